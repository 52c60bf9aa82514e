"""What `multiverse bench lease-start` reads of a lease that starts."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiverse.api import JobView, LeaseView, TemplateView, VmView
from multiverse_lab.bench import lease_start
from multiverse_lab.bench.lease_start import PHASES, LeaseStart
from multiverse_lab.cli.lease_start import document

LEASE = "lease-x-1"


class Site:
    """A controller and a node on which a lease starts: with each look another second has passed, and one more step."""

    def __init__(self, leases: Path) -> None:
        self.leases_at, self.second = leases, 1000

    def time(self) -> float:
        return float(self.second)

    def leases(self) -> list[dict[str, Any]]:
        self.second += 1
        made = self.leases_at / LEASE
        for second, file in ((1002, "lock"), (1004, "agent.sock")):
            if self.second >= second and not (made / file).exists():
                made.mkdir(exist_ok=True)
                (made / file).touch()
                os.utime(made / file, (second - 0.5, second - 0.5))
        return [asdict(LeaseView(LEASE, "starting", "physical", "", 0, 0, "9", "n1", None, 0.0, ""))]

    def templates(self) -> list[dict[str, Any]]:
        state = "building" if self.second < 1009 else "ready"
        view = TemplateView(LEASE, "slim", state, 1, 256, "", 0.0, 0, "")
        other = TemplateView("localhost", "slim", "ready", 1, 256, "", 0.0, 0, "")
        return [asdict(other), *([asdict(view)] if self.second >= 1005 else [])]

    def vms(self) -> list[dict[str, Any]]:
        state = "starting" if self.second < 1010 else "joined"
        facts = (1, 300, "", 1, "7", 0.0, 0.0, 0.0, 0.0, 0.0, "", "")
        return [asdict(VmView("mvx-1", state, LEASE, "slim", "instant", *facts))] if self.second >= 1009 else []

    def jobs(self, job: str) -> list[dict[str, Any]]:
        state = "queued" if self.second < 1012 else "allocated"
        size = {"nodes": 1, "cpus": 1, "memory": 300, "image": "slim", "kind": "instant", "since": 1.0, "restarts": 0}
        texts = {"waiting": "", "reason": "", "quarantined": ""}
        return [asdict(JobView(job, "j", 1000, 1, state, vms=(), **size, **texts))]  # type: ignore[arg-type]


def test_the_phases_of_a_lease_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    monkeypatch.setattr(lease_start, "time", SimpleNamespace(time=site.time, monotonic=site.time, sleep=lambda _: None))
    plan = SimpleNamespace(physical_nodes=[SimpleNamespace(name="mvp1")])
    lab = SimpleNamespace(
        lab=SimpleNamespace(plan=plan),
        where=SimpleNamespace(host=lambda _: SimpleNamespace(leases=tmp_path)),
        submit=lambda *_: "7",
    )
    found = lease_start._measure(cast(Any, lab), cast(Any, site))
    assert found == LeaseStart(1.5, {"agent": 2.0, "seen": 0.5, "template": 4.0, "vm": 1.0, "job": 2.0})
    assert list(found.phases) == list(PHASES) and found.whole == 9.5


def test_the_first_lease_is_told_apart_and_the_template_has_its_share() -> None:
    def one(template: float) -> LeaseStart:
        return LeaseStart(1.0, dict(zip(PHASES, (1.0, 1.0, template, 1.0, 1.0), strict=True)))

    found = document([one(16.0), one(4.0), one(4.0)])
    assert (found["first"]["template"], found["first"]["whole"]) == (16.0, 20.0)
    assert (found["others"]["template"], found["others"]["whole"], found["template_share"]) == (4.0, 8.0, 0.5)
