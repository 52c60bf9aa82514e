"""Templates."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from multiverse.api import TemplateRequest, TemplateView
from multiverse.service.backend import Backend
from multiverse.service.routers.errors import committed


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/templates")
    async def templates() -> list[TemplateView]:
        return backend.templates()

    @routes.post("/templates/build", status_code=202)
    async def build(request: TemplateRequest) -> TemplateRequest:
        return await _commit("build", request)

    @routes.post("/templates/drop", status_code=202)
    async def drop(request: TemplateRequest) -> TemplateRequest:
        return await _commit("drop", request)

    async def _commit(verb: str, request: TemplateRequest) -> TemplateRequest:
        """Returns the request as it was committed, with the defaults filled in."""
        host = _host(request.host)
        size = None
        if request.cpus or request.memory or verb == "build":
            base = backend.base_size
            size = (request.cpus or base.cpus, request.memory or base.memory)
        account = request.account or "" if verb == "build" else request.account
        with committed():
            await backend.template(verb, request.image, host, size, account)
        known = {"cpus": size[0], "memory": size[1]} if size else {}
        return request.model_copy(update={"host": host, "account": account, **known})

    def _host(name: str) -> str:
        hosts = backend.host_names()
        host = name or (hosts[0] if len(hosts) == 1 else "")
        if host not in hosts:
            problem = f"there is no host {name} in reach" if name else "name a host"
            raise HTTPException(404, f"{problem}; hosts in reach: {', '.join(hosts) or 'none'}")
        return host

    return routes
