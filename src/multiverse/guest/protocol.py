"""The messages between the host and a guest agent: one JSON object per line, at most `MAX_LINE` bytes.

The JSON is a contract with guest agents of other releases, which run in VMs and lie in frozen templates: a field that
was released is never renamed or removed.

Nothing from a guest is trusted, because its user may be root there: types are checked, unknown messages are ignored,
and nothing is kept without a limit.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiverse.core.errors import Refused
from multiverse.core.model.identity import Identity, User
from multiverse.core.model.vm import Stage
from multiverse.guest.agent.saving import ATTACHER as ATTACHER
from multiverse.guest.agent.system import DISK as DISK
from multiverse.guest.agent.system import MAX_LINE as MAX_LINE
from multiverse.guest.agent.system import PORT as PORT
from multiverse.guest.agent.system import TASKS_PORT as TASKS_PORT
from multiverse.guest.agent.system import TEMPLATE as TEMPLATE
from multiverse.guest.agent.system import USER_ADDED as USER_ADDED

COMMANDS = ("sacct", "sacctmgr", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "sprio", "squeue", "sreport",
            "srun", "sshare", "sstat")  # fmt: skip
"""Slurm's commands that the host runs for a guest: `names` in spank/commands.c."""

INSTALLED = (*COMMANDS, "salloc", "sbcast")
"""Slurm's commands in a guest. The host refuses salloc, because it would run its command on the host. sbcast becomes a
step of srun."""

# --- messages to a guest ------------------------------------------------------------------------------

HELLO = b'{"type":"hello"}\n'
"""Asks for the agent's state: its last report of `fork_point`, `becoming`, `started` or `failed`."""
FLUSH = b'{"type":"flush"}\n'
"""Makes the agent write everything back and unmount the cluster's file systems. The answer is `flushed`."""
AUDIT = b'{"type":"audit"}\n'
"""Asks for the facts that distinguish this VM from other clones. The answer is `audited`."""

Names = Iterable[tuple[str, str]]
"""Names of other VMs, each with its address."""


def identity_message(identity: Identity, cpus: int, plugged: int, disk: int, names: Names = ()) -> bytes:
    """The line that gives a clone its identity. It holds fresh random bytes and the time: never keep or resend it.
    `cpus` is the number of CPUs that the clone must have, `plugged` the MiB of memory that were plugged, `disk` the MiB
    that users may write. Raises `Refused` if the line is longer than MAX_LINE."""
    return _identity_line("identity", identity, names, cpus=cpus, plugged=plugged, disk=disk)


def wake_message(identity: Identity, names: Names = ()) -> bytes:
    """The line that makes a restored guest a node again, as that identity. Never keep or resend it. The answer is
    `started`. Raises `Refused` if the line is longer than MAX_LINE."""
    return _identity_line("wake", identity, names, program=program("attach_program.sh"))


def _identity_line(kind: str, identity: Identity, names: Names, **more: object) -> bytes:
    bootstrap = identity.bootstrap
    line = _line(
        type=kind,  # first: the agent recognizes an identity by its first bytes, before it parses it
        random=base64.b64encode(os.urandom(64)).decode(),
        **more,
        identity={
            "hostname": identity.hostname,
            "mac": identity.mac,
            "address": identity.address,  # with prefix length
            "gateway": identity.gateway,  # may be empty
            "machine_id": identity.machine_id,
            "users": [_user(user) for user in identity.users],
            "mounts": [
                {"source": each.source, "target": each.target, "type": each.type, "options": each.options}
                for each in identity.mounts
            ],
            "peers": identity.peers,
            "bootstrap": {
                "files": [
                    {
                        "path": each.path,
                        "content": base64.b64encode(each.content).decode(),
                        "mode": each.mode,
                        "owner": each.owner,
                    }
                    for each in bootstrap.files
                ],
                "directories": bootstrap.directories,  # path, owner and mode
                "daemons": [
                    {"name": each.name, "argv": each.argv, "user": each.user, "ready_path": each.ready_path}
                    for each in bootstrap.daemons
                ],
                "users": [_user(user) for user in bootstrap.users],
            },
        },
        names=sorted(names),
        time=time.time(),
    )
    if len(line) > MAX_LINE:
        what = f"the identity of {identity.hostname} has {len(line)} bytes, over {MAX_LINE}"
        raise Refused(what, hint="are there very large files in the guests' configuration?")
    return line


@dataclass(frozen=True, slots=True)
class JobGuest:
    """The name, address and peers of a VM inside of a job."""

    hostname: str
    address: str  # with prefix length
    hosts: tuple[tuple[str, str], ...]  # names and addresses of other machines
    vms: tuple[tuple[str, str], ...]  # names and addresses of the job's VMs: equally many on each node, node by node
    nodes: tuple[str, ...]
    mtu: int  # 0: that of the interface stays


def join_job_message(guest: JobGuest) -> bytes:
    """The line that gives a VM inside of a job its name, its address in the network of the job, and the job's VMs. The
    answer is `joined_job`. Raises `Refused` if there are too many VMs."""
    line = _line(
        type="join_job",
        hostname=guest.hostname,
        address=guest.address,
        peers=[*guest.hosts, *guest.vms],
        nodes=guest.nodes,
        vms=len(guest.vms) // len(guest.nodes),  # on each node; they are the last of the peers
        mtu=guest.mtu,
    )
    if len(line) > MAX_LINE:
        raise Refused(f"{len(guest.vms)} VMs are too many for a job", hint="submit it for fewer")
    return line


