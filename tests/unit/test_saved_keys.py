"""The keys of saved VMs: each user has one, which only root reads, and hosts get what is derived from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse.controller.saved_keys import SavedKeys
from multiverse.core.errors import Broken, Exhausted


def test_each_saved_vm_of_each_user_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys = SavedKeys(tmp_path / "keys")
    assert keys.find(1000, "mv1-1") == "", "none is made by looking"
    made = {(uid, name): keys.make(uid, name) for uid in (1000, 1001) for name in ("mv1-1", "mv1-2")}
    assert len(set(made.values())) == 4 and all(len(bytes.fromhex(key)) == 32 for key in made.values())
    again = SavedKeys(tmp_path / "keys")
    assert made == {(uid, name): again.find(uid, name) for uid, name in made}, "also after a restart"


def test_only_root_reads_keys_and_no_host_gets_a_users(tmp_path: Path) -> None:
    key = SavedKeys(tmp_path / "keys").make(1000, "mv1-1")
    file = tmp_path / "keys" / "1000"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert key not in file.read_text()


def test_without_the_key_of_a_user_nothing_of_the_user_can_be_read(tmp_path: Path) -> None:
    keys = SavedKeys(tmp_path / "keys")
    before = keys.make(1000, "mv1-1")
    (tmp_path / "keys" / "1000").unlink()
    assert keys.find(1000, "mv1-1") == "" and keys.make(1000, "mv1-1") != before


def test_a_key_that_cannot_be_read_or_made_is_told(tmp_path: Path) -> None:
    keys = SavedKeys(tmp_path / "keys")
    keys.make(1000, "mv1-1")
    for content in ("no key", "ab" * 5):
        (tmp_path / "keys" / "1000").write_text(content)
        with pytest.raises(Broken, match="key"):
            keys.find(1000, "mv1-1")
    (tmp_path / "file").touch()
    with pytest.raises(Exhausted, match="cannot write the key"):
        SavedKeys(tmp_path / "file" / "keys").make(1000, "mv1-1")
