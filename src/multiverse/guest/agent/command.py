"""The command of a task: a user's process in a control group of its own, its prologs, and its streams of PMI."""

# ruff: noqa: PTH106, PTH108, PTH123

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import signal
import socket
import struct
import time

from multiverse.guest.agent.system import CGROUPS, GuestAgentError, make_directory, read, suppress, write_kernel_file

LONGEST_OUTPUT = 1 << 20  # bytes of a prolog's output that are taken


def run_prolog(path: bytes, content: bytes, environment: dict[bytes, bytes]) -> None:
    """Run a prolog of a task as this process's user, and obey its output. As in slurmstepd, its exit status means
    nothing. `content` is the host's file at `path`. If the guest has the same file, that one runs, so that the program
    finds its neighbours; otherwise a copy in memory runs."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if not pid:
        _become(path, content, environment, writing)
    os.close(writing)
    output = bytearray()
    while data := os.read(reading, 65536):
        output += data[: LONGEST_OUTPUT - len(output)]
    os.close(reading)
    os.waitpid(pid, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # as slurmstepd does
    os.write(1, apply_output(bytes(output), environment))


def _become(path: bytes, content: bytes, environment: dict[bytes, bytes], output: int) -> None:
    try:
        os.setpgid(0, 0)
        null = os.open("/dev/null", os.O_RDWR)
        for target, fd in enumerate((null, output, null)):
            os.dup2(fd, target)
        program = path
        if not _has(path, content):
            copy = os.memfd_create("prolog", 0)
            with open(copy, "wb", closefd=False) as file:
                file.write(content)
            # An open description for writing would make the program busy; one for reading is for its interpreter.
            program = b"/proc/self/fd/%d" % os.open(f"/proc/self/fd/{copy}", os.O_RDONLY)
            os.set_inheritable(int(program.rpartition(b"/")[2]), True)
            os.close(copy)
        os.execve(program, [path], environment)
    except BaseException:
        os._exit(127)


def _has(path: bytes, content: bytes) -> bool:
    """Whether this guest can run the file, and it is the host's."""
    try:
        with open(path, "rb") as file:
            return os.access(path, os.X_OK) and file.read(len(content) + 1) == content
    except OSError:
        return False


def apply_output(output: bytes, environment: dict[bytes, bytes]) -> bytes:
    """Obey the lines of a prolog: `export NAME=VALUE` and `unset NAME`. Returns the task's output, from lines `print
    TEXT`. Other lines mean nothing (TaskProlog in slurm.conf(5))."""
    printed = b""
    for line in output.split(b"\n"):
        word, _, rest = line.partition(b" ")
        rest = rest.lstrip()
        if word == b"print":
            printed += rest + b"\n"
        elif word == b"export" and b"=" in rest:
            name, _, value = rest.partition(b"=")
            environment[name.rstrip()] = value
        elif word == b"unset":
            environment.pop(rest.rstrip(), None)
    return printed


LARGEST_READ = 1 << 13
MOST_STREAMS = 64  # STREAMS in spank/streams.c; further connections wait
INHERITED = 0  # the number of the stream of PMI-2
PMIX_SERVER = re.compile(rb"(tcp4://127\.0\.0\.1:)[0-9]+")


