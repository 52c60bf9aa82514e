"""The gate: what keeps a job waiting, what lets it through, and who looks after the licence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Stale
from multiverse.core.model.job import JobRef, JobState
from multiverse.drivers.slurm.acting import gate_keeper
from multiverse.drivers.slurm.command import Completed, SlurmCommands
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.site import gate, install
from tests.unit.slurm_lua import _PROGRAM, PARTITIONS, install_scripts, modify, needs_lua, run, submit
from tests.unit.slurm_records import jobs_of
from tests.unit.test_slurm_overflow import RECORD

NAMES = parse.SiteNames("ab12c", "vm", "mvgate", "vm")
RUN = JobRef("7", 500)


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nice", [0, 100, 10_000, -100])
def test_the_usual_nice_values_come_back_exactly(nice: int) -> None:
    for by in (60_000, 2_000_000_000):
        once = gate.boosted(nice, by)
        assert gate.boosted(once, by) == once and gate.unboosted(once, by) == nice == gate.unboosted(nice, by)


def test_the_boost_depends_on_how_slurm_computes_priorities() -> None:
    assert gate.boost("PriorityType=priority/multifactor\n") == 2_000_000_000
    assert gate.boost("") == gate.boost("PriorityType=priority/basic\n") == 60_000


def test_a_boost_does_not_overflow_the_priority_of_the_first_job() -> None:
    assert 0xFFFF0000 + gate.boost("") < 1 << 32


@pytest.mark.parametrize(
    ("text", "own", "ours"),
    [
        ("vm:1", (), True),
        ("seat:2,vm:1", ("seat:2",), True),
        ("seat:2;vm", ("seat:2",), True),
        ("vmware:1", ("vmware:1",), False),
        ("(null)", (), False),
        ("", (), False),
    ],
)
def test_the_gates_licence_is_told_from_the_users(text: str, own: tuple[str, ...], ours: bool) -> None:
    assert gate.own_licences(text, "vm") == own and gate.has_licence(text, "vm") == ours


def test_a_job_is_at_the_gate_by_its_partition_its_feature_and_its_licence() -> None:
    waits = RECORD | {"partition": "vm", "features": "slim&mvgate", "licenses": "vm:1", "state_reason": "Licenses"}

    def gated(**changes: object) -> tuple[bool, bool, str | None]:
        (job,) = jobs_of([waits | changes], NAMES, 1e9).values()
        return job.gated, job.eligible, job.pinned

    assert gated() == (True, True, None)
    assert gated(licenses="") == (False, False, None)
    assert gated(features="slim") == (False, False, None)
    assert gated(features="slim&mv_3", licenses="") == (False, False, "mv_3"), "a licence of its user is short"


def test_a_job_that_got_past_the_licence_is_shown_as_waiting_outside_the_gate() -> None:
    leaked = RECORD | {"partition": "vm", "features": "slim&mvgate", "licenses": "vm:1", "job_state": "CONFIGURING"}
    (job,) = jobs_of([leaked | {"nodes": "mvgate[1-2]"}], NAMES, 1e9).values()
    assert (job.state, job.gated, job.pinned, job.nodes) == (JobState.PENDING, False, None, ())
    (job,) = jobs_of([leaked | {"nodes": "mvab12c-3"}], NAMES, 1e9).values()
    assert (job.state, job.nodes) == (JobState.RUNNING, ("mvab12c-3",))


# --- the submit script ---------------------------------------------------------------------------------

_SHOWN = """
local job = { %s }
io.write("|", slurm_job_submit(job, partitions, 1000), "|", tostring(job.licenses), "|", tostring(job.nice))
"""
_CHANGED = """
local job = { %s }
io.write("|", slurm_job_modify(job, { partition = "vm", job_state = 0, %s }, partitions, 1000), "|",
         tostring(job.licenses))
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", inbox=tmp_path / "inbox")
    return install_scripts(Settings(slurm=slurm))


@needs_lua
def test_a_job_is_submitted_with_the_gates_licence_beside_its_own(scripts: Path) -> None:
    def shown(fields: str) -> str:
        return run(scripts, _PROGRAM % PARTITIONS + _SHOWN % f"user_id = 1000, {fields}")

    assert shown("min_cpus = 1") == "|0|vm:1|nil"
    assert shown("min_cpus = 1, licenses = 'seat:2', nice = 2147483748") == "|0|seat:2,vm:1|2147483748"
    assert "reserved for Multiverse" in shown("licenses = 'seat,vm:1'")
    assert "join licences with commas" in shown("licenses = 'seat|ice'")
    assert "|0|vmware:1,vm:1|" in shown("licenses = 'vmware:1'")


