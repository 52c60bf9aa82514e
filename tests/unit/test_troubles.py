"""Each trouble is named, says what is wrong and what to do, and is repaired by the command that mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from multiverse.cli import repair, status
from multiverse.core.errors import Broken, Refused
from multiverse.core.model import AttemptState, Depth, Host, JobState, Key, Request, Size, TemplateState, VmState
from multiverse.core.policy import Policy, Pool
from multiverse.core.transition import Change, Command, Done, EffectKind, Event, Move
from multiverse.service.troubles import Failing, Situation, Trouble, Unanswered, command_for, troubles
from multiverse.service.views import job_counts
from tests.unit.scene import POLICY, Scene


def seen(scene: Scene, **more: Any) -> list[Trouble]:
    return troubles(Situation(scene.rows, scene.clock.time, **more), POLICY)


def quarantined(scene: Scene) -> None:
    """The job runs on a node that is not its own."""
    scene.to_spawned()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.RUNNING, nodes=("elsewhere",))
    scene.run()


def test_a_cluster_that_is_well_has_no_trouble() -> None:
    scene = Scene()
    scene.to_allocated()
    assert seen(scene) == [] and job_counts(scene.rows) == {
        "waiting": 0, "provisioning": 0, "running": 1, "ending": 0,
    }  # fmt: skip


def test_a_quarantined_record_is_named_with_its_job_and_repair_takes_it_up_again() -> None:
    scene = Scene()
    quarantined(scene)
    (one,) = seen(scene)
    assert one.name == "attempt-1" and one.jobs == ("7",)
    assert "job 7 is quarantined" in one.wrong and "elsewhere" in one.wrong and "timeline 7" in one.todo
    scene.jobs["7"] = replace(scene.jobs["7"], nodes=tuple(vm.name for vm in scene.all_vms()))
    scene.run()
    assert seen(scene), "without a word from the operator it is left alone"
    scene.run(command_for(one))
    assert seen(scene) == [] and scene.attempt().state is AttemptState.ALLOCATED


def test_a_host_that_is_short_of_memory_is_named_only_where_more_is_claimed_than_declared() -> None:
    bold = replace(POLICY, overcommit=2.0, floor=1000)
    scene = Scene()
    for available, policy, kinds in ((999, bold, ["memory"]), (1000, bold, []), (0, bold, []), (999, POLICY, [])):
        host = replace(scene.hosts["h1"], available=available)
        found = troubles(Situation(scene.rows, scene.clock.time, hosts=[host]), policy)
        assert [one.kind for one in found] == kinds
        assert all("999 MiB are available, 1000 are to be kept" in one.wrong and not one.repair for one in found)


def test_an_image_that_no_host_has_is_named_with_who_waits_for_it() -> None:
    policy = replace(POLICY, pools=(Pool("stock", Depth.PARKED, 1, 1, Size(1, 100), 100.0),))
    scene = Scene()
    scene.job(request=Request(1, Size(1, 100), image="mine"))
    scene.run()
    bare = [replace(scene.hosts["h1"], images={"slim": frozenset[str]()})]

    def found(hosts: list[Host] | None, policy: Policy) -> list[tuple[str, tuple[str, ...]]]:
        return [
            (one.name, one.jobs)
            for one in troubles(Situation(scene.rows, scene.clock.time, hosts=hosts), policy)
            if one.kind == "image"
        ]

    assert found(bare, POLICY) == [], "it may have come a moment ago"
    scene.clock.time += POLICY.patience
    assert found(bare, policy) == [("image-mine", ("7",)), ("image-stock", ())]
    (mine, _) = [t for t in troubles(Situation(scene.rows, scene.clock.time, hosts=bare), policy) if t.kind == "image"]
    assert mine.wrong == "no host has image mine; waiting for it: job 7" and "image build slim --name mine" in mine.todo
    assert found([replace(bare[0], images={"mine": frozenset()})], POLICY) == found(None, policy) == []


def test_what_was_wrong_from_the_start_is_shown_after_what_came_later() -> None:
    scene = Scene()
    quarantined(scene)
    standing = Trouble("unserved", "preemption", "it reaches nobody", "tell them")
    assert [one.kind for one in seen(scene, standing=[standing])] == ["quarantine", "unserved"]


def test_what_is_still_impossible_is_quarantined_again_under_a_new_version() -> None:
    scene = Scene()
    quarantined(scene)
    (one,) = seen(scene)
    scene.run(command_for(one))
    (again,) = seen(scene)
    assert again.name == one.name and again.version > one.version


def test_a_quarantined_vm_and_template_are_named_too() -> None:
    scene = Scene()
    scene.to_allocated()
    vm, template = scene.all_vms()[0], scene.rows.templates[1]
    with scene.store.transaction() as tx:
        tx.apply(Move((Change(replace(vm, quarantined="odd"), Event.QUARANTINED),)))
        tx.apply(Move((Change(replace(template, quarantined="odd too"), Event.QUARANTINED),)))
    first, second = seen(scene)
    assert (first.name, first.jobs) == ("vm-1", ("7",)) and f"VM {vm.name} of job 7" in first.wrong
    assert second.name == "template-1" and "the template of slim on h1" in second.wrong
    scene.run(command_for(first), command_for(second))
    assert seen(scene) == []


def test_a_broken_template_says_why_and_when_it_is_tried_again_and_repair_builds_it_now() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    (template,) = scene.rows.templates.values()
    scene.run(Done(template.key, EffectKind.BUILD, "building", Broken("no kernel")))
    (one,) = seen(scene)
    assert one.name == "template-1" and "slim on h1 is broken: no kernel" in one.wrong and "in 2 s" in one.todo
    scene.run(command_for(one))
    assert scene.rows.templates[1].state is TemplateState.BUILDING and seen(scene) == []


def test_a_host_out_of_reach_shows_its_vms_and_jobs_and_is_fenced_by_its_name_alone() -> None:
    scene = Scene()
    scene.to_allocated()
    host = scene.hosts.pop("h1")
    scene.run()
    (one,) = seen(scene)
    (vm,) = scene.all_vms()
    assert vm.state is VmState.LOST and one.name == "h1" and one.needs_fenced and one.jobs == ("7",)
    assert vm.name in one.wrong and "job 7" in one.wrong
    assert command_for(one) == Command("fence", host="h1")
    scene.run(command_for(one))
    assert [t.kind for t in seen(scene)] == ["fenced"], "shown until it is gone"
    assert host.name == "h1"


def test_a_job_that_backs_off_is_named_and_repair_ends_the_wait() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    attempt = scene.attempt()
    with scene.store.transaction() as tx:
        late = replace(attempt, not_before=scene.clock.time + 300, tries=4)
        tx.apply(Move((Change(late, Event.NOTED),)))
    (one,) = [t for t in seen(scene) if t.kind == "back-off"]
    assert one.name == "attempt-1" and "4 times in a row" in one.wrong and "in 5 min" in one.todo
    scene.run(command_for(one))
    assert not [t for t in seen(scene) if t.kind == "back-off"]


@pytest.mark.parametrize(
    ("more", "name", "words"),
    [
        (
            {"unanswered": [Unanswered("scheduler", 300, "no answer")]},
            "scheduler",
            ("5 min", "no answer", "scontrol ping"),
        ),
        ({"unanswered": [Unanswered("hypervisor", 3, "gone")]}, "hypervisor", ("host side", "3 s", "gone")),
        ({"uncommitted": (7200.0, "disk is full")}, "store", ("2 h", "disk is full", "make room")),
        (
            {"failing": [Failing("release", "vm 3", 5, "refused", 16)]},
            "vm-3",
            ("release of vm 3 failed 5 times", "16 s"),
        ),
        ({"strangers": ["mvtest0-9"]}, "mvtest0-9", ("no record explains it", "two looks")),
    ],
)
def test_what_ends_by_itself_is_shown_and_no_repair_is_offered(
    more: Mapping[str, Any], name: str, words: Sequence[str]
) -> None:
    (one,) = seen(Scene(), **more)
    assert one.name == name and not one.repair
    for word in words:
        assert word in f"{one.wrong} {one.todo}"


# --- the commands ----------------------------------------------------------------------------------

HOST = {"kind": "host", "name": "h1", "wrong": "it is away", "todo": "bring it back", "repair": "takes your word",
        "needs_fenced": True, "version": 3, "jobs": []}  # fmt: skip
RECORD = HOST | {"kind": "quarantine", "name": "attempt-1", "repair": "looks again", "needs_fenced": False}
SOURCE = RECORD | {"kind": "source", "name": "scheduler", "repair": ""}


class Daemon:
    """Mends whatever it is asked to, and shows it at the next look."""

    def __init__(self, *troubles: Mapping[str, Any]) -> None:
        self.troubles, self.asked, self.looks = list(troubles), [], 0

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        self.looks += 1
        sources = [{"name": n, "known": True, "looks": self.looks, "age": 0.1, "unknown_for": 0.0, "failure": ""}
                   for n in ("scheduler", "hypervisor")]  # fmt: skip
        jobs = job_counts(Scene().rows)
        return {
            "pid": 1, "version": "0", "site": "test0", "up": 5.0, "sources": sources, "jobs": jobs, "attempts": {},
            "vms": {}, "templates": {}, "pools": [], "troubles": list(self.troubles),
        }  # fmt: skip

    def repair(self, name: str, *, fenced: bool) -> None:
        self.asked.append((name, fenced))
        self.troubles = [t for t in self.troubles if t["name"] != name]


def run(monkeypatch: pytest.MonkeyPatch, daemon: Daemon, *words: str, said: str = "") -> Any:
    app = typer.Typer()
    app.command("status")(status.status)
    app.command("repair")(repair.repair)
    for module in (status, repair):
        monkeypatch.setattr(module, "Client", lambda: daemon)
    return CliRunner().invoke(app, words, input=said)


def test_status_exits_with_0_without_trouble_and_with_1_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Daemon(), "status").exit_code == 0
    assert run(monkeypatch, Daemon(SOURCE), "status").exit_code == status.TROUBLED
    assert run(monkeypatch, Daemon(SOURCE), "status", "--json").exit_code == status.TROUBLED


def test_what_no_one_can_mend_is_shown_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    unserved = SOURCE | {"kind": "unserved", "name": "preemption", "wrong": "it reaches nobody"}
    shown = run(monkeypatch, Daemon(unserved), "status")
    assert shown.exit_code == 0 and "it reaches nobody" in shown.stdout and "No trouble" not in shown.stdout
    assert run(monkeypatch, Daemon(unserved, SOURCE), "status").exit_code == status.TROUBLED


def test_repair_does_what_it_said_and_never_a_host_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(HOST, RECORD, SOURCE)
    assert run(monkeypatch, daemon, "repair", "--yes").exit_code == 0
    assert daemon.asked == [("attempt-1", False)]


def test_nothing_is_repaired_when_the_operator_says_no_or_asks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(RECORD)
    assert run(monkeypatch, daemon, "repair", said="n\n").exit_code != 0
    assert run(monkeypatch, daemon, "repair", "--dry-run").exit_code == 0
    assert daemon.asked == []
    assert run(monkeypatch, daemon, "repair", said="y\n").exit_code == 0
    assert daemon.asked == [("attempt-1", False)]


def test_a_host_is_fenced_only_by_name_and_with_the_word_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(HOST)
    assert isinstance(run(monkeypatch, daemon, "repair", "h1", "--yes").exception, Refused)
    assert isinstance(run(monkeypatch, daemon, "repair", "--fenced", "--yes").exception, Refused)
    assert daemon.asked == []
    assert run(monkeypatch, daemon, "repair", "h1", "--fenced", "--yes").exit_code == 0
    assert daemon.asked == [("h1", True)]


def test_what_is_no_trouble_or_has_no_repair_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hint in (("attempt-9", "multiverse status"), ("scheduler", SOURCE["todo"])):
        error = run(monkeypatch, Daemon(SOURCE), "repair", name, "--yes").exception
        assert isinstance(error, Refused) and hint in error.hint


def test_a_key_and_a_name_are_the_same_thing() -> None:
    trouble = Trouble("quarantine", "vm-12", "", "")
    assert command_for(trouble) == Command("retry", key=Key("vm", 12))


def test_a_host_out_of_reach_that_holds_nothing_is_shown_until_an_operator_gives_it_up() -> None:
    scene = Scene()
    with scene.store.transaction() as tx:
        tx.keep_hosts(frozenset({"h1", "h2"}))
    here = [scene.hosts["h1"]]
    assert seen(scene) == [], "nothing is known while the hosts' side is not"
    (one,) = seen(scene, hosts=here)
    assert one.name == "h2" and one.needs_fenced and command_for(one) == Command("fence", host="h2")
    assert [trouble.name for trouble in seen(scene, hosts=[])] == ["h1", "h2"]
