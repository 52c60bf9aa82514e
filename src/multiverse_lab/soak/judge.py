"""The verdict on each job: what it wrote, what Slurm and the controller say, and what had happened to it must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from multiverse_lab.soak.kinds import STEP, Action, Harm, SoakIncident, SoakKind
from multiverse_lab.soak.record import RecordedRun

SETTLE = 60.0
"""Seconds after an incident in which it may still show its effect: Slurm's longest timeout for a node or a message."""

SLACK = 30.0
"""Seconds for which a job may still write after its end in Slurm: it gets KillWait to end, and clocks differ."""

OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
"""Slurm's words for a job that has ended."""


@dataclass(frozen=True, slots=True)
class HappenedIncident:
    """An incident: from `began` to `mended`, when the component worked again (Unix times). `vm` is the VM that it hit,
    if it hit one only."""

    kind: SoakIncident
    began: float
    mended: float
    vm: str = ""


@dataclass(frozen=True, slots=True)
class JudgedAttempt:
    """An attempt as the controller lists it."""

    state: str
    reason: str
    vms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """All that is known about a job, or a task of an array, at the end of the test. Unix times.

    `refusal` is the message with which it was not accepted. `acted` is when its user did what the kind says. `state`
    and `ended` are those of Slurm's accounting (empty: the job is not there). `whole` says whether its output has its
    last line. `stopped` is when the test cancelled all jobs, if it was interrupted.
    """

    name: str
    kind: SoakKind
    submitted: float
    job_id: str = ""
    refusal: str = ""
    acted: float | None = None
    state: str = ""
    exit_code: str = ""
    ended: float | None = None
    attempts: tuple[JudgedAttempt, ...] = ()
    runs: tuple[RecordedRun, ...] = ()
    damaged: int = 0
    whole: bool = False
    stopped: float | None = None


class Ending(StrEnum):
    """What became of a job."""

    EXPECTED = "as expected"
    AGAIN = "ran again"  # as expected, but it ran more than once
    EXPLAINED = "explained"  # otherwise than expected, by an incident and with a reason
    REFUSED = "refused"
    STOPPED = "stopped"  # the test was interrupted
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a job, which incidents may have hit it, and what contradicts the promises."""

    facts: JobFacts
    ending: Ending
    hits: tuple[HappenedIncident, ...]
    violations: tuple[str, ...]

    @property
    def explanation(self) -> str:
        """Why a job was refused, ended otherwise, or ran again, in one line."""
        facts = self.facts
        if self.ending is Ending.REFUSED:
            return f"refused: {facts.refusal}"
        reasons = [attempt.reason for attempt in facts.attempts if attempt.state != "done"] or [_reason(facts)]
        return f"{facts.state}, {len(facts.runs)} runs: {'; '.join(dict.fromkeys(reasons))}"


def judge(facts: JobFacts, incidents: Sequence[HappenedIncident]) -> Verdict:
    hits = tuple(one for one in incidents if _hit(facts, one))
    harms = frozenset(harm for one in hits for harm in one.kind.harm)
    if not facts.state and facts.refusal:
        wrong = () if Harm.REFUSED in harms else (f"was refused: {facts.refusal}",)
        return Verdict(facts, Ending.WRONG if wrong else Ending.REFUSED, hits, wrong)
    violations = (*_wrong_runs(facts, harms), *_wrong_end(facts, harms))
    return Verdict(facts, Ending.WRONG if violations else _ending(facts), hits, violations)


def _hit(facts: JobFacts, one: HappenedIncident) -> bool:
    if not one.kind.everywhere:
        return any(one.vm in attempt.vms for attempt in facts.attempts)
    return one.began <= (facts.ended or float("inf")) and facts.submitted <= one.mended + SETTLE


def _ending(facts: JobFacts) -> Ending:
    if _was_stopped(facts):
        return Ending.STOPPED
    if facts.state != _expected(facts):
        return Ending.EXPLAINED
    return Ending.AGAIN if len(facts.runs) > _runs_wanted(facts) else Ending.EXPECTED


def _expected(facts: JobFacts) -> str:
    """A job that its user did not get to cancel completes."""
    cancelled = facts.kind.state == "CANCELLED"
    return "COMPLETED" if cancelled and facts.acted is None else facts.kind.state


def _runs_wanted(facts: JobFacts) -> int:
    return 2 if facts.kind.action is Action.REQUEUE and facts.acted is not None else 1


def _was_stopped(facts: JobFacts) -> bool:
    if facts.stopped is None or facts.state != "CANCELLED":
        return False
    return facts.ended is None or facts.ended >= facts.stopped - 1


def _wrong_runs(facts: JobFacts, harms: frozenset[Harm]) -> Iterator[str]:
    """What is wrong with the runs: two at once, one too many, or one after the end."""
    if facts.damaged:
        yield f"{facts.damaged} lines of its record make no sense"
    for one, other in zip(facts.runs, facts.runs[1:], strict=False):
        if other.began < one.last:
            yield f"ran twice at the same time, on {one.node} and on {other.node}"
    most = _runs_wanted(facts) if Harm.AGAIN not in harms else max(len(facts.attempts), 1)
    if len(facts.runs) > most:
        yield f"ran {len(facts.runs)} times, where {most} is explained"
    for attempt in facts.attempts[:-1]:
        if not attempt.reason:
            yield f"an attempt is {attempt.state} without a reason"
    if facts.ended is not None and facts.runs and facts.runs[-1].last > facts.ended + SLACK:
        yield f"went on for {facts.runs[-1].last - facts.ended:.0f} s after its end"


def _wrong_end(facts: JobFacts, harms: frozenset[Harm]) -> Iterator[str]:
    """What is wrong with the job's end: another one than expected, or one that its output contradicts."""
    expected = _expected(facts)
    if not facts.state:
        yield "was accepted, and Slurm does not know it"
    elif facts.state not in OVER:
        yield f"is still {facts.state}: {_reason(facts) or 'no reason is given'}"
    elif _was_stopped(facts):
        return
    elif facts.state == expected:
        yield from _contradicted(facts)
    elif Harm.END not in harms:
        yield f"is {facts.state} {facts.exit_code}, not {expected}: {_reason(facts) or 'no reason is given'}"
    elif facts.state != "NODE_FAIL" and not _reason(facts):
        yield f"is {facts.state}, not {expected}, without a reason"


def _reason(facts: JobFacts) -> str:
    return facts.attempts[-1].reason if facts.attempts else ""


def _contradicted(facts: JobFacts) -> Iterator[str]:
    """What the job wrote that does not agree with the state in which it should end, and has ended."""
    last = facts.runs[-1] if facts.runs else None
    if facts.state in ("COMPLETED", "FAILED", "OUT_OF_MEMORY"):
        if last is None or not last.ended:
            yield f"is {facts.state}, but {'did not run' if last is None else 'its script did not end'}"
        elif not facts.whole:
            yield "its output is not whole"
        if last is not None and facts.kind.body == STEP and last.nodes != facts.kind.nodes:
            yield f"its step ran on {last.nodes} nodes, not on {facts.kind.nodes}"
    elif last is not None and last.ended:
        yield f"is {facts.state}, but its script came to its end"
    if facts.state == "FAILED" and facts.exit_code != "3:0":
        yield f"exited with {facts.exit_code}, not 3:0"
