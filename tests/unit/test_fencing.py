"""The site's fence command, and the agent that ends its VMs by itself."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from copy import deepcopy
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.agent.protocol import Answer, Hello, Line, Observe, decode, encode
from multiverse.agent.self_fence import ContactFile, Contacts, FenceTimer, SelfFence
from multiverse.agent.server import AgentIdentity, AgentServer, Epochs
from multiverse.config import FenceSettings
from multiverse.core.errors import Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.vm import VmRef
from multiverse.service.daemon import FenceCommand

LIMIT = 100.0
ONE, TWO = "mvtest0-1", "mvtest0-2"


# --- the command -----------------------------------------------------------------------------------


def script(tmp_path: Path, text: str) -> FenceCommand:
    path = tmp_path / "fence"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return FenceCommand(FenceSettings(command=(str(path), "--plug", "{host}"), timeout=0.5))


async def test_a_fence_command_that_ends_with_0_has_fenced_its_host(tmp_path: Path) -> None:
    await script(tmp_path, f'echo "$@" > {tmp_path}/asked').fence("n7")
    assert (tmp_path / "asked").read_text() == "--plug n7\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo no route >&2; exit 3", "status 3: no route"), ("exit 1", "it said nothing"), ("kill -9 $$", "status -9")],
)
async def test_a_fence_command_that_fails_says_what_it_has_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Unknown, match=said):
        await script(tmp_path, text).fence("n7")


async def test_a_fence_command_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    fence = script(tmp_path, f"(sleep 1; touch {tmp_path}/late) & echo waiting; sleep 60")
    with pytest.raises(Unknown, match=r"did not end within 0\.5 s"):
        await fence.fence("n7")
    await asyncio.sleep(0.8)
    assert not (tmp_path / "late").exists()


async def test_a_fence_command_is_killed_when_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    task = asyncio.create_task(script(tmp_path, f"sleep 0.3; touch {tmp_path}/late").fence("n7"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.4)
    assert not (tmp_path / "late").exists(), "its host is back"


async def test_a_fence_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match="cannot start /none"):
        await FenceCommand(FenceSettings(command=("/none", "{host}"))).fence("n7")


# --- the timer -------------------------------------------------------------------------------------


def test_a_vm_goes_on_while_the_controller_or_the_scheduler_is_in_contact() -> None:
    timer = FenceTimer(LIMIT, Contacts({"test0": 0.0}), lambda: 0.0)
    assert timer.expired("test0", [ONE, TWO], LIMIT) == []
    assert timer.expired("test0", [ONE, TWO], LIMIT + 1) == [ONE, TWO]
    timer.reached([TWO], 50.0)
    assert timer.expired("test0", [ONE, TWO], LIMIT + 1) == [ONE], "the scheduler has lost the other"
    timer.heard("test0", 60.0)
    assert timer.expired("test0", [ONE, TWO], LIMIT + 60) == []
    timer.heard("test0", 10.0)
    assert timer.contacts.controllers == {"test0": 60.0}, "what arrives late takes nothing back"
    assert not timer.asks_scheduler("test0", 80.0) and timer.asks_scheduler("test0", 81.0)


@given(st.lists(st.tuples(st.sampled_from("cs"), st.floats(0, 1000)), max_size=20), st.floats(0, 2000))
def test_a_vm_ends_if_and_only_if_nothing_was_in_contact_for_its_whole_time(
    contacts: list[tuple[str, float]], now: float
) -> None:
    timer = FenceTimer(LIMIT, Contacts({"test0": 0.0}), lambda: 0.0)
    for who, at in contacts:
        timer.heard("test0", at) if who == "c" else timer.reached([ONE], at)
    last = max([0.0, *(at for _, at in contacts)])
    assert bool(timer.expired("test0", [ONE], now)) is (now - last > LIMIT)


class Hosted:
    """A hypervisor with two VMs, and a scheduler that reaches some of them, or does not answer."""

    def __init__(self) -> None:
        self.vms = {ONE, TWO}
        self.reaches: Collection[str] | None = None
        self.now = 0.0
        self.kept: list[Contacts] = []
        self.asked = 0
        self.fails: Collection[str] = ()
        self.hangs: Collection[str] = ()
        self.killed: list[str] = []
        self.silent = False

    def fence(self, contacts: Contacts | None = None, limit: float = LIMIT) -> SelfFence:
        timer = FenceTimer(limit, contacts or Contacts(), lambda: self.now)
        return SelfFence(
            timer, lambda: ["test0"], lambda _: self, self.reached, lambda kept: self.kept.append(deepcopy(kept))
        )

    async def list_vms(self) -> Collection[str]:
        if self.silent:
            await asyncio.Event().wait()
        return list(self.vms)

    async def kill(self, vms: Collection[str]) -> None:
        self.killed += vms

    async def destroy(self, vm: VmRef, grace: float) -> None:
        assert vm.name in self.killed, "it goes on until then"
        if vm.name in self.hangs:
            await asyncio.Event().wait()
        if vm.name in self.fails:
            raise Unknown("it is stuck")
        self.vms.discard(vm.name)

    async def reached(self, site: str) -> Collection[str]:
        self.asked += 1
        if self.reaches is None:
            raise Unknown("slurmctld does not answer")
        return self.reaches


async def test_vms_are_ended_after_the_time_without_controller_and_scheduler() -> None:
    host = Hosted()
    fence = host.fence()
    await fence.check()
    host.now = LIMIT
    await fence.check()
    assert len(host.vms) == 2 and host.asked == 1
    host.now += 1
    host.fails = {ONE}
    await fence.check()
    assert host.vms == {ONE}, "one that is stuck keeps no other"
    host.fails = ()
    await fence.check()
    assert not host.vms


async def test_the_absence_of_the_controller_alone_ends_no_vm_however_long() -> None:
    host = Hosted()
    host.reaches = [ONE, TWO]
    fence = host.fence()
    for host.now in range(0, 100_000, 90):
        await fence.check()
    assert len(host.vms) == 2
    host.reaches = [ONE]
    for host.now in range(100_000, 100_200, 10):
        await fence.check()
    assert host.vms == {ONE}, "a VM whose node the scheduler has lost is lost to the site"


async def test_a_vm_that_hangs_as_it_is_removed_keeps_no_other_and_no_look() -> None:
    host = Hosted()
    host.reaches, host.hangs = [TWO], {ONE}
    fence = host.fence()
    fence.patience = 0.01
    await fence.check()
    host.now = LIMIT + 1
    await fence.check()
    assert host.vms == {ONE, TWO} and host.killed == [ONE]
    host.reaches, host.now = None, 2 * LIMIT + 2
    await fence.check()
    assert host.vms == {ONE} and host.killed == [ONE, ONE, TWO], "it is killed again, and removed once"


async def test_vms_are_ended_while_the_host_does_not_list_them() -> None:
    host = Hosted()
    fence = host.fence()
    fence.patience = 0.01
    await fence.check()
    host.now = LIMIT / 2
    await fence.check()
    host.silent, host.now = True, LIMIT + 1
    await fence.check()
    assert not host.vms


async def test_the_scheduler_is_not_asked_while_the_controller_is_in_contact() -> None:
    host = Hosted()
    fence = host.fence()
    for host.now in range(0, 1000, 10):
        fence.timer.heard("test0", host.now - 5)
        await fence.check()
    assert host.asked == 0 and len(host.vms) == 2 and host.kept[-1].controllers == {"test0": 985.0}


async def test_a_full_disk_ends_neither_the_agent_nor_its_vms() -> None:
    host = Hosted()
    fence = host.fence()

    def full(contacts: Contacts) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    fence.keep = full
    fence.timer.heard("test0", 1.0)
    host.now = 50.0
    await fence.check()
    fence.keep = lambda kept: host.kept.append(deepcopy(kept))
    await fence.check()
    assert [one.controllers for one in host.kept] == [{"test0": 1.0}] and len(host.vms) == 2


async def test_vms_are_ended_while_the_directories_of_the_host_cannot_be_listed() -> None:
    host = Hosted()
    fence = host.fence()
    await fence.check()

    def failing() -> list[str]:
        raise OSError(errno.EIO, "input/output error")

    fence.sites = failing
    host.now = LIMIT + 1
    await fence.check()
    assert not host.vms


def test_contacts_outlive_the_agent_but_not_the_boot(tmp_path: Path) -> None:
    contacts = Contacts({"test0": 12.5}, {ONE: 13.5}, {"test0": LIMIT})
    file = ContactFile(tmp_path / "contacts", "boot-1")
    file.write(contacts)
    assert file.read() == contacts
    after = ContactFile(tmp_path / "contacts", "boot-2").read()
    assert after == Contacts(limits={"test0": LIMIT}), "what the controller knows of the host outlives the boot"
    (tmp_path / "contacts").write_text("{")
    assert file.read() == Contacts()


async def test_a_restarted_agent_ends_no_vm_that_the_scheduler_has_just_reached(tmp_path: Path) -> None:
    host, file = Hosted(), ContactFile(tmp_path / "contacts", "boot")
    fence = host.fence()
    fence.keep = file.write
    host.reaches = [ONE, TWO]
    for host.now in range(0, 1000, 10):
        await fence.check()
    host.reaches = None  # slurmctld is away as the agent starts again
    host.now = 1010
    again = host.fence(file.read())
    again.keep = file.write
    await again.check()
    assert host.vms == {ONE, TWO}
    host.now = 990 + LIMIT + 1
    await again.check()
    assert not host.vms
    await again.check()
    assert file.read().vms == {}, "what was kept of VMs goes with them"


async def test_an_agent_that_ends_soon_after_its_controller_was_back_keeps_that(tmp_path: Path) -> None:
    """Seed 63925 of saving: its look waited for slurmctld, and its VMs were ended by the contact before."""
    host, file = Hosted(), ContactFile(tmp_path / "contacts", "boot")
    waits, kept = asyncio.Event(), asyncio.Event()

    def keep(contacts: Contacts) -> None:
        file.write(contacts)
        kept.set()

    async def reached(_: str) -> Collection[str]:
        waits.set()
        await asyncio.Event().wait()
        return ()

    host.now = LIMIT / 2
    fence = host.fence(Contacts({"test0": 0.0}))
    fence.keep, fence.reached = keep, reached
    running = asyncio.create_task(fence.run())
    await waits.wait()
    fence.timer.heard("test0", host.now)
    await kept.wait()
    running.cancel()
    assert file.read().controllers == {"test0": LIMIT / 2}
    host.now += LIMIT - 1
    await host.fence(file.read()).check()
    assert host.vms == {ONE, TWO}


# --- what counts as contact ------------------------------------------------------------------------


async def test_contact_is_as_old_as_the_answer_that_the_controller_has_got() -> None:
    """A line that was on its way for long proves nothing about the time at which it arrives."""
    now = 1000.0
    timer = FenceTimer(LIMIT, Contacts(), lambda: now)
    hypervisor = Hosted()
    server = AgentServer(AgentIdentity("1", "h1", "b", "r"), Epochs(), lambda _: hypervisor, fence_timer=timer)  # type: ignore[arg-type, return-value]
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])

    async def say(line: Line) -> Answer:
        writer.write(encode(line))
        return decode(Answer, await reader.readline())

    await say(Line(hello=Hello(release="1", protocol=1, oldest=1, controller="c", site="test0")))
    now = 1003.0
    await say(Line(take=1))
    assert timer.contacts.controllers == {"test0": 1000.0}, (
        "the greeting has come, when a VM may be made for the controller"
    )
    now = 1005.0
    await say(Line(ping=1, heard=0))
    assert timer.contacts.controllers == {"test0": 1000.0}, "whether the answer arrives is not known yet"
    now = 1010.0
    await say(Line(ping=2, heard=1))
    assert timer.contacts.controllers == {"test0": 1005.0}
    now = 1500.0
    await say(Line(ping=3, heard=1))
    assert timer.contacts.controllers == {"test0": 1005.0}, "it was sent long ago"
    writer.close()
    listening.close()
    await server.close()


class Pipe:
    """A connection to an agent, line by line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, line: Line) -> Answer:
        self._writer.write(encode(line))
        return decode(Answer, await self._reader.readline())

    async def shown(self, number: int) -> float:
        """The time of self-fencing that an observation tells."""
        answer = await self.say(Line(id=number, call=Observe()))
        assert answer.result is not None
        return float(answer.result["hosts"]["h1"]["self_fence"])

    async def known(self, ping: int) -> None:
        """The controller goes on, and says that it has got all until now."""
        await self.say(Line(ping=ping, heard=ping - 1))
        await self.say(Line(ping=ping + 1, heard=ping))


