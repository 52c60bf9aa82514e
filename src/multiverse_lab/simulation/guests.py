"""The guests of simulated VMs. They join the cluster and run scripts; only their ledger says what really ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from multiverse.core.errors import Broken
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon, GuestFile, Identity, NodeBootstrap
from multiverse.core.model.job import JobState
from multiverse_lab.simulation.jobs import JobRecord
from multiverse_lab.simulation.processes import FrozenProcesses, SavedFiles, ScriptProcesses

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
    boot: tuple[float, float] = (0.4, 1.2)  # from start to a daemon that registers, or to the network
    customize: tuple[float, float] = (0.0, 0.0)  # from the network to the daemon, where that is told apart
    retry: float = 1.0  # between tries to register while the scheduler does not answer
    mute: float = 0.0  # the share that never registers although the VM runs
    small: float = 0.0  # the share that registers with less memory than configured, and is set DOWN for that


@dataclass(eq=False)
class Guest:
    """A running guest. `served` are the jobs, as (number, id), that ever had this node.

    The processes of a script can be frozen, and cut off from their run. Then the VM can be saved. In a restored guest a
    run starts no script: it takes the processes over that were saved, once that is permitted."""

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
    _processes: ScriptProcesses | None = None  # of the run's script
    _seconds_left: float = 0.0  # of the script
    _resumed: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _suspended: bool = False  # the script, by its user
    _cut_off: bool = False  # its host is out of reach
    _paused: bool = False  # the disk of its host is full
    _unsent: list[Callable[[], None]] = field(default_factory=list)
    _waiting: set[tuple[int, int]] = field(default_factory=set)  # runs that wait, or have waited, for their user
    _after_prolog: list[Callable[[], None]] = field(default_factory=list)
    _mine: list[Run] = field(default_factory=list)
    _frozen: bool = False  # the processes, also those that are held
    _held: FrozenProcesses | None = None  # cut off, or restored: they wait for the next run
    _restored: SavedFiles | None = None  # what the guest was restored from
    _permitted: bool = False  # the next run may go on with them
    flooded: bool = False  # its channel was closed
    given_up: bool = False  # an operator has ended it with the job that is on it
    stranded: bool = False  # it stands still, handed over to a host that has lost its power since
    to_freeze: bool = False  # its host was asked to freeze the job, and cannot know how far that came once flooded
    rests: bool = False  # its daemons have ended, or its VM is stopped, to be saved
    _asleep: bool = False  # its VM sleeps, and something answers for it
    _slept: bool = False  # it was to sleep at least once
    share_cpus: Callable[[], None] = lambda: None  # a script of its host has begun, or goes on no more
    speed: float = 1.0  # of the script: below 1 where VMs claim more CPUs than their host has
    times: dict[str, float] = field(default_factory=dict)  # when it was started, had its network, its daemon, its node
    _deaf: bool = False  # its VM falls asleep or wakes: nobody answers
    _kill_waits: bool = False  # for the thaw
    _after_thaw: list[Callable[[], None]] = field(default_factory=list)

    def boot(self) -> None:
        """Begin to boot; the node registers later. A guest without a daemon never registers."""
        sound = self._is_sound()
        if self.identity.bootstrap.daemons and (self.rng.random() >= self.behaviour.mute or sound):
            seconds = self.rng.uniform(*self.behaviour.boot)
            self.times["started"] = self._now()
            self._later(min(seconds, _QUICK) if sound else seconds, self._have_network)

    def _have_network(self) -> None:
        self.times["network"] = self._now()
        if self.behaviour.customize[1]:
            self._later(self.rng.uniform(*self.behaviour.customize), self._have_daemon)
        else:
            self._have_daemon()

    def _have_daemon(self) -> None:
        self.times["daemon"] = self._now()
        self.cluster.after_restart(self._register)

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
        self._mine.append(self._run)
        if self._restored is not None:
            self.log(f"{self.name}: {job.job_id} runs, and waits for the processes of its earlier run")
            if self._permitted:
                self._attach()
            return
        self.log(f"{self.name}: the script of {job.job_id} begins")
        self._processes, self._seconds_left = self.cluster.ledger.begin(job), job.batch.seconds
        self.resume(job)

    def after_prolog(self, do: Callable[[], None]) -> None:
        """Do something now, or, in a joined spare without users, once a user has been added; not while the job's
        slurmstepd is frozen."""
        if self.waits_for_user:
            self._after_prolog.append(do)
        elif self._frozen and self._held is None:
            self._after_thaw.append(do)
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
        if self._job is job and not (self._asleep or self._deaf):
            self._suspended = True
            self._stop_script()

    def resume(self, job: JobRecord) -> None:
        if self._job is job and not (self._asleep or self._deaf):
            self._suspended = False
            self._continue_script()

    def _stop_script(self) -> None:
        if self._pause_script():
            self.share_cpus()

    def _pause_script(self) -> bool:
        computes = self._timer is not None and self._processes is not None
        if self._timer is not None and self._processes is not None:
            self._timer.cancel()
            self._timer = None
            self._seconds_left -= (self._now() - self._resumed) * self.speed
            self.cluster.ledger.stop(self._processes, self._computed, self)
        return computes

    def _continue_script(self) -> None:
        asleep = self._asleep or self._deaf
        stopped = asleep or self._suspended or self._paused or self._frozen or self._timer is not None
        if self._processes is not None and not stopped:
            self._go_on_with_script()
            self.share_cpus()

    def _go_on_with_script(self) -> None:
        if self._processes is not None:
            self._resumed = self._now()
            self.cluster.ledger.go_on(self._processes, self._computed, self.name, self)
            left = max(0.0, self._seconds_left) / self.speed
            self._timer = asyncio.get_running_loop().call_later(left, self._script_ends)

    def run_at(self, speed: float) -> None:
        """From now on the script computes at this share of a CPU's speed."""
        if speed != self.speed:
            goes_on = self._pause_script()
            self.speed = speed
            if goes_on:
                self._go_on_with_script()

    @property
    def is_computing(self) -> bool:
        """Whether a script runs here."""
        return self._timer is not None

    @property
    def _computed(self) -> float:
        """To which second of their script the processes had come when they stopped last."""
        return self._processes.job.batch.seconds - self._seconds_left if self._processes is not None else 0.0

    # --- saving, as the agent of a real guest does it (`guest.agent.saving`)

    def freeze(self, *, script: bool = True) -> None:
        """Stop the processes of the job. Raises `Broken` if its `script` is to run here, and does not."""
        if self._frozen:
            return
        if script and self._processes is None:
            raise Broken(f"there is no job with processes in {self.name}")
        self._stop_script()
        self._frozen = True
        self.log(f"{self.name}: the job is frozen")

    def cut(self) -> None:
        """Cut the frozen processes off from their run. Raises `Broken` if none are frozen."""
        if self._held is None or self._restored is not None:
            self._held, self._restored = self._memory(cut=True), None
            self._end_run()
            self.log(f"{self.name}: the job is cut off")
            self._go_on_after_thaw()

    def _memory(self, *, cut: bool) -> FrozenProcesses:
        if not self._frozen:
            raise Broken(f"the job in {self.name} is not frozen")
        return FrozenProcesses(self._processes, self._computed, cut)

    def thaw(self) -> None:
        """Let the frozen processes go on in their run. Raises `Broken` if they were cut off from it."""
        if self._held is not None:
            raise Broken(f"the job in {self.name} was cut off from its run")
        if self._frozen:
            self._frozen = False
            self._interrupt() if self._kill_waits else self._continue_script()
            self._go_on_after_thaw()

    def _go_on_after_thaw(self) -> None:
        self._kill_waits = False
        waiting, self._after_thaw = self._after_thaw, []
        for do in waiting:
            do()

    def rest(self) -> None:
        """End the daemons. The VM is stopped then, and does not go on."""
        if not self.rests:
            self._fall_silent()
            self.rests = True

    def memory(self) -> FrozenProcesses | None:
        """What is saved of the job."""
        return self._held or (self._memory(cut=False) if self._frozen else None)

    def restore(self, files: SavedFiles) -> None:
        """The guest was restored. It has not begun to boot."""
        self._restored, self._held, self._frozen = files, files.frozen, True

    @property
    def is_frozen(self) -> bool:
        return self._frozen

    @property
    def may_be_stuck(self) -> bool:
        """Whether it may have to be ended: its job may be frozen, or is to go on, and it does not answer."""
        stopped = self._frozen or self.to_freeze or self._restored is not None or self._slept
        return self.flooded and stopped

    @property
    def is_cut_off(self) -> bool:
        return self._held is not None

    @property
    def restored_from(self) -> str:
        """The name of the files that it was restored from; empty if it was not."""
        return self._restored.name if self._restored is not None else ""

    @property
    def is_restored(self) -> bool:
        return self._restored is not None

    # --- sleep: what slurmctld asks of its job meanwhile reaches nobody, but for the end of the job

    @property
    def is_suspended(self) -> bool:
        """Whether it has a job, and no process of it runs."""
        return self._suspended and self._processes is not None and not self._frozen

    def fall_asleep(self) -> None:
        """Nobody answers for a moment."""
        self._fall_silent()
        self._asleep, self._deaf, self._slept = False, True, True

    def sleep(self) -> None:
        """Something answers in its place from now on."""
        self._asleep, self._deaf = True, False
        self._answer()

    def wake_up(self) -> None:
        self._asleep = self._deaf = False
        self._answer()

    def settle(self, *, runs: bool) -> None:
        """Let its job go on, or stop it."""
        if self._job is not None and not self._frozen:
            (self.resume if runs else self.suspend)(self._job)

    def attach(self) -> bool:
        """Permit the next run to go on with the processes that were restored. Whether they go on now."""
        self._permitted = True
        if self._processes is not None:
            self.thaw()
            return True
        if self._held is None or self._held.which is None:  # the script does not run here
            self._held, self._frozen = None, False
            self._go_on_after_thaw()
            return True
        return self._job is not None and self._attach()

    def _attach(self) -> bool:
        if self._held is None or self._restored is None or self._job is None:
            return False
        found = self.cluster.ledger.attach(self._restored, self._job, self.name, self)
        if found is None or found.which is None:
            return False
        self._check_others(self._restored, self._job)
        self.log(f"{self.name}: {self._job.job_id} goes on after {found.computed:.3f} s")
        self._held, self._frozen, self._processes = None, False, found.which
        self._seconds_left = found.which.job.batch.seconds - found.computed
        self._continue_script()
        return True

    def _check_others(self, files: SavedFiles, job: JobRecord) -> None:
        """The other VMs of a job go on as they were saved with this one."""
        number = files.name.rpartition("-")[2]
        for name in job.nodes:
            node = self.cluster.nodes.get(name)
            restored = node.guest.restored_from if node is not None else ""
            if restored != f"{name}-{number}":
                told = (
                    f"job {job.job_id} goes on in {self.name} as {files.name}, and in {name} as {restored or 'nothing'}"
                )
                self.cluster.violations.append(told)

    def kill(self, job: JobRecord) -> None:
        """End the job's script, if the script runs here."""
        if self._silent:
            self._unsent.append(lambda: self.kill(job))
        elif self._job is job and self._frozen and self._processes is not None:
            self._kill_waits = True  # for its slurmstepd, which is frozen too
        elif self._job is job:
            self._interrupt()

    def finish(self, job: JobRecord) -> bool:
        """End the job's script now as if its time had passed. False if the script does not run here."""
        if self._job is not job:
            return False
        if self._processes is not None:
            self._stop_script()
            self._processes.computed, self._seconds_left = job.batch.seconds, 0.0
        self._script_ends()
        return True

    @property
    def reachable(self) -> bool:
        return self.alive and not self._silent

    @property
    def _silent(self) -> bool:
        return self._cut_off or self._paused or self.rests or self._deaf

    def has_run(self, job: JobRecord) -> bool:
        """Whether this guest knows this very run of the job: running, ended, or waiting for its user."""
        return (job.number, job.restarts) in self._waiting or any(
            (run.job, run.restarts) == (job.number, job.restarts) for run in self._mine
        )

    def executes(self, job: JobRecord) -> bool:
        """Whether a run of the job goes on here, or its processes are frozen and not cut off."""
        return self._job is job

    def has_run_before(self, job: JobRecord) -> bool:
        """Whether this guest knows an earlier run of the job."""
        return any(run.job == job.number and run.restarts < job.restarts for run in self._mine)

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
        assert job is not None and run is not None and self._processes is not None
        run.completed = self._processes.completed = True
        self._interrupt()
        self.log(f"{self.name}: the script of {job.job_id} has ended")
        self.send(lambda: self.cluster.script_ended(job, run))

    def _interrupt(self) -> None:
        self._stop_script()
        self._end_run()
        self._permitted = False

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.ended = self._now()
        self._job = self._run = self._processes = None
        self._suspended = False

    def _register(self) -> None:
        if not self.alive:
            return
        registration = Registration.unpack(self.identity.bootstrap)
        if self._silent or not self.cluster.register(self, registration, small=self._registers_small()):
            self._later(self.behaviour.retry, self._register)
        else:
            self.times["node"] = self._now()

    def _registers_small(self) -> bool:
        chosen = self.behaviour.small > 0 and self.rng.random() < self.behaviour.small
        return chosen and not self._is_sound()

    def _is_sound(self) -> bool:
        return self.behaviour.until is not None and self._now() >= self.behaviour.until

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, do)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
