"""Jobs whose VMs move between the two hosts of a lab: by the real controller, agents and Slurm, watched from inside."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse.host import manifest
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabHost, LabOptions, load
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.moving_jobs import Step, Terminal, begin, digest_of, install, move, result, vm_named, vms_of
from tests.integration.stream_server import StreamServer
from tests.integration.test_gangs import OPEN_MPI
from tests.integration.test_hosts import on, own_settings, pid_of, plan_of, reached, up_again
from tests.integration.watch import SLURMS_DELAY, accounted, ended, kill, latest, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]


@pytest.fixture(scope="module")
def two(accelerator: Path) -> Iterator[LabUnderTest]:
    """Two hosts with a router between them, so that their VMs reach each other by a VXLAN."""
    slim()
    wishes = LabOptions(
        hosts=2, routed=True, cores=8, memory=8192, settings={"pacing": {"silence": 600.0}, "fence": {"after": 600.0}}
    )
    with new_lab(accelerator, wishes, controller=True) as made:
        install(made.user.home)
        yield made


@pytest.fixture(scope="module")
def client(two: LabUnderTest) -> Iterator[Client]:
    with Client(two.settings.socket) as made:
        both_are_reached(two, made)
        for host in plan_of(two.where):
            made.template("build", "slim", host.name)
        until("both have a template", lambda: [one["state"] for one in made.templates()] == ["ready"] * 2)
        yield made


# --- what a host has -----------------------------------------------------------------------------------

_BELONGINGS = """
cd {root}; ls -A controller/vms run/vms
ls /sys/class/net
nft list ruleset
bridge fdb show | grep -v master | sort
ip neigh show nud permanent | sort
cat /proc/[0-9]*/comm 2>&1 | grep -E 'qemu|zstd' | sort
find /sys/fs/cgroup -name 'mv*-[0-9]*' 2>&1; true
"""


def belongings(lab: LabUnderTest) -> dict[str, str]:
    """Files, interfaces, firewall, entries of the VXLAN, processes and control groups of each host's VMs."""
    command = _BELONGINGS.format(root=lab.where.root)
    return {host.name: on(lab, host, command) for host in plan_of(lab.where)}


def capacity(client: Client) -> list[tuple[Any, ...]]:
    """What is taken of each host and of its NUMA nodes."""
    taken = lambda one: [node["taken"] for node in one["numa"]]  # noqa: E731
    return [(one["name"], one["state"], one["claimed"], one["vms"], taken(one)) for one in client.hosts()]


# --- twenty moves, watched from inside -----------------------------------------------------------------

_POOL = """
[[pool]]
depth = "joined"
min = 1
memory = 300
"""

_WATCHES = """
cd {home}
python3 clock.py {home} clock &
python3 files.py {home} own /var/tmp &
python3 files.py {home} shared {home} &
python3 stream.py {home} inside {peer} &
srun -Q --overlap python3 stream.py {home} outside {here} &
wait
sha256sum /var/tmp/own.blocks /var/tmp/own.blocks.mapped | cut -d' ' -f1 > {home}/own.digests
"""

_RING = "mpirun python3 {home}/ring.py {home} ring {library}"

# Names of VMs; which move at the same time. A VM that has moved away moves back the next time.
TWENTY = [
    ("watching", "peer"), ("steps", "terminal"), ("ring1", "peer"), ("watching", "ring2"), ("ring1", "steps"),
    ("peer", "watching"), ("ring2", "terminal"), ("steps", "ring1"), ("peer", "ring2"), ("terminal", "watching"),
]  # fmt: skip