@asynccontextmanager
async def connected(timer: FenceTimer) -> AsyncIterator[Pipe]:
    host = SimpleNamespace(observe=observe)
    server = AgentServer(AgentIdentity("1", "h1", "b", "r"), Epochs(), lambda _: host, fence_timer=timer)  # type: ignore[arg-type, return-value]
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])
    pipe = Pipe(reader, writer)
    await pipe.say(Line(hello=Hello(release="1", protocol=1, oldest=1, controller="c", site="test0")))
    await pipe.say(Line(take=1))
    yield pipe
    writer.close()
    listening.close()
    await server.close()


async def observe() -> HypervisorView:
    return HypervisorView({"h1": Host("h1", Size(1, 512))})


async def test_a_controller_is_told_when_vms_are_ended_once_the_next_run_of_the_agent_knows() -> None:
    host = Hosted()
    fence = host.fence()
    async with connected(fence.timer) as pipe:
        assert await pipe.shown(1) == 0
        await fence.check()
        assert host.kept[-1].limits == {"test0": LIMIT} and await pipe.shown(2) == LIMIT


async def test_a_longer_time_counts_only_once_the_controller_knows_it() -> None:
    """It would take VMs for ended after the shorter one."""
    host = Hosted()
    fence = host.fence(Contacts({"test0": 0.0}, {}, {"test0": LIMIT / 2}))
    assert fence.timer.limit("test0") == LIMIT / 2
    async with connected(fence.timer) as pipe:
        await pipe.known(1)
        assert fence.timer.limit("test0") == LIMIT / 2, "it has observed nothing yet"
        assert await pipe.shown(1) == LIMIT
        assert fence.timer.limit("test0") == LIMIT / 2, "whether that has come is not known yet"
        await pipe.known(3)
        assert fence.timer.limit("test0") == LIMIT
    await fence.check()
    assert host.kept[-1].limits == {"test0": LIMIT}
    host.now = LIMIT
    await fence.check()
    assert len(host.vms) == 2


async def test_a_shorter_time_counts_at_once_and_is_told_once_it_is_kept() -> None:
    host = Hosted()
    fence = host.fence(Contacts({"test0": 0.0}, {}, {"test0": 2 * LIMIT}))
    async with connected(fence.timer) as pipe:
        assert fence.timer.limit("test0") == LIMIT and await pipe.shown(1) == 0
        await fence.check()
        assert await pipe.shown(2) == LIMIT
    host.now = LIMIT + 1
    await fence.check()
    assert not host.vms


async def test_vms_are_ended_after_self_fencing_was_turned_off_until_the_controller_knows() -> None:
    host = Hosted()
    fence = host.fence(Contacts({"test0": 0.0}, {}, {"test0": LIMIT}), inf)
    assert fence.timer.shortest == LIMIT
    async with connected(fence.timer) as pipe:
        assert await pipe.shown(1) == 0
        await pipe.known(1)
    assert fence.timer.shortest == inf
    await fence.run()
    assert host.kept[-1].limits == {} and len(host.vms) == 2
