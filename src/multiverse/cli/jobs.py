"""`multiverse jobs`, `vms`, `explain`, `timeline`, `capacity` and `images`: jobs, their VMs, why jobs wait, and what
they may request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Annotated, get_args

import typer
from ClusterShell.RangeSet import RangeSet
from rich.text import Text

from multiverse import api
from multiverse.api import decode
from multiverse.cli import render
from multiverse.cli.arguments import parse_request
from multiverse.cli.asking import Controller, asker
from multiverse.cli.render import Watch, watched
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of
from multiverse.core.model.job import AttemptState, Outcome
from multiverse.core.model.reason import when

# --- multiverse jobs --------------------------------------------------------------------------------

NAMED = 6  # the most jobs that are named with a reason below the table


def jobs(
    job: Annotated[str | None, typer.Argument(help="Only this job, or this array's tasks.")] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended too.")] = False,
    user: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="Only of these users: names or uids, with commas between.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-t", help="Only in these states or stages, with commas between.")
    ] = None,
    json: render.Json = False,
    watch: Watch = False,
) -> None:
    """Show jobs: their state, their VMs, and the reason why a job waits.

    Tasks of an array that wait are one row; --json has each of them. --user and --state may be repeated."""
    users, states = _words(user), {word.lower() for word in _words(state)}
    if unknown := states - _STATES:
        known = ", ".join(dict.fromkeys((*api.STAGES, *map(str, AttemptState))))
        raise Refused(f"{', '.join(sorted(unknown))}: there is no such state", hint=f"give some of {known}")
    watched(lambda: _show(job, users, states, ended=ended, json=json), again=watch)


_STATES = {*api.STAGES, *map(str, AttemptState)}
_MOST = 10_000  # ended attempts among which --user and --state choose


def _words(given: Sequence[str] | None) -> set[str]:
    return {word for text in given or () for word in text.split(",") if word}


def _show(job: str | None, users: Set[str], states: Set[str], *, ended: bool, json: bool) -> None:
    with Client() as client:
        document = client.jobs(job, ended=ended, limit=_MOST if users or states else 200)
    document = [
        one
        for one in document
        if (not users or not users.isdisjoint((one["user"], str(one["uid"]))))
        and (not states or not states.isdisjoint((one["state"], one["stage"])))
    ]
    if json:
        return render.as_json(document)
    found = decode(list[api.JobView], document)
    empty = "No such jobs." if users or states else "No jobs."
    if not (ended or job or users or states):
        empty = "No live jobs; --all shows those that have ended."
    if render.is_wide():
        _show_wide(_folded(found), empty)
    else:
        _show_narrow(_folded(found), empty)
    for one in found if job is not None else ():
        if one.usage is not None:
            render.say(f"{one.job_id}: {one.usage.text}", indent=1)
    if job is not None:  # a later attempt has the evictions of earlier ones, too
        for one in {one.job_id: one for one in found}.values():
            _show_evictions(one.job_id, one.evictions)


_LONGEST = 14  # characters of a set of tasks that are shown


def _folded(found: Sequence[api.JobView]) -> list[api.JobView]:
    """The jobs by number; tasks of an array that wait are one, as in squeue."""
    groups: dict[tuple[object, ...], list[api.JobView]] = {}
    for one in sorted(found, key=lambda one: ([int(number) for number in re.findall(r"\d+", one.job_id)], one.attempt)):
        array, _, task = one.job_id.partition("_")
        waits = task and one.state == "queued" and not one.quarantined
        alike = (array, one.name, one.nodes, one.cpus, one.memory, one.image, one.origin)
        groups.setdefault(alike if waits else (one.attempt,), []).append(one)
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups.values()]


def _as_one(tasks: Sequence[api.JobView]) -> api.JobView:
    array = tasks[0].job_id.partition("_")[0]
    numbers = str(RangeSet(",".join(one.job_id.partition("_")[2] for one in tasks)))
    if len(numbers) > _LONGEST:
        numbers = numbers[:_LONGEST].rpartition(",")[0] + ",…"
    reasons = dict.fromkeys(one.waiting or one.reason for one in tasks)
    since, waiting = min(one.since for one in tasks), "; ".join(filter(None, reasons))
    return replace(tasks[0], job_id=f"{array}_[{numbers}]", since=since, waiting=waiting)


def _show_evictions(job_id: str, evictions: Sequence[api.JobEvictionView]) -> None:
    if not evictions:
        return
    times = "once" if len(evictions) == 1 else f"{len(evictions)} times"
    render.say(f"Job {job_id} was evicted {times}:", indent=0)
    table = render.table("BEGAN", "FROM", "HOW", "SENT", "TOOK", "WHY", right=("SENT", "TOOK"), fold=("FROM", "WHY"))
    for one in evictions:
        open_end = "not yet" if one.under_way else "it ended" if one.way in ("requeue", "cancel") else "it stayed"
        took = render.duration(one.took) if one.took is not None else open_end
        host, sent = one.host or "a host", render.memory(one.memory)
        table.add_row(render.moment(one.at), host, one.way, sent, took, render.plain(one.reason))
    render.console.print(table)


def _show_wide(found: Sequence[api.JobView], empty: str) -> None:
    columns: dict[str, Callable[[api.JobView], str | Text]] = {
        "JOB": lambda one: one.job_id,
        "NAME": lambda one: one.name,
        "STATE": lambda one: render.state(one.state, one.quarantined),
        "FOR": lambda one: render.age(one.since),
        "NODES": lambda one: str(one.nodes),
        "CPUS": lambda one: str(one.cpus),
        "MEMORY": lambda one: render.memory(one.memory),
        "IMAGE": lambda one: one.image,
        "VMS": lambda one: " ".join(one.vms),
        "REASON": _reason,
    }
    render.listed(found, empty, columns, right=("FOR", "NODES", "CPUS", "MEMORY"), fold=("VMS", "REASON"))


def _show_narrow(found: Sequence[api.JobView], empty: str) -> None:
    """What fits 80 columns, and the reasons below, once for all jobs that have the same."""
    table = render.table("JOB", "NAME", "STATE", "FOR", "SIZE", "VMS", right=("FOR",), fold=("NAME", "VMS"))
    reasons: dict[str, list[str]] = {}
    for one in found:
        size = f"{f'{one.nodes} × ' if one.nodes > 1 else ''}{one.cpus}, {render.memory(one.memory)}"
        state = render.state(one.state, "" if not one.quarantined else "see below")
        table.add_row(one.job_id, one.name, state, render.age(one.since), size, " ".join(one.vms) or "–")
        if reason := _reason(one):
            reasons.setdefault(reason, []).append(one.job_id)
    render.show(table, empty)
    for reason, ids in reasons.items():
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        render.say(f"{', '.join(ids[:NAMED])}{more}: {reason}", indent=1)


def _reason(one: api.JobView) -> str:
    why = one.quarantined or one.waiting or one.reason
    if not one.origin:
        return why
    moved = one.state in ("allocated", "reclaiming", "done")
    where = f"moved from partition {one.origin}, which was full" if moved else f"in partition {one.origin}"
    return f"{where}: {why}" if why else where


# --- multiverse vms ---------------------------------------------------------------------------------


def vms(json: render.Json = False, watch: Watch = False) -> None:
    """Show VMs: their state, their job, the memory that is theirs alone, and the memory that they share."""
    watched(lambda: _show_vms(json=json), again=watch)


def _show_vms(*, json: bool) -> None:
    with Client() as client:
        document = client.vms()
    if json:
        return render.as_json(document)
    found = decode(list[api.VmView], document)
    columns: dict[str, Callable[[api.VmView], str | Text]] = {
        "VM": lambda one: one.name,
        "STATE": lambda one: render.state(one.state, one.quarantined),
        "JOB": lambda one: one.job_id or "–",
        "HOST": render.places,
        "KIND": lambda one: one.kind,
        "SIZE": lambda one: f"{one.cpus}, {render.memory(one.memory)}",
        "UNIQUE": lambda one: render.memory(one.private) if one.private else "–",
        "UNIQUE, SHARED": lambda one: (
            f"{render.memory(one.private)}, {render.memory(one.shared)}" if one.private else "–"
        ),
        "CPU TIME": lambda one: render.duration(one.cpu_s) if one.cpu_s else "–",
        "ADDRESS": lambda one: one.address,
    }
    wide = render.is_wide()
    left_out = {"UNIQUE"} if wide else {"KIND", "UNIQUE, SHARED", "CPU TIME"}
    if len({render.places(one) for one in found}) < 2 and not any(one.other_host for one in found):
        left_out.add("HOST")
    shown = {name: cell for name, cell in columns.items() if name not in left_out}
    fold = ("SIZE", "UNIQUE, SHARED", "CPU TIME") if wide else ("STATE", "SIZE")
    render.listed(found, "No VMs.", shown, right=("CPU TIME", "UNIQUE"), fold=fold)


# --- multiverse explain -----------------------------------------------------------------------------

GROUPS = 8  # the most groups of hosts that are shown; with --hosts, all


def explain(
    job: Annotated[str, typer.Argument(help="A job id: 123, or 123_4; 123 tells of an array's first tasks.")],
    hosts: Annotated[bool, typer.Option("--hosts", help="All groups of hosts, with all names.")] = False,
    json: render.Json = False,
    controller: Controller = "",
) -> None:
    """Say why a job waits, in which stage it is, or why it failed, what to do, and what each host lacks for it.

    Operators may ask about any job, and users about their own."""
    with asker(controller) as client:
        document = client.explain(job)
    if json:
        return render.as_json(document)
    found = decode(api.ExplanationsView, document)
    for number, (one, *others) in enumerate(_alike(found.jobs)):
        if number:
            render.console.print()
        _show_explanation(one, every=hosts)
        if others:
            render.say(f"The same is true of {', '.join(other.job_id for other in others)}.")
    if found.more:
        render.console.print(f"And {number_of(found.more, 'more task')} of this array; ask for one of them by its id.")


def _alike(jobs: Sequence[api.ExplanationView]) -> list[list[api.ExplanationView]]:
    """Tasks of an array that wait for the same, together: one explanation is true of them all."""
    groups: dict[tuple[str, ...], list[api.ExplanationView]] = {}
    for one in jobs:
        groups.setdefault((one.state, one.short, one.behind) if one.short else (one.job_id,), []).append(one)
    return list(groups.values())


def _show_explanation(one: api.ExplanationView, *, every: bool) -> None:
    head = Text.assemble(("job ", "bold"), (render.plain(one.job_id).plain, "bold"), "  ")
    head.append_text(render.plain(one.name)).append("  ").append_text(render.state(one.state))
    render.console.print(head)
    render.say(one.text)
    if one.expected is not None:
        render.say(f"By the time limits it starts {when(one.expected)} at the latest.")
    if one.todo:
        render.say(f"to do: {one.todo}")
    _show_evictions(one.job_id, one.evictions)
    show_groups(one.hosts, every=every)


def show_groups(groups: Sequence[api.HostGroupView], *, every: bool) -> None:
    """Which hosts could take a VM, and why the others are passed over."""
    if not groups:
        return
    table = render.table("HOSTS", "NAMES", "FOR THIS JOB", right=("HOSTS",), fold=("NAMES", "FOR THIS JOB"))
    for one in groups if every else groups[:GROUPS]:
        names = one.hosts if every or len(one.hosts) <= _SHORT else one.hosts[:_SHORT] + "…"
        table.add_row(str(one.count), names, Text(render.plain(one.why).plain, style="green" if one.fits else ""))
    render.console.print(table)
    if not every and len(groups) > GROUPS:
        render.console.print(f"  And {len(groups) - GROUPS} more groups of hosts: --hosts shows all.", style="dim")


_SHORT = 30  # characters of a node set that are shown


# --- multiverse timeline ----------------------------------------------------------------------------

_BAR_WIDTH = 60
_STAGE_INDENT = 12


def timeline(
    job: Annotated[str, typer.Argument(help="A job id: 123, or 123_4; 123 shows all tasks of an array.")],
    events: Annotated[bool, typer.Option("--events", "-e", help="Every event as well.")] = False,
    json: render.Json = False,
    controller: Controller = "",
) -> None:
    """Show where a job's time went, attempt by attempt. Users may ask about their own jobs."""
    with asker(controller) as client:
        document = client.timeline(job)
    if json:
        return render.as_json(document)
    for one in decode(list[api.TimelineView], document):
        _show_phases(one)
        if events:
            _show_events(one)
        render.console.print()


