"""Self-fencing: the agent ends its VMs after some time without contact to its controller and to the scheduler, if the
site asks for that. Then their jobs may run elsewhere.

Only contacts count that the controller knows of too, because it takes the VMs for ended some time later. A controller
was surely in contact when the agent sent an answer (to the greeting or a ping) that the controller confirms. The
arrival of its line proves nothing: the line may have been on its way for minutes. The scheduler keeps a VM whose node
it reaches. A VM whose node is DOWN is lost to it, and queues the job again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import MultiverseError
from multiverse.core.model.identity import site_of
from multiverse.core.model.vm import VmRef
from multiverse.system import files

log = structlog.get_logger()

CHECKS = 10  # looks within the time after which VMs are ended
QUIET_CHECKS = 2  # looks without the controller before the scheduler is asked
PATIENCE = 5.0  # seconds that a look waits for each answer of its own host


@dataclass(frozen=True)
class Contacts:
    """The last contacts. Times are seconds of one clock."""

    controllers: dict[str, float] = field(default_factory=dict)  # by site: when its controller was surely in contact
    vms: dict[str, float] = field(default_factory=dict)  # by name: when the scheduler has reached the node of the VM
    limits: dict[str, float] = field(
        default_factory=dict
    )  # by site: after how long its controller may take VMs for ended


class FenceTimer:
    """Until when each VM may go on. Times are of the clock that `now` reads.

    After a change of the settings the controller goes on with the time that it knows. So a longer time counts only once
    the controller knows it, and the controller is told a time only once it is kept for the next run of the agent.
    """

    def __init__(self, seconds: float, contacts: Contacts, now: Callable[[], float]) -> None:
        """`seconds` are of the settings; infinity: no VM is ended any more. `contacts` were kept; they change in
        place."""
        self.seconds, self.contacts, self.now = seconds, contacts, now
        self.back = asyncio.Event()  # a controller is in contact that was not for longer than looks are apart
        self.kept: Mapping[str, float] = dict(contacts.limits)  # the limits that the next run of the agent knows

    @property
    def shortest(self) -> float:
        """The shortest time after which VMs of any site are ended; infinity if none ever are."""
        return min([self.seconds, *self.contacts.limits.values()])

    def limit(self, site: str) -> float:
        """The seconds without any contact after which VMs of the site are ended."""
        return min(self.seconds, self.contacts.limits.get(site, inf))

    def shown(self, site: str) -> float:
        """The time that the controller of the site is told; 0: it concludes nothing."""
        return self.seconds if self.kept.get(site, inf) <= self.seconds < inf else 0.0

    def known(self, site: str, shown: float) -> None:
        """The controller surely knows what it was shown."""
        if self.seconds == inf:
            self.contacts.limits.pop(site, None)
        elif shown == self.seconds:
            self.contacts.limits[site] = shown

    def heard(self, site: str, at: float) -> None:
        if at - self.contacts.controllers.get(site, at) > self.shortest / CHECKS:
            self.back.set()
        _advance(self.contacts.controllers, site, at)
        if (limit := self.limit(site)) < inf:
            self.contacts.limits[site] = limit

    def reached(self, vms: Iterable[str], at: float) -> None:
        """The scheduler has reached the nodes of these VMs in an observation that began then."""
        for name in vms:
            _advance(self.contacts.vms, name, at)

    def asks_scheduler(self, site: str, now: float) -> bool:
        """Whether the controller has been away for so long that the scheduler has to be asked."""
        return now - self.contacts.controllers.get(site, now) > self.limit(site) * QUIET_CHECKS / CHECKS

    def expired(self, site: str, vms: Collection[str], now: float) -> list[str]:
        reached = self.contacts.vms
        for name in [name for name in reached if name not in vms and site_of(name) == site]:
            del reached[name]
        contact, limit = self.contacts.controllers.get(site, now), self.limit(site)
        return [name for name in sorted(vms) if now - max(contact, reached.get(name, contact)) > limit]


def _advance(contacts: dict[str, float], name: str, at: float) -> None:
    contacts[name] = max(at, contacts.get(name, at))


class HostedVms(Protocol):
    """The hypervisor of one site. No observation is needed: it asks QEMUs, which may not answer."""

    async def list_vms(self) -> Collection[str]:
        """The names of all VMs, also of those that exist only in part."""

    async def kill(self, vms: Collection[str]) -> None:
        """Kill the QEMUs of these VMs at once, and wait for none."""

    async def destroy(self, vm: VmRef, grace: float) -> None: ...


@dataclass
class SelfFence:
    """Applies a timer to the VMs of all sites of this host. `reached` gives the nodes of a site that the scheduler
    reaches; it raises if the scheduler does not answer. `keep` is called with the contacts when they have changed."""

    timer: FenceTimer
    sites: Callable[[], Collection[str]]
    hypervisor: Callable[[str], HostedVms]
    reached: Callable[[str], Awaitable[Collection[str]]]
    keep: Callable[[Contacts], None]
    patience: float = PATIENCE
    _kept: Contacts | None = None
    _listed: dict[str, Collection[str]] = field(default_factory=dict)  # the VMs of each site at the last look
    _removing: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # removals of VMs that were killed

    async def run(self) -> None:
        """Look at intervals until cancelled, or until no VM is ended any more."""
        keeping = asyncio.create_task(self._keep_when_back())
        try:
            while self.timer.shortest < inf:
                await self.check()
                await asyncio.sleep(self.timer.shortest / CHECKS)
        finally:
            keeping.cancel()
        self._keep_contacts()

    async def _keep_when_back(self) -> None:
        """Keep that a controller is back, at once: the agent may end soon after, and a look may wait for the scheduler
        for long."""
        while True:
            await self.timer.back.wait()
            self.timer.back.clear()
            self._keep_contacts()

    async def check(self) -> None:
        """Look once. The next look tries again what fails."""
        await asyncio.gather(*map(self._look, self._present_sites()))
        self._keep_contacts()

    async def _look(self, site: str) -> None:
        if site not in self.timer.contacts.controllers:
            self.timer.heard(site, self.timer.now())  # nobody knows of an earlier contact: its time begins now
        try:
            await self._check(site)
        except (MultiverseError, OSError) as error:
            log.warning("self-fencing could not look", site=site, reason=str(error) or type(error).__name__)

    def _present_sites(self) -> Collection[str]:
        """The sites that have VMs here; the known sites, while the host's directories cannot be listed."""
        try:
            return self.sites()
        except OSError as error:
            log.warning("self-fencing cannot list the sites of this host", reason=str(error))
            return sorted(self.timer.contacts.controllers)

    def _keep_contacts(self) -> None:
        if self.timer.contacts == self._kept:
            return
        try:
            self.keep(self.timer.contacts)
            self._kept = deepcopy(self.timer.contacts)
            self.timer.kept = self._kept.limits
        except OSError as error:  # the next run of the agent would take its VMs for longer out of contact than they are
            log.warning("the last contacts cannot be kept", reason=str(error))

    async def _check(self, site: str) -> None:
        began = self.timer.now()
        if not self.timer.asks_scheduler(site, began):
            return
        hypervisor = self.hypervisor(site)
        vms = await self._list(site, hypervisor)
        try:
            self.timer.reached(set(vms) & set(await self.reached(site)), began)
        except (MultiverseError, OSError) as error:
            log.warning("neither the controller nor the scheduler is reached", site=site, reason=str(error))
        if ending := self.timer.expired(site, vms, self.timer.now()):
            await self._end(hypervisor, ending)

    async def _list(self, site: str, hypervisor: HostedVms) -> Collection[str]:
        """The names of the site's VMs, or those of the look before if the host does not tell now."""
        try:
            async with asyncio.timeout(self.patience):
                self._listed[site] = await hypervisor.list_vms()
        except (MultiverseError, OSError) as error:
            if site not in self._listed:
                raise
            log.warning("self-fencing cannot list VMs", site=site, reason=str(error) or type(error).__name__)
        return self._listed[site]

    async def _end(self, hypervisor: HostedVms, ending: Collection[str]) -> None:
        """End VMs: kill all QEMUs, then remove the rest. A removal that takes long delays no other VM, and is not
        waited for; its QEMU is killed again at each look."""
        log.error("VMs are ended: neither the controller nor the scheduler has reached them", vms=list(ending))
        try:
            async with asyncio.timeout(self.patience):
                await hypervisor.kill(ending)
        except (MultiverseError, OSError) as error:
            log.error("VMs could not be killed", reason=str(error) or type(error).__name__)
        for name in ending:
            if name not in self._removing:
                self._removing[name] = asyncio.create_task(self._remove(hypervisor, name), name=f"remove {name}")
        if removing := [self._removing[name] for name in ending if name in self._removing]:
            await asyncio.wait(removing, timeout=self.patience)

    async def _remove(self, hypervisor: HostedVms, name: str) -> None:
        try:
            await hypervisor.destroy(VmRef(name), 0.0)
        except (MultiverseError, OSError) as error:
            log.error("a VM could not be ended", vm=name, reason=str(error))
        finally:
            del self._removing[name]


@dataclass(frozen=True)
class _Kept:
    boot_id: str
    contacts: Contacts


_KEPT = TypeAdapter(_Kept)


class ContactFile:
    """Keeps the contacts for the next run of the agent: a restart does not let VMs go on for longer. Times are of one
    boot of the host; the limits outlive the boot."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path, self._boot_id = path, boot_id

    def read(self) -> Contacts:
        try:
            kept = _KEPT.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Contacts()
        except (OSError, ValidationError) as error:
            log.warning("the last contacts cannot be read", path=str(self._path), reason=str(error))
            return Contacts()
        return kept.contacts if kept.boot_id == self._boot_id else Contacts(limits=kept.contacts.limits)

    def write(self, contacts: Contacts) -> None:
        files.replace(self._path, _KEPT.dump_json(_Kept(self._boot_id, contacts)))
