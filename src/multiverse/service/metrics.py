"""The daemon's counters, and what hosts and VMs use, in Prometheus' text format. The controller reads none of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from multiverse.api import Alert, HostView, SizeView, SourceView
from multiverse.config import listening_address
from multiverse.core.errors import Refused
from multiverse.core.model.eviction import LIMITS, Step
from multiverse.core.model.usage import HostUsage, Usage
from multiverse.service.startup import bind, bind_tcp
from multiverse.service.statistics import Statistics

log = structlog.get_logger()

SPAN = 15.0  # seconds: figures of hosts and VMs are means over this time, the usual interval of Prometheus
RESOURCES = {"cpus": 1, "memory_bytes": 1 << 20, "disk_bytes": 1 << 20}
"""What hosts have, by the names that metrics use, each with how many of its unit one of ours is."""

Values = Mapping[Any, float]  # the values of one metric, by a label's value or a tuple of them


def text(*found: Iterable[Metric]) -> bytes:
    """These metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(chain(*found)))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry would collect all metrics to learn their names

    def collect(self) -> Iterable[Metric]:
        return self._families


def of_the_daemon(
    commits: int, processes: Mapping[str, int], sources: Sequence[SourceView], effects: Mapping[tuple[str, str], int]
) -> Iterator[Metric]:
    """`effects` are those that ended, by kind and outcome."""
    yield CounterMetricFamily("multiverse_commits", "Commits that changed something.", commits)
    yield _counter("processes", "Processes executed.", ("program",), processes)
    observed = {source.name: source.observations for source in sources}
    yield _counter("observations", "Observations of a source.", ("source",), observed)
    known = {source.name: source.known for source in sources}
    yield _gauge("source_known", "1 if the last observation succeeded.", ("source",), known)
    yield _counter("effects", "Effects that ended.", ("kind", "outcome"), effects)


def of_rows(
    counts: Mapping[str, Mapping[str, int]],
    jobs: Mapping[str, int],
    waiting: Mapping[str, int],
    alerts: Sequence[Alert],
) -> Iterator[Metric]:
    """`counts` are those of live rows by kind and state, `jobs` by stage, `waiting` by the word of the reason."""
    rows = {(of, state): times for of, found in counts.items() for state, times in found.items()}
    yield _gauge("rows", "Live rows.", ("of", "state"), rows)
    yield _gauge("jobs", "Jobs by the stage that a user knows.", ("stage",), jobs)
    yield _gauge("jobs_waiting", "Jobs that wait, by why.", ("reason",), waiting)
    yield _gauge("alerts", "Alerts, by kind.", ("kind",), Counter(alert.kind for alert in alerts))


