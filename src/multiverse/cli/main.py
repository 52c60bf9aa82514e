"""The command line. Each command has a module of its own; this one puts them together."""

from __future__ import annotations

import signal
import sys

import typer

from multiverse.cli import (
    agent,
    audit,
    backfill,
    bench,
    burst,
    daemon,
    demo,
    density,
    hosts,
    image,
    jobs,
    lab,
    long_queue,
    observations,
    passes,
    placement,
    prune,
    repair,
    scale,
    simulate,
    site,
    soak,
    status,
    submissions,
    template,
    timeline,
    vms,
)
from multiverse.cli.render import errors
from multiverse.core.errors import MultiverseError, Superseded

app = typer.Typer(
    name="multiverse",
    help="A virtual machine of its own for every Slurm job.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("jobs")(jobs.jobs)
app.command("vms")(vms.vms)
app.add_typer(hosts.app, name="hosts")
app.command("status")(status.status)
app.command("repair")(repair.repair)
app.command("prune")(prune.prune)
app.command("timeline")(timeline.timeline)
app.add_typer(audit.app, name="audit")
app.add_typer(template.app, name="template")
app.add_typer(image.app, name="image")
app.command("daemon")(daemon.daemon)
app.add_typer(agent.app, name="agent")
app.add_typer(lab.app, name="lab")
app.add_typer(site.app, name="site")
bench.app.command("burst")(burst.burst)
bench.app.command("density")(density.density)
bench.app.command("observations")(observations.observations)
bench.app.command("planner")(passes.planner)
bench.app.command("submissions")(submissions.submissions)
bench.app.command("backfill")(backfill.backfill)
bench.app.command("placement")(placement.placement)
bench.app.command("queue")(long_queue.queue)
bench.app.command("scale")(scale.scale)
bench.app.command("neighbours")(long_queue.neighbours_)
app.add_typer(bench.app, name="bench")
app.add_typer(simulate.app, name="simulate")
app.command("demo")(demo.demo)
app.command("soak")(soak.soak)


def _interrupt(_number: int, _frame: object) -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that the command cleans up before it ends."""
    signal.raise_signal(signal.SIGINT)


def _show(error: typer.TyperException) -> None:
    """Print an error of the command line's usage as typer does, with the command that shows help."""
    show = getattr(error, "show", None)
    if show is not None:
        show()
    else:
        errors.print(error.format_message(), markup=False)


SUPERSEDED = 4
"""The exit status of a daemon that another one supersedes: two that start each other again would take turns."""


def main() -> None:
    """Entry point. Errors for operators go to stderr with their next step, and the exit status is 1, or
    `SUPERSEDED` where the service manager must not start the daemon again."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1) ignores SIGHUP, and that is kept
            signal.signal(number, _interrupt)
    try:
        status = app(prog_name="multiverse", standalone_mode=False)
    except MultiverseError as error:
        errors.print(f"multiverse: {error.message}", markup=False)
        if error.hint:
            errors.print(f"  next: {error.hint}", markup=False, style="dim")
        sys.exit(SUPERSEDED if isinstance(error, Superseded) else 1)
    except typer.TyperException as error:  # wrong usage of the command line
        _show(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)
