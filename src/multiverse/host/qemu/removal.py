"""Destroying a VM: nothing of it is left."""

from __future__ import annotations

import time

from multiverse.core.errors import Broken, MultiverseError
from multiverse.guest.protocol import FLUSH
from multiverse.host import manifest, process, tap
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.channel import AgentChannel
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.session import Paths, remove_files
from multiverse.system.processes import boot_id


def destroy(host: HostContext, name: str, grace: float, token: str = "") -> None:
    """Let the guest write back and unmount for up to `grace` seconds, unless it is paused because the disk is full, end
    the VM, and remove all of it.

    Absent is success. Raises `Broken` if its process cannot be ended, and what `manifest.refuse_other` raises.
    """
    host.check_name(name)
    paths = host.paths(name)
    if not paths.home.exists() and not paths.run.exists():
        host.connections.drop(name)
        return
    known = manifest.read(paths.home)
    manifest.refuse_other(known, token)
    alive = known is not None and known.process.is_alive()
    if known is not None and alive:
        if grace > 0 and known.phase in (VmPhase.STARTED, VmPhase.STARTING) and name not in host.paused:
            _flush(host, name, paths, grace)
        # Killed before the lock is held: whoever holds the lock, waiting for this guest, then releases it.
        process.kill(known.process)
    # The directory is not created: another destroy may have removed it meanwhile.
    with manifest.locked(paths.home, create=False):
        known = manifest.read(paths.home)
        kill_qemu(name, paths, known)
        host.connections.drop(name)
        host.names.drop(name)
        host.outputs.drop(name)
        host.functions.release(name)
        tap.remove_tap(name)
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
    if known is not None and known.pid and known.boot_id == boot_id():
        suspects.add(known.process)
    if known is None or not known.pid:
        suspects.update(process.find_by_argument(f"path={paths.console}"))
    for suspect in suspects:
        if not process.kill(suspect):
            raise Broken(
                f"the process {suspect.pid} of VM {name} cannot be ended",
                hint=f"see what it waits for in /proc/{suspect.pid}/stack",
            )


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
        channel = host.connections.take_channel(name)
        if channel is None and host.connections.has_session(name):
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
