"""What keeps a job from being admitted whatever is free: that no host could ever hold it, or an earlier run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multiverse.core.free import ByHost
from multiverse.core.model import Attempt, CloneKind, Reason, Size, Vm, VmState, Why, World
from multiverse.core.provisioning.capacity import every_host
from multiverse.core.provisioning.clones import Way, unable_to_make, ways_now, ways_to_make
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.draining import avoided_hosts, drained_hosts
from multiverse.core.provisioning.largest import largest_on
from multiverse.core.provisioning.leasing import fits_on_leases
from multiverse.core.provisioning.templates import could_hold
from multiverse.core.runs import may_hold_earlier_run, node_without_record
from multiverse.core.state import State


def why_unfit(context: Context, attempt: Attempt) -> tuple[Reason | None, bool]:
    """Why none of the hosts that take new VMs, have the image, and make such clones of it, could hold the job, were
    they empty (None: one could), and whether hosts may yet: those that are drained, those that cannot make such clones
    now, those that the image can still come to, those that can be leased, and those out of reach or fenced, of which
    nobody knows what they could hold."""
    if _fits_now(context, attempt):
        return None, True
    if context.avoided and _fits_now(context.with_avoided(), attempt):
        return Why.ALL_AVOIDED(*avoided_hosts(context, context.image_of(attempt))), True
    if context.policy.leases and fits_on_leases(context, attempt):
        return Why.TO_BE_LEASED(), True
    resumed = context.with_drained()
    if len(resumed.hosts) > len(context.hosts) and _fits_now(resumed, attempt):
        return Why.ALL_DRAINED(*drained_hosts(context)), True
    return _why_unfit(resumed, attempt)


def _fits_now(context: Context, attempt: Attempt) -> bool:
    ways = ways_to_make(context, attempt)
    return _fits_one_way(context, attempt, ways_now(context, attempt, ways) or ways)


def _why_unfit(context: Context, attempt: Attempt) -> tuple[Reason, bool]:
    image, hosts, state = context.image_of(attempt), context.hosts, context.state
    ways = ways_to_make(context, attempt)
    now = ways_now(context, attempt, ways) or ways
    kind, templates = ways[0]
    unable = unable_to_make(image, ways) if _fits_one_way(context, attempt, ways) else []
    without = every_host(context, context.policy.base, lambda host: image not in host.images)
    anywhere = ByHost((*templates.parts, *without.parts))
    hope = bool(unable) or could_hold(context, attempt, kind, anywhere)
    if not hosts:
        why = Why.NO_HOST()
    elif hope and not templates:
        why = Why.NO_IMAGE(image=image)
    else:
        lacking = Why.WITHOUT_IMAGE(image=image, hosts=without) if hope and without else None
        why = _largest(context, attempt, *now[0]).also(*unable, lacking)
    away = sorted(name for name, known in state.hosts.items() if name not in hosts and known.is_member)
    return why.also(Why.AWAY_NOW(hosts=away) if away else None), hope or bool(away) or not hosts


def _fits_one_way(context: Context, attempt: Attempt, ways: Sequence[Way]) -> bool:
    return any(could_hold(context, attempt, kind, sizes) for kind, sizes in ways)


def _largest(context: Context, attempt: Attempt, kind: CloneKind, templates: ByHost[Size]) -> Reason:
    node, nodes, image = attempt.request.size, attempt.request.nodes, context.image_of(attempt)
    parts = (templates or every_host(context, context.policy.base)).parts
    most = (largest_on(part.kind.host, image, context.policy, kind) for part in parts if part)
    fit = max(most, key=lambda size: (size.memory, size.cpus))
    return Why.TOO_LARGE(vms=nodes, node=str(node), per_host=attempt.request.per_host, fit=str(fit))


def why_earlier_run(state: State, world: World, attempt: Attempt, orphaned: Mapping[str, Vm]) -> Reason | None:
    """Why an earlier run of the same job may still go on, if it may. `orphaned` are VMs that no record explained, by
    their jobs."""
    mine = (vm for other in state.attempts_of_job(attempt.job.job_id) for vm in state.vms_of(other))
    vm = next((vm for vm in mine if may_hold_earlier_run(state, vm, attempt)), None)
    if vm is not None and vm.state is VmState.LOST:
        return Why.EARLIER_RUN_AWAY(vm=vm.name, host=vm.host)
    if vm is not None:
        return Why.EARLIER_RUN_ENDS(vm=vm.name)
    orphan = orphaned.get(attempt.job.job_id)
    if orphan:
        return Why.EARLIER_RUN_FOUND(vm=orphan.name)
    unknown = node_without_record(state, world, attempt)
    return Why.EARLIER_RUN_UNKNOWN(vm=unknown) if unknown else None
