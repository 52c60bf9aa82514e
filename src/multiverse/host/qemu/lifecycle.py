"""A VM's life: it is created paused and without an identity, started with its size and identity, and destroyed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity
from multiverse.core.model.vm import Stage
from multiverse.guest.protocol import CUT, FLUSH, HELLO, REST, Report, identity_message, wake_message
from multiverse.host import manifest, network, process, stand_in
from multiverse.host.manifest import Manifest, Specification, VmPhase
from multiverse.host.qemu import disks, saves, templates
from multiverse.host.qemu.channels import AgentChannel
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.hotplug import memory_to_plug, plug
from multiverse.host.qemu.machine import Feature, Memory, QemuMachine
from multiverse.host.qemu.session import FrozenTemplate, Launch, Paths, QemuSession, remove_files
from multiverse.host.qemu.templates import BOOT_TIMEOUT
from multiverse.host.registry import ProcessUser, Resource, host_lock
from multiverse.host.virtual_functions import VirtualFunction
from multiverse.images.catalog import Image
from multiverse.system.kernel import SharedMemory
from multiverse.system.locks import locked_directory
from multiverse.system.processes import ProcessIdentity, boot_id

# --- creation ----------------------------------------------------------------------------------------

_WAKE_TIMEOUT = 30.0  # seconds for a restored guest's first message


@dataclass(frozen=True)
class VmParts:
    machine: QemuMachine
    image: Image
    template: FrozenTemplate | None
    record: Manifest  # as written so far
    user: ProcessUser | None
    functions: Sequence[VirtualFunction] = ()
    memory: SharedMemory | None = None
    # Completes a QEMU that waits for a state of another one, and returns the record.
    complete: Callable[[QemuSession, Manifest], Manifest] | None = None
    phase: VmPhase = VmPhase.PARKED  # in which it is then


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
        with locked_directory(paths.home, create=True):
            try:
                if not _exists(spec, paths):
                    host.connections.sessions[spec.name] = _create(host, spec, paths, timer, memory)
            except MultiverseError:
                with suppress(OSError):  # it is not empty: a part of the VM is there
                    paths.home.rmdir()
                raise
    except OSError as error:
        hint = f"is there room in {host.config.vms}?"
        raise Exhausted(f"cannot create VM {spec.name}: {error}", hint=hint) from error
    return timer.stages


def _exists(spec: Specification, paths: Paths) -> bool:
    """Whether the VM of that specification exists as a whole. The remains of an interrupted creation are removed."""
    known = manifest.read(paths.home)
    if known is not None:
        manifest.refuse_moving(known)
        if known.kept:
            _check_same(replace(spec, token=known.token), known)  # its own token it gets now
            saves.take_over(paths, known, spec)
            return True
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
    """Raise `Refused` if the VM of that name is not the specified one. No address before the start matches any."""
    same = {
        "token": known.token == spec.token,
        "MAC": known.mac == spec.mac,
        "kind": known.kind == spec.kind,
        "address": not known.address or not spec.address or known.address == spec.bare_address,
    }
    other = [field for field, matches in same.items() if not matches]
    if other:
        what = f"the name {spec.name} is in use by another VM: it has another {' and '.join(other)}"
        raise Refused(what, hint=f"destroy {spec.name} first, or specify another name")


def _create(
    host: HostContext, spec: Specification, paths: Paths, timer: VmStageTimer, memory: SharedMemory | None
) -> QemuSession:
    image = host.image(spec.image)
    if spec.saved:
        return _restore(host, spec, paths, timer, image)
    template = templates.template_for(host, spec) if spec.kind is CloneKind.INSTANT else None
    try:
        record, user = allocate(host, spec, image, template)
        disk, how = _make_disk(spec, paths, image, template)
        timer(how)
        functions: list[VirtualFunction] = []
        if spec.functions:
            functions = host.functions.claim(spec.name, spec.functions, spec.function_groups)
            timer("functions")
        machine = host.vm_machine(spec, image, template, disk)
        if memory is not None:  # QEMU opens inherited descriptors by their paths
            regions = tuple(Memory(memory.size, Path(f"/proc/self/fd/{fd}")) for fd in memory.fds)
            machine = replace(machine, regions=regions)
        return launch(host, spec, VmParts(machine, image, template, record, user, functions, memory), timer)
    except (OSError, Broken) as error:
        if template is not None and not template.state.exists():  # deleted meanwhile, at whatever stage
            raise Gone(f"the template of {spec.image} was deleted", hint="it is built again on demand") from error
        raise


def _restore(host: HostContext, spec: Specification, paths: Paths, timer: VmStageTimer, image: Image) -> QemuSession:
    """A VM as it was saved, paused. The machine is made as it was, and what had been plugged is plugged before QEMU
    reads the state."""
    saved = saves.find(host, spec, image)
    record, user = allocate(host, spec, image, None)
    booted = Size(saved.cpus, saved.memory)
    record = replace(record, cpus=booted.cpus, memory=booted.memory, total_cpus=saved.total_cpus,
                     total_memory=saved.total_memory, saved=spec.saved, uncut=saved.uncut, frozen=True,
                     cpu=saved.cpu or record.cpu, most=saved.most or record.most)  # fmt: skip
    saves.copy_files(host, spec, saved, image, paths)
    timer("overlay")

    def complete(session: QemuSession, record: Manifest) -> Manifest:
        huge = plug(session.monitor, record, record.total_cpus, record.total_memory - record.memory,
                    huge=Feature.HUGE_PAGES in host.features.in_use, backends=saved.backends)  # fmt: skip
        timer("plug")
        saves.read_state(session.monitor, saves.directory(host, spec.storage) / spec.saved, saved, spec.key)
        timer("restore")
        return replace(record, huge_memory=huge)

    machine = saves.machine(host, replace(spec, kind=saved.kind), booted, image, paths, paths.overlay)
    machine = machine.as_made(saved.cpu, saved.most)
    return launch(host, spec, VmParts(machine, image, None, record, user, complete=complete), timer)


def allocate(
    host: HostContext, spec: Specification, image: Image, template: FrozenTemplate | None
) -> tuple[Manifest, ProcessUser | None]:
    """Check that no other VM has the values of the specification, pick the VM's user, and write its first manifest.
    Until the VM is started, its guest is paused and its disk hardly written, unless that is a copy. After an error
    nothing is allocated."""
    vms, disk = host.config.vms, host.image_disk(image)
    booted = template.size if template is not None else spec.size  # before anything is plugged
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
            image=spec.image,
            cpu=host.accelerator.cpu,
            most=host.largest(image, booted),
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


def launch(host: HostContext, spec: Specification, parts: VmParts, timer: VmStageTimer) -> QemuSession:
    paths, machine, template, user = host.paths(spec.name), parts.machine, parts.template, parts.user
    record = parts.record
    if user is not None:
        user.allow_traversal(paths.home)
        user.take_file(machine.disk)
    image = parts.image  # its files may be links to another place
    opened = (template.path if template is not None else machine.kernel, machine.initrd, image.disk)
    if parts.complete is not None and user is not None:
        for path in (machine.kernel, machine.initrd):
            user.take_file(path, 0o400)
    groups = host.groups(spec.job_groups)
    threads = host.limit(groups, spec.name, spec.size.memory, spec.size.cpus)

    def started(identity: ProcessIdentity) -> None:
        nonlocal record
        record = replace(record, pid=identity.pid, started=identity.started)
        manifest.write(paths.home, record)
        groups.add_process(spec.name, identity.pid, threads)

    with _mapped(host, machine, template) as (mapped, fds):
        session = host.launch(
            Launch(
                mapped,
                paths,
                host.config.binary,
                tap=spec.name,
                bridge=spec.bridge if record.moving is None else None,  # one that moves here is on another host's
                paused=True,
                incoming=template is not None or parts.complete is not None,
                user=user,
                system=host.system,
                readable=(*opened, *(each.directory for each in parts.functions)),
                writable=(machine.disk,),
                devices=tuple({path for each in parts.functions for path in host.functions.device_files(each)}),
                fds=(*fds, *(parts.memory.fds if parts.memory is not None else ())),
                started=started,
                stage=timer,
            )
        )
    try:
        if parts.complete is not None:
            record = parts.complete(session, record)
        if template is not None:
            session.restore(template.state)
            timer("restore")
            if spec.spare:
                _warm_up(session)
                timer("tried")
        manifest.write(paths.home, replace(record, phase=parts.phase))
    except BaseException:
        if session.output is not None:
            session.output.save()
        session.close()
        raise
    if session.output is not None:
        host.outputs.keep(spec.name, session.output)
        session.output = None  # which `host.outputs` closes
    return session


def _warm_up(session: QemuSession) -> None:
    """Let a spare run until its agent answers, and stop it again: then its code is mapped and translated."""
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


# --- start -------------------------------------------------------------------------------------------

_START_TIMEOUT = 120.0  # seconds for its mounts and daemons


def start(host: HostContext, name: str, size: Size, identity: Identity, token: str = "") -> list[Stage]:
    """Plug a VM up to its size, send its identity and let it run, until its daemons have been started. A VM that has
    been started is success. Raises `Gone` if there is no such VM, `Refused` if the identity or the token is another
    VM's, `Exhausted` if the VM cannot be plugged up to that size, `Broken` if the guest reports a failure and `Unknown`
    if it does not answer."""
    host.check_name(name)
    timer = VmStageTimer()
    home = host.paths(name).home
    with locked_directory(home, create=False) as there:
        found = manifest.read(home) if there else None
        manifest.refuse_other(found, token)
        known = _startable(name, found, identity)
        if known.phase is VmPhase.STARTED:
            return []
        session = host.connections.session(known)
        booted = known.kind is not CloneKind.INSTANT or bool(known.saved)
        plugged = 0 if booted else memory_to_plug(known.memory, size.memory)
        cpus = known.cpus if booted else max(size.cpus, known.cpus)
        if known.saved:
            plugged, cpus = known.total_memory - known.memory, known.total_cpus
        if not booted:
            # The VM may have been created with another size, before a job asked for it.
            groups = host.groups(known.job_groups)
            threads = host.limit(groups, name, known.memory + plugged, size.cpus)
            groups.add_process(name, known.pid, threads)
        known = choose_node(host, known, Size(cpus, known.memory + plugged))
        if not booted:
            huge = plug(session.monitor, known, size.cpus, plugged, huge=Feature.HUGE_PAGES in host.features.in_use)
            known = replace(known, huge_memory=huge)
        allowance = host.allowance(size)
        known = _limit_disk(known, allowance)
        timer("plug")

        def message() -> bytes:  # made when it is sent: it holds the time
            names = host.names.first(name, host.firewall.group(known))
            return identity_message(identity, cpus, plugged, allowance, names)

        resumed = known.phase is VmPhase.STARTING
        grown = replace(known, total_cpus=cpus, total_memory=known.memory + plugged, net=size.net)
        if known.uncut:
            grown = _cut_off(session, home, grown)
        known = _join_network(host, grown, identity)
        if known.saved:
            report = _wake_saved(session, lambda: wake_message(identity, host.names.first(name, 0)), timer)
        elif booted or resumed:
            report = _boot_or_resume(session, message, timer, "boot" if booted else "ask")
        else:
            report = _wake(session, message, timer)
        try:
            manifest.write(home, replace(known, phase=VmPhase.STARTED))
        except Exhausted as error:  # the VM runs all the same: asked again, its guest says so
            raise Unknown(f"VM {name} has been started, but: {error.message}", hint=error.hint) from error
        host.connections.keep_channel(name, session, report)
        host.names.started(name)
    inside = sum(stage.seconds for stage in report.stages)
    timer("answer")
    *before, answer = timer.stages
    return [*before, *report.stages, Stage("answer", max(0.0, answer.seconds - inside))]


def _startable(name: str, known: Manifest | None, identity: Identity) -> Manifest:
    manifest.refuse_moving(known)
    if known is None or known.phase is VmPhase.CREATING:
        raise Gone(f"there is no VM {name} to start", hint="create it first")
    if not known.process.is_alive():
        raise Gone(f"VM {name} is dead", hint="destroy it and create another")
    address = identity.address.partition("/")[0]
    if (identity.hostname, identity.mac) != (name, known.mac) or known.address not in ("", address):
        what = f"VM {name} with {known.mac} {known.address} cannot be {identity.hostname} with {identity.mac} {address}"
        raise Refused(what, hint="destroy it and create another")
    return known


def choose_node(host: HostContext, known: Manifest, size: Size) -> Manifest:
    """Keep the VM on a NUMA node, where there are several. Returns its manifest, as written. A VM whose start was begun
    before stays where it is, and so does one inside a job, whose CPUs Slurm has chosen."""
    if known.job_groups or not host.numa.are_several:
        return known
    if known.numa is None:
        with host_lock(host.config.vms):
            node = host.numa.choose(known.name, size)
            known = replace(known, numa=-1 if node is None else node, total_cpus=size.cpus, total_memory=size.memory)
            manifest.write(host.paths(known.name).home, known)
    if known.numa is not None and (cpus := host.numa.cpus_of(known.numa)):
        host.cgroups.keep_on(known.name, cpus)
    return known


def _limit_disk(known: Manifest, allowance: int) -> Manifest:
    """Limit the VM's files to its guest's allowance. Returns its manifest, which the caller writes."""
    disk = known.disk_cost.of(allowance)
    process.limit_files(known.process, known.uid, disk << 20)
    return replace(known, disk=disk)


def _join_network(host: HostContext, known: Manifest, identity: Identity) -> Manifest:
    """Let the VM send as its address, to its peers and to its group. Returns its manifest, as written."""
    address = identity.address.partition("/")[0]
    # Peers that are VMs of this host have taps of the same names; other machines are not on ports of the bridge.
    peers = [one for one in identity.peers if one[0] != known.name and one[0].startswith(host.config.prefix)]
    joined = replace(
        known,
        phase=VmPhase.STARTING,
        address=address,
        peers=tuple(name for name, _ in peers),
        peer_addresses=tuple(where for _, where in peers),
        group=identity.group,
    )
    home = host.paths(known.name).home
    if known.address:
        manifest.write(home, joined)
    else:  # its specification had no address
        with host_lock(host.config.vms):
            host.registry.refresh()
            host.registry.check_free(known.name, {Resource.ADDRESS: address})
            manifest.write(home, joined)
    if host.vxlan is not None:
        host.vxlan.add(known.name, identity.neighbours)
    host.firewall.allow(joined)
    separate(host, joined)
    return joined


def separate(host: HostContext, known: Manifest) -> None:
    """Let the bridge isolate the port of a VM that reaches no other one."""
    network.set_isolated(known.name, not (known.peers or host.firewall.separates(known)))


def _wake(session: QemuSession, message: Callable[[], bytes], timer: VmStageTimer) -> Report:
    """Let a restored guest run. Its identity waits in the channel when it wakes."""
    rest = session.channel.queue(message())
    session.monitor.execute("cont")
    session.channel.send(rest, _WAKE_TIMEOUT)
    return _until_started(session, timer)


def _cut_off(session: QemuSession, home: Path, known: Manifest) -> Manifest:
    """Let a guest run that is restored from a checkpoint, and cut its job off from the run that was lost, as is done
    before a VM is saved. Nothing that it sends leaves the host yet. Returns its manifest, as written."""
    session.monitor.execute("cont")
    for message, answer in ((CUT, "cut"), (REST, "rests")):
        report = session.channel.ask(message, answer, _START_TIMEOUT, or_else="refused")
        if report.type == "refused":
            raise Broken(f"in the guest of VM {known.name}: {report.reason}", hint="see its console log")
    known = replace(known, uncut=False)
    manifest.write(home, known)
    return known


def _wake_saved(session: QemuSession, message: Callable[[], bytes], timer: VmStageTimer) -> Report:
    """Let a restored guest run, and make it a node again. Its job stays frozen."""
    session.monitor.execute("cont")
    report = session.channel.ask(message(), "started", _START_TIMEOUT)
    timer("wake")
    return report


def _boot_or_resume(session: QemuSession, message: Callable[[], bytes], timer: VmStageTimer, stage: str) -> Report:
    """Let a guest run that boots first, or that may have been sent its identity before: ask for its state."""
    session.monitor.execute("cont")
    session.channel.send(HELLO, _WAKE_TIMEOUT)
    answer = session.channel.expect(frozenset({"fork_point", "becoming", "started"}), BOOT_TIMEOUT)
    timer(stage)
    if answer.type == "started":
        return answer
    if answer.type == "becoming":
        return session.channel.expect(frozenset({"started"}), _START_TIMEOUT)
    session.channel.send(message(), _WAKE_TIMEOUT)
    return _until_started(session, timer)


def _until_started(session: QemuSession, timer: VmStageTimer) -> Report:
    session.channel.expect(frozenset({"forked"}), _WAKE_TIMEOUT)
    timer("first_byte")
    return session.channel.expect(frozenset({"started"}), _START_TIMEOUT)


# --- removal -----------------------------------------------------------------------------------------


def destroy(host: HostContext, name: str, grace: float, token: str = "") -> None:
    """End a VM and remove all of it, but for one that is kept in memory as a saved VM. See `remove`."""
    host.check_name(name)
    known = manifest.read(host.paths(name).home)
    if known is None or not known.kept:
        remove(host, name, grace, token)
        return
    manifest.refuse_other(known, token)
    host.connections.drop(name)
    host.names.drop(name)
    host.firewall.revoke(known)
    if host.vxlan is not None:
        host.vxlan.drop(name)


def discard_kept(host: HostContext, saved: str) -> None:
    """Remove a saved VM that is kept in memory. Absent is success."""
    for home in host.config.vms.glob(f"{host.config.prefix}*"):
        if (known := manifest.read(home)) is not None and known.kept == saved:
            remove(host, known.name, 0.0)


def remove(host: HostContext, name: str, grace: float, token: str = "") -> None:
    """Let the guest write back and unmount for up to `grace` seconds, unless it is paused because the disk is full, end
    the VM, and remove all of it. Absent is success. Raises `Broken` if its process cannot be ended, and what
    `manifest.refuse_other` raises."""
    host.check_name(name)
    paths = host.paths(name)
    if not paths.home.exists() and not paths.run.exists():
        host.connections.drop(name)
        return
    known = manifest.read(paths.home)
    manifest.refuse_other(known, token)
    alive = known is not None and known.process.is_alive()
    if known is not None and alive:
        waits = known.frozen or name in host.paused  # such a guest does not answer, or has written back already
        if grace > 0 and known.phase in (VmPhase.STARTED, VmPhase.STARTING) and not waits:
            _flush(host, name, paths, grace)
        # Killed before the lock is held: whoever holds the lock, waiting for this guest, then releases it.
        process.kill(known.process)
    # The directory is not created: another destroy may have removed it meanwhile.
    with locked_directory(paths.home, create=False):
        known = manifest.read(paths.home)
        kill_qemu(name, paths, known)
        if known is not None and known.sleep is not None:  # it was falling asleep in this moment
            stand_in.end(name, known.sleep.process)
        host.connections.drop(name)
        host.names.drop(name)
        host.outputs.drop(name)
        host.functions.release(name)
        network.remove_tap(name)
        host.groups(known.job_groups if known is not None else ()).remove(name)
        if known is not None:
            host.firewall.revoke(known)
        if host.vxlan is not None:
            host.vxlan.drop(name)
        remove_files(paths)
    host.firewall.remove_if_unused()


def kill_qemu(name: str, paths: Paths, known: Manifest | None) -> None:
    """Kill the QEMU of a VM: the recorded process, or any that was started and not recorded."""
    suspects = set()
    if known is not None and known.pid and known.process.is_alive():
        suspects.add(known.process)
    else:
        suspects.update(process.find_by_argument(f"path={paths.console}"))
    for suspect in suspects:
        if not process.kill(suspect):
            what = f"the process {suspect.pid} of VM {name} cannot be ended"
            raise Broken(what, hint=f"see what it waits for in /proc/{suspect.pid}/stack")


def clear_home(paths: Paths) -> None:
    """Remove the files of an interrupted creation, the manifest last. The directory stays: its lock is held."""
    for entry in sorted(paths.home.iterdir(), key=lambda path: path.name == manifest.FILE):
        entry.unlink(missing_ok=True)
    for path in (paths.monitor, paths.agent):
        path.unlink(missing_ok=True)


def _flush(host: HostContext, name: str, paths: Paths, grace: float) -> None:
    """Ask the guest to write back and unmount, for up to `grace` seconds. Its failure to do so is no error."""
    deadline = time.monotonic() + grace
    try:
        # Taken, so that no observation reads from it meanwhile; QEMU serves one connection at a time.
        channel = host.connections.channels.pop(name, None)
        if channel is None and name in host.connections.sessions:
            return  # its start is in progress or has failed, so no job has written anything
        channel = channel or AgentChannel(paths.agent)
    except MultiverseError:
        return
    try:
        channel.ask(FLUSH, "flushed", max(0.0, deadline - time.monotonic()))
    except MultiverseError:
        return
    finally:
        channel.close()