class Watched:
    """Jobs that run while their VMs move, and all that is seen of them. The sequence is that of the methods."""

    def __init__(self, lab: LabUnderTest, client: Client, stack: ExitStack) -> None:
        self.lab, self.client = lab, client
        self.home = lab.user.home
        self.before, self.free_before = belongings(lab), capacity(client)
        self.jobs: dict[str, str] = {}
        self.vms: dict[str, str] = {}
        self.typed: list[str] = []
        self.steps: dict[str, Step] = {}
        self.outside = stack.enter_context(closing(StreamServer()))
        self._stack = stack

    def begin(self) -> None:
        lab, home = self.lab, self.home
        with own_settings(lab, _POOL):
            spares = lab.settings.slurm.inbox / "spares" / "list"
            until("a spare is on offer", lambda: spares.exists() and "mv" in spares.read_text())
            self._begin("peer", f"exec python3 {home}/server.py {home} peer", "--mem=250")
            until("the peer listens", (home / "peer.listens").exists)
        peer = " ".join(map(str, json.loads((home / "peer.listens").read_text())))
        plan = load(lab.where)
        assert plan is not None
        here = f"{plan.gateway} {self.outside.port}"
        self._begin("watching", _WATCHES.format(home=home, peer=peer, here=here), "-c2", "--mem=500")
        self._begin("ring", _RING.format(home=home, library=OPEN_MPI), "-N4", "--ntasks-per-node=1", "--mem=400")
        self.jobs["steps"] = self._allocate("until [ -e stop ]; do sleep 0.2; done")
        self.terminal = self._stack.enter_context(closing(Terminal(lab, "--job-name=terminal", "--mem=300")))
        self.jobs["terminal"] = self.terminal.ask("echo $SLURM_JOB_ID")
        until("the ring runs", (home / "ring.runs").exists)
        for name, job in self.jobs.items():
            found = sorted(vm["name"] for vm in vms_of(self.client, job))
            self.vms |= {name: found[0]} if len(found) == 1 else {f"{name}{n}": vm for n, vm in enumerate(found, 1)}
        self.step("before")
        self.type()

    def _begin(self, name: str, script: str, *options: str) -> None:
        job = self.lab.sbatch(script, f"--job-name={name}", f"--output={self.home}/{name}.out", *options)
        until(f"{name} runs", lambda: latest(self.client, job).get("state") == "allocated")
        self.jobs[name] = job

    def _allocate(self, script: str) -> str:
        """The id of a job by salloc, which runs a script here."""
        told = self.home / "steps.id"
        self.allocated = begin(self.lab, "salloc", "--quiet", "sh", "-c", f"echo $SLURM_JOB_ID > {told}; {script}")
        self._stack.callback(self.allocated.kill)
        return str(until("salloc has its job", lambda: told.exists() and told.read_text().strip()))

    def step(self, name: str) -> None:
        self.steps[name] = self._stack.enter_context(closing(Step(self.lab, self.jobs["steps"], name)))

    def type(self) -> None:
        """Type a line into the shell, which answers."""
        self.typed.append(self.terminal.ask("n=$((n + 1)); echo $n $(hostname) > /var/tmp/typed; cat /var/tmp/typed"))

    def move(self) -> None:
        for number, names in enumerate(TWENTY):
            move(self.client, *(self.vms[name] for name in names), meanwhile=partial(self._meanwhile, number))
            self.type()

    def _meanwhile(self, number: int) -> None:
        self.type()
        if "steps" in TWENTY[number] and "during" not in self.steps:
            self.step("during")
        elif "steps" in TWENTY[number] and "after" not in self.steps:
            self.steps["before"].end()
            self.steps["during"].end()
            self.step("after")

    def end(self) -> None:
        """All end as their users wish. What was seen meanwhile is kept: rows of ended VMs are shown no more."""
        self.timelines = {name: self.client.timeline(job) for name, job in self.jobs.items()}
        self.explained = {name: self.client.explain(job)["jobs"][0]["text"] for name, job in self.jobs.items()}
        self.meanwhile = belongings(self.lab)
        self.shown = {name: vm_named(self.client, vm) for name, vm in self.vms.items()}
        self.steps["after"].end()
        (self.home / "stop").touch()
        self.left = (self.terminal.leave(), self.allocated.wait(60))
        for job in self.jobs.values():
            ended(self.client, job, "done")
        until("no VM is left", lambda: not self.client.vms())


