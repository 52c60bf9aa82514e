"""What hosts and VMs use, as operators see it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields

from multiverse.api import CompatibleHostView, UsagePoint, UsageView, UtilizationView
from multiverse.controller.history import JobUsageRecorder, UtilizationRecorder
from multiverse.controller.loop import Controller
from multiverse.core.context import Context
from multiverse.core.errors import Gone
from multiverse.core.explanation import compatible_hosts
from multiverse.core.model import CloneKind, HostUsage, Size, Usage, Vm
from multiverse.core.model.usage import combined
from multiverse.ports import Clock
from multiverse.service.convert import size_view
from multiverse.store.history import UsageRecord, UsedBy, read_usage

HOUR, FIVE_MINUTES = 3600.0, 300.0

AT_ONCE = 20
"""Hosts and VMs whose history is read before others get their turn: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class UtilizationReader:
    """Answers from the recorder's figures and its history. `jobs` learns what jobs use."""

    controller: Controller
    recorder: UtilizationRecorder
    jobs: JobUsageRecorder
    clock: Clock

    def current(self) -> Mapping[str, HostUsage]:
        """See `UtilizationRecorder.current`."""
        return self.recorder.current()

    async def views(self, names: Collection[str] = ()) -> list[UtilizationView]:
        """Hosts and live VMs by name, each host with its VMs behind it; all, or those with these names."""
        found = []
        for number, view in enumerate(self._known()):
            if names and view.name not in names:
                continue
            found.append(self._with_history(view))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return found

    def history(self, name: str, hours: float) -> list[UsagePoint]:
        """The rows of a host or VM in the last hours, also of a VM that has ended. Raises `Gone` if there are none."""
        kind: UsedBy = "host" if name in self.controller.state.hosts else "vm"
        records = read_usage(self.recorder.store, kind, name, self.clock.wall() - hours * HOUR)
        if not records:
            raise Gone(f"nothing is known of what {name} used in the last {hours:g} hours")
        return [UsagePoint(one.wall, one.span, view) for one in records if (view := _view(one.usage))]

    def compatible(self, node: Size, image: str, kind: CloneKind | None, policy: str) -> list[CompatibleHostView]:
        """See `compatible_hosts`. Raises `Refused` if there is no such policy."""
        controller = self.controller
        state = controller.state
        # With the hosts as the latest pass knew them: they are not observed here.
        context = Context(state, controller.observed, controller.policy, sight=state.free.hosts)
        return [
            CompatibleHostView(one.name, size_view(one.free), size_view(one.claim), one.holds, one.use)
            for one in compatible_hosts(context, node, image, kind, policy)
        ]

    def _known(self) -> Iterator[UtilizationView]:
        """All of them, with what they use now."""
        rows, world, current = self.controller.state.rows(), self.controller.world(), self.current()
        vms: defaultdict[str, list[Vm]] = defaultdict(list)
        for vm in sorted(rows.vms.values(), key=lambda vm: vm.name):
            vms[vm.host].append(vm)
        for name in sorted(host.name for host in self.controller.known_hosts().values()):
            host, used = world.hosts.get(name), current.get(name, HostUsage())
            machine = host.machine if host else None
            size = (machine.cpus, machine.memory) if machine else (0, 0)
            yield UtilizationView("host", name, "", "", *size, _view(used.usage), None, None)
            for vm in vms[name]:
                seen = used.vms.get(vm.name)
                attempt = rows.attempt_of(vm)
                job_id = attempt.job.job_id if attempt else ""
                now = _view(seen.usage if seen else None)
                yield UtilizationView("vm", vm.name, name, job_id, vm.size.cpus, vm.size.memory, now, None, None)

    def _with_history(self, view: UtilizationView) -> UtilizationView:
        wall = self.clock.wall()
        kind: UsedBy = "host" if view.kind == "host" else "vm"
        records = read_usage(self.recorder.store, kind, view.name, wall - HOUR)
        return UtilizationView(
            **{one.name: getattr(view, one.name) for one in fields(UtilizationView)[:7]},
            five_minutes=_mean([one for one in records if one.wall >= wall - FIVE_MINUTES - 60]),
            hour=_mean(records),
        )


def _mean(records: list[UsageRecord]) -> UsageView | None:
    return _view(combined([one.usage for one in records]) if records else None)


def _view(usage: Usage | None) -> UsageView | None:
    return None if usage is None else UsageView(*(getattr(usage, one.name) for one in fields(UsageView)))
