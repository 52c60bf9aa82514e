"""The Slurm driver with a real slurmctld. Nodes are slurmds in network namespaces (see fake_guest)."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import EqualHosts, JobLimit, JobLimits
from multiverse.core.model.job import YEAR, Job, JobRef, JobState, NodeState, Preemption, SchedulerView
from multiverse.drivers.slurm.command import Completed, SlurmCommands, execute
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.reading.nodes import reached_nodes
from multiverse.drivers.slurm.site.conf import CHECKED_EVERY
from multiverse.drivers.slurm.submission import Hint, hints
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from tests.integration.fake_guest import SITE, FakeGuest, node_spec
from tests.integration.watch import accounted, until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

_serials = iter(range(1, 10000))


@pytest.fixture
def scheduler(lab: Any) -> SlurmScheduler:
    return SlurmScheduler(lab.settings, SITE)


@pytest.fixture(autouse=True)
async def clean(lab: Any) -> AsyncIterator[None]:
    """Cancel all jobs after each test."""
    yield
    lab.run("scancel", "--partition=vm", check=False)


Spawn = Callable[..., Awaitable[FakeGuest]]


@pytest.fixture
async def spawn(lab: Any, scheduler: SlurmScheduler) -> AsyncIterator[Spawn]:
    """Create a node for a job: `await spawn(job, 7)` returns when a node with the feature mv_7 is idle."""
    guests: list[FakeGuest] = []

    async def make(job: Job, number: int, peers: int = 1) -> FakeGuest:
        assert job.request is not None
        network = ipaddress.IPv4Network(lab.settings.network.subnet)
        size = Size(job.request.size.cpus, job.request.size.memory + 20)
        serials = [next(_serials) for _ in range(peers)]
        addresses = [f"{network[512 + serial]}/{network.prefixlen}" for serial in serials]
        nodes = [
            node_spec(serial, address, size, job.request.features, f"mv_{number}")
            for serial, address in zip(serials, addresses, strict=True)
        ]
        known = tuple((node.name, node.address.partition("/")[0]) for node in nodes)
        for node in nodes:
            guest = FakeGuest(lab.settings, node.name, node.address, lab.where.root.parent / "fake")
            guests.append(guest)
            await guest.start(await scheduler.bootstrap(node), known)
            await reached(scheduler, lambda view, name=guest.name: _idle(view, name))
        return guests[-1]

    yield make
    for guest in guests:
        await scheduler.set_down(guest.name, "the test has ended")
        await guest.stop()
        while True:
            try:
                await scheduler.delete_node(guest.name)
                break
            except Refused:
                await asyncio.sleep(0.2)


def _idle(view: SchedulerView, name: str) -> bool:
    return name in view.nodes and view.nodes[name].state is NodeState.IDLE


async def reached(
    scheduler: SlurmScheduler, what: Callable[[SchedulerView], bool], timeout: float = 20.0
) -> SchedulerView:
    deadline = time.monotonic() + timeout
    while True:
        view = await scheduler.observe()
        if what(view):
            return view
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.1)


async def job_of(scheduler: SlurmScheduler, job_id: str) -> Job:
    return (await scheduler.observe()).jobs[job_id]


async def became(scheduler: SlurmScheduler, job_id: str, *states: JobState) -> Job:
    view = await reached(scheduler, lambda view: job_id in view.jobs and view.jobs[job_id].state in states)
    return view.jobs[job_id]


async def output(path: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text() if path.exists() else path
        await asyncio.sleep(0.05)


async def test_a_job_waits_at_the_gate_and_runs_when_pinned(lab: Any, scheduler: SlurmScheduler, spawn: Spawn) -> None:
    job_id = lab.sbatch("hostname; id -un; exit 3", "-C", "slim&instant", "--mem=100", "-o", "out.txt")
    waiting = await job_of(scheduler, job_id)
    assert (waiting.state, waiting.gated, waiting.eligible, waiting.held) == (JobState.PENDING, True, True, False)
    assert (waiting.uid, waiting.pinned, waiting.nodes) == (lab.user.uid, None, ())
    request = waiting.request
    assert request is not None
    assert (request.nodes, request.size, request.image, request.kind) == (1, Size(1, 100), "slim", CloneKind.INSTANT)

    guest = await spawn(waiting, 7)
    assert (await scheduler.observe()).nodes[guest.name].features == ("vm", "slim", "instant", "mv_7")
    assert (await job_of(scheduler, job_id)).state is JobState.PENDING  # the node alone does not start the job
    await scheduler.pin(waiting.ref, "mv_7", ())
    await scheduler.pin(waiting.ref, "mv_7", ())  # the second call changes nothing
    ended = await became(scheduler, job_id, JobState.ENDED)
    assert (ended.result, ended.exit_code, ended.nodes) == ("FAILED", 3, (guest.name,))
    await output(lab.user.home / "out.txt", f"{guest.name}\n{lab.user.name}\n")

    await scheduler.delete_node(guest.name)
    await scheduler.delete_node(guest.name)
    assert guest.name not in (await scheduler.observe()).nodes
    assert await asyncio.to_thread(accounted, lab, job_id) == ("FAILED", "3:0")
    assert lab.run("sacct", "-nXP", "-j", job_id, "-o", "User").stdout.strip() == lab.user.name


async def test_the_time_limit_of_a_job_is_followed_until_it_has_ended(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn
) -> None:
    """KillWait is 5 s in the lab, and slurmctld looks at limits every 30 s."""
    beyond = 5 + CHECKED_EVERY
    no_limit, job_id = lab.sbatch("true", "--hold"), lab.sbatch("sleep 100", "-C", "slim&instant", "--time=10")
    waiting = await job_of(scheduler, job_id)
    assert (waiting.limit, waiting.ends) == (600 + beyond, None)
    assert (await job_of(scheduler, no_limit)).limit == YEAR + beyond
    lab.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=1-00:00:00")
    assert (await job_of(scheduler, job_id)).limit == 86400 + beyond

    await spawn(waiting, 7)
    await scheduler.pin(waiting.ref, "mv_7", ())
    running = await became(scheduler, job_id, JobState.RUNNING)
    assert running.ends is not None and abs(running.ends - time.time() - 86400 - beyond) < 20
    lab.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=5")
    shorter = await job_of(scheduler, job_id)
    assert shorter.limit == 300 + beyond and shorter.ends is not None
    assert abs(shorter.ends - running.ends + 86400 - 300) < 2
    lab.run("scontrol", "suspend", job_id)
    assert (await became(scheduler, job_id, JobState.SUSPENDED)).ends is None
    await asyncio.sleep(3)
    lab.run("scontrol", "resume", job_id)
    resumed = await became(scheduler, job_id, JobState.RUNNING)
    assert resumed.ends is not None and 2 <= resumed.ends - shorter.ends <= 20


async def test_array_tasks_are_pinned_one_by_one_within_the_arrays_limit(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn
) -> None:
    job_id = lab.sbatch("sleep 100", "--array=0-8:2%2")
    view = await scheduler.observe()
    tasks = {name: job for name, job in view.jobs.items() if name.startswith(f"{job_id}_")}
    assert sorted(tasks, key=lambda name: tasks[name].rank) == [f"{job_id}_{i}" for i in (0, 2, 4, 6, 8)]
    limit = f"JobArrayTaskLimit: {job_id}"
    assert view.limits[limit] == 2 and all(job.uses == ((limit, 1),) for job in tasks.values())
    task = tasks[f"{job_id}_2"]
    await spawn(task, 11)
    await scheduler.pin(task.ref, "mv_11", ())
    running = await became(scheduler, task.ref.job_id, JobState.RUNNING)
    assert running.ref == task.ref
    view = await scheduler.observe()
    after = view.jobs
    assert [name for name in sorted(after) if name.startswith(f"{job_id}_") and after[name].gated] == [
        f"{job_id}_{i}" for i in (0, 4, 6, 8)
    ]
    assert view.limits[limit] == 1 and all(after[f"{job_id}_{i}"].eligible for i in (0, 4, 6, 8))


async def test_srun_waits_at_the_gate_and_runs_when_pinned(lab: Any, scheduler: SlurmScheduler, spawn: Spawn) -> None:
    process = await asyncio.create_subprocess_exec(
        *("srun", "-J", "gated-srun", "hostname"),
        env=lab.env,
        cwd=lab.user.home,
        user=lab.user.uid,
        group=lab.user.uid,
        stdout=asyncio.subprocess.PIPE,
    )
    view = await reached(scheduler, lambda view: any(job.name == "gated-srun" for job in view.jobs.values()))
    job = next(job for job in view.jobs.values() if job.name == "gated-srun")
    guest = await spawn(job, 12)
    await scheduler.pin(job.ref, "mv_12", ())
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, out.decode()) == (0, f"{guest.name}\n")


async def test_a_job_of_two_nodes_is_pinned_by_one_feature(lab: Any, scheduler: SlurmScheduler, spawn: Spawn) -> None:
    job_id = lab.sbatch("srun hostname | sort", "-N2", "-n2", "-o", "gang.txt")
    job = await job_of(scheduler, job_id)
    assert job.request is not None
    assert (job.request.nodes, job.request.size.cpus) == (2, 1)
    await spawn(job, 13, peers=2)
    await scheduler.pin(job.ref, "mv_13", ())
    ended = await became(scheduler, job_id, JobState.ENDED)
    assert (ended.result, len(ended.nodes)) == ("COMPLETED", 2)
    await output(lab.user.home / "gang.txt", "".join(f"{name}\n" for name in sorted(ended.nodes)))


async def test_the_job_of_a_failed_node_is_requeued_and_starts_at_once_when_pinned(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn
) -> None:
    job_id = lab.sbatch("sleep 100")
    first = await job_of(scheduler, job_id)
    guest = await spawn(first, 21)
    await scheduler.pin(first.ref, "mv_21", ())
    await became(scheduler, job_id, JobState.RUNNING)
    with pytest.raises(Refused):
        await scheduler.delete_node(guest.name)
    await scheduler.set_down(guest.name, "lost")
    await scheduler.set_down(guest.name, "lost")
    again = await became(scheduler, job_id, JobState.PENDING)
    assert (again.ref.restarts, again.pinned, again.gated) == (1, "mv_21", False)
    assert (await scheduler.observe()).nodes[guest.name].is_unusable
    with pytest.raises(Stale):
        await scheduler.pin(first.ref, "mv_21", ())
    await scheduler.unpin(again.ref)
    await scheduler.unpin(again.ref)
    gated = await job_of(scheduler, job_id)
    assert (gated.gated, gated.pinned, gated.eligible) == (True, None, True)
    await guest.stop()
    await scheduler.delete_node(guest.name)
    await spawn(gated, 22)
    await scheduler.pin(gated.ref, "mv_22", (), at_once=True)
    assert (await became(scheduler, job_id, JobState.RUNNING)).ref == gated.ref


@pytest.mark.slow
async def test_a_node_that_is_drained_under_its_job_answers_and_one_that_is_silent_is_not_given_up_yet(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn
) -> None:
    job_id = lab.sbatch("sleep 300")
    job = await job_of(scheduler, job_id)
    guest = await spawn(job, 25)
    await scheduler.pin(job.ref, "mv_25", ())
    await became(scheduler, job_id, JobState.RUNNING)
    lab.run("scontrol", "update", f"NodeName={guest.name}", "State=DRAIN", "Reason=memory")
    node = (await scheduler.observe()).nodes[guest.name]
    assert (node.state, node.answers, node.is_given_up) == (NodeState.DRAINED, True, False)
    commands = SlurmCommands(lab.settings.slurm)
    assert guest.name in await reached_nodes(commands, SITE)
    await guest.stop()
    view = await reached(scheduler, lambda view: not view.nodes[guest.name].answers, 60.0)
    assert (view.nodes[guest.name].state, view.jobs[job_id].state) == (NodeState.SILENT, JobState.RUNNING)
    assert guest.name not in await reached_nodes(commands, SITE)


async def test_requeue_stops_a_run_and_puts_the_job_back_at_the_gate(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn
) -> None:
    job_id = lab.sbatch("trap '' TERM; sleep 100 & wait; sleep 100")
    job = await job_of(scheduler, job_id)
    await spawn(job, 31)
    await scheduler.pin(job.ref, "mv_31", ())
    await became(scheduler, job_id, JobState.RUNNING)
    await scheduler.requeue(job.ref)
    ending = await job_of(scheduler, job_id)
    if ending.state is JobState.COMPLETING:  # the run that was stopped is still completing
        assert ending.ref == job.ref
        await scheduler.requeue(job.ref)
    back = await became(scheduler, job_id, JobState.PENDING)
    assert (back.ref.restarts, back.gated, back.pinned, back.eligible) == (1, True, None, True)
    with pytest.raises(Stale):
        await scheduler.requeue(job.ref)
    await scheduler.pin(back.ref, "mv_31", (), at_once=True)
    assert (await became(scheduler, job_id, JobState.RUNNING)).ref == back.ref


async def test_a_job_that_is_cancelled_held_or_dependent_is_not_pinned(lab: Any, scheduler: SlurmScheduler) -> None:
    held = lab.sbatch("true", "--hold")
    dependent = lab.sbatch("true", f"--dependency=afterok:{held}")
    later = lab.sbatch("true", "--begin=now+1000")
    view = await scheduler.observe()
    for job_id in (held, dependent, later):
        assert not view.jobs[job_id].eligible, view.jobs[job_id]
    assert [view.jobs[job_id].held for job_id in (held, dependent, later)] == [True, False, False]
    with pytest.raises(Stale):
        await scheduler.pin(view.jobs[held].ref, "mv_1", ())
    await scheduler.unpin(view.jobs[held].ref)
    assert (await job_of(scheduler, held)).held  # only the user may release it
    lab.run("scancel", held, user=lab.user)
    cancelled = await became(scheduler, held, JobState.ENDED)
    assert cancelled.result == "CANCELLED"
    for call in (
        scheduler.pin(cancelled.ref, "mv_1", ()),
        scheduler.unpin(cancelled.ref),
        scheduler.requeue(cancelled.ref),
    ):
        with pytest.raises(Stale):
            await call


async def test_a_revoked_job_is_cancelled_with_a_reason(lab: Any, scheduler: SlurmScheduler) -> None:
    job_id = lab.sbatch("true")
    job = await job_of(scheduler, job_id)
    await scheduler.explain([job.ref], 'waits for "memory"\nof a host')
    assert (
        "AdminComment=[multiverse: waits for 'memory' of a host]" in lab.run("scontrol", "show", "job", job_id).stdout
    )
    await scheduler.revoke(job.ref, "no host has 900 GiB")
    await scheduler.revoke(job.ref, "no host has 900 GiB")
    assert (await became(scheduler, job_id, JobState.ENDED)).result == "CANCELLED"
    assert "AdminComment=[multiverse: no host has 900 GiB]" in lab.run("scontrol", "show", "job", job_id).stdout


async def test_many_jobs_that_are_revoked_at_once_use_few_processes_and_are_observed_meanwhile(lab: Any) -> None:
    running = most = 0

    async def counted(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await execute(argv, env, timeout)
        finally:
            running -= 1

    settings = replace(lab.settings, slurm=replace(lab.settings.slurm, commands=4))
    scheduler = SlurmScheduler(settings, SITE, execute=counted)
    array = lab.sbatch("true", "--array=1-60", "--output=/dev/null")
    jobs = [await job_of(scheduler, f"{array}_{task}") for task in (1, 60)]
    refs = [replace(jobs[0].ref, job_id=f"{array}_{task}") for task in range(1, 61)]
    revocations = asyncio.gather(*(scheduler.revoke(ref, "no host has room") for ref in refs))
    views = 0
    while not revocations.done():
        await scheduler.observe()
        views += 1
    await revocations
    assert most <= 4 and views >= 3, (most, views)
    shown = lab.run("squeue", "-h", "-r", "-a", "-t", "all", "-j", array, "-o", "%T").stdout.split()
    assert set(shown) == {"CANCELLED"} and len(shown) == 60


async def test_an_array_is_told_as_one_record_and_not_split(lab: Any, scheduler: SlurmScheduler) -> None:
    def records() -> dict[str, str]:
        """The comments of the array's records, by the tasks that share them."""
        rows = lab.run("squeue", "-h", "-a", "-r", "-j", base, "-O", "JobID:0;,ArrayTaskID:0;,admin_comment:0").stdout
        found: dict[tuple[str, str], str] = {}
        for number, task, comment in (row.split(";", 2) for row in rows.splitlines()):
            found[number, comment] = ",".join(filter(None, (found.get((number, comment)), task)))
        return {tasks: comment.replace("(null)", "") for (_, comment), tasks in found.items()}

    base = lab.sbatch("true", "--array=0-40:2%3")
    one = await job_of(scheduler, f"{base}_6")
    lab.run("scontrol", "update", f"JobId={base}_8", "AdminComment=reviewed")
    lab.run("scontrol", "hold", f"{base}_12")
    shared = "0,2,4,6,10,14,16,18,20,22,24,26,28,30,32,34,36,38,40"
    assert records() == {shared: "", "8": "reviewed", "12": ""}
    for line in ("the hosts are full", "it is its turn"):
        await scheduler.explain([one.ref], line)
        assert records() == {
            shared: f"[multiverse: {line}]",
            "8": f"reviewed [multiverse: {line}]",
            "12": "",
        }
    lab.run("scancel", f"{base}_[{shared}]")
    (left,) = [task for task in (await scheduler.observe()).jobs.values() if task.ref.job_id == f"{base}_8"]
    await scheduler.explain([left.ref], "the last one")
    assert records()["8"] == "reviewed [multiverse: the last one]"