@pytest.fixture(scope="module")
def watched(two: LabUnderTest, client: Client) -> Iterator[Watched]:
    with ExitStack() as stack:
        made = Watched(two, client, stack)
        made.begin()
        made.move()
        made.end()
        yield made


def test_all_jobs_and_steps_end_well(watched: Watched) -> None:
    for job in watched.jobs.values():
        assert accounted(watched.lab, job) == ("COMPLETED", "0:0")
    for name in ("peer", "watching", "ring"):
        assert (watched.home / f"{name}.out").read_text() == ""
    for name, number in (("watching", 1), ("steps", 3)):
        asked = ("sacct", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", watched.jobs[name])
        steps = [line for line in watched.lab.run(*asked).stdout.splitlines() if re.search(r"\.\d+\|", line)]
        assert len(steps) == number and all(line.endswith("|COMPLETED|0:0") for line in steps), steps


def test_time_goes_on(watched: Watched) -> None:
    seen = result(watched.home, "clock")
    assert seen["back"] == 0 and seen["count"] > 100, seen


@pytest.mark.parametrize("name", ["own", "shared"])
def test_files_hold_what_was_written(watched: Watched, name: str) -> None:
    """By calls and by a mapping: on the VM's own disk, and on NFS as other machines see it."""
    seen = result(watched.home, name)
    assert seen["wrong"] == 0 and seen["written"] > 20, seen
    if name == "own":
        assert (watched.home / "own.digests").read_text().split() == seen["digests"]
    else:
        files = (watched.home / "shared.blocks", watched.home / "shared.blocks.mapped")
        assert [digest_of(path) for path in files] == seen["digests"]


def test_streams_arrive_whole(watched: Watched) -> None:
    """To a VM of another job, which moves, too, and to a machine outside."""
    for sent, got in (("inside", result(watched.home, "peer")), ("outside", watched.outside.result())):
        seen = result(watched.home, sent)
        assert seen["wrong"] == got["wrong"] == 0
        assert (seen["sent"], seen["digest"]) == (got["got"], got["digest"]) and got["got"] > 20


def test_a_ring_of_mpi_goes_round(watched: Watched) -> None:
    seen = [result(watched.home, f"ring.{rank}") for rank in range(4)]
    assert len({one["laps"] for one in seen}) == 1 and seen[0]["laps"] > 20, seen
    assert all((one["wrong"], one["size"]) == (0, 4) for one in seen)


def test_a_shell_answers_each_line(watched: Watched) -> None:
    vm = watched.vms["terminal"]
    assert watched.typed == [f"{n} {vm}" for n in range(1, len(watched.typed) + 1)]
    assert watched.left == (0, 0), "of srun and salloc"


def test_it_is_told_where_they_were(watched: Watched) -> None:
    moves = Counter(name for names in TWENTY for name in names)
    assert moves.total() == 20
    for name, vm in watched.shown.items():
        job = name.rstrip("0123456789")
        (timeline,) = watched.timelines[job]  # it ran once
        told = Counter(
            (one["event"], bool(one["state"])) for one in timeline["entries"] if one["subject"] == subject(vm)
        )
        assert told["move", True] == told["move", False] == told["moved", True] == moves[name], timeline
        assert vm["state"] == "serving" and f"{vm['name']} on {vm['host']}" in watched.explained[job]
    taken = [one["event"] for one in watched.timelines["peer"][0]["entries"]]
    assert "took a spare" in taken, "its user was added after its VM's start"


def subject(vm: dict[str, Any]) -> str:
    return f"vm {vm['name'].rpartition('-')[2]}"


def test_what_they_used_on_all_hosts_counts(watched: Watched) -> None:
    for name in ("watching", "peer", "steps"):
        with closing(sqlite3.connect(watched.lab.settings.state_dir / "multiverse.db")) as database:
            found = database.execute(
                "SELECT job_usage.body FROM job_usage JOIN attempts ON attempts.id = job_usage.attempt"
                " WHERE attempts.job_id = ?", (watched.jobs[name],),
            ).fetchall()  # fmt: skip
        (used,) = (json.loads(body) for (body,) in found)
        assert used["known"] == 1 and used["cpu_s"] > used["moved_s"] > used["cpu_s"] / 4, used


def test_slurmctld_has_noticed_nothing(watched: Watched) -> None:
    """slurmctld may hear of a node that it has just deleted."""
    names = "|".join(map(re.escape, watched.vms.values()))
    log = (watched.lab.where.log / "slurmctld.log").read_text().splitlines()
    told = [line for line in log if re.search(rf"(error|responding|DOWN).*\b({names})\b", line)]
    assert not [line for line in told if "lookup failure" not in line and "unable to find" not in line]


def test_nothing_is_left(watched: Watched) -> None:
    named = [name for name in watched.vms.values() if any(name in text for text in watched.meanwhile.values())]
    assert len(named) == len(watched.vms), "what is looked at shows each VM while it is there"
    until("all is as before", lambda: belongings(watched.lab) == watched.before, 30)
    assert capacity(watched.client) == watched.free_before


# --- what can happen in the middle of a move -----------------------------------------------------------

_COUNTS = """
cd {place}
run=run${{SLURM_RESTART_COUNT:-0}}
python3 {home}/files.py {place} $run.own /var/tmp &
n=0
until [ -e stop ]; do
    n=$((n + 1))
    echo $n >> $run
    dd if=/dev/urandom of=/var/tmp/grows bs=64k count=1 oflag=append conv=notrunc,fsync status=none
    sleep 0.2
done
wait
"""
_MIDDLE = 40 << 20  # bytes that have left the source by then; there are three times as many


@dataclass(frozen=True)
class MovingJob:
    """A job that counts, whose VM is in the middle of a slow move. `place` is its directory."""

    lab: LabUnderTest
    client: Client
    job: str
    place: Path
    vm: str
    source: LabHost
    target: LabHost

    @property
    def state(self) -> str:
        return str(vm_named(self.client, self.vm).get("state"))

    @property
    def explained(self) -> str:
        return str(self.client.explain(self.job)["jobs"][0]["text"])

    def begin(self) -> None:
        before = self._sent()
        self.client.move(self.job)
        until("the move is in the middle", lambda: self._sent() > before + _MIDDLE)
        assert self.state == "moving"
        said = f"Its VM {self.vm} moves from {self.source.name} to {self.target.name}"
        assert said in self.explained

    def _sent(self) -> int:
        """Bytes that the VM's host has sent to other machines."""
        return int(on(self.lab, self.source, "cat /sys/class/net/underlay/statistics/tx_bytes"))

    def counted(self, run: int = 0) -> list[int]:
        """The numbers that the job has written. Two VMs would write some of them twice."""
        path = self.place / f"run{run}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def goes_on(self) -> None:
        counted = len(self.counted())
        until("the job goes on", lambda: len(self.counted()) > counted + 3)

    def goes_on_at(self, host: LabHost) -> None:
        """It runs there, and nothing of it is left at the other host."""
        other = self.target if host is self.source else self.source
        until("the move is over", lambda: self.state == "serving")
        assert vm_named(self.client, self.vm)["host"] == host.name, self.client.timeline(self.job)
        self.goes_on()
        until("nothing is left of it", lambda: self.vm not in self.files_at(other))
        assert f"{self.vm} on {host.name}" in self.explained and "settle" not in self.explained

    def files_at(self, host: LabHost) -> list[str]:
        """The names of the VMs that have files on a host."""
        return on(self.lab, host, f"ls {self.lab.where.controller}/vms").split()

    def told(self) -> str:
        """What its timeline says since its move was begun."""
        entries = [one for attempt in self.client.timeline(self.job) for one in attempt["entries"]]
        begun = max(n for n, one in enumerate(entries) if one["event"] == "move" and one["state"])
        return "\n".join(f"{one['event']}: {one['reason']}" for one in entries[begun:])

    def ends(self, run: int = 0) -> None:
        """Let it end. Each run has counted once, and the disk of the last one holds what it has written."""
        (self.place / "stop").touch()
        ended(self.client, self.job, "done")
        assert accounted(self.lab, self.job) == ("COMPLETED", "0:0")
        for each in range(run + 1):
            counted = self.counted(each)
            assert counted == list(range(1, len(counted) + 1)), "no number twice, and none left out"
        assert not self.counted(run + 1) and result(self.place, f"run{run}.own")["wrong"] == 0

    def kill_qemu(self, host: LabHost) -> None:
        known = manifest.read(self.lab.where.host(host.name).controller / "vms" / self.vm)
        assert known is not None
        on(self.lab, host, f"kill -9 {known.pid}")


@pytest.fixture(scope="module")
def slow_moves(two: LabUnderTest, client: Client) -> Iterator[None]:
    """Moves take some ten seconds."""
    with own_settings(two, "[move]\nbandwidth = 16\n[host]\ndisk_floor = 16\n"):
        both_are_reached(two, client)
        yield


def both_are_reached(lab: LabUnderTest, client: Client) -> None:
    until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(lab.where)))


