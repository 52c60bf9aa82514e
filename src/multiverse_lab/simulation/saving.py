"""Operators who have jobs saved and resumed, and what must hold of saved jobs at each commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from multiverse.core.model.job import AttemptState, JobRef, JobState
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import WAITS_FOR_RUN, SavedState
from multiverse.core.rows import Rows
from multiverse.core.transition import Command
from multiverse_lab.simulation.jobs import JobRecord
from multiverse_lab.simulation.promises import is_disturbed
from multiverse_lab.simulation.scenario import Scenario
from multiverse_lab.simulation.world import SimulatedWorld

SAVE_ACTIONS = ("save", "save_held", "resume_saved")

PATIENCE = 120.0
"""Seconds that an operator tries to have a job saved: it may not run yet, or its host may be out of reach."""

PAUSE = 0.5  # seconds between two looks; twice as long after each try
LONGEST = 8.0  # seconds between two tries
DECISION = 30.0  # seconds between two looks at jobs that cannot go on
DAMAGED = Why.SAVED_DAMAGED


class Savers:
    """Give the commands again until the rows show that they were carried out: a controller that crashes loses them."""

    def __init__(self, give: Callable[[Command], None], rows: Callable[[], Rows], log: Callable[[str], None]) -> None:
        self._give, self._rows, self._log = give, rows, log
        self._tasks: set[asyncio.Task[None]] = set()

    def act(self, kind: str, job: JobRecord) -> None:
        self._start(self._resume(job) if kind == "resume_saved" else self._save(job, hold=kind == "save_held"))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def mend(self) -> None:
        """From now on let each job go on whose files were lost: with those that were put back, or else anew."""
        self._start(self._mend())

    async def _mend(self) -> None:
        tried = set[int]()
        while True:
            damaged = [one for one in self._rows().saved.values() if one.reason and one.reason.kind is DAMAGED]
            for saved in damaged:
                if saved.state is SavedState.STORED and saved.hold:
                    self._give(Command("resume_saved", job=saved.job.job_id, anew=saved.id in tried))
                    tried.add(saved.id)
            await asyncio.sleep(DECISION)

    async def _save(self, job: JobRecord, *, hold: bool) -> None:
        """A job that waits is tried once: each command costs a pass of the controller."""
        latest, until, tries = max(self._rows().saved, default=0), _now() + PATIENCE, 0
        while job.state is not JobState.ENDED and _now() < until:
            rows = self._rows()
            if any(one.id > latest and one.job.job_id == job.job_id for one in rows.saved.values()):
                return
            waits = job.state is JobState.PENDING
            if not waits or not tries:
                self._give(Command("save", job=job.job_id, hold=hold))
                tries += 1
            await asyncio.sleep(PAUSE if waits else min(PAUSE * 2**tries, LONGEST))

    async def _resume(self, job: JobRecord) -> None:
        """Whatever became of the save, the job is not to be left held."""
        self._log(f"operator: resumes {job.job_id} whenever it is saved and held")
        while job.state is not JobState.ENDED:
            saved = [one for one in self._rows().saved.values() if one.job.job_id == job.job_id]
            if any(one.hold and one.state in WAITS_FOR_RUN for one in saved):
                self._give(Command("resume_saved", job=job.job_id))
            elif job.held and job.state is JobState.PENDING and not saved:
                job.held = False  # as its user, when nothing of it is saved any more
            await asyncio.sleep(10 * PAUSE)


class SaveWatch:
    """Checks at each commit that no job begins anew that is saved, and that a saved job takes nothing of a host; and at
    the end that all work was done once."""

    def __init__(self, scenario: Scenario, world: SimulatedWorld) -> None:
        self._world = world
        kinds = {action.kind for arrival in scenario.arrivals for action in arrival.actions}
        self._disturbed = is_disturbed(scenario) or bool(scenario.crashes) or "requeue" in kinds
        self._broken: set[str] = set()

    def look(self, rows: Rows) -> None:
        """The rows of a commit."""
        if not rows.saved:
            return
        for saved in rows.saved.values():
            if saved.state not in WAITS_FOR_RUN:
                continue
            for attempt in rows.attempts.values():
                if attempt.state is AttemptState.CLAIMED and saved.is_for(attempt.job):
                    vms = [vm for vm in rows.vms.values() if vm.attempt == attempt.id and not vm.leaving]
                    if any(vm.saved not in _names_for(rows, attempt.job) for vm in vms):
                        self._broken.add(f"job {attempt.job.job_id} begins anew though it is saved as {saved.name}")
        for claim in rows.claims:
            owner = rows.saved.get(claim.owner.id) if claim.owner.kind == "saved" else None
            if owner is not None and not owner.kept:
                self._broken.add(f"{claim.owner}, a saved job, claims memory of {claim.domain}")

    def violations(self) -> list[str]:
        return [*sorted(self._broken), *self._world.cluster.ledger.lost_work(disturbed=self._disturbed)]


def _names_for(rows: Rows, job: JobRef) -> set[str]:
    return {name for one in rows.saved.values() if one.is_for(job) for name in one.names}


def _now() -> float:
    return asyncio.get_running_loop().time()
