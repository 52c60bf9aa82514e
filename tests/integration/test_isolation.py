"""What other users of the host, and a QEMU that its guest has taken over, can access: tried as these users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon
from multiverse.core.model.vm import VmRef
from multiverse.host import manifest
from multiverse.host.cgroups import Cgroups
from multiverse.host.qemu.session import FrozenTemplate
from multiverse.host.qemu.templates import directory_name, load
from tests.integration.test_qemu_driver import PARENT, Lab, lab, swept, until
from tests.integration.watch import below, kill, matching

__all__ = ["lab", "swept"]  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

NOBODY = 65534
# Tries to read, write, create below and connect to each path, and prints what was permitted.
_TRY = """
import json, os, socket, sys
for path in sys.argv[1:]:
    done = []
    for word, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            done.append(word)
        except OSError:
            pass
    try:
        os.close(os.open(f"{path}/new", os.O_WRONLY | os.O_CREAT)); os.unlink(f"{path}/new"); done.append("make")
    except OSError:
        pass
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path); done.append("connect")
        except OSError:
            pass
    print(json.dumps([path, done]))
"""


def allowed(paths: Sequence[Path], uid: int, *groups: int) -> dict[Path, list[str]]:
    """What that user is permitted to do with each path, for the paths where that is anything."""
    argv = ["/usr/bin/python3", "-c", _TRY, *map(str, paths)]
    done = subprocess.run(argv, user=uid, group=uid, extra_groups=groups, capture_output=True, text=True, check=True)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == len(paths) > 0, "all paths were tried"
    return {Path(path): words for path, words in found.items() if words}


def everything(*places: Path) -> list[Path]:
    return [path for place in places for path in (place, *below(place)) if not path.is_symlink()]


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def uid_of(lab: Lab, name: str) -> int:
    known = manifest.read(lab.settings.qemu.vms / name)
    assert known is not None
    return known.uid


def template(lab: Lab) -> FrozenTemplate:
    found = load(lab.settings.qemu.templates / directory_name(PARENT))
    assert found is not None
    return found


async def test_other_users_can_access_nothing_and_a_qemu_its_own_vm_only(lab: Lab) -> None:
    one, two = lab.spec(), lab.spec()
    await lab.started(one)
    await lab.hypervisor.create(two)
    await lab.hypervisor.observe()  # which copies what the guests have printed
    qemu = lab.settings.qemu
    first, _ = qemu.uids
    things = everything(*(place / spec.name for place in (qemu.vms, qemu.run) for spec in (one, two)), qemu.templates)
    assert {"disk.qcow2", "manifest.json", "console.log", "qemu.log", "qmp", "agent", "memory"} <= {
        path.name for path in things
    }
    assert allowed(things, 0), "root is permitted, so the attempts work"
    inside = [path for path in things if path != qemu.templates and not path.name.endswith(".lock")]
    assert allowed(inside, NOBODY) == {}

    # The user of the VM's QEMU, even outside of its namespaces: its own disk, what it maps of its template, no more.
    home = qemu.vms / one.name
    own = allowed(inside, uid_of(lab, one.name), first)
    assert own.pop(home / "disk.qcow2") == ["read", "write"]
    assert own and all(path.parent == template(lab).path and words == ["read"] for path, words in own.items())
    assert {path.name for path in own} == {"memory", "disk.qcow2", "kernel.stub", "initrd.stub"}


async def test_a_qemu_has_a_user_of_its_own_and_no_privilege(lab: Lab) -> None:
    one, two = lab.spec(), lab.spec()
    await lab.hypervisor.create(one)
    await lab.hypervisor.create(two)
    first, count = lab.settings.qemu.uids
    users = {uid_of(lab, one.name), uid_of(lab, two.name)}
    assert len(users) == 2 and all(first < uid < first + count for uid in users)
    about = status(lab.pid(one.name))
    assert set(about["Uid"].split()) == set(about["Gid"].split()) == {str(uid_of(lab, one.name))}
    assert about["Groups"] == str(first)
    assert {int(about[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (about["NoNewPrivs"], about["Seccomp"]) == ("1", "2")
    await lab.hypervisor.destroy(VmRef(one.name), 0)
    await lab.hypervisor.destroy(VmRef(two.name), 0)
    assert [path.name for path in lab.settings.qemu.vms.iterdir()] == [".lock"]


async def test_no_descriptor_of_a_clone_can_write_to_its_template(lab: Lab) -> None:
    spec = lab.spec()
    await lab.hypervisor.create(spec)
    frozen = template(lab)
    before = frozen.memory.stat().st_mtime_ns, frozen.memory.read_bytes()[:4096]
    spoil = "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY); os.pwrite(fd, b'spoilt', 0)"
    held = [path for path in Path(f"/proc/{lab.pid(spec.name)}/fd").iterdir() if path.is_symlink()]
    mapped = [path for path in held if "memory" in os.fspath(path.readlink())]
    assert mapped
    if any("memfd:" in os.fspath(path.readlink()) for path in mapped):
        for path in mapped:  # a sealed copy: not even root can write, through the QEMU's own descriptors
            assert subprocess.run([sys.executable, "-c", spoil, str(path)], capture_output=True).returncode != 0
    else:  # the QEMU maps the file itself, which its user may only read
        own = allowed([frozen.memory, *mapped], uid_of(lab, spec.name), lab.settings.qemu.uids[0])
        assert own and all(words == ["read"] for words in own.values())
    assert (frozen.memory.stat().st_mtime_ns, frozen.memory.read_bytes()[:4096]) == before


def test_a_process_in_a_cgroup_cannot_exceed_its_limits() -> None:
    cgroups, name = Cgroups(), f"mvtest-{os.getpid()}"
    ends = {}
    for word, size, script in (("fits", 16, "pass"), ("grows", 300, "pass"), ("forks", 16, "import os; os.fork()")):
        code = f"import sys; sys.stdin.readline(); block = bytearray(b'x') * ({size} << 20); {script}"
        greedy = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        try:
            cgroups.set_limits(name, 128, 1)
            cgroups.add_process(name, greedy.pid, 1)
            greedy.communicate(b"\n")
            ends[word] = greedy.returncode
        finally:
            greedy.kill()
            greedy.wait()
            cgroups.remove(name)
    assert ends == {"fits": 0, "grows": -signal.SIGKILL, "forks": 1}
    cgroups.remove(name)


async def test_the_cgroup_of_a_vm_is_removed_with_it(lab: Lab) -> None:
    spec = lab.spec()
    await lab.hypervisor.create(spec)
    pid = lab.pid(spec.name)
    inside = [line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.endswith(spec.name)]
    assert inside, "it is in a cgroup"
    kill(pid)
    await lab.hypervisor.destroy(VmRef(spec.name), 0)
    assert not matching(Path("/sys/fs/cgroup"), f"**/{spec.name}")


async def test_the_limits_of_a_vm_grow_with_its_size(lab: Lab) -> None:
    """A spare gets its size when it is started, and so do its limits."""

    def limits() -> dict[str, int]:
        groups = [path for path in matching(Path("/sys/fs/cgroup"), f"**/{spec.name}") if path.is_dir()]
        names = {"memory.max": "MiB", "memory.limit_in_bytes": "MiB", "pids.max": "threads"}
        found = {
            names[path.name]: int(path.read_text()) for one in groups for path in one.iterdir() if path.name in names
        }
        return {**found, "MiB": found["MiB"] >> 20}

    spec = lab.spec()
    await lab.hypervisor.create(spec)
    parked = limits()
    grown = Size(lab.cpus, spec.size.memory + 512)  # in whole blocks of 128 MiB
    await lab.hypervisor.start(VmRef(spec.name), grown, lab.identity(spec))
    assert lab.hypervisor.audit(spec.name)["cpus"] == grown.cpus
    more = {"MiB": grown.memory - spec.size.memory, "threads": grown.cpus - spec.size.cpus}
    assert limits() == {each: parked[each] + more[each] for each in parked}


_FLOOD = """
import ctypes, os
agent = os.pidfd_open(1)
for number in range(3, 20):  # the agent's own end of the channel: its port can be opened once only
    fd = ctypes.CDLL(None).syscall(438, agent, number, 0)  # pidfd_getfd(2)
    if fd >= 0 and "/vport" in os.readlink(f"/proc/self/fd/{fd}"):
        break
os.set_blocking(fd, True)
while True:
    os.write(fd, b'{"type":"flushed"}\\n' * 3000)
"""


async def test_a_guest_that_floods_its_channel_affects_no_other_guest(lab: Lab) -> None:
    wild, quiet = lab.spec(), lab.spec()
    await lab.started(wild, Daemon("flood", ("/usr/bin/python3", "-c", _FLOOD)))

    async def cut_off() -> bool:
        return "flooded" in (await lab.hypervisor.observe()).vms[wild.name].reason

    await until(cut_off, 60)
    await lab.started(quiet)
    said = await lab.hypervisor.examine()
    assert "error" in said[wild.name] and said[quiet.name]["hostname"] == quiet.name
    await lab.hypervisor.destroy(VmRef(wild.name), 1.0)
    assert lab.remains(wild.name) == []
