"""The contract of `ports.Hypervisor`: one suite for the simulated hypervisors and for QEMU.

A check that needs an ability which a hypervisor has not is skipped.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from tests.contract.agents import agents_of, controller

from multiverse.bundles.composite import CompositeHypervisor
from multiverse.bundles.contract import DaemonTask, Followed
from multiverse.core.errors import Broken, Damaged, Exhausted, Gone, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Daemon, Identity, NodeBootstrap, User
from multiverse.core.model.job import JobState
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import TemplateCondition, TemplateKey, VmCondition, VmRef, VmSeen, VmSpec
from multiverse.ports import GuestUsers, Hypervisor, Saves, Source, Templates
from multiverse_lab.simulation.cloud import CLOUD_ABILITIES, QUOTA
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings


class Harness(ABC):
    """What the suite needs beside the port. `image` boots, and two VMs of `size` fit on `host`."""

    hypervisor: Hypervisor
    host: str
    image: str
    size: Size
    site = "test0"
    serial = 0
    assigns_addresses = False  # as the host's abilities say
    jobs_begin_by_themselves = False  # in guests that have been started, whether or not `begin_job` is called

    @abstractmethod
    async def kill(self, name: str) -> None:
        """End the process of a VM without the hypervisor's knowledge."""

    @abstractmethod
    def cpus(self, name: str) -> int:
        """The number of CPUs of a running VM."""

    @abstractmethod
    def remains(self, name: str) -> list[str]:
        """What is left of this VM on its host, found by other means than `observe`."""

    async def begin_job(self, name: str) -> None:  # noqa: B027
        """Let a job begin in a running VM, or its next run in one that was restored."""

    @property
    def saves(self) -> Saves:
        """Skips the check if the hypervisor saves no VMs."""
        if self.hypervisor.saves is None:
            pytest.skip("this hypervisor saves no VMs")
        return self.hypervisor.saves

    async def freeze(self, vm: VmRef) -> None:
        """As soon as the job's processes have begun."""
        for _ in range(50):
            try:
                await self.saves.freeze(vm)
                return
            except Broken:
                await asyncio.sleep(0.2)
        raise AssertionError(f"the job in {vm.name} was never frozen")

    @property
    def template(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size)

    def address(self, number: int) -> str:
        """The address for the VM of this serial, with its prefix length; empty if the platform assigns addresses."""
        return f"10.213.200.{number}/16"

    def name(self, number: int) -> str:
        return f"mv{self.site}-{number}"

    @property
    def templates(self) -> Templates:
        """Skips the check if the hypervisor has no templates."""
        if self.hypervisor.templates is None:
            pytest.skip("this hypervisor has no templates")
        return self.hypervisor.templates

    @property
    def users(self) -> GuestUsers:
        """Skips the check if the hypervisor cannot add users."""
        if self.hypervisor.users is None:
            pytest.skip("this hypervisor adds no users to running guests")
        return self.hypervisor.users

    @property
    def kind(self) -> CloneKind:
        """The kind of clones that the suite makes."""
        return CloneKind.INSTANT if self.hypervisor.templates is not None else CloneKind.FULL

    @property
    def source(self) -> Source:
        """The source that answers for the host."""
        return next(source for source in self.hypervisor.sources if self.host in source.hosts)

    async def observe(self) -> HypervisorView:
        return await self.source.observe()

    async def host_can(self, ability: str) -> bool:
        return ability in (await self.observe()).hosts[self.host].abilities

    def ref(self, name: str) -> VmRef:
        return VmRef(name, self.source.name)

    def spec(self, kind: CloneKind | None = None) -> VmSpec:
        kind = kind or self.kind
        self.serial += 1
        mac = "" if self.assigns_addresses else f"02:00:5e:00:00:{self.serial:02x}"
        template = self.template if kind is CloneKind.INSTANT else None
        source = self.source.name
        return VmSpec(self.name(self.serial), self.host, self.image, kind, self.size, mac, template, source=source)

    def identity(self, spec: VmSpec) -> Identity:
        """A guest that joins nothing: its only daemon sleeps."""
        daemon = Daemon("sleeper", ("/bin/sleep", "1000000"))
        number = int(spec.name.partition("-")[2])
        return Identity(
            hostname=spec.name,
            mac=spec.mac,
            address="" if self.assigns_addresses else self.address(number),
            gateway="",
            machine_id=f"{number:032x}",
            bootstrap=NodeBootstrap(daemons=(daemon,)),
        )

    async def seen(self, name: str) -> VmSeen | None:
        return (await self.observe()).vms.get(name)

    async def condition(self, name: str) -> VmCondition | None:
        seen = await self.seen(name)
        return None if seen is None else seen.condition

    async def created(self) -> VmSpec:
        """A parked VM."""
        if self.hypervisor.templates is not None:
            await self.hypervisor.templates.build_template(self.template)
        spec = self.spec()
        await self.hypervisor.create(spec)
        return spec

    async def started_with_token(self) -> VmSpec:
        """A running VM with a token, as the controller gives each one."""
        assert self.saves
        await self.templates.build_template(self.template)
        spec = replace(self.spec(), token=f"token-{self.serial}")
        await self.hypervisor.create(spec)
        await self.hypervisor.start(spec.ref, spec.size, self.identity(spec))
        return spec


