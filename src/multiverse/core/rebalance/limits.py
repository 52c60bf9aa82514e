"""How much may be evicted at a time."""

from __future__ import annotations

from multiverse.core.context import Context
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import SAVING
from multiverse.core.model.vm import MOVING_STATES

_HOUR, _MINUTE = 3600.0, 60.0  # seconds in which evictions of a job, and bytes, are counted


class EvictionLimits:
    """What may still be evicted now. Evictions that are under way count, whoever asked for them."""

    def __init__(self, context: Context) -> None:
        state, policy = context.state, context.policy
        self._policy, self._now = policy, context.now
        going = len(state.vms_in(*MOVING_STATES)) + len(state.saved_in(*SAVING))
        self.left = max(0, policy.evict_at_once - going)  # so many jobs more
        self._sent = 0
        if policy.evict_rate:
            recent = (one for attempt in state.evicted() for one in attempt.evictions if self._within(one.at, _MINUTE))
            self._sent = sum(one.memory for one in recent)

    def why_held(self, step: Step) -> Reason | None:
        """Why a step does not begin now. The end of a run sends nothing, and counts only by job. A job that would
        be lost otherwise is evicted however often it was."""
        policy, memory = self._policy, step.memory
        often = None if step.method is Method.LEASE_END else self.why_too_often(step.attempt)
        if (why := often) or step.ends:
            return why
        if not self.left:
            return Why.EVICTIONS_AT_ONCE(limit=policy.evict_at_once)
        if policy.evict_rate and self._sent and self._sent + memory > policy.evict_rate * _MINUTE:
            return Why.EVICTION_RATE(sent=self._sent, rate=policy.evict_rate)
        return None

    def why_too_often(self, attempt: Attempt) -> Reason | None:
        """Why a job is not evicted again before an hour is over."""
        times = sum(self._within(one.at, _HOUR) for one in attempt.evictions)
        return Why.EVICTED_OFTEN(times=times) if times >= self._policy.evict_per_job else None

    def take(self, step: Step) -> None:
        if not step.ends:
            self.left -= 1
            self._sent += step.memory

    def _within(self, at: float, seconds: float) -> bool:
        return self._now - at < seconds
