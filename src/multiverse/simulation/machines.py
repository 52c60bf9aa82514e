"""Simulated hosts: their templates and VMs, and an account of what they were made to carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

from multiverse.core.errors import Broken, Gone, Refused, Unknown
from multiverse.core.model import (
    CloneKind,
    Host,
    HypervisorView,
    Identity,
    Size,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    User,
    VmCondition,
    VmSeen,
    VmSpec,
)
from multiverse.simulation.guests import Guest

ABILITIES = frozenset({"instant", "linked", "full", "plug_cpus", "plug_memory"})
IMAGE_ABILITIES = frozenset({"fork", "plug_cpus", "plug_memory"})

OVERHEAD = 32  # MiB of its own that a hypervisor's process needs beside its guest's memory
PARKED = 18.0  # MiB that are a parked clone's alone (DESIGN 5)
FILLS = 20.0  # seconds that a VM's memory fills for; from then on it grows by a fifth, in a minute


@dataclass(frozen=True)
class Image:
    """An image by name; one that does not boot breaks every template of it. `abilities` as in `Host.images`. `since`
    when it is there, on each host in their order, and on all further ones as on the last; none: from the start."""

    name: str
    boots: bool = True
    abilities: frozenset[str] = IMAGE_ABILITIES
    since: tuple[float, ...] = ()


@dataclass(frozen=True)
class Frozen:
    """A template as it was made once: the next one of the same key is another."""

    which: TemplateKey
    made: int


@dataclass(eq=False)
class Machine:
    """A VM on a host, or what is left of one. A `deaf` one's guest is neither heard nor told anything any more."""

    spec: VmSpec
    condition: VmCondition = VmCondition.MAKING
    reason: str = ""
    guest: Guest | None = None
    size: Size | None = None  # what it was started with
    deaf: bool = False
    woken: float = 0.0
    template: Frozen | None = None  # whose memory it maps

    def private(self, now: float) -> float:
        """MiB that are its own by now. Some fill what they have, others hardly touch it: their names tell."""
        if self.condition is VmCondition.DEAD:
            return 0.0
        if self.guest is None:
            return PARKED
        whole = self.takes.memory + OVERHEAD - PARKED
        share = (0.1 + crc32(self.spec.name.encode()) % 70 / 100) * whole
        age = now - self.woken
        return PARKED + share * (min(1.0, age / FILLS) + min(0.2, max(0.0, age - FILLS) / 300))

    @property
    def takes(self) -> Size:
        """What it takes of its host. Until it runs, a clone of a template has touched none of its memory."""
        if self.size is None and self.spec.kind is CloneKind.INSTANT:
            return Size(0, 0, 0)
        return self.size or self.spec.size


