"""Observing a host: manifests and /proc show the state of its VMs. No program is run, and no QEMU is asked unless it
may be paused (`PausedGuests`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.vm import TemplateCondition, TemplateSeen, VmCondition, VmSeen
from multiverse.host import manifest, network, process
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import saves, templates
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.disks import REASON, available_disk
from multiverse.system.hanging import MayHang

log = structlog.get_logger(__name__)

_CONDITIONS = {
    VmPhase.CREATING: VmCondition.CREATING,
    VmPhase.PARKED: VmCondition.PARKED,
    VmPhase.STARTING: VmCondition.STARTING,
    VmPhase.STARTED: VmCondition.RUNNING,
    VmPhase.INCOMING: VmCondition.CREATING,
    VmPhase.ASLEEP: VmCondition.ASLEEP,
}
_ABILITIES = frozenset({"instant", "linked", "full", "plug_cpus", "plug_memory"})
_MEASURED_FOR = 2.0  # seconds that a VM's figures count as new
_STORAGE_ANSWERS = 3.0  # seconds until a storage of saved VMs counts as out of reach
_WARNINGS = {"daemon_ended": "daemon ended in guest", "flooded": "guest channel closed"}


class HostObserver:
    """Keeps the last figures of each VM: an observation costs little where nothing has changed."""

    def __init__(self, host: HostContext) -> None:
        self._host = host
        self._manifests: dict[str, tuple[tuple[int, int], Manifest | None]] = {}
        self._figures: dict[str, tuple[float, VmSeen]] = {}
        self._reasons: dict[str, str] = {}
        self._uplink_rate = 0
        self._storages = [self._storage_in(place) for place in (host.config.saves, host.config.copies)]

    def observe(self) -> HypervisorView:
        there = self.vm_directories()
        kept = {path: known for path in there if (known := self._manifest(path)) is not None and known.kept}
        seen = {path.name: self._vm(path) for path in there if path not in kept}
        self._host.paused.keep_only(seen)
        for gone in (set(self._manifests) | set(self._figures) | set(self._reasons)) - set(seen):
            self.forget(gone)
        # The templates first: a build that ends meanwhile has recorded abilities that its image lacks.
        ready = {template.which: template for template in self._templates()}
        own, copies = self._look_at_storages()
        host = self._as_host(own, copies)
        alive = [known for known in kept.values() if known.process.is_alive()]
        return HypervisorView({host.name: host}, seen, ready, saves.shown(own, copies, alive))

    def _storage_in(self, place: Path | None) -> MayHang[saves.SeenStorage | None] | None:
        return MayHang(lambda: saves.look(self._host, place), f"look at {place}") if place is not None else None

    def _look_at_storages(self) -> list[saves.SeenStorage | None]:
        """What both storages show. One whose file system hangs counts as out of reach. It delays what the host shows
        otherwise only as it begins to hang."""
        return [self._look_at(place) if place is not None else None for place in self._storages]

    @staticmethod
    def _look_at(place: MayHang[saves.SeenStorage | None]) -> saves.SeenStorage | None:
        hung, found = place.hangs, place.call(_STORAGE_ANSWERS)
        if place.hangs and not hung:
            log.warning("a storage of saved VMs hangs, and counts as out of reach", doing=place.name)
        return found

    def forget(self, name: str) -> None:
        self._manifests.pop(name, None)
        self._figures.pop(name, None)
        self._reasons.pop(name, None)

    def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives. Takes a millisecond or more for each."""
        found = {}
        for path in self.vm_directories():
            known = self._manifest(path)
            if known is not None and known.process.is_alive():
                found[path.name] = (process.cpu_seconds(known.pid), *process.exact_memory(known.pid, "/memory"))
        return found

    def vm_directories(self) -> list[Path]:
        """The directory of each VM that exists in part at least: an interrupted creation may have left any."""
        config = self._host.config
        found: dict[str, Path] = {}
        for place in (config.vms, config.run):
            if place.is_dir():
                names = [entry.name for entry in os.scandir(place)]
                found.update({name: config.vms / name for name in names if name.startswith(config.prefix)})
        return [found[name] for name in sorted(found)]

    def _as_host(self, own: saves.SeenStorage | None, copies: saves.SeenStorage | None) -> Host:
        config = self._host.config
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        present = self._host.images.listed()
        abilities = {image.name: self._host.abilities.abilities(image) for image in present}
        return Host(
            config.host,
            self._capacity(),
            _ABILITIES,
            machine=Size(os.cpu_count() or 1, pages),
            accelerator=self._host.accelerator.name,
            template_copies=1 if self._host.maps_readonly else 2,  # see `memfd`
            available=process.available_memory(),
            images=abilities,
            available_disk=available_disk(config.vms) >> 20 if config.vms.is_dir() else None,
            disks={image.name: self._host.image_disk(image) for image in present},
            overcommit=config.overcommit,
            features=frozenset(self._host.features.in_use),
            features_off={str(one): why for one, why in self._host.features.lacking.items()} | self._host.model_off,
            numa=self._host.numa.view(),
            storage=own.storage if own is not None else None,
            storage_free=own.free if own is not None else None,
            copies=copies.storage if copies is not None else None,
            moves=self._host.machine_kind() if config.moves is not None else None,
        )

    def _capacity(self) -> Size:
        """The declared capacity. Bandwidth that is not declared is that of the uplink; while the uplink is down, its
        last one. Without a firewall VMs could claim no bandwidth, because nothing would limit them."""
        capacity = self._host.config.capacity
        if not self._host.firewall.in_use:
            return replace(capacity, net=0)
        if capacity.net or not self._host.config.uplink:
            return capacity
        self._uplink_rate = network.link_rate(self._host.config.uplink) or self._uplink_rate
        return replace(capacity, net=self._uplink_rate)

    def _templates(self) -> list[TemplateSeen]:
        config = self._host.config
        found = [
            TemplateSeen(name, config.host, image, TemplateCondition.BUILDING, size, account=account)
            for name, (image, size, account) in templates.list_builds(config.templates).items()
        ]
        for path in sorted(config.templates.glob("[!.]*/template.json")):
            template = templates.load(path.parent)
            if template is not None and templates.is_usable(self._host, template):
                held = (template.memory_used() + self._host.sealed.size(template.memory)) / 2**20
                name = f"{path.parent.name}-{template.key}"
                found.append(TemplateSeen(name, config.host, template.image, TemplateCondition.READY, template.size,
                                          held=held, account=template.account, build=template.build))  # fmt: skip
        return found

    def _manifest(self, path: Path) -> Manifest | None:
        try:
            stat = (path / manifest.FILE).stat()
        except OSError:
            self._manifests.pop(path.name, None)
            return None
        # Each write makes a new file, which has another inode or another time.
        stamp = (stat.st_ino, stat.st_mtime_ns)
        cached = self._manifests.get(path.name)
        if cached is None or cached[0] != stamp:
            cached = self._manifests[path.name] = (stamp, manifest.read(path))
        return cached[1]

    def _vm(self, path: Path) -> VmSeen:
        name, host = path.name, self._host.config.host
        known = self._manifest(path)
        for report in self._host.connections.poll_reports(name):
            if report.type in _WARNINGS:
                self._reasons[name] = report.reason
                log.warning(_WARNINGS[report.type], vm=name, reason=report.reason)
        if known is None:
            return VmSeen(name, host, VmCondition.CREATING, "its creation was begun")
        seen = VmSeen(
            name,
            host,
            _CONDITIONS[known.phase],
            users_added=known.users_added,
            address=known.address,
            mac=known.mac,
            token=known.token,
            frozen=known.frozen,
            freezing=known.freezing,
            told=known.told,
            sleeps=known.sleep.number if known.sleep is not None else known.slept,
            mute=self._host.connections.is_mute(name),
            size=Size(known.total_cpus or known.cpus, known.total_memory or known.memory, net=known.net),
            disk=known.disk,
            template_build=known.template_build,
            template_memory=known.memory if known.template_build else 0,
        )
        if known.phase is VmPhase.CREATING and not known.pid:
            return seen
        if known.phase is VmPhase.ASLEEP:
            there = known.sleep is not None and known.sleep.process.is_alive()
            return replace(seen, reason="" if there else "nothing stands in for it at the moment")
        if not known.process.is_alive():
            process.reap(known.process)
            self._host.outputs.finish(name)
            return replace(seen, condition=VmCondition.DEAD, reason="its QEMU has ended")
        if known.moving is not None and known.handed_over:  # it may run there, so nothing says that it goes on here
            reason = f"it was handed over to {known.moving.address}"
            return replace(seen, condition=VmCondition.DEAD, reason=reason)
        measured = self._measured(replace(seen, reason=self._reasons.get(name, "")), known)
        if name in self._host.paused:
            return replace(measured, condition=VmCondition.PAUSED, reason=REASON)
        return measured

    def _measured(self, seen: VmSeen, known: Manifest) -> VmSeen:
        """Add what the VM uses. It is measured every few seconds; then its output is copied too."""
        now = time.monotonic()
        since, before = self._figures.get(seen.name, (-math.inf, seen))
        if now - since >= _MEASURED_FOR:
            private, shared = process.resident_memory(known.pid)
            cpu_s = process.cpu_seconds(known.pid)
            # One that moves is continued by that alone.
            if cpu_s == before.cpu_s and known.phase is VmPhase.STARTED and known.moving is None:
                self._host.paused.ask(seen.name)
            # The kernel counts huge pages in no process's resident memory (proc(5)).
            before = replace(seen, cpu_s=cpu_s, private=private + known.huge_memory, shared=shared)
            self._figures[seen.name] = (now, before)
            self._host.outputs.save(known.name, known.process, self._host.paths(known.name).outputs)
        return replace(seen, cpu_s=before.cpu_s, private=before.private, shared=before.shared)
