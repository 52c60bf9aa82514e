"""The documents that the API transmits are the same, byte for byte, as those recorded in api_documents.json.

The records were made before the API's types moved to `multiverse.api`. To write them anew after an intended change of
the API, run `python -m tests.unit.test_api` in the repository's root; clients of both releases must read both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError

from multiverse.api import (
    Alert,
    HostView,
    IdentityAudit,
    ImageView,
    JobView,
    StatusView,
    TemplateView,
    TimelineView,
    VmView,
    decode,
)
from multiverse.bundles.contract import Notice
from multiverse.controller.effects import Failure
from multiverse.controller.users import LookupFailure
from multiverse.core.model.basics import CloneKind, Depth, Key, Size
from multiverse.core.model.eviction import Step
from multiverse.core.model.host import (
    Claim,
    Drain,
    Host,
    HostState,
    HypervisorView,
    KnownHost,
    NumaNode,
    Overcommitment,
)
from multiverse.core.model.job import AttemptState, Eviction, Job, JobState, Request, SchedulerView
from multiverse.core.model.reason import Why, said
from multiverse.core.model.vm import (
    OfferState,
    TemplateCondition,
    TemplateSeen,
    TemplateState,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.model.world import Seen, World
from multiverse.core.policy import Policy, Pool
from multiverse.core.pools import PoolStatus
from multiverse.core.rows import Rows
from multiverse.core.transition import Command, Effect, EffectKind
from multiverse.images.catalog import Image
from multiverse.service.api import make_api
from multiverse.service.backend import Backend
from multiverse.store import Entry
from tests.unit.planner_harness import ManualClock
from tests.unit.rows import IMAGES, SOURCE, attempt, offer, rows, template, vm, world_of

RECORDED = Path(__file__).with_name("api_documents.json")

POOLS = (Pool("slim", Depth.JOINED, 1, 4, Size(1, 150), 100.0), Pool("stock", Depth.PARKED, 2, 2, Size(1, 100), 100.0))
POLICY = Policy(subnet=ipaddress.IPv4Network("10.9.0.0/16"), gateway="10.9.0.1", pools=POOLS)

EVICTIONS = (
    Eviction(1000.0, "save", "h1", Why.PREEMPTED(job="12", by="high"), 12288, 340.5),
    Eviction(1900.0, "move", "h1", Why.HOST_DRAINED(host="h1"), 700, 2.14),
    Eviction(2000.0, "move", "h2", Why.OPERATOR(), 700),
)
ATTEMPTS = (
    attempt(AttemptState.ALLOCATED, id=1, since=950.0),
    attempt(
        AttemptState.QUEUED, id=2, job="8_1", since=600.0, note=said("no room"), not_before=1300.0, tries=4,
        request=Request(2, Size(2, 700), image="mine", kind=CloneKind.FULL), evictions=EVICTIONS,
    ),
    attempt(AttemptState.SPAWNING, id=3, job="9", restarts=1, since=990.0, quarantined=said("it is odd")),
)  # fmt: skip
VMS = (
    replace(vm(VmState.SERVING, id=1, attempt=1, since=940.0, template_id=1), mac="02:2"),
    vm(VmState.LOST, id=2, attempt=3, host="h2", kind=CloneKind.FULL, reason="its host is away"),
    vm(VmState.JOINED, id=3, pool=Depth.JOINED, account="physics", template_id=9),
    vm(VmState.ENDING, id=4, host="h4", quarantined=said("what is it")),
)
TEMPLATES = (
    template(TemplateState.READY, id=1, since=100.0),
    template(TemplateState.BROKEN, id=2, image="stock", since=990.0, tries=3, reason="no kernel", account="physics"),
)
OFFERS = (offer(OfferState.OPEN, id=3, since=980.0),)
CLAIMS = (Claim(Key("vm", 1), "h1", Size(1, 288, 100, 250)), Claim(Key("template", 1), "h1", Size(0, 256)))
HOSTS = {
    "h1": Host(
        "h1", Size(4, 8192, 65536, 1000), frozenset({"instant", "full"}), Size(8, 16384), "kvm", 2, 900,
        {"slim": IMAGES["slim"], "stock": frozenset({"fork"})}, overcommit=Overcommitment(memory=2.0, floor=1000),
        features=frozenset({"native-aio", "iothread"}), features_off={"vhost-net": "no such device"},
        numa=(NumaNode(0, (0, 1, 2, 8), 8192, 700, Size(2, 600), (10, 21)),
              NumaNode(1, (4, 5, 6, 7), 8192, 200, Size(0, 0), (21, 10))),
    )
}  # fmt: skip
SEEN = HypervisorView(
    hosts=HOSTS,
    vms={"mvtest0-1": VmSeen("mvtest0-1", "h1", VmCondition.RUNNING, cpu_s=1.5, private=60.0, shared=90.0)},
    templates={
        t.which: TemplateSeen("t", t.host, t.image, TemplateCondition.READY, t.size, held=220.0) for t in TEMPLATES[:1]
    },
)


def entry(seq: int, mono: float, kind: str, event: str, target: str | None, **more: Any) -> Entry:
    values = {"boot": "b", "wall": 1_700_000_000.0 + mono, "id": 1, "attempt": 1, "source": None, "reason": None,
              "detail": {}, **more}  # fmt: skip
    return Entry(seq=seq, mono=mono, kind=kind, event=event, target=target, **values)  # type: ignore[arg-type]


JOURNAL = [
    entry(1, 900.0, "attempt", "submitted", "queued"),
    entry(2, 901.0, "attempt", "admitted", "claimed", reason=said("it fits on h1")),
    entry(3, 901.0, "vm", "planned", "planned"),
    entry(4, 901.5, "vm", "create", None, detail={"stages": [["overlay", 0.002], ["exec", 0.047]]}),
    entry(5, 902.0, "attempt", "created", "spawning"),
    entry(6, 904.0, "attempt", "all joined", "spawned"),
    entry(7, 905.0, "attempt", "runs", "allocated"),
]


def live_rows() -> Rows:
    """The rows above. Host h1 is drained, h4 is fenced, h5 removed, and h2 and h3 are out of reach, h3 silent."""
    found = rows(*ATTEMPTS, *VMS, *TEMPLATES, *OFFERS, claims=CLAIMS, known=["h1", "h2", "h3"])
    silent = replace(found.hosts["h3"], state=HostState.SILENT, id=3)
    drained = replace(found.hosts["h1"], drain=Drain(0.0, "a fan"), id=1)
    off = KnownHost("h4", SOURCE, HostState.FENCED, id=4, reason=said("an operator says that host h4 is off"))
    gone = KnownHost("h5", SOURCE, HostState.REMOVED, id=5)
    return replace(found, hosts={**found.hosts, "h1": drained, "h3": silent, "h4": off, "h5": gone})


class StoreOfRows:
    """A store that holds the rows above and nothing else."""

    site = "test0"

    def attempts(self, *, job_id: str | None = None, limit: int = 1000) -> list[Any]:
        found = [a for a in reversed(ATTEMPTS) if job_id in (None, a.job.job_id)]
        return found[:limit]

    def vms_of(self, attempts: list[int]) -> list[Any]:
        return [one for one in VMS if one.attempt in attempts]

    def journal(self, *, attempts: list[int]) -> list[Entry]:
        return [one for one in JOURNAL if one.attempt in attempts]


class ControllerAtRest:
    """What the API reads of a controller; every command is committed at once and kept in `commands`."""

    began, uncommitted, policy = 100.0, (970.0, "disk is full"), POLICY

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(
            name="scheduler", latest=None, observations=7, since=400.0, failure="no answer", asked=None
        )
        source = SimpleNamespace(
            name=SOURCE, latest=Seen(SEEN, 998.0), observations=70, since=100.0, failure="", asked=None
        )
        self.sources = {SOURCE: source}
        self.state = SimpleNamespace(
            rows=live_rows, reasons={}, placement_faults={}, saved_for=lambda job: None, vms_of=lambda attempt: []
        )
        self.commands: list[Command] = []
        self.missing_hints = SimpleNamespace(since=None)
        self.users = SimpleNamespace(name=str)

    def pools(self) -> list[PoolStatus]:
        return [PoolStatus(POOLS[0], 3, 1, 2, 1), PoolStatus(POOLS[1], 2, 2, 0, 0)]

    def world(self) -> World:
        return world_of(None, SEEN, 998.0)

    def claimable_cpus(self) -> int:
        return 12

    def held_back(self) -> Mapping[str, str]:
        return {"h3": "only 1 of 3 hosts are in sight: the controller may be cut off from them"}

    def staying(self) -> Mapping[str, str]:
        return {}

    def held_evictions(self) -> list[Step]:
        return []

    def unknown_users(self) -> list[LookupFailure]:
        return []

    def orphans(self) -> list[str]:
        return ["mvtest0-77"]

    def failing(self, often: int) -> list[Failure]:
        return [Failure(Effect(EffectKind.END, Key("vm", 4)), 5, "refused", 1016.0)]

    def command(self, command: Command) -> asyncio.Future[None]:
        self.commands.append(command)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def measure() -> Mapping[str, tuple[float, float, float]]:
    return {"mvtest0-1": (2.0, 61.5, 70.0)}


async def examine() -> Mapping[str, Mapping[str, str | int]]:
    facts = {"machine_id": "m", "boot_id": "b", "address": "10.9.1.1", "random": "r", "fresh": "f", "skew": 12}
    return {"mvtest0-1": {"hostname": "mvtest0-1", "mac": "02:1", **facts}, "mvtest0-3": {"error": "it sleeps"}}


def serve(controller: ControllerAtRest) -> FastAPI:
    permanent = [Alert("unserved", "preemption", "it reaches no VM", "tell the users")]

    async def programs() -> dict[str, int]:
        return {}

    processes, guests = SimpleNamespace(programs=programs), SimpleNamespace(measure=measure, examine=examine)
    return make_api(
        Backend(controller, StoreOfRows(), ManualClock(), guests, processes, permanent)  # type: ignore[arg-type]
    )


def test_the_nodes_that_all_hosts_need_are_among_the_alerts() -> None:
    def lack(cpus: int) -> list[Notice]:
        return [Notice("nodes", "MaxNodeCount", f"it has no room for VMs of {cpus} CPUs", "raise it")]

    backend = Backend(
        ControllerAtRest(),
        StoreOfRows(),
        ManualClock(),
        None,
        None,  # type: ignore[arg-type]
        lack_of_nodes=lack,
    )
    (alert,) = (one for one in backend.alerts() if one.kind == "nodes")
    assert "12 CPUs" in alert.message


async def test_jobs_and_timelines_of_a_task_are_found_by_the_number_by_which_the_scheduler_shows_it_too() -> None:
    controller = ControllerAtRest()
    job = Job(ATTEMPTS[1].job, "hello", 1000, JobState.PENDING, ATTEMPTS[1].request, other_id="12")
    controller.scheduler.latest = Seen(SchedulerView({"8_1": job}), 998.0)
    transport = httpx.ASGITransport(app=serve(controller))
    async with httpx.AsyncClient(transport=transport, base_url="http://multiverse") as client:
        for path in ("/jobs?job=12", "/timeline/12"):
            assert [one["job_id"] for one in (await client.get(path)).json()] == ["8_1"]
        assert (await client.get("/timeline/13")).status_code == 404


async def test_images_are_those_of_hosts_and_of_this_machine_with_what_is_in_them() -> None:
    common = ("k", "b", Path(), "", "6.1")
    made = [
        Image("mine", "stock", *common, "bookworm", ("hpcc", "openmpi-bin"), made_from=("Debian 12 (bookworm)", "x")),
        Image("slim", "slim", *common, "bookworm"),
    ]
    controller = ControllerAtRest()
    away = KnownHost("h7", SOURCE, id=7, value=Host("h7", Size(1, 1), images={"big": IMAGES["slim"]}))
    controller.known_hosts = lambda: {"h7": away}  # type: ignore[attr-defined]
    backend = Backend(controller, StoreOfRows(), ManualClock(), None, None, made_images=lambda: made)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=make_api(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://multiverse") as client:
        found = decode(list[ImageView], (await client.get("/images")).json())
    assert found == [
        ImageView("big", False, 0, ""),
        ImageView("mine", False, 0, "Debian 12 (bookworm), with systemd; with hpcc, openmpi-bin"),
        ImageView("slim", True, 1, "Debian bookworm, without systemd"),
        ImageView("stock", False, 1, ""),
    ]


ASKED: tuple[tuple[str, str, Mapping[str, Any] | None], ...] = (
    ("GET", "/status", None),
    ("GET", "/jobs", None),
    ("GET", "/jobs?job=8_1", None),
    ("GET", "/jobs?ended=true&limit=1", None),
    ("GET", "/vms", None),
    ("GET", "/vms?exact=true", None),
    ("GET", "/hosts", None),
    ("GET", "/templates", None),
    ("GET", "/timeline/7", None),
    ("GET", "/timeline/none", None),
    ("GET", "/audit/identity", None),
    ("POST", "/templates/build", {"image": "slim"}),
    ("POST", "/templates/build", {"image": "slim", "host": "h1", "memory": 512, "account": "physics"}),
    ("POST", "/templates/build", {"image": "slim", "host": "h9"}),
    ("POST", "/templates/build", {"image": "../slim"}),
    ("POST", "/templates/drop", {"image": "slim"}),
    ("POST", "/templates/drop", {"image": "slim", "cpus": 2}),
    ("POST", "/repair", {"name": "attempt-2"}),
    ("POST", "/repair", {"name": "h2"}),
    ("POST", "/repair", {"name": "h2", "fenced": True}),
    ("POST", "/repair", {"name": "scheduler"}),
    ("POST", "/repair", {"name": ""}),
)


async def answers() -> dict[str, Any]:
    """Each question with the status and the document of its answer, and with the commands that it caused."""
    controller, found = ControllerAtRest(), {}
    transport = httpx.ASGITransport(app=serve(controller))
    async with httpx.AsyncClient(transport=transport, base_url="http://multiverse") as client:
        for method, path, body in ASKED:
            controller.commands.clear()
            answer = await client.request(method, path, json=body)
            found[f"{method} {path} {json.dumps(body)}"] = {
                "status": answer.status_code,
                "document": answer.text,
                "commands": [
                    f"{c.verb} host={c.host} image={c.image} key={c.key} size={c.size} account={c.account}"
                    for c in controller.commands
                ],
            }
    return found


def ask() -> dict[str, Any]:
    with mock.patch("os.getpid", lambda: 4711):
        return asyncio.run(answers())


def test_a_client_reads_the_transmitted_names_and_ignores_fields_that_it_does_not_know() -> None:
    document = {"kind": "store", "name": "store", "message": "no room", "remedy": "make room", "of_a_newer_release": 1}
    assert decode(Alert, document) == Alert("store", "store", message="no room", remedy="make room")


def test_a_document_without_a_required_field_is_an_error() -> None:
    with pytest.raises(ValidationError, match="remedy"):
        decode(list[Alert], [{"kind": "store", "name": "store", "message": "no room"}])


def test_every_recorded_document_decodes_to_its_type() -> None:
    types: dict[str, Any] = {
        "/status": StatusView, "/jobs": list[JobView], "/vms": list[VmView], "/hosts": list[HostView],
        "/templates": list[TemplateView], "/timeline/7": list[TimelineView], "/audit/identity": IdentityAudit,
    }  # fmt: skip
    recorded = json.loads(RECORDED.read_text())
    for path, of in types.items():
        document = json.loads(recorded[f"GET {path} null"]["document"])
        again = TypeAdapter(of).dump_python(decode(of, document), mode="json")
        assert again == document, path


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    return ask()


@pytest.mark.parametrize("question", [f"{method} {path} {json.dumps(body)}" for method, path, body in ASKED])
def test_a_document_is_the_same_as_before(question: str, answered: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert answered[question] == recorded[question]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(ask(), indent=1) + "\n")
