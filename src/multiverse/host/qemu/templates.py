"""Templates: a VM of an image, booted to its fork point and frozen, memory and disk together.

The directory `<templates>/<image>@<cpus>x<memory>/` (for one account alone, followed by `@` and a hash of the account)
holds `memory`, `state` (of the devices), `disk.qcow2` (on top of the image's disk), `overlay.qcow2` (empty, on top of
that; copied for each clone), stubs of kernel and initial ramdisk, and `template.json`. It is built beside its place and
renamed into it. After that nothing writes to its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError
from multiverse.core.model import Size, Stage, TemplateKey
from multiverse.guest.protocol import Report
from multiverse.host import process
from multiverse.host.namespaces import System
from multiverse.host.qemu import disks
from multiverse.host.qemu import machine as machine_module
from multiverse.host.qemu.machine import QemuMachine
from multiverse.host.qemu.session import Launch, Paths, QemuSession
from multiverse.host.qemu.template_copies import TemplateCopies, failure_of
from multiverse.host.registry import ProcessUser
from multiverse.images.catalog import Image
from multiverse.system.locks import is_locked, locked_file, try_locked_file
from multiverse.system.processes import ProcessIdentity

BOOT_TIMEOUT = 240.0  # seconds from power-on to the fork point; a stock boot under emulation is slow
_DEVICE_LIST = Path(machine_module.__file__).read_bytes()
_STUB = 64 << 10
_SPARE = 64  # MiB of disk that a template takes beside its memory, generously
# Files that a clone's QEMU opens by their names, as its own user; the others are opened by this process only.
_OPENED_BY_QEMU = frozenset({"memory", "disk.qcow2", "kernel.stub", "initrd.stub"})


@dataclass(frozen=True)
class FrozenTemplate:
    image: str
    key: str  # says what made it
    path: Path
    size: Size  # that its clones have before anything is plugged
    account: str = ""
    build: str = ""  # tells it from an earlier one of the same key

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    def memory_used(self) -> int:
        """Bytes that its memory takes. Pages that were never written take none."""
        try:
            return self.memory.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @property
    def state(self) -> Path:
        return self.path / "state"


@dataclass(frozen=True)
class Build:
    image: Image
    account: str
    machine: Callable[[Path, Path], QemuMachine]  # gives the VM to boot, from its disk and its memory file
    binary: str
    version: str  # QEMU's version line
    run: Path  # the directory for sockets
    user: ProcessUser | None  # that its QEMU runs as; the user's group may read the template
    system: System  # that its QEMU sees beside the files of image and template
    abandoned: Callable[[], bool] = lambda: False  # whether the template was deleted since the build was asked for
    # Called with the number of CPUs that the guest's kernel has room for, before the template can be used.
    booted: Callable[[int], None] = lambda possible: None
    launch: Callable[[Launch], QemuSession] = QemuSession.launch
    copies: TemplateCopies | None = None  # a copy of another host is taken from there, a new template is offered
    background: Callable[[Callable[[], None]], None] = lambda work: work()  # offers it


def directory_name(which: TemplateKey) -> str:
    """The name of a template's directory. No name of an image holds an `@`; one of an account may hold anything."""
    name = f"{which.image}@{which.size.cpus}x{which.size.memory}"
    return f"{name}@{hashlib.sha256(which.account.encode()).hexdigest()[:16]}" if which.account else name


def key_of(image: Image, machine: QemuMachine, version: str) -> str:
    """The key of the template that this image, machine and QEMU make. Clones need a template of the same key."""
    facts = [version, image.key, machine.cmdline, *machine.shape(), *sorted(machine.features)]
    if machine.mtu:  # its guest has been told of it
        facts.append(f"mtu {machine.mtu}")
    digest = hashlib.sha256("\0".join(facts).encode())
    digest.update(_DEVICE_LIST)
    return digest.hexdigest()[:16]


