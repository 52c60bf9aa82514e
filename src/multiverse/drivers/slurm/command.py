"""Runs Slurm's commands and converts their failures to the errors of `core.errors`."""

from __future__ import annotations

import asyncio
import copy
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

from multiverse.config import SlurmSettings
from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Stale, Unknown

# Parts of Slurm's messages (from slurm_errno.c and the commands) and the errors they mean. The first match counts.
_MEANINGS: tuple[tuple[str, type[MultiverseError]], ...] = (
    ("unable to contact slurm controller", Unknown),
    ("socket timed out", Unknown),
    ("zero bytes were transmitted", Unknown),
    ("communication connection failure", Unknown),
    ("communication shutdown failure", Unknown),
    ("message send failure", Unknown),
    ("message receive failure", Unknown),
    ("unexpected missing socket error", Unknown),  # 24.11, when slurmctld ends in a request, and sometimes otherwise
    ("connection refused", Unknown),
    ("connection reset by peer", Unknown),
    ("connection timed out", Unknown),
    ("broken pipe", Unknown),
    ("in standby mode", Unknown),
    ("resource temporarily unavailable", Exhausted),  # 24.11, while a change of the job is being sent to slurmdbd
    ("try again in a bit", Exhausted),  # ESLURM_JOB_SETTING_DB_INX, the same for a new job
    ("invalid job id", Gone),
    ("invalid node name", Gone),
    ("no longer pending execution", Stale),
    ("already completing", Stale),
    ("already completed", Stale),
    ("job is pending", Stale),
    ("job has already finished", Stale),
    ("unable to process configuration file", Broken),
    ("munge encode failed", Broken),
    ("protocol authentication error", Broken),
    ("access/permission denied", Broken),
)

_CHECK_SLURMCTLD = "check slurmctld with scontrol ping, and its log"


class Completed(NamedTuple):
    status: int
    out: bytes
    err: bytes


# Runs a program with arguments in an environment. It is killed after some seconds, and TimeoutError is raised. Raises
# OSError if it cannot be started.
Execute = Callable[[Sequence[str], Mapping[str, str], float], Awaitable[Completed]]


async def execute(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None, "communicate() has waited for its end"
    return Completed(process.returncode, out, err)


class SlurmCommands:
    """Slurm's command line tools, run without a shell in an environment that does not depend on the caller's. At most
    `SlurmSettings.commands` run at the same time."""

    def __init__(
        self, settings: SlurmSettings, env: Mapping[str, str] | None = None, execute: Execute = execute
    ) -> None:
        self._bin = settings.bin_dir
        self._timeout = settings.command_timeout
        self._execute = execute
        self._limiter = CommandLimiter(settings.commands)
        self._observes = False
        inherited = os.environ if env is None else env
        # Variables such as SQUEUE_FORMAT or SLURM_CLUSTERS would change the commands' output.
        clean = {k: v for k, v in inherited.items() if not k.startswith(("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_"))}
        self._env = clean | {
            "SLURM_CONF": str(settings.conf),
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # array task lists in full, not cut at 64 bytes
            "LC_ALL": "C",
        }

    def for_observations(self) -> Self:
        """The same commands, within the same limit, but before commands that change something."""
        other = copy.copy(self)
        other._observes = True
        return other

    async def run(
        self,
        program: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        refused: str = "",
        via: Sequence[str] = (),
    ) -> str:
        """The command's standard output. `env` is added to its environment. `via` are the words before it, of a program
        such as setpriv(1) that runs it.

        Raises the error that its message means: `Gone`, `Stale`, `Refused`, `Broken` or `Exhausted`; `Unknown` if
        slurmctld did not answer in time, because it may still act on the request. A message with the text `refused`
        raises `Refused`, whatever the exit status is.
        """
        path = str(Path(self._bin) / program) if self._bin else program
        async with self._limiter.slot(observes=self._observes):
            try:
                done = await self._execute((*via, path, *args), {**self._env, **(env or {})}, self._timeout)
            except TimeoutError as error:
                raise Unknown(f"{program} did not end within {self._timeout:g} s", hint=_CHECK_SLURMCTLD) from error
            except OSError as error:
                hint = "install slurm-client, or set slurm.bin_dir"
                raise Broken(f"cannot run {path}: {error.strerror}", hint=hint) from error
        out, err = done.out.decode(errors="replace"), done.err.decode(errors="replace")
        if refused and refused in err:
            raise Refused(f"{program}: {err.strip()}")
        if done.status != 0:
            raise meaning(program, err or out)
        return out


def meaning(program: str, output: str) -> MultiverseError:
    lowered = output.lower()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    text = f"{program}: {lines[-1] if lines else 'failed without a message'}"
    for phrase, kind in _MEANINGS:
        if phrase in lowered:
            return kind(text, hint=_CHECK_SLURMCTLD) if kind is Unknown else kind(text)
    return Refused(text)


class CommandLimiter:
    """At most `most` commands run at the same time; at most three quarters of them change something.

    Observations go before changes that wait: they are only delayed by commands that run. Commands are otherwise run in
    the order of asking: a burst of one kind of change does not starve the others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_changes = max(1, most - max(1, most // 4))
        self._observations: deque[asyncio.Future[None]] = deque()
        self._changes: deque[asyncio.Future[None]] = deque()
        self._running = self._changing = 0

    @asynccontextmanager
    async def slot(self, *, observes: bool) -> AsyncIterator[None]:
        """The slot of one command. A command must not wait for the slot of another one."""
        granted = asyncio.get_running_loop().create_future()
        waiting = self._observations if observes else self._changes
        waiting.append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted in the meantime
                self._end(observes=observes)
            raise
        try:
            yield
        finally:
            self._end(observes=observes)

    def _end(self, *, observes: bool) -> None:
        self._running -= 1
        self._changing -= not observes
        self._grant()

    def _grant(self) -> None:
        while self._running < self._most:
            if (granted := _next(self._observations)) is not None:
                self._running += 1
            elif self._changing < self._most_changes and (granted := _next(self._changes)) is not None:
                self._running += 1
                self._changing += 1
            else:
                return
            granted.set_result(None)


def _next(waiting: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Take out the first that still waits, and those before it that were cancelled."""
    while waiting:
        granted = waiting.popleft()
        if not granted.done():
            return granted
    return None
