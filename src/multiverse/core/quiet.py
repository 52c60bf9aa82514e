"""Whether an observation of hosts can wait for a pass that is made anyway: it moves no row, and nobody waits for it.

Each host is observed at least every `poll` seconds, and its load differs each time. With a thousand hosts a pass for
each such observation would follow another without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from multiverse.core.model.host import HostState, HypervisorView
from multiverse.core.model.vm import TemplateSeen, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen
from multiverse.core.policy import Policy
from multiverse.core.state import State


def can_wait(told: Observation | None, now: Seen[HypervisorView] | None) -> bool:
    """Whether an observation of a source that is not among `expected_sources` needs no pass of its own. `told` is what
    the last pass was told."""
    if told is None or told.latest is None or now is None:  # it was, or is, unknown
        return False
    return _shows_the_same(told.latest.value, now.value)


def expected_sources(state: State, policy: Policy) -> Collection[str] | None:
    """The sources of which something waits for what they show. None: all, because something waits for what hosts have
    free, or for any of them. It holds until the next pass."""
    if not state.queue.is_idle or state.drains or state.leases or state.saved or policy.pools:
        return None
    if state.compared.unexplained or state.compared.stray or state.compared.silent:
        return None
    if state.hosts_in(HostState.SILENT, HostState.FENCING, HostState.FENCED):
        return None
    if state.count_vms(VmState.ASLEEP, VmState.DELAYED):
        return None
    attempts = [state.attempts[id_] for id_ in state.dirty.attempts | state.dirty.unread if id_ in state.attempts]
    vms = [state.vms[id_] for id_ in state.dirty.vms if id_ in state.vms]
    vms += (vm for attempt in attempts for vm in state.vms_of(attempt))
    templates = (state.templates[id_] for id_ in state.dirty.templates if id_ in state.templates)
    return {*(place.source for vm in vms for place in vm.places), *(template.source for template in templates)}


def _lasting(kind: Any, *changing: str) -> Callable[[object], object]:
    return attrgetter(*(one.name for one in fields(kind) if one.name not in changing))


_OF_VM = _lasting(VmSeen, "cpu_s", "private", "shared")
_OF_TEMPLATE = _lasting(TemplateSeen, "held")


def _shows_the_same(before: HypervisorView, after: HypervisorView) -> bool:
    """Whether nothing differs but what is measured. Of frozen processes it depends on rows what is done."""
    if after is before:
        return True
    if after.saved != before.saved or any(vm.frozen or vm.freezing for vm in after.vms.values()):
        return False
    hosts = after.hosts.keys() == before.hosts.keys() and all(
        host is (old := before.hosts[name]) or host.lasts_as(old) for name, host in after.hosts.items()
    )
    return hosts and _same(before.vms, after.vms, _OF_VM) and _same(before.templates, after.templates, _OF_TEMPLATE)


def _same(before: Mapping[Any, object], after: Mapping[Any, object], lasting: Callable[[object], object]) -> bool:
    return after.keys() == before.keys() and all(
        one is (old := before[key]) or lasting(one) == lasting(old) for key, one in after.items()
    )