def load(path: Path) -> FrozenTemplate | None:
    """The template in that directory; None if there is none, or an unfinished one."""
    try:
        raw = json.loads((path / "template.json").read_text())
        size = Size(int(raw["cpus"]), int(raw["memory"]))
        return FrozenTemplate(
            str(raw["image"]), str(raw["key"]), path, size, str(raw["account"]), str(raw.get("build", ""))
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def list_names(templates: Path) -> list[str]:
    """The directory names of all templates, with unfinished ones and those whose build was only begun."""
    found = set()
    for path in templates.iterdir() if templates.is_dir() else ():
        if not path.name.startswith("."):
            found.add(path.name)
        elif path.name.endswith(".lock"):
            found.add(path.name[1 : -len(".lock")])
    return sorted(found)


def list_builds(templates: Path) -> dict[str, tuple[str, Size, str]]:
    """The templates that a living process builds now: image, size and account by directory name."""
    found = {}
    for path in sorted(templates.glob(".*.lock")):
        if is_locked(path):
            try:
                image, cpus, memory, account = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # the template is being deleted, or its build has not begun
            found[path.name[1 : -len(".lock")]] = (image, Size(cpus, memory), account)
    return found


def build(templates: Path, order: Build) -> list[Stage]:
    """Build a template in the directory `templates`, unless a usable one is there. Raises `Broken` if the image does
    not boot, `Exhausted` if there is no room, and `Gone` if the build was abandoned. An unfinished template is
    removed."""
    copies = order.copies if not order.account else None
    parent = order.machine(Path("/"), Path("/"))
    image, size = order.image, Size(parent.cpus, parent.memory.size)
    name = directory_name(TemplateKey("", image.name, size, order.account))
    final = templates / name
    with locked_file(_lock_of(templates, name)):
        key = key_of(image, parent, order.version)
        gone = Gone(f"the template {name} was deleted during its build", hint="it is built again on demand")
        if order.abandoned():
            raise gone
        found = load(final)
        if found is not None and found.key == key:
            return []
        _lock_of(templates, name).write_text(json.dumps([image.name, size.cpus, size.memory, order.account]))
        _remove_unfinished(templates, name)
        _remove(final, templates)  # it cannot be used any more, and may take the room that is needed
        _check_room(templates, size.memory + _SPARE)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=templates))
        try:
            began = time.monotonic()
            taken = copies.take(name, key, work, image.disk) if copies is not None else None
            if taken is None:
                stages, possible = _boot_and_freeze(work, final, order)
            else:
                create_overlay(work / "overlay.qcow2", final / "disk.qcow2", "qcow2", image.disk.stat().st_size)
                if order.user is not None:
                    order.user.allow_traversal(work)
                stages, possible = [Stage("copy", time.monotonic() - began)], taken
            order.booted(possible)
            facts = {"image": image.name, "key": key, "cpus": size.cpus, "memory": size.memory,
                     "account": order.account, "build": secrets.token_hex(8)}  # fmt: skip
            (work / "template.json").write_text(json.dumps(facts))
            _make_read_only(work, order.user)
            if order.abandoned():
                raise gone
            work.rename(final)
            if copies is not None and taken is None:
                order.background(partial(copies.offer, final, key, possible))
        except Broken as error:
            if order.abandoned():
                raise gone from error
            raise
        except OSError as error:
            what = f"cannot build the template of {image.name}: {error}"
            raise Exhausted(what, hint="is there room left?") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return stages


def delete(templates: Path, name: str) -> None:
    """Remove a template and unfinished ones of the same name. A build in progress is ended, not waited for. VMs that
    map the template's memory keep it until they end. Absent is success."""
    if templates.is_dir():
        with locked_file(_lock_of(templates, name), while_waiting=lambda: kill_builds(templates, name)):
            _remove_all(templates, name)


def _remove_all(templates: Path, name: str) -> None:
    _remove_unfinished(templates, name)
    _remove(templates / name, templates)
    _lock_of(templates, name).unlink(missing_ok=True)


def delete_unusable(templates: Path, is_usable: Callable[[FrozenTemplate], bool]) -> list[str]:
    """Remove the templates that no VM can be forked from any more, because their image, QEMU or place has changed, and
    unfinished ones whose builder has died. Those that are being built or deleted stay. Returns the names."""
    deleted = []
    for name in list_names(templates):
        found = load(templates / name)
        if found is not None and is_usable(found):
            continue
        with try_locked_file(_lock_of(templates, name)) as ours:
            if ours:
                _remove_all(templates, name)
                deleted.append(name)
    return deleted


def kill_builds(templates: Path, name: str) -> None:
    """Kill the QEMUs that boot this template. They are found by the path of its memory file."""
    for work in templates.glob(f".{name}.building-*"):
        for found in process.find_by_argument(f"mem-path={work / 'memory'}"):
            process.kill(found)


def create_overlay(path: Path, backing: Path, backing_format: str, size: int) -> None:
    """Create an empty qcow2 overlay of `size` bytes. `backing` is recorded as it is, and need not exist yet."""
    backed = ["-b", str(backing), "-F", backing_format]
    if problem := failure_of(["qemu-img", "create", "-q", "-u", "-f", "qcow2", *backed, str(path), str(size)]):
        raise Broken(f"qemu-img failed: {problem}", hint="is the disk full, is qemu-utils installed?")


