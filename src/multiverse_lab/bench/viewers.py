"""What the web page costs the controller: its CPU time with many viewers, beside its own without any.

A controller with a blocked queue observes anew every two seconds, as a site's does, and one of its jobs ends each
second. Its page is served on a Unix socket, in the same process as in the daemon. The viewers are another process,
which reads all that it is sent. No scheduler is there to be asked: a page view that asked one would never be answered.

The phases alternate between no viewers and all of them, so that what drifts affects both alike. Each begins with a
pause, in which viewers connect and get the whole.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from multiverse.service.backend import Backend
from multiverse.service.publisher import Publisher
from multiverse.service.startup import http_server
from multiverse.service.statistics import Statistics
from multiverse.service.web import make_web
from multiverse.store import Store
from multiverse_lab.bench.planner import BlockedCluster, MonotonicClock, Passes, UncheckedTables

OBSERVED = 2.0
"""Seconds between two observations, as `poll` is by default."""

PAUSE = 6.0
"""Seconds before a phase is measured: viewers have connected, and have the whole."""

REQUEST = b"GET /events HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ViewersPlan:
    """What is measured: so many viewers, jobs and VMs, in phases of so many `seconds`, `rounds` of each sort."""

    viewers: int
    jobs: int
    vms: int
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class ViewersCost:
    """Shares of a core that the controller took, one for each phase, without viewers and with all of them. `events` is
    how many each viewer got in a phase, `received` how many bytes (both medians), and `whole` the bytes of a whole
    snapshot. `connected` is how many viewers were served."""

    idle: list[float]
    viewed: list[float]
    events: int
    received: int
    whole: int
    connected: int


async def measure(plan: ViewersPlan) -> ViewersCost:
    """Measure in this process, whose CPU time must be the controller's alone."""
    with tempfile.TemporaryDirectory(prefix="mvbench-") as directory:
        path, sock = Path(directory) / "web.sock", socket.socket(socket.AF_UNIX)
        sock.bind(str(path))
        sock.listen(plan.viewers)
        async with blocked_site(plan, Path(directory), sock) as publisher:
            idle, viewed, seen = [], [], []
            for _ in range(plan.rounds):
                idle.append(await _share(plan.seconds))
                viewers = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", __name__, str(path), str(plan.viewers), str(PAUSE), str(plan.seconds),
                    stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                viewed.append(await _share(plan.seconds))
                connected = publisher.viewers
                output, _ = await viewers.communicate()
                seen.append(json.loads(output) | {"connected": connected})
            whole = len(await publisher.snapshot())
    middle = sorted(seen, key=lambda one: one["received"])[len(seen) // 2]
    connected = min(one["connected"] for one in seen)
    return ViewersCost(idle, viewed, middle["events"], middle["received"], whole, connected)


async def _share(seconds: float) -> float:
    """The share of a core that this process takes, after the pause."""
    await asyncio.sleep(PAUSE)
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


@asynccontextmanager
async def blocked_site(plan: ViewersPlan, directory: Path, sock: socket.socket) -> AsyncIterator[Publisher]:
    """A controller with so many jobs and VMs, whose page is served on a listening socket. Its database is in
    `directory`."""
    cluster, clock = BlockedCluster(plan.jobs, plan.vms), MonotonicClock()
    store = Store(directory / "multiverse.db", clock, site="bench", tables=cast(Any, UncheckedTables()))
    with store.transaction() as tx:
        for move in cluster.moves():
            tx.apply(move)
    passes = Passes(cluster, store)
    for _ in range(3):
        passes.timed()  # opens the attempts, and lets all rows come to rest
    statistics = Statistics()
    passes.controller.watch(statistics)
    backend = Backend(passes.controller, store, clock, None, cast(Any, None), statistics=statistics)
    publisher = Publisher(backend, plan.viewers)
    server = http_server(make_web(backend, publisher))
    work = [asyncio.create_task(server.serve(sockets=[sock])), asyncio.create_task(_live(passes, plan.vms))]
    gc.freeze()
    try:
        yield publisher
    finally:
        server.should_exit = True
        await publisher.close()
        work[1].cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await passes.controller.close()
        store.close()
        gc.unfreeze()


async def _live(passes: Passes, vms: int) -> None:
    """Observe anew every two seconds. In each second one of the jobs ends."""
    ended = 0
    while True:
        for _ in range(int(OBSERVED)):
            ended = ended % vms + 1
            passes.cluster.end_a_job(ended)
            await asyncio.sleep(1.0)
        passes.timed()


# --- the viewers, in a process of their own --------------------------------------------------------


async def view(path: str, viewers: int, pause: float, seconds: float) -> dict[str, int]:
    """Look for so long with so many viewers. Returns medians of what each got after the pause."""
    measured = asyncio.get_running_loop().time() + pause
    found = await asyncio.gather(*(_viewer(path, measured, measured + seconds) for _ in range(viewers)))
    middle = viewers // 2
    return {name: sorted(one[i] for one in found)[middle] for i, name in enumerate(("events", "received"))}


async def _viewer(path: str, begins: float, ends: float) -> tuple[int, int]:
    """The number of events, and of bytes, that one viewer got between two moments."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(REQUEST)
    events = received = 0
    now = asyncio.get_running_loop().time
    while (left := ends - now()) > 0:
        try:
            part = await asyncio.wait_for(reader.read(1 << 18), left)
        except TimeoutError:
            break
        if not part:
            break
        if now() >= begins:
            events, received = events + part.count(b"\nid: "), received + len(part)
    writer.close()
    return events, received


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(asyncio.run(view(given[0], int(given[1]), float(given[2]), float(given[3])))))
