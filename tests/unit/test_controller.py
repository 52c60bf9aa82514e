"""The controller, in virtual time: the largest nodes are published when they change, and until that succeeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

from structlog.testing import capture_logs

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.controller.publication import AGAIN, AGAIN_LIMIT, TIMEOUT
from multiverse.core.capacity.sizes import job_limits
from multiverse.core.errors import Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView, JobLimits, KnownHost
from multiverse.core.model.job import SchedulerView
from multiverse.store import Store
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit.rows import IMAGES


class Submission:
    """Keeps what was published. The next calls fail with `errors`, or do not return while `hangs`."""

    def __init__(self) -> None:
        self.published: list[JobLimits] = []
        self.calls = 0
        self.errors: list[Exception] = []
        self.hangs = False

    async def publish(self, limits: JobLimits) -> None:
        self.calls += 1
        while self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        if self.errors:
            raise self.errors.pop(0)
        self.published.append(limits)


class OneHost:
    """A source with one host, which answers unless it is `away`."""

    silence = None

    def __init__(self, name: str, memory: int = 4096) -> None:
        self.name, self.hosts, self.away, self.observations = name, [name], False, 0
        self.host = Host(name, Size(4, memory, 65536), images={"slim": IMAGES["slim"]}, available=1000)

    async def observe(self) -> HypervisorView:
        await asyncio.sleep(0.01)
        if self.away:
            raise Unknown("it does not answer")
        self.observations += 1
        return HypervisorView({self.name: self.host})


class Ports:
    """A scheduler without jobs, and a hypervisor with these sources."""

    def __init__(self, *sources: OneHost, submission: Submission | None = None) -> None:
        self.sources, self.submission, self.parts = sources, submission, None
        self.addresses = self.offers = self.templates = self.users = self.membership = self.groups = None

    async def observe(self) -> SchedulerView:
        await asyncio.sleep(0.01)
        return SchedulerView()


class Running:
    """A controller that runs while the block does."""

    def __init__(self, *sources: OneHost, store: Store | None = None) -> None:
        self.submission, self.clock = Submission(), VirtualClock()
        self.ports: Any = Ports(*sources, submission=self.submission)
        self.store = store or Store(":memory:", self.clock, site="test0")

    async def __aenter__(self) -> Submission:
        controller = Controller(self.store, self.ports, self.ports, self.clock, Settings(), Random(1))
        self._task = asyncio.create_task(controller.run())
        return self.submission

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def expected(controller: Running, *hosts: Host) -> JobLimits | None:
    policy = Controller(controller.store, controller.ports, controller.ports, controller.clock, Settings()).policy
    return job_limits({host.name: KnownHost(host.name, host.name, value=host) for host in hosts}, policy)


def test_the_largest_nodes_are_published_once_for_each_change() -> None:
    async def script() -> None:
        source = OneHost("h1")
        running = Running(source)
        async with running as submission:
            await asyncio.sleep(300.0)
            assert submission.published == [expected(running, source.host)] and submission.calls == 1
            source.host = replace(source.host, available=50)
            await asyncio.sleep(300.0)
            assert submission.calls == 1, "what is available at the moment does not matter"
            source.host = replace(source.host, capacity=Size(4, 8192))
            await asyncio.sleep(300.0)
            assert submission.published[1:] == [expected(running, source.host)] and submission.calls == 2
            source.host = replace(source.host, images={**source.host.images, "new": IMAGES["slim"]})
            await asyncio.sleep(300.0)
            assert submission.calls == 3 and set(submission.published[2].limits) == {"slim", "new", "*"}
            assert source.observations > 100

    run(script(), 1)


def test_a_failed_publication_is_repeated_until_it_succeeds_and_not_after() -> None:
    async def script() -> None:
        source = OneHost("h1")
        running = Running(source)
        running.submission.errors = [Refused("no such directory"), Unknown("no answer")]
        async with running as submission:
            await asyncio.sleep(60.0)
            assert submission.published == [expected(running, source.host)] and submission.calls == 3
            submission.errors = [Refused("the disk is full")]
            source.host = replace(source.host, capacity=Size(4, 8192))
            await asyncio.sleep(300.0)
            assert submission.published[1:] == [expected(running, source.host)] and submission.calls == 5

    run(script(), 1)


def test_a_publication_that_fails_again_and_again_pauses_between_attempts() -> None:
    async def script() -> None:
        sources = [OneHost(f"h{n}") for n in range(8)]  # each of their observations is followed by a pass
        running = Running(*sources)
        running.submission.errors = [Refused("the disk is full")] * 1000
        async with running as submission:
            await asyncio.sleep(AGAIN * 2**4)
            calls = submission.calls
            assert calls in (4, 5), "each pause is about twice as long as the one before"
            await asyncio.sleep(10 * AGAIN_LIMIT)
            assert calls + 6 <= submission.calls <= calls + 11
            submission.errors.clear()
            await asyncio.sleep(2 * AGAIN_LIMIT)
            assert len(submission.published) == 1
            submission.errors = [Refused("the disk is full")]
            sources[0].host = replace(sources[0].host, capacity=Size(4, 8192))
            await asyncio.sleep(5 * AGAIN)
            assert len(submission.published) == 2, "after a success the pauses begin anew"

    run(script(), 1)


def test_a_publication_that_hangs_holds_nothing_up_and_what_changed_meanwhile_is_published() -> None:
    async def script() -> None:
        source = OneHost("h1")
        running = Running(source)
        running.submission.hangs = True
        async with running as submission:
            await asyncio.sleep(TIMEOUT / 2)
            seen = source.observations
            source.host = replace(source.host, capacity=Size(4, 8192))
            await asyncio.sleep(TIMEOUT / 4)
            assert source.observations > seen and submission.calls == 1, "one at a time"
            await asyncio.sleep(TIMEOUT / 2)
            assert submission.calls == 2, "the first has timed out"
            submission.hangs = False
            await asyncio.sleep(AGAIN)
            await asyncio.sleep(60.0)
            assert submission.published == [expected(running, source.host)]

    run(script(), 1)


def test_nothing_is_published_before_every_host_of_the_settings_has_answered_once() -> None:
    async def script() -> None:
        near, away = OneHost("h1"), OneHost("h2", 65536)
        away.away = True
        running = Running(near, away)
        async with running as submission:
            await asyncio.sleep(300.0)
            assert submission.calls == 0
            away.away = False
            await asyncio.sleep(60.0)
            assert submission.published == [expected(running, near.host, away.host)]
            away.away = True
            await asyncio.sleep(300.0)
            assert submission.calls == 1, "a host out of reach counts as before"

    run(script(), 1)


def test_a_controller_that_starts_anew_publishes_what_it_knows_of_hosts_out_of_reach() -> None:
    async def script() -> None:
        near, away = OneHost("h1"), OneHost("h2", 65536)
        first = Running(near, away)
        async with first:
            await asyncio.sleep(60.0)
        away.away = near.away = True
        again = Running(near, away, store=first.store)
        async with again as submission:
            await asyncio.sleep(300.0)
            assert submission.published == [expected(again, near.host, away.host)] and submission.calls == 1

    run(script(), 1)


def test_a_scheduler_that_refuses_nothing_at_submission_is_left_alone() -> None:
    async def script() -> None:
        source = OneHost("h1")
        running = Running(source)
        running.ports.submission = None
        async with running as submission:
            await asyncio.sleep(60.0)
            assert submission.calls == 0 and source.observations > 5

    run(script(), 1)


def test_a_defect_of_a_driver_leaves_its_source_unknown_and_ends_nothing() -> None:
    async def script() -> None:
        broken, well = OneHost("h1"), OneHost("h2")
        running = Running(broken, well)
        controller = Controller(running.store, running.ports, running.ports, running.clock, Settings(), Random(1))
        task = asyncio.create_task(controller.run())
        await asyncio.sleep(10.0)
        assert controller.sources["h1"].latest is not None
        before, answer = well.observations, broken.observe
        with capture_logs() as logs:
            controller.sources["h1"]._observe = defect
            await asyncio.sleep(60.0)
        assert controller.sources["h1"].latest is None and "KeyError" in controller.sources["h1"].failure
        assert well.observations > before + 20 and not task.done()
        (entry,) = [log for log in logs if log["event"] == "source is unknown"]
        assert entry["source"] == "h1" and entry["exc_info"], "with its traceback, once"
        controller.sources["h1"]._observe = answer
        await asyncio.sleep(10.0)
        assert controller.sources["h1"].latest is not None
        controller.scheduler._observe = defect  # type: ignore[assignment]
        await asyncio.sleep(60.0)
        world = controller.context().world
        assert world.scheduler is None and 40.0 < running.clock.now() - world.scheduler_since < 60.0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def defect() -> HypervisorView:
        raise KeyError("vms")

    run(script(), 1)
