"""The configuration of one host, and the parts that the operations on it share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import structlog

from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import DiskCost, ImageDisk, Overcommitment
from multiverse.core.model.machine import HOST_CPU, MachineKind
from multiverse.core.model.vm import Stage
from multiverse.guest.protocol import DISK, TEMPLATE
from multiverse.host import path_security
from multiverse.host.cgroups import Cgroups, JobGroups
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, Specification
from multiverse.host.namespaces import System
from multiverse.host.numa import NODES, NumaNodes
from multiverse.host.qemu import abilities, cpus, disks
from multiverse.host.qemu.abilities import AbilityCache, HostFeatures
from multiverse.host.qemu.connections import Connections, GuestNames
from multiverse.host.qemu.cpus import HostCpu
from multiverse.host.qemu.disks import PausedGuests
from multiverse.host.qemu.machine import Accelerator, Feature, Memory, QemuMachine, limits
from multiverse.host.qemu.session import FrozenTemplate, Launch, OutputStore, Paths, QemuSession
from multiverse.host.qemu.template_copies import SealedMemory, TemplateCopies
from multiverse.host.registry import UidPool, VmRegistry
from multiverse.host.virtual_functions import RECORDS, VirtualFunctions
from multiverse.host.vxlan import Vxlan, VxlanConfig
from multiverse.images.catalog import Image
from multiverse.images.transfer import ImageStore
from multiverse.system import kernel

log = structlog.get_logger(__name__)

_TEMPLATE_MAC = "02:00:00:00:00:01"  # a template is on no bridge; each clone gets a MAC of its own
_IDLE_THREADS = 128  # QEMU's pool has 64 at most (util/thread-pool.c), and starts some more for a moment


@dataclass(frozen=True)
class MoveConfig:
    """How VMs move to other hosts: see `config.MoveSettings`."""

    private: bool = False
    compress: bool = False
    bandwidth: int = 0  # MiB/s; 0: any
    timeout: float = 600.0  # seconds
    downtime: float = 0.05  # seconds
    namespace: int | None = None  # a descriptor of the network by which other hosts are reached; None: this process's


@dataclass(frozen=True)
class QemuHostConfig:
    """One host. Memory and disk are MiB. All processes that run VMs on one machine must agree on `vms` and `uids`."""

    host: str  # its name
    prefix: str  # the beginning of the names of its VMs
    capacity: Size  # that it declares; without bandwidth, that of `uplink` counts
    images: Path
    templates: Path
    vms: Path
    run: Path
    cache: Path  # facts that were found out about this machine
    binary: str = "qemu-system-x86_64"
    accelerator: str = "auto"
    cpu: str = HOST_CPU  # QEMU's CPU model of guests that run on KVM
    uids: tuple[int, int] = (0, 0)  # first user for QEMUs, and how many; with none, they run as this process's user
    base: Size = Size(1, 256)  # of the smallest template
    largest: Size = Size(64, 262144)  # up to which a VM can be plugged
    overcommit: Overcommitment = Overcommitment()  # VMs may claim more than the capacity
    scratch: int = 2048  # that users of each VM may write to its disk, if the VM's own size does not say more
    tb_size: int = 0  # emulation's cache of translated code; 0: QEMU's default
    image_source: Path | None = None  # images that are not in `images` are copied from there
    template_source: Path | None = None  # templates that another host has built are copied from there
    guests: tuple[str, str] = ("0.0.0.0", "0.255.255.255")  # first and last address of VMs of all hosts
    uplink: str = ""  # the interface that connects the bridge with other hosts
    numa: Path = NODES  # where the kernel describes the machine's NUMA nodes
    vxlan: VxlanConfig | None = None  # connects the bridge with those of other hosts
    mtu: int = 0  # of guests; 0: 1500
    saves: Path | None = None  # where VMs are saved; None: none is
    copies: Path | None = None  # where saved VMs are copied to; None: nowhere
    functions: tuple[str, ...] = ()  # virtual functions that VMs may have: see `VirtualFunctions`
    features: Mapping[Feature, str] = field(default_factory=dict)  # modes: see `HostFeatures`
    moves: MoveConfig | None = None  # None: no VM moves


class VmStageTimer:
    """Measures stages that follow each other."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self.stages.append(Stage(name, now - self._last))
        self._last = now


