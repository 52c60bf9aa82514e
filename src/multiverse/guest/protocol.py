"""What the host and a guest agent send each other: one JSON object per line, at most `MAX_LINE` bytes.

The JSON is a contract with guest agents of other releases, which run in VMs and lie in frozen templates: a field that
was released is never renamed or removed. The wire types here are that contract. Each has one conversion from the value
that it carries.

Nothing that comes from a guest is trusted, because its user may be root there: types are checked, unknown messages are
ignored, and nothing is kept without a limit.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from multiverse.core.errors import Refused
from multiverse.core.model import Daemon, GuestFile, Identity, Mount, NodeBootstrap, Stage, User
from multiverse.guest.agent import DISK as DISK
from multiverse.guest.agent import MAX_LINE as MAX_LINE
from multiverse.guest.agent import PORT as PORT
from multiverse.guest.agent import TASKS_PORT as TASKS_PORT
from multiverse.guest.agent import TEMPLATE as TEMPLATE
from multiverse.guest.agent import USER_ADDED as USER_ADDED
from multiverse.guest.commands import INSTALLED, program, shared_memory_program

# --- messages to a guest ------------------------------------------------------------------------------

HELLO = b'{"type":"hello"}\n'
"""Asks for the agent's state: its last report of `fork_point`, `becoming`, `started` or `failed`."""
FLUSH = b'{"type":"flush"}\n'
"""Makes the agent write everything back and unmount the cluster's file systems; it answers `flushed`."""
AUDIT = b'{"type":"audit"}\n'
"""Asks for the facts that distinguish this VM from other clones; the agent answers `audited`."""


class WireUser(TypedDict):
    """A user of the guest: its passwd entry and its groups, pairs of name and gid."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: list[tuple[str, int]]


class WireMount(TypedDict):
    """A file system that the guest mounts; fields as in fstab(5)."""

    source: str
    target: str
    type: str
    options: str


class WireFile(TypedDict):
    """A file that the agent writes; `content` is base64, `owner` the name of a user of the image."""

    path: str
    content: str
    mode: int
    owner: str


class WireDaemon(TypedDict):
    """A process that the agent starts and watches; an empty `ready_path` means that nothing is waited for."""

    name: str
    argv: list[str]
    user: str
    ready_path: str


class WireBootstrap(TypedDict):
    """What a node needs to join the scheduler; directories are triples of path, owner and mode."""

    files: list[WireFile]
    directories: list[tuple[str, str, int]]
    daemons: list[WireDaemon]
    users: list[WireUser]


class WireIdentity(TypedDict):
    """What makes a clone itself; `address` has a prefix length, `gateway` may be empty, peers are (name, address)."""

    hostname: str
    mac: str
    address: str
    gateway: str
    machine_id: str
    users: list[WireUser]
    mounts: list[WireMount]
    peers: list[tuple[str, str]]
    bootstrap: WireBootstrap


class IdentityMessage(TypedDict):
    """`random` are 64 bytes in base64, `plugged` MiB of memory, `disk` MiB that users may write, `time` seconds since
    the epoch. `names` are those of the other VMs of its group, with their addresses.

    The type comes first: the agent recognizes the message by its first bytes, before it parses it.
    """

    type: Literal["identity"]
    random: str
    cpus: int
    plugged: int
    disk: int
    identity: WireIdentity
    names: list[tuple[str, str]]
    time: float


class AddUserMessage(TypedDict):
    """`time` is in seconds since the epoch; `names` are as in an identity."""

    type: Literal["add_user"]
    user: WireUser
    names: list[tuple[str, str]]
    time: float


class NamesMessage(TypedDict):
    """The names of other VMs, with their addresses: more of them, or with `whole` all. Those that are `gone` are no
    more. It is not answered."""

    type: Literal["names"]
    names: list[tuple[str, str]]
    gone: list[str]
    whole: bool


class WireCommands(TypedDict):
    """Slurm's commands in the VM of a job: their names, the directory that the host has them in, and the text of the
    program that stands for them."""

    names: list[str]
    directory: str
    program: str


class ServeTasksMessage(TypedDict):
    """`token` is a secret of the host's agent."""

    type: Literal["serve_tasks"]
    token: str
    commands: WireCommands


class JoinJobMessage(TypedDict):
    """`address` has a prefix length, peers are (name, address), an `mtu` of 0 leaves that of the interface. The job has
    `vms` VMs on each of its `nodes`, which are the last ones of the peers, in the order of the nodes."""

    type: Literal["join_job"]
    hostname: str
    address: str
    peers: list[tuple[str, str]]
    nodes: list[str]
    vms: int
    mtu: int


