"""VMs and hosts."""

from __future__ import annotations

from fastapi import APIRouter

from multiverse.api import HostView, IdentityAudit, VmView
from multiverse.service.backend import Backend


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/vms")
    async def vms(exact: bool = False) -> list[VmView]:
        """Live VMs, with figures a few seconds old. `exact` reads every page of every VM now, which takes milliseconds
        for each."""
        return await backend.vms(exact=exact)

    @routes.get("/hosts")
    async def hosts() -> list[HostView]:
        return backend.hosts()

    @routes.get("/audit/identity")
    async def audit_identity() -> IdentityAudit:
        return await backend.identity_audit()

    return routes
