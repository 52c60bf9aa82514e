"""The client of the API, for the command line, the benchmarks and tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown, Unreachable

DEFAULT_SOCKET = Path("/run/multiverse/api.sock")
_START = "start it: systemctl start multiverse, in a lab multiverse lab up; users: ask the operators"


def socket_path() -> Path:
    """The path of the daemon's socket: $MULTIVERSE_SOCKET, or the default of a site's daemon."""
    return Path(os.environ.get("MULTIVERSE_SOCKET") or DEFAULT_SOCKET)


class Client:
    """A synchronous client with one connection.

    Methods return the documents as the daemon sent them; `multiverse.api.decode` makes values of them. Every method
    raises `Unreachable` if there is no daemon or it may not be used, `Unknown` if it did not answer, `Gone` if what was
    asked for does not exist, and `MultiverseError` for any other refusal.
    """

    def __init__(self, path: Path | None = None, timeout: float = 30.0) -> None:
        self._path = path or socket_path()
        # A Unix socket has no TLS; loading the certificates would take 50 ms.
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
        """The daemon's counters in Prometheus' text format."""
        return self._ask("GET", "/metrics").text

    def jobs(self, job: str | None = None, *, ended: bool = False, limit: int = 200) -> list[dict[str, Any]]:
        """Live attempts, oldest first; with `ended` or a `job` (or an array), the last `limit` that have ended too."""
        params: dict[str, str] = {"ended": str(ended).lower(), "limit": str(limit)}
        if job is not None:
            params["job"] = job
        return list(self._call("GET", "/jobs", params=params))

    def vms(self, *, exact: bool = False) -> list[dict[str, Any]]:
        """All live VMs. With `exact` their memory is measured now, page by page, with PSS: milliseconds for each VM."""
        return list(self._call("GET", "/vms", params={"exact": str(exact).lower()}))

    def snapshot(self) -> dict[str, Any]:
        """Everything at a glance, as the web page shows it; see `api.Snapshot`."""
        return dict(self._call("GET", "/snapshot"))

    def hosts(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/hosts"))

    def leases(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/leases"))

    def evictions(self) -> list[dict[str, Any]]:
        """The running jobs that would leave their hosts now; see `api.EvictionView`."""
        return list(self._call("GET", "/evictions"))

    def saved(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/saved"))

    def save(self, job_id: str, *, hold: bool = False) -> None:
        """Save a running job. Returns once that is committed."""
        self._call("POST", f"/jobs/{job_id}/save", params={"hold": hold})

    def checkpoint(self, job_id: str, *, shared_files: bool = False) -> None:
        """Make a checkpoint of a running job. Returns once it is committed that it begins."""
        self._call("POST", f"/jobs/{job_id}/checkpoint", params={"shared_files": shared_files})

    def resume(self, job_id: str, *, anew: bool = False) -> None:
        """Let a saved job go on that is held, or begin `anew` without its state."""
        self._call("POST", f"/jobs/{job_id}/resume", params={"anew": anew})

    def move(self, what: str, host: str = "") -> dict[str, Any]:
        """Move a VM, or that of a job, to a host, or to any. Returns where to, once that is committed."""
        return dict(self._call("POST", "/moves", json={"what": what, "host": host}))

    def change_hosts(self, verb: str, hosts: str, **more: str | float | bool | None) -> dict[str, Any]:
        """Add, drain, resume or remove (`verb`) hosts, a node set; see `api.HostRequest` for `more`. Returns which were
        changed, and which were refused."""
        return dict(self._call("POST", f"/hosts/{verb}", json={"hosts": hosts, **more}))

    def utilization(self, names: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Hosts and live VMs, or those with these names, with what they use now, and have used."""
        return list(self._call("GET", "/utilization", params={"name": ",".join(names)}))

    def compatible(self, cpus: int, memory: int, **more: int | str) -> list[dict[str, Any]]:
        """The hosts that have room for a VM of a node of that size now, memory in MiB: first the one that the placement
        policy would take. `more` are `disk` (MiB), `image`, `kind` and `policy`."""
        given = {key: value for key, value in more.items() if value}
        return list(self._call("GET", "/utilization/compatible", params={"cpus": cpus, "memory": memory, **given}))

    def usage_history(self, name: str, hours: float = 24.0) -> list[dict[str, Any]]:
        """The usage of a host or of a VM, also of an ended one, in the last hours."""
        return list(self._call("GET", f"/utilization/{name}/history", params={"hours": hours}))

    def templates(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/templates"))

    def template(self, verb: str, image: str, host: str = "", **which: int | str | None) -> dict[str, Any]:
        """Ask to build or drop (`verb`) templates; see `api.TemplateRequest` for `which`. Returns the request as it was
        committed."""
        return dict(self._call("POST", f"/templates/{verb}", json={"image": image, "host": host, **which}))

    def repair(self, name: str, *, fenced: bool = False) -> dict[str, Any]:
        """Ask for the repair of an alert. The request has been committed when this returns; `status` shows the
        outcome."""
        return dict(self._call("POST", "/repair", json={"name": name, "fenced": fenced}))

    def prune(self, older_than: float | None = None, *, dry_run: bool = False) -> dict[str, Any]:
        """Delete, or count, the records of what ended more than `older_than` seconds ago (None: as the daemon's
        settings say). Asks until all is done, and adds the counts."""
        asked = {"older_than": older_than, "dry_run": dry_run, "after": ""}
        total: dict[str, Any] = {}
        while not total or asked["after"]:
            found = dict(self._call("POST", "/prune", json=asked))
            counts = {key: n + total.get(key, 0) for key, n in found.items() if type(n) is int}
            total, asked["after"] = found | counts, found["next"]
        return total

    def audit_identity(self) -> dict[str, Any]:
        """The reports of all running VMs about themselves, compared."""
        return dict(self._call("GET", "/audit/identity"))

    def timeline(self, job: str) -> list[dict[str, Any]]:
        """One timeline for each attempt of the job, or of the array's tasks."""
        return list(self._call("GET", f"/timeline/{job}"))

    def explain(self, job: str) -> dict[str, Any]:
        """Why a job waits, in which stage it is, or how it ended; for an array, of its first tasks."""
        return dict(self._call("GET", f"/explain/{job}"))

    def capacity(self) -> dict[str, Any]:
        """Which sizes would start at once, and what is free."""
        return dict(self._call("GET", "/capacity"))

    def images(self) -> list[dict[str, Any]]:
        """The images that a job may request."""
        return list(self._call("GET", "/images"))

    def trial(self, **request: Any) -> dict[str, Any]:
        """What would become of one request; see `api.TrialRequest`."""
        return dict(self._call("POST", "/capacity", json=request))

    def _call(self, method: str, path: str, **more: Any) -> Any:
        return self._ask(method, path, **more).json()

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **more)
        except httpx.ConnectError as error:
            raise self._unreachable() from error
        except httpx.HTTPError as error:
            raise Unknown(
                f"the daemon at {self._path} did not answer: {error}", hint="see whether it runs: multiverse lab status"
            ) from error
        if response.status_code == 404:
            raise Gone(str(response.json().get("detail", "not found")), hint="see: multiverse jobs, multiverse status")
        if response.status_code == 409 and isinstance(detail := response.json().get("detail"), dict):
            raise Refused(detail["message"], hint=detail["hint"])
        if response.status_code >= 400:
            raise MultiverseError(
                f"the daemon refused the request: {response.text[:300]}", hint="see: multiverse status"
            )
        return response

    def _unreachable(self) -> Unreachable:
        """The error for a connection that failed."""
        if not self._path.exists():
            return Unreachable(f"no daemon listens at {self._path}", hint=_START)
        if not os.access(self._path, os.W_OK):
            return Unreachable(
                f"{self._path} is not yours to use",
                hint="users: squeue, multiverse explain; operators: run this as the daemon's user",
            )
        return Unreachable(f"the daemon at {self._path} is not running", hint=_START)