class PmiStream:
    """This process's end of a stream. `fd` is -1 once it is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.host_ended = False
        self._waiting = bytearray()  # for the command
        os.set_blocking(fd, False)

    @property
    def events(self) -> int:
        """The events that poll(2) should watch for."""
        return select.POLLIN | (select.POLLOUT if self._waiting else 0)

    def take(self, data: bytes) -> None:
        """Pass on bytes of the host; none are its end."""
        self._waiting += data
        self.host_ended = self.host_ended or not data

    def carry(self) -> bytes:
        """Write what can be written. Returns bytes of the command. Closes at the end of either side. Never blocks."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self.fd, self._waiting[:LARGEST_READ])]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting.clear()  # nobody reads it
        try:
            data = os.read(self.fd, LARGEST_READ)
        except BlockingIOError:
            data = b""
            if self.host_ended and not self._waiting:
                self.close()
        except OSError:
            data = b""
            self.close()
        else:
            if not data:
                self.close()
        return data

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class PmiStreams:
    """The streams on which Slurm serves PMI to a task: the host has one end of each, and the task's command the other.

    With `srun --mpi=pmi2` the command inherits a stream. With `srun --mpi=pmix` each process of MPI connects to a port
    of the host's loopback interface; for the command it is a port of this guest, where this process accepts the
    connections. Frames begin with the number of their stream. A number is free for another stream when both sides have
    ended the old one.
    """

    def __init__(self) -> None:
        self._streams: dict[int, PmiStream] = {}
        self._server: socket.socket | None = None

    def inherit(self, environment: dict[bytes, bytes]) -> int:
        """Make the stream of PMI-2. Returns the descriptor for the command to inherit."""
        ours, theirs = (end.detach() for end in socket.socketpair())
        self._streams[INHERITED] = PmiStream(ours)
        environment[b"PMI_FD"] = b"%d" % theirs
        return theirs

    def serve(self, environment: dict[bytes, bytes]) -> None:
        """Accept the connections of PMIx if the environment says where the host serves it."""
        servers = [name for name in environment if name.startswith(b"PMIX_SERVER_URI")]
        if not any(PMIX_SERVER.search(environment[name]) for name in servers):
            return
        self._server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(MOST_STREAMS)
        self._server.setblocking(False)
        port = b"%d" % self._server.getsockname()[1]
        for name in servers:
            environment[name] = PMIX_SERVER.sub(lambda found: found[1] + port, environment[name])
        # The other modules for data share files with the host, and say that they find none.
        environment[b"PMIX_GDS_MODULE"] = b"hash"
        environment.setdefault(b"PMIX_MCA_gds", b"hash")

    @property
    def watched(self) -> dict[int, int]:
        """The descriptors that poll(2) should watch, with their events."""
        found = {stream.fd: stream.events for stream in self._streams.values() if stream.fd >= 0}
        if self._server is not None and len(self._streams) < MOST_STREAMS:
            found[self._server.fileno()] = select.POLLIN
        return found

    def take(self, frame: bytes) -> None:
        if (stream := self._streams.get(frame[0])) is not None:
            stream.take(frame[1:])

    def carry(self) -> list[bytes]:
        """Accept connections, and write what can be written. Returns the frames for the host."""
        frames = []
        while self._server is not None and len(self._streams) < MOST_STREAMS:
            try:
                connection, _ = self._server.accept()
            except OSError:
                break
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            free = next(number for number in range(INHERITED + 1, MOST_STREAMS + 1) if number not in self._streams)
            self._streams[free] = PmiStream(connection.detach())
        for number, stream in list(self._streams.items()):
            if stream.fd >= 0:
                if data := stream.carry():
                    frames.append(bytes((number,)) + data)
                if stream.fd < 0:
                    frames.append(bytes((number,)))
            if stream.fd < 0 and stream.host_ended:
                del self._streams[number]
        return frames

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        if self._server is not None:
            self._server.close()


TASKS = f"{CGROUPS}/multiverse-tasks"
TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414  # <asm-generic/ioctls.h>
SEARCH_PATH = b"/usr/local/bin:/usr/bin:/bin"  # if the environment has no PATH
SCRIPT = re.compile(rb"/(?:.*/)?job[0-9]+/slurm_script", re.DOTALL)  # where slurmd has a batch script
GONE_TIMEOUT = 5.0  # seconds for the kernel to take the last process of a task out of its control group


class TaskCommand:
    """The command of a task, as frames of the host describe it."""

    def __init__(self, name: str, uid: int, gid: int) -> None:
        self.name, self.uid, self.gid = name, uid, gid  # of the user
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
        if kind == b"A":  # argument
            self.argv.append(body)
        elif kind == b"E":  # environment variable
            key, _, value = body.partition(b"=")
            self.environment[key] = value
        elif kind == b"C":  # directory
            self.directory = body
        elif kind == b"U":  # umask
            self.umask = int(body, 8)
        elif kind == b"L":  # resource limit: number, soft, hard
            number, soft, hard = body.split()
            self.limits.append((int(number), int(soft), int(hard)))
        elif kind == b"T":  # terminal of so many rows and columns
            rows, columns = body.split()
            self.has_terminal, self.window = True, (int(rows), int(columns))
        elif kind == b"F":  # file: path, a zero byte, content
            path, _, content = body.partition(b"\0")
            write_script(path, content, self.uid, self.gid)
            self.script = path
        elif kind == b"P":  # prolog: path, a zero byte, content
            path, _, content = body.partition(b"\0")
            self.prologs.append((path, content))
        elif kind == b"J":  # PMI-2
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
                with suppress(OSError, ValueError):  # this kernel allows less
                    resource.setrlimit(number, (soft, hard))
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
            with suppress(ProcessLookupError):
                if not everyone or int(pid) != self.pid:
                    os.kill(int(pid), number)

    def end(self) -> None:
        """Kill the processes that are left of the command, and remove its control group and its file."""
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
            with suppress(OSError):
                os.unlink(self.script)


def write_script(path: bytes, content: bytes, uid: int, gid: int) -> None:
    """Make the file of a batch script, for this user. The user determines what the host says of a task, and this
    process is root: only a path like slurmd's is accepted, below directories of root or of that user. Raises
    GuestAgentError, and OSError."""
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
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
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
    """Open a subdirectory, which is made if it is absent. The descriptor of `directory` is closed."""
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=directory)
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
