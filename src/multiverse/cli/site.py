"""`multiverse site`, `doctor` and `selftest`: what a site adds to its Slurm, what it lacks, and whether it works."""

from __future__ import annotations

import asyncio
import os
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
from multiverse.config import Settings, is_host, load
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of
from multiverse.ports.site import Addition, Finding, Level
from multiverse.service.doctor import examine, examine_agent, examine_before
from multiverse.site import selftest as tests
from multiverse.site.checking import check_agent, is_ready
from multiverse.site.installing import add, plan_agent, removals, stop, take_back
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
    _written(write(wanted, directory.absolute(), force=force))
    output.console.print(f"Next: multiverse site check{' --agent' * agent}", markup=False)


def _written(outcomes: Iterator[tuple[Path, WriteOutcome]]) -> None:
    """Write files, and show what was done."""
    table = output.table("FILE", "WHAT WAS DONE", fold=("FILE",))
    kept = []
    for path, outcome in outcomes:
        table.add_row(str(path), outcome.value)
        if outcome is WriteOutcome.KEPT:
            kept.append(path)
    output.show(table, "There is no file to write.")
    for path in kept:
        output.console.print(f"The new content is in {beside(path)}; --force overwrites the file.", markup=False)


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
            _say(each)
        if is_ready(found):
            output.console.print("Nothing is missing.", markup=False)
    if not is_ready(found):
        raise typer.Exit(1)


def _say(finding: Finding) -> None:
    style = "bold red" if finding.level is Level.PROBLEM else "bold yellow"
    output.console.print(Text.assemble((finding.level.value, style), "  ", (finding.name, "bold")))
    output.console.print(Text(f"  {finding.message}"), Text(f"  → {finding.remedy}"), sep="\n", soft_wrap=True)


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@site_app.command()
def install(config: Config = DEFAULT_CONFIG, yes: Yes = False, agent: Agent = False) -> None:
    """Show each line that the site's own files need, ask, add these, and write our files. Originals are kept beside.

    Nothing is done where a line of the site's has to change: that is left to you. What is there is not done again."""
    settings, path = load(config), config.absolute()
    plan = plan_agent(settings, path) if agent else _files(settings).plan(settings, path)
    for each in plan.left:
        _say(each)
    if plan.by_hand:
        for each in plan.by_hand:
            _say(each)
        raise Refused(
            "nothing was installed, because lines of the site's own have to change first",
            hint="change them as said above, then run this command again",
        )
    for addition in plan.additions:
        output.console.print(Text.assemble((str(addition.path), "bold"), _above(addition)), soft_wrap=True)
        for line in addition.lines:
            output.console.print(Text(f"  + {line}", style="green"), soft_wrap=True)
        if not addition.lines:
            output.console.print(Text("  the lines of an earlier installation go"), soft_wrap=True)
    count = len(plan.files)
    output.say(
        f"{count} files of Multiverse are written beside slurm.conf and for systemd, where they differ.", indent=0
    )
    if not yes:
        typer.confirm("Do it?", abort=True)
    _written(write(plan.files, Path("/")))
    for addition in plan.additions:
        add(addition)
        output.say(f"changed: {addition.path}", indent=0)
    _next_steps(settings, agent=agent)


def _above(addition: Addition) -> str:
    return f", above line {addition.at + 1}" if addition.lines else ""


def _next_steps(settings: Settings, *, agent: bool) -> None:
    output.console.print("Next, to start it:", markup=False)
    tmpfiles = "" if agent else "systemd-tmpfiles --create /etc/tmpfiles.d/multiverse.conf"
    start = ["systemctl enable --now multiverse-agent"]
    if not agent:
        services = "multiverse-agent multiverse" if is_host(settings) else "multiverse"
        start = ["systemctl restart slurmctld", f"systemctl enable --now {services}"]
    check = f"multiverse site check{' --agent' * agent} --wait 60"
    for step in ("systemctl daemon-reload", tmpfiles, "systemctl enable --now multiverse-bridge", *start, check):
        if step:
            output.console.print(f"  {step}", markup=False, soft_wrap=True)


