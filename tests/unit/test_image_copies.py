"""Which images the controller copies to which hosts, and when it tries again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.bundles.qemu import platform
from multiverse.bundles.qemu.platform import RETRY, ImageCopies, wanted_copies
from multiverse.core.errors import Broken
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.host import Drain, Host, HypervisorView, KnownHost
from multiverse.core.model.job import AttemptState, Request
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.policy import Pool
from multiverse.core.rows import Rows
from multiverse.images.catalog import Image
from tests.unit import rows
from tests.unit.planner_harness import POLICY
from tests.unit.test_image_transfer import image

ALL = ("one", "two", "slim")


def host(name: str, *images: str) -> Host:
    return Host(name, Size(4, 4096), frozenset({"instant"}), images=dict.fromkeys(images, frozenset()))


def world(*hosts: Host) -> World:
    views = {one.name: HypervisorView({one.name: one}) for one in hosts}
    return World(sources={name: Observation(Seen(view, 1.0), 1.0) for name, view in views.items()})


def site(*waiting: str, drained: str = "") -> Rows:
    """Jobs wait for these images; hosts h1 to h3 are known."""
    known = {name: KnownHost(name, name, drain=Drain() if name == drained else None) for name in ("h1", "h2", "h3")}
    queued = {
        n: rows.attempt(AttemptState.QUEUED, id=n, request=Request(1, Size(1, 100), image=wanted))
        for n, wanted in enumerate(waiting, 1)
    }
    return Rows("s", attempts=queued, hosts=known)


def copies(there: Rows, seen: World, own: str = "h1", **policy: object) -> list[tuple[str, str]]:
    return list(wanted_copies(there, seen, replace(POLICY, **policy), ALL, own))  # type: ignore[arg-type]


def test_an_image_that_a_job_waits_for_is_copied_to_each_host_that_lacks_it() -> None:
    seen = world(host("h2", "slim"), host("h3", "one", "slim"))
    assert copies(site("one", "two", "one"), seen) == [("one", "h2"), ("two", "h2"), ("two", "h3")]


def test_nothing_is_copied_that_nobody_waits_for_or_that_is_not_here() -> None:
    seen = world(host("h2"), host("h3"))
    assert copies(site(), seen) == []
    assert copies(site("unknown"), seen) == []
    assert copies(site("one"), world(host("h2", *ALL))) == []


def test_a_job_without_an_image_waits_for_the_default_and_pools_want_theirs() -> None:
    seen = world(host("h2"))
    assert copies(site(""), seen) == [(POLICY.image, "h2")]
    assert copies(site(), seen, pools=(Pool("two", Depth.PARKED, 1, 1, Size(1, 256)),)) == [("two", "h2")]  # type: ignore[arg-type]


def test_hosts_out_of_reach_and_drained_ones_and_the_own_get_no_copy() -> None:
    seen = world(host("h1"), host("h2"))
    assert copies(site("one", drained="h2"), seen) == []
    assert copies(site("one"), seen) == [("one", "h2")]
    stranger = world(host("h9"))
    assert copies(site("one"), stranger) == [], "it is not of the site"


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def boot_id(self) -> str:
        return "b"


class Sender:
    """Fails or waits as the test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, image: Image, host: str) -> bool:
        self.sent.append((image.name, host))
        self.go_on.wait(10)
        if self.fails:
            raise Broken("no route")
        return True


@pytest.fixture
def sender() -> Sender:
    return Sender()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.01)


async def test_a_copy_that_failed_is_repeated_after_a_while(tmp_path: Path, sender: Sender) -> None:
    image(tmp_path, "one")
    clock, seen = Clock(), world(host("h2"))
    made = ImageCopies(tmp_path, "h1", sender, clock)
    sender.fails = True
    for _ in range(2):
        await made.look(lambda: site("one"), lambda: seen, POLICY)
        await settle()
    assert sender.sent == [("one", "h2")]
    clock.time += RETRY + 1
    sender.fails = False
    await made.look(lambda: site("one"), lambda: seen, POLICY)
    await settle()
    assert sender.sent == [("one", "h2")] * 2


async def test_no_copy_is_begun_twice_and_few_at_the_same_time(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "AT_ONCE", 2)
    image(tmp_path, "one")
    image(tmp_path, "two")
    clock, seen = Clock(), world(host("h2"), host("h3"))
    made = ImageCopies(tmp_path, "h1", sender, clock)
    sender.go_on.clear()
    for _ in range(3):
        await made.look(lambda: site("one", "two"), lambda: seen, POLICY)
        await settle()
        clock.time += RETRY + 1
    assert sender.sent == [("one", "h2"), ("one", "h3")]
    sender.go_on.set()
    await settle()
    await made.look(lambda: site("two"), lambda: seen, POLICY)
    await settle()
    assert sender.sent[2:] == [("two", "h2"), ("two", "h3")]


async def test_the_daemon_does_not_wait_for_a_copy_as_it_ends(tmp_path: Path, sender: Sender) -> None:
    image(tmp_path, "one")
    made = ImageCopies(tmp_path, "h1", sender, Clock())
    sender.go_on.clear()
    await made.look(lambda: site("one"), lambda: world(host("h2")), POLICY)
    await settle()
    await made.close()
    assert sender.sent == [("one", "h2")]
    sender.go_on.set()
    await settle()  # what it says then is not heard
