"""The backfill of the lab's slurmctld, and what it shows of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from multiverse_lab.lab import lifecycle

if TYPE_CHECKING:
    from tests.integration.conftest import LabUnderTest


@contextmanager
def backfill_each_second(lab: LabUnderTest) -> Iterator[None]:
    """A cycle of backfill each second: a crash comes with the next one."""
    conf = lab.where.slurm_conf
    text = conf.read_text()
    conf.write_text(text.replace("SchedulerParameters=", "SchedulerParameters=bf_interval=1,"))
    lab.run("scontrol", "reconfigure")
    try:
        yield
    finally:
        conf.write_text(text)
        lab.run("scontrol", "reconfigure")


def slurmctld(lab: LabUnderTest) -> int:
    return int(lifecycle.status(lab.where)["slurmctld"]["pid"])


def words(lab: LabUnderTest, node: str) -> set[str]:
    """The words of a node's state; none if there is no such node."""
    shown = lab.run("sinfo", "-h", "-a", "-N", "-n", node, "-O", "StateComplete:0").stdout.split()
    return set(shown[0].upper().split("+")) if shown else set()


def cycles(lab: LabUnderTest) -> int:
    """How many cycles of backfill there were that had jobs to look at."""
    shown = lab.run("sdiag").stdout.partition("Backfilling stats")[2]
    return int(shown.partition("Total cycles: ")[2].split()[0])
