"""`multiverse repair`: does what `multiverse status` offers, after saying what that is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.cli import render
from multiverse.client import Client
from multiverse.core.errors import Refused, Unknown

LIMIT = 900.0
_LOOKS = 2
"""Looks of each source after which a record that was taken up again has been judged afresh."""

Troubles = Sequence[Mapping[str, Any]]


def repair(
    what: Annotated[list[str] | None, typer.Argument(help="Troubles by their names in status; all if none.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    fenced: Annotated[
        bool, typer.Option("--fenced", help="The named hosts are off: I vouch that nothing runs on them any more.")
    ] = False,
) -> None:
    """Repair what status shows: say what will be done, ask, do it, and tell what came of it."""
    with Client() as client:
        plan = _choose(client.status()["troubles"], what or [], fenced=fenced)
        for trouble in plan:
            line = Text.assemble((trouble["name"], "bold"), f": {trouble['repair']}")
            render.console.print(line)
            if trouble["needs_fenced"]:
                warning = "  If it is not off, its jobs go on there and run a second time elsewhere."
                render.console.print(Text(warning, style="bold red"))
        if not plan:
            render.console.print("There is nothing to repair.")
        if dry_run or not plan:
            return
        if not yes:
            typer.confirm("Do it?", abort=True)
        failed = [trouble for trouble in plan if not _mended(client, trouble)]
    if failed:
        raise typer.Exit(1)


def _choose(found: Troubles, names: Sequence[str], *, fenced: bool) -> list[Mapping[str, Any]]:
    """The troubles to repair. A host is fenced only if it was named, and its being off was vouched for."""
    if fenced and not names:
        raise Refused("--fenced vouches for no host", hint="name it: multiverse repair HOST --fenced")
    if not names:
        for one in (one for one in found if one["needs_fenced"]):
            text = f"{one['name']} is left out: only multiverse repair {one['name']} --fenced does it"
            render.console.print(text, markup=False)
        return [one for one in found if one["repair"] and not one["needs_fenced"]]
    chosen = []
    for name in dict.fromkeys(names):
        same = [one for one in found if one["name"] == name]
        if not same:
            raise Refused(f"there is no trouble named {name}", hint="see: multiverse status")
        repairable = [one for one in same if one["repair"]]
        if not repairable:
            raise Refused(f"no repair is for {name}", hint=same[0]["todo"])
        if repairable[0]["needs_fenced"] and not fenced:
            raise Refused(
                f"{name} may still run its jobs, and they would run twice",
                hint=f"if it is off for certain: multiverse repair {name} --fenced",
            )
        chosen += repairable
    return chosen


def _mended(client: Client, trouble: Mapping[str, Any]) -> bool:
    """Do it, and tell what came of it."""
    name = trouble["name"]
    client.repair(name, fenced=trouble["needs_fenced"])
    with render.step(f"repairing {name}", f"{name}: asked for"):
        left = _outcome(client, trouble)
    render.console.print(Text(f"  {name} is mended" if left is None else f"  still so: {left['wrong']}"))
    return left is None


def _outcome(client: Client, trouble: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The trouble that is there again, if any, once the wish has been heeded and what it set off is over."""
    deadline, asked = time.monotonic() + LIMIT, None
    while time.monotonic() < deadline:
        time.sleep(0.1)
        status = client.status()
        same = next(
            (t for t in status["troubles"] if (t["kind"], t["name"]) == (trouble["kind"], trouble["name"])), None
        )
        if same is not None and same["version"] == trouble["version"]:
            continue
        looks = [source["looks"] for source in status["sources"]]
        asked = asked or looks
        judged = all(now >= then + _LOOKS for now, then in zip(looks, asked, strict=True))
        busy = trouble["kind"] == "template" and same is None and status["templates"].get("building")
        if judged and not busy:
            return same
    raise Unknown(f"nothing came of it within {LIMIT:g} s", hint="see: multiverse status")
