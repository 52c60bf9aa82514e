"""The guests of simulated VMs: they join the cluster and run scripts, and they alone count what ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from multiverse.core.model import Daemon, GuestFile, Identity, Membership, Size
from multiverse.simulation.jobs import JobRecord

if TYPE_CHECKING:
    from multiverse.simulation.cluster import Cluster

_FILE = "/etc/multiverse/simulated.json"


@dataclass(frozen=True)
class Joining:
    """What the simulated slurmd tells slurmctld: its node's name, features and size."""

    name: str
    features: tuple[str, ...]
    size: Size

    def pack(self) -> Membership:
        text = json.dumps([self.name, list(self.features), self.size.cpus, self.size.memory])
        return Membership((GuestFile(_FILE, text.encode()),), (), (Daemon("slurmd", ("slurmd", "-Z", "-D")),))

    @staticmethod
    def unpack(membership: Membership) -> Joining:
        """Read what `pack` made. `ValueError` for any other membership."""
        for file in membership.files:
            if file.path == _FILE:
                name, features, cpus, memory = json.loads(file.content)
                return Joining(name, tuple(features), Size(cpus, memory))
        raise ValueError("not a membership of the simulated scheduler")


@dataclass
class Run:
    """One start of a script in a guest: the truth about what ran."""

    job: int  # its `JobRecord.number`
    restarts: int
    node: str
    began: float
    ended: float | None = None
    completed: bool = False  # it came to its own end


@dataclass(frozen=True)
class GuestPace:
    """How long guests take, each as a range in seconds that is drawn from."""

    boot: tuple[float, float] = (0.4, 1.2)  # from start to a daemon that registers
    retry: float = 1.0  # between tries to register while slurmctld is away


@dataclass(eq=False)
class Guest:
    """A running guest. `served` are the jobs, as (number, id), that ever had this node."""

    name: str
    identity: Identity
    cluster: Cluster
    runs: list[Run]  # the world's ledger
    rng: Random
    pace: GuestPace
    alive: bool = True
    served: list[tuple[int, str]] = field(default_factory=list)
    _job: JobRecord | None = None
    _run: Run | None = None
    _rest: float = 0.0  # seconds of the script still to go
    _resumed: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def boot(self) -> None:
        """Begin to boot; the node registers by and by. A guest without a daemon never joins."""
        if self.identity.membership.daemons:
            self._later(self.rng.uniform(*self.pace.boot), self._register)

    def die(self) -> None:
        """Stop at once, with whatever runs."""
        self.alive = False
        self._interrupt()

    def allot(self, job: JobRecord) -> None:
        """This node is now the job's."""
        key = (job.number, job.job_id)
        if key not in self.served:
            self.served.append(key)

    def launch(self, job: JobRecord) -> None:
        """Run the job's script (told to its first node only)."""
        if not self.alive:
            return  # nobody hears it; slurmctld finds out when the node does not answer
        self._job = job
        self._run = Run(job.number, job.restarts, self.name, self._now())
        self.runs.append(self._run)
        self._rest = job.batch.seconds
        self.resume(job)

    def suspend(self, job: JobRecord) -> None:
        if self._job is job and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._rest -= self._now() - self._resumed

    def resume(self, job: JobRecord) -> None:
        if self._job is job and self._timer is None:
            self._resumed = self._now()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._rest), self._script_ends)

    def kill(self, job: JobRecord) -> None:
        """End the job's script, if it runs here."""
        if self._job is job:
            self._interrupt()

    def _script_ends(self) -> None:
        job, run = self._job, self._run
        assert job is not None and run is not None
        run.completed = True
        self._interrupt()
        self.cluster.script_ended(job, run.restarts)

    def _interrupt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._run is not None:
            self._run.ended = self._now()
        self._job = self._run = self._timer = None

    def _register(self) -> None:
        if not self.alive:
            return
        if not self.cluster.register(self, Joining.unpack(self.identity.membership)):
            self._later(self.pace.retry, self._register)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, do)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
