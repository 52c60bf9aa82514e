"""The outcome of a simulation, and how its journal is shown to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from multiverse.core.model.job import Eviction
from multiverse.store import Entry
from multiverse_lab.simulation.faults import Call, PlannedFault
from multiverse_lab.simulation.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """`violations` is empty if all promises were kept. `faults` are those that calls really had."""

    scenario: Scenario
    seconds: float
    crash_count: int
    commits: int
    faults: tuple[PlannedFault, ...]
    results: dict[str, str]  # of each job, by the world's own number and the job id
    journal: list[str]
    events: list[tuple[float, str]]  # the journal and what happened outside the controller, by virtual time
    violations: list[str]
    calls: tuple[Call, ...] = ()
    entries: tuple[Entry, ...] = ()
    told: tuple[str, ...] = ()  # what the users of jobs were told, in the order of the jobs
    runs: tuple[tuple[str, float, float], ...] = ()  # of scripts: the job's name, begin and end
    evictions: Mapping[str, tuple[Eviction, ...]] = field(default_factory=dict)  # of each job, by its id
    starts_kept: int = 0  # how often the first job in the queue started by the time that its user was told
    transitions: Counter[str] = field(default_factory=Counter)  # how often each one happened, by `transition_name`

    def fault_counts(self) -> Counter[str]:
        """How often each kind of fault happened, by "port.method: kind"."""
        return Counter(f"{fault.call.partition(' ')[0]}: {fault.kind}" for fault in self.faults)

    def story(self, lines: int = 0) -> str:
        """All events in order, or the last `lines` of them, and then the violations."""
        events = [f"{at:9.3f}  {text}" for at, text in self.events]
        if lines and len(events) > lines:
            events = [f"({len(events) - lines} lines before)", *events[-lines:]]
        violations = [f"VIOLATION: {text}" for text in self.violations] or ["all promises were kept"]
        head = f"seed {self.scenario.seed}: {self.seconds:.1f} s of virtual time, {self.commits} commits, "
        head += f"{len(self.faults)} faults, {self.crash_count} crashes of the controller"
        return "\n".join([head, *events, *violations])


def transition_name(kind: str, source: object, event: object, target: object) -> str:
    """How a transition of a table is called in an outcome."""
    return f"{kind}: {source or 'nothing'} - {event} -> {target}"


def journal_line(entry: Entry) -> str:
    """A journal entry as one line of a story."""
    who = f"{entry.kind} {entry.id}"
    if entry.kind == "vm" and entry.attempt is not None:
        who += f" of attempt {entry.attempt}"
    if entry.target is None:
        return f"{who}: effect {entry.event} {f'failed: {entry.reason}' if entry.reason else 'ended'}"
    change = entry.target if entry.source in (None, entry.target) else f"{entry.source} -> {entry.target}"
    return f"{who}: {change} ({entry.event}{f', {entry.reason}' if entry.reason else ''})"
