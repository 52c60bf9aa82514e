"""Connections to agents: what is known after each way in which they end, and which controller an agent obeys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from multiverse.agent import protocol
from multiverse.agent.dial import permitted
from multiverse.agent.protocol import AgentCall, Answer, Create, Line, Nothing, decode, encode
from multiverse.agent.self_fence import Contacts, FenceTimer
from multiverse.agent.server import AgentIdentity, AgentServer, Epoch, EpochFile, Epochs
from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Stale, Superseded, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import GuestFile, Identity, Neighbour, NodeBootstrap, User
from multiverse.core.model.vm import TemplateKey, VmCondition, VmRef, VmSpec
from multiverse.system.files import RECORD_SIZE
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.network import NEIGHBOURS, STRANGERS, AgentBehaviour, ProtocolRelease, SimulatedAgent
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings
from tests.contract.agents import TestedController, agents_of, controller

SIZE = Size(1, 256)
HOSTS = ("h0", "h1")
HELLO = protocol.Hello(release="1.1", protocol=protocol.PROTOCOL, oldest=protocol.OLDEST, controller="c", site="test0")


def spec(serial: int = 1, host: str = "h1", kind: CloneKind = CloneKind.FULL) -> VmSpec:
    return VmSpec(f"mvtest0-{serial}", host, "slim", kind, SIZE, f"02:00:5e:00:00:{serial:02x}", token=f"t{serial}")


def virtual(test: Callable[[list[SimulatedAgent]], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test in virtual time, with an agent for each of two hosts."""

    def wrapped() -> None:
        async def main() -> None:
            capacity = Size(8, 8192, 65536)
            hosts = tuple(Host(name, capacity, ABILITIES) for name in HOSTS)
            agents = agents_of(SimulatedWorld(1, WorldSettings(hosts, pair=Pair.SLURM_HOSTS)), 1)
            try:
                await test(agents)
            finally:
                for agent in agents:
                    await agent.stop()

        run(main(), 1)

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


async def unknown(call: Awaitable[object]) -> str:
    """The reason why a call is unknown."""
    with pytest.raises(Unknown) as caught:
        await call
    return str(caught.value)


async def observed(one: TestedController, host: str = "h1") -> dict[str, VmCondition]:
    source = next(source for source in one.hypervisor.sources if source.name == host)
    return {name: vm.condition for name, vm in (await source.observe()).vms.items()}


# --- what a key may ask for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("multiverse agent dial-stdio", ("dial-stdio",)),
        ("/opt/bin/multiverse agent --config /etc/m.toml dial-stdio", ("dial-stdio",)),
        ("multiverse agent receive-image slim 01ab", ("receive-image", "slim", "01ab")),
    ],
)
def test_a_key_with_our_command_may_be_used_for_what_controllers_do(asked: str, words: tuple[str, ...]) -> None:
    assert permitted(asked) == words


@pytest.mark.parametrize("asked", ["", "sh", "dial-stdio -x", "receive-image slim", "receive-image slim 01ab;sh"])
def test_a_key_with_our_command_may_be_used_for_nothing_else(asked: str) -> None:
    with pytest.raises(Refused):
        permitted(asked)


# --- observations ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@virtual
async def test_an_observation_that_cannot_be_read_is_followed_by_no_older_one(agents: list[SimulatedAgent]) -> None:
    """As that of an agent of the next release, with a condition that this one does not know."""
    local, observe = agents[1].local, agents[1].local.observe
    created = asyncio.Event()

    async def observe_a_later_release() -> HypervisorView:
        view = await observe()
        later = {name: replace(vm, condition="melting") for name, vm in view.vms.items()}  # type: ignore[arg-type]
        return replace(view, vms=later) if created.is_set() else view

    local.observe = observe_a_later_release  # type: ignore[method-assign]
    async with controller(agents) as one:
        await one.connected()
        await one.hypervisor.create(spec())
        assert await observed(one) == {spec().name: VmCondition.PARKED}
        created.set()
        for _ in range(3):
            await unknown(observed(one))
        created.clear()
        assert await observed(one) == {spec().name: VmCondition.PARKED}
        assert await observed(one) == {spec().name: VmCondition.PARKED}