async def test_many_jobs_are_told_at_once_and_none_is_written_to_twice(lab: Any, scheduler: SlurmScheduler) -> None:
    ids = [lab.sbatch("true") for _ in range(3)] + [lab.sbatch("true", "--array=1-3") + "_1"]
    refs = [(await job_of(scheduler, job_id)).ref for job_id in ids]
    lab.run("scontrol", "update", f"JobId={ids[1]}", "AdminComment=two\nlines ;")
    await scheduler.explain(refs, "waiting behind earlier jobs")
    shown = lab.run("scontrol", "show", "job").stdout
    assert shown.count("[multiverse: waiting behind earlier jobs]") == 4 and "two\nlines ; [multiverse" in shown
    log = lab.where.root.rglob("slurmctld.log")
    before = [path.read_text().count("setting admin_comment") for path in log]
    await scheduler.explain(refs, "waiting behind earlier jobs")
    after = [path.read_text().count("setting admin_comment") for path in lab.where.root.rglob("slurmctld.log")]
    assert before == after and sum(before) >= 5


async def test_another_run_of_a_job_is_not_changed(lab: Any, scheduler: SlurmScheduler) -> None:
    job = await job_of(scheduler, lab.sbatch("true"))
    wrong = (replace(job.ref, restarts=1), replace(job.ref, submitted=job.ref.submitted - 5))
    for ref, error in ((wrong[0], Stale), (wrong[1], Stale), (JobRef("99999999", 1), Gone)):
        for call in (
            scheduler.pin(ref, "mv_1", ()),
            scheduler.unpin(ref),
            scheduler.requeue(ref),
            scheduler.revoke(ref, "x"),
        ):
            with pytest.raises(error):
                await call
        await scheduler.explain([ref], "x")
    assert "AdminComment" not in lab.run("scontrol", "show", "job", job.ref.job_id).stdout
    after = await job_of(scheduler, job.ref.job_id)
    assert after._replace(reason="", rank=0) == job._replace(reason="", rank=0)
    await scheduler.set_down(f"mv{SITE}-99999", "never was")
    await scheduler.delete_node(f"mv{SITE}-99999")


