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
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.vm import Stage, TemplateKey
from multiverse.guest.protocol import Report
from multiverse.host import path_security, process
from multiverse.host.manifest import Specification
from multiverse.host.qemu import disks
from multiverse.host.qemu import machine as machine_module
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.machine import QemuMachine
from multiverse.host.qemu.session import FrozenTemplate, Launch, Paths
from multiverse.host.qemu.template_copies import failure_of
from multiverse.host.registry import ProcessUser
from multiverse.images.catalog import Image
from multiverse.system.locks import is_locked, locked_file, try_locked_file
from multiverse.system.processes import ProcessIdentity

BOOT_TIMEOUT = 240.0  # seconds from power-on to the fork point; a stock boot under emulation is slow
_DEVICE_LIST = Path(machine_module.__file__).read_bytes()
STUB = 64 << 10  # bytes of a kernel, which QEMU reads the head of only
_SPARE = 64  # MiB of disk that a template takes beside its memory, generously
# Files that a clone's QEMU opens by their names, as its own user; the others are opened by this process only.
_OPENED_BY_QEMU = frozenset({"memory", "disk.qcow2", "kernel.stub", "initrd.stub"})


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


def template_for(host: HostContext, spec: Specification) -> FrozenTemplate:
    """The template that the VM is forked from. Raises `Gone` if it does not exist or cannot be used any more."""
    config, template = host.config, None
    if (which := spec.template) is not None:
        template = load(config.templates / directory_name(which))
    if template is None or not is_usable(host, template):
        raise Gone(f"VM {spec.name} has no template of image {spec.image} on {config.host}", hint="build it first")
    path_security.check(template.path.parent)
    return template


def is_usable(host: HostContext, template: FrozenTemplate) -> bool:
    """Whether a build of its image, size and account would make the same template now."""
    which = TemplateKey(host.config.host, template.image, template.size, template.account)
    try:
        image = host.images.described(template.image)
    except Refused:
        return False
    key = key_of(image, host.template_machine(image, template.size)(Path("/"), Path("/")), host.version)
    return (template.path.name, template.key) == (directory_name(which), key)


def build(host: HostContext, image: Image, which: TemplateKey, abandoned: Callable[[], bool]) -> list[Stage]:
    """Build a template, unless a usable one is there. `abandoned` says whether it was deleted since the build was asked
    for. A copy of another host is taken, if there is one; a new template is offered to other hosts. Raises `Broken` if
    the image does not boot, `Exhausted` if there is no room, and `Gone` if the build was abandoned. An unfinished
    template is removed."""
    templates, name, size = host.config.templates, directory_name(which), which.size
    copies, user = host.copies if not which.account else None, host.uids.template_user
    machine = host.template_machine(image, size)
    final = templates / name
    with locked_file(_lock_of(templates, name)):
        key = key_of(image, machine(Path("/"), Path("/")), host.version)
        gone = Gone(f"the template {name} was deleted during its build", hint="it is built again on demand")
        if abandoned():
            raise gone
        found = load(final)
        if found is not None and found.key == key:
            return []
        _lock_of(templates, name).write_text(json.dumps([image.name, size.cpus, size.memory, which.account]))
        _remove_unfinished(templates, name)
        _remove(final, templates)  # it cannot be used any more, and may take the room that is needed
        _check_room(templates, size.memory + _SPARE)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=templates))
        try:
            began = time.monotonic()
            taken = copies.take(name, key, work, image.disk) if copies is not None else None
            if taken is None:
                stages, possible = _boot_and_freeze(host, image, machine, work, final, abandoned)
            else:
                create_overlay(work / "overlay.qcow2", final / "disk.qcow2", "qcow2", image.disk.stat().st_size)
                if user is not None:
                    user.allow_traversal(work)
                stages, possible = [Stage("copy", time.monotonic() - began)], taken
            _record_abilities(host, image, size, possible)
            facts = {"image": image.name, "key": key, "cpus": size.cpus, "memory": size.memory,
                     "account": which.account, "build": secrets.token_hex(8)}  # fmt: skip
            (work / "template.json").write_text(json.dumps(facts))
            _make_read_only(work, user)
            if abandoned():
                raise gone
            work.rename(final)
            if copies is not None and taken is None:
                offer = partial(copies.offer, final, key, possible)
                threading.Thread(target=offer, name="offer", daemon=True).start()
        except Broken as error:
            if abandoned():
                raise gone from error
            raise
        except OSError as error:
            what = f"cannot build the template of {image.name}: {error}"
            raise Exhausted(what, hint="is there room left?") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return stages


