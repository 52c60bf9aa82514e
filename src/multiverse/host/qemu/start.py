"""Starting a VM: it gets its size and its identity, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from multiverse.core.errors import Exhausted, Gone, Refused, Unknown
from multiverse.core.model import CloneKind, Identity, Size, Stage
from multiverse.guest.protocol import HELLO, Report, identity_message
from multiverse.host import manifest, process, tap
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.hotplug import memory_to_plug, plug
from multiverse.host.qemu.machine import Feature
from multiverse.host.qemu.session import QemuSession
from multiverse.host.qemu.templates import BOOT_TIMEOUT
from multiverse.host.registry import Resource, host_lock

_WAKE_TIMEOUT = 30.0  # seconds for a restored guest's first message
_START_TIMEOUT = 120.0  # seconds for its mounts and daemons


def start(host: HostContext, name: str, size: Size, identity: Identity, token: str = "") -> list[Stage]:
    """Plug a VM up to its size, send its identity and let it run, until its daemons have been started.

    A VM that has been started is success. Raises `Gone` if there is no such VM, `Refused` if the identity or the token
    is another VM's, `Exhausted` if the VM cannot be plugged up to that size, `Broken` if the guest reports a failure
    and `Unknown` if it does not answer.
    """
    host.check_name(name)
    timer = VmStageTimer()
    home = host.paths(name).home
    with manifest.locked(home, create=False) as there:
        found = manifest.read(home) if there else None
        manifest.refuse_other(found, token)
        known = _startable(name, found, identity)
        if known.phase is VmPhase.STARTED:
            return []
        session = host.connections.session(known)
        booted = known.kind is not CloneKind.INSTANT
        plugged = 0 if booted else memory_to_plug(known.memory, size.memory)
        cpus = known.cpus if booted else max(size.cpus, known.cpus)
        if not booted:
            # The VM may have been created with another size, before a job asked for it.
            groups = host.groups(known.job_groups)
            threads = host.limit(groups, name, known.memory + plugged, size.cpus)
            groups.add_process(name, known.pid, threads)
        known = _choose_node(host, known, Size(cpus, known.memory + plugged))
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
        known = _join_network(host, grown, identity)
        if booted or resumed:
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
    """The manifest of a VM that can be started with that identity, or has been."""
    if known is None or known.phase is VmPhase.CREATING:
        raise Gone(f"there is no VM {name} to start", hint="create it first")
    if not known.process.is_alive():
        raise Gone(f"VM {name} is dead", hint="destroy it and create another")
    address = identity.address.partition("/")[0]
    if (identity.hostname, identity.mac) != (name, known.mac) or known.address not in ("", address):
        raise Refused(
            f"VM {name} with {known.mac} {known.address} cannot be {identity.hostname} with {identity.mac} {address}",
            hint="destroy it and create another",
        )
    return known


def _choose_node(host: HostContext, known: Manifest, size: Size) -> Manifest:
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
    """Let the VM's files grow to what its guest may write. Returns its manifest, which is still to be written: a limit
    that it does not tell of is set again by the next call."""
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
    tap.set_isolated(known.name, not (peers or host.firewall.separates(joined)))
    return joined


def _wake(session: QemuSession, message: Callable[[], bytes], timer: VmStageTimer) -> Report:
    """Let a restored guest run. Its identity waits in the channel when it wakes."""
    rest = session.channel.queue(message())
    session.monitor.execute("cont")
    session.channel.send(rest, _WAKE_TIMEOUT)
    return _until_started(session, timer)


def _boot_or_resume(session: QemuSession, message: Callable[[], bytes], timer: VmStageTimer, stage: str) -> Report:
    """Let a guest run that boots first, or that may have been sent its identity before: it is asked how far it is."""
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
