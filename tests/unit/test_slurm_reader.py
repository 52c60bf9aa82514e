"""How parts of Slurm's jobs and nodes are read, with a fake of Slurm's commands over captured tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import pytest

from multiverse.config import ImageSettings, Settings, SlurmSettings
from multiverse.core.errors import Gone, Refused, Unknown
from multiverse.core.model.job import JobState, NodeState
from multiverse.drivers.slurm.reading import jobs
from multiverse.drivers.slurm.reading.jobs import JobColumns, JobTable
from multiverse.drivers.slurm.reading.reader import SlurmReader
from tests.unit.test_slurm_table import END, NODES, SECRET, SHOWN, TABLE

USER = 65534
TITLES, *ROWS = TABLE.split(END + "\n")[:-1]


class Commands:
    """Slurm's commands. `rows` are those of squeue; a user who is in `unknown` has no account on this machine."""

    def __init__(self) -> None:
        self.rows = list(ROWS)
        self.unknown: set[str] = set()
        self.calls: list[tuple[str, ...]] = []
        self.nodes = NODES
        self.on_nodes = ""
        self.shown = SHOWN

    async def run(self, *command: str, env: Mapping[str, str] | None = None, refused: str = "") -> str:
        self.calls.append(command)
        match command[0]:
            case "squeue" if "-w" in command:
                return self.on_nodes
            case "squeue":
                assert env and SECRET in env["SQUEUE_FORMAT2"] and not any(SECRET in word for word in command)
                return self._squeue(*command[-2:])
            case "sinfo":
                return self.nodes
            case _:
                return self.shown if "job" in command else "LicenseName=seat\n Total=1 Used=0 Free=1 \n"

    def _squeue(self, option: str, value: str) -> str:
        rows = self.rows
        if option == "-u":
            if value in self.unknown:
                raise Refused("squeue: error: Invalid user")
            rows = [row for row in rows if row.split("\x1f")[7] == value]
        elif option == "-j":
            rows = [row for row in rows if row.split("\x1f")[0].partition("_")[0] == value]
            if not rows:
                raise Gone("invalid job id specified")
        return "".join(f"{row}{END}\n" for row in (TITLES, *rows))

    def asked(self, program: str) -> list[tuple[str, ...]]:
        """The last two arguments of each call of a program since the last question."""
        found = [call[-2:] for call in self.calls if call[0] == program]
        self.calls.clear()
        return found


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
async def reader(commands: Commands, tmp_path: Path) -> SlurmReader:
    (tmp_path / "slurm.conf").write_text("DefMemPerCPU=150\n")
    settings = Settings(slurm=SlurmSettings(conf=tmp_path / "slurm.conf"), image=ImageSettings())
    reader = SlurmReader(settings, "ab12c", commands)  # type: ignore[arg-type]  # only run() is called
    reader._jobs = JobTable(JobColumns(SECRET))
    await reader.whole()
    commands.calls.clear()
    return reader


async def test_the_jobs_of_a_user_with_few_jobs_are_read_in_one_go(reader: SlurmReader, commands: Commands) -> None:
    part = await reader.part({"15003": USER, "15008": USER, "15099": USER}, (), ())
    assert commands.asked("squeue") == [("-u", str(USER))]
    assert part.users == {USER} and part.job_ids == {"15003", "15008", "15099"}
    assert len(part.jobs) == len(ROWS) and "15099" not in part.jobs


async def test_the_jobs_of_a_user_with_many_jobs_are_read_alone(reader: SlurmReader, commands: Commands) -> None:
    reader._jobs.of_users[USER] = 550
    part = await reader.part({"15007_2": USER, "15007_4": USER, "15099": USER}, (), ())
    assert sorted(commands.asked("squeue")) == [("-u", str(USER))], "two jobs and arrays cost as much as all 550"
    reader._jobs.of_users[USER] = 650
    part = await reader.part({"15007_2": USER, "15007_4": USER, "15099": USER}, (), ())
    assert sorted(commands.asked("squeue")) == [("-j", "15007"), ("-j", "15099")]
    assert not part.users and part.job_ids == {"15007_2", "15007_4", "15099"}
    assert sorted(part.jobs) == ["15007_0", "15007_2", "15007_4", "15007_6", "15007_8"]
    assert part.limits == {"JobArrayTaskLimit: 15007": 2}


async def test_a_job_of_an_unknown_user_is_read_alone(reader: SlurmReader, commands: Commands) -> None:
    await reader.part({"15003": None}, (), ())
    assert commands.asked("squeue") == [("-j", "15003")]
    part = await reader.part({"15003": 9}, (), ())
    assert commands.asked("squeue") == [("-j", "15003")], "the id is that of another user's job"
    assert part.job_ids == {"15003"} and "15003" in part.jobs


async def test_nothing_is_said_of_a_user_whom_squeue_cannot_name(reader: SlurmReader, commands: Commands) -> None:
    commands.unknown.add(str(USER))
    part = await reader.part({"15003": USER}, [USER], ())
    assert not part.users and not part.job_ids and not part.jobs
    assert "15003" in reader._jobs.jobs
    commands.calls.clear()
    part = await reader.part({"15003": USER}, [USER], ())
    assert commands.asked("squeue") == [("-j", "15003")] and part.job_ids == {"15003"}
    commands.unknown.clear()
    await reader.whole()
    assert (await reader.part({}, [USER], ())).users == {USER}, "the name service answers again"


