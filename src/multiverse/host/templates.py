"""Templates: a VM of an image, booted to its fork point and frozen, memory and disk together.

`<templates>/<image>@<cpus>x<memory>/`, with `@` and a hash of its account where it is for one alone, holds
`memory`, `state` (of the devices), `disk.qcow2` (on the image's disk), `overlay.qcow2` (empty, on that; copied
for each clone), stubs of kernel and ramdisk, and `template.json`. Nothing writes to any of them again. It is made
beside its place and renamed into it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError
from multiverse.core.model import Size, Stage, TemplateKey
from multiverse.guest.protocol import Report
from multiverse.host import machine as machine_module
from multiverse.host import process
from multiverse.host.machine import Machine
from multiverse.host.owners import Owner
from multiverse.host.session import Paths, Session
from multiverse.images.catalog import Image

BOOT_TIMEOUT = 240.0  # seconds from power-on to the fork point; a stock boot under emulation is slow
_STUB = 64 << 10


@dataclass(frozen=True)
class Template:
    """A template that is ready. `size` is what clones have before anything is plugged."""

    image: str
    key: str
    path: Path
    size: Size
    account: str = ""

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    def held(self) -> int:
        """Bytes that its memory takes: less than its size, for nothing is kept of pages that were never written."""
        try:
            return self.memory.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def overlay(self) -> Path:
        return self.path / "overlay.qcow2"

    @property
    def kernel(self) -> Path:
        return self.path / "kernel.stub"

    @property
    def initrd(self) -> Path:
        return self.path / "initrd.stub"

    def clone_of(self, machine: Machine) -> Machine:
        """The machine with our stubs: the restored memory holds the kernel already, which saves 14 MiB a clone."""
        return replace(machine, kernel=self.kernel, initrd=self.initrd)


def name_of(which: TemplateKey) -> str:
    """Its directory's name. No image's name holds an `@`, and an account's may hold anything."""
    name = f"{which.image}@{which.size.cpus}x{which.size.memory}"
    return f"{name}@{hashlib.sha256(which.account.encode()).hexdigest()[:16]}" if which.account else name


def key_of(image: Image, machine: Machine, version: str) -> str:
    """The key of the template that this image, machine and QEMU make; its name and places are not in it."""
    facts = [version, image.key, machine.cmdline, *machine.shape()]
    digest = hashlib.sha256("\0".join(facts).encode())
    digest.update(_device_list())
    return digest.hexdigest()[:16]


@cache
def _device_list() -> bytes:
    return Path(machine_module.__file__).read_bytes()