def copy_overlay(template: FrozenTemplate, path: Path) -> None:
    """Copy the template's empty overlay to `path`. Raises `Gone` if the template was deleted."""
    try:
        shutil.copyfile(template.path / "overlay.qcow2", path)
    except FileNotFoundError as error:
        raise Gone(f"the template of {template.image} was deleted", hint="it is built again on demand") from error


def _lock_of(templates: Path, name: str) -> Path:
    return templates / f".{name}.lock"


def _check_room(templates: Path, needed: int) -> None:
    free = shutil.disk_usage(templates).free >> 20
    if free < needed:
        what = f"{templates} has {free} MiB free, a template takes {needed}"
        raise Exhausted(what, hint="delete a template that is not needed")


def _boot_and_freeze(work: Path, final: Path, order: Build) -> tuple[list[Stage], int]:
    """Make a template in `work`. Returns the stages, and the number of CPUs that its kernel has room for."""
    image = order.image
    began = time.monotonic()
    virtual_size = image.disk.stat().st_size
    create_overlay(work / "disk.qcow2", image.disk, "raw", virtual_size)
    # The backing file gets its final name when the template is finished.
    create_overlay(work / "overlay.qcow2", final / "disk.qcow2", "qcow2", virtual_size)
    parent = order.machine(work / "disk.qcow2", work / "memory")
    parent = replace(parent, kernel=image.kernel, initrd=image.initrd, memory=replace(parent.memory, shared=True))
    short = hashlib.sha256(final.name.encode()).hexdigest()[:8]  # the path of a socket has no room for the name
    run = order.run / f".t-{short}"
    shutil.rmtree(run, ignore_errors=True)
    if order.user is not None:
        order.user.allow_traversal(work)
        for path in (work / "memory", work / "disk.qcow2"):
            order.user.take_file(path)
    overlaid = time.monotonic()
    try:
        report, booted = _boot(parent, Paths(work, run), work / "state", order)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    # QEMU checks the kernel's header, and reads no more of the file than there is.
    with image.kernel.open("rb") as file:
        (work / "kernel.stub").write_bytes(file.read(_STUB))
    (work / "initrd.stub").write_bytes(bytes(4096))
    frozen = time.monotonic()
    stages = [Stage("overlay", overlaid - began), Stage("boot", booted - overlaid), Stage("freeze", frozen - booted)]
    return stages, report.possible


def _boot(parent: QemuMachine, paths: Paths, state: Path, order: Build) -> tuple[Report, float]:
    """Boot the parent and freeze it. Returns the guest's report, and when its fork point was reached (monotonic)."""

    def started(identity: ProcessIdentity) -> None:
        if order.abandoned():  # whoever deleted the template may have looked for this process before it was started
            process.kill(identity)

    # The kernel picks the number of the tap.
    session = order.launch(
        Launch(
            parent,
            paths,
            order.binary,
            tap="mvt%d",
            bridge=None,
            user=order.user,
            system=order.system,
            readable=(order.image.disk, order.image.kernel, order.image.initrd),
            writable=(paths.home / "memory", parent.disk),
            started=started,
        )
    )
    # QEMU has made its memory's file, which may be larger. What it writes to that does not make it grow.
    limit = disks.image_disk(disks.virtual_size(order.image.disk)).overhead
    try:
        process.limit_files(session.process, order.user.uid if order.user is not None else 0, limit << 20)
        report = session.channel.expect(frozenset({"fork_point"}), BOOT_TIMEOUT)
        booted = time.monotonic()
        session.freeze(state)
    except MultiverseError as error:
        if session.output is not None:
            session.output.save()
        tail = paths.tail()
        raise Broken(f"image {order.image.name} does not reach its fork point: {error.message}{tail}",
                     hint="build the image again, or read its console") from error  # fmt: skip
    finally:
        process.kill(session.process)
        session.close()
    return report, booted


def _make_read_only(work: Path, user: ProcessUser | None) -> None:
    """Let nobody write to any file of a template, and the user's group read the files that QEMUs open by name."""
    for path in work.iterdir():
        opened = path.name in _OPENED_BY_QEMU
        if user is not None:
            os.chown(path, 0, user.readers if opened else 0)
        path.chmod(0o440 if opened else 0o400)


def _remove(path: Path, templates: Path) -> None:
    """Remove a template. It is renamed first, so that no clone finds half of it."""
    if path.exists():
        away = Path(tempfile.mkdtemp(prefix=f".{path.name}.dropped-", dir=templates))
        path.rename(away / "template")
        shutil.rmtree(away)


def _remove_unfinished(templates: Path, name: str) -> None:
    kill_builds(templates, name)  # the QEMU of a builder that was killed is still running
    for left in [*templates.glob(f".{name}.building-*"), *templates.glob(f".{name}.dropped-*")]:
        shutil.rmtree(left, ignore_errors=True)
