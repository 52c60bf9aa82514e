"""The simulated world without the controller, driven through the ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from multiverse.core.clones.spares import node_spec
from multiverse.core.errors import Broken, Exhausted, Gone, Refused, Stale, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host
from multiverse.core.model.identity import Identity
from multiverse.core.model.job import Attempt, Job, JobState, NodeState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import Place, TemplateKey, Vm, VmCondition, VmRef, VmSpec
from multiverse.ports import Scheduler
from multiverse_lab.simulation.cloud import CLOUD_ABILITIES, QUOTA, CloudMachines, SimulatedCloud
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings

SIZE = Size(1, 256)


@dataclass
class Driver:
    """Does what the controller would do."""

    world: SimulatedWorld
    scheduler: Scheduler
    hypervisor: SimulatedHosts
    serial: int = 0

    async def job(self, job_id: str) -> Job:
        return (await self.scheduler.observe()).jobs[job_id]

    async def until(self, met: Callable[[], bool], limit: float = 300.0) -> None:
        for _ in range(int(limit / 0.1)):
            if met():
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the condition was never met")

    async def boot(self, feature: str, number: int = 1, size: Size = SIZE) -> str:
        self.serial += 1
        name = f"mvsim-{self.serial}"
        mac, address = f"02:00:00:00:00:{self.serial:02x}", f"10.1.0.{self.serial}/16"
        node_size = Size(size.cpus, size.memory - 80)
        vm = Vm(self.serial, 0.0, name, (Place("h1"),), "slim", CloneKind.INSTANT, size, node_size, mac, address)
        request = Request(1, node_size)
        jobs = (await self.scheduler.observe()).jobs
        job = next(iter(jobs.values())).ref
        attempt = Attempt(number, 0.0, job, "job", 1000, request)
        template = TemplateKey("h1", "slim", SIZE)
        await self.hypervisor.build_template(template)
        await self.hypervisor.create(VmSpec(name, "h1", "slim", CloneKind.INSTANT, size, mac, template))
        bootstrap = await self.scheduler.bootstrap(node_spec(vm, attempt))
        await self.hypervisor.start(
            VmRef(name, "h1"),
            size,
            Identity(name, mac, address, "", f"{self.serial:032x}", (self.world.user(1000),), bootstrap=bootstrap),
        )
        return name

    async def serve(self, job_id: str, number: int = 1) -> list[str]:
        job = await self.job(job_id)
        assert job.request is not None
        names = [await self.boot(f"mv_{number}", number) for _ in range(job.request.nodes)]
        await self.until(lambda: all(name in self.world.cluster.nodes for name in names))
        await self.scheduler.pin(job.ref, f"mv_{number}", ())
        return names

    async def clear(self, names: list[str]) -> None:
        for name in names:
            await self.hypervisor.destroy(VmRef(name, "h1"), 1.0)
            await self.scheduler.set_down(name, "test")
            await self.scheduler.delete_node(name)


def drive_world(seed: int, drive: Callable[[Driver], Any], **cluster: Any) -> SimulatedWorld:
    async def main() -> SimulatedWorld:
        world = SimulatedWorld(seed, WorldSettings(cluster=ClusterSettings(**cluster)))
        driver = Driver(world, world.scheduler(Random(seed)), SimulatedHosts(world.machines, Random(seed)))
        await drive(driver)
        return world

    return run(main(), seed)


@pytest.mark.parametrize("batch", [Batch(), Batch(exit_code=3), Batch(nodes=3)])
def test_a_job_runs_once(batch: Batch) -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(batch)
        await asyncio.sleep(5)
        assert (await driver.job(job_id)).state is JobState.PENDING
        names = await driver.serve(job_id)
        await driver.until(lambda: not driver.world.unfinished())
        await driver.clear(names)

    world = drive_world(3, drive)
    assert not world.violations() and not world.leftovers()
    assert [run.completed for run in world.runs] == [True]
    assert world.cluster.history[0].result == ("FAILED" if batch.exit_code else "COMPLETED")
    assert len(world.machines.created) == batch.nodes


def test_a_job_that_a_limit_holds_back_while_it_has_its_vms_is_a_violation() -> None:
    async def drive(driver: Driver) -> None:
        first, second = (driver.world.cluster.submit(Batch(seconds=30)) for _ in range(2))
        names = await driver.serve(first, 1)
        await driver.until(lambda: bool(driver.world.runs))
        assert (await driver.scheduler.observe()).limits == {"jobs of 1000": 0}
        assert (await driver.job(second)).uses == (("jobs of 1000", 1),) and not driver.world.violations()
        names += await driver.serve(second, 2)
        await driver.until(lambda: not driver.world.unfinished())
        await driver.clear(names)

    world = drive_world(3, drive, max_jobs=1)
    assert any("a limit holds it back: jobs of 1000" in wrong for wrong in world.violations())
    assert [run.completed for run in world.runs] == [True, True], "the job starts once the limit permits"


def test_the_job_of_a_dead_vm_is_requeued_with_its_old_pin() -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(seconds=50))
        names = await driver.serve(job_id)
        await driver.until(lambda: bool(driver.world.runs))
        driver.world.kill_vm(names[0])
        await asyncio.sleep(20)
        assert (await driver.job(job_id)).state is JobState.RUNNING
        await asyncio.sleep(20)
        job = await driver.job(job_id)
        assert (job.state, job.ref.restarts, job.pinned, job.eligible) == (JobState.PENDING, 1, "mv_1", True)
        await driver.scheduler.unpin(job.ref)
        job = await driver.job(job_id)
        assert job.gated and job.eligible and job.pinned is None
        await driver.clear(names)
        names = await driver.serve(job_id, 2)
        await driver.until(lambda: not driver.world.unfinished())
        await driver.clear(names)

    world = drive_world(4, drive, node_timeout=30.0)
    assert not world.violations() and not world.leftovers()
    assert [run.completed for run in world.runs] == [False, True]


@pytest.mark.parametrize("lost", [True, False])
def test_a_job_that_may_not_be_requeued_fails_with_its_node(lost: bool) -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(seconds=50, requeue=False, nodes=2))
        names = await driver.serve(job_id)
        await driver.until(lambda: bool(driver.world.runs))
        if lost:
            driver.world.kill_vm(names[1])
        await driver.scheduler.set_down(names[1], "lost")
        await driver.until(lambda: not driver.world.unfinished())
        await driver.clear(names)

    world = drive_world(4, drive)
    assert world.cluster.history[0].result == "NODE_FAIL" and not world.leftovers()
    well = "job 1 ran on VMs that were all well, and lost mvsim-2, which we set DOWN"
    assert world.violations() == ([] if lost else [well])


def test_a_run_may_be_ended_on_vms_on_which_an_earlier_one_was_started_in_vain() -> None:
    """The message that launches the first run is lost: slurmctld starts the job again there by itself."""

    async def drive(driver: Driver) -> None:
        cluster = driver.world.cluster
        job_id = cluster.submit(Batch(seconds=30))
        names = await driver.serve(job_id)
        await driver.until(lambda: cluster.nodes[names[0]].job is not None)
        cluster.nodes[names[0]].guest.pause()
        await asyncio.sleep(20)
        assert not driver.world.runs
        cluster.nodes[names[0]].guest.unpause()
        await driver.until(lambda: bool(driver.world.runs))
        await driver.scheduler.set_down(names[0], "its job was queued again")

    world = drive_world(4, drive)
    assert not world.violations()
    assert [(run.restarts, run.completed) for run in world.runs] == [(1, False)]


def test_a_pin_without_a_node_is_refused_and_a_pin_that_lost_its_node_is_bad() -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(nodes=2))
        ref = (await driver.job(job_id)).ref
        with pytest.raises(Refused):
            await driver.scheduler.pin(ref, "mv_1", ())
        name = await driver.boot("mv_1")
        await driver.until(lambda: name in driver.world.cluster.nodes)
        await driver.scheduler.pin(ref, "mv_1", ())
        await driver.clear([name])
        await asyncio.sleep(10)
        job = await driver.job(job_id)
        assert (text_of(job.reason), job.eligible, job.held) == ("BadConstraints", False, False)
        await driver.scheduler.unpin(ref)
        assert (await driver.job(job_id)).eligible
        driver.world.cluster.cancel(job_id)

    drive_world(5, drive)


def test_suspension_stops_the_scripts_clock() -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(seconds=10))
        await driver.serve(job_id)
        await driver.until(lambda: bool(driver.world.runs))
        driver.world.cluster.suspend(job_id)
        await asyncio.sleep(100)
        assert (await driver.job(job_id)).state is JobState.SUSPENDED
        driver.world.cluster.resume(job_id)
        await driver.until(lambda: not driver.world.unfinished())

    (only,) = drive_world(6, drive).runs
    assert only.completed and only.ended is not None and only.ended - only.began > 100


def test_messages_sent_while_slurmctld_is_away_are_delivered_later() -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(seconds=3))
        names = await driver.serve(job_id)
        await driver.until(lambda: bool(driver.world.runs))
        driver.world.cluster.go_away()
        await asyncio.sleep(10)
        with pytest.raises(Unknown):
            await driver.scheduler.observe()
        driver.world.cluster.come_back()
        await driver.until(lambda: not driver.world.unfinished())
        await driver.clear(names)

    world = drive_world(7, drive)
    assert world.cluster.history[0].result == "COMPLETED" and not world.violations()


def test_job_ids_are_used_again() -> None:
    async def drive(driver: Driver) -> None:
        refs = []
        for _ in range(5):
            job_id = driver.world.cluster.submit(Batch())
            refs.append((await driver.job(job_id)).ref)
            driver.world.cluster.cancel(job_id)
            await asyncio.sleep(5)
        assert [ref.job_id for ref in refs] == ["1", "2", "1", "2", "1"]
        with pytest.raises((Stale, Gone)):
            await driver.scheduler.unpin(refs[0])

    drive_world(8, drive, last_id=2, min_job_age=(2.0, 3.0))


def test_an_oversubscribed_host_is_a_violation() -> None:
    async def drive(driver: Driver) -> None:
        driver.world.cluster.submit(Batch())
        for _ in range(9):
            await driver.boot("mv_1", size=Size(1, 1024))

    assert any("made to carry" in wrong for wrong in drive_world(9, drive).violations())


def test_nodes_are_shown_busy_and_idle() -> None:
    async def drive(driver: Driver) -> None:
        job_id = driver.world.cluster.submit(Batch(seconds=5))
        (name,) = await driver.serve(job_id)
        await driver.until(lambda: bool(driver.world.runs))
        with pytest.raises(Refused):
            await driver.scheduler.delete_node(name)
        view = await driver.scheduler.observe()
        assert view.nodes[name].state is NodeState.BUSY and view.jobs[job_id].nodes == (name,)
        await driver.until(lambda: not driver.world.unfinished())
        assert (await driver.scheduler.observe()).nodes[name].state is NodeState.IDLE
        await driver.clear([name])

    drive_world(10, drive)


# --- the grid and the cloud ------------------------------------------------------------------------


def test_the_grid_numbers_tasks_with_a_dot_and_keeps_the_submit_time_of_a_requeued_job() -> None:
    async def main() -> None:
        world = SimulatedWorld(11, WorldSettings(pair=Pair.GRID_HOSTS))
        driver = Driver(world, world.scheduler(Random(11)), SimulatedHosts(world.machines, Random(11)))
        assert driver.scheduler.offers is None and driver.scheduler.submission is None
        job_id, other = world.cluster.submit_array(Batch(seconds=600), 2)
        assert job_id.partition(".")[2] and job_id.partition(".")[0] == other.partition(".")[0]
        before = (await driver.job(job_id)).ref
        name = await driver.boot("tag-1")
        await driver.until(lambda: name in world.cluster.nodes)
        assert (await driver.scheduler.observe()).nodes[name].features == ()
        await driver.scheduler.pin(before, "tag-1", [name])
        assert (await driver.job(job_id)).pinned == "tag-1" and (await driver.job(other)).gated
        await driver.until(lambda: bool(world.runs))
        await asyncio.sleep(10)
        await driver.scheduler.requeue(before)
        await driver.until(lambda: world.cluster.jobs[job_id].state is JobState.PENDING)
        job = await driver.job(job_id)
        assert job.ref == replace(before, restarts=1) and job.gated and job.eligible

    run(main(), 11)


def test_the_grid_shows_a_node_that_was_set_down_as_disabled() -> None:
    async def main() -> None:
        world = SimulatedWorld(12, WorldSettings(pair=Pair.GRID_HOSTS))
        driver = Driver(world, world.scheduler(Random(12)), SimulatedHosts(world.machines, Random(12)))
        world.cluster.submit(Batch())
        name = await driver.boot("tag-1")
        await driver.until(lambda: name in world.cluster.nodes)
        await driver.scheduler.set_down(name, "a test")
        node = (await driver.scheduler.observe()).nodes[name]
        assert node.state is NodeState.DOWN and text_of(node.reason).startswith("disabled")

    run(main(), 12)


def cloud_spec(name: str, cpus: int = 1) -> VmSpec:
    return VmSpec(name, QUOTA, "slim", CloneKind.FULL, Size(cpus, 256), "")


def in_the_cloud(drive: Callable[[SimulatedWorld, SimulatedCloud], Any]) -> SimulatedWorld:
    async def main() -> SimulatedWorld:
        host = Host(QUOTA, Size(2, 4096, 65536), CLOUD_ABILITIES)
        world = SimulatedWorld(13, WorldSettings((host,), pair=Pair.SLURM_CLOUD))
        assert isinstance(world.machines, CloudMachines)
        await drive(world, SimulatedCloud(world.machines, Random(13)))
        return world

    return run(main(), 13)


def test_the_cloud_builds_a_vm_although_its_caller_has_gone() -> None:
    async def drive(world: SimulatedWorld, cloud: SimulatedCloud) -> None:
        call = asyncio.ensure_future(cloud.create(cloud_spec("mvsim-1")))
        await asyncio.sleep(2.0)
        call.cancel()
        assert (await cloud.observe()).vms["mvsim-1"].condition is VmCondition.CREATING
        await asyncio.sleep(90.0)
        seen = (await cloud.observe()).vms["mvsim-1"]
        assert seen.condition is VmCondition.PARKED and seen.host == QUOTA and seen.placed_on != QUOTA

    assert not in_the_cloud(drive).violations()


def test_the_cloud_refuses_what_exceeds_the_quota_and_reports_a_violation() -> None:
    async def drive(world: SimulatedWorld, cloud: SimulatedCloud) -> None:
        await cloud.create(cloud_spec("mvsim-1"))
        with pytest.raises(Exhausted):
            await cloud.create(cloud_spec("mvsim-2", cpus=2))

    assert any("exceeds the quota" in violation for violation in in_the_cloud(drive).violations())


def test_a_vm_of_an_unbootable_image_dies_in_the_cloud() -> None:
    async def drive(world: SimulatedWorld, cloud: SimulatedCloud) -> None:
        with pytest.raises(Broken):
            await cloud.create(replace(cloud_spec("mvsim-1"), image="dud"))
        assert (await cloud.observe()).vms["mvsim-1"].condition is VmCondition.DEAD

    assert not in_the_cloud(drive).violations()


def test_a_rack_that_fails_takes_its_own_vms_along() -> None:
    async def drive(world: SimulatedWorld, cloud: SimulatedCloud) -> None:
        for serial in (1, 2):
            await cloud.create(cloud_spec(f"mvsim-{serial}"))
        places = {name: vm.placed_on for name, vm in (await cloud.observe()).vms.items()}
        assert len(set(places.values())) == 2
        world.machines.switch_off(QUOTA)
        vms = (await cloud.observe()).vms
        assert sorted(vm.condition for vm in vms.values()) == [VmCondition.DEAD, VmCondition.PARKED]

    in_the_cloud(drive)


# --- sources ---------------------------------------------------------------------------------------


def test_a_host_out_of_reach_makes_only_its_own_source_unknown() -> None:
    async def main() -> None:
        hosts = tuple(Host(f"h{n}", Size(8, 8192, 65536), ABILITIES) for n in range(3))
        world = SimulatedWorld(14, WorldSettings(hosts))
        hypervisor = SimulatedHosts(world.machines, Random(14))
        assert [source.name for source in hypervisor.sources] == ["h0", "h1", "h2"]
        world.machines.go_away("h1")
        with pytest.raises(Unknown):
            await hypervisor.sources[1].observe()
        assert set((await hypervisor.sources[0].observe()).hosts) == {"h0"}
        await hypervisor.destroy(VmRef("mvsim-1", "h0"), 0.0)
        with pytest.raises(Unknown):
            await hypervisor.destroy(VmRef("mvsim-1", "h1"), 0.0)
        with pytest.raises(Refused):
            await hypervisor.destroy(VmRef("mvsim-1", "h7"), 0.0)

    run(main(), 14)


def test_a_vm_is_found_only_at_its_own_source() -> None:
    async def main() -> None:
        hosts = tuple(Host(f"h{n}", Size(8, 8192, 65536), ABILITIES) for n in range(2))
        world = SimulatedWorld(15, WorldSettings(hosts))
        hypervisor = SimulatedHosts(world.machines, Random(15))
        await hypervisor.create(VmSpec("mvsim-1", "h0", "slim", CloneKind.FULL, SIZE, "02:00:00:00:00:01"))
        await hypervisor.destroy(VmRef("mvsim-1", "h1"), 0.0)
        assert "mvsim-1" in (await hypervisor.sources[0].observe()).vms
        with pytest.raises(Gone):
            await hypervisor.start(VmRef("mvsim-1", "h1"), SIZE, Identity("mvsim-1", "02:00:00:00:00:01", "", "", ""))

    run(main(), 15)


def test_a_slow_source_answers_late() -> None:
    async def main() -> None:
        world = SimulatedWorld(16, WorldSettings(slow_sources={"h1": 600.0}))
        began = asyncio.get_running_loop().time()
        await SimulatedHosts(world.machines, Random(16)).sources[0].observe()
        assert asyncio.get_running_loop().time() - began >= 600.0

    run(main(), 16)
