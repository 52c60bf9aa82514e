"""QEMU as a hypervisor: one host, this machine. The host side does the work, in threads of its own."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog

from multiverse.config import Settings
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.core.model import (
    CloneKind,
    Host,
    HypervisorView,
    Identity,
    Size,
    Stage,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    User,
    VmCondition,
    VmRef,
    VmSeen,
    VmSpec,
)
from multiverse.guest.protocol import TEMPLATE, Report
from multiverse.host import link, manifest, probe, process, templates, trust, vms
from multiverse.host.found import Found
from multiverse.host.machine import Accelerator, Machine, Memory, limits
from multiverse.host.manifest import Manifest, Phase
from multiverse.host.templates import Template
from multiverse.host.vms import Places, Vms
from multiverse.images import catalog as images
from multiverse.images.catalog import Image

log = structlog.get_logger(__name__)
T = TypeVar("T")

_TEMPLATE_MAC = "02:00:00:00:00:01"  # on no bridge; each clone gets its own
_CONDITIONS = {
    Phase.MAKING: VmCondition.MAKING,
    Phase.PARKED: VmCondition.PARKED,
    Phase.STARTING: VmCondition.STARTING,
    Phase.STARTED: VmCondition.RUNNING,
}
_MEASURED_FOR = 2.0  # seconds that a VM's figures count as new
_CONSOLE_LIMIT = 1 << 20  # bytes of a guest's console that are kept


class QemuHypervisor:
    """`ports.Hypervisor` with QEMU on this machine. `site` marks which VMs are ours: `mv<site>-…`."""

    def __init__(self, settings: Settings, site: str) -> None:
        self._settings = settings.qemu
        self._host = settings.host
        self._prefix = f"mv{site}-"
        qemu = settings.qemu
        self._version = probe.qemu_version(qemu.binary)
        found = probe.accelerator(qemu.accel, qemu.binary, self._version, settings.state_dir / "kvm.json")
        self._accelerator = replace(found, tb_size=qemu.tb_size, relocates=probe.is_since(self._version, 8))
        self._found = Found(settings.state_dir / "guests.json", f"{self._version} {found.name}")
        self._vms = Vms(Places(qemu.vms.absolute(), qemu.run.absolute(), qemu.bridge, qemu.binary, qemu.uids,
                               probe.is_since(self._version, 8, 2), self._prefix, self._accelerator))  # fmt: skip
        self._limits = limits(Size(qemu.base_cpus, qemu.base_memory), Size(settings.host.cores, settings.host.memory),
                              Size(qemu.max_cpus, qemu.max_memory))  # fmt: skip
        self._manifests: dict[str, tuple[tuple[int, int], Manifest | None]] = {}
        self._figures: dict[str, tuple[float, VmSeen]] = {}
        self._reasons: dict[str, str] = {}
        self._making: dict[str, Future[Sequence[Stage]]] = {}
        self._drops: Counter[str] = Counter()  # of each template, by name
        self._closed = False
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="qemu")
        vms.raise_file_limit()
        process.hand_on_nothing()

    @property
    def accelerator(self) -> Accelerator:
        """How guests are run: by KVM, or emulated."""
        return self._accelerator

    @property
    def name(self) -> str:
        """See `ports.Source`: this machine answers for itself."""
        return self._host.name

    @property
    def sources(self) -> Sequence[QemuHypervisor]:
        """See `ports.Hypervisor`."""
        return (self,)

    @property
    def templates(self) -> QemuHypervisor:
        """See `ports.Hypervisor`."""
        return self

    @property
    def users(self) -> QemuHypervisor:
        """See `ports.Hypervisor`."""
        return self

    @property
    def hosts(self) -> Sequence[str]:
        """See `ports.Hypervisor`."""
        return [self._host.name]

    def check(self) -> None:
        """Raise `Refused` or `Broken` with what this process is not let do: VMs need users and links of their own, and
        places that nobody else writes to. Those are made."""
        self._vms.owners.check()
        os.close(link.open_tap("mvt%d", None))
        places = self._vms.places
        for place, mode in ((self._settings.templates.absolute(), 0o711), (places.vms, 0o711), (places.run, 0o700)):
            trust.make(place, mode)
        if self._settings.images.exists():  # each image is looked at when it is used
            trust.check(self._settings.images)

    # --- looking --------------------------------------------------------------------------------------

    async def observe(self) -> HypervisorView:
        """See `ports.Hypervisor`. Runs no program and asks no QEMU: manifests and /proc tell."""
        return await self._in_thread(self._observe)

    def _observe(self) -> HypervisorView:
        name = self._host.name
        seen = {path.name: self._seen(path) for path in self._directories()}
        for gone in (*(set(self._manifests) - set(seen)), *(set(self._figures) - set(seen))):
            self._manifests.pop(gone, None)  # a name never comes again
            self._figures.pop(gone, None)
        known = images.list_images(self._settings.images)
        ready = {t.which: t for t in self._templates()}  # before what they have shown that their images can do
        return HypervisorView({name: self._as_host(known)}, seen, ready)

    def _as_host(self, known: Iterable[Image]) -> Host:
        capacity = Size(self._host.cores, self._host.memory, self._host.disk)
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        abilities = frozenset({"instant", "linked", "full", "plug_cpus", "plug_memory"})
        copies = 1 if self._vms.places.maps_readonly else 2  # see `sealed`
        return Host(self._host.name, capacity, abilities, Size(os.cpu_count() or 1, pages), self._accelerator.name,
                    copies, probe.available_memory(),
                    {image.name: self._found.abilities(image) for image in known})  # fmt: skip

    def _directories(self) -> list[Path]:
        """Of our VMs: wherever a part of one is left, for a create may have been cut anywhere."""
        found: dict[str, Path] = {}
        for place in (self._vms.places.vms, self._vms.places.run):
            if place.is_dir():
                found.update(
                    {
                        e.name: self._vms.places.vms / e.name
                        for e in os.scandir(place)
                        if e.name.startswith(self._prefix)
                    }
                )
        return [found[name] for name in sorted(found)]

    def _manifest(self, path: Path) -> Manifest | None:
        try:
            stat = (path / manifest.FILE).stat()
        except OSError:
            self._manifests.pop(path.name, None)
            return None
        # Each write makes a new file, so its inode and time tell a new one.
        stamp = (stat.st_ino, stat.st_mtime_ns)
        cached = self._manifests.get(path.name)
        if cached is None or cached[0] != stamp:
            cached = self._manifests[path.name] = (stamp, manifest.read(path))
        return cached[1]

    def _seen(self, path: Path) -> VmSeen:
        known = self._manifest(path)
        self._hear(path.name)
        if known is None:
            return VmSeen(path.name, self._host.name, VmCondition.MAKING, "its making was begun")
        if known.phase is Phase.MAKING and not known.pid:
            return VmSeen(path.name, self._host.name, VmCondition.MAKING)
        if not vms.lives(known):
            process.reap(known.pid, known.started)
            return VmSeen(path.name, self._host.name, VmCondition.DEAD, "its QEMU has ended")
        reason = self._reasons.get(path.name, "")
        seen = VmSeen(path.name, self._host.name, _CONDITIONS[known.phase], reason, introduced=known.introduced)
        return self._weighed(seen, known.pid)

    def _weighed(self, seen: VmSeen, pid: int) -> VmSeen:
        """With what it takes, and its console kept short. Each VM's turn comes every few seconds: looks are often."""
        now = time.monotonic()
        since, before = self._figures.get(seen.name, (-math.inf, seen))
        if now - since >= _MEASURED_FOR:
            private, shared = process.resident(pid)
            before = replace(seen, cpu_s=process.cpu_seconds(pid), private=private, shared=shared)
            self._figures[seen.name] = (now, before)
            self._cut_console(self._vms.places.of(seen.name).console)
        return replace(seen, cpu_s=before.cpu_s, private=before.private, shared=before.shared)

    @staticmethod
    def _cut_console(console: Path) -> None:
        """QEMU appends, so a file that is cut goes on from its new end."""
        try:
            if console.stat().st_size > _CONSOLE_LIMIT:
                os.truncate(console, 0)
        except FileNotFoundError:
            return

    def _hear(self, name: str) -> None:
        channel = self._vms.channels.get(name)
        for report in channel.news() if channel is not None else ():
            if report.type == "daemon_ended":
                self._reasons[name] = report.reason
                log.warning("a daemon has ended in a guest", vm=name, reason=report.reason)
            elif report.type == "flooded":
                self._reasons[name] = report.reason
                log.warning("a guest is listened to no longer", vm=name, reason=report.reason)

    def _templates(self) -> list[TemplateSeen]:
        place, host = self._settings.templates, self._host.name
        found = [
            TemplateSeen(name, host, image, TemplateCondition.BUILDING, size, account=account)
            for name, (image, size, account) in templates.building(place).items()
        ]
        for path in sorted(place.glob("[!.]*/template.json")):
            template = templates.load(path.parent)
            if template is not None and self._of_use(template):
                name = path.parent.name
                held = (template.held() + self._vms.sealed.held(name)) / 2**20
                found.append(TemplateSeen(f"{name}-{template.key}", host, template.image, TemplateCondition.READY,
                                          template.size, held=held, account=template.account))  # fmt: skip
        return found

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives. Costs a millisecond or more each."""
        return await self._in_thread(self._measure)

    def _measure(self) -> dict[str, tuple[float, float, float]]:
        found = {}
        for path in self._directories():
            known = self._manifest(path)
            if known is not None and vms.lives(known):
                found[path.name] = (process.cpu_seconds(known.pid), *process.memory(known.pid, "/memory"))
        return found

    def audit(self, name: str) -> Mapping[str, str | int]:
        """What the guest said of itself when it started: digests of its ids and of random bytes, CPUs, memory."""
        report = self._vms.audits.get(name)
        return dict(report.audit) if report is not None else {}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """What each guest that runs says of itself now, see `Vms.examine`; `error` instead if it does not."""
        names = [path.name for path in await self._in_thread(self._directories)]
        found = await asyncio.gather(*(self._in_thread(self._examine, name) for name in names))
        return {name: facts for name, facts in zip(names, found, strict=True) if facts is not None}

    def _examine(self, name: str) -> Mapping[str, str | int] | None:
        try:
            return self._vms.examine(name)
        except Gone:
            return None
        except MultiverseError as error:
            return {"error": error.message}

    # --- templates ------------------------------------------------------------------------------------

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        """See `ports.Hypervisor`."""
        self._check_host(template.host)
        return await self._in_thread(self._prepare, template, self._drops[templates.name_of(template)])

    def _prepare(self, which: TemplateKey, drops: int) -> Sequence[Stage]:
        self._vms.owners.check()
        place, name = self._settings.templates.absolute(), templates.name_of(which)
        image = self._image(which.image)
        trust.make(place, 0o711)
        for stale in templates.drop_stale(place, self._of_use):
            self._vms.sealed.drop(stale)
        return templates.prepare(place, image, which.account, self._parent(image, which.size), self._settings.binary,
                                 self._version, self._vms.places.run, self._vms.owners.builder,
                                 lambda: self._closed or self._drops[name] != drops,
                                 lambda report: self._learn(image, which.size, report))  # fmt: skip

    def _learn(self, image: Image, size: Size, report: Report) -> None:
        room = self._most(image, size).cpus
        if 0 < report.possible < room:
            reason = f"its kernel has room for {report.possible} CPUs of {room}"
            self._found.lacks(image, "plug_cpus", reason, images.list_images(self._settings.images))

    async def delete_template(self, template: TemplateKey) -> None:
        """See `ports.Hypervisor`."""
        self._check_host(template.host)
        await self._drop(templates.name_of(template))

    async def drop_all(self) -> None:
        """Remove every template of this host, those too that another life of ours, or an older one, has begun."""
        place = self._settings.templates.absolute()
        if place.exists():
            trust.check(place)
        for name in templates.names(place):
            await self._drop(name)

    async def _drop(self, name: str) -> None:
        # A thread goes on when whoever waited for it is cancelled: it must not make the template after this.
        self._drops[name] += 1
        self._vms.sealed.drop(name)
        await self._in_thread(templates.drop, self._settings.templates.absolute(), name)

    def _parent(self, image: Image, size: Size) -> Callable[[Path, Path], Machine]:
        def machine(disk: Path, memory: Path) -> Machine:
            made = self._machine(
                f"template-{image.name}", image, size, Memory(size.memory, memory), disk, "qcow2", _TEMPLATE_MAC
            )
            return replace(made, cmdline=f"{made.cmdline} {TEMPLATE}")

        return machine

    def _of_use(self, template: Template) -> bool:
        """Is it what would be made now, of that image and size and for that account?"""
        which = TemplateKey(self._host.name, template.image, template.size, template.account)
        try:
            image = images.load(self._settings.images, template.image)
        except Refused:
            return False
        key = templates.key_of(image, self._parent(image, template.size)(Path("/"), Path("/")), self._version)
        return (template.path.name, template.key) == (templates.name_of(which), key)

    def _machine(
        self, name: str, image: Image, size: Size, memory: Memory, disk: Path, disk_format: str, mac: str
    ) -> Machine:
        most = self._most(image, Size(size.cpus, memory.size))
        return Machine(name, self._accelerator, size.cpus, memory, most, disk, disk_format, mac,
                       image.kernel, image.initrd, self._accelerator.cmdline(image.cmdline))  # fmt: skip

    def _most(self, image: Image, size: Size) -> Size:
        """What a VM of `size` can be plugged up to. Room for what is never plugged would cost the guest memory."""
        return Size(self._limits.cpus if "plug_cpus" in image.abilities else size.cpus,
                    self._limits.memory if "plug_memory" in image.abilities else size.memory)  # fmt: skip

    # --- VMs ------------------------------------------------------------------------------------------

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """See `ports.Hypervisor`."""
        self._check_host(vm.host)
        self._check_name(vm.name)
        making = self._making[vm.name] = self._threads.submit(self._create, vm)
        making.add_done_callback(lambda done: self._made(vm.name, done))
        return await asyncio.wrap_future(making)

    def _made(self, name: str, making: Future[Sequence[Stage]]) -> None:
        if self._making.get(name) is making:
            del self._making[name]

    def _create(self, spec: VmSpec) -> Sequence[Stage]:
        image = self._image(spec.image)
        template = None
        if spec.kind is CloneKind.INSTANT:
            path = self._settings.templates.absolute() / templates.name_of(spec.template) if spec.template else None
            template = templates.load(path) if path else None
            if template is None or not self._of_use(template):
                raise Gone(
                    f"there is no such template of image {spec.image} on {spec.host}",
                    hint="it is made on demand: prepare it first",
                )
            trust.check(template.path.parent)

        def machine(disk: Path, disk_format: str) -> Machine:
            if template is None:
                return self._machine(spec.name, image, spec.size, Memory(spec.size.memory), disk, disk_format, spec.mac)
            made = self._machine(spec.name, image, template.size, Memory(template.size.memory, template.memory), disk,
                                 disk_format, spec.mac)  # fmt: skip
            return template.clone_of(made)

        return self._vms.create(spec, image, template, machine)

    def _image(self, name: str) -> Image:
        """The image of that name. `Refused` if there is none, or one that others than root could have written to."""
        image = images.load(self._settings.images, name)
        trust.check(image.path, inside=True)
        return image

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        """See `ports.Hypervisor`."""
        self._check_name(vm.name)
        return await self._in_thread(self._vms.start, vm.name, size, identity)

    async def add_user(self, vm: VmRef, user: User) -> None:
        """See `ports.GuestUsers`."""
        self._check_name(vm.name)
        await self._in_thread(self._vms.introduce, vm.name, user)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        """See `ports.Hypervisor`."""
        name = vm.name
        self._check_name(name)
        making = self._making.get(name)
        await self._in_thread(self._vms.destroy, name, grace)
        if making is not None:
            # A thread goes on when whoever waited for it is cancelled. Its QEMU has just been ended, so it
            # ends soon, and then goes what it made meanwhile.
            await asyncio.wait([asyncio.wrap_future(making)])
            await self._in_thread(self._vms.destroy, name, 0.0)
        self._reasons.pop(name, None)

    def close(self) -> None:
        """Let go, waiting for nothing: calls that still wait end with an error. VMs and templates stay as they are; a
        template that is being made is given up, for nobody could finish it."""
        self._closed = True
        place = self._settings.templates.absolute()
        for name in templates.building(place):
            templates.end_builders(place, name)
        self._vms.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- helpers --------------------------------------------------------------------------------------

    def _check_host(self, host: str) -> None:
        if host != self._host.name:
            raise Gone(f"there is no host {host}", hint=f"QEMU runs on {self._host.name} only")

    def _check_name(self, name: str) -> None:
        serial = name.removeprefix(self._prefix)
        if serial == name or not serial.isalnum() or len(name.encode()) > 15:
            raise Refused(f"{name!r} is no VM of ours", hint=f"they are {self._prefix}<serial>, at most 15 bytes")

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments))
