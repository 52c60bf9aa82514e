"""How commands of operators come to the controller, and how its connections and observers follow them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fastapi.testclient import TestClient

from multiverse.agent.connection import CommandTransport, UnixTransport, command_of
from multiverse.bundles.qemu.platform import connect_agents, declared, transport_to
from multiverse.cli import render
from multiverse.cli.arguments import unix_time
from multiverse.cli.commands import build
from multiverse.client import Client
from multiverse.config import Settings, on_machine, parse
from multiverse.controller.loop import Controller
from multiverse.core.capacity.sizes import largest_on
from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Drain, Host, HostState, KnownHost
from multiverse.core.model.job import LeasedHost
from multiverse.core.transition import Command
from multiverse.ports.hypervisor import NOT_LEASED
from multiverse.store import Store
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit.planner_harness import ManualClock, context_of
from tests.unit.rows import IMAGES
from tests.unit.test_api import ControllerAtRest, serve
from tests.unit.test_controller import OneHost, Ports, Submission

SETTINGS = parse({"host": {"name": "n1"}, "hosts": [{"nodes": "n[1-3]"}]}, "m")

# --- connections -----------------------------------------------------------------------------------


def test_the_own_host_is_reached_by_its_socket_and_others_by_the_command() -> None:
    here = on_machine(SETTINGS, "n1")
    assert isinstance(transport_to("n1", here), UnixTransport)
    there = transport_to("n2", here)
    assert isinstance(there, CommandTransport)
    words = there._command
    assert words[0] == "ssh" and words[-5:] == ("--", "n2", "multiverse", "agent", "dial-stdio")
    assert "-oBatchMode=yes" in words and "-oControlMaster=no" in words


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh is not installed")
def test_ssh_gives_up_a_host_that_does_not_answer_any_more() -> None:
    """Nothing else does for a copy of an image: TCP itself waits for hours."""
    ssh, *words = command_of(SETTINGS.agent.connect, "n2")
    shown = subprocess.run([ssh, "-F", "none", "-G", *words], capture_output=True, text=True, check=True).stdout
    options = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)
    assert 0 < int(options["serveraliveinterval"]) * int(options["serveralivecountmax"]) <= 60


def test_the_hosts_of_the_settings_and_of_the_store_are_connected_but_those_that_were_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", ManualClock())
    with store.transaction() as tx:
        tx.keep_host(KnownHost("n2", "n2", HostState.REMOVED, id=1))
        tx.keep_host(KnownHost("n9", "n9", id=2))
    assert [one.name for one in connect_agents(context_of(SETTINGS, store)).sources] == ["n1", "n3", "n9"]
    alone = Store(tmp_path / "alone", ManualClock())
    assert [one.name for one in connect_agents(context_of(Settings(), alone)).sources] == ["localhost"]


class Members(Ports):
    """A scheduler and a hypervisor whose hosts can be changed."""

    def __init__(self) -> None:
        super().__init__(OneHost("h1"), OneHost("h2"))
        self.membership: Any = self
        self.kept: list[list[str]] = []
        self.known: dict[str, OneHost] = {}

    def keep(self, hosts: Collection[str], leased: Mapping[str, LeasedHost] = NOT_LEASED) -> None:
        self.kept.append(sorted(hosts))
        self.known |= {one.name: one for one in self.sources}
        self.sources: Sequence[OneHost] = [self.known.get(name) or OneHost(name) for name in hosts]

    def declared(self, host: str) -> Host | None:
        cpus = {"h1": 4, "h2": 16}.get(host)
        return cpus and Host(host, Size(cpus, 4096 * cpus, 1 << 20), IMAGES["slim"])


def test_observers_follow_the_hosts_that_are_added_and_removed_and_a_refusal_reaches_who_asked() -> None:
    async def main() -> None:
        ports: Any = Members()
        clock = VirtualClock()
        store = Store(":memory:", clock, site="test0")
        controller = Controller(store, ports, ports, clock, Settings(), Random(1))
        task = asyncio.create_task(controller.run())
        await asyncio.sleep(5.0)
        assert sorted(controller.sources) == ["h1", "h2"]
        await controller.command(Command("add", "h3"))
        await asyncio.sleep(5.0)
        observed = controller.sources["h3"].observations
        assert observed >= 2 and store.rows().hosts["h3"].value is not None
        await controller.command(Command("remove", "h3"))
        await asyncio.sleep(5.0)
        assert sorted(controller.sources) == ["h1", "h2"] and ports.kept[-1] == ["h1", "h2"]
        with pytest.raises(Refused, match="there is no host h3"):
            await controller.command(Command("drain", "h3", drain=Drain()))
        await controller.command(Command("add", "h3"))
        await asyncio.sleep(5.0)
        assert controller.sources["h3"].latest is not None and not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main(), 1)


def test_hosts_that_never_answered_count_as_the_settings_declare_them_and_not_if_nothing_does() -> None:
    """What is refused at submission, and the number of nodes that Slurm may need, depend on it."""

    async def main() -> None:
        ports: Any = Members()
        submission = ports.submission = Submission()
        _, away = ports.sources
        away.away = True
        clock = VirtualClock()
        controller = Controller(Store(":memory:", clock, site="test0"), ports, ports, clock, Settings(), Random(1))
        task = asyncio.create_task(controller.run())
        await asyncio.sleep(60.0)
        largest = largest_on(ports.declared("h2"), "slim", controller.policy)
        assert submission.published[-1].allow(None, None, 1, largest) and controller.claimable_cpus() == 4 + 16
        calls = submission.calls
        new = OneHost("h9", 1 << 20)
        new.away = True
        ports.known["h9"] = new
        await controller.command(Command("add", "h9"))
        await asyncio.sleep(60.0)
        assert sorted(controller.known_hosts()) == ["h1", "h2"] and submission.calls == calls, "h9 withholds nothing"
        new.away = away.away = False
        await asyncio.sleep(60.0)
        assert controller.claimable_cpus() == 4 + 4 + 4, "as they were observed"
        assert submission.published[-1].allow(None, None, 1, largest_on(new.host, "slim", controller.policy))
        await controller.command(Command("remove", "h9"))
        assert controller.claimable_cpus() == 4 + 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main(), 1)


def test_a_host_is_declared_as_its_class_and_the_defaults_say() -> None:
    here = on_machine(parse({"host": {"cpu_overcommit": 2.0}, "hosts": [
        {"nodes": "n[1-3]", "cores": 8, "memory": 9000},
        {"nodes": "fat", "cores": 64, "memory": 64000, "cpu_overcommit": 1.0, "overcommit": 1.5},
    ]}, "m"), "fat")  # fmt: skip
    one, fat = declared(here, "n2"), declared(here, "fat")
    assert one and fat and declared(here, "n4") is None and declared(here, "head") is None
    assert (one.capacity.cpus, one.capacity.memory, one.overcommit.cpus, one.overcommit.memory) == (8, 9000, 2.0, 1.0)
    assert (fat.capacity.cpus, fat.overcommit.cpus, fat.overcommit.memory) == (64, 1.0, 1.5)
    agents = connect_agents(context_of(here, Store(":memory:", ManualClock(), site="test0")))
    assert agents.declared("n2") == one and agents.declared("n4") is None


# --- the API ---------------------------------------------------------------------------------------


class Refusing(ControllerAtRest):
    def command(self, command: Command) -> asyncio.Future[None]:
        if command.host == "h2":
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Refused("host h2 still has 1 VMs", hint="drain it"))
            return future
        return super().command(command)


def test_a_change_to_hosts_is_made_for_each_of_a_node_set_and_says_which_were_refused() -> None:
    controller = Refusing()
    client = TestClient(serve(controller))
    answer = client.post("/hosts/drain", json={"hosts": "h[1-2]", "reason": "a fan", "begins": 12.0})
    assert answer.json() == {"done": ["h1"], "refused": {"h2": "host h2 still has 1 VMs (drain it)"}}
    assert controller.commands == [Command("drain", "h1", drain=Drain(12.0, "a fan"))]
    assert client.post("/hosts/add", json={"hosts": "n7"}).json() == {"done": ["n7"], "refused": {}}
    assert controller.commands[-1] == Command("add", "n7")
    now = ManualClock().wall()
    client.post("/hosts/drain", json={"hosts": "h1"})
    assert controller.commands[-1].drain == Drain(now, "")


@pytest.mark.parametrize("hosts", ["h[1-", "", "-oProxyCommand=x", "a b"])
def test_what_is_no_node_set_or_has_other_names_is_refused(hosts: str) -> None:
    controller = ControllerAtRest()
    assert TestClient(serve(controller)).post("/hosts/add", json={"hosts": hosts}).status_code in (400, 422)
    assert controller.commands == []
    assert TestClient(serve(controller)).post("/hosts/format", json={"hosts": "h1"}).status_code == 422


# --- the command line ------------------------------------------------------------------------------


def asked(*words: str, refused: dict[str, str] | None = None) -> tuple[str, dict[str, Any], int]:
    """What a command asks the daemon for, and its exit status."""
    found: dict[str, Any] = {}

    def answer(_client: Client, method: str, path: str, **more: Any) -> Any:
        found.update(path=path, **more)
        return SimpleNamespace(json=lambda: {"done": ["n1"], "refused": refused or {}})

    with mock.patch.object(Client, "_ask", answer), mock.patch.object(render.errors, "print"):
        try:
            status = build()(["hosts", *words], standalone_mode=False) or 0
        except SystemExit as ended:
            status = ended.code
    return found["path"], found["json"], int(status)


def test_the_commands_for_hosts_take_names_and_node_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("add", "n40") == ("/hosts/add", {"hosts": "n40"}, 0)
    assert "multiverse status what Slurm lacks" in " ".join(capsys.readouterr().out.split())
    assert asked("remove", "n[1-2]", "n9")[:2] == ("/hosts/remove", {"hosts": "n[1-2],n9"})
    path, body, _ = asked("drain", "n1", "--reason", "a fan")
    told = '{"hosts": "n1", "reason": "a fan", "begins": null, "move": false, "save": false}'
    assert (path, json.dumps(body)) == ("/hosts/drain", told)
    assert asked("drain", "n1", "--move")[1]["move"] is True
    moment = datetime(2026, 12, 24, 18, tzinfo=UTC)
    assert asked("drain", "n1", "--from", moment.isoformat())[1]["begins"] == moment.timestamp()


def test_a_refusal_is_shown_and_is_the_exit_status() -> None:
    assert asked("remove", "n1", refused={"n2": "host n2 still has 1 VMs"})[2] == 1


NOW = datetime(2026, 11, 23, 10, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("now+2", datetime(2026, 11, 23, 10, 0, 2, tzinfo=UTC)),
        ("now+90", datetime(2026, 11, 23, 10, 1, 30, tzinfo=UTC)),
        ("now+2hours", datetime(2026, 11, 23, 12, 0, tzinfo=UTC)),
        ("NOW+1week", datetime(2026, 11, 30, 10, 0, tzinfo=UTC)),
        ("18:30", datetime(2026, 11, 23, 18, 30, tzinfo=UTC)),
        ("09:00", datetime(2026, 11, 24, 9, 0, tzinfo=UTC)),
        ("noon", datetime(2026, 11, 23, 12, 0, tzinfo=UTC)),
        ("midnight", datetime(2026, 11, 24, 0, 0, tzinfo=UTC)),
        ("tomorrow", datetime(2026, 11, 24, 10, 0, tzinfo=UTC)),
        ("2026-12-24T18:00:00+00:00", datetime(2026, 12, 24, 18, 0, tzinfo=UTC)),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, moment: datetime) -> None:
    assert unix_time(text, NOW) == moment.timestamp()


@pytest.mark.parametrize("text", ["", "later", "now+", "now+2fortnights", "25:00", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is no time"):
        unix_time(text, NOW)
