"""Slurm, as the daemon, agents and the commands of a site use it, and what `multiverse doctor` examines of it.

`multiverse site check` is a part of that: what a site still lacks. Beside it: whether releases go together, what of the
site's own would catch VMs, names, slurmctld's port and munge.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import structlog

from multiverse.bundles.contract import DaemonTask, Examination, Notice, Privacy, SchedulerWords, Tell
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.core.model.job import Job, LeaseSpec
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.leases import PilotSteps
from multiverse.drivers.slurm.reading.nodes import reached_nodes
from multiverse.drivers.slurm.site import bootstrap, conf, requirements
from multiverse.drivers.slurm.site.bootstrap import read, slurm_uid, why_not_writable
from multiverse.drivers.slurm.site.conf import SiteConf, UntilChanged, munge_socket
from multiverse.drivers.slurm.submission import Hint, hints, take
from multiverse.images.catalog import list_images, package_version
from multiverse.ports.site import Finding, InstallationPlan, Level, Removal
from multiverse.site import checking, installing, machine, rendering
from multiverse.site.checking import Part, tried
from multiverse.system.files import SiteFile
from multiverse.system.processes import unreachable

log = structlog.get_logger()

SLURMCTLD_PORT = 6817  # Slurm's own default (slurm.conf(5))
SLOW_NAMES = 1.0
"""Seconds for one name from which on the name service is called slow: slurmctld asks it while it holds its locks."""
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
    """Decodes credentials with the munged behind a socket (None: munge's own). munged refuses one a second time."""

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
    """PrivateData of the slurm.conf at `conf`. While it cannot be read, everything is private."""

    def __init__(self, conf: Path) -> None:
        self._conf = UntilChanged(conf, Privacy(others=False, hosts=False))

    def privacy(self) -> Privacy:
        return self._conf.get(_privacy)


def _privacy(site: SiteConf) -> Privacy:
    kept = set(site.words("PrivateData"))
    return Privacy(others=not kept & {"jobs", "all"}, hosts=not kept & {"nodes", "all"})


class NodeCount:
    """Whether the slurm.conf at `conf` permits as many nodes as there can be VMs, also on hosts that come later."""

    def __init__(self, conf: Path) -> None:
        self._conf, self._cpus = UntilChanged[list[Notice]](conf, []), -1

    def lack(self, cpus: int) -> list[Notice]:
        """The problem for VMs that claim so many CPUs together. `multiverse site check` tells of an unreadable file."""
        anew, self._cpus = cpus != self._cpus, cpus
        return self._conf.get(lambda site: _lack(site, cpus), anew=anew)


def _lack(site: SiteConf, cpus: int) -> list[Notice]:
    lack = requirements.lack_of_nodes(cpus, site)
    return [Notice("nodes", *lack[1:4])] if lack else []


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
        text, preempts = read(self._settings.slurm.conf), self._settings.preempts
        return [Notice("unserved", *found[1:4]) for found in conf.unsupported(text, preempts=preempts)]

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


def examine_slurm(settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
    try:
        site = conf.read(source)
    except MultiverseError as error:
        yield _broken("slurm.conf", error)
    else:
        yield from _of_slurm(settings, config, site)
    yield Examination("munge", tuple(tried(partial(_munge, settings))))


def _of_slurm(settings: Settings, config: Path, site: SiteConf) -> Iterator[Examination]:
    try:
        release = checking.release_of(settings)
    except MultiverseError as error:
        yield _broken("Slurm's commands", error)
        return
    silent = False
    for name, part in checking.parts(settings, config, site, release).items():
        found = tuple(tried(part))
        silent |= any(each.message.startswith(checking.NO_ANSWER) for each in found)
        yield Examination(name, found)
    asking: dict[str, Part] = {
        "slurmd in the guests": lambda: _guests(settings),
        "reservations": lambda: _reservations(settings),
    }
    more: dict[str, Part] = {
        "node sets": lambda: requirements.node_sets(settings.slurm, site),
        "name service": lambda: names(site),
        "port of slurmctld": lambda: _slurmctld_port(settings, site),
    }
    for name, part in (asking | more).items():
        if silent and name in asking:
            yield Examination(name, skipped=checking.NO_ANSWER)
        else:
            yield Examination(name, tuple(tried(part)))


def before(settings: Settings, source: Path) -> Iterator[Examination]:
    """What the site's Slurm lacks that `multiverse site install` does not add."""
    try:
        site, release = conf.read(source), checking.release_of(settings)
    except MultiverseError as error:
        yield _broken("Slurm", error)
        return
    lacking = [each for each in requirements.examine(settings, site, release) if not installing.is_added(each, site)]
    parts: dict[str, Part] = {
        "slurm.conf, without what site install adds": lambda: lacking,
        "node sets": lambda: requirements.node_sets(settings.slurm, site),
        "name service": lambda: names(site),
        "munge": lambda: _munge(settings),
        "munge key": lambda: checking.munge_key(settings),
    }
    for name, part in parts.items():
        yield Examination(name, tuple(tried(part)))


def _guests(settings: Settings) -> Iterator[Finding]:
    """Whether the slurmctld that runs accepts the slurmd of each image. Raises `Unknown` if none answers."""
    shown = asyncio.run(checking.asking(settings).run("scontrol", "show", "config"))
    found = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", shown, re.MULTILINE)
    running = requirements.version(f"slurm {found[1] if found else ''}")
    images = list_images(settings.qemu.images)
    yield from requirements.guests(running, {image.name: package_version(image.disk, "slurmd") for image in images})


def _reservations(settings: Settings) -> Iterator[Finding]:
    shown = asyncio.run(checking.asking(settings).run("scontrol", "show", "reservation", "--oneliner"))
    yield from requirements.reservations(settings.slurm, shown)


def names(site: SiteConf) -> Iterator[Finding]:
    """Whether the name service knows the machines of slurmctld, and soon. SlurmUser is looked up with the inbox."""
    for one in conf.controllers(site.text):
        began = time.monotonic()
        try:
            socket.getaddrinfo(one.name, None)
        except OSError as error:
            yield Finding(
                Level.PROBLEM,
                f"SlurmctldHost={one.name}",
                f"the name service does not know {one.name}: {error.strerror or error}",
                f"add {one.name} to /etc/hosts or to DNS: getent hosts {one.name}",
            )
            continue
        if (took := time.monotonic() - began) > SLOW_NAMES:
            yield Finding(
                Level.NOTE,
                f"SlurmctldHost={one.name}",
                f"the name service took {took:.1f} s to find {one.name}",
                "make it answer faster, for example with /etc/hosts before dns in /etc/nsswitch.conf, or nscd",
            )


def _slurmctld_port(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Whether slurmctld listens where guests look for it."""
    port = int(site.value("SlurmctldPort", str(SLURMCTLD_PORT)).partition("-")[0])
    chosen = settings.slurm.controller_address
    addresses = [one.strip() for one in chosen.split(",")] if chosen else []
    if not chosen and checking.has_address(settings.qemu.bridge, settings.network.gateway):
        addresses = [settings.network.gateway]  # without the bridge there is a finding already
    problems = {address: why for address in addresses if (why := unreachable(address, port))}
    if addresses and len(problems) == len(addresses):
        for address, why in problems.items():
            yield Finding(
                Level.PROBLEM,
                f"{address}:{port}",
                f"guests look for slurmctld there, and nobody answers: {why}",
                "start slurmctld, let the firewall pass this port from the bridge, or set slurm.controller_address",
            )


def _munge(settings: Settings) -> Iterator[Finding]:
    where = munge_socket(settings.slurm.conf)
    if problem := machine.munge_problem(where):
        yield Finding(
            Level.PROBLEM,
            "munge",
            f"no credential can be made and decoded here: {problem}",
            "start munged (systemctl enable --now munge), with the key of the cluster",
        )


def _broken(name: str, error: MultiverseError) -> Examination:
    return Examination(name, (Finding(Level.PROBLEM, name, error.message, error.hint or "see the message"),))


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

    def plan(self, settings: Settings, config: Path) -> InstallationPlan:
        return installing.plan(settings, config, checking.release_of(settings))

    def removals(self, settings: Settings, config: Path) -> list[Removal]:
        return installing.removals(settings, config)

    def in_use(self, settings: Settings) -> list[str]:
        return installing.in_use(settings)

    def stop(self, settings: Settings) -> list[str]:
        return installing.stop(settings)

    def before(self, settings: Settings, source: Path) -> Iterator[Examination]:
        return before(settings, source)

    def open(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> SlurmSystem:
        return SlurmSystem(settings, site, leased)

    def reached(self, settings: Settings) -> SlurmReach:
        return SlurmReach(settings)

    def examine(self, settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
        return examine_slurm(settings, config, source)


SLURM = SlurmBundle()
