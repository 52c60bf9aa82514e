"""Boots an image as templates and clones are made for jobs, without Slurm and beside all other VMs, and examines it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from multiverse.config import HostSettings, ImageSettings, Settings
from multiverse.core.errors import Broken, MultiverseError
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Daemon, GuestFile, Identity, NodeBootstrap, User, machine_id, vm_name
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import host_config
from multiverse.guest.protocol import program
from multiverse.host.manifest import Specification
from multiverse.host.qemu.library import QemuHost
from multiverse.images.catalog import Image
from multiverse.system import kernel

SITE = "check"
_BRIDGE, _MAC = "mvcheck", "02:00:5e:00:c0:01"
_HEAD, _GUEST = "198.51.100.254", "198.51.100.1"  # of TEST-NET-2 (RFC 5737), which nobody uses
_MEMORY = 512  # MiB of the clone, at least
_ANSWER = 180.0  # seconds for the facts, once the guest has its identity
_USER = User("checkuser", 64998, 64998, "/", "/bin/sh", (("checkgroup", 64997),))
_SHOWN = "uid=64998(checkuser) gid=64998 groups=64998,64997(checkgroup)"  # by id(1): the primary group has no name
_PROGRAM = "/run/multiverse-check.py"


@dataclass(frozen=True)
class ImageTrial:
    """What came of it. Times in seconds."""

    accelerator: str
    abilities: frozenset[str]
    scratch: int  # MiB that a job may write, by the settings
    kind: str = ""  # of the clone
    boot: float | None = None  # until the fork point; None: it was not reached
    start: float = 0.0  # from the identity until the guest agent had applied it
    fault: str = ""  # why it ended before the guest could be examined
    facts: Mapping[str, Any] | None = None  # what the guest said: see `guest.check_program`
    silence: str = ""  # why it said nothing


def try_image(image: Image, settings: Settings, say: Callable[[str], None]) -> ImageTrial:
    """Boot a template of the image, fork a clone, give it an identity, and ask it. Takes a minute where guests are
    emulated. This process is moved into namespaces of its own for network and mounts. Nothing is left behind. Raises
    `Broken` or `Refused` if this machine cannot run a VM at all."""
    with _place() as place, _network(place):
        own = _settings(image, settings, place)
        host = QemuHost(host_config(own, SITE))
        host.check()
        try:
            return _tried(host, image, own, say)
        finally:
            host.destroy(_name(), 0.0)
            host.delete_all_templates()
            host.close()


def _name() -> str:
    """The user of a VM follows from the number in its name: that of this process is rarely that of a job's VM."""
    return vm_name(SITE, os.getpid())


def _tried(host: QemuHost, image: Image, settings: Settings, say: Callable[[str], None]) -> ImageTrial:
    base = Size(settings.qemu.base_cpus, settings.qemu.base_memory)
    abilities = host.image_abilities(image.name)
    plugs = {"plug_cpus", "plug_memory"} <= abilities
    size = Size(base.cpus, max(_MEMORY, base.memory) if plugs else base.memory)
    found = ImageTrial(host.accelerator.name, abilities, settings.image.scratch, str(CloneKind.INSTANT))
    template = TemplateKey(settings.host.name, image.name, base if plugs else size)
    say("booting it to its fork point")
    began = time.monotonic()
    try:
        host.build_template(template)
    except Broken as error:
        return replace(found, fault=error.message)
    found = replace(found, boot=time.monotonic() - began, abilities=host.image_abilities(image.name))
    say("forking a clone, and giving it an identity")
    with socket.create_server((_HEAD, 0)) as server:
        began = time.monotonic()
        spec = Specification(
            name=_name(), host=settings.host.name, image=image.name, kind=CloneKind.INSTANT, size=size,
            mac=_MAC, template=template, token="check", address=f"{_GUEST}/24", bridge=_BRIDGE,
        )  # fmt: skip
        try:
            host.create(spec)
            host.start(spec.name, size, _identity(spec, server.getsockname()[1]), spec.token)
        except MultiverseError as error:
            return replace(found, fault=error.message)
        found = replace(found, start=time.monotonic() - began)
        say("examining it as the VM of a job")
        return _answer(server, found)


def _answer(server: socket.socket, found: ImageTrial) -> ImageTrial:
    server.settimeout(_ANSWER)
    try:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(_ANSWER)
            said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        facts = json.loads(said)
        return replace(found, facts=facts | {"clock": facts["clock"] - time.time()})
    except (OSError, ValueError, KeyError) as error:
        return replace(found, silence=str(error))


def _identity(spec: Specification, port: int) -> Identity:
    identity = machine_id(f"{spec.name} {os.urandom(8).hex()}")
    expected = {"hostname": spec.name, "machine_id": identity, "address": spec.address, "user": _SHOWN}
    argv = ("/usr/bin/python3", "-I", _PROGRAM, _HEAD, str(port), json.dumps(expected))
    return Identity(
        hostname=spec.name,
        mac=spec.mac,
        address=spec.address,
        gateway=_HEAD,
        machine_id=identity,
        users=(_USER,),
        bootstrap=NodeBootstrap(
            (GuestFile(_PROGRAM, program("check_program.py").encode(), 0o700, "root"),), (), (Daemon("check", argv),)
        ),
    )


def _settings(image: Image, settings: Settings, place: Path) -> Settings:
    """Settings of a host of its own, with this machine's QEMU."""
    for cache in ("kvm.json", "features.json"):  # what this machine's agent has found out takes seconds to find out
        with suppress(OSError):
            shutil.copy(settings.state_dir / cache, place)
    qemu = replace(
        settings.qemu, images=image.path.parent, templates=place / "t", vms=place / "v", run=place / "r",
        bridge=_BRIDGE, uplink="",
    )  # fmt: skip
    host = HostSettings("localhost", max(2, settings.qemu.base_cpus), max(4096, settings.qemu.base_memory))
    return Settings(state_dir=place, host=host, qemu=qemu, image=ImageSettings(scratch=settings.image.scratch))


@contextmanager
def _place() -> Iterator[Path]:
    """A directory in memory, because QEMU maps a template from there."""
    place = Path(tempfile.mkdtemp(prefix="mvcheck-", dir="/dev/shm"))
    try:
        place.chmod(0o711)  # the users of VMs pass through it
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _network(place: Path) -> Iterator[None]:
    """A bridge in a network namespace of its own: no rule of this machine's firewall and no address meets it, and it
    goes with this process."""
    kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
    kept = place / "groups"
    kept.mkdir()
    groups = Path("/sys/fs/cgroup")
    kernel.mount(str(groups), kept, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount_new(Path("/sys"), "sysfs")  # it shows the interfaces of this namespace
    kernel.mount(str(kept), groups, kernel.MS_MOVE)
    kept.rmdir()
    with IPRoute() as ip:
        ip.link("set", index=1, state="up")
        ip.link("add", ifname=_BRIDGE, kind="bridge")
        index = ip.link_lookup(ifname=_BRIDGE)[0]
        ip.addr("add", index=index, address=_HEAD, prefixlen=24)
        ip.link("set", index=index, state="up")
    yield
