"""Which VMs reach each other: their groups, who is told of them, and the names by which they are found."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse import config
from multiverse.agent.hypervisor import VxlanDirectory
from multiverse.controller.publication import GroupBook
from multiverse.core.errors import Exhausted, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import OF_SITE, Member, Reach, group_of
from multiverse.core.model.job import Attempt, AttemptState, Request
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.transition import Change, Event, Move
from multiverse.drivers.slurm.site.install import AddressFile
from multiverse.guest.agent import network
from multiverse.host import manifest
from multiverse.host.firewall import Firewall, MemberRecord, changed
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.connections import GuestNames
from multiverse.system.files import keep_names
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit import rows
from tests.unit.test_vxlan import Machines, Told

# --- groups -----------------------------------------------------------------------------------------


def job(id: int, uid: int = 1000, nodes: int = 1) -> Attempt:
    made = rows.attempt(AttemptState.ALLOCATED, id=id, job=str(id), request=Request(nodes, Size(1, 100)))
    return replace(made, uid=uid)


def test_a_group_is_that_of_the_user_of_the_job_or_of_the_site() -> None:
    one, two, other = job(1), job(2), job(3, uid=1001)
    assert group_of(one, Reach.USER) == group_of(two, Reach.USER) == 1000 != group_of(other, Reach.USER)
    assert group_of(None, Reach.USER) == group_of(None, Reach.JOB) == group_of(one, Reach.JOB) == 0
    assert group_of(None, Reach.SITE) == group_of(one, Reach.SITE) == group_of(other, Reach.SITE) == OF_SITE
    gang = job(4, nodes=2)
    assert group_of(gang, Reach.JOB) != group_of(job(5, nodes=2), Reach.JOB)


@given(st.integers(1, 1 << 45), st.integers(1, (1 << 32) - 1), st.sampled_from(Reach))
def test_groups_of_all_kinds_are_marks_that_never_meet(id: int, uid: int, reach: Reach) -> None:
    """After the site's choice has changed, VMs of both choices run. A uid beyond those in use makes no group of its
    user: it might be a number of another kind."""
    group = group_of(job(id, uid, nodes=2), reach)
    assert 0 < group < 1 << 32
    kind = Reach.USER if group < 1 << 31 else Reach.SITE if group == OF_SITE else Reach.JOB
    assert kind is (Reach.JOB if reach is Reach.USER and uid >= 1 << 31 else reach)


def test_a_site_chooses_by_its_settings() -> None:
    assert config.Settings().network.reach is Reach.USER
    assert config.parse({"network": {"reach": "job"}}, "x").network.reach is Reach.JOB
    with pytest.raises(Refused, match=r"network\.reach"):
        config.parse({"network": {"reach": "everybody"}}, "x")
    assert not config.Settings().network.names, "no file that is not the daemon's own changes without a word"


# --- what hosts are told ----------------------------------------------------------------------------


class Hosts:
    """`ports.Groups`: hosts that know what they were told."""

    def __init__(self, *names: str) -> None:
        self.listening: Mapping[str, str] = dict.fromkeys(names, "first")
        self.known: dict[str, dict[str, Member]] = {name: {} for name in names}
        self.calls: list[tuple[str, bool]] = []
        self.errors: list[Exception] = []

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        self.calls.append((host, whole))
        await asyncio.sleep(0.1)
        if self.errors:
            raise self.errors.pop(0)
        self.known[host] = changed(self.known[host], members, gone, whole=whole)

    def names(self) -> dict[str, list[str]]:
        return {host: sorted(known) for host, known in self.known.items()}


class Book:
    """A book, and the rows that it follows."""

    def __init__(self, *there: Attempt | Vm, reach: Reach = Reach.USER) -> None:
        self.state = rows.state(*there)
        self.clock = VirtualClock()
        self.book = GroupBook(self.state, reach, self.clock, Random(1))

    def move(self, row: Vm) -> None:
        self.book.note([Move((Change(row, Event.RELEASED),))])

    async def tell(self, hosts: Hosts, passes: int = 3) -> None:
        for _ in range(passes):
            self.book.ensure(hosts)
            await asyncio.sleep(5.0)


def placed(id: int, host: str, attempt: int | None, state: VmState = VmState.SERVING) -> Vm:
    made = rows.vm(state, id=id, host=host, attempt=attempt)
    return replace(made, name=f"mv-{id}", mac=f"02:00:00:00:00:{id:02x}", address=f"10.0.0.{id}/16")


ONE, TWO, OTHER = job(1), job(2), job(3, uid=1001)


def test_a_host_is_told_of_the_groups_of_its_own_vms_and_of_no_others() -> None:
    async def script() -> None:
        hosts = Hosts("h1", "h2", "h3")
        book = Book(ONE, TWO, OTHER, placed(1, "h1", 1), placed(2, "h2", 2), placed(3, "h3", 3), placed(4, "h3", None))
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"], "h2": ["mv-1", "mv-2"], "h3": []}
        assert hosts.known["h1"]["mv-2"] == Member("mv-2", "10.0.0.2", "02:00:00:00:00:02", "h2", 1000)
        assert sorted(hosts.calls) == [("h1", True), ("h2", True), ("h3", True)], "once, if nothing changes"

    run(script(), 1)


@pytest.mark.parametrize("state", VmState)
def test_a_vm_is_told_of_from_before_it_runs_until_it_leaves(state: VmState) -> None:
    async def script() -> None:
        hosts = Hosts("h1")
        await Book(ONE, TWO, placed(1, "h1", 1), placed(2, "h1", 2, state)).tell(hosts)
        leaves = (VmState.ORPHAN, VmState.DEAD, VmState.ENDING, VmState.REMOVING, VmState.RELEASING, VmState.DELETING)
        assert hosts.names() == {"h1": [] if state in (*leaves, VmState.GONE) else ["mv-1", "mv-2"]}

    run(script(), 1)


def test_what_changes_is_told_alone() -> None:
    async def script() -> None:
        hosts = Hosts("h1", "h2")
        book = Book(ONE, TWO, placed(1, "h1", 1))
        await book.tell(hosts)
        assert hosts.names() == {"h1": [], "h2": []}, "a group of one is nothing to tell"
        hosts.calls.clear()
        book.move(placed(2, "h2", 2, VmState.PLANNED))
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"], "h2": ["mv-1", "mv-2"]}
        book.move(placed(3, "h1", 1))
        await book.tell(hosts)
        book.move(placed(3, "h1", 1, VmState.LOST))
        await book.tell(hosts)
        assert len(hosts.calls) == 4, "a state that changes nothing is not told"
        book.move(placed(2, "h2", 2, VmState.RELEASING))
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-3"], "h2": []}, "h2 has no VM of the user any more"
        book.move(placed(3, "h1", 1, VmState.RELEASING))
        await book.tell(hosts)
        assert hosts.names() == {"h1": [], "h2": []}
        assert not any(whole for _, whole in hosts.calls)

    run(script(), 1)


def test_a_vm_that_moves_is_told_of_to_its_new_host_before_it_runs_there_and_to_all_once_it_does() -> None:
    async def script() -> None:
        hosts, moves = Hosts("h1", "h2", "h3"), placed(1, "h1", 1)
        book = Book(ONE, TWO, moves, placed(2, "h2", 2))
        await book.tell(hosts)
        places = (moves.place, replace(moves.place, host="h3"))
        book.move(replace(moves, state=VmState.MOVING, places=places))
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"], "h2": ["mv-1", "mv-2"], "h3": ["mv-1", "mv-2"]}
        assert {known["mv-1"].host for known in hosts.known.values()} == {"h1"}
        book.move(replace(moves, places=places[1:]))
        await book.tell(hosts)
        assert hosts.names() == {"h1": [], "h2": ["mv-1", "mv-2"], "h3": ["mv-1", "mv-2"]}
        assert {known["mv-1"].host for known in hosts.known.values() if known} == {"h3"}
        book.move(replace(moves, state=VmState.RELEASING, places=places[1:]))
        await book.tell(hosts)
        assert hosts.names() == {"h1": [], "h2": [], "h3": []}

    run(script(), 1)


def test_a_spare_is_told_of_when_a_job_has_taken_it() -> None:
    async def script() -> None:
        hosts = Hosts("h1", "h2")
        book = Book(ONE, TWO, placed(1, "h1", 1), placed(2, "h2", None, VmState.JOINED))
        await book.tell(hosts)
        assert hosts.names() == {"h1": [], "h2": []}
        book.move(placed(2, "h2", 2, VmState.JOINED))
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"], "h2": ["mv-1", "mv-2"]}

    run(script(), 1)


def test_a_host_that_may_have_forgotten_is_told_all_and_so_it_is_after_a_failure() -> None:
    async def script() -> None:
        hosts = Hosts("h1")
        book = Book(ONE, TWO, placed(1, "h1", 1), placed(2, "h1", 2))
        await book.tell(hosts)
        hosts.known["h1"], hosts.listening = {"mv-9": Member("mv-9", "10.0.0.9", "", "h1", 7)}, {"h1": "second"}
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"]}
        hosts.calls.clear()
        hosts.errors = [Unknown("no answer"), Exhausted("no room")]
        book.move(placed(3, "h1", 1))
        await book.tell(hosts, passes=8)
        assert hosts.names() == {"h1": ["mv-1", "mv-2", "mv-3"]}
        assert hosts.calls == [("h1", False), ("h1", True), ("h1", True)]
        hosts.listening = {}
        book.move(placed(4, "h1", 1))
        await book.tell(hosts)
        hosts.listening = {"h1": "second"}
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2", "mv-3", "mv-4"]}, "it was away meanwhile"

    run(script(), 1)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "controller restarted"])
def test_a_host_that_was_cut_off_forgets_what_has_moved_or_ended_meanwhile(restarted: bool) -> None:
    async def script() -> None:
        hosts = Hosts("h1", "h2", "h3")
        here, moves, ends = placed(1, "h1", 1), placed(2, "h2", 2), placed(4, "h2", 2)
        book = Book(ONE, TWO, here, moves, ends)
        await book.tell(hosts)
        hosts.listening = dict.fromkeys(("h2", "h3"), "first")
        book.move(replace(ends, state=VmState.RELEASING))
        moved = replace(moves, places=(replace(moves.place, host="h3"),))
        book.move(moved)
        await book.tell(hosts)
        assert hosts.names()["h1"] == ["mv-1", "mv-2", "mv-4"] and hosts.known["h1"]["mv-2"].host == "h2"
        if restarted:
            book = Book(ONE, TWO, here, moved)
        hosts.listening = dict.fromkeys(hosts.known, "first")
        await book.tell(hosts)
        assert hosts.names() == {"h1": ["mv-1", "mv-2"], "h2": [], "h3": ["mv-1", "mv-2"]}
        assert hosts.known["h1"]["mv-2"].host == "h3"

    run(script(), 1)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8),
            st.sampled_from(["h1", "h2", "h3"]),
            st.sampled_from([1, 2, 3, None]),
            st.sampled_from([VmState.PLANNED, VmState.SERVING, VmState.RELEASING, VmState.LOST]),
        ),
        max_size=30,
    ),
    st.lists(st.integers(0, 30), max_size=4),
    st.sampled_from(Reach),
)
def test_hosts_always_come_to_know_what_is(
    moves: list[tuple[int, str, int | None, VmState]], told_after: list[int], reach: Reach
) -> None:
    """Whatever happens between two tellings, and in whichever order."""

    async def script() -> None:
        hosts, book = Hosts("h1", "h2", "h3"), Book(ONE, TWO, OTHER, reach=reach)
        there = dict[int, Vm]()
        for at, (id_, host, attempt, state) in enumerate(moves):
            there[id_] = placed(id_, host, attempt, state)
            book.move(there[id_])
            if at in told_after:
                await book.tell(hosts, passes=1)
        await book.tell(hosts)
        groups = {
            vm.name: group_of(book.state.attempt_of(vm), reach)
            for vm in there.values()
            if vm.state is not VmState.RELEASING
        }
        of_host = {vm.name: vm.host for vm in there.values()}
        for name in hosts.known:
            own = {group for vm, group in groups.items() if of_host[vm] == name}
            several = {group for group in own if group and list(groups.values()).count(group) > 1}
            known = {vm: member.host for vm, member in hosts.known[name].items()}
            assert known == {vm: of_host[vm] for vm, group in groups.items() if group in several}

    run(script(), 1)


async def test_members_are_told_with_the_machines_to_which_the_vxlan_leads() -> None:
    """None is needed to the host's own machine, and those on an unknown one are left out."""
    members = [placed_member(n, host) for n, host in enumerate(("h1", "h2", "h4", "nowhere.invalid"), 1)]
    directory = VxlanDirectory(Machines(), lambda _: None, Told().connect)
    found = await directory.located("h1", members)
    assert {one.host: one.machine for one in found} == {"h1": "", "h2": "198.51.100.12", "h4": ""}


