"""`multiverse hosts`, `leases` and `utilization`: the hosts of the site, what is on them and what it uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, get_args

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from multiverse import api
from multiverse.api import decode
from multiverse.cli import render
from multiverse.cli.arguments import DEFAULT_CONFIG, Config, mebibytes, unix_time
from multiverse.cli.render import Watch, watched
from multiverse.client import Client
from multiverse.config import folded, host_names, load, names_of_hosts
from multiverse.core.errors import MultiverseError, Refused
from multiverse.core.model.basics import number_of
from multiverse.images.catalog import Flavour

# --- multiverse hosts -------------------------------------------------------------------------------

hosts_app = typer.Typer(help="The hosts: show, add, drain, resume and remove them.", invoke_without_command=True)

Hosts = Annotated[list[str], typer.Argument(metavar="HOST", help="Names, also as node sets: n[1-4,7].")]

SHOWN_JOBS = 8

_PLUG_ABILITIES = {"plug_cpus": "CPUs", "plug_memory": "memory"}
_CLONE_KINDS = ("instant", "linked", "full")


@hosts_app.callback()
def hosts(context: typer.Context, json: render.Json = False, watch: Watch = False) -> None:
    """Show hosts. Admission counts against what is declared, which need not be what the machine has."""
    if context.invoked_subcommand is None:
        watched(lambda: _show(json=json), again=watch)


def _show(*, json: bool) -> None:
    with Client() as client:
        document = client.hosts()
    if json:
        return render.as_json(document)
    found = decode(list[api.HostView], document)
    titles = _titles(found)
    shown = titles if render.is_wide() else titles[: len(NARROW)]
    render.show(_table(found, shown), "The site has no host; see: multiverse hosts add.")
    if found and (left_out := titles[len(shown) :]):
        text = f"{', '.join(left_out[:-1])} and {left_out[-1]}: on a terminal of {render.WIDE} columns, or with --json."
        render.say(text, indent=0, style="dim")
    for one in found:
        _show_trouble(one)
    _show_lacking(found)
    _show_alike(found)


NARROW = ("CPUS", "MEMORY")


def _titles(found: Sequence[api.HostView]) -> tuple[str, ...]:
    """The columns of what differs from host to host beside its name, state, VMs and jobs."""
    network = ("NETWORK",) if any(one.declared.net for one in found) else ()
    return (*NARROW, "DISK", "VMS TAKE", "TEMPLATES", "AVAILABLE", *network)


def _table(found: Sequence[api.HostView], shown: Sequence[str]) -> Table:
    table = render.table("HOST", "STATE", "VMS", "JOBS", *shown, right=("VMS", "JOBS"), fold=shown)
    for one in found:
        cells: list[str | Text] = [one.name, render.state(one.state), str(one.vms), str(len(one.jobs))]
        cpus = f"{one.claimed.cpus} of {one.declared.cpus}{_times(one.cpu_overcommit)}"
        memory = _claimed(one.claimed.memory, one.declared.memory, one.overcommit)
        known = (cpus, memory) if one.declared.cpus else ("–", "–")
        table.add_row(*cells, *(*known, *_more(one))[: len(shown)])
    return table


def _more(host: api.HostView) -> list[str]:
    if host.machine is None:
        return ["–"] * 5
    return [
        _claimed(host.claimed.disk, host.declared.disk, host.disk_overcommit),
        f"{render.memory(host.private)}, {render.memory(host.shared)} shared",
        render.memory(host.templates) + (", held twice" if host.template_copies > 1 and host.templates else ""),
        render.memory(host.available) if host.available else "–",
        f"{host.claimed.net} of {host.declared.net} Mbit/s",
    ]


def _claimed(claimed: float, declared: float, overcommit: float) -> str:
    return f"{render.memory(claimed)} of {render.memory(declared)}{_times(overcommit)}"


def _times(overcommit: float) -> str:
    return f" × {overcommit:g}" if overcommit > 1 else ""


def _show_trouble(host: api.HostView) -> None:
    """What is not as usual on a host, and what to do."""
    said = []
    if host.lease is not None and host.lease.pilot:
        said.append(_leased(host.lease))
    if host.state == "closing" and host.drain_from is not None:
        said.append(f"drained from {render.moment(host.drain_from)} on")
    if host.reason:
        said.append(host.reason)
    if host.away_since is not None and host.state != "fenced":
        why = f": {host.why}" if host.why else ""
        said.append(f"nothing was heard of it for {render.age(host.away_since)}{why}")
    if host.jobs and host.state != "up":
        more = f" and {len(host.jobs) - SHOWN_JOBS} more" if len(host.jobs) > SHOWN_JOBS else ""
        said.append(f"job {', '.join(host.jobs[:SHOWN_JOBS])}{more}")
    if said or host.todo:
        line = Text.assemble((host.name, "bold"), f": {'; '.join(said) or host.state}")
        render.console.print(Text(render.plain(line.plain).plain, spans=line.spans))
    if host.todo:
        render.console.print(Padding(render.plain(f"to do: {host.todo}"), (0, 0, 0, 2), expand=False))


def _show_lacking(found: Sequence[api.HostView]) -> None:
    """Images that the settings name, with the hosts that lack them."""
    lacking: dict[str, list[str]] = {}
    for one in found:
        for image in one.lacks:
            lacking.setdefault(image, []).append(one.name)
    for image, names in lacking.items():
        where = folded(names)
        what = image if image in get_args(Flavour) else f"FILE.toml --name {image}"
        render.say(f"{where}: no image {image}, so no job of that image starts there", indent=0, style="yellow")
        render.say(
            "to do: if the controller's machine has it, it is copied there once a job waits for it, or at once:"
            f" multiverse image push {image} {where}; if not, build it there: multiverse image build {what}"
        )


def _leased(lease: api.LeaseView) -> str:
    until = f" until {render.moment(lease.ends)}" if lease.ends is not None else ""
    return f"leased by pilot {lease.pilot} on node {lease.node} of partition {lease.partition}{until}"


def _show_alike(found: Sequence[api.HostView]) -> None:
    """What hosts have in common, once for all of them."""
    hosts: dict[str, list[str]] = {}
    for one in found:
        for what in (*_machine(one), *_moves(one), *_nodes(one), *_images(one)):
            hosts.setdefault(what, []).append(one.name)
    for what, names in hosts.items():
        line = f"{folded(names)}: {what}"
        render.console.print(Text(render.plain(line).plain, style="dim"))


def _machine(host: api.HostView) -> Iterator[str]:
    if host.machine is None:
        return
    kinds = [kind for kind in _CLONE_KINDS if kind in host.abilities]
    yield (
        f"{number_of(host.machine.cpus, 'CPU')}, {render.memory(host.machine.memory)}"
        + (f", runs {host.accelerator}" if host.accelerator else "")
        + (f"; clones: {', '.join(kinds)}" if kinds else "")
        + (f"; features: {', '.join(host.features)}" if host.features else "")
    )


def _moves(host: api.HostView) -> Iterator[str]:
    if host.moves:
        yield f"VMs move to hosts like it: {host.moves}"
    if host.common_cpu:
        yield f'VMs would move between all of these with cpu = "{host.common_cpu}" in [qemu], the newest they all run'


def _nodes(host: api.HostView) -> Iterator[str]:
    for node in host.numa if len(host.numa) > 1 else ():
        cpus = folded(map(str, node.cpus))
        yield (
            f"NUMA node {node.number}: CPUs {cpus.strip('[]')}, {render.memory(node.free)} of"
            f" {render.memory(node.memory)} free; VMs have {number_of(node.taken.cpus, 'CPU')},"
            f" {render.memory(node.taken.memory)}"
        )


def _images(host: api.HostView) -> Iterator[str]:
    for image, abilities in host.images.items():
        if lacking := [what for ability, what in _PLUG_ABILITIES.items() if ability not in abilities]:
            what = " or ".join(lacking)
            yield f"guests of {image} take up no {what} while they run: there is a template for each size"
        if "limit_disk" not in abilities:
            yield (
                f"VMs of {image} claim all of their disk, because its guests do not limit users: build it again with"
                " `multiverse image build`"
            )


@hosts_app.command()
def add(hosts: Hosts) -> None:
    """Add hosts to the site: hosts that the settings do not name, and hosts that were removed."""
    _change("add", hosts, "added")
    render.console.print(
        "Next: multiverse hosts shows whether they answer, and multiverse status what Slurm lacks then."
    )


@hosts_app.command()
def drain(
    hosts: Hosts,
    reason: Annotated[str, typer.Option("--reason", help="Why; shown to whoever asks.")] = "",
    begins: Annotated[
        str, typer.Option("--from", metavar="TIME", help="As for sbatch --begin. Until then, only jobs that end by it.")
    ] = "",
    move: Annotated[bool, typer.Option("--move", help="Move VMs of running jobs to other hosts.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Save running jobs; with --move those that no other host takes.")
    ] = False,
) -> None:
    """Let hosts take no new VM. They are free when their jobs have ended, or have left, and are shown as drained
    then."""
    moment = unix_time(begins, datetime.now().astimezone()) if begins else None
    _change("drain", hosts, "draining", reason=reason, begins=moment, move=move, save=save)


@hosts_app.command()
def resume(hosts: Hosts) -> None:
    """Let drained hosts take VMs again. A host that was fenced counts as in the site again."""
    _change("resume", hosts, "resumed")


@hosts_app.command()
def remove(hosts: Hosts) -> None:
    """Take hosts out of the site. Nothing may be on them, unless they are surely off. They stay removed, also if the
    settings name them, until they are added again."""
    _change("remove", hosts, "removed")


By = Annotated[
    str, typer.Option("--by", metavar="COMMAND", help="How to run a command as root on a host, such as by sudo.")
]
_BY = "ssh {host}"


@hosts_app.command()
def connect(hosts: Hosts, by: By = _BY, config: Config = DEFAULT_CONFIG) -> None:
    """Connect this controller with hosts of the settings: bring them its key and its settings, and start their agents.

    multiverse-host has to be installed there. The key runs the agent and nothing else. It may be repeated, and has to
    be after a change of the settings."""
    from multiverse.site import connecting  # imported late: only two of these commands need it

    settings = load(config)
    names = names_of_hosts(",".join(hosts))
    if unknown := [name for name in names if name not in host_names(settings)]:
        hint = f"add them to `nodes` of a table [[hosts]] in {config}"
        raise Refused(f"the settings name no host {folded(unknown)}", hint=hint)

    def one(host: str) -> None:
        connecting.send(connecting.setup_for(settings, host, config), by, "trust")
        connecting.check_reached(settings, host)
        render.console.print(f"connected: {host}", markup=False)

    _for_each(names, one)


@hosts_app.command()
def disconnect(hosts: Hosts, by: By = _BY, config: Config = DEFAULT_CONFIG) -> None:
    """Take back what `connect` has done on hosts: end the agent, remove our files and the settings, and accept the key
    no more. It is refused where VMs are. The package, images and the agent's records stay."""
    from multiverse.site import connecting

    settings = load(config)

    def one(host: str) -> None:
        connecting.send(connecting.setup_for(settings, host, config), by, "distrust")
        render.console.print(f"disconnected: {host}", markup=False)

    _for_each(names_of_hosts(",".join(hosts)), one)


