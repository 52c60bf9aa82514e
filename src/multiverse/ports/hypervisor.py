"""What the controller asks of a hypervisor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, Member, User
from multiverse.core.model.job import LeasedHost
from multiverse.core.model.usage import HostUsage
from multiverse.core.model.vm import Stage, TemplateKey, VmRef, VmSpec

NOT_LEASED: Mapping[str, LeasedHost] = MappingProxyType({})  # no host is leased


class Source(Protocol):
    """Whatever answers in one piece: the agent of one host, or a cloud with all its hosts."""

    @property
    def name(self) -> str:
        """Unique among the sources of all hypervisors, and the same after a restart."""

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts that the settings name for this source, whether or not it has ever answered."""

    @property
    def silence(self) -> float | None:
        """Seconds since anything at all was heard of it; None where only observations tell."""

    async def observe(self) -> HypervisorView:
        """All hosts, templates and VMs of our site at this source, with the remains of dead VMs. Raises `Unknown`."""


class Hypervisor(Protocol):
    """What runs VMs, on one host or many. What a host can do, and what things cost there, is data (`Host`).

    Each call that names a VM (`VmRef`) is `Refused` if the VM of that name has another token, and touches nothing."""

    @property
    def sources(self) -> Sequence[Source]:
        """All sources. Only `membership` changes them; a source that stays is the same object."""

    @property
    def membership(self) -> Membership | None:
        """Adds and removes hosts; None if the platform alone says which there are."""

    @property
    def templates(self) -> Templates | None:
        """Builds and deletes templates; None if clones only boot."""

    @property
    def users(self) -> GuestUsers | None:
        """Adds users to running guests; None if a guest knows only the users that it was started with."""

    @property
    def groups(self) -> Groups | None:
        """Tells hosts which VMs reach each other; None if the platform decides that by itself."""

    @property
    def saves(self) -> Saves | None:
        """Saves VMs with their jobs; None if it cannot."""

    @property
    def moves(self) -> Moves | None:
        """Moves VMs to other hosts while they run; None if it cannot."""

    @property
    def sleeps(self) -> Sleeps | None:
        """Frees the memory of VMs whose jobs are suspended; None if it cannot."""

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """Create a VM without identity, paused where the platform can. `Gone` if the template or host is missing,
        `Refused` if the name, token, address or MAC is another VM's. After an error remains may exist, until
        `destroy`."""

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        """Give a VM its size and identity, and let it run until its daemons have been started. `Gone` if there is none,
        `Refused` if the identity is another VM's, `Broken` if the guest did not answer or refused."""

    async def destroy(self, vm: VmRef, grace: float) -> None:
        """Let the guest write back and unmount for up to `grace` seconds (0: not at all), end the VM and remove all of
        it. Success if there is none; returning means that nothing of it is left."""


class Membership(Protocol):
    """Which hosts belong to the site, where it decides that itself. Each host is a source, by its name."""

    def keep(self, hosts: Collection[str], leased: Mapping[str, LeasedHost] = NOT_LEASED) -> None:
        """Have these hosts as sources, and no others. `leased` ones are reached by their pilots. Nothing is awaited:
        calls to a removed host end as `Unknown` or `Gone`, and an added one answers once it is reached."""

    def declared(self, host: str) -> Host | None:
        """What a host is declared to have that may never have answered; what nobody knows of it yet costs nothing and
        can do everything. None if nothing is declared."""


class Templates(Protocol):
    """Templates for instant clones."""

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        """Boot and freeze a template. `Broken` if the image does not boot, `Refused` if there is none, `Exhausted` for
        want of memory or disk, `Gone` if there is no such host or the template was deleted meanwhile."""

    async def delete_template(self, template: TemplateKey) -> None:
        """Remove a template. One that is being built is not waited for and does not come back. VMs that were forked
        from it go on. Success if there is none."""


class GuestUsers(Protocol):
    """Users of guests that run."""

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        """Make a user known to a running VM, and set its clock. From then on it reaches the VMs of `group`, if not 0.
        `Gone` if there is none, `Broken` or `Unknown` if its guest did not do it."""


class Groups(Protocol):
    """Which VMs reach each other, and by which names: see `core.model.identity`. What a host was told stays until it is
    told something else, also while no controller runs."""

    @property
    def listening(self) -> Mapping[str, str]:
        """The hosts that can be told now, each with a word that is another one when it may have forgotten all."""

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        """From now on a host knows these VMs, its own among them, and no more those that are gone; with `whole` no
        other ones. Two calls for a host are never under way at once. After an error it may know a part of that."""