def _show_phases(one: api.TimelineView) -> None:
    total = sum(phase.seconds for phase in one.phases)
    head = Text.assemble(
        ("job ", "bold"), (one.job_id, "bold"), f"  attempt {one.attempt}  ",
        render.state(one.state), f"  {render.duration(total)} in all",
    )  # fmt: skip
    render.console.print(head)
    if why := one.waiting or _why_over(one):
        render.say(why)
    width = min(_BAR_WIDTH, render.console.width - 4)
    parts = [(phase.seconds, render.PHASE_STYLES[phase.name]) for phase in one.phases]
    render.console.print(Text("  ") + render.bar(parts, width))
    for phase in one.phases:
        line = Text("  ")
        line.append(f"{phase.name:<8}", style=render.PHASE_STYLES[phase.name])
        line.append(f"{render.duration(phase.seconds):>9}")
        render.console.print(line)
        reasons = [entry.reason for entry in one.entries if phase.name == "queued" and entry.event == "admitted"]
        if phase.name == "run":
            reasons = [_move_line(entry) for entry in one.entries if entry.event in _MOVES and entry.state]
        for text in reasons or _stage_lines(phase.stages, render.console.width - _STAGE_INDENT):
            render.console.print(Text(" " * _STAGE_INDENT + text, style="dim"))


