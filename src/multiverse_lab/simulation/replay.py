"""Replays a trace of real calls (`multiverse.trace`) with the fakes, and reports where they differ.

The lines of the trace are replayed in their order, and not before their time. Actions of users and incidents are
applied when the trace first shows their result. Each call is made with the same arguments and must have the same
result. After each observation the fakes must come to show the same. A fake may be faster, and either side may pass
through short states that the other side does not show. Scripts and guests wait for the trace, which says when they end
and register.

A trace must begin with the controller's first observation, with no VM and no running job, and end like that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from multiverse.core.errors import Gone, MultiverseError
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, NodeBootstrap, User
from multiverse.core.model.job import JobRef, JobState
from multiverse.core.model.vm import TemplateKey, VmRef, VmSpec
from multiverse.trace import View, hypervisor_view, scheduler_view
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.guests import LIVE, GuestBehaviour, Registration
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.machines import IMAGE_ABILITIES, SimulatedImage
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings

PATIENCE = 200.0  # virtual seconds within which the fakes must come to show what the trace shows
SHORT_PATIENCE = 10.0  # the same after the first difference, because further ones follow from it
INTERVAL = 0.02  # virtual seconds between two observations of the fakes
ENDLESS = 1e9  # seconds: a time that the trace decides
ANY_SIZE = Size(1 << 20, 1 << 40)
UNSURE = ("Unknown", "TimeoutError", "cancelled")  # the call may have been executed: nothing to compare

_PARTS: tuple[Callable[[HypervisorView], Mapping[Any, Any]], ...] = (
    lambda view: view.hosts,
    lambda view: view.vms,
    lambda view: view.templates,
)

Line = dict[str, Any]
Item = tuple[str, str]  # kind and name, as in a `View`
Shown = tuple[Any, ...]  # what of an item is compared

PASSING = {
    "jobs": ("completing",),
    "nodes": ("joining", "busy"),
    "vms": ("creating", "starting"),
    "templates": ("building",),
}
"""States that the real object may pass through and the fake is never observed in."""


def replay(lines: Iterable[str]) -> list[str]:
    """The differences between a trace and the fakes, a sentence each; empty if there are none."""

    async def main() -> list[str]:
        return await _Replay([json.loads(line) for line in lines]).run()

    return run(main(), seed=0)


@dataclass
class _Track:
    """What the fake has shown of an item, without repetitions, and how far the trace has followed."""

    shown: list[Shown]
    at: int = 0
    differs: bool = False

    def reach(self, kind: str, wanted: Shown) -> bool:
        for place in range(self.at, len(self.shown)):
            if self.shown[place] == wanted:
                self.at = place
                return True
            if place > self.at and not _passes(kind, self.shown[place], wanted):
                return False
        return False


def _passes(kind: str, shown: Shown, wanted: Shown) -> bool:
    """Whether a fake may show this on its way to what is wanted, although the trace does not show it."""
    match kind, shown[0]:
        case "jobs", "ended":
            return False
        case "jobs", "running":
            return wanted[0] != "pending" or bool(wanted[-1] > shown[-1])
        case (("nodes" | "vms"), ("down" | "dead")):
            return wanted == ("absent",)
        case (("nodes" | "vms"), "absent"):
            return False
    return True


def _compared(kind: str, seen: Any, restarts: int = 0) -> Shown:
    """What of an item is compared. `restarts` is the job's restart count when the trace first showed it."""
    if kind != "jobs":
        return (seen["condition"] if isinstance(seen, dict) else seen or "absent",)
    if seen is None:
        return ("ended",)
    match seen["state"]:
        case "pending":
            return ("pending", seen["gated"], seen["pinned"], seen["held"], seen["restarts"] - restarts)
        case "running" | "suspended":
            return (seen["state"], seen["pinned"], seen["restarts"] - restarts)
    return (seen["state"],)


@dataclass
class _Job:
    """A job of the trace, and the fake's job that plays it."""

    record: JobRecord
    restarts: int  # the trace's count when it was first seen
    submitted: dict[int, int] = field(default_factory=dict)  # the trace's own submit times, by restart count


