"""`multiverse doctor`: all that can be examined of a site, before and after installation, with remedies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.bundles.contract import Examination
from multiverse.cli import render
from multiverse.cli.exit_codes import NOT_DONE
from multiverse.config import Settings, load
from multiverse.ports.site import Level
from multiverse.service.doctor import examine, examine_agent

_CONFIG = Path("/etc/multiverse/multiverse.toml")


def doctor(
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="MULTIVERSE_CONFIG", help="The settings, a TOML file.")
    ] = _CONFIG,
    slurm_conf: Annotated[
        Path | None, typer.Option("--slurm-conf", help="The site's slurm.conf. [default: as in the settings]")
    ] = None,
    agent: Annotated[bool, typer.Option("--agent", help="Of a host with an agent and without the controller.")] = False,
    kvm: Annotated[bool, typer.Option("--kvm/--no-kvm", help="Run small guests to see whether KVM works.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine this machine, the site's Slurm and, through the daemon, all hosts; before and after installation.

    Exits with 1 if there is a problem, and with 0 otherwise. Notes need no action."""
    settings = load(config) if config.exists() or config != _CONFIG else Settings()
    found = (
        examine_agent(settings, config.absolute(), kvm=kvm)
        if agent
        else examine(settings, config.absolute(), slurm_conf or settings.slurm.conf, kvm=kvm)
    )
    problems = _as_json(found) if json else _shown(found)
    if problems:
        raise typer.Exit(NOT_DONE)


def _as_json(found: Iterator[Examination]) -> int:
    document: list[dict[str, Any]] = [
        {
            "name": one.name,
            "skipped": one.skipped,
            "findings": [{**each._asdict(), "level": each.level.value} for each in one.findings],
        }
        for one in found
    ]
    render.as_json(document)
    return sum(each["level"] == Level.PROBLEM.value for one in document for each in one["findings"])


def _shown(found: Iterator[Examination]) -> int:
    """Print each examination as it ends. Returns the number of problems."""
    problems = notes = examined = 0
    for one in found:
        examined += not one.skipped
        levels = {each.level for each in one.findings}
        mark, style = _mark(levels, skipped=bool(one.skipped))
        more = f"  skipped: {one.skipped}" if one.skipped else ""
        render.console.print(Text.assemble((mark, style), " ", (one.name, "bold" if levels else ""), (more, "dim")))
        for each in one.findings:
            problems, notes = problems + (each.level is Level.PROBLEM), notes + (each.level is Level.NOTE)
            own = "" if each.name == one.name else f"{each.name}: "
            render.say(f"{each.level.value}: {own}{each.message}", indent=2)
            for number, line in enumerate(each.remedy.splitlines()):
                render.say(f"{'→ ' if not number else '  '}{line}", indent=4)
    style = "bold red" if problems else "green"
    render.console.print(Text(f"{examined} examinations: {problems} problems, {notes} notes.", style=style))
    return problems


def _mark(levels: set[Level], *, skipped: bool) -> tuple[str, str]:
    if skipped:
        return "–", "dim"
    if Level.PROBLEM in levels:
        return "✗", "bold red"
    return ("!", "bold yellow") if levels else ("✓", "green")