def _why_over(one: api.TimelineView) -> str:
    """Why the attempt has ended; empty while it has not."""
    if one.state not in get_args(Outcome):
        return ""
    return next((entry.reason for entry in reversed(one.entries) if entry.state == one.state), "")


_MOVES = {"move": "moves", "moved": "moved", "stayed": "did not move"}


def _move_line(entry: api.TimelineEntry) -> str:
    return f"at {render.duration(entry.at)} {_MOVES[entry.event]}" + (f" ({entry.reason})" if entry.reason else "")


def _show_events(one: api.TimelineView) -> None:
    table = render.table("AT", "OF", "EVENT", "STATE", "REASON", right=("AT",), fold=("REASON",))
    for entry in one.entries:
        table.add_row(f"{entry.at:.3f} s", entry.subject, entry.event, render.state(entry.state), entry.reason)
    render.console.print(table)


def _stage_lines(stages: Sequence[tuple[str, float]], width: int) -> list[str]:
    """The stages as `name 12 ms`, as many on a line as fit."""
    lines: list[str] = []
    for name, seconds in stages:
        item = f"{name} {seconds * 1000:.0f} ms"
        if lines and len(lines[-1]) + len(item) + 3 <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


# --- multiverse capacity ----------------------------------------------------------------------------


def capacity(
    request: Annotated[
        str,
        typer.Option("--for", metavar="REQUEST", help='One request, as for sbatch: "-N 2 -c 4 --mem=8G -t 1:00:00"'),
    ] = "",
    json: render.Json = False,
    controller: Controller = "",
) -> None:
    """Show which sizes would start at once and how many of each, and what is free beside what is used.

    With --for, whether one request would start at once; if not, why, and when it is expected to."""
    asked = parse_request(request) if request else None
    with asker(controller) as client:
        document = client.trial(**asked) if asked is not None else client.capacity()
    if json:
        render.as_json(document)
    elif asked is not None:
        _show_trial(decode(api.TrialView, document))
    else:
        _show_capacity(decode(api.CapacityView, document))


