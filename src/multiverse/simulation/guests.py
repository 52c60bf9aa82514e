"""The guests of simulated VMs: they join the cluster and run scripts, and they alone count what ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from multiverse.core.model import Daemon, GuestFile, Identity, JobState, NodeBootstrap, Size
from multiverse.simulation.jobs import JobRecord

if TYPE_CHECKING:
    from multiverse.simulation.cluster import Cluster

LIVE = (JobState.RUNNING, JobState.SUSPENDED)
_FILE = "/etc/multiverse/simulated.json"


@dataclass(frozen=True)
class Joining:
    """What the simulated slurmd tells slurmctld: its node's name, features and size."""

    name: str
    features: tuple[str, ...]
    size: Size

    def pack(self) -> NodeBootstrap:
        text = json.dumps([self.name, list(self.features), self.size.cpus, self.size.memory])
        return NodeBootstrap((GuestFile(_FILE, text.encode()),), (), (Daemon("slurmd", ("slurmd", "-Z", "-D")),))

    @staticmethod
    def unpack(bootstrap: NodeBootstrap) -> Joining:
        """Read what `pack` made. `ValueError` for any other membership."""
        for file in bootstrap.files:
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
    heard: bool = False  # and the scheduler was told


@dataclass(frozen=True)
class GuestPace:
    """How long guests take, each as a range in seconds that is drawn from."""

    boot: tuple[float, float] = (0.4, 1.2)  # from start to a daemon that registers
    retry: float = 1.0  # between tries to register while slurmctld is away
    mute: float = 0.0  # the share that never registers, though all else looks well
    small: float = 0.0  # the share that registers as smaller than it was told to be, and is set DOWN for it


@dataclass(eq=False)
class Guest:
    """A running guest. `served` are the jobs, as (number, id), that ever had this node."""

    name: str
    identity: Identity
    cluster: Cluster
    runs: list[Run]  # the world's ledger
    rng: Random
    pace: GuestPace
    say: Callable[[str], None] = lambda _: None  # told what its scripts do
    alive: bool = True
    served: list[tuple[int, str]] = field(default_factory=list)
    users: set[int] = field(default_factory=set)  # whom it knows, beside those of its identity
    _job: JobRecord | None = None
    _run: Run | None = None
    _rest: float = 0.0  # seconds of the script still to go
    _resumed: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _cut: bool = False  # its host is out of reach
    _untold: list[Callable[[], None]] = field(default_factory=list)
    _waiting: set[tuple[int, int]] = field(default_factory=set)  # runs that wait for their user, or did
    _after_prolog: list[Callable[[], None]] = field(default_factory=list)

    def boot(self) -> None:
        """Begin to boot; the node registers by and by. A guest without a daemon never joins."""
        if self.identity.bootstrap.daemons and self.rng.random() >= self.pace.mute:
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
        if not self.reachable:
            return  # nobody hears it; slurmctld finds out when the node does not answer
        known = self.users | {user.uid for user in self.identity.users}
        if not known:  # a spare that was taken: its prolog waits
            restarts = job.restarts
            self._waiting.add((job.number, restarts))
            go_on = lambda: self.launch(job) if job.state in LIVE and job.restarts == restarts else None  # noqa: E731
            self.after_prolog(go_on)
            return
        if job.batch.uid not in known:
            self.cluster.violations.append(f"{self.name} got job {job.job_id} of user {job.batch.uid}, a stranger")
        self._job = job
        self._run = Run(job.number, job.restarts, self.name, self._now())
        self.runs.append(self._run)
        self.say(f"{self.name}: the script of {job.job_id} begins")
        self._rest = job.batch.seconds
        self.resume(job)

    def after_prolog(self, do: Callable[[], None]) -> None:
        """Do something now, or, in a spare that was taken, once its user is known."""
        if self.waits:
            self._after_prolog.append(do)
        else:
            do()

    def introduce(self, uid: int) -> None:
        """Know one more user. Who waits for one goes on."""
        self.users.add(uid)
        waiting, self._after_prolog = self._after_prolog, []
        for do in waiting:
            do()

    @property
    def waits(self) -> bool:
        """Whether a job here would wait until its user is known."""
        return self.alive and not self.users and not self.identity.users

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
        if self._cut:
            self._untold.append(lambda: self.kill(job))
        elif self._job is job:
            self._interrupt()

    def finish(self, job: JobRecord) -> bool:
        """The job's script comes to its end now, whatever time it was to take. False if it does not run here."""
        if self._job is not job:
            return False
        self._script_ends()
        return True

    @property
    def reachable(self) -> bool:
        return self.alive and not self._cut

    def has_run(self, job: JobRecord) -> bool:
        """Whether it has this very run of the job, going or ended, or waiting for its user."""
        return (job.number, job.restarts) in self._waiting or any(
            (run.job, run.restarts, run.node) == (job.number, job.restarts, self.name) for run in self.runs
        )

    def serves(self) -> JobRecord | None:
        """The job that slurmctld believes to run on this very node; None if there is none, or its node is DOWN."""
        node = self.cluster.nodes.get(self.name)
        if node is None or node.guest is not self or node.down or node.job is None:
            return None
        return node.job if node.job.state in LIVE else None

    def cut_off(self) -> None:
        """Nobody hears it and it hears nobody; what it runs goes on."""
        self._cut = True
        self.cluster.fell_silent(self)

    def reconnect(self) -> None:
        """It answers again, and hears what it missed before it tells what nobody heard."""
        self._cut = False
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()
        if self.alive:
            self.cluster.answers_again(self)

    def tell(self, word: Callable[[], None]) -> None:
        """Say something to slurmctld, now or when it can be reached."""
        if self._cut:
            self._untold.append(lambda: self.tell(word))
        else:
            self.cluster.hear(word)

    def register_again(self) -> None:
        """Its daemon was started anew; or, of one that is dead, slurmctld takes up only now what it sent before."""
        if self.alive:
            self._register()
        elif self.cluster.register(self, Joining.unpack(self.identity.bootstrap)):
            self.cluster.fell_silent(self)

    def _script_ends(self) -> None:
        job, run = self._job, self._run
        assert job is not None and run is not None
        run.completed = True
        self._interrupt()
        self.say(f"{self.name}: the script of {job.job_id} has come to its end")
        self.tell(lambda: self.cluster.script_ended(job, run))

    def _interrupt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._run is not None:
            self._run.ended = self._now()
        self._job = self._run = self._timer = None

    def _register(self) -> None:
        if not self.alive:
            return
        joining = Joining.unpack(self.identity.bootstrap)
        if self._cut or not self.cluster.register(self, joining, small=self._small()):
            self._later(self.pace.retry, self._register)

    def _small(self) -> bool:
        return self.pace.small > 0 and self.rng.random() < self.pace.small

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, do)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
