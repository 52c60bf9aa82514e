"""The API's client: what the command line and the benchmarks talk through."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown

DEFAULT_SOCKET = Path("/run/multiverse/api.sock")


def socket_path() -> Path:
    """The daemon's socket: $MULTIVERSE_SOCKET, or where a site's daemon has it."""
    return Path(os.environ.get("MULTIVERSE_SOCKET") or DEFAULT_SOCKET)


class Client:
    """Synchronous, one connection. Every method raises `MultiverseError` with a next step."""

    def __init__(self, path: Path | None = None, timeout: float = 30.0) -> None:
        self._path = path or socket_path()
        # No TLS on a Unix socket: to read the certificates all the same takes fifty milliseconds.
        transport = httpx.HTTPTransport(uds=str(self._path), verify=False)
        self._http = httpx.Client(transport=transport, base_url="http://multiverse", timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        return dict(self._call("GET", "/status"))

    def metrics(self) -> str:
        """What the daemon has done, in Prometheus' text format."""
        return self._ask("GET", "/metrics").text

    def jobs(self, job: str | None = None, *, ended: bool = False) -> list[dict[str, Any]]:
        params: dict[str, str] = {"ended": str(ended).lower()}
        if job is not None:
            params["job"] = job
        return list(self._call("GET", "/jobs", params=params))

    def vms(self, *, exact: bool = False) -> list[dict[str, Any]]:
        """`exact`: measured now, page by page, with PSS; costs milliseconds for each VM."""
        return list(self._call("GET", "/vms", params={"exact": str(exact).lower()}))

    def hosts(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/hosts"))

    def templates(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/templates"))

    def template(self, verb: str, image: str, host: str = "", **which: int | str | None) -> dict[str, Any]:
        return dict(self._call("POST", f"/templates/{verb}", json={"image": image, "host": host, **which}))

    def repair(self, name: str, *, fenced: bool = False) -> dict[str, Any]:
        """Ask that a trouble of `status` be repaired; what comes of it is seen there."""
        return dict(self._call("POST", "/repair", json={"name": name, "fenced": fenced}))

    def audit_identity(self) -> dict[str, Any]:
        """What each VM that runs says of itself, compared."""
        return dict(self._call("GET", "/audit/identity"))

    def timeline(self, job: str) -> list[dict[str, Any]]:
        return list(self._call("GET", f"/timeline/{job}"))

    def _call(self, method: str, path: str, **more: Any) -> Any:
        return self._ask(method, path, **more).json()

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **more)
        except httpx.ConnectError as error:
            if not self._path.exists():
                why = f"no daemon listens at {self._path}"
                raise Refused(why, hint="start one: multiverse lab up, or multiverse daemon") from error
            if not os.access(self._path, os.W_OK):
                raise Refused(f"{self._path} is not yours to use", hint="run this as the daemon's user") from error
            raise Refused(f"the daemon at {self._path} is not running", hint="multiverse lab up") from error
        except httpx.HTTPError as error:
            raise Unknown(f"the daemon did not answer: {error}", hint="multiverse lab status") from error
        if response.status_code == 404:
            raise Gone(str(response.json().get("detail", "not found")))
        if response.status_code >= 400:
            raise MultiverseError(f"the daemon refused it: {response.text[:300]}")
        return response
