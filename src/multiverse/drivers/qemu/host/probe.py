"""Does KVM truly run guests here? A device that opens is no proof (DESIGN 5, "KVM").

The probe boots a disk whose boot sector writes to `isa-debug-exit`, with the CPU model that VMs will
have: QEMU must end with the expected code in time. The answer is kept for this kernel and this QEMU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Refused
from multiverse.drivers.qemu.host.machine import Accelerator

log = structlog.get_logger(__name__)

_LIMIT = 2.0  # seconds
_VALUE = 0x2A
_EXPECTED = (_VALUE << 1) | 1  # hw/misc/debugexit.c: exit((val << 1) | 1)
# mov dx,0x501; mov al,value; out dx,al; hlt; jmp to the hlt
_BOOT_SECTOR = bytes([0xBA, 0x01, 0x05, 0xB0, _VALUE, 0xEE, 0xF4, 0xEB, 0xFD]).ljust(510, b"\0") + b"\x55\xaa"


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


def accelerator(wanted: str, binary: str, version: str, memory_file: Path) -> Accelerator:
    """The accelerator to use. `auto` asks the probe and says aloud when it falls back.

    `memory_file` is where the answer is kept. `Broken` if `kvm` is demanded and does not run guests.
    """
    if wanted == "tcg":
        return Accelerator("tcg")
    reason = _remembered(f"{os.uname().release} {version}", binary, memory_file)
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
    try:
        memory_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = memory_file.with_suffix(".new")
        fresh.write_text(json.dumps({"key": key, "reason": reason}))
        fresh.rename(memory_file)
    except OSError as error:
        log.warning("cannot remember whether KVM runs guests", path=str(memory_file), reason=error.strerror)
    return reason


def _probe(binary: str) -> str:
    """Why KVM cannot be used, or nothing if it can."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    with tempfile.NamedTemporaryFile(suffix=".img") as disk:
        disk.write(_BOOT_SECTOR.ljust(512 * 2880, b"\0"))
        disk.flush()
        argv = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "kvm",
                "-cpu", Accelerator("kvm").cpu, "-m", "64M", "-no-reboot",
                "-drive", f"file={disk.name},format=raw,if=ide,readonly=off,snapshot=on",
                "-device", "isa-debug-exit,iobase=0x501,iosize=1"]  # fmt: skip
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=_LIMIT, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return f"a guest of one instruction hung for {_LIMIT:.0f} s"
        except OSError as error:
            return str(error)
    if done.returncode == _EXPECTED:
        return ""
    tail = done.stderr.strip().splitlines()[-1:] or [""]
    return f"a guest of one instruction ended with {done.returncode} instead of {_EXPECTED} {tail[0][:200]}".strip()
