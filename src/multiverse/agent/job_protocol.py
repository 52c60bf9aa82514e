r"""Requests of Slurm's plugin, and of the program that enters a VM, to the agent of their host: one line, one answer.

    provide job=12 uid=1000 cores=2 allocated=600 image=slim cpus=2 memory=512 disk= vms=1 functions=1 groups=4,7 \
        regions=2 nodes=n[1-2] node=n1
    enter job=12 vm=0
    release job=12
    test

Without a plugin, steps of a job ask for themselves (spank/multiverse_vm.c). Their control groups tell which job it is.

    comment
    launch image=slim cpus=2 memory=512 disk= vms=1
    list
    reclaim

The answer is `ok`, to `enter` with the directory of Slurm's commands and, if there is one, the path of TaskProlog; to
`comment` with the job's comment, to `reclaim` with its id, and to `launch` and `list` with its id, how many regions its
VMs here share, and name and address of each VM, such as `12 0 mvjob-12-0=10.214.128.1`. Otherwise it is `error` and a
sentence for the user. Sizes are MiB; what is empty or missing was not given. The plugin and the agent speak one
protocol: they are installed together, and a test of the plugin compares it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from multiverse.core.errors import MultiverseError, Refused
from multiverse.core.model.basics import Size, number_of

PROTOCOL = 1
"""The version of these lines, and of the plugin's records. spank/multiverse.c has the same number."""

LONGEST_REQUEST = 8192  # bytes of a request
LONGEST_ANSWER = 8192  # bytes of an answer, with its end. spank/client.h has the same number
MOST_VMS = 64  # VMs of one job on one host, at most
MOST_FUNCTIONS = 4  # virtual functions of one VM, at most: it has a root port for each
MOST_REGIONS = 32  # regions of shared memory that the VMs of one job on one host have, at most
LAUNCH = "srun --ntasks-per-node=1 multiverse-vm launch"
"""The command that makes the VMs of a job on all its nodes, where no plugin does."""

_IMAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_LAST_JOB = 0x03FF_FFFF  # MAX_JOB_ID in Slurm's slurm_protocol_defs.h


@dataclass(frozen=True, slots=True)
class ProvideVm:
    """The VMs of a job are to be there. 0 and an empty `image` mean that a value was not given."""

    job: int
    uid: int
    cores: int  # of the job on this host
    allocated: int = 0  # memory of the job on this host
    image: str = ""
    cpus: int = 0
    memory: int = 0
    disk: int = 0
    vms: int = 1  # on this host
    nodes: tuple[str, ...] = ()  # all of the job's, in an order that is the same on each
    node: int = 0  # the number of this host among them, from 0 on
    functions: int = 0  # virtual functions of each VM
    groups: tuple[int, ...] = ()  # IOMMU groups whose device files the job may open
    regions: int = 0  # regions of memory that all VMs share
    started: int = 0  # when slurmctld started the run (Unix time); 0: the plugin records the run


@dataclass(frozen=True, slots=True)
class EnterVm:
    """A task of the job wants a connection to its guest."""

    job: int
    vm: int = 0  # the number of the VM on this host


@dataclass(frozen=True, slots=True)
class ReleaseVm:
    """The job has ended on this host."""

    job: int


@dataclass(frozen=True, slots=True)
class LaunchVms:
    """A step wants VMs for its job on this host. The job, its user and its nodes are not set in `wanted`."""

    wanted: ProvideVm


class PlainRequest(Enum):
    """A request without further words."""

    TEST = "test"  # the plugin is being tested, and wants to know whether the agent answers
    COMMENT = "comment"  # a step wants the comment of its job, which may ask for VMs
    LIST = "list"  # a step wants to know the VMs of its job on this host
    RECLAIM = "reclaim"  # a step gives the VMs of its job on this host back


StepRequest = LaunchVms | PlainRequest  # what steps of jobs ask for where no plugin does it for them


def parse(line: bytes) -> ProvideVm | EnterVm | ReleaseVm | StepRequest:
    """The request in a line. Raises `Refused`."""
    operation, *words = line.decode("ascii", "replace").split() or [""]
    values = dict(word.partition("=")[::2] for word in words)
    match operation:
        case "test" | "comment" | "list" | "reclaim":
            return PlainRequest(operation)
        case "launch":
            return LaunchVms(_wanted(values, 0))
    job = _number(values, "job")
    if not 0 < job <= _LAST_JOB:
        raise Refused(f"{job} is no job")
    match operation:
        case "enter":
            return EnterVm(job, _number(values, "vm"))
        case "release":
            return ReleaseVm(job)
        case "provide":
            nodes, node = _place(values)
            uid, cores, allocated = (_number(values, key) for key in ("uid", "cores", "allocated"))
            groups = tuple(_number({"groups": one}, "groups") for one in values.get("groups", "").split(",") if one)
            wanted = _wanted(values, job)
            return replace(wanted, uid=uid, cores=cores, allocated=allocated, nodes=nodes, node=node, groups=groups)
    raise Refused(f"the agent cannot {operation!r}", hint="install the plugin and the agent of one release")


