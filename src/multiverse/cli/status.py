"""`multiverse status`, `repair`, `prune` and `audit`: the state of the controller, what is wrong, and what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from multiverse.api import Alert, IdentityAudit, PoolView, PruneView, SourceView, StatusView, VmIdentity, decode
from multiverse.cli import progress, render
from multiverse.cli.render import Watch, watched
from multiverse.client import Client
from multiverse.core.errors import Refused, Unknown
from multiverse.core.model.basics import number_of

# --- multiverse status ------------------------------------------------------------------------------

PATIENCE = 5.0  # seconds for which an answer of a source may be awaited until that is said
ALERTS_PRESENT = 1  # the exit status when there is an alert with something to do


def status(json: render.Json = False, watch: Watch = False) -> None:
    """Show the state of the controller, and each alert with its remedy.

    Exits with 1 when there is an alert that can be remedied. Settings of Slurm that do not reach VMs (kind "unserved")
    are only shown."""
    watched(lambda: _status(json=json), again=watch)


def _status(*, json: bool) -> None:
    with Client() as client:
        document = client.status()
    found = decode(StatusView, document)
    if json:
        render.as_json(document)
    else:
        _show(found)
    if any(alert.kind != "unserved" for alert in found.alerts):
        raise typer.Exit(ALERTS_PRESENT)


def _show(found: StatusView) -> None:
    _line(
        "controller",
        f"up for {render.duration(found.up)}, pid {found.pid}, site {found.site}, version {found.version}",
    )
    for source in found.sources:
        _line(source.name, _source(source))
    jobs = found.jobs
    _line("jobs", f"{jobs['waiting']} waiting, {jobs['provisioning']} being provisioned, {jobs['running']} running, "
          f"{jobs['ending']} ending")  # fmt: skip
    for label, counts in (("VMs", found.vms), ("templates", found.templates)):
        _line(label, ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none")
    for pool in found.pools:
        _line("pool", _pool(pool))
    render.console.print()
    late = [source for source in found.sources if source.known and source.awaited > PATIENCE]
    for source in late:
        _show_late(source)
    if not found.alerts:
        render.console.print("No alerts yet." if late else "No alerts.", style="" if late else "green")
    for alert in found.alerts:
        _show_alert(alert)


def _source(source: SourceView) -> str:
    if source.known:
        return f"observed {render.duration(source.age)} ago"
    return f"unknown for {render.duration(source.unknown_for)}"


def _show_late(source: SourceView) -> None:
    """A source that is slow to answer may still do so, so this is no alert, and does not change the exit status."""
    what, check = (
        ("the scheduler", "scontrol ping") if source.name == "scheduler" else (source.name, "multiverse hosts")
    )
    since = render.moment(time.time() - source.awaited)
    render.say(f"{what} has not answered since {since} ({render.duration(source.awaited)})", indent=0, style="yellow")
    render.say(f"to do: see whether it answers: {check}; if it fails to, an alert says why")


def _pool(pool: PoolView) -> str:
    size = f" of {number_of(pool.cpus, 'CPU')}, {render.memory(pool.memory)}" if pool.cpus else ""
    offered = f", {pool.offered} on offer" if pool.offered else ""
    creating = f", {pool.creating} being created" if pool.creating else ""
    return (
        f"{pool.ready} of {pool.wanted} {pool.depth} {pool.image}{size}{offered}{creating}"
        f" ({pool.least} to {pool.most} by the arrival rate)"
    )


WHAT = {
    "source": "no answer",
    "hints": "no hints of new jobs",
    "store": "database",
    "memory": "memory of a host",
    "disk": "disk of a host",
    "image": "image",
    "quarantine": "record in quarantine",
    "back-off": "job without VMs",
    "avoided": "host that is avoided",
    "placement": "placement policy",
    "settings": "settings",
    "template": "broken template",
    "effect": "repeated failure",
    "host": "host out of reach",
    "fenced": "fenced hosts",
    "user": "unknown user",
    "eviction": "eviction held back",
    "orphan": "without a record",
    "nodes": "number of nodes in Slurm",
    "unserved": "setting of Slurm that does not reach VMs",
}
"""What an alert of each kind is of: its name is that of a record, a host, a partition or a user."""


def _show_alert(alert: Alert) -> None:
    """The message, the remedy, and what a repair would do, below the alert's name."""
    render.console.print(Text.assemble((alert.name, "bold red"), (f" ({WHAT[alert.kind]})", "dim")))
    lines = [Text(alert.message), Text(f"to do: {alert.remedy}")]
    if alert.repair:
        flag = " --fenced" if alert.needs_fenced else ""
        lines.append(Text(f"multiverse repair {alert.name}{flag}: {alert.repair}", style="dim"))
    for line in lines:
        render.console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _line(label: str, text: str) -> None:
    render.console.print(Text.assemble((f"{label:<12}", "bold"), text))


