"""The contract of `ports.Hypervisor` when replies are lost, and when calls are repeated, late, or made at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest
from tests.contract.agents import agents_of, controller
from tests.contract.test_hypervisor_contract import PAIRS, Check, Harness, Simulated

from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import TemplateCondition, VmCondition
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import Pair


async def cut(call: Awaitable[object], after: float) -> None:
    """Make a call and cancel it: its reply is lost, and it may have been executed."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def at_once(*calls: Awaitable[object]) -> list[object]:
    """Make calls at the same time and return their results. Only errors of our own may be raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    wrong = [r for r in results if isinstance(r, BaseException) and not isinstance(r, MultiverseError)]
    assert not wrong, wrong
    return list(results)


async def template(h: Harness) -> TemplateCondition | None:
    seen = (await h.observe()).templates.get(h.template)
    return None if seen is None else seen.condition


async def building(h: Harness) -> asyncio.Task[object]:
    """A template that is being built; returns the call that builds it."""
    await h.templates.delete_template(h.template)
    making = asyncio.ensure_future(h.templates.build_template(h.template))
    for _ in range(500):
        if await template(h) is TemplateCondition.BUILDING:
            return making
        await asyncio.sleep(0.02)
    raise AssertionError("the build never began")


# --- lost replies ----------------------------------------------------------------------------------


async def a_start_whose_reply_was_lost_is_repeated(h: Harness) -> None:
    for after in (0.0, 0.01, 0.05, 0.2):
        spec = await h.created()
        await cut(h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec)), after)
        assert await h.condition(spec.name) in (VmCondition.PARKED, VmCondition.STARTING, VmCondition.RUNNING)
        await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
        assert await h.condition(spec.name) is VmCondition.RUNNING
        await h.hypervisor.destroy(h.ref(spec.name), 0)


async def a_destroy_whose_reply_was_lost_is_repeated(h: Harness) -> None:
    for after in (0.0, 0.005, 0.02, 0.1):
        spec = await h.created()
        await cut(h.hypervisor.destroy(h.ref(spec.name), 0), after)
        await h.hypervisor.destroy(h.ref(spec.name), 0)
        assert not h.remains(spec.name) and await h.condition(spec.name) is None


async def building_and_deleting_a_template_is_repeated_after_lost_replies(h: Harness) -> None:
    await h.templates.delete_template(h.template)
    await cut(h.templates.build_template(h.template), 0.3)
    await h.templates.build_template(h.template)
    assert await template(h) is TemplateCondition.READY
    await cut(h.templates.delete_template(h.template), 0.002)
    await h.templates.build_template(h.template)  # the opposite call undoes what may have been done
    assert await template(h) is TemplateCondition.READY
    await cut(h.templates.delete_template(h.template), 0.002)
    await h.templates.delete_template(h.template)
    assert await template(h) is None


# --- repeats ---------------------------------------------------------------------------------------


async def two_equal_calls_at_once_are_like_one(h: Harness) -> None:
    if h.hypervisor.templates is not None:
        built = await at_once(*(h.templates.build_template(h.template) for _ in range(2)))
        assert not [result for result in built if isinstance(result, Exception)]
        assert await template(h) is TemplateCondition.READY
    spec = h.spec()
    created = await at_once(*(h.hypervisor.create(spec) for _ in range(2)))
    assert not [result for result in created if isinstance(result, Exception)]
    assert await h.condition(spec.name) is VmCondition.PARKED
    started = await at_once(*(h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec)) for _ in range(2)))
    assert not [result for result in started if isinstance(result, Exception)]
    assert await h.condition(spec.name) is VmCondition.RUNNING
    assert await at_once(*(h.hypervisor.destroy(h.ref(spec.name), 1.0) for _ in range(2))) == [None, None]
    assert not h.remains(spec.name) and await h.condition(spec.name) is None


async def a_repeated_start_with_another_size_changes_nothing(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    for size in (replace(spec.size, cpus=spec.size.cpus + 1), spec.size):
        await h.hypervisor.start(h.ref(spec.name), size, h.identity(spec))
        assert await h.condition(spec.name) is VmCondition.RUNNING and h.cpus(spec.name) == spec.size.cpus


# --- stale calls -----------------------------------------------------------------------------------


async def a_destroyed_vm_is_gone(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.destroy(h.ref(spec.name), 0)
    with pytest.raises(Gone):
        await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    assert not h.remains(spec.name)


async def a_vm_does_not_become_another(h: Harness) -> None:
    spec, other = await h.created(), h.spec()
    for _ in range(2):  # parked, and then running
        with pytest.raises(Refused):
            await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(other))
        with pytest.raises(Refused):
            bigger = Size(spec.size.cpus, 2 * spec.size.memory)
            await h.hypervisor.create(replace(spec, mac=other.mac) if other.mac else replace(spec, size=bigger))
        await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
        assert await h.condition(spec.name) is VmCondition.RUNNING


async def a_vm_is_destroyed_while_it_starts(h: Harness) -> None:
    for after in (0.0, 0.02, 0.1):
        spec = await h.created()
        starting = asyncio.ensure_future(h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec)))
        await asyncio.sleep(after)
        await h.hypervisor.destroy(h.ref(spec.name), 0)
        assert not h.remains(spec.name)
        await at_once(starting)
        assert not h.remains(spec.name) and await h.condition(spec.name) is None


async def only_an_instant_clone_needs_a_template(h: Harness) -> None:
    await h.templates.delete_template(h.template)
    for kind in (CloneKind.LINKED, CloneKind.FULL):
        spec = h.spec(kind)
        await h.hypervisor.create(spec)
        assert await h.condition(spec.name) is VmCondition.PARKED
        await h.hypervisor.destroy(h.ref(spec.name), 0)
        assert not h.remains(spec.name)


async def a_create_while_its_template_is_deleted_leaves_a_whole_vm_or_none(h: Harness) -> None:
    for after in (0.0, 0.02):  # the disk and the memory of the template are opened at different times
        await h.templates.build_template(h.template)
        spec = h.spec()
        creating = asyncio.ensure_future(h.hypervisor.create(spec))
        await asyncio.sleep(after)
        made, _ = await at_once(creating, h.templates.delete_template(h.template))
        if isinstance(made, Exception):
            assert isinstance(made, Gone), made
        else:
            assert await h.condition(spec.name) is VmCondition.PARKED
        await h.hypervisor.destroy(h.ref(spec.name), 0)
        assert not h.remains(spec.name) and await template(h) is None


async def a_template_that_is_deleted_while_it_is_built_stays_deleted(h: Harness) -> None:
    """Whether or not its caller has gone, a build that goes on must not bring the template back."""
    for gone in (False, True):
        making = await building(h)
        waiting = asyncio.ensure_future(h.templates.build_template(h.template))
        await asyncio.sleep(0.1)
        if gone:
            making.cancel()
            waiting.cancel()
        await h.templates.delete_template(h.template)
        assert await template(h) is None
        for result in await asyncio.gather(making, waiting, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError if gone else Gone), result
        assert await template(h) is None
    await h.templates.build_template(h.template)
    assert await template(h) is TemplateCondition.READY


TROUBLES: tuple[Check, ...] = (
    a_start_whose_reply_was_lost_is_repeated,
    a_destroy_whose_reply_was_lost_is_repeated,
    building_and_deleting_a_template_is_repeated_after_lost_replies,
    two_equal_calls_at_once_are_like_one,
    a_repeated_start_with_another_size_changes_nothing,
    a_destroyed_vm_is_gone,
    a_vm_does_not_become_another,
    a_vm_is_destroyed_while_it_starts,
    a_template_that_is_deleted_while_it_is_built_stays_deleted,
    a_create_while_its_template_is_deleted_leaves_a_whole_vm_or_none,
    only_an_instant_clone_needs_a_template,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("check", TROUBLES, ids=lambda check: check.__name__)
def test_simulated(check: Check, pair: Pair, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed, pair)
        await check(harness)
        assert not harness.world.violations()

    run(main(), seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("check", TROUBLES, ids=lambda check: check.__name__)
def test_simulated_behind_agents(check: Check, seed: int) -> None:
    """The same hosts, asked over connections to agents."""

    async def main() -> None:
        harness = Simulated(seed, Pair.SLURM_HOSTS)
        agents = agents_of(harness.world, seed)
        async with controller(agents) as one:
            await one.connected()
            harness.hypervisor = one.hypervisor
            await check(harness)
        for agent in agents:
            await agent.stop()
        assert not harness.world.violations()

    run(main(), seed)
