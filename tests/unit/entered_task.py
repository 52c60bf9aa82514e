"""A task without a VM, for tests: the program that enters one, built from its source, and the part of the guest agent
that runs commands. The test is the agent of the host between them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from multiverse.guest.agent import command, requests
from multiverse.guest.agent.tasks import TaskRelay

SOURCES = [Path(__file__).parents[2] / "spank" / name for name in ("mventer.c", "commands.c", "streams.c")]
LIMIT = 60

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def build(factory: pytest.TempPathFactory) -> Path:
    """The program."""
    program = factory.mktemp("mventer") / "mventer"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"]
    subprocess.run(["cc", *flags, "-o", program, *SOURCES], check=True)
    return program


@dataclass
class FakeAgent:
    """Answers one request of mventer, and runs the guest's side of the task in a thread."""

    program: Path
    directory: Path
    token: str = "secret"
    refusal: str = ""
    prolog: str = ""  # the site's TaskProlog
    requests: list[bytes] = field(default_factory=list)
    machine: int = -1  # closing it ends the VM
    relay: threading.Thread | None = None  # the task's own
    relays: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / "sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def commands(self) -> Path:
        """The directory of Slurm's commands."""
        return self.directory / "slurm"

    def _serve(self) -> None:
        while True:
            try:
                asked, _ = self._listener.accept()
            except OSError:
                return
            self._answer(asked)

    def _answer(self, asked: socket.socket) -> None:
        with asked:
            self.requests.append(asked.recv(100))
            if self.refusal:
                asked.sendall(f"error {self.refusal}\n".encode())
                return
            ours, theirs = _connected()
            greeting = {"token": self.token, "name": user(), "uid": os.getuid(), "gid": os.getgid()}
            ours.sendall(json.dumps(greeting).encode() + b"\n")
            relay = threading.Thread(target=_run, args=(theirs,), daemon=True)
            relay.start()
            self.relays.append(relay)
            if self.relay is None:
                self.relay = relay
                self.reading, self.machine = os.pipe()
            reading = os.dup(self.reading)
            told = f"ok {self.commands}" + (f" prolog={self.prolog}" if self.prolog else "")
            socket.send_fds(asked, [told.encode() + b"\n"], [ours.fileno(), reading])
            os.close(reading)
            ours.close()

    def argv(self, *command: str, kind: str = "command") -> list[str]:
        return [str(self.program), str(self.directory / "sock"), "7", "0", kind, *command]

    def run(
        self, *command: str, kind: str = "command", data: bytes = b"", **more: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(*command, kind=kind), input=data, capture_output=True, timeout=LIMIT, check=False,
            cwd=self.directory, env={**os.environ, **more},
        )  # fmt: skip

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.directory,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)

    def close(self) -> None:
        self.stop()
        if self.machine >= 0:
            os.close(self.machine)


def _run(connection: socket.socket) -> None:
    with connection:
        TaskRelay(connection, "secret", [], []).run()


def _connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def agents(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeAgent]]:
    """Makes agents. Control groups and the ids of users are the kernel's business, and need root."""
    monkeypatch.setattr(command, "TASKS", str(tmp_path / "groups"))
    monkeypatch.setattr(command, "write_kernel_file", lambda path, text: None)
    monkeypatch.setattr(requests, "SOCKETS", str(tmp_path / "sockets"))
    monkeypatch.setattr(command, "GONE_TIMEOUT", 0.0)
    monkeypatch.setattr(os, "setgroups", lambda groups: None)
    made: list[FakeAgent] = []

    def make(**more: Any) -> FakeAgent:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(FakeAgent(program, directory, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
        for relay in one.relays:
            relay.join(LIMIT)
