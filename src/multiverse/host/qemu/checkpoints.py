"""Checkpoints: the files of a saved VM, made while its job goes on.

Memory is written while the guest runs, and the disk is mirrored. When little is left, the guest's agent freezes the job
and writes network file systems back; the guest stands still, the last of its memory is written, and the mirror ends.
Then guest and job go on. So memory and disk are of one moment, and in that moment the job is frozen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from threading import Thread

from multiverse.core.errors import Broken, Gone, MultiverseError, Refused
from multiverse.core.model.vm import Stage
from multiverse.host import manifest
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import migration, saved_files, saves
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.context import HostContext, VmStageTimer
from multiverse.host.qemu.migration import Limits, Sender, TooSoon
from multiverse.host.qemu.saved_files import SavedFile
from multiverse.system.locks import locked_directory, locked_file

_DISK, _LOCK = "checkpoint.qcow2", "checkpoint.lock"  # beside the VM's disk
_DOWNTIME = 0.2  # seconds that a guest may stand still for its last pages, if it is not emulated
_ENDS = 10.0  # seconds until the programs that compress and encrypt have ended
_TIMEOUT = 3600.0  # seconds until a checkpoint is given up


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a VM, under the name `saved`. `freeze` and `thaw` ask the agent in its guest. It is given up
    once `closed` says so."""

    host: HostContext
    name: str
    saved: str
    key: str
    freeze: Callable[[], None]
    thaw: Callable[[], None]
    closed: Callable[[], bool]
    timer: VmStageTimer = field(default_factory=VmStageTimer)

    @property
    def home(self) -> Path:
        return self.host.paths(self.name).home

    def write(self, token: str) -> list[Stage]:
        """Make it. The same again is success. Raises `Gone` if the VM does not run, `Refused` if it moves or its job is
        frozen, `Exhausted` if there is no room; also what `freeze` and `thaw` raise. After an error the job goes on."""
        with self._locked():
            known = self._begin(token)
            if not saves.is_written(self.host, known, self.saved):
                try:
                    how = saves.Writing(lambda work: self._write_or_go_on(known, work), self.home / _DISK)
                    saves.write_files(self.host, known, self.saved, self.key, how, self.timer)
                finally:
                    (self.home / _DISK).unlink(missing_ok=True)
            self._end()
        return self.timer.stages

    def settle(self) -> None:
        """Let the VM go on after a checkpoint was interrupted by the end of another process."""
        with self._locked():
            self._go_on()
            self._end()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """An earlier call may go on. VMs are destroyed all the while."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_file(self.home / _LOCK))
            except FileNotFoundError as error:
                raise Gone(f"there is no running VM {self.name}", hint="see `multiverse vms`") from error
            yield

    def _begin(self, token: str) -> Manifest:
        """Record that a checkpoint is made: the VM is neither moved nor saved meanwhile."""
        with locked_directory(self.home, create=False):
            before = saves.running(self.name, manifest.read(self.home))
            manifest.refuse_other(before, token)
            manifest.refuse_moving(before)
            if before.phase is not VmPhase.STARTED or (before.frozen and not before.checkpoint):
                raise Refused(f"the job of VM {self.name} is frozen", hint="see `multiverse saved`")
            known = replace(before, checkpoint=self.saved)
            manifest.write(self.home, known)
        if before.checkpoint:  # it was interrupted
            self._go_on()
        return known

    def _end(self) -> None:
        with locked_directory(self.home, create=False) as there:
            known = manifest.read(self.home) if there else None
            if known is not None and known.checkpoint == self.saved:
                manifest.write(self.home, replace(known, checkpoint=""))

    def _go_on(self) -> None:
        """Let the guest run and its job go on, however much of the checkpoint was made."""
        with Monitor.connect(self.host.paths(self.name).monitor) as monitor:
            migration.stay(monitor)
        self.thaw()

    def _write_or_go_on(self, known: Manifest, work: Path) -> SavedFile:
        try:
            with Monitor.connect(self.host.paths(self.name).monitor) as monitor:
                return self._write(known, monitor, work / saves.STATE)
        except (MultiverseError, OSError) as error:
            if not known.process.is_alive():
                raise Gone(f"VM {self.name} has ended", hint="see `multiverse vms`") from error
            self._go_on()
            self._end()
            raise

    def _write(self, known: Manifest, monitor: Monitor, path: Path, *, frozen: bool = False) -> SavedFile:
        """Write memory and disk. `frozen`: the job is frozen first."""
        emulated = self.host.accelerator.name != "kvm"
        sender = Sender(monitor, Limits(0, _DOWNTIME, time.monotonic() + _TIMEOUT, emulated), self._tick)
        self._mirror(known, monitor, sender)
        self.timer("mirror")
        stream = _Stream(path, self.key)
        try:
            if frozen:
                self.freeze()
            sender.send_memory(stream.sink, None if frozen else self.freeze)
            self.timer("write")
            sender.end_disk()
            sender.end_memory()
        except MultiverseError as error:
            migration.stay(monitor)
            stream.check()
            if not isinstance(error, TooSoon):
                raise
            return self._write(known, monitor, path, frozen=True)  # there is little to write
        monitor.execute("cont")
        self.thaw()
        self.timer("pause")
        return stream.end()

    def _mirror(self, known: Manifest, monitor: Monitor, sender: Sender) -> None:
        """Begin to mirror the disk into a file."""
        image, copy = self.host.image(known.image), self.home / _DISK
        whole = not self.host.paths(self.name).overlay.exists()
        sender.flatten(image.disk)
        size = int(monitor.execute("query-block")[0]["inserted"]["image"]["virtual-size"])
        backing = () if whole else ("-u", "-F", "raw", "-b", str(image.disk))
        saves.run("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(copy), str(size))
        sender.copy_disk(copy, whole=whole)

    def _tick(self) -> None:
        if self.closed():
            raise Broken("the agent ends", hint="it is tried again")


class _Stream:
    """Writes what comes through a pipe to a file, compressed and encrypted, in a thread of its own. QEMU gets the end
    `sink`."""

    def __init__(self, path: Path, key: str) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.sink = FileIO(writing, "w")
        self._result: Future[SavedFile] = Future()
        self._thread = Thread(target=self._run, args=(path, key, reading), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, path: Path, key: str, reading: int) -> None:
        try:
            self._result.set_result(saved_files.write(path, key, reading, compress=True))
        except BaseException as error:
            self._result.set_exception(error)

    def end(self) -> SavedFile:
        """What was written, once QEMU has written all. Raises `Exhausted` if that failed."""
        return self._result.result()

    def check(self) -> None:
        """Raise `Exhausted` if writing has failed. QEMU was told to end before."""
        self.sink.close()
        self._thread.join(_ENDS)
        if self._result.done():
            self._result.result()
