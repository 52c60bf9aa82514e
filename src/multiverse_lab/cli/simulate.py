"""`multiverse simulate`: run the controller in virtual time against a simulated cluster, with faults."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multiverse.cli import progress, render
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import number_of
from multiverse_lab.cli import simulated_cluster

if TYPE_CHECKING:  # the simulator is an extra, and its imports must not delay other commands
    from multiverse_lab.simulation.scenario import Scenario
    from multiverse_lab.simulation.world import Pair

app = typer.Typer(no_args_is_help=True, help="Simulate the controller with faults, by seed, in virtual time.")

Seed = Annotated[str, typer.Argument(metavar="SEED|FILE", help="A seed, or a file that shrink has written.")]


PairName = Annotated[
    str,
    typer.Option("--pair", help="slurm-hosts, grid-hosts, slurm-cloud or grid-cloud. By default the seed decides."),
]

History = Annotated[
    str,
    typer.Option(
        help="Of a seed: crowded, operated, leasing, requesting, overflowing, failing, saving, moving, "
        "checkpointing, sleeping, evicting or leaving. By default that with faults."
    ),
]


@app.callback()
def _check() -> None:
    try:
        import async_solipsism  # noqa: F401
    except ImportError as error:
        raise Refused("the simulator's virtual clock is missing", hint="pip install multiverse[simulation]") from error


@app.command()
def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to simulate.")] = 2000,
    first: Annotated[int, typer.Option(min=0, help="The first one's seed.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="How many at a time; 0 for one on each core.")] = 0,
    pair: PairName = "",
    history: History = "",
) -> None:
    """Simulate many seeds, each with its own jobs and faults, and print every seed that breaks a promise.

    The exit status is 1 if any seed does."""
    from multiverse_lab.simulation.fuzz import HISTORIES, fuzz

    if history and history not in HISTORIES:
        raise Refused(f"there is no history {history!r}", hint=f"choose one of {', '.join(HISTORIES)}")
    began, done, bad, jobs, commits, crashes = time.monotonic(), 0, 0, 0, 0, 0
    faults: Counter[str] = Counter()
    with progress.step(f"{seeds} seeds from {first}") as say:
        for result in fuzz(range(first, first + seeds), processes or None, _pair(pair), history):
            done += 1
            jobs, commits, crashes = jobs + result.jobs, commits + result.commits, crashes + result.crashes
            faults.update(result.faults)
            if result.violations:
                bad += 1
                render.console.print(
                    f"seed {result.seed}: {result.violations[0].strip()}", markup=False, highlight=False
                )
            progress.present().advance(done, seeds)
            if done % 50 == 0:
                say(f"{done} of {seeds} seeds, {bad or 'none'} broke a promise")
    render.console.print(
        f"{number_of(done, 'seed')}, {number_of(jobs, 'job')}, {number_of(commits, 'commit')}, "
        f"{number_of(sum(faults.values()), 'fault')} of calls, {number_of(crashes, 'crash', 'crashes')} of the "
        f"controller, in {render.duration(time.monotonic() - began)}: {bad or 'none'} broke a promise",
        highlight=False,
    )
    if bad:
        raise Broken(f"{number_of(bad, 'seed')} broke a promise", hint="run multiverse simulate shrink SEED")


@app.command()
def replay(
    what: Seed,
    lines: Annotated[int, typer.Option(min=0, help="Print only so many of the last lines; 0 for all.")] = 0,
    pair: PairName = "",
    history: History = "",
) -> None:
    """Simulate one seed again and print all events: users, faults, incidents, and what the controller did."""
    from multiverse_lab.simulation.fuzz import silence_logs
    from multiverse_lab.simulation.run import simulate

    silence_logs()
    outcome = simulate(_scenario(what, pair, history))
    typer.echo(outcome.story(lines))
    if outcome.violations:
        again = f"{what} --history {history}" if history else what
        raise Broken(f"{what} breaks a promise", hint=f"run multiverse simulate shrink {again} for a short story")


@app.command()
def shrink(
    what: Seed,
    out: Annotated[Path | None, typer.Option(help="Where to write the small scenario; SEED.json by default.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="The largest number of simulations.")] = 2000,
    pair: PairName = "",
    history: History = "",
) -> None:
    """Make a scenario that breaks a promise as small as possible, write it to a file, and print its story."""
    from multiverse_lab.simulation.fuzz import save, silence_logs
    from multiverse_lab.simulation.run import simulate
    from multiverse_lab.simulation.shrink import breaks_the_same, explicit, shrink

    silence_logs()
    outcome = simulate(_scenario(what, pair, history))
    if not outcome.violations:
        raise Refused(
            f"{what} breaks no promise",
            hint="give --history if simulate fuzz names one, or run simulate fuzz to find a seed that does",
        )
    with progress.working("making the scenario smaller"):
        small = shrink(explicit(outcome), breaks_the_same(outcome), tries=tries)
    path = out or Path(f"{small.seed}.json")
    save(small, path)
    typer.echo(simulate(small).story())
    typer.echo(f"written to {path}; replay it with: multiverse simulate replay {path}")


def _pair(name: str) -> Pair | None:
    from multiverse_lab.simulation.world import Pair

    if name and name not in list(Pair):
        raise Refused(f"there is no pair {name!r}", hint=f"choose one of {', '.join(Pair)}")
    return Pair(name) if name else None


def _scenario(what: str, pair: str, history: str) -> Scenario:
    from multiverse_lab.simulation.fuzz import HISTORIES, load
    from multiverse_lab.simulation.generate import with_faults

    if history and history not in HISTORIES:
        raise Refused(f"there is no history {history!r}", hint=f"choose one of {', '.join(HISTORIES)}")
    if history and (pair or not what.isdigit()):
        raise Refused("--history is of a seed, and needs neither a file nor --pair", hint="leave one of them out")
    if not what.isdigit():
        return load(Path(what))
    return HISTORIES[history].scenario(int(what)) if history else with_faults(int(what), pair=_pair(pair))


app.command("cluster")(simulated_cluster.cluster)
