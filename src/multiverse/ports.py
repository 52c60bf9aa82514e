"""The boundaries: what the controller asks of a scheduler, of a hypervisor, and of time.

Every method that changes something means *ensure*: twice is as good as once, and none remembers a
previous call. They raise the errors of `core.errors`, which say what is true afterwards. After a
cancellation or `Unknown` the thing may have been done, in full or in part; the same call may be
repeated, and the opposite one undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from multiverse.core.model import (
    Attempt,
    HypervisorView,
    Identity,
    JobRef,
    NodeBootstrap,
    SchedulerView,
    Size,
    Stage,
    TemplateKey,
    User,
    Vm,
    VmSpec,
)


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; runs on while the machine sleeps, starts anew at boot."""
        ...

    def wall(self) -> float:
        """Unix time in seconds."""
        ...

    def boot_id(self) -> str:
        """Tells one boot's monotonic times from another's."""
        ...


class Scheduler(Protocol):
    """A batch scheduler. Calls that name a job carry its expected restart count (in `JobRef`), reread the
    job first, and raise `Stale` if it moved or is another job of the same id, `Gone` if there is none."""

    async def observe(self) -> SchedulerView:
        """All jobs in our partitions and all nodes of our site. Raises `Unknown`; never a partial view."""
        ...

    async def pin(self, job: JobRef, feature: str, text: str = "") -> None:
        """Tie a pending job to the nodes that carry `feature`, and let it start; `text`, if any, is left for its user
        as by `explain`, in the same word. A held job raises `Stale`."""
        ...

    async def unpin(self, job: JobRef) -> None:
        """Put a pending job back at the gate, released unless its user holds it. Nothing to do for one
        that is at the gate; `Stale` for one that is not pending."""
        ...

    async def requeue(self, job: JobRef) -> None:
        """Stop a running job and queue it again, at the gate."""
        ...

    async def revoke(self, job: JobRef, reason: str) -> None:
        """Cancel a pending job for good, leaving `reason` where its user finds it."""
        ...

    async def set_down(self, node: str, reason: str) -> None:
        """Set a node DOWN, so that whatever runs there is ended by the scheduler's own rules, and withdraw it. A node
        that does not exist is as good as down."""
        ...

    async def delete_node(self, node: str) -> None:
        """Make the scheduler forget a node, its offer too. `Refused` while a job is on it; absent is success."""
        ...

    async def explain(self, job: JobRef, text: str) -> None:
        """Leave one line for the job's user, where the scheduler shows such things."""
        ...

    async def offer(self, vm: Vm) -> None:
        """Let one job that comes and fits take this joined spare by itself, tied to it as by `pin`; it waits there
        until `Hypervisor.add_user`. An offer that was taken or withdrawn never comes again, however often this is
        said. A scheduler that can offer nothing does nothing: its looks show no offer."""
        ...

    async def withdraw(self, node: str) -> None:
        """No job that comes may take it any more, and `offer` is without effect from now on. Nothing to do for one that
        was taken or never offered: the next look tells."""
        ...

    async def bootstrap(self, vm: Vm, attempt: Attempt | None) -> NodeBootstrap:
        """What this VM needs to become a node of this cluster, for this attempt's job."""
        ...

    async def user(self, uid: int) -> User:
        """Who this is, with all groups. `Gone` if nobody."""
        ...


class Hypervisor(Protocol):
    """What runs VMs, on one host or many. What a host can do is data (`Host.abilities`)."""

    @property
    def hosts(self) -> Sequence[str]:
        """The names of all hosts that the settings name, whether or not any of them has ever answered."""
        ...

    async def observe(self) -> HypervisorView:
        """All hosts, templates and VMs of our site, with what is left of dead ones. Raises `Unknown`."""
        ...

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        """Boot and freeze a template. `Broken` if the image does not boot,
        `Refused` if there is no such image, `Exhausted` for want of memory or disk, `Gone` if there is no
        such host or it was dropped meanwhile."""
        ...

    async def delete_template(self, template: TemplateKey) -> None:
        """Remove a template; one that is being made is not waited for, and does not come back. VMs that were
        forked from it go on; absent is success."""
        ...

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """Bring a VM into being without identity, paused where the platform can. `Gone` if the
        template or host is missing, `Refused` if it exists and is another. After an error something of
        it may remain, until `destroy`."""
        ...

    async def start(self, name: str, size: Size, identity: Identity) -> Sequence[Stage]:
        """Give it its size and identity and let it run, until its daemons have been started. `Gone` if
        there is no such VM, `Refused` if it is another's identity, `Broken` if the guest did not answer or
        refused its identity."""
        ...

    async def add_user(self, name: str, user: User) -> None:
        """Let a VM that runs know a user whom it did not know when it was started, and set its clock. `Gone` if there
        is no such VM, `Broken` or `Unknown` if its guest did not do it."""
        ...

    async def destroy(self, name: str, grace: float) -> None:
        """Let the guest write back and unmount for up to `grace` seconds (0: not at all), end the VM
        and remove all of it. Absent is success; returning means that nothing of it is left."""
        ...