# --- connections that end ------------------------------------------------------------------------


@virtual
async def test_a_call_without_an_answer_is_unknown_and_its_vm_is_found_again(agents: list[SimulatedAgent]) -> None:
    async with controller(agents) as one:
        await one.connected()
        creating = asyncio.create_task(one.hypervisor.create(spec()))
        await asyncio.sleep(0.1)
        await agents[1].stop()
        assert "lost" in await unknown(creating)
        assert "no connection to its agent" in await unknown(one.hypervisor.create(spec(2)))
        assert await observed(one, "h0") == {}, "the other host goes on"
        agents[1].start()
        await one.connected()
        await one.hypervisor.destroy(VmRef(spec().name, "h1"), 0)
        await one.hypervisor.create(spec())
        assert await observed(one) == {spec().name: VmCondition.PARKED}


@virtual
async def test_a_creation_that_outlives_its_connection_is_observed(agents: list[SimulatedAgent]) -> None:
    """Otherwise its VM would count as absent, and what it has claimed would be released."""
    local = agents[1].local
    begun = asyncio.Event()

    async def create_slowly(vm: VmSpec) -> tuple[()]:
        begun.set()
        await asyncio.sleep(300.0)
        return ()

    local.create = create_slowly  # type: ignore[method-assign]
    async with controller(agents, "first") as one:
        await one.connected()
        creating = asyncio.create_task(one.hypervisor.create(spec()))
        await begun.wait()
        await one.stop()
        creating.cancel()
        async with controller(agents, "second", one.kept) as two:
            await two.connected()
            assert await observed(two) == {spec().name: VmCondition.CREATING}
            assert next(s for s in two.hypervisor.sources if s.name == "h1").name == "h1"
            await asyncio.sleep(400.0)
            assert await observed(two) == {}


@pytest.mark.parametrize("cut", [5.0, 60.0, 600.0])
def test_a_link_that_is_down_ends_no_call_early_and_no_call_late(cut: float) -> None:
    """After a short cut the answers arrive. After a long one the calls are unknown, and the connection is made anew."""

    @virtual
    async def check(agents: list[SimulatedAgent]) -> None:
        async with controller(agents) as one:
            await one.connected()
            agents[1].link.cut()
            asking = asyncio.create_task(one.hypervisor.create(spec()))
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(cut)
            agents[1].link.mend()
            if cut < protocol.SILENCE:
                assert await asking
            else:
                assert "has not answered" in await unknown(asking)
                assert asyncio.get_running_loop().time() - began <= cut + protocol.SILENCE
            await one.connected()
            assert await observed(one, "h0") == {}
            await one.hypervisor.create(spec())
            assert await observed(one) == {spec().name: VmCondition.PARKED}

    check()


@virtual
async def test_an_agent_that_hangs_is_given_up(agents: list[SimulatedAgent]) -> None:
    async with controller(agents) as one:
        await one.connected()
        agents[1].link.cut()
        assert f"{protocol.SILENCE:g} s" in await unknown(one.connections[1].call(protocol.Observe()))
        assert one.connections[1].reason and one.connections[0].reason == ""


@virtual
async def test_a_cancelled_call_is_cancelled_at_the_agent(agents: list[SimulatedAgent]) -> None:
    ended = asyncio.Event()

    async def observe() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            ended.set()

    agents[1].local.observe = observe  # type: ignore[assignment, method-assign]
    async with controller(agents) as one:
        await one.connected()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await one.hypervisor.sources[1].observe()
        async with asyncio.timeout(1.0):
            await ended.wait()


@virtual
async def test_equal_observations_are_one_object(agents: list[SimulatedAgent]) -> None:
    """The planner then knows at once that nothing has changed, and nothing is sent twice."""
    async with controller(agents) as one:
        await one.connected()
        source = one.hypervisor.sources[1]
        first, second = await source.observe(), await source.observe()
        assert first is second
        await one.hypervisor.create(spec())
        assert (await source.observe()).vms.keys() == {spec().name}
        # The answer to a call that nobody waits for counts as the last one, too.
        asking = asyncio.create_task(source.observe())
        await asyncio.sleep(0)
        asking.cancel()
        await one.hypervisor.destroy(VmRef(spec().name, "h1"), 0)
        assert (await source.observe()).vms == {} and (await source.observe()).vms == {}


