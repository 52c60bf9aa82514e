"""Which VMs move, where to and why not: by command, and off hosts that are to be emptied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.host import Drain, Host
from multiverse.core.model.job import JobState, NodeState
from multiverse.core.model.machine import MachineKind, why_other_machine
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.rebalance.drains import why_stay
from multiverse.core.transition import Command, Done, EffectKind, Event
from multiverse.service.hosts import Troubles, host_views
from tests.unit.recorded_cpus import machine
from tests.unit.test_places import Site

V = VmState
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
