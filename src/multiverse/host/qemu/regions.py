"""Regions of memory that the VMs of a job on this host share, each as a device of QEMU's (ivshmem-plain).

A region is a file without a name, which each QEMU of the job inherits, and maps before the guest runs. So there is no
path by which anybody else could open it, and it ends with the last QEMU. Its memory is allocated by a process in the
control groups of the job: the kernel charges a page of a file to the group of the process that first uses it
(cgroups(7)), and whoever creates the file is in no group of the job.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.host.cgroups import Cgroups
from multiverse.host.job_groups import JobGroups
from multiverse.host.qemu.machine import PORTS, WINDOW, RegionPlace, region_id
from multiverse.host.qemu.qmp import Command, Monitor, QmpError
from multiverse.system.kernel import SharedMemory

_FUNCTIONS = 8  # of a PCI device
_ALLOCATING = 64  # MiB and threads for the programs that allocate, where the job has no limits
_TIMEOUT = 60.0  # seconds
# Waits until it is in the control groups.
_PROGRAM = 'read -r go && for fd; do fallocate --length "$0" "/proc/self/fd/$fd" || exit; done'
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def region_places(count: int, size: int, ports: int = len(PORTS)) -> list[RegionPlace]:
    """Where `count` regions of `size` MiB are plugged: functions of devices in the first ports of the machine, of which
    `ports` may be used. Raises `Refused` if they do not fit."""
    each = min(_FUNCTIONS, WINDOW // size)
    if count > (most := each * ports):
        raise Refused(
            f"--ivshmem={count}: a VM has room for {most} regions of {size} MiB"
            + (f" beside {len(PORTS) - ports} virtual functions (--sriov)" if ports < len(PORTS) else ""),
            hint="submit the job for fewer, or ask an administrator for a smaller job_vms.ivshmem_size",
        )
    return [RegionPlace(number // each, number % each) for number in range(count)]


def allocation_group(name: str) -> str:
    """The control groups of the process that allocates the regions of the VM of that name, and of others."""
    return f"{name}-ivshmem"


def allocate_regions(groups: Cgroups | JobGroups, name: str, ids: Sequence[str], size: int) -> SharedMemory:
    """New regions of `size` MiB, allocated in the control groups `name`, which are removed again. Raises `Exhausted` if
    there is no room for them, and `Broken` if the groups cannot be made."""
    try:
        memory = SharedMemory(ids, size)
    except OSError as error:
        raise Exhausted(f"cannot make a region of shared memory: {error.strerror}") from error
    if ids:
        try:
            groups.set_limits(name, len(ids) * size + _ALLOCATING, _ALLOCATING)
            _allocate(groups, name, memory)
        except BaseException:
            memory.close()
            raise
        finally:
            groups.remove(name)
    return memory


def _allocate(groups: Cgroups | JobGroups, name: str, memory: SharedMemory) -> None:
    argv = ["/bin/sh", "-c", _PROGRAM, f"{memory.size}MiB", *map(str, memory.fds)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_ENVIRONMENT, text=True,
        pass_fds=memory.fds,
    ) as program:  # fmt: skip
        try:
            groups.add_process(name, program.pid, _ALLOCATING)
            _, said = program.communicate("go\n", _TIMEOUT)
        except subprocess.TimeoutExpired as error:
            program.kill()
            raise Exhausted(f"{len(memory.fds)} regions of shared memory are not allocated within {_TIMEOUT:.0f} s",
                            hint="does the machine swap?") from error  # fmt: skip
        except BaseException:
            program.kill()
            raise
    if program.returncode:
        raise Exhausted(
            f"there is no room for {len(memory.fds)} regions of {memory.size} MiB: {said.strip() or 'it was killed'}",
            hint="submit the job with more --mem, or for fewer regions",
        )


def plug_regions(monitor: Monitor, name: str, places: Sequence[RegionPlace]) -> None:
    """Plug the regions that the VM of that name was created with. The guest looks at a port when its function 0
    appears, so that comes last. Those that are plugged already are left. Raises `Broken` if QEMU refuses it."""
    present = {one["name"] for one in monitor.execute("qom-list", path="/machine/peripheral")}
    commands: list[Command] = [
        ("device_add", {"driver": "ivshmem-plain", "id": f"ivshmem{number}", "memdev": region_id(number),
                        "bus": f"rp{place.port}", "addr": f"0.{place.function}", "multifunction": True, "master": "on"})
        for number, place in sorted(enumerate(places), key=lambda one: -one[1].function)
        if f"ivshmem{number}" not in present
    ]  # fmt: skip
    try:
        monitor.execute_all(commands)
    except QmpError as error:
        raise Broken(f"cannot plug the shared memory of VM {name}: {error.message}",
                     hint="see its log beside its manifest") from error  # fmt: skip