@pytest.fixture
def counting(
    two: LabUnderTest, client: Client, slow_moves: None, request: pytest.FixtureRequest
) -> Iterator[MovingJob]:
    """Such a job, whose VM does not move yet."""
    place = two.user.home / re.sub(r"\W", "-", request.node.name)
    place.mkdir()
    os.chown(place, two.user.uid, two.user.uid)
    job = two.sbatch(_COUNTS.format(home=two.user.home, place=place), "--mem=300", "--requeue", f"--output={place}/out")
    until("it counts", (place / "run0").exists)
    (vm,) = vms_of(client, job)
    hosts = {host.name: host for host in plan_of(two.where)}
    source = hosts.pop(vm["host"])
    yield MovingJob(two, client, job, place, vm["name"], source, *hosts.values())
    two.run("scancel", job, check=False)
    until("no VM is left", lambda: not client.vms())


@pytest.fixture
def moving(counting: MovingJob) -> MovingJob:
    counting.begin()
    return counting


_CUT = """
table netdev cut {
    chain in { type filter hook ingress device underlay priority 0; policy drop; }
    chain out { type filter hook egress device underlay priority 0; policy drop; }
}
"""


@contextmanager
def cut_off(lab: LabUnderTest, host: LabHost) -> Iterator[None]:
    """The host reaches no other machine, and its VMs neither."""
    nft = ["nsenter", f"--target={pid_of(lab.where, host)}", "--net", "nft"]
    subprocess.run([*nft, "-f", "-"], input=_CUT, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "netdev", "cut"], check=True)


