"""Why jobs wait, and what would start at once, as far as who asks may be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from multiverse import api
from multiverse.bundles.contract import UNKNOWN_WORDS, Privacy, SchedulerWords
from multiverse.config import folded
from multiverse.controller.loop import Controller
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.explanation import (
    Explanation,
    HostVerdict,
    explain,
    explain_ended,
    explain_new,
    immediate_capacity,
    is_being_evicted,
    sizes_to_show,
    usage,
    what_if,
)
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import Attempt, AttemptState, Job, Request
from multiverse.core.model.reason import Reason, Why, text_of
from multiverse.core.policy import Policy
from multiverse.ports import Clock
from multiverse.service.convert import job_evictions, size_view
from multiverse.store import Store


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks."""

    uid: int | None = None  # a user, who may see their own jobs only; None: an operator, who may see all
    others: bool = True  # other users' jobs may be named to them
    hosts: bool = True  # hosts may be named to them

    @classmethod
    def of(cls, uid: int, privacy: Privacy) -> Viewer:
        """A user with the scheduler's permissions."""
        return cls(uid, privacy.others, privacy.hosts)

    def may_see(self, uid: int) -> bool:
        return self.uid is None or self.uid == uid

    def hidden(self, reason: Reason, own: str) -> Reason:
        """The reason without ids of jobs but their `own`, and without names of hosts, where these are hidden."""
        return reason.hidden(own, others=self.others, hosts=self.hosts)

    def teller(self, own: str) -> Callable[[Reason | None], str]:
        """Words reasons of that job as far as the viewer may be told of them."""
        return lambda reason: text_of(reason and self.hidden(reason, own))


OPERATOR = Viewer()


TASK_IDS = "a task of an array has the id that squeue shows, such as 123_4"
TASKS = 20  # the most tasks of an array in one answer
_SEARCHED = 1000  # the latest attempts of an array that are searched for the latest of each task


class Explanations:
    """Answers from the controller's state between two passes."""

    def __init__(
        self, controller: Controller, store: Store, clock: Clock, words: SchedulerWords = UNKNOWN_WORDS
    ) -> None:
        self._controller, self._store, self._clock, self._words = controller, store, clock, words

    def of_job(self, job: str, viewer: Viewer) -> api.ExplanationsView:
        """What is to be said of a job, or of the tasks of an array, that the viewer may see. Empty if there is none."""
        context = self._controller.context()
        if context.world.scheduler is not None:
            job = context.scheduler.own_id(job)
        shown = [one for one in self._latest(job) if viewer.may_see(one.uid)]
        new = [one for one in self._without_attempt(job, context, shown) if viewer.may_see(one.uid)]
        views, asked = [], set[Request]()
        for attempt in shown[:TASKS]:
            found = self._explain(context, attempt)
            if attempt.request in asked:  # tasks of one array: it is the same for all
                found = replace(found, hosts=())
            asked.add(attempt.request)
            views.append(_view(attempt, found, viewer, evicted=is_being_evicted(context.state, attempt)))
        views += [_view_of_new(one, context.policy, viewer) for one in new[: TASKS - len(views)]]
        return api.ExplanationsView(tuple(views), len(shown) + len(new) - len(views))

    def _latest(self, job: str) -> list[Attempt]:
        """The latest attempt of the job, or of each task; live ones come first."""
        latest: dict[str, Attempt] = {}
        for attempt in self._store.attempts(job_id=job, limit=_SEARCHED):
            latest.setdefault(attempt.job.job_id, attempt)
        live = self._controller.state.attempts
        return sorted((live.get(one.id, one) for one in latest.values()), key=lambda one: (one.id not in live, one.id))

    def _without_attempt(self, job: str, context: Context, known: Sequence[Attempt]) -> list[Job]:
        if context.world.scheduler is None:
            return []
        jobs, served = context.scheduler.jobs, {one.job.job_id for one in known}
        found = [jobs[job]] if job in jobs else [one for one in jobs.values() if one.array == job]
        return [one for one in found if one.ref.job_id not in served]

    def _explain(self, context: Context, attempt: Attempt) -> Explanation:
        if attempt.id in context.state.attempts:
            found = explain(context, attempt, self._clock.now())
            kept = _kept_by_the_scheduler(context, attempt)
            todo = found.todo or (self._words.advise(kept) if kept else "")
            sentences = (*found.sentences, *self._lost_run(attempt))
            return replace(found, sentences=tuple(map(self._explained, sentences)), todo=todo)
        entries = self._store.journal(attempts=[attempt.id])
        return explain_ended(attempt, self._clock.wall() - entries[-1].wall if entries else 0.0)

    def _lost_run(self, attempt: Attempt) -> list[Reason]:
        """Of a job that runs: why its run before this one was lost, if it was queued again because of its VM."""
        if attempt.state is not AttemptState.ALLOCATED or not attempt.job.restarts:
            return []
        earlier = self._store.attempts(job_id=attempt.job.job_id, limit=TASKS)
        before = next((one for one in earlier if one.job.restarts == attempt.job.restarts - 1), None)
        why = before.reason if before is not None and before.outcome == "requeued" else None
        return [Why.BEGAN_ANEW(why.because[0])] if why and why.kind is Why.REQUEUED and why.because else []

    def _explained(self, reason: Reason) -> Reason:
        """The same with what the scheduler's own words mean."""
        word = dict(reason.figures).get("word")
        meaning = self._words.say(str(word)) if word and reason.kind in (Why.IS_HELD, Why.SLURM_KEEPS) else ""
        more = (("meaning", meaning),) if meaning else ()
        return replace(reason, figures=(*reason.figures, *more), because=tuple(map(self._explained, reason.because)))

    # --- what would start ----------------------------------------------------------------------------

    def capacity(self, viewer: Viewer) -> api.CapacityView:
        """Which sizes would start at once. Raises `Refused` while the scheduler or all hosts are unknown."""
        context = self._known()
        used, state = usage(context), context.state
        blocking = state.attempts.get(state.blocking) if state.blocking is not None else None
        own = blocking is not None and (viewer.others or viewer.may_see(blocking.uid))
        return api.CapacityView(
            image=context.policy.image,
            usage=api.CapacityUsageView(
                used.hosts,
                used.closed_hosts,
                *map(size_view, (used.total, used.jobs, used.spares, used.templates, used.free, used.closed)),
            ),
            sizes=tuple(
                api.StartableView(one.size.cpus, one.size.memory, one.size.disk, one.now, one.with_template)
                for one in (immediate_capacity(context, size) for size in sizes_to_show(context))
            ),
            waiting=len(state.queue.candidates) + len(state.queue.unfit),
            blocked=blocking is not None,
            blocked_by=blocking.job.job_id if blocking is not None and own else "",
        )

    def trial(self, asked: api.TrialRequest, viewer: Viewer) -> api.TrialView:
        """What would become of a job. Raises `Refused` as `capacity` does."""
        size = Size(asked.cpus, asked.memory, asked.disk)
        request = Request(asked.nodes, size, asked.image, CloneKind(asked.kind) if asked.kind else None)
        found = what_if(self._known(), request, asked.limit, self._clock.now())
        return api.TrialView(
            starts=found.starts,
            never=found.never,
            why=viewer.teller("")(found.why),
            hosts=folded(found.hosts) if viewer.hosts else "",
            ahead=found.ahead,
            behind=found.behind if viewer.others else "",
            expected=_time(found.expected),
            alone=_time(found.alone),
            groups=tuple(_group(one, viewer) for one in found.verdicts),
        )

    def _known(self) -> Context:
        context = self._controller.context()
        if context.world.scheduler is None or not context.world.sees_hosts:
            raise Refused(
                "nobody can tell while the scheduler, or all hosts, are out of reach",
                hint="ask again later; operators see what to do: multiverse status",
            )
        return context


