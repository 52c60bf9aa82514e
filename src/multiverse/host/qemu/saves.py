"""Saving a VM into files, and restoring it from them, on any host with the same image, machine type and CPU model.

A saved VM is a directory: `state.zst` (memory and devices, QEMU's migration stream, compressed), `disk.qcow2` (what its
disk has beyond the image's), `kernel.stub`, `initrd.stub`, and `save.json`, which is written last. The first two may be
encrypted: see `saved_files`. A VM that cannot be written is kept as it is, stopped: its manifest says so.

A host may have a second directory, elsewhere, to which it copies such directories as they are. It restores from both.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Damaged, Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.saved import SavedSeen, Storage
from multiverse.core.model.vm import Stage
from multiverse.host import manifest, path_security
from multiverse.host.manifest import Manifest, Specification, VmPhase
from multiverse.host.qemu import saved_files, templates
from multiverse.host.qemu.channels import Command, Monitor
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.disks import OUT_OF_ROOM, REASON, available_disk
from multiverse.host.qemu.hotplug import backends_of
from multiverse.host.qemu.machine import Memory, QemuMachine
from multiverse.host.qemu.migration import NO_LIMIT, capabilities, state_after
from multiverse.host.qemu.saved_files import Reader, SavedFile
from multiverse.host.qemu.session import Paths
from multiverse.host.qemu.template_copies import failure_of, rebase
from multiverse.images.catalog import Image
from multiverse.system import files
from multiverse.system.locks import locked_directory, locked_file

FILE = "save.json"
STATE, OVERLAY, STUBS = "state.zst", "disk.qcow2", ("kernel.stub", "initrd.stub")
_NAME = ".storage"  # a file in the directory: the name of the storage
_WRITING = ".writing"  # at the end of the name of a directory that is incomplete
_OTHER = "the controller's record is about another VM"
_TIMEOUT = 3600.0  # seconds until the whole memory of a VM was written or read
_FAILS = 20.0  # seconds until QEMU has noticed that nobody reads its state any more
_LEFT = 2 * _TIMEOUT  # seconds after which files that nobody completed are removed


@dataclass(frozen=True)
class SavedVm:
    """What `save.json` says. Everything that a restore needs to make the same machine."""

    name: str
    token: str
    kind: CloneKind
    image: str
    image_key: str
    version: str  # of QEMU
    accelerator: str  # with the CPU that the VM has
    mac: str
    address: str
    cpus: int  # before anything was plugged
    memory: int  # MiB, before anything was plugged
    total_cpus: int
    total_memory: int  # MiB
    disk: int  # MiB that its files can grow to
    state: SavedFile
    overlay: SavedFile
    written: float  # seconds since the epoch
    encrypted: bool = False
    seal: str = ""  # of all that is above and below, by its key; empty: it is not encrypted
    backing: str = ""  # the image's disk, as `disk.qcow2` names it
    backends: tuple[str, ...] = ()  # of plugged memory, by name: the state is read into backends of the same names
    uncut: bool = False  # a checkpoint: its job is frozen, and was not cut off from its run
    most: Size | None = None  # up to which it can be plugged; None: written by a release that did not record it

    @property
    def cpu(self) -> str:
        """QEMU's CPU model; empty: that of the host's other VMs."""
        return self.accelerator.rpartition(" ")[2] if " " in self.accelerator else ""


_ADAPTER = TypeAdapter(SavedVm)


def read(directory: Path) -> SavedVm | None:
    """The saved VM in that directory; None if there is none, or an unfinished one."""
    try:
        return _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def directory(host: HostContext, name: str = "") -> Path:
    """Where VMs are saved or, with the name of a storage, which directory is that one. Raises `Refused` if this host
    saves none, and `Gone` if the storage is out of reach."""
    if host.config.saves is None:
        raise Refused(f"host {host.config.host} saves no VMs", hint="set save.enabled for it")
    for place in (host.config.saves, host.config.copies):  # the second one may hang
        if place is not None and (not name or name == _name_in(place)):
            return place
    raise Gone(f"the storage {name} is out of reach", hint="is its directory mounted?")


def _name_in(place: Path) -> str:
    """The name of the storage, as all hosts read it that share the directory; empty if it is out of reach."""
    try:
        return (place / _NAME).read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class SeenStorage:
    """What a directory of saved VMs shows: the storage with the machines that this host makes, the bytes that can still
    be written there, and this site's saved VMs, complete or not."""

    storage: Storage
    free: int
    states: dict[str, SavedSeen]