def placed_member(n: int, host: str, group: int = 1000) -> Member:
    return Member(f"mv-{n}", f"10.0.0.{n}", f"02:00:00:00:00:{n:02x}", host, group)


# --- the host ---------------------------------------------------------------------------------------


def test_what_a_host_was_told_outlives_its_agent_and_an_unreadable_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "members"
    one, two = placed_member(1, "h1"), placed_member(2, "h2")
    first, second = MemberRecord(file), MemberRecord(file)
    first.write({one.name: one})
    assert second.read() == {one.name: one}
    first.write({two.name: two})
    assert second.read() == {two.name: two}, "what another process has written counts at once"
    file.write_text("[{")
    assert second.read() == {}
    first.write({})
    assert not file.exists() and second.read() == {}
    with pytest.raises(Exhausted):
        MemberRecord(tmp_path / "no" / "such").write({one.name: one})


def test_a_thread_that_reads_members_while_another_parses_them_gets_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, file = placed_member(1, "h1"), tmp_path / "members"
    MemberRecord(file).write({one.name: one})
    record, read, seen = MemberRecord(file), Path.read_text, list[Mapping[str, Member]]()

    def beside(path: Path) -> str:
        monkeypatch.setattr(Path, "read_text", read)
        other = threading.Thread(target=lambda: seen.append(record.read()))
        other.start()
        other.join()
        return read(path)

    monkeypatch.setattr(Path, "read_text", beside)
    assert record.read() == {one.name: one}
    assert seen == [{one.name: one}]


