"""The guests of simulated VMs. They join the cluster and run scripts; only their ledger says what really ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon, GuestFile, Identity, NodeBootstrap
from multiverse.core.model.job import JobState
from multiverse_lab.simulation.jobs import JobRecord

if TYPE_CHECKING:
    from multiverse_lab.simulation.cluster import Cluster

LIVE = (JobState.RUNNING, JobState.SUSPENDED)
_FILE = "/etc/multiverse/simulated.json"


@dataclass(frozen=True)
class Registration:
    """What a node's daemon tells the scheduler: the node's name, features, size and sockets."""

    name: str
    features: tuple[str, ...]
    size: Size
    sockets: int = 1

    def pack(self) -> NodeBootstrap:
        text = json.dumps([self.name, list(self.features), self.size.cpus, self.size.memory, self.sockets])
        return NodeBootstrap((GuestFile(_FILE, text.encode()),), (), (Daemon("slurmd", ("slurmd", "-Z", "-D")),))

    @staticmethod
    def unpack(bootstrap: NodeBootstrap) -> Registration:
        """Read what `pack` made. `ValueError` for the bootstrap of any other scheduler."""
        for file in bootstrap.files:
            if file.path == _FILE:
                name, features, cpus, memory, sockets = json.loads(file.content)
                return Registration(name, tuple(features), Size(cpus, memory), sockets)
        raise ValueError("not a bootstrap of the simulated scheduler")


@dataclass
class Run:
    """One start of a script in a guest."""

    job: int  # its `JobRecord.number`
    restarts: int
    node: str
    began: float
    ended: float | None = None
    completed: bool = False  # the script came to its own end
    reported: bool = False  # to the scheduler


_QUICK = 1.2  # seconds; the longest that a quick guest boots


@dataclass(frozen=True)
class GuestBehaviour:
    """How long guests take, as ranges in seconds that are drawn from, and what share of them is defective, until the
    faults end: with every other boot longer than the controller waits, a job might never start."""

    until: float | None = None  # seconds of virtual time: later guests are quick, and none is defective
    boot: tuple[float, float] = (0.4, 1.2)  # from start to a daemon that registers
    retry: float = 1.0  # between tries to register while the scheduler does not answer
    mute: float = 0.0  # the share that never registers although the VM runs
    small: float = 0.0  # the share that registers with less memory than configured, and is set DOWN for that


@dataclass(eq=False)
class Guest:
    """A running guest. `served` are the jobs, as (number, id), that ever had this node."""

    name: str
    identity: Identity
    cluster: Cluster
    runs: list[Run]  # the world's ledger
    rng: Random
    behaviour: GuestBehaviour
    log: Callable[[str], None] = lambda _: None
    alive: bool = True
    served: list[tuple[int, str]] = field(default_factory=list)
    users: set[int] = field(default_factory=set)  # uids that were added after the start
    _job: JobRecord | None = None
    _run: Run | None = None
    _seconds_left: float = 0.0  # of the script
    _resumed: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _suspended: bool = False  # the script, by its user
    _cut_off: bool = False  # its host is out of reach
    _paused: bool = False  # the disk of its host is full
    _unsent: list[Callable[[], None]] = field(default_factory=list)
    _waiting: set[tuple[int, int]] = field(default_factory=set)  # runs that wait, or have waited, for their user
    _after_prolog: list[Callable[[], None]] = field(default_factory=list)

    def boot(self) -> None:
        """Begin to boot; the node registers later. A guest without a daemon never registers."""
        sound = self._is_sound()
        if self.identity.bootstrap.daemons and (self.rng.random() >= self.behaviour.mute or sound):
            seconds = self.rng.uniform(*self.behaviour.boot)
            self._later(min(seconds, _QUICK) if sound else seconds, self._register)

    def die(self) -> None:
        """Stop at once, with the script that runs."""
        self.alive = False
        self._interrupt()

    def allocate(self, job: JobRecord) -> None:
        """The scheduler gives this node to the job."""
        key = (job.number, job.job_id)
        if key not in self.served:
            self.served.append(key)

    def launch(self, job: JobRecord) -> None:
        """Run the job's script. Only the first node of a job does."""
        if not self.reachable:
            return  # the message is lost; the scheduler notices when the node does not answer
        known = self.users | {user.uid for user in self.identity.users}
        if not known:  # a joined spare that the job took: the prolog waits for the job's user
            restarts = job.restarts
            self._waiting.add((job.number, restarts))
            again = lambda: self.launch(job) if job.state in LIVE and job.restarts == restarts else None  # noqa: E731
            self.after_prolog(again)
            return
        if job.batch.uid not in known:
            problem = f"{self.name} got job {job.job_id} of user {job.batch.uid}, whom the guest does not know"
            self.cluster.violations.append(problem)
        self._job = job
        self._run = Run(job.number, job.restarts, self.name, self._now())
        self.runs.append(self._run)
        self.log(f"{self.name}: the script of {job.job_id} begins")
        self._seconds_left = job.batch.seconds
        self.resume(job)

    def after_prolog(self, do: Callable[[], None]) -> None:
        """Do something now, or, in a joined spare without users, once a user has been added."""
        if self.waits_for_user:
            self._after_prolog.append(do)
        else:
            do()

    def add_user(self, uid: int) -> None:
        """Add a user. A prolog that waits for a user goes on."""
        self.users.add(uid)
        waiting, self._after_prolog = self._after_prolog, []
        for do in waiting:
            do()

    @property
    def waits_for_user(self) -> bool:
        """Whether a job here would wait until its user has been added."""
        return self.alive and not self.users and not self.identity.users

    def suspend(self, job: JobRecord) -> None:
        if self._job is job:
            self._suspended = True
            self._stop_script()

    def resume(self, job: JobRecord) -> None:
        if self._job is job:
            self._suspended = False
            self._continue_script()

    def _stop_script(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._seconds_left -= self._now() - self._resumed

    def _continue_script(self) -> None:
        if self._job is not None and self._timer is None and not self._suspended and not self._paused:
            self._resumed = self._now()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._seconds_left), self._script_ends)

    def kill(self, job: JobRecord) -> None:
        """End the job's script, if the script runs here."""
        if self._silent:
            self._unsent.append(lambda: self.kill(job))
        elif self._job is job:
            self._interrupt()

    def finish(self, job: JobRecord) -> bool:
        """End the job's script now as if its time had passed. False if the script does not run here."""
        if self._job is not job:
            return False
        self._script_ends()
        return True

    @property
    def reachable(self) -> bool:
        return self.alive and not self._silent

    @property
    def _silent(self) -> bool:
        return self._cut_off or self._paused

    def has_run(self, job: JobRecord) -> bool:
        """Whether this guest knows this very run of the job: running, ended, or waiting for its user."""
        return (job.number, job.restarts) in self._waiting or any(
            (run.job, run.restarts, run.node) == (job.number, job.restarts, self.name) for run in self.runs
        )

    def has_run_before(self, job: JobRecord) -> bool:
        """Whether this guest knows an earlier run of the job."""
        mine = (run for run in self.runs if (run.job, run.node) == (job.number, self.name))
        return any(run.restarts < job.restarts for run in mine)

    def serves(self) -> JobRecord | None:
        """The job that the scheduler believes to run on this very node; None if there is none or the node is DOWN."""
        node = self.cluster.nodes.get(self.name)
        if node is None or node.guest is not self or node.down or node.job is None:
            return None
        return node.job if node.job.state in LIVE else None

    def cut_off(self) -> None:
        """Lose the network. The script that runs goes on."""
        self._fall_silent()
        self._cut_off = True

    def pause(self) -> None:
        """Stop, with the script that runs, and answer nobody."""
        self._fall_silent()
        self._paused = True
        self._stop_script()

    def _fall_silent(self) -> None:
        if not self._silent:
            self.cluster.stopped_answering(self)

    def reconnect(self) -> None:
        """Regain the network."""
        self._cut_off = False
        self._answer()

    def unpause(self) -> None:
        """Go on."""
        self._paused = False
        self._continue_script()
        self._answer()

    def _answer(self) -> None:
        """First receive what was sent meanwhile, then answer the scheduler again."""
        if self._silent:
            return
        unsent, self._unsent = self._unsent, []
        for send in unsent:
            send()
        if self.alive:
            self.cluster.answers_again(self)

    def send(self, message: Callable[[], None]) -> None:
        """Send something to the scheduler, now or once the scheduler can be reached."""
        if self._silent:
            self._unsent.append(lambda: self.send(message))
        else:
            self.cluster.receive(message)

    def register_again(self) -> None:
        """Its daemon was restarted. For a dead guest: the scheduler handles an earlier registration only now."""
        if self.alive:
            self._register()
        elif self.cluster.register(self, Registration.unpack(self.identity.bootstrap)):
            self.cluster.stopped_answering(self)

    def _script_ends(self) -> None:
        job, run = self._job, self._run
        assert job is not None and run is not None
        run.completed = True
        self._interrupt()
        self.log(f"{self.name}: the script of {job.job_id} has ended")
        self.send(lambda: self.cluster.script_ended(job, run))

    def _interrupt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._run is not None:
            self._run.ended = self._now()
        self._job = self._run = self._timer = None
        self._suspended = False

    def _register(self) -> None:
        if not self.alive:
            return
        registration = Registration.unpack(self.identity.bootstrap)
        if self._silent or not self.cluster.register(self, registration, small=self._registers_small()):
            self._later(self.behaviour.retry, self._register)

    def _registers_small(self) -> bool:
        chosen = self.behaviour.small > 0 and self.rng.random() < self.behaviour.small
        return chosen and not self._is_sound()

    def _is_sound(self) -> bool:
        return self.behaviour.until is not None and self._now() >= self.behaviour.until

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, do)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
