"""PCI devices that the host plugs for a job: virtual functions (SR-IOV), and memory shared with other VMs."""

# ruff: noqa: PTH108, PTH110, PTH112, PTH120, PTH123, PTH208, PTH211

from __future__ import annotations

import os
import time
from typing import Any

from multiverse.guest.agent.system import (
    DAEMON_TIMEOUT,
    GuestAgentError,
    make_directory,
    read,
    run,
    write,
    write_kernel_file,
)

PCI_DEVICES = "/sys/bus/pci/devices"
NVME_SUBSYSTEMS = "/sys/class/nvme-subsystem"
DEVICE_FILES = "/dev"
TAKING_TIMEOUT = 210.0  # seconds for all of it; the host waits a little longer, and so hears what was missing
DRIVER_TIMEOUT = 30.0  # seconds until a driver that is loaded has taken its function


def take_functions(ports: list[int], uid: int) -> None:
    """Load the drivers of the devices in these root ports, and give their device files to this user. Raises
    GuestAgentError if a device does not appear, or no driver takes it."""
    deadline = time.monotonic() + TAKING_TIMEOUT
    # modprobe(8) returns when a driver has done all that it does at first with the devices that it finds. So all of
    # them have to be there before one is loaded: two functions of one card have the same driver.
    devices = [appeared_device(port, deadline) for port in ports]
    load_drivers(devices, deadline)
    for device in devices:
        for each in parts_of(device):
            for line in read_attribute(each, "uevent").split("\n"):
                file = f"{DEVICE_FILES}/{line[8:]}"
                if line.startswith("DEVNAME=") and os.path.exists(file):
                    os.chown(file, uid, -1)


def appeared_device(port: int, deadline: float) -> str:
    """Wait for the device in that root port. Returns its directory in sysfs."""
    bridge = f"{PCI_DEVICES}/0000:00:{port:02x}.0"
    while True:
        for name in sorted(os.listdir(bridge)) if os.path.isdir(bridge) else ():
            if os.path.exists(f"{bridge}/{name}/vendor"):
                return os.path.realpath(f"{bridge}/{name}")
        if time.monotonic() > deadline:
            raise GuestAgentError(f"the virtual function at port {port:#x} did not appear in the guest")
        time.sleep(0.02)


def load_drivers(devices: list[str], deadline: float) -> None:
    """Load the drivers of these devices, and of devices that the drivers make, as for RDMA, until each has a driver."""
    tried: set[str] = set()
    taken_by = time.monotonic() + DRIVER_TIMEOUT
    while True:
        aliases = {read_attribute(part, "modalias") for device in devices for part in parts_of(device)} - {""}
        for alias in sorted(aliases - tried):
            if os.WIFSIGNALED(run(["/sbin/modprobe", "-q", "-b", alias], max(0.0, deadline - time.monotonic()))):
                raise GuestAgentError(f"the drivers of the virtual functions were not loaded in {TAKING_TIMEOUT:.0f} s")
            taken_by = time.monotonic() + DRIVER_TIMEOUT
        without = [device for device in devices if not os.path.exists(f"{device}/driver")]
        if not without and not aliases - tried:
            return
        if without and time.monotonic() > taken_by:
            ids = ":".join(read_attribute(without[0], name)[2:] for name in ("vendor", "device"))
            raise GuestAgentError(f"no driver of this image takes the virtual function {ids}: use another")
        tried |= aliases
        time.sleep(0.02)


def parts_of(device: str) -> list[str]:
    """The directories of a device and of all devices that its drivers have made."""
    return [*described_below(device), *shared_namespaces(device)]


def described_below(directory: str) -> list[str]:
    return [place for place, _, files in os.walk(directory) if "uevent" in files]


def shared_namespaces(device: str) -> list[str]:
    """The directories of the NVMe namespaces of a device. Where several controllers share a namespace, as functions of
    a card do, the kernel has it below their subsystem."""
    found: list[str] = []
    for name in os.listdir(NVME_SUBSYSTEMS) if os.path.exists(NVME_SUBSYSTEMS) else ():
        subsystem = os.path.realpath(f"{NVME_SUBSYSTEMS}/{name}")
        members = [os.path.realpath(f"{subsystem}/{each}") for each in os.listdir(subsystem)]
        if any(each.startswith(f"{device}/") for each in members):
            found += described_below(subsystem)
    return found


def read_attribute(device: str, name: str) -> str:
    try:
        with open(f"{device}/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


# --- shared memory -----------------------------------------------------------------------------------

PCI = "/sys/bus/pci/devices"
REGIONS = "/dev/ivshmem"  # with a link for each region, by its number
REGION_PROGRAM = "/usr/local/bin/mvshm"
IVSHMEM = ("0x1af4", "0x1110")  # vendor and device


def take_regions(message: dict[str, Any]) -> None:
    """Wait for the regions of memory that the VM shares with other VMs of its job, and let the job's user map them.
    Each is a PCI device (ivshmem-plain in QEMU), whose memory the kernel shows as a file without a driver."""
    make_directory(REGIONS)
    deadline = time.monotonic() + DAEMON_TIMEOUT
    for number, (port, function) in enumerate(message["devices"]):
        device = wait_for_region(port, function, deadline)
        if read(f"{device}/enable")[:1] == "0":
            write_kernel_file(f"{device}/enable", "1")
        memory = f"{device}/resource2"  # uncached where the CPU is not emulated, so all CPUs see one order of accesses
        os.chown(memory, message["uid"], -1)
        link = f"{REGIONS}/{number}"
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(memory, link)
    make_directory(os.path.dirname(REGION_PROGRAM))
    write(REGION_PROGRAM, message["program"], 0o755)


def wait_for_region(port: int, function: int, deadline: float) -> str:
    """The directory in sysfs of this function of the device in that root port."""
    root = f"{PCI}/0000:00:{port:02x}.0"
    while True:
        for name in os.listdir(root):
            device = f"{root}/{name}"
            if not name.endswith(f":00.{function}") or not os.path.exists(f"{device}/resource2"):
                continue
            if (read(f"{device}/vendor").strip(), read(f"{device}/device").strip()) == IVSHMEM:
                return os.path.realpath(device)
        if time.monotonic() > deadline:
            raise GuestAgentError(f"no shared memory appeared at function {function} of port {port:02x}")
        time.sleep(0.005)  # the kernel needs this CPU for the plugging
