"""What a client may ask the daemon to do."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TemplateRequest(BaseModel):
    """Which templates to build or to drop. An empty `host` means the only host that there is.

    To build: a missing `cpus` or `memory` is that of the base size, and a missing `account` means a template for every
    account. To drop: a missing `account` matches every account, and a missing size matches every size; if only one of
    `cpus` and `memory` is given, the other is that of the base size."""

    image: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    host: str = Field(default="", max_length=255)
    cpus: int | None = Field(default=None, ge=1, le=4096)
    memory: int | None = Field(default=None, ge=1, le=1 << 30)
    account: str | None = Field(default=None, max_length=255)


class HostRequest(BaseModel):
    """What to do to hosts. `hosts` is a ClusterShell node set, such as n[1-4]. `reason` and `begins` are of a drain:
    why, and from when on (Unix time; None: now)."""

    hosts: str = Field(min_length=1, max_length=100_000)
    reason: str = Field(default="", max_length=200)
    begins: float | None = Field(default=None, ge=0, le=1e11)


class PruneRequest(BaseModel):
    """Which records to delete: those that ended more than `older_than` seconds ago. None: as old as the settings say.
    With `dry_run` they are only counted. `after` is `PruneView.next` of the answer before."""

    older_than: float | None = Field(default=None, ge=0, le=1e10)
    dry_run: bool = False
    after: str = Field(default="", max_length=100)


class RepairRequest(BaseModel):
    """Which alert to repair. `fenced` is the operator's assurance that the host of that name is switched off."""

    name: str = Field(min_length=1, max_length=255)
    fenced: bool = False


class TrialRequest(BaseModel):
    """A job that somebody may submit: what it asks for, and for how many seconds it runs at most (None: unlimited).
    Memory and disk are per node, in MiB. A missing image or kind is the site's."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    cpus: int = Field(default=1, ge=1, le=4096)
    memory: int = Field(default=512, ge=1, le=1 << 30)
    disk: int = Field(default=0, ge=0, le=1 << 40)
    image: str | None = Field(default=None, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: Literal["instant", "linked", "full", "auto"] | None = None
    limit: float | None = Field(default=None, ge=0, le=1e10)