def look(host: HostContext, place: Path) -> SeenStorage | None:
    """Look at a directory; None if the storage is out of reach. Hangs for as long as its file system does."""
    if not (name := _name_in(place)):
        return None
    free, states = available_disk(place), _shown_in(host, place, name)
    return SeenStorage(Storage(name, f"{host.version} {host.guest_cpu()}"), free, states)


def prepare_copies(place: Path, prefix: str) -> bool:
    """The same as `prepare`, but the directory has to exist: made in place of a file system that is not mounted, it
    would be on this machine. Returns False if it does not. A copy may be mounted later if it was prepared before."""
    if not place.is_dir():
        return False
    prepare(place, prefix)
    return True


def prepare(place: Path, prefix: str) -> None:
    """Make the directory, which only root may read, and give the storage a name. Remove what was begun long ago and not
    completed. Raises `Refused` if others could change it, or if this machine lacks the program that compresses."""
    if shutil.which("zstd") is None:
        raise Refused("zstd is not installed, and states are compressed by it", hint="install it: apt install zstd")
    path_security.make_directory(place, 0o700)
    with locked_file(place / f"{_NAME}.lock"):
        if not (place / _NAME).exists():
            files.replace(place / _NAME, secrets.token_hex(8))
    for left in place.glob(f".{prefix}*{_WRITING}"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _LEFT:
                shutil.rmtree(left, ignore_errors=True)


def shown(own: SeenStorage | None, copies: SeenStorage | None, kept: Iterable[Manifest]) -> dict[str, SavedSeen]:
    """The saved VMs in the storages that this host reaches, and those that it keeps in memory."""
    found = dict(copies.states) if copies is not None else {}
    for name, seen in own.states.items() if own is not None else ():
        other = found.get(name)
        if other is None or not other.complete or seen.complete:
            same = other is not None and other.complete and other.token == seen.token
            found[name] = replace(seen, copy=other.storage) if same and other is not None else seen
    for known in kept:
        found[known.kept] = SavedSeen(known.kept, known.token, 0, "", kept=True)
    return found


def _shown_in(host: HostContext, place: Path, storage: str) -> dict[str, SavedSeen]:
    found: dict[str, SavedSeen] = {}
    for entry in os.scandir(place):
        name = entry.name.removeprefix(".").removesuffix(_WRITING)
        if not name.startswith(host.config.prefix) or not entry.is_dir():
            continue
        if (saved := read(Path(entry.path))) is not None and name == entry.name:
            size = saved.state.size + saved.overlay.size
            found[name] = SavedSeen(name, saved.token, size, storage, saved.written)
        else:
            found.setdefault(name, SavedSeen(name, "", 0, storage, complete=False))
    return found


def discard(host: HostContext, saved: str) -> None:
    """Remove the files of that name from both directories, complete or not; first what says that they are complete.
    Incomplete ones go first: whoever is completing them fails then, or has done so."""
    with ExitStack() as last_first:  # an error in one directory is raised after the other one; the copies may hang
        for place in filter(None, (host.config.copies, host.config.saves)):
            last_first.callback(_remove, place / saved)
            last_first.callback(_remove, place / f".{saved}{_WRITING}")


def _remove(place: Path) -> None:
    (place / FILE).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def is_running(host: HostContext, name: str) -> bool:
    """Whether the guest of a VM runs. If not, an earlier call has stopped it to save it. Raises `Unknown` if the guest
    is paused because its host's disk is full: nothing can be asked of it."""
    with Monitor.connect(host.paths(name).monitor) as monitor:
        status = monitor.execute("query-status")
    if status["status"] == OUT_OF_ROOM:
        raise Unknown(f"VM {name} does not answer: {REASON}", hint="make room")
    return bool(status["running"])


def find(host: HostContext, spec: Specification, image: Image) -> SavedVm:
    """The saved VM that the specification names. Raises `Gone` if the storage is out of reach, `Damaged` if it lacks
    the files, or if they are encrypted and there is no key, and `Refused` if it is another VM or this host makes
    another machine. The contents of the files are checked as they are read."""
    saved = _complete(host, directory(host, spec.storage), spec.saved)
    if (saved.name, saved.mac) != (spec.name, spec.mac):
        raise Refused(f"the saved VM {spec.saved} is {saved.name}, not {spec.name}", hint=_OTHER)
    here = (image.key, host.version, host.guest_cpu(saved.cpu))
    if here != (saved.image_key, saved.version, saved.accelerator) or not host.runs(saved.cpu):
        what = f"{host.config.host} makes another machine than the one that {spec.saved} was saved from"
        raise Refused(what, hint="resume it on a host with the same image, QEMU, accelerator and CPU")
    _check_seal(saved, spec.saved, spec.key)
    return saved


def _complete(host: HostContext, place: Path, name: str) -> SavedVm:
    """What `save.json` says. Raises `Gone` if the storage is out of reach, and `Damaged` if there is none."""
    saved = read(place / name)
    if saved is None:
        if not _name_in(place):
            raise Gone(f"the storage {place} is out of reach", hint="is the directory mounted?")
        raise Damaged(f"the saved VM {name} is missing in {place}", hint="is it in a backup?")
    return saved


def _check_seal(saved: SavedVm, name: str, key: str) -> None:
    if bool(key) != saved.encrypted or (key and saved.seal != _sealed(saved, key).seal):
        raise Damaged(f"the saved VM {name} is not as it was saved, or its key is not", hint="is it in a backup?")


def _sealed(saved: SavedVm, key: str) -> SavedVm:
    """Without a key nobody can change what a restore goes by. What is None is not sealed: an earlier release did not
    have it."""
    if not key:
        return saved
    facts = {name: value for name, value in asdict(replace(saved, seal="")).items() if value is not None}
    return replace(saved, seal=saved_files.seal(key, json.dumps(facts, sort_keys=True)))


def copy_files(host: HostContext, spec: Specification, saved: SavedVm, image: Image, paths: Paths) -> None:
    """Copy what the restored VM goes on to write or to open by name into its directory. Raises `Damaged`."""
    place = directory(host, spec.storage) / spec.saved
    target = os.open(paths.overlay, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    reader = Reader(place / OVERLAY, spec.key if saved.encrypted else "", saved.overlay)
    with reader.into(target, compressed=False) as feed:
        feed()
    if saved.backing != str(image.disk):
        rebase(paths.overlay, image.disk)
    for stub in STUBS:
        shutil.copyfile(place / stub, paths.home / stub)


def machine(
    host: HostContext, spec: Specification, booted: Size, image: Image, paths: Paths, disk: Path
) -> QemuMachine:
    """The machine of a VM that has run in another QEMU, with that size before anything was plugged. Its directory has
    the stubs."""
    memory = Memory(booted.memory, restored=spec.kind is CloneKind.INSTANT)
    plain = host.vm_machine(replace(spec, size=booted), image, None, disk)
    kernel, initrd = (paths.home / stub for stub in STUBS)
    disk_format = "raw" if disk == paths.full_disk else "qcow2"
    return replace(plain, memory=memory, kernel=kernel, initrd=initrd, disk_format=disk_format)


def write_stubs(image: Image, place: Path) -> None:
    """Write what stands for kernel and ramdisk, of which the memory has all that matters."""
    with image.kernel.open("rb") as file:
        (place / STUBS[0]).write_bytes(file.read(templates.STUB))
    (place / STUBS[1]).write_bytes(bytes(4096))


def save(host: HostContext, name: str, saved: str, key: str = "") -> list[Stage]:
    """Save a VM, which is stopped and stays so. The same again is success. Raises `Gone` if it does not run,
    `Exhausted` if there is no room."""
    timer = VmStageTimer()
    paths = host.paths(name)
    with locked_directory(paths.home, create=False):
        known = running(name, manifest.read(paths.home))

        def write_memory(work: Path) -> SavedFile:
            with Monitor.connect(paths.monitor) as monitor:
                state = write_state(monitor, work / STATE, key)
            timer("write")
            return state

        if not is_written(host, known, saved):
            write_files(host, known, saved, key, Writing(write_memory), timer)
    return timer.stages


def is_written(host: HostContext, known: Manifest, saved: str) -> bool:
    found = read(directory(host) / saved)
    return found is not None and found.token == known.token


@dataclass(frozen=True)
class Writing:
    """How the parts of a VM are written: its memory into the directory that `memory` gets, and its disk as it is, or,
    of a checkpoint, the copy of it that `memory` has made."""

    memory: Callable[[Path], SavedFile]
    disk: Path | None = None


def write_files(host: HostContext, known: Manifest, saved: str, key: str, how: Writing, timer: VmStageTimer) -> None:
    """Write the files of a VM. Raises `Exhausted` if there is no room."""
    store, paths, image = directory(host), host.paths(known.name), host.image(known.image)
    work, final = store / f".{saved}{_WRITING}", store / saved
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(mode=0o700)
        with Monitor.connect(paths.monitor) as monitor:
            backends = tuple(backends_of(monitor))
        state = how.memory(work)
        overlay = _write_overlay(paths, image, work / OVERLAY, key, how.disk)
        timer("disk")
        write_stubs(image, work)
        facts = SavedVm(
            name=known.name, token=known.token, kind=known.kind, image=known.image, image_key=image.key,
            version=host.version, accelerator=host.guest_cpu(known.cpu), mac=known.mac, address=known.address,
            cpus=known.cpus, memory=known.memory, total_cpus=known.total_cpus or known.cpus,
            total_memory=known.total_memory or known.memory, disk=known.disk, state=state, overlay=overlay,
            written=time.time(), encrypted=bool(key), backing=str(image.disk), backends=backends,
            uncut=how.disk is not None, most=host.most_of(known, image),
        )  # fmt: skip
        files.create_whole(work / FILE, json.dumps(asdict(_sealed(facts, key))).encode())
        shutil.rmtree(final, ignore_errors=True)  # of another VM, after a database was restored
        work.rename(final)
        timer("sync")
    except OSError as error:
        raise Exhausted(f"cannot save VM {known.name}: {error}", hint=f"is there room in {store}?") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def copy(host: HostContext, name: str, key: str = "") -> None:
    """Copy a saved VM as it is to the second directory. The same again is success. Raises `Refused` if this host has
    none, `Gone` if one is out of reach, `Damaged` if the files are not as they were written, and `Exhausted` if they
    cannot be copied. After an error nothing is left of the copy."""
    source, target = directory(host) / name, host.config.copies
    if target is None:
        raise Refused(f"host {host.config.host} copies no saved VMs", hint="set save.copy for it")
    if not _name_in(target):
        raise Gone(f"the storage {target} is out of reach", hint="is the directory mounted?")
    with locked_directory(source, create=False):  # an earlier call may go on
        saved = _complete(host, source.parent, name)
        _check_seal(saved, name, key)
        if read(target / name) != saved:
            _copy_whole(source, target, saved, key)


def _copy_whole(source: Path, target: Path, saved: SavedVm, key: str) -> None:
    name = source.name
    need, free = saved.state.size + saved.overlay.size, available_disk(target)
    if need > free:  # what fills a shared file system to its end harms others
        what = f"{target} has room for {free >> 20} MiB, and the saved VM {name} takes {need >> 20}"
        raise Exhausted(what, hint="remove what nobody needs there")
    work = target / f".{name}{_WRITING}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(mode=0o700)
        for file, expected in ((STATE, saved.state), (OVERLAY, saved.overlay)):
            saved_files.copy(source / file, work / file, key, expected)
        for stub in STUBS:
            shutil.copyfile(source / stub, work / stub)
        files.create_whole(work / FILE, (source / FILE).read_bytes())
        shutil.rmtree(target / name, ignore_errors=True)  # of another VM, after a database was restored
        work.rename(target / name)
    except OSError as error:
        raise Exhausted(f"cannot copy {source} to {target}: {error}", hint="is there room?") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def running(name: str, known: Manifest | None) -> Manifest:
    if known is None or not known.process.is_alive():
        raise Gone(f"there is no running VM {name}", hint="see `multiverse vms`")
    return known


def keep(host: HostContext, name: str, saved: str) -> None:
    """Keep a VM, stopped, until one that is restored from `saved` takes it over, or it is discarded. Raises `Gone` if
    it does not run."""
    paths = host.paths(name)
    with locked_directory(paths.home, create=False):
        known = running(name, manifest.read(paths.home))
        if not known.kept:
            with Monitor.connect(paths.monitor) as monitor:
                monitor.execute("stop")
            on = replace(known, phase=VmPhase.PARKED, saved=saved, kept=saved, frozen=True)
            manifest.write(paths.home, on)


def take_over(paths: Paths, known: Manifest, spec: Specification) -> None:
    """Let a VM that is kept in memory be the one that is restored from it. Raises `Damaged` if it has ended."""
    if known.kept != spec.saved:
        raise Refused(f"VM {known.name} is kept as {known.kept}, not as {spec.saved}", hint="see `multiverse saved`")
    if not known.process.is_alive():
        raise Damaged(f"VM {known.name} was kept in memory, and has ended", hint="see its console log")
    manifest.write(paths.home, replace(known, kept="", token=spec.token))


def _write_overlay(paths: Paths, image: Image, target: Path, key: str, source: Path | None) -> SavedFile:
    """What the VM's disk has beyond its image's, also what its template wrote: of that copy of the disk, or of the disk
    itself. It is made beside the VM's disk, because qemu-img cannot encrypt it."""
    made, difference = paths.home / "saved.qcow2", paths.home / "difference.qcow2"
    try:
        if paths.full_disk.exists():  # a copy of the whole image
            full, kind = (source, "qcow2") if source is not None else (paths.full_disk, "raw")
            run("qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", kind, "-b", str(full), str(difference),
                str(paths.full_disk.stat().st_size))  # fmt: skip
            run("qemu-img", "rebase", "-U", "-F", "raw", "-b", str(image.disk), str(difference))
            source = difference
        run("qemu-img", "convert", "-U", "-O", "qcow2", "-c", "-o", "compression_type=zstd", "-F", "raw",
            "-B", str(image.disk), str(source or paths.overlay), str(made))  # fmt: skip
        return saved_files.write(target, key, os.open(made, os.O_RDONLY | os.O_CLOEXEC), compress=False)
    finally:
        made.unlink(missing_ok=True)
        difference.unlink(missing_ok=True)


def run(*argv: str) -> None:
    if problem := failure_of(list(argv)):
        raise Exhausted(f"cannot copy the disk {argv[-2]}: {problem}", hint="is there room left?")


def write_state(monitor: Monitor, path: Path, key: str = "") -> SavedFile:
    """Stop the guest, and write its memory and devices to a compressed file. The guest stays stopped."""
    # An earlier call may have ended before its files were complete. QEMU writes no state twice, unless the guest has
    # run meanwhile: nothing goes on in it but its agent.
    written = state_after(monitor) == "postmigrate"
    commands: list[Command] = [
        *([("cont", {})] if written else []),
        ("stop", {}),
        ("migrate-set-parameters", {"max-bandwidth": NO_LIMIT}),
        capabilities(),
        ("getfd", {"fdname": "state"}),
        ("migrate", {"uri": "fd:state"}),
    ]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        monitor.execute_all(commands, writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        found = saved_files.write(path, key, reading, compress=True)
    except Exhausted:
        with suppress(MultiverseError):  # it fails: a state can be written again once that is settled
            monitor.wait_event("MIGRATION", _FAILS, status="completed")
        raise
    monitor.wait_event("MIGRATION", _TIMEOUT, status="completed")
    state_after(monitor)
    return found


def read_state(monitor: Monitor, place: Path, saved: SavedVm, key: str) -> None:
    """Restore memory and devices into a QEMU that waits for them. Raises `Damaged`."""
    read_memory(monitor, place / STATE, saved.state, key if saved.encrypted else "")


def read_memory(monitor: Monitor, path: Path, file: SavedFile, key: str = "") -> None:
    """The same, from that file."""
    commands: list[Command] = [
        ("migrate-set-parameters", {"max-bandwidth": NO_LIMIT}),
        ("getfd", {"fdname": "state"}),
        ("migrate-incoming", {"uri": "fd:state"}),
    ]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with Reader(path, key, file).into(writing, compressed=True) as feed:
            try:
                monitor.execute_all(commands, reading)
            finally:
                os.close(reading)
            with suppress(BrokenPipeError):  # QEMU says why
                feed()
            monitor.wait_event("MIGRATION", _TIMEOUT, status="completed")
    except OSError as error:
        raise Exhausted(f"cannot read {path}: {error}", hint="is the storage in reach?") from error