class Channels:
    """`Connections` to guests, of which some do not take a message."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.sessions: set[str] = set()  # of VMs that are being started
        self.deaf: set[str] = set()

    def started_channel(self, name: str) -> Channels:
        if name in self.deaf:
            raise Unknown("it does not answer")
        self.name = name
        return self

    def tell(self, line: bytes, timeout: float) -> None:
        self.sent.append((self.name, line))


class Rules:
    """A `Firewall` that knows members."""

    def __init__(self, *members: Member) -> None:
        self.members = {one.name: one for one in members}


def test_guests_are_told_what_they_do_not_know_of_their_own_group() -> None:
    channels, rules = Channels(), Rules(*(placed_member(n, "h1") for n in (1, 2)), placed_member(3, "h2"))
    rules.members["mv-4"] = placed_member(4, "h1", group=7)
    names = GuestNames("h1", rules, channels)  # type: ignore[arg-type]
    assert sorted(names.first("mv-1", 1000)) == [("mv-2", "10.0.0.2"), ("mv-3", "10.0.0.3")]
    channels.sessions = {"mv-2"}
    names.tell()
    assert [to for to, _ in channels.sent] == ["mv-4"], "one knows all, and one is being started"
    channels.sent.clear()
    del rules.members["mv-3"]
    rules.members["mv-5"] = placed_member(5, "h2")
    channels.sessions = set()
    names.tell()
    assert dict(channels.sent) == {
        "mv-1": b'{"type":"names","names":[["mv-5","10.0.0.5"]],"gone":["mv-3"],"whole":false}\n',
        "mv-2": b'{"type":"names","names":[["mv-1","10.0.0.1"],["mv-5","10.0.0.5"]],"gone":[],"whole":true}\n',
    }
    channels.sent.clear()
    names.tell()
    assert channels.sent == []
    channels.deaf = {"mv-1"}
    del rules.members["mv-5"]
    names.tell()
    channels.deaf, channels.sent = set(), []
    names.tell()
    assert [to for to, _ in channels.sent] == ["mv-1"] and b'"whole":true' in channels.sent[0][1], "it missed one"


def test_a_vm_whose_group_has_dissolved_forgets_the_names_and_one_that_is_gone_is_told_nothing() -> None:
    channels, rules = Channels(), Rules(placed_member(1, "h1"), placed_member(2, "h1"))
    names = GuestNames("h1", rules, channels)  # type: ignore[arg-type]
    names.first("mv-1", 1000), names.first("mv-2", 1000)
    rules.members.clear()
    names.drop("mv-2")
    names.tell()
    assert channels.sent == [("mv-1", b'{"type":"names","names":[],"gone":["mv-2"],"whole":false}\n')]


def test_the_group_that_was_told_last_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a host without nftables, where nothing separates groups."""
    monkeypatch.setattr("multiverse.host.firewall._library", lambda: None)
    rules = Firewall("mv-", tmp_path, ("10.0.0.1", "10.0.0.9"), "h1")
    known = Manifest("mv-1", CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, group=5)
    assert rules.group(known) == 5 and rules.learn([placed_member(1, "h1")], (), whole=False) == []
    assert rules.group(known) == 1000 and not rules.separates(known)


