"""Simulated hosts with their templates and VMs, and checks of what the hosts are made to carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

from multiverse.core.errors import Broken, Damaged, Exhausted, Gone, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView, ImageDisk
from multiverse.core.model.identity import Identity, NodeBootstrap, User
from multiverse.core.model.saved import SavedSeen
from multiverse.core.model.usage import Load
from multiverse.core.model.vm import TemplateCondition, TemplateKey, TemplateSeen, VmCondition, VmRef, VmSeen, VmSpec
from multiverse_lab.simulation.clock import EPOCH
from multiverse_lab.simulation.guests import Guest
from multiverse_lab.simulation.processes import SavedFiles

ABILITIES = frozenset({"instant", "linked", "full", "plug_cpus", "plug_memory"})
IMAGE_ABILITIES = frozenset({"fork", "plug_cpus", "plug_memory", "limit_disk"})
DISK = ImageDisk(whole=3000, overhead=100)

SPOILT = "slim"
"""The image of which VMs do not start on hosts that spoil it."""

OVERHEAD = 32  # MiB that a hypervisor's process needs beside its guest's memory
PARKED = 18.0  # MiB of private memory of a parked clone (DESIGN 5)
FILLS = 20.0  # seconds in which a VM touches its memory; afterwards the touched part grows by a fifth within a minute


@dataclass(frozen=True)
class SimulatedImage:
    """An image by name. `boots` is whether a template of it can be built. `abilities` are as in `Host.images`. `since`
    is the virtual second from which the image exists on each host, in the order of the hosts; the last one holds for
    all further hosts, and an empty tuple means from the start. `disk` is how large the files of its VMs can become."""

    name: str
    boots: bool = True
    abilities: frozenset[str] = IMAGE_ABILITIES
    since: tuple[float, ...] = ()
    disk: ImageDisk = DISK

    def written(self, machine: Machine) -> int:
        """MiB that a VM can write to its host's disk: what its guest is limited to, or all of its disk."""
        limited = "limit_disk" in self.abilities and machine.spec.kind is not CloneKind.FULL
        if machine.spec.kind is CloneKind.INSTANT and machine.size is None and not machine.spec.saved:
            return self.disk.overhead  # it is paused
        return machine.takes.disk + self.disk.overhead if limited else self.disk.whole


@dataclass(frozen=True)
class TemplateBuild:
    """One build of a template. A template that is built again has other memory."""

    key: TemplateKey
    number: int

    @property
    def name(self) -> str:
        """What its host calls it, which tells it from all others there."""
        image, size, account = self.key.image, self.key.size, self.key.account
        return f"{image}@{size.cpus}x{size.memory}@{account}#{self.number}"


@dataclass(eq=False)
class Machine:
    """A VM on a host, or the remains of a dead one. Once `channel_closed`, the host and the guest cannot talk to each
    other any more."""

    spec: VmSpec
    condition: VmCondition = VmCondition.CREATING
    reason: str = ""
    guest: Guest | None = None
    size: Size | None = None  # that it was started with
    channel_closed: bool = False
    started_at: float = 0.0
    template: TemplateBuild | None = None  # whose memory it maps
    mac: str = ""  # assigned by the platform, and so the address and the place
    address: str = ""
    placed_on: str = ""
    frozen: bool = False  # the processes of its job, as its host has recorded
    freezing: bool = False  # the same: they were to be
    files: SavedFiles | None = None  # that it was restored from
    asleep: bool = False  # its memory is in a file, also of one that has died since
    slept: int = 0  # the number of its latest sleep
    told: bool | None = None  # whether its job runs, as its guest was told last
    handed: str = ""  # the host to which it was handed over, and which has not taken it over yet
    shown: tuple[tuple[object, ...], VmSeen] | None = None  # last, and by what

    def private(self, now: float) -> float:
        """MiB of private memory at a virtual time. How much of its memory a VM touches is drawn from its name."""
        if self.condition is VmCondition.DEAD or self.asleep:
            return 0.0
        if self.guest is None:
            return PARKED
        whole = self.takes.memory + OVERHEAD - PARKED
        share = (0.1 + crc32(self.spec.name.encode()) % 70 / 100) * whole
        age = now - self.started_at
        return PARKED + share * (min(1.0, age / FILLS) + min(0.2, max(0.0, age - FILLS) / 300))

    @property
    def takes(self) -> Size:
        """What the VM takes of its host. An instant clone takes nothing until it is started, unless it is restored."""
        if self.size is None and self.spec.kind is CloneKind.INSTANT and not self.spec.saved:
            return Size(0, 0, 0)
        whole = self.size or self.spec.size
        return Size(0, 0, whole.disk) if self.asleep else whole


class _Started(NamedTuple):
    """A VM whose guest was started."""

    spec: VmSpec
    files: SavedFiles | None
    guest: Guest


class PlacedMachines(dict[str, Machine]):
    """The VMs by name, and those of each host, so that a look at one host costs what is there. A VM that goes to
    another host is taken out before its specification changes, and put in again."""

    def __init__(self) -> None:
        super().__init__()
        self.on: dict[str, dict[str, Machine]] = {}  # by host and name
        self._holders: dict[tuple[str, str], str] = {}  # which VM has a token, MAC or address

    def __setitem__(self, name: str, machine: Machine) -> None:
        super().__setitem__(name, machine)
        self.on.setdefault(machine.spec.host, {})[name] = machine
        self._holders.update(dict.fromkeys(_unique_values(machine.spec), name))

    def __delitem__(self, name: str) -> None:
        spec = self[name].spec
        super().__delitem__(name)
        del self.on[spec.host][name]
        for value in _unique_values(spec):
            self._holders.pop(value, None)

    def take(self, name: str) -> Machine:
        machine = self[name]
        del self[name]
        return machine

    def same(self, spec: VmSpec) -> Iterator[tuple[str, str]]:
        """The VMs that have something which only one VM may have, and what."""
        return ((self._holders[value], value[0]) for value in _unique_values(spec) if value in self._holders)


