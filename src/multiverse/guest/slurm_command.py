#!/usr/bin/python3 -IS
"""Stands for each of Slurm's commands in the VM of a job: the host runs the command in its place.

The guest agent puts this file there (`guest.agent.requests`). It asks the process that carries its task for a
connection to the host, describes the command, and then carries input, output, signals and the exit status, as mventer
does for a task; `guest.agent.tasks` describes the frames. Standard library only; no module of ours is in a guest.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import tty

TYPE_CHECKING = False  # importing it from typing would take longer than all else
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Never

SOCKETS = "/run/multiverse/tasks"  # as in guest.agent.system
GROUPS = "multiverse-tasks/"
CREDIT = 1 << 16  # bytes of input that the host takes before it grants more: ROOM in spank/commands.c
ROOM = 1 << 16  # bytes of output that are received before earlier ones are written
LONGEST_FRAME = 1 << 20
LIMITS = ("CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS")
"""Resource limits that srun and sbatch propagate: those of the process that runs them."""
UNCAUGHT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU,
            signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}  # fmt: skip


def main() -> None:
    argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH119
    if argv[0] == "sbcast":
        argv, source = broadcast(argv[1:])
        os.dup2(source, 0)
    elif argv[0] in LAUNCHERS:
        argv = launch(argv[1:], LAUNCHERS[argv[0]])
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    elif argv[0] == "sbatch":
        forget_mpi(os.environ)
    Carrier(connect()).run([os.fsencode(each) for each in argv])


def fail(text: str) -> Never:
    sys.stderr.write(f"multiverse: {text}\n")
    sys.exit(1)


def connect() -> socket.socket:
    with open("/proc/self/cgroup") as file:  # noqa: PTH123
        _, found, rest = file.read().partition(GROUPS)
    task = rest.split()[0].partition("/")[0] if found else ""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(f"{SOCKETS}/{task}")
            sock.send(b"connect")
            _, files, _, _ = socket.recv_fds(sock, 64, 1)
    except OSError as error:
        fail(f"Slurm's commands are for the tasks of a job: {error.strerror}")
    if not files:
        fail("the host did not run this command; see the errors of the task")
    connection = socket.socket(fileno=files[0])
    connection.setblocking(True)
    return connection


class Carrier:
    def __init__(self, connection: socket.socket) -> None:
        self._host = connection
        self._host_gone = False
        self._received = bytearray()
        self._output = bytearray()  # that is not written yet, and where it belongs
        self._output_fd = 1
        self._credit = CREDIT
        self._terminal = os.isatty(0) and os.isatty(1)
        self._before = termios.tcgetattr(0) if self._terminal else None

    def run(self, argv: list[bytes]) -> Never:
        waking, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in signal.valid_signals() - UNCAUGHT:
            if number < signal.SIGRTMIN:
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            self._describe(argv)
            if self._terminal:
                tty.setraw(0)
            self._carry(waking)
        except OSError as error:
            self._restore()
            fail(f"the connection to the host broke: {error.strerror}")

    def _describe(self, argv: list[bytes]) -> None:
        mask = os.umask(0)
        os.umask(mask)
        self._send(b"U", b"%o" % mask)
        try:
            self._send(b"C", os.getcwdb())  # noqa: PTH109
        except FileNotFoundError:
            pass  # the directory was removed
        for name in LIMITS:
            number = getattr(resource, f"RLIMIT_{name}")
            self._send(b"L", b"%d %d" % (number, resource.getrlimit(number)[0]))
        for key, value in os.environb.items():
            self._send(b"E", key + b"=" + value)
        for each in argv:
            self._send(b"A", each)
        if self._terminal:
            self._send(b"T", self._window())
        self._send(b"X", b"")

    def _window(self) -> bytes:
        return b"%d %d" % struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))[:2]

    def _send(self, kind: bytes, body: bytes) -> None:
        self._host.sendall(kind + struct.pack(">I", len(body)) + body)

    def _carry(self, waking: int) -> Never:
        has_input = True
        while True:
            wanted = {waking: select.POLLIN}
            if self._output:
                wanted[self._output_fd] = select.POLLOUT
            if len(self._output) < ROOM and not self._host_gone:
                wanted[self._host.fileno()] = select.POLLIN
            if has_input and self._credit:
                wanted[0] = select.POLLIN
            poller = select.poll()
            for fd, events in wanted.items():
                poller.register(fd, events)
            ready = dict(poller.poll())
            if waking in ready:
                self._forward_signals(os.read(waking, 256))
            if self._output and self._output_fd in ready:
                self._write_output()
            if self._host.fileno() in ready:
                self._receive()
            if 0 in ready and has_input and 0 in wanted:
                has_input = self._send_input()
            self._take_frames()
            if self._host_gone and not self._output:  # and no wait status was among the frames
                self._restore()
                fail("the host ended this command")

    def _forward_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGWINCH:
                if self._terminal:
                    self._send(b"W", self._window())
            else:
                self._send(b"S", bytes((number, ord("1"))))

    def _send_input(self) -> bool:
        try:
            data = os.read(0, min(self._credit, 8192))
        except OSError:
            data = b""  # there is no input, or the terminal is closed
        self._credit -= len(data)
        self._send(b"I" if data else b"Z", data)
        return bool(data)

    def _receive(self) -> None:
        data = self._host.recv(65536)
        self._host_gone = not data
        self._received += data

    def _take_frames(self) -> None:
        """Take the frames that have come. Output for another file waits until earlier output is written."""
        while len(self._received) >= 5:
            kind, length = bytes(self._received[:1]), struct.unpack_from(">I", self._received, 1)[0]
            if length > LONGEST_FRAME:
                fail("the host sends what makes no sense")
            if len(self._received) < 5 + length:
                return
            target = {b"O": 1, b"D": 2}.get(kind, self._output_fd)
            if self._output and (target != self._output_fd or kind in b"QM"):
                return
            body = bytes(self._received[5 : 5 + length])
            del self._received[: 5 + length]
            self._output_fd = target
            self._take(kind, body)

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind in b"OD":
            self._output += body
        elif kind == b"K":
            self._credit += struct.unpack(">I", body)[0]
        elif kind == b"M":
            self._restore()
            fail(os.fsdecode(body))
        elif kind == b"Q":
            self._end(struct.unpack(">I", body)[0])

    def _write_output(self) -> None:
        # A pipe that poll(2) calls ready takes as much without blocking.
        try:
            done = os.write(self._output_fd, self._output[:4096])
        except BlockingIOError:
            return
        except OSError:
            done = len(self._output)  # nobody reads it
            if self._output_fd == 1:
                self._send(b"S", bytes((signal.SIGPIPE, ord("1"))))  # what the command would get
        del self._output[:done]

    def _restore(self) -> None:
        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def _end(self, status: int) -> Never:
        self._restore()
        if os.WIFSIGNALED(status):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            number = os.WTERMSIG(status)
            signal.set_wakeup_fd(-1)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)
        os._exit(os.WEXITSTATUS(status))


# --- sbcast -------------------------------------------------------------------------------------------

WITH_VALUE = {"-F", "--fanout", "-s", "--size", "-t", "--timeout", "-j", "--jobid", "--exclude", "--treewidth"}
COPY = """umask 077
[ -z "$2" ] || rm -f -- "$1"
set -C
cat > "$1" && chmod "$3" "$1" && { [ -z "$4" ] || touch -d "@$4" "$1"; }"""


def broadcast(argv: list[str]) -> tuple[list[str], int]:
    """A step that copies a file of this guest to the VMs of all the job's nodes, as sbcast does for nodes. Returns the
    step's arguments and a descriptor of the file, its input."""
    flags, names = set(), []
    values = iter(argv)
    for each in values:
        if each.startswith("-") and len(each) > 1:
            flags |= set(each[1:]) if not each.startswith("--") else {each[2:].partition("=")[0]}
            if each in WITH_VALUE:
                next(values, "")
        else:
            names.append(each)
    if len(names) != 2:
        fail("sbcast: usage: sbcast [--force] [--preserve] SOURCE DEST")
    source, target = names
    try:
        file = os.open(source, os.O_RDONLY)
        seen = os.fstat(file)
    except OSError as error:
        fail(f"sbcast: cannot open {source}: {error.strerror}")
    if target.endswith("/"):
        target += os.path.basename(source)  # noqa: PTH119
    nodes, vms = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), int(os.environ.get("MULTIVERSE_VMS_PER_NODE", "1"))
    force, preserve = bool(flags & {"f", "force"}), bool(flags & {"p", "preserve"})
    when = str(int(seen.st_mtime)) if preserve else ""
    mode = oct(seen.st_mode & 0o777)[2:]
    # A task for each VM: the tasks of a node are divided over its VMs, also if it has fewer cores.
    count = (f"--nodes={nodes}", f"--ntasks={nodes * vms}", f"--ntasks-per-node={vms}", "--overcommit")
    step = ["srun", "--quiet", "--overlap", "--mpi=none", *count]
    return [*step, "sh", "-c", COPY, "sh", target, "1" if force else "", mode, when], file


