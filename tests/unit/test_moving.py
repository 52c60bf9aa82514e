"""Which VMs move, where to and why not: by command, and off hosts that are to be emptied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.capacity.room import room_of
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Claim, Drain, Host, ImageDisk
from multiverse.core.model.job import AttemptState, Eviction, JobRef, JobState, NodeState, Request
from multiverse.core.model.machine import MachineKind, why_other_machine
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import Place, Vm, VmCondition, VmSeen, VmState
from multiverse.core.moving import follow_command, search_for
from multiverse.core.rebalance.drains import why_stay
from multiverse.core.transition import Command, Done, EffectKind, Event
from multiverse.service.hosts import Troubles, host_views
from tests.unit.recorded_cpus import machine
from tests.unit.rows import SOURCE, saved
from tests.unit.test_places import Site
from tests.unit.test_preemption import CROWDED, UNIX, Crowd, host
from tests.unit.test_preemption import KIND as CROWD_KIND

A, V = AttemptState, VmState
KIND = MachineKind("kvm", "Haswell", frozenset({"avx", "avx2"}), "7.2", "pc-q35-7.2", vendor="GenuineIntel")


def ready(**changes: object) -> Site:
    """A site whose hosts move VMs between each other; `changes` are of the second one."""
    site = Site()
    site.hosts["h1"] = replace(site.hosts["h1"], moves=KIND)
    site.hosts["h2"] = replace(site.hosts["h2"], **{"moves": KIND, **changes})  # type: ignore[arg-type]
    site.run()
    return site


def order(site: Site, host: str = "", what: str = "7") -> str:
    """What a command is answered: empty, or why it is refused."""
    site.run(Command("move", host, job=what))
    return "; ".join(str(error) for _, error in site.state.refusals)


@pytest.mark.parametrize("host", ["", "h2"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_vm_that_is_named_itself_or_by_its_job_moves_to_a_host(host: str, by_name: bool) -> None:
    site = ready()
    assert not order(site, host, site.vm.name if by_name else "7")
    assert (site.vm.state, site.vm.moves) == (V.MOVING, 1)
    assert [place.host for place in site.vm.places] == ["h1", "h2"] and site.held == ["h1", "h2"]
    assert site.vm.places[1].template is None, "all of its memory is its own there"


def test_a_move_that_is_done_leaves_the_vm_at_its_new_host_alone() -> None:
    site = ready()
    order(site)
    site.there = {"h2": VmCondition.RUNNING}
    site.act()
    site.run()
    assert (site.vm.state, site.vm.host, site.held) == (V.SERVING, "h2", ["h2"])
    assert site.moved_by(Event.MOVE, Event.MOVED, Event.LOST) == [Event.MOVE, Event.MOVED]


def test_while_a_move_is_under_way_nothing_is_concluded_from_what_either_host_shows() -> None:
    site = ready()
    order(site)
    site.effect_ended_at[site.vm.key] = float("inf")
    site.there = {"h1": VmCondition.DEAD, "h2": VmCondition.CREATING}
    site.run()
    assert site.vm.state is V.MOVING, "it is being handed over"


def test_a_move_that_has_failed_is_ended_at_both_hosts() -> None:
    site = ready()
    order(site)
    site.there = {"h1": VmCondition.RUNNING, "h2": VmCondition.CREATING}
    site.run(Done(site.vm.key, EffectKind.MOVE, V.MOVING, Broken("the link was cut")))
    assert (site.vm.state, site.vm.host, site.held) == (V.SETTLING, "h1", ["h1", "h2"])
    site.act()
    site.run()
    assert (site.vm.state, site.vm.host, site.held) == (V.SERVING, "h1", ["h1"])
    assert "the link was cut" in [str(entry.reason) for entry in site.store.journal() if entry.event == Event.STAYED]


def test_a_move_that_takes_too_long_is_given_up() -> None:
    site = ready()
    order(site)
    site.there = {"h1": VmCondition.RUNNING, "h2": VmCondition.CREATING}
    site.act()
    site.run()
    assert site.vm.state is V.MOVING, "it is asked for again"
    site.pass_time(site.policy.move_timeout + 1)
    site.run()
    assert site.vm.state is V.SETTLING


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moves": None}, "h2: no VM moves to it (move.enabled)"),
        (
            {"moves": replace(KIND, cpu="host", models=(), wanted="Haswell", lacking=("avx2",))},
            "h2: its CPU lacks avx2 of model Haswell",
        ),
        ({"moves": replace(KIND, release="8.2")}, "h2: it has QEMU 8.2, not 7.2"),
        ({"images": {}}, "h2: it has no image slim"),
        ({"capacity": replace(Site().hosts["h2"].capacity, memory=100)}, "h2: it has no room"),
    ],
)
def test_a_host_that_cannot_take_a_vm_says_what_it_lacks(changes: dict[str, object], why: str) -> None:
    site = ready(**changes)
    assert why in order(site)
    assert why in order(site, "h2") and site.vm.state is V.SERVING


def test_a_vm_with_a_named_model_moves_to_a_cpu_with_more() -> None:
    site = ready(moves=replace(KIND, features=frozenset({"avx", "avx2", "avx512f"}), models=("Skylake", "Haswell")))
    assert not order(site)


def test_what_cannot_move_now_is_refused_with_the_reason() -> None:
    site = ready()
    assert "job 8 runs in no VM of its own (VMs inside a job are neither saved nor moved)" in order(site, what="8")
    assert "no VM is mv-8" in order(site, what="mv-8")
    assert "h1: the VM is there" in order(site, "h1")
    assert "there is no such host" in order(site, "h9")
    site.run(Command("drain", "h2", drain=Drain()))
    assert "h2: it takes no VMs now" in order(site, "h2")
    site.run(Command("resume", "h2"))
    assert not order(site)
    assert "moves already" in order(site)
    assert "cannot be saved now: its VM moves" in str(refusal_of(site, Command("save", job="7")))
    site.run(Done(site.vm.key, EffectKind.MOVE, V.MOVING, Broken("the link was cut")))
    assert "hosts h1 and h2 settle which of them keeps VM" in order(site)


def refusal_of(site: Site, command: Command) -> Refused:
    site.run(command)
    ((_, error),) = site.state.refusals
    return error


class TwoJobs(Site):
    """A second job runs in a VM on h1, and one VM moves from and to a host at a time."""

    def __init__(self) -> None:
        self.second: Vm | None = None
        super().__init__()
        self.policy = replace(self.policy, moves_at_once=1)
        self.hosts = {name: replace(host, moves=KIND) for name, host in self.hosts.items()}
        self.run(Command("drain", "h2", drain=Drain()))
        self.job("8")
        self.run()
        (self.second,) = self.all_vms(2)
        for step in (lambda name: None, self.node, lambda name: self.node(name, NodeState.BUSY)):
            step(self.second.name)
            self.ended(self.second.key)
            self.run()
        attempt = self.attempt(2)
        self.job("8", state=JobState.RUNNING, nodes=(self.second.name,), gated=False, pinned=attempt.feature)
        self.ended(attempt.key)
        self.run()
        self.run(Command("resume", "h2"))
        assert self.states == [V.SERVING, V.SERVING] and {vm.host for vm in self.rows.vms.values()} == {"h1"}

    @property
    def states(self) -> list[VmState]:
        return [vm.state for _, vm in sorted(self.rows.vms.items())]

    def observe(self) -> None:
        super().observe()
        if self.second is not None:
            made = self.rows.vms[self.second.id].state not in (V.PLANNED, V.PARKED)
            latest = self.world.sources["h1"].latest
            assert latest is not None and isinstance(latest.value.vms, dict)
            condition = VmCondition.RUNNING if made else VmCondition.PARKED
            latest.value.vms[self.second.name] = VmSeen(self.second.name, "h1", condition)

    def end_move(self) -> None:
        """Of the first VM, which is at h2 alone then."""
        self.there = {"h2": VmCondition.RUNNING}
        self.act()
        self.run()
        assert (self.vm.state, self.vm.host) == (V.SERVING, "h2")


def test_a_vm_is_not_moved_while_as_many_move_as_the_site_permits() -> None:
    site = TwoJobs()
    assert not order(site) and site.states == [V.MOVING, V.SERVING]
    assert "as many VMs as may move at once (move.at_once) move from or to host h1" in order(site, what="8")
    assert site.states == [V.MOVING, V.SERVING]
    site.end_move()
    assert not order(site, what="8") and site.states == [V.SERVING, V.MOVING]


def test_the_vms_of_a_host_that_is_to_be_emptied_wait_for_each_other() -> None:
    site = TwoJobs()
    site.run(Command("drain", "h1", drain=Drain(moves=True)))
    site.run()
    assert site.states == [V.MOVING, V.SERVING]
    site.end_move()
    site.run()
    assert site.states == [V.SERVING, V.MOVING]


def test_a_host_that_is_to_be_emptied_is_and_one_that_is_drained_alone_is_not() -> None:
    site = ready()
    site.run(Command("drain", "h1", drain=Drain()))
    assert site.vm.state is V.SERVING
    site.run(Command("drain", "h1", drain=Drain(moves=True)))
    assert site.vm.state is V.MOVING


def test_a_vm_of_such_a_host_that_came_back_is_tried_again_after_a_while() -> None:
    site = ready()
    site.run(Command("drain", "h1", drain=Drain(moves=True)))
    site.there = {"h1": VmCondition.RUNNING}
    site.act()
    site.run()
    assert site.vm.state is V.SERVING
    site.pass_time(site.policy.move_again / 2)
    site.run()
    assert site.vm.state is V.SERVING
    site.pass_time(site.policy.move_again)
    site.run()
    assert (site.vm.state, site.vm.moves) == (V.MOVING, 2)


def test_it_is_said_why_a_vm_of_such_a_host_stays() -> None:
    site = ready(moves=None)
    site.run(Command("drain", "h1", drain=Drain(moves=True)))
    said = why_stay(Context(site.state, site.world, site.policy))
    assert list(said) == ["h1"] and "h2: no VM moves to it" in said["h1"]


def test_a_job_that_is_over_ends_its_move() -> None:
    site = ready()
    order(site)
    site.there["h2"] = VmCondition.CREATING
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.ENDED, result="CANCELLED", nodes=())
    site.run()
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"accelerator": "tcg"}, "it runs guests by tcg, not kvm"),
        ({"cpu": "Nehalem"}, "it does not run guests with CPU model Haswell"),
        ({"cpu": "Nehalem", "models": ("Haswell", "Nehalem")}, ""),
        ({"vendor": "AuthenticAMD"}, "it has a CPU by AuthenticAMD, not GenuineIntel"),
        ({"board": "pc-q35-8.2"}, "it makes machines of type pc-q35-8.2, not pc-q35-7.2"),
        ({"page_size": 16384}, "it has pages of 16384, not 4096"),
        ({"tsc_khz": 1}, "its time stamp counter runs at 1 kHz, not 0"),
    ],
)
def test_what_tells_machines_apart_is_named(change: dict[str, object], why: str) -> None:
    assert why_other_machine(KIND, replace(KIND, **change)) == why  # type: ignore[arg-type]


def test_hosts_that_make_other_machines_are_told_apart_also_where_all_else_is_equal() -> None:
    site = ready(moves=replace(KIND, release="8.2"))
    third: Host = replace(site.hosts["h2"], name="h3", moves=KIND)
    site.hosts["h3"] = third
    site.run()
    assert not order(site) and site.vm.places[1].host == "h3"


def shown(site: Site) -> list[tuple[str, str]]:
    views = host_views(site.rows, site.world, site.clock.time, Troubles({}, {}, {}, {}))
    return [(view.moves, view.common_cpu) for view in views]


def with_cpus(wanted: str, *names: str) -> Site:
    """A site of hosts with these CPUs, whose settings want that model."""
    site = Site()
    first, second = (machine(name, wanted) for name in names)
    site.hosts["h1"], site.hosts["h2"] = replace(site.hosts["h1"], moves=first), replace(site.hosts["h2"], moves=second)
    site.run()
    return site


def test_hosts_show_their_cpus_and_the_model_with_which_vms_would_move_between_them() -> None:
    assert shown(with_cpus("host", "skylake", "cascadelake")) == [
        ("pc-q35-9.2 of QEMU 9.2.0, kvm, CPU host: Intel(R) Xeon(R) Gold 6152 CPU @ 2.10GHz (family 6, model 85,"
         " stepping 4)", "Skylake-Server-v2"),
        ("pc-q35-9.2 of QEMU 9.2.0, kvm, CPU host: Intel(R) Xeon(R) Platinum 8268 CPU @ 2.90GHz (family 6, model 85,"
         " stepping 6), with avx512vnni, ibrs-all, rdctl-no", "Skylake-Server-v2"),
    ]  # fmt: skip
    assert shown(with_cpus("Skylake-Server-v2", "skylake", "cascadelake")) == [
        ("pc-q35-9.2 of QEMU 9.2.0, kvm, CPU Skylake-Server-v2", ""),
        ("pc-q35-9.2 of QEMU 9.2.0, kvm, CPU Skylake-Server-v2", ""),
    ]
    assert [model for _, model in shown(with_cpus("host", "skylake", "milan"))] == ["", ""]


def test_a_host_that_does_not_run_the_model_of_the_settings_shows_what_it_lacks_and_takes_no_vm_with_it() -> None:
    site = with_cpus("Broadwell-v2", "broadwell", "haswell")
    assert [text.rpartition("; ")[2] for text, _ in shown(site)] == [
        "pc-q35-9.2 of QEMU 9.2.0, kvm, CPU Broadwell-v2",
        "it lacks 3dnowprefetch, adx, rdseed, smap of Broadwell-v2",
    ]
    assert {model for _, model in shown(site)} == {"Haswell-v2"}
    assert "h2: its CPU lacks 3dnowprefetch, adx, rdseed and more of model Broadwell-v2" in order(site)
    assert not order(with_cpus("Haswell-v2", "broadwell", "haswell"))


def test_a_vm_moves_to_no_host_that_is_drained_before_its_job_has_surely_ended() -> None:
    site = ready()
    now = site.clock.time + site.world.epoch
    site.run(Command("drain", "h2", drain=Drain(begins=now + 60)))
    assert "h2: it is drained, or its lease ends, before the job has surely ended" in order(site)
    site.jobs["7"] = site.jobs["7"]._replace(ends=now + 10)
    site.run()
    assert not order(site) and site.vm.state is V.MOVING


# --- the search for a host, on single rows -------------------------------------------------------------


def crowd(*hosts: Host, **job: Any) -> Crowd:
    """Job 1 runs on h1, in a VM of two CPUs and 512 MiB."""
    made = Crowd(list(hosts or (free("h1"), free("h2"))))
    made.runs(1, cpus=2, memory=512, **job)
    return made


def free(name: str, cpus: int = 2, **more: Any) -> Host:
    return replace(host(name, cpus, moves=True), **more)


def refused(here: Crowd, **more: Any) -> str:
    """Why VM 10 cannot leave its host; empty if it can."""
    context = here.context if here.state is not None else Context(here.decide(), here.world(), here.policy)
    try:
        search_for(replace(context, **more), context.state.vms[10])
    except Refused as error:
        return error.message
    return ""


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_the_vm_of_a_job_that_runs_or_is_suspended_may_leave(state: JobState) -> None:
    assert not refused(crowd(shown=state))


RUNS_NONE, NOT_SHOWN = "VM mvtest0-10 runs no job now", "the scheduler does not show that job 1 runs"
HIDDEN = {"world": replace(crowd().world(), scheduler=None)}


@pytest.mark.parametrize(
    ("here", "more", "why"),
    [
        (crowd(vms=V.MOVING), {}, "VM mvtest0-10 moves already"),
        (crowd(vms=V.SETTLING), {}, "hosts h1 settle which of them keeps VM mvtest0-10"),
        (crowd(vms=V.ASLEEP), {}, "VM mvtest0-10 sleeps: it goes on where it is"),
        (crowd(vms=V.WAKING), {}, "VM mvtest0-10 sleeps: it goes on where it is"),
        (crowd(vms=V.JOINED), {}, RUNS_NONE),
        (crowd(vms=V.RELEASING), {}, RUNS_NONE),
        (crowd(state=A.SPAWNED), {}, RUNS_NONE),
        (crowd(shown=JobState.COMPLETING), {}, NOT_SHOWN),
        (crowd(), HIDDEN, NOT_SHOWN),
        (crowd(free("h1", moves=None)), {}, "no VM moves from host h1"),
    ],
)
def test_a_vm_that_cannot_leave_now_says_why(here: Crowd, more: dict[str, Any], why: str) -> None:
    assert refused(here, **more) == why


def test_nor_can_one_without_an_attempt_or_whose_job_is_another_run_or_whose_host_is_away() -> None:
    spare = crowd()
    spare.change(1, attempt=None)
    assert refused(spare) == RUNS_NONE
    another = crowd()
    another.jobs["1"] = another.jobs["1"]._replace(ref=JobRef("1", 501, 1))
    assert refused(another) == NOT_SHOWN
    away = crowd()
    away.away = {"h1"}
    assert refused(away) == "host h1 of VM mvtest0-10 is out of reach"


@pytest.mark.parametrize(
    ("state", "more", "why"),
    [
        (SavedState.WRITING, {}, "job 1 is being saved or resumed"),
        (SavedState.CAPTURING, {"checkpoint": True}, "job 1 is being saved or resumed"),
        (SavedState.STORED, {"checkpoint": True}, ""),
    ],
)
def test_the_vm_of_a_job_that_is_being_saved_stays_and_one_of_which_there_is_a_checkpoint_may_leave(
    state: SavedState, more: dict[str, Any], why: str
) -> None:
    here = crowd()
    here.rows.append(saved(state, id=7, job=JobRef("1", 501), vm=10, vm_name="mvtest0-10", **more))
    assert refused(here) == why


def test_the_vms_of_a_job_move_one_at_a_time() -> None:
    here = Crowd([free("h1"), free("h2"), free("h3")])
    here.runs(1, "h1", "h2")
    row: Any = here.rows[-1]
    here.change(1, state=V.MOVING, places=(row.place, Place("h3", SOURCE)))
    assert refused(here) == "VM mvtest0-11 of the same job moves now"


def test_as_many_vms_move_from_and_to_a_host_as_the_site_permits() -> None:
    for at_once, why in ((1, "as many VMs as may move at once (move.at_once) move from or to host h1"), (2, "")):
        for source, target in (("h1", "h2"), ("h2", "h1")):
            here = crowd(free("h1", 4), free("h2", 4))
            here.policy = replace(CROWDED, moves_at_once=at_once)
            here.moves(3, source, target)
            assert refused(here) == why


def found(here: Crowd, name: str = "", **more: bool) -> tuple[str, Size] | None:
    context = Context(here.decide(), here.world(), here.policy)
    return search_for(context, context.state.vms[10]).find(name, room_of(context).copy(), **more)


CLAIM = Size(2, 512 + 32)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (free("h2"), ("h2", CLAIM)),
        (free("h2", vm_overhead=50), ("h2", Size(2, 512 + 50))),
        (free("h2", disks={"slim": ImageDisk(whole=700)}), ("h2", Size(2, 512 + 32, 700))),
        (free("h2", capacity=Size(2, 256 + CLAIM.memory, 100)), ("h2", CLAIM)),
        (free("h2", capacity=Size(2, 256 + CLAIM.memory - 1, 100)), None),
        (free("h2", 1), None),
        (free("h2", moves=None), None),
        (free("h2", images={}), None),
        (free("h2", moves=replace(CROWD_KIND, release="8.2")), None),
    ],
)
def test_a_vm_goes_where_it_has_room_and_claims_what_that_host_takes(
    second: Host, expected: tuple[str, Size] | None
) -> None:
    here = crowd(free("h1", 9), second)
    assert found(here) == found(here, "h2") == expected
    assert found(here, "h1") is None and found(here, "h3") is None


def test_it_goes_to_no_host_where_its_job_wants_no_more_of_its_vms_or_that_is_drained_before_it_ends() -> None:
    for per_host, expected in ((0, "h2"), (1, None)):
        here = Crowd([free("h1"), free("h2", 9)])
        here.runs(1, "h1", "h2")
        here.change(3, request=Request(2, Size(1, 100), per_host=per_host))
        there = found(here)
        assert (there[0] if there else None) == expected
    here = crowd()
    state = here.decide()
    state.drains["h2"] = Drain(UNIX + 60)
    state.close_hosts(frozenset(), frozenset({"h2"}))
    assert search_for(here.context, state.vms[10]).find("", room_of(here.context).copy()) is None


def test_hosts_from_or_to_which_many_move_are_asked_only_if_that_is_wanted() -> None:
    here = crowd(free("h1"), free("h2", 9), free("h3"))
    here.policy = replace(CROWDED, moves_at_once=1)
    here.moves(3, "h3", "h2")
    here.claims.append(Claim(Key("vm", 77), "h3", Size(2, 100)))
    assert found(here) is None and found(here, busy=True) == ("h2", CLAIM)


def test_what_begins_is_a_move_with_an_eviction_and_a_claim_and_takes_the_room() -> None:
    here = crowd()
    context = Context(here.decide(), here.world(), here.policy)
    why, row = Why.HOST_DRAINED(host="h1"), context.state.vms[10]
    assert search_for(context, row).begin("", why)
    (made,) = context.state.moves
    assert made.make == (Claim(row.key, "h2", CLAIM),)
    begun, noted = made.changes
    assert (begun.event, noted.event, noted.reason) == (Event.MOVE, Event.NOTED, why)
    assert begun.reason is not None and begun.reason.because == (why,)
    moving, attempt = context.state.vms[10], context.state.attempts[1]
    assert (moving.state, moving.places) == (V.MOVING, (row.place, Place("h2", SOURCE)))
    assert attempt.evictions == (Eviction(UNIX, "move", "h1", why, 512),)
    assert room_of(context).free["h2"][0] == 0
    full_up = crowd(free("h1"), free("h2", 1))
    context = Context(full_up.decide(), full_up.world(), full_up.policy)
    assert not search_for(context, context.state.vms[10]).begin("", why) and not context.state.moves


def test_a_refusal_says_what_the_first_hosts_lack_and_that_there_are_others() -> None:
    hosts = [free("h1"), free("h2", 1), free("h3", moves=None), free("h4", images={}), free("h5", 1)]
    for more, others in (([], ""), ([free("h6", 1)], "; and others")):
        here = crowd(*hosts, *more)
        context = Context(here.decide(), here.world(), here.policy)
        said = search_for(context, context.state.vms[10]).refusal("").message
        assert said == (
            "VM mvtest0-10 cannot move to another host: h2: it has no room; h3: no VM moves to it (move.enabled); "
            f"h4: it has no image slim; h5: it has no room{others}"
        )
    alone = crowd(free("h1"))
    context = Context(alone.decide(), alone.world(), alone.policy)
    assert search_for(context, context.state.vms[10]).refusal("").message == "VM mvtest0-10 cannot move to another host"


def why_not(here: Crowd, closed: str = "", name: str = "h2") -> str:
    state = here.decide()
    state.close_hosts(frozenset({closed} - {""}), frozenset())
    said = search_for(here.context, state.vms[10]).refusal(name).message
    return said.removeprefix(f"VM mvtest0-10 cannot move to host {name}: {name}: ")


def test_a_host_that_is_named_says_what_it_lacks() -> None:
    away = crowd()
    away.away = {"h2"}
    assert why_not(away) == "it is out of reach" and why_not(away, name="h7") == "there is no such host"
    assert why_not(crowd(), name="h1") == "the VM is there"
    assert why_not(crowd(), closed="h2") == "it takes no VMs now"
    busy = crowd(free("h1"), free("h2", 9), free("h3"))
    busy.policy = replace(CROWDED, moves_at_once=1)
    busy.moves(3, "h3", "h2")
    assert why_not(busy) == "as many VMs as may move at once (move.at_once) move from or to host h2"
    limited = Crowd([free("h1"), free("h2", 9)])
    limited.runs(1, "h1", "h2")
    limited.change(3, request=Request(2, Size(1, 100), per_host=1))
    assert why_not(limited) == "its job wants no more of its VMs on one host"
    limited.change(3, request=Request(2, Size(1, 100), per_host=2))
    assert why_not(limited) == "it has no room", "which was not asked"


def ordered(here: Crowd, name: str, to: str = "") -> str:
    """What a command is answered: empty, or why it is refused."""
    context = Context(here.decide(), here.world(), here.policy)
    follow_command(context, Command("move", to, job=name))
    return "; ".join(error.message for _, error in context.state.refusals)


def test_a_command_means_a_vm_by_its_name_or_the_only_one_of_a_job_that_runs() -> None:
    assert not ordered(crowd(), "mvtest0-10", "h2")
    here = crowd()
    assert not ordered(here, "1")
    assert [one.why for one in here.context.state.attempts[1].evictions] == [Why.OPERATOR()]
    two = Crowd([free("h1"), free("h2")])
    two.runs(1, "h1", "h2")
    assert ordered(two, "1") == "job 1 has several VMs: mvtest0-10 on h1, mvtest0-11 on h2"
    assert ordered(crowd(state=A.SPAWNED), "1") == "job 1 runs in no VM"
    assert ordered(crowd(vms=V.LOST), "1") == "job 1 runs in no VM"
    assert ordered(crowd(), "mv-9") == "no VM is mv-9"
    assert ordered(crowd(), "1", "h9").endswith("h9: there is no such host")
