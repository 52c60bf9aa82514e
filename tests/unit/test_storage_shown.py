"""What a host shows of the storage of saved VMs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from multiverse.core.model.basics import CloneKind
from multiverse.core.model.saved import SavedSeen
from multiverse.host.qemu import saves
from multiverse.host.qemu.context import HostContext

FILE = saves.SavedFile(10, "00")
VM = saves.SavedVm("mvx-1", "token", CloneKind.INSTANT, "slim", "key", "7.2", "tcg", "", "", 1, 64, 1, 64, 0,
                   FILE, FILE, 0.0)  # fmt: skip


def host(storage: Path, copies: Path | None = None) -> HostContext:
    config = SimpleNamespace(saves=storage, copies=copies, host="h1", prefix="mvx-")
    emulated = {"guest_cpu": lambda model="": "tcg", "runs": lambda model: True}
    return cast("HostContext", SimpleNamespace(config=config, version="7.2", **emulated))


def what_is_shown(one: HostContext) -> dict[str, SavedSeen]:
    assert one.config.saves is not None
    copies = saves.look(one, one.config.copies) if one.config.copies is not None else None
    return saves.shown(saves.look(one, one.config.saves), copies, ())


def test_incomplete_files_are_shown_as_such_until_they_are_discarded(tmp_path: Path) -> None:
    (tmp_path / ".storage").write_text("shared")
    (tmp_path / "mvx-1-1").mkdir()
    (tmp_path / "mvx-1-1" / saves.FILE).write_text(json.dumps(asdict(VM)))
    (tmp_path / ".mvx-1-1.writing").mkdir()  # of an earlier try
    (tmp_path / ".mvx-2-2.writing").mkdir()
    (tmp_path / ".mvx-2-2.writing" / saves.FILE).write_text(json.dumps(asdict(replace(VM, name="mvx-2"))))
    (tmp_path / "mvx-3-3").mkdir()  # its removal was interrupted
    shown = what_is_shown(host(tmp_path))
    assert {name: one.complete for name, one in shown.items()} == {"mvx-1-1": True, "mvx-2-2": False, "mvx-3-3": False}
    assert (shown["mvx-1-1"].token, shown["mvx-1-1"].size) == ("token", 20)
    for name in shown:
        saves.discard(host(tmp_path), name)
    assert not what_is_shown(host(tmp_path))
