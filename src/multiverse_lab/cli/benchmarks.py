"""`multiverse bench`: all benchmarks, each in a module of its own."""

from __future__ import annotations

import typer

from multiverse_lab.cli import (
    across,
    backfill,
    bench,
    burst,
    checkpoint,
    compare,
    containers,
    density,
    evicted_week,
    injob,
    lease_day,
    lease_start,
    long_queue,
    move,
    observations,
    paper,
    passes,
    placement,
    report,
    sampling,
    save,
    scale,
    sleep,
    spread,
    submissions,
    throughput,
    viewers,
)

app = typer.Typer(help="Measurements, with their baseline in the same run.", no_args_is_help=True)
app.callback()(bench.show_progress)
app.command("latency")(bench.latency_)
app.command("across")(across.across)
app.command("burst")(burst.burst)
app.command("checkpoint")(checkpoint.checkpoint)
app.command("compare")(compare.compare)
app.command("containers")(containers.containers)
app.command("density")(density.density)
app.command("injob")(injob.injob)
app.command("leases")(lease_day.lease_day)
app.command("evictions")(evicted_week.evicted_week)
app.command("lease-start")(lease_start.lease_start)
app.command("observations")(observations.observations)
app.command("paper")(paper.paper)
app.command("planner")(passes.planner)
app.command("submissions")(submissions.submissions)
app.command("backfill")(backfill.backfill)
app.command("placement")(placement.placement)
app.command("queue")(long_queue.queue)
app.command("all")(report.all_benchmarks)
app.command("sampling")(sampling.sampling)
app.command("move")(move.move)
app.command("save")(save.save)
app.command("scale")(scale.scale)
app.command("sleep")(sleep.sleep)
app.command("spread")(spread.spread)
app.command("neighbours")(long_queue.neighbours_)
app.command("throughput")(throughput.throughput)
app.command("viewers")(viewers.viewers)
