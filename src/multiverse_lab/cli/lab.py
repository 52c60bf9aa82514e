"""`multiverse lab up|down|status|env`: a whole cluster on this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.arguments import mebibytes
from multiverse.cli.render import as_json, console, duration, show, table
from multiverse.config import Settings, examined_as, host_names
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of
from multiverse.system import interrupts
from multiverse_lab.lab import lifecycle, users_command
from multiverse_lab.lab.configure import users_environment
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import MOST_HOSTS, MOST_PHYSICAL, LabOptions, changed_settings, load, shares

app = typer.Typer(help="A whole cluster on this machine.", no_args_is_help=True)

Dir = Annotated[
    Path | None, typer.Option("--dir", help="The lab's directory; else $MULTIVERSE_LAB, else /var/lib/multiverse/lab.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DOWN = 3
"""The exit status of `lab status` unless every service is alive, as of systemctl status."""


def chosen(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings `section.key=value`, by section and key. A value is read as TOML; if it is none, it is text. Raises
    `Refused` for a word of another form, an unknown key, or a wrong value: the lab would keep it."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        match = re.fullmatch(r"([a-z_]+)\.([a-z_]+)=(.*)", word)
        if not match:
            raise Refused(f"--set {word}: not a setting", hint="write it as pacing.provisioning=8")
        section, key, text = match.groups()
        try:
            found.setdefault(section, {})[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found.setdefault(section, {})[key] = text
    given = {section: {key: one for key, one in keys.items() if one != ""} for section, keys in found.items()}
    if mistakes := examined_as(Settings, given)[1]:
        raise Refused(
            f"--set: {'; '.join(map(str, mistakes))}", hint="correct these; multiverse config show has all keys"
        )
    return found


def _line(name: str, word: str, seconds: float) -> None:
    console.print(f"  {name:<12}{word:<18}{duration(seconds):>8}", markup=False)


def _silent(name: str, word: str, seconds: float) -> None:
    pass


@app.command()
def up(
    directory: Dir = None,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_HOSTS, help="Hosts; of several, each has namespaces. [first time: 1]"),
    ] = None,
    physical: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_PHYSICAL, help="Bare-metal nodes, in partition `physical`. [first time: 0]"),
    ] = None,
    routed: Annotated[
        bool | None, typer.Option("--routed/--switched", help="A router between the hosts. [first time: a switch]")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores each host declares. [first time: 8]")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory each host declares. [first time: 16G]")] = None,
    share: Annotated[list[Path] | None, typer.Option(help="A directory that guests see too; may be repeated.")] = None,
    image: Annotated[str | None, typer.Option(help="The image of jobs that name none. [first time: slim]")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, as pacing.provisioning=8, or KEY= for its default; may be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Start the lab, or those of its services that have died."""
    where = layout(directory)
    options = LabOptions(
        cores=cores,
        hosts=hosts,
        physical=physical,
        routed=routed,
        memory=mebibytes(memory) if memory else None,
        shares=shares(share or (), where),
        image=image,
        settings=changed_settings(where, chosen(setting)) if setting else None,
    )
    settings = interrupts.run(lifecycle.up(where, options, _silent if json else _line))
    if json:
        as_json(lifecycle.status(where))
        return
    plan = load(where)
    if plan and plan.physical and not plan.plugin:
        console.print(
            "Jobs have no VMs inside them: Slurm's plugin is not built. Build it, and repeat this: make spank"
        )
    console.print(
        _declared(settings),
        f'Next: eval "$({_command(where.root, directory)} env)"',
        sep="\n",
        markup=False,
    )


def _declared(settings: Settings) -> str:
    where = f"On each of {', '.join(host_names(settings))}, VMs" if settings.hosts else "VMs"
    own, machine = settings.host, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return (
        f"{where} may claim {number_of(own.cores, 'CPU')} and {render.memory(own.memory)} of memory. They share this "
        f"machine, which has {number_of(os.cpu_count() or 1, 'CPU')} and {render.memory(machine)}."
    )


def _command(root: Path, directory: Path | None) -> str:
    program = shlex.quote(sys.argv[0])
    return f"{program} lab" if directory is None else f"MULTIVERSE_LAB={shlex.quote(str(root))} {program} lab"


@app.command()
def down(directory: Dir = None) -> None:
    """End all services and VMs of the lab. Its directory keeps logs, keys, the database and caches."""
    interrupts.run(lifecycle.down(layout(directory), _line))


@app.command()
def status(directory: Dir = None, json: Json = False) -> None:
    """Show each service with its pid. Exits with 3 unless all are alive."""
    found = lifecycle.status(layout(directory))
    if json:
        as_json(found)
    else:
        # A lab that was brought down has not failed.
        lost = "dead" if any(service["alive"] for service in found.values()) else "down"
        made = table("PART", "PID", "STATE", right=("PID",))
        for name, service in found.items():
            made.add_row(
                name, str(service.get("pid") or service.get("address") or "–"), "alive" if service["alive"] else lost
            )
        show(made, "no lab")
    if not all(service["alive"] for service in found.values()):
        raise typer.Exit(_DOWN)


@app.command()
def env(directory: Dir = None) -> None:
    """Print what a shell needs to use the lab: eval "$(multiverse lab env)"."""
    where = layout(directory)
    if load(where) is None:
        raise Refused(f"there is no lab in {where.root}", hint="bring it up first: multiverse lab up")
    for name, value in users_environment(where).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"export MULTIVERSE_LAB={shlex.quote(str(where.root))}")
    own = ":".join(map(str, users_command.directories(where)))
    print(f'export PATH={shlex.quote(own)}:"$PATH"')
