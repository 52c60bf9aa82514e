"""`multiverse simulate`: the controller in virtual time, against a simulated cluster, through faults."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multiverse.cli import render
from multiverse.core.errors import Broken, Refused

if TYPE_CHECKING:  # the simulator is an extra, and no other verb is to wait for its imports
    from multiverse.simulation.run import Scenario

app = typer.Typer(no_args_is_help=True, help="Simulate the controller through faults, by seed, in virtual time.")

Seed = Annotated[str, typer.Argument(metavar="SEED|FILE", help="A seed, or a scenario that shrink has written.")]


@app.callback()
def _check() -> None:
    try:
        import async_solipsism  # noqa: F401
    except ImportError as error:
        raise Refused("the simulator's virtual clock is missing", hint="pip install multiverse[simulation]") from error


@app.command()
def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many histories.")] = 2000,
    first: Annotated[int, typer.Option(min=0, help="The first one's seed.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="How many at a time; 0 for one on each core.")] = 0,
) -> None:
    """Play many histories, each with its own jobs and faults; print every seed that breaks a promise.

    The exit status is 1 if any did."""
    from multiverse.simulation.fuzz import fuzz

    began, done, bad, jobs, commits, deaths = time.monotonic(), 0, 0, 0, 0, 0
    faults: Counter[str] = Counter()
    with render.step(f"{seeds} histories from seed {first}") as say:
        for verdict in fuzz(range(first, first + seeds), processes or None):
            done += 1
            jobs, commits, deaths = jobs + verdict.jobs, commits + verdict.commits, deaths + verdict.deaths
            faults.update(verdict.faults)
            if verdict.wrongs:
                bad += 1
                render.console.print(f"seed {verdict.seed}: {verdict.wrongs[0].strip()}", markup=False, highlight=False)
            if done % 50 == 0:
                say(f"{done} of {seeds} histories, {bad or 'none'} broke a promise")
    render.console.print(
        f"{done} histories, {jobs} jobs, {commits} commits, {sum(faults.values())} faults of calls, {deaths} deaths of "
        f"the controller, in {render.duration(time.monotonic() - began)}: {bad or 'none'} broke a promise",
        highlight=False,
    )
    if bad:
        raise Broken(f"{bad} histories broke a promise", hint="multiverse simulate shrink SEED makes one small")


@app.command()
def replay(
    what: Seed, lines: Annotated[int, typer.Option(min=0, help="Only the last lines of it; 0 for all.")] = 0
) -> None:
    """Play one history again and tell its story, in order: users, faults, mishaps, and what the controller did."""
    from multiverse.simulation.fuzz import hush
    from multiverse.simulation.run import simulate

    hush()
    outcome = simulate(_scenario(what))
    typer.echo(outcome.story(lines))
    if outcome.wrongs:
        raise Broken("promises were broken", hint=f"multiverse simulate shrink {what} makes the story short")


@app.command()
def shrink(
    what: Seed,
    out: Annotated[Path | None, typer.Option(help="Where to write the small scenario; SEED.json if not told.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="At most so many simulations.")] = 2000,
) -> None:
    """Make a history that goes wrong as small as it gets, write it down, and tell its story."""
    from multiverse.simulation.fuzz import hush, save
    from multiverse.simulation.run import simulate
    from multiverse.simulation.shrink import explicit, shrink

    hush()
    outcome = simulate(_scenario(what))
    if not outcome.wrongs:
        raise Refused(f"{what} keeps all promises: there is nothing to make smaller", hint="multiverse simulate fuzz")
    small = shrink(explicit(outcome), tries=tries)
    path = out or Path(f"{small.seed}.json")
    save(small, path)
    typer.echo(simulate(small).story())
    typer.echo(f"written to {path}; again with: multiverse simulate replay {path}")


def _scenario(what: str) -> Scenario:
    from multiverse.simulation.fuzz import load
    from multiverse.simulation.scenarios import troubled

    return troubled(int(what)) if what.isdigit() else load(Path(what))