def test_the_link_is_cut(moving: MovingJob) -> None:
    """The job goes on while its host does not know what the other one has, and moves when the link is back."""
    hosts = (moving.source, moving.target)
    with cut_off(moving.lab, moving.target):
        until("the move is given up", lambda: moving.state == "settling")
        moving.goes_on()
        assert f"Hosts {hosts[0].name} and {hosts[1].name} settle" in moving.explained
    moving.goes_on_at(moving.source)
    assert "stayed: its memory could not be sent" in moving.told()
    move(moving.client, moving.vm)
    moving.goes_on_at(moving.target)
    moving.ends()


def test_the_host_that_it_leaves_is_cut_off(moving: MovingJob) -> None:
    """Its VM with it. The move is over when the link is back, and the job has waited for its files."""
    with cut_off(moving.lab, moving.source):
        until("the host is out of reach", lambda: not reached(moving.client, moving.source.name))
        until("what had come to the other one is removed", lambda: moving.vm not in moving.files_at(moving.target))
    moving.goes_on_at(moving.source)
    moving.ends()


@pytest.mark.parametrize("where", ["source", "target"])
def test_an_agent_is_killed(moving: MovingJob, where: str) -> None:
    host = getattr(moving, where)
    kill(pid_of(moving.lab.where, host, 2))
    up_again(moving.lab)
    moving.goes_on_at(moving.source)
    assert f"the agent of {host.name}" in moving.told() and f"it is not on host {moving.target.name}" in moving.told()
    moving.ends()


