"""Does KVM truly run guests here? A device that opens is no proof (DESIGN 5, "KVM").

The probe boots a disk whose boot sector writes to `isa-debug-exit`, with the CPU model that VMs will
have: QEMU must end with the expected code, about as soon as without KVM. The answer is kept for this kernel and
this QEMU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Refused
from multiverse.host.qemu.ability_cache import remember
from multiverse.host.qemu.machine import Accelerator

log = structlog.get_logger(__name__)

_LIMIT = 2.0  # seconds
_SLOWER = 4  # times emulation's own time: starting QEMU and the firmware are in both, so a true KVM is well within
_TRIES = 2  # a busy machine may spoil one
_VALUE = 0x2A
_EXPECTED = (_VALUE << 1) | 1  # hw/misc/debugexit.c: exit((val << 1) | 1)
# Sixteen-bit code: four million turns of writing to memory, then the value to the port, then halt. The work is
# what tells: there are machines whose KVM gets through the firmware within the limit and is sixty times too slow.
#   xor ax,ax; mov ds,ax; mov ecx,TURNS; turn: inc word [0x7000]; dec ecx; jnz turn;
#   mov dx,0x501; mov al,VALUE; out dx,al; halt: hlt; jmp halt
_TURNS = 4_000_000
_CODE = (b"\x31\xc0\x8e\xd8" b"\x66\xb9" + _TURNS.to_bytes(4, "little") + b"\xff\x06\x00\x70" b"\x66\x49" b"\x75\xf8"
         b"\xba\x01\x05" b"\xb0" + bytes([_VALUE]) + b"\xee" b"\xf4\xeb\xfd")  # fmt: skip
_BOOT_SECTOR = _CODE.ljust(510, b"\0") + b"\x55\xaa"


def available_memory() -> int:
    """MiB that this machine could give to new processes without swapping (proc(5), MemAvailable); 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123  (on the path of each look)
            return next((int(line.split()[1]) >> 10 for line in file if line.startswith("MemAvailable:")), 0)
    except OSError:
        return 0


def qemu_version(binary: str) -> str:
    """The first line of `qemu --version`. `Refused` if there is no such program."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"cannot run {binary}: {error}", hint="`make setup` installs QEMU; see qemu.binary") from error
    found = re.match(r"QEMU emulator version .*", done.stdout)
    if found is None:
        raise Refused(f"{binary} is no QEMU", hint="see qemu.binary in the configuration")
    return found[0]


def is_since(version: str, *release: int) -> bool:
    """Is a QEMU that says this of itself of that release, or a later one? Not if it says none."""
    found = re.search(r"version ([\d.]+)", version)
    return found is not None and tuple(int(part) for part in found[1].split(".") if part) >= release


def accelerator(wanted: str, binary: str, version: str, memory_file: Path) -> Accelerator:
    """The accelerator to use. `auto` asks the probe and says aloud when it falls back.

    `memory_file` is where the answer is kept. `Broken` if `kvm` is demanded and does not run guests.
    """
    if wanted == "tcg":
        return Accelerator("tcg")
    reason = _remembered(f"{os.uname().release} {version} {zlib.crc32(_BOOT_SECTOR):x}", binary, memory_file)
    if not reason:
        return Accelerator("kvm")
    if wanted == "kvm":
        raise Broken(f"KVM does not run guests on this machine: {reason}", hint='set qemu.accel = "tcg", or mend KVM')
    log.warning(
        "KVM does not run guests on this machine: guests run emulated (TCG), several times slower", reason=reason
    )
    return Accelerator("tcg")


def _remembered(key: str, binary: str, memory_file: Path) -> str:
    try:
        kept = json.loads(memory_file.read_text())
        if kept["key"] == key and isinstance(kept["reason"], str):
            return str(kept["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    reason = _probe(binary)
    remember(memory_file, {"key": key, "reason": reason}, "whether KVM runs guests")
    return reason


def _probe(binary: str) -> str:
    """Why KVM cannot be used, or nothing if it can.

    A guest that comes through at last is not enough: where KVM is itself emulated, the same boot takes twenty
    times as long as without it, now within two seconds and now not. So emulation is timed first, in the same
    minute on the same machine, and KVM has to keep up with it.
    """
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    took, reason = _boot(binary, Accelerator("tcg"), 10 * _LIMIT)
    if reason:
        return f"not even emulation runs one: {reason}"
    limit = min(_LIMIT, _SLOWER * took)
    for _ in range(_TRIES):
        _, reason = _boot(binary, Accelerator("kvm"), limit)
        if not reason:
            return ""
    return f"{reason}; emulated, the same took {took:.2f} s"


def _boot(binary: str, accelerator: Accelerator, limit: float) -> tuple[float, str]:
    """How many seconds the boot sector took through the firmware, and what went wrong, if anything."""
    with tempfile.NamedTemporaryFile(suffix=".img") as disk:
        disk.write(_BOOT_SECTOR.ljust(512 * 2880, b"\0"))
        disk.flush()
        argv = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35",
                "-accel", accelerator.name, "-cpu", accelerator.cpu, "-m", "64M", "-no-reboot",
                "-drive", f"file={disk.name},format=raw,if=ide,readonly=off,snapshot=on",
                "-device", "isa-debug-exit,iobase=0x501,iosize=1"]  # fmt: skip
        began = time.monotonic()
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return limit, f"a small guest was not done in {limit:.2g} s"
        except OSError as error:
            return 0.0, str(error)
    took = time.monotonic() - began
    if done.returncode == _EXPECTED:
        return took, ""
    tail = done.stderr.strip().splitlines()[-1:] or [""]
    return (
        took,
        f"a small guest ended with {done.returncode} instead of {_EXPECTED} {tail[0][:200]}".strip(),
    )
