"""Copies the images of the controller's machine to hosts that lack them, once jobs or pools want them.

That decides nothing: a job waits as long as no host shows its image, whoever brings it there. A copy that is repeated,
late or interrupted does no harm (`images.transfer`). With `image.source` hosts copy by themselves, and show an image
before they have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import structlog

from multiverse.agent.connection import other_command
from multiverse.bundles.contract import Followed, LeasedTransport
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Unknown
from multiverse.core.model import AttemptState, LeasedHost, World
from multiverse.core.policy import Policy, image_of
from multiverse.core.rows import Rows
from multiverse.images import transfer
from multiverse.images.catalog import Image, list_images
from multiverse.ports import Clock

log = structlog.get_logger()

PERIOD = 5.0  # seconds between two looks at what is wanted
RETRY = 60.0  # seconds until a copy is repeated that failed, or that its host does not show
AT_ONCE = 4  # copies at the same time
Send = Callable[[Image, str], bool]  # copies an image to a host, as `transfer.send` does. Blocks


def wanted_copies(
    rows: Rows, world: World, policy: Policy, offered: Collection[str], own: str
) -> Iterator[tuple[str, str]]:
    """Each image of `offered` that a job in the queue or a pool wants, with each host in reach that lacks it and takes
    new VMs. `own` is the controller's machine, whose images these are."""
    lacking: dict[str, list[str]] = {}
    for name, host in sorted(world.hosts.items()):
        known = rows.hosts.get(name)
        if name != own and known is not None and known.drain is None:
            for image in set(offered).difference(host.images):
                lacking.setdefault(image, []).append(name)
    if not lacking:  # as nearly always: the queue need not be read
        return
    wanted = {pool.image for pool in policy.pools}
    wanted |= {image_of(row, policy) for row in rows.attempts.values() if row.state is AttemptState.QUEUED}
    for image in sorted(wanted & lacking.keys()):
        yield from ((image, host) for host in lacking[image])


class ImageCopies:
    """The copies that run, and when others may be tried again."""

    def __init__(self, images: Path, own: str, send: Send, clock: Clock) -> None:
        self._images, self._own, self._send, self._clock = images, own, send, clock
        self._not_before: dict[tuple[str, str], float] = {}
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def look(self, rows: Callable[[], Rows], world: Callable[[], World], policy: Policy) -> None:
        """Begin the copies that are wanted now."""
        offered = {image.name: image for image in await asyncio.to_thread(list_images, self._images)}
        for image, host in wanted_copies(rows(), world(), policy, offered, self._own):
            self._begin(offered, image, host)

    async def close(self) -> None:
        """Do not wait for copies that run: their programs finish them, or fail."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin(self, offered: Mapping[str, Image], image: str, host: str) -> None:
        which, now = (image, host), self._clock.now()
        if which in self._running or now < self._not_before.get(which, 0.0) or len(self._running) >= AT_ONCE:
            return
        self._not_before[which] = now + RETRY
        self._running[which] = task = asyncio.create_task(self._copy(offered[image], host))
        task.add_done_callback(lambda _: self._running.pop(which, None))

    async def _copy(self, image: Image, host: str) -> None:
        try:
            copied = await _in_thread(lambda: self._send(image, host))
        except MultiverseError as error:
            log.warning("image not copied", image=image.name, host=host, reason=error.message)
        else:
            log.info("image copied" if copied else "image is there", image=image.name, host=host)
        self._not_before[image.name, host] = self._clock.now() + RETRY


async def copy_regularly(
    settings: Settings, controller: Followed, clock: Clock, transport: LeasedTransport | None
) -> None:
    """Copy images until cancelled, to leased hosts by this transport."""
    leased: Mapping[str, LeasedHost] = {}

    def send(image: Image, host: str) -> bool:
        if (lease := leased.get(host)) is None:
            return transfer.send(image, other_command(settings.agent.connect, host, "receive-image"))
        if transport is None:
            raise Unknown(f"the scheduler does not lead to {host}", hint="it leases no hosts now")
        return transfer.send(image, transport.receive(lease), partial(transport.bring, lease, image.name))

    copies = ImageCopies(settings.qemu.images, settings.host.name, send, clock)
    try:
        while True:
            leased = controller.state.rows().leased_hosts()
            await copies.look(controller.state.rows, controller.world, controller.policy)
            await asyncio.sleep(PERIOD)
    finally:
        await copies.close()


async def _in_thread(work: Callable[[], bool]) -> bool:
    """Do `work` in a thread that does not keep this process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def tell(result: bool, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, problem = False, None
        try:
            result = work()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=run, name="image copy", daemon=True).start()
    return await done
