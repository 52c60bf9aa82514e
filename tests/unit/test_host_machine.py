"""The state machine of hosts: when a silent host is fenced, when that is held back, and what a fence ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Unknown
from multiverse.core.machines.host import (
    add_host,
    end_drain,
    held_back,
    remove_host,
    resume_host,
    return_host,
    silent_since,
)
from multiverse.core.machines.tables import TABLES, permitted_effects
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Drain, Host, HostFault, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import (
    WAITING_STATES,
    Attempt,
    AttemptState,
    Job,
    JobState,
    Node,
    NodeState,
    SchedulerView,
)
from multiverse.core.model.reason import Reason, Why, said, text_of
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.rebalance.maintenance import follow_maintenance
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Done, EffectKind, Event, Message
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import IMAGES, attempt, changes_of, rows, vm

A, H, V, N = AttemptState, HostState, VmState, NodeState
FENCES = replace(POLICY, fences=True, fence_after=100.0)
HOST = Host("h1", Size(4, 4096, 65536), images=IMAGES)
LOST = vm(V.LOST, id=1, source="h1", attempt=1)
EARLIER = attempt(A.RECLAIMING, outcome="requeued")
LATER = attempt(A.QUEUED, id=2, restarts=1)
NOW = 1000.0


def known(name: str = "h1", state: HostState = H.KNOWN, **more: object) -> KnownHost:
    number = int(name[1:])
    return KnownHost(name, name, state, replace(HOST, name=name), id=number, **more)  # type: ignore[arg-type]


def pending(waiting: Attempt) -> Job:
    return Job(waiting.job, "hello", 1000, JobState.PENDING, waiting.request)


class Site:
    """Hosts, each a source of its own, of which `silent` have not been heard of since second 0. Of the `attempts`, the
    job of those that wait is pending."""

    def __init__(
        self,
        *hosts: KnownHost,
        vms: Iterable[Vm] = (LOST,),
        policy: Policy = FENCES,
        attempts: Iterable[Attempt] = (EARLIER, LATER),
    ) -> None:
        some = {host.name: host for host in (hosts or (known("h1"), known("h2"), known("h3")))}
        self.state = State(replace(rows(*vms, *attempts), hosts=some), TABLES)
        self.jobs = {one.job.job_id: pending(one) for one in attempts if one.state in WAITING_STATES}
        self.silent = {"h1": 0.0}
        self.nodes = {one.name: N.DOWN for one in vms}
        self.policy, self.now, self.scheduler_known = policy, NOW, True

    def world(self, began: float | None = None) -> World:
        sources = {
            name: Observation(None, self.silent[name])
            if name in self.silent
            else Observation(Seen(HypervisorView({name: replace(HOST, name=name)}), self.now - 1), 0.0)
            for name in self.state.hosts
        }
        view = SchedulerView(self.jobs, {name: Node(name, state) for name, state in self.nodes.items()})
        return World(Seen(view, began or self.now - 1) if self.scheduler_known else None, sources, entropy="x")

    def run(self, *messages: Message, seconds: float = 0.0) -> list[tuple[Key, Event]]:
        self.now += seconds
        moves = plan(self.state, self.world(), list(messages), self.now, self.policy)
        changes = [change for change in changes_of(moves) if change.row.key.kind in ("host", "vm")]
        assert all(change.reason for change in changes if change.row.key.kind == "host"), "the journal says why"
        return [(change.row.key, change.event) for change in changes]

    @property
    def host(self) -> KnownHost:
        return self.state.hosts["h1"]

    def effects(self) -> list[EffectKind]:
        return [effect.kind for row, effect in permitted_effects(self.state) if isinstance(row, KnownHost)]


def fencing(site: Site) -> Site:
    site.run()
    assert site.host.state is H.FENCING
    return site


# --- when ------------------------------------------------------------------------------------------


def test_a_silent_host_whose_vms_the_scheduler_does_not_reach_is_fenced_by_command() -> None:
    site = Site()
    assert site.run() == [(Key("host", 1), Event.SILENT), (Key("host", 1), Event.FENCE)]
    assert site.effects() == [EffectKind.FENCE]
    assert site.run() == [], "the effect is repeated until it succeeds"
    done = Done(Key("host", 1), EffectKind.FENCE, "fencing")
    assert site.run(done) == [(Key("host", 1), Event.FENCED), (Key("vm", 1), Event.FENCED)]
    assert site.host.state is H.FENCED and site.effects() == []
    assert site.state.vms[1].state is V.ENDING


def test_a_host_is_silent_for_a_while_before_it_is_fenced() -> None:
    site = Site()
    site.silent["h1"] = NOW - POLICY.silence
    assert site.run() == []
    assert site.run(seconds=1) == [(Key("host", 1), Event.SILENT)] and site.effects() == []
    assert site.run(seconds=FENCES.fence_after - POLICY.silence - 1) == []
    assert site.run(seconds=1) == [(Key("host", 1), Event.FENCE)]


def test_a_host_of_which_something_was_heard_meanwhile_is_not_silent_any_more() -> None:
    site = Site()
    site.run()
    site.silent["h1"] = NOW - POLICY.silence
    assert site.run() == [(Key("host", 1), Event.FOUND)]
    assert (site.host.state, site.host.reason) == (H.KNOWN, None)


def test_a_host_that_is_quarantined_is_left_alone() -> None:
    site = Site(known(quarantined=said("it is odd")), known("h2"), known("h3"))
    assert site.run() == [] and site.host.state is H.KNOWN


@pytest.mark.parametrize(
    "nodes",
    [
        {},
        {1: N.BUSY},
        {1: N.IDLE},
        {1: N.JOINING},
        {1: N.DRAINED},
        {1: N.SILENT, 2: N.SILENT},
        {1: N.DOWN, 2: N.BUSY},
        {1: N.DOWN, 2: N.IDLE},
        {1: N.DOWN, 2: N.DRAINED},
    ],
    ids=str,
)
def test_a_host_is_not_fenced_while_a_node_on_it_answers_or_none_is_down(nodes: dict[int, NodeState]) -> None:
    site = Site(vms=(LOST, vm(V.LOST, id=2, source="h1")))
    site.nodes = {f"mvtest0-{number}": state for number, state in nodes.items()}
    assert site.run() == [] and site.host.state is H.KNOWN


@pytest.mark.parametrize("other", [N.DOWN, N.SILENT, N.JOINING])
def test_a_host_is_fenced_when_one_node_on_it_is_down_and_none_answers(other: NodeState) -> None:
    site = Site(vms=(LOST, vm(V.LOST, id=2, source="h1")))
    site.nodes["mvtest0-2"] = other
    fencing(site)


def test_a_host_without_vms_and_one_of_which_something_was_heard_are_not_fenced() -> None:
    assert Site(vms=()).run() == []
    site = Site()
    world = site.world()
    heard = {**world.sources, "h1": Observation(None, 0.0, heard=NOW - 5)}
    assert plan(site.state, replace(world, sources=heard), [], NOW, FENCES) == [], "its agent answers, to pings"


@pytest.mark.parametrize(
    "others",
    [
        (),
        (attempt(A.QUEUED, id=2),),
        (attempt(A.QUEUED, id=2, job="8", restarts=1),),
        (attempt(A.RECLAIMING, id=2, restarts=1, outcome="cancelled"),),
    ],
    ids=["nothing waits", "the same run waits", "another job waits", "the later run was cancelled"],
)
def test_a_host_is_not_fenced_for_a_node_that_is_down_while_no_job_waits_for_it(others: tuple[Attempt, ...]) -> None:
    """As when a VM's end has set its node DOWN, and its host could not be reached any more."""
    site = Site(attempts=(EARLIER, *others))
    assert site.run() == [] and site.host.state is H.KNOWN


