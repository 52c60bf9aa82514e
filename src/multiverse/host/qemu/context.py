"""What the operations on one host share: its configuration, and the parts that were set up from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from multiverse.core.errors import Gone, Refused
from multiverse.core.model import CloneKind, DiskCost, ImageDisk, Overcommitment, Size, Stage, TemplateKey
from multiverse.guest.protocol import DISK, TEMPLATE
from multiverse.host import disks, path_security
from multiverse.host.cgroups import Cgroups
from multiverse.host.firewall import Firewall
from multiverse.host.job_groups import JobGroups
from multiverse.host.memfd import SealedMemory
from multiverse.host.namespaces import System
from multiverse.host.numa import NODES, NumaNodes
from multiverse.host.qemu import features, probe, templates
from multiverse.host.qemu.ability_cache import AbilityCache
from multiverse.host.qemu.connections import Connections
from multiverse.host.qemu.features import HostFeatures
from multiverse.host.qemu.full_disk import PausedGuests
from multiverse.host.qemu.machine import Accelerator, Feature, Memory, QemuMachine, limits
from multiverse.host.qemu.names import GuestNames
from multiverse.host.qemu.output import OutputStore
from multiverse.host.qemu.session import Launch, Paths, QemuSession
from multiverse.host.qemu.template_copies import TemplateCopies, cpu_of
from multiverse.host.qemu.templates import FrozenTemplate
from multiverse.host.registry import VmRegistry
from multiverse.host.specification import Specification
from multiverse.host.uids import UidPool
from multiverse.host.virtual_functions import RECORDS, VirtualFunctions
from multiverse.host.vxlan import Vxlan, VxlanConfig
from multiverse.images.catalog import Image
from multiverse.images.transfer import ImageStore
from multiverse.system import tsc

_TEMPLATE_MAC = "02:00:00:00:00:01"  # a template is on no bridge; each clone gets a MAC of its own
_IDLE_THREADS = 128  # QEMU's pool has 64 at most (util/thread-pool.c), and starts some more for a moment


@dataclass(frozen=True)
class QemuHostConfig:
    """One host: its name, its directories, and what VMs on it may have. Memory and disk are MiB.

    VMs are the ones whose names begin with `prefix`. All processes that run VMs on one machine must agree on `vms` and
    `uids`. `cache` holds what was found out about this machine. `uids` are the first user for QEMUs and how many; a
    count of 0 runs every QEMU as the user of this process. `base` is the size of the smallest template, `largest` the
    one that a VM can be plugged up to, and `capacity` what the host declares; `overcommit` lets VMs claim more than
    that. `scratch` is what the users of each VM may write to its disk, if the VM's own size does not say more.
    `tb_size` is emulation's cache of translated code, 0 for QEMU's default. `guests` are the first and the last address
    that a VM of any host can have. `uplink` connects the bridge with other hosts, if it is known; where `capacity` has
    no bandwidth, that of the uplink counts. Images that are not in `images` are copied from `image_source`, and
    templates that another host has built from `template_source`. `features` are the modes of `HostFeatures`. `numa` is
    where the kernel describes the machine's NUMA nodes. `vxlan` connects the bridge with those of other hosts, and
    `mtu` is that of guests where it is not 1500. `functions` says which virtual functions VMs may have (see
    `VirtualFunctions`).
    """

    host: str
    prefix: str
    capacity: Size
    images: Path
    templates: Path
    vms: Path
    run: Path
    cache: Path
    binary: str = "qemu-system-x86_64"
    accelerator: str = "auto"
    uids: tuple[int, int] = (0, 0)
    base: Size = Size(1, 256)
    largest: Size = Size(64, 262144)
    overcommit: Overcommitment = Overcommitment()
    scratch: int = 2048
    tb_size: int = 0
    image_source: Path | None = None
    template_source: Path | None = None
    guests: tuple[str, str] = ("0.0.0.0", "0.255.255.255")
    uplink: str = ""
    numa: Path = NODES
    vxlan: VxlanConfig | None = None
    mtu: int = 0
    functions: tuple[str, ...] = ()
    features: Mapping[Feature, str] = field(default_factory=dict)


class VmStageTimer:
    """Measures stages that follow each other."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        """The stage of that name ends now."""
        now = time.monotonic()
        self.stages.append(Stage(name, now - self._last))
        self._last = now


class HostContext:
    """The parts of one host. Setting it up runs QEMU, to learn its version and, once per machine, whether KVM works."""

    def __init__(self, config: QemuHostConfig) -> None:
        self.config = config
        self.version = probe.qemu_version(config.binary)
        found = probe.accelerator(config.accelerator, config.binary, self.version, config.cache / "kvm.json")
        relocates = probe.is_since(self.version, 8)
        self.accelerator: Accelerator = replace(
            found, tb_size=config.tb_size, relocates=relocates, tsc_khz=tsc.measured_khz() or 0
        )
        self.maps_readonly = probe.is_since(self.version, 8, 2)  # see `memfd`
        trials = features.trials(
            config.binary, self.version, self.accelerator, config.vms, config.cache / "features.json"
        )
        self.features = HostFeatures(config.features, self.accelerator, trials)
        self.abilities = AbilityCache(config.cache / "guests.json", f"{self.version} {found.name}")
        self.images = ImageStore(
            config.images, config.image_source, lambda path: path_security.check(path, inside=True)
        )
        self.copies = (
            TemplateCopies(
                config.template_source, cpu_of(self.accelerator), lambda path: path_security.check(path, inside=True)
            )
            if config.template_source is not None
            else None
        )
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
        self._limits = limits(config.base, config.capacity, config.largest)

    def paths(self, name: str) -> Paths:
        """The files of a VM."""
        return Paths(self.config.vms / name, self.config.run / name)

    def check_name(self, name: str) -> None:
        """Raise `Refused` if this is no name of a VM of this site. It names files and an interface."""
        serial = name.removeprefix(self.config.prefix)
        if serial == name or not serial.isalnum() or not serial.isascii() or len(name.encode()) > 15:
            hint = f"they are {self.config.prefix}<serial>, at most 15 bytes"
            raise Refused(f"{name!r} is no VM of this site", hint=hint)

    def image(self, name: str) -> Image:
        """The image of that name, copied first if that is necessary. Raises `Refused` if there is none, or if an
        untrusted user could change it, and what `ImageStore.fetch` raises."""
        image = self.images.fetch(name)
        path_security.check(image.path, inside=True)
        return image

    def template_for(self, spec: Specification) -> FrozenTemplate:
        """The template that the VM is forked from. Raises `Gone` if it does not exist or cannot be used any more."""
        config, template = self.config, None
        if (which := spec.template) is not None:
            template = templates.load(config.templates / templates.directory_name(which))
        if template is None or not self.is_usable(template):
            raise Gone(f"VM {spec.name} has no template of image {spec.image} on {config.host}", hint="build it first")
        path_security.check(template.path.parent)
        return template

    def is_usable(self, template: FrozenTemplate) -> bool:
        """Whether a build of its image, size and account would make the same template now."""
        which = TemplateKey(self.config.host, template.image, template.size, template.account)
        try:
            image = self.images.described(template.image)
        except Refused:
            return False
        key = templates.key_of(image, self.template_machine(image, template.size)(Path("/"), Path("/")), self.version)
        return (template.path.name, template.key) == (templates.directory_name(which), key)

    def launch(self, launch: Launch) -> QemuSession:
        """Start a QEMU. If it is the first, and does not start, later ones are started without its features."""
        used = launch.machine.features
        session = QemuSession.launch(replace(launch, failed=lambda reason: self.features.failed(used, reason)))
        self.features.started(used)
        return session

    # --- machines -------------------------------------------------------------------------------------

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
            plain = template.with_stubs(self._machine(image, template.size, memory, disk))
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
        """The size up to which a VM of `size` can be plugged. A guest that cannot be plugged gets no room for it, which
        would cost it memory."""
        return Size(self._limits.cpus if "plug_cpus" in image.abilities else size.cpus,
                    self._limits.memory if "plug_memory" in image.abilities else size.memory)  # fmt: skip

    # --- disks ----------------------------------------------------------------------------------------

    def allowance(self, size: Size) -> int:
        """MiB that the users of a VM of `size` may write to its disk."""
        return max(self.config.scratch, size.disk)

    def image_disk(self, image: Image) -> ImageDisk:
        """How large the files of the image's VMs can become."""
        size = self.images.disk_size(image)
        return disks.image_disk(disks.virtual_size(image.disk) if size is None else size)

    def disk_cost(self, image: Image, kind: CloneKind) -> DiskCost:
        """What the files of a VM can grow to, by its allowance: as `core.model.Host.disk_cost` says of this host."""
        limited = kind is not CloneKind.FULL and self._limits_disk(image)
        return self.image_disk(image).cost(limited=limited)

    def _limits_disk(self, image: Image) -> bool:
        return "limit_disk" in self.abilities.abilities(image)

    def _disk_option(self, image: Image, allowance: int) -> str:
        """What the kernel's command line says of the allowance."""
        return f" {DISK}{allowance}" if self._limits_disk(image) else ""

    # --- limits ---------------------------------------------------------------------------------------

    def groups(self, job_groups: Sequence[str]) -> Cgroups | JobGroups:
        """The control groups of a VM that is inside of the job with these; of others, if there are none."""
        return JobGroups(job_groups, self.cgroups.beside(job_groups)) if job_groups else self.cgroups

    def limit(self, groups: Cgroups | JobGroups, name: str, memory: int, cpus: int) -> int:
        """Limit the QEMU of a VM of `memory` MiB and `cpus` CPUs. Returns how many threads it may have."""
        threads = cpus + _IDLE_THREADS
        groups.set_limits(name, self.accelerator.footprint(memory), threads)
        return threads
