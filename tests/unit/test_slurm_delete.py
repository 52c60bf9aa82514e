"""In which order nodes are deleted (`drivers.slurm.acting.delete`), with a fake of Slurm's commands that crashes as
22.05.8 does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from multiverse.config import SlurmSettings
from multiverse.core.errors import NotYet, Refused, Unknown
from multiverse.core.model.job import Maintenance, NodeReservation
from multiverse.drivers.slurm.acting.delete import NodeDeleter
from multiverse.drivers.slurm.command import Completed, SlurmCommands
from multiverse.drivers.slurm.reading.nodes import backfill, deletions, maintenance, node_words, reservations

CONFIG = """\
Configuration data as of 2026-11-27T15:51:12
BOOT_TIME               = 2026-11-27T15:51:12
SchedulerParameters     = sched_interval=2,bf_interval={interval},bf_continue
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = {version}
"""
SDIAG = """\
*******************************************************
sdiag output at Fri Nov 27 15:55:59 2026 ({now})
Data since      Fri Nov 27 15:51:12 2026 (1795794672)
*******************************************************
Main schedule statistics (microseconds):
\tLast cycle:   22

Backfilling stats{active}
\tTotal cycles: 3
\tLast cycle when: {began}
"""


@dataclass
class Slurm:
    """slurmctld. `nodes` are the words of their states, `planned` what the plans of backfill have. A cycle begins and
    ends as a test says."""

    version: str = "22.05.8"
    nodes: dict[str, set[str]] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)  # by node
    counted: set[str] = field(default_factory=set)  # nodes on which jobs are counted that have left
    plannable: set[str] = field(default_factory=set)  # nodes on which a job waits to start
    now: int = 1000
    active: bool = False
    began: int = 900
    crashed: bool = False
    calls: list[str] = field(default_factory=list)
    _planned: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.now += 10
        self._check()
        for name in self._planned:
            self.nodes[name].discard("planned")
        self._planned = {name for name in self.plannable if name in self.nodes and "drain" not in self.nodes[name]}
        self.active, self.began = True, self.now

    def end(self) -> None:
        self.now += 1
        self._check()
        for name in self._planned:
            self.nodes[name].add("planned")
        self.active = False

    def cycle(self) -> None:
        self.begin()
        self.end()

    def restart(self) -> None:
        self._planned.clear()

    def _check(self) -> None:
        self.crashed |= not self._planned <= self.nodes.keys()

    async def execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        await asyncio.sleep(0)
        self.calls.append(argv[0] if argv[0] != "scontrol" else f"scontrol {argv[1]}")
        match argv:
            case ["scontrol", "show", "config"]:
                self.calls.pop()
                return _printed(CONFIG.format(version=self.version, interval=30))
            case ["sdiag"]:
                words = " (WARNING: data obtained in the middle of backfilling execution.)" if self.active else ""
                began = f"Fri Nov 27 15:54:14 2026 ({self.began})" if self.began else "N/A"
                return _printed(SDIAG.format(now=self.now, active=words, began=began))
            case ["sinfo", *_, names, "-O", _]:
                rows = [f"{name}|idle+{'+'.join(sorted(self._shown(name)))}|\n" for name in names.split(",")
                        if name in self.nodes]  # fmt: skip
                return _printed("".join(rows))
            case ["squeue", *_, "-w", name, "-o", _]:
                return _printed(f"{self.jobs[name]}\n" if name in self.jobs else "")
            case ["squeue", *_]:
                return _printed("".join(f"{name}\n" for name in self.jobs))
            case ["scontrol", "update", names, state, _]:
                for name in names.removeprefix("NodeName=").split(","):
                    self.nodes[name].add(state.removeprefix("State=").lower())
                return _printed("")
            case ["scontrol", "delete", names]:
                return self._delete(names.removeprefix("NodeName=").split(","))
        raise AssertionError(argv)

    def _shown(self, name: str) -> set[str]:
        busy = {"allocated"} if name in self.jobs or name in self.counted else set()
        return {"dynamic_norm", *busy, *self.nodes[name]}

    def _delete(self, names: Sequence[str]) -> Completed:
        if missing := [name for name in names if name not in self.nodes]:
            return Completed(1, b"", f"scontrol: error: Invalid node name {missing[0]}".encode())
        for name in names:
            busy = name in self.jobs or name in self.counted
            if (busy and "down" not in self.nodes[name]) or "reserved" in self.nodes[name]:
                return Completed(1, b"", b"delete_node NodeName=x: Requested nodes are busy")
            self.crashed |= name in self.jobs
        for name in names:
            del self.nodes[name]
        return _printed("")


def _printed(text: str) -> Completed:
    return Completed(0, text.encode(), b"")


@pytest.fixture
def slurm() -> Slurm:
    return Slurm(nodes={"mv-1": set(), "mv-2": set()})


def deleter(slurm: Slurm, *reserved: str) -> NodeDeleter:
    commands = SlurmCommands(SlurmSettings(), {}, slurm.execute)
    return NodeDeleter(commands, lambda name: name in reserved)


async def test_a_node_that_nothing_plans_to_use_is_deleted_at_once_with_two_questions(slurm: Slurm) -> None:
    await deleter(slurm).delete("mv-1")
    assert slurm.calls == ["sdiag", "sinfo", "scontrol delete"] and slurm.nodes.keys() == {"mv-2"}


@pytest.mark.parametrize("version", ["22.05.9", "23.02.1", "24.11.5"])
async def test_a_slurmctld_without_the_fault_is_asked_no_more_than_before(slurm: Slurm, version: str) -> None:
    slurm.version = version
    slurm.nodes["mv-1"].add("planned")
    await deleter(slurm).delete("mv-1")
    assert slurm.calls == ["squeue", "scontrol delete"]


async def test_a_planned_node_is_drained_and_deleted_after_the_next_cycle(slurm: Slurm) -> None:
    slurm.plannable.add("mv-1")
    slurm.cycle()
    one = deleter(slurm)
    for _ in range(3):
        with pytest.raises(NotYet):
            await one.delete("mv-1")
    assert slurm.calls.count("scontrol update") == 1 and "down" not in slurm.nodes["mv-1"]
    slurm.cycle()
    await one.delete("mv-1")
    slurm.cycle()
    assert not slurm.crashed and "mv-1" not in slurm.nodes


async def test_a_node_that_a_cycle_under_way_may_plan_to_use_waits_for_its_end(slurm: Slurm) -> None:
    """The plan is shown only at the end of the cycle."""
    slurm.plannable.add("mv-1")
    slurm.begin()
    slurm.plannable.clear()  # its job has started, ended, and left the node meanwhile
    one = deleter(slurm)
    with pytest.raises(NotYet):
        await one.delete("mv-1")
    slurm.end()
    with pytest.raises(NotYet):
        await one.delete("mv-1")
    slurm.begin()
    await one.delete("mv-1")
    slurm.end()
    slurm.cycle()
    assert not slurm.crashed and "mv-1" not in slurm.nodes


async def test_a_node_of_which_only_the_mark_is_left_is_deleted_after_a_cycle(slurm: Slurm) -> None:
    """After a restart of slurmctld nothing takes the mark away, and no plan has the node."""
    slurm.plannable.add("mv-1")
    slurm.cycle()
    slurm.restart()
    one = deleter(slurm)
    with pytest.raises(NotYet):
        await one.delete("mv-1")
    slurm.cycle()
    assert "planned" in slurm.nodes["mv-1"]
    await one.delete("mv-1")
    assert "mv-1" not in slurm.nodes


async def test_a_mark_is_not_believed_for_ever_where_no_cycle_has_a_job_to_look_at(slurm: Slurm) -> None:
    slurm.nodes["mv-1"].add("planned")
    one = deleter(slurm)
    with pytest.raises(NotYet):
        await one.delete("mv-1")
    slurm.now += 590
    with pytest.raises(NotYet):
        await one.delete("mv-1")
    slurm.now += 20
    await one.delete("mv-1")
    assert "mv-1" not in slurm.nodes


async def test_a_node_that_waits_keeps_no_other_of_its_batch(slurm: Slurm) -> None:
    slurm.nodes["mv-1"].add("planned")
    one = deleter(slurm)
    results = await asyncio.gather(one.delete("mv-1"), one.delete("mv-2"), one.delete("mv-3"), return_exceptions=True)
    assert [type(result) for result in results] == [NotYet, type(None), type(None)]
    assert slurm.nodes.keys() == {"mv-1"}


async def test_a_node_that_is_down_under_a_job_is_not_deleted(slurm: Slurm) -> None:
    slurm.nodes["mv-1"].add("down")
    slurm.jobs["mv-1"] = "7"
    with pytest.raises(Refused):
        await deleter(slurm).delete("mv-1")
    assert not slurm.crashed and "scontrol delete" not in slurm.calls


async def test_a_busy_node_is_neither_set_down_nor_deleted(slurm: Slurm) -> None:
    slurm.jobs["mv-1"] = "7"
    with pytest.raises(Refused, match="a job is on node mv-1"):
        await deleter(slurm).delete("mv-1")
    assert "scontrol update" not in slurm.calls and "mv-1" in slurm.nodes


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
async def test_a_node_on_which_a_job_is_only_counted_is_set_down_and_deleted(slurm: Slurm, version: str) -> None:
    slurm.version = version
    slurm.counted.add("mv-1")
    await deleter(slurm).delete("mv-1")
    assert slurm.nodes.keys() == {"mv-2"} and not slurm.crashed
    assert slurm.calls.count("scontrol update") == 2, "drained as well: a slurmd that answers would bring it back"


async def test_a_reserved_node_is_asked_for_once_and_then_only_when_it_is_shown_free(slurm: Slurm) -> None:
    slurm.nodes["mv-1"].add("reserved")
    with pytest.raises(NotYet, match="reservation"):
        await deleter(slurm).delete("mv-1")
    assert "scontrol update" not in slurm.calls
    slurm.calls.clear()
    with pytest.raises(NotYet, match="reservation"):
        await deleter(slurm, "mv-1").delete("mv-1")
    assert slurm.calls == []


# --- what slurmctld says of itself -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "crash"),
    [("22.05.0", True), ("22.05.8", True), ("22.05.9", False), ("22.05.11", False), ("23.02.0", True),
     ("23.02.1", False), ("24.11.5", False)],
)  # fmt: skip
def test_the_releases_that_crash(version: str, crash: bool) -> None:
    assert deletions(CONFIG.format(version=version, interval=30)).planned_crash is crash


def test_backfill_that_rarely_runs_is_waited_for_longer() -> None:
    assert deletions(CONFIG.format(version="22.05.8", interval=30)).patience == 600
    assert deletions(CONFIG.format(version="22.05.8", interval=300)).patience == 3000


def test_texts_that_say_nothing_are_unknown() -> None:
    for parse, text in ((deletions, "slurmctld is away"), (backfill, "No data available"), (node_words, "mv-1|idle")):
        with pytest.raises(Unknown):
            parse(text)
    with pytest.raises(Unknown):
        reservations("slurm_load_reservations error", ("vm",))


def test_the_state_of_backfill() -> None:
    seen = backfill(SDIAG.format(now=7, active="", began="N/A"))
    assert (seen.now, seen.active, seen.began) == (7, False, 0)


RESERVATION = (
    "ReservationName={name} StartTime=1795794838 EndTime=1795795438 Duration=00:10:00 Nodes={nodes} NodeCnt=1 "
    "CoreCnt=2 Features=(null) PartitionName={partition} Flags={flags} TRES=cpu=2 Users=root Groups=(null) "
    "Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)"
)


def line(name: str, flags: str, nodes: str = "mv-1", partition: str = "(null)") -> str:
    return RESERVATION.format(name=name, flags=flags, nodes=nodes, partition=partition)


def test_the_reservations_that_keep_all_nodes_of_vms() -> None:
    """Those of named nodes, of other partitions and of licences keep none, and a magnetic one takes jobs in."""
    text = "\n".join(
        [
            line("all", "MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES"),
            line("future", "ALL_NODES"),
            line("named", "MAINT,SPEC_NODES", "node[1-4]"),
            line("ours", "PART_NODES", partition="vmrun"),
            line("theirs", "PART_NODES", partition="batch"),
            line("gate", "LICENSE_ONLY", "(null)"),
            line("any", "ANY_NODES", "(null)"),
            line("magnet", "ALL_NODES,MAGNETIC"),
        ]
    )
    found = reservations(text + "\n", ("vm", "vmrun"))
    assert [one.name for one in found] == ["all", "future", "ours"]
    assert found[0] == NodeReservation("all", 1795794838.0, 1795795438.0)
    assert reservations("No reservations in the system\n", ("vm", "vmrun")) == ()
    (named,) = maintenance(text + "\n")
    nodes = ("node1", "node2", "node3", "node4")
    assert named == Maintenance("named", 1795794838.0, 1795795438.0, nodes), "a flag MAINT, and no other nodes"
    assert maintenance("No reservations in the system\n") == ()


def test_a_reservation_without_times_is_unknown() -> None:
    with pytest.raises(Unknown):
        reservations(line("all", "ALL_NODES").replace("1795794838", "Unknown"), ("vm",))
