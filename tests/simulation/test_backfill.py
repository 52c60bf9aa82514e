"""The first job that waits for room starts when its user was told, whatever goes ahead of it, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from multiverse.config import BackfillSettings, Settings
from multiverse.core.admission import backfill
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.reason import text_of
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.generate import crowded
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import Pair, WorldSettings

HOST = Host("h1", Size(4, 8192, 65536), ABILITIES, Size(4, 8192, 65536), "tcg")


def job(name: str, cpus: int, seconds: float, limit: float | None, at: float, *actions: UserAction) -> Arrival:
    return Arrival(at, Batch(name=name, size=Size(cpus, 64), seconds=seconds, limit=limit), actions=actions)


def scenario(*arrivals: Arrival, overtakes: int = 20, pair: Pair = Pair.SLURM_HOSTS) -> Scenario:
    settings = Settings(backfill=BackfillSettings(overtakes=overtakes))
    return Scenario(1, arrivals, WorldSettings((HOST,), pair=pair), settings, hints=1.0)


def begins(outcome: Outcome) -> dict[str, float]:
    return {name: began for name, began, _ in outcome.runs}


RUNNING = job("running", 3, 100.0, 110.0, 1.0)
WIDE = job("wide", 4, 10.0, 20.0, 12.0)
SHORT = job("short", 1, 20.0, 25.0, 14.0)
LONG = job("long", 1, 200.0, 300.0, 16.0)


@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
def test_a_short_job_goes_ahead_and_a_long_one_does_not(pair: Pair) -> None:
    outcome = simulate(scenario(RUNNING, WIDE, SHORT, LONG, pair=pair))
    assert not outcome.violations and outcome.starts_kept == 1
    began = begins(outcome)
    assert began["short"] < 30.0 < began["wide"] < 130.0 and began["long"] > began["wide"]
    told = [text for text in outcome.told if "ahead of job" in text]
    assert len(told) == 1 and "ended by its time limit" in told[0]
    assert sum("expected to start by 2023-11-14 22:16 UTC" in text for text in outcome.told) == 1, "it is told once"


def test_without_backfill_none_goes_ahead() -> None:
    plain = scenario(RUNNING, WIDE, SHORT, LONG)
    outcome = simulate(replace(plain, settings=Settings(backfill=BackfillSettings(enabled=False))))
    began = begins(outcome)
    assert began["short"] > began["wide"] > 100.0 and not outcome.violations


def test_the_world_reports_a_first_job_that_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill.Overtaking, "_kept", lambda *_: Size(0, 0))
    outcome = simulate(scenario(RUNNING, WIDE, SHORT, LONG))
    assert any("later than it was expected to start" in text for text in outcome.violations)


def test_a_job_that_exceeds_its_limit_is_ended_and_the_first_one_starts_then() -> None:
    outcome = simulate(scenario(job("running", 3, 500.0, 60.0, 1.0), WIDE))
    assert not outcome.violations and outcome.starts_kept == 1
    assert "TIMEOUT" in outcome.results.values() and begins(outcome)["wide"] < 90.0


def test_a_job_behind_a_suspended_one_is_overtaken_so_often_across_a_restart() -> None:
    suspends = (UserAction(8.0, "suspend"), UserAction(200.0, "resume"))
    stuck = job("stuck", 3, 20.0, 30.0, 1.0, *suspends)
    short = [job(f"short{n}", 1, 5.0, 60.0, 14.0 + 12 * n) for n in range(6)]
    restart = Incident(30.0, IncidentKind.CONTROLLER_CRASH, 1.0)
    outcome = simulate(replace(scenario(stuck, WIDE, *short, overtakes=3), incidents=(restart,)))
    assert not outcome.violations and outcome.crash_count == 1
    overtaken = [text_of(entry.reason) for entry in outcome.entries if entry.event == "overtaken"]
    assert [text.partition(", ")[2] for text in overtaken] == ["1 of 3 times", "2 of 3 times", "3 of 3 times"]
    began = begins(outcome)
    assert began["short2"] < 100.0 and min(began["short3"], began["short4"], began["short5"]) > began["wide"] > 200.0


@pytest.mark.slow
def test_crowded_hosts_keep_their_promises() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        outcome = simulate(crowded(seed))
        assert not outcome.violations, outcome.story(60)
        seen["kept"] += outcome.starts_kept
        seen["ahead"] += sum(
            "ahead of job" in text_of(entry.reason) for entry in outcome.entries if entry.event == "admitted"
        )
        seen["timeouts"] += sum(result == "TIMEOUT" for result in outcome.results.values())
    assert min(seen[what] for what in ("kept", "ahead", "timeouts")) > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_between_passes_changes_no_decision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_table = simulate(crowded(seed)).journal
    monkeypatch.setattr(backfill, "_KEPT", 0)
    assert simulate(crowded(seed)).journal == with_table