@pytest.mark.parametrize("state", [V.ORPHAN, V.LOST])
def test_a_host_is_fenced_for_a_job_that_was_seen_in_a_vm_that_no_record_explained(state: VmState) -> None:
    fencing(Site(vms=(vm(state, source="h1", job_id="7"),), attempts=(attempt(A.QUEUED, id=2),)))


def test_a_host_is_not_fenced_any_more_when_the_job_that_waited_is_cancelled() -> None:
    site = fencing(Site())
    site.jobs = {}
    site.run()
    assert site.host.state is H.KNOWN and site.effects() == []


def test_no_host_is_fenced_while_the_scheduler_is_unknown() -> None:
    site = Site()
    site.scheduler_known = False
    assert site.run() == []
    site.scheduler_known = True
    fencing(site)
    site.scheduler_known = False
    assert site.run() == [(Key("host", 1), Event.FOUND)] and site.effects() == []


def test_without_a_command_a_silent_host_waits_for_an_operator() -> None:
    site = Site(policy=replace(FENCES, fences=False))
    assert site.run() == [(Key("host", 1), Event.SILENT)] and site.run(seconds=1e5) == []
    assert site.run(Command("fence", "h1"))[0] == (Key("host", 1), Event.FENCED)


# --- when not --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "silent", "held"),
    [
        (2, [], False),
        (2, ["h2"], True),  # one of three is in sight
        (3, ["h2"], False),  # two of four
        (1, [], False),  # one of two
        (1, ["h2"], True),
        (0, [], True),
    ],
)
def test_hosts_are_not_fenced_while_most_are_silent(others: int, silent: list[str], held: bool) -> None:
    site = Site(*(known(f"h{number}") for number in range(1, 2 + others)))
    site.silent |= dict.fromkeys(silent, 0.0)
    site.run()
    assert site.host.state is (H.SILENT if held else H.FENCING)


