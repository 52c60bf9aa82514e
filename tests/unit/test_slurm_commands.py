"""How many of Slurm's commands run at the same time, and which of those that wait comes first."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.core.model import JobRef
from multiverse.drivers.slurm.command import Completed, SlurmCommands
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.turns import CommandTurns

JOB = {"State": "PENDING", "Partition": "vm", "Feature": "mvgate", "RestartCnt": "0", "SubmitTime": "500",
       "PriorityLong": "9"}  # fmt: skip


class Processes:
    """Slurm's commands, in whose place nothing is executed. All jobs wait at the gate until scancel ends them. While
    `stuck`, commands do not end."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.begun: list[str] = []
        self.most = 0
        self.cancelled: set[str] = set()
        self.stuck = asyncio.Event()
        self.stuck.set()

    async def execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        self.begun.append(argv[0])
        self.running.append(argv[0])
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(0)
            await self.stuck.wait()
        finally:
            self.running.remove(argv[0])
        if argv[0] == "scancel":
            self.cancelled.add(argv[-1])
        return Completed(0, self._squeue(argv).encode() if argv[0] == "squeue" else b"", b"")

    @staticmethod
    def _squeue(argv: Sequence[str]) -> str:
        *columns, comment = [column.partition(":") for column in argv[-1].split(",")]
        job = {**JOB, "JobArrayID": argv[argv.index("-j") + 1]}
        return "".join(job.get(name, "").ljust(int(width)) for name, _, width in columns) + comment[2][1:] + "\n"


def scheduler(processes: Processes, most: int) -> SlurmScheduler:
    settings = Settings(slurm=SlurmSettings(commands=most))
    return SlurmScheduler(settings, "ab12c", env={}, execute=processes.execute)


async def test_ten_thousand_revocations_at_once_use_a_constant_number_of_processes() -> None:
    processes = Processes()
    slurm = scheduler(processes, 16)
    jobs = [JobRef(str(number), 500) for number in range(1, 10_001)]
    await asyncio.gather(*(slurm.revoke(job, "no reason") for job in jobs))
    assert processes.cancelled == {job.job_id for job in jobs}
    assert processes.most == 12, "a quarter is left to observations"


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_an_observation_waits_for_no_change() -> None:
    processes = Processes()
    commands = SlurmCommands(SlurmSettings(commands=8), {}, processes.execute)
    processes.stuck.clear()
    changes = [asyncio.create_task(commands.run("scontrol")) for _ in range(100)]
    await settle()
    observations = [asyncio.create_task(commands.for_observations().run("sinfo")) for _ in range(4)]
    await settle()
    assert sorted(processes.running) == ["scontrol"] * 6 + ["sinfo"] * 2, "changes leave two places"
    processes.stuck.set()
    await asyncio.gather(*changes, *observations)
    assert processes.begun[:10].count("sinfo") == 4, "the other observations went before the changes that waited"
    assert processes.most == 8


async def test_observations_may_use_all_places_and_changes_keep_their_order() -> None:
    processes = Processes()
    commands = SlurmCommands(SlurmSettings(commands=4), {}, processes.execute)
    processes.stuck.clear()
    tasks = [asyncio.create_task(commands.for_observations().run("sinfo")) for _ in range(4)]
    tasks += [asyncio.create_task(commands.run(f"change-{number}")) for number in range(20)]
    await settle()
    assert processes.running == ["sinfo"] * 4
    processes.stuck.set()
    await asyncio.gather(*tasks)
    assert processes.begun[4:] == [f"change-{number}" for number in range(20)]


async def test_a_command_that_is_cancelled_while_it_waits_or_runs_frees_its_place() -> None:
    processes = Processes()
    commands = SlurmCommands(SlurmSettings(commands=2), {}, processes.execute)
    processes.stuck.clear()
    running, waiting, last = [asyncio.create_task(commands.run(name)) for name in ("one", "two", "three")]
    await settle()
    waiting.cancel()
    await settle()
    running.cancel()
    processes.stuck.set()
    await last
    assert processes.begun == ["one", "three"] and not processes.running


async def test_a_turn_that_is_cancelled_as_it_is_granted_is_given_to_the_next() -> None:
    turns = CommandTurns(2)
    taken: list[str] = []

    async def take(name: str) -> None:
        async with turns.turn(observes=False):
            taken.append(name)

    async with turns.turn(observes=False):
        tasks = [asyncio.create_task(take(name)) for name in ("a", "b")]
        await settle()
    tasks[0].cancel()  # it has been granted the turn and has not run since
    await asyncio.wait_for(tasks[1], 10)
    assert taken == ["b"]


async def test_a_command_gives_its_output_or_the_error_that_its_message_means(tmp_path: Path) -> None:
    def program(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    program("fine", 'echo "$1 $SLURM_CONF [$SLURM_CLUSTERS]"')
    program("fails", 'echo "fails: error: Invalid partition name specified" >&2; exit 1')
    program("hangs", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    settings = SlurmSettings(bin_dir=tmp_path, conf=Path("/a/slurm.conf"))
    commands = SlurmCommands(settings, {"SLURM_CLUSTERS": "other"})
    assert await commands.run("fine", "given") == "given /a/slurm.conf []\n"
    with pytest.raises(Refused, match="Invalid partition name"):
        await commands.run("fails")
    with pytest.raises(Broken, match="cannot run"):
        await commands.run("missing")
    with pytest.raises(Unknown, match="did not end"):
        await SlurmCommands(SlurmSettings(bin_dir=tmp_path, command_timeout=2.0), {}).run("hangs")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