@needs_lua
def test_no_job_is_accepted_while_nothing_holds_the_licence(scripts: Path) -> None:
    opened = _PROGRAM.replace("mvgate = {}", "other = {}") % PARTITIONS
    assert "start Multiverse's daemon|2070|" in run(scripts, opened + _SHOWN % "user_id = 1000")
    assert run(scripts, opened + _SHOWN % "user_id = 1000, partition = 'other'").startswith("|0|nil|")


@needs_lua
def test_a_user_may_change_licences_but_not_the_gates(scripts: Path) -> None:
    def changed(fields: str, record: str) -> str:
        return run(scripts, _PROGRAM % PARTITIONS + _CHANGED % (fields, f"user_id = 1000, {record}"))

    assert changed("licenses = 'seat:1'", "licenses = 'vm:1'") == "|0|seat:1,vm:1"
    assert changed("licenses = ''", "licenses = 'seat:1,vm:1'") == "|0|vm:1"
    assert changed("licenses = 'seat:1'", "licenses = ''") == "|0|seat:1", "the job is pinned"
    assert "reserved for Multiverse" in changed("licenses = 'vm'", "licenses = 'vm:1'")
    assert changed("nice = 2147483748", "licenses = 'vm:1'") == "|0|nil"


@needs_lua
def test_the_words_of_other_jobs_are_left_alone(scripts: Path) -> None:
    assert submit(scripts, "user_id = 1000, partition = 'other', licenses = 'vm'").startswith("|0|nil|")
    assert modify(scripts, "licenses = 'vm'", "partition = 'other'") == "|0|"


# --- the keeper ----------------------------------------------------------------------------------------


class Slurmctld:
    """A slurmctld with at most one reservation, which counts the calls."""

    def __init__(self, reservation: str = "", out_of_service: str = "") -> None:
        self.reservation, self.out_of_service, self.failure = reservation, out_of_service, ""
        self.calls: list[str] = []

    async def execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        call = " ".join(argv)
        self.calls.append(call)
        if "show reservation" in call and not self.reservation:
            return Completed(1, b"", b"Reservation mvgate not found")
        if self.failure and "create" in call:
            return Completed(1, b"", self.failure.encode())
        if "show reservation" in call:
            return Completed(0, self.reservation.encode(), b"")
        return Completed(0, self.out_of_service.encode() if argv[0] == "sinfo" else b"", b"")

    def changes(self) -> list[str]:
        changes = [call for call in self.calls if "create" in call or "update" in call]
        return [call for call in changes if "NodeAddr" not in call]


def shown_reservation(licences: str = "vm:1", days: float = 300) -> str:
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + days * 86400))
    return f"ReservationName=mvgate StartTime=2026-11-27T10:00:00 EndTime={ends} Licenses={licences} State=ACTIVE\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A slurm.conf with our file beside it."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("Include multiverse.conf\n")
    (tmp_path / install.OURS).write_text("NodeName=mvgate[1-250] NodeAddr=127.0.1.[1-250] Port=1 State=CLOUD\n")
    return conf


def keeper(slurmctld: Slurmctld, now: list[float], conf: Path) -> gate_keeper.GateKeeper:
    slurm = SlurmSettings(conf=conf)
    return gate_keeper.GateKeeper(slurm, SlurmCommands(slurm, {}, slurmctld.execute), lambda: now[0])


@pytest.mark.parametrize(
    ("reservation", "change"),
    [
        ("", "create reservation ReservationName=mvgate Users=root Licenses=vm:1 StartTime=now Duration=UNLIMITED"),
        (shown_reservation("(null)"), "update ReservationName=mvgate Licenses=vm:1"),
        (shown_reservation(days=100), "update ReservationName=mvgate Duration=UNLIMITED"),
        (shown_reservation(), ""),
        (shown_reservation("seat:1,vm:1"), ""),
    ],
)
def test_the_licence_is_held_by_a_reservation_that_does_not_end(reservation: str, change: str, conf: Path) -> None:
    slurmctld = Slurmctld(reservation)
    asyncio.run(keeper(slurmctld, [100.0], conf).tend())
    assert [call for call in slurmctld.changes() if change and change in call] == slurmctld.changes()
    assert bool(slurmctld.changes()) == bool(change)


