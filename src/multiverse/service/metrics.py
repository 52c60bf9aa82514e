"""The daemon's counters in Prometheus' text format. The controller reads none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multiverse.core.model import HostUsage
from multiverse.service.usage_metrics import families

if TYPE_CHECKING:  # an agent has no backend
    from multiverse.service.backend import Counts

SPAN = 15.0
"""Seconds of which the figures of hosts and VMs are the means, as often as Prometheus usually asks."""


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
        counts = self._counts
        yield CounterMetricFamily("multiverse_commits", "Commits that changed something.", counts.commits)
        processes = CounterMetricFamily("multiverse_processes", "Processes executed.", labels=("program",))
        for program, times in sorted(counts.processes.items()):
            processes.add_metric((program,), times)
        observations = CounterMetricFamily("multiverse_looks", "Observations of a source.", labels=("source",))
        known = GaugeMetricFamily("multiverse_source_known", "1 if the last observation succeeded.", labels=("source",))
        for source in counts.sources:
            observations.add_metric((source.name,), source.observations)
            known.add_metric((source.name,), source.known)
        effects = CounterMetricFamily("multiverse_effects", "Effects that ended.", labels=("kind", "outcome"))
        for (kind, outcome), times in sorted(counts.effects.items()):
            effects.add_metric((kind, outcome), times)
        states = GaugeMetricFamily("multiverse_rows", "Live rows.", labels=("of", "state"))
        for of, found in sorted(counts.rows.items()):
            for state, times in sorted(found.items()):
                states.add_metric((of, state), times)
        yield from (processes, observations, known, effects, states)
