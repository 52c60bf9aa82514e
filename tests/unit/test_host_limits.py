"""Users for VMs are leased by what is on disk, templates' memory is sealed, and QEMUs are limited."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.core.errors import Exhausted, Gone, Refused
from multiverse.core.model import Size
from multiverse.host.cgroups import Cgroups
from multiverse.host.memfd import SealedMemory
from multiverse.host.qemu.templates import Template
from multiverse.host.uids import UidPool


def lease(owners: UidPool, name: str) -> int:
    owner = owners.lease(name)
    assert owner is not None
    return owner.uid


def test_no_two_vms_have_the_same_user_and_one_keeps_its_own(tmp_path: Path) -> None:
    owners = UidPool(tmp_path, 1000, 4)
    taken = {name: lease(owners, name) for name in ("mva-1", "mva-2", "mva-4")}  # the first and the last fall together
    assert set(taken.values()) == {1001, 1002, 1003}
    assert {name: lease(UidPool(tmp_path, 1000, 4), name) for name in taken} == taken
    with pytest.raises(Exhausted):
        owners.lease("mva-3")
    owners.release("mva-1", taken["mva-2"])  # another's stays
    with pytest.raises(Exhausted):
        owners.lease("mva-3")
    owners.release("mva-1")
    owners.release("mva-1")
    assert lease(owners, "mva-3") == taken["mva-1"]


def test_without_users_every_qemu_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    none = UidPool(tmp_path, 0, 0)
    none.check()
    assert none.lease("mva-1") is None and none.builder is None
    with pytest.raises(Refused, match=r"not root.*uids"):
        UidPool(tmp_path, 1000, 4).check()


def test_sealed_memory_is_the_template_s_and_nobody_s_to_change(tmp_path: Path) -> None:
    template = Template("slim", "k", tmp_path, Size(1, 1))
    with template.memory.open("wb") as file:  # holes and data
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"here")
    sealed = SealedMemory()
    fd = sealed.open(template)
    again = sealed.open(template)
    assert os.fstat(fd).st_ino == os.fstat(again).st_ino, "all clones share one"
    assert os.pread(fd, 1 << 20, 0) == template.memory.read_bytes()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    (tmp_path / "new").write_bytes(b"another template")
    (tmp_path / "new").rename(template.memory)
    other = sealed.open(template)
    assert os.pread(other, 100, 0) == b"another template"
    sealed.drop(tmp_path.name)
    template.memory.unlink()
    with pytest.raises(Gone):
        sealed.open(template)
    for each in (fd, again, other):
        os.close(each)


def test_without_control_groups_a_vm_s_user_is_limited_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    cages = Cgroups(tmp_path / "mounts")
    assert "no control group" in capsys.readouterr().out
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        cages.limit("mva-1", 100, 7)
        cages.put("mva-1", child.pid, 7)
        assert resource.prlimit(child.pid, resource.RLIMIT_NPROC) == (7, 7)
        child.communicate(b"\n")
    cages.put("mva-1", child.pid, 7)  # it has ended
    cages.remove("mva-1")
