"""The hosts of the site, and the sources that answer for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType

from multiverse.controller.observers import Observer, ObserverTasks
from multiverse.core.capacity.empty_hosts import job_limits
from multiverse.core.leases.leasable import leasable_hosts
from multiverse.core.model import HypervisorView, JobLimits, KnownHost, Observation, Size, World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.ports import Clock, Hypervisor, Source


class FollowedHosts:
    """Lets the hypervisor have the hosts that belong to the site, keeps one observer for each of its sources, and tells
    passes what these have observed."""

    def __init__(
        self,
        hypervisor: Hypervisor,
        state: State,
        clock: Clock,
        poll: float,
        began: float,
        tasks: ObserverTasks,
    ) -> None:
        """`began` is since when sources are unknown that the hypervisor does not have."""
        self._hypervisor, self._state, self._clock = hypervisor, state, clock
        self._poll, self._began, self._tasks = poll, began, tasks
        # A host that the settings name and that has not answered yet may hold what those that have answered cannot.
        # One that is leased is a row, and ends with it.
        named = [(host, source.name) for source in hypervisor.sources for host in source.hosts]
        leased = state.leased
        self.declared = [KnownHost(*one) for one in named if one[0] not in leased]
        """The hosts that the settings name, until a pass is committed: then they are rows."""
        self._followed = -1  # `State.host_changes`, as of which this and the sources are
        self._listened: dict[str, Source] = {}
        self.sources: dict[str, Observer[HypervisorView]] = {}
        """One observer for each source of the hypervisor, by the source's name."""
        self._told: dict[str, Observation] = {}  # at the last pass, by source, also of sources that only rows refer to
        self.anew: set[str] = state.sources()
        """The sources of which the next pass is told something else than the last one: those observed since, those that
        came or went, and those that are unknown."""
        self._follow_sources()

    # --- what is observed ----------------------------------------------------------------------------

    def observations(self) -> dict[str, Observation]:
        """What is known of each source now."""
        told = {**self._told, **{name: self._observation(name) for name in sorted(self.anew)}}
        return {name: one for name, one in told.items() if one is not None}

    def tell(self) -> Mapping[str, Observation]:
        """The same for a pass, whose cost is that of the sources in `anew`."""
        for name in sorted(self.anew):
            if (observation := self._observation(name)) is not None:
                self._told[name] = observation
            else:
                self._told.pop(name, None)
        return MappingProxyType(self._told)

    def committed(self, world: World) -> None:
        """A pass with this world is committed: its sources are told, but for those that are unknown."""
        self.anew = {name for name in world.anew or () if name in self._told and self._told[name].latest is None}
        self.declared = []

    def _observation(self, name: str) -> Observation | None:
        """What is known of a source now; None if there is none. One that rows refer to and that is none of the
        hypervisor's is unknown since the controller began."""
        if (one := self.sources.get(name)) is not None:
            return Observation(one.latest, one.since, self._heard(one))
        return Observation(None, self._began) if self._state.has_vms_at(name) else None

    def _heard(self, source: Observer[HypervisorView]) -> float:
        """When anything was last heard of a source, while it is unknown."""
        silence = self._listened[source.name].silence if source.latest is None else None
        return -inf if silence is None else self._clock.now() - silence

    # --- hosts and sources ---------------------------------------------------------------------------

    def known_hosts(self) -> dict[str, KnownHost]:
        """The hosts of the site, by name, as they were observed last. One that never was is as the settings declare it,
        and left out if only an operator has named it."""
        members, found = self._hypervisor.membership, dict[str, KnownHost]()
        for name, host in self._state.hosts.items():
            value = host.value or (members.declared(name) if members else None)
            if host.is_member and (value or members is None):
                found[name] = replace(host, value=value)
        return found

    def job_limits(self, policy: Policy, leasable: Mapping[str, Size]) -> JobLimits | None:
        """What no job must exceed, by the hosts of the site and those that can be leased."""
        leased = self._state.leased
        static = {name: one for name, one in self.known_hosts().items() if name not in leased}
        return job_limits({**static, **leasable_hosts(leasable, policy)}, policy)

    @property
    def have_changed(self) -> bool:
        """Whether a host's row has changed since they were followed last."""
        return self._followed != self._state.host_changes

    def follow(self) -> None:
        """Let the hypervisor have the hosts that belong to the site, as committed."""
        self._followed = self._state.host_changes
        membership = self._hypervisor.membership
        if membership is not None:
            # Until a pass is committed, the state lacks hosts that it would have added.
            hosts = {host.name: host for host in self.declared} | self._state.hosts
            names = [host.name for host in hosts.values() if host.is_member]
            membership.keep(names, self._state.leased_hosts())
            self._follow_sources()

    def _follow_sources(self) -> None:
        """One observer for each source, and none for those that are gone."""
        sources = {source.name: source for source in self._hypervisor.sources}
        for name in [name for name in self.sources if name not in sources]:
            del self._listened[name]
            self.anew.add(name)
            self._tasks.stop(self.sources.pop(name))
        for name in [name for name in sources if name not in self.sources]:
            observe, interval = sources[name].observe, lambda: self._poll
            observer = Observer(name, observe, self._clock, interval, partial(self._observed_anew, name))
            self.sources[name], self._listened[name] = observer, sources[name]
            self.anew.add(name)
            self._tasks.run(observer)

    def _observed_anew(self, source: str) -> None:
        self.anew.add(source)
        self._tasks.wake()
