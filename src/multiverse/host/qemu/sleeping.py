"""VMs that sleep: their memory is in a file, their QEMU has ended, and a stand-in answers the scheduler (`stand_in`).

A VM falls asleep in these steps; until the third its guest goes on after an error or an interruption:

1. its guest writes back, and says which steps its job has; its disk is put on top of the image alone;
2. it is stopped, and its memory is written to the file;
3. its manifest says that it is asleep;
4. its QEMU is ended, and its stand-in is started.

It wakes in the opposite order: the stand-in ends, a QEMU reads the file, the guest runs, the manifest says that the VM
is started, and the guest is told the time and whether its job runs. Whoever finds a manifest that says that a VM is
asleep does the fourth step again. The file lies beside the saved VMs. It is of no use elsewhere, or without the VM's
disk.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict

from multiverse.core.errors import Broken, Damaged, Exhausted, Gone, MultiverseError, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import GuestFile, Identity
from multiverse.core.model.vm import Stage
from multiverse.guest.protocol import STEPS, Report, rise_message, sleep_message
from multiverse.host import manifest, process, stand_in
from multiverse.host.manifest import Manifest, Sleep, Specification, VmPhase
from multiverse.host.qemu import lifecycle, migration, saves
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.disks import available_disk
from multiverse.host.qemu.hotplug import backends_of, plug
from multiverse.host.qemu.lifecycle import VmParts
from multiverse.host.qemu.machine import Feature
from multiverse.host.qemu.migration import Limits, Sender
from multiverse.host.qemu.saved_files import SavedFile
from multiverse.host.qemu.session import QemuSession
from multiverse.system import files
from multiverse.system.locks import locked_directory

log = structlog.get_logger(__name__)

_FILE, _LOG = "stand-in.json", "stand-in.log"  # beside the manifest
_SYNC_TIMEOUT, _ANSWER_TIMEOUT = 20.0, 60.0  # seconds for the guest
_TIMEOUT = 3600.0  # seconds until the disk is on top of the image
_STEP = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10}){1,2}")


class StandIn(BaseModel):
    """What stands in for a VM."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    identity: Identity  # with the daemons of the stand-in
    bridge: str  # at which its tap was
    steps: tuple[str, ...] = ()  # of the job


def sleep(host: HostContext, name: str, token: str, number: int, found: StandIn, key: str = "") -> list[Stage]:
    """Let a VM sleep whose job is suspended; sleeps are numbered. `found` stands in for it; the file is encrypted if
    there is a key. The same again is success. Raises `Gone` if the VM does not run, `Refused` if it moves, is being
    saved, or a process of its job runs, if nothing can stand in for it, or if that sleep is over, and `Exhausted` if
    there is no room. Then it goes on. Raises `Broken` if nothing stands in for it yet: `settle` tries that again."""
    timer = VmStageTimer()
    with _locked(host, name, token) as known:
        _refuse_late(known, number, is_over=known.phase is not VmPhase.ASLEEP)
        if known.phase is not VmPhase.ASLEEP:
            known = _fall_asleep(host, known, number, found, key, timer)
        _settle(host, known)
        timer("stand in")
    return timer.stages