class TakeFunctionsMessage(TypedDict):
    """`ports` are the device numbers of the root ports that functions were plugged into."""

    type: Literal["take_functions"]
    ports: list[int]
    uid: int


class TakeRegionsMessage(TypedDict):
    """`devices` are the regions of shared memory in their order: the number of the device on the first bus that is the
    root port, and that of the function. `uid` is whom they are for. `program` is the text of the program that passes
    data through them."""

    type: Literal["take_regions"]
    devices: list[tuple[int, int]]
    uid: int
    program: str


def identity_message(
    identity: Identity, cpus: int, plugged: int, disk: int, names: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The line that gives a clone its identity. It holds fresh random bytes and the time: never keep or resend it.

    `cpus` is the number of CPUs that the clone must have, `plugged` the MiB of memory that were plugged, `disk` the MiB
    that its users may write, `names` those of other VMs, with their addresses. Raises
    `Refused` if the line is longer than MAX_LINE.
    """
    line = _line(
        IdentityMessage(
            type="identity",
            random=base64.b64encode(os.urandom(64)).decode(),
            cpus=cpus,
            plugged=plugged,
            disk=disk,
            identity=_wire_identity(identity),
            names=sorted(names),
            time=time.time(),
        )
    )
    if len(line) > MAX_LINE:
        raise Refused(
            f"the identity of {identity.hostname} has {len(line)} bytes, over {MAX_LINE}",
            hint="are there very large files in the guests' configuration?",
        )
    return line


@dataclass(frozen=True, slots=True)
class JobGuest:
    """What a VM inside of a job is among the job's VMs. `address` has a prefix length, `hosts` and `vms` are names and
    addresses: of other machines, and of the VMs, which are as many on each of the `nodes`, in the order of these."""

    hostname: str
    address: str
    hosts: tuple[tuple[str, str], ...]
    vms: tuple[tuple[str, str], ...]
    nodes: tuple[str, ...]
    mtu: int


def join_job_message(guest: JobGuest) -> bytes:
    """The line that gives a VM inside of a job its name and its second address, in the network of the job, and tells it
    the job's VMs. The agent answers `joined_job`. Raises `Refused` if there are too many to tell."""
    line = _line(
        JoinJobMessage(
            type="join_job",
            hostname=guest.hostname,
            address=guest.address,
            peers=[*guest.hosts, *guest.vms],
            nodes=list(guest.nodes),
            vms=len(guest.vms) // len(guest.nodes),
            mtu=guest.mtu,
        )
    )
    if len(line) > MAX_LINE:
        raise Refused(f"{len(guest.vms)} VMs are too many for a job", hint="submit it for fewer")
    return line


def take_functions_message(ports: Sequence[int], uid: int) -> bytes:
    """The line that gives this user of a VM the virtual functions that were plugged into these root ports. The agent
    answers `took_functions`."""
    return _line(TakeFunctionsMessage(type="take_functions", ports=list(ports), uid=uid))


def add_user_message(user: User, names: Iterable[tuple[str, str]] = ()) -> bytes:
    """The line that adds a user to a VM that runs, with the names of the user's other VMs, and corrects its clock. The
    agent answers `user_added`."""
    return _line(AddUserMessage(type="add_user", user=_wire_user(user), names=sorted(names), time=time.time()))


def names_message(names: Sequence[tuple[str, str]], gone: Sequence[str], *, whole: bool) -> bytes:
    """The line that tells a VM that runs the names of other VMs, with their addresses."""
    return _line(NamesMessage(type="names", names=list(names), gone=list(gone), whole=whole))


def serve_tasks_message(token: str, directory: str) -> bytes:
    """The line that makes the agent accept the tasks of a job, on connections that begin with this token, and stand in
    for Slurm's commands, which the host has in `directory`. It answers `serving_tasks`."""
    commands = WireCommands(names=list(INSTALLED), directory=directory, program=program())
    return _line(ServeTasksMessage(type="serve_tasks", token=token, commands=commands))


def take_regions_message(devices: Sequence[tuple[int, int]], uid: int) -> bytes:
    """The line that makes the agent give regions of shared memory, which have been plugged, to that user. It answers
    `took_regions`."""
    program = shared_memory_program()
    return _line(TakeRegionsMessage(type="take_regions", devices=list(devices), uid=uid, program=program))


def _line(
    message: IdentityMessage
    | AddUserMessage
    | NamesMessage
    | ServeTasksMessage
    | JoinJobMessage
    | TakeFunctionsMessage
    | TakeRegionsMessage,
) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _wire_identity(identity: Identity) -> WireIdentity:
    return WireIdentity(
        hostname=identity.hostname,
        mac=identity.mac,
        address=identity.address,
        gateway=identity.gateway,
        machine_id=identity.machine_id,
        users=[_wire_user(user) for user in identity.users],
        mounts=[_wire_mount(mount) for mount in identity.mounts],
        peers=list(identity.peers),
        bootstrap=_wire_bootstrap(identity.bootstrap),
    )


def _wire_user(user: User) -> WireUser:
    return WireUser(
        name=user.name, uid=user.uid, gid=user.gid, home=user.home, shell=user.shell, groups=list(user.groups)
    )


def _wire_mount(mount: Mount) -> WireMount:
    return WireMount(source=mount.source, target=mount.target, type=mount.type, options=mount.options)


def _wire_bootstrap(bootstrap: NodeBootstrap) -> WireBootstrap:
    return WireBootstrap(
        files=[_wire_file(file) for file in bootstrap.files],
        directories=list(bootstrap.directories),
        daemons=[_wire_daemon(daemon) for daemon in bootstrap.daemons],
        users=[_wire_user(user) for user in bootstrap.users],
    )


def _wire_file(file: GuestFile) -> WireFile:
    return WireFile(path=file.path, content=base64.b64encode(file.content).decode(), mode=file.mode, owner=file.owner)


def _wire_daemon(daemon: Daemon) -> WireDaemon:
    return WireDaemon(name=daemon.name, argv=list(daemon.argv), user=daemon.user, ready_path=daemon.ready_path)


# --- reports from a guest -----------------------------------------------------------------------------

_TEXT = 1000  # characters of any text that is kept
_TYPES = frozenset(
    {
        "fork_point",
        "forked",
        "becoming",
        "started",
        "failed",
        "flushed",
        "daemon_ended",
        "audited",
        "user_added",
        "joined_job",
        "serving_tasks",
        "took_functions",
        "took_regions",
    }
)


@dataclass(frozen=True, slots=True)
class Report:
    """A message from a guest agent.

    `reason` is for operators: bounded, and without control characters. `audit` holds what distinguishes clones (see
    `multiverse.guest.agent.audit`). `possible` is the number of CPUs that the guest's kernel supports, 0 if unknown.
    """

    type: str
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    audit: Mapping[str, str | int] = field(default_factory=lambda: MappingProxyType({}))
    possible: int = 0


class ReportParser:
    """Parses the bytes that come from a guest into reports. It keeps at most one line of them."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> list[Report]:
        """The reports that `data` completes. Lines that are too long, or no messages of an agent, are ignored."""
        found = []
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if self._skipping:
                self._skipping = False
            elif (report := _parse(line)) is not None:
                found.append(report)
        if len(self._rest) > MAX_LINE:
            self._rest.clear()
            self._skipping = True
        return found


def _parse(line: bytes) -> Report | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str) or raw["type"] not in _TYPES:
        return None
    reason = raw.get("reason")
    name = raw.get("name")
    text = ": ".join(_clean(part) for part in (name, reason) if isinstance(part, str))
    audit = MappingProxyType(_audit(raw.get("audit")))
    return Report(raw["type"], text, _stages(raw.get("stages")), audit, _count(raw.get("possible")))


def _count(raw: Any) -> int:
    return raw if type(raw) is int and 0 <= raw < 1 << 20 else 0  # `type`, because a bool is an instance of int


def _clean(text: str) -> str:
    """Text for operators' screens: at most _TEXT characters, none of them a control character."""
    return "".join(c if c.isprintable() else " " for c in text[:_TEXT])


def _stages(raw: Any) -> tuple[Stage, ...]:
    items = raw[:64] if isinstance(raw, list) else []
    pairs = [item for item in items if isinstance(item, list) and len(item) == 2]
    # The number is compared before it is converted, because a JSON integer may be too large for a float.
    return tuple(
        Stage(_clean(name)[:40], float(seconds))
        for name, seconds in pairs
        if isinstance(name, str) and isinstance(seconds, int | float) and 0 <= seconds < 3600
    )


def _audit(raw: Any) -> dict[str, str | int]:
    if not isinstance(raw, dict):
        return {}
    kept = {k[:40]: v for k, v in list(raw.items())[:32] if isinstance(v, str | int)}
    return {k: _clean(v) if isinstance(v, str) else v for k, v in kept.items()}
