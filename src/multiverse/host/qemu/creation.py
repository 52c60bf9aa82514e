"""Creating a VM: paused, and without an identity."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused
from multiverse.core.model import CloneKind, Stage
from multiverse.guest.protocol import HELLO
from multiverse.host import disks, manifest
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import templates
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.machine import Memory, QemuMachine
from multiverse.host.qemu.removal import clear_home, kill_qemu
from multiverse.host.qemu.session import Launch, Paths, QemuSession
from multiverse.host.qemu.templates import FrozenTemplate
from multiverse.host.registry import Resource, host_lock
from multiverse.host.specification import Specification
from multiverse.host.uids import ProcessUser
from multiverse.host.virtual_functions import VirtualFunction
from multiverse.images.catalog import Image
from multiverse.system.kernel import SharedMemory
from multiverse.system.processes import ProcessIdentity, boot_id

_WAKE_TIMEOUT = 30.0  # seconds for a restored guest's first message


@dataclass(frozen=True)
class _Parts:
    """What a VM is launched from. `record` is its manifest as written so far, `functions` are bound for it."""

    machine: QemuMachine
    image: Image
    template: FrozenTemplate | None
    record: Manifest
    user: ProcessUser | None
    functions: Sequence[VirtualFunction] = ()
    memory: SharedMemory | None = None


def create(host: HostContext, spec: Specification, memory: SharedMemory | None = None) -> list[Stage]:
    """Create a VM, paused; an instant clone is restored, the other kinds are ready to boot. It maps `memory`, which it
    shares with other VMs; `plug_regions` shows that to its guest.

    The same specification again is success. Raises `Refused` if the specification makes no sense, or if its name,
    token, MAC or address is another VM's; `Gone` if there is no such template; `Broken` if the VM exists and is dead;
    `Exhausted` if there is no room. After an error a part of the VM may remain, until it is destroyed.
    """
    host.check_name(spec.name)
    spec.check()
    host.uids.check()
    timer = VmStageTimer()
    paths = host.paths(spec.name)
    try:
        with manifest.locked(paths.home, create=True):
            try:
                if not _exists(spec, paths):
                    host.connections.add_session(spec.name, _create(host, spec, paths, timer, memory))
            except MultiverseError:
                with suppress(OSError):  # it is not empty: a part of the VM is there
                    paths.home.rmdir()
                raise
    except OSError as error:
        hint = f"is there room in {host.config.vms}?"
        raise Exhausted(f"cannot create VM {spec.name}: {error}", hint=hint) from error
    return timer.stages


def _exists(spec: Specification, paths: Paths) -> bool:
    """Whether the VM of that specification exists as a whole. What an interrupted creation left is removed."""
    known = manifest.read(paths.home)
    if known is not None:
        _check_same(spec, known)
        if known.phase is not VmPhase.CREATING:
            if known.process.is_alive():
                return True
            raise Broken(f"VM {spec.name} is dead", hint="destroy it first")
    if known is not None or any(paths.home.iterdir()):
        kill_qemu(spec.name, paths, known)
        clear_home(paths)
    return False


def _check_same(spec: Specification, known: Manifest) -> None:
    """Raise `Refused` if the VM of that name is not the specified one.

    A VM that was specified without an address has none before it is started: that matches any.
    """
    same = {
        "token": known.token == spec.token,
        "MAC": known.mac == spec.mac,
        "kind": known.kind == spec.kind,
        "address": not known.address or not spec.address or known.address == spec.bare_address,
    }
    other = [field for field, matches in same.items() if not matches]
    if other:
        raise Refused(
            f"the name {spec.name} is in use by another VM: it has another {' and '.join(other)}",
            hint=f"destroy {spec.name} first, or specify another name",
        )


def _create(
    host: HostContext, spec: Specification, paths: Paths, timer: VmStageTimer, memory: SharedMemory | None
) -> QemuSession:
    image = host.image(spec.image)
    template = host.template_for(spec) if spec.kind is CloneKind.INSTANT else None
    try:
        record, user = _allocate(host, spec, image, template)
        disk, how = _make_disk(spec, paths, image, template)
        timer(how)
        functions: list[VirtualFunction] = []
        if spec.functions:
            functions = host.functions.claim(spec.name, spec.functions, spec.function_groups)
            timer("functions")
        machine = host.vm_machine(spec, image, template, disk)
        return _launch(host, spec, _Parts(machine, image, template, record, user, functions, memory), timer)
    except (OSError, Broken) as error:
        if template is not None and not template.state.exists():  # deleted meanwhile, at whatever stage
            raise Gone(f"the template of {spec.image} was deleted", hint="it is built again on demand") from error
        raise


def _allocate(
    host: HostContext, spec: Specification, image: Image, template: FrozenTemplate | None
) -> tuple[Manifest, ProcessUser | None]:
    """Check that no other VM has what the specification says, pick the VM's user, and write its first manifest.

    Until the VM is started, its guest is paused and its disk
    hardly written, unless that is a copy. After an error nothing is allocated.
    """
    vms, disk = host.config.vms, host.image_disk(image)
    booted = template.size if template is not None else spec.size  # what it has before anything is plugged
    vms.chmod(0o711)  # each QEMU passes through it to its own directory
    wanted = {Resource.MAC: spec.mac, Resource.ADDRESS: spec.bare_address, Resource.TOKEN: spec.token}
    with host_lock(vms):
        host.registry.refresh()
        host.registry.check_free(spec.name, wanted)
        user = host.uids.allocate(spec.name, host.registry)
        record = Manifest(
            spec.name,
            spec.kind,
            VmPhase.CREATING,
            spec.mac,
            booted.cpus,
            booted.memory,
            boot_id=boot_id(),
            uid=user.uid if user is not None else 0,
            address=spec.bare_address,
            token=spec.token,
            job_groups=spec.job_groups,
            job_address=spec.job_address.partition("/")[0],
            disk_cost=host.disk_cost(image, spec.kind),
            disk=disk.whole if spec.kind is CloneKind.FULL else disk.overhead,
            template_build=template.build if template is not None else "",
        )
        manifest.write(host.paths(spec.name).home, record)
    return record, user


def _make_disk(spec: Specification, paths: Paths, image: Image, template: FrozenTemplate | None) -> tuple[Path, str]:
    """Make the VM's disk. Returns its path, and how it was made: `overlay`, `reflink` or `copy`."""
    if spec.kind is CloneKind.FULL:
        return paths.full_disk, disks.copy_disk(image.disk, paths.full_disk)
    if template is not None:
        templates.copy_overlay(template, paths.overlay)
    else:
        templates.create_overlay(paths.overlay, image.disk, "raw", image.disk.stat().st_size)
    return paths.overlay, "overlay"


