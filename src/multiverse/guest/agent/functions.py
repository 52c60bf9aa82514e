"""Virtual functions of the host's devices (SR-IOV) that were plugged into the VM for its job."""

# ruff: noqa: PTH110, PTH123, PTH208

from __future__ import annotations

import os
import time

from multiverse.guest.agent.contract import GuestAgentError
from multiverse.guest.agent.processes import run

PCI_DEVICES = "/sys/bus/pci/devices"
DEVICE_FILES = "/dev"
APPEARANCE_TIMEOUT = 30.0  # seconds until the kernel has found a plugged device
MODPROBE_TIMEOUT = 300.0  # seconds until its drivers are loaded: emulation is slow
DRIVER_TIMEOUT = 30.0  # seconds until a driver has taken it then


def take_function(port: int, uid: int) -> None:
    """Load the drivers of the device that was plugged into the root port whose device number is `port`, and make its
    device files this user's own. Raises GuestAgentError if it does not appear, or no driver takes it."""
    deadline = time.monotonic() + APPEARANCE_TIMEOUT
    while (device := plugged_device(port)) is None:
        if time.monotonic() > deadline:
            raise GuestAgentError(f"the virtual function at port {port:#x} did not appear in the guest")
        time.sleep(0.02)
    ids = ":".join(read_attribute(device, name)[2:] for name in ("vendor", "device"))
    deadline = time.monotonic() + DRIVER_TIMEOUT
    tried: set[str] = set()
    while True:
        # A driver may make devices that have drivers of their own, as those for RDMA.
        aliases = {read_attribute(each, "modalias") for each in parts_of(device)} - {""}
        for alias in sorted(aliases - tried):
            run(["/sbin/modprobe", "-q", "-b", alias], MODPROBE_TIMEOUT)
            deadline = time.monotonic() + DRIVER_TIMEOUT
        if os.path.exists(f"{device}/driver") and not aliases - tried:
            break
        if time.monotonic() > deadline:
            raise GuestAgentError(f"no driver of this image takes the virtual function {ids}: use another")
        tried |= aliases
        time.sleep(0.02)
    for each in parts_of(device):
        name = event_name(each)
        if name and os.path.exists(f"{DEVICE_FILES}/{name}"):
            os.chown(f"{DEVICE_FILES}/{name}", uid, -1)


def plugged_device(port: int) -> str | None:
    """The directory in sysfs of the device below that root port, if the kernel has found one."""
    bridge = f"{PCI_DEVICES}/0000:00:{port:02x}.0"
    try:
        found = [name for name in sorted(os.listdir(bridge)) if os.path.exists(f"{bridge}/{name}/vendor")]
    except OSError:
        return None
    return f"{bridge}/{found[0]}" if found else None


def parts_of(device: str) -> list[str]:
    """The directories of a device and of all devices that its drivers have made of it."""
    return [place for place, _, files in os.walk(device) if "uevent" in files]


def read_attribute(device: str, name: str) -> str:
    """The content of a file of a device, in one line; empty if there is none."""
    try:
        with open(f"{device}/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


def event_name(device: str) -> str:
    """The name of a device's file in /dev; empty if it has none."""
    lines = read_attribute(device, "uevent").split("\n")
    return next((line[8:] for line in lines if line.startswith("DEVNAME=")), "")
