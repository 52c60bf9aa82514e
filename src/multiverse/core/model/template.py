"""Templates: as rows and as observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from multiverse.core.model.keys import ClaimKey, Key
from multiverse.core.model.reason import Reason
from multiverse.core.model.sizes import Size


class TemplateKey(NamedTuple):
    """Which template: a host may have several of one image, by size, and each account its own (empty: for all)."""

    host: str
    image: str
    size: Size
    account: str = ""


class TemplateCondition(StrEnum):
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class TemplateSeen:
    """A template as its host sees it. `held` is the memory that it takes there now, all copies, in MiB. `build` is
    another one for each time that it was built, because VMs of an earlier build keep that one's memory; it is empty
    while the template is being built."""

    name: str
    host: str
    image: str
    condition: TemplateCondition
    size: Size
    reason: str = ""
    held: float = 0.0
    account: str = ""
    build: str = ""

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)


class TemplateState(StrEnum):
    ABSENT = "absent"
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"
    RETIRING = "retiring"


@dataclass(frozen=True, slots=True)
class Template:
    """A template of one image at one size on one host, for one account or for all. `source` answers for its host. How
    many VMs refer to it is counted from the VM rows. `build` is which build of it is ready, as its host calls it."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: TemplateState = field(default=TemplateState.BUILDING, kw_only=True)
    since: float
    host: str
    image: str
    size: Size
    reason: Reason | None = None
    tries: int = 0
    quarantined: Reason | None = None
    account: str = ""
    source: str = ""
    build: str = ""

    @property
    def key(self) -> Key:
        return Key("template", self.id)

    @property
    def claim_key(self) -> ClaimKey:
        """The claim that it holds."""
        return ClaimKey(self.key, self.host)

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)
