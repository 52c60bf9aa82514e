"""The prologs of a task: programs that run before its command and say by their output what its environment is to be."""

# ruff: noqa: PTH123

from __future__ import annotations

import os
import signal

LONGEST_OUTPUT = 1 << 20  # bytes of a prolog's output that are taken


def run_prolog(path: bytes, content: bytes, environment: dict[bytes, bytes]) -> None:
    """Run one, as this process's user, and do what its output says. As in slurmstepd, its exit status means nothing.

    `content` is what the host has at `path`. Where the guest has the same file, that one runs, so that the program
    finds what lies beside it; otherwise a copy in memory does.
    """
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
    try:
        os.killpg(pid, signal.SIGKILL)  # as slurmstepd does
    except (ProcessLookupError, PermissionError):
        pass
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
    """Do what the lines of a prolog say: `export NAME=VALUE` and `unset NAME`; `print TEXT` is the task's output, which
    is returned. Other lines mean nothing (TaskProlog in slurm.conf(5))."""
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
