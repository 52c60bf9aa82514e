"""What a VM's QEMU cannot exceed: its own user, sealed memory, control groups, and no descriptor of ours."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.core.errors import Exhausted, Gone, Refused
from multiverse.host import process
from multiverse.host.cgroups import Cgroups
from multiverse.host.firewall import Firewall
from multiverse.host.memfd import SealedMemory
from multiverse.host.reservations import Reservations, Resource
from multiverse.host.uids import UidPool


def pool(vms: Path) -> UidPool:
    return UidPool(Reservations(vms), 1000, 4)


def allocate(uids: UidPool, name: str) -> int:
    user = uids.allocate(name)
    assert user is not None
    return user.uid


def test_each_vm_has_a_uid_of_its_own_until_it_is_released(tmp_path: Path) -> None:
    uids, names = pool(tmp_path), ("mva-1", "mva-2", "mva-4", "mva-3")
    for name in names:
        (tmp_path / name).mkdir()
    taken = {name: allocate(uids, name) for name in names[:3]}  # the search for the third wraps around
    assert set(taken.values()) == {1001, 1002, 1003}
    assert {name: allocate(pool(tmp_path), name) for name in taken} == taken
    with pytest.raises(Exhausted):
        uids.allocate("mva-3")
    reservations = Reservations(tmp_path)
    reservations.release("mva-1", Resource.UID, str(taken["mva-2"]))  # another VM's is not released
    with pytest.raises(Exhausted):
        uids.allocate("mva-3")
    for _ in range(2):
        reservations.release("mva-1", Resource.UID)
    assert allocate(uids, "mva-3") == taken["mva-1"]


def test_the_uid_of_a_vm_whose_directory_was_removed_is_free(tmp_path: Path) -> None:
    uids = pool(tmp_path)
    for name in ("mva-1", "mva-4"):  # both search from the same uid on
        (tmp_path / name).mkdir()
    first = allocate(uids, "mva-1")
    (tmp_path / "mva-1").rmdir()
    assert allocate(uids, "mva-4") == first


def test_without_uids_every_qemu_runs_as_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    none = UidPool(Reservations(tmp_path), 0, 0)
    none.check()
    assert none.allocate("mva-1") is None and none.template_user is None
    with pytest.raises(Refused, match=r"not root.*uids"):
        pool(tmp_path).check()


def test_sealed_memory_equals_its_file_and_cannot_be_written(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    with memory.open("wb") as file:  # holes and data
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"here")
    sealed = SealedMemory()
    fd = sealed.open(memory)
    again = sealed.open(memory)
    assert os.fstat(fd).st_ino == os.fstat(again).st_ino, "all clones share one copy"
    assert os.pread(fd, 1 << 20, 0) == memory.read_bytes() and sealed.size(memory) > 0
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    (tmp_path / "new").write_bytes(b"another template")
    (tmp_path / "new").rename(memory)
    other = sealed.open(memory)
    assert os.pread(other, 100, 0) == b"another template"
    sealed.discard(memory)
    assert sealed.size(memory) == 0
    memory.unlink()
    with pytest.raises(Gone):
        sealed.open(memory)
    for each in (fd, again, other):
        os.close(each)


def test_without_control_groups_the_user_is_limited_and_a_warning_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    cgroups = Cgroups(tmp_path / "mounts")
    logged = capsys.readouterr().out
    assert "VMs have no memory limit" in logged and "VMs have no thread limit" in logged
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        cgroups.set_limits("mva-1", 100, 7)
        cgroups.add_process("mva-1", child.pid, 7)
        assert resource.prlimit(child.pid, resource.RLIMIT_NPROC) == (7, 7)
        child.communicate(b"\n")
    cgroups.add_process("mva-1", child.pid, 7)  # it has ended
    cgroups.remove("mva-1")


def test_the_socket_of_the_firewall_is_not_inherited(tmp_path: Path) -> None:
    def inheritable() -> list[str]:
        opened = [path for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]
        return [str(path.readlink()) for path in opened if path.is_symlink() and os.get_inheritable(int(path.name))]

    process.set_all_close_on_exec()
    before = inheritable()
    firewall = Firewall("mvtest-", tmp_path / "vms")
    assert firewall is not None and inheritable() == before == []
