"""Which hosts could take a VM now, and which of them a policy would take. Pure; nothing is claimed."""

from __future__ import annotations

from dataclasses import dataclass

from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, Size
from multiverse.core.provisioning.capacity import room_of
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.placement import BUILT_IN
from multiverse.core.provisioning.sizes import template_size, vm_claim, vm_size


@dataclass(frozen=True, slots=True)
class CompatibleHost:
    """A host with room for such a VM. `free` may still be claimed there, of which the VM would claim `claim`; `holds`
    of them fit. `use` is the share of its CPUs or memory that is in use, see `load.use`."""

    name: str
    free: Size
    claim: Size
    holds: int
    use: float


def compatible_hosts(
    context: Context, node: Size, image: str = "", kind: CloneKind | None = None, policy: str = ""
) -> list[CompatibleHost]:
    """The hosts that take new VMs, have the image, make that kind of clone, and have room for a VM whose node declares
    `node`; the one that the policy would take first, then by their use. A template that has to be built first is not
    counted. Empty or None: as in the settings. Its cost is that of a look at each host. Raises `Refused` if there is no
    such policy."""
    name = policy or context.policy.placement
    if name not in BUILT_IN:
        raise Refused(f"{name} is no placement policy that is built in", hint=f"give one of {', '.join(BUILT_IN)}")
    image, kind, room = image or context.policy.image, kind or context.policy.kind, room_of(context).copy()
    claims = {}
    for host in context.hosts.values():
        makes = kind is CloneKind.AUTO or kind.value in host.abilities
        if image in host.images and makes and host.name in room.free:
            size = vm_size(node, template_size(node, host, image, context.policy), host, context.policy)
            claims[host.name] = vm_claim(size, host, image, kind)
    found = [
        CompatibleHost(one, Size(*room.free[one]), claims[one], room.held(one, claims[one]), room.use(one))
        for one in room.holding(claims)
    ]
    first = room.place(1, claims, choose=BUILT_IN[name], seed=context.state.entropy) or [""]
    return sorted(found, key=lambda one: (one.name != first[0], one.use, one.name))
