"""`multiverse daemon` and `multiverse agent`: the controller with its API, and what runs the VMs of one host."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, TextIO, cast

import structlog
import typer

from multiverse.cli.arguments import DEFAULT_CONFIG, Config
from multiverse.cli.commands import DONE, NOT_DONE
from multiverse.config import load
from multiverse.system.interrupts import hold_reloads
from multiverse.system.logs import LossyStream, RepeatLimiter

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]


def daemon(config: Config = DEFAULT_CONFIG, verbose: Verbose = False) -> None:
    """Run the controller in the foreground. SIGTERM ends it and leaves VMs and jobs as they are. After SIGHUP it reads
    the settings again."""
    hold_reloads()
    settings = load(config)
    configure_log(verbose=verbose)
    from multiverse.service.daemon import serve  # imported late: it loads slowly, and only this command needs it

    asyncio.run(serve(settings, config))


def configure_log(*, verbose: bool) -> None:
    """Log to standard error, a line for each event."""
    structlog.configure(
        processors=[
            RepeatLimiter(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )


# --- multiverse agent -------------------------------------------------------------------------------

agent_app = typer.Typer(help="The agent of this host, which runs its VMs.", invoke_without_command=True)


@agent_app.callback()
def agent(context: typer.Context, config: Config = DEFAULT_CONFIG, verbose: Verbose = False) -> None:
    """Run the agent of this host in the foreground. SIGTERM ends it and leaves VMs as they are. After SIGHUP it reads
    the settings again."""
    if context.invoked_subcommand is not None:
        context.obj = config
        return
    hold_reloads()
    settings = load(config)
    configure_log(verbose=verbose)
    from multiverse.service.agent import serve  # imported late: it loads slowly, and only this command needs it

    asyncio.run(serve(settings, config))


@agent_app.command("dial-stdio")
def dial_stdio(
    context: typer.Context,
    socket: Annotated[Path | None, typer.Option(help="The agent's socket, if it is not that of the settings.")] = None,
    leased: Annotated[bool, typer.Option("--leased", help="It is the agent of a lease.", hidden=True)] = False,
) -> None:
    """Connect standard input and output to this host's agent. A controller on another machine runs this by ssh."""
    if leased:  # Slurm's first signal reaches all steps; the controller still has to hear what becomes of the VMs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from multiverse.agent.dial import dial_stdio

    dial_stdio(socket or load(context.obj).agent.socket)


@agent_app.command("pilot", hidden=True)
def pilot(
    context: typer.Context,
    name: str,
    job: Annotated[str, typer.Option(help="The pilot's job, its cores and its MiB, with commas between them.")] = "",
    token: Annotated[str, typer.Option(help="The lease's token.")] = "",
) -> None:
    """Be the pilot of a lease, in the job that the controller has submitted for it."""
    from multiverse.service.pilot import PilotJob, run_pilot

    configure_log(verbose=False)
    raise typer.Exit(run_pilot(load(context.obj), name, PilotJob.parse(job, token)))


@agent_app.command("sweep")
def sweep(
    context: typer.Context,
    job: Annotated[str, typer.Option(help="This job has ended: also what its pilot has left running.")] = "",
) -> None:
    """Remove what leases that have ended have left on this node. The site's epilog runs this, as root."""
    from multiverse.pilot.lease import sweep

    configure_log(verbose=False)
    left = sweep(load(context.obj).agent.leases, job)
    for line in left:
        print(line)
    raise typer.Exit(1 if left else 0)


@agent_app.command("from-ssh")
def from_ssh(context: typer.Context) -> None:
    """Do what a controller asks for by ssh, and nothing else: the command of its key in authorized_keys."""
    from multiverse.agent.dial import permitted

    match permitted(os.environ.get("SSH_ORIGINAL_COMMAND", "")):
        case (_, name, digest):
            receive_image(context, name, digest)
        case _:
            dial_stdio(context)


@agent_app.command()
def trust(context: typer.Context) -> None:
    """Have the settings of a controller, accept its key for the agent alone, and run the agent: `multiverse hosts
    connect` runs this by ssh. Exits with 1 if something is lacking then."""
    from multiverse.ports.site import Finding, Level
    from multiverse.site import connecting

    missing = False
    for said in connecting.trust(connecting.received(sys.stdin.buffer.read()), context.obj.absolute()):
        if isinstance(said, Finding):
            missing |= said.level is Level.PROBLEM
            said = f"{said.level.value}: {said.name}: {said.message}\n  → {said.remedy}"
        print(said, flush=True)
    raise typer.Exit(NOT_DONE if missing else DONE)


@agent_app.command()
def distrust(context: typer.Context) -> None:
    """Take back what `trust` has done: `multiverse hosts disconnect` runs this by ssh."""
    from multiverse.site import connecting

    for said in connecting.distrust(connecting.received(sys.stdin.buffer.read()), context.obj.absolute()):
        print(said, flush=True)


@agent_app.command("receive-image", hidden=True)
def receive_image(
    context: typer.Context,
    name: str,
    digest: str,
    leased: Annotated[str, typer.Option(help="The lease to which the archive is brought.")] = "",
    owner: Annotated[int, typer.Option(help="The uid of who brings it.")] = 0,
) -> None:
    """Receive an image from `multiverse image push` on another machine, by standard input. For a lease, its archive is
    brought to a file."""
    from multiverse.host import path_security
    from multiverse.images import transfer
    from multiverse.images.catalog import check_name
    from multiverse.pilot.lease import directory_of

    settings = load(context.obj)
    images, streams = settings.qemu.images, (sys.stdin.buffer, sys.stdout.buffer)
    check_name(name)
    path_security.make_directory(images, 0o755)
    if leased:
        with directory_of(settings.agent.leases, leased).incoming(name, owner) as brought:
            transfer.receive(images, name, digest, *streams, brought)
    else:
        transfer.receive(images, name, digest, *streams)