# --- multiverse repair ------------------------------------------------------------------------------

LIMIT = 900.0  # seconds to wait for the outcome of a repair: as long as a template may take to build
_OBSERVATIONS = 2  # observations of each source after which the controller has judged a repaired record anew


def repair(
    what: Annotated[list[str] | None, typer.Argument(help="Alerts by their names in status; all if none.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    fenced: Annotated[
        bool, typer.Option("--fenced", help="I assure that the named hosts are switched off: nothing runs on them.")
    ] = False,
) -> None:
    """Repair what status shows: say what will be done, ask, do it, and show the outcome."""
    with Client() as client:
        plan = _choose(decode(StatusView, client.status()).alerts, what or [], fenced=fenced)
        for alert in plan:
            render.console.print(Text.assemble((alert.name, "bold"), f": {alert.repair}"))
            if alert.needs_fenced:
                warning = "  If the host is not switched off, its jobs go on there and run a second time elsewhere."
                render.console.print(Text(warning, style="bold red"))
        if not plan:
            render.console.print("There is nothing to repair.")
        if dry_run or not plan:
            return
        if not yes:
            typer.confirm("Do it?", abort=True)
        failed = [alert for alert in plan if not _repaired(client, alert)]
    if failed:
        raise typer.Exit(1)


def _choose(found: Sequence[Alert], names: Sequence[str], *, fenced: bool) -> list[Alert]:
    """The alerts to repair. A repair that may end what runs must be named, and fencing needs the operator's
    assurance."""
    if fenced and not names:
        raise Refused("--fenced needs the name of a host", hint="multiverse repair HOST --fenced")
    if not names:
        for one in (one for one in found if one.repair and _must_be_named(one)):
            flag = " --fenced" if one.needs_fenced else ""
            text = f"{one.name} is left out; to repair it: multiverse repair {one.name}{flag}"
            render.console.print(text, markup=False)
        return [one for one in found if one.repair and not _must_be_named(one)]
    return [one for name in dict.fromkeys(names) for one in _named(found, name, fenced=fenced)]


def _must_be_named(alert: Alert) -> bool:
    """Whether the repair may end what still runs."""
    return alert.needs_fenced or alert.kind == "orphan"


def _named(found: Sequence[Alert], name: str, *, fenced: bool) -> list[Alert]:
    """The alerts of this name that have a repair. Raises `Refused` if there is none, or if it needs `fenced`."""
    same = [one for one in found if one.name == name]
    if not same:
        raise Refused(f"there is no alert named {name}", hint="see: multiverse status")
    repairable = [one for one in same if one.repair]
    if not repairable:
        raise Refused(f"there is no repair for {name}", hint=same[0].remedy)
    if repairable[0].needs_fenced and not fenced:
        raise Refused(
            f"{name} may still run its jobs, and they would run twice",
            hint=f"if it is switched off for certain: multiverse repair {name} --fenced",
        )
    return repairable


def _repaired(client: Client, alert: Alert) -> bool:
    """Repair one alert, show the outcome, and say whether the alert is gone."""
    client.repair(alert.name, fenced=alert.needs_fenced)
    with progress.step(f"repairing {alert.name}", f"repair of {alert.name} requested"):
        left = _outcome(client, alert)
    render.console.print(Text(f"  {alert.name} is repaired" if left is None else f"  not repaired: {left.message}"))
    return left is None


def _outcome(client: Client, alert: Alert) -> Alert | None:
    """The alert that is there again, if any, after the repair and a new judgement of the record."""
    deadline, first = time.monotonic() + LIMIT, None
    while time.monotonic() < deadline:
        time.sleep(0.1)
        status = decode(StatusView, client.status())
        same = next((one for one in status.alerts if (one.kind, one.name) == (alert.kind, alert.name)), None)
        if same is not None and same.version == alert.version:
            continue
        counts = [source.observations for source in status.sources]
        first = first or counts
        judged = all(now >= then + _OBSERVATIONS for now, then in zip(counts, first, strict=True))
        building = alert.kind == "template" and same is None and status.templates.get("building")
        if judged and not building:
            return same
    raise Unknown(f"the outcome of repairing {alert.name} is unknown after {LIMIT:g} s", hint="see: multiverse status")


# --- multiverse prune -------------------------------------------------------------------------------

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="As 90d, 12h or 2w; by default history_days.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete the records of jobs, VMs and templates that ended long ago, and their journal.

    The records of a job stay while it waits or runs. The daemon does the same by itself, every hour.
    """
    age = None if older_than is None else age_in_seconds(older_than)
    with Client() as client, progress.step("examining the records of what has ended", "records examined"):
        found = decode(PruneView, client.prune(age, dry_run=dry_run))
    counts = {
        "attempt": found.attempts,
        "VM": found.vms,
        "offer": found.offers,
        "template": found.templates,
        "lease": found.leases,
    }
    journal = number_of(found.journal, "journal entry", "journal entries")
    text = ", ".join([*(number_of(count, what) for what, count in counts.items()), journal])
    verb = "would be deleted" if found.dry_run else "deleted"
    render.console.print(f"{verb}, ended more than {span(found.older_than)} ago: {text}", markup=False, soft_wrap=True)


def age_in_seconds(text: str) -> float:
    """An age such as `30d`. Raises `Refused`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise Refused(f"{text} is not an age", hint="give a number with a unit: 90d, 12h, 2w, 45m, 30s")
    return float(match[1]) * _SECONDS[match[2]]


def span(age: float) -> str:
    """Seconds as an operator writes them."""
    unit = next((unit for unit in "dhm" if age >= _SECONDS[unit] and age % _SECONDS[unit] == 0), "s")
    return f"{age / _SECONDS[unit]:g}{unit}"


# --- multiverse audit -------------------------------------------------------------------------------

audit_app = typer.Typer(
    help="Check what is promised of VMs on those that run.", no_args_is_help=True, rich_markup_mode=None
)

NOT_SHOWN = 1  # the exit status unless the promise was shown to hold
_WIDTHS = {"machine_id": 8, "boot_id": 8, "random": 8, "fresh": 8, "mac": 17, "address": 15, "host_keys": 8}
"""The most characters that are shown of each property, in the order of the columns."""


@audit_app.callback()
def audit() -> None:
    """Check what is promised of VMs on those that run."""


@audit_app.command()
def identity(json: render.Json = False) -> None:
    """Ask every VM that runs who it is: no two may share an id, an address, a key or random bytes, and each clock is
    right to the second. Exits with 1 unless that is shown, for two VMs at least."""
    with Client() as client:
        document = client.audit_identity()
    found = decode(IdentityAudit, document)
    if json:
        render.as_json(document)
    else:
        _show_identities(found.vms)
        if found.distinct:
            render.console.print(f"{len(found.vms)} VMs, all distinct.", style="green")
        elif len(found.vms) < 2:
            render.console.print("There are no two VMs to compare: submit some jobs, then ask again.", style="yellow")
    if not found.distinct:
        raise typer.Exit(NOT_SHOWN)


def _show_identities(vms: Sequence[VmIdentity]) -> None:
    table = render.table("VM", "JOB", "MACHINE-ID", "BOOT ID", "FIRST RANDOM", "RANDOM NOW", "MAC", "ADDRESS",
                         "HOST KEYS", "CLOCK", right=("CLOCK",))  # fmt: skip
    for one in vms:
        facts = [_short(one.facts[name], width) for name, width in _WIDTHS.items()]
        style = "red" if one.problems else ""
        table.add_row(Text(one.name, style=style), one.job_id or "–", *facts, f"{one.skew} ms off")
    render.show(table, "No VMs.")
    for one in vms:
        for problem in one.problems:
            render.console.print(Text(f"{one.name}: {problem}", style="red"))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width]}…"
