"""The abilities of this machine, its QEMU and its guests. Trials find them, and caches keep the results."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.core.model.basics import Size
from multiverse.host import path_security
from multiverse.host.network import open_tap, open_vhost_net
from multiverse.host.qemu import machine as machine_module
from multiverse.host.qemu.machine import HUGE_PAGE, Accelerator, Feature, Memory, QemuMachine, Wiring
from multiverse.images.catalog import Image
from multiverse.system import files

log = structlog.get_logger(__name__)

# --- abilities of guests -----------------------------------------------------------------------------


def save(file: Path, facts: object) -> None:
    try:
        if not file.parent.exists():
            path_security.make_directory(file.parent, 0o711)  # users of QEMU and of a lab's daemons pass through it
        files.replace(file, json.dumps(facts))
    except (OSError, Refused) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        log.warning("cache not written", path=str(file), reason=reason)


def _load(file: Path) -> dict[str, Any]:
    """The facts in a cache. A file that cannot be read counts as empty."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class AbilityCache:
    """Abilities that guests of images lack on this host, kept across restarts. An image's manifest says what its guests
    can have plugged. Whether their kernel accepts it depends on the accelerator and QEMU too, which `environment`
    names. Linux since November 2025 (6.18, and Debian's 6.12) counts the CPUs that ACPI shows as disabled only under a
    hypervisor that it knows, and QEMU's emulation is none: such a guest boots with "0 hotplug CPUs"."""

    def __init__(self, file: Path, environment: str) -> None:
        self._file = file
        self._environment = environment
        self._lock = threading.Lock()
        self._lacking: dict[str, frozenset[str]] = {}
        with suppress(TypeError):
            self._lacking = {key: frozenset(map(str, what)) for key, what in _load(file).items()}

    def abilities(self, image: Image) -> frozenset[str]:
        """The known abilities of the image's guests."""
        return frozenset(image.abilities) - self._lacking.get(self._key(image), frozenset())

    def record_lacking(self, image: Image, ability: str, reason: str, known: Collection[Image]) -> None:
        """Record that guests of the image lack an ability. Entries of images that are not in `known` are removed."""
        with self._lock:
            key = self._key(image)
            if ability not in image.abilities or ability in self._lacking.get(key, frozenset()):
                return
            log.warning("guests lack an ability", image=image.name, ability=ability, reason=reason)
            keys = {self._key(one) for one in known}
            kept = {one: what for one, what in self._lacking.items() if one in keys}
            self._lacking = kept | {key: kept.get(key, frozenset()) | {ability}}
            save(self._file, {one: sorted(what) for one, what in self._lacking.items()})

    def _key(self, image: Image) -> str:
        return f"{self._environment} {image.name} {image.key} {zlib.crc32(image.cmdline.encode()):x}"


# --- QEMU and KVM ------------------------------------------------------------------------------------

_LIMIT = 2.0  # seconds
_SLOWER = 4  # times what emulation takes: both start QEMU and the firmware, so KVM that works is well within
_TRIES = 2  # one may take too long on a busy machine
_VALUE = 0x2A
_EXPECTED = (_VALUE << 1) | 1  # hw/misc/debugexit.c: exit((val << 1) | 1)
# Sixteen-bit code: four million writes to memory, then the value to the port, then halt. The writes make the
# difference: there are machines whose KVM executes the firmware within the limit, but is sixty times too slow.
#   xor ax,ax; mov ds,ax; mov ecx,TURNS; turn: inc word [0x7000]; dec ecx; jnz turn;
#   mov dx,0x501; mov al,VALUE; out dx,al; halt: hlt; jmp halt
_TURNS = 4_000_000
_CODE = (b"\x31\xc0\x8e\xd8" b"\x66\xb9" + _TURNS.to_bytes(4, "little") + b"\xff\x06\x00\x70" b"\x66\x49" b"\x75\xf8"
         b"\xba\x01\x05" b"\xb0" + bytes([_VALUE]) + b"\xee" b"\xf4\xeb\xfd")  # fmt: skip
