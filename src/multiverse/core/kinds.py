"""Which kind of clone a job's VMs are: as asked for, or else whatever will be a node first.

The Multiverse paper leaves a "mixed system" of full and instant clones to the future; this is one. A clone of
a template that is ready wins nearly always. It does not where the image cannot be forked, where its template is
broken or waits behind others for its pace, and where a template would have to be made for a single job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from multiverse.core.model import (
    Attempt,
    AttemptState,
    CloneKind,
    Depth,
    Host,
    Template,
    TemplateKey,
    TemplateState,
    VmState,
    World,
)
from multiverse.core.pacing import ARRIVALS_FADE, Policy, image_of, wait_for
from multiverse.core.placement import could_ever_fit
from multiverse.core.pool import fit_to_serve, spares
from multiverse.core.rows import Draft


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind, and why it was chosen (empty: it was asked for). `prepare`: its template is worth making for the jobs
    that come after, though this one does not wait for it."""

    kind: CloneKind
    why: str = ""
    prepare: bool = False


def choose(draft: Draft, attempt: Attempt, templates: Mapping[TemplateKey, Template | None],
           hosts: Mapping[str, Host], world: World, policy: Policy) -> Choice:  # fmt: skip
    """The kind for an attempt that is to be admitted now. `templates` are those that it could be forked from, on the
    hosts that fork its image, None where there is none."""
    asked = attempt.request.kind or policy.kind
    if asked is not CloneKind.AUTO:
        return Choice(asked)
    image = image_of(attempt, policy)
    boots = any(CloneKind.LINKED.value in host.abilities for host in hosts.values())
    if not boots:
        return Choice(CloneKind.INSTANT, "no host boots clones")
    if not templates:
        return Choice(CloneKind.LINKED, "no host can fork its image")
    parents = {which.host: which.size for which in templates}
    if not could_ever_fit(attempt.request.size, attempt.request.nodes, parents, hosts, policy):
        return Choice(CloneKind.LINKED, "no host could hold the template beside it")
    if policy.pools and any(
        vm.state is VmState.PARKED and vm.template in templates and fit_to_serve(vm, draft, world, policy)
        for vm in spares(draft, Depth.PARKED)
    ):
        return Choice(CloneKind.INSTANT, "one is parked")
    forecast = world.forecast
    fork, boot = policy.takes(image, CloneKind.INSTANT, forecast), policy.takes(image, CloneKind.LINKED, forecast)
    rows = [row for row in templates.values() if row is not None]
    ready = [row.host for row in rows if row.state is TemplateState.READY]
    if ready:
        return _of_ready(image, ready, fork, boot, draft, policy)
    return _without(attempt, image, rows, fork, boot, draft, world, policy)


def _of_ready(image: str, ready: list[str], fork: float, boot: float, draft: Draft, policy: Policy) -> Choice:
    kind = CloneKind.INSTANT
    wait = min(
        wait_for((name, image, kind), draft.paced, draft.now, policy)
        + draft.waiting[name, image, kind] * policy.interval(kind)
        for name in ready
    )
    if wait + fork > boot:
        return Choice(CloneKind.LINKED, f"clones queued on its template take {wait:.1f} s more, a boot {boot:.1f} s")
    return Choice(CloneKind.INSTANT, f"its template is ready: {fork + wait:.1f} s, a boot {boot:.1f} s")


def _others(draft: Draft, attempt: Attempt, image: str, world: World, policy: Policy) -> float:
    """How many VMs of the image others were given of late, or want now: those that wait, and are not held, and those
    that this very pass has admitted, of which the forecast does not know yet."""
    jobs = world.scheduler.value.jobs if world.scheduler else {}

    def wanted(one: Attempt) -> int:
        if one.state is AttemptState.QUEUED:
            wants = (job := jobs.get(one.job.job_id)) is not None and job.eligible
        else:
            wants = one.state is AttemptState.CLAIMED and one.since >= draft.now
        return one.request.nodes if wants else 0

    if draft.wanted is None:  # once for all who ask in this pass: who is admitted meanwhile counts as before
        draft.wanted = Counter()
        for one in draft.attempts.values():
            draft.wanted[image_of(one, policy)] += wanted(one)
    now = draft.wanted[image] - wanted(attempt)
    return world.forecast.arrivals.get(image, 0.0) * ARRIVALS_FADE + now


def _without(attempt: Attempt, image: str, rows: list[Template], fork: float, boot: float, draft: Draft,
             world: World, policy: Policy) -> Choice:  # fmt: skip
    """No template is ready."""
    building = [row for row in rows if row.state is TemplateState.BUILDING]
    if not building:
        worth = _others(draft, attempt, image, world, policy) >= 1
        broken = next((row for row in rows if row.state is TemplateState.BROKEN), None)
        if broken:
            return Choice(CloneKind.LINKED, f"its template is broken on {broken.host}", prepare=worth)
        if not worth:
            return Choice(CloneKind.LINKED, "no other job wants this image of late: not worth a template")
    # What is overdue is expected to take as long again as it is.
    waits = [abs(row.since + policy.template_seconds - draft.now) for row in building]
    wait = min(waits, default=policy.template_seconds)
    if wait + fork < boot:
        return Choice(CloneKind.INSTANT, f"its template is ready in {wait:.0f} s, sooner than a boot of {boot:.1f} s")
    return Choice(CloneKind.LINKED, f"a boot takes {boot:.1f} s, its template {wait:.0f} s more", prepare=not building)
