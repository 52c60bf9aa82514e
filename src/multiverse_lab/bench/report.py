"""The page of measured figures: what a benchmark's JSON says in a table, each figure with its baseline beside it, and
the machine, the commit and the date of the run.

The page has a region for each benchmark, between two marks. Only what is between them is written; all other text is
for people to write. A region that the page does not have yet is added at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiverse.core.errors import Refused
from multiverse_lab.bench.figures import Figure, differ, flatten

_BEGIN, _END = "<!-- measured: {name} -->\n", "<!-- end of measured -->\n"


@dataclass(frozen=True, slots=True)
class BenchmarkMachine:
    """Where a run was. Memory in MiB. `load` is the machine's load over the minute before it: other work."""

    cpu: str
    cpus: int
    memory: int
    slurm: str
    qemu: str
    load: float


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """A run of `multiverse bench` with these words: what it printed as JSON, when, and on which commit and machine.
    None or empty: that is not known."""

    words: tuple[str, ...]
    at: str
    commit: str
    machine: BenchmarkMachine | None
    result: Any

    @property
    def name(self) -> str:
        """The name of its region: that of the benchmark. A burst that is none is called steady; moves have a region for
        each way."""
        if self.words[0] == "move":
            return f"move-{self.result['how']}"
        if self.words[0] == "burst" and self.result.get("every") is not None:
            return "steady"
        return self.words[0]


def document(run: BenchmarkRun) -> dict[str, Any]:
    """A run as it is kept in a file."""
    return asdict(run)


def read(name: str, found: Any, at: str) -> BenchmarkRun:
    """The run in a file of that name (without its ending) and date: one that was kept, or what a benchmark printed.
    Raises `Refused` if it is neither."""
    if isinstance(found, dict) and {"words", "result"} <= found.keys():
        machine = found["machine"] and BenchmarkMachine(**found["machine"])
        return BenchmarkRun(tuple(found["words"]), found["at"], found["commit"], machine, found["result"])
    if isinstance(found, dict) and {"figures", "runs", "host", "commit", "at"} <= found.keys():  # of `bench paper`
        return BenchmarkRun((name,), found["at"], found["commit"], BenchmarkMachine(**found["host"]), found)
    if not isinstance(found, dict | list) or not flatten(name, found):
        raise Refused(f"{name} has no figures of a benchmark", hint="give files that bench NAME --json has printed")
    return BenchmarkRun((name,), at, "", None, found)


Row = tuple[str, ...]
Table = tuple[Row, Sequence[Row]]
"""The heads of the columns, and the rows."""