def _launch(host: HostContext, spec: Specification, parts: _Parts, timer: VmStageTimer) -> QemuSession:
    paths, machine, template, user = host.paths(spec.name), parts.machine, parts.template, parts.user
    record = parts.record
    if user is not None:
        user.allow_traversal(paths.home)
        user.take_file(machine.disk)
    groups = host.groups(spec.job_groups)
    threads = host.limit(groups, spec.name, spec.size.memory, spec.size.cpus)

    def started(identity: ProcessIdentity) -> None:
        nonlocal record
        record = replace(record, pid=identity.pid, started=identity.started)
        manifest.write(paths.home, record)
        groups.add_process(spec.name, identity.pid, threads)

    with _mapped(host, _sharing(machine, parts.memory), template) as (mapped, fds):
        session = host.launch(
            Launch(
                mapped,
                paths,
                host.config.binary,
                tap=spec.name,
                bridge=spec.bridge,
                paused=True,
                incoming=template is not None,
                user=user,
                system=host.system,
                readable=(*_readable(parts.image, template), *(each.directory for each in parts.functions)),
                writable=(machine.disk,),
                devices=tuple({path for each in parts.functions for path in host.functions.device_files(each)}),
                fds=(*fds, *(parts.memory.fds if parts.memory is not None else ())),
                started=started,
                stage=timer,
            )
        )
    try:
        if template is not None:
            session.restore(template.state)
            timer("restore")
            if spec.spare:
                _warm_up(session)
                timer("tried")
        manifest.write(paths.home, replace(record, phase=VmPhase.PARKED))
    except BaseException:
        session.save_output()
        session.close()
        raise
    host.outputs.keep(spec.name, session.take_output())
    return session


def _sharing(machine: QemuMachine, memory: SharedMemory | None) -> QemuMachine:
    """The machine as it maps that memory too. QEMU opens what it inherits by its path."""
    if memory is None:
        return machine
    return replace(machine, regions=tuple(Memory(memory.size, Path(f"/proc/self/fd/{fd}")) for fd in memory.fds))


def _readable(image: Image, template: FrozenTemplate | None) -> tuple[Path, ...]:
    """What the VM's QEMU opens besides its own disk. A file of an image may be a link to another place."""
    if template is not None:
        return (template.path, image.disk)
    return (image.disk, image.kernel, image.initrd)


def _warm_up(session: QemuSession) -> None:
    """Let a spare run until its agent answers, and stop it again: then the code from its devices to its agent is
    mapped, and emulation has translated it."""
    session.monitor.execute("cont")
    session.channel.send(HELLO, _WAKE_TIMEOUT)
    session.channel.expect(frozenset({"fork_point"}), _WAKE_TIMEOUT)
    session.monitor.execute("stop")


@contextmanager
def _mapped(
    host: HostContext, machine: QemuMachine, template: FrozenTemplate | None
) -> Iterator[tuple[QemuMachine, list[int]]]:
    """The machine as it maps its template's memory, which it cannot write to, and the descriptors it needs for that."""
    if template is None:
        yield machine, []
    elif host.maps_readonly:
        yield replace(machine, memory=replace(machine.memory, readonly=True)), []
    else:
        fd = host.sealed.open(template.memory)
        try:
            yield replace(machine, memory=replace(machine.memory, file=Path(f"/proc/self/fd/{fd}"))), [fd]
        finally:
            os.close(fd)