@site_app.command()
def remove(
    config: Config = DEFAULT_CONFIG,
    yes: Yes = False,
    agent: Agent = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while jobs or VMs use it. Jobs in VMs are lost.")
    ] = False,
) -> None:
    """Take back what `site install` has done: our lines, our files, the services. What was changed since is named and
    kept, and so are the settings and the state directory."""
    settings, path = load(config), config.absolute()
    used = [] if agent else _files(settings).in_use(settings)
    for text in used:
        output.console.print(Text.assemble(("still used", "bold red"), f"  {text}"), soft_wrap=True)
    if used and not force:
        partition = settings.slurm.partition
        raise Refused(
            "nothing was removed, because it is still used",
            hint=f"scontrol update PartitionName={partition} State=DRAIN, and wait until its jobs have ended; "
            "or --force",
        )
    found = removals(settings, path, agent=True) if agent else _files(settings).removals(settings, path)
    for each in found:
        what = "is kept" if each.why else "these lines go" if each.lines else "goes"
        output.console.print(Text.assemble((str(each.path), "bold"), f"  {what}"), soft_wrap=True)
        for line in each.lines:
            output.console.print(Text(f"  - {line}", style="red"), soft_wrap=True)
    if not yes:
        typer.confirm("Do it?", abort=True)
    for text in stop(settings, agent=True) if agent else _files(settings).stop(settings):
        output.say(f"failed: {text}", indent=0, style="red")
    for each in found:
        if said := take_back(each):
            output.say(f"{each.path}: {said}", indent=0)
    left = f"{config} and {settings.state_dir} stay, and so does the bridge {settings.qemu.bridge} until the next boot."
    output.say(left, indent=0)
    output.say(f"Next: systemctl daemon-reload{'' if agent else '; systemctl restart slurmctld'}", indent=0)


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
    before: Annotated[
        bool,
        typer.Option("--before", help="Only what is lacking before anything is installed, by packages or by hand."),
    ] = False,
    json: output.Json = False,
) -> None:
    """Examine this machine, the site's Slurm and, through the daemon, all hosts; before and after installation.

    Exits with 1 if there is a problem, and with 0 otherwise. Notes need no action."""
    settings = load(config) if config.exists() or config != DEFAULT_CONFIG else Settings()
    path, source = config.absolute(), slurm_conf or settings.slurm.conf
    if agent:
        found = examine_agent(settings, path, kvm=kvm, before=before)
    else:
        found = (examine_before if before else examine)(settings, path, source, kvm=kvm)
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
    said = f"{number_of(problems, 'problem')}, {number_of(notes, 'note')}"
    output.console.print(Text(f"{number_of(examined, 'examination')}: {said}.", style=style))
    return problems


def _mark(levels: set[Level], *, skipped: bool) -> tuple[str, str]:
    if skipped:
        return "–", "dim"
    if Level.PROBLEM in levels:
        return "✗", "bold red"
    return ("!", "bold yellow") if levels else ("✓", "green")


# --- multiverse selftest ----------------------------------------------------------------------------


def selftest(
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="MULTIVERSE_CONFIG", help="The settings, a TOML file.")
    ] = DEFAULT_CONFIG,
    user: Annotated[
        str, typer.Option("--user", "-u", envvar="SUDO_USER", help="Whose jobs they are; never root's.")
    ] = "",
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds in which all jobs have to end.")] = 600.0,
    json: output.Json = False,
) -> None:
    """Submit five jobs (batch, array, two nodes, failing, cancelled), wait for them, and count what is left of them.

    Exits with 1 if anything was wrong, and with 0 otherwise. It needs root, and two nodes' worth of free capacity."""
    settings = load(config)
    _files(settings)
    if os.geteuid() != 0 or user in ("", "root"):
        raise Refused(
            "the test needs root, and a user whose jobs it submits", hint="run multiverse selftest --user NAME as root"
        )
    found: list[tests.CheckedPart] = []

    def tell(one: tests.CheckedPart) -> None:
        found.append(one)
        if not json:
            mark, style = ("✓", "green") if one.fine else ("✗", "bold red")
            output.console.print(Text.assemble((mark, style), " ", (one.name, "" if one.fine else "bold")))
            output.say(one.said)

    if not json:
        output.say(f"{len(tests.JOBS)} jobs of {user} are submitted to partition {settings.slurm.partition}.", indent=0)
    asyncio.run(tests.SelfTest(settings, user, tell).run(limit))
    wrong = [one for one in found if not one.fine]
    if json:
        output.as_json([one._asdict() for one in found])
    else:
        style = "bold red" if wrong else "green"
        output.say(f"{len(found)} tests: {len(wrong)} wrong.", indent=0, style=style)
        output.say(tests.page(settings), indent=0)
    if wrong:
        raise typer.Exit(NOT_DONE)
