"""All that was observed and is remembered: what the planner decides upon."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Generic, TypeVar

from multiverse.core.model.basics import CloneKind, Key
from multiverse.core.model.host import Host, HypervisorView, KnownHost
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import Attempt, Lease, Node, SchedulerView
from multiverse.core.model.saved import Saved, SavedSeen
from multiverse.core.model.vm import Offer, Place, Template, Vm, VmSeen

Row = Attempt | Vm | Template | Offer | KnownHost | Lease | Saved

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """A value that was observed; the observation began at `began` (monotonic). Nothing newer is in it."""

    value: T
    began: float


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one source of a hypervisor."""

    latest: Seen[HypervisorView] | None = None  # None: unknown, which never means empty
    since: float = 0.0  # when it turned known, or unknown (monotonic)
    heard: float = -inf  # when anything at all was last heard: an agent may answer while its observations fail

    def silent_since(self, host: str) -> float:
        """Since when nothing was heard of a host of this source; infinity while the source shows the host."""
        if self.latest is not None:
            return inf if host in self.latest.value.hosts else max(self.since, self.latest.began)
        return max(self.since, self.heard)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the controller remembers of earlier passes, and a restart forgets: only the pace depends on it."""

    arrivals: Mapping[str, float] = field(default_factory=dict)  # VMs a second that jobs are given, by image
    seconds: Mapping[tuple[str, CloneKind], float] = field(default_factory=dict)  # from claim to node, lately
    paced: Mapping[tuple[str, str, CloneKind], float] = field(default_factory=dict)  # until when clones are paid for
    rest: Mapping[str, float] = field(default_factory=dict)  # by image: no more spares before, because VMs failed
    lease_rest: Mapping[str, float] = field(default_factory=dict)  # by partition: no more leases before


@dataclass(frozen=True)
class World:
    """All that was observed, and when effects last ended."""

    scheduler: Seen[SchedulerView] | None = None  # None while it is unknown
    sources: Mapping[str, Observation] = field(default_factory=dict)  # of the hypervisor, by name
    effect_ended_at: Mapping[Key, float] = field(default_factory=dict)  # by row; infinity: one runs
    refused: Mapping[Key, str] = field(default_factory=dict)  # why the last effect of a row was refused for good
    forecast: Forecast = Forecast()
    entropy: str = ""  # random for each pass; tokens are made of it
    users: Mapping[int, UserSeen] | None = None  # by uid; missing: unknown; None: nobody is looked up
    epoch: float = 0.0  # Unix time at which the monotonic clock was 0
    anew: Collection[str] | None = None  # sources that are unknown, or have changed since the last commit; None: any
    declared: Sequence[KnownHost] = ()  # hosts that the settings name, until they are rows
    scheduler_since: float = 0.0  # when the scheduler turned known, or unknown (monotonic)

    def latest(self, source: str) -> Seen[HypervisorView] | None:
        """The latest observation of a source; None while it is unknown."""
        observation = self.sources.get(source)
        return observation.latest if observation else None

    @cached_property
    def sees_hosts(self) -> bool:
        return any(one.latest is not None for one in self.sources.values())

    @cached_property
    def views(self) -> Mapping[str, HypervisorView]:
        """The views of all sources that are known, by source, in the order of their names."""
        return {name: seen.latest.value for name, seen in sorted(self.sources.items()) if seen.latest}

    @cached_property
    def hosts(self) -> Mapping[str, Host]:
        """All hosts in sight, by name: what the known sources show."""
        return {name: host for view in self.views.values() for name, host in sorted(view.hosts.items())}

    @cached_property
    def source_of(self) -> Mapping[str, str]:
        return {host: source for source, view in self.views.items() for host in view.hosts}

    def shows(self, place: Place) -> bool:
        latest = self.latest(place.source)
        return latest is not None and place.host in latest.value.hosts

    def at(self, vm: Vm, place: Place) -> VmSeen | None:
        """The VM as shown at one of its places; None if it is not shown, or is another VM by its token."""
        latest = self.latest(place.source)
        seen = latest.value.vms.get(vm.name) if latest else None
        if seen is None or seen.host != place.host:
            return None
        return seen if not vm.token or seen.token in ("", vm.token) else None

    def vm(self, vm: Vm) -> VmSeen | None:
        """The VM where it goes on, or else at the first place that shows it."""
        if len(vm.places) == 1:
            return self.at(vm, vm.places[0])
        shown = [seen for place in vm.places if (seen := self.at(vm, place)) is not None]
        return next((seen for seen in shown if seen.runs), shown[0] if shown else None)

    def node_of(self, vm: Vm) -> Node | None:
        """The VM's node; None if it is not shown, or is that of another VM of the name."""
        node = self.scheduler.value.nodes.get(vm.name) if self.scheduler is not None else None
        return node if node is not None and vm.owns(node.features) else None

    def saved(self, name: str) -> Sequence[SavedSeen]:
        """The complete files of a saved VM, as each source shows them."""
        shown = (view.saved.get(name) for view in self.views.values())
        return [found for found in shown if found is not None and found.complete]

    def user_known_since(self, uid: int) -> float:
        """Since when the name service has known the user; infinity while it does not say so."""
        if self.users is None:
            return 0.0
        user = self.users.get(uid)
        return user.since if user is not None and user.exists else float("inf")

    def job_began(self, job_id: str) -> float:
        """When the latest reading of a job began; minus infinity while the scheduler is unknown."""
        if self.scheduler is None:
            return -inf
        return max(self.scheduler.began, self.scheduler.value.jobs_began.get(job_id, -inf))

    def node_began(self, name: str) -> float:
        """When the latest reading of a node began; see `job_began`."""
        if self.scheduler is None:
            return -inf
        return max(self.scheduler.began, self.scheduler.value.nodes_began.get(name, -inf))

    def ended_at(self, key: Key, never: float = 0.0) -> float:
        """When the row's last effect ended, infinity while one runs; `never` if none has begun."""
        return self.effect_ended_at.get(key, never)
