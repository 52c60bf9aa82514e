"""QEMU's driver with real guests: an image, a template, and clones of every kind on a bridge of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from multiverse.config import QemuSettings, Settings
from multiverse.core.errors import Broken, Gone, MultiverseError
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Daemon, GuestFile, Identity, NodeBootstrap, User
from multiverse.core.model.vm import Stage, TemplateCondition, TemplateKey, VmCondition, VmRef, VmSpec
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import manifest
from tests.integration.conftest import GUESTS_NETWORK
from tests.integration.watch import kill

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

SITE = f"q{os.getpid() % 46656:04x}"[:5]
BASE = Size(1, QemuSettings().base_memory)
PARENT = TemplateKey("h", "slim", BASE)
HEAD = f"{GUESTS_NETWORK}.254"
SLEEPER = Daemon("sleeper", ("/bin/sleep", "1000000"))


@dataclasses.dataclass
class Lab:
    settings: Settings
    hypervisor: QemuHypervisor
    serial: int = 0
    cpus: int = 2  # that a clone of a template of one CPU can have: 1 where its guest cannot plug CPUs

    def spec(self, kind: CloneKind = CloneKind.INSTANT, size: Size = BASE) -> VmSpec:
        self.serial += 1
        mac = f"02:00:5e:00:{os.getpid() % 256:02x}:{self.serial:02x}"
        template = PARENT if kind is CloneKind.INSTANT else None
        return VmSpec(f"mv{SITE}-{self.serial}", "h", "slim", kind, size, mac, template)

    def identity(self, spec: VmSpec, *daemons: Daemon, **more: object) -> Identity:
        number = int(spec.name.partition("-")[2])
        facts = {"hostname": spec.name, "mac": spec.mac, "address": f"{GUESTS_NETWORK}.{number}/24", "gateway": HEAD,
                 "machine_id": f"{number:032x}", "users": (User("ann", 4001, 4001, "/", "/bin/sh", (("lab", 4100),)),),
                 "peers": (("head", HEAD),),
                 "bootstrap": NodeBootstrap(daemons=daemons or (SLEEPER,)), **more}  # fmt: skip
        return Identity(**facts)  # type: ignore[arg-type]

    async def started(self, spec: VmSpec, *daemons: Daemon, **more: object) -> list[Stage]:
        stages = [*await self.hypervisor.create(spec)]
        return [
            *stages,
            *await self.hypervisor.start(VmRef(spec.name), spec.size, self.identity(spec, *daemons, **more)),
        ]

    async def condition(self, name: str) -> VmCondition | None:
        seen = (await self.hypervisor.observe()).vms.get(name)
        return None if seen is None else seen.condition

    def pid(self, name: str) -> int:
        known = manifest.read(self.settings.qemu.vms / name)
        assert known is not None
        return known.pid

    def remains(self, name: str) -> list[str]:
        """What the operating system still has of a VM."""
        qemu = self.settings.qemu
        places = [qemu.vms / name, qemu.run / name, Path("/sys/class/net") / name]
        found = [str(path) for path in places if path.exists()]
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"-incoming" in arguments or b"-chardev" in arguments:
                found += [str(entry)] if name.encode() in arguments else []
        return found


async def until(what: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Poll, for a bounded time: an observation has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < deadline, "the condition was not reached in time"
        await asyncio.sleep(0.005)


@pytest.fixture
async def lab(settings: Settings) -> Lab:
    hypervisor = QemuHypervisor(settings, SITE)
    await hypervisor.build_template(PARENT)
    can = (await hypervisor.observe()).hosts["h"].image_can("slim", "plug_cpus")
    return Lab(settings, hypervisor, int(time.monotonic() * 10) % 100, 2 if can else 1)


@pytest.fixture(autouse=True)
async def swept(lab: Lab) -> object:
    yield
    view = await lab.hypervisor.observe()
    for name in view.vms:
        await lab.hypervisor.destroy(VmRef(name), 0)
        assert lab.remains(name) == []
    lab.hypervisor.close()


async def test_two_clones_share_no_ids_and_leave_nothing(lab: Lab) -> None:
    specs = [lab.spec(), lab.spec()]
    stages = await asyncio.gather(*(lab.started(spec) for spec in specs))
    one, two = (lab.hypervisor.audit(spec.name) for spec in specs)
    for fact in ("machine_id", "boot_id", "random"):
        assert one[fact] and one[fact] != two[fact]
    assert one["machine_id"] == lab.identity(specs[0]).machine_id
    assert [stage.name for stage in stages[0]][:6] == ["overlay", "tap", "exec", "restore", "plug", "first_byte"]
    view = await lab.hypervisor.observe()
    assert [view.vms[spec.name].condition for spec in specs] == [VmCondition.RUNNING] * 2
    assert view.templates[PARENT].condition is TemplateCondition.READY
    measured = await lab.hypervisor.measure()
    assert all(measured[spec.name][1] > 1 for spec in specs)
    for spec in specs:
        await lab.hypervisor.destroy(VmRef(spec.name), 2.0)
        assert lab.remains(spec.name) == []
        await lab.hypervisor.destroy(VmRef(spec.name), 2.0)
    assert not (await lab.hypervisor.observe()).vms


async def answers_of(
    lab: Lab, spec: VmSpec, script: str, size: Size | None = None, files: tuple[GuestFile, ...] = (), limit: float = 120
) -> list[str]:
    """Start the VM, which has been created, and run a script in its guest. The lines that it prints, over the guest's
    network, within `limit` seconds."""
    lines: list[str] = []
    done = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.extend((await reader.read()).decode().splitlines())
        writer.close()
        done.set()

    server = await asyncio.start_server(hear, HEAD, 0)
    port = server.sockets[0].getsockname()[1]
    teller = Daemon("teller", ("/bin/bash", "-c", f"exec 3<>/dev/tcp/head/{port}; {{ {script}; }} >&3 2>&1 3>&-"))
    identity = lab.identity(spec, bootstrap=NodeBootstrap(files, (), (teller,)))
    async with server:
        await lab.hypervisor.start(VmRef(spec.name), size or spec.size, identity)
        await asyncio.wait_for(done.wait(), limit)
    return lines


async def test_a_clone_has_the_identity_that_it_was_sent(lab: Lab) -> None:
    """Verified from inside the guest, over its network."""
    spec = lab.spec()
    questions = ("hostname", "id ann", "cat /sys/class/net/eth0/address", "stat -c '%a %U' /etc/site/key",
                 "date +%s", "stat -fc %T /sys/fs/cgroup", "ls -d /sys/fs/cgroup/system.slice")  # fmt: skip
    key = GuestFile("/etc/site/key", b"secret", 0o400, "munge")
    await lab.hypervisor.create(spec)
    lines = await answers_of(lab, spec, "; ".join(questions), files=(key,), limit=30)
    assert lines[:4] == [spec.name, "uid=4001(ann) gid=4001 groups=4001,4100(lab)", spec.mac, "400 munge"]
    assert abs(int(lines[4]) - time.time()) < 10
    assert lines[5:] == ["cgroup2fs", "/sys/fs/cgroup/system.slice"]


async def test_a_clone_is_plugged_up_to_its_size(lab: Lab) -> None:
    spec = lab.spec(size=Size(lab.cpus, 768))
    await lab.started(spec)
    audit = lab.hypervisor.audit(spec.name)
    assert audit["cpus"] == lab.cpus
    assert 768 - 80 <= int(audit["memory"]) <= 768


async def test_a_spare_that_was_warmed_up_is_paused_until_it_is_started(lab: Lab) -> None:
    spec = dataclasses.replace(lab.spec(), spare=True)
    stages = await lab.hypervisor.create(spec)
    assert stages[-1].name == "tried"
    assert await lab.condition(spec.name) is VmCondition.PARKED
    before = await lab.hypervisor.measure()
    await asyncio.sleep(0.3)
    after = await lab.hypervisor.measure()
    assert after[spec.name][0] - before[spec.name][0] < 0.05, "it takes no CPU time"
    assert await lab.hypervisor.create(spec) == []
    assert "first_byte" in [stage.name for stage in await lab.started(spec)]
    assert await lab.condition(spec.name) is VmCondition.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CloneKind.FULL, CloneKind.LINKED])
async def test_a_clone_that_boots_gets_its_identity_too(lab: Lab, kind: CloneKind) -> None:
    spec = lab.spec(kind, Size(2, 384))
    stages = await lab.started(spec)
    names = [stage.name for stage in stages]
    assert "boot" in names and names[0] in {CloneKind.FULL: ("copy", "reflink"), CloneKind.LINKED: ("overlay",)}[kind]
    audit = lab.hypervisor.audit(spec.name)
    assert audit["cpus"] == 2 and audit["machine_id"] == lab.identity(spec).machine_id
    await lab.hypervisor.destroy(VmRef(spec.name), 2.0)
    assert lab.remains(spec.name) == []


async def test_a_killed_vm_is_dead_until_it_is_destroyed(lab: Lab) -> None:
    spec = lab.spec()
    await lab.started(spec)
    kill(lab.pid(spec.name))

    async def dead() -> bool:
        return await lab.condition(spec.name) is VmCondition.DEAD

    await until(dead)
    assert await lab.condition(spec.name) is VmCondition.DEAD
    with pytest.raises(Gone):
        await lab.hypervisor.start(VmRef(spec.name), BASE, lab.identity(spec))
    with pytest.raises(MultiverseError):
        await lab.hypervisor.create(spec)
    await lab.hypervisor.destroy(VmRef(spec.name), 2.0)
    assert lab.remains(spec.name) == []


async def test_another_driver_finds_everything_on_disk(lab: Lab) -> None:
    parked, running = lab.spec(), lab.spec()
    await lab.hypervisor.create(parked)
    await lab.started(running)
    lab.hypervisor.close()
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)
    assert await lab.condition(parked.name) is VmCondition.PARKED
    assert await lab.condition(running.name) is VmCondition.RUNNING
    assert await lab.hypervisor.create(parked) == []
    await lab.hypervisor.start(VmRef(parked.name), BASE, lab.identity(parked))
    assert lab.hypervisor.audit(parked.name)["machine_id"] == lab.identity(parked).machine_id
    began = time.monotonic()
    await lab.hypervisor.destroy(VmRef(running.name), 20.0)
    assert time.monotonic() - began < 15  # the guest answered the flush
    assert lab.remains(running.name) == []


@pytest.mark.slow
async def test_a_template_that_another_host_has_built_is_copied_and_not_booted(lab: Lab, tmp_path: Path) -> None:
    """Two hosts, which have templates of their own and a directory in common. A clone of the copy runs."""
    lab.hypervisor.close()
    shared, own = tmp_path / "shared", lab.settings.qemu.templates
    image = dataclasses.replace(lab.settings.image, templates=shared)
    places = [own.with_name(f"{own.name}-{n}") for n in (1, 2)]
    try:
        for place, first in zip(places, ("overlay", "copy"), strict=True):
            qemu = dataclasses.replace(lab.settings.qemu, templates=place)
            lab.hypervisor = QemuHypervisor(dataclasses.replace(lab.settings, image=image, qemu=qemu), SITE)
            stages = await lab.hypervisor.build_template(PARENT)
            assert stages[0].name == first

            async def offered() -> bool:
                return shared.is_dir() and [path.name.startswith("slim@") for path in shared.iterdir()] == [True]

            await until(offered)
            if first == "overlay":
                lab.hypervisor.close()
                shutil.rmtree(place)  # the copy needs nothing of the original
        spec = lab.spec()
        await lab.started(spec)
        assert await lab.condition(spec.name) is VmCondition.RUNNING
        assert lab.hypervisor.audit(spec.name)["machine_id"] == lab.identity(spec).machine_id
        await lab.hypervisor.destroy(VmRef(spec.name), 2.0)
        assert lab.remains(spec.name) == []
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


async def test_a_start_whose_reply_was_lost_can_be_repeated(lab: Lab) -> None:
    spec = lab.spec()
    await lab.hypervisor.create(spec)
    first = asyncio.ensure_future(lab.hypervisor.start(VmRef(spec.name), BASE, lab.identity(spec)))

    async def told() -> bool:
        known = manifest.read(lab.settings.qemu.vms / spec.name)
        return known is not None and known.phase is manifest.VmPhase.STARTING

    await until(told)
    lab.hypervisor.close()
    with pytest.raises(MultiverseError):
        await first
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)
    await lab.hypervisor.start(VmRef(spec.name), BASE, lab.identity(spec))
    assert lab.hypervisor.audit(spec.name)["machine_id"] == lab.identity(spec).machine_id


async def test_the_error_of_a_daemon_that_cannot_start_is_reported(lab: Lab) -> None:
    spec = lab.spec()
    broken = Daemon("broken", ("/bin/sh", "-c", "echo no licence >&2; exit 3"), ready_path="/run/never")
    with pytest.raises(Broken, match=r"exit code 3.*no licence"):
        await lab.started(spec, broken)


async def test_a_daemon_that_dies_is_reported(lab: Lab) -> None:
    spec = lab.spec()
    await lab.started(spec, Daemon("brief", ("/bin/sh", "-c", "exit 4")))

    async def noted() -> bool:
        return bool((await lab.hypervisor.observe()).vms[spec.name].reason)

    await until(noted)
    reason = (await lab.hypervisor.observe()).vms[spec.name].reason
    assert "brief" in reason and "exit code 4" in reason


async def test_destroy_does_not_wait_for_a_start_that_hangs(lab: Lab) -> None:
    spec = lab.spec()
    stuck = Daemon("stuck", ("/bin/sleep", "1000000"), ready_path="/run/never")
    starting = asyncio.ensure_future(lab.started(spec, stuck))

    async def runs() -> bool:
        return await lab.condition(spec.name) is VmCondition.STARTING

    await until(runs)
    began = time.monotonic()
    await lab.hypervisor.destroy(VmRef(spec.name), 0)
    assert time.monotonic() - began < 10
    assert lab.remains(spec.name) == []
    with pytest.raises(MultiverseError):
        await starting


async def test_closing_a_driver_ends_the_build_of_a_template(lab: Lab) -> None:
    await lab.hypervisor.delete_template(PARENT)
    making = asyncio.ensure_future(lab.hypervisor.build_template(PARENT))

    async def boots() -> bool:
        return bool(list(lab.settings.qemu.run.glob(".t-*/agent")))

    await until(boots)
    lab.hypervisor.close()
    with pytest.raises(Gone):
        await making
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)
    assert not list(lab.settings.qemu.templates.glob(".*.building-*"))


async def test_an_mpi_program_runs_as_an_ordinary_user(lab: Lab) -> None:
    """Open MPI in a slim guest: two ranks communicate, as a user without privileges."""
    spec = lab.spec(size=Size(lab.cpus, 512))
    heard = socket.create_server((HEAD, 0))
    port = heard.getsockname()[1]
    script = (
        f"cd /tmp; {{ mpirun --oversubscribe -np 2 hostname; echo $?; id -un; }} >o 2>&1; cat o >/dev/tcp/head/{port}"
    )
    await lab.started(spec, Daemon("mpi", ("/bin/bash", "-c", script), user="ann"))
    heard.settimeout(60)
    peer, _ = await asyncio.to_thread(heard.accept)
    with heard, peer, peer.makefile() as lines:
        assert (await asyncio.to_thread(lines.read)).split() == [spec.name, spec.name, "0", "ann"]
