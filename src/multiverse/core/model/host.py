"""Hosts, what was observed of them, and what is held on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import Size
from multiverse.core.model.template import TemplateKey, TemplateSeen
from multiverse.core.model.vm import VmSeen


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs VMs: what it declares to have for them, and what it can do.

    `abilities` are names such as `instant`, `full`, `plug_memory`, `plug_cpus`. `machine` is what the
    machine itself has, shown beside the declared capacity; None if the platform does not tell.
    `template_copies` is how often the memory of a template is held there while it has clones.
    `available` is what the machine could give to new processes at this look, in MiB; 0 if that is unknown.
    `images` are those that are there, each with what it can do: `fork`, `plug_cpus`, `plug_memory`.
    """

    name: str
    capacity: Size
    abilities: frozenset[str] = frozenset()
    machine: Size | None = None
    accelerator: str = ""
    template_copies: int = 1
    available: int = 0
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def image_can(self, image: str, ability: str) -> bool:
        """Whether the image is there, and has that ability."""
        return ability in self.images.get(image, ())


@dataclass(frozen=True, slots=True)
class HypervisorView:
    """One look. VMs and hosts by name."""

    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))
    vms: Mapping[str, VmSeen] = field(default_factory=lambda: MappingProxyType({}))
    templates: Mapping[TemplateKey, TemplateSeen] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Claim:
    """Capacity held on a host by one row."""

    owner: Key
    host: str
    size: Size
