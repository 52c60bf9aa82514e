"""What holds after every pass, whatever was observed: the planner answers, keeps to the tables, holds a claim for every
VM, and never claims more than there is. A pass that is rolled back changes nothing, and planned again is the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiverse.core.errors import Broken, Exhausted, Gone, Refused, Stale, Unknown
from multiverse.core.machines.tables import TABLES, effect_of
from multiverse.core.model.basics import Depth, Key, Size
from multiverse.core.model.host import HostState
from multiverse.core.model.job import ENDING_STATES, Attempt, Job, JobRef, JobState, NodeState, Request
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row
from multiverse.core.planner import plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.transition import Command, Done, EffectKind, Message, Move
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import indexes_of

UNEXPLAINED = "mvtest0-9999"
"""The name of a VM that the host may show, and that no row explains."""

ERRORS = (Broken, Exhausted, Gone, Refused, Stale, Unknown)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """What happens to the world between passes: (what, to which, how, by how much)."""
    what = st.sampled_from(
        [
            *(
                "submit",
                "job",
                "vm",
                "node",
                "template",
                "host",
                "effect",
                "error",
                "time",
                "source",
                "command",
                "forget",
            ),
            *("offer", "refuse", "add_user", "progress"),
        ]
    )
    number = st.integers(0, 11)
    return draw(st.lists(st.tuples(what, number, number, number), min_size=1, max_size=40))


def live_rows(harness: PlannerHarness) -> list[Row]:
    rows = harness.rows
    return [*rows.attempts.values(), *rows.vms.values(), *rows.templates.values(), *rows.offers.values()]


def name_of(harness: PlannerHarness, which: int) -> str:
    """The name of some VM, or one that no row has."""
    names = [vm.name for vm in harness.rows.vms.values()] + [UNEXPLAINED]
    return names[which % len(names)]


def change_job(harness: PlannerHarness, which: int, how: int, much: int) -> None:
    rows, job = harness.rows, harness.jobs[str(which)]
    mine = [a for a in rows.attempts.values() if a.job.job_id == str(which)]
    nodes = tuple(vm.name for vm in rows.vms.values() if mine and vm.attempt == mine[0].id)
    harness.jobs[str(which)] = [
        job._replace(state=JobState.RUNNING, nodes=nodes, gated=False),
        job._replace(state=JobState.COMPLETING),
        job._replace(state=JobState.ENDED, result="COMPLETED", nodes=()),
        job._replace(held=True, eligible=False),
        job._replace(held=False, eligible=True),
        job._replace(ref=replace(job.ref, restarts=job.ref.restarts + 1), state=JobState.PENDING, nodes=()),
        job._replace(gated=False, pinned=mine[0].feature if mine else "mv_77"),
        job._replace(gated=True, pinned=None),
        job._replace(request=Request(1, Size(1 + much, 300))),
        job._replace(problem="it cannot be served", request=None),
        job._replace(state=JobState.RUNNING, nodes=("elsewhere",)),
        job._replace(state=JobState.SUSPENDED),
    ][how]


def change_offers(harness: PlannerHarness, which: int, how: int, much: int) -> None:
    """The scheduler shows other offers; one that is taken has a job."""
    name = name_of(harness, which)
    harness.offers = [None, {}, {name: False}, {name: True}][how % 4]
    spare = next((vm for vm in harness.rows.vms.values() if vm.name == name), None)
    if how % 4 == 3 and spare is not None:
        ref = JobRef(str(20 + which), 500)
        taker = Job(ref, "j", 1000, JobState.PENDING, Request(1, Size(1, 100)), gated=False, pinned=spare.feature)
        state = [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING][much % 3]
        harness.jobs[ref.job_id] = taker._replace(state=state, nodes=(name,) if much % 3 else ())


def advance_vms(harness: PlannerHarness) -> None:
    """Every VM comes as far as its row permits."""
    for vm in harness.rows.vms.values():
        harness.ended(vm.key)
        awake = vm.state in (VmState.STARTING, VmState.JOINED, VmState.SERVING)
        harness.seen(vm.name, VmCondition.RUNNING if awake else VmCondition.PARKED)
        if awake:
            harness.node(vm.name)


def act_on_scheduler(harness: PlannerHarness, what: str, which: int, how: int, much: int) -> None:
    match what:
        case "submit":
            size = Size(1 + how % 5, 100 * (1 + much))
            harness.jobs[str(which)] = Job(
                JobRef(str(which), 500 + much), "j", 1000, JobState.PENDING, Request(1 + how % 3, size), rank=how
            )
        case "job" if str(which) in harness.jobs:
            change_job(harness, which, how, much)
        case "node":
            harness.node(name_of(harness, which), list(NodeState)[how % len(NodeState)])
        case "offer":
            change_offers(harness, which, how, much)
        case _:
            pass


def act_on_hypervisor(harness: PlannerHarness, what: str, which: int, how: int) -> None:
    name = name_of(harness, which)
    match what:
        case "vm":
            harness.seen(name, list(VmCondition)[how % len(VmCondition)])
        case "add_user":
            harness.vms[name] = VmSeen(name, "h1", VmCondition.RUNNING, users_added=(1000,))
        case "progress":
            advance_vms(harness)
        case "template":
            harness.template() if how % 2 else harness.templates.clear()
        case "host":
            harness.hosts = {} if how == 0 else PlannerHarness().hosts
        case _:
            pass


def act_on_observers(harness: PlannerHarness, what: str, which: int, how: int, much: int) -> None:
    match what:
        case "time":
            harness.pass_time(much * 30.0)
        case "source":
            harness.scheduler_known, harness.hypervisor_known = how % 3 > 0, much % 3 > 0
            harness.unknown_since = harness.clock.time - 30.0 * (which % 4)
        case "forget":
            [harness.vms, harness.nodes, harness.jobs][how % 3].clear()  # type: ignore[index]
        case _:
            pass


def message_of(harness: PlannerHarness, what: str, which: int, how: int, much: int) -> Message | None:
    """What an effect reports of some row, or an operator asks for."""
    live = live_rows(harness)
    row = live[which % len(live)] if live else None
    if what == "command":
        verb = ["build", "drop", "fence", "retry"][how % 4]
        return Command(verb, "h1", "slim", row.key if row and verb == "retry" else None)
    match what:
        case "effect" if row:
            harness.effect_ended_at[row.key] = float("inf") if how == 0 else harness.clock.time
        case "refuse" if row:
            harness.refused[row.key] = "no"
        case "error" if row:
            kinds = list(EffectKind)
            return Done(row.key, kinds[how % len(kinds)], str(row.state), ERRORS[much % len(ERRORS)]("no"))
        case _:
            pass
    return None


def act(harness: PlannerHarness, what: str, which: int, how: int, much: int) -> Message | None:
    act_on_scheduler(harness, what, which, how, much)
    act_on_hypervisor(harness, what, which, how)
    act_on_observers(harness, what, which, how, much)
    return message_of(harness, what, which, how, much)


def check(harness: RepeatingHarness) -> None:
    rows = harness.rows
    owners = {claim.owner for claim in rows.claims}
    gone = {vm.key for vm in rows.vms.values() if vm.state is VmState.DELETING}
    assert {vm.key for vm in rows.vms.values()} - owners == gone, "every VM has its claim until it is gone"
    for owner in owners:
        assert rows.get(owner) is not None, "no claim outlives its row"
    assert len({vm.address for vm in rows.vms.values()}) == len(rows.vms)
    capacity = PlannerHarness().hosts["h1"].capacity
    # A VM that is found holds its claim because it exists, even on a full host; nothing else may claim too much.
    harness.found |= {vm.key for vm in rows.vms.values() if vm.name == UNEXPLAINED or vm.state is VmState.ORPHAN}
    chosen = [claim.size for claim in rows.claims if claim.owner not in harness.found]
    assert sum(size.cpus for size in chosen) <= capacity.cpus
    assert sum(size.memory for size in chosen) <= capacity.memory
    live = [a.job for a in rows.attempts.values() if a.state not in ENDING_STATES]
    assert len(set(live)) == len(live), "one attempt at a time for each run of a job"
    for row in (*rows.attempts.values(), *rows.vms.values(), *rows.templates.values(), *rows.offers.values()):
        assert "a fault of Multiverse" not in text_of(row.quarantined)
    assert set(rows.offers) <= set(rows.vms), "no offer outlives its VM"
    for vm in rows.vms.values():
        assert vm.state is not VmState.RETIRING or vm.attempt is None, "a VM that serves a job does not retire"
        ended = vm.attempt is not None and vm.attempt not in rows.attempts
        assert not ended or vm.state is VmState.DELETING, "no attempt ends before its VMs are gone, but for their nodes"
    fenced = [host for host in rows.hosts.values() if host.state is HostState.FENCED]
    assert not [host for host in fenced if host.name in harness.world.hosts], "a host in sight is not fenced"


class RepeatingHarness(PlannerHarness):
    """A harness that plans each pass twice, with a rollback between. `found` are the VMs that were found."""

    def __init__(self, policy: Policy = POLICY) -> None:
        super().__init__(policy)
        self.found = set[Key]()

    def commit(self, *messages: Message) -> list[Move]:
        before, indexes, addresses = self.state.rows(), indexes_of(self.state), dict(self.state.addresses)
        first = list(plan(self.state, self.world, list(messages), self.clock.time, self.policy))
        self.state.rollback()
        assert (self.state.rows(), indexes_of(self.state), dict(self.state.addresses)) == (before, indexes, addresses)
        again = super().commit(*messages)
        assert again == first, "the same rows and observations give the same moves"
        return again


POOLS = (
    (),
    (Pool("slim", Depth.JOINED, 1, 2, Size(1, 100), 90.0),),
    (Pool("slim", Depth.PARKED, 1, 1, Size(1, 100), 90.0), Pool("slim", Depth.JOINED, 1, 1, Size(1, 200), offer=False)),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(turns(), st.sampled_from(POOLS))
def test_whatever_happens_the_planner_answers_and_keeps_its_invariants(
    script: list[tuple[str, int, int, int]], pools: tuple[Pool, ...]
) -> None:
    harness = RepeatingHarness(replace(POLICY, pools=pools))
    for turn in script:
        message = act(harness, *turn)
        harness.run(*([message] if message else []))  # apply() refuses every move that no table has
        check(harness)
    assert not harness.commit(), "a pass leaves nothing that the next one, seeing the same, would still do"


def test_a_vm_that_is_found_on_a_full_host_holds_its_claim() -> None:
    harness = RepeatingHarness(replace(POLICY, pools=()))
    for turn in [("template", 0, 9, 0), *[("submit", 0, 3, 0)] * 4, ("add_user", 1, 0, 0)]:
        act(harness, *turn)
        harness.run()
        check(harness)
    claimed = sum(claim.size.cpus for claim in harness.rows.claims)
    assert claimed == PlannerHarness().hosts["h1"].capacity.cpus + 1


def test_a_parked_spare_whose_guest_knows_a_user_holds_the_claim_of_a_vm_that_runs() -> None:
    harness = RepeatingHarness(replace(POLICY, pools=(Pool("slim", Depth.PARKED, 1, 1, Size(1, 100)),)))
    for turn in [("submit", 0, 3, 0), ("template", 0, 1, 0), ("add_user", 1, 0, 0), ("refuse", 2, 0, 0)]:
        act(harness, *turn)
        harness.run()
        check(harness)
    assert {vm.state for vm in harness.rows.vms.values()} == {VmState.PLANNED, VmState.ORPHAN}
    assert sum(claim.size.cpus for claim in harness.rows.claims) == PlannerHarness().hosts["h1"].capacity.cpus + 1


def test_every_state_of_every_table_can_be_left_but_the_last_ones() -> None:
    for table in TABLES.values():
        sources = {arrow.source for arrow in table if arrow.target is not arrow.source}
        targets = {arrow.target for arrow in table}
        last = {str(state) for state in targets - sources}
        assert last <= {"done", "cancelled", "requeued", "revoked", "failed", "gone", "absent", "ended", "returned"}


def test_a_quarantined_row_wants_nothing() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    rows: list[Attempt | Vm] = [*harness.rows.attempts.values(), *harness.rows.vms.values()]
    assert any(effect_of(row) for row in rows)
    assert not any(effect_of(replace(row, quarantined=said("because"))) for row in rows)
