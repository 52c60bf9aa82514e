"""Nodes that backfill plans to use, with a real slurmctld: 22.05.8 crashes after one is deleted (decision 85)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from multiverse.core.errors import NotYet
from multiverse.core.model.job import JobState
from tests.integration.backfill_cycles import backfill_each_second, cycles, slurmctld, words
from tests.integration.test_contract_slurm import RealSlurm
from tests.integration.watch import release

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("no_controller")]


async def met(what: str, ask: Any) -> None:
    for _ in range(300):
        if await asyncio.to_thread(ask):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(what)


async def test_a_planned_node_is_deleted_after_the_next_cycle_and_slurmctld_goes_on(lab: Any) -> None:
    """The job cannot start because of a reservation. It is untied, and its node is deleted."""
    h = RealSlurm(lab)
    try:
        with backfill_each_second(lab):
            before = slurmctld(lab)
            await h.reserve()
            job = await h.job(await h.submit())
            name, feature = await h.node(job)
            await h.pin(job.ref, feature)
            await met("backfill plans to use the node", lambda: "PLANNED" in words(lab, name))
            await h.scheduler.unpin(job.ref)
            await h.open_again()
            await h.view(lambda view: not view.nodes[name].reserved)
            if release(lab.run("sbatch", "--version").stdout) < (22, 6) and "PLANNED" in words(lab, name):
                with pytest.raises(NotYet):
                    await h.scheduler.delete_node(name)
            await h.delete(name)
            assert (await h.job(job.ref.job_id)).state is JobState.PENDING
            looked = cycles(lab)
            await met("backfill has run twice since", lambda: cycles(lab) > looked + 1)
            assert slurmctld(lab) == before and not words(lab, name)
    finally:
        lab.run("scontrol", "delete", "reservationname=maintenance", check=False)
        await h.clean()