def _wanted(values: dict[str, str], job: int) -> ProvideVm:
    image = values.get("image", "")
    if image and not _IMAGE.fullmatch(image):
        raise Refused(f"{image!r} is no name of an image")
    numbers = {key: _number(values, key) for key in ("cpus", "memory", "disk", "functions", "regions")}
    vms = _number(values, "vms") or 1
    if vms > MOST_VMS:
        raise Refused(f"--vm-per-node={vms}: a job has at most {MOST_VMS} VMs on a node")
    if (functions := numbers["functions"]) > MOST_FUNCTIONS:
        raise Refused(f"--sriov={functions}: a VM has at most {MOST_FUNCTIONS} virtual functions")
    if (regions := numbers["regions"]) > MOST_REGIONS:
        raise Refused(f"--ivshmem={regions}: a job has at most {MOST_REGIONS} regions on a node")
    asked: dict[str, Any] = {"image": image, "vms": vms, **numbers}
    return ProvideVm(job, uid=0, cores=0, **asked)


def _place(values: dict[str, str]) -> tuple[tuple[str, ...], int]:
    """The nodes of the job, and the number of this host among them."""
    own = values.get("node", "")
    try:
        nodes = tuple(NodeSet(values.get("nodes", ""), resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise Refused(f"the nodes of the job cannot be read: {error}") from error
    if own not in nodes:
        hint = "are there too many of them, with too long names?"
        raise Refused("which nodes the job has is unknown here", hint=hint)
    return nodes, nodes.index(own)


def _number(values: dict[str, str], key: str) -> int:
    text = values.get(key, "") or "0"
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refused(f"{key}={text!r} is no number")
    return int(text)


def answer(error: MultiverseError | None = None, *, told: str = "") -> bytes:
    """The answer to a request that failed with this error, or was done; then its sender is `told` something."""
    if error is None:
        return f"ok {_printable(told)}".rstrip().encode()[: LONGEST_ANSWER - 2] + b"\n"
    return f"error {_printable(str(error))[:800]}\n".encode()


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def vm_size(request: ProvideVm, least: int, overhead: int, region: int = 0) -> Size:
    """The size of each VM of a job on this host: an equal part of what the job has, or what was asked for. Memory in
    MiB: `least` of the smallest VM, `overhead` of a QEMU beside its guest, `region` of each region of shared memory.
    Raises `Refused` for what the job cannot hold."""
    return Size(_cpus(request), _memory(request, least, overhead, request.regions * region), request.disk)


def _cpus(request: ProvideVm) -> int:
    vms = request.vms
    cpus = request.cpus or request.cores // vms
    if not cpus:
        raise Refused(
            f"--vm-per-node={vms}: the job has {number_of(request.cores, 'core')} on this node, and each VM needs one",
            hint=f"submit it with --cpus-per-task={vms}, or for fewer VMs",
        )
    if vms * cpus > max(request.cores, 1):
        raise Refused(
            f"--vcpu-per-vm={cpus}{_times(vms)}: the job has {number_of(request.cores, 'core')} on this node",
            hint=f"submit it with --cpus-per-task={vms * cpus}",
        )
    return cpus


def _memory(request: ProvideVm, least: int, overhead: int, shared: int) -> int:
    vms = request.vms
    most = (request.allocated - shared) // vms - overhead if request.allocated else request.memory
    if not (request.allocated or request.memory):
        raise Refused("how much memory the job has is unknown here", hint="submit it with --memory-per-vm")
    regions = f", and --ivshmem={request.regions} takes {shared}" if shared else ""
    memory = request.memory or most
    if memory > most:
        raise Refused(
            f"--memory-per-vm={memory}{_times(vms)}: the job has {request.allocated} MiB on this node, "
            f"and QEMU takes {overhead}{_times(vms)}{regions}",
            hint=f"submit it with --mem={vms * (memory + overhead) + shared}",
        )
    if memory < least:
        raise Refused(
            f"a VM has at least {least} MiB, and this one would have {max(0, memory)}{regions}",
            hint=f"submit the job with --mem={vms * (least + overhead) + shared} or more",
        )
    return memory


def _times(vms: int) -> str:
    return f" for each of {vms} VMs" if vms > 1 else ""
