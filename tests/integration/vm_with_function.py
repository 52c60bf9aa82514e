"""A QEMU that uses a virtual function, inside of the guest with an IOMMU: `python -m tests.integration.vm_with_function
CONTROLLER KERNEL RAMDISK`.

The host library claims, binds and returns the function. QEMU maps the guest's memory privately, as for a clone, and
gets the function while the guest runs. It prints a line of JSON with what it and its guest have seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from multiverse.core.errors import Exhausted
from multiverse.host import process
from multiverse.host.qemu.qmp import Monitor
from multiverse.host.virtual_functions import VirtualFunctions
from multiverse.system.processes import ProcessIdentity
from tests.integration import nvme_functions
from tests.integration.functions_in_guest import state

MEMORY = 256
LIMIT = 300
RUNNING = "the guest runs"
"""What its ramdisk prints when a device can be plugged."""

CONSOLE, MONITOR = Path("/run/console"), Path("/run/qmp")
USER = 200123


def start(kernel: str, ramdisk: str) -> subprocess.Popen[bytes]:
    """QEMU, as a user of its own without a capability."""
    argv = ["qemu-system-x86_64", "-machine", "q35,memory-backend=ram", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-m", f"{MEMORY}M", "-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{CONSOLE}",
            "-object", f"memory-backend-file,id=ram,size={MEMORY}M,mem-path=/dev/shm/ram,share=off",
            "-qmp", f"unix:{MONITOR},server=on,wait=off", "-kernel", kernel, "-initrd", ramdisk,
            "-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable lpj=4000000 norandmaps",
            "-device", "pcie-root-port,id=rp0,chassis=1,addr=8,pref64-reserve=256M"]  # fmt: skip
    for directory in (CONSOLE.parent, Path("/dev/shm")):
        directory.chmod(0o1777)
    return subprocess.Popen(argv, user=USER, group=USER, extra_groups=[])


def main(controller: str, kernel: str, ramdisk: str) -> None:
    nvme_functions.make(controller, 1)
    functions = VirtualFunctions((controller,), Path("/run/functions"))
    found: dict[str, Any] = {"before": state(functions)}
    (function,) = functions.claim("mvjob-1", 1)
    qemu = start(kernel, ramdisk)
    identity = ProcessIdentity.of(qemu.pid)
    nvme_functions.until(lambda: CONSOLE.exists() and RUNNING in CONSOLE.read_text(errors="replace"), LIMIT)
    functions.lend("mvjob-1", USER)
    process.limit_locked_memory(identity, MEMORY + 1024 << 20)
    with Monitor.connect(MONITOR, LIMIT) as monitor:
        monitor.execute("device_add", driver="vfio-pci", id="function0", bus="rp0", rombar=0,
                        sysfsdev=str(function.directory))  # fmt: skip
    status = dict(line.split(":", 1) for line in Path(f"/proc/{qemu.pid}/status").read_text().splitlines())
    found["own"] = int(status["RssAnon"].split()[0]) >> 10
    try:
        functions.claim("mvjob-2", 1)
    except Exhausted as error:
        found["refused"] = str(error)
    found["exit"] = qemu.wait(LIMIT)
    found["guest"] = CONSOLE.read_text(errors="replace").replace("\r", "").partition(RUNNING)[2].splitlines()
    functions.release("mvjob-1")
    print(json.dumps(found | {"after": state(functions)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
