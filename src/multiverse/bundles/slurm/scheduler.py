"""Slurm, as the daemon, agents and the commands of a site use it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Collection, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import structlog

from multiverse.bundles.contract import DaemonTask, Examination, Notice, Privacy, SchedulerWords, Tell
from multiverse.bundles.slurm import examine
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.core.model import Job, LeaseSpec
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.leases import PilotSteps
from multiverse.drivers.slurm.reading.nodes import reached_nodes
from multiverse.drivers.slurm.site import bootstrap, conf, requirements
from multiverse.drivers.slurm.site.bootstrap import read, slurm_uid, why_not_writable
from multiverse.drivers.slurm.site.conf import SiteConf, UntilChanged, munge_socket
from multiverse.drivers.slurm.submission import Hint, hints, take
from multiverse.ports.finding import Finding
from multiverse.site import checking, rendering
from multiverse.system.rendered import SiteFile

log = structlog.get_logger()

INTERVAL = 300.0  # seconds between two checks of the inbox: each starts a process
NAME_SERVICE_TIMEOUT = 10.0  # seconds that the daemon waits, once it has started, to learn who slurmctld's user is
TIMEOUT = 5.0  # seconds that `unmunge` may take
AT_ONCE = 4  # credentials that are decoded at the same time
_STATUS = {
    15: "it has expired",
    16: "it was made in the future: compare the clocks",
    17: "it was used before",
    18: "it is for another user",
}
"""By munge's statuses EMUNGE_CRED_EXPIRED, _REWOUND, _REPLAYED and _UNAUTHORIZED. See munge(3)."""

_CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]+:")


class Credentials:
    """Decodes munge credentials with the munged behind a socket (None: munge's own). munged refuses one that it has
    seen before."""

    def __init__(self, socket: Path | None = None) -> None:
        self._socket, self._turns = socket, asyncio.Semaphore(AT_ONCE)

    async def decode(self, credential: str) -> tuple[int, str]:
        data = credential.encode("ascii", "replace")
        if not _CREDENTIAL.fullmatch(data):
            raise Refused("this is no munge credential")
        async with self._turns:
            return _parsed(*await self._run(data))

    async def _run(self, data: bytes) -> tuple[int, bytes, bytes]:
        where = [f"--socket={self._socket}"] if self._socket else []
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                "unmunge", "--numeric", "--keys=UID", *where, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise Unknown(f"cannot run unmunge: {error.strerror}", hint="install munge on this machine") from error
        try:
            async with asyncio.timeout(TIMEOUT):
                out, said = await process.communicate(data)
        except TimeoutError as error:
            raise Unknown("munged does not answer", hint="see whether munged runs") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode or 0, out, said


def _parsed(status: int, out: bytes, said: bytes) -> tuple[int, str]:
    """Read the output of unmunge: metadata, an empty line, the payload. Its status tells what is wrong."""
    if status:
        words = said.decode(errors="replace").strip().removeprefix("unmunge: Error: ")
        why = _STATUS.get(status) or words or f"unmunge ended with {status}"
        raise Refused(f"the credential is not accepted: {why}"[:300])
    metadata, _, payload = out.partition(b"\n\n")
    found = re.fullmatch(rb"UID:\s+(\d+)", metadata.strip())
    if not found:
        raise Unknown("unmunge did not say whose the credential is")
    return int(found[1]), payload.decode(errors="replace")


async def warn_of_closed_inbox(settings: Settings, interval: float = INTERVAL) -> None:
    """Warn when slurmctld's user cannot write to the inbox: hints and offers would fail silently. Never ends."""
    known = None
    await asyncio.sleep(settings.poll)  # the daemon has created the directory by then
    while True:
        reason = await asyncio.to_thread(_reason, settings)
        if reason is not None and reason != known:
            log.warning("inbox not writable", reason=reason, remedy="run multiverse site check")
        elif reason is None and known is not None:
            log.info("inbox writable again")
        known = reason
        await asyncio.sleep(interval)


def _reason(settings: Settings) -> str | None:
    try:
        return why_not_writable(settings.slurm.inbox, bootstrap.slurm_user(read(settings.slurm.conf)))
    except MultiverseError as error:
        return error.message


class PrivateData:
    """What the slurm.conf at `conf` keeps private. While it cannot be read, everything is private."""

    def __init__(self, conf: Path) -> None:
        self._conf = UntilChanged(conf, Privacy(others=False, hosts=False))

    def privacy(self) -> Privacy:
        return self._conf.get(_privacy)


def _privacy(site: SiteConf) -> Privacy:
    kept = set(site.words("PrivateData"))
    return Privacy(others=not kept & {"jobs", "all"}, hosts=not kept & {"nodes", "all"})


class NodeCount:
    """Whether the slurm.conf at `conf` permits as many nodes as there can be VMs: hosts may come that no settings
    name."""

    def __init__(self, conf: Path) -> None:
        self._conf, self._cpus = UntilChanged[list[Notice]](conf, []), -1

    def lack(self, cpus: int) -> list[Notice]:
        """The problem, for VMs that claim so many CPUs together. None while the file cannot be read: `multiverse site
        check` tells of that."""
        anew, self._cpus = cpus != self._cpus, cpus
        return self._conf.get(lambda site: _lack(site, cpus), anew=anew)


def _lack(site: SiteConf, cpus: int) -> list[Notice]:
    lack = requirements.lack_of_nodes(cpus, site)
    return [Notice("nodes", lack.name, lack.message, lack.remedy)] if lack else []