@virtual
async def test_the_errors_of_a_host_keep_their_meaning(agents: list[SimulatedAgent]) -> None:
    async with controller(agents) as one:
        await one.connected()
        for kind in (Refused, Exhausted, Gone, Stale, Unknown, Broken):

            async def fail(vm: VmSpec, kind: type[MultiverseError] = kind) -> None:
                raise kind("the reason", hint="the next step")

            agents[1].local.create = fail  # type: ignore[assignment, method-assign]
            with pytest.raises(kind) as caught:
                await one.hypervisor.create(spec())
            assert (caught.value.message, caught.value.hint) == ("the reason", "the next step")

        async def defect(vm: VmSpec) -> None:
            raise ZeroDivisionError("a defect")

        agents[1].local.create = defect  # type: ignore[assignment, method-assign]
        assert "a defect" in await unknown(one.hypervisor.create(spec()))
        with pytest.raises(Gone):
            await one.hypervisor.create(spec(host="elsewhere"))


@virtual
async def test_a_host_that_ends_says_so_with_its_vms_and_takes_none(agents: list[SimulatedAgent]) -> None:
    async with controller(agents) as one:
        await one.connected()
        assert agents[1].running is not None
        source, name = one.hypervisor.sources[1], agents[1].local.name
        assert (await source.observe()).hosts[name].refuses == ""
        agents[1].running.refuse("the lease ends", 1700000000.5)
        shown = (await source.observe()).hosts[name]
        assert (shown.refuses, shown.holds_until) == ("the lease ends", 1700000000.5)
        agents[1].running.refuse("the lease ends")
        assert (await source.observe()).hosts[name].holds_until == 0.0
        with pytest.raises(Refused):
            await one.hypervisor.create(spec())


# --- who is obeyed -------------------------------------------------------------------------------


@virtual
async def test_an_older_controller_is_refused_from_the_moment_that_a_newer_one_has_connected(
    agents: list[SimulatedAgent],
) -> None:
    async with controller(agents, "first") as old:
        await old.connected()
        async with controller(agents, "second") as new:
            await new.connected()
            assert new.kept == old.kept + 1
            # It must not conclude that what it has asked for is refused for good.
            assert "another controller" in await unknown(old.hypervisor.create(spec()))
            await new.hypervisor.create(spec())
            await agents[1].stop()
            agents[1].start()
            await asyncio.sleep(1.0)
            await new.connected()
            assert await observed(new) == {spec().name: VmCondition.PARKED}


@virtual
async def test_a_controller_ends_once_a_later_one_commands_a_host(agents: list[SimulatedAgent]) -> None:
    """slurmctld and the fence command obey it still, whatever the agents do."""
    async with controller(agents, "first") as old:
        await old.connected()
        agents[0].link.cut()
        async with controller(agents, "second") as new:
            await new.connected("h1")
            with pytest.raises(Superseded, match=r"runs on machine-second: it has commanded h1 for \d+ s"):
                await old.ended()
            await asyncio.sleep(200.0)
            await new.connected("h1")
            assert await observed(new) == {}, "the later one goes on"


@virtual
async def test_an_agent_that_starts_again_has_not_forgotten_whom_it_obeys(agents: list[SimulatedAgent]) -> None:
    async with controller(agents, "first") as old:
        await old.connected()
        async with controller(agents, "second") as new:
            await new.connected()
        assert "another controller" in await unknown(old.hypervisor.create(spec()))
        await agents[1].stop()
        agents[1].start()
        await asyncio.sleep(120.0)
        assert "another controller" in old.connections[1].reason, "a later one that is gone ends no other"


@virtual
async def test_of_two_controllers_with_the_same_epoch_one_ends(agents: list[SimulatedAgent]) -> None:
    """As of two that start at the same time with copies of a database, and reach different hosts first."""
    async with controller(agents, "a", wait=0.1) as one, controller(agents[1:], "b") as two:
        one.hypervisor.keep(["h0"])
        await one.connected("h0")
        await two.connected("h1")
        assert one.kept == two.kept == 1
        one.hypervisor.keep(["h0", "h1"])
        with pytest.raises(Superseded):
            await one.ended()
        await two.connected("h1")