def test_the_quorum_leaves_out_the_controllers_own_host_and_those_that_are_off_drained_or_were_never_seen() -> None:
    never = KnownHost("h4", "h4", id=4)
    drained, off = known("h5", drain=Drain()), known("h6", H.FENCED)
    site = Site(known(), known("h2"), known("h3"), never, drained, off, policy=replace(FENCES, here="h3"))
    site.silent |= {"h4": 0.0, "h5": 0.0, "h6": 0.0}
    site.run()
    assert site.host.state is H.FENCING, "h2 is in sight, of h1 and h2"
    alone = Site(known(), known("h3"), policy=replace(FENCES, here="h3"))
    alone.run()
    assert alone.host.state is H.SILENT, "that the controller reaches its own host says nothing"
    alone = Site(known(), known("h3"), policy=replace(FENCES, here="h3", quorum=0.0))
    alone.run()
    assert alone.host.state is H.FENCING, "unless the site wants it so"
    own = Site(policy=replace(FENCES, here="h1", quorum=0.0))
    own.run()
    assert own.host.state is H.SILENT, "the controller does not switch its own machine off"


def test_a_fence_that_is_under_way_is_held_back_when_most_hosts_turn_silent() -> None:
    site = fencing(Site())
    site.silent["h2"] = 0.0
    assert site.run() == [(Key("host", 1), Event.HELD_BACK)] and site.effects() == []
    del site.silent["h2"]
    assert site.run() == [(Key("host", 1), Event.FENCE)]


def test_why_silent_hosts_are_not_fenced_is_told_of_those_that_the_command_could_fence() -> None:
    site = Site(known(state=H.SILENT), known("h2"), known("h3"))
    assert held_back(site.state, site.world(), FENCES) == {}
    site.silent["h2"] = 0.0
    few = Why.FEW_IN_SIGHT(shown=1, total=3)
    assert held_back(site.state, site.world(), FENCES) == {"h1": few}
    assert held_back(site.state, site.world(), replace(FENCES, here="h1")) == {"h1": Why.CONTROLLER_THERE()}
    assert held_back(site.state, site.world(), replace(FENCES, fences=False)) == {}


def test_a_host_to_which_nobody_listens_is_not_silent() -> None:
    assert silent_since(known(), World()) == float("inf")
    assert silent_since(known(), Site().world()) == 0.0 and silent_since(known("h2"), Site().world()) == float("inf")


# --- twice, late, to a successor, without a reply --------------------------------------------------


def test_a_host_that_is_back_is_not_fenced_by_a_late_answer() -> None:
    site = fencing(Site())
    del site.silent["h1"]
    site.now += 2
    assert site.run()[0] == (Key("host", 1), Event.FOUND) and site.effects() == []
    assert site.run(Done(Key("host", 1), EffectKind.FENCE, "fencing")) == []
    assert site.host.state is H.KNOWN


def test_a_command_that_fails_leaves_the_host_as_it_is() -> None:
    site = fencing(Site())
    assert site.run(Done(Key("host", 1), EffectKind.FENCE, "fencing", Unknown("the BMC does not answer"))) == []
    assert site.effects() == [EffectKind.FENCE]


def test_an_answer_to_an_earlier_fence_counts_only_in_the_state_that_asked() -> None:
    site = Site(policy=replace(FENCES, fences=False))
    site.run()
    assert site.run(Done(Key("host", 1), EffectKind.FENCE, "fencing")) == [] and site.host.state is H.SILENT


# --- the agent itself ------------------------------------------------------------------------------


def test_a_host_whose_agent_ends_its_vms_counts_as_fenced_some_time_after_that() -> None:
    host = known()
    assert host.value is not None
    fences_itself = replace(host, value=replace(host.value, self_fence=600.0))
    site = Site(fences_itself, policy=replace(FENCES, fences=False))
    assert site.run() == [(Key("host", 1), Event.SILENT)]
    assert site.run(seconds=600 + 120) == [], "not by the time that it is silent, but since its nodes are not reached"
    found = site.run(seconds=1)
    assert found == [(Key("host", 1), Event.FENCED), (Key("vm", 1), Event.FENCED)]
    assert "by itself" in text_of(site.host.reason)


