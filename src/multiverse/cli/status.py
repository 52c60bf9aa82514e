"""`multiverse status`: how the controller is, and what is wrong with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from multiverse.cli import render
from multiverse.client import Client

TROUBLED = 1


def status(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show how the controller is, and each trouble with what to do. Exits with 1 when there is one that can be mended:
    what of Slurm's settings does not reach VMs (kind "unserved") is shown only."""
    with Client() as client:
        found = client.status()
    if json:
        render.as_json(found)
    else:
        _show(found)
    if any(trouble["kind"] != "unserved" for trouble in found["troubles"]):
        raise typer.Exit(TROUBLED)


def _show(found: Mapping[str, Any]) -> None:
    about = f"pid {found['pid']}, site {found['site']}, version {found['version']}"
    _line("controller", f"up for {render.duration(found['up'])}, {about}")
    for source in found["sources"]:
        age = render.duration(source["age"])
        word = f"looked at {age} ago" if source["known"] else f"unknown for {render.duration(source['unknown_for'])}"
        _line({"hypervisor": "host side"}.get(source["name"], source["name"]), word)
    jobs = found["jobs"]
    _line("jobs", f"{jobs['waiting']} waiting, {jobs['provisioning']} being given VMs, {jobs['running']} running, "
          f"{jobs['ending']} ending")  # fmt: skip
    for name in ("vms", "templates"):
        counts = ", ".join(f"{count} {state}" for state, count in sorted(found[name].items()))
        _line("VMs" if name == "vms" else name, counts or "none")
    for pool in found["pools"]:
        size = f" of {pool['cpus']} CPU, {render.memory(pool['memory'])}" if pool["cpus"] else ""
        making = f", {pool['making']} in the making" if pool["making"] else ""
        offered = f", {pool['offered']} on offer" if pool["offered"] else ""
        _line("pool", f"{pool['ready']} of {pool['wanted']} {pool['depth']} {pool['image']}{size}{offered}{making}"
              f" ({pool['least']} to {pool['most']} by the arrival rate)")  # fmt: skip
    render.console.print()
    if not found["troubles"]:
        render.console.print("No trouble.", style="green")
    for trouble in found["troubles"]:
        show_trouble(trouble)


def show_trouble(trouble: Mapping[str, Any]) -> None:
    """What is wrong, what to do, and what a repair would do, below the trouble's name."""
    render.console.print(Text(trouble["name"], style="bold red"))
    lines = [Text(trouble["wrong"]), Text(f"to do: {trouble['todo']}")]
    if trouble["repair"]:
        flag = " --fenced" if trouble["needs_fenced"] else ""
        lines.append(Text(f"multiverse repair {trouble['name']}{flag}: {trouble['repair']}", style="dim"))
    for line in lines:
        render.console.print(Padding(line, (0, 0, 0, 2)))


def _line(name: str, text: str) -> None:
    render.console.print(Text.assemble((f"{name:<12}", "bold"), text))