async def test_without_an_answer_of_slurmctld_the_view_is_unknown(lab: Any, tmp_path: Path) -> None:
    text = lab.where.slurm_conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1#")
    (tmp_path / "slurm.conf").write_text(text)
    settings: Settings = replace(lab.settings, slurm=replace(lab.settings.slurm, conf=tmp_path / "slurm.conf"))
    for timeout in (1.0, 20.0):
        settings = replace(settings, slurm=replace(settings.slurm, command_timeout=timeout))
        with pytest.raises(Unknown):
            await SlurmScheduler(settings, SITE).observe()


async def test_a_bootstrap_holds_the_key_and_slurmctlds_address(lab: Any, scheduler: SlurmScheduler) -> None:
    user = await scheduler.user(lab.user.uid)
    assert (user.name, user.home, user.groups) == (lab.user.name, str(lab.user.home), ((lab.user.name, lab.user.uid),))
    with pytest.raises(Gone):
        await scheduler.user(61999)
    bootstrap = await scheduler.bootstrap(node_spec(1, "10.0.0.9/16", Size(1, 200), (), "mv_1"))
    files = {file.path: file for file in bootstrap.files}
    key = files["/etc/munge/munge.key"]
    assert (key.mode, key.owner, key.content) == (0o400, "munge", lab.where.munge_key.read_bytes())
    assert f"({lab.settings.network.gateway})" in files["/etc/slurm/multiverse-slurmd.conf"].content.decode()