def wake(host: HostContext, name: str, token: str, number: int, *, runs: bool, key: str = "") -> list[Stage]:
    """Let a VM go on that sleeps, or was to. `runs`: the scheduler shows its job as running. The same again is success:
    then the job is stopped or goes on as it says. Raises `Gone` if there is no such VM, `Damaged` if its file is not as
    it was written, `Exhausted` if there is no room; then it sleeps on. Raises `Broken` if its guest does not do it."""
    timer = VmStageTimer()
    with _locked(host, name, token) as known:
        _refuse_late(known, number)
        if known.phase is VmPhase.ASLEEP:
            _wake(host, known, key, timer)
        elif known.sleep is not None:
            _stay_awake(host, known)
        elif host.connections.is_mute(name) and (known.slept < number or known.told is not None):
            # It has run all the while, and its guest has heard all that the scheduler asked of it.
            manifest.write(host.paths(name).home, replace(known, slept=number, told=runs))
            return timer.stages
        elif known.slept < number or known.told is not runs:
            manifest.write(host.paths(name).home, replace(known, slept=number, told=None))
    channel = host.connections.started_channel(name)
    report = channel.ask(rise_message(runs=runs), "risen", _ANSWER_TIMEOUT, or_else="refused")
    if report.type == "refused":
        raise Broken(f"in the guest of VM {name}: {report.reason}", hint="see its console log beside its manifest")
    with _locked(host, name, token) as known:
        if known.slept == number and known.sleep is None:
            manifest.write(host.paths(name).home, replace(known, told=runs))
    host.names.started(name)
    timer("rise")
    return timer.stages


def _unsettled(host: HostContext) -> Iterator[Manifest]:
    for home in host.config.vms.glob(f"{host.config.prefix}*"):
        known = manifest.read(home)
        if known is not None and known.sleep is not None and not _is_settled(known):
            yield known


def _refuse_late(known: Manifest, number: int, *, is_over: bool = False) -> None:
    """Raise `Refused` if that sleep is over. `is_over`: the latest one is."""
    latest = known.sleep.number if known.sleep is not None else known.slept
    if number < latest + is_over:
        raise Refused(f"sleep {number} of VM {known.name} is over: its latest is {latest}", hint="see `multiverse vms`")


def settle(host: HostContext) -> None:
    """Complete what another process has left incomplete, and start stand-ins again that have ended."""
    for known in _unsettled(host):
        try:
            with _locked(host, known.name, known.token) as found:
                if found.phase is VmPhase.ASLEEP:
                    _settle(host, found)
                elif found.sleep is not None:
                    _stay_awake(host, found)
        except MultiverseError as error:
            log.warning("VM neither sleeps nor goes on", vm=known.name, reason=str(error))


def _is_settled(known: Manifest) -> bool:
    return known.phase is VmPhase.ASLEEP and known.sleep is not None and known.sleep.process.is_alive()


def remove_orphans(host: HostContext) -> None:
    """Remove the files of this host's VMs that do not sleep, or do not exist any more."""
    for path in saves.directory(host).glob(f".{host.config.prefix}*{_suffix(host)}"):
        known = manifest.read(host.paths(path.name[1 : -len(_suffix(host))]).home)
        if known is None or known.sleep is None:
            path.unlink(missing_ok=True)


def end(host: HostContext, name: str, token: str) -> None:
    """End the stand-in of a VM that is to be destroyed, and remove its file. Absent is success. Raises `Broken`, and
    what `manifest.refuse_other` raises."""
    host.check_name(name)
    known = manifest.read(host.paths(name).home)
    if known is None or known.sleep is None:
        return  # whoever holds its lock may wait for its guest: `lifecycle.remove` ends that first
    with suppress(Gone), _locked(host, name, token) as known:
        if known.sleep is not None:
            stand_in.end(name, known.sleep.process)
            file_of(host, name).unlink(missing_ok=True)
            manifest.write(host.paths(name).home, _awake(known))


@contextmanager
def _locked(host: HostContext, name: str, token: str) -> Iterator[Manifest]:
    host.check_name(name)
    home = host.paths(name).home
    with locked_directory(home, create=False) as there:
        known = manifest.read(home) if there else None
        manifest.refuse_other(known, token)
        if known is None:
            raise Gone(f"there is no VM {name}", hint="see `multiverse vms`")
        yield known


def file_of(host: HostContext, name: str) -> Path:
    """Where the memory of a VM is while it sleeps."""
    return saves.directory(host) / f".{name}{_suffix(host)}"


def _suffix(host: HostContext) -> str:
    """Hosts may share the directory."""
    return f".{host.config.host}.asleep"


