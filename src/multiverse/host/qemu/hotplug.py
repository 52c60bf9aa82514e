"""Plugging into a VM: CPUs and memory before it runs, virtual functions and shared memory while it runs."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.host import manifest, process
from multiverse.host.cgroups import Cgroups, JobGroups
from multiverse.host.manifest import Manifest
from multiverse.host.qemu.channels import Command, Monitor, QmpError
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.machine import DIMMS, HUGE_PAGE, PORTS, WINDOW, RegionPlace, region_id
from multiverse.system.kernel import SharedMemory

log = structlog.get_logger(__name__)

# --- CPUs and memory ---------------------------------------------------------------------------------

_BLOCK = 128  # MiB: x86 Linux accepts plugged memory in blocks of this size
_RATIO = 8  # see `dimm_sizes`


def memory_to_plug(booted: int, wanted: int) -> int:
    """MiB that give a guest with `booted` MiB at least `wanted`, in whole blocks."""
    return max(0, -(-(wanted - booted) // _BLOCK) * _BLOCK)


def dimm_sizes(memory: int, plugged: int) -> list[int]:
    """Sizes in MiB of the DIMMs by which a guest of `memory` MiB gets `plugged` MiB more. Linux describes each page of
    4 KiB in 64 bytes before it can use any of a DIMM. So a DIMM is at most eight times the earlier memory: the
    descriptions take an eighth."""
    sizes: list[int] = []
    while (left := plugged - sum(sizes)) > 0:
        sizes.append(min(left, _RATIO * (memory + sum(sizes)) // _BLOCK * _BLOCK or left))
    return sizes


def plug(
    monitor: Monitor,
    known: Manifest,
    cpus: int,
    plugged: int,
    *,
    huge: bool = False,
    backends: Collection[str] | None = None,
) -> int:
    """Plug the VM of that manifest up to `cpus` CPUs, and `plugged` MiB of memory. Returns the MiB of it in huge pages.
    With `huge`, huge pages are used as far as enough of them are free. The memory is taken from the VM's NUMA node, if
    it has one, while there is some. Devices and objects are found by their ids, so those of an earlier, interrupted
    call are left. `backends` are the names that the backends of memory have in another QEMU, whose state is to be read:
    it is found by them, whether or not there are huge pages here. Raises `Exhausted` if the machine has no room."""
    listed: list[Command] = [("qom-list", {"path": path}) for path in ("/machine/peripheral", "/objects")]
    present, objects = ({one["name"] for one in found} for found in monitor.execute_all(listed))
    sizes = dict(enumerate(dimm_sizes(known.memory, plugged)))
    missing = {n: size for n, size in sizes.items() if not {f"mem{n}", f"huge{n}"} & objects}
    if backends is not None:
        missing = {n: size for n, size in missing.items() if f"huge{n}" in backends}
    objects |= _allocate_huge(monitor, known, missing) if huge else set()
    in_huge = sum(size for number, size in sizes.items() if f"huge{number}" in objects)
    commands: list[Command] = []
    if backends is not None:
        ordinary = {n: size for n, size in missing.items() if f"huge{n}" not in objects}
        commands = [_ordinary(known, f"huge{n}", size) for n, size in ordinary.items()]
        objects |= {f"huge{n}" for n in ordinary}
    commands += _memory_commands(known, sizes, present, objects)
    if cpus > known.cpus:
        commands += _cpu_commands(monitor, known, cpus, present)
    try:
        if commands:
            monitor.execute_all(commands)
    except QmpError as error:
        if known.numa not in (None, -1):
            # A QEMU without libnuma, or a node without memory.
            log.warning("memory plugged on any NUMA node", vm=known.name, reason=error.message)
            return plug(monitor, replace(known, numa=-1), cpus, plugged, huge=huge, backends=backends)
        what = f"cannot plug VM {known.name} up to {cpus} CPUs and {plugged} MiB more: {error.message}"
        raise Exhausted(what, hint="does its template allow as much? see host.cores, host.memory") from error
    return in_huge


def _near(known: Manifest) -> dict[str, object]:
    """The properties of a backend whose memory is taken from the VM's node, as long as there is some."""
    return {} if known.numa in (None, -1) else {"host-nodes": [known.numa], "policy": "preferred"}


def _allocate_huge(monitor: Monitor, known: Manifest, sizes: Mapping[int, int]) -> set[str]:
    """Make backends of huge pages. Returns the names of those for which enough pages are free: QEMU reserves a
    backend's pages when it makes it, so a guest never finds too few."""
    made: set[str] = set()
    for number, size in sizes.items():
        options = {"size": size << 20, "hugetlb": True, "hugetlbsize": HUGE_PAGE, **_near(known)}
        try:
            monitor.execute("object-add", **{"qom-type": "memory-backend-memfd", "id": f"huge{number}", **options})
        except QmpError as error:
            left = sum(size for other, size in sizes.items() if other >= number)
            log.warning("memory plugged without huge pages", vm=known.name, mib=left, reason=error.message)
            break
        made.add(f"huge{number}")
    return made


def _ordinary(known: Manifest, backend: str, size: int) -> Command:
    return "object-add", {"qom-type": "memory-backend-ram", "id": backend, "size": size << 20, **_near(known)}


def backends_of(monitor: Monitor) -> list[str]:
    """The names of the backends of plugged memory."""
    return [one["name"] for one in monitor.execute("qom-list", path="/objects")]