async def test_submission_and_end_of_a_job_leave_hints(lab: Any, scheduler: SlurmScheduler, spawn: Spawn) -> None:
    seen: set[Hint] = set()

    async def listen() -> None:
        async for hint in hints(lab.settings.slurm.inbox):
            seen.add(hint)

    listening = asyncio.create_task(listen())
    try:
        job_id = lab.sbatch("true")
        job = await job_of(scheduler, job_id)
        await spawn(job, 41)
        await scheduler.pin(job.ref, "mv_41", ())
        await became(scheduler, job_id, JobState.ENDED)
        deadline = time.monotonic() + 5
        while not {Hint("end", job_id), Hint("submit", uid=lab.user.uid)} <= seen:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.05)
        assert not any(path.is_file() for path in lab.settings.slurm.inbox.iterdir())
    finally:
        listening.cancel()


# --- sizes -----------------------------------------------------------------------------------------


@pytest.fixture
async def publish(scheduler: SlurmScheduler) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Publish the largest sizes of an image, as the controller does; `close` withdraws them."""

    async def sizes(image: str, *largest: Size) -> None:
        hosts = tuple(EqualHosts(9, one.cpus, one.disk, (one.memory,)) for one in largest)
        limits = {image: (JobLimit(frozenset(CloneKind), hosts),)}
        await scheduler.submission.publish(JobLimits("slim", CloneKind.INSTANT, limits))

    yield sizes
    scheduler.close()


LARGEST = (Size(2, 1500, 65536), Size(4, 700, 65536))
TOO_LARGE = {
    "memory": (("--mem=1501",), "1 CPU and 1501 MiB"),
    "memory with an image": (("--mem=1501", "-C", "slim&instant"), "1 CPU and 1501 MiB"),
    "memory per CPU": (("-n1", "-c2", "--mem-per-cpu=751"), "2 CPUs and 1502 MiB"),
    "default memory per CPU": (("-n5",), "5 CPUs and 750 MiB"),
    "CPUs": (("-n3", "--mem=1500"), "3 CPUs and 1500 MiB"),
    "memory of the size with more CPUs": (("-n4", "--mem=701"), "4 CPUs and 701 MiB"),
    "each node of several": (("-N2", "--mem=1501"), "1 CPU and 1501 MiB"),
    "disk": (("--tmp=200G",), "204800 MiB"),
}


@pytest.mark.parametrize(("options", "size"), TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_job_above_the_published_sizes_is_refused_at_submission(
    lab: Any, publish: Callable[..., Awaitable[None]], options: tuple[str, ...], size: str
) -> None:
    await publish("slim", *LARGEST)
    done = lab.run("sbatch", *options, "--wrap=true", user=lab.user, check=False)
    assert done.returncode != 0 and size in done.stderr
    if "--tmp" not in options[0]:
        assert "2 CPUs and 1500 MiB" in done.stderr and "4 CPUs and 700 MiB" in done.stderr and "-N" in done.stderr


async def test_a_job_of_exactly_the_published_size_runs(
    lab: Any, scheduler: SlurmScheduler, spawn: Spawn, publish: Callable[..., Awaitable[None]]
) -> None:
    await publish("slim", *LARGEST)
    job_id = lab.sbatch("true", "-n2", "--mem=1500")
    other = lab.sbatch("true", "-n4", "--mem=700", "-C", "slim")
    job = await job_of(scheduler, job_id)
    assert job.request is not None and job.request.size == Size(2, 1500)
    await spawn(job, 51)
    await scheduler.pin(job.ref, "mv_51", ())
    assert (await became(scheduler, job_id, JobState.ENDED)).result == "COMPLETED"
    waiting = await job_of(scheduler, other)
    assert (waiting.state, waiting.gated, waiting.eligible) == (JobState.PENDING, True, True)


async def test_a_waiting_job_cannot_grow_above_the_published_size(
    lab: Any, scheduler: SlurmScheduler, publish: Callable[..., Awaitable[None]]
) -> None:
    large = lab.sbatch("true", "--mem=9000")
    await publish("slim", *LARGEST)

    def update(job: str, change: str) -> int:
        return int(lab.run("scontrol", "update", f"JobId={job}", change, user=lab.user, check=False).returncode)

    for options in ((), ("-C", "slim")):
        job = lab.sbatch("true", "--mem=100", *options)
        assert update(job, "MinMemoryNode=1501") != 0
        assert update(job, "MinMemoryNode=1500") == 0
        request = (await job_of(scheduler, job)).request
        assert request is not None and request.size.memory == 1500
    assert update(large, "Nice=7") == 0, "the update does not change its size"


async def test_nothing_is_refused_for_its_size_without_published_sizes(
    lab: Any, scheduler: SlurmScheduler, publish: Callable[..., Awaitable[None]]
) -> None:
    """Slurm itself must not refuse the job either: the gate is larger than any host."""
    for largest in ({}, {"another": (Size(1, 100),)}):
        for image, sizes in largest.items():
            await publish(image, *sizes)
        job = await job_of(scheduler, lab.sbatch("true", "-n300", "--mem=3T", "-N1"))
        assert job.request is not None and job.request.size == Size(300, 3 << 20) and job.eligible


async def test_other_partitions_do_not_depend_on_the_published_sizes(
    lab: Any, publish: Callable[..., Awaitable[None]]
) -> None:
    def elsewhere() -> tuple[int, str]:
        done = lab.run("sbatch", "-p", "bare", "--mem=1501", "--hold", "--wrap=true", user=lab.user, check=False)
        return done.returncode, done.stderr

    before = elsewhere()
    assert "largest" not in before[1]
    await publish("slim", *LARGEST)
    assert elsewhere() == before


async def test_the_size_of_the_gate_is_not_taken_for_a_jobs_size(lab: Any, scheduler: SlurmScheduler) -> None:
    """A job that has its node alone is billed for what it requested, not for a whole node of the gate."""
    plain, exclusive = lab.sbatch("true", "-n3", "--mem=700"), lab.sbatch("true", "-n3", "--mem=700", "--exclusive")
    view = await scheduler.observe()
    sizes = [
        job.request and (job.request.nodes, job.request.size) for job in map(view.jobs.get, (plain, exclusive)) if job
    ]
    assert sizes == [(1, Size(3, 700))] * 2
    shown = [lab.run("scontrol", "show", "job", "-o", job).stdout for job in (plain, exclusive)]
    billed = [next(word for word in text.split() if word.startswith(("TRES=", "ReqTRES="))) for text in shown]
    assert billed[0] == billed[1] and "cpu=3,mem=700M,node=1,billing=3" in billed[0]


REFUSED = {
    "our feature": (("-C", "mv_1"), "reserved for Multiverse"),
    "the gate's": (("-C", "mvgate"), "reserved for Multiverse"),
    "alternatives": (("-C", "slim|stock"), "alternatives"),
    "brackets": (("-C", "[slim]"), "alternatives"),
    "prefer": (("--prefer=slim",), "--constraint"),
    "partitions": (("-p", "vm,bare"), "submit to vm only"),
    "the gate's licence": (("-L", "vm"), "reserved for Multiverse"),
    "alternatives of licences": (("-L", "seat|vm"), "alternatives in --licenses"),
    "node list": (("-w", "mvgate1"), "without --nodelist"),
    "reservation": (("--reservation=x",), "reservations"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_an_unsupported_job_is_refused_at_submission(lab: Any, options: tuple[str, ...], sentence: str) -> None:
    done = lab.run("sbatch", *options, "--wrap=true", user=lab.user, check=False)
    assert done.returncode != 0
    assert sentence in done.stderr


async def test_root_and_heterogeneous_jobs_are_refused(lab: Any) -> None:
    done = lab.run("sbatch", "--wrap=true", check=False)
    assert done.returncode != 0
    assert "Multiverse runs no jobs of root: submit as a user" in done.stderr
    done = lab.run("sbatch", "-n1", "--wrap=true", ":", "-n1", user=lab.user, check=False)
    assert done.returncode != 0
    assert "heterogeneous" in done.stderr


@pytest.mark.parametrize(
    "change", ["Licenses=vm", "Partition=bare", "Features=mv_3", "ReqNodeList=mvgate1", "NumNodes=999"]
)
async def test_users_cannot_change_what_multiverse_sets(lab: Any, scheduler: SlurmScheduler, change: str) -> None:
    job_id = lab.sbatch("true")
    assert lab.run("scontrol", "update", f"JobId={job_id}", change, user=lab.user, check=False).returncode != 0
    assert lab.run("scontrol", "update", f"JobId={job_id}", "Nice=7", user=lab.user, check=False).returncode == 0
    assert (await job_of(scheduler, job_id)).gated


@pytest.fixture
def breaks(lab: Any) -> Iterator[Callable[[str], None]]:
    """Replace multiverse.lua until the test ends. slurmctld reads the new script at the next submission."""
    ours, loader = lab.where.etc / "multiverse.lua", lab.where.etc / "job_submit.lua"
    before = ours.read_text()

    def write(text: str) -> None:
        ours.write_text(text)
        later = loader.stat().st_mtime + 2  # slurmctld checks only the loader's time, in whole seconds
        os.utime(loader, (later, later))

    yield write
    write(before)


@pytest.mark.parametrize("harm", ["empty", "syntax", "rule"])
def test_a_broken_script_closes_multiverses_partitions_only(lab: Any, breaks: Callable[[str], None], harm: str) -> None:
    waiting = lab.sbatch("true", "--hold")
    rule = "local function unsupported_option(job)"
    whole = (lab.where.etc / "multiverse.lua").read_text()
    assert rule in whole

    def elsewhere() -> tuple[int, str]:
        """Slurm's answer in another partition, which has no node at this time."""
        other = lab.run("sbatch", "-p", "bare", "--hold", "--wrap=true", user=lab.user, check=False)
        return other.returncode, other.stderr

    before = elsewhere()
    assert "Multiverse" not in before[1]
    breaks({"empty": "", "syntax": "x = = 1", "rule": whole.replace(rule, f"{rule} error('in it')")}[harm])
    for options in (("-p", "vm"), ()):
        refused = lab.run("sbatch", *options, "--wrap=true", user=lab.user, check=False)
        assert refused.returncode != 0 and "Multiverse could not check this job" in refused.stderr
    change = ("scontrol", "update", f"JobId={waiting}", "Nice=7")
    assert lab.run(*change, user=lab.user, check=False).returncode != 0
    lab.run(*change)  # the controller may still change jobs
    assert elsewhere() == before