# --- falling asleep ----------------------------------------------------------------------------------


def _fall_asleep(
    host: HostContext, known: Manifest, number: int, found: StandIn, key: str, timer: VmStageTimer
) -> Manifest:
    """Do the first three steps. Returns the manifest, as written."""
    _check(host, known, found.identity)
    paths = host.paths(known.name)
    if known.sleep is not None:
        _stay_awake(host, known)
    found = found.model_copy(update={"steps": _write_back(host, known)})
    timer("write back")
    files.replace(paths.home / _FILE, found.model_dump_json(), mode=0o600)
    image = host.image(known.image)
    saves.write_stubs(image, paths.home)
    falling = replace(known, sleep=Sleep(number))
    manifest.write(paths.home, falling)
    try:
        with Monitor.connect(paths.monitor) as monitor:
            limits = Limits(0, 0.0, time.monotonic() + _TIMEOUT)
            Sender(monitor, limits, lambda: None).flatten(image.disk)
            timer("disk")
            backends = tuple(backends_of(monitor))
            state = saves.write_state(monitor, file_of(host, known.name), key)
            timer("write")
        asleep = replace(falling, phase=VmPhase.ASLEEP, template_build="", huge_memory=0,
                         sleep=Sleep(number, state.size, state.digest, bool(key), backends))  # fmt: skip
        manifest.write(paths.home, asleep)
    except MultiverseError:
        _stay_awake(host, falling)
        raise
    return asleep


def _check(host: HostContext, known: Manifest, identity: Identity) -> None:
    name = known.name
    saves.running(name, known)
    manifest.refuse_moving(known)
    if known.phase is not VmPhase.STARTED or known.frozen or known.freezing or known.checkpoint or known.kept:
        raise Refused(f"VM {name} does not sleep: its job is being saved, or resumed", hint="see `multiverse saved`")
    if known.job_groups:
        raise Refused(f"VM {name} does not sleep: it is inside of a job", hint="VMs of jobs of their own do")
    stand_in.check(identity)
    place, need = saves.directory(host), known.total_memory or known.memory
    if (room := available_disk(place) >> 20) < need:
        what = f"VM {name} does not sleep: {place} has room for {room} MiB, and its memory are {need}"
        raise Exhausted(what, hint="make room there")


def _write_back(host: HostContext, known: Manifest) -> tuple[str, ...]:
    """Let the guest write back. The names of the steps of its job."""
    channel = host.connections.started_channel(known.name)
    report = channel.ask(sleep_message(_SYNC_TIMEOUT), "may_sleep", _ANSWER_TIMEOUT, or_else="refused")
    if report.type == "refused":
        raise Refused(f"VM {known.name} does not sleep: {report.reason}", hint="it keeps its memory meanwhile")
    return tuple(sorted(step for step in report.audit if _STEP.fullmatch(step)))


def _stay_awake(host: HostContext, known: Manifest) -> None:
    """Let the guest of a VM go on that was about to sleep, or has been read from its file. Whoever finds the record
    does all of it again."""
    if known.process.is_alive():
        with Monitor.connect(host.paths(known.name).monitor) as monitor:
            migration.stay(monitor)
    _goes_on(host, known)


def _goes_on(host: HostContext, known: Manifest) -> None:
    """Forget that a VM was to sleep, or slept: its guest goes on."""
    home = host.paths(known.name).home
    file_of(host, known.name).unlink(missing_ok=True)
    (home / _FILE).unlink(missing_ok=True)
    manifest.write(home, _awake(known))


def _awake(known: Manifest) -> Manifest:
    slept = max(known.slept, known.sleep.number if known.sleep is not None else 0)
    return replace(known, phase=VmPhase.STARTED, sleep=None, slept=slept, told=None)


