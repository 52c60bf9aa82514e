"""Which hosts have room for a VM now, and which of them comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.explanation import compatible_hosts
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Drain, Host, HypervisorView, KnownHost
from multiverse.core.model.job import SchedulerView
from multiverse.core.model.usage import Load
from multiverse.core.planner import plan
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, state, world_of

NOW = 1000.0


def context(**hosts: dict[str, Any]) -> Context:
    """After a pass that has seen these hosts, of 8 CPUs and 8 GiB."""
    size = Size(8, 8192, 1 << 16)
    made = {
        name: Host(name, **{"capacity": size, "abilities": frozenset({"instant"}), "images": IMAGES, **values})
        for name, values in hosts.items()
    }
    world, here = world_of(SchedulerView(), HypervisorView(made), NOW), state(now=NOW)
    plan(here, world, [], NOW, POLICY)
    return Context(here, world, POLICY, sight=here.free.hosts)


def names(found: Context, *size: int, **wanted: Any) -> list[str]:
    return [one.name for one in compatible_hosts(found, Size(*(size or (2, 1024))), **wanted)]


def test_the_policys_choice_comes_first_and_then_the_least_used() -> None:
    loads = [Load(6.0, 100), Load(0.0, 100), Load(3.0, 100)]
    here = context(
        h1={"load": loads[0], "capacity": Size(16, 1 << 16, 1 << 16)}, h2={"load": loads[1]}, h3={"load": loads[2]}
    )
    assert names(here) == ["h1", "h2", "h3"], "worst-fit takes the host with the most free CPUs"
    assert names(here, policy="least-loaded") == ["h2", "h1", "h3"]
    assert names(here, policy="best-fit") == ["h2", "h1", "h3"]
    first, *_ = compatible_hosts(here, Size(2, 1024), policy="least-loaded")
    assert first.holds == 4 and first.claim.cpus == 2 and first.claim.memory > 1024 and first.free.cpus == 8
    assert first.use == pytest.approx(100 / 8192)


def test_a_host_without_room_image_or_kind_is_not_compatible() -> None:
    here = context(
        h1={"capacity": Size(1, 8192, 1 << 16)},
        h2={"capacity": Size(8, 1024, 1 << 16)},
        h3={"images": {}},
        h4={"abilities": frozenset({"full"})},
        h5={},
    )
    assert names(here) == ["h5"]
    assert names(here, kind=CloneKind.FULL) == ["h4"]
    assert names(here, image="none such") == [] and names(here, 9, 100) == []


def test_a_drained_host_is_not_compatible() -> None:
    here = context(h1={}, h2={})
    known = here.state.hosts["h1"]
    assert isinstance(known, KnownHost)
    here.state.know_host(replace(known, drain=Drain(0.0, "repair")))
    plan(here.state, here.world, [], NOW + 1, POLICY)
    assert names(here) == ["h2"]


def test_asking_takes_nothing() -> None:
    here = context(h1={}, h2={})
    first = names(here)
    before = {name: list(free) for name, free in here.state.free.free.items()}
    assert before.keys() == {"h1", "h2"}
    assert names(here) == first
    assert {name: list(free) for name, free in here.state.free.free.items()} == before
    assert plan(here.state, here.world, [], NOW + 1, POLICY) == []


def test_a_policy_that_is_not_built_in_is_refused() -> None:
    with pytest.raises(Refused, match="fast is no placement policy"):
        names(context(h1={}), policy="fast")