def test_a_host_that_was_never_seen_does_not_end_its_vms_itself() -> None:
    never = KnownHost("h1", "h1", id=1)
    site = Site(never, policy=replace(FENCES, fences=False))
    assert site.run() == [(Key("host", 1), Event.SILENT)]
    assert site.run(seconds=1e5) == [] and not site.host.quarantined


def test_a_node_that_answers_in_between_gives_such_a_host_its_whole_time_again() -> None:
    host = known()
    assert host.value is not None
    site = Site(replace(host, value=replace(host.value, self_fence=600.0)), policy=replace(FENCES, fences=False))
    site.run()
    site.nodes = dict.fromkeys(site.nodes, N.BUSY)
    assert site.run(seconds=500) == [(Key("host", 1), Event.FOUND)]
    site.nodes = dict.fromkeys(site.nodes, N.DOWN)
    assert site.run(seconds=1) == [(Key("host", 1), Event.SILENT)]
    assert site.run(seconds=700) == []
    assert site.run(seconds=21)[0] == (Key("host", 1), Event.FENCED)


# --- what is over is forgotten ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "event", "after", "reason", "avoided_until"),
    [
        (add_host, Event.ADDED, H.KNOWN, None, []),
        (resume_host, Event.RESUMED, H.KNOWN, None, [0.0]),
        (remove_host, Event.REMOVED, H.REMOVED, None, [NOW]),
        (return_host, Event.GIVEN_BACK, H.RETURNED, Why.IS_SILENT(), [NOW]),
        (end_drain, Event.DRAINED, H.SILENT, Why.IS_SILENT(), [NOW]),
    ],
)
def test_what_is_over_of_a_host_is_forgotten_and_the_journal_says_why(
    change: Callable[[KnownHost, Reason], Change],
    event: Event,
    after: HostState,
    reason: Reason | None,
    avoided_until: list[float],
) -> None:
    faults = (HostFault("slim", 1, NOW, Why.VM_DIED()),)
    made = change(known(state=H.SILENT, reason=Why.IS_SILENT(), drain=Drain(), faults=faults), Why.OPERATOR())
    assert isinstance(made.row, KnownHost) and (made.event, made.reason) == (event, Why.OPERATOR())
    assert (made.row.name, made.row.state, made.row.reason, made.row.drain) == ("h1", after, reason, None)
    assert [one.until for one in made.row.faults] == avoided_until


def test_the_drain_for_a_maintenance_that_is_over_ends_and_an_operators_stays() -> None:
    def drained(drain: Drain) -> list[Change]:
        site = Site(known(drain=drain), vms=(), attempts=())
        site.state.begin(NOW, {})
        follow_maintenance(Context(site.state, site.world(), POLICY))
        return changes_of(site.state.moves)

    (change,) = drained(Drain(0.0, "maintenance", reservation="disks"))
    assert change.event is Event.DRAINED and isinstance(change.row, KnownHost) and change.row.drain is None
    assert change.reason == Why.MAINTENANCE_OVER(name="disks")
    assert drained(Drain(0.0, "a fan")) == []


# --- the whole way ---------------------------------------------------------------------------------


def test_a_job_that_is_requeued_waits_until_its_host_is_fenced_and_then_runs_elsewhere() -> None:
    harness = PlannerHarness(policy=replace(POLICY, fences=True, quorum=0.0))
    attempt = harness.to_allocated()
    (serving,) = harness.all_vms()
    harness.hypervisor_known, harness.unknown_since = False, harness.clock.time
    harness.node(serving.name, N.DOWN)
    ref = replace(attempt.job, restarts=1)
    harness.job("7", ref=ref, state=JobState.PENDING, nodes=(), pinned=None, gated=True)
    harness.pass_time(POLICY.silence + 1)
    harness.run()
    harness.run()
    assert harness.rows.hosts["h1"].state is H.FENCING
    states = [(a.id, a.state) for a in harness.rows.attempts.values()]
    assert states == [(1, "reclaiming"), (2, "queued")], "the job does not start"
    harness.run(Done(harness.rows.hosts["h1"].key, EffectKind.FENCE, "fencing"))
    harness.clear()
    harness.run()
    harness.run()
    assert harness.rows.vms == {} and harness.attempt(1).state == "requeued" and harness.attempt(2).job == ref
