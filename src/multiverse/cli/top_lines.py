"""What `multiverse top` shows of a snapshot: lines and rows for a terminal of some width."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.text import Text

from multiverse.api import STAGES, HostView, JobView, Snapshot, VmView
from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.core.model.basics import number_of

_LONGEST_NAME = (20, 64)  # characters of a host's name, on a narrow and on a wide terminal
WIDE = 110  # columns from which on more is shown of each job and host
LISTED = sorted(STAGES, key=lambda stage: stage != "provisioning")  # the order in which jobs are listed
_WORDS = {"provisioning": "preparing"}
_STYLES = {"waiting": "yellow", "provisioning": "cyan", "running": "bold green", "ending": "magenta"}
_LOOKS = {"serving": "green", "moving": "green", "settling": "green", "planned": "cyan", "starting": "cyan",
          "parked": "bright_black", "joined": "bright_black",
          "lost": "red", "dead": "red", "orphan": "red"}  # fmt: skip
_BLOCKS = " ▁▂▃▄▅▆▇█"


def head(snapshot: Snapshot, width: int) -> list[Text]:
    """The site, its jobs by stage, what is free, what happens, and the alerts: four or five lines."""
    summary, up = snapshot.summary, [host for host in snapshot.hosts if host.away_since is None]
    cpus = [sum(host.usable.cpus for host in up), sum(host.claimed.cpus for host in up)]
    memory = [sum(host.usable.memory for host in up), sum(host.claimed.memory for host in up)]
    counts = [Text(f"{summary.jobs[stage]} {_WORDS.get(stage, stage)}", style=_STYLES[stage]) for stage in STAGES]
    hosts = f"  {number_of(len(snapshot.vms), 'VM')} on {len(up)} of {number_of(len(snapshot.hosts), 'host')}"
    first = Text.assemble((summary.site, "bold"), "  ", Text(", ").join(counts), hosts)
    free = Text.assemble(
        ("free ", "bold"), f"{max(0, cpus[0] - cpus[1])} of {number_of(cpus[0], 'CPU')}, ",
        f"{render.memory(max(0, memory[0] - memory[1]))} of {render.memory(memory[0])}",
    )  # fmt: skip
    lines = [first, free, _rates(snapshot, width), _latencies(snapshot, width)]
    if unknown := [f"{name}: {why}" for name, why in summary.sources.items() if why]:
        lines.append(Text("unknown: " + "; ".join(unknown), style="red"))
    if snapshot.alerts:
        more = f" (and {len(snapshot.alerts) - 1} more: multiverse status)" if len(snapshot.alerts) > 1 else ""
        lines.append(Text.assemble(("alert ", "bold red"), render.plain(snapshot.alerts[0].message), (more, "dim")))
    return lines


def _rates(snapshot: Snapshot, width: int) -> Text:
    rates = snapshot.summary.rates
    minute = round(60 / rates.step)
    text = Text("in a minute ", style="bold")
    for name in ("submitted", "started", "ended", "failures"):
        counts = rates.series[name]
        text.append(f"{sum(counts[-minute - 1 : -1])} {name} ", style="")
        if width >= WIDE:
            text.append(spark(counts[-16:]) + " ", style="red" if name == "failures" else "cyan")
    return text


def _latencies(snapshot: Snapshot, width: int) -> Text:
    found = snapshot.summary.rates.latencies
    start = found["start"]
    if not start.count:
        return Text.assemble(("start ", "bold"), ("no job has started in the last quarter of an hour", "dim"))
    line = Text.assemble(("start ", "bold"), f"{render.duration(start.p50)} median, {render.duration(start.p95)} 95 % ")
    parts = ", ".join(f"{phase} {render.duration(found[phase].p50)}" for phase in ("queued", "clone", "join", "launch"))
    if line.cell_len + len(parts) + 2 <= width:
        line.append(f"({parts})", style="dim")
    return line


def spark(counts: Sequence[int]) -> str:
    """Counts as a line of blocks, the highest of them full."""
    most = max(*counts, 1)
    return "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // most)] for count in counts)


# --- hosts -----------------------------------------------------------------------------------------


def host_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """A line for each host: its name and state, a cell for each CPU, and what is free, or why it is out of reach."""
    vms: defaultdict[str, list[VmView]] = defaultdict(list)
    for vm in snapshot.vms:
        for name in filter(None, (vm.host, vm.other_host)):  # while it moves it takes CPUs at both
            vms[name].append(vm)
    hosts = sorted(snapshot.hosts, key=lambda host: host.name)
    longest = min(_LONGEST_NAME[width >= render.WIDE], max((len(host.name) for host in hosts), default=0))
    return [_host_line(host, vms[host.name], longest, width) for host in hosts]


def _host_line(host: HostView, vms: Sequence[VmView], longest: int, width: int) -> Text:
    line = Text(f"{host.name[:longest]:<{longest}} ", style="bold")
    if host.state != "up":
        line.append_text(render.state(host.state)).append(" ")
    cpus, memory = host.usable.cpus - host.claimed.cpus, host.usable.memory - host.claimed.memory
    free = f" {number_of(cpus, 'CPU'):>8} {render.memory(memory):>9} free"
    cells = _cells(host, vms)
    room = max(8, width - line.cell_len - len(free))
    if host.away_since is not None:
        return line.append_text(render.plain(host.why or host.reason or "out of reach"))
    line.append_text(_scaled(cells, room))
    line.append(" " * (width - line.cell_len - len(free)))
    line.append(free, style="dim")
    return line


def _cells(host: HostView, vms: Sequence[VmView]) -> list[str]:
    """The style of each CPU of the host: those of VMs first, then the free ones (an empty style)."""
    taken = [_LOOKS.get(vm.state, "magenta") for vm in sorted(vms, key=lambda vm: vm.since) for _ in range(vm.cpus)]
    return taken + [""] * (host.usable.cpus - len(taken))


def _scaled(cells: Sequence[str], room: int) -> Text:
    """The cells, or as many of them as there is room for, in proportion."""
    shown = cells if len(cells) <= room else [cells[i * len(cells) // room] for i in range(room)]
    text = Text()
    for style in shown:
        text.append("■" if style else "·", style=style or "bright_black")
    return text


# --- jobs ------------------------------------------------------------------------------------------


def columns(width: int) -> tuple[str, ...]:
    more = ("USER", "HOSTS") if width >= WIDE else ()
    return ("JOB", "NAME", *more[:1], "STATE", "FOR", "SIZE", *more[1:], "WHY")


def listed(snapshot: Snapshot, stage: str = "", text: str = "") -> list[JobView]:
    """The jobs of a stage (empty: of all) with a text in their id, name, user or reason, as they are listed."""
    words = text.lower().split()
    found = [job for job in snapshot.jobs if (not stage or job.stage == stage) and _has(job, words)]
    return sorted(found, key=lambda job: (LISTED.index(job.stage), -job.since if job.stage == "running" else job.order))


def _has(job: JobView, words: Sequence[str]) -> bool:
    text = " ".join((job.job_id, job.name, job.user, job.state, job.waiting, job.reason)).lower()
    return all(word in text for word in words)


LEAST = 40  # columns that a reason needs beside its job; a longer one has lines of its own where there are fewer


def job_rows(snapshot: Snapshot, jobs: Sequence[JobView], width: int) -> tuple[Text, list[Text]]:
    """The titles, and these jobs with one or more lines each. No reason is cut."""
    vms, titles = {vm.name: vm for vm in snapshot.vms}, columns(width)
    cells = [job_cells(job, vms, snapshot.summary.wall, width) for job in jobs]
    rows = [tuple(Text(title, style="bold") for title in titles), *cells]
    sizes = [max(cell.cell_len for cell in column) + 2 for column in list(zip(*rows, strict=True))[:-1]]
    heading, *lines = [_job_lines(row, sizes, titles.index("FOR"), width) for row in rows]
    return heading, lines


def _job_lines(cells: Sequence[Text], sizes: Sequence[int], right: int, width: int) -> Text:
    *first, why = cells
    text, used = Text(), sum(sizes)
    for number, (cell, size) in enumerate(zip(first, sizes, strict=True)):
        blank = Text(" " * (size - 2 - cell.cell_len))
        text.append_text(Text.assemble(*((blank, cell) if number == right else (cell, blank)), "  "))
    if width - used < min(LEAST, why.cell_len):
        text.rstrip()
        text.append("\n  ")
        used = 2
    wrapped = why.wrap(console, max(1, width - used))
    for line in wrapped:
        line.rstrip()
    return text.append_text(Text("\n" + " " * used).join(wrapped))


def job_cells(job: JobView, vms: Mapping[str, VmView], now: float, width: int) -> tuple[Text, ...]:
    wide = width >= WIDE
    nodes = f"{job.nodes}×" if job.nodes > 1 else ""
    hosts = sorted({render.places(vms[name]) for name in job.vms if name in vms})
    names = ", ".join(hosts[:2]) + (f" and {len(hosts) - 2} more" if len(hosts) > 2 else "")
    state = Text("quarantined", style="bold red") if job.quarantined else _state(job)
    why = job.quarantined or job.waiting or job.reason or ("" if wide else f"on {names}" if names else "")
    name = render.plain(job.name)
    if width < render.WIDE:
        name.truncate(18 if wide else 10, overflow="ellipsis")
    return (
        Text(job.job_id, style="bold"), name, *([render.plain(job.user)] if wide else []), state,
        Text(render.duration(max(0.0, now - job.since))), Text(f"{nodes}{job.cpus} CPU {render.memory(job.memory)}"),
        *([Text(names)] if wide else []), render.plain(why),
    )  # fmt: skip


def _state(job: JobView) -> Text:
    return Text(_WORDS.get(job.stage, job.stage), style=_STYLES[job.stage])