def of_moves(moved: Statistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("multiverse_viewers", "Viewers of the web page and of multiverse top.", moved.viewers)
    yield _counter("events", "Events of state machines.", ("of", "event"), moved.events)
    yield _counter("failures", "Failures, by what failed and why.", ("of", "cause"), moved.failures)
    yield _counter("attempts_ended", "Attempts that ended.", ("outcome",), moved.outcomes)
    yield _counter("clones", "VMs that were made.", ("image", "kind", "host"), moved.clones)
    phases = HistogramMetricFamily(
        "multiverse_phase_seconds", "How long phases of attempts took; start: from submission until the job runs.",
        labels=("phase",),
    )  # fmt: skip
    for name, one in moved.phases.items():
        phases.add_metric((name,), one.cumulative(), one.total)
    yield phases
    stages = HistogramMetricFamily(
        "multiverse_stage_seconds", "How long the stages of effects took.", labels=("effect", "stage")
    )
    for (effect, stage), one in sorted(moved.stages.items()):
        stages.add_metric((effect, stage), one.cumulative(), one.total)
    yield stages


def of_evictions(moved: Statistics, held: Iterable[Step]) -> Iterator[Metric]:
    """`held` are those that a limit holds back."""
    kind, found = ("way", "cause"), moved.evictions
    failed = {one: found.failed[one] for one in found.begun}
    yield _counter("evictions", "Evictions of running jobs that were begun.", kind, found.begun)
    yield _counter("evictions_failed", "Evictions by which a job did not leave its host.", kind, failed)
    limits = Counter(dict.fromkeys(LIMITS.values(), 0))
    limits.update(LIMITS[step.held.kind] for step in held if step.held is not None)
    yield _gauge("evictions_held", "Evictions that a limit of rebalance holds back now.", ("limit",), limits)


def of_hosts(hosts: Sequence[HostView]) -> Iterator[Metric]:
    labels = ("host", "resource")
    usable = _sizes({host.name: host.usable for host in hosts})
    yield _gauge("host_usable", "What claims may reach on a host, with over-commitment.", labels, usable)
    claimed = _sizes({host.name: host.claimed for host in hosts})
    yield _gauge("host_claimed", "What is claimed on a host.", labels, claimed)
    reached = {host.name: host.away_since is None for host in hosts}
    yield _gauge("host_reachable", "1 if the host is in reach.", ("host",), reached)


def _counter(name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _family(CounterMetricFamily(f"multiverse_{name}", about, labels=labels), values)


def _gauge(name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _family(GaugeMetricFamily(f"multiverse_{name}", about, labels=labels), values)


def _family(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> CounterMetricFamily | GaugeMetricFamily:
    for labels, value in sorted(values.items()):
        family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return family


def _sizes(sizes: Mapping[str, SizeView]) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for host, size in sizes.items():
        for (resource, unit), value in zip(RESOURCES.items(), (size.cpus, size.memory, size.disk), strict=True):
            found[host, resource] = value * unit
    return found


# --- what hosts and VMs use -------------------------------------------------------------------------

_MIB = 1 << 20

_GAUGES: dict[str, tuple[str, str, float]] = {
    "cpus": ("cpus_used", "CPUs in use.", 1),
    "memory": ("memory_used_bytes", "Memory in use.", _MIB),
    "active": ("memory_active_bytes", "Memory in use that was used lately.", _MIB),
    "received": ("received_bytes_per_second", "Received from the network.", 1),
    "sent": ("sent_bytes_per_second", "Sent to the network.", 1),
    "read": ("read_bytes_per_second", "Read from disks.", 1),
    "written": ("written_bytes_per_second", "Written to disks.", 1),
    "cpu_pressure": ("cpu_pressure", "Share of the time in which a process waited for a CPU.", 1),
    "memory_pressure": ("memory_pressure", "Share of the time in which a process waited for memory.", 1),
    "io_pressure": ("io_pressure", "Share of the time in which a process waited for a disk.", 1),
}
"""By figure of `Usage`: the end of the metric's name, its help, and by what the figure is multiplied."""


def of_usage(hosts: Mapping[str, HostUsage]) -> Iterator[Metric]:
    """The metrics of these hosts, by name, and of their VMs: means of the last seconds, but for the counters."""
    of_hosts = [((name,), host.usage) for name, host in sorted(hosts.items()) if host.usage]
    vms = [((name, vm), one) for name, host in sorted(hosts.items()) for vm, one in sorted(host.vms.items())]
    yield from _usage_gauges("multiverse_host", ("host",), of_hosts)
    yield from _usage_gauges("multiverse_vm", ("host", "vm"), [(labels, one.usage) for labels, one in vms if one.usage])
    cpu = CounterMetricFamily(
        "multiverse_vm_cpu_seconds", "CPU time of the VM's process since its start.", labels=("host", "vm")
    )
    peak = GaugeMetricFamily(
        "multiverse_vm_memory_peak_bytes", "The most memory that the VM had since its start.", labels=("host", "vm")
    )
    for labels, one in vms:
        if one.usage:
            cpu.add_metric(labels, one.cpu_s)
            peak.add_metric(labels, one.peak * _MIB)
    yield from (cpu, peak)


def _usage_gauges(
    prefix: str, labels: tuple[str, ...], usages: Sequence[tuple[tuple[str, ...], Usage]]
) -> Iterator[Metric]:
    for figure, (name, text, factor) in _GAUGES.items():
        metric = GaugeMetricFamily(f"{prefix}_{name}", text, labels=labels)
        for values, usage in usages:
            if (value := getattr(usage, figure)) is not None:
                metric.add_metric(values, value * factor)
        yield metric


# --- reading without the API ------------------------------------------------------------------------

TIMEOUT = 10.0  # seconds that a whole request may take
AT_ONCE = 8  # requests at the same time; further ones are closed
LONGEST_HEAD = 8192  # bytes of a request


@contextlib.asynccontextmanager
async def scraped(where: str, setting: str, text: Callable[[], bytes]) -> AsyncIterator[None]:
    """Let `text` be read at ADDRESS:PORT or at the path of a Unix socket; empty: nowhere. A thread calls it. Raises
    `Refused` if it cannot listen; `setting` names what to change."""
    if not where:
        yield
        return
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            if len(serving) <= AT_ONCE:
                async with asyncio.timeout(TIMEOUT):
                    await _answer_scrape(reader, writer, text)
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
            log.debug("request for metrics not answered", reason=str(error))
        finally:
            serving.discard(task)
            writer.close()

    sock = _bound(where, setting)
    server = await asyncio.start_server(connected, sock=sock, limit=LONGEST_HEAD)
    log.info("metrics can be read", where=where)
    try:
        yield
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        if where.startswith("/"):
            Path(where).unlink(missing_ok=True)


def _bound(where: str, setting: str) -> socket.socket:
    if where.startswith("/"):
        return bind(Path(where), setting)
    address = listening_address(where)
    if address is None:
        raise Refused(f"{where} is no ADDRESS:PORT", hint=f"correct {setting} in the settings")
    return bind_tcp(*address, setting)


async def _answer_scrape(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: Callable[[], bytes]) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ", 1)[0].partition(b"?")[0]
    if (method, path) == (b"GET", b"/metrics"):
        status, kind, body = "200 OK", CONTENT_TYPE_LATEST, await asyncio.to_thread(text)
    else:
        status, kind, body = "404 Not Found", "text/plain", b"only GET /metrics is here\n"
    head_of_answer = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head_of_answer.encode() + body)
    await writer.drain()