def _record_abilities(host: HostContext, image: Image, size: Size, possible: int) -> None:
    """Record whether the guest's kernel has room for the CPUs that may be plugged, before the template can be used."""
    room = host.largest(image, size).cpus
    if 0 < possible < room:
        reason = f"its kernel has room for {possible} CPUs of {room}"
        host.abilities.record_lacking(image, "plug_cpus", reason, host.images.listed())


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


def _boot_and_freeze(
    host: HostContext,
    image: Image,
    machine: Callable[[Path, Path], QemuMachine],
    work: Path,
    final: Path,
    abandoned: Callable[[], bool],
) -> tuple[list[Stage], int]:
    """Make a template in `work`. Returns the stages, and the number of CPUs that its kernel has room for."""
    began, user = time.monotonic(), host.uids.template_user
    virtual_size = image.disk.stat().st_size
    create_overlay(work / "disk.qcow2", image.disk, "raw", virtual_size)
    # The backing file gets its final name when the template is finished.
    create_overlay(work / "overlay.qcow2", final / "disk.qcow2", "qcow2", virtual_size)
    parent = machine(work / "disk.qcow2", work / "memory")
    parent = replace(parent, kernel=image.kernel, initrd=image.initrd, memory=replace(parent.memory, shared=True))
    short = hashlib.sha256(final.name.encode()).hexdigest()[:8]  # the path of a socket has no room for the name
    run = host.config.run / f".t-{short}"
    shutil.rmtree(run, ignore_errors=True)
    if user is not None:
        user.allow_traversal(work)
        for path in (work / "memory", work / "disk.qcow2"):
            user.take_file(path)
    overlaid = time.monotonic()
    try:
        report, booted = _boot(host, image, parent, Paths(work, run), abandoned)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    # QEMU checks the kernel's header, and reads no more of the file than there is.
    with image.kernel.open("rb") as file:
        (work / "kernel.stub").write_bytes(file.read(STUB))
    (work / "initrd.stub").write_bytes(bytes(4096))
    frozen = time.monotonic()
    stages = [Stage("overlay", overlaid - began), Stage("boot", booted - overlaid), Stage("freeze", frozen - booted)]
    return stages, report.possible


def _boot(
    host: HostContext, image: Image, parent: QemuMachine, paths: Paths, abandoned: Callable[[], bool]
) -> tuple[Report, float]:
    """Boot the parent and freeze it. Returns the guest's report, and when its fork point was reached (monotonic)."""
    user = host.uids.template_user

    def started(identity: ProcessIdentity) -> None:
        if abandoned():  # whoever deleted the template may have looked for this process before it was started
            process.kill(identity)

    session = host.launch(
        Launch(
            parent,
            paths,
            host.config.binary,
            tap="mvt%d",  # the kernel picks the number
            bridge=None,
            user=user,
            system=host.system,
            readable=(image.disk, image.kernel, image.initrd),
            writable=(paths.home / "memory", parent.disk),
            started=started,
        )
    )
    # QEMU has made its memory's file, which may be larger. Its later writes do not make that grow.
    limit = disks.image_disk(disks.virtual_size(image.disk)).overhead
    try:
        process.limit_files(session.process, user.uid if user is not None else 0, limit << 20)
        report = session.channel.expect(frozenset({"fork_point"}), BOOT_TIMEOUT)
        booted = time.monotonic()
        session.freeze(paths.home / "state")
    except MultiverseError as error:
        if session.output is not None:
            session.output.save()
        what = f"image {image.name} does not reach its fork point: {error.message}{paths.tail()}"
        raise Broken(what, hint="build the image again, or read its console") from error
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
