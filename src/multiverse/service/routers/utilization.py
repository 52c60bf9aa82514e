"""What hosts and VMs use."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from multiverse.api import CompatibleHostView, UsagePoint, UtilizationView
from multiverse.core.errors import Gone, Refused
from multiverse.core.model import CloneKind, Size
from multiverse.service.backend import Backend


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/utilization")
    async def utilization(name: str = "") -> list[UtilizationView]:
        """Hosts and live VMs, with what they use; with `name` those of these names, which are separated by commas."""
        reader = backend.utilization
        return await reader.views(frozenset(filter(None, name.split(",")))) if reader else []

    @routes.get("/utilization/compatible")
    async def compatible(
        cpus: Annotated[int, Query(ge=1)],
        memory: Annotated[int, Query(ge=1)],
        disk: Annotated[int, Query(ge=0)] = 0,
        image: str = "",
        kind: CloneKind | None = None,
        policy: str = "",
    ) -> list[CompatibleHostView]:
        """The hosts that have room for a VM of a node of that size now (memory and disk in MiB): first the one that the
        policy would take, then by their use. Nothing is claimed."""
        try:
            reader = backend.utilization
            return reader.compatible(Size(cpus, memory, disk), image, kind, policy) if reader else []
        except Refused as error:
            raise HTTPException(400, str(error)) from error

    @routes.get("/utilization/{name}/history")
    async def history(name: str, hours: float = 24.0) -> list[UsagePoint]:
        """What a host or VM has used in the last hours, also a VM that has ended."""
        try:
            return backend.utilization.history(name, hours) if backend.utilization else []
        except Gone as error:
            raise HTTPException(404, str(error)) from error

    return routes
