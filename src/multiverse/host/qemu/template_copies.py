"""Templates that the hosts of a site share by a directory: what one host has booted and frozen, another one copies.

The state of a frozen guest fits hosts with the same image, QEMU, machine and kind of CPU. All but the last is in the
template's key; a copy is found by both. A copy appears as a whole, and is verified by its digest as it is taken.
Templates of one account alone are not shared. Blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, MultiverseError
from multiverse.host.qemu.machine import Accelerator
from multiverse.images.catalog import digest_of_files

log = structlog.get_logger()

_FILES = ("memory", "state", "disk.qcow2", "kernel.stub", "initrd.stub")
_FACTS = "copy.json"
_CPUINFO = Path("/proc/cpuinfo")
_OF_A_CPU = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_KEPT = 7 * 86400.0  # seconds after which a copy gives way to a new one of the same name
_PLACE = re.compile(r"(?P<name>.+)@[0-9a-f]{16}")


@dataclass(frozen=True)
class TemplateCopies:
    """The templates in `directory`. `cpu` says what a guest's state depends on beside its key (`cpu_of`). `check` is
    called with a directory before something is taken from there; its errors are those of `path_security.check`."""

    directory: Path
    cpu: str
    check: Callable[[Path], None]

    def take(self, name: str, key: str, work: Path, disk: Path) -> int | None:
        """Copy the template of that directory name and key to `work`, on top of the image's disk. Returns how many CPUs
        its guest's kernel has room for (0: unknown), or None if there is no such copy, or none that can be used: then
        the template has to be booted."""
        place = self._place(name, key)
        if not place.is_dir():
            return None
        try:
            self.check(place)
            facts = json.loads((place / _FACTS).read_text())
            _copy(place, work)
            if digest_of_files(work, _FILES) != facts["digest"]:
                raise Broken("its digest is another one")
            _rebase(work / "disk.qcow2", disk)
            return int(facts["possible"])
        except (OSError, ValueError, KeyError, TypeError, MultiverseError) as error:
            log.warning("the copy of a template cannot be used", path=str(place), reason=str(error))
            for file in _FILES:
                (work / file).unlink(missing_ok=True)
            return None

    def offer(self, template: Path, key: str, possible: int) -> None:
        """Let other hosts copy this template. Copies of its name that are older than a week are removed. What goes
        wrong is logged: nothing depends on it."""
        place = self._place(template.name, key)
        if place.exists():
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.check(self.directory)
            work = Path(tempfile.mkdtemp(prefix=f".{template.name}@new-", dir=self.directory))
            try:
                _copy(template, work)
                (work / _FACTS).write_text(json.dumps({"digest": digest_of_files(work, _FILES), "possible": possible}))
                work.chmod(0o755)
                _sync(work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            log.info("template offered to other hosts", template=template.name, path=str(place))
            self._remove_others(template.name, place)
        except (OSError, MultiverseError) as error:
            log.warning("a template is not offered to other hosts", template=template.name, reason=str(error))

    def _place(self, name: str, key: str) -> Path:
        return self.directory / f"{name}@{hashlib.sha256(f'{key} {self.cpu}'.encode()).hexdigest()[:16]}"

    def _remove_others(self, name: str, own: Path) -> None:
        """Remove old copies of that name, and what hosts that crashed have left of theirs. Hosts of another kind may
        still want one: they boot, and offer it again."""
        oldest = own.stat().st_mtime - _KEPT
        for place in self.directory.iterdir():
            match = _PLACE.fullmatch(place.name)
            is_other = match is not None and match["name"] == name
            if (is_other or place.name.startswith(f".{name}@new-")) and place.stat().st_mtime < oldest:
                shutil.rmtree(place, ignore_errors=True)


def cpu_of(accelerator: Accelerator, cpuinfo: Path = _CPUINFO) -> str:
    """What the state of a guest depends on of this machine's CPUs. Emulated ones are the same everywhere."""
    if accelerator.name != "kvm":
        return accelerator.name
    found = {}
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() in _OF_A_CPU:
            found[key.strip()] = value.strip()
    return json.dumps([found, round(accelerator.tsc_khz / 1000)], sort_keys=True)


def _copy(source: Path, target: Path) -> None:
    argv = ["cp", "--sparse=always", "--", *(str(source / file) for file in _FILES), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Broken(f"cannot copy it: {done.stderr.strip()[-300:]}")


def _sync(directory: Path) -> None:
    """Write the files of a directory back, which others are to read after a crash of this machine."""
    for path in (*directory.iterdir(), directory):
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _rebase(disk: Path, image: Path) -> None:
    """Name the image's disk of this host: the copy has the path that it had on another one."""
    argv = ["qemu-img", "rebase", "-u", "-b", str(image), "-F", "raw", str(disk)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Broken(f"qemu-img failed: {done.stderr.strip()[-300:]}")