def _show_capacity(found: api.CapacityView) -> None:
    _show_usage(found.usage)
    columns: dict[str, Callable[[api.StartableView], str | Text]] = {
        "NODE OF": lambda one: number_of(one.cpus, "CPU"),
        "MEMORY": lambda one: render.memory(one.memory),
        "DISK": lambda one: render.memory(one.disk) if one.disk else "–",
        "START AT ONCE": lambda one: Text(str(one.now), style="bold green" if one.now else "dim"),
        "AFTER A TEMPLATE IS BUILT": lambda one: f"+ {one.with_template}" if one.with_template else "–",
    }
    render.listed(found.sizes, "No host that takes new VMs is in sight.", columns, right=tuple(columns)[1:])
    render.console.print(f"Each line for itself: jobs of one node, of image {found.image}.")
    if found.blocked:
        name = f"Job {found.blocked_by}" if found.blocked_by else "A job"
        text = (
            f"{name} waits for capacity and comes first: a later job starts only if it does not delay it by its time"
            " limit. Ask with --for."
        )
        render.say(text, indent=0, style="yellow")
    elif found.waiting:
        waits = "waits" if found.waiting == 1 else "wait"
        render.console.print(
            f"{number_of(found.waiting, 'job')} {waits} for something else than capacity.", markup=False
        )


