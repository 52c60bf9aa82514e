"""VMs move between two hosts with real QEMU, while programs in them note the time, and write and verify a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind
from multiverse.host.manifest import Specification
from multiverse.host.qemu.context import MoveConfig
from tests.integration.images import IMAGES, slim
from tests.integration.moving_hosts import BASE, CABLE, PLUGGED, MovingHost, MovingHosts, moving_hosts
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and namespaces need root")]

ENCRYPTED, PRIVATE = MoveConfig(timeout=60.0), MoveConfig(private=True, timeout=60.0)
SLOW = replace(PRIVATE, bandwidth=30)  # MiB/s: there is time to do something in the middle
SHARED, SHARED_SLOW = (PRIVATE, True), (SLOW, True)


@pytest.fixture(scope="module")
def both() -> Iterator[MovingHosts]:
    """Two hosts with a template on the first one."""
    slim()
    with moving_hosts(IMAGES, ENCRYPTED) as made:
        made.a.call("build", image="slim")
        yield made


@pytest.fixture
def hosts(request: pytest.FixtureRequest, both: MovingHosts) -> MovingHosts:
    """The two hosts without a VM. The parameter is how VMs move, and perhaps whether both reach the disks."""
    found = getattr(request, "param", ENCRYPTED)
    both.configure(*(found if isinstance(found, tuple) else (found,)))
    return both


def goes_on(hosts: MovingHosts, spec: Specification, where: str, seen_from: str = "a") -> None:
    """The VM runs there and nowhere else. Its programs go on, and have seen nothing wrong."""
    assert hosts.running(spec) == [where]
    asked = hosts.hosts[seen_from]
    before = asked.call("watched", address=spec.bare_address)
    until("its programs go on", lambda: asked.call("watched", address=spec.bare_address)["count"] > before["count"], 20)
    after = asked.call("watched", address=spec.bare_address)
    assert after["wrong"] == 0 and after["written"] >= before["written"]


def is_gone(hosts: MovingHosts, spec: Specification, where: MovingHost) -> None:
    """Nothing of the VM is left on a host."""
    assert spec.name not in where.call("observe")
    until("nothing is recorded", lambda: [one.name for one in (where.place / "vms").iterdir()] == [".lock"], 10)
    assert not (where.place / "run" / spec.name).exists()


@pytest.mark.parametrize("hosts", [ENCRYPTED], indirect=True, ids=["encrypted"])
def test_a_vm_moves_there_and_back(hosts: MovingHosts) -> None:
    """It is a clone with a CPU and memory plugged. The host that it comes to has no template."""
    spec = hosts.spec()
    hosts.run(spec)
    goes_on(hosts, spec, "a", seen_from="b")
    hosts.a.call("add_user", name=spec.name)
    before = hosts.a.call("seen", name=spec.name)
    assert before["users"] == [4711]
    hosts.move(spec, hosts.a, hosts.b)
    goes_on(hosts, spec, "b", seen_from="a")
    is_gone(hosts, spec, hosts.a)
    assert hosts.b.call("seen", name=spec.name) == before
    console = hosts.b.place / "vms" / spec.name / "console.log"
    until("its console is here", lambda: hosts.b.call("observe") and "the watch begins" in console.read_text(), 20)
    assert hosts.b.call("observe")[spec.name] == ["running", ""]
    facts = hosts.b.call("examine", name=spec.name)
    assert (facts["hostname"], facts["cpus"], abs(facts["skew"]) < 2000) == (spec.name, 2, True)
    hosts.move(spec, hosts.b, hosts.a)
    goes_on(hosts, spec, "a", seen_from="b")
    is_gone(hosts, spec, hosts.b)
    hosts.a.call("destroy", name=spec.name)
    is_gone(hosts, spec, hosts.a)


@pytest.mark.parametrize("hosts", [SHARED], indirect=True, ids=["shared"])
def test_a_disk_that_both_hosts_reach_is_not_copied(hosts: MovingHosts) -> None:
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    until("it has written", lambda: hosts.a.call("watched", address=spec.bare_address)["written"] > 200, 60)
    disks = [host.place / "vms" / spec.name / "disk.qcow2" for host in (hosts.a, hosts.b)]
    before = disks[0].stat()
    hosts.move(spec, hosts.a, hosts.b)
    goes_on(hosts, spec, "b")
    is_gone(hosts, spec, hosts.a)
    after = disks[1].stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 1)
    hosts.move(spec, hosts.b, hosts.a)
    goes_on(hosts, spec, "a", seen_from="b")
    assert disks[0].stat().st_ino == before.st_ino and not disks[1].exists()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PRIVATE, replace(PRIVATE, compress=True), replace(ENCRYPTED, compress=True), SHARED],
                         indirect=True, ids=["private", "private, compressed", "encrypted, compressed",
                                             "shared"])  # fmt: skip
@pytest.mark.parametrize("kind", [CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL])
def test_each_kind_moves_several_times(hosts: MovingHosts, kind: CloneKind) -> None:
    spec = hosts.spec(kind=kind, size=BASE if kind is CloneKind.INSTANT else PLUGGED)
    hosts.run(spec)
    for _ in range(2):
        hosts.move(spec, hosts.a, hosts.b)
        goes_on(hosts, spec, "b")
        hosts.move(spec, hosts.b, hosts.a)
        goes_on(hosts, spec, "a", seen_from="b")
    is_gone(hosts, spec, hosts.b)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PRIVATE, SHARED], indirect=True, ids=["private", "shared"])
def test_a_vm_moves_twenty_times(hosts: MovingHosts) -> None:
    spec, source, target = hosts.spec(size=BASE), hosts.a, hosts.b
    hosts.run(spec)
    for _ in range(20):
        hosts.move(spec, source, target)
        source, target = target, source
    goes_on(hosts, spec, "a")


def begun(hosts: MovingHosts, spec: Specification) -> None:
    """The memory of the VM is being sent."""
    until("its memory is sent", lambda: hosts.a.call("sent") - hosts.sent_before > 40 << 20, 30)


def stays(hosts: MovingHosts, spec: Specification) -> None:
    """The VM goes on where it was; what had come to the other host is removed, and it can move."""
    goes_on(hosts, spec, "a")
    until("what had come is removed", lambda: spec.name not in hosts.b.call("observe"), 60)
    is_gone(hosts, spec, hosts.b)
    until("the move has ended", lambda: not hosts.a.call("is_moving", name=spec.name), 60)
    hosts.move(spec, hosts.a, hosts.b)
    goes_on(hosts, spec, "b")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [SLOW, replace(SLOW, private=False), SHARED_SLOW], indirect=True,
                         ids=["private", "encrypted", "shared"])  # fmt: skip
def test_the_cable_is_cut_in_the_middle(hosts: MovingHosts) -> None:
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    moving = hosts.begin_move(spec, hosts.a, hosts.b)
    begun(hosts, spec)
    hosts.a.call("ip", command=f"link set {CABLE} down")
    with pytest.raises(Broken):
        moving(90.0)
    assert hosts.running(spec) == ["a"]
    hosts.a.call("ip", command=f"link set {CABLE} up")
    stays(hosts, spec)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [SLOW], indirect=True, ids=["private"])
def test_a_move_is_cancelled_in_the_middle(hosts: MovingHosts) -> None:
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    moving = hosts.begin_move(spec, hosts.a, hosts.b)
    begun(hosts, spec)
    assert hosts.a.call("cancel", name=spec.name, number=1) == "kept"
    assert hosts.b.call("cancel", name=spec.name, number=1) == "absent"
    with pytest.raises(Refused, match="cancelled"):
        moving(30.0)
    stays(hosts, spec)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [SLOW, SHARED_SLOW], indirect=True, ids=["private", "shared"])
@pytest.mark.parametrize("where", ["a", "b"])
def test_qemu_is_killed_in_the_middle(hosts: MovingHosts, where: str) -> None:
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    moving = hosts.begin_move(spec, hosts.a, hosts.b)
    begun(hosts, spec)
    hosts.hosts[where].call("kill_qemu", name=spec.name)
    with pytest.raises(Gone if where == "a" else Broken):
        moving(60.0)
    if where == "b":
        stays(hosts, spec)
        return
    assert hosts.running(spec) == []
    assert hosts.a.call("observe")[spec.name][0] == "dead"
    until("what had come is removed", lambda: spec.name not in hosts.b.call("observe"), 60)
    is_gone(hosts, spec, hosts.b)


@pytest.mark.slow
def test_the_disk_of_the_target_is_full(hosts: MovingHosts) -> None:
    spec = hosts.spec(size=BASE)
    vms = hosts.b.place / "vms"
    hosts.b.run("mount", "-t", "tmpfs", "-o", "size=5m,mode=0711", "tmpfs", str(vms))
    hosts.run(spec)
    until("it has written", lambda: hosts.a.call("watched", address=spec.bare_address)["written"] > 200, 60)
    with pytest.raises(MultiverseError, match=r"disk|room"):
        hosts.move(spec, hosts.a, hosts.b)
    goes_on(hosts, spec, "a")
    hosts.b.run("mount", "-o", "remount,size=500m", str(vms))
    stays(hosts, spec)


# Where a process is killed: the host, the module, the function, and whether that is done first.
KILLED = [
    ("a", "departures", "OutgoingVm._begin", True),
    ("a", "migration", "Sender.send_disk", True),
    ("a", "migration", "Sender.send_memory", True),
    ("a", "migration", "Sender.end_disk", True),
    ("a", "migration", "Sender.end_memory", True),
    ("a", "departures", "OutgoingVm._hand_over", True),
    ("a", "departures", "OutgoingVm._ask", True),
    ("a", "departures", "OutgoingVm._remove", False),
    ("b", "arrivals", "IncomingVms._make", True),
    ("b", "arrivals", "IncomingVms._connect_disk", True),
    ("b", "arrivals", "IncomingVms._connect_memory", True),
    ("b", "arrivals", "IncomingVms._decide", False),
    ("b", "arrivals", "IncomingVms._take_over", True),
    ("b", "migration", "go_on", False),
    ("b", "migration", "go_on", True),
    ("b", "arrivals", "IncomingVms._finish", True),
]


OF_COPIES = ("send_disk", "end_disk", "_connect_disk")
KILLED_SHARING = [
    ("b", "arrivals", "share_disk", False),
    ("b", "arrivals", "share_disk", True),
    *(each for each in KILLED if not each[2].endswith(OF_COPIES)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "where", "module", "function", "after"),
    [*((ENCRYPTED, *each) for each in KILLED), *((SHARED, *each) for each in KILLED_SHARING)],
    indirect=["hosts"],
    ids=[f"{how}-{each}" for how, all_ in (("encrypted", KILLED), ("shared", KILLED_SHARING)) for each in all_],
)
def test_an_agent_is_killed_at_each_step(
    hosts: MovingHosts, where: str, module: str, function: str, after: bool
) -> None:
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    killed = hosts.hosts[where]
    killed.call("die", module=module, function=function, after=after)
    moving = hosts.begin_move(spec, hosts.a, hosts.b)
    if where == "a":
        with pytest.raises(Unknown):
            moving(60.0)
    assert killed.process is not None
    killed.process.wait(60)
    killed.begin()
    # The end of an agent, of whichever host, ends no VM: it goes on at one of the two, soon.
    until("it runs on one host", lambda: len(hosts.running(spec)) == 1, 60)
    (at,) = hosts.running(spec)
    other = hosts.b if at == "a" else hosts.a
    until("nothing is left on the other one", lambda: spec.name not in other.call("observe"), 60)
    goes_on(hosts, spec, at)
    hosts.move(spec, hosts.hosts[at], other)
    goes_on(hosts, spec, other.name)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("hosts", [SLOW], indirect=True, ids=["private"])
def test_an_agent_ends_in_the_middle(hosts: MovingHosts, where: str) -> None:
    """It ends as `multiverse agent` does, so what it has begun ends with it."""
    spec = hosts.spec(size=BASE)
    hosts.run(spec)
    moving = hosts.begin_move(spec, hosts.a, hosts.b)
    begun(hosts, spec)
    hosts.hosts[where].end()
    hosts.hosts[where].begin()
    with pytest.raises(MultiverseError):
        moving(60.0)
    time.sleep(1.0)
    until("it runs on one host", lambda: hosts.running(spec) == ["a"], 60)
    stays(hosts, spec)