class _Replay:
    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.world = SimulatedWorld(0, _settings(lines))
        self.scheduler = self.world.scheduler(Random(0))
        self.hypervisor = SimulatedHosts(self.world.machines, Random(0))
        self.loop = asyncio.get_running_loop()
        self.jobs: dict[str, _Job] = {}
        self.registration: dict[str, Registration] = {}
        self.tasks: dict[int, asyncio.Task[str]] = {}
        self.tracks: dict[Item, _Track] = {}
        self.found: list[str] = []
        self.shown_at: dict[Item, list[tuple[float, Any]]] = {}
        for line in lines:
            for kind, new in _news(line).items():
                for name, seen in new.items():
                    self.shown_at.setdefault((kind, name), []).append((line["ended"], seen))

    async def run(self) -> list[str]:
        self._make_templates()
        watching = asyncio.create_task(self._watch())
        points = [(line["began"], 1, number) for number, line in enumerate(self.lines)]
        points += [(line["ended"], 0, number) for number, line in enumerate(self.lines)]
        for at, begins, number in sorted(points):
            await asyncio.sleep(max(0.0, at - self.loop.time()))
            line = self.lines[number]
            if line["call"].endswith(".observe"):
                if not begins:
                    await self._seen(line)
            else:
                await self._begin(number, line)
                if not begins:
                    await self._end(number, line)
            self._sample()
        watching.cancel()
        ahead = [
            f"at the end: {kind} {name}: the trace shows {_text(track.shown[track.at])}, "
            f"the fake {_text(track.shown[-1])}"
            for (kind, name), track in self.tracks.items()
            if not track.differs and track.shown[track.at] != track.shown[-1]
        ]
        return self.found + ahead + [f"the simulated world says: {wrong}" for wrong in self.world.violations()]

    def _make_templates(self) -> None:
        """Build the templates that the first observation shows: they existed before."""
        first = next((line for line in self.lines if line["call"] == "hypervisor.observe" and _news(line)), {})
        for seen in first.get("templates", {}).values():
            self.world.machines.begin_template(_template(seen))
            if seen["condition"] == "ready":
                self.world.machines.finish_template(_template(seen))

    # --- calls

    async def _begin(self, number: int, line: Line) -> None:
        if number in self.tasks:
            return
        if line["result"] != "ok" and line["result"] not in UNSURE:
            # The cause of the error is shown by a later observation only.
            subject = ("jobs", line["job"][0]) if "job" in line else ("vms", line.get("vm", ""))
            later = next((seen for at, seen in self.shown_at.get(subject, ()) if at > line["began"]), ...)
            if later is not ...:
                await self._play(subject, later, line["ended"])
            if line["result"] == "Gone" and subject[1] in self.jobs and later is None:
                self.world.cluster.jobs.pop(self.jobs[subject[1]].record.job_id, None)
        self.tasks[number] = asyncio.create_task(self._answer(line))

    async def _end(self, number: int, line: Line) -> None:
        task = self.tasks[number]
        if line["result"] in UNSURE:
            task.cancel()
            return
        said = f"{line['began']:.3f} s: {line['call']} of {_subject(line)}: the trace says {line['result']}, the fake"
        if not await self._come(task.done):
            self.found.append(f"{said} does not answer")
        elif task.result() != line["result"]:
            self.found.append(f"{said} {task.result()}")

    async def _answer(self, line: Line) -> str:
        try:
            await self._call(line)
        except MultiverseError as error:
            return type(error).__name__
        return "ok"

    def _call(self, line: Line) -> Awaitable[Any]:
        match line["call"].split("."):
            case ["scheduler", ("unpin" | "requeue") as name]:
                return getattr(self.scheduler, name)(self._ref(line))  # type: ignore[no-any-return]
            case ["scheduler", "pin"]:
                return self.scheduler.pin(self._ref(line), line["feature"], (), at_once=line["at_once"])
            case ["scheduler", "hold"]:
                return self.scheduler.hold(self._ref(line), line["reason"])
            case ["scheduler", "revoke"]:
                return self.scheduler.revoke(self._ref(line), line["reason"])
            case ["scheduler", "explain"]:
                return self.scheduler.explain(self._refs(line), line["text"])
            case ["scheduler", "set_down"]:
                return self.scheduler.set_down(line["node"], line["reason"])
            case ["scheduler", "delete_node"]:
                return self.scheduler.delete_node(line["node"])
            case ["scheduler", "bootstrap"]:
                features = (self.world.cluster.settings.node_feature, *line["features"])
                self.registration[line["node"]] = Registration(line["node"], features, Size(*line["told"]))
                return asyncio.sleep(0)
            case ["scheduler", "offer" | "withdraw" | "exclude"]:
                return asyncio.sleep(0)  # the jobs that take an offer show its result
            case ["scheduler", "user"]:
                return self.scheduler.user(line["uid"])
        return self._call_hypervisor(line)

    def _call_hypervisor(self, line: Line) -> Awaitable[Any]:
        match line["call"].split("."):
            case ["hypervisor", "build_template"]:
                return self.hypervisor.build_template(_template(line))
            case ["hypervisor", "delete_template"]:
                return self.hypervisor.delete_template(_template(line))
            case ["hypervisor", "create"]:
                return self.hypervisor.create(
                    VmSpec(
                        line["vm"],
                        line["host"],
                        line["image"],
                        CloneKind(line["kind"]),
                        Size(*line["size"]),
                        line["mac"],
                        line["template"] and _template(line["template"]),
                    )
                )
            case ["hypervisor", "start"]:
                return self.hypervisor.start(self._vm(line), Size(*line["size"]), self._identity(line))
            case ["hypervisor", "add_user"]:
                return self.hypervisor.add_user(self._vm(line), self._user(line["uid"]))
            case ["hypervisor", "destroy"]:
                return self.hypervisor.destroy(self._vm(line), line["grace"])
        raise ValueError(f"no such call: {line['call']}")

    def _ref(self, line: Line) -> JobRef:
        """The fake's own ref for the run of a job that the trace names. `Gone` for a job that was never shown."""
        job_id, submitted, restarts = line["job"]
        job = self.jobs.get(job_id)
        if job is None:
            raise Gone(f"no job {job_id} was seen")
        record = job.record
        same = job.submitted.get(restarts) == submitted and restarts - job.restarts == record.restarts
        return JobRef(record.job_id, record.submitted - (not same), restarts - job.restarts)

    def _refs(self, line: Line) -> list[JobRef]:
        """The fake's own refs for the jobs that the trace names (an old trace names one), as far as they were
        shown."""
        named = [line["job"]] if "job" in line else line["refs"]
        return [self._ref({"job": job}) for job in named if job[0] in self.jobs]

    def _vm(self, line: Line) -> VmRef:
        """The VM that a line names, at the source that the fake has for its host."""
        machine = self.world.machines.vms.get(line["vm"])
        return VmRef(line["vm"], machine.spec.host if machine else next(iter(self.world.machines.hosts)))

    def _identity(self, line: Line) -> Identity:
        registration = self.registration.get(line["vm"])
        bootstrap = registration.pack() if registration else NodeBootstrap()
        users = (self._user(Batch.uid),)  # a trace does not name the users of jobs: here all are one user's
        return Identity(line["hostname"], line["mac"], line["address"], "", "", users, bootstrap=bootstrap)

    @staticmethod
    def _user(uid: int) -> User:
        return User(f"u{uid}", uid, uid, f"/home/u{uid}", "/bin/sh")

    # --- observations

    async def _seen(self, line: Line) -> None:
        news = [
            (kind, name, seen) for kind, new in _news(line).items() if kind != "hosts" for name, seen in new.items()
        ]
        for kind, name, seen in sorted(news, key=lambda new: new[0], reverse=True):  # VMs, nodes, then jobs
            await self._play((kind, name), seen, line["ended"])
        self._sample()
        for kind, name, seen in news:
            await self._compare(line, kind, name, seen)

    async def _compare(self, line: Line, kind: str, name: str, seen: Any) -> None:
        wanted = _compared(kind, seen, self.jobs[name].restarts if kind == "jobs" else 0)
        track = self.tracks.setdefault((kind, name), _Track([("absent",)]))
        if track.differs or track.reach(kind, wanted) or wanted[0] in PASSING[kind]:
            return
        if self._starts_soon(track, kind, wanted) or self._is_being_set_down(line, kind, name, wanted):
            return
        if not await self._come(lambda: track.reach(kind, wanted)):
            track.differs = True  # further differences of this item follow from this one
            ours, theirs = _text(track.shown[-1]), _text(wanted)
            self.found.append(f"{line['ended']:.3f} s: {kind} {name}: the trace shows {theirs}, the fake {ours}")

    @staticmethod
    def _starts_soon(track: _Track, kind: str, wanted: Shown) -> bool:
        """Whether slurmctld was still to start a pinned job that the fake starts as it is pinned."""
        if kind != "jobs" or wanted[0] != "pending":
            return False
        _, gated, pinned, held, restarts = wanted
        return not gated and not held and bool(pinned) and track.shown[-1] == ("running", pinned, restarts)

    def _is_being_set_down(self, line: Line, kind: str, name: str, wanted: Shown) -> bool:
        """Whether a node was observed between the two commands by which the real driver sets it DOWN."""
        return (kind, wanted) == ("nodes", ("drained",)) and any(
            (one["call"], one.get("node")) == ("scheduler.set_down", name)
            and one["began"] <= line["ended"]
            and line["began"] <= one["ended"]
            for one in self.lines
        )

    async def _watch(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(INTERVAL)

    def _sample(self) -> None:
        view: View = scheduler_view(self.world.cluster.view()) | hypervisor_view(self._hypervisor_view())
        ours = view.pop("jobs")
        view["jobs"] = {name: ours.get(job.record.job_id) for name, job in self.jobs.items()}
        for kind in PASSING:
            here = {item[1] for item in self.tracks if item[0] == kind} if kind != "jobs" else set()
            for name in sorted(here | set(view[kind])):
                now = _compared(kind, view[kind].get(name))
                track = self.tracks.setdefault((kind, name), _Track([now if kind == "jobs" else ("absent",)]))
                if track.shown[-1] != now:
                    track.shown.append(now)

    def _hypervisor_view(self) -> HypervisorView:
        """All hosts of the fake in one view, as the trace shows them."""
        views = [self.world.machines.view(host) for host in self.world.machines.hosts]
        return HypervisorView(*({name: seen for view in views for name, seen in part(view).items()} for part in _PARTS))

    async def _come(self, met: Callable[[], bool]) -> bool:
        until = self.loop.time() + (SHORT_PATIENCE if self.found else PATIENCE)
        while not met():
            if self.loop.time() >= until:
                return False
            await asyncio.sleep(INTERVAL)
            self._sample()
        return True

    # --- actions and incidents

    async def _play(self, item: Item, seen: Any, at: float) -> None:
        """Do to the fakes what users, guests or incidents must have done before this was observed."""
        kind, name = item
        machine = self.world.machines.vms.get(name)
        if kind == "jobs":
            await self._play_job(name, seen, at)
        elif kind == "vms" and seen == "dead":
            self.world.kill_vm(name)
        elif kind == "nodes" and seen in ("idle", "busy") and name not in self.world.cluster.nodes:
            if machine is not None and await self._come(lambda: machine.guest is not None) and machine.guest:
                machine.guest.register_again()
        elif kind == "nodes" and seen == "down":
            self.world.cluster.set_down(name, "the trace says so")

    async def _play_job(self, name: str, seen: Any, at: float) -> None:
        cluster = self.world.cluster
        known = self.jobs.get(name)
        before = known and known.record
        if seen is not None:
            if known is None or (seen["state"] != "ended" and known.record.state is JobState.ENDED):
                known = self._submit(name, seen)
            known.submitted[seen["restarts"]] = seen["submitted"]
        if known is None:
            return
        record = known.record
        mine = [self.tasks[n] for n in self.tasks if self.lines[n].get("job", [""])[0] == name]
        await self._come(lambda: all(task.done() for task in mine))  # the effects of our own calls come first
        state = JobState(seen["state"]) if seen else JobState.ENDED
        if known.record is not before and state is JobState.ENDED:
            cluster.cancel(record.job_id)  # it had ended before the trace began; how does not matter
            return
        end = seen or {"result": "", "exit_code": 0, "restarts": 0}
        if state is JobState.COMPLETING:
            later = (shown for when, shown in self.shown_at["jobs", name] if when > at)
            end = next((shown for shown in later if shown is None or shown["state"] != "completing"), None) or end
            if end["restarts"] > seen["restarts"] or end["state"] != "ended":
                return  # it is queued again: shown when it is
        if seen is not None and seen["restarts"] - known.restarts > record.restarts and not record.again:
            await self._come(lambda: record.state in LIVE)
            cluster.requeue(record.job_id)
        elif state is JobState.PENDING and seen["held"] != record.held:
            (cluster.hold if seen["held"] else cluster.release)(record.job_id)
        elif state is JobState.SUSPENDED:
            cluster.suspend(record.job_id)
        elif state is JobState.RUNNING:
            cluster.resume(record.job_id)
        elif state in (JobState.COMPLETING, JobState.ENDED) and record.state not in (
            JobState.COMPLETING,
            JobState.ENDED,
        ):
            await self._over(record, end["result"], end["exit_code"])

    def _submit(self, name: str, seen: Any) -> _Job:
        batch = Batch(
            name=name,
            seconds=ENDLESS,
            problem=seen["problem"],
            held=seen["held"],
            requeue=not self._ends_with_its_node(name),
        )
        if asked := seen["request"]:
            batch = replace(
                batch,
                nodes=asked["nodes"],
                size=Size(*asked["size"]),
                image=asked["image"],
                kind=asked["kind"] and CloneKind(asked["kind"]),
                features=tuple(asked["features"]),
                account=asked["account"],
            )
        record = self.world.cluster.jobs[self.world.cluster.submit(batch)]
        self.jobs[name] = job = _Job(record, seen["restarts"])
        self.tracks.pop(("jobs", name), None)  # an id that is used again is another job
        self._sample()
        return job

    def _ends_with_its_node(self, name: str) -> bool:
        return any(seen and seen["result"] == "NODE_FAIL" for _, seen in self.shown_at["jobs", name])

    async def _over(self, record: JobRecord, result: str, code: int) -> None:
        """The job ended in the trace, by itself or because it was cancelled."""
        if result in ("COMPLETED", "FAILED"):
            record.batch = replace(record.batch, exit_code=code or int(result == "FAILED"))
            await self._come(lambda: self._finished(record))
        elif result != "NODE_FAIL":  # NODE_FAIL follows from what happened to its node
            self.world.cluster.cancel(record.job_id)

    def _finished(self, record: JobRecord) -> bool:
        machine = self.world.machines.vms.get(record.nodes[0]) if record.nodes else None
        return machine is not None and machine.guest is not None and machine.guest.finish(record)


def _text(shown: Shown) -> str:
    return " ".join(map(str, shown))


def _news(line: Line) -> View:
    return {kind: line[kind] for kind in ("hosts", "vms", "templates", "nodes", "jobs") if kind in line}


def _template(seen: Mapping[str, Any]) -> TemplateKey:
    return TemplateKey(seen["host"], seen["image"], Size(*seen["size"]), seen["account"])


def _subject(line: Line) -> str:
    named = line.get("job") or line.get("vm") or line.get("node") or line.get("image") or line.get("uid")
    return " ".join(map(str, named)) if isinstance(named, list) else str(named)


def _settings(lines: list[Line]) -> WorldSettings:
    """The world in which the trace was recorded: its hosts, the images that it names, the users that it knows."""
    hosts = {name: seen for line in lines for name, seen in line.get("hosts", {}).items() if seen}
    images = {line["image"]: True for line in lines if "image" in line and line["result"] != "Refused"}
    for line in lines:
        images |= {seen["image"]: True for seen in line.get("templates", {}).values() if seen}
    can = {image: frozenset(able) for seen in hosts.values() for image, able in seen["images"].items()}
    broken = {
        line["image"] for line in lines if line["call"] == "hypervisor.build_template" and line["result"] == "Broken"
    }
    users = {line["uid"] for line in lines if line["call"] == "scheduler.user" and line["result"] == "ok"}
    return WorldSettings(
        hosts=tuple(Host(name, Size(*seen["capacity"]), frozenset(seen["abilities"])) for name, seen in hosts.items()),
        images=tuple(
            SimulatedImage(name, name not in broken, can.get(name, IMAGE_ABILITIES)) for name in sorted(images)
        ),
        users=tuple(sorted(users)),
        cluster=ClusterSettings(
            node_timeout=ENDLESS,
            min_job_age=(ENDLESS, ENDLESS),
            flavor=ANY_SIZE,
            max_nodes=1 << 20,
            bf_interval=(ENDLESS, ENDLESS),
        ),
        guests=GuestBehaviour(mute=1.0),
    )
