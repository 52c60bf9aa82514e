"""Saving a VM into files, and restoring it from them, on any host with the same image, machine type and CPU model.

A saved VM is a directory: `state.zst` (memory and devices, QEMU's migration stream, compressed), `disk.qcow2` (what its
disk has beyond the image's), `kernel.stub`, `initrd.stub`, and `save.json`, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.saved import SavedSeen, Storage
from multiverse.core.model.vm import Stage
from multiverse.host import manifest, path_security
from multiverse.host.manifest import Specification
from multiverse.host.qemu import templates
from multiverse.host.qemu.channels import Command, Monitor
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.machine import Memory, QemuMachine
from multiverse.host.qemu.session import Paths
from multiverse.host.qemu.template_copies import failure_of
from multiverse.images.catalog import Image
from multiverse.system import files
from multiverse.system.locks import locked_directory, locked_file

FILE = "save.json"
STATE, OVERLAY, STUBS = "state.zst", "disk.qcow2", ("kernel.stub", "initrd.stub")
_NAME = ".storage"  # a file in the directory: the name of the storage
_WRITING = ".writing"  # at the end of the name of a directory that is incomplete
_OTHER = "the controller's record is about another VM"
_CHUNK = 1 << 20
_TIMEOUT = 3600.0  # seconds until the whole memory of a VM was written or read
_NO_LIMIT = 1 << 50  # bytes per second: QEMU's default of 128 MiB/s is less than a disk writes
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True)
class SavedFile:
    size: int  # bytes
    digest: str  # SHA-256, hexadecimal


@dataclass(frozen=True)
class SavedVm:
    """What `save.json` says. Everything that a restore needs to make the same machine."""

    name: str
    token: str
    kind: CloneKind
    image: str
    image_key: str
    version: str  # of QEMU
    accelerator: str
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


_ADAPTER = TypeAdapter(SavedVm)


def read(directory: Path) -> SavedVm | None:
    """The saved VM in that directory; None if there is none, or an unfinished one."""
    try:
        return _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def directory(host: HostContext) -> Path:
    """Where VMs are saved. Raises `Refused` if this host saves none."""
    if host.config.saves is None:
        raise Refused(f"host {host.config.host} saves no VMs", hint="set save.enabled for it")
    return host.config.saves


def storage(host: HostContext) -> Storage | None:
    """The storage that this host reaches now, and the machines that it makes; None if it reaches none. Hosts that share
    the directory read the same name in it."""
    if host.config.saves is None:
        return None
    try:
        name = (host.config.saves / _NAME).read_text().strip()
    except OSError:
        return None
    return Storage(name, f"{host.version} {host.accelerator.name}") if name else None


def prepare(place: Path) -> None:
    """Make the directory, which only root may read, and give the storage a name. Raises `Refused` if others could
    change it, or if this machine lacks the program that compresses states."""
    if shutil.which("zstd") is None:
        raise Refused("zstd is not installed, and states are compressed by it", hint="install it: apt install zstd")
    path_security.make_directory(place, 0o700)
    with locked_file(place / f"{_NAME}.lock"):
        if not (place / _NAME).exists():
            files.replace(place / _NAME, secrets.token_hex(8))


def shown(host: HostContext) -> dict[str, SavedSeen]:
    """What the storage that this host reaches has of saved VMs, complete or not."""
    where = storage(host)
    if where is None or host.config.saves is None:
        return {}
    found = {}
    for entry in os.scandir(host.config.saves):
        if not entry.is_dir():
            continue
        name = entry.name.removeprefix(".").removesuffix(_WRITING)
        if (saved := read(Path(entry.path))) is not None and name == entry.name:
            found[name] = SavedSeen(name, saved.token, saved.state.size + saved.overlay.size, where.name)
        else:
            found.setdefault(name, SavedSeen(name, "", 0, where.name, complete=False))
    return found


def discard(host: HostContext, saved: str) -> None:
    """Remove the files of that name, complete or not; first what says that they are complete."""
    for place in (directory(host) / saved, directory(host) / f".{saved}{_WRITING}"):
        (place / FILE).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def is_running(host: HostContext, name: str) -> bool:
    with Monitor.connect(host.paths(name).monitor) as monitor:
        return bool(monitor.execute("query-status")["running"])


def find(host: HostContext, spec: Specification, image: Image) -> SavedVm:
    """The saved VM that the specification names. Raises `Gone` if there is none, `Refused` if it is another VM or this
    host makes another machine, and `Broken` if its files were damaged."""
    place = directory(host) / spec.saved
    saved = read(place)
    if saved is None:
        raise Gone(f"there is no saved VM {spec.saved} in {directory(host)}", hint="is the directory mounted?")
    if (saved.name, saved.mac) != (spec.name, spec.mac):
        raise Refused(f"the saved VM {spec.saved} is {saved.name}, not {spec.name}", hint=_OTHER)
    here = (image.key, host.version, host.accelerator.name)
    if here != (saved.image_key, saved.version, saved.accelerator):
        what = f"{host.config.host} makes another machine than the one that {spec.saved} was saved from"
        raise Refused(what, hint="resume it on a host with the same image, QEMU and accelerator")
    for name, expected in ((STATE, saved.state), (OVERLAY, saved.overlay)):
        if measure(place / name) != expected:
            raise Broken(f"{place / name} was damaged since it was saved", hint="its job has to begin anew")
    return saved


def copy_files(host: HostContext, saved: str, paths: Paths) -> None:
    """Copy what the restored VM goes on to write or to open by name into its directory."""
    for source, target in ((OVERLAY, paths.overlay), *((stub, paths.home / stub) for stub in STUBS)):
        shutil.copyfile(directory(host) / saved / source, target)


def machine(host: HostContext, spec: Specification, saved: SavedVm, image: Image, paths: Paths) -> QemuMachine:
    memory = Memory(saved.memory, restored=saved.kind is CloneKind.INSTANT)
    plain = host.vm_machine(replace(spec, size=Size(saved.cpus, saved.memory)), image, None, paths.overlay)
    kernel, initrd = (paths.home / stub for stub in STUBS)
    return replace(plain, memory=memory, kernel=kernel, initrd=initrd, disk_format="qcow2")


def save(host: HostContext, name: str, saved: str) -> list[Stage]:
    """Save a VM, which is stopped and stays so. The same again is success. Raises `Gone` if it does not run,
    `Exhausted` if there is no room."""
    timer = VmStageTimer()
    paths, store = host.paths(name), directory(host)
    with locked_directory(paths.home, create=False):
        known = manifest.read(paths.home)
        if known is None or not known.process.is_alive():
            raise Gone(f"there is no running VM {name}", hint="see `multiverse vms`")
        final = store / saved
        if (found := read(final)) is not None and found.token == known.token:
            return []
        image = host.image(known.image)
        work = store / f".{saved}{_WRITING}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            with Monitor.connect(paths.monitor) as monitor:
                state = write_state(monitor, work / STATE, timer)
            overlay = _copy_overlay(paths.overlay, image, work / OVERLAY)
            timer("disk")
            (work / STUBS[0]).write_bytes(image.kernel.read_bytes()[: templates.STUB])
            (work / STUBS[1]).write_bytes(bytes(4096))
            facts = SavedVm(
                name=name, token=known.token, kind=known.kind, image=known.image, image_key=image.key,
                version=host.version, accelerator=host.accelerator.name, mac=known.mac, address=known.address,
                cpus=known.cpus, memory=known.memory, total_cpus=known.total_cpus or known.cpus,
                total_memory=known.total_memory or known.memory, disk=known.disk, state=state, overlay=overlay,
                written=time.time(),
            )  # fmt: skip
            files.replace(work / FILE, json.dumps(asdict(facts)))
            shutil.rmtree(final, ignore_errors=True)  # of another VM, after a database was restored
            work.rename(final)
        except OSError as error:
            raise Exhausted(f"cannot save VM {name}: {error}", hint=f"is there room in {store}?") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return timer.stages


def _copy_overlay(overlay: Path, image: Image, target: Path) -> SavedFile:
    """What the VM's disk has beyond its image's, also what its template wrote."""
    argv = ["qemu-img", "convert", "-U", "-O", "qcow2", "-c", "-o", "compression_type=zstd", "-F", "raw",
            "-B", str(image.disk), str(overlay), str(target)]  # fmt: skip
    if problem := failure_of(argv):
        raise Exhausted(f"cannot copy the disk {overlay}: {problem}", hint="is there room left?")
    return measure(target)


def write_state(monitor: Monitor, path: Path, timer: VmStageTimer) -> SavedFile:
    """Stop the guest, and write its memory and devices to a compressed file. The guest stays stopped."""
    # An earlier call may have ended before its files were complete. QEMU writes no state twice, unless the guest has
    # run meanwhile: nothing goes on in it but its agent.
    written = monitor.execute("query-status")["status"] == "postmigrate"
    commands: list[Command] = [
        *([("cont", {})] if written else []),
        ("stop", {}),
        ("migrate-set-parameters", {"max-bandwidth": _NO_LIMIT}),
        ("migrate-set-capabilities", {"capabilities": [{"capability": "x-ignore-shared", "state": False}]}),
        ("getfd", {"fdname": "state"}),
        ("migrate", {"uri": "fd:state"}),
    ]
    with path.open("wb") as out:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        zstd = _zstd(["-T0", "-1"], reading, out.fileno(), reading, writing)
        try:
            _transfer(monitor, commands, writing, zstd)
        except Broken:
            if zstd.returncode <= 0:
                raise  # zstd did not fail first
        if zstd.returncode:
            problem = f"cannot write {path}: zstd ended with {zstd.returncode}"
            raise Exhausted(problem, hint="is there room left?")
        timer("write")
        os.fsync(out.fileno())
        timer("sync")
    found = measure(path)
    timer("digest")
    return found


def read_state(monitor: Monitor, directory: Path) -> None:
    """Restore memory and devices into a QEMU that waits for them."""
    commands: list[Command] = [
        ("migrate-set-parameters", {"max-bandwidth": _NO_LIMIT}),
        ("getfd", {"fdname": "state"}),
        ("migrate-incoming", {"uri": "fd:state"}),
    ]
    with (directory / STATE).open("rb") as source:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        _transfer(monitor, commands, reading, _zstd(["-d"], source.fileno(), writing, writing, reading))


def _zstd(options: list[str], source: int, target: int, its: int, ours: int) -> subprocess.Popen[bytes]:
    """zstd between a file and a pipe. Its end of the pipe is closed here: QEMU sees when zstd ends early."""
    try:
        return subprocess.Popen(["zstd", "-q", "-c", *options], stdin=source, stdout=target, env=_ENVIRONMENT)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(its)


def _transfer(monitor: Monitor, commands: list[Command], ours: int, zstd: subprocess.Popen[bytes]) -> None:
    """Let QEMU write its state into a pipe, or read it from one, and wait for both programs. `ours` is closed."""
    try:
        try:
            monitor.execute_all(commands, ours)
        finally:
            os.close(ours)
        monitor.wait_event("MIGRATION", _TIMEOUT, status="completed")
    except BaseException:
        zstd.kill()  # changes nothing if it has ended by itself
        raise
    finally:
        zstd.wait()


def measure(path: Path) -> SavedFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return SavedFile(size, digest.hexdigest())