class Saves(Protocol):
    """Saves VMs with the frozen processes of their jobs. `create` restores one that its specification names (`saved`),
    and `start` makes it a node again, whose processes stay frozen. Files that are complete are shown by sources that
    reach their storage (`HypervisorView.saved`). Each call again is success."""

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        """Stop the processes of the VM's job, and write back what they wrote (`VmSeen.frozen`). After an error the job
        goes on, or `thaw` lets it. `script`: the script of the job runs in this VM, and not in another one of it.
        `Broken` if a process does not stop in time, or a file server does not answer."""

    async def cut(self, vm: VmRef) -> None:
        """Cut the frozen job off from the scheduler, which can queue it again then. There is no way back."""

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        """Cut the VM's job off, if that was not done, stop the VM, and write it to the storage under that name,
        encrypted by `key` (hexadecimal) if there is one. It stays stopped, until it is destroyed. `Exhausted` if it
        cannot be written; then nothing is left of the files. `create` of it raises `Damaged` if the files are not as
        they were written, or are missing."""

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        """Write a running VM to the storage as `save` does, while its job goes on, but for a moment in which it is
        frozen: the files are of that moment. Unless `shared_files` that is refused to a job that writes to files which
        other machines share, beside the output of its script (`Refused`). After a definite error its job goes on; after
        another one `thaw` lets it."""

    async def copy(self, source: str, name: str, key: str = "") -> None:
        """Copy complete files, as they are, from the storage to which a source writes to its storage for copies. `key`
        is that by which they were encrypted. `Exhausted` if they cannot be written, `Damaged` if they are not as they
        were written, `Gone` if a storage is out of reach; then nothing is left of the copy. `create` restores a VM from
        either (`VmSpec.storage`)."""

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        """The same without writing it: keep the VM in the memory of its host under that name. From then on `destroy`
        leaves it alone, and it is shown as saved, no more as a VM. `create` of it there takes it over."""

    async def thaw(self, vm: VmRef) -> None:
        """Let the processes go on: in a VM that was not cut off as if nothing had been, in a restored one within the
        next run of the job, as soon as that has begun there. `Unknown` if it does not within seconds."""

    async def discard(self, source: str, name: str) -> None:
        """Remove the files of that name from the storages that a source reaches, complete or not."""


class Moves(Protocol):
    """Moves VMs to other hosts while their jobs run. The hosts hand a VM over between themselves: it runs on one of
    them at most, and goes on also while no controller is there.

    A VM that is to come is shown at its target as soon as the target knows of it (`VmCondition.CREATING`), and as
    running once it runs there. Its source shows it as dead from when it has handed the VM over until nothing is left of
    it there."""

    async def move(self, vm: VmRef, number: int, target: VmSpec) -> Sequence[Stage]:
        """Move a running VM to `target.source`, and return when it runs there and nothing is left at its source. The
        moves of a VM are numbered in their order; the same move again waits for it. `Refused`, `Exhausted`, `Broken` or
        `Gone` if it goes on where it was, or has ended there; after another error only observations tell where."""

    async def settle(self, vm: VmRef, number: int, other: VmRef) -> None:
        """End that move and earlier ones: the host that has the VM keeps it, nothing of it is left at the other one,
        and no more comes to either. A VM that was handed over to a host that did not take it goes on where it was. Both
        hosts are asked, also if one of them does not answer; then this fails, and may be repeated."""


class Sleeps(Protocol):
    """Lets VMs sleep: their memory is in a file of their host, and something answers the scheduler in their place
    (`VmCondition.ASLEEP`). `destroy` removes all of that. The sleeps of a VM are numbered in their order: a call about
    an earlier one than the latest is `Refused`. Each call again is success."""

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        """Let a VM sleep whose job is suspended. `identity` has the daemons that stand in for it, the file is encrypted
        by `key` (hexadecimal) if there is one. After an error `wake` lets it go on. `Refused` if a process of its job
        goes on, or nothing can stand in for it there, `Exhausted` if the file cannot be written."""

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        """Let a VM go on that sleeps, or was to, and let its job go on or stop it (`runs`), as the scheduler shows it.
        `Damaged` if the file is not as it was written, `Gone` if there is no such VM, `Exhausted` if its host has no
        room: then it sleeps on."""


class Measurements(Protocol):
    """What hosts and VMs use, as it is sampled where they run. No decision waits for it."""

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        """What the hosts of a source, and our VMs on them, have used in the last `span` seconds, also VMs that ended a
        few minutes ago. `Gone` if there is no such source, `Refused` if it samples nothing, `Unknown` without an
        answer."""