def test_a_manifest_keeps_the_group(tmp_path: Path) -> None:
    known = Manifest("mv-1", CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, group=5)
    manifest.write(tmp_path, known)
    assert manifest.read(tmp_path) == known


# --- names ------------------------------------------------------------------------------------------


def test_a_guest_knows_its_own_names_first_and_others_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    monkeypatch.setattr(network, "HOSTS", str(hosts))
    own = "127.0.0.1 localhost\n10.0.0.1 mv-1\n10.0.0.2 mv-2\n"
    network.set_hosts("mv-1", "10.0.0.1", [["mv-2", "10.0.0.2"]], [["mv-2", "10.0.0.2"], ["mv-3", "10.0.0.3"]])
    assert hosts.read_text() == f"{own}10.0.0.3 mv-3\n"
    before = hosts.open()
    network.learn_names([["mv-4", "10.0.0.4"]], ["mv-3", "mv-9"], False)
    assert hosts.read_text() == f"{own}10.0.0.4 mv-4\n"
    with before:
        assert before.read() == f"{own}10.0.0.3 mv-3\n", "a job that reads the file reads all of the earlier one"
    network.learn_names([["mv-5", "10.0.0.5"]], [], True)
    assert hosts.read_text() == f"{own}10.0.0.5 mv-5\n"
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