@virtual
async def test_a_controller_whose_database_was_restored_takes_a_higher_epoch(agents: list[SimulatedAgent]) -> None:
    for agent in agents:
        agent.epochs.take("test0", Epoch(41, "lost"))
    async with controller(agents, "restored", kept=3) as one:
        await one.connected()
        assert one.kept == 42


@virtual
async def test_a_host_that_is_away_delays_the_epoch_and_does_not_prevent_it(agents: list[SimulatedAgent]) -> None:
    await agents[1].stop()
    agents[1].epochs.take("test0", Epoch(9, "another"))
    async with controller(agents, "first", kept=4) as one:
        await one.connected("h0")
        assert one.kept == 5
        agents[1].start()
        await asyncio.sleep(60.0)
        assert "another controller" in one.connections[1].reason and "restart this one" in one.connections[1].reason
        assert await observed(one, "h0") == {}
    async with controller(agents, "again", one.kept) as restarted:
        await restarted.connected()
        assert restarted.kept == 10


@virtual
async def test_of_two_controllers_with_one_epoch_one_is_refused(agents: list[SimulatedAgent]) -> None:
    agents[1].epochs.take("test0", Epoch(1, "other"))
    agents[1].epochs.check("test0", Epoch(1, "other"))
    with pytest.raises(Refused):
        agents[1].epochs.take("test0", Epoch(1, "first"))
    agents[1].epochs.take("another-site", Epoch(1, "first"))


def test_epochs_outlive_the_agent(tmp_path: Path) -> None:
    EpochFile(tmp_path / "epochs").take("site", Epoch(3, "a"))
    again = EpochFile(tmp_path / "epochs")
    assert again.highest("site") == Epoch(3, "a") and again.highest("other") == Epoch()
    with pytest.raises(Refused):
        again.take("site", Epoch(2, "b"))


@pytest.mark.parametrize("text", ["", "[]", '{"site": {"number": "x"}}', '{"site": 1}'])
def test_epochs_that_cannot_be_read_are_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "epochs").write_text(text)
    with pytest.raises(Broken, match="epochs"):
        EpochFile(tmp_path / "epochs")


def test_an_epoch_that_cannot_be_kept_is_not_taken(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "epochs")
    (tmp_path / "epochs").unlink()
    with pytest.raises(Broken):
        epochs.take("site", Epoch(3, "a"))
    assert epochs.highest("site") == Epoch()


def test_epochs_of_too_many_sites_are_an_error_that_keeps_the_others(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "epochs")
    epochs.take("site", Epoch(3, "a"))
    with pytest.raises(Broken):
        epochs.take("other", Epoch(1, "b" * RECORD_SIZE))
    assert EpochFile(tmp_path / "epochs").highest("site") == epochs.highest("site") == Epoch(3, "a")


def test_an_agent_whose_directory_cannot_be_used_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="epochs"):
        EpochFile(tmp_path / "gone" / "epochs")


# --- releases ------------------------------------------------------------------------------------


@virtual
async def test_another_release_is_told_why_it_is_refused(agents: list[SimulatedAgent]) -> None:
    reader, writer = await _raw(agents[1])
    hello = protocol.Hello(release="9.0", protocol=99, oldest=98, controller="c", site="test0")
    writer.write(encode(Line(hello=hello)))
    refused = decode(Answer, await reader.readuntil()).refused
    assert refused is not None and refused.kind == "refused" and "9.0" in refused.message and refused.hint
    assert await reader.read() == b""


@pytest.mark.parametrize("release", [*NEIGHBOURS, *STRANGERS], ids=lambda release: str(release.name))
def test_only_neighbouring_releases_work_together(release: ProtocolRelease) -> None:
    @virtual
    async def check(agents: list[SimulatedAgent]) -> None:
        await agents[1].replace(release)
        async with controller(agents) as one:
            if release in NEIGHBOURS:
                await one.connected()
                await one.hypervisor.create(spec())
                assert await observed(one) == {spec().name: VmCondition.PARKED}
            else:
                await one.connected("h0")
                await asyncio.sleep(5.0)
                reason = one.connections[1].reason
                assert release.name in reason and "1.0" in reason and "only neighbouring releases" in reason

    check()


