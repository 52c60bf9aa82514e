"""A task from end to end without a VM: the program that enters one, built from its source, and the part of the guest
agent that runs commands. The test is the agent of the host between them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiverse.guest.agent import command, tasks
from multiverse.guest.agent.system import GuestAgentError
from tests.unit.entered_task import LIMIT, NEEDS_COMPILER, FakeAgent, agents, build, user

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def mventer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


@pytest.fixture
def agent(mventer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeAgent]]:
    yield from agents(mventer, tmp_path, monkeypatch)


def test_a_command_has_its_arguments_directory_and_environment_and_its_exit_code_comes_back(
    agent: Callable[..., FakeAgent],
) -> None:
    one = agent()
    done = one.run("sh", "-c", 'echo "$PWD|$COLOUR|$0|$1"; echo oops >&2; exit 3', "", "two words\n", COLOUR="blue sky")
    assert done.returncode == 3
    assert done.stdout.decode() == f"{one.directory}|blue sky||two words\n\n"
    assert done.stderr == b"oops\n"
    assert one.requests == [b"enter job=7 vm=0\n"]


def test_limits_that_srun_propagates_hold_in_the_guest_and_their_variables_are_gone(
    agent: Callable[..., FakeAgent],
) -> None:
    one, above = agent(), str(resource.getrlimit(resource.RLIMIT_NOFILE)[1] + 1)
    shown = ("sh", "-c", "ulimit -Sn; ulimit -c; env | grep RLIMIT")
    done = one.run(*shown, SLURM_RLIMIT_NOFILE="64", SLURM_RLIMIT_CORE="U0")
    assert done.stdout == b"64\n0\n" and not done.stderr
    done = one.run(*shown, SLURM_RLIMIT_NOFILE=f"U{above}", SLURM_RLIMIT_CORE="nonsense")
    assert b"cannot propagate RLIMIT_NOFILE" in done.stderr and b"RLIMIT" not in done.stdout


def test_a_task_is_told_that_the_guest_ran_out_of_memory(
    agent: Callable[..., FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = iter((4, 4, 4, 5))
    monkeypatch.setattr(tasks, "_killed_for_memory", lambda: next(killed))
    one = agent()
    assert b"out of memory" not in one.run("true").stderr
    done = one.run("sh", "-c", "exit 3")
    assert done.returncode == 3 and b"the VM of this job ran out of memory" in done.stderr


def test_input_and_output_of_any_length_are_carried_whole(agent: Callable[..., FakeAgent]) -> None:
    data = os.urandom(3_000_001)
    assert agent().run("cat", data=data).stdout == data


def test_a_command_that_reads_no_input_gets_signals_all_the_same(agent: Callable[..., FakeAgent]) -> None:
    started = agent().start("sh", "-c", "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.05; done")
    assert started.stdout is not None and started.stdin is not None
    assert started.stdout.readline() == b"ready\n"
    os.set_blocking(started.stdin.fileno(), False)
    written = 0
    while (count := started.stdin.raw.write(bytes(65536))) is not None:  # type: ignore[attr-defined]
        written += count
    started.send_signal(signal.SIGUSR1)
    assert started.wait(LIMIT) == 5 and started.stdout.read() == b"got\n"
    assert written < 10_000_000, "the guest takes no more than it has room for"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM])
def test_a_task_ends_by_the_signal_that_ended_its_command(agent: Callable[..., FakeAgent], number: int) -> None:
    assert agent().run("sh", "-c", f"kill -{number} $$").returncode == -number


def test_a_command_ignores_no_signal(agent: Callable[..., FakeAgent]) -> None:
    done = agent().run("grep", "SigIgn", "/proc/self/status")
    reserved = 0b11 << 31  # signals 32 and 33 belong to the C library, and no program can change what they do
    assert int(done.stdout.split()[1], 16) & ~reserved == 0, "Python's own ignores some"


def test_a_command_that_does_not_exist_ends_as_slurm_ends_one(agent: Callable[..., FakeAgent]) -> None:
    done = agent().run("no-such-program")
    assert done.returncode == 2 and done.stderr == b"multiverse: execve(): no-such-program: No such file or directory\n"


ANSWERS = """
import os, socket
stream = socket.socket(fileno=int(os.environ["PMI_FD"]))
asked = b""
while len(asked) < 1_000_000:
    asked += stream.recv(65536)