OTHERS = "127.0.0.1 localhost\n\n# mine\n10.9.9.9 mvab-99 printer\n"


def test_names_are_kept_between_lines_of_our_own_and_all_else_stays(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(OTHERS)
    hosts.chmod(0o640)
    keep_names(hosts, "ab", {"mvab-1": "10.0.0.1", "mvab-2": "10.0.0.2"})
    first, last = "# multiverse ab: names of VMs, kept by the daemon", "# multiverse ab: end"
    assert hosts.read_text() == f"{OTHERS}{first}\n10.0.0.1 mvab-1\n10.0.0.2 mvab-2\n{last}\n"
    hosts.write_text(hosts.read_text() + "10.1.1.1 later\n")
    keep_names(hosts, "cd", {"mvcd-1": "10.2.0.1"})
    keep_names(hosts, "ab", {"mvab-3": "10.0.0.3"})
    text = hosts.read_text()
    assert f"{OTHERS}{first}\n10.0.0.3 mvab-3\n{last}\n10.1.1.1 later\n" in text and "10.2.0.1 mvcd-1\n" in text
    before = hosts.stat()
    keep_names(hosts, "ab", {"mvab-3": "10.0.0.3"})
    assert hosts.stat() == before and before.st_mode & 0o777 == 0o640, "nothing has changed"
    keep_names(hosts, "ab", {})
    keep_names(hosts, "cd", {})
    assert hosts.read_text() == f"{OTHERS}10.1.1.1 later\n"
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_an_end_that_somebody_has_removed_costs_no_line_of_others(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    keep_names(hosts, "ab", {"mvab-1": "10.0.0.1"})
    hosts.write_text(hosts.read_text().replace("# multiverse ab: end\n", "10.1.1.1 printer\n"))
    keep_names(hosts, "ab", {"mvab-2": "10.0.0.2"})
    assert "10.1.1.1 printer\n" in hosts.read_text() and "mvab-1" not in hosts.read_text()


async def test_users_are_told_names_too_where_the_site_wants_it(tmp_path: Path) -> None:
    commands, hosts = tmp_path / "addresses.conf", tmp_path / "hosts"
    await AddressFile(commands).tell({"mvab-1": "10.0.0.1"})
    assert [path.name for path in tmp_path.iterdir()] == ["addresses.conf"]
    await AddressFile(commands, hosts, "ab").tell({"mvab-1": "10.0.0.1"})
    assert "10.0.0.1 mvab-1\n" in hosts.read_text()
    with pytest.raises(Exhausted, match="no/such") as caught:
        await AddressFile(commands, tmp_path / "no" / "such", "ab").tell({"mvab-2": "10.0.0.2"})
    assert "network.names" in caught.value.hint and "mvab-[2]" in commands.read_text().replace("mvab-2", "mvab-[2]")
