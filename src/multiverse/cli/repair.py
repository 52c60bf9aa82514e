"""`multiverse repair`: carries out the repairs that `multiverse status` offers, after saying what they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import Alert, StatusView, decode
from multiverse.cli import progress, render
from multiverse.client import Client
from multiverse.core.errors import Refused, Unknown

LIMIT = 900.0
"""Seconds to wait for the outcome of a repair: as long as a template may take to build."""

_OBSERVATIONS = 2
"""Observations of each source after which the controller has judged a repaired record anew."""


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
    """The alerts to repair. A host is fenced only if it is named and the operator assures that it is switched off. A VM
    with a running job is ended only if it is named."""
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
    """The alert that is there again, if any, once the repair has been carried out and the controller has judged the
    record anew."""
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