# --- the launcher of MPI ------------------------------------------------------------------------------

DIRECTORY = "/run/multiverse/mpi"  # as in guest.agent.requests
VMS = f"{DIRECTORY}/vms"
# What tasks here are told for MPI, beside paths below DIRECTORY.
VALUES = {"OMPI_MCA_plm": "rsh", "OMPI_MCA_ras": "^slurm", "OMPI_MCA_routed_radix": "16", "HYDRA_LAUNCHER": "ssh"}
LAUNCHERS = {"launch": 0, "launch-hydra": 33}  # how many VMs a job may have for it; 0: any number
OPTIONS_WITH_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")  # of ssh
# The variables of these names say how the task's own step was to be started, and who serves PMI to it; all but a few.
STEPS_OWN = ("SLURM_", "SRUN_", "PMI_", "PMIX_")
KEPT = ("SLURM_JOB", "SLURM_ARRAY_", "SLURM_SUBMIT_", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "PMIX_MCA_")


def launch(argv: list[str], most: int) -> list[str]:
    """The arguments of srun that start a command in another VM of the job. `argv` are those of ssh: options, which mean
    nothing here, the name of a VM, and a command for the shell."""
    while argv and argv[0].startswith("-"):
        del argv[: 2 if len(argv[0]) == 2 and argv[0][1] in OPTIONS_WITH_VALUE else 1]
    if len(argv) < 2:
        fail("launch: usage: launch VM COMMAND, where VM is one of the job's")
    wanted, *command = argv
    with open(VMS) as file:  # noqa: PTH123
        vms = {name: (node, number) for name, node, number in map(str.split, file)}
    node, number = vms.get(wanted.rpartition("@")[2], ("", ""))
    if not node:
        fail(f"launch: {wanted} is no VM of this job; its VMs are {', '.join(list(vms)[:3])}{' ...' * (len(vms) > 3)}")
    if most and len(vms) > most:
        # It starts a command for each VM and waits for all, but only so many run at once.
        other = "submit the job with --vm-per-node=1, for srun --mpi=pmi2"
        fail(f"launch: mpiexec of MPICH starts ranks in {most} VMs at most; {other}")
    for name in list(os.environ):
        if name.startswith(STEPS_OWN) and not name.startswith(KEPT):
            del os.environ[name]
    os.environ["MULTIVERSE_VM"] = number
    step = ["srun", "--quiet", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return [*step, "--input=none", "sh", "-c", " ".join(command)]


def forget_mpi(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that tell MPI how it reaches the VMs of this job: in another job, which may have none,
    mpirun would look for our launcher. What the user has set stays."""
    names = [name for name in environment if name.startswith(("OMPI_MCA_", "HYDRA_"))]
    paths = [name for name in names if environment[name].startswith(f"{DIRECTORY}/")]
    for name in [*paths, *(name for name, value in VALUES.items() if paths and environment.get(name) == value)]:
        del environment[name]


if __name__ == "__main__":
    main()
