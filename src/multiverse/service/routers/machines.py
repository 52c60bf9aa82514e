"""VMs and hosts."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, HTTPException

from multiverse.api import HostRequest, HostsChanged, HostView, IdentityAudit, LeaseView, VmView
from multiverse.config import names_of_hosts
from multiverse.core.errors import Refused
from multiverse.service.backend import Backend
from multiverse.service.routers.errors import committed


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

    @routes.get("/leases")
    async def leases() -> list[LeaseView]:
        return backend.leases()

    @routes.post("/hosts/{verb}")
    async def change_hosts(verb: Literal["add", "drain", "resume", "remove"], request: HostRequest) -> HostsChanged:
        """Change hosts. The change is committed when this answers."""
        try:
            names = names_of_hosts(request.hosts)
        except Refused as error:
            raise HTTPException(400, str(error)) from error
        with committed():
            return await backend.change_hosts(verb, names, request.reason, request.begins)

    @routes.get("/audit/identity")
    async def audit_identity() -> IdentityAudit:
        return await backend.identity_audit()

    return routes