def test_the_qemu_that_it_leaves_is_killed(moving: MovingJob) -> None:
    """Its VM has died: Slurm queues the job again."""
    moving.kill_qemu(moving.source)
    until("the job runs again", lambda: moving.counted(1), SLURMS_DELAY + 60)
    assert f"VM {moving.vm} has ended" in moving.told() and "out of reach" not in moving.told()
    moving.ends(run=1)


def test_the_qemu_that_is_to_receive_it_is_killed(moving: MovingJob) -> None:
    moving.kill_qemu(moving.target)
    moving.goes_on_at(moving.source)
    assert re.search(r"stayed: its (disk could not be copied|memory could not be sent)", moving.told())
    moving.ends()


def test_the_disk_of_the_target_is_full(counting: MovingJob) -> None:
    lab, target, vms = counting.lab, counting.target, counting.lab.where.controller / "vms"

    def begin_anew() -> None:  # the agent has the old directory open
        kill(pid_of(lab.where, target, 2))
        up_again(lab)
        both_are_reached(lab, counting.client)

    on(lab, target, f"mount -t tmpfs -o size=64m,mode=0711 tmpfs {vms}")
    begin_anew()
    try:
        counting.begin()
        on(lab, target, f"dd if=/dev/zero of={vms}/fills bs=64k status=none 2>&1; true")
        counting.goes_on_at(counting.source)
        assert "stayed: its disk could not be copied: it could not be written on the other host" in counting.told()
        counting.ends()
    finally:
        on(lab, target, f"umount -l {vms}")
        begin_anew()


def test_the_controller_is_killed(moving: MovingJob) -> None:
    """The hosts go on by themselves, and the next controller learns where the VM is."""
    kill(lifecycle.status(moving.lab.where)["controller"]["pid"])
    up_again(moving.lab)
    moving.goes_on_at(moving.target)
    assert f"moved: it is not on host {moving.source.name} any more" in moving.told()
    moving.ends()


def test_a_job_that_has_moved_is_saved_and_moves_again(counting: MovingJob) -> None:
    """The processes go on, with their files: the VM that has its state is moved by the same numbers again."""
    client, vm = counting.client, counting.vm
    for _ in range(2):
        move(client, vm)
        counting.goes_on()
        client.save(counting.job)
        until("its state is used", lambda: not client.saved())
        counting.goes_on()
        until("its VM serves it", lambda: vm_named(client, vm).get("state") == "serving")
    move(client, vm)
    counting.goes_on()
    counting.ends()


def test_a_host_that_is_drained_is_emptied_as_the_other_has_room(counting: MovingJob) -> None:
    """While the other host is full, the job stays, and the hosts are shown with the reason. Then it goes on there."""
    lab, client, source = counting.lab, counting.client, counting.source.name
    filling = lab.sbatch("sleep 600", "--mem=7100", "--output=/dev/null")
    until("the other host is full", lambda: [vm["state"] for vm in vms_of(client, filling)] == ["serving"])
    assert vms_of(client, filling)[0]["host"] == counting.target.name
    client.change_hosts("drain", source, move=True)
    shown = lambda: next(host for host in client.hosts() if host["name"] == source)  # noqa: E731
    try:
        until("it is told why the job stays", lambda: "now they stay: " in shown()["todo"])
        assert shown()["state"] == "draining" and vm_named(client, counting.vm)["host"] == source
        lab.run("scancel", filling)
        until("it has moved", lambda: vm_named(client, counting.vm)["host"] == counting.target.name)
        counting.goes_on_at(counting.target)
        until("the host is empty", lambda: shown()["state"] == "drained")
        counting.ends()
    finally:
        client.change_hosts("resume", source)
        lab.run("scancel", filling, check=False)