@virtual
async def test_an_answer_that_comes_twice_is_the_answer_to_one_call(agents: list[SimulatedAgent]) -> None:
    agents[1].behaviour = AgentBehaviour(twice=1.0)
    async with controller(agents) as one:
        await one.connected()
        for serial in range(1, 6):
            await one.hypervisor.create(spec(serial))
            assert len(await observed(one)) == serial


@virtual
async def test_a_ping_of_an_older_controller_is_refused_and_is_no_contact(agents: list[SimulatedAgent]) -> None:
    """Otherwise the agent would not end VMs that the newer one takes for ended."""
    timer = FenceTimer(100.0, Contacts(), asyncio.get_running_loop().time)
    server = AgentServer(
        AgentIdentity("1.0", "h1", "boot", "run"), Epochs(), lambda _: agents[1].local, fence_timer=timer
    )
    agents[1].running = server
    old, new = await _raw(agents[1]), await _raw(agents[1])
    await _greeted(*old)
    await asyncio.sleep(10.0)
    await _greeted(*new, epoch=2)
    contacts = dict(timer.contacts.controllers)
    await asyncio.sleep(10.0)
    old[1].write(encode(Line(ping=1)))
    refused = decode(Answer, await old[0].readuntil()).refused
    assert refused is not None and "another controller" in refused.message
    assert await old[0].read() == b"" and timer.contacts.controllers == contacts


@virtual
async def test_what_a_neighbouring_release_adds_is_ignored_and_what_it_lacks_has_its_default(
    agents: list[SimulatedAgent],
) -> None:
    reader, writer = await _raw(agents[1])
    await _greeted(reader, writer)
    vm = {"name": "mvtest0-1", "host": "h1", "image": "slim", "kind": "full", "size": {"cpus": 1, "memory": 256}}
    call = {"name": "create", "vm": {**vm, "mac": "02:00:5e:00:00:01", "colour": "blue"}, "urgent": True}
    writer.write(json.dumps({"id": 1, "call": call, "trace": "x"}).encode() + b"\n")
    assert decode(Answer, await reader.readuntil()).result is not None
    writer.write(b'{"id": 2, "call": {"name": "observe"}}\n')
    answer = decode(Answer, await reader.readuntil())
    assert answer.result is not None and list(answer.result["vms"]) == ["mvtest0-1"]


