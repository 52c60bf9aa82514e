"""The host library alone: processes without a controller, beside each other and beside the driver."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind
from multiverse.core.model.vm import VmCondition, VmRef, VmSpec
from multiverse.drivers.qemu.driver import QemuHypervisor, host_config
from multiverse.host import manifest
from multiverse.host.manifest import Manifest, Specification
from multiverse.host.qemu.context import QemuHostConfig
from tests.integration.test_qemu_driver import BASE, PARENT, SITE, Lab, lab, swept

__all__ = ["lab", "swept"]  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

# Both programs get a directory with config.json, and files with specifications.
_COMMON = """
import json, sys
from pathlib import Path
from pydantic import TypeAdapter
from multiverse.core.errors import MultiverseError
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon, Identity, NodeBootstrap, User
from multiverse.core.model.vm import TemplateKey
from multiverse.host.manifest import Specification
from multiverse.host.qemu.context import QemuHostConfig
from multiverse.host.qemu.library import QemuHost

place = Path(sys.argv[1])
host = QemuHost(TypeAdapter(QemuHostConfig).validate_json((place / "config.json").read_text()))
"""

_LIFE = """
spec = Specification.from_json((place / "spec.json").read_text())
host.check()
host.build_template(spec.template)
seen = lambda: [str(vm.condition) for vm in host.observe().vms.values() if vm.name == spec.name]
facts = {"created": [stage.name for stage in host.create(spec)], "parked": seen(), "again": host.create(spec)}
sleeper = NodeBootstrap(daemons=(Daemon("sleeper", ("/bin/sleep", "1000000")),))
identity = Identity(spec.name, spec.mac, spec.address, "", "1" * 32, bootstrap=sleeper)
host.start(spec.name, spec.size, identity)
facts["running"] = seen()
user = User("late", 4711, 4711, "/home/late", "/bin/sh", (("late", 4711),))
host.add_user(spec.name, user)
facts["users"] = host.observe().vms[spec.name].users_added
facts["guest"] = host.examine(spec.name)["hostname"]
host.destroy(spec.name, 2.0)
facts["destroyed"] = seen()
facts["modules"] = [name for name in sys.modules if name.startswith("multiverse.")]
print(json.dumps(facts))
"""

# Starts two VMs on a machine that is said to have two NUMA nodes. Prints the node of each, the CPUs that its QEMU may
# use, whether memory of it is preferred on node 0, and how many CPUs the VMs have of each node.
_TWO_NODES = """
import dataclasses
for number in (0, 1):
    node = place / f"nodes/node{number}"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(str(number))
    (node / "distance").write_text("10 20" if number == 0 else "20 10")
    (node / "meminfo").write_text(f"Node {number} MemTotal: 4194304 kB")
