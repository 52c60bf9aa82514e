"""The site's fence command, and the agent that ends its VMs by itself."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.agent.protocol import Answer, Hello, Line, decode_answer, encode
from multiverse.agent.self_fence import ContactFile, Lease, SelfFence
from multiverse.agent.server import AgentIdentity, AgentServer
from multiverse.config import FenceSettings
from multiverse.core.errors import Unknown
from multiverse.core.model import HypervisorView, VmCondition, VmRef, VmSeen
from multiverse.service.fencing import FenceCommand

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


# --- the lease -------------------------------------------------------------------------------------


def test_a_vm_goes_on_while_the_controller_or_the_scheduler_is_in_contact() -> None:
    lease = Lease(LIMIT, {"test0": 0.0}, lambda: 0.0)
    assert lease.expired("test0", [ONE, TWO], LIMIT) == []
    assert lease.expired("test0", [ONE, TWO], LIMIT + 1) == [ONE, TWO]
    lease.reached([TWO], 50.0)
    assert lease.expired("test0", [ONE, TWO], LIMIT + 1) == [ONE], "the scheduler has lost the other"
    lease.heard("test0", 60.0)
    assert lease.expired("test0", [ONE, TWO], LIMIT + 60) == []
    lease.heard("test0", 10.0)
    assert lease.contacts == {"test0": 60.0}, "what arrives late takes nothing back"
    assert not lease.asks_scheduler("test0", 80.0) and lease.asks_scheduler("test0", 81.0)


@given(st.lists(st.tuples(st.sampled_from("cs"), st.floats(0, 1000)), max_size=20), st.floats(0, 2000))
def test_a_vm_ends_if_and_only_if_nothing_was_in_contact_for_its_whole_time(
    contacts: list[tuple[str, float]], now: float
) -> None:
    lease = Lease(LIMIT, {"test0": 0.0}, lambda: 0.0)
    for who, at in contacts:
        lease.heard("test0", at) if who == "c" else lease.reached([ONE], at)
    last = max([0.0, *(at for _, at in contacts)])
    assert bool(lease.expired("test0", [ONE], now)) is (now - last > LIMIT)


class Hosted:
    """A hypervisor with two VMs, and a scheduler that reaches some of them, or does not answer."""

    def __init__(self) -> None:
        self.vms = {name: VmSeen(name, "h1", VmCondition.RUNNING) for name in (ONE, TWO)}
        self.reaches: Collection[str] | None = None
        self.now = 0.0
        self.kept: list[dict[str, float]] = []
        self.asked = 0
        self.fails: Collection[str] = ()

    def fence(self) -> SelfFence:
        lease = Lease(LIMIT, {}, lambda: self.now)
        return SelfFence(lease, lambda: ["test0"], lambda _: self, self.reached, self.kept.append)

    async def observe(self) -> HypervisorView:
        return HypervisorView({}, dict(self.vms))

    async def destroy(self, vm: VmRef, grace: float) -> None:
        if vm.name in self.fails:
            raise Unknown("it is stuck")
        del self.vms[vm.name]

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
    assert host.vms.keys() == {ONE}, "one that is stuck keeps no other"
    host.fails = ()
    await fence.check()
    assert host.vms == {}


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
    assert host.vms.keys() == {ONE}, "a VM whose node the scheduler has lost is lost to the site"


async def test_the_scheduler_is_not_asked_while_the_controller_is_in_contact() -> None:
    host = Hosted()
    fence = host.fence()
    for host.now in range(0, 1000, 10):
        fence.lease.heard("test0", host.now - 5)
        await fence.check()
    assert host.asked == 0 and len(host.vms) == 2 and host.kept[-1] == {"test0": 985.0}


async def test_a_full_disk_ends_neither_the_agent_nor_its_vms() -> None:
    host = Hosted()
    fence = host.fence()

    def full(contacts: dict[str, float]) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    fence.keep = full
    fence.lease.heard("test0", 1.0)
    host.now = 50.0
    await fence.check()
    fence.keep = host.kept.append
    await fence.check()
    assert host.kept == [{"test0": 1.0}] and len(host.vms) == 2


def test_contacts_outlive_the_agent_but_not_the_boot(tmp_path: Path) -> None:
    ContactFile(tmp_path / "contacts", "boot-1").write({"test0": 12.5})
    assert ContactFile(tmp_path / "contacts", "boot-1").read() == {"test0": 12.5}
    assert ContactFile(tmp_path / "contacts", "boot-2").read() == {}
    (tmp_path / "contacts.boot-1").write_text("{")
    assert ContactFile(tmp_path / "contacts", "boot-1").read() == {}


# --- what counts as contact ------------------------------------------------------------------------


async def test_contact_is_as_old_as_the_answer_that_the_controller_has_got() -> None:
    """A line that was on its way for long proves nothing about the time at which it arrives."""
    from multiverse.agent.epochs import Epochs

    now = 1000.0
    lease = Lease(LIMIT, {}, lambda: now)
    hypervisor = Hosted()
    server = AgentServer(AgentIdentity("1", "h1", "b", "r"), Epochs(), lambda _: hypervisor, lease=lease)  # type: ignore[arg-type, return-value]
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])

    async def say(line: Line) -> Answer:
        writer.write(encode(line))
        return decode_answer(await reader.readline())

    await say(Line(hello=Hello(release="1", protocol=1, oldest=1, controller="c", site="test0")))
    now = 1003.0
    await say(Line(take=1))
    assert lease.contacts == {"test0": 1000.0}, "the greeting has come, when a VM may be made for the controller"
    now = 1005.0
    await say(Line(ping=1, heard=0))
    assert lease.contacts == {"test0": 1000.0}, "whether the answer arrives is not known yet"
    now = 1010.0
    await say(Line(ping=2, heard=1))
    assert lease.contacts == {"test0": 1005.0}
    now = 1500.0
    await say(Line(ping=3, heard=1))
    assert lease.contacts == {"test0": 1005.0}, "it was sent long ago"
    await say(Line(ping=4))
    assert lease.contacts == {"test0": 1500.0}, "a controller of the release before says no more"
    writer.close()
    listening.close()
    await server.close()


def test_a_host_tells_after_which_time_its_agent_ends_its_vms() -> None:
    from multiverse.agent.epochs import Epochs
    from multiverse.core.model import Host, Size

    host = Host("h1", Size(1, 512))
    server = AgentServer(
        AgentIdentity("1", "h1", "b", "r"), Epochs(), lambda _: None, lease=Lease(LIMIT, {}, lambda: 0.0)
    )  # type: ignore[arg-type, return-value]
    assert server._completed("test0", HypervisorView({"h1": host})).hosts == {"h1": replace(host, self_fence=LIMIT)}
