"""The command of a task: a user's process, in a control group of its own."""

# ruff: noqa: PTH106, PTH108

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import struct
import time

from multiverse.guest.agent.boot import CGROUPS
from multiverse.guest.agent.contract import GuestAgentError
from multiverse.guest.agent.files import make_directory, read, write_kernel_file
from multiverse.guest.agent.pmi import PmiStreams
from multiverse.guest.agent.prolog import run_prolog

TASKS = f"{CGROUPS}/multiverse-tasks"
TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414  # <asm-generic/ioctls.h>
SEARCH_PATH = b"/usr/local/bin:/usr/bin:/bin"  # if the environment has no PATH
SCRIPT = re.compile(rb"/(?:.*/)?job[0-9]+/slurm_script", re.DOTALL)  # where slurmd has a batch script
GONE_TIMEOUT = 5.0  # seconds for the kernel to take the last process of a task out of its control group


class TaskCommand:
    """What a task runs, as the host has described it; see `frame`. `name`, `uid` and `gid` are the user's."""

    def __init__(self, name: str, uid: int, gid: int) -> None:
        self.name, self.uid, self.gid = name, uid, gid
        self.argv: list[bytes] = []
        self.environment: dict[bytes, bytes] = {}
        self.directory = b"/"
        self.umask = 0o022
        self.has_terminal = False
        self.window = (0, 0)  # rows and columns of its terminal
        self.script = b""  # path of the file that is made for it
        self.limits: list[tuple[int, int, int]] = []
        self.prologs: list[tuple[bytes, bytes]] = []  # their paths and contents
        self.has_pmi = False  # the host serves PMI-2 to it
        self.streams = PmiStreams()
        self.pid = 0
        self.group = f"{TASKS}/{os.getpid()}"

    def frame(self, kind: bytes, body: bytes) -> None:
        """Take one frame of the description: argument, environment variable, directory, umask, resource limit (number,
        soft, hard), a terminal of so many rows and columns, a file or a prolog (path, a zero byte, content), or that
        there is PMI."""
        if kind == b"A":
            self.argv.append(body)
        elif kind == b"E":
            key, _, value = body.partition(b"=")
            self.environment[key] = value
        elif kind == b"C":
            self.directory = body
        elif kind == b"U":
            self.umask = int(body, 8)
        elif kind == b"L":
            number, soft, hard = body.split()
            self.limits.append((int(number), int(soft), int(hard)))
        elif kind == b"T":
            rows, columns = body.split()
            self.has_terminal, self.window = True, (int(rows), int(columns))
        elif kind == b"F":
            path, _, content = body.partition(b"\0")
            write_script(path, content, self.uid, self.gid)
            self.script = path
        elif kind == b"P":
            path, _, content = body.partition(b"\0")
            self.prologs.append((path, content))
        elif kind == b"J":
            self.has_pmi = True

    def start(self) -> tuple[int, int, int]:
        """Start it. Returns descriptors of its input, output and errors; with a terminal, three times the terminal."""
        make_directory(self.group)
        theirs = self.streams.inherit(self.environment) if self.has_pmi else -1
        self.streams.serve(self.environment)
        try:
            return self._start_with_terminal() if self.has_terminal else self._start_with_pipes()
        finally:
            if theirs >= 0:
                os.close(theirs)

    def _start_with_pipes(self) -> tuple[int, int, int]:
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        self.pid = os.fork()
        if not self.pid:
            self._become(in_r, out_w, err_w)
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        return in_w, out_r, err_r

    def _start_with_terminal(self) -> tuple[int, int, int]:
        ours, theirs = os.openpty()
        os.fchown(theirs, self.uid, -1)
        self.pid = os.fork()
        if not self.pid:
            self._become(theirs, theirs, theirs)
        self.set_window(ours, self.window)
        os.close(theirs)
        return ours, ours, ours

    def set_window(self, terminal: int, window: tuple[int, int]) -> None:
        fcntl.ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", *window, 0, 0))

    def _become(self, *files: int) -> None:
        """In the child: execute the command."""
        try:
            os.setsid()
            if self.has_terminal:
                fcntl.ioctl(files[0], TIOCSCTTY, 0)
            for target, fd in enumerate(files):
                os.dup2(fd, target)
            write_kernel_file(f"{self.group}/cgroup.procs", "0")
            write_kernel_file("/proc/self/oom_score_adj", "0")  # the agent's own protects it from the OOM killer
            for known in signal.valid_signals():  # Python ignores some, and the agent's parent may ignore others
                if signal.getsignal(known) is signal.SIG_IGN:
                    signal.signal(known, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number, soft, hard in self.limits:
                try:
                    resource.setrlimit(number, (soft, hard))
                except (OSError, ValueError):
                    continue  # this kernel allows less
            os.umask(self.umask)
            os.setgroups(os.getgrouplist(self.name, self.gid))
            os.setgid(self.gid)
            os.setuid(self.uid)
            self._change_directory()
            for path, content in self.prologs:
                run_prolog(path, content, self.environment)
            if self.has_pmi:
                os.set_inheritable(int(self.environment[b"PMI_FD"]), True)
            self._execute()
        except BaseException as error:
            os.write(2, f"multiverse: {error}\n".encode())
        os._exit(1)

    def _change_directory(self) -> None:
        try:
            os.chdir(self.directory)
        except OSError as error:  # as slurmstepd does
            shown = os.fsdecode(self.directory)
            os.write(2, f"multiverse: cannot chdir to `{shown}': {error.strerror}: going to /tmp instead\n".encode())
            os.chdir("/tmp")

    def _execute(self) -> None:
        program = self.argv[0]
        directories = self.environment.get(b"PATH", SEARCH_PATH).split(b":")
        paths = [program] if b"/" in program else [(each or b".") + b"/" + program for each in directories]
        failure: OSError = FileNotFoundError(2, "No such file or directory")
        for path in paths:
            try:
                os.execve(path, self.argv, self.environment)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:
                if os.path.lexists(path):  # not if it is a directory of PATH that cannot be searched
                    failure = error
            except OSError as error:
                failure = error
                break
        shown = os.fsdecode(program)
        os.write(2, f"multiverse: execve(): {shown}: {failure.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(failure.errno or 1)  # as slurmstepd does

    def send_signal(self, number: int, *, everyone: bool) -> None:
        """Send a signal to the command, or to all its processes but the first, which got the signal itself."""
        group = read(f"{self.group}/cgroup.procs").split() if everyone else [str(self.pid)]
        for pid in group:
            try:
                if not everyone or int(pid) != self.pid:
                    os.kill(int(pid), number)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        """Kill all that is left of the command, and remove its control group and its file."""
        deadline = time.monotonic() + GONE_TIMEOUT
        while True:
            try:
                write_kernel_file(f"{self.group}/cgroup.kill", "1")
                os.rmdir(self.group)
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
        if self.script:
            try:
                os.unlink(self.script)
            except OSError:
                pass


def write_script(path: bytes, content: bytes, uid: int, gid: int) -> None:
    """Make the file of a batch script, for this user.

    What the host says of a task comes from its user, and this process is root: only a path as slurmd's is taken, below
    directories of root or of that user. Raises GuestAgentError for another one, and OSError.
    """
    shown = os.fsdecode(path)
    if not SCRIPT.fullmatch(path):
        raise GuestAgentError(f"{shown} is no path of a batch script")
    *directories, name = path.split(b"/")
    at = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in directories:
            if each:
                at = _enter(at, each)
            if os.fstat(at).st_uid not in (0, uid):
                raise GuestAgentError(f"{shown} is below a directory of another user")
        try:
            os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            pass
        script = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700, dir_fd=at)
    finally:
        os.close(at)
    try:
        os.fchown(script, uid, gid)
        os.fchmod(script, 0o700)
        done = 0
        while done < len(content):
            done += os.write(script, content[done:])
    finally:
        os.close(script)


def _enter(directory: int, name: bytes) -> int:
    """A descriptor of a directory in that one, which is made if it is absent. That one's descriptor is closed."""
    try:
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            pass
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
