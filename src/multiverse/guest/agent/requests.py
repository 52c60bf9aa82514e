"""Slurm's commands and the launcher of MPI in the VM of a job: the host runs them for the processes of a task.

In place of each command lies a program (`guest.slurm_command`). It asks the process that carries its task for a
connection to the host, and this process passes the request on. The host then connects to TASKS_PORT. The process that
accepts the connection hands it to the carrier, and the carrier to the program, which speaks with the host alone from
then on.

The launcher is the same program by another name. It starts a command in another VM of the job as a step of srun: so
Slurm decides whether the user may, and the step ends with the job. Launchers of MPI find it, and the VMs, by variables
in the environment of each task.
"""

# ruff: noqa: PTH101, PTH108, PTH112, PTH116, PTH120, PTH211

from __future__ import annotations

import errno
import os
import re
import socket
from typing import Any

from multiverse.guest.agent.system import MNT_DETACH, MS_BIND, SOCKETS, make_directory, mount, suppress, unmount, write

MOST_ASKING = 500  # programs of a task that wait for their connections; descriptors are limited
PROGRAM = "/run/multiverse/slurm-command"
PLACES = ("/usr/local/bin", "/usr/bin")  # where an image has commands; they are put into the first one if it has none


class CommandRequests:
    """The requests of one task's programs, at a socket that its user can connect to."""

    def __init__(self, uid: int) -> None:
        self.path = f"{SOCKETS}/{os.getpid()}"
        self.outgoing: list[bytes] = []  # names of requests that the host has to be told
        self._last = 0
        self._asking: dict[bytes, socket.socket] = {}
        self._silent: list[socket.socket] = []  # that have connected and said nothing yet
        make_directory(SOCKETS)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._sock.bind(self.path)
        os.chmod(self.path, 0o600)
        os.chown(self.path, uid, -1)
        self._sock.listen(64)
        self._sock.setblocking(False)

    @property
    def watched(self) -> list[int]:
        """The descriptors to watch: call `attend` when one can be read."""
        return [sock.fileno() for sock in (self._sock, *self._silent, *self._asking.values())]

    def attend(self) -> None:
        """Accept requests and connections for them, and forget programs that have ended. Never blocks."""
        for sock in list(self._silent):
            self._hear(sock)
        for name, sock in list(self._asking.items()):
            if self._has_ended(sock):
                self.refuse(name)
        while len(self._silent) + len(self._asking) < MOST_ASKING:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            sock.setblocking(False)
            self._silent.append(sock)

    def _hear(self, sock: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(sock, 64, 2)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        self._silent.remove(sock)
        if data and not files:
            self._last += 1
            name = b"%d %d" % (os.getpid(), self._last)
            self._asking[name] = sock
            self.outgoing.append(name)
            return
        asking = self._asking.pop(data, None) if data else None
        with suppress(OSError):  # the program has ended
            if asking is not None:
                socket.send_fds(asking, [b"connected"], files[:1])
        for each in files:
            os.close(each)
        for one in (sock, asking):
            if one is not None:
                one.close()

    def _has_ended(self, sock: socket.socket) -> bool:
        try:
            return not sock.recv(64)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def refuse(self, name: bytes) -> None:
        if (sock := self._asking.pop(name, None)) is not None:
            sock.close()

    def close(self) -> None:
        """Take no more requests. Programs that wait end with an error."""
        for sock in (self._sock, *self._silent, *self._asking.values()):
            sock.close()
        with suppress(OSError):
            os.unlink(self.path)


def hand_over(name: bytes, connection: socket.socket) -> None:
    """Give the host's connection to the process that sent the request `name`. A user may have made the name up, so it
    is read as numbers only. Raises OSError if nobody waits for it, and ValueError."""
    pid, number = map(int, name.split())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"{SOCKETS}/{pid}")
        socket.send_fds(sock, [b"%d %d" % (pid, number)], [connection.fileno()])


def install_commands(commands: dict[str, Any]) -> list[str]:
    """Put the program in the place of each of Slurm's commands: over those of the image and of mounted file systems,
    otherwise into `directory`, where the host has them, or the first of PLACES. The files of mounted file systems stay
    as they are. Returns the paths that were mounted over: they must be unmounted before their file systems."""
    directory = commands["directory"]
    make_directory(os.path.dirname(PROGRAM))
    write(PROGRAM, commands["program"], 0o755)
    covered: list[str] = []
    for name in commands["names"]:
        found = [
            f"{place}/{name}" for place in dict.fromkeys((directory, *PLACES)) if os.path.lexists(f"{place}/{name}")
        ]
        covered += [real for path in found if _cover(real := os.path.realpath(path))]
        if f"{directory}/{name}" not in found and not _link(f"{directory}/{name}") and not found:
            _link(f"{PLACES[0]}/{name}")
    return covered