def load(path: Path) -> Template | None:
    """The template in that directory, if there is a whole one."""
    try:
        raw = json.loads((path / "template.json").read_text())
        size = Size(int(raw["cpus"]), int(raw["memory"]))
        return Template(str(raw["image"]), str(raw["key"]), path, size, str(raw["account"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def names(templates: Path) -> list[str]:
    """Names of all that there are, whole or not, and of those whose making was begun."""
    found = set()
    for path in templates.iterdir() if templates.is_dir() else ():
        if not path.name.startswith("."):
            found.add(path.name)
        elif path.name.endswith(".lock"):
            found.add(path.name[1 : -len(".lock")])
    return sorted(found)


def building(templates: Path) -> dict[str, tuple[str, Size, str]]:
    """The templates that are being made by a process that lives, by name: of which image, size and account."""
    found = {}
    for path in sorted(templates.glob(".*.lock")):
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                image, cpus, memory, account = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # it is being removed, or not begun yet
            found[path.name[1:-5]] = (image, Size(cpus, memory), account)
        except OSError:
            continue
    return found


def prepare(templates: Path, image: Image, account: str, machine: Callable[[Path, Path], Machine], binary: str,
            version: str, run: Path, owner: Owner | None,
            dropped: Callable[[], bool] = lambda: False,
            said: Callable[[Report], None] = lambda _: None) -> list[Stage]:  # fmt: skip
    """Make the template of an image, unless it is there; `templates` is. `machine` gives the VM, from its disk and
    memory file. Its QEMU runs as `owner`, in whose group one has to be to read what is made; nobody may write to it.
    `dropped` says whether it has been dropped since it was asked for: then nothing is made, and `Gone` raised.
    `said` is given what the guest said at its fork point, before the template is there.

    Raises `Broken` if the image does not boot and `Exhausted` for want of room; nothing half is left.
    """
    parent = machine(Path("/"), Path("/"))
    cpus, size = parent.cpus, parent.memory.size
    name = name_of(TemplateKey("", image.name, Size(cpus, size), account))
    final = templates / name
    short = hashlib.sha256(name.encode()).hexdigest()[:8]  # socket paths have no room for the name
    with _locked(templates / f".{name}.lock") as lock:
        key = key_of(image, parent, version)
        gone = Gone(f"the template {name} was dropped while it was made", hint="it is made again on demand")
        if dropped():
            raise gone
        found = load(final)
        if found is not None and found.key == key:
            return []
        lock.write_text(json.dumps([image.name, cpus, size, account]))
        _sweep(templates, name)
        # The one that is there is of no use, and what it takes may be what is missing.
        _remove(final, templates)
        free = shutil.disk_usage(templates).free >> 20
        if free < size + 64:
            raise Exhausted(
                f"{templates} has {free} MiB free, a template takes {size + 64}", hint="drop a template nobody needs"
            )
        work = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=templates))
        try:
            stages, report = _boot_and_freeze(work, final, image, machine, binary, run / f".t-{short}", owner, dropped)
            said(report)
            facts = {"image": image.name, "key": key, "cpus": cpus, "memory": size, "account": account}
            (work / "template.json").write_text(json.dumps(facts))
            _close(work, owner)
            if dropped():
                raise gone
            work.rename(final)
        except Broken as error:
            if dropped():
                raise gone from error
            raise
        except OSError as error:
            raise Exhausted(f"cannot make the template of {image.name}: {error}", hint="is there room left?") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return stages


def drop(templates: Path, name: str) -> None:
    """Remove a template and what is left of unfinished ones; one that is being made is ended, not waited for.
    VMs that map its memory keep it until they end."""
    if not templates.is_dir():
        return
    with _locked(templates / f".{name}.lock", lambda: end_builders(templates, name)) as lock:
        _sweep(templates, name)
        _remove(templates / name, templates)
        lock.unlink(missing_ok=True)


def drop_stale(templates: Path, of_use: Callable[[Template], bool]) -> list[str]:
    """Remove what no VM can be forked from any more, for its image has changed, or QEMU, or where templates lie, and
    what is left of those who died while they made one; what is being made or dropped is left alone. Their names."""
    dropped = []
    for name in names(templates):
        found = load(templates / name)
        if found is not None and of_use(found):
            continue
        with (templates / f".{name}.lock").open("a") as file:
            if _taken(file.fileno()):
                _sweep(templates, name)
                _remove(templates / name, templates)
                Path(file.name).unlink(missing_ok=True)
                dropped.append(name)
    return dropped


def make_overlay(path: Path, backing: Path, backing_format: str) -> None:
    """An empty qcow2 overlay. `backing` is written into it as it is, and need not be there yet."""
    size = f"{_virtual_size(backing, backing_format)}" if backing.exists() else ""
    _qemu_img(
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-b",
        str(backing),
        "-F",
        backing_format,
        str(path),
        *([size] if size else []),
    )


def _virtual_size(path: Path, kind: str) -> int:
    if kind == "raw":
        return path.stat().st_size
    with path.open("rb") as file:
        return int.from_bytes(file.read(32)[24:32], "big")  # docs/interop/qcow2.txt: size, at byte 24


def _qemu_img(*arguments: str) -> None:
    done = subprocess.run(
        ["qemu-img", *arguments], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise Broken(
            f"qemu-img failed: {done.stderr.strip()[-300:]}", hint="is the disk full, is qemu-utils installed?"
        )


def _boot_and_freeze(work: Path, final: Path, image: Image, machine: Callable[[Path, Path], Machine], binary: str,
                     run: Path, owner: Owner | None,
                     dropped: Callable[[], bool]) -> tuple[list[Stage], Report]:  # fmt: skip
    began = time.monotonic()
    make_overlay(work / "disk.qcow2", image.disk, "raw")
    # Its backing file will be there under the final name only.
    virtual = image.disk.stat().st_size
    _qemu_img("create", "-q", "-u", "-f", "qcow2", "-b", str(final / "disk.qcow2"), "-F", "qcow2",
              str(work / "overlay.qcow2"), str(virtual))  # fmt: skip
    parent = machine(work / "disk.qcow2", work / "memory")
    parent = replace(parent, kernel=image.kernel, initrd=image.initrd, memory=replace(parent.memory, shared=True))
    paths = Paths(work, run)
    written = (work / "memory", work / "disk.qcow2")
    shutil.rmtree(run, ignore_errors=True)
    if owner is not None:
        owner.admit(work)
        for path in written:
            owner.give(path)

    def spawned(pid: int, started: int) -> None:
        if dropped():  # whoever dropped it looked for this process too soon
            process.end(pid, started)

    try:
        session = Session.launch(
            parent, paths, binary, tap="mvt%d", bridge=None, paused=False, owner=owner, spawned=spawned
        )  # the kernel picks the number
        try:
            overlaid = time.monotonic()
            report = session.channel.expect(frozenset({"fork_point"}), BOOT_TIMEOUT)
            booted = time.monotonic()
            session.freeze(work / "state")
        except MultiverseError as error:
            tail = paths.tail()
            raise Broken(f"image {image.name} does not come to its fork point: {error.message}{tail}",
                         hint="build the image again, or look at its console") from error  # fmt: skip
        finally:
            process.end(session.pid, session.started)
            session.close()
    finally:
        shutil.rmtree(run, ignore_errors=True)
    # QEMU wants a kernel with a header to its liking, and reads no more of it than there is.
    with image.kernel.open("rb") as file:
        (work / "kernel.stub").write_bytes(file.read(_STUB))
    (work / "initrd.stub").write_bytes(bytes(4096))
    frozen = time.monotonic()
    stages = [Stage("overlay", overlaid - began), Stage("boot", booted - overlaid), Stage("freeze", frozen - booted)]
    return stages, report


def _close(work: Path, owner: Owner | None) -> None:
    """Nobody may write to any of it again; what QEMUs open by its name, those in the owner's group may read."""
    for path in work.iterdir():
        opened = path.name in ("memory", "disk.qcow2", "kernel.stub", "initrd.stub")
        if owner is not None:
            os.chown(path, 0, owner.readers if opened else 0)
        path.chmod(0o440 if opened else 0o400)


def clone_overlay(template: Template, path: Path) -> None:
    """Copy the prepared empty overlay. `Gone` if the template has been dropped."""
    try:
        shutil.copyfile(template.overlay, path)
    except FileNotFoundError as error:
        raise Gone(f"the template of {template.image} is gone", hint="it is made again on demand") from error


def _remove(path: Path, templates: Path) -> None:
    """Out of sight first, so that no clone finds half a template."""
    if path.exists():
        away = Path(tempfile.mkdtemp(prefix=f".{path.name}.dropped-", dir=templates))
        path.rename(away / "template")
        shutil.rmtree(away)


def _sweep(templates: Path, name: str) -> None:
    end_builders(templates, name)  # the QEMU of one that was killed goes on without it
    for rubbish in [*templates.glob(f".{name}.building-*"), *templates.glob(f".{name}.dropped-*")]:
        shutil.rmtree(rubbish, ignore_errors=True)


def end_builders(templates: Path, name: str) -> None:
    """End the QEMUs that make this template: they hold its memory file by its name."""
    for work in templates.glob(f".{name}.building-*"):
        for pid, started in process.with_part(f"mem-path={work / 'memory'}"):
            process.end(pid, started)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path, hurry: Callable[[], None] | None = None) -> Iterator[Path]:
    """Hold a template's lock. `hurry` is done, again and again, to whoever holds it."""
    while True:
        with path.open("a") as file:  # what its holder wrote stays
            while hurry is not None and not _taken(file.fileno()):
                hurry()
                time.sleep(0.02)
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                same = False
            if same:
                yield path
                return
