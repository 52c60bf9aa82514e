"""`multiverse demo --preempt`: jobs of low priority fill two hosts, and urgent ones take their places for a while.

The first urgent job gets its place by a move, the second by saves: the story of the virtual nodes that suspend, migrate
and resume backfill work, with real jobs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from multiverse.api import JobView, VmView, decode
from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.cli.demo_jobs import LOG_HINT, eventually, show_command, text_of
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.lifecycle import Progress
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession, session

HOSTS, CORES, MEMORY = 2, 4, 4096  # of each host; memory in MiB
PREEMPTION = """\
AccountingStorageEnforce=associations,qos
PreemptType=preempt/qos
PreemptMode=REQUEUE
"""

LOW = """#!/bin/bash
number=0
until [ -e {stop} ]; do
  number=$((number + 1))
  echo "$number"
  sleep 0.5
done
echo "sum $((number * (number + 1) / 2))"
"""

URGENT = """#!/bin/sh
echo "urgent on $(hostname) with $(nproc) CPUs"
sleep 5
"""


@dataclass(frozen=True, slots=True)
class StoryJob:
    what: str
    id: str
    output: Path


async def demo_preempt(
    directory: Path,
    image: str,
    images: Path,
    tell: Callable[[Layout, Callable[[str], None]], Progress],
    build_templates: Callable[[Client], Awaitable[None]],
) -> None:
    """Run the story in a lab of its own, and end everything. Raises `Broken` if something is not as expected."""
    options = LabOptions(cores=CORES, memory=MEMORY, hosts=HOSTS, image=image, images=images)
    stack, where = AsyncExitStack(), layout(directory)
    try:
        with progress.step(f"lab: a cluster of {HOSTS} hosts on this machine") as say:
            lab = await stack.enter_async_context(session(where, options, tell(where, say)))
        with progress.step("Slurm: QOS urgent may preempt QOS low (PreemptType=preempt/qos)"):
            await _with_preemption(lab, options)
        with Client(lab.settings.socket) as client:
            await build_templates(client)
            wrong = await _story(lab, client)
    finally:
        with progress.step("ending everything", "everything ended"):
            await stack.aclose()
    if wrong:
        raise Broken(f"not as expected: {', '.join(wrong)}", hint=f"see the logs in {directory}/log")


async def _with_preemption(lab: LabSession, options: LabOptions) -> None:
    """Let Slurm preempt jobs by their QOS, as its administrator would."""
    for words in (
        ("add", "account", "physics", "Description=physics", "Organization=lab"),
        ("add", "qos", "low"),
        ("add", "qos", "urgent", "Preempt=low", "Priority=1000"),
        ("add", "user", lab.user.name, "account=physics", "qos=low,urgent"),
    ):
        done = subprocess.run(("sacctmgr", "-i", *words), env=lab.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Broken(f"sacctmgr {words[0]} {words[1]} failed: {done.stderr.strip()}", hint=LOG_HINT)
    (lab.where.etc / "site.conf").write_text(PREEMPTION)
    await lifecycle.up(lab.where, options)


async def _story(lab: LabSession, client: Client) -> list[str]:
    stop = lab.user.home / "stop"
    stop.unlink(missing_ok=True)
    low = []
    with progress.step("four jobs of QOS low fill the hosts, but for one CPU of each") as say:
        for number, cpus in enumerate((2, 2, 1, 1), 1):
            low.append(_submit(lab, f"low{number}", LOW.format(stop=stop), "low", cpus))
            await _running(client, low, say)
    await eventually(lambda: all(_lines(job) for job in low), "the jobs did not begin")
    show_command(lab, "vms")
    hosts = _hosts(client)

    with progress.step("an urgent job needs two CPUs of one host: a VM moves"):
        began = time.monotonic()
        first = _submit(lab, "urgent1", URGENT, "urgent", 2)
        await eventually(lambda: bool(_lines(first)), "the first urgent job did not begin")
        took = time.monotonic() - began
    console.print(f"  it began after {render.duration(took)}", style="dim")
    now = _hosts(client)
    moved = [job for job in low if now.get(job.id) != hosts.get(job.id)]
    for job in moved:
        show_command(lab, "explain", job.id)
    await eventually(lambda: first.id not in _live(client), "the first urgent job did not end")

    with progress.step("another one needs a whole host: jobs are saved") as say:
        began = time.monotonic()
        second = _submit(lab, "urgent2", URGENT, "urgent", CORES)
        await eventually(lambda: bool(client.saved()), "no job was saved")
        say("jobs are being saved")
        await eventually(lambda: bool(_lines(second)), "the second urgent job did not begin")
        took = time.monotonic() - began
    console.print(f"  it began after {render.duration(took)}", style="dim")
    saved = {one["job_id"] for one in client.saved()}
    show_command(lab, "saved")

    with progress.step("it ends, and the saved jobs go on") as say:
        await _running(client, low, say)
        before = [len(_lines(job)) for job in low]
        await eventually(
            lambda: all(len(_lines(job)) > count for job, count in zip(low, before, strict=True)),
            "a job does not go on",
        )
    for job in [one for one in low if one.id in saved][:1]:
        show_command(lab, "explain", job.id)
    with progress.step("all end"):
        stop.touch()
        await eventually(lambda: not _live(client), "the jobs did not end")
    wrong = [] if moved else ["no job moved for the first urgent one"]
    wrong += [] if saved else ["no job was saved for the second urgent one"]
    wrong += [f"{job.what} wrote {_lines(job)[-3:]}" for job in low if not _is_right(job)]
    return wrong + await _accounts(lab, [*low, first, second])


def _submit(lab: LabSession, name: str, script: str, qos: str, cpus: int) -> StoryJob:
    output = lab.user.home / f"{name}.out"
    output.unlink(missing_ok=True)  # of an earlier demonstration
    options = (f"--job-name={name}", f"--output={output}", f"--qos={qos}", f"-c{cpus}", "--mem=100", "--time=60")
    return StoryJob(name, lab.submit(script, *options), output)


async def _running(client: Client, jobs: Sequence[StoryJob], say: Callable[[str], None]) -> None:
    said = ""

    def running() -> bool:
        nonlocal said
        states = {one.job_id: one.state for one in decode(list[JobView], client.jobs())}
        now = ", ".join(f"{job.what} {states.get(job.id, 'submitted')}" for job in jobs)
        if now != said:
            say(said := now)
        return all(states.get(job.id) == "allocated" for job in jobs)

    await eventually(running, "the jobs did not run")


def _live(client: Client) -> set[str]:
    """The jobs that have not ended."""
    return {one.job_id for one in decode(list[JobView], client.jobs())}


def _hosts(client: Client) -> dict[str, str]:
    """On which host each job runs, by job."""
    return {vm.job_id: vm.host for vm in decode(list[VmView], client.vms())}


def _lines(job: StoryJob) -> list[str]:
    return text_of(job.output).splitlines()


def _is_right(job: StoryJob) -> bool:
    """Whether it wrote each number once, in order, and their sum."""
    *numbers, last = _lines(job)
    expected = [str(number) for number in range(1, len(numbers) + 1)]
    return numbers == expected and last == f"sum {len(numbers) * (len(numbers) + 1) // 2}"


async def _accounts(lab: LabSession, jobs: Sequence[StoryJob]) -> list[str]:
    """Show what sacct says of the jobs, each run by itself. Returns those whose last run did not end well."""

    def runs() -> list[list[str]] | None:
        fields = "JobID,JobName,QOS,State,ExitCode,Start,Elapsed"
        ids = ",".join(job.id for job in jobs)
        done = lab.run("sacct", "-X", "-D", "-n", "-P", "-o", fields, "-j", ids)
        found = [line.split("|") for line in done.stdout.splitlines()]
        known = {row[0] for row in found} == {job.id for job in jobs}
        return found if known and all(row[3] not in ("RUNNING", "PENDING") for row in found) else None

    found = await eventually(runs, "accounting does not know the ends")
    console.rule("what Slurm keeps of each run (sacct -D)", style="dim")
    table = render.table("JOB", "NAME", "QOS", "STATE", "EXIT", "START", "ELAPSED", right=("EXIT", "ELAPSED"))
    for row in sorted(found, key=lambda row: (int(row[0]), row[5])):
        table.add_row(*row)
    console.print(table)
    last = {row[0]: row for row in sorted(found, key=lambda row: row[5])}
    return [f"{row[1]} is {row[3]}" for row in last.values() if row[3] != "COMPLETED"]