PREEMPTION = """\
AccountingStorageEnforce=associations,qos
PreemptType=preempt/qos
PreemptMode=REQUEUE
PreemptExemptTime=00:05:00
"""


@pytest.fixture
def preempting(lab: Any) -> Iterator[None]:
    """Slurm preempts jobs by their QOS during a test."""

    def sacctmgr(*words: str, check: bool = True) -> None:
        lab.run("sacctmgr", "-i", *words, check=check)

    sacctmgr("add", "account", "physics", "Description=physics", "Organization=lab")
    sacctmgr("add", "qos", "low", "PreemptMode=cancel", "GraceTime=120", "PreemptExemptTime=1-00:00:10")
    sacctmgr("add", "qos", "urgent", "Preempt=low,normal")
    sacctmgr("add", "user", lab.user.name, "account=physics", "qos=low,urgent")
    site = lab.where.etc / "site.conf"
    try:
        site.write_text(PREEMPTION)
        asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))
        yield
    finally:
        site.write_text("")
        lab.run("scancel", f"--user={lab.user.name}", check=False)
        until("no job of the user is left", lambda: not lab.run("squeue", "-h", "-u", lab.user.name).stdout)
        sacctmgr("delete", "account", "physics", check=False)
        sacctmgr("delete", "qos", "low,urgent", check=False)
        asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))


