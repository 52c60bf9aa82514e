"""NUMA nodes of a host, by the description of a machine with several: which one a VM is kept on, and by what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import NumaNode
from multiverse.host import manifest
from multiverse.host.cgroups import Cgroups
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.numa import NODES, NumaNodes, cpu_list, read_nodes
from multiverse.host.qemu.channels import Monitor, QmpError
from multiverse.host.qemu.hotplug import plug

ALL = frozenset(range(64))


def describe(root: Path, *nodes: tuple[str, int, str]) -> Path:
    """A machine with these nodes: the CPUs of each, its memory in MiB, and the distances from it."""
    for number, (cpus, memory, distances) in enumerate(nodes):
        node = root / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        (node / "distance").write_text(f"{distances}\n")
        lines = [f"Node {number} {key}:  {size << 10} kB" for key, size in (("MemTotal", memory), ("MemFree", 100))]
        (node / "meminfo").write_text("\n".join(lines) + "\n")
    (root / "has_cpu").write_text("0-1\n")
    return root


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of 4 CPUs and 8 GiB, and one without CPUs. This process may use all CPUs."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: ALL)
    (tmp_path / "vms").mkdir()
    nodes = (("0-1,8-9", 8192, "10 21 40"), ("2-3,10-11", 8192, "21 10 40"), ("", 65536, "40 40 10"))
    return describe(tmp_path / "nodes", *nodes)


def keep(machine: Path, name: str, numa: int | None, size: Size) -> None:
    """A VM that is kept on a node, according to its manifest."""
    home = machine.parent / "vms" / name
    home.mkdir()
    manifest.write(home, Manifest(name, CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, numa=numa,
                                  total_cpus=size.cpus, total_memory=size.memory))  # fmt: skip


def nodes_of(machine: Path, overcommit: float = 1.0) -> NumaNodes:
    return NumaNodes(machine.parent / "vms", overcommit, machine)


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("0\n", {0}), ("0-2,8\n", {0, 1, 2, 8}), ("3,5-6", {3, 5, 6})])
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus


def test_nodes_with_cpus_are_shown_as_numactl_shows_them(machine: Path) -> None:
    keep(machine, "mva-1", 1, Size(2, 600))
    one, other = nodes_of(machine).view()
    assert one == NumaNode(0, (0, 1, 8, 9), 8192, 100, Size(0, 0), (10, 21, 40))
    assert (other.number, other.cpus, other.taken) == (1, (2, 3, 10, 11), Size(2, 600))


def test_cpus_that_the_process_may_not_use_do_not_count(machine: Path) -> None:
    (one,) = read_nodes(machine, frozenset({2, 3}))
    assert (one.number, one.cpus) == (1, (2, 3))
    assert read_nodes(machine / "missing", ALL) == ()


def test_this_machine_has_a_node_with_its_cpus() -> None:
    found = NumaNodes(Path("/nonexistent"), root=NODES).view()
    assert found and all(node.cpus and node.memory > 0 for node in found)


def test_the_node_with_the_most_cpus_left_is_chosen(machine: Path) -> None:
    nodes = nodes_of(machine)
    assert nodes.are_several and nodes.choose("mva-9", Size(2, 1000)) == 0
    keep(machine, "mva-1", 0, Size(2, 1000))
    assert nodes.choose("mva-9", Size(2, 1000)) == 1
    keep(machine, "mva-2", 1, Size(2, 2000))
    assert nodes.choose("mva-9", Size(2, 1000)) == 0, "as many CPUs are left, and more memory"
    assert nodes.choose("mva-1", Size(4, 1000)) == 0, "what it has itself does not count"


@pytest.mark.parametrize("size", [Size(5, 100), Size(1, 8193), Size(8, 20000)])
def test_a_vm_that_fits_on_no_node_is_kept_on_none(machine: Path, size: Size) -> None:
    assert nodes_of(machine).choose("mva-9", size) is None


def test_a_vm_that_spans_the_nodes_takes_of_each(machine: Path) -> None:
    keep(machine, "mva-1", -1, Size(6, 4000))
    keep(machine, "mva-2", None, Size(4, 4000))  # no node was chosen: it is paused
    nodes = nodes_of(machine)
    assert [node.taken for node in nodes.view()] == [Size(3, 2000)] * 2
    assert nodes.choose("mva-9", Size(2, 100)) is None and nodes.choose("mva-9", Size(1, 6192)) == 0
    assert nodes.choose("mva-9", Size(1, 6193)) is None


def test_cpus_of_a_node_may_be_claimed_as_often_as_those_of_the_host(machine: Path) -> None:
    keep(machine, "mva-1", 0, Size(4, 100))
    keep(machine, "mva-2", 1, Size(4, 100))
    assert nodes_of(machine).choose("mva-9", Size(1, 100)) is None
    assert nodes_of(machine, overcommit=1.5).choose("mva-9", Size(2, 100)) == 0


# --- by what a VM is kept there -----------------------------------------------------------------------


def hierarchy(root: Path, version: int) -> Path:
    """A hierarchy with the controller cpuset, as files; and the table of mounts that has it."""
    root.mkdir()
    if version == 2:
        (root / "cgroup.controllers").write_text("cpuset memory\n")
        line = f"none {root} cgroup2 rw 0 0"
    else:
        line = f"none {root} cgroup rw,cpuset 0 0"
    for file, text in (("cpuset.cpus", "0-11\n"), ("cpuset.mems", "0-1\n")):
        (root / file).write_text(text)
        for group in ("multiverse", "multiverse/mva-1"):
            (root / group).mkdir(exist_ok=True)
            (root / group / file).write_text("\n")
    (root / "mounts").write_text(line + "\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_the_cpus_of_a_vm_are_limited_and_the_nodes_of_its_memory_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    root = hierarchy(tmp_path / "cg", version)
    cgroups = Cgroups(root / "mounts")
    cgroups.keep_on("mva-1", [2, 3])
    assert (root / "multiverse/mva-1/cpuset.cpus").read_text() == "\n", "not asked for: the machine has one node"
    monkeypatch.setattr("multiverse.host.cgroups._is_usable", lambda _hierarchy: True)
    Cgroups(root / "mounts", cpusets=True).keep_on("mva-1", [3, 2, 10])
    assert (root / "multiverse/mva-1/cpuset.cpus").read_text() == "2,3,10"
    inherited = "0-1\n" if version == 1 else "\n"  # of version 1 a group without nodes takes no process
    assert (root / "multiverse/mva-1/cpuset.mems").read_text() == inherited


def test_without_the_controller_nothing_fails_and_the_log_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    cgroups = Cgroups(tmp_path / "mounts", cpusets=True)
    cgroups.keep_on("mva-1", [0])
    assert "VMs are kept on no NUMA node" in capsys.readouterr().out


class FakeMonitor:
    """A QEMU that may be unable to bind memory to nodes."""

    def __init__(self, *, binds: bool) -> None:
        self.binds = binds
        self.backends: dict[str, dict[str, Any]] = {}

    def execute_all(self, commands: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        return [self.execute(name, **asked) for name, asked in commands]

    def execute(self, name: str, **asked: Any) -> Any:
        if name == "qom-list":
            return [{"name": one} for one in self.backends] if asked["path"] == "/objects" else []
        if name == "object-add":
            if "host-nodes" in asked and not self.binds:
                raise QmpError("QEMU refused object-add: NUMA node binding are not supported by this QEMU")
            self.backends[asked["id"]] = asked
        return None


@pytest.mark.parametrize("numa", [None, -1, 1])
@pytest.mark.parametrize("binds", [True, False])
def test_plugged_memory_is_taken_from_the_node_where_qemu_can(numa: int | None, binds: bool) -> None:
    qemu = FakeMonitor(binds=binds)
    known = Manifest("mva-1", CloneKind.INSTANT, VmPhase.STARTING, "02:00:00:00:00:01", 1, 256, numa=numa)
    with capture_logs() as said:
        plug(cast(Monitor, qemu), known, 1, 512)
    (backend,) = qemu.backends.values()
    near = numa == 1 and binds
    assert (backend.get("host-nodes"), backend.get("policy")) == (([1], "preferred") if near else (None, None))
    assert [line["event"] for line in said] == (["memory plugged on any NUMA node"] if numa == 1 and not binds else [])