def uncover(covered: list[str]) -> None:
    """Unmount what `install_commands` has mounted."""
    for path in reversed(covered):
        with suppress(OSError):
            unmount(path, MNT_DETACH)
    covered.clear()


def _cover(path: str) -> bool:
    with suppress(OSError):
        if os.path.realpath(path) != PROGRAM:
            mount(PROGRAM, path, "", MS_BIND, "")
            return True
    return False


def _link(path: str) -> bool:
    """Make a link to the program there, unless it would be on a mounted file system, which others may share."""
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    try:
        if os.stat(parent).st_dev != os.stat("/").st_dev:
            return False
        make_directory(os.path.dirname(path))
        os.symlink(PROGRAM, path)
    except OSError as error:
        return error.errno == errno.EEXIST
    return True


DIRECTORY = "/run/multiverse/mpi"
VMS = f"{DIRECTORY}/vms"  # for the launcher: a line for each VM, of its name, its node and its number there
LAUNCHERS = (f"{DIRECTORY}/launch", f"{DIRECTORY}/launch-hydra")  # that of Open MPI, and that of MPICH
RADIX = b"16"  # of the tree in which Open MPI starts its daemons: fewer than commands run at once for a task
COUNTS = re.compile(rb"([0-9]+)(?:\(x([0-9]+)\))?")  # as Slurm writes the tasks of nodes: 2(x3),1

JobVms = list[tuple[str, str, int]]


def install_launcher(vms: JobVms) -> None:
    """Put the launchers into their place. `vms` are the job's VMs: name, node, and number on the node."""
    make_directory(DIRECTORY)
    write(VMS, "".join(f"{name} {node} {number}\n" for name, node, number in vms))
    for path in LAUNCHERS:
        if not os.path.lexists(path):
            os.symlink(PROGRAM, path)


def prepare_mpi(environment: dict[bytes, bytes], vms: JobVms) -> list[str]:
    """Set the variables of a task's environment that tell launchers of MPI about the job's VMs and our launcher. What
    the user has set stays. Returns the files to remove after the task."""
    if not vms:
        return []
    slots = list(zip((name for name, _, _ in vms), slots_of(environment, vms), strict=True))
    files = [f"{DIRECTORY}/{os.getpid()}.{who}" for who in ("openmpi", "hydra")]
    write(files[0], "".join(f"{name} slots={count}\n" for name, count in slots))
    write(files[1], "".join(f"{name}:{count}\n" for name, count in slots))
    ours = {
        b"OMPI_MCA_plm": b"rsh",
        b"OMPI_MCA_ras": b"^slurm",  # it would take nodes for hosts
        b"OMPI_MCA_plm_rsh_agent": os.fsencode(LAUNCHERS[0]),
        b"OMPI_MCA_orte_default_hostfile": os.fsencode(files[0]),
        b"OMPI_MCA_routed_radix": RADIX,
        b"HYDRA_LAUNCHER": b"ssh",
        b"HYDRA_LAUNCHER_EXEC": os.fsencode(LAUNCHERS[1]),
        b"HYDRA_HOST_FILE": os.fsencode(files[1]),
    }
    for name, value in ours.items():
        # A step has the variables of the task that started it, whose files are in another VM.
        if name not in environment or environment[name].startswith(os.fsencode(DIRECTORY)):
            environment[name] = value
    return files


def slots_of(environment: dict[bytes, bytes], vms: JobVms) -> list[int]:
    """The number of ranks for each VM: the tasks that the job has on its node, divided as srun divides them, at least
    1. A step of fewer nodes does not know the tasks of all nodes: then the job counts as one that named none."""
    each = max(number for _, _, number in vms) + 1
    nodes = len(vms) // each
    tasks = _counts(environment.get(b"SLURM_TASKS_PER_NODE", b""))
    if len(tasks) != nodes:
        cores = _counts(environment.get(b"SLURM_JOB_CPUS_PER_NODE", b""))
        needed = max(_counts(environment.get(b"SLURM_CPUS_PER_TASK", b"")) or [1])
        tasks = [count // max(needed, 1) for count in cores] if len(cores) == nodes else [0] * nodes
    found = []
    for count in tasks:
        blocks = [0] * each
        for task in range(count):
            blocks[task * each // count] += 1
        found += [max(1, block) for block in blocks]
    return found


def _counts(text: bytes) -> list[int]:
    return [int(count) for count, times in COUNTS.findall(text) for _ in range(int(times or 1))]


def remove_files(paths: list[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