def _view(attempt: Attempt, found: Explanation, viewer: Viewer, *, evicted: bool) -> api.ExplanationView:
    own = attempt.job.job_id
    reasons = _reasons(found.sentences, viewer, own)
    return api.ExplanationView(
        job_id=own,
        name=attempt.job_name,
        uid=attempt.uid,
        attempt=attempt.id,
        state=str(attempt.state),
        waiting_since=float(attempt.job.submitted) if attempt.state is AttemptState.QUEUED else None,
        short=viewer.teller(own)(found.short),
        text=" ".join(one.text for one in reasons),
        todo=found.todo,
        ahead=found.ahead,
        behind=found.behind if viewer.others else "",
        expected=_time(found.expected),
        hosts=tuple(_group(one, viewer) for one in found.hosts),
        reasons=reasons,
        evictions=job_evictions(attempt, evicted, viewer.teller(own), hosts=viewer.hosts),
    )


def _view_of_new(job: Job, policy: Policy, viewer: Viewer) -> api.ExplanationView:
    found, own = explain_new(job, policy), job.ref.job_id
    reasons = _reasons(found.sentences, viewer, own)
    text = " ".join(one.text for one in reasons)
    shown = (own, job.name, job.uid, None, str(job.state), None, "", text, found.todo, 0, "", None)
    return api.ExplanationView(*shown, reasons=reasons)


def _reasons(found: Sequence[Reason], viewer: Viewer, own: str) -> tuple[api.ReasonView, ...]:
    """These reasons, as far as the viewer may be told of them, as values of the API."""
    return tuple(_reason(viewer.hidden(one, own)) for one in found)


def _reason(one: Reason) -> api.ReasonView:
    return api.ReasonView(one.kind, str(one), dict(one.figures), one.jobs, one.hosts, tuple(map(_reason, one.because)))


def _group(one: HostVerdict, viewer: Viewer) -> api.HostGroupView:
    hosts = folded(one.hosts) if viewer.hosts else ""
    return api.HostGroupView(hosts, len(one.hosts), one.fits, viewer.teller("")(one.why), one.why.kind)


def _time(at: float) -> float | None:
    return None if at == inf else at


def _kept_by_the_scheduler(context: Context, attempt: Attempt) -> Job | None:
    """The job of the attempt, if the scheduler itself keeps it waiting."""
    job = context.job_of(attempt)
    if job is None or attempt.state is not AttemptState.QUEUED:
        return None
    return None if job.eligible and not attempt.waits_for_delay(job) else job
