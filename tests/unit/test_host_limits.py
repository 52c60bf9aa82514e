"""What a VM's QEMU cannot exceed: its own user, sealed memory, control groups, and no descriptor of ours."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.core.errors import Exhausted, Gone, Refused
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest, process
from multiverse.host.cgroups import Cgroups
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.template_copies import SealedMemory
from multiverse.host.registry import UidPool, VmRegistry


def exists(vms: Path, name: str, uid: int) -> None:
    """Let a VM with that uid exist, as far as the disk tells."""
    (vms / name).mkdir()
    manifest.write(vms / name, Manifest(name, CloneKind.LINKED, VmPhase.PARKED, f"mac of {name}", 1, 256, uid=uid))


def allocate(vms: Path, name: str) -> int:
    registry = VmRegistry(vms)
    registry.refresh()
    user = UidPool(1000, 4).allocate(name, registry)
    assert user is not None
    return user.uid


def test_each_vm_has_a_uid_of_its_own_until_it_is_gone(tmp_path: Path) -> None:
    taken = {}
    for name in ("mva-1", "mva-2", "mva-4"):  # the search for the third wraps around
        taken[name] = allocate(tmp_path, name)
        exists(tmp_path, name, taken[name])
    assert set(taken.values()) == {1001, 1002, 1003}
    assert {name: allocate(tmp_path, name) for name in taken} == taken
    with pytest.raises(Exhausted):
        allocate(tmp_path, "mva-3")
    shutil.rmtree(tmp_path / "mva-1")
    assert allocate(tmp_path, "mva-3") == taken["mva-1"]


def test_without_uids_every_qemu_runs_as_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    none = UidPool(0, 0)
    none.check()
    assert none.allocate("mva-1", VmRegistry(tmp_path)) is None and none.template_user is None
    with pytest.raises(Refused, match=r"not root.*uids"):
        UidPool(1000, 4).check()


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
    firewall = Firewall("mvtest-", tmp_path / "vms", ("10.9.1.0", "10.9.255.254"))
    assert firewall is not None and inheritable() == before == []
