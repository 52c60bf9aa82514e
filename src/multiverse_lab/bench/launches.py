"""A VM for a job, made in the ways that Slurm-V's paper compares (Zhang et al., 2016) and by an instant clone.

All four begin with the same image, and end when the guest has its address, has mounted the site's file systems, knows
the addresses of its job, and has taken a region of shared memory (IVShmem) that was plugged into it. The paper's ways
boot a VM each: from a copy of the whole image, or from an external snapshot, which is an overlay on the image. They do
without what contains our QEMUs (a user, namespaces, control groups, the firewall), so they are not made to look slow.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity, mac_of, machine_id, vm_name
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import host_config
from multiverse.guest.protocol import HELLO, JobGuest, identity_message, join_job_message, take_regions_message
from multiverse.host import network, process
from multiverse.host.manifest import Specification
from multiverse.host.qemu import templates
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.hotplug import plug_regions, region_places
from multiverse.host.qemu.library import QemuHost
from multiverse.host.qemu.machine import PORTS, Memory, QemuMachine
from multiverse.host.qemu.session import Launch, Paths, QemuSession
from multiverse.system.kernel import SharedMemory

COPY, SNAPSHOT, OVERLAPPED, INSTANT = "copy", "snapshot", "overlapped", "instant"
WAYS = (COPY, SNAPSHOT, OVERLAPPED, INSTANT)
"""Overlapped: the snapshot is made while the machine is described."""

DESCRIPTION, IMAGE, VM, ANSWER = "description", "image", "vm", "first_answer"
ADDRESSES, REGION = "addresses", "ivshmem"
PARTS = (DESCRIPTION, IMAGE, VM, ANSWER, ADDRESSES, REGION)

_BOOT_TIMEOUT = 180.0
_ANSWER_TIMEOUT = 60.0
_JOB = ipaddress.IPv4Network("10.128.0.0/17")  # the network of a job, in which all jobs use the same addresses


class Launches:
    """Makes VMs on this machine, at the bridge of the settings, and ends each when it has been measured."""

    def __init__(self, settings: Settings, image: str, place: Path) -> None:
        """`place` is a directory for disks and sockets, which exists."""
        self._settings, self._image, self._place = settings, image, place
        self._site = f"b{secrets.token_hex(2)}"
        config = host_config(settings, self._site)
        self._host, self._context = QemuHost(config), HostContext(config)
        self._template = TemplateKey(config.host, image, Size(settings.qemu.base_cpus, settings.qemu.base_memory))
        self._serials = count(1)

    def __enter__(self) -> Launches:
        self._host.build_template(self._template)
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def measure(self, way: str) -> Mapping[str, float]:
        """The seconds of each part. An instant clone's description is a part of its image's."""
        serial = next(self._serials)
        return self._clone(serial) if way == INSTANT else self._boot(serial, way)

    # --- the paper's ways -----------------------------------------------------------------------------

    def _boot(self, serial: int, way: str) -> Mapping[str, float]:
        parts, last = dict[str, float](), time.monotonic()

        def ended(part: str) -> None:
            nonlocal last
            now = time.monotonic()
            parts[part], last = now - last, now

        home = self._place / str(serial)
        home.mkdir()
        disk = home / "disk"
        try:
            with ThreadPoolExecutor(1) as beside:
                early = beside.submit(self._make_disk, way, disk) if way == OVERLAPPED else None
                machine, identity, region = self._describe(serial, way, disk)
                ended(DESCRIPTION)
                early.result() if early is not None else self._make_disk(way, disk)
            ended(IMAGE)
            with self._running(machine, Paths(home, self._place / f"{serial}.run"), region) as session:
                ended(VM)
                channel = session.channel
                session.monitor.execute("cont")
                channel.send(HELLO, _ANSWER_TIMEOUT)
                channel.expect(frozenset({"fork_point"}), _BOOT_TIMEOUT)
                ended(ANSWER)
                channel.send(identity_message(identity, machine.cpus, 0, 0), _ANSWER_TIMEOUT)
                channel.expect(frozenset({"started"}), _ANSWER_TIMEOUT)
                channel.ask(join_job_message(self._job(serial)), "joined_job", _ANSWER_TIMEOUT)
                ended(ADDRESSES)
                places = region_places(1, region.size)
                plug_regions(session.monitor, machine.name, places)
                ports = [(PORTS[place.port], place.function) for place in places]
                channel.ask(take_regions_message(ports, 0), "took_regions", _ANSWER_TIMEOUT)
                ended(REGION)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        return parts

    def _describe(self, serial: int, way: str, disk: Path) -> tuple[QemuMachine, Identity, SharedMemory]:
        """Choose what the VM gets, and write its whole description to a file, as the paper does for libvirt."""
        spec, identity = self._specified(serial, CloneKind.FULL if way == COPY else CloneKind.LINKED)
        machine = self._context.vm_machine(spec, self._context.image(self._image), None, disk)
        region = SharedMemory([str(serial)], self._settings.job_vms.ivshmem_size)
        (own,) = region.fds
        machine = replace(machine, regions=(Memory(region.size, Path(f"/proc/self/fd/{own}")),))
        disk.with_suffix(".json").write_text(json.dumps([machine.shape(), str(identity)]))
        return machine, identity, region

    def _make_disk(self, way: str, disk: Path) -> None:
        image = self._context.image(self._image).disk
        if way != COPY:
            templates.create_overlay(disk, image, "raw", image.stat().st_size)
            return
        argv = ["cp", "--reflink=never", "--sparse=auto", "--", str(image), str(disk)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Broken(f"cannot copy the image: {done.stderr.strip()}", hint=f"is there room in {disk.parent}?")

    @contextmanager
    def _running(self, machine: QemuMachine, paths: Paths, region: SharedMemory) -> Iterator[QemuSession]:
        binary, name, bridge = self._context.config.binary, machine.name, self._settings.qemu.bridge
        try:
            session = QemuSession.launch(
                Launch(machine, paths, binary, tap=name, bridge=bridge, paused=True, fds=region.fds)
            )
            try:
                yield session
            finally:
                process.kill(session.process)
                session.close()
        finally:
            region.close()
            network.remove_tap(name)
            shutil.rmtree(paths.run, ignore_errors=True)

    # --- ours -----------------------------------------------------------------------------------------

    def _clone(self, serial: int) -> Mapping[str, float]:
        spec, identity = self._specified(serial, CloneKind.INSTANT)
        began = time.monotonic()
        region = self._host.share_memory(spec, [str(serial)], self._settings.job_vms.ivshmem_size)
        allocated = time.monotonic() - began
        try:
            made = {stage.name: stage.seconds for stage in self._host.create(spec, region)}
            stages = self._host.start(spec.name, spec.size, identity)
            names = [stage.name for stage in stages]
            woken = names.index("first_byte") + 1
            began = time.monotonic()
            self._host.join_job(spec.name, self._job(serial))
            joined = time.monotonic()
            self._host.plug_regions(spec.name, region, 0)
            plugged = time.monotonic() - joined
        finally:
            region.close()
            self._host.destroy(spec.name, 0.0)
        return {
            IMAGE: made.pop("overlay"),
            VM: sum(made.values()),
            ANSWER: sum(stage.seconds for stage in stages[:woken]),
            ADDRESSES: sum(stage.seconds for stage in stages[woken:]) + joined - began,
            REGION: allocated + plugged,
        }

    # --- both -----------------------------------------------------------------------------------------

    def _specified(self, serial: int, kind: CloneKind) -> tuple[Specification, Identity]:
        network = ipaddress.IPv4Network(self._settings.network.subnet)
        name, mac = vm_name(self._site, serial), mac_of(self._site, serial)
        # From the end on, where VMs of the lab have none yet.
        address = f"{network[-1 - serial]}/{network.prefixlen}"
        spec = Specification(
            name=name,
            host=self._template.host,
            token=secrets.token_hex(8),
            image=self._image,
            kind=kind,
            size=self._template.size,
            mac=mac,
            address=address,
            bridge=self._settings.qemu.bridge,
            template=self._template if kind is CloneKind.INSTANT else None,
        )
        mounts = self._settings.mounts
        return spec, Identity(name, mac, address, self._settings.network.gateway, machine_id(name), mounts=mounts)

    def _job(self, serial: int) -> JobGuest:
        """What a VM is told of its job, which has 32 of them."""
        vms = tuple((f"mvjob-{serial}-{place}", str(_JOB[1 + place])) for place in range(32))
        return JobGuest(vms[0][0], f"{vms[0][1]}/{_JOB.prefixlen}", (), vms, ("node",), 0)