@pytest.mark.slow
@pytest.mark.usefixtures("preempting")
async def test_slurms_own_preemption_by_qos_is_shown(lab: Any, scheduler: SlurmScheduler) -> None:
    low, urgent = (lab.sbatch("true", f"--qos={qos}") for qos in ("low", "urgent"))
    view = await scheduler.observe()
    assert [view.jobs[job].preempt_class for job in (low, urgent)] == ["low", "urgent"]
    assert view.preemption == Preemption(
        takes={"urgent": frozenset(("low", "normal"))},
        exempt={"normal": 300.0, "low": 86410.0, "urgent": 300.0},
        modes={"normal": "requeue", "low": "cancel", "urgent": "requeue"},
        grace={"low": 120.0},
    )

    lab.run("sacctmgr", "-i", "modify", "qos", "urgent", "set", "Preempt=")
    assert (await scheduler.observe()).preemption == view.preemption, "it is remembered for a while"
    after = (await SlurmScheduler(lab.settings, SITE).observe()).preemption
    assert after is not None and after.takes == {} and after.modes == view.preemption.modes


async def test_a_missing_command_is_an_error_of_the_model(lab: Any) -> None:
    settings = replace(lab.settings, slurm=replace(lab.settings.slurm, bin_dir=Path("/nonexistent")))
    with pytest.raises(MultiverseError):
        await SlurmScheduler(settings, SITE).observe()
