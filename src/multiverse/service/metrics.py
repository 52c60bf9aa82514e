"""What the daemon has done, counted, in Prometheus' text format. Nothing here is asked by the controller.

Processes are counted where Python starts them, by an audit hook: no edge can forget to count its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multiverse.controller.loop import Controller
from multiverse.store import Store

_VERBS = frozenset({"scontrol", "qemu-img"})
"""Programs whose first argument says what they do; of the others it is data."""


class Executed:
    """Counts every process that this one starts from now on, by its program. An audit hook stays for good, so there
    is one of these in a process."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        sys.addaudithook(self._heed)

    def _heed(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self.programs[_called([str(word) for word in args[1]])] += 1


def _called(argv: list[str]) -> str:
    program = PurePath(argv[0]).name
    if program == "setpriv" and "--" in argv:  # it becomes what it runs
        return _called(argv[argv.index("--") + 1 :])
    return f"{program} {argv[1]}" if program in _VERBS and len(argv) > 1 else program


class Metrics(Collector):
    """Reads the counts where they are kept, when it is asked."""

    def __init__(self, controller: Controller, store: Store, executed: Executed) -> None:
        self._controller, self._store, self._executed = controller, store, executed
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # its names are known without asking the store

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("multiverse_commits", "Commits that changed something.", self._store.commits)
        processes = CounterMetricFamily("multiverse_processes", "Processes executed.", labels=("program",))
        for program, times in sorted(self._executed.programs.items()):
            processes.add_metric((program,), times)
        looks = CounterMetricFamily("multiverse_looks", "Looks at a source.", labels=("source",))
        known = GaugeMetricFamily("multiverse_source_known", "1 if the last look succeeded.", labels=("source",))
        for source in (self._controller.scheduler, self._controller.hypervisor):
            looks.add_metric((source.name,), source.looks)
            known.add_metric((source.name,), source.latest is not None)
        effects = CounterMetricFamily("multiverse_effects", "Effects that ended.", labels=("kind", "outcome"))
        for (kind, outcome), times in sorted(self._controller.effects_ended.items()):
            effects.add_metric((kind, outcome), times)
        states = GaugeMetricFamily("multiverse_rows", "Live rows.", labels=("of", "state"))
        rows = self._store.rows()
        found = Counter(
            (row.key.kind, str(row.state))
            for table in (rows.attempts, rows.vms, rows.templates)
            for row in table.values()
        )
        for (of, state), times in sorted(found.items()):
            states.add_metric((of, state), times)
        yield from (processes, looks, known, effects, states)
