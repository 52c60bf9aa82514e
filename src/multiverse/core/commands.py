"""What effects report and operators ask, applied to the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.machines.attempt import given_back
from multiverse.core.machines.vm import releasing
from multiverse.core.model.host import Host
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.template import Template, TemplateKey, TemplateState
from multiverse.core.model.vm import Offer, Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.policy import Policy
from multiverse.core.provisioning.clones import need_template
from multiverse.core.state import PlanState
from multiverse.core.transition import Change, Command, Done, EffectKind, Event

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def apply_result(state: PlanState, done: Done) -> None:
    """An effect said that it failed for good. What it says of success is not heeded: that is looked at."""
    if not isinstance(done.error, _DEFINITE):
        return
    row = state.get(done.key)
    if row is None or row.state != done.state or row.quarantined:
        return
    why = str(done.error)
    making = (VmState.PLANNED, VmState.STARTING)
    if isinstance(row, Vm) and done.kind in (EffectKind.CREATE, EffectKind.START) and row.state in making:
        state.move(Change(releasing(row, why), Event.FAILED, why))
    elif isinstance(row, Template) and done.kind is EffectKind.BUILD and row.state is TemplateState.BUILDING:
        state.move(Change(replace(row, state=TemplateState.BROKEN, reason=why, tries=row.tries + 1), Event.BROKE, why))
    elif isinstance(row, Attempt) and row.state is AttemptState.SPAWNED and isinstance(done.error, Refused):
        if not any(vm.offer is Offer.TAKEN for vm in state.vms_of(row)):
            state.move(Change(given_back(row, why, tries=row.tries + 1), Event.GAVE_UP, why))
        elif row.reason != why:  # its job may be in there already, let in by an earlier word: see `waits_for_its_user`
            state.move(Change(replace(row, reason=why), Event.NOTED, why))


def apply_command(state: PlanState, command: Command, hosts: Mapping[str, Host], policy: Policy) -> None:
    why = "an operator asked for it"
    match command.verb:
        case "build":
            which = TemplateKey(command.host, command.image, command.size or policy.base, command.account or "")
            row = state.template_for(which)
            if row is None or row.state is TemplateState.BROKEN:
                need_template(state, which, hosts, why)
        case "drop":
            for _, row in sorted(state.templates.items()):
                if _meant(command, row) and row.state in (
                    TemplateState.READY,
                    TemplateState.BROKEN,
                    TemplateState.BUILDING,
                ):
                    state.move(Change(replace(row, state=TemplateState.RETIRING), Event.DROPPED, why))
        case "retry" if command.key is not None and (record := state.get(command.key)) is not None:
            _retry(state, record, hosts, why)
        case "fence":
            for _, vm in sorted(state.vms.items()):
                if vm.state is VmState.LOST and vm.host == command.host:
                    fenced = replace(releasing(vm, vm.reason), fenced=True, quarantined="")
                    state.move(Change(fenced, Event.FENCED, f"an operator says that host {vm.host} is off"))
        case _:
            pass


def _meant(command: Command, row: Template) -> bool:
    return (
        (row.host, row.image) == (command.host, command.image)
        and command.size in (None, row.size)
        and command.account in (None, row.account)
    )


def _retry(state: PlanState, row: Row, hosts: Mapping[str, Host], why: str) -> None:
    if isinstance(row, Attempt) and (row.quarantined or row.not_before > state.now):
        state.move(Change(replace(row, quarantined="", not_before=0.0), Event.RETRIED, why))
    elif not isinstance(row, Attempt) and row.quarantined:
        state.move(Change(replace(row, quarantined=""), Event.RETRIED, why))
    elif isinstance(row, Template) and row.state is TemplateState.BROKEN:
        need_template(state, row.which, hosts, why)
