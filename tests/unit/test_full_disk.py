"""A full disk: what may be claimed of it, which guests are paused, and what is committed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.capacity.room import Room, room_of
from multiverse.core.capacity.sizes import largest_on
from multiverse.core.context import Context
from multiverse.core.errors import Exhausted
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView, Overcommitment
from multiverse.core.model.job import AttemptState, Job, JobState, SchedulerView
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import TemplateState, VmCondition, VmSeen, VmState
from multiverse.core.planner import plan
from multiverse.core.transition import RELEASING_EFFECTS, Change, Command, EffectKind, Event, Move
from multiverse.host.qemu import disks
from multiverse.host.qemu.disks import PausedGuests
from multiverse.host.qemu.machine import Accelerator, Memory, QemuMachine, Wiring
from multiverse.host.qemu.session import Paths
from multiverse.service.alerts import findings
from multiverse.store import Store
from tests.unit.planner_harness import POLICY, ManualClock, PlannerHarness
from tests.unit.rows import IMAGES, as_ready, attempt, changes_of, rows, state, template, vm, world_of

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0


def host(available: int | None, disk: int = 1000) -> Host:
    abilities = frozenset({"instant"})
    return Host("h1", Size(4, 8192, disk), abilities, images=IMAGES, available_disk=available)


# --- claims -----------------------------------------------------------------------------------------


def room_on(one: Host) -> Room:
    return room_of(Context(state(), world_of(None, HypervisorView({"h1": one}), 0.0), POLICY))


@pytest.mark.parametrize(("available", "fits"), [(None, True), (0, False), (1023, False), (1024, True)])
def test_a_host_with_less_disk_than_its_floor_takes_nothing(available: int | None, fits: bool) -> None:
    room = room_on(host(available))
    assert room.fits("h1", Size(1, 100)) is fits
    assert (room.place(1, {"h1": Size(1, 100)}) == ["h1"]) is fits


def test_disk_may_be_claimed_as_many_times_as_the_site_says() -> None:
    more = replace(host(None), overcommit=Overcommitment(disk=2.5))
    room = room_on(more)
    assert room.fits("h1", Size(1, 100, 2500)) and not room.fits("h1", Size(1, 100, 2501))
    assert largest_on(more, "slim", POLICY).disk == 2500
    assert largest_on(host(None), "slim", POLICY).disk == 1000


def admitted(available: int | None) -> tuple[list[Change], dict[int, str]]:
    """The changes of one pass with a job at the gate, and why jobs wait. An unused template is there too."""
    one = attempt(A.QUEUED)
    here = state(one, template(T.READY), template(T.READY, id=2, image="other"), now=NOW)
    job = Job(one.job, one.job_name, one.uid, JobState.PENDING, one.request)
    ready = as_ready(here.templates.values())
    world = world_of(SchedulerView({"7": job}), HypervisorView({"h1": host(available)}, {}, ready), NOW)
    return changes_of(plan(here, world, [], NOW, POLICY)), {number: str(why) for number, why in here.reasons.items()}


def test_a_job_waits_for_disk_and_no_template_is_given_up_for_it() -> None:
    assert admitted(500) == ([], {1: "waiting for disk: h1 must have 1024 MiB available"})
    assert {change.row.state for change in admitted(1024)[0]} == {A.CLAIMED, V.PLANNED}


# --- paused guests, as the planner sees them --------------------------------------------------------


def test_a_paused_vm_goes_on_serving_also_after_its_host_was_out_of_reach() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    name = harness.all_vms()[0].name
    harness.seen(name, VmCondition.PAUSED)
    assert harness.run() == []
    away = harness.hosts.pop("h1")
    harness.run()
    harness.hosts["h1"] = away
    harness.run()
    assert harness.all_vms()[0].state is V.SERVING


@pytest.mark.parametrize(("condition", "seconds"), [(VmCondition.PAUSED, 10.0), (VmCondition.RUNNING, 120.0)])
def test_a_job_that_does_not_complete_loses_its_vm_sooner_if_the_vm_is_paused(
    condition: VmCondition, seconds: float
) -> None:
    harness = PlannerHarness()
    its = harness.to_allocated()
    name = harness.all_vms()[0].name
    harness.seen(name, condition)
    job = harness.jobs["7"]._replace(state=JobState.COMPLETING, nodes=(name,), gated=False, pinned=its.feature)
    harness.jobs["7"] = job
    harness.run()
    assert harness.attempt().state is A.RECLAIMING
    harness.pass_time(seconds - 3)
    harness.run()
    assert harness.all_vms()[0].state is V.SERVING
    harness.pass_time(3)
    harness.run()
    assert harness.all_vms()[0].leaving


def test_the_alert_names_paused_vms_their_jobs_the_room_and_what_to_do() -> None:
    here = rows(attempt(A.ALLOCATED), vm(V.SERVING, attempt=1), vm(V.PARKED, id=2))
    names = ("mvtest0-1", "mvtest0-2")

    def found(available: int | None, condition: VmCondition) -> list[tuple[str, str, str, tuple[str, ...]]]:
        seen = {names[0]: VmSeen(names[0], "h1", condition), names[1]: VmSeen(names[1], "h1", VmCondition.PARKED)}
        world = world_of(SchedulerView(), HypervisorView({"h1": host(available)}, seen), NOW)
        return [
            (one.name, one.message, one.remedy, one.jobs)
            for one in findings(here, world, POLICY, NOW)
            if one.kind == "disk"
        ]

    assert found(2000, VmCondition.RUNNING) == found(None, VmCondition.RUNNING) == []
    ((name, message, remedy, jobs),) = found(7, VmCondition.PAUSED)
    assert name == "disk-h1" and jobs == ("7",) and "scancel" in remedy
    assert "7 MiB are available" in message and names[0] in message and names[1] not in message and "job 7" in message
    ((_, message, _, jobs),) = found(7, VmCondition.RUNNING)
    assert "short of disk: 7 MiB are available, 1024 MiB are to be kept" in message and jobs == ()


# --- QEMU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waits", "werror"), [(True, "enospc"), (False, "report")])
def test_only_a_vm_waits_for_room_and_only_a_want_of_room_pauses_it(waits: bool, werror: str) -> None:
    facts: dict[str, Any] = {"name": "mva-1", "accelerator": Accelerator("tcg"), "cpus": 1, "memory": Memory(256),
             "limits": Size(8, 4096), "disk": Path("/d"), "disk_format": "qcow2", "mac": "02:00:00:00:00:01",
             "kernel": Path("/k"), "initrd": Path("/i"), "cmdline": "quiet", "waits_for_room": waits}  # fmt: skip
    argv = " ".join(QemuMachine(**facts).argv("qemu", Wiring(5, 6, 7, Path("/c")), paused=True))
    assert f"werror={werror},rerror=report" in argv


class FakeQemu:
    """A monitor, one connection after another. `status` is the guest's; `cont` lets it run if `resumes`."""

    def __init__(self, path: Path) -> None:
        self.status, self.resumes = "running", True
        self.commands: list[str] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        if self._server.fileno() >= 0:
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            with peer, peer.makefile("r") as lines:
                peer.sendall(b'{"QMP": {}}\n')
                for line in lines:
                    command = json.loads(line)["execute"]
                    if command != "qmp_capabilities":
                        self.commands.append(command)
                    if command == "cont" and self.resumes:
                        self.status = "running"
                    peer.sendall(json.dumps({"return": {"status": self.status}}).encode() + b"\n")


