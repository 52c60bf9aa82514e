"""What every `ports.Hypervisor` keeps to: one suite for the simulated one and for QEMU."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import pytest

from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.model import (
    CloneKind,
    Daemon,
    Identity,
    NodeBootstrap,
    Size,
    TemplateCondition,
    TemplateKey,
    User,
    VmCondition,
    VmRef,
    VmSeen,
    VmSpec,
)
from multiverse.ports import Hypervisor
from multiverse.simulation.hypervisor import SimulatedHypervisor
from multiverse.simulation.loop import run
from multiverse.simulation.world import World


class Harness(ABC):
    """What the suite needs beside the port itself. `image` is one that boots, `size` one that fits twice."""

    hypervisor: Hypervisor
    host: str
    image: str
    size: Size
    site = "test0"
    serial = 0

    @abstractmethod
    async def kill(self, name: str) -> None:
        """End a VM behind the hypervisor's back."""

    @abstractmethod
    def cpus(self, name: str) -> int:
        """How many a VM that runs has."""

    @abstractmethod
    def remains(self, name: str) -> list[str]:
        """Whatever of this VM can still be found on its host, by other means than `look`."""

    @property
    def template(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size)

    def address(self, number: int) -> str:
        """One for the VM of this serial, with its prefix length."""
        return f"10.213.200.{number}/16"

    def name(self, number: int) -> str:
        return f"mv{self.site}-{number}"

    def spec(self, kind: CloneKind = CloneKind.INSTANT) -> VmSpec:
        self.serial += 1
        mac = f"02:00:5e:00:00:{self.serial:02x}"
        template = self.template if kind is CloneKind.INSTANT else None
        return VmSpec(self.name(self.serial), self.host, self.image, kind, self.size, mac, template)

    def identity(self, spec: VmSpec) -> Identity:
        """A guest that joins nothing: its only daemon sleeps."""
        daemon = Daemon("sleeper", ("/bin/sleep", "1000000"))
        number = int(spec.name.partition("-")[2])
        return Identity(
            hostname=spec.name,
            mac=spec.mac,
            address=self.address(number),
            gateway="",
            machine_id=f"{number:032x}",
            bootstrap=NodeBootstrap(daemons=(daemon,)),
        )

    async def seen(self, name: str) -> VmSeen | None:
        return (await self.hypervisor.sources[0].observe()).vms.get(name)

    async def condition(self, name: str) -> VmCondition | None:
        seen = await self.seen(name)
        return None if seen is None else seen.condition

    async def created(self) -> VmSpec:
        await self.hypervisor.templates.build_template(self.template)
        spec = self.spec()
        await self.hypervisor.create(spec)
        return spec


async def a_look_is_whole(h: Harness) -> None:
    one, two = await h.created(), await h.created()
    view = await h.hypervisor.sources[0].observe()
    assert {one.name, two.name} <= set(view.vms)
    assert view.hosts[h.host].capacity.cpus > 0 and "instant" in view.hosts[h.host].abilities
    assert view.templates[h.template].condition is TemplateCondition.READY
    assert all(seen.host in view.hosts for seen in view.vms.values())


async def prepare_is_ensure(h: Harness) -> None:
    await h.hypervisor.templates.build_template(h.template)
    await h.hypervisor.templates.build_template(h.template)
    view = await h.hypervisor.sources[0].observe()
    assert view.templates[h.template].condition is TemplateCondition.READY


async def there_is_no_template_of_no_image(h: Harness) -> None:
    unmade = h.template._replace(image="no-such-image")
    with pytest.raises(Refused):
        await h.hypervisor.templates.build_template(unmade)
    view = await h.hypervisor.sources[0].observe()
    assert unmade not in view.templates
    images = view.hosts[h.host].images
    assert h.image in images and unmade.image not in images, "what a look shows decides what is made of which image"


