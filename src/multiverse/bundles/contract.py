"""Bundles: all parts of a kind of hypervisor, or of scheduler, for the daemon, the agents and the commands of a site.

A bundle is chosen by its name in the settings, and found by an entry point. A part that not every kind has is None, or
an empty sequence. Nothing else in the service knows a driver.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from multiverse.agent.protocol import LocalHypervisor, MoveOffer
from multiverse.agent.self_fence import HostedVms
from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model.job import Job, LeasedHost, LeaseSpec
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.host.links import MoveHello, NodeNetwork
from multiverse.ports import Clock, Hypervisor, Measurements, Reports, Scheduler
from multiverse.ports.site import Finding, InstallationPlan, Removal
from multiverse.system.files import SiteFile

# --- common to both --------------------------------------------------------------------------------


class DaemonTask(NamedTuple):
    """A task that runs beside the controller until cancelled. If it ends by itself, the daemon ends with its error."""

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]


class Notice(NamedTuple):
    """Something that an operator should know for as long as it is so."""

    kind: Literal["nodes", "unserved", "orphan"]  # of the alert that tells it
    name: str  # of the object that it concerns
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Examination:
    """One thing that `multiverse doctor` examined."""

    name: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""  # why it was not examined


class Followed(Protocol):
    """The controller, as a bundle may read it: rows as committed, and the last observation."""

    @property
    def state(self) -> State: ...

    @property
    def policy(self) -> Policy: ...

    def world(self) -> World: ...


# --- platforms -------------------------------------------------------------------------------------


class GuestFacts(Protocol):
    """Asks running VMs for facts for operators. No decision waits for them."""

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives, on the hosts that answer, by name."""

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """The facts that each running guest tells of itself now, by name; `error` if it does not answer."""


class LeasedTransport(Protocol):
    """The way to a host that a scheduler has leased."""

    def dial(self, host: LeasedHost) -> Sequence[str]:
        """The command whose standard input and output lead to the agent there. Raises `Refused` if it is unknown."""

    def receive(self, host: LeasedHost) -> Sequence[str]:
        """The command that receives an image there. Raises `Refused`."""

    def bring(self, host: LeasedHost, image: str, archive: Path) -> None:
        """Bring the archive of an image there. Blocks. Raises `Broken`."""


@dataclass(frozen=True, slots=True)
class PlatformContext:
    """Everything that a platform needs to be opened."""

    settings: Settings
    site: str
    clock: Clock
    rows: Rows  # at the start of the daemon
    epoch: int  # of the last run of the daemon
    keep_epoch: Callable[[int], None]  # stores the epoch of this run
    leased: LeasedTransport | None = None  # None: the scheduler leases no hosts


class Platform(Protocol):
    """One hypervisor of a site, open for the daemon."""

    @property
    def hypervisor(self) -> Hypervisor: ...

    @property
    def measurements(self) -> Measurements | None: ...  # None if nothing is sampled there

    @property
    def guests(self) -> GuestFacts | None: ...  # None if VMs cannot be asked

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        """The tasks beside the controller: connections, the network between hosts, copies of images. Called once,
        before the controller runs. Raises `Refused` if the daemon cannot start."""

    async def programs(self) -> Counter[str]:
        """How many processes it has started on hosts, by program."""


class LocalHost(LocalHypervisor, HostedVms, Protocol):
    """The hypervisor of the host that an agent runs on, for one site."""

    def check(self) -> None:
        """Make the host's directories, and see whether VMs can run. Raises `Refused`."""

    def resume_moves(self, offer: MoveOffer | None) -> None:
        """Go on with the moves of VMs that an earlier process has begun. From now on this host receives VMs as `offer`
        says; None: it receives none."""

    def serve_move(self, sock: socket.socket, hello: MoveHello) -> None:
        """Answer a connection of another host, about one of this site's VMs. Blocks until its end. Raises `Refused` if
        nobody expects it."""

    def restore_vxlan(self) -> None:
        """Make the host's part of the network between hosts again, if it has one. Raises a `MultiverseError`."""

    def close(self) -> None:
        """Wait for nothing: calls that still wait end with an error. VMs stay as they are."""


class HostSide(Protocol):
    """The part of a platform for agents, if its hosts have agents."""

    def local(self, settings: Settings, site: str, node: NodeNetwork | None = None) -> LocalHost:
        """The hypervisor of this machine; `node` is the network of a leased one."""

    def sites(self, settings: Settings) -> Sequence[str]:
        """The sites that have VMs, or remains of VMs, on this machine. Raises OSError if they cannot be listed."""


class PlatformBundle(Protocol):
    """A kind of hypervisor."""

    @property
    def host(self) -> HostSide | None: ...  # None if its hosts have no agents of ours

    def open(self, context: PlatformContext) -> Platform:
        """Raises `Refused` if the settings do not go together."""

    def sites(self, settings: Settings) -> Sequence[str]:
        """The sites that have VMs in reach of the daemon's machine, as far as that is known at once."""

    def examine(self, settings: Settings, *, run_guests: bool) -> Iterator[Examination]:
        """The examinations of `multiverse doctor` on this machine; with `run_guests`, small guests are run."""