def _memory_commands(known: Manifest, sizes: Mapping[int, int], present: set[str], objects: set[str]) -> list[Command]:
    """The commands that plug DIMMs that are not `present`, on backends of huge pages if they have them."""
    commands: list[Command] = []
    for number, size in sizes.items():
        if f"dimm{number}" in present:
            continue
        if number >= DIMMS:
            raise Exhausted(f"VM {known.name} has no memory slot left", hint="destroy it and create it again")
        backend = f"huge{number}" if f"huge{number}" in objects else f"mem{number}"
        if backend not in objects:
            commands.append(_ordinary(known, backend, size))
        commands.append(("device_add", {"driver": "pc-dimm", "id": f"dimm{number}", "memdev": backend}))
    return commands


def _cpu_commands(monitor: Monitor, known: Manifest, cpus: int, present: set[str]) -> list[Command]:
    free = [cpu for cpu in monitor.execute("query-hotpluggable-cpus") if "qom-path" not in cpu]
    free.sort(key=lambda cpu: tuple(sorted(cpu["props"].items())))
    missing = [f"cpu{number}" for number in range(known.cpus, cpus) if f"cpu{number}" not in present]
    if len(free) < len(missing):
        what = f"VM {known.name} cannot have {cpus} CPUs"
        raise Exhausted(what, hint="delete its template, which was built for fewer")
    return [
        ("device_add", {"driver": cpu["type"], "id": name, **cpu["props"]})
        for name, cpu in zip(missing, free, strict=False)
    ]


# --- virtual functions -------------------------------------------------------------------------------

# MiB that QEMU may keep in place beside the guest's memory: firmware, registers, memory that is plugged as a device.
_FUNCTION_ROOM = 1024 + len(PORTS) * WINDOW
_FUNCTION_TIMEOUT = 30.0  # seconds for QEMU's answers, and one more for each GiB, all of which is allocated
_PER_SECOND = 1024  # MiB


def plug_functions(host: HostContext, name: str) -> list[int]:
    """Plug the functions of a VM into its last root ports, unless they are plugged. Returns the device numbers of the
    ports. The IOMMU translates the addresses of functions, so all of the guest's memory stays in place from then on,
    and a clone shares none of it with its template any more. Raises `Gone` if the VM does not run, and `Broken` if it
    has no port left or QEMU refuses a function."""
    paths = host.paths(name)
    known = manifest.read(paths.home)
    if known is None or not known.process.is_alive():
        raise Gone(f"VM {name} does not run", hint="see the log of the agent")
    found = host.functions.lend(name, known.uid)
    if len(found) > len(PORTS):
        raise Broken(f"VM {name} has no room for {len(found)} functions", hint=f"a VM has {len(PORTS)} at most")
    memory = known.total_memory or known.memory
    process.limit_locked_memory(known.process, (memory + _FUNCTION_ROOM) << 20)
    with Monitor.connect(paths.monitor, _FUNCTION_TIMEOUT + memory / _PER_SECOND) as monitor:
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


# --- shared memory -----------------------------------------------------------------------------------

_FUNCTIONS = 8  # of a PCI device
_ALLOCATING = 64  # MiB and threads for the programs that allocate, where the job has no limits
_ALLOCATION_TIMEOUT = 60.0  # seconds
# Waits until it is in the control groups.
_PROGRAM = 'read -r go && for fd; do fallocate --length "$0" "/proc/self/fd/$fd" || exit; done'
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def region_places(count: int, size: int, ports: int = len(PORTS)) -> list[RegionPlace]:
    """Where `count` regions of `size` MiB are plugged, in the first ports. Raises `Refused` if they do not fit."""
    each = min(_FUNCTIONS, WINDOW // size)
    if count > (most := each * ports):
        raise Refused(
            f"--ivshmem={count}: a VM has room for {most} regions of {size} MiB"
            + (f" beside {len(PORTS) - ports} virtual functions (--sriov)" if ports < len(PORTS) else ""),
            hint="submit the job for fewer, or ask an administrator for a smaller job_vms.ivshmem_size",
        )
    return [RegionPlace(number // each, number % each) for number in range(count)]


def allocation_group(name: str) -> str:
    """The name of the control groups of the process that allocates the regions of that VM."""
    return f"{name}-ivshmem"


def allocate_regions(groups: Cgroups | JobGroups, name: str, ids: Sequence[str], size: int) -> SharedMemory:
    """New regions of `size` MiB. Raises `Exhausted` if there is no room, and `Broken` if control groups cannot be made.
    A region is a file without a name. Each QEMU of the job inherits it, and it ends with the last of them. A process in
    the groups `name` allocates it, because the kernel charges a page of a file to the group of its first user
    (cgroups(7)). The groups are removed again."""
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
            _, said = program.communicate("go\n", _ALLOCATION_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            program.kill()
            late = f"{len(memory.fds)} regions of shared memory are not allocated within {_ALLOCATION_TIMEOUT:.0f} s"
            raise Exhausted(late, hint="does the machine swap?") from error
        except BaseException:
            program.kill()
            raise
    if program.returncode:
        what = f"there is no room for {len(memory.fds)} regions of {memory.size} MiB: {said.strip() or 'it was killed'}"
        raise Exhausted(what, hint="submit the job with more --mem, or for fewer regions")


def plug_regions(monitor: Monitor, name: str, places: Sequence[RegionPlace]) -> None:
    """Plug the regions of that VM, each as a device of QEMU's (ivshmem-plain), unless they are plugged. The guest looks
    at a port when its function 0 appears, so that comes last. Raises `Broken` if QEMU refuses it."""
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
