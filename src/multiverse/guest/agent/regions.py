"""Memory that this VM shares with the other VMs of its job on the same host: regions, each a PCI device (ivshmem-plain
in QEMU) that the host plugs while the guest runs.

No driver is needed: the kernel shows the memory of a device as a file, which a process with the right to open it can
map. That right is given to the user of the job.
"""

# ruff: noqa: PTH108, PTH110, PTH120, PTH208, PTH211

from __future__ import annotations

import os
import time
from typing import Any

from multiverse.guest.agent.contract import DAEMON_TIMEOUT, GuestAgentError
from multiverse.guest.agent.files import make_directory, read, write, write_kernel_file

PCI = "/sys/bus/pci/devices"
REGIONS = "/dev/ivshmem"  # with a link for each region, by its number
REGION_PROGRAM = "/usr/local/bin/mvshm"
IVSHMEM = ("0x1af4", "0x1110")  # vendor and device


def take_regions(message: dict[str, Any]) -> None:
    """Wait for the regions, and let the user of the message map them. Raises GuestAgentError if they do not come."""
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
    """The directory of the device that is this function below that root port."""
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