@virtual
async def test_a_call_that_comes_twice_is_done_once(agents: list[SimulatedAgent]) -> None:
    calls: list[VmSpec] = []

    async def create(vm: VmSpec) -> tuple[()]:
        calls.append(vm)
        return ()

    agents[1].local.create = create  # type: ignore[method-assign]
    reader, writer = await _raw(agents[1])
    await _greeted(reader, writer)
    for number in (1, 1, 2, 1):
        writer.write(encode(Line(id=number, call=Create(vm=spec(number)))))
    await asyncio.sleep(1.0)
    assert calls == [spec(1), spec(2)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"secret",
        b'{"id": "secret"}',
        b'{"id": 1, "call": {"name": "create", "vm": "secret"}}',
        b"\xff",
    ],
)
def test_what_is_no_line_is_refused_without_its_content(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode(Line, data)
    assert "protocol" in str(caught.value) and "secret" not in str(caught.value)


@virtual
async def test_nonsense_ends_the_connection_and_not_the_agent(agents: list[SimulatedAgent]) -> None:
    for data in (b"nonsense\n", encode(Line(ping=1)), b'{"id": 1, "call": {"name": "explode"}}\n', b"x" * 100):
        reader, writer = await _raw(agents[1])
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == b""
    async with controller(agents) as one:
        await one.connected()


@virtual
async def test_a_silent_controller_is_given_up(agents: list[SimulatedAgent]) -> None:
    reader, writer = await _raw(agents[1])
    await _greeted(reader, writer)
    async with asyncio.timeout(4 * protocol.SILENCE):
        assert await reader.read() == b""


@pytest.mark.parametrize("lines", [[], [Line(hello=HELLO)], [Line(hello=HELLO), Line(take=1)]])
def test_an_agent_that_ends_ends_its_connections_without_a_complaint(
    lines: list[Line], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose controller has not greeted it yet, or waits for other agents before it takes its epoch."""

    async def main() -> None:
        who = AgentIdentity("1.0", "h1", "boot", "run")
        server = AgentServer(who, Epochs(), lambda _: None)  # type: ignore[arg-type, return-value]
        listening = await asyncio.start_unix_server(server.serve, tmp_path / "agent.sock")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "agent.sock")
        for line in lines:
            writer.write(encode(line))
            await reader.readuntil()
        await asyncio.sleep(0.05)  # the agent has accepted it
        listening.close()
        await server.close()

    asyncio.run(main())
    assert [one for one in caplog.records if one.name == "asyncio"] == []


@virtual
async def test_the_agent_of_another_host_is_refused(agents: list[SimulatedAgent]) -> None:
    async with controller([agents[0]]) as one:
        one.connections[0].host = "elsewhere"
        await asyncio.sleep(10.0)
        assert "says that it is h0" in one.connections[0].reason


def test_a_line_keeps_what_it_says() -> None:
    user = User("ada", 1000, 1000, "/home/ada", "/bin/sh", (("ada", 1000),))
    bootstrap = NodeBootstrap(files=(GuestFile("/etc/munge.key", bytes(range(256)), 0o400),))
    identity = Identity("mv-1", "02:00:5e:00:00:01", "10.0.0.2/16", "10.0.0.1", "0" * 32, (user,), bootstrap=bootstrap)
    for call in (
        protocol.Create(vm=spec(kind=CloneKind.INSTANT)),
        protocol.Start(vm=VmRef("mv-1", "h", "t"), size=SIZE, identity=identity),
        protocol.Destroy(vm=VmRef("mv-1", "h", "t"), grace=1.5),
        protocol.AddUser(vm=VmRef("mv-1"), user=user),
        protocol.Connect(vm=VmRef("mv-1"), neighbours=(Neighbour("10.0.0.3", "02:00:5e:00:00:02", "192.0.2.1"),)),
        protocol.BuildTemplate(template=TemplateKey("h", "slim", SIZE, "physics")),
        protocol.DeleteTemplate(template=TemplateKey("h", "slim", SIZE)),
        protocol.Measure(),
        protocol.Examine(),
    ):
        line = Line(id=1, call=call)
        data = encode(line)
        assert data.endswith(b"\n") and data.count(b"\n") == 1
        assert decode(Line, data) == line


@virtual
async def test_a_host_without_an_vxlan_refuses_to_connect_vms(agents: list[SimulatedAgent]) -> None:
    async with controller(agents) as one:
        await one.connected()
        await one.hypervisor.create(spec())
        with pytest.raises(Refused, match="has no VXLAN"):
            await one.hypervisor.connect(VmRef("mvtest0-1", "h1"), ())


class Dance(AgentCall[Nothing]):
    """A made-up call of the next release."""

    name: Literal["dance"] = "dance"
    since = protocol.PROTOCOL + 1


@virtual
async def test_an_agent_of_the_release_before_is_not_asked_what_it_does_not_know(agents: list[SimulatedAgent]) -> None:
    """It would end the connection, with all calls that run on it."""
    async with controller(agents) as one:
        await one.connected()
        with pytest.raises(Refused, match="does not know dance"):
            await one.connections[1].call(Dance())
        assert one.connections[1].welcome is not None and await observed(one) == {}


def test_an_error_of_a_later_release_says_nothing_about_what_was_done() -> None:
    assert isinstance(protocol.CallFailure(kind="overdue", message="m").error(), Unknown)


async def _raw(agent: SimulatedAgent) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    stream = await agent.open()
    return stream.reader, stream.writer


async def _greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, epoch: int = 1) -> None:
    writer.write(encode(Line(hello=HELLO)))
    assert decode(Answer, await reader.readuntil()).welcome is not None
    writer.write(encode(Line(take=epoch)))
    assert decode(Answer, await reader.readuntil()) == Answer(taken=epoch)