stream.sendall(asked[::-1])
print("told", len(stream.recv(10)))
"""


def test_the_stream_of_pmi_is_carried_in_both_directions_up_to_its_ends(agent: Callable[..., FakeAgent]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv, given = agent().argv("python3", "-c", ANSWERS), {**os.environ, "PMI_FD": str(theirs.fileno())}
        started = subprocess.Popen(argv, env=given, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()])
        theirs.close()
        data = os.urandom(1_000_000)
        ours.settimeout(LIMIT)
        ours.sendall(data)
        answered = b""
        while len(answered) < len(data):
            answered += ours.recv(65536)
        assert answered == data[::-1]
        ours.shutdown(socket.SHUT_WR)
        assert started.communicate(timeout=LIMIT)[0] == b"told 0\n"
        assert ours.recv(1) == b"", "it ends with the task"


CONNECTS = """
import os, socket
address, _, port = os.environ["PMIX_SERVER_URI2"].rpartition("/")[2].partition(":")
for number in range(3):
    with socket.create_connection((address, int(port))) as stream:
        stream.sendall(b"%d" % number * 100_000)
        print(len(stream.makefile("rb").read()), flush=True)
print(os.environ["PMIX_GDS_MODULE"])
"""


def test_connections_to_the_port_of_pmix_reach_the_hosts_server(agent: Callable[..., FakeAgent]) -> None:
    got: list[bytes] = []

    def serve(server: socket.socket) -> None:
        for _ in range(3):
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                got.append(stream.read(100_000))
                connection.sendall(bytes(200_000 + len(got)))

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve, args=(server,), daemon=True)
        serving.start()
        uri = f"slurm.pmix.7.0.1;tcp4://127.0.0.1:{server.getsockname()[1]}"
        done = agent().run("python3", "-c", CONNECTS, PMIX_SERVER_URI2=uri, PMIX_GDS_MODULE="ds21,ds12,hash")
        serving.join(LIMIT)
    assert got == [b"%d" % number * 100_000 for number in range(3)]
    assert done.stdout.split() == [b"200001", b"200002", b"200003", b"hash"], done.stderr


def test_a_variable_of_pmi_without_a_stream_means_nothing(agent: Callable[..., FakeAgent]) -> None:
    one = agent()
    for number in range(3, 10):  # among these are the descriptors of the connections that mventer makes
        done = one.run("sh", "-c", 'echo "$PMI_FD"', PMI_FD=str(number))
        assert (done.stdout, done.returncode) == (b"%d\n" % number, 0), done.stderr


def test_a_batch_script_is_copied_to_its_path_and_removed(agent: Callable[..., FakeAgent], tmp_path: Path) -> None:
    script = tmp_path / "spool" / "job00007" / "slurm_script"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\necho $0 $1\n")
    script.chmod(0o700)
    done = agent().run(str(script), "word", kind="script")
    assert done.stdout.decode() == f"{script} word\n"
    assert not script.exists(), "here the guest's file is the host's"


def test_a_user_who_describes_a_task_has_no_other_file_written_or_removed_by_root(tmp_path: Path) -> None:
    """Who has the connection to the guest can send any frame."""
    kept, link = tmp_path / "passwd", tmp_path / "job1" / "slurm_script"
    kept.write_text("kept")
    link.parent.mkdir()
    for path in (kept, tmp_path / "new" / "x.conf", tmp_path / "job1" / ".." / "passwd", tmp_path / "job1" / "x"):
        told = command.TaskCommand(user(), os.getuid(), os.getgid())
        with pytest.raises(GuestAgentError, match="no path of a batch script"):
            told.frame(b"F", os.fsencode(path) + b"\0mine")
        told.end()
    link.symlink_to(kept)
    told.frame(b"F", os.fsencode(link) + b"\0mine")
    assert link.read_text() == "mine" and not link.is_symlink()
    assert kept.read_text() == "kept" and {path.name for path in tmp_path.iterdir()} == {"passwd", "job1"}


def test_nothing_is_made_for_a_user_below_a_directory_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    own, seen = theirs.stat().st_ino, os.fstat

    def fstat(fd: int) -> object:
        found = seen(fd)
        return SimpleNamespace(st_uid=4711) if found.st_ino == own else found

    monkeypatch.setattr(os, "fstat", fstat)
    told = command.TaskCommand(user(), os.getuid(), os.getgid())
    with pytest.raises(GuestAgentError, match="another user"):
        told.frame(b"F", os.fsencode(theirs / "a" / "job1" / "slurm_script") + b"\0mine")
    assert not list(theirs.iterdir())


def test_a_batch_script_that_cannot_be_read_whole_does_not_run(agent: Callable[..., FakeAgent], tmp_path: Path) -> None:
    script = tmp_path / "job00007" / "slurm_script"
    script.mkdir(parents=True)  # it can be opened, and reading fails
    done = agent().run(str(script), kind="script")
    assert done.returncode == 1 and b"cannot read the batch script" in done.stderr


def test_killing_the_task_ends_the_connection_and_the_relay(agent: Callable[..., FakeAgent]) -> None:
    one = agent()
    started = one.start("sh", "-c", "echo $$; exec sleep 1000")
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    handle = os.pidfd_open(pid)
    started.kill()
    started.wait(LIMIT)
    os.kill(pid, signal.SIGKILL)  # what the control group does in a guest
    os.close(handle)
    assert one.relay is not None
    one.relay.join(LIMIT)
    assert not one.relay.is_alive()


def test_a_vm_that_ends_fails_its_tasks(agent: Callable[..., FakeAgent]) -> None:
    one = agent()
    started = subprocess.Popen(
        one.argv("sleep", "3"), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LIMIT
    while one.machine < 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.close(one.machine)
    one.machine = -1
    assert started.wait(LIMIT) == 1
    assert started.stderr is not None and b"the VM of this job has ended" in started.stderr.read()


def test_who_does_not_know_the_token_runs_nothing(agent: Callable[..., FakeAgent]) -> None:
    done = agent(token="guess").run("echo", "hello")
    assert done.returncode == 1 and not done.stdout and b"connection" in done.stderr


def test_connections_without_the_token_have_no_processes_and_a_failing_fork_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forked = []

    def fork() -> int:
        forked.append(1)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tasks, "TASKS_PORT", 0)
    monkeypatch.setattr(os, "fork", fork)
    listener = tasks.TaskListener([], [])
    listener.token = "secret"
    for greeting, expected in ((b'{"token": "guess"}\n', 0), (b'{"token": "secret"', 0), (b'{"token": "secret"}\n', 1)):
        with socket.create_connection(listener.sock.getsockname()) as host:
            host.sendall(greeting)
            assert select.select([listener.sock], [], [], LIMIT)[0]
            listener.accept()
            assert len(forked) == expected
            host.settimeout(LIMIT)
            with contextlib.suppress(ConnectionResetError):
                assert not host.recv(1), "the connection is closed"
    listener.sock.close()


def test_the_agents_refusal_is_shown(agent: Callable[..., FakeAgent]) -> None:
    done = agent(refusal="job 7 has no VM of yours on this host").run("true")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"multiverse: this task cannot enter its VM: job 7 has no VM of yours on this host\n"


def test_a_terminal_here_is_a_terminal_there_of_the_same_size(agent: Callable[..., FakeAgent]) -> None:
    one = agent()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))  # a terminal without a size is one, too
    command = 'test -t 0 && stty size; stty rows 11 cols 22; stty size; read word; echo "<$word>"; exit 4'
    started = subprocess.Popen(one.argv("sh", "-c", command), stdin=theirs, stdout=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    sent = False
    while True:
        try:
            data = os.read(ours, 1000)
        except OSError:  # the last process has closed it
            break
        if not data:
            break
        said += data
        if not sent and b"11 22" in said:
            os.write(ours, b"hello\r")
            sent = True
    assert started.wait(LIMIT) == 4
    assert said.split() == [b"0", b"0", b"11", b"22", b"hello", b"<hello>"]