async def an_observation_is_complete(h: Harness) -> None:
    one, two = await h.created(), await h.created()
    view = await h.observe()
    assert {one.name, two.name} <= set(view.vms)
    host = view.hosts[h.host]
    assert host.capacity.cpus > 0 and h.kind in host.abilities and h.image in host.images
    assert ("assigns_addresses" in host.abilities) == h.assigns_addresses
    if h.hypervisor.templates is not None:
        assert view.templates[h.template].condition is TemplateCondition.READY
    assert all(seen.host in view.hosts for seen in view.vms.values())


async def every_host_belongs_to_one_source(h: Harness) -> None:
    named = [host for source in h.hypervisor.sources for host in source.hosts]
    assert len(set(named)) == len(named) and h.host in named
    assert len({source.name for source in h.hypervisor.sources}) == len(h.hypervisor.sources)
    for source in h.hypervisor.sources:
        view = await source.observe()
        assert set(view.hosts) <= set(source.hosts)
        assert all(vm.host in source.hosts for vm in view.vms.values())


async def assigned_addresses_are_shown_and_belong_to_one_vm(h: Harness) -> None:
    if not h.assigns_addresses:
        pytest.skip("this hypervisor is given addresses")
    one, two = await h.created(), await h.created()
    vms = (await h.observe()).vms
    address = vms[one.name].address
    assert address and "/" in address and address != vms[two.name].address and vms[one.name].placed_on
    with pytest.raises(Refused):
        await h.hypervisor.start(h.ref(two.name), two.size, replace(h.identity(two), address=address))
    await h.hypervisor.start(h.ref(one.name), one.size, replace(h.identity(one), address=address))
    assert (await h.observe()).vms[one.name].address == address
    with pytest.raises(Refused):
        await h.hypervisor.create(replace(h.spec(), mac="02:00:5e:00:00:77"))


async def building_a_template_twice_is_like_once(h: Harness) -> None:
    await h.templates.build_template(h.template)
    await h.templates.build_template(h.template)
    view = await h.observe()
    assert view.templates[h.template].condition is TemplateCondition.READY


async def a_template_of_a_missing_image_is_refused(h: Harness) -> None:
    unmade = h.template._replace(image="no-such-image")
    with pytest.raises(Refused):
        await h.templates.build_template(unmade)
    view = await h.observe()
    assert unmade not in view.templates
    images = view.hosts[h.host].images
    assert h.image in images and unmade.image not in images, "the planner decides by this which images can be used"