class Guests:
    """The paused guests of a host with one guest, the room of its disk, and a clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (directory / "run").mkdir()
        self.qemu = FakeQemu(directory / "run" / "qmp")
        self.available, self.now = 100 << 30, 5000.0
        self.paused = PausedGuests(directory, lambda name: Paths(directory / "home", directory / "run"))
        monkeypatch.setattr(disks, "available_disk", lambda _: self.available)
        monkeypatch.setattr("multiverse.host.qemu.disks.time.monotonic", lambda: self.now)


@pytest.fixture
def guests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guests]:
    made = Guests(tmp_path, monkeypatch)
    with closing(made.qemu):
        yield made


def test_a_paused_guest_goes_on_when_the_disk_has_room(guests: Guests) -> None:
    guests.available, guests.qemu.status = 0, "io-error"
    guests.paused.ask("vm")
    assert "vm" in guests.paused
    guests.paused.ask("vm")
    guests.paused.resume()
    assert guests.qemu.commands == ["query-status", "query-status"], "one that is known is not asked, nor resumed"
    guests.available = 1 << 30
    guests.paused.resume()
    assert "vm" not in guests.paused and guests.qemu.status == "running"
    assert guests.qemu.commands[2:] == ["cont", "query-status"]


def test_a_guest_that_finds_no_room_again_is_found_paused_again(guests: Guests) -> None:
    guests.available, guests.qemu.status, guests.qemu.resumes = 0, "io-error", False
    guests.paused.ask("vm")
    guests.available = 512 << 20
    guests.paused.resume()
    guests.paused.ask("vm")
    assert "vm" in guests.paused


def test_while_the_disk_has_room_an_idle_guest_is_asked_once_a_minute(guests: Guests) -> None:
    for _ in range(10):
        guests.paused.ask("vm")
    assert len(guests.qemu.commands) == 2
    guests.now += 60.0
    guests.paused.ask("vm")
    assert len(guests.qemu.commands) == 4
    guests.available = 1 << 20
    guests.paused.ask("vm")
    assert len(guests.qemu.commands) == 6, "while it has none, each time"


def test_a_guest_that_somebody_else_stopped_is_left_alone(guests: Guests) -> None:
    guests.available, guests.qemu.status = 0, "paused"
    guests.paused.ask("vm")
    assert "vm" not in guests.paused


def test_a_guest_that_is_gone_is_forgotten(guests: Guests) -> None:
    guests.available, guests.qemu.status = 0, "io-error"
    guests.paused.ask("vm")
    guests.qemu.close()
    guests.available = 1 << 30
    guests.paused.resume()
    assert "vm" in guests.paused, "its QEMU did not answer"
    guests.paused.keep_only(())
    assert "vm" not in guests.paused


# --- the store --------------------------------------------------------------------------------------


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the disk has room for more."""
    full = [False]
    allocate = os.posix_fallocate

    def allocated(fd: int, offset: int, length: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    return lambda room: full.__setitem__(0, not room)


def test_only_what_releases_is_committed_until_the_reserve_is_whole_again(
    tmp_path: Path, allocation: Callable[[bool], None]
) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    harness.to_claimed()
    its = harness.attempt()
    allocation(False)

    def note(number: int, *, releasing: bool) -> None:
        noted = replace(harness.store.rows().attempts[its.id], note=said(f"{number}"))
        with harness.store.transaction(releasing=releasing) as tx:
            tx.apply(Move((Change(noted, Event.QUARANTINED, said("x" * 3000)),)))

    for number in range(20):
        note(number, releasing=True)
    with pytest.raises(Exhausted, match="make room"):
        note(20, releasing=False)
    assert text_of(harness.store.rows().attempts[its.id].note) == "19"
    allocation(True)
    note(21, releasing=False)
    allocation(False)
    note(22, releasing=True)
    harness.store.close()


# --- the controller ---------------------------------------------------------------------------------


class FullStore(Store):
    """A store that commits nothing but releases while it is `full`."""

    full = False

    def transaction(self, *, releasing: bool = False) -> Any:
        if self.full and not releasing:
            raise Exhausted("the database has no room", hint="make room in the state directory")
        return super().transaction(releasing=releasing)


class Nothing:
    """A scheduler and a hypervisor with one host, of which nobody calls anything."""

    name, sources, submission, addresses, parts, offers, templates, users, membership, groups = (
        "h1",
        (),
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
    )

    async def observe(self) -> SchedulerView:
        raise AssertionError("no observer runs")


def uncommitted(controller: Controller) -> bool:
    return controller.uncommitted is not None


def test_a_command_to_build_waits_until_there_is_room_and_others_do_not() -> None:
    async def script() -> None:
        store = FullStore(":memory:", ManualClock(), site="test0")
        controller = Controller(store, Nothing(), Nothing(), ManualClock(), Settings())  # type: ignore[arg-type]
        view = HypervisorView({"h1": host(None)})
        store.full = True
        build, drop = controller.command(Command("build", "h1", "slim")), controller.command(Command("drop", "h1", "x"))
        controller.world = lambda: world_of(SchedulerView(), view, 1.0)  # type: ignore[method-assign]
        assert not controller.run_pass()
        assert [uncommitted(controller), drop.done(), build.done()] == [True, True, False]
        assert controller.state.templates == {}
        store.full = False
        assert controller.run_pass()
        assert [uncommitted(controller), drop.done(), build.done()] == [False, True, True]
        assert len(controller.state.templates) == 1
        await controller.close()

    asyncio.run(script())


def test_effects_that_add_are_those_that_make_or_start_something() -> None:
    adding = set(EffectKind) - RELEASING_EFFECTS
    made = {EffectKind.CREATE, EffectKind.START, EffectKind.BUILD, EffectKind.REQUEST}
    # What is saved takes room, too.
    saving = {
        EffectKind.PREPARE,
        EffectKind.FREEZE,
        EffectKind.CUT,
        EffectKind.SAVE,
        EffectKind.CAPTURE,
        EffectKind.KEEP,
        EffectKind.SLEEP,
        EffectKind.WAKE,
    }
    assert adding == {*made, *saving, EffectKind.COPY, EffectKind.MOVE, EffectKind.OFFER, EffectKind.PIN}
