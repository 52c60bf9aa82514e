"""Alerts: each has a name, a message and a remedy, and its repair is the command that removes the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from multiverse.api import Alert, AlertKind
from multiverse.cli import status
from multiverse.controller.effects import Failure
from multiverse.core.errors import Broken, Refused
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Depth, Key, Size
from multiverse.core.model.host import Host, HostState, HypervisorView, KnownHost, Overcommitment
from multiverse.core.model.job import AttemptState, JobState, Request
from multiverse.core.model.reason import said
from multiverse.core.model.vm import OfferState, TemplateState, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.policy import Policy, Pool
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Done, Effect, EffectKind, Event, Move
from multiverse.service import alerts
from multiverse.service.alerts import failing_effect, findings, repair_command, sources_away
from multiverse.service.convert import stage_counts
from multiverse.store import Transaction
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import SOURCE, offer, rows, vm, world_of


def seen(harness: PlannerHarness, *, hosts: Sequence[Host] | None = None, policy: Policy = POLICY) -> list[Alert]:
    """The alerts while a source shows these hosts; None: while the source has just turned unknown."""
    view = HypervisorView({host.name: host for host in hosts}) if hosts is not None else None
    world = world_of(None, view, harness.clock.time)
    if view is None:
        world = replace(world, sources={SOURCE: Observation(None, harness.clock.time)})
    return findings(harness.rows, world, policy, harness.clock.time)


@contextmanager
def committing(harness: PlannerHarness) -> Iterator[Transaction]:
    """A transaction of the store, beside the planner; the state in memory is made anew from it."""
    with harness.store.transaction() as tx:
        yield tx
    harness.state = State(harness.rows, TABLES)


def quarantined(harness: PlannerHarness) -> None:
    """Make the job run on a node that is not its own, which quarantines its attempt."""
    harness.to_spawned()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, nodes=("elsewhere",))
    harness.run()


def test_a_healthy_cluster_has_no_alert() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    assert seen(harness) == [] and stage_counts(harness.rows.attempts.values()) == {
        "waiting": 0, "provisioning": 0, "running": 1, "ending": 0,
    }  # fmt: skip


def test_a_quarantined_record_is_named_with_its_job_and_can_be_repaired() -> None:
    harness = PlannerHarness()
    quarantined(harness)
    (one,) = seen(harness)
    assert one.name == "attempt-1" and one.jobs == ("7",)
    assert "job 7 is quarantined" in one.message and "elsewhere" in one.message and "timeline 7" in one.remedy
    harness.jobs["7"] = harness.jobs["7"]._replace(nodes=tuple(vm.name for vm in harness.all_vms()))
    harness.run()
    assert seen(harness), "without a repair the record is left alone"
    harness.run(repair_command(one))
    assert seen(harness) == [] and harness.attempt().state is AttemptState.ALLOCATED


def test_a_host_short_of_memory_is_an_alert_only_with_overcommit() -> None:
    bold, modest = Overcommitment(memory=2.0, floor=1000), Overcommitment(floor=1000)
    harness = PlannerHarness()
    for available, overcommit, kinds in ((999, bold, ["memory"]), (1000, bold, []), (0, bold, []), (999, modest, [])):
        host = replace(harness.hosts["h1"], available=available, overcommit=overcommit)
        found = seen(harness, hosts=[host])
        assert [one.kind for one in found] == kinds
        assert all("999 MiB are available, 1000 MiB are to be kept" in one.message and not one.repair for one in found)


def test_an_image_that_no_host_has_is_named_with_the_jobs_that_wait() -> None:
    policy = replace(POLICY, pools=(Pool("stock", Depth.PARKED, 1, 1, Size(1, 100), 100.0),))
    harness = PlannerHarness()
    harness.job(request=Request(1, Size(1, 100), image="mine"))
    harness.run()
    bare = [replace(harness.hosts["h1"], images={"slim": frozenset[str]()})]

    def found(hosts: list[Host] | None, policy: Policy) -> list[tuple[str, tuple[str, ...]]]:
        return [(one.name, one.jobs) for one in seen(harness, hosts=hosts, policy=policy) if one.kind == "image"]

    assert found(bare, POLICY) == [], "the image may have been built after the last observation"
    harness.clock.time += POLICY.patience
    assert found(bare, policy) == [("image-mine", ("7",)), ("image-stock", ())]
    (mine, _) = [t for t in seen(harness, hosts=bare, policy=policy) if t.kind == "image"]
    assert (
        mine.message == "no host has image mine; waiting for it: job 7"
        and "image build slim --name mine" in mine.remedy
    )
    assert found([replace(bare[0], images={"mine": frozenset()})], POLICY) == found(None, policy) == []


def test_a_record_quarantined_again_has_a_new_version() -> None:
    harness = PlannerHarness()
    quarantined(harness)
    (one,) = seen(harness)
    harness.run(repair_command(one))
    (again,) = seen(harness)
    assert again.name == one.name and again.version > one.version


def test_quarantined_vms_and_templates_are_named_too() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    vm, template = harness.all_vms()[0], harness.rows.templates[1]
    with committing(harness) as tx:
        tx.apply(Move((Change(replace(vm, quarantined=said("odd")), Event.QUARANTINED),)))
        tx.apply(Move((Change(replace(template, quarantined=said("odd too")), Event.QUARANTINED),)))
    first, second = seen(harness)
    assert (first.name, first.jobs) == ("vm-1", ("7",)) and f"VM {vm.name} of job 7" in first.message
    assert second.name == "template-1" and "the template of slim on h1" in second.message
    harness.run(repair_command(first), repair_command(second))
    assert seen(harness) == []


def test_a_broken_template_shows_its_reason_and_next_attempt_and_repair_builds_it_now() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    (template,) = harness.rows.templates.values()
    harness.run(Done(template.key, EffectKind.BUILD, "building", Broken("no kernel")))
    (one,) = seen(harness)
    assert one.name == "template-1" and "slim on h1 is broken: no kernel" in one.message and "in 2 s" in one.remedy
    harness.run(repair_command(one))
    assert harness.rows.templates[1].state is TemplateState.BUILDING and seen(harness) == []


def test_a_host_out_of_reach_shows_its_vms_and_jobs_and_its_repair_fences_it() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    host = harness.hosts.pop("h1")
    harness.run()
    (one,) = seen(harness)
    (vm,) = harness.all_vms()
    assert vm.state is VmState.LOST and one.name == "h1" and one.needs_fenced and one.jobs == ("7",)
    assert vm.name in one.message and "job 7" in one.message
    assert repair_command(one) == Command("fence", host="h1")
    harness.run(repair_command(one))
    assert [t.kind for t in seen(harness)] == ["fenced"], "the VM is shown until it is gone"
    assert host.name == "h1"


def test_a_job_that_backs_off_is_named_and_repair_ends_the_back_off() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    attempt = harness.attempt()
    with committing(harness) as tx:
        late = replace(attempt, not_before=harness.clock.time + 300, tries=4)
        tx.apply(Move((Change(late, Event.NOTED),)))
    (one,) = [t for t in seen(harness) if t.kind == "back-off"]
    assert one.name == "attempt-1" and "4 times in a row" in one.message and "in 5 min" in one.remedy
    harness.run(repair_command(one))
    assert not [t for t in seen(harness) if t.kind == "back-off"]


EMPTY = PlannerHarness().rows
RELEASE = Failure(Effect(EffectKind.RELEASE, Key("vm", 3)), 5, "refused", 16.0)


def test_an_effect_that_fails_is_told_in_words_that_name_the_job_or_the_vm() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    (vm,) = harness.all_vms()
    told = {
        EffectKind.PIN: (Key("attempt", 1), "tying job 7 to its VMs, so that Slurm starts it there, failed 5 times"),
        EffectKind.RELEASE: (vm.key, f"ending VM {vm.name} of job 7 failed 5 times"),
        EffectKind.FENCE: (Key("host", 1), "fencing host h1 failed 5 times"),
    }
    for kind, (key, words) in told.items():
        one = failing_effect(Failure(Effect(kind, key, "h1"), 5, "refused", 16.0), harness.rows, 0.0)
        assert one.message == f"{words} in a row: refused"
    assert set(alerts.DOING) == set(EffectKind)


@pytest.mark.parametrize(
    ("one", "name", "words"),
    [
        (
            sources_away([("scheduler", 300.0, "no answer"), ("h1", 9.0, "")])[0],
            "scheduler",
            ("the scheduler", "5 min", "no answer", "scontrol ping"),
        ),
        (sources_away([("cloud-1", 3.0, "gone")])[0], "cloud-1", ("source cloud-1", "3 s: gone", "start its agent")),
        (
            alerts.HINTS(seconds=300.0, poll=2.0, inbox="/run/mv/inbox"),
            "hints",
            ("5 min", "up to 2 s late", "multiverse.lua", "/run/mv/inbox", "SlurmUser"),
        ),
        (alerts.STORE(seconds=7200.0, reason="disk is full"), "store", ("2 h", "disk is full", "make room")),
        (failing_effect(RELEASE, EMPTY, 0.0), "vm-3", ("ending vm 3 failed 5 times", "16 s")),
        (alerts.ORPHAN(name="mvtest0-9"), "mvtest0-9", ("no record explains it", "two observations")),
    ],
)
def test_an_alert_that_ends_by_itself_has_no_repair(one: Alert, name: str, words: Sequence[str]) -> None:
    assert one.name == name and not one.repair
    for word in words:
        assert word in f"{one.message} {one.remedy}"


DEFINED = [one for one in vars(alerts).values() if isinstance(one, alerts.Wrong)]


@pytest.mark.parametrize("wrong", DEFINED, ids=lambda one: one.message[:30])
def test_each_alert_has_words_and_a_severity_whatever_is_known(wrong: alerts.Wrong) -> None:
    bare = wrong()
    assert bare.kind == wrong.kind and bare.severity == wrong.severity
    for text in (bare.message, bare.remedy, bare.repair):
        assert "{" not in text and "[" not in text
    assert bare.message and bare.remedy and bare.needs_fenced == (wrong.kind == "host")


def test_hosts_of_a_source_that_is_unknown_are_out_of_reach_after_a_while() -> None:
    harness = PlannerHarness()
    known = {name: KnownHost(name, source) for name, source in (("h1", "near"), ("h2", "near"), ("h3", "silent"))}
    seen_near = Seen(HypervisorView({"h1": harness.hosts["h1"]}), harness.clock.time)
    for silence, away in ((POLICY.silence - 1, ["h2"]), (POLICY.silence + 1, ["h2", "h3"])):
        silent = Observation(None, harness.clock.time - silence)
        world = World(sources={"near": Observation(seen_near), "silent": silent})
        found = findings(replace(harness.rows, hosts=known), world, POLICY, harness.clock.time)
        assert [one.name for one in found if one.kind == "host"] == away


def test_vms_of_a_fenced_host_are_shown_until_they_are_gone() -> None:
    fenced = {"h1": KnownHost("h1", SOURCE, HostState.FENCED), "h2": KnownHost("h2", SOURCE)}
    two = rows(vm(VmState.ENDING, id=1), vm(VmState.SERVING, id=2, host="h2"))
    found = findings(replace(two, hosts=fenced), World(), POLICY, 0.0)
    assert [one.message for one in found if one.kind == "fenced"] == [
        "VMs of fenced hosts are not yet removed: mvtest0-1"
    ]


def test_a_quarantined_offer_is_named_by_its_vm_and_can_be_repaired() -> None:
    odd = replace(offer(OfferState.OPEN, id=3), quarantined=said("odd"))
    (one,) = findings(rows(vm(VmState.JOINED, id=3), odd), world_of(None, None, 0.0), POLICY, 0.0)
    assert one.name == "offer-3" and "offer of VM mvtest0-3" in one.message
    assert repair_command(one) == Command("retry", key=Key("offer", 3))


# --- the commands ----------------------------------------------------------------------------------

HOST_ALERT = {"kind": "host", "name": "h1", "message": "it is away", "remedy": "bring it back",
        "repair": "takes your word", "needs_fenced": True, "version": 3, "jobs": []}  # fmt: skip
RECORD_ALERT = HOST_ALERT | {"kind": "quarantine", "name": "attempt-1", "repair": "looks again", "needs_fenced": False}
SOURCE_ALERT = RECORD_ALERT | {"kind": "source", "name": "scheduler", "repair": ""}


class RepairingClient:
    """A client whose daemon removes every alert that it is asked to repair."""

    def __init__(self, *alerts: Mapping[str, Any]) -> None:
        self.alerts, self.asked, self.looks, self.awaited = list(alerts), [], 0, 0.0

    def __enter__(self) -> RepairingClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        self.looks += 1
        sources = [{"name": n, "known": True, "observations": self.looks, "age": 0.1, "unknown_for": 0.0, "failure": ""}
                   for n in ("scheduler", "hypervisor")]  # fmt: skip
        sources[0]["awaited"] = self.awaited
        jobs = stage_counts(PlannerHarness().rows.attempts.values())
        return {
            "pid": 1, "version": "0", "site": "test0", "up": 5.0, "sources": sources, "jobs": jobs, "attempts": {},
            "vms": {}, "templates": {}, "pools": [], "alerts": list(self.alerts),
        }  # fmt: skip

    def repair(self, name: str, *, fenced: bool) -> None:
        self.asked.append((name, fenced))
        self.alerts = [one for one in self.alerts if one["name"] != name]


def run(monkeypatch: pytest.MonkeyPatch, daemon: RepairingClient, *words: str, said: str = "") -> Any:
    app = typer.Typer()
    app.command("status")(status.status)
    app.command("repair")(status.repair)
    monkeypatch.setattr(status, "Client", lambda: daemon)
    return CliRunner().invoke(app, words, input=said)


def test_status_exits_with_1_if_there_is_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, RepairingClient(), "status").exit_code == 0
    assert run(monkeypatch, RepairingClient(SOURCE_ALERT), "status").exit_code == status.ALERTS_PRESENT
    assert run(monkeypatch, RepairingClient(SOURCE_ALERT), "status", "--json").exit_code == status.ALERTS_PRESENT


def test_each_alert_has_a_heading_that_says_what_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(status.WHAT) == set(get_args(AlertKind))
    twice = (SOURCE_ALERT | {"name": "vm", "kind": "unserved"}, SOURCE_ALERT | {"name": "vm", "kind": "effect"})
    shown = run(monkeypatch, RepairingClient(*twice), "status").stdout
    assert "vm (setting of Slurm that does not reach VMs)" in shown and "vm (repeated failure)" in shown


def test_a_permanent_alert_is_shown_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    unserved = SOURCE_ALERT | {"kind": "unserved", "name": "preemption", "message": "it reaches nobody"}
    shown = run(monkeypatch, RepairingClient(unserved), "status")
    assert shown.exit_code == 0 and "it reaches nobody" in shown.stdout and "No alerts" not in shown.stdout
    assert run(monkeypatch, RepairingClient(unserved, SOURCE_ALERT), "status").exit_code == status.ALERTS_PRESENT


def test_a_source_that_is_slow_to_answer_is_shown_and_is_no_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RepairingClient()
    for awaited, slow in ((0.0, False), (4.0, False), (20.0, True)):
        daemon.awaited = awaited
        shown = run(monkeypatch, daemon, "status")
        assert shown.exit_code == 0 and ("the scheduler has not answered since" in shown.stdout) == slow
        assert ("No alerts yet." in shown.stdout) == slow and ("scontrol ping" in shown.stdout) == slow


def test_repair_without_names_repairs_all_but_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RepairingClient(HOST_ALERT, RECORD_ALERT, SOURCE_ALERT)
    assert run(monkeypatch, daemon, "repair", "--yes").exit_code == 0
    assert daemon.asked == [("attempt-1", False)]


def test_nothing_is_repaired_without_consent_or_in_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RepairingClient(RECORD_ALERT)
    assert run(monkeypatch, daemon, "repair", said="n\n").exit_code != 0
    assert run(monkeypatch, daemon, "repair", "--dry-run").exit_code == 0
    assert daemon.asked == []
    assert run(monkeypatch, daemon, "repair", said="y\n").exit_code == 0
    assert daemon.asked == [("attempt-1", False)]


def test_a_host_is_fenced_only_by_name_and_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RepairingClient(HOST_ALERT)
    assert isinstance(run(monkeypatch, daemon, "repair", "h1", "--yes").exception, Refused)
    assert isinstance(run(monkeypatch, daemon, "repair", "--fenced", "--yes").exception, Refused)
    assert daemon.asked == []
    assert run(monkeypatch, daemon, "repair", "h1", "--fenced", "--yes").exit_code == 0
    assert daemon.asked == [("h1", True)]


def test_an_unknown_alert_or_one_without_repair_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hint in (("attempt-9", "multiverse status"), ("scheduler", SOURCE_ALERT["remedy"])):
        error = run(monkeypatch, RepairingClient(SOURCE_ALERT), "repair", name, "--yes").exception
        assert isinstance(error, Refused) and hint in error.hint


def test_the_name_of_an_alert_determines_its_record() -> None:
    alert = Alert("quarantine", "vm-12", "", "")
    assert repair_command(alert) == Command("retry", key=Key("vm", 12))


def test_an_empty_host_out_of_reach_is_shown_until_an_operator_gives_it_up() -> None:
    harness = PlannerHarness()
    with committing(harness) as tx:
        for number, name in enumerate(("h1", "h2"), 1):
            tx.keep_host(KnownHost(name, SOURCE, id=number))
    here = [harness.hosts["h1"]]
    assert seen(harness) == [], "nothing is concluded while the hosts are not observed"
    (one,) = seen(harness, hosts=here)
    assert one.name == "h2" and one.needs_fenced and repair_command(one) == Command("fence", host="h2")
    assert [alert.name for alert in seen(harness, hosts=[])] == ["h1", "h2"]