def _settle(host: HostContext, known: Manifest) -> None:
    """End the QEMU of a VM that is asleep, and start what stands in for it, unless that is there."""
    name, paths = known.name, host.paths(known.name)
    asleep = known.sleep or Sleep(0)
    lifecycle.kill_qemu(name, paths, known)
    host.connections.drop(name)
    host.outputs.drop(name)
    if asleep.process.is_alive():
        return
    found = _stand_in_of(paths.home)
    listed = GuestFile(STEPS, "\n".join(found.steps).encode())
    bootstrap = replace(found.identity.bootstrap, files=(*found.identity.bootstrap.files, listed))
    with stand_in.start(replace(found.identity, bootstrap=bootstrap), paths.run, paths.home / _LOG) as starting:
        its = starting.process
        asleep = replace(asleep, pid=its.pid, started=its.started, boot_id=its.boot_id)
        manifest.write(paths.home, replace(known, sleep=asleep))
        starting.serve(found.bridge)
    lifecycle.separate(host, known)


def _stand_in_of(home: Path) -> StandIn:
    try:
        return StandIn.model_validate_json((home / _FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise Broken(f"cannot read {home / _FILE}: {error}", hint="the VM can only be destroyed") from error


# --- waking ------------------------------------------------------------------------------------------


def _wake(host: HostContext, known: Manifest, key: str, timer: VmStageTimer) -> None:
    name, paths = known.name, host.paths(known.name)
    asleep = known.sleep or Sleep(0)
    bridge = _stand_in_of(paths.home).bridge
    stand_in.end(name, asleep.process)
    timer("stand in")
    try:
        session = _restore(host, known, asleep, bridge, key, timer)
    except MultiverseError:
        with suppress(MultiverseError):
            _settle(host, manifest.read(paths.home) or known)
        raise
    # Its disk changes once it goes on. So it is recorded before that it does, and nobody reads the file again.
    record = replace(manifest.read(paths.home) or known, phase=VmPhase.STARTED)
    manifest.write(paths.home, record)
    host.connections.sessions[name] = session
    lifecycle.separate(host, known)
    session.monitor.execute("cont")
    timer("continue")
    host.connections.keep_channel(name, session, Report("started"))
    _goes_on(host, record)


def _restore(
    host: HostContext, known: Manifest, asleep: Sleep, bridge: str, key: str, timer: VmStageTimer
) -> QemuSession:
    """The QEMU of a VM that was asleep, paused. Its manifest goes on to say that it is asleep."""
    name, paths, image = known.name, host.paths(known.name), host.image(known.image)
    if asleep.encrypted and not key:
        raise Damaged(f"VM {name} sleeps in an encrypted file, and there is no key", hint="is it in a backup?")
    total = Size(known.total_cpus or known.cpus, known.total_memory or known.memory)
    spec = Specification(name, host.config.host, known.image, known.kind, total, known.mac, token=known.token,
                         address=known.address, bridge=bridge)  # fmt: skip
    huge = Feature.HUGE_PAGES in host.features.in_use

    def complete(session: QemuSession, record: Manifest) -> Manifest:
        process.limit_files(record.process, record.uid, record.disk << 20)
        record = lifecycle.choose_node(host, replace(record, numa=None), total)
        made = plug(session.monitor, record, total.cpus, total.memory - known.memory, huge=huge,
                    backends=asleep.backends)  # fmt: skip
        timer("plug")
        saves.read_memory(session.monitor, file_of(host, name), SavedFile(asleep.size, asleep.digest),
                          key if asleep.encrypted else "")  # fmt: skip
        timer("restore")
        return replace(record, huge_memory=made)

    machine = saves.machine(host, spec, Size(known.cpus, known.memory), image, paths, paths.disk)
    machine = machine.as_made(known.cpu, known.most)
    parts = VmParts(machine, image, None, known, host.uids.user(known.uid), complete=complete, phase=VmPhase.ASLEEP)
    return lifecycle.launch(host, spec, parts, timer)
