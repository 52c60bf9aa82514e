"""What the daemon and the agent do alike as they start, and the count of the processes that they start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import uvicorn

from multiverse.config import WebSettings, web_address
from multiverse.core.errors import Refused
from multiverse.system.locks import try_locked_file


@contextlib.contextmanager
def locked(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock for the life of this process; `what` names the process. Raises `Refused` if another one holds it."""
    with try_locked_file(lock) as held:
        if not held:
            raise Refused(f"another {what} uses {lock.parent}", hint="stop it first, or set another state_dir")
        with contextlib.suppress(OSError):  # it is for people, and the disk may be full
            lock.write_text(f"{os.getpid()}\n")
        yield


def bind(path: Path, setting: str, group: str = "", *, all_users: bool = False) -> socket.socket:
    """A listening Unix socket for its owner, for all users, or also for a `group`, from its first moment on. Raises
    `Refused` if it cannot be made; `setting` names what to change."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o111 if all_users else 0o177)
    try:
        sock.bind(str(path))
        if group:
            shutil.chown(path, group=group)
            path.chmod(0o660)
    except LookupError as error:
        raise Refused(f"there is no group {group}", hint="correct web.group in the settings") from error
    except OSError as error:
        raise Refused(f"cannot bind {path}: {error.strerror}", hint=f"set {setting} in the settings") from error
    finally:
        os.umask(before)
    sock.listen(64)
    return sock


def bind_tcp(address: str, port: int, setting: str) -> socket.socket:
    """A listening TCP socket; `::` takes IPv4 too. Raises `Refused`, which names `setting`, if it cannot be made."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=64, dualstack_ipv6=address == "::")
    except OSError as error:
        raise Refused(f"cannot listen on {address} port {port}: {error}", hint=f"set {setting}") from error


def bind_web(web: WebSettings) -> socket.socket | None:
    """The listening socket of the web page; None if the settings want none. Raises `Refused`."""
    if not web.listen:
        return None
    address = web_address(web.listen)
    if address is None:
        return bind(Path(web.listen), "web.listen", web.group)
    return bind_tcp(*address, "web.listen")


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any) -> Server:
    """A server for an ASGI application, which is told nothing of starts and stops, and says nothing of itself."""
    return Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False))


def stop_signal() -> asyncio.Event:
    """Set as soon as SIGTERM or SIGINT comes. Belongs to the running event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


_COMMANDS = frozenset({"scontrol", "qemu-img"})
"""Programs that are counted by their first argument too, because it is a command; elsewhere it is data."""

_LAUNCHERS = frozenset({"setpriv", "unshare"})  # programs that execute the program after "--" in their own place


class ProcessCounter:
    """Counts every process that this process starts, by program. An audit hook cannot be removed: make one counter
    only."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        sys.addaudithook(self._count)

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self.programs[_program([str(word) for word in args[1]])] += 1


class Processes:
    """The processes that the daemon has started, and the agents that answer."""

    def __init__(self, own: ProcessCounter, agents: Callable[[], Awaitable[Counter[str]]]) -> None:
        self._own, self._agents = own, agents

    async def programs(self) -> Mapping[str, int]:
        return self._own.programs + await self._agents()


def _program(argv: list[str]) -> str:
    program = PurePath(argv[0]).name
    if program in _LAUNCHERS and "--" in argv:
        return _program(argv[argv.index("--") + 1 :])
    return f"{program} {argv[1]}" if program in _COMMANDS and len(argv) > 1 else program
