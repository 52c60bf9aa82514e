"""Which QEMU this is, and whether KVM runs guests on this machine.

That /dev/kvm opens is no proof. On some machines a guest under KVM hangs, or runs sixty times slower than emulated. The
probe boots a disk whose boot sector writes to `isa-debug-exit`, with the CPU model that VMs will have: QEMU must exit
with the expected code, about as soon as without KVM. The answer is cached for this kernel and this QEMU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Refused
from multiverse.host.qemu.ability_cache import save
from multiverse.host.qemu.machine import Accelerator

log = structlog.get_logger(__name__)

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
_BOOT_SECTOR = _CODE.ljust(510, b"\0") + b"\x55\xaa"


def qemu_version(binary: str) -> str:
    """The first line of `qemu --version`. Raises `Refused` if there is no such program."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(
            f"cannot run {binary}: {error}", hint="install QEMU (qemu-system-x86 in Debian), or set qemu.binary"
        ) from error
    found = re.match(r"QEMU emulator version .*", done.stdout)
    if found is None:
        raise Refused(f"{binary} is no QEMU", hint="see qemu.binary in the configuration")
    return found[0]


def is_since(version: str, *release: int) -> bool:
    """Whether a QEMU with this version line is of that release or a later one; False if the line names none."""
    found = re.search(r"version ([\d.]+)", version)
    return found is not None and tuple(int(part) for part in found[1].split(".") if part) >= release


def accelerator(wanted: str, binary: str, version: str, cache: Path) -> Accelerator:
    """The accelerator to use, for `wanted`: `auto`, `kvm` or `tcg`. `auto` runs the probe, and logs a warning when it
    falls back to emulation; `cache` is the file that keeps the answer. Raises `Broken` if `kvm` is wanted and does not
    run guests."""
    if wanted == "tcg":
        return Accelerator("tcg")
    reason = _cached_probe(f"{os.uname().release} {version} {zlib.crc32(_BOOT_SECTOR):x}", binary, cache)
    if not reason:
        return Accelerator("kvm")
    if wanted == "kvm":
        raise Broken(f"KVM does not run guests on this machine: {reason}", hint='set qemu.accel = "tcg", or repair KVM')
    log.warning("KVM does not run guests: they run emulated (TCG), several times slower", reason=reason)
    return Accelerator("tcg")


def _cached_probe(key: str, binary: str, cache: Path) -> str:
    try:
        kept = json.loads(cache.read_text())
        if kept["key"] == key and isinstance(kept["reason"], str):
            return str(kept["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    reason = why_no_kvm(binary)
    save(cache, {"key": key, "reason": reason})
    return reason


def why_no_kvm(binary: str) -> str:
    """The reason why KVM cannot be used, or nothing if it can.

    That a guest boots is not enough: where KVM is itself emulated, the boot takes twenty times as long as without KVM,
    sometimes under two seconds and sometimes over. So emulation is timed first, on the same machine in the same minute,
    and KVM must be about as fast.
    """
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


def _plain_disk(disk: Path) -> list[str]:
    return ["-drive", f"file={disk},format=raw,if=ide,readonly=off,snapshot=on"]


def boot_sector(
    binary: str,
    accelerator: Accelerator,
    limit: float,
    devices: Callable[[Path], Sequence[str]] = _plain_disk,
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
                "-accel", accelerator.name, "-cpu", accelerator.cpu, "-m", "64M", "-no-reboot",
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