def _show_usage(usage: api.CapacityUsageView) -> None:
    names = ("jobs", "spares", "templates", "free", *(("closed",) if usage.closed_hosts else ()), "total")
    table = render.table("", "CPUS", "MEMORY", "DISK", right=("CPUS", "MEMORY", "DISK"))
    for name in names:
        size: api.SizeView = getattr(usage, name)
        label = Text(_LABELS.get(name, name), style="bold green" if name == "free" else "")
        table.add_row(label, str(size.cpus), render.memory(size.memory), render.memory(size.disk))
    takes = "takes" if usage.closed_hosts == 1 else "take"
    closed = f", {usage.closed_hosts} of them {takes} no new VM" if usage.closed_hosts else ""
    render.console.print(f"{number_of(usage.hosts, 'host')} in sight{closed}")
    render.console.print(table)


_LABELS = {"closed": "on closed hosts", "total": "in all"}


def _show_trial(found: api.TrialView) -> None:
    if found.starts:
        render.console.print(Text("It would start at once.", style="bold green"))
        where = f" on {found.hosts}" if found.hosts and found.hosts not in found.why else ""
        render.say(f"{found.why}{where}")
        return
    said = "It would be refused." if found.never else "It would wait."
    render.console.print(Text(said, style="bold red" if found.never else "bold yellow"))
    render.say(found.why)
    if found.ahead:
        behind = f", and job {found.behind} keeps the others waiting" if found.behind else ""
        render.say(f"{number_of(found.ahead, 'job')} would be ahead of it{behind}.")
    if found.expected is not None:
        render.say(f"It would start {when(found.expected)} at the latest, by the time limits.")
    elif found.alone is not None and not found.never:
        render.say(f"Without other jobs that wait, it would start {when(found.alone)} at the latest.")
    elif not found.never:
        render.say("Nobody can tell when: no time limit says by when there is room for it.")
    show_groups(found.groups, every=False)


# --- multiverse images ------------------------------------------------------------------------------


def images(json: render.Json = False, controller: Controller = "") -> None:
    """Show the images that a job may request with --constraint (-C), and what is in each. Users may ask, too."""
    with asker(controller) as client:
        document = client.images()
    if json:
        return render.as_json(document)
    columns: dict[str, Callable[[api.ImageView], str | Text]] = {
        "IMAGE": lambda one: one.name,
        "HOSTS": lambda one: str(one.hosts),
        "CONTENTS": lambda one: ("jobs get it without -C; " if one.default else "") + (one.about or "unknown here"),
    }
    found = decode(list[api.ImageView], document)
    render.listed(found, "There is no image.", columns, right=("HOSTS",), fold=("CONTENTS",))
    render.say("A job requests one by its name: sbatch -C IMAGE. HOSTS: how many of those in reach have it.", indent=0)