async def create_is_ensure(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.create(spec)
    assert await h.condition(spec.name) is VmCondition.PARKED
    assert len([name for name in (await h.hypervisor.sources[0].observe()).vms if name == spec.name]) == 1


async def create_needs_its_template_and_host(h: Harness) -> None:
    await h.created()
    spec = h.spec()
    place, image = h.template._replace(host="no-such-host"), h.template._replace(image="no-such-image")
    elsewhere = replace(spec, name=h.name(90), host=place.host, template=place)
    unmade = replace(spec, name=h.name(91), image=image.image, template=image)
    another = replace(spec, name=h.name(92), template=h.template._replace(account="another"))
    none = replace(spec, name=h.name(93), template=None)
    for wrong in (elsewhere, unmade, another, none):
        with pytest.raises((Gone, Refused)):
            await h.hypervisor.create(wrong)
        await h.hypervisor.destroy(VmRef(wrong.name), 0)
        assert not h.remains(wrong.name)


async def start_is_ensure(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING


async def create_of_one_that_runs_changes_nothing(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    await h.hypervisor.create(spec)
    assert await h.condition(spec.name) is VmCondition.RUNNING


async def start_of_none_is_gone(h: Harness) -> None:
    spec = h.spec()
    with pytest.raises(Gone):
        await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))


async def a_parked_clone_becomes_of_the_size_it_is_started_with(h: Harness) -> None:
    spec = await h.created()
    more = (await h.hypervisor.sources[0].observe()).hosts[h.host].image_can(h.image, "plug_cpus")
    cpus = spec.size.cpus + more
    await h.hypervisor.start(VmRef(spec.name), Size(cpus, spec.size.memory + 128), h.identity(spec))
    assert h.cpus(spec.name) == cpus


async def one_that_runs_learns_of_a_user(h: Harness) -> None:
    spec, user = await h.created(), User("late", 4711, 4711, "/home/late", "/bin/sh", (("late", 4711),))
    with pytest.raises(Gone):
        await h.hypervisor.users.add_user(VmRef(spec.name), user)  # parked: nobody listens
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    await h.hypervisor.users.add_user(VmRef(spec.name), user)
    await h.hypervisor.users.add_user(VmRef(spec.name), user)
    assert await h.condition(spec.name) is VmCondition.RUNNING
    await h.hypervisor.destroy(VmRef(spec.name), 0)
    with pytest.raises(Gone):
        await h.hypervisor.users.add_user(VmRef(spec.name), user)


async def destroy_leaves_nothing_in_any_condition(h: Harness) -> None:
    parked, running = await h.created(), await h.created()
    await h.hypervisor.start(VmRef(running.name), running.size, h.identity(running))
    for name in (parked.name, running.name, h.name(92)):
        await h.hypervisor.destroy(VmRef(name), 1.0)
        assert not h.remains(name)
        assert await h.condition(name) is None
        await h.hypervisor.destroy(VmRef(name), 1.0)


async def a_dead_vm_is_shown_until_it_is_destroyed(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    await h.kill(spec.name)
    for _ in range(50):
        if await h.condition(spec.name) is VmCondition.DEAD:
            break
        await asyncio.sleep(0.1)
    assert await h.condition(spec.name) is VmCondition.DEAD
    definite = (Refused, Exhausted, Gone, Broken)  # anything else would be tried again, in vain
    with pytest.raises(definite):
        await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    with pytest.raises(definite):
        await h.hypervisor.create(spec)
    await h.hypervisor.destroy(VmRef(spec.name), 1.0)
    assert not h.remains(spec.name)
    assert await h.condition(spec.name) is None


async def what_a_cut_create_leaves_destroy_removes(h: Harness) -> None:
    await h.hypervisor.templates.build_template(h.template)
    cut_short: list[str] = []
    for cut in (0.0, 0.001, 0.002, 0.004, 0.01, 0.02, 0.06, 0.1):
        spec = h.spec()
        making = asyncio.ensure_future(h.hypervisor.create(spec))
        await asyncio.sleep(cut)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await h.hypervisor.destroy(VmRef(spec.name), 0)
        assert not h.remains(spec.name)
        cut_short.append(spec.name)
    await asyncio.sleep(1.0)  # what went on regardless must not bring a VM back after its end
    assert not [name for name in cut_short if h.remains(name)]
    assert not set(cut_short) & set((await h.hypervisor.sources[0].observe()).vms)


async def a_cut_create_may_be_said_again(h: Harness) -> None:
    await h.hypervisor.templates.build_template(h.template)
    for cut in (0.004, 0.06):
        spec = h.spec()
        making = asyncio.ensure_future(h.hypervisor.create(spec))
        await asyncio.sleep(cut)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await h.hypervisor.create(spec)
        assert await h.condition(spec.name) is VmCondition.PARKED


async def drop_is_ensure_and_its_clones_go_on(h: Harness) -> None:
    spec = await h.created()
    await h.hypervisor.templates.delete_template(h.template)
    await h.hypervisor.templates.delete_template(h.template)
    assert h.template not in (await h.hypervisor.sources[0].observe()).templates
    await h.hypervisor.start(VmRef(spec.name), spec.size, h.identity(spec))
    assert await h.condition(spec.name) is VmCondition.RUNNING
    with pytest.raises(Gone):
        await h.hypervisor.create(h.spec())


Check = Callable[[Harness], Awaitable[None]]
SUITE: tuple[Check, ...] = (
    a_look_is_whole,
    prepare_is_ensure,
    there_is_no_template_of_no_image,
    create_is_ensure,
    create_needs_its_template_and_host,
    start_is_ensure,
    create_of_one_that_runs_changes_nothing,
    start_of_none_is_gone,
    a_parked_clone_becomes_of_the_size_it_is_started_with,
    one_that_runs_learns_of_a_user,
    destroy_leaves_nothing_in_any_condition,
    a_dead_vm_is_shown_until_it_is_destroyed,
    what_a_cut_create_leaves_destroy_removes,
    a_cut_create_may_be_said_again,
    drop_is_ensure_and_its_clones_go_on,
)


class Simulated(Harness):
    host, image, size = "h1", "slim", Size(1, 256)

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.hypervisor = SimulatedHypervisor(self.world, Random(seed))

    def identity(self, spec: VmSpec) -> Identity:
        whole = super().identity(spec)
        return Identity(whole.hostname, whole.mac, whole.address, whole.gateway, whole.machine_id)

    async def kill(self, name: str) -> None:
        self.world.kill_vm(name)

    def cpus(self, name: str) -> int:
        return self.world.machines.vms[name].takes.cpus

    def remains(self, name: str) -> list[str]:
        return [vm for vm in self.world.machines.vms if vm == name]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_simulated(check: Check, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed)
        await check(harness)
        assert not harness.world.violations()

    run(main(), seed)
