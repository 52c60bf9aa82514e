"""The jobs of the demonstration, followed until they have ended, and what commands print about them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiverse.api import JobView, VmView, decode
from multiverse.cli import render
from multiverse.cli.render import console, duration
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.lab.program import multiverse
from multiverse_lab.lab.session import LabSession

T = TypeVar("T")

LIMIT = 600.0
"""Seconds for the template, and for all jobs together."""

REQUEUE_LIMIT = 3
"""The number of times that a job may be requeued before the demonstration fails."""

LOG_HINT = "see log/controller.log in the lab's directory"


@dataclass
class DemoJob:
    """One line of the demonstration: a job or a task of an array. `expected` is Slurm's word for how it must end,
    `refusal` what sbatch said if it refused the job."""

    what: str
    job: str
    expected: str
    state: str = "submitted"
    vm: str = ""
    hosts: str = ""
    note: str = ""
    refusal: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("done", "cancelled", "revoked", "failed", "refused")


async def eventually(ask: Callable[[], T | None], otherwise: str) -> T:
    """The first answer that is neither None nor False. Raises `Broken` with these words if there is none in time."""
    deadline = time.monotonic() + LIMIT
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise Broken(f"{otherwise} within {LIMIT:g} s", hint=LOG_HINT)
        await asyncio.sleep(0.05)
    return answer


async def _nothing() -> None:
    pass


async def follow(
    client: Client, rows: Sequence[DemoJob], each: Callable[[], Awaitable[None]] = _nothing, *, until: str = ""
) -> None:
    """Show the jobs until all have ended, or all are in the state `until`; `each` is called after each look at them.
    Raises `Broken` for one that takes too long."""
    deadline = time.monotonic() + LIMIT
    with Live(console=console, auto_refresh=False) as live:
        while not all(row.over or row.state == until for row in rows):
            if time.monotonic() > deadline:
                late = ", ".join(row.what for row in rows if not row.over)
                raise Broken(f"not over after {duration(LIMIT)}: {late}", hint=LOG_HINT)
            _look(client, rows)
            await each()
            if console.is_terminal:
                live.update(_table(rows), refresh=True)
            await asyncio.sleep(0.05)
        live.update(_table(rows), refresh=True)
    if not console.is_terminal:
        console.print()  # Live does not end its last line without a terminal


def _look(client: Client, rows: Sequence[DemoJob]) -> None:
    """Update the lines with what the controller knows about each job's latest attempt, which it lists last."""
    jobs = decode(list[JobView], client.jobs(ended=True))
    hosts = {vm.name: vm.host for vm in decode(list[VmView], client.vms())}
    latest = {job.job_id: job for job in jobs}
    for row in rows:
        job = latest.get(row.job)
        if job is None or row.over:
            continue
        if row.state != job.state:
            row.state = job.state
            if not console.is_terminal:
                console.print(f"  {row.job:>6}  {row.what:<16} {row.state}", markup=False)
        row.vm = job.vms[-1] if job.vms else ""
        if of_job := {hosts[vm] for vm in job.vms if vm in hosts}:
            row.hosts = " ".join(sorted(of_job))
        again = [one.reason for one in jobs if one.job_id == row.job and one.state == "requeued"]
        if len(again) == REQUEUE_LIMIT:
            raise Broken(f"{row.what} was requeued {REQUEUE_LIMIT} times: {again[-1]}", hint=LOG_HINT)
        if again:
            row.note = f"requeued: {again[-1]}"


def _table(rows: Sequence[DemoJob]) -> Table:
    table = render.table("JOB", "WHAT", "STATE", "VM", "HOST", "", fold=("",))
    for column in table.columns[2:5]:
        column.min_width = 10  # otherwise the columns would move as states change
    for row in rows:
        table.add_row(row.job, row.what, render.state(row.state), row.vm, row.hosts, Text(row.note))
    return table


def show_command(lab: LabSession, *words: str) -> None:
    """Print what `multiverse` prints with these words."""
    console.rule(f"multiverse {' '.join(words)}", style="dim")
    width = {"COLUMNS": str(console.width)}
    done = subprocess.run(
        multiverse(*words), env={**os.environ, **lab.env, **width}, capture_output=True, text=True, check=False
    )
    console.print(done.stdout or done.stderr, markup=False, highlight=False)


def text_of(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
