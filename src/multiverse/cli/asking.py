"""Who answers a command that users may use, too: the daemon's API where it is ours, or else what answers users."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.api import JOB_ID, PURPOSE
from multiverse.client import Client, socket_path
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown, Unreachable

PORT = 6821  # the port of `users.listen`, unless the settings say otherwise
TIMEOUT = 30.0  # seconds

Controller = Annotated[
    str,
    typer.Option(
        "--controller", metavar="HOST[:PORT]", envvar="MULTIVERSE_CONTROLLER",
        help="Ask the controller of that machine, with a munge credential.",
    ),
]  # fmt: skip


def asker(controller: str = "") -> Client | UsersClient:
    """The API of this machine's daemon if we may use it, or what answers users, here or at the `controller`
    (HOST[:PORT])."""
    if controller:
        host, port = _address(controller)
        return UsersClient(host=host, port=port)
    users = Path(os.environ.get("MULTIVERSE_USERS_SOCKET") or socket_path().with_name("users.sock"))
    if os.access(socket_path(), os.W_OK) or not users.exists():
        return Client()
    return UsersClient(users)


def _address(text: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, [IPv6], [IPv6]:PORT or an IPv6 address."""
    found = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?|([0-9A-Fa-f:.]+)", text)
    if not found:
        raise Refused(f"{text!r} is no address of a controller", hint="as HOST or HOST:PORT")
    return found[1] or found[3] or found[5], int(found[2] or found[4] or PORT)


class UsersClient:
    """Asks what answers users: by a Unix socket, where the kernel tells who asks, or by TCP with a munge credential.
    Its methods return what those of `client.Client` do."""

    def __init__(self, path: Path | None = None, host: str = "", port: int = PORT) -> None:
        self._path, self._host, self._port = path, host, port

    def __enter__(self) -> UsersClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Each question has a connection of its own."""

    def explain(self, job: str) -> Any:
        return self._ask(ask="explain", job=job)

    def timeline(self, job: str) -> Any:
        return self._ask(ask="timeline", job=job)

    def capacity(self) -> Any:
        return self._ask(ask="capacity")

    def images(self) -> Any:
        return self._ask(ask="images")

    def trial(self, **request: Any) -> Any:
        return self._ask(ask="trial", request=request)

    def saved(self) -> Any:
        return self._ask(ask="saved")

    def save(self, job: str, *, hold: bool = False) -> None:
        self._ask(ask="save", job=job, hold=hold)

    def checkpoint(self, job: str, *, shared_files: bool = False) -> None:
        self._ask(ask="checkpoint", job=job, shared_files=shared_files)

    def resume(self, job: str, *, anew: bool = False) -> None:
        self._ask(ask="resume", job=job, anew=anew)

    def _ask(self, **question: Any) -> Any:
        if "job" in question and not re.fullmatch(JOB_ID, question["job"]):
            raise Refused(f"{question['job']!r} is no id of a job", hint="see: squeue --me; ids are like 123 or 123_4")
        if self._path is None:
            line = json.dumps({"credential": _credential(json.dumps({**question, "purpose": PURPOSE}))})
        else:
            line = json.dumps(question)
        where = self._path or f"{self._host} port {self._port}"
        try:
            answer = json.loads(self._exchange(line.encode() + b"\n") or "null")
        except OSError as error:
            raise Unreachable(
                f"no controller answers at {where}: {error.strerror or error}",
                hint="ask the operators whether it runs, and whether it answers users (users in its settings)",
            ) from error
        except ValueError as error:
            raise Unknown("the controller's answer makes no sense", hint="see: multiverse --help") from error
        if answer is None:
            raise Unknown("the controller did not answer", hint="it has too much to do: try again later")
        if isinstance(answer, dict) and "error" in answer:
            kind = {403: Refused, 404: Gone, 503: Unknown}.get(answer.get("status", 0), MultiverseError)
            raise kind(str(answer["error"]), hint=str(answer.get("hint") or "see: squeue --me"))
        return answer

    def _exchange(self, line: bytes) -> bytes:
        """Send a line, and return what comes back until the end."""
        if self._path is None:
            sock = socket.create_connection((self._host, self._port), TIMEOUT)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(TIMEOUT)
        with closing(sock):
            if self._path is not None:
                sock.connect(str(self._path))
            sock.sendall(line)
            return b"".join(iter(lambda: sock.recv(65536), b""))


def _credential(payload: str) -> str:
    """A credential that only root can decode, and that carries the payload."""
    where = os.environ.get("MULTIVERSE_MUNGE_SOCKET")
    try:
        done = subprocess.run(
            ["munge", "--restrict-uid=0", *([f"--socket={where}"] if where else [])],
            input=payload, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Refused("there is no munge on this machine", hint="ask on a login node of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise Unknown("munged does not answer", hint="ask the operators of this machine") from error
    if done.returncode:
        raise Refused(
            f"munge: {done.stderr.strip()[:200]}", hint="ask the operators of this machine whether munged runs"
        )
    return done.stdout.strip()
