"""What hosts and VMs use."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

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
        cpus: int, memory: int, disk: int = 0, image: str = "", kind: CloneKind | None = None, policy: str = ""
    ) -> list[CompatibleHostView]:
        """The hosts that have room for a VM of a node of that size now (memory and disk in MiB): first the one that the
        policy would take, then by their use. Nothing is claimed."""
        if backend.utilization is None or cpus < 1 or memory < 1 or disk < 0:
            raise HTTPException(422, "cpus and memory have to be 1 or more")
        try:
            return backend.utilization.compatible(Size(cpus, memory, disk), image, kind, policy)
        except Refused as error:
            raise HTTPException(422, str(error)) from error

    @routes.get("/utilization/{name}/history")
    async def history(name: str, hours: float = 24.0) -> list[UsagePoint]:
        """What a host or VM has used in the last hours, also a VM that has ended."""
        try:
            return backend.utilization.history(name, hours) if backend.utilization else []
        except Gone as error:
            raise HTTPException(404, str(error)) from error

    return routes