async def test_a_part_reads_only_so_much_and_the_rest_later(reader: SlurmReader, commands: Commands) -> None:
    wanted = {str(15100 + number): None for number in range(20)}
    read: set[str] = set()
    for _ in range(3):
        part = await reader.part(wanted, [USER], ())
        asked = commands.asked("squeue")
        assert len(asked) == 8 and ("-u", str(USER)) in asked, "a hint comes first"
        read |= part.job_ids
    assert read == wanted.keys()


async def test_unchanged_jobs_are_the_same_objects_in_parts_and_wholes(reader: SlurmReader, commands: Commands) -> None:
    before = dict(reader._jobs.jobs)
    part = await reader.part({}, [USER], ())
    assert all(part.jobs[job_id] is job for job_id, job in before.items())
    jobs, _, _ = await reader.whole()
    assert all(jobs[job_id] is job for job_id, job in before.items())


async def test_a_changed_limit_of_an_array_is_seen_with_the_hint_and_with_the_next_whole(
    reader: SlurmReader, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.shown = SHOWN.replace("ArrayTaskThrottle=2 ", "ArrayTaskThrottle=3 ")
    part = await reader.part({}, [USER], ())
    assert part.limits["JobArrayTaskLimit: 15007"] == 2 and not commands.asked("scontrol")
    part = await reader.part({"15007": None}, (), ())
    assert part.limits == {"JobArrayTaskLimit: 15007": 3}
    commands.shown = SHOWN.replace("ArrayTaskThrottle=2 ", "ArrayTaskThrottle=1 ")
    monkeypatch.setattr(jobs, "_AGE", 0.0)
    _, _, limits = await reader.whole()
    assert limits["JobArrayTaskLimit: 15007"] == 1


async def test_limits_are_counted_again_after_a_job_started_or_ended(reader: SlurmReader, commands: Commands) -> None:
    part = await reader.part({"15008": None}, (), ())
    assert commands.asked("scontrol") == [] and part.limits == {}
    waiting = next(row for row in ROWS if row.startswith("15008\x1f"))
    running = waiting.replace("PENDING", "RUNNING")
    commands.rows[commands.rows.index(waiting)] = running
    part = await reader.part({"15008": None}, (), ())
    assert part.jobs["15008"].state is JobState.RUNNING
    assert commands.asked("scontrol") == [("show", "licenses")] and part.limits == {"Licenses: seat": 1}
    part = await reader.part({"15008": None}, (), ())
    assert commands.asked("scontrol") == [] and part.limits == {}
    commands.rows.remove(running)
    part = await reader.part({"15008": None}, (), ())
    assert commands.asked("scontrol") == [("show", "licenses")] and not part.jobs


async def test_a_table_of_all_nodes_is_read_unless_single_nodes_cost_less(
    reader: SlurmReader, commands: Commands
) -> None:
    part = await reader.part({}, (), ["mvab12c-1", "mvab12c-9"])
    assert commands.asked("sinfo")[0][0] == "-O" and part.all_nodes
    assert part.node_names == {"mvab12c-1", "mvab12c-9"} and set(part.nodes) == {f"mvab12c-{n}" for n in (1, 2, 3)}
    reader._nodes_took = deque([0.1, 0.3])
    assert (await reader.part({}, (), {"mvab12c-9"})).all_nodes, "slurmctld would log an error for one it does not know"
    commands.calls.clear()
    reader._nodes_took = deque([0.3])
    commands.nodes = "".join(NODES.splitlines(keepends=True)[:1])
    part = await reader.part({}, (), ["mvab12c-1"])
    assert [call[3] for call in commands.calls if call[0] == "sinfo"] == ["mvab12c-1"]
    assert not part.all_nodes and part.node_names == {"mvab12c-1"} and not part.nodes
    assert set(reader.nodes) == {"mvab12c-2", "mvab12c-3"}


async def test_a_part_of_nothing_asks_for_nothing(reader: SlurmReader, commands: Commands) -> None:
    part = await reader.part({}, (), ())
    assert commands.calls == [] and not part.jobs and not part.nodes


async def test_a_damaged_part_is_unknown_and_forgets_nothing(reader: SlurmReader, commands: Commands) -> None:
    before = dict(reader._jobs.jobs)
    commands.rows = ["damaged"]
    with pytest.raises(Unknown):
        await reader.whole()
    commands.nodes = ""
    with pytest.raises(Unknown):
        await reader.part({}, (), ["mvab12c-1"])
    assert reader._jobs.jobs == before and set(reader.nodes) == {f"mvab12c-{n}" for n in (1, 2, 3)}


async def test_a_node_that_stays_allocated_without_a_job_of_any_partition_is_drained(
    reader: SlurmReader, commands: Commands
) -> None:
    commands.nodes = NODES.replace("idle+dynamic_norm", "allocated+dynamic_norm")
    stuck = ("mvab12c-1", "mvab12c-2")
    commands.on_nodes = "node1,mvab12c-2\n"
    states = [(await reader.whole())[1] for _ in range(3)]
    assert [[one[name].state for name in stuck] for one in states] == [
        [NodeState.BUSY, NodeState.BUSY],  # a job may have started between the two tables
        [NodeState.DRAINED, NodeState.BUSY],
        [NodeState.DRAINED, NodeState.BUSY],
    ]
    assert states[2]["mvab12c-1"] is states[1]["mvab12c-1"]
    part = await reader.part({}, (), ["mvab12c-1"])
    assert part.nodes["mvab12c-1"].state is NodeState.DRAINED
    commands.on_nodes = "mvab12c-[1-2]\n"  # a job of another partition has started there
    assert (await reader.whole())[1]["mvab12c-1"].state is NodeState.BUSY
    commands.nodes = NODES
    assert (await reader.whole())[1]["mvab12c-1"].state is NodeState.IDLE
