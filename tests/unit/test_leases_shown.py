"""What operators see of leases: in the list of hosts, in that of leases, and on the command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from multiverse.api import HostView, LeaseView
from multiverse.cli import hosts, render
from multiverse.core.model.host import Drain
from multiverse.core.model.job import PilotState
from multiverse.core.transition import Command
from multiverse.service.hosts import Troubles, host_views, lease_views
from tests.unit.lease_harness import LeaseHarness


def shown(site: LeaseHarness) -> dict[str, HostView]:
    views = host_views(site.rows, site.world, site.clock.time, Troubles({}, {}, {}, {}))
    return {view.name: view for view in views}


def test_a_leased_host_says_by_which_pilot_on_which_node_and_until_when() -> None:
    site = LeaseHarness()
    lease = site.until_idle(seconds=3600.0)
    view = shown(site)[lease.name]
    assert view.lease is not None and (view.state, view.todo) == ("up", "")
    assert (view.lease.pilot, view.lease.node, view.lease.partition) == ("50", "p1", "physical")
    assert view.lease.ends == lease.ends and shown(site)["h1"].lease is None


def test_a_lost_lease_says_what_an_operator_may_confirm() -> None:
    site = LeaseHarness()
    lease, _ = site.until_held()
    site.answering.clear()
    site.ends(state=PilotState.ENDED, reason="NODE_FAIL")
    site.run()
    view = shown(site)[lease.name]
    assert view.state == "lost" and "NODE_FAIL" in view.reason
    assert f"multiverse repair {lease.name} --fenced" in view.todo and "node p1" in view.todo


def test_a_drained_lease_says_that_it_is_given_back_when_its_jobs_have_ended() -> None:

    site = LeaseHarness()
    lease, _ = site.until_held()
    site.run(Command("drain", lease.name, drain=Drain(0.0, "they need it")))
    view = shown(site)[lease.name]
    assert view.state == "draining" and "given back" in view.todo and view.reason == "they need it"


def test_the_list_of_leases_has_those_that_wait_for_their_pilots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.pilot(lease, reason="Resources")
    site.run()
    views = lease_views(site.rows, site.clock.time)
    assert [(one.state, one.pilot, one.node, one.reason) for one in views] == [("waiting", "50", "", "Resources")]

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def leases(self) -> Any:
            return TypeAdapter(list[LeaseView]).dump_python(views, mode="json")

        def hosts(self) -> Any:
            return TypeAdapter(list[HostView]).dump_python(list(shown(site).values()), mode="json")

    monkeypatch.setattr(hosts, "Client", Client)
    monkeypatch.setattr(render.console, "width", 140)
    hosts.leases(json=False)
    said = capsys.readouterr().out
    assert lease.name in said and "waiting" in said and "Resources" in said
    site.granted(lease, site.clock.wall() + 3600.0)
    hosts.hosts(SimpleNamespace(invoked_subcommand=None), json=False)  # type: ignore[arg-type]
    assert f"{lease.name}: leased by pilot 50 on node p1 of partition physical until" in capsys.readouterr().out
