"""Plugging virtual functions of the host's devices into a VM that runs."""

from __future__ import annotations

from multiverse.core.errors import Broken, Gone
from multiverse.host import manifest, process
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.machine import PORTS, WINDOW
from multiverse.host.qemu.qmp import Command, Monitor, QmpError

# MiB that QEMU may keep in place beside the guest's memory: firmware, registers, memory that is plugged as a device.
_ROOM = 1024 + len(PORTS) * WINDOW
_TIMEOUT = 30.0  # seconds for QEMU's answers, and a second more for each GiB: all of it is allocated and kept in place
_PER_SECOND = 1024  # MiB


def plug_functions(host: HostContext, name: str) -> list[int]:
    """Plug the functions of a VM into its last root ports; one that an interrupted call has plugged is left. Returns
    the device numbers of these ports.

    The IOMMU translates what the function addresses, so the guest's memory stays where it is from then on, all of it,
    and a clone shares none of it with its template any more. Raises `Gone` if the VM does not run, and `Broken` if it
    has no port left or QEMU refuses a function.
    """
    paths = host.paths(name)
    known = manifest.read(paths.home)
    if known is None or not known.process.is_alive():
        raise Gone(f"VM {name} does not run", hint="see the log of the agent")
    found = host.functions.lend(name, known.uid)
    if len(found) > len(PORTS):
        raise Broken(f"VM {name} has no room for {len(found)} functions", hint=f"a VM has {len(PORTS)} at most")
    memory = known.total_memory or known.memory
    process.limit_locked_memory(known.process, (memory + _ROOM) << 20)
    with Monitor.connect(paths.monitor, _TIMEOUT + memory / _PER_SECOND) as monitor:
        present = {one["name"] for one in monitor.execute("qom-list", path="/machine/peripheral")}
        used = {number: function for number, function in enumerate(found) if f"function{number}" not in present}
        commands: list[Command] = [
            ("device_add", {"driver": "vfio-pci", "id": f"function{number}", "bus": f"rp{len(PORTS) - 1 - number}",
                            "sysfsdev": str(function.directory), "rombar": 0})
            for number, function in used.items()
        ]  # fmt: skip
        try:
            if commands:
                monitor.execute_all(commands)
        except QmpError as error:
            hint = "see `dmesg`, and the log beside the VM's manifest"
            raise Broken(f"cannot plug a virtual function into VM {name}: {error.message}", hint=hint) from error
    return [PORTS[len(PORTS) - 1 - number] for number in range(len(found))]