def _unique_values(spec: VmSpec) -> list[tuple[str, str]]:
    return [(what, value) for what in ("token", "mac", "address") if (value := getattr(spec, what))]


def _machine(host: Host) -> str:
    """The machine that a host makes, as it says with its storages."""
    return next((one.machine for one in (host.storage, host.copies) if one is not None), "")


class Machines:
    """All hosts, templates and VMs. Methods take no time; `boot` creates the guest of a started VM. With `overcommit`
    above 1 the memory of each host's machine is checked: `floor` MiB must stay available beside the `others` MiB that
    processes of others hold. Violations of what must always hold are collected in `violations`."""

    def __init__(
        self,
        hosts: tuple[Host, ...],
        images: tuple[SimulatedImage, ...],
        boot: Callable[[str, Identity], Guest],
        overcommit: float = 1.0,
        floor: int = 0,
        others: int = 0,
    ) -> None:
        self.images = {image.name: image for image in images}
        self.hosts = {host.name: host for host in hosts}
        self.vms = PlacedMachines()
        self.copies: dict[tuple[str, str], Machine] = {}  # by name and host: the other place of a VM that moves
        self.templates: dict[TemplateKey, TemplateSeen] = {}
        self._templates_on: dict[str, dict[TemplateKey, None]] = {}
        self._identities: dict[tuple[str, str], str] = {}  # of guests: whose hostname, MAC, address or machine id it is
        self._numbers = {host.name: number for number, host in enumerate(hosts)}
        self._builds: dict[TemplateKey, int] = {}
        self.violations: list[str] = []
        self.created: list[str] = []  # names of all VMs that ever existed, in order
        self.has_agents = False  # calls come from agents on the hosts, also on those that nobody reaches
        self.full: set[str] = set()  # hosts whose disk is full
        self.refusing: set[str] = set()  # hosts that create no VM
        self.spoiling: set[str] = set()  # hosts on which VMs of the image `SPOILT` do not start
        self.muting: set[str] = set()  # hosts from which no VM registers
        self.tried: list[tuple[float, str, str, str]] = []  # VMs that failed for that: when, host, image, and name
        self.away: set[str] = set()  # hosts that cannot be reached; their VMs go on
        self.captured: dict[str, SavedFiles] = {}  # what is being written of VMs whose jobs go on, by name
        self.storages: dict[str, dict[str, SavedFiles]] = {}  # of saved VMs: the complete files, by storage and name
        self.unfinished: dict[str, set[str]] = {}  # incomplete files, by storage
        # As they were shown last; of hosts and templates, by what.
        self._views: dict[str, HypervisorView] = {}
        self._hosts_shown: dict[str, tuple[object, Host]] = {}
        self._templates_shown: dict[TemplateKey, tuple[object, TemplateSeen]] = {}
        self.kept: dict[tuple[str, str], SavedFiles] = {}  # what is in memory in place of files, by host and name
        self.detached: set[str] = set()  # hosts that do not reach their storage
        self.detached_copies: set[str] = set()  # hosts that do not reach the storage to which they copy
        self.full_storages: set[str] = set()
        self.links_cut = 0.0  # the share of messages between hosts that are lost
        self.delays: dict[str, float] = {}  # seconds that each observation of a source takes longer
        self.peak_memory_ratio = 0.0  # the largest memory that a host carried, divided by its capacity
        self._boot, self._overcommit, self._floor, self._others = boot, overcommit, floor, others

    # --- templates

    def begin_template(self, which: TemplateKey) -> bool:
        """Begin to build a template; False if the template is ready already. Raises `Gone`, `Refused`, `Exhausted`."""
        self._check_reachable(which.host)
        self._check_taken(which.host)
        self._check_room(which.host)
        self._check_image(which.image, which.host)
        known = self.templates.get(which)
        if known is not None and known.condition is TemplateCondition.READY:
            return False
        self._builds[which] = self._builds.get(which, 0) + 1
        self._show(which, TemplateCondition.BUILDING)
        self.check_capacity(which.host)
        return True

    def finish_template(self, which: TemplateKey) -> None:
        """End the build. Raises `Broken` if the image does not boot, `Gone` if the template was deleted meanwhile."""
        if which not in self.templates:
            raise Gone(f"the template of {which.image} on {which.host} was deleted while it was built")
        if self.images[which.image].boots:
            self._show(which, TemplateCondition.READY)
        else:
            self._show(which, TemplateCondition.BROKEN, "the guest never came to its fork point")
        self._check_reachable(which.host)
        if not self.images[which.image].boots:
            raise Broken(f"image {which.image} does not boot", hint="look at its console")

    def delete_template(self, which: TemplateKey) -> None:
        self._check_reachable(which.host)
        self._check_floor(which.host)
        self._remove_template(which)

    def _remove_template(self, which: TemplateKey) -> None:
        if self.templates.pop(which, None) is not None:
            del self._templates_on[which.host][which]

    def _show(self, which: TemplateKey, condition: TemplateCondition, reason: str = "") -> None:
        host, image, size, account = which
        self._templates_on.setdefault(host, {})[which] = None
        self.templates[which] = TemplateSeen(image, host, image, condition, size, reason, account=account)

    # --- VMs

    def begin(self, spec: VmSpec) -> Machine:
        """Begin to create a VM, which takes capacity from now on. Raises `Gone`, `Refused`, `Broken`, `Exhausted`."""
        self._check_reachable(spec.host)
        self._check_taken(spec.host)
        known = self.vms.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise Refused(f"{spec.name} exists already with another specification", hint="destroy it first")
            if known.condition is VmCondition.DEAD:
                raise Broken(f"{spec.name} is dead", hint="destroy it")
            return known
        self._check_room(spec.host)
        self._check_image(spec.image, spec.host)
        if spec.host in self.refusing:
            self._note_try(spec)
            raise Exhausted(f"cannot create VM {spec.name}: Operation not permitted", hint="look at the host")
        self._check_unused(spec)
        files = self._files_for(spec) if spec.saved else None
        machine = self.vms[spec.name] = self._admit(spec)
        machine.files, machine.frozen = files, files is not None
        if files is None:
            self.created.append(spec.name)
        self.check_capacity(spec.host)
        return machine

    def _admit(self, spec: VmSpec) -> Machine:
        self._check_template(spec)
        return Machine(spec, template=self._current_build(spec.template))

    def park(self, vm: VmRef) -> None:
        """End the creation of a VM. Raises `Gone` if the VM or its template was destroyed meanwhile."""
        machine = self._get(vm)
        if machine.condition is VmCondition.CREATING:
            self._check_template(machine.spec)
            machine.condition = VmCondition.PARKED

    def start(self, vm: VmRef, size: Size, identity: Identity) -> None:
        """Give a VM its identity and let it run. Raises `Gone` if there is no complete, living VM, `Refused` if the
        identity is another VM's."""
        machine, name = self._get(vm), vm.name
        self._check_taken(machine.spec.host)
        if machine.condition in (VmCondition.CREATING, VmCondition.DEAD):
            raise Gone(f"{name} is {machine.condition}: {machine.reason or 'not complete'}", hint="destroy it")
        if not self._owns(machine, identity):
            raise Refused(f"{name} cannot be {identity.hostname} with {identity.mac}", hint="destroy it")
        if machine.condition is not VmCondition.PARKED:
            return  # a repeated call
        self._check_room(machine.spec.host)
        if machine.spec.host in self.spoiling and machine.spec.image == SPOILT:
            self._note_try(machine.spec)
            raise Broken(f"{name} does not start from image {SPOILT}", hint="look at the image on the host")
        if size != machine.spec.size and machine.spec.kind is not CloneKind.INSTANT:
            self.violations.append(f"{name} was made as {machine.spec.size} and started as {size}")
        machine.size = size
        self.check_capacity(machine.spec.host)
        self._check_identity(name, identity)
        machine.condition = VmCondition.STARTING
        machine.started_at = self._now()
        if machine.spec.host in self.muting:
            self._note_try(machine.spec)
            identity = replace(identity, bootstrap=NodeBootstrap())  # a guest without a daemon never registers
        machine.guest = self._boot(name, identity)
        if machine.files is not None:
            machine.guest.restore(machine.files)

    def _note_try(self, spec: VmSpec) -> None:
        if spec.name not in [name for *_, name in self.tried]:
            self.tried.append((self._now(), spec.host, spec.image, spec.name))

    @staticmethod
    def _owns(machine: Machine, identity: Identity) -> bool:
        return (identity.hostname, identity.mac) == (machine.spec.name, machine.spec.mac)

    def started(self, vm: VmRef) -> None:
        """End the start of a VM. Raises `Gone` if the VM was destroyed meanwhile, `Broken` if it died."""
        machine, name = self._get(vm), vm.name
        if machine.condition is VmCondition.DEAD:
            raise Broken(f"{name} died while it was started: {machine.reason}", hint="destroy it")
        if machine.channel_closed and machine.condition is VmCondition.STARTING:
            raise Broken(f"{name} was not started: {machine.reason}", hint="destroy it")
        machine.condition = VmCondition.RUNNING
        if machine.spec.host in self.full:
            self._pause(machine)

    def add_user(self, vm: VmRef, user: User) -> None:
        """Add a user to the guest of a VM. Raises `Gone` if the VM does not run, `Broken` if its channel is closed,
        `Unknown` if it is paused."""
        machine, name = self._get(vm), vm.name
        if machine.guest is None:
            raise Gone(f"{name} is {machine.condition}", hint="start it first")
        if machine.channel_closed:
            raise Broken(f"{name} cannot be told of a user: {machine.reason}", hint="destroy it")
        if machine.condition is VmCondition.PAUSED:
            raise Unknown(f"{name} does not answer")
        machine.guest.add_user(user.uid)

    def flood(self, name: str) -> None:
        """The guest of a VM sends too much, and its channel is closed. The script that it runs goes on."""
        machine = self.vms[name]
        if machine.guest is not None:
            machine.channel_closed, machine.reason = True, "the guest flooded its channel, which was closed"
            machine.guest.flooded = True

    def write_back(self, vm: VmRef) -> None:
        """The guest writes its memory back to the file systems, if its channel is open."""
        machine = self.find(vm)
        able = machine is not None and not machine.channel_closed and machine.condition is not VmCondition.PAUSED
        if able and machine is not None and machine.guest is not None:
            machine.guest.log(f"{vm.name}: the guest has written everything back")

    def die(self, name: str, reason: str) -> None:
        """The process of a VM ends. Its files on the host remain."""
        machine = self.vms.get(name)
        if machine is not None and machine.condition is not VmCondition.DEAD and not machine.handed:
            self._check_floor(machine.spec.host)
            machine.condition, machine.reason = VmCondition.DEAD, reason
            self._stop(machine)

    def destroy(self, vm: VmRef) -> None:
        """Remove all of a VM. Nothing to do if its source has none of that name."""
        machine = self.find(vm)
        if machine is not None:
            self._check_floor(machine.spec.host)
            if self.copies.pop((vm.name, machine.spec.host), None) is None:
                del self.vms[vm.name]
            if machine.guest is not None and not machine.guest.is_cut_off and (job := machine.guest.serves()):
                self.violations.append(f"{vm.name} was destroyed while job {job.job_id} ran on it")
            self._stop(machine)

    # --- saves

    def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        machine = self.find(vm)
        if machine is not None and machine.guest is not None:
            machine.freezing = machine.guest.to_freeze = True
        self._started(vm).guest.freeze(script=script)

    def cut(self, vm: VmRef) -> None:
        self._started(vm).guest.cut()

    def note_frozen(self, vm: VmRef, *, frozen: bool) -> None:
        """The host records whether the job of a VM is frozen."""
        if (machine := self.find(vm)) is not None:
            machine.frozen, machine.freezing = frozen, False

    def thaw(self, vm: VmRef) -> bool:
        """Let the processes go on. False if they are to go on in a run that has not begun."""
        machine = self._started(vm)
        if machine.files is not None:
            return machine.guest.attach()
        machine.guest.thaw()
        return True

    def begin_save(self, vm: VmRef, name: str) -> bool:
        """Stop a VM, and begin to write its files. False if they are complete already."""
        machine = self._started(vm, stopped=True)
        if self._is_complete(machine.spec, name):
            return False
        self._let_rest(machine.guest)
        self._check_attached(machine.spec.host, name)
        self.unfinished.setdefault(self._storage_name(machine.spec.host), set()).add(name)
        return True

    @staticmethod
    def _let_rest(guest: Guest) -> None:
        """Cut the job off, if somebody else queued it again before that, and stop the VM."""
        if not guest.rests:
            guest.cut()
            guest.rest()

    def finish_save(self, vm: VmRef, name: str) -> None:
        machine, host = self.find(vm), self.host_at(vm.source)
        self._end_writing(vm, host, name)
        if machine is None or machine.guest is None:
            raise Gone(f"{vm.name} was destroyed while it was saved")
        self._check_storage(vm, host)
        self._storage(host)[name] = self._state_of(name, machine, machine.guest)

    def _is_complete(self, spec: VmSpec, name: str) -> bool:
        """Whether the files of a state of this VM are complete."""
        known = self._storage(spec.host).get(name)
        return known is not None and known.spec.token == spec.token

    def _end_writing(self, vm: VmRef, host: str, name: str) -> None:
        storage = self._storage_name(host)
        self._check_attached(host, name)
        if name not in self.unfinished.get(storage, ()):
            raise Exhausted(f"cannot save VM {vm.name}: its files were removed", hint="is it being discarded?")
        self.unfinished[storage].discard(name)

    def _check_storage(self, vm: VmRef, host: str) -> None:
        if self._storage_name(host) in self.full_storages:
            raise Exhausted(f"cannot save VM {vm.name}: no space left on device", hint="is there room?")

    def _state_of(self, name: str, machine: Machine, guest: Guest) -> SavedFiles:
        memory, identity = guest.memory(), guest.identity
        if memory is None or not memory.cut:
            self.violations.append(f"{machine.spec.name} was saved before its job was cut off")
        elif memory.which is not None:
            memory.which.states += 1
        return SavedFiles(name, machine.spec, identity, memory, machine.takes.memory << 18, EPOCH + self._now())

    def begin_checkpoint(self, vm: VmRef, name: str) -> bool:
        """Begin to write the files of a VM whose job goes on. False if they are complete already. A VM whose checkpoint
        was interrupted goes on first."""
        spec, _, guest = self._started(vm)
        if self._is_complete(spec, name):
            return False
        if guest.is_frozen:
            self.thaw(vm)
            self.note_frozen(vm, frozen=False)
        self._check_attached(spec.host, name)
        self.unfinished.setdefault(self._storage_name(spec.host), set()).add(name)
        return True

    def capture(self, vm: VmRef, name: str) -> None:
        """Keep a VM as it is at this moment, and let its job go on."""
        machine = self.find(vm)
        if machine is None or machine.guest is None:
            raise Gone(f"{vm.name} has ended")
        memory = machine.guest.memory()
        if memory is None or memory.cut:
            raise Broken(f"the job in {vm.name} is not frozen")
        identity, size = machine.guest.identity, machine.takes.memory << 18
        self.captured[name] = SavedFiles(
            name, machine.spec, identity, replace(memory, cut=True), size, EPOCH + self._now(), checkpoint=True
        )
        self.thaw(vm)
        self.note_frozen(vm, frozen=False)

    def finish_checkpoint(self, vm: VmRef, name: str) -> None:
        files, host = self.captured.pop(name), self.host_at(vm.source)
        self._end_writing(vm, host, name)
        self._check_storage(vm, host)
        if files.frozen is not None and files.frozen.which is not None:
            files.frozen.which.states += 1
        self._storage(host)[name] = files

    def keep(self, vm: VmRef, name: str) -> None:
        """Keep a VM, stopped, in the memory of its host, where it is no VM any more."""
        if (self.host_at(vm.source), name) in self.kept:
            return
        spec, _, guest = self._started(vm, stopped=True)
        self._let_rest(guest)
        self.kept[spec.host, name] = self._state_of(name, self._get(vm), guest)
        self.remove(vm.name)

    def begin_copy(self, host: str, name: str) -> bool:
        """Begin to copy files to the other storage of a host. False if they are there already."""
        self._check_reachable(host)
        files, copy = self._file_in(host, self._storage_name(host), name), self._copies_reached(host)
        if self.storages.setdefault(copy, {}).get(name) is files:
            return False
        self.unfinished.setdefault(copy, set()).add(name)
        return True

    def finish_copy(self, host: str, name: str) -> None:
        copy = self._copies_reached(host)
        if name not in self.unfinished.get(copy, ()):
            raise Exhausted(f"cannot copy {name}: its files were removed", hint="is it being discarded?")
        self.unfinished[copy].discard(name)
        if copy in self.full_storages:
            raise Exhausted(f"cannot copy {name}: no space left on device", hint="is there room?")
        self.storages[copy][name] = self._file_in(host, self._storage_name(host), name)

    def _copies_reached(self, host: str) -> str:
        copies = self.hosts[host].copies
        if copies is None:
            raise Refused(f"host {host} copies no saved VMs", hint="set save.copy for it")
        if host in self.detached_copies:
            raise Gone(f"the storage {copies.name} is out of reach", hint="is the directory mounted?")
        return copies.name

    def discard(self, host: str, name: str) -> None:
        """Remove files from the storages that a host reaches, complete or not, and what it keeps of that name."""
        self._check_reachable(host)
        self.kept.pop((host, name), None)
        for storage in self._reached(host):
            self.storages.get(storage, {}).pop(name, None)
            self.unfinished.get(storage, set()).discard(name)

    def lose_files(self, storage: str) -> dict[str, SavedFiles]:
        """Remove all files of a storage. Returns those that were complete, as a backup has them."""
        self.unfinished.pop(storage, None)
        return self.storages.pop(storage, {})

    def put_back(self, storage: str, files: dict[str, SavedFiles]) -> None:
        self.storages[storage] = files | self.storages.get(storage, {})

    def left_in_storages(self) -> list[str]:
        """What the storages hold."""
        every = [*self.storages.items(), *self.unfinished.items()]
        kept = [f"{name} in the memory of {host}" for host, name in sorted(self.kept)]
        return [f"the files {name} in {storage}" for storage, names in every for name in sorted(names)] + kept

    def _started(self, vm: VmRef, *, stopped: bool = False) -> _Started:
        """A VM that runs, whose guest answers. `stopped`: or does not, because it was stopped to be saved."""
        machine = self._get(vm)
        if machine.guest is None or machine.condition in (VmCondition.PARKED, VmCondition.CREATING):
            raise Gone(f"{vm.name} is {machine.condition}", hint="start it first")
        if machine.channel_closed:
            raise Broken(f"{vm.name} does not answer: {machine.reason}", hint="destroy it")
        rests = machine.guest.rests
        if (machine.condition is VmCondition.PAUSED or rests) and not (rests and stopped):
            raise Unknown(f"{vm.name} does not answer")
        return _Started(machine.spec, machine.files, machine.guest)

    def _files_for(self, spec: VmSpec) -> SavedFiles:
        """What a VM is to be restored from. What its host has kept in memory, it takes over."""
        files = self.kept.pop((spec.host, spec.saved), None)
        if files is None:
            files = self._file_in(spec.host, spec.storage or self._storage_name(spec.host), spec.saved)
        if (files.spec.name, files.spec.mac) != (spec.name, spec.mac):
            raise Refused(f"the saved VM {spec.saved} is {files.spec.name}, not {spec.name}")
        if _machine(self.hosts[files.spec.host]) != _machine(self.hosts[spec.host]):
            raise Refused(f"{spec.host} makes another machine than {files.spec.host}")
        if files.attached is not None and not files.checkpoint:
            self.violations.append(f"{spec.name} is restored from {spec.saved}, whose processes went on before")
        return files

    def _file_in(self, host: str, storage: str, name: str) -> SavedFiles:
        """Complete files as a host reads them from a storage."""
        if storage not in self._reached(host):
            raise Gone(f"the storage {storage} is out of reach", hint="is the directory mounted?")
        if (files := self.storages.get(storage, {}).get(name)) is None:
            raise Damaged(f"the saved VM {name} is missing", hint="is it in a backup?")
        return files

    def _reached(self, host: str) -> list[str]:
        """The storages that a host reaches: that to which it copies, and that to which it writes."""
        one = self.hosts[host]
        pairs = ((one.copies, self.detached_copies), (one.storage, self.detached))
        return [storage.name for storage, away in pairs if storage is not None and host not in away]

    def _storage_name(self, host: str) -> str:
        storage = self.hosts[host].storage
        if storage is None:
            raise Refused(f"host {host} saves no VMs", hint="set save.enabled for it")
        return storage.name

    def _storage(self, host: str) -> dict[str, SavedFiles]:
        """The complete files in the storage of a host. While it is out of reach it cannot be written, and is empty."""
        return {} if host in self.detached else self.storages.setdefault(self._storage_name(host), {})

    def _check_attached(self, host: str, name: str) -> None:
        if host in self.detached:
            raise Exhausted(f"cannot write {name}: no such directory", hint="is the storage mounted?")

    def host_at(self, source: str) -> str:
        return self.hosts_of(source)[0]

    # --- moves

    def expect(self, spec: VmSpec) -> bool:
        """A process for a VM begins on a host to which the VM is to move; False if it has begun already. Raises the
        errors of `begin`."""
        self._check_reachable(spec.host)
        self._check_taken(spec.host)
        machine, known = self.vms.get(spec.name), self.copies.get((spec.name, spec.host))
        if known is not None and known.condition is VmCondition.CREATING:
            return False
        if known is not None or machine is None or spec.host in (machine.spec.host, *self.refusing):
            raise Refused(f"{spec.name} cannot come to {spec.host}", hint="look what is there")
        self._check_room(spec.host)
        self._check_image(spec.image, spec.host)
        self.copies[spec.name, spec.host] = Machine(spec, size=machine.size)
        self.check_capacity(spec.host)
        return True

    def switch(self, name: str, host: str) -> None:
        """A VM goes on in its copy on a host. The process that it leaves never runs again: it is shown as dead."""
        machine, there = self.vms.take(name), self.copies.pop((name, host))
        self.copies[name, machine.spec.host] = replace(
            machine, condition=VmCondition.DEAD, reason="it has moved", guest=None
        )
        machine.spec, machine.template = there.spec, None  # all of its memory is its own
        self.vms[name] = machine

    # --- hosts

    def go_away(self, host: str) -> None:
        """The host cannot be reached any more, neither by the controller nor by the scheduler."""
        self.away.add(host)
        for guest in self._guests(host):
            guest.cut_off()

    def come_back(self, host: str) -> None:
        self.away.discard(host)
        for guest in self._guests(host):
            guest.reconnect()

    def switch_off(self, host: str) -> None:
        """End all VMs and templates of the host; nothing of them remains."""
        self._check_floor(host)
        for name in list(self.vms.on.get(host, ())):
            self.remove(name)
        for guest in [machine.guest for machine in self.vms.values() if machine.handed == host and machine.guest]:
            guest.stranded = True
        self.copies = {key: copied for key, copied in self.copies.items() if copied.spec.host != host}
        for which in list(self._templates_on.get(host, ())):
            self._remove_template(which)
        self.kept = {key: files for key, files in self.kept.items() if key[0] != host}

    def host_of(self, vm: str) -> str:
        """The host of a VM; empty if there is no such VM."""
        machine = self.vms.get(vm)
        return machine.spec.host if machine is not None else ""

    def vms_on(self, host: str) -> list[str]:
        """The names of the VMs of a host, also of those that have their other place there."""
        return [machine.spec.name for machine in self._on(host)]

    def _on(self, host: str) -> list[Machine]:
        moving = [one for one in self.copies.values() if one.spec.host == host]
        return [*self.vms.on.get(host, {}).values(), *moving]

    def remove(self, name: str) -> None:
        """End a VM, whatever it does."""
        self._stop(self.vms.take(name))

    def fill_disk(self, host: str) -> None:
        """The disk of the host has no room left. The guests that run write, and are paused."""
        self.full.add(host)
        for machine in self.vms.on.get(host, {}).values():
            if machine.condition is VmCondition.RUNNING and not machine.handed:
                self._pause(machine)

    def make_room(self, host: str) -> None:
        """The disk of the host has room again."""
        self.full.discard(host)
        for machine in self.vms.on.get(host, {}).values():
            if machine.condition is VmCondition.PAUSED:
                machine.condition = VmCondition.RUNNING
                if machine.guest is not None:
                    machine.guest.unpause()

    @staticmethod
    def _pause(machine: Machine) -> None:
        machine.condition = VmCondition.PAUSED
        if machine.guest is not None:
            machine.guest.pause()

    def _check_room(self, host: str) -> None:
        if host in self.full:
            raise Exhausted(f"the disk of {host} is full", hint="make room")

    def serves(self, host: str) -> bool:
        """Whether a job runs on the host, as the guests know."""
        return any(guest.alive and guest.serves() is not None for guest in self._guests(host))

    def _guests(self, host: str) -> list[Guest]:
        return [machine.guest for machine in self.vms.on.get(host, {}).values() if machine.guest]

    # --- observation

    def source_of(self, host: str) -> str:
        """The name of the source that answers for a host."""
        return host

    def hosts_of(self, source: str) -> Sequence[str]:
        """The hosts for which a source answers."""
        return [source] if source in self.hosts else []

    def find(self, vm: VmRef) -> Machine | None:
        """The VM of that name at that source. Raises `Unknown` if the source does not answer, `Refused` if there is no
        such source, or if the VM has another token."""
        hosts = self.hosts_of(vm.source)
        if not hosts:
            raise Refused(f"there is no source {vm.source!r} for VM {vm.name}", hint="name the source of its host")
        self._check_reachable(hosts[0])
        machine = self.vms.get(vm.name)
        if machine is None or self.source_of(machine.spec.host) != vm.source:
            machine = self.copies.get((vm.name, hosts[0]))
        if machine is None:
            return None
        if vm.token and machine.spec.token not in ("", vm.token):
            raise Refused(f"{vm.name} is another VM: it has another token", hint="look who made it")
        return machine

    def used(self, host: str) -> Size:
        """What VMs and templates take of a host now; of its disk, what they can write. A template takes no CPU."""
        machines = self._on(host)
        kept = [files.spec for (where, _), files in self.kept.items() if where == host]
        memory = sum(machine.takes.memory + OVERHEAD for machine in machines) + self._frozen(host)
        memory += sum(spec.size.memory + OVERHEAD for spec in kept)
        disk = sum(self.images[machine.spec.image].written(machine) for machine in machines)
        disk += sum(self.images[which.image].disk.overhead for which in self._templates_on.get(host, ()))
        net = sum(machine.takes.net for machine in machines)
        cpus = sum(machine.takes.cpus for machine in machines) + sum(spec.size.cpus for spec in kept)
        return Size(cpus, memory, disk, net)

    def available(self, host: str) -> int:
        """MiB that a host's machine has left beside what VMs, templates and others really use."""
        machine = self.hosts[host].machine
        assert machine is not None, "a host whose memory is checked has a machine"
        vms = sum(one.private(self._now()) for one in self._on(host))
        return int(machine.memory - self._others - vms - self._frozen(host))

    def _frozen(self, host: str) -> int:
        """MiB of templates. One that was deleted while VMs map it counts once, without copies."""
        existing = {self._current_build(which) for which in self._templates_on.get(host, ())}
        mapped = {one.template for one in self._on(host) if one.condition is not VmCondition.DEAD}
        copies = self.hosts[host].template_copies
        return sum(
            one.key.size.memory * (copies if one in existing else 1) for one in existing | mapped if one is not None
        )

    def _held(self, seen: TemplateSeen) -> float:
        """MiB that an observation shows as held by a template: none until the template is ready."""
        ready = seen.condition is TemplateCondition.READY
        return float(seen.size.memory * self.hosts[seen.host].template_copies) if ready else 0.0

    def _build_shown(self, seen: TemplateSeen) -> str:
        build = self._current_build(seen.which) if seen.condition is TemplateCondition.READY else None
        return build.name if build else ""

    def _current_build(self, which: TemplateKey | None) -> TemplateBuild | None:
        return TemplateBuild(which, self._builds[which]) if which is not None else None

    def view(self, host: str) -> HypervisorView:
        """What the source of one host shows. Raises `Unknown` if the host cannot be reached."""
        self._check_reachable(host)
        on_host = sorted(self._on(host), key=lambda machine: machine.spec.name)
        vms = {machine.spec.name: self._vm_shown(machine) for machine in on_host}
        seen = self._host_shown(host, vms)
        templates = {which: self._template_shown(which) for which in sorted(self._templates_on.get(host, ()))}
        view = HypervisorView({host: seen}, vms, templates, self._saved_shown(seen))
        if view == (before := self._views.get(host)):  # an agent's connection keeps the same object, too
            return before
        self._views[host] = view
        return view

    def _host_shown(self, host: str, vms: Mapping[str, VmSeen]) -> Host:
        """The same object for as long as it shows the same, as are those of templates and VMs."""
        of = (
            self.hosts[host], self._images(host), self._disks(), self.available(host) if self._overcommit > 1 else 0,
            0 if host in self.full else None, self._load(host, vms), host in self.detached,
            host in self.detached_copies,
        )  # fmt: skip
        shown = self._hosts_shown.get(host)
        if shown is None or shown[0] != of:
            seen, images, disks, available, left, load, alone, without_copies = of
            seen = replace(seen, images=images, disks=disks, available=available, available_disk=left, load=load,
                           storage=None if alone else seen.storage,
                           copies=None if without_copies else seen.copies)  # fmt: skip
            shown = self._hosts_shown[host] = of, seen
        return shown[1]

    def _template_shown(self, which: TemplateKey) -> TemplateSeen:
        seen = self.templates[which]
        of = (seen, self._held(seen), self._build_shown(seen))
        shown = self._templates_shown.get(which)
        if shown is None or shown[0] != of:
            shown = self._templates_shown[which] = of, replace(seen, held=of[1], build=of[2])
        return shown[1]

    def _vm_shown(self, machine: Machine) -> VmSeen:
        """The same object for as long as it shows the same: most VMs of most observations are as before."""
        of = (
            machine.condition, machine.handed, machine.reason, machine.private(self._now()),
            machine.guest and frozenset(machine.guest.users), machine.address, machine.mac, machine.placed_on,
            machine.spec, machine.size, self._written(machine), machine.frozen, machine.freezing, machine.slept,
            machine.told, machine.channel_closed, machine.template,
        )  # fmt: skip
        if machine.shown is None or machine.shown[0] != of:
            machine.shown = of, self._as_vm(machine)
        return machine.shown[1]

    def _as_vm(self, machine: Machine) -> VmSeen:
        spec = machine.spec
        return VmSeen(
            spec.name,
            spec.host,
            VmCondition.DEAD if machine.handed else machine.condition,
            "it was handed over to another host" if machine.handed else machine.reason,
            private=machine.private(self._now()),
            users_added=tuple(sorted(machine.guest.users)) if machine.guest else (),
            address=machine.address or spec.address,
            mac=machine.mac or spec.mac,
            placed_on=machine.placed_on,
            token=spec.token,
            size=machine.size or spec.size,
            disk=self._written(machine),
            frozen=machine.frozen,
            freezing=machine.freezing,
            sleeps=machine.slept,
            told=machine.told,
            mute=machine.channel_closed,
            template_build=machine.template.name if machine.template else "",
            template_memory=machine.template.key.size.memory if machine.template else 0,
        )

    def _saved_shown(self, host: Host) -> dict[str, SavedSeen]:
        kept = {
            name: SavedSeen(name, files.spec.token, 0, "", kept=True)
            for (where, name), files in sorted(self.kept.items())
            if where == host.name
        }
        shown: dict[str, SavedSeen] = {}
        for storage in self._reached(host.name):  # the one to which it writes is the last
            for name in sorted(self.unfinished.get(storage, ())):
                shown.setdefault(name, SavedSeen(name, "", 0, storage, complete=False))
            for name, one in sorted(self.storages.get(storage, {}).items()):
                copy = before.storage if (before := shown.get(name)) is not None and before.complete else ""
                shown[name] = SavedSeen(name, one.spec.token, one.bytes, storage, one.written, copy=copy)
        return shown | kept

    def _load(self, host: str, vms: Mapping[str, VmSeen]) -> Load:
        """Guests that run use all their CPUs."""
        running = [one for one in self.vms.on.get(host, {}).values() if one.condition is VmCondition.RUNNING]
        cpus = sum((one.size or one.spec.size).cpus for one in running)
        return Load(float(cpus), int(sum(vms[one.spec.name].private for one in running)) // 64 * 64)

    # --- checks

    def _get(self, vm: VmRef) -> Machine:
        machine = self.find(vm)
        if machine is None:
            raise Gone(f"no VM {vm.name} at {vm.source}")
        return machine

    def refuse(self, host: str, why: str, holds_until: float = 0.0) -> None:
        """The host's agent takes no VM any more, and says so with each observation, and until when (Unix time) it
        leaves its VMs alone."""
        if host in self.hosts:  # its agent has started
            self.hosts[host] = replace(self.hosts[host], refuses=why, holds_until=holds_until)

    def _check_taken(self, host: str) -> None:
        if why := self.hosts[host].refuses:
            raise Refused(why, hint="another host takes the VM")

    def _check_reachable(self, host: str) -> None:
        if host not in self.hosts:
            raise Gone(f"no host {host}")
        if host in self.away and not self.has_agents:
            raise Unknown(f"host {host} does not answer", hint="see whether it runs")

    def _images(self, host: str) -> dict[str, frozenset[str]]:
        return {image.name: image.abilities for image in self.images.values() if self._has_image(image, host)}

    def _has_image(self, image: SimulatedImage, host: str) -> bool:
        number = self._numbers.get(host, len(self._numbers))
        return not image.since or image.since[min(number, len(image.since) - 1)] <= self._now()

    def _disks(self) -> dict[str, ImageDisk]:
        """What hosts report of the disks of images."""
        return {image.name: image.disk for image in self.images.values()}

    def _written(self, machine: Machine) -> int:
        """What the source shows that a VM can write."""
        return self.images[machine.spec.image].written(machine)

    def _check_image(self, name: str, host: str) -> None:
        if name not in self.images or not self._has_image(self.images[name], host):
            raise Refused(f"no image {name}", hint="build it first")

    def _check_unused(self, spec: VmSpec) -> None:
        """Refuse a token, MAC or address that another VM has."""
        for other, what in self.vms.same(spec):
            raise Refused(f"{spec.name}: {other} has the same {what}", hint="destroy one of them")

    def _check_template(self, spec: VmSpec) -> None:
        if spec.kind is not CloneKind.INSTANT or spec.saved:
            return  # it boots from its image, or is restored from its files
        template = self.templates.get(spec.template) if spec.template else None
        if template is None or template.condition is not TemplateCondition.READY:
            raise Gone(f"no such template of {spec.image} on {spec.host}", hint="build it first")
        can = self.images[spec.image].abilities
        if ("plug_cpus" not in can and spec.size.cpus != template.size.cpus) or (
            "plug_memory" not in can and spec.size.memory != template.size.memory
        ):
            self.violations.append(f"{spec.name} of {spec.size} cannot come from {template.image} of {template.size}")

    def _stop(self, machine: Machine) -> None:
        if machine.guest is not None:
            guest, machine.guest = machine.guest, None
            for value in _unique_identity(guest.identity):
                self._identities.pop(value, None)
            guest.die()
            guest.cluster.stopped_answering(guest)

    def check_writable(self, host: str) -> None:
        """Raise `Refused` or `Exhausted` if no VM of a host can be written to a file."""
        if self._storage_name(host) in self.full_storages or host in self.detached or host in self.full:
            raise Exhausted(f"no room for the memory of a VM on {host}", hint="make room")

    def check_capacity(self, host: str) -> None:
        used, capacity = self.used(host), self.hosts[host].capacity
        times = used.memory / capacity.memory
        self.peak_memory_ratio = max(self.peak_memory_ratio, times)
        cpus = int(capacity.cpus * self.hosts[host].overcommit.cpus)
        if used.cpus > cpus or times > self._overcommit or used.disk > capacity.disk or used.net > capacity.net:
            self.violations.append(f"host {host} of {capacity} was made to carry {used}")
        self._check_floor(host)

    def _check_floor(self, host: str) -> None:
        """Check the memory that is left. Called before memory is released, because until then the rest only falls."""
        if self._overcommit > 1 and (left := self.available(host)) < self._floor:
            self.violations.append(f"host {host} had {left} MiB available, and had to keep {self._floor}")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _check_identity(self, name: str, identity: Identity) -> None:
        if identity.hostname != name:
            self.violations.append(f"{name} was started as {identity.hostname}")
        for what, value in _unique_identity(identity):
            if (other := self._identities.setdefault((what, value), name)) != name:
                self.violations.append(f"{name} and {other} share {what} {value}")


def _unique_identity(identity: Identity) -> list[tuple[str, str]]:
    """What no two guests may share: it is empty if the driver makes it."""
    names = ("hostname", "mac", "address", "machine_id")
    return [(what, value) for what in names if (value := getattr(identity, what))]
