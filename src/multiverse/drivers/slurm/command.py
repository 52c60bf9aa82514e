"""Runs Slurm's commands and says what their failures mean. Errors are translated here and nowhere else."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multiverse.config import SlurmSettings
from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Stale, Unknown

# What Slurm says (slurm_errno.c, and the commands themselves), and what is then true. The first that matches counts.
_MEANINGS: tuple[tuple[str, type[MultiverseError]], ...] = (
    ("unable to contact slurm controller", Unknown),
    ("socket timed out", Unknown),
    ("zero bytes were transmitted", Unknown),
    ("communication connection failure", Unknown),
    ("communication shutdown failure", Unknown),
    ("message send failure", Unknown),
    ("message receive failure", Unknown),
    ("unexpected missing socket error", Unknown),  # 24.11, when slurmctld ends as it is asked, or now and then
    ("connection refused", Unknown),
    ("connection reset by peer", Unknown),
    ("connection timed out", Unknown),
    ("broken pipe", Unknown),
    ("in standby mode", Unknown),
    ("resource temporarily unavailable", Exhausted),  # 24.11 of a job whose last change is on its way to slurmdbd
    ("try again in a bit", Exhausted),  # ESLURM_JOB_SETTING_DB_INX, the same of one just submitted
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


class SlurmCommands:
    """Slurm's command line tools, run without a shell, in an environment that is the same for everyone."""

    def __init__(self, settings: SlurmSettings, env: Mapping[str, str] | None = None) -> None:
        self._bin = settings.bin_dir
        self._timeout = settings.command_timeout
        inherited = os.environ if env is None else env
        # A user's SQUEUE_FORMAT or SLURM_CLUSTERS must not change what we read.
        clean = {k: v for k, v in inherited.items() if not k.startswith(("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_"))}
        self._env = clean | {
            "SLURM_CONF": str(settings.conf),
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # array task lists in full, not cut at 64 bytes
            "LC_ALL": "C",
        }

    async def run(self, program: str, *args: str) -> str:
        """Its standard output. Raises what its complaint means: `Gone`, `Stale`, `Refused`, `Broken`, `Exhausted`, and
        `Unknown` when slurmctld did not answer in time, since it may act on the request all the same."""
        path = str(Path(self._bin) / program) if self._bin else program
        try:
            process = await asyncio.create_subprocess_exec(
                path,
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._env,
            )
        except OSError as error:
            raise Broken(
                f"cannot run {path}: {error.strerror}", hint="install slurm-client, or set slurm.bin_dir"
            ) from error
        try:
            out, err = await asyncio.wait_for(process.communicate(), self._timeout)
        except TimeoutError as error:
            raise Unknown(
                f"{program} gave no answer within {self._timeout:g} s", hint="see whether slurmctld is well"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise meaning(program, err.decode(errors="replace") or out.decode(errors="replace"))
        return out.decode(errors="replace")

    async def json(self, program: str, *args: str) -> dict[str, Any]:
        """Its parsed JSON. `Unknown` also for a document that lists errors: squeue exits with 0 and
        an empty list of jobs when it could not reach slurmctld (22.05.8)."""
        text = await self.run(program, *args, "--json")
        try:
            document: dict[str, Any] = await asyncio.to_thread(json.loads, text)
        except ValueError as error:
            raise Unknown(f"{program} did not answer in JSON: {text[:80]!r}") from error
        if document.get("errors"):
            first = document["errors"][0]
            said = first.get("description") or first.get("error") if isinstance(first, dict) else first
            raise Unknown(f"{program}: {said}", hint="see whether slurmctld is well")
        return document


def meaning(program: str, complaint: str) -> MultiverseError:
    """The error that a command's complaint stands for."""
    lowered = complaint.lower()
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    text = f"{program}: {lines[-1] if lines else 'failed without a word'}"
    for phrase, kind in _MEANINGS:
        if phrase in lowered:
            return kind(text, hint="see whether slurmctld is well") if kind is Unknown else kind(text)
    return Refused(text)