from multiverse.host import manifest
host = QemuHost(dataclasses.replace(host.config, numa=place / "nodes"))
specs = [Specification.from_json(json.dumps(raw)) for raw in json.loads((place / "specs.json").read_text())]
host.build_template(specs[0].template)
sleeper = NodeBootstrap(daemons=(Daemon("sleeper", ("/bin/sleep", "1000000")),))
found = []
for spec in specs:
    host.create(spec)
    size = Size(1, spec.size.memory + 128)
    host.start(spec.name, size, Identity(spec.name, spec.mac, spec.address, "", "1" * 32, bootstrap=sleeper))
    known = manifest.read(host.config.vms / spec.name)
    status = Path(f"/proc/{known.pid}/status").read_text()
    (cpus,) = [line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list")]
    found.append([known.numa, cpus, "prefer:0" in Path(f"/proc/{known.pid}/numa_maps").read_text()])
taken = [node.taken.cpus for node in host.observe().hosts[host.config.host].numa]
for spec in specs:
    host.destroy(spec.name, 2.0)
print(json.dumps({"vms": found, "taken": taken}))
"""

# Creates its VMs in four threads, once it is told to. Prints what came of each.
_CROWD = """
from concurrent.futures import ThreadPoolExecutor
specs = [Specification.from_json(json.dumps(raw)) for raw in json.loads((place / f"{sys.argv[2]}.json").read_text())]
def create(spec):
    try:
        host.create(spec)
    except MultiverseError as error:
        return spec.name, type(error).__name__
    return spec.name, "created"
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(4) as threads:
    print(json.dumps(list(threads.map(create, specs))), flush=True)
"""


@pytest.fixture
def place(tmp_path: Path, settings: Settings) -> Iterator[Path]:
    config: QemuHostConfig = host_config(settings, SITE)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config), default=str))
    yield tmp_path


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own, with the host library for this host as `host`."""
    argv = [sys.executable, "-c", _COMMON + script, *map(str, arguments)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def specification(settings: Settings, serial: int, token: str) -> Specification:
    return Specification(
        name=f"mv{SITE}-{serial}",
        host=settings.host.name,
        token=token,
        image="slim",
        kind=CloneKind.INSTANT,
        size=BASE,
        mac=f"02:00:5e:01:{os.getpid() % 256:02x}:{serial % 256:02x}",
        address=f"10.99.{serial >> 8}.{serial & 255}/16",
        bridge=settings.qemu.bridge,
        template=PARENT,
    )


def test_a_clone_lives_its_whole_life_in_a_process_without_a_controller(
    lab: Lab, place: Path, settings: Settings
) -> None:
    spec = specification(settings, 150, "token-150")
    (place / "spec.json").write_text(json.dumps(asdict(spec)))
    process = python(_LIFE, place)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    facts = json.loads(out.splitlines()[-1])
    assert facts["created"][-1] == "restore" and facts["again"] == []
    assert (facts["parked"], facts["running"], facts["destroyed"]) == (["parked"], ["running"], [])
    assert facts["users"] == [4711] and facts["guest"] == spec.name
    assert lab.remains(spec.name) == []
    forbidden = {"config", "ports", "store", "controller", "drivers", "service", "bundles", "client", "trace"}
    assert not forbidden & {name.split(".")[1] for name in facts["modules"]}


@pytest.mark.skipif(len(os.sched_getaffinity(0) & {0, 1}) < 2, reason="needs CPUs 0 and 1")
def test_each_vm_is_kept_on_a_numa_node(lab: Lab, place: Path, settings: Settings) -> None:
    """Of node 1, which this machine may not have, QEMU takes no memory; the VM starts all the same."""
    specs = [specification(settings, serial, f"token-{serial}") for serial in (160, 161)]
    (place / "specs.json").write_text(json.dumps([asdict(spec) for spec in specs]))
    process = python(_TWO_NODES, place)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    facts = json.loads(out.splitlines()[-1])
    assert facts["vms"][0] == [0, "0", True] and facts["vms"][1][:2] == [1, "1"]
    assert facts["taken"] == [1, 1]
    assert [lab.remains(spec.name) for spec in specs] == [[], []]


def as_port(spec: Specification) -> VmSpec:
    return VmSpec(
        spec.name, "h", spec.image, spec.kind, spec.size, spec.mac, PARENT, token=spec.token, address=spec.address
    )


async def test_processes_beside_each_other_and_the_driver_never_take_the_same(
    lab: Lab, place: Path, settings: Settings
) -> None:
    """Three of them create VMs at once; there are few more uids than VMs, so that their searches meet."""
    first = settings.qemu.uids[0]
    few = replace(settings, qemu=replace(settings.qemu, uids=(first, 24)))
    (place / "config.json").write_text(json.dumps(asdict(host_config(few, SITE)), default=str))
    parties: dict[str, list[Specification]] = {"a": [], "b": [], "driver": []}
    for number, (party, specs) in enumerate(parties.items()):
        specs += [specification(few, 1000 + 3 * turn + number, f"{party}-{turn}") for turn in range(6)]
        wanted = specification(few, 1100 + number, f"{party}-mac")
        specs += [specification(few, 1200, f"{party}-name"), replace(wanted, mac="02:00:5e:02:00:01")]
    processes = {}
    for party in ("a", "b"):
        (place / f"{party}.json").write_text(json.dumps([asdict(spec) for spec in parties[party]]))
        processes[party] = python(_CROWD, place, party)
    hypervisor = QemuHypervisor(few, SITE)

    async def create(spec: Specification) -> tuple[str, str]:
        try:
            await hypervisor.create(as_port(spec))
        except Refused:
            return spec.name, "Refused"
        return spec.name, "created"

    try:
        for process in processes.values():
            assert process.stdout is not None
            assert "ready\n" in process.stdout, "warnings come before it"
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        came = {"driver": dict(await asyncio.gather(*(create(spec) for spec in parties["driver"])))}
        for party, process in processes.items():
            out, errors = await asyncio.to_thread(process.communicate, timeout=120)
            assert process.returncode == 0, errors
            came[party] = dict(json.loads(out.splitlines()[-1]))
        check_distinct(lab, parties, came)
        seen = (await hypervisor.observe()).vms
        assert len(seen) == 20 and {vm.condition for vm in seen.values()} == {VmCondition.PARKED}
        for name in seen:
            await hypervisor.destroy(VmRef(name), 0)
            assert lab.remains(name) == []
        assert {path.name for path in few.qemu.vms.iterdir()} == {".lock"}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        hypervisor.close()


def check_distinct(lab: Lab, parties: dict[str, list[Specification]], came: dict[str, dict[str, str]]) -> None:
    """Of VMs with the same name, and of those with the same MAC, one exists; no two share what the host allocates."""
    for party, (*own, _, _) in parties.items():
        assert {came[party][spec.name] for spec in own} == {"created"}
    same_name = [came[party][specs[-2].name] for party, specs in parties.items()]
    same_mac = [came[party][specs[-1].name] for party, specs in parties.items()]
    assert sorted(same_name) == sorted(same_mac) == ["Refused", "Refused", "created"]
    found: list[Manifest] = []
    for home in sorted(lab.settings.qemu.vms.glob(f"mv{SITE}-*")):
        known = manifest.read(home)
        assert known is not None and known.process.is_alive(), home.name
        owner = Path(f"/proc/{known.pid}").stat().st_uid
        assert owner == known.uid and home.stat().st_gid == known.uid
        assert Path(f"/sys/class/net/{home.name}/master").readlink().name == lab.settings.qemu.bridge
        found.append(known)
    assert len(found) == 20
    for field in ("name", "uid", "pid", "mac", "address", "token"):
        assert len({getattr(known, field) for known in found}) == len(found), field