def region(run: BenchmarkRun) -> str:
    """What the page says of a run, without its marks."""
    heads, rows = _TABLES.get(run.name, _generic)(run)
    lines = [f"{_where(run)}\n", _line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    said = _NOTES.get(run.name)
    note = said(run.result) if said is not None else ""
    return "\n".join(lines) + "\n" + (f"\n{note}\n" if note else "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _where(run: BenchmarkRun) -> str:
    said = [f"`multiverse bench {' '.join(run.words)}`", run.at]
    if run.commit:
        said.append(f"commit {run.commit[:12]}{'+' if run.commit.endswith('+') else ''}")
    if run.machine is not None:
        one = run.machine
        cores = f"{one.cpus} CPU{'s' if one.cpus > 1 else ''}"
        said += [f"{cores} ({one.cpu})", f"{one.memory / 1024:.0f} GiB"]
        said += [f"Slurm {one.slurm}", f"QEMU {one.qemu}", f"a load of {one.load:.1f} before it"]
    if isinstance(run.result, Mapping) and run.result.get("accelerator"):
        said.insert(2, f"guests by {run.result['accelerator']}")
    return ", ".join(said) + "."


def written(page: str, runs: Sequence[BenchmarkRun]) -> str:
    """The page with the regions of these runs."""
    for run in runs:
        begin = _BEGIN.format(name=run.name)
        text = f"{begin}{region(run)}{_END}"
        if begin not in page:
            page = f"{page.rstrip()}\n\n## {run.name.capitalize()}\n\n{text}"
            continue
        before, _, rest = page.partition(begin)
        if _END not in rest:
            raise Refused(f"the region of {run.name} has no end in the page", hint=f"add the line {_END.strip()}")
        page = f"{before}{text}{rest.partition(_END)[2]}"
    return page


@dataclass(frozen=True, slots=True)
class ChangedFigure:
    """A figure of a run beside the same of the run before, as the page says them, each with its 95 % interval."""

    row: str
    column: str
    before: str
    now: str


_FIGURE = re.compile(r"(?P<value>-?[\d,.]+)(?: \S+)? \((?P<low>-?[\d,.]+) to (?P<high>-?[\d,.]+)\)")
_RUN = re.compile(r"`(?P<command>[^`]*)`, (?P<at>[\d-]+),.*?(?P<machine>\d+ CPUs? \(.*?\), \d+ GiB)?(?:, Slurm .*)?\.")


def changes(page: str, run: BenchmarkRun) -> tuple[str, list[ChangedFigure]]:
    """The day of the run that the page has, and which figures with an interval differ from it, as for `bench compare`.
    The day is empty if the page has no run by the same command on such a machine."""
    begin = _BEGIN.format(name=run.name)
    before, now = page.partition(begin)[2].partition(_END)[0], region(run)
    was, is_ = _RUN.match(before), _RUN.match(now)
    if was is None or is_ is None or any(was[part] != is_[part] for part in ("command", "machine")):
        return "", []
    old, found = _figures(before), []
    for (row, column), text in _figures(now).items():
        one, other = _FIGURE.fullmatch(old.get((row, column), "")), _FIGURE.fullmatch(text)
        if one is not None and other is not None and differ(_figure(one), _figure(other)):
            found.append(ChangedFigure(row, column, one[0], text))
    return was["at"], found


def _figures(text: str) -> dict[tuple[str, str], str]:
    """The cells of a region's table by row and column."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    heads, *rows = [[cell.strip() for cell in line] for line in lines] or [[]]
    return {(row[0], head): cell for row in rows[1:] for head, cell in zip(heads[1:], row[1:], strict=False)}


def _figure(found: re.Match[str]) -> Figure:
    return Figure(*(float(found[part].replace(",", "")) for part in ("value", "low", "high")))


def regions(page: str) -> list[str]:
    """The names of the regions that a page has, in their order."""
    return re.findall(_BEGIN.format(name=r"([\w-]+)"), page)


# --- the tables ------------------------------------------------------------------------------------


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}{unit and f' {unit}'}"


def _interval(one: Mapping[str, float | None] | None, unit: str = "", digits: int = 2) -> str:
    """A median or an estimate, with its 95 % interval if that is known."""
    if one is None:
        return "–"
    middle = one["p50"] if "p50" in one else one["value"]
    if one["low"] is None:
        return _number(middle, unit, digits)
    return f"{_number(middle, unit, digits)} ({one['low']:,.{digits}f} to {one['high']:,.{digits}f})"


def _latency(run: BenchmarkRun) -> Table:
    beside = {one["kind"]: one for one in run.result["beside"]}
    rows = [
        (
            name,
            _interval(one["submit_to_start"], "s"),
            _number(one["submit_to_start"]["p95"], "s"),
            _interval(beside[name]["ratio"]) if name in beside else "1",
            _interval(beside[name]["excess"], "s") if name in beside else "0",
            _number(one["cpu_s"], "s"),
            _number(one["uss_mib"], "MiB", 1),
        )
        for name, one in run.result["kinds"].items()
    ]
    heads = (
        "kind",
        "submission to first instruction, median",
        "95th percentile",
        "× bare metal",
        "more than bare metal",
    )
    return (*heads, "CPU time until then", "memory of its own"), rows


def _stages(found: Mapping[str, Any]) -> str:
    """The stages of each kind, medians in milliseconds."""
    lines = []
    for name, one in found["kinds"].items():
        parts = ", ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in one["stages"].items())
        if parts:
            lines.append(f"- {name}, stages in ms: {parts}")
    return "\n".join(lines)


def _burst(run: BenchmarkRun) -> Table:
    found = run.result
    ratios = {one["over"]: one for one in found["ratios"]}
    rows = [
        (
            name,
            _number(one["provisioning"]["mean"], "s"),
            _interval(one["provisioning"], "s"),
            _interval(ratios[name]["means"], digits=1) if name in ratios else "1",
            _number(one["submit_to_start"]["mean"], "s", 1),
            _number(one["all_ran"], "s", 1),
        )
        for name, one in found["kinds"].items()
    ]
    paper = found["paper"]
    for kind, times in (("full", paper["ratio"]), ("instant", 1.0)):
        rows.append((f"published: {kind}", _number(paper[kind], "s", 0), "–", _number(times, "", 1), "–", "–"))
    heads = (
        "kind",
        "provisioning, mean",
        "median",
        "× instant, of means",
        "submission to start, mean",
        "all ran after",
    )
    return heads, rows


def _throughput(run: BenchmarkRun) -> Table:
    found = run.result
    rows = [
        (
            name,
            _number(one["tasks_per_minute"], "", 1),
            f"{found['beside'][name]:.0%}" if name in found["beside"] else "100%",
            f"{one['computing']:.1%}",
            f"{one['machine']:.0%}",
            *(f"{one['daemons'].get(daemon, 0.0):.0%}" for daemon in ("controller", "slurmctld")),
            one["bounded_by"],
        )
        for name, one in found["kinds"].items()
    ]
    paper = found["paper"]
    published = (f"{paper['tasks_per_minute']:.1f}", "–", f"{paper['computing']:.1%}", "–", "–", "–", "36 s a clone")
    rows.append(("published: instant", *published))
    heads = ("kind", "tasks a minute", "of bare metal", "computes", "machine", "controller", "slurmctld", "bounded by")
    return heads, rows


def _parts(found: Mapping[str, Any]) -> str:
    """What a CPU spends on each task, in seconds."""
    lines = []
    for name, one in found["kinds"].items():
        parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in one["stages"].items())
        lines.append(f"- {name}, seconds of a CPU for each task: {parts}")
    return "\n".join(lines)


def _density(run: BenchmarkRun) -> Table:
    rows = [
        (
            str(one["vms"]),
            _number(one["private"], "MiB", 1),
            _number(one["shared"], "MiB", 1),
            _number(one["used"] / one["vms"], "MiB", 1),
            _number(one["available"] / 1024, "GiB", 1),
            f"{one['busy']:.0%}",
            f"{one['vm_cpu']:.2%}",
        )
        for one in run.result["steps"]
    ]
    heads = (
        "VMs with a job",
        "own memory, median",
        "shared",
        "machine's memory more than before the first VM, for each",
    )
    return (*heads, "available", "CPUs of the machine, idle VMs", "of one CPU, each"), rows


def _queue(run: BenchmarkRun) -> Table:
    rows = []
    for one in run.result["phases"]:
        start, bare = (_middle(one[which]) for which in ("start", "bare"))
        idle, cycles = one["idle"], one["cycles"]
        rows.append((
            one["name"],
            _number(start, "s"),
            _number(bare, "s"),
            _number(start / bare if start and bare else None),
            *(f"{idle[daemon]:.1%}" if daemon in idle else "–" for daemon in ("controller", "slurmctld")),
            *(_number(cycles[which] / 1000, "ms", 1) if which in cycles else "–" for which in ("main", "backfill")),
        ))  # fmt: skip
    heads = ("queue", "submission to first instruction, median", "on bare metal", "× bare metal", "controller, idle")
    return (*heads, "slurmctld, idle", "main cycle", "backfill cycle"), rows


def _middle(samples: Sequence[float]) -> float | None:
    ordered = sorted(samples)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else None


def _ratios(found: Mapping[str, Any]) -> str:
    """The phases against their baseline."""
    return "\n".join(
        f"- {name}, {which} against the same without: {_interval(one)}"
        for name, figures in found["ratios"].items()
        for which, one in figures.items()
    )


def _planner(run: BenchmarkRun) -> Table:
    evicts = all(one.get("evicting") for one in run.result)
    rows = [
        (
            f"{one['vms']:,}",
            f"{one['jobs']:,}",
            *(_interval(one[which], "ms", 1) for which in ("one_host", "unchanged", "one_ended", "all_rows")),
            _number(one["all_rows"]["p50"] / one["one_ended"]["p50"], "", 1),
            *((f"{one['candidates']:,}", _interval(one["evicting"], "ms", 1)) if evicts else ()),
        )
        for one in run.result
    ]
    heads = ("VMs", "queued jobs", "one host observed", "nothing changed", "one job ended", "a pass over all rows")
    evicting = ("candidates", "one host observed, and evictions planned") if evicts else ()
    return (*heads, "× one job ended", *evicting), rows


def _submissions(run: BenchmarkRun) -> Table:
    rows = [
        (
            f"{one['rate']:g} a second, {'served' if one['served'] else 'waiting'}",
            _number(one["done"], "", 0),
            _number(one["alone"], "", 0),
            f"{one['done'] / one['alone']:.0%}",
            _interval(one["lag"], "s", 3),
        )
        for one in run.result
    ]
    return ("submitted", "done a second", "the store alone", "of the store alone", "until committed, median"), rows


def _move(run: BenchmarkRun) -> Table:
    rows = [
        (
            name,
            *(_number(one[which], "s") for which in ("total", "outside", "usual")),
            _number(one["sent"] / (1 << 20), "MiB", 0),
            f"{one['slowdown']:.0%}",
            " + ".join(_number(one[which]) for which in ("cpu_old", "cpu_new", "cpu_agents")) + " s",
            _number(one["cpu_usual"], "s"),
        )
        for name, one in run.result["cases"].items()
    ]
    rows += [
        ("published: 500 MB (Sandia)", "10 to 13 s", *("–",) * 6),
        ("published: idle 8 GiB (QEMU, KVM)", "2.3 s", "0.03 s", *("–",) * 5),
    ]
    heads = ("job", "moved, median", "longest pause of the job", "the same when it does not move", "sent")
    return (*heads, "job slower by", "CPU: old host + new host + agents", "QEMU's CPU when it does not move"), rows


def _save(run: BenchmarkRun) -> Table:
    rows = [
        (
            name,
            *(_number(one[which], "s") for which in ("start", "frozen", "requeued", "written")),
            _number(one["size_mib"], "MiB", 0),
            *(_number(one[which], "s") for which in ("at_disk_speed", "resume")),
        )
        for name, one in run.result["cases"].items()
    ]
    heads = ("job", "fresh start", "frozen", "queued again", "written", "state", "as many bytes at the storage's speed")
    return (*heads, "from the resume to its next instruction"), rows


def _checkpoint(run: BenchmarkRun) -> Table:
    rows = [
        (
            name,
            *(_number(one[which], "s") for which in ("total", "pause", "usual")),
            _number(one["size"] / (1 << 20), "MiB", 0),
            f"{one['slowdown']:.0%}",
            f"{one['lost']:.1%}",
        )
        for name, one in run.result["cases"].items()
    ]
    heads = ("job", "complete, median", "longest pause of the job", "the same just before", "size", "slower meanwhile")
    return (*heads, "slower with one each 60 s"), rows


def _sleep(run: BenchmarkRun) -> Table:
    rows = [
        (
            name,
            _number(one["asleep"] or None, "s"),
            *(_number(one[which], "s") for which in ("first", "middle", "last")),
            *(_number(one[which], "MiB", 0) for which in ("memory", "left")),
        )
        for name, one in run.result["cases"].items()
    ]
    heads = (f"{run.result['jobs']} VMs", "all asleep", "first job goes on", "the one in the middle", "the last")
    return (*heads, "memory of their own", "while suspended"), rows


def _spread(run: BenchmarkRun) -> Table:
    rows = [
        (name, *(_number(one[which], "s") for which in ("frozen", "spread", "usual", "resume")))
        for name, one in run.result["cases"].items()
    ]
    heads = ("job", "all frozen, median", "between the first and the last VM", "the same of reports while it runs")
    return (*heads, "from the resume until all go on"), rows


def _containers(run: BenchmarkRun) -> Table:
    beside = {one["kind"]: one for one in run.result["beside"]}
    rows = [
        (
            name,
            _interval(one["submit_to_start"], "s"),
            _interval(beside[name]["ratio"]) if name in beside else "1",
            _interval(beside[name]["excess"], "s") if name in beside else "0",
            _interval(one["cpu_s"], "s"),
            _interval(one["uss_mib"], "MiB", 1),
        )
        for name, one in run.result["kinds"].items()
    ]
    heads = ("kind", "submission to first instruction, median", "× bare metal", "more than bare metal")
    return (*heads, "CPU time until then", "memory of its own"), rows


def _isolation(found: Mapping[str, Any]) -> str:
    """What each way isolates, and what made the containers."""
    ways = list(found["kinds"])
    rows = [(row, *(cells[way] for way in ways)) for row, cells in found["isolation"].items()]
    lines = [_line(("a job …", *ways)), _line(["---"] * (len(ways) + 1)), *map(_line, rows)]
    versions = "; ".join(found["programs"].values())
    return "\n".join([*lines, *(["", f"Containers by {versions}."] if versions else [])])


def _paper(run: BenchmarkRun) -> Table:
    rows = [
        (name, one["published"], _interval(one["ours"], one["unit"]), _number(one["in_paper_seconds"], "s", 0))
        for name, one in run.result["figures"].items()
        if one["ours"] is not None
    ]
    return ("figure", "published", "here (95 %)", "here, in the paper's time"), rows


def _paper_scale(found: Mapping[str, Any]) -> str:
    scale, seeds = found["scale"], ", ".join(map(str, found["seeds"]))
    return (
        f"{scale['share']:.0%} of the paper's cluster and of its jobs: {scale['cpus']} CPUs. A second of the paper is"
        f" {scale['second']:.3f} s here. Seeds: {seeds}."
    )


def _generic(run: BenchmarkRun) -> Table:
    """Every figure, where no table of its own is known."""
    figures = flatten(run.words[0], run.result)
    rows = [
        (name.partition(".")[2], f"{one.value:.4g}", f"{one.low:.4g} to {one.high:.4g}" if one.low < one.high else "–")
        for name, one in figures.items()
    ]
    return ("figure", "value", "95 %"), rows


_TABLES: dict[str, Callable[[BenchmarkRun], Table]] = {
    "latency": _latency,
    "burst": _burst,
    "steady": _burst,
    "throughput": _throughput,
    "density": _density,
    "queue": _queue,
    "neighbours": _queue,
    "planner": _planner,
    "submissions": _submissions,
    "save": _save,
    "checkpoint": _checkpoint,
    "sleep": _sleep,
    "spread": _spread,
    "move-encrypted": _move,
    "move-compressed": _move,
    "move-private": _move,
    "containers": _containers,
    "paper": _paper,
}
_NOTES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "latency": _stages,
    "throughput": _parts,
    "queue": _ratios,
    "neighbours": _ratios,
    "containers": _isolation,
    "paper": _paper_scale,
}
