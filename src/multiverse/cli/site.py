"""`multiverse site` and `doctor`: the files that a site adds to its Slurm, what it lacks, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.bundles.contract import Examination, SiteFiles, scheduler_bundle
from multiverse.cli import render as output
from multiverse.cli.arguments import DEFAULT_CONFIG, Config
from multiverse.cli.commands import NOT_DONE
from multiverse.config import Settings, load
from multiverse.core.errors import Refused
from multiverse.ports.site import Finding, Level
from multiverse.service.doctor import examine, examine_agent
from multiverse.site.checking import check_agent, is_ready
from multiverse.site.rendering import WriteOutcome, beside, render_agent, write

site_app = typer.Typer(help="Install Multiverse beside a site's Slurm.", no_args_is_help=True)

SlurmConf = Annotated[
    Path | None, typer.Option("--slurm-conf", help="The site's slurm.conf, or a copy. [default: as in the settings]")
]
Agent = Annotated[bool, typer.Option("--agent", help="Of a host with an agent and without the controller.")]
_INTERVAL = 1.0  # seconds between two checks with --wait


def _read(config: Path, slurm_conf: Path | None) -> tuple[Settings, Path]:
    settings = load(config)
    return settings, slurm_conf or settings.slurm.conf


def _files(settings: Settings) -> SiteFiles:
    files = scheduler_bundle(settings).files
    if files is None:
        raise Refused(f"a site adds no files for the scheduler {settings.scheduler}", hint="start the daemon")
    return files


@site_app.command()
def render(
    directory: Annotated[Path, typer.Argument(help="Files are written below it; / installs them on this machine.")],
    config: Config = DEFAULT_CONFIG,
    slurm_conf: SlurmConf = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed by hand, too.")] = False,
    agent: Agent = False,
) -> None:
    """Write all files that a site adds. A file that was changed by hand stays, and the new one is written beside it."""
    settings, source = _read(config, slurm_conf)
    if agent:
        wanted = render_agent(settings, config.absolute())
    else:
        wanted = _files(settings).render(settings, config.absolute(), source)
    table = output.table("FILE", "WHAT WAS DONE", fold=("FILE",))
    kept = []
    for path, outcome in write(wanted, directory.absolute(), force=force):
        table.add_row(str(path), outcome.value)
        if outcome is WriteOutcome.KEPT:
            kept.append(path)
    output.show(table, "There is no file to write.")
    for path in kept:
        output.console.print(f"The new content is in {beside(path)}; --force overwrites the file.", markup=False)
    output.console.print(f"Next: multiverse site check{' --agent' * agent}", markup=False)


@site_app.command()
def check(
    config: Config = DEFAULT_CONFIG,
    slurm_conf: SlurmConf = None,
    wait: Annotated[float, typer.Option(help="Seconds for services that are starting: check again meanwhile.")] = 0.0,
    json: output.Json = False,
    agent: Agent = False,
) -> None:
    """Report what is missing or different, with remedies. Exits with 1 if there is a problem, and with 0 otherwise."""
    settings, source = _read(config, slurm_conf)
    deadline = time.monotonic() + wait

    def look() -> list[Finding]:
        path = config.absolute()
        return check_agent(settings, path) if agent else _files(settings).check(settings, path, source)

    while not is_ready(found := look()) and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
    if json:
        output.as_json([{**each._asdict(), "level": each.level.value} for each in found])
    else:
        for each in found:
            style = "bold red" if each.level is Level.PROBLEM else "bold yellow"
            output.console.print(Text.assemble((each.level.value, style), "  ", (each.name, "bold")))
            output.console.print(Text(f"  {each.message}"), Text(f"  → {each.remedy}"), sep="\n", soft_wrap=True)
        if is_ready(found):
            output.console.print("Nothing is missing.", markup=False)
    if not is_ready(found):
        raise typer.Exit(1)


# --- multiverse doctor ------------------------------------------------------------------------------


def doctor(
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="MULTIVERSE_CONFIG", help="The settings, a TOML file.")
    ] = DEFAULT_CONFIG,
    slurm_conf: Annotated[
        Path | None, typer.Option("--slurm-conf", help="The site's slurm.conf. [default: as in the settings]")
    ] = None,
    agent: Annotated[bool, typer.Option("--agent", help="Of a host with an agent and without the controller.")] = False,
    kvm: Annotated[bool, typer.Option("--kvm/--no-kvm", help="Run small guests to see whether KVM works.")] = True,
    json: output.Json = False,
) -> None:
    """Examine this machine, the site's Slurm and, through the daemon, all hosts; before and after installation.

    Exits with 1 if there is a problem, and with 0 otherwise. Notes need no action."""
    settings = load(config) if config.exists() or config != DEFAULT_CONFIG else Settings()
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
    output.as_json(document)
    return sum(each["level"] == Level.PROBLEM.value for one in document for each in one["findings"])


def _shown(found: Iterator[Examination]) -> int:
    """Print each examination as it ends. Returns the number of problems."""
    problems = notes = examined = 0
    for one in found:
        examined += not one.skipped
        levels = {each.level for each in one.findings}
        mark, style = _mark(levels, skipped=bool(one.skipped))
        more = f"  skipped: {one.skipped}" if one.skipped else ""
        output.console.print(Text.assemble((mark, style), " ", (one.name, "bold" if levels else ""), (more, "dim")))
        for each in one.findings:
            problems, notes = problems + (each.level is Level.PROBLEM), notes + (each.level is Level.NOTE)
            own = "" if each.name == one.name else f"{each.name}: "
            output.say(f"{each.level.value}: {own}{each.message}", indent=2)
            for number, line in enumerate(each.remedy.splitlines()):
                output.say(f"{'→ ' if not number else '  '}{line}", indent=4)
    style = "bold red" if problems else "green"
    output.console.print(Text(f"{examined} examinations: {problems} problems, {notes} notes.", style=style))
    return problems


def _mark(levels: set[Level], *, skipped: bool) -> tuple[str, str]:
    if skipped:
        return "–", "dim"
    if Level.PROBLEM in levels:
        return "✗", "bold red"
    return ("!", "bold yellow") if levels else ("✓", "green")