_PLAIN_DISK = "file={},format=raw,if=ide,readonly=off,snapshot=on"
_BOOT_SECTOR = _CODE.ljust(510, b"\0") + b"\x55\xaa"


def qemu_version(binary: str) -> str:
    """The first line of `qemu --version`. Raises `Refused` if there is no such program."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"cannot run {binary}: {error}"
        raise Refused(what, hint="install QEMU (qemu-system-x86 in Debian), or set qemu.binary") from error
    found = re.match(r"QEMU emulator version .*", done.stdout)
    if found is None:
        raise Refused(f"{binary} is no QEMU", hint="see qemu.binary in the configuration")
    return found[0]


def board(binary: str) -> str:
    """QEMU's newest version of our machine type, which it uses. Raises `Broken` if it names none."""
    try:
        done = subprocess.run([binary, "-machine", "help"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Broken(f"cannot run {binary}: {error}", hint="see qemu.binary in the configuration") from error
    found = re.search(r"^q35 .*\(alias of (\S+)\)", done.stdout, re.MULTILINE)
    if found is None:
        raise Broken(f"{binary} names no machine type q35", hint="install another QEMU, or set move.enabled = false")
    return found[1]


def is_since(version: str, *release: int) -> bool:
    """Whether a QEMU with this version line is of that release or a later one; False if the line names none."""
    found = re.search(r"version ([\d.]+)", version)
    return found is not None and tuple(int(part) for part in found[1].split(".") if part) >= release


def accelerator(wanted: str, binary: str, version: str, cache: Path) -> Accelerator:
    """The accelerator for `wanted`: `auto`, `kvm` or `tcg`. `auto` tries KVM, and logs a warning before it uses
    emulation; `cache` keeps the answer for this kernel and QEMU. Raises `Broken` if `kvm` is wanted and runs no
    guests."""
    if wanted == "tcg":
        return Accelerator("tcg")
    key, kept = f"{os.uname().release} {version} {zlib.crc32(_BOOT_SECTOR):x}", _load(cache)
    reason = kept.get("reason")
    if kept.get("key") != key or not isinstance(reason, str):
        reason = why_no_kvm(binary)
        save(cache, {"key": key, "reason": reason})
    if not reason:
        return Accelerator("kvm")
    if wanted == "kvm":
        raise Broken(f"KVM does not run guests on this machine: {reason}", hint='set qemu.accel = "tcg", or repair KVM')
    log.warning("KVM does not run guests: they run emulated (TCG), several times slower", reason=reason)
    return Accelerator("tcg")


def why_no_kvm(binary: str) -> str:
    """The reason why KVM cannot be used, or nothing if it can. That /dev/kvm opens is no proof, and neither is a guest
    that boots: where KVM is itself emulated, a guest hangs or is twenty to sixty times slower. So a disk is booted
    whose boot sector writes to `isa-debug-exit`, with the CPU model of VMs. QEMU must exit with the expected code,
    about as soon as with emulation in the same minute."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    took, reason = boot_sector(binary, Accelerator("tcg"), 10 * _LIMIT)
    if reason:
        return f"emulation does not run one either: {reason}"
    limit = min(_LIMIT, _SLOWER * took)
    for _ in range(_TRIES):
        _, reason = boot_sector(binary, Accelerator("kvm"), limit)
        if not reason:
            return ""
    return f"{reason}; emulated, the same took {took:.2f} s"


def boot_sector(
    binary: str,
    accelerator: Accelerator,
    limit: float,
    devices: Callable[[Path], Sequence[str]] = lambda disk: ("-drive", _PLAIN_DISK.format(disk)),
    place: Path | None = None,
    fds: Sequence[int] = (),
) -> tuple[float, str]:
    """Boot the sector, on a disk in the directory `place`, with the devices that QEMU's arguments describe. QEMU
    inherits `fds`. Returns the seconds that it took, up to `limit`, and the problem, if there was one. Raises OSError
    if the disk cannot be written."""
    with tempfile.NamedTemporaryFile(prefix=".trial-", suffix=".img", dir=place) as disk:
        disk.write(_BOOT_SECTOR.ljust(512 * 2880, b"\0"))
        disk.flush()
        argv = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35",
                "-accel", accelerator.name, "-cpu", accelerator.cpu_option, "-m", "64M", "-no-reboot",
                *devices(Path(disk.name)), "-device", "isa-debug-exit,iobase=0x501,iosize=1"]  # fmt: skip
        began = time.monotonic()
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return limit, f"a small guest had not finished after {limit:.2g} s"
        except OSError as error:
            return 0.0, str(error)
    took = time.monotonic() - began
    if done.returncode == _EXPECTED:
        return took, ""
    tail = done.stderr.strip().splitlines()[-1:] or [""]
    return took, f"a small guest ended with {done.returncode} instead of {_EXPECTED} {tail[0][:200]}".strip()


# --- features of VMs ---------------------------------------------------------------------------------

Trials = Mapping[Feature, Callable[[], str]]
"""By feature, what tries it: it returns why the feature cannot be used, or nothing if it can."""

_BOOT_LIMIT = 10.0  # seconds for the boot of one sector: emulated, on a busy machine
_VHOST_SET_OWNER = 0xAF01  # <linux/vhost.h>
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_EMULATED = {
    Feature.VHOST_NET: "guests are emulated: QEMU would not notice that the kernel overwrites code it has translated",
    Feature.IOTHREAD: 'guests are emulated, and start later with it; to use it all the same, set qemu.iothread = "on"',
}
_ON_REQUEST = {
    Feature.NATIVE_AIO: "full clones start later with it, because it bypasses the page cache, which has their disks as"
    ' copied; to use it all the same, set qemu.native_aio = "on"'
}


class HostFeatures:
    """The features of this host's VMs: those that work, as trials show. `modes` are `off`, `on` or `auto`, the default;
    with `auto` a feature is used unless it makes VMs slower.

    A trial does what VMs will do: QEMU boots a sector from a disk, or with an interface; /dev/vhost-net serves this
    process; a huge page is allocated. Trials run when the features are first asked for, because they take up to some
    seconds. The first VM shows the rest: if its QEMU does not start, this process starts VMs without these features
    from then on.
    """

    def __init__(self, modes: Mapping[Feature, str], accelerator: Accelerator, trials: Trials) -> None:
        self._modes, self._accelerator, self._trials = modes, accelerator, trials
        self._lock = threading.Lock()
        self._lacking: dict[Feature, str] | None = None
        self._proven: frozenset[Feature] = frozenset()  # with which a VM has started in this life of the process

    @property
    def lacking(self) -> Mapping[Feature, str]:
        """The features that VMs do not have, each with the reason."""
        with self._lock:
            if self._lacking is None:
                reasons = {feature: self._reason(feature) for feature in Feature}
                self._lacking = {feature: reason for feature, reason in reasons.items() if reason}
                used = sorted(str(one) for one in Feature if one not in self._lacking)
                log.info("host features", used=used, lacking={str(one): why for one, why in self._lacking.items()})
            return self._lacking

    @property
    def in_use(self) -> frozenset[Feature]:
        return frozenset(Feature) - self.lacking.keys()

    def started(self, used: frozenset[Feature]) -> None:
        """A QEMU with these features has started: if another one does not, they are not the reason."""
        self._proven |= used

    def failed(self, used: frozenset[Feature], reason: str) -> None:
        """A QEMU with these features did not start. Those with which none has started are used no more. The VM is not
        started again here: the caller asks again, for one without them."""
        suspects = used - self._proven
        if not suspects:
            return
        why = f"the first VM with {' and '.join(sorted(suspects))} did not start: {reason}"
        with self._lock:
            self._lacking = {**dict.fromkeys(suspects, why), **(self._lacking or {})}
        log.warning("features disabled", features=sorted(map(str, suspects)), reason=reason)

    def _reason(self, feature: Feature) -> str:
        mode = self._modes.get(feature, "auto")
        if mode == "off":
            return "turned off in the settings"
        unwanted = _ON_REQUEST if self._accelerator.name == "kvm" else _ON_REQUEST | _EMULATED
        if mode == "auto" and feature in unwanted:
            return unwanted[feature]
        return self._trials[feature]()


def trials(binary: str, version: str, accelerator: Accelerator, storage: Path, cache: Path) -> Trials:
    """The trials of this host, whose VMs have their disks in `storage`. The file `cache` keeps successful boots with
    this kernel, this QEMU and these arguments; a failed one is tried again by the next process."""
    arguments = zlib.crc32(Path(machine_module.__file__).read_bytes())
    key = f"{os.uname().release} {version} {accelerator.name} {storage} {arguments:x}"

    def boots(feature: Feature) -> Callable[[], str]:
        def boot() -> str:
            kept = _load(cache)
            known = kept.get("succeeded", []) if kept.get("key") == key else []
            if feature in known:
                return ""
            if not (reason := _boot(feature, binary, accelerator, storage)):
                save(cache, {"key": key, "succeeded": sorted({*known, feature})})
            return reason

        return boot

    return {
        Feature.VHOST_NET: lambda: vhost_net_trial() or boots(Feature.VHOST_NET)(),
        Feature.HUGE_PAGES: huge_page_trial,
        Feature.NATIVE_AIO: boots(Feature.NATIVE_AIO),
        Feature.IOTHREAD: boots(Feature.IOTHREAD),
    }


def vhost_net_trial() -> str:
    """Why the kernel cannot move frames for this process: it has to start a thread for that."""
    try:
        fd = open_vhost_net()
    except Broken as error:
        return f"{error.message}; {error.hint}"
    try:
        fcntl.ioctl(fd, _VHOST_SET_OWNER)
    except OSError as error:
        return f"/dev/vhost-net does not serve this process: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def huge_page_trial(pool: Path = _POOL) -> str:
    """Why memory cannot consist of huge pages. Where all are taken now, VMs get ordinary ones meanwhile."""
    try:
        fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB | os.MFD_CLOEXEC)
    except OSError as error:
        return f"the kernel has no huge pages of 2 MiB: {error.strerror}"
    try:
        os.posix_fallocate(fd, 0, HUGE_PAGE)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC) and any(_read(pool / name) for name in _SIZES):
            return ""
        return f"no huge page can be allocated: {error.strerror}; reserve some: sysctl vm.nr_hugepages=N"
    finally:
        os.close(fd)
    return ""


_SIZES = ("nr_hugepages", "nr_overcommit_hugepages")


def _read(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _boot(feature: Feature, binary: str, accelerator: Accelerator, storage: Path) -> str:
    """Boot a sector with the devices of a machine that has the feature. Returns the problem, or nothing."""
    nowhere = Path("/")
    machine = QemuMachine("trial", accelerator, 1, Memory(64), Size(1, 64), nowhere, "raw", "02:00:00:00:00:02",
                          nowhere, nowhere, "", features=frozenset({feature}))  # fmt: skip
    place = next(path for path in (storage, *storage.parents) if path.is_dir())
    fds: list[int] = []
    try:
        network: list[str] = []
        if feature is Feature.VHOST_NET:
            fds.append(open_tap("mvt%d", None))
            fds.append(open_vhost_net())
            network = machine.network_argv(Wiring(-1, -1, fds[0], nowhere, fds[1]))

        def devices(disk: Path) -> list[str]:
            return [*replace(machine, disk=disk).disk_argv(), *network]

        _, reason = boot_sector(binary, accelerator, _BOOT_LIMIT, devices, place, fds)
    except (OSError, MultiverseError) as error:
        return str(error)
    finally:
        for fd in fds:
            os.close(fd)
    return reason