def _for_each(names: Sequence[str], do: Callable[[str], None]) -> None:
    """What fails for one host is said, and keeps no other one waiting."""
    failed = []
    for name in names:
        try:
            do(name)
        except MultiverseError as error:
            if len(names) == 1:
                raise
            failed.append(name)
            render.errors.print(str(error), markup=False, soft_wrap=True)
    if failed:
        raise Refused(f"failed: {folded(failed)}", hint="see above; what was done for the others stays")


def _change(verb: str, hosts: Sequence[str], done: str, **more: str | float | bool | None) -> None:
    """Ask for a change to hosts, and say what came of it for each."""
    with Client() as client:
        changed = decode(api.HostsChanged, client.change_hosts(verb, ",".join(hosts), **more))
    if changed.done:
        render.console.print(f"{done}: {', '.join(changed.done)}", markup=False, soft_wrap=True)
    for why in changed.refused.values():
        render.errors.print(why, markup=False)
    if changed.refused:
        raise typer.Exit(1)


# --- multiverse move --------------------------------------------------------------------------------


def move(
    what: Annotated[str, typer.Argument(metavar="JOB|VM", help="A job of one VM, or a VM.")],
    host: Annotated[str, typer.Argument(metavar="[HOST]", help="By default any that can take it.")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has moved.")] = True,
) -> None:
    """Move a VM to another host while its job runs."""
    with Client() as client:
        begun = decode(api.MoveBegun, client.move(what, host))
        typer.echo(f"VM {begun.vm} of job {begun.job_id} moves from {begun.host} to {begun.target}.")
        began = time.monotonic()
        while wait and (vm := _vm(client, begun.vm)) is not None and vm.state == "moving":
            time.sleep(_POLL)
    if not wait:
        return
    if vm is None or vm.host != begun.target:
        raise Refused(_how_ended(begun, vm), hint=f"multiverse timeline {begun.job_id} says why")
    typer.echo(f"It has moved, in {time.monotonic() - began:.1f} s.")


_POLL = 0.2  # seconds between two looks at a VM that moves


def _how_ended(begun: api.MoveBegun, vm: api.VmView | None) -> str:
    if vm is None:
        return f"VM {begun.vm} has ended meanwhile"
    if vm.state == "settling":
        return f"VM {vm.name} did not move; {vm.host} and {vm.other_host} settle which of them keeps it"
    return f"VM {vm.name} did not move"


def _vm(client: Client, name: str) -> api.VmView | None:
    return next((one for one in decode(list[api.VmView], client.vms()) if one.name == name), None)


# --- multiverse leases ------------------------------------------------------------------------------


def leases(json: render.Json = False) -> None:
    """Show the hosts that are leased from Slurm, with their pilot jobs, also those that wait.

    To give one back once its jobs have ended: multiverse hosts drain HOST.
    """
    with Client() as client:
        document = client.leases()
    if json:
        return render.as_json(document)
    table = render.table("HOST", "STATE", "PARTITION", "PILOT", "NODE", "SINCE", "UNTIL", "REASON", right=("SINCE",))
    for one in decode(list[api.LeaseView], document):
        until = f"{datetime.fromtimestamp(one.ends):%m-%d %H:%M}" if one.ends is not None else "–"
        cells = (one.partition, one.pilot or "–", one.node or "–", render.age(one.since), until, one.reason)
        table.add_row(one.name, render.state(one.state), *cells)
    render.show(table, "No host is leased.")


# --- multiverse utilization -------------------------------------------------------------------------

UNKNOWN = "–"

utilization_app = typer.Typer(
    help="What hosts and VMs use, and which hosts have room for a VM.", invoke_without_command=True
)


@utilization_app.callback()
def utilization(
    context: typer.Context,
    only: Annotated[str, typer.Option("--only", metavar="NAMES", help="Hosts or VMs, with commas.")] = "",
    history: Annotated[str, typer.Option("--history", metavar="NAME", help="What a host or VM has used.")] = "",
    hours: Annotated[float, typer.Option("--hours", min=0.1, help="Of the history.")] = 24.0,
    json: render.Json = False,
) -> None:
    """Show what hosts and VMs use: now, and as means of the last five minutes and of the last hour.

    A host counts with all processes on it; a VM with its process on the host, which includes the guest's own kernel,
    daemons and page cache. Memory that a guest has used once stays with its VM until the VM ends. From 140 columns on:
    the memory that was used lately, bytes per second on the network and on disks, and the shares of the time in which
    a process waited for CPU, memory and disks."""
    if context.invoked_subcommand is not None:
        return
    with Client() as client:
        document = client.usage_history(history, hours) if history else client.utilization(only.split(","))
    if json:
        render.as_json(document)
    elif history:
        render.show(_history(decode(list[api.UsagePoint], document)), "Nothing is known.")
    else:
        render.show(_usage_table(decode(list[api.UtilizationView], document)), "There is no such host or VM.")


@utilization_app.command()
def compatible(
    cpus: Annotated[int, typer.Option("--cpus", "-c", min=1, help="Of each node of the job.")] = 1,
    memory: Annotated[str, typer.Option("--mem", help="Of each node of the job: 800M, 8G.")] = "1G",
    image: Annotated[str, typer.Option("--image", help="By default that of the settings.")] = "",
    policy: Annotated[str, typer.Option("--policy", help="Of placement; by default that of the settings.")] = "",
    json: render.Json = False,
) -> None:
    """Show the hosts that have room for a VM now: first the one that the placement policy would take, then by their
    use. Nothing is reserved. Exits with 1 if there is none."""
    size = mebibytes(memory)
    if not size:
        raise Refused("--mem 0: a VM needs memory", hint="give a number with a unit: 800M, 8G")
    with Client() as client:
        document = client.compatible(cpus, size, image=image, policy=policy)
    found = decode(list[api.CompatibleHostView], document)
    if json:
        render.as_json(document)
    else:
        right = ("IN USE", "FREE CPUS", "FREE MEMORY", "VM CLAIMS", "FIT")
        table = render.table("HOST", *right, right=right)
        for one in found:
            claim = f"{one.claim.cpus}, {render.memory(one.claim.memory)}"
            table.add_row(one.name, f"{one.use:.0%}", str(one.free.cpus), render.memory(one.free.memory), claim,
                          str(one.holds))  # fmt: skip
        render.show(table, "No host has room for such a VM now.")
    if not found:
        raise typer.Exit(1)


def _usage_table(found: Sequence[api.UtilizationView]) -> Table:
    wide = render.is_wide()
    columns = ("CPUS", "5 MIN", "HOUR", "MEMORY", "5 MIN", "HOUR")
    more = ("ACTIVE", "IN/S", "OUT/S", "READ/S", "WRITTEN/S", "WAITING") if wide else ()
    table = render.table("NAME", "JOB", *columns, *more, right=(*columns, *more))
    for one in found:
        spans = (one.now, one.five_minutes, one.hour)
        cpus = [_number(usage.cpus) if usage else UNKNOWN for usage in spans]
        memory = [_memory(usage.memory) if usage else UNKNOWN for usage in spans]
        if one.cpus:
            cpus[0] += f" of {one.cpus}"
        name = one.name if one.kind == "host" else f"  {one.name}"
        table.add_row(name, one.job_id, *cpus, *memory, *(_usage_more(one.now) if wide else ()))
    return table


def _usage_more(usage: api.UsageView | None) -> list[str]:
    if usage is None:
        return [UNKNOWN] * 6
    rates = [_rate(value) for value in (usage.received, usage.sent, usage.read, usage.written)]
    active = UNKNOWN if usage.active is None else _memory(usage.active)
    waited = (usage.cpu_pressure, usage.memory_pressure, usage.io_pressure)
    return [active, *rates, "/".join(UNKNOWN if one is None else f"{one:.0%}" for one in waited)]


def _history(found: Sequence[api.UsagePoint]) -> Table:
    columns = ("FOR", "CPUS", "MOST", "MEMORY", "MOST", "IN/S", "OUT/S", "READ/S", "WRITTEN/S")
    table = render.table("FROM", *columns, right=columns)
    for one in found:
        used = one.usage
        rates = (used.received, used.sent, used.read, used.written)
        table.add_row(
            f"{datetime.fromtimestamp(one.wall):%m-%d %H:%M}",
            "hour" if one.span == 3600 else "min",
            _number(used.cpus),
            _number(used.cpus_peak),
            _memory(used.memory),
            _memory(used.memory_peak),
            *map(_rate, rates),
        )
    return table


def _number(cpus: float) -> str:
    return f"{cpus:.2f}" if cpus < 10 else f"{cpus:.1f}"


def _memory(mib: float) -> str:
    """A size given in MiB, as short as it can be read."""
    return f"{mib / 1024:.1f}G" if mib >= 1000 else f"{mib:.0f}M"


def _rate(value: float) -> str:
    """Bytes per second, in powers of ten."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return "0" if value < 1 else f"{value:.0f}"
