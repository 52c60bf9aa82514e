"""The daemon's counters in Prometheus' text format. The controller reads none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from multiverse.api import SizeView
from multiverse.core.model import HostUsage
from multiverse.service.usage_metrics import families

if TYPE_CHECKING:  # an agent has no backend
    from multiverse.service.backend import Counts

SPAN = 15.0
"""Seconds of which the figures of hosts and VMs are the means, as often as Prometheus usually asks."""

RESOURCES = {"cpus": 1, "memory_bytes": 1 << 20, "disk_bytes": 1 << 20}
"""What hosts have, by the names that metrics use, each with how many of its unit one of ours is."""


Values = Mapping[Any, float]
"""The values of one metric, by a tuple of its labels' values."""


def text(counts: Counts, hosts: Mapping[str, HostUsage]) -> bytes:
    """The counts, and what hosts and VMs use, in Prometheus' text format."""
    return _text(_Metrics(counts), _Usages(hosts))


def usage_text(hosts: Mapping[str, HostUsage]) -> bytes:
    """The same of an agent, which counts nothing."""
    return _text(_Usages(hosts))


def _text(*collectors: Collector) -> bytes:
    registry = CollectorRegistry()
    for one in collectors:
        registry.register(one)
    return generate_latest(registry)


class _Usages(Collector):
    def __init__(self, hosts: Mapping[str, HostUsage]) -> None:
        self._hosts = hosts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from families(self._hosts)


class _Metrics(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry would collect all metrics to learn their names

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_daemon()
        yield from self._of_rows()
        yield from self._of_moves()
        yield from self._of_hosts()

    def _of_the_daemon(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily("multiverse_commits", "Commits that changed something.", counts.commits)
        yield GaugeMetricFamily(
            "multiverse_viewers", "Viewers of the web page and of multiverse top.", counts.statistics.viewers
        )
        yield _counter("processes", "Processes executed.", ("program",), _singles(counts.processes))
        observed = {(source.name,): source.observations for source in counts.sources}
        yield _counter("looks", "Observations of a source.", ("source",), observed)
        known = {(source.name,): source.known for source in counts.sources}
        yield _gauge("source_known", "1 if the last observation succeeded.", ("source",), known)
        yield _counter("effects", "Effects that ended.", ("kind", "outcome"), counts.effects)

    def _of_rows(self) -> Iterator[Metric]:
        counts = self._counts
        rows = {(of, state): times for of, found in counts.rows.items() for state, times in found.items()}
        yield _gauge("rows", "Live rows.", ("of", "state"), rows)
        yield _gauge("jobs", "Jobs by the stage that a user knows.", ("stage",), _singles(counts.jobs))
        yield _gauge("jobs_waiting", "Jobs that wait, by why.", ("reason",), _singles(counts.waiting))
        yield _gauge("alerts", "Alerts, by kind.", ("kind",), _singles(counts.alerts))

    def _of_moves(self) -> Iterator[Metric]:
        moved = self._counts.statistics
        yield _counter("events", "Events of state machines.", ("of", "event"), moved.events)
        yield _counter("failures", "Failures, by what failed and why.", ("of", "cause"), moved.failures)
        yield _counter("attempts_ended", "Attempts that ended.", ("outcome",), _singles(moved.outcomes))
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

    def _of_hosts(self) -> Iterator[Metric]:
        hosts = self._counts.hosts
        labels = ("host", "resource")
        usable = _sizes({host.name: host.usable for host in hosts})
        yield _gauge("host_usable", "What claims may reach on a host, with over-commitment.", labels, usable)
        claimed = _sizes({host.name: host.claimed for host in hosts})
        yield _gauge("host_claimed", "What is claimed on a host.", labels, claimed)
        reached = {(host.name,): host.away_since is None for host in hosts}
        yield _gauge("host_reachable", "1 if the host is in reach.", ("host",), reached)


def _counter(name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _family(CounterMetricFamily(f"multiverse_{name}", about, labels=labels), values)


def _gauge(name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _family(GaugeMetricFamily(f"multiverse_{name}", about, labels=labels), values)


def _family(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> CounterMetricFamily | GaugeMetricFamily:
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family


def _singles(values: Mapping[str, float]) -> Values:
    return {(label,): value for label, value in values.items()}


def _sizes(sizes: Mapping[str, SizeView]) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for host, size in sizes.items():
        for (resource, unit), value in zip(RESOURCES.items(), (size.cpus, size.memory, size.disk), strict=True):
            found[host, resource] = value * unit
    return found
