"""The kinds of jobs and incidents of a soak test, and what may become of a job that an incident has hit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What a job's user does to it, and when."""

    RELEASE = "release"  # a job that was submitted held
    CANCEL_QUEUED = "cancel while queued"
    CANCEL_CREATED = "cancel while its VM is made"
    CANCEL_RUNNING = "cancel while it runs"
    REQUEUE = "requeue while it runs"


WHEN: Mapping[Action, Collection[str]] = {
    Action.CANCEL_QUEUED: ("queued", "ungated", "claimed", "spawning", "spawned", "adding_user", "allocated"),
    Action.CANCEL_CREATED: ("claimed", "spawning", "spawned", "adding_user", "allocated"),
    Action.CANCEL_RUNNING: ("allocated",),
    Action.REQUEUE: ("allocated",),
}
"""The states of the job's attempt in which its user acts. A state that was missed because it was short is made up for
in the next one."""


@dataclass(frozen=True, slots=True)
class SoakKind:
    """A kind of job. Its script runs for a number of `seconds` in the range, drawn by the plan, after `body`.

    `command` is Slurm's command that submits it. An array has `tasks` tasks. `state` is the state in Slurm's accounting
    in which it must end. `weight` is its share among the jobs.
    """

    name: str
    weight: float = 1.0
    options: tuple[str, ...] = ()
    seconds: tuple[int, int] = (4, 20)
    state: str = "COMPLETED"
    action: Action | None = None
    command: str = "sbatch"
    tasks: int = 1
    nodes: int = 1
    body: str = ""


STEP = """\
for try in $(seq 120); do
    found=$(srun --quiet hostname | sort -u | wc -l)
    [ "$found" = "$SLURM_JOB_NUM_NODES" ] && break
    sleep 1
done
say tasks $found
"""
"""Runs a step on each node of the job and writes how many there are. A step that fails is tried again, as users do."""

HOG = "head -c 400M /dev/zero | tail | wc -c\n"
"""Makes tail(1) allocate 400 MiB, because the input has no line end."""

LONG = (120, 120)
"""Seconds of a job whose user ends or requeues it before."""

KINDS = (
    SoakKind("batch", 6),
    SoakKind("array", 2, ("--array=1-3",), tasks=3),
    SoakKind("step", 1, body=STEP),
    SoakKind("gang", 2, ("--nodes=2",), nodes=2, body=STEP),
    SoakKind("srun", 1, command="srun"),
    SoakKind("salloc", 1, command="salloc"),
    SoakKind("large", 1.5, ("--cpus-per-task=3", "--mem=900")),
    SoakKind("tmp", 1, ("--tmp=600",)),
    SoakKind("nice", 1, ("--nice=100",)),
    SoakKind("linked", 0.5, ("--constraint=linked",)),
    SoakKind("full", 0.5, ("--constraint=full",)),
    SoakKind("no requeue", 1, ("--no-requeue",)),
    SoakKind("held", 1, ("--hold",), action=Action.RELEASE),
    SoakKind("cancel queued", 1, seconds=LONG, state="CANCELLED", action=Action.CANCEL_QUEUED),
    SoakKind("cancel created", 1, seconds=LONG, state="CANCELLED", action=Action.CANCEL_CREATED),
    SoakKind("cancel running", 1, seconds=LONG, state="CANCELLED", action=Action.CANCEL_RUNNING),
    SoakKind("requeued", 1, seconds=LONG, action=Action.REQUEUE),
    SoakKind("fails", 1, state="FAILED"),
    SoakKind("out of memory", 1, ("--mem=120",), state="OUT_OF_MEMORY", body=HOG),
    SoakKind("time limit", 0.4, ("--time=1",), seconds=(300, 300), state="TIMEOUT"),
    SoakKind("slurmd dies", 1, body="$HOME/.rootsh -p -c 'kill -9 $(pidof slurmd)'\n"),
)
NEWCOMER = SoakKind("newcomer", 0)
"""A job of a user whom nobody has looked up yet, submitted while the name service is lost."""

BY_NAME: Mapping[str, SoakKind] = {kind.name: kind for kind in (*KINDS, NEWCOMER)}


class Harm(StrEnum):
    """What an incident may do to a job that it hits. Everything else is a violation."""

    AGAIN = "again"  # the job runs once more
    END = "end"  # the job ends otherwise than it should, with a reason
    REFUSED = "refused"  # the job is not accepted


@dataclass(frozen=True, slots=True)
class SoakIncident:
    """A kind of incident. It lasts for a number of seconds in `pause`. It hits one VM only, or (`everywhere`) every job
    that is not over. `weight` is how often it comes in each round."""

    name: str
    pause: tuple[float, float] = (0.0, 15.0)
    harm: frozenset[Harm] = frozenset()
    everywhere: bool = True
    weight: int = 1


CONTROLLER_KILLED = SoakIncident("controller killed", weight=2)
"""The controller may be away at any time: nothing happens to a job but that it waits."""

INCIDENTS = (
    CONTROLLER_KILLED,
    SoakIncident("QEMU killed", (0.0, 0.0), frozenset({Harm.AGAIN, Harm.END}), everywhere=False, weight=3),
    # slurmctld forgets what it has not saved yet, and jobs cannot be submitted without it.
    SoakIncident("slurmctld killed", harm=frozenset({Harm.AGAIN, Harm.REFUSED})),
    SoakIncident("slurmctld stopped", (5.0, 25.0), frozenset({Harm.REFUSED})),
    SoakIncident("slurmdbd killed"),
    SoakIncident("mariadb killed"),
    SoakIncident("munged killed", harm=frozenset({Harm.REFUSED})),
    SoakIncident("NFS killed", (2.0, 20.0)),
    # A guest cannot write to its disk while the host's is full.
    SoakIncident("disk full", (5.0, 20.0), frozenset({Harm.AGAIN, Harm.END})),
    SoakIncident("names lost", (5.0, 20.0)),
    SoakIncident("memory short", (5.0, 20.0)),
)
INCIDENT_BY_NAME: Mapping[str, SoakIncident] = {kind.name: kind for kind in INCIDENTS}