async def creating_twice_is_like_once(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.create(spec)
    assert await h.condition(spec.name) is VmCondition.PARKED
    assert len([name for name in (await h.observe()).vms if name == spec.name]) == 1


async def create_needs_its_template_and_host(h: Harness) -> None:
    await h.created()
    spec = h.spec(h.kind)
    place, image = h.template._replace(host="no-such-host"), h.template._replace(image="no-such-image")
    forked = spec.template is not None
    wrongs = [
        replace(spec, name=h.name(90), host=place.host, template=place if forked else None),
        replace(spec, name=h.name(91), image=image.image, template=image if forked else None),
    ]
    if forked:
        wrongs += [
            replace(spec, name=h.name(92), template=h.template._replace(account="another")),
            replace(spec, name=h.name(93), template=None),
        ]
    for wrong in wrongs:
        with pytest.raises((Gone, Refused)):
            await h.hypervisor.create(wrong)
        await h.hypervisor.destroy(h.ref(wrong.name), 0)
        assert not h.remains(wrong.name)


async def starting_twice_is_like_once(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING


async def creating_a_running_vm_changes_nothing(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    await h.hypervisor.create(spec)
    assert await h.condition(spec.name) is VmCondition.RUNNING


async def starting_a_missing_vm_is_gone(h: Harness) -> None:
    spec = h.spec()
    with pytest.raises(Gone):
        await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))


async def a_parked_clone_gets_the_size_that_it_is_started_with(h: Harness) -> None:
    if not await h.host_can("plug_memory"):
        pytest.skip("this hypervisor plugs no memory")
    spec = await h.created()
    more = (await h.observe()).hosts[h.host].image_can(h.image, "plug_cpus")
    cpus = spec.size.cpus + more
    await h.hypervisor.start(h.ref(spec.name), Size(cpus, spec.size.memory + 128), h.identity(spec))
    assert h.cpus(spec.name) == cpus


async def a_vm_can_write_what_it_claims(h: Harness) -> None:
    """Once it is started: a clone that is paused writes hardly anything."""
    spec = await h.created()
    size = replace(spec.size, disk=3000)
    if spec.kind is not CloneKind.INSTANT:
        spec = replace(h.spec(), size=size)
        await h.hypervisor.create(spec)
    await h.hypervisor.start(h.ref(spec.name), size, h.identity(spec))
    view = await h.observe()
    assert view.vms[spec.name].disk == view.hosts[h.host].disk_cost(h.image, spec.kind).of(3000) >= 3000


async def a_user_is_added_to_a_running_vm(h: Harness) -> None:
    spec, user = await h.created(), User("late", 4711, 4711, "/home/late", "/bin/sh", (("late", 4711),))
    with pytest.raises(Gone):
        await h.users.add_user(h.ref(spec.name), user)  # parked: the guest does not run
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    await h.users.add_user(h.ref(spec.name), user)
    await h.users.add_user(h.ref(spec.name), user)
    assert await h.condition(spec.name) is VmCondition.RUNNING
    await h.hypervisor.destroy(h.ref(spec.name), 0)
    with pytest.raises(Gone):
        await h.users.add_user(h.ref(spec.name), user)


async def destroy_leaves_nothing_in_any_condition(h: Harness) -> None:
    parked, running = await h.created(), await h.created()
    await h.hypervisor.start(h.ref(running.name), running.size, h.identity(running))
    for name in (parked.name, running.name, h.name(92)):
        await h.hypervisor.destroy(h.ref(name), 1.0)
        assert not h.remains(name)
        assert await h.condition(name) is None
        await h.hypervisor.destroy(h.ref(name), 1.0)


async def a_vm_with_another_token_is_not_touched(h: Harness) -> None:
    user = User("late", 4711, 4711, "/home/late", "/bin/sh", (("late", 4711),))
    await h.created()  # with it, its template
    spec = replace(h.spec(), token="0123456789abcdef")
    await h.hypervisor.create(spec)
    own = h.ref(spec.name)._replace(token=spec.token)
    other = own._replace(token="fedcba9876543210")
    with pytest.raises(Refused):
        await h.hypervisor.start(other, spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.PARKED
    await h.hypervisor.start(own, spec.size, h.identity(spec))
    with pytest.raises(Refused):
        await h.hypervisor.start(other, spec.size, h.identity(spec))
    if h.hypervisor.users is not None:
        with pytest.raises(Refused):
            await h.hypervisor.users.add_user(other, user)
    for grace in (0, 1):
        with pytest.raises(Refused):
            await h.hypervisor.destroy(other, grace)
    seen = await h.seen(spec.name)
    assert seen is not None and seen.condition is VmCondition.RUNNING and not seen.users_added
    await h.hypervisor.destroy(own, 0)
    assert not h.remains(spec.name)


async def a_dead_vm_is_shown_until_it_is_destroyed(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    await h.kill(spec.name)
    for _ in range(50):
        if await h.condition(spec.name) is VmCondition.DEAD:
            break
        await asyncio.sleep(0.1)
    assert await h.condition(spec.name) is VmCondition.DEAD
    definite = (Refused, Exhausted, Gone, Broken)  # any other error would be followed by a repetition
    with pytest.raises(definite):
        await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    with pytest.raises(definite):
        await h.hypervisor.create(spec)
    await h.hypervisor.destroy(h.ref(spec.name), 1.0)
    assert not h.remains(spec.name)
    assert await h.condition(spec.name) is None


async def destroy_removes_what_a_cancelled_create_leaves(h: Harness) -> None:
    await h.created()  # with its template
    cut_short: list[str] = []
    for cut in (0.0, 0.001, 0.002, 0.004, 0.01, 0.02, 0.06, 0.1):
        spec = h.spec()
        making = asyncio.ensure_future(h.hypervisor.create(spec))
        await asyncio.sleep(cut)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await h.hypervisor.destroy(h.ref(spec.name), 0)
        assert not h.remains(spec.name)
        cut_short.append(spec.name)
    await asyncio.sleep(1.0)  # a creation that goes on must not bring a destroyed VM back
    assert not [name for name in cut_short if h.remains(name)]
    assert not set(cut_short) & set((await h.observe()).vms)


async def a_cancelled_create_may_be_repeated(h: Harness) -> None:
    await h.created()  # with its template
    for cut in (0.004, 0.06):
        spec = h.spec()
        making = asyncio.ensure_future(h.hypervisor.create(spec))
        await asyncio.sleep(cut)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await h.hypervisor.create(spec)
        assert await h.condition(spec.name) is VmCondition.PARKED


async def clones_outlive_their_deleted_template(h: Harness) -> None:
    spec = await h.created()
    await h.templates.delete_template(h.template)
    await h.templates.delete_template(h.template)
    assert h.template not in (await h.observe()).templates
    await h.hypervisor.start(h.ref(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING
    with pytest.raises(Gone):
        await h.hypervisor.create(h.spec())


async def a_vm_shows_which_build_of_its_template_it_maps(h: Harness) -> None:
    templates, earlier = h.templates, await h.created()
    first = (await h.observe()).templates[h.template].build
    await templates.build_template(h.template)
    assert (await h.observe()).templates[h.template].build == first, "it was there, and was not built again"
    await templates.delete_template(h.template)
    later = await h.created()
    view = await h.observe()
    second = view.templates[h.template].build
    assert first and second and first != second
    assert [view.vms[spec.name].template_build for spec in (earlier, later)] == [first, second]
    assert {view.vms[spec.name].template_memory for spec in (earlier, later)} == {h.template.size.memory}


Check = Callable[[Harness], Awaitable[None]]


async def a_job_is_frozen_and_goes_on(h: Harness) -> None:
    spec = await h.started_with_token()
    if not h.jobs_begin_by_themselves:
        with pytest.raises(Broken):
            await h.saves.freeze(spec.ref)
    await h.begin_job(spec.name)
    for _ in range(2):
        await h.freeze(spec.ref)
    seen = await h.seen(spec.name)
    assert seen is not None and seen.frozen and seen.condition is VmCondition.RUNNING
    with pytest.raises(Refused):
        await h.saves.thaw(spec.ref._replace(token="another"))
    for _ in range(2):
        await h.saves.thaw(spec.ref)
    seen = await h.seen(spec.name)
    assert seen is not None and not seen.frozen


async def _saved(h: Harness) -> VmSpec:
    """A VM that was saved, and destroyed; as it is specified to be restored. It has another token then."""
    spec = await h.started_with_token()
    with pytest.raises(Broken):
        await h.saves.cut(spec.ref)
    await h.begin_job(spec.name)
    await h.freeze(spec.ref)
    for _ in range(2):
        await h.saves.cut(spec.ref)
    with pytest.raises(Broken):  # its next run may have begun elsewhere
        await h.saves.thaw(spec.ref)
    restored = replace(spec, template=None, saved=f"{spec.name}-1", token=f"{spec.token}-again")
    for _ in range(2):
        await h.saves.save(spec.ref, restored.saved)
    await h.hypervisor.destroy(spec.ref, 1.0)
    return restored


async def a_saved_vm_goes_on_in_the_next_run_of_its_job(h: Harness) -> None:
    spec = restored = await _saved(h)
    state, source = spec.saved, h.source.name
    seen = (await h.observe()).saved[state]
    storage = (await h.observe()).hosts[h.host].storage
    earlier = spec.ref._replace(token=spec.token.removesuffix("-again"))
    assert seen.complete and seen.token == earlier.token and storage is not None and seen.storage == storage.name
    for wrong in (replace(restored, saved=f"{spec.name}-2"), replace(restored, name=h.name(94))):
        with pytest.raises((Damaged, Refused)):
            await h.hypervisor.create(wrong)
        await h.hypervisor.destroy(wrong.ref, 0)
    for _ in range(2):
        await h.hypervisor.create(restored)
    assert await h.condition(spec.name) is VmCondition.PARKED
    await h.hypervisor.start(spec.ref, spec.size, h.identity(spec))
    vm = await h.seen(spec.name)
    assert vm is not None and vm.frozen and vm.condition is VmCondition.RUNNING
    await h.begin_job(spec.name)
    for _ in range(2):
        await h.saves.thaw(spec.ref)
    vm = await h.seen(spec.name)
    assert vm is not None and not vm.frozen
    late = (h.saves.freeze(earlier), h.saves.cut(earlier), h.saves.save(earlier, state), h.saves.thaw(earlier))
    for call in late:  # for the VM that was saved, as after a restore of an old database
        with pytest.raises(Refused):
            await call
    with pytest.raises(Refused):
        await h.hypervisor.destroy(earlier, 0.0)
    vm = await h.seen(spec.name)
    assert vm is not None and not vm.frozen and vm.condition is VmCondition.RUNNING
    for _ in range(2):
        await h.saves.discard(source, state)
    assert state not in (await h.observe()).saved


async def a_job_is_cut_off_before_its_vm_is_saved(h: Harness) -> None:
    """Somebody else may have queued it again before that."""
    spec = await h.started_with_token()
    await h.begin_job(spec.name)
    await h.freeze(spec.ref)
    await h.saves.save(spec.ref, f"{spec.name}-1")
    await h.hypervisor.destroy(spec.ref, 1.0)
    restored = replace(spec, template=None, saved=f"{spec.name}-1", token=f"{spec.token}-again")
    await h.hypervisor.create(restored)
    await h.hypervisor.start(restored.ref, spec.size, h.identity(restored))
    await h.begin_job(spec.name)
    await h.saves.thaw(restored.ref)
    vm = await h.seen(spec.name)
    assert vm is not None and not vm.frozen
    await h.saves.discard(h.source.name, restored.saved)


async def a_saved_vm_is_copied_and_restored_from_the_copy(h: Harness) -> None:
    copies = (await h.observe()).hosts[h.host].copies
    if copies is None:
        pytest.skip("this host copies no saved VMs")
    restored = await _saved(h)
    state, source = restored.saved, h.source.name
    assert not (await h.observe()).saved[state].copy
    with pytest.raises(Damaged):  # there is none
        await h.hypervisor.create(replace(restored, storage=copies.name))
    await h.hypervisor.destroy(restored.ref, 0)
    with pytest.raises(Damaged):
        await h.saves.copy(source, f"{restored.name}-2")
    for _ in range(2):
        await h.saves.copy(source, state)
    seen = (await h.observe()).saved[state]
    assert seen.complete and seen.copy == copies.name != seen.storage and restored.token.startswith(seen.token)
    with pytest.raises(Gone):
        await h.hypervisor.create(replace(restored, storage="another"))
    await h.hypervisor.destroy(restored.ref, 0)
    for _ in range(2):
        await h.hypervisor.create(replace(restored, storage=copies.name))
    assert await h.condition(restored.name) is VmCondition.PARKED
    await h.hypervisor.destroy(restored.ref, 0)
    for _ in range(2):
        await h.saves.discard(source, state)
    assert state not in (await h.observe()).saved
    with pytest.raises(Damaged):
        await h.hypervisor.create(replace(restored, storage=copies.name))
    await h.hypervisor.destroy(restored.ref, 0)


SUITE: tuple[Check, ...] = (
    an_observation_is_complete,
    every_host_belongs_to_one_source,
    assigned_addresses_are_shown_and_belong_to_one_vm,
    building_a_template_twice_is_like_once,
    a_template_of_a_missing_image_is_refused,
    creating_twice_is_like_once,
    create_needs_its_template_and_host,
    starting_twice_is_like_once,
    creating_a_running_vm_changes_nothing,
    starting_a_missing_vm_is_gone,
    a_parked_clone_gets_the_size_that_it_is_started_with,
    a_vm_can_write_what_it_claims,
    a_user_is_added_to_a_running_vm,
    destroy_leaves_nothing_in_any_condition,
    a_vm_with_another_token_is_not_touched,
    a_dead_vm_is_shown_until_it_is_destroyed,
    destroy_removes_what_a_cancelled_create_leaves,
    a_cancelled_create_may_be_repeated,
    clones_outlive_their_deleted_template,
    a_vm_shows_which_build_of_its_template_it_maps,
    a_job_is_frozen_and_goes_on,
    a_saved_vm_goes_on_in_the_next_run_of_its_job,
    a_job_is_cut_off_before_its_vm_is_saved,
    a_saved_vm_is_copied_and_restored_from_the_copy,
)


class Simulated(Harness):
    image, size = "slim", Size(1, 256)

    def __init__(self, seed: int, pair: Pair) -> None:
        self.assigns_addresses = pair.has_cloud
        self.host = QUOTA if pair.has_cloud else "h1"
        self.world = SimulatedWorld(seed, _settings(pair))
        self.hypervisor = self.world.hypervisor(Random(seed))
        self.job = JobRecord(0, "1", 0, Batch(seconds=1e6), 0.0, restarts=-1)

    def identity(self, spec: VmSpec) -> Identity:
        whole = super().identity(spec)
        return Identity(whole.hostname, whole.mac, whole.address, whole.gateway, whole.machine_id)

    async def kill(self, name: str) -> None:
        self.world.kill_vm(name)

    async def begin_job(self, name: str) -> None:
        guest = self.world.machines.vms[name].guest
        assert guest is not None
        guest.add_user(self.job.batch.uid)
        self.job.restarts, self.job.state = self.job.restarts + 1, JobState.RUNNING
        guest.launch(self.job)

    def cpus(self, name: str) -> int:
        return self.world.machines.vms[name].takes.cpus

    def remains(self, name: str) -> list[str]:
        return [vm for vm in self.world.machines.vms if vm == name]


def _settings(pair: Pair) -> WorldSettings:
    capacity = Size(8, 8192, 65536)
    names = [QUOTA] if pair.has_cloud else ["h0", "h1"]
    abilities = CLOUD_ABILITIES if pair.has_cloud else ABILITIES
    storage, copies = (None, None) if pair.has_cloud else (Storage("shared", "qemu"), Storage("copies", "qemu"))
    hosts = tuple(Host(name, capacity, abilities, storage=storage, copies=copies) for name in names)
    return WorldSettings(hosts, pair=pair)


PAIRS = (Pair.SLURM_HOSTS, Pair.SLURM_CLOUD)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_simulated(check: Check, pair: Pair, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed, pair)
        await check(harness)
        assert not harness.world.violations()

    run(main(), seed)


class OnePlatform:
    """A platform that is nothing but a hypervisor."""

    measurements = guests = None

    def __init__(self, hypervisor: Hypervisor) -> None:
        self.hypervisor = hypervisor

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        return []

    async def programs(self) -> Counter[str]:
        return Counter()


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_simulated_beside_a_cloud(check: Check) -> None:
    """Hosts of a site that has a cloud, too."""

    async def main() -> None:
        harness, cloud = Simulated(1, Pair.SLURM_HOSTS), Simulated(2, Pair.SLURM_CLOUD)
        platforms = {"cloud": OnePlatform(cloud.hypervisor), "hosts": OnePlatform(harness.hypervisor)}
        harness.hypervisor = CompositeHypervisor(platforms)
        await check(harness)
        assert not harness.world.violations() and not cloud.world.machines.created

    run(main(), 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
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
