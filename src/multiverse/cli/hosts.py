"""`multiverse hosts`: the hosts of the site, what they have and what is on them; and what operators do to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from multiverse.api import HostsChanged, HostView, LeaseView, decode
from multiverse.cli import render
from multiverse.cli.times import unix_time
from multiverse.cli.watch import Watch, watched
from multiverse.client import Client
from multiverse.config import folded

app = typer.Typer(help="The hosts: show, add, drain, resume and remove them.", invoke_without_command=True)

Hosts = Annotated[list[str], typer.Argument(metavar="HOST", help="Names, also as node sets: n[1-4,7].")]

SHOWN_JOBS = 8

_PLUG_ABILITIES = {"plug_cpus": "CPUs", "plug_memory": "memory"}
_CLONE_KINDS = ("instant", "linked", "full")


@app.callback()
def hosts(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Watch = False,
) -> None:
    """Show hosts. Admission counts against what is declared, which need not be what the machine has."""
    if context.invoked_subcommand is None:
        watched(lambda: _show(json=json), again=watch)


def _show(*, json: bool) -> None:
    with Client() as client:
        document = client.hosts()
    if json:
        render.as_json(document)
        return
    found = decode(list[HostView], document)
    render.show(_table(found), "The site has no host; see: multiverse hosts add.")
    for one in found:
        _show_trouble(one)
    _show_alike(found)


def _table(found: Sequence[HostView]) -> Table:
    """What differs from host to host, as far as it fits the terminal: all of it from 140 columns on."""
    narrow = ("CPUS", "MEMORY")
    wide = (*narrow, "DISK", "VMS TAKE", "TEMPLATES", "AVAILABLE")
    full = render.is_wide()
    shown = (*wide, *(("NETWORK",) if any(one.declared.net for one in found) else ())) if full else narrow
    table = render.table("HOST", "STATE", "VMS", "JOBS", *shown, right=("VMS", "JOBS"), fold=shown)
    for one in found:
        cells: list[str | Text] = [one.name, render.state(one.state), str(one.vms), str(len(one.jobs))]
        cpus = f"{one.claimed.cpus} of {one.declared.cpus}{_times(one.cpu_overcommit)}"
        memory = _claimed(one.claimed.memory, one.declared.memory, one.overcommit)
        more = _more(one)[: len(shown) - len(narrow)] if full else ()
        table.add_row(*cells, *((cpus, memory) if one.declared.cpus else ("–", "–")), *more)
    return table


def _more(host: HostView) -> list[str]:
    if host.machine is None:
        return ["–"] * 5
    return [
        _claimed(host.claimed.disk, host.declared.disk, host.disk_overcommit),
        f"{render.memory(host.private)}, {render.memory(host.shared)} shared",
        render.memory(host.templates) + (", held twice" if host.template_copies > 1 else ""),
        render.memory(host.available) if host.available else "–",
        f"{host.claimed.net} of {host.declared.net} Mbit/s",
    ]


def _claimed(claimed: float, declared: float, overcommit: float) -> str:
    """MiB that VMs claim, of those that they may claim."""
    return f"{render.memory(claimed)} of {render.memory(declared)}{_times(overcommit)}"


def _times(overcommit: float) -> str:
    return f" × {overcommit:g}" if overcommit > 1 else ""


def _show_trouble(host: HostView) -> None:
    """What is not as usual on a host, and what to do."""
    said = []
    if host.lease is not None and host.lease.pilot:
        said.append(_leased(host.lease))
    if host.state == "closing" and host.drain_from is not None:
        said.append(f"drained from {datetime.fromtimestamp(host.drain_from):%Y-%m-%d %H:%M:%S} on")
    if host.reason:
        said.append(host.reason)
    if not host.reachable and host.state != "fenced":
        said.append(
            f"nothing was heard of it for {render.duration(host.away_for)}" + (f": {host.why}" if host.why else "")
        )
    if host.jobs and host.state != "up":
        said.append(f"job {_some(host.jobs)}")
    if said or host.todo:
        line = Text.assemble((host.name, "bold"), f": {'; '.join(said) or host.state}")
        render.console.print(Text(render.plain(line.plain).plain, spans=line.spans))
    if host.todo:
        render.console.print(Padding(render.plain(f"to do: {host.todo}"), (0, 0, 0, 2), expand=False))


def _leased(lease: LeaseView) -> str:
    """By which pilot, where and until when a host is leased."""
    until = f" until {datetime.fromtimestamp(lease.ends):%Y-%m-%d %H:%M:%S}" if lease.ends is not None else ""
    return f"leased by pilot {lease.pilot} on node {lease.node} of partition {lease.partition}{until}"


def _some(jobs: Sequence[str]) -> str:
    shown = ", ".join(jobs[:SHOWN_JOBS])
    return f"{shown} and {len(jobs) - SHOWN_JOBS} more" if len(jobs) > SHOWN_JOBS else shown


def _show_alike(found: Sequence[HostView]) -> None:
    """What hosts have in common, once for all hosts of which it is true."""
    hosts: dict[str, list[str]] = {}
    for one in found:
        for what in (*_machine(one), *_nodes(one), *_images(one)):
            hosts.setdefault(what, []).append(one.name)
    for what, names in hosts.items():
        line = f"{folded(names)}: {what}"
        render.console.print(Text(render.plain(line).plain, style="dim"))


def _machine(host: HostView) -> Iterator[str]:
    if host.machine is None:
        return
    kinds = [kind for kind in _CLONE_KINDS if kind in host.abilities]
    yield (
        f"{host.machine.cpus} CPUs, {render.memory(host.machine.memory)}"
        + (f", runs {host.accelerator}" if host.accelerator else "")
        + (f"; clones: {', '.join(kinds)}" if kinds else "")
        + (f"; features: {', '.join(host.features)}" if host.features else "")
    )


def _nodes(host: HostView) -> Iterator[str]:
    """NUMA nodes, where there are several."""
    for node in host.numa if len(host.numa) > 1 else ():
        cpus = folded(map(str, node.cpus))
        yield (
            f"NUMA node {node.number}: CPUs {cpus.strip('[]')}, {render.memory(node.free)} of"
            f" {render.memory(node.memory)} free; VMs have {node.taken.cpus} CPUs, {render.memory(node.taken.memory)}"
        )


def _images(host: HostView) -> Iterator[str]:
    for image, abilities in host.images.items():
        if lacking := [what for ability, what in _PLUG_ABILITIES.items() if ability not in abilities]:
            what = " or ".join(lacking)
            yield f"guests of {image} take up no {what} while they run: there is a template for each size"
        if "limit_disk" not in abilities:
            yield (
                f"VMs of {image} claim all of their disk, because its guests do not limit users: build it again with"
                " `multiverse image build`"
            )


@app.command()
def add(hosts: Hosts) -> None:
    """Add hosts to the site: hosts that the settings do not name, and hosts that were removed."""
    _change("add", hosts, "added")
    render.console.print(
        "Next: multiverse hosts shows whether they answer, and multiverse status what Slurm lacks then."
    )


@app.command()
def drain(
    hosts: Hosts,
    reason: Annotated[str, typer.Option("--reason", help="Why; shown to whoever asks.")] = "",
    begins: Annotated[
        str, typer.Option("--from", metavar="TIME", help="As for sbatch --begin. Until then, only jobs that end by it.")
    ] = "",
) -> None:
    """Let hosts take no new VM. They are free when their jobs have ended, and are shown as drained then."""
    moment = unix_time(begins, datetime.now().astimezone()) if begins else None
    _change("drain", hosts, "draining", reason=reason, begins=moment)


@app.command()
def resume(hosts: Hosts) -> None:
    """Let drained hosts take VMs again. A host that was fenced counts as in the site again."""
    _change("resume", hosts, "resumed")


@app.command()
def remove(hosts: Hosts) -> None:
    """Take hosts out of the site. Nothing may be on them, unless they are surely off. They stay removed, also if the
    settings name them, until they are added again."""
    _change("remove", hosts, "removed")


def _change(verb: str, hosts: Sequence[str], done: str, **more: str | float | None) -> None:
    """Ask for a change to hosts, and say what came of it for each."""
    with Client() as client:
        changed = decode(HostsChanged, client.change_hosts(verb, ",".join(hosts), **more))
    if changed.done:
        render.console.print(f"{done}: {', '.join(changed.done)}", markup=False, soft_wrap=True)
    for why in changed.refused.values():
        render.errors.print(why, markup=False)
    if changed.refused:
        raise typer.Exit(1)
