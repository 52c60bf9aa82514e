"""Which process may have the VMs of which job, where steps ask for them; and what releases them at the job's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from multiverse.agent import job_tasks
from multiverse.agent.job_protocol import LaunchVms, PlainRequest, ProvideVm, StepRequest, parse
from multiverse.agent.job_tasks import JobRun, JobTasks
from multiverse.agent.jobs import JobVm
from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.system.processes import Peer

ADA, BOB = 1000, 1001
JOB, STARTED = 12, 1700000000


@dataclass
class Fake:
    """A host, its scheduler and its VMs: `agent.job_vm.JobHost` as far as it is asked, `JobRuns` and `JobVms`."""

    jobs: dict[int, int] = field(default_factory=lambda: {100: JOB})  # by process
    runs: dict[int, JobRun] = field(default_factory=lambda: {JOB: JobRun(JOB, ADA, STARTED, ("n1", "n2"))})
    vms: dict[int, tuple[JobVm, ...]] = field(default_factory=dict)
    steps: bool = True
    silent: bool = False
    unanswered: set[int] = field(default_factory=set)  # jobs about which slurmctld says nothing yet
    hold: asyncio.Event | None = None  # until it is set, no VM is made
    asked: int = 0
    failures: int = 0  # of releases
    provided: list[ProvideVm] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def find_job(self, pid: int) -> int:
        return self.jobs.get(pid, 0)

    def has_steps(self, vm: JobVm) -> bool:
        return self.steps

    def known_as(self, vm: JobVm) -> tuple[str, str]:
        return f"mvjob-{vm.job}-{vm.index}", f"10.0.0.{vm.index + 1}"

    async def run_of(self, job: int) -> JobRun | None:
        self.asked += 1
        if job in self.unanswered:
            await asyncio.Event().wait()
        if self.silent:
            raise Unknown("slurmctld does not answer")
        return self.runs.get(job)

    async def comment(self, job: int) -> str:
        return "mine vm:image=slim"

    async def share(self, job: int, node: str) -> tuple[int, int]:
        return 4, 2000

    def known(self) -> list[tuple[JobVm, ...]]:
        return list(self.vms.values())

    def vms_of(self, job: int) -> tuple[JobVm, ...]:
        return self.vms.get(job, ())

    async def provide(self, request: ProvideVm, pid: int) -> None:
        self.provided.append(request)
        if self.hold is not None:
            await self.hold.wait()
        self.vms[request.job] = tuple(
            replace(vm_of(request.job, request.uid, request.started), index=index) for index in range(request.vms)
        )

    async def release(self, job: int) -> None:
        if self.failures:
            self.failures -= 1
            raise Broken("its process cannot be ended")
        self.vms.pop(job, None)
        self.released.append(job)


def vm_of(job: int, uid: int, started: int, watched: bool = True) -> JobVm:
    return JobVm(job, 0, started, uid, 0, "slim", 1, 256, 0, "t", "secret", ("/groups",), watched=watched)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
async def tasks(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobTasks]:
    for name in ("LOOK", "FIRST_QUESTION", "LAST_QUESTION", "QUESTION_WITH_STEPS"):
        monkeypatch.setattr(job_tasks, name, 0.01)
    made = JobTasks(fake, fake, fake, "n2")  # type: ignore[arg-type]
    watching = asyncio.create_task(made.watch())
    yield made
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def launch(text: str = "image=slim vms=2") -> StepRequest:
    request = parse(f"launch {text}".encode())
    assert isinstance(request, LaunchVms)
    return request


async def test_a_step_launches_what_it_wants_for_the_job_that_it_is_in(tasks: JobTasks, fake: Fake) -> None:
    assert await tasks.answer(launch(), Peer(100, ADA, ADA)) == "12 0 mvjob-12-0=10.0.0.1 mvjob-12-1=10.0.0.2"
    (request,) = fake.provided
    expected = ProvideVm(JOB, ADA, 4, 2000, "slim", vms=2, nodes=("n1", "n2"), node=1, started=STARTED)
    assert request == expected
    assert await tasks.answer(PlainRequest.COMMENT, Peer(100, ADA, ADA)) == "mine vm:image=slim"
    assert await tasks.answer(PlainRequest.LIST, Peer(100, ADA, ADA)) == "12 0 mvjob-12-0=10.0.0.1 mvjob-12-1=10.0.0.2"
    assert await tasks.answer(PlainRequest.RECLAIM, Peer(100, ADA, ADA)) == "12" and fake.released == [JOB]


@pytest.mark.parametrize("request_", [PlainRequest.COMMENT, launch(), PlainRequest.LIST, PlainRequest.RECLAIM])
async def test_a_process_outside_of_jobs_and_one_of_another_user_get_nothing(
    tasks: JobTasks, fake: Fake, request_: StepRequest
) -> None:
    fake.vms[JOB] = (vm_of(JOB, ADA, STARTED),)
    with pytest.raises(Refused, match="in no control groups of a job"):
        await tasks.answer(request_, Peer(101, ADA, ADA))
    with pytest.raises(Refused, match="another user's"):
        await tasks.answer(request_, Peer(100, BOB, BOB))
    assert not fake.provided and not fake.released


@pytest.mark.parametrize("run", [None, JobRun(JOB, ADA, STARTED, ("n1",))])
async def test_no_vm_is_launched_for_a_job_that_does_not_run_here(
    tasks: JobTasks, fake: Fake, run: JobRun | None
) -> None:
    fake.runs = {} if run is None else {JOB: run}
    with pytest.raises(Gone, match="does not run on n2"):
        await tasks.answer(launch(), Peer(100, ADA, ADA))
    assert not fake.provided


async def test_without_an_answer_of_slurmctld_no_vm_is_launched_and_none_is_released(
    tasks: JobTasks, fake: Fake
) -> None:
    fake.silent, fake.steps = True, False
    with pytest.raises(Unknown):
        await tasks.answer(launch(), Peer(100, ADA, ADA))
    fake.vms[JOB] = (vm_of(JOB, ADA, STARTED),)
    await until(lambda: fake.asked > 5)
    assert not fake.provided and not fake.released


async def test_a_step_finds_no_vm_before_it_is_launched_nor_one_of_an_earlier_run(tasks: JobTasks, fake: Fake) -> None:
    with pytest.raises(Refused, match=r"has no VM on this node.*multiverse-vm launch"):
        await tasks.answer(PlainRequest.LIST, Peer(100, ADA, ADA))
    fake.failures = 1 << 30  # it is not released soon
    fake.vms[JOB] = (vm_of(JOB, ADA, STARTED - 100),)
    with pytest.raises(Refused, match="has no VM on this node"):
        await tasks.answer(PlainRequest.LIST, Peer(100, ADA, ADA))


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it does not become so")


@pytest.mark.parametrize("run", [None, JobRun(JOB, ADA, STARTED + 1, ("n2",)), JobRun(JOB, ADA, STARTED, ("n1",))])
@pytest.mark.parametrize("steps", [False, True])
async def test_the_vms_of_a_run_that_has_ended_here_are_released_until_they_are_gone(
    tasks: JobTasks, fake: Fake, run: JobRun | None, steps: bool
) -> None:
    await tasks.answer(launch(), Peer(100, ADA, ADA))
    fake.steps, fake.failures = steps, 2
    fake.runs = {} if run is None else {JOB: run}
    await until(lambda: fake.released == [JOB])


@pytest.mark.parametrize("steps", [False, True])
async def test_vms_that_a_run_launches_are_not_released_with_those_of_the_run_before(
    tasks: JobTasks, fake: Fake, steps: bool
) -> None:
    fake.vms[JOB], fake.steps = (vm_of(JOB, ADA, STARTED - 60),), steps
    fake.hold = asyncio.Event()
    launched = asyncio.create_task(tasks.answer(launch(), Peer(100, ADA, ADA)))
    await until(lambda: fake.provided and fake.asked > 5)
    fake.hold.set()
    assert (await launched).startswith("12 0 mvjob-12-0=")
    assert not fake.released, "who makes the new ones removes the earlier ones"


async def test_a_question_about_one_job_keeps_no_step_of_another_waiting(tasks: JobTasks, fake: Fake) -> None:
    other = JOB + 1
    fake.jobs[101], fake.runs[other] = other, JobRun(other, BOB, STARTED, ("n2",))
    fake.vms |= {JOB: (vm_of(JOB, ADA, STARTED),), other: (vm_of(other, BOB, STARTED),)}
    fake.unanswered = {JOB}
    waiting = asyncio.create_task(tasks.answer(PlainRequest.LIST, Peer(100, ADA, ADA)))
    await until(lambda: fake.asked > 1)
    async with asyncio.timeout(10):
        assert (await tasks.answer(PlainRequest.LIST, Peer(101, BOB, BOB))).startswith("13 ")
    waiting.cancel()


async def test_a_job_that_runs_without_a_step_here_keeps_its_vms(tasks: JobTasks, fake: Fake) -> None:
    await tasks.answer(launch(), Peer(100, ADA, ADA))
    fake.steps = False
    await until(lambda: fake.asked > 5)
    assert not fake.released
    assert await tasks.answer(PlainRequest.LIST, Peer(100, ADA, ADA))


async def test_the_plugins_vms_are_not_watched(tasks: JobTasks, fake: Fake) -> None:
    fake.vms[JOB] = (vm_of(JOB, ADA, 5, watched=False),)
    fake.runs, fake.steps = {}, False
    await asyncio.sleep(0.2)
    assert not fake.released and not fake.asked


async def test_the_tasks_of_a_step_ask_slurmctld_once_what_it_said_before(tasks: JobTasks, fake: Fake) -> None:
    await tasks.answer(launch(), Peer(100, ADA, ADA))
    before = fake.asked
    await asyncio.gather(*(tasks._own_vms(JOB, ADA) for _ in range(50)))
    assert fake.asked - before <= 1


def test_what_a_step_wants_is_checked_as_what_the_plugin_asks_for() -> None:
    for line, message in (("launch image=../x", "no name of an image"), ("launch vms=65", "at most 64 VMs")):
        with pytest.raises(MultiverseError, match=message):
            parse(line.encode())
