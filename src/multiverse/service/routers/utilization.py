"""What hosts and VMs use."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from multiverse.api import UsagePoint, UtilizationView
from multiverse.core.errors import Gone
from multiverse.service.backend import Backend


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/utilization")
    async def utilization(name: str = "") -> list[UtilizationView]:
        """Hosts and live VMs, with what they use; with `name` those of these names, which are separated by commas."""
        reader = backend.utilization
        return await reader.views(frozenset(filter(None, name.split(",")))) if reader else []

    @routes.get("/utilization/{name}/history")
    async def history(name: str, hours: float = 24.0) -> list[UsagePoint]:
        """What a host or VM has used in the last hours, also a VM that has ended."""
        try:
            return backend.utilization.history(name, hours) if backend.utilization else []
        except Gone as error:
            raise HTTPException(404, str(error)) from error

    return routes