# The reasons that users ask about most. See squeue(1), JOB REASON CODES.
_WORDS = {
    "BeginTime": "its begin time has not come",
    "Dependency": "it depends on jobs that have not ended as it asks",
    "DependencyNeverSatisfied": "it depends on a job that did not end as it asks, so it will never start",
    "JobArrayTaskLimit": "its array runs as many tasks at a time as it permits",
    "JobHeldAdmin": "an operator holds it",
    "JobHeldUser": "its user holds it",
    "Licenses": "licences that it asks for are in use",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "its time limit exceeds that of its partition",
    "Prolog": "its prolog runs",
    "ReqNodeNotAvail": "nodes that it asks for are not available",
    "Reservation": "its reservation has not begun",
}
_PREFIXES = {
    "QOS": "a limit of its quality of service is reached",
    "Assoc": "a limit of its account is reached",
}


class SlurmWords(SchedulerWords):
    """`bundles.contract.SchedulerWords`."""

    def say(self, word: str) -> str:
        first = word.partition(",")[0].strip()
        return _WORDS.get(first) or next((text for prefix, text in _PREFIXES.items() if first.startswith(prefix)), "")

    def advise(self, job: Job) -> str:
        own = job.ref.job_id
        if job.held:
            admin = "Admin" in job.reason
            return "ask the administrators of Slurm, who hold it" if admin else f"release it: scontrol release {own}"
        if job.eligible:  # it was queued again, and waits for its delay
            return f"wait; if the cause is gone, let it start at once: scontrol update JobId={own} StartTime=now"
        known = {
            "Dependency": f"see which jobs it depends on: squeue --job={own} --Format=Dependency",
            "BeginTime": f"see when it may begin: squeue --job={own} --Format=StartTime",
        }
        return known.get(job.reason, f"see what Slurm says of it: scontrol show job {own}")


class SlurmSystem:
    """`bundles.contract.SchedulerSystem`."""

    words = SlurmWords()

    def __init__(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> None:
        """Raises `Refused` if the site's Slurm is not set up for us."""
        self._settings = settings
        _make_passable(settings.slurm.inbox.parent)
        self.scheduler = self.reports = SlurmScheduler(settings, site, leased=leased)
        self.scheduler.check_leases()
        self.scheduler.check_overflow()
        self.leased, self.hints_from = PilotSteps(settings), str(settings.slurm.inbox)
        self._node_count, self._private = NodeCount(settings.slurm.conf), PrivateData(settings.slurm.conf)

    @cached_property
    def identities(self) -> Credentials:
        return Credentials(munge_socket(self._settings.slurm.conf))

    @cached_property
    def notices(self) -> Sequence[Notice]:
        return [Notice("unserved", *each) for each in self.scheduler.unserved()]

    def lack_of_nodes(self, cpus: int) -> Sequence[Notice]:
        return self._node_count.lack(cpus)

    def privacy(self, uid: int) -> Privacy:
        return self._private.privacy()

    def work(self, tell: Tell) -> Sequence[DaemonTask]:
        return [
            DaemonTask("inbox", partial(_forward_hints, self._settings, tell)),
            DaemonTask("shared inbox", partial(_poll_inbox, self._settings, tell)),
            DaemonTask("access to the inbox", partial(warn_of_closed_inbox, self._settings)),
        ]

    def close(self) -> None:
        self.scheduler.close()


def _make_passable(directory: Path) -> None:
    """Make a directory that slurmctld's user can pass through. Raises `Refused`."""
    try:
        for path in reversed((directory, *directory.parents)):
            if not path.exists():
                path.mkdir()
                path.chmod(0o755)  # whatever the umask is
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the daemon as root, or see slurm.inbox in its settings",
        ) from error


async def _forward_hints(settings: Settings, tell: Tell) -> None:
    owner = None  # as it is now
    with contextlib.suppress(TimeoutError):  # of a name service that does not answer
        owner = await asyncio.wait_for(asyncio.to_thread(slurm_uid, settings), NAME_SERVICE_TIMEOUT)
    async for hint in hints(settings.slurm.inbox, owner):
        _tell(hint, tell)


async def _poll_inbox(settings: Settings, tell: Tell) -> None:
    """Hints that another machine wrote into a shared directory: inotify does not report these."""
    while True:
        await asyncio.sleep(settings.poll)
        for hint in await asyncio.to_thread(lambda: list(take(settings.slurm.inbox))):
            _tell(hint, tell)


def _tell(hint: Hint, tell: Tell) -> None:
    tell(submitted=hint.kind == "submit", uid=hint.uid, job_id=hint.job_id)


class SlurmReach:
    """`bundles.contract.ReachedNodes`, by Slurm's commands on this machine."""

    def __init__(self, settings: Settings) -> None:
        self._commands = SlurmCommands(settings.slurm)

    async def check(self) -> None:
        await self._commands.run("scontrol", "--version")

    def of(self, site: str) -> Awaitable[Collection[str]]:
        return reached_nodes(self._commands, site)


class SlurmBundle:
    """`bundles.contract.SchedulerBundle` and `SiteFiles`."""

    def __init__(self) -> None:
        self.files = self

    def render(self, settings: Settings, config: Path, source: Path) -> list[SiteFile]:
        return rendering.render(settings, config, conf.read(source))

    def check(self, settings: Settings, config: Path, source: Path) -> list[Finding]:
        return checking.check(settings, config, source)

    def open(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> SlurmSystem:
        return SlurmSystem(settings, site, leased)

    def reached(self, settings: Settings) -> SlurmReach:
        return SlurmReach(settings)

    def examine(self, settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
        return examine.examine(settings, config, source)


SLURM = SlurmBundle()