class HostContext:
    """The parts of one host. Setting it up runs QEMU, to learn its version and, once per machine, whether KVM works."""

    def __init__(self, config: QemuHostConfig) -> None:
        self.config = config
        self.version = abilities.qemu_version(config.binary)
        found = abilities.accelerator(config.accelerator, config.binary, self.version, config.cache / "kvm.json")
        relocates = abilities.is_since(self.version, 8)
        self.model_off: dict[str, str] = {}  # why guests do not have the CPU model of the settings, if they have not
        self.accelerator: Accelerator = replace(
            found, tb_size=config.tb_size, relocates=relocates, tsc_khz=kernel.measured_khz() or 0,
            model=self._model() if found.name == "kvm" else HOST_CPU,
        )  # fmt: skip
        self.maps_readonly = abilities.is_since(self.version, 8, 2)  # see `memfd`
        trials = abilities.trials(
            config.binary, self.version, self.accelerator, config.vms, config.cache / "features.json"
        )
        self.features = HostFeatures(config.features, self.accelerator, trials)
        self.abilities = AbilityCache(config.cache / "guests.json", f"{self.version} {found.name}")
        check = partial(path_security.check, inside=True)
        self.images = ImageStore(config.images, config.image_source, check)
        self.copies: TemplateCopies | None = None
        if config.template_source is not None:
            clock = f" {round(self.accelerator.tsc_khz / 1000)} MHz" if found.name == "kvm" else ""
            self.copies = TemplateCopies(config.template_source, f"{self.guest_cpu()}{clock}", check)
        self.registry = VmRegistry(config.vms)
        self.uids = UidPool(*config.uids)
        self.functions = VirtualFunctions(config.functions, config.vms / RECORDS)
        self.sealed = SealedMemory()
        self.numa = NumaNodes(config.vms, config.overcommit.cpus, config.numa)
        self.cgroups = Cgroups(cpusets=self.numa.are_several)
        self.firewall = Firewall(config.prefix, config.vms, config.guests, config.host)
        self.vxlan = Vxlan(config.vxlan) if config.vxlan is not None else None
        self.connections = Connections(self.paths)
        self.names = GuestNames(config.host, self.firewall, self.connections)
        self.outputs = OutputStore()
        self.paused = PausedGuests(config.vms, self.paths)
        self.system = System.of(config.binary, self.accelerator.devices())
        self._kind: MachineKind | None = None
        self._limits = limits(config.base, config.capacity, config.largest)

    @cached_property
    def host_cpu(self) -> HostCpu:
        """This host's CPU. Needs KVM. Raises `Broken` if QEMU does not describe it."""
        return cpus.examine(self.config.binary)

    def _model(self) -> str:
        """The CPU model of guests that run on KVM: that of the settings, or the host's own if it does not run that."""
        wanted = self.config.cpu
        if wanted == HOST_CPU:
            return HOST_CPU
        if not (why := self.host_cpu.why_not(wanted)):
            return self.host_cpu.named(wanted)
        log.warning("guests have the host's CPU and not the model of the settings", model=wanted, reason=why)
        self.model_off = {f"CPU model {wanted}": why}
        return HOST_CPU

    def guest_cpu(self, model: str = "") -> str:
        """How guests run here with that CPU model, or with that of this host's VMs. A guest that was frozen or saved
        goes on alone where this is the same. Raises `Broken` if QEMU does not describe the host's CPU."""
        if self.accelerator.name != "kvm":
            return self.accelerator.name
        model = model or self.accelerator.cpu
        return f"kvm {self.host_cpu.identity if model == HOST_CPU else self.host_cpu.vendor} {model}"

    def runs(self, model: str) -> bool:
        """Whether guests of another host with that CPU model can have it here."""
        return self.accelerator.name != "kvm" or model in ("", HOST_CPU, *self.host_cpu.models)

    def machine_kind(self) -> MachineKind:
        """The machine that VMs of this host see. Raises `Broken` if QEMU does not describe it."""
        if self._kind is None:
            how, board = self.accelerator, abilities.board(self.config.binary)
            kind = MachineKind(how.name, how.cpu, frozenset(), self.version, board, os.sysconf("SC_PAGE_SIZE"))
            if how.name == "kvm":
                self._kind = self.host_cpu.described(kind, self.config.cpu)
            else:  # each host measures its own, a few kHz off: whole MHz let a clock be wrong by 17 s a day
                self._kind = replace(kind, tsc_khz=round(how.tsc_khz / 1000) * 1000)
        return self._kind

    def paths(self, name: str) -> Paths:
        return Paths(self.config.vms / name, self.config.run / name)

    def check_name(self, name: str) -> None:
        """Raise `Refused` if this is no name of a VM of this site. It names files and an interface."""
        serial = name.removeprefix(self.config.prefix)
        if serial == name or not serial.isalnum() or not serial.isascii() or len(name.encode()) > 15:
            hint = f"they are {self.config.prefix}<serial>, at most 15 bytes"
            raise Refused(f"{name!r} is no VM of this site", hint=hint)

    def image(self, name: str) -> Image:
        """The image of that name, copied first if necessary. Raises `Refused` if there is none, or if an untrusted user
        could change it, and what `ImageStore.fetch` raises."""
        image = self.images.fetch(name)
        path_security.check(image.path, inside=True)
        return image

    def launch(self, launch: Launch) -> QemuSession:
        """Start a QEMU. If it is the first, and does not start, later ones are started without its features."""
        used = launch.machine.features
        session = QemuSession.launch(replace(launch, failed=lambda reason: self.features.failed(used, reason)))
        self.features.started(used)
        return session

    def template_machine(self, image: Image, size: Size) -> Callable[[Path, Path], QemuMachine]:
        """Gives the machine of a template, from its disk and its memory file."""

        def machine(disk: Path, memory: Path) -> QemuMachine:
            plain = self._machine(image, size, Memory(size.memory, memory), disk)
            return replace(
                plain,
                name=f"template-{image.name}",
                mac=_TEMPLATE_MAC,
                cmdline=f"{plain.cmdline}{self._disk_option(image, self.config.scratch)} {TEMPLATE}",
                waits_for_room=False,
            )

        return machine

    def vm_machine(self, spec: Specification, image: Image, template: FrozenTemplate | None, disk: Path) -> QemuMachine:
        """The machine of a VM, whose disk is a qcow2 overlay unless the VM is a full clone."""
        if template is None:
            plain = self._machine(image, spec.size, Memory(spec.size.memory), disk)
            if spec.kind is not CloneKind.FULL:
                allowance = self.allowance(spec.size)
                plain = replace(plain, cmdline=plain.cmdline + self._disk_option(image, allowance))
        else:
            memory = Memory(template.size.memory, template.memory)
            # Stubs of kernel and ramdisk, because the restored memory holds both: this saves 14 MiB for each clone.
            plain = self._machine(image, template.size, memory, disk)
            plain = replace(plain, kernel=template.path / "kernel.stub", initrd=template.path / "initrd.stub")
        plain = replace(plain, name=spec.name, mac=spec.mac)
        if spec.kind is not CloneKind.FULL:
            return plain
        native = self.features.in_use & {Feature.NATIVE_AIO}
        return replace(plain, disk_format="raw", features=plain.features | native)

    def _machine(self, image: Image, size: Size, memory: Memory, disk: Path) -> QemuMachine:
        return QemuMachine(
            name="",
            accelerator=self.accelerator,
            cpus=size.cpus,
            memory=memory,
            limits=self.largest(image, Size(size.cpus, memory.size)),
            disk=disk,
            disk_format="qcow2",
            mac="",
            kernel=image.kernel,
            initrd=image.initrd,
            cmdline=self.accelerator.cmdline(image.cmdline),
            features=self.features.in_use & {Feature.VHOST_NET, Feature.IOTHREAD},
            mtu=self.config.mtu,
        )

    def largest(self, image: Image, size: Size) -> Size:
        """The size up to which a VM can be plugged. Room costs memory, so a guest without hotplug gets none."""
        return Size(self._limits.cpus if "plug_cpus" in image.abilities else size.cpus,
                    self._limits.memory if "plug_memory" in image.abilities else size.memory)  # fmt: skip

    def most_of(self, known: Manifest, image: Image) -> Size:
        """The size up to which the machine of a VM could be plugged: that of the host that made it."""
        return known.most or self.largest(image, Size(known.cpus, known.memory))

    def allowance(self, size: Size) -> int:
        """MiB that the users of a VM of `size` may write to its disk."""
        return max(self.config.scratch, size.disk)

    def image_disk(self, image: Image) -> ImageDisk:
        size = self.images.disk_size(image)
        return disks.image_disk(disks.virtual_size(image.disk) if size is None else size)

    def disk_cost(self, image: Image, kind: CloneKind) -> DiskCost:
        """MiB that the files of a VM can grow to, by its allowance: see `core.model.Host.disk_cost`."""
        limited = kind is not CloneKind.FULL and self._limits_disk(image)
        return self.image_disk(image).cost(limited=limited)

    def _limits_disk(self, image: Image) -> bool:
        return "limit_disk" in self.abilities.abilities(image)

    def _disk_option(self, image: Image, allowance: int) -> str:
        return f" {DISK}{allowance}" if self._limits_disk(image) else ""

    def groups(self, job_groups: Sequence[str]) -> Cgroups | JobGroups:
        """The control groups of a VM: beside the steps of the job with these groups, or a VM's usual ones."""
        return JobGroups(job_groups, self.cgroups.beside(job_groups)) if job_groups else self.cgroups

    def limit(self, groups: Cgroups | JobGroups, name: str, memory: int, cpus: int) -> int:
        """Limit the QEMU of a VM of `memory` MiB and `cpus` CPUs. Returns the number of threads that it may have."""
        threads = cpus + _IDLE_THREADS
        groups.set_limits(name, self.accelerator.footprint(memory), threads)
        return threads