# --- schedulers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Privacy:
    others: bool = True  # a user may see ids of other users' jobs
    hosts: bool = True  # a user may see names of hosts


class Identities(Protocol):
    """Tells who a user of another machine is."""

    async def decode(self, credential: str) -> tuple[int, str]:
        """The uid that made a credential, and its payload. `Refused` for a forged, replayed or expired credential, or
        one for another user; `Unknown` if nobody can tell."""


class Tell(Protocol):
    """Takes a hint of the scheduler: it has something new, perhaps of this user or job."""

    def __call__(self, *, submitted: bool, uid: int | None, job_id: str) -> None: ...


class SchedulerWords:
    """Explains the scheduler's own reasons to users of waiting jobs. For an unknown scheduler it says nothing."""

    def say(self, word: str) -> str:
        """The meaning of a reason (`Job.reason`), in plain words; empty if the word says enough."""
        return ""

    def advise(self, job: Job) -> str:
        """The next step for the user of such a job; empty if it is unknown."""
        return ""


UNKNOWN_WORDS = SchedulerWords()


class SchedulerSystem(Protocol):
    """The scheduler of a site, open for the daemon."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def reports(self) -> Reports | None: ...  # None if users cannot be told what their jobs used

    @property
    def leased(self) -> LeasedTransport | None: ...  # None if it leases no hosts

    @property
    def identities(self) -> Identities | None: ...  # None if users of other machines cannot be told apart

    @property
    def notices(self) -> Sequence[Notice]: ...  # its settings that have no effect in VMs

    @property
    def hints_from(self) -> str: ...  # where hints come from, for people; empty if it gives none

    def lack_of_nodes(self, cpus: int) -> Sequence[Notice]:
        """The problem, if it cannot have all VMs that claim so many CPUs together."""

    def privacy(self, uid: int) -> Privacy: ...  # of other users, for this user

    @property
    def words(self) -> SchedulerWords: ...

    def work(self, tell: Tell) -> Sequence[DaemonTask]:
        """The tasks beside the controller. They give hints to `tell`."""

    def close(self) -> None: ...


class SiteFiles(Protocol):
    """Renders and checks the files of a site for this scheduler. `source` is the scheduler's configuration."""

    def render(self, settings: Settings, config: Path, source: Path) -> list[SiteFile]:
        """All files. Raises `Broken`."""

    def check(self, settings: Settings, config: Path, source: Path) -> list[Finding]:
        """Findings, in the order in which to deal with them. Blocks. Raises `Broken`."""

    def plan(self, settings: Settings, config: Path) -> InstallationPlan:
        """What an installation on the scheduler's machine does. Changes nothing. Raises a `MultiverseError`."""

    def removals(self, settings: Settings, config: Path) -> list[Removal]:
        """What a removal does. Changes nothing. Raises a `MultiverseError`."""

    def in_use(self, settings: Settings) -> list[str]:
        """What is still used of it, in words. Blocks."""

    def stop(self, settings: Settings) -> list[str]:
        """End the services, and take back what they have made in the scheduler. Returns what has failed. Blocks."""

    def before(self, settings: Settings, source: Path) -> Iterator[Examination]:
        """Examine what the scheduler lacks before anything is installed."""


class ReachedNodes(Protocol):
    """Asks which nodes the scheduler reaches: the agent of a host does not end these VMs by itself."""

    async def check(self) -> None:
        """Raises a `MultiverseError` if the scheduler cannot be asked from here."""

    def of(self, site: str) -> Awaitable[Collection[str]]:
        """The nodes of a site that it reaches, by name. Raises a `MultiverseError`."""


class SchedulerBundle(Protocol):
    """A kind of scheduler."""

    @property
    def files(self) -> SiteFiles | None: ...  # None if a site adds no files for it

    def open(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> SchedulerSystem:
        """`leased` are the leases that there are already. Raises `Refused` if the scheduler is not set up for us."""

    def reached(self, settings: Settings) -> ReachedNodes:
        """For agents that end VMs by themselves."""

    def examine(self, settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
        """The examinations of `multiverse doctor`."""


# The groups of entry points. An entry point has the name that the settings use, and leads to a bundle.
PLATFORMS, SCHEDULERS = "multiverse.platforms", "multiverse.schedulers"


def platform_bundles(settings: Settings) -> Mapping[str, PlatformBundle]:
    """The platforms of the site, by name, in the order of the settings. Raises `Refused` if one is not installed."""
    return {name: _load(PLATFORMS, name, "platforms") for name in settings.platforms}


def scheduler_bundle(settings: Settings) -> SchedulerBundle:
    """The scheduler of the site. Raises `Refused` if it is not installed."""
    bundle: SchedulerBundle = _load(SCHEDULERS, settings.scheduler, "scheduler")
    return bundle


def _load(group: str, name: str, key: str) -> Any:
    found = {one.name: one for one in entry_points(group=group)}
    if name not in found:
        raise Refused(
            f"{key} names {name!r}, and nothing of that name is installed",
            hint=f"set {key} in the settings to one of: {', '.join(sorted(found)) or 'none is installed'}",
        )
    return found[name].load()