class Machines:
    """All hosts, templates and VMs. Changes happen at once; `boot` makes the guest of a started VM. With `overcommit`
    above 1 the memory of the hosts' machines is kept account of: they must keep `floor` MiB available, beside what
    `others` hold."""

    def __init__(
        self,
        hosts: tuple[Host, ...],
        images: tuple[Image, ...],
        boot: Callable[[str, Identity], Guest],
        overcommit: float = 1.0,
        floor: int = 0,
        others: int = 0,
    ) -> None:
        self.images = {image.name: image for image in images}
        self.hosts = {host.name: host for host in hosts}
        self.vms: dict[str, Machine] = {}
        self.templates: dict[TemplateKey, TemplateSeen] = {}
        self._builds: dict[TemplateKey, int] = {}
        self.violations: list[str] = []
        self.made: list[str] = []  # every VM that ever was begun
        self.away: set[str] = set()  # hosts that cannot be reached; what is on them goes on
        self.most_claimed = 0.0  # times what a host declares
        self._boot, self._overcommit, self._floor, self._others = boot, overcommit, floor, others

    # --- templates

    def begin_template(self, which: TemplateKey) -> bool:
        """Begin to build a template; False if it is there already. `Gone`, `Refused`."""
        self._reach(which.host)
        self._of_image(which.image, which.host)
        known = self.templates.get(which)
        if known is not None and known.condition is TemplateCondition.READY:
            return False
        self._builds[which] = self._builds.get(which, 0) + 1
        self._show(which, TemplateCondition.BUILDING)
        self._weigh(which.host)
        return True

    def finish_template(self, which: TemplateKey) -> None:
        """It has been frozen. `Broken` if the image does not boot, `Gone` if it was dropped meanwhile."""
        if which not in self.templates:
            raise Gone(f"the template of {which.image} on {which.host} was dropped while it was made")
        if self.images[which.image].boots:
            self._show(which, TemplateCondition.READY)
        else:
            self._show(which, TemplateCondition.BROKEN, "the guest never came to its fork point")
        self._reach(which.host)
        if not self.images[which.image].boots:
            raise Broken(f"image {which.image} does not boot", hint="look at its console")

    def drop_template(self, which: TemplateKey) -> None:
        self._reach(which.host)
        self._watch(which.host)
        self.templates.pop(which, None)

    def _show(self, which: TemplateKey, condition: TemplateCondition, reason: str = "") -> None:
        host, image, size, account = which
        self.templates[which] = TemplateSeen(image, host, image, condition, size, reason, account=account)

    # --- VMs

    def begin(self, spec: VmSpec) -> Machine:
        """Something of the VM now exists, and weighs on its host. `Gone`, `Refused`, `Broken`."""
        self._reach(spec.host)
        known = self.vms.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise Refused(f"{spec.name} exists already, and is another", hint="destroy it first")
            if known.condition is VmCondition.DEAD:
                raise Broken(f"{spec.name} is dead", hint="destroy it")
            return known
        self._of_image(spec.image, spec.host)
        self._parent(spec)
        machine = self.vms[spec.name] = Machine(spec, template=self._now_of(spec.template))
        self.made.append(spec.name)
        self._weigh(spec.host)
        return machine

    def park(self, name: str) -> None:
        """It is complete, without identity. `Gone` if it was destroyed meanwhile, or its template was."""
        machine = self._get(name)
        if machine.condition is VmCondition.MAKING:
            self._parent(machine.spec)
            machine.condition = VmCondition.PARKED

    def start(self, name: str, size: Size, identity: Identity) -> None:
        """Give it its identity and let it run. `Gone`, also if it is incomplete or dead; `Refused` if another's."""
        machine = self._get(name)
        if machine.condition in (VmCondition.MAKING, VmCondition.DEAD):
            raise Gone(f"{name} is {machine.condition}: {machine.reason or 'not complete'}", hint="destroy it")
        if (identity.hostname, identity.mac) != (name, machine.spec.mac):
            raise Refused(f"{name} cannot be {identity.hostname} with {identity.mac}", hint="destroy it")
        if machine.condition is not VmCondition.PARKED:
            return  # said before
        if size != machine.spec.size and machine.spec.kind is not CloneKind.INSTANT:
            self.violations.append(f"{name} was made as {machine.spec.size} and started as {size}")
        machine.size = size
        self._weigh(machine.spec.host)
        self._know_apart(name, identity)
        machine.condition = VmCondition.STARTING
        machine.woken = self._now()
        machine.guest = self._boot(name, identity)

    def started(self, name: str) -> None:
        """It has become someone. `Gone` or `Broken` if it was destroyed or died meanwhile."""
        machine = self._get(name)
        if machine.condition is VmCondition.DEAD:
            raise Broken(f"{name} died while it was started: {machine.reason}", hint="destroy it")
        if machine.deaf and machine.condition is VmCondition.STARTING:
            raise Broken(f"{name} was not started: {machine.reason}", hint="destroy it")
        machine.condition = VmCondition.RUNNING

    def introduce(self, name: str, user: User) -> None:
        """Its guest knows this user from now on. `Gone` if it does not run."""
        machine = self._get(name)
        if machine.guest is None:
            raise Gone(f"{name} is {machine.condition}", hint="start it first")
        if machine.deaf:
            raise Broken(f"{name} is not told anything: {machine.reason}", hint="destroy it")
        machine.guest.introduce(user.uid)

    def flood(self, name: str) -> None:
        """Its guest says too much, and is cut off; what it runs goes on."""
        machine = self.vms[name]
        if machine.guest is not None:
            machine.deaf, machine.reason = True, "the guest flooded its channel, which was closed"

    def write_back(self, name: str) -> None:
        """What its guest has in memory comes to where it belongs, if it can be told so."""
        machine = self.vms.get(name)
        if machine is not None and machine.guest is not None and not machine.deaf:
            machine.guest.say(f"{name}: all that was written is written back")

    def die(self, name: str, reason: str) -> None:
        """Its process ends; what it had on its host remains."""
        machine = self.vms.get(name)
        if machine is not None and machine.condition is not VmCondition.DEAD:
            self._watch(machine.spec.host)
            machine.condition, machine.reason = VmCondition.DEAD, reason
            self._stop(machine)

    def destroy(self, name: str) -> None:
        """Nothing of it is left. Absent is success."""
        machine = self.vms.get(name)
        if machine is not None:
            self._reach(machine.spec.host)
            self._watch(machine.spec.host)
            del self.vms[name]
            if machine.guest is not None and (job := machine.guest.serves()) is not None:
                self.violations.append(f"{name} was destroyed while job {job.job_id} ran on it")
            self._stop(machine)

    # --- hosts

    def leave(self, host: str) -> None:
        """The host cannot be reached any more, neither by us nor by slurmctld."""
        self.away.add(host)
        for guest in self._guests(host):
            guest.cut_off()

    def come_back(self, host: str) -> None:
        self.away.discard(host)
        for guest in self._guests(host):
            guest.reconnect()

    def switch_off(self, host: str) -> None:
        """All VMs and templates of the host end, and nothing of them remains on it."""
        self._watch(host)
        for name in [name for name, machine in self.vms.items() if machine.spec.host == host]:
            self._stop(self.vms.pop(name))
        for which in [which for which in self.templates if which.host == host]:
            del self.templates[which]

    def _guests(self, host: str) -> list[Guest]:
        return [machine.guest for machine in self.vms.values() if machine.spec.host == host and machine.guest]

    # --- what it shows

    def used(self, host: str) -> Size:
        """What VMs and templates take of a host now. A template is frozen memory and takes no CPU."""
        sizes = [machine.takes for machine in self.vms.values() if machine.spec.host == host]
        memory = sum(size.memory + OVERHEAD for size in sizes) + self._frozen(host)
        return Size(sum(size.cpus for size in sizes), memory, sum(size.disk for size in sizes))

    def available(self, host: str) -> int:
        """MiB that a host's machine has left, by what its VMs and others there really take."""
        machine = self.hosts[host].machine
        assert machine is not None, "a host whose memory is watched has a machine"
        vms = sum(one.private(self._now()) for one in self.vms.values() if one.spec.host == host)
        return int(machine.memory - self._others - vms - self._frozen(host))

    def _frozen(self, host: str) -> int:
        """MiB of templates, and of those that were dropped while VMs map them: these are there once."""
        there = {self._now_of(which) for which in self.templates}
        mapped = {one.template for one in self.vms.values() if one.condition is not VmCondition.DEAD}
        copies = self.hosts[host].template_copies
        return sum(
            one.which.size.memory * (copies if one in there else 1)
            for one in there | mapped
            if one is not None and one.which.host == host
        )

    def _held(self, seen: TemplateSeen) -> float:
        """MiB that a look shows: of one that is not ready, none."""
        ready = seen.condition is TemplateCondition.READY
        return float(seen.size.memory * self.hosts[seen.host].template_copies) if ready else 0.0

    def _now_of(self, which: TemplateKey | None) -> Frozen | None:
        return Frozen(which, self._builds[which]) if which is not None else None

    def view(self) -> HypervisorView:
        vms = {
            name: VmSeen(
                name,
                machine.spec.host,
                machine.condition,
                machine.reason,
                private=machine.private(self._now()),
                introduced=tuple(sorted(machine.guest.users)) if machine.guest else (),
            )
            for name, machine in sorted(self.vms.items())
            if machine.spec.host not in self.away
        }
        hosts = {
            name: replace(
                host, images=self._images(name), available=self.available(name) if self._overcommit > 1 else 0
            )
            for name, host in self.hosts.items()
            if name not in self.away
        }
        templates = {
            which: replace(seen, held=self._held(seen))
            for which, seen in sorted(self.templates.items())
            if which.host not in self.away
        }
        return HypervisorView(hosts, vms, templates)

    # --- inside

    def _get(self, name: str) -> Machine:
        machine = self.vms.get(name)
        if machine is None:
            raise Gone(f"no VM {name}")
        self._reach(machine.spec.host)
        return machine

    def _reach(self, host: str) -> None:
        if host not in self.hosts:
            raise Gone(f"no host {host}")
        if host in self.away:
            raise Unknown(f"host {host} does not answer", hint="see whether it runs")

    def _images(self, host: str) -> dict[str, frozenset[str]]:
        number, now = list(self.hosts).index(host), self._now()
        return {
            image.name: image.abilities
            for image in self.images.values()
            if not image.since or image.since[min(number, len(image.since) - 1)] <= now
        }

    def _of_image(self, name: str, host: str) -> None:
        if name not in self._images(host):
            raise Refused(f"no image {name}", hint="build it first")

    def _parent(self, spec: VmSpec) -> None:
        if spec.kind is not CloneKind.INSTANT:
            return  # it is made from its image
        template = self.templates.get(spec.template) if spec.template else None
        if template is None or template.condition is not TemplateCondition.READY:
            raise Gone(f"no such template of {spec.image} on {spec.host}", hint="prepare it first")
        can = self.images[spec.image].abilities
        if ("plug_cpus" not in can and spec.size.cpus != template.size.cpus) or (
            "plug_memory" not in can and spec.size.memory != template.size.memory
        ):
            self.violations.append(f"{spec.name} of {spec.size} cannot come from {template.image} of {template.size}")

    def _stop(self, machine: Machine) -> None:
        if machine.guest is not None:
            guest, machine.guest = machine.guest, None
            guest.die()
            guest.cluster.fell_silent(guest)

    def _weigh(self, host: str) -> None:
        used, capacity = self.used(host), self.hosts[host].capacity
        times = used.memory / capacity.memory
        self.most_claimed = max(self.most_claimed, times)
        if used.cpus > capacity.cpus or times > self._overcommit or used.disk > capacity.disk:
            self.violations.append(f"host {host} of {capacity} was made to carry {used}")
        self._watch(host)

    def _watch(self, host: str) -> None:
        """Between what is given back, what a host has left only falls: it is enough to look before that."""
        if self._overcommit > 1 and (left := self.available(host)) < self._floor:
            self.violations.append(f"host {host} had {left} MiB available, and was to keep {self._floor}")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _know_apart(self, name: str, identity: Identity) -> None:
        if identity.hostname != name:
            self.violations.append(f"{name} was told to be {identity.hostname}")
        for other in self.vms.values():
            if other.guest is None:
                continue
            theirs = other.guest.identity
            for what in ("hostname", "mac", "address", "machine_id"):
                mine = getattr(identity, what)  # empty: the driver's to make, when it sends it
                if mine and getattr(theirs, what) == mine:
                    self.violations.append(f"{name} and {theirs.hostname} share {what} {mine}")