def take_functions_message(ports: Sequence[int], uid: int) -> bytes:
    """The line that gives this user the virtual functions in these root ports. The answer is `took_functions`."""
    return _line(type="take_functions", ports=ports, uid=uid)


def add_user_message(user: User, names: Names = ()) -> bytes:
    """The line that adds a user, with names of the user's VMs, and sets the clock. The answer is `user_added`."""
    return _line(type="add_user", user=_user(user), names=sorted(names), time=time.time())


WRITES_SHARED_FILES = "it writes to shared files"
"""How the agent's reason begins if that is why it refuses a checkpoint (`guest.agent.saving`)."""


def freeze_message(sync: float, *, script: bool = True, checkpoint: bool = False, shared_files: bool = False) -> bytes:
    """The line that freezes the processes of the VM's job, and writes network file systems back within `sync` seconds.
    `script`: the VM has the batch script. The answer is `frozen`, or `refused`: also for a checkpoint of a job that
    writes to files of network file systems beside the output of its script, unless `shared_files`."""
    return _line(type="freeze", sync=sync, script=script, checkpoint=checkpoint, shared_files=shared_files)


THAW = b'{"type":"thaw"}\n'
"""Lets a frozen job go on. The answer is `thawed`."""
CUT = b'{"type":"cut"}\n'
"""Cuts a frozen job off from Slurm, which can requeue it then. The answer is `cut`."""
REST = b'{"type":"rest"}\n'
"""Ends the daemons of a guest that is about to be saved. The answer is `rests`."""
ATTACH = b'{"type":"attach"}\n'
"""Lets the frozen processes go on within the next run of their job. The answer is `attached`."""


STEPS = "/run/multiverse/steps"
"""The file with the names of the job's steps, in the stand-in for a VM that sleeps."""


def sleep_message(sync: float) -> bytes:
    """The line that asks a guest whose job is suspended to write all file systems back within `sync` seconds. The
    answer is `may_sleep` with the names of the job's steps as facts, or `refused`."""
    return _line(type="sleep", sync=sync)


def rise_message(*, runs: bool) -> bytes:
    """The line that tells a guest that has slept the time, and lets its job go on or stops it, as Slurm shows it now.
    The answer is `risen`, or `refused`."""
    return _line(type="rise", time=time.time(), runs=runs)


def names_message(
    names: Sequence[tuple[str, str]], gone: Sequence[str], *, whole: bool, now: float | None = None
) -> bytes:
    """The line that tells new names and names that are gone, or with `whole` all names; and the time, if it is given,
    to a guest whose clock stood still. There is no answer."""
    return _line(type="names", names=names, gone=gone, whole=whole, **({} if now is None else {"time": now}))


def serve_tasks_message(token: str, directory: str) -> bytes:
    """The line that makes the agent accept tasks of a job, on connections that begin with this secret token, and stand
    in for Slurm's commands, which are in `directory` on the host. The answer is `serving_tasks`."""
    commands = {"names": INSTALLED, "directory": directory, "program": program("slurm_command.py")}
    return _line(type="serve_tasks", token=token, commands=commands)


def take_regions_message(devices: Sequence[tuple[int, int]], uid: int) -> bytes:
    """The line that gives plugged regions of shared memory to this user. Each device is the number of its root port and
    that of its function. The answer is `took_regions`."""
    return _line(type="take_regions", devices=devices, uid=uid, program=program("shared_memory_program.py"))


@cache
def program(name: str) -> str:
    """The text of a program that guests, or stand-ins for them, get: `slurm_command.py`, `shared_memory_program.py`,
    `attach_program.sh`, `steps_program.py` or `check_program.py`."""
    return (Path(__file__).parent / name).read_text()


def _line(**message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _user(user: User) -> dict[str, object]:
    """A passwd entry, and the groups as pairs of name and gid."""
    return {"name": user.name, "uid": user.uid, "gid": user.gid, "home": user.home, "shell": user.shell,
            "groups": user.groups}  # fmt: skip


# --- reports from a guest -----------------------------------------------------------------------------

_TEXT = 1000  # characters of any text that is kept
_TYPES = frozenset({"fork_point", "forked", "becoming", "started", "failed", "flushed", "daemon_ended", "audited",
                    "user_added", "joined_job", "serving_tasks", "took_functions", "took_regions",
                    "frozen", "thawed", "cut", "rests", "attached", "refused",
                    "may_sleep", "risen"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    type: str
    reason: str = ""  # for operators: bounded, and without control characters
    stages: tuple[Stage, ...] = ()
    audit: Mapping[str, str | int] = field(default_factory=lambda: MappingProxyType({}))  # facts that tell clones apart
    possible: int = 0  # CPUs that the guest's kernel supports; 0: unknown


class ReportParser:
    """Parses the bytes from a guest into reports. It keeps at most one line."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> list[Report]:
        """The reports that `data` completes. Long lines, and lines that are no message of an agent, are ignored."""
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
