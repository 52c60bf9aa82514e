"""The agent ends its VMs after a time in which it reached neither its controller nor the scheduler, where the site asks
for that: then their jobs may run elsewhere.

What counts is what the controller can know, too, because it takes the VMs for ended some time later. A controller has
surely been in contact at the moment of an answer, the greeting or a ping's, that it confirms to have got, and not when
a line of it arrives: that line may have been on its way for minutes. The scheduler keeps a VM whose node it reaches;
one whose node is DOWN is lost to it, and the job there is queued again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import MultiverseError
from multiverse.core.model import HypervisorView, VmRef, site_of
from multiverse.system import files

log = structlog.get_logger()

CHECKS = 10
"""Looks within the time after which VMs are ended."""

QUIET_CHECKS = 2
"""So many of them may pass without the controller before the scheduler is asked."""


class Lease:
    """Until when each VM may go on. Times are seconds of one clock, which `now` reads."""

    def __init__(self, seconds: float, contacts: dict[str, float], now: Callable[[], float]) -> None:
        """`contacts` says when the controller of each site was surely in contact last."""
        self.seconds, self.now = seconds, now
        self.contacts = dict(contacts)
        self._reached: dict[str, float] = {}

    def heard(self, site: str, at: float) -> None:
        """The controller of the site was in contact at that time."""
        self.contacts[site] = max(at, self.contacts.get(site, at))

    def reached(self, vms: Iterable[str], at: float) -> None:
        """The scheduler has reached the nodes of these VMs in an observation that began then."""
        for name in vms:
            self._reached[name] = max(at, self._reached.get(name, at))

    def asks_scheduler(self, site: str, now: float) -> bool:
        """Whether the controller has been away for so long that the scheduler is to be asked."""
        return now - self.contacts.get(site, now) > self.seconds * QUIET_CHECKS / CHECKS

    def expired(self, site: str, vms: Collection[str], now: float) -> list[str]:
        """Those of the site's VMs that are to be ended."""
        self._reached = {name: at for name, at in self._reached.items() if name in vms or site_of(name) != site}
        contact = self.contacts.get(site, now)
        return [name for name in sorted(vms) if now - max(contact, self._reached.get(name, contact)) > self.seconds]


class HostedVms(Protocol):
    """What is needed of the hypervisor of one site."""

    async def observe(self) -> HypervisorView: ...

    async def destroy(self, vm: VmRef, grace: float) -> None: ...


@dataclass
class SelfFence:
    """Applies a lease to the VMs of all sites of this host. `reached` says which nodes of a site the scheduler reaches;
    it raises if the scheduler does not answer. `keep` is called with the contacts when they have changed."""

    lease: Lease
    sites: Callable[[], Collection[str]]
    hypervisor: Callable[[str], HostedVms]
    reached: Callable[[str], Awaitable[Collection[str]]]
    keep: Callable[[dict[str, float]], None]
    _kept: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self.lease.seconds / CHECKS)

    async def check(self) -> None:
        """Look once. What fails is tried again at the next look; a VM is ended only by what is known."""
        self._keep_contacts()
        for site in self.sites():
            if site not in self.lease.contacts:
                self.lease.heard(site, self.lease.now())  # nobody knows of an earlier contact: its time begins now
            try:
                await self._check(site)
            except (MultiverseError, OSError) as error:
                log.warning("self-fencing could not look", site=site, reason=str(error))

    def _keep_contacts(self) -> None:
        if self.lease.contacts == self._kept:
            return
        try:
            self.keep(self.lease.contacts)
            self._kept = dict(self.lease.contacts)
        except OSError as error:  # the next run of the agent would take its VMs for longer out of contact than they are
            log.warning("the last contacts cannot be kept", reason=str(error))

    async def _check(self, site: str) -> None:
        began = self.lease.now()
        if not self.lease.asks_scheduler(site, began):
            return
        hypervisor = self.hypervisor(site)
        vms = (await hypervisor.observe()).vms
        try:
            self.lease.reached(vms.keys() & set(await self.reached(site)), began)
        except (MultiverseError, OSError) as error:
            log.warning("neither the controller nor the scheduler is reached", site=site, reason=str(error))
        ending = self.lease.expired(site, vms.keys(), self.lease.now())
        await asyncio.gather(*(self._end(hypervisor, VmRef(name, vms[name].host)) for name in ending))

    async def _end(self, hypervisor: HostedVms, vm: VmRef) -> None:
        """End a VM. One that cannot be ended is tried again at the next look, and keeps no other one."""
        log.error("a VM is ended: neither the controller nor the scheduler has reached it", vm=vm.name)
        try:
            await hypervisor.destroy(vm, 0.0)
        except (MultiverseError, OSError) as error:
            log.error("a VM could not be ended", vm=vm.name, reason=str(error))


_CONTACTS = TypeAdapter(dict[str, float])


class ContactFile:
    """The contacts, for the next run of the agent in the same boot: a restart does not make VMs go on for longer."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path.with_name(f"{path.name}.{boot_id}")

    def read(self) -> dict[str, float]:
        try:
            return _CONTACTS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("the last contacts cannot be read", path=str(self._path), reason=str(error))
            return {}

    def write(self, contacts: dict[str, float]) -> None:
        files.replace(self._path, _CONTACTS.dump_json(contacts))
