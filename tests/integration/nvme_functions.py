"""Makes virtual functions of an NVMe controller and puts them online: `nvme virt-mgmt` without nvme-cli."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

PCI = Path("/sys/bus/pci")
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD, <linux/nvme_ioctl.h>
_RESET = 0x4E44  # NVME_IOCTL_RESET
_VIRTUALIZATION = 0x1C  # Virtualization Management
_PRIMARY, _ASSIGN, _ONLINE = 1, 8, 9  # its actions
_QUEUES, _INTERRUPTS = 0, 1  # and its resources


def until(what: Callable[[], object], limit: float = 60) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.02)


def make(controller: str, count: int) -> list[str]:
    """Make so many functions of a controller, none of them with a driver and all of them online. Returns their
    addresses."""
    device = PCI / "devices" / controller
    (device / "sriov_drivers_autoprobe").write_text("0")
    until(lambda: Path("/dev/nvme0").exists() and _state() == "live")
    (device / "sriov_numvfs").write_text(str(count))
    (device / "sriov_drivers_autoprobe").write_text("1")  # from now on a driver takes one when it is asked to
    fd = os.open("/dev/nvme0", os.O_RDWR)
    try:
        for resource in (_INTERRUPTS, _QUEUES):
            _manage(fd, 0, resource, _PRIMARY, 0)
        fcntl.ioctl(fd, _RESET)
        until(lambda: _state() == "live")
        for number in range(1, count + 1):
            _manage(fd, number, _INTERRUPTS, _ASSIGN, 1)
            _manage(fd, number, _QUEUES, _ASSIGN, 2)
            _manage(fd, number, 0, _ONLINE, 0)
    finally:
        os.close(fd)
    return [(device / f"virtfn{number}").resolve().name for number in range(count)]


def _state() -> str:
    return Path("/sys/class/nvme/nvme0/state").read_text().strip()


def _manage(fd: int, controller: int, resource: int, action: int, number: int) -> None:
    words = (controller << 16 | resource << 8 | action, number, 0, 0, 0, 0)
    command = bytearray(struct.pack("=BBHIIIQQII6III", _VIRTUALIZATION, 0, 0, 0, 0, 0, 0, 0, 0, 0, *words, 0, 0))
    status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    assert status == 0, f"the controller refused {words}: {status:#x}"