def test_the_gate_is_looked_after_once_a_minute_and_at_once_after_a_job_got_past_it(conf: Path) -> None:
    slurmctld, now = Slurmctld(shown_reservation()), [100.0]
    found = keeper(slurmctld, now, conf)

    async def tend() -> int:
        before = len(slurmctld.calls)
        await found.tend()
        return len(slurmctld.calls) - before

    assert asyncio.run(tend()) and not asyncio.run(tend())
    now[0] += 59
    assert not asyncio.run(tend())
    now[0] += 1
    assert asyncio.run(tend())
    found.look_again()
    assert asyncio.run(tend())


def test_nodes_of_the_gate_that_are_out_of_service_are_put_back(conf: Path) -> None:
    slurmctld = Slurmctld(shown_reservation(), "mvgate1 mvgate2 mvab12c-3")
    asyncio.run(keeper(slurmctld, [100.0], conf).tend())
    assert [call.partition("NodeName=mvgate1,mvgate2 State=")[2] for call in slurmctld.changes()] == [
        "DOWN Reason=multiverse gate", "RESUME", "POWER_DOWN_FORCE",
    ]  # fmt: skip


def test_the_gates_nodes_get_their_addresses_back_until_slurm_has_powered_all_of_them_down(conf: Path) -> None:
    """Slurm replaces the address of a node that it powers down by its name, which nobody can look up."""
    slurmctld, now = Slurmctld(shown_reservation()), [100.0]
    found = keeper(slurmctld, now, conf)

    def tend(seconds: float) -> int:
        now[0] += seconds
        asyncio.run(found.tend())
        given = sum("update NodeName=mvgate[1-250] NodeAddr=127.0.1.[1-250]" in call for call in slurmctld.calls)
        slurmctld.calls.clear()
        return given

    assert (tend(0), tend(60), tend(60)) == (1, 0, 0), "once, for what an earlier controller may have left"
    asyncio.run(found.release(["mvgate3"]))
    assert (tend(60), tend(539), tend(60)) == (1, 1, 0)


def test_a_slurmctld_without_the_licence_does_not_keep_anybody_from_observing(conf: Path) -> None:
    slurmctld = Slurmctld()
    slurmctld.failure = "Error creating the reservation: Invalid license specification"
    asyncio.run(keeper(slurmctld, [100.0], conf).tend())


# --- a job that got past the gate ----------------------------------------------------------------------


class OneJob(Slurmctld):
    """A slurmctld with one job, which squeue shows with these columns."""

    def __init__(self, **job: str) -> None:
        super().__init__(shown_reservation())
        known = {"JobArrayID": "7", "State": "CONFIGURING", "Partition": "vm", "Feature": "mvgate", "RestartCnt": "0"}
        self.job = {**known, "SubmitTime": "500", "PriorityLong": "9", "NodeList": "mvgate1", "Licenses": "vm:1", **job}

    async def execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        if argv[0] != "squeue":
            return await super().execute(argv, env, timeout)
        *columns, comment = [column.partition(":") for column in argv[-1].split(",")]
        row = "".join(self.job.get(name, "").ljust(int(width)) for name, _, width in columns)
        return Completed(0, f"{row}{comment[2][1:]}\n".encode(), b"")


@pytest.mark.parametrize("call", ["unpin", "pin"])
@pytest.mark.parametrize("batch", ["1", "0"])
def test_a_job_on_the_gates_nodes_is_taken_back(tmp_path: Path, call: str, batch: str) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("")
    slurmctld = OneJob(BatchFlag=batch)
    scheduler = SlurmScheduler(Settings(slurm=SlurmSettings(conf=conf)), "ab12c", env={}, execute=slurmctld.execute)
    with pytest.raises(Stale, match="taken back"):
        asyncio.run(scheduler.unpin(RUN) if call == "unpin" else scheduler.pin(RUN, "mv_3", ("mvab12c-1",)))
    done = [" ".join(call.split()[1:]) for call in slurmctld.calls]
    ends = "requeue Incomplete 7" if batch == "1" else "7"
    assert ends in done and any(one.startswith("update NodeName=mvgate1 State=POWER_DOWN_FORCE") for one in done)
    assert any(one == "update JobId=7 Requeue=1" for one in done) == (batch == "1")
