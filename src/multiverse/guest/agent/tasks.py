"""The tasks of a job whose VM is inside its allocation: for each task the host connects and describes the command.

A connection begins with a line of JSON from the agent of the host: the token of this VM, and the user. Frames follow: a
type of one byte, the length of the body in four bytes (most significant first), and the body, at most LONGEST_FRAME
bytes. Types of frames from the host: the description of the command (`TaskCommand.frame`) up to X, which starts it;
then I input, Z the end of the input, S a signal (a byte with its number, and `1` for the command alone or `a` for its
other processes), W rows and columns of the terminal. Types to the host: O output, D errors, K room for that many more
bytes of input, M why the command could not be started, and last Q its wait status. V names a request for one of Slurm's
commands (`requests`): the host makes a connection that begins with the same V, or answers N. J is in both directions:
the number of a stream of PMI (`PmiStreams`) and its bytes; a number alone ends the stream.

Each task has a process of its own, forked from the agent. It ends with the connection, and the command ends with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import time

from multiverse.guest.agent.command import TaskCommand
from multiverse.guest.agent.requests import CommandRequests, JobVms, hand_over, prepare_mpi, remove_files
from multiverse.guest.agent.system import LONGEST_FRAME, TASKS_PORT, GuestAgentError, read, suppress, sync_file_system

DESCRIPTION_TIMEOUT = 30.0  # seconds for the host to describe the command
OUTPUT_TIMEOUT = 5.0  # seconds for the output to end after its last process was killed
LINGER = 20.0  # seconds for the host to close its end after the last frame
ROOM = 1 << 16  # bytes of output that are read before the host has taken earlier ones
CHUNK = 1 << 14
ACCEPTED_AT_ONCE = 64  # connections, before other messages of the host are answered


class TaskListener:
    """Where the host connects. `token` must be set before the first connection is accepted."""

    def __init__(self, mounts: list[str], vms: JobVms) -> None:
        self.mounts, self.vms = mounts, vms
        self.token = ""
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 30)  # seconds: for a greeting
        self.sock.bind(("", TASKS_PORT))
        self.sock.listen(128)
        self.sock.setblocking(False)

    def accept(self) -> None:
        """Start a process for each connection that has come from the agent of the host. Never blocks. Any process of
        the host can connect. One without the token gets no process here, because their number would have no limit: this
        process must not fail, because the VM ends with it."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self.sock.accept()
            except OSError:
                return
            with connection:
                try:
                    if self._is_greeted(connection) and not os.fork():
                        self._serve(connection)
                except OSError as error:  # as for want of memory
                    os.write(2, f"task: {error}\n".encode())

    def _is_greeted(self, connection: socket.socket) -> bool:
        """Whether a greeting with the token has come. `TaskRelay` reads it."""
        try:
            line, end, _ = connection.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT).partition(b"\n")
        except OSError:
            return False
        return bool(end and self.token) and self.token.encode() in line

    def _serve(self, connection: socket.socket) -> None:
        """In the child: run one task, and end."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGIO, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            kept = connection.fileno()
            os.closerange(3, kept)
            os.closerange(kept + 1, 1024)  # the agent has some ten descriptors
            TaskRelay(connection, self.token, self.mounts, self.vms).run()
        except BaseException as error:
            os.write(2, f"task: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)


class TaskRelay:
    """Carries one task. `mounts` are written back before the task ends. `vms` are the job's VMs."""

    def __init__(self, connection: socket.socket, token: str, mounts: list[str], vms: JobVms) -> None:
        self._connection, self._token, self._mounts, self._vms = connection, token, mounts, vms
        self._received = bytearray()
        self._unsent = bytearray()
        self._input = bytearray()
        self._input_ended = False
        self._host_gone = False
        self._command = TaskCommand("", 0, 0)
        self._files: dict[int, bytes] = {}  # the type of frame for each descriptor of output
        self._stdin = -1
        self._requests: CommandRequests | None = None
        self._mpi: list[str] = []  # files for launchers of MPI

    def run(self) -> None:
        self._connection.settimeout(DESCRIPTION_TIMEOUT)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._greeted():
            return
        try:
            if request := self._describe():
                hand_over(request, self._connection)
                return
            killed = _killed_for_memory()
            self._start()
            status = self._carry()
        except (OSError, ValueError, GuestAgentError) as error:
            self._command.end()
            self._frame(b"M", f"in the VM of this job: {error}".encode())
            self._flush()
            return
        finally:
            remove_files(self._mpi)
            self._command.streams.close()
            if self._requests is not None:
                self._requests.close()
        for mount in self._mounts:
            with suppress(OSError):
                sync_file_system(mount)
        if _killed_for_memory() > killed:
            self._tell_of_memory()
        self._frame(b"Q", struct.pack(">I", status))
        self._flush()

    def _greeted(self) -> bool:
        """Read the user, and check the token of the host's agent."""
        line = self._line()
        try:
            who = json.loads(line)
            if not self._token or who["token"] != self._token:
                return False
            self._command = TaskCommand(who["name"], int(who["uid"]), int(who["gid"]))
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _line(self) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            data = self._connection.recv(4096)
            if not data or len(self._received) > 4096:
                return b""
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _describe(self) -> bytes:
        """Read the description of the command. If the connection is for a request, returns the name of the request."""
        while True:
            while frame := self._next_frame():
                if frame[0] == b"X":
                    return b""
                if frame[0] == b"V":
                    return frame[1]
                self._command.frame(*frame)
            data = self._connection.recv(65536)
            if not data:
                raise GuestAgentError("the host has closed the connection")
            self._received += data

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        """Type and body of the next frame, if it has come whole."""
        if len(self._received) < 5:
            return None
        (length,) = struct.unpack_from(">I", self._received, 1)
        if length > LONGEST_FRAME:
            raise GuestAgentError("a frame of the host is too long")
        if len(self._received) < 5 + length:
            return None
        kind, body = bytes(self._received[:1]), bytes(self._received[5 : 5 + length])
        del self._received[: 5 + length]
        return kind, body

    def _start(self) -> None:
        if not self._command.argv:
            raise GuestAgentError("the task has no command")
        self._requests = CommandRequests(self._command.uid)  # before the command can ask for something
        self._mpi = prepare_mpi(self._command.environment, self._vms)
        self._stdin, out, err = self._command.start()
        self._files = {out: b"O"} if out == err else {out: b"O", err: b"D"}
        for fd in {self._stdin, out, err}:
            os.set_blocking(fd, False)
        self._connection.setblocking(False)

    def _carry(self) -> int:
        """Carry input, output and signals until the command and its output have ended. Returns the wait status."""
        process = os.pidfd_open(self._command.pid)
        status, deadline = -1, 0.0
        while status < 0 or (self._files and not self._host_gone and time.monotonic() < deadline):
            self._wait(process if status < 0 else -1)
            self._receive()
            self._write_input()
            self._read_output()
            if self._requests is not None:
                self._requests.attend()
                for name in self._requests.outgoing:
                    self._frame(b"V", name)
                self._requests.outgoing.clear()
            if len(self._unsent) < ROOM:
                self._pass_streams()
            self._send()
            if self._host_gone:
                self._command.end()
            if status < 0:
                pid, found = os.waitpid(self._command.pid, os.WNOHANG)
                if pid:
                    status, deadline = found, time.monotonic() + OUTPUT_TIMEOUT
                    self._command.end()  # as Slurm ends the rest of a step
        while self._pass_streams():  # the last bytes of the command
            pass
        return status

    def _wait(self, process: int) -> None:
        wanted = {self._connection.fileno(): select.POLLIN | (select.POLLOUT if self._unsent else 0)}
        if self._host_gone:
            wanted = {}
        if process >= 0:
            wanted[process] = select.POLLIN
        if self._input and self._stdin >= 0:
            wanted[self._stdin] = select.POLLOUT
        if len(self._unsent) < ROOM:
            if process >= 0:
                wanted |= self._command.streams.watched
            for fd in self._files:
                wanted[fd] = wanted.get(fd, 0) | select.POLLIN
        if self._requests is not None and process >= 0 and not self._host_gone:
            wanted |= dict.fromkeys(self._requests.watched, select.POLLIN)
        poller = select.poll()
        for fd, events in wanted.items():
            poller.register(fd, events)
        poller.poll(1000)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(65536)
            self._host_gone = not data
            self._received += data
        except BlockingIOError:
            pass  # there may be frames that came with the description
        except OSError:
            self._host_gone = True
        while frame := self._next_frame():
            self._take(*frame)

    def _take(self, kind: bytes, body: bytes) -> None:
        command = self._command
        if kind == b"I":
            self._input += body
        elif kind == b"Z":
            self._input_ended = True
        elif kind == b"S":
            # Stopping by the terminal's signal does nothing to processes without a shell above them.
            number = signal.SIGSTOP if body[0] == signal.SIGTSTP else body[0]
            with suppress(OSError):
                command.send_signal(number, everyone=body[1:2] == b"a")
        elif kind == b"N" and self._requests is not None:
            self._requests.refuse(body)
        elif kind == b"J":
            command.streams.take(body)
        elif kind == b"W" and command.has_terminal:
            rows, columns = body.split()
            for fd in self._files:
                command.set_window(fd, (int(rows), int(columns)))

    def _pass_streams(self) -> bool:
        frames = self._command.streams.carry()
        for frame in frames:
            self._frame(b"J", frame)
        return bool(frames)

    def _write_input(self) -> None:
        if self._stdin < 0:
            self._grant(len(self._input))
            self._input.clear()
            return
        if self._input:
            try:
                done = os.write(self._stdin, self._input[:CHUNK])
            except BlockingIOError:
                return
            except OSError:
                done = len(self._input)  # the command does not read it
            del self._input[:done]
            self._grant(done)
        if self._input_ended and not self._input:
            if not self._command.has_terminal:
                os.close(self._stdin)
            self._stdin, self._input_ended = -1, False

    def _grant(self, count: int) -> None:
        if count:
            self._frame(b"K", struct.pack(">I", count))

    def _read_output(self) -> None:
        if len(self._unsent) >= ROOM:
            return
        for fd, kind in list(self._files.items()):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            except OSError:
                data = b""  # the last process has closed the terminal
            if data:
                self._frame(kind, data)
            else:
                del self._files[fd]

    def _frame(self, kind: bytes, body: bytes) -> None:
        self._unsent += kind + struct.pack(">I", len(body)) + body

    def _send(self) -> None:
        try:
            while self._unsent and not self._host_gone:
                del self._unsent[: self._connection.send(self._unsent[:65536])]
        except BlockingIOError:
            return
        except OSError:
            self._host_gone = True

    def _flush(self) -> None:
        """Send all that is left, however long the host takes to read it."""
        with suppress(OSError):
            self._connection.settimeout(None)
            self._connection.sendall(self._unsent)
            self._connection.shutdown(socket.SHUT_WR)
            # Until the host closes its end: with unread input here, the last frames could be lost on their way.
            self._connection.settimeout(LINGER)
            while self._connection.recv(65536):
                pass

    def _tell_of_memory(self) -> None:
        """Tell the user that processes were killed: Slurm sees only the job's control groups on the host."""
        total = read("/proc/meminfo").split()[1]
        end = b"\r\n" if self._command.has_terminal else b"\n"
        told = f"multiverse: the VM of this job ran out of memory ({int(total) >> 10} MiB), and processes were killed"
        self._frame(b"D", told.encode() + b"; submit the job with more --mem or --memory-per-vm" + end)


def _killed_for_memory() -> int:
    """The number of processes of this guest that the kernel has killed because no memory was left."""
    for line in read("/proc/vmstat").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0
