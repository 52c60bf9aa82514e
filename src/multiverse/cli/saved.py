"""`multiverse save`, `checkpoint`, `resume` and `saved`: states of running jobs, from which they go on later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from multiverse import api
from multiverse.api import decode
from multiverse.cli import render
from multiverse.cli.asking import Controller, UsersClient, asker
from multiverse.client import Client
from multiverse.core.errors import Refused

_POLL = 0.2  # seconds between two looks at a job that is being saved
_NOT_YET = ("preparing", "freezing", "cutting", "writing", "keeping")
_HELD = "It is held: multiverse resume {job} lets it go on."
_WAITS = "It waits in the queue, and goes on as soon as a host has room."


def save(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job, or a task of an array (123_4).")],
    hold: Annotated[bool, typer.Option("--hold", help="Hold it until `multiverse resume`.")] = False,
    controller: Controller = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until its state is complete.")] = True,
) -> None:
    """Save a running job: it stops, waits in the queue without memory of a host, and goes on where it stopped."""
    with asker(controller) as client:
        client.save(job, hold=hold)
        if not wait:
            return
        reason = ""
        while (found := _of(client, job)) is not None and found.state in _NOT_YET:
            reason = found.reason
            time.sleep(_POLL)
    if found is None or found.state not in ("stored", "copying", "resuming", "queueing", "thawing"):
        what = f"job {job} was not saved: {found.reason if found is not None else reason}"
        raise Refused(what, hint=f"multiverse explain {job} says what became of it")
    kept = "in the memory of its host, because it could not be written"
    what = kept if found.in_memory else f"{found.bytes >> 20} MiB"
    typer.echo(f"Job {job} is saved: {what}. " + (_HELD if hold else _WAITS).format(job=job))


def _of(client: Client | UsersClient, job: str) -> api.SavedView | None:
    mine = (one for one in decode(list[api.SavedView], client.saved()) if one.job_id == job)
    return next((one for one in mine if not one.checkpoint), None)


def checkpoint(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job, or a task of an array (123_4).")],
    shared_files: Annotated[
        bool, typer.Option("--shared-files", help="Also if it writes to shared files, which stay as they are.")
    ] = False,
    controller: Controller = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is complete.")] = True,
) -> None:
    """Write the state of a running job, which goes on. If its VM is lost, it goes on from the last such state."""
    with asker(controller) as client:
        before = {one.name for one in _checkpoints(client, job)}
        client.checkpoint(job, shared_files=shared_files)
        made = None
        while wait and (made is None or made.state in ("capturing", "undoing")):
            later = [one for one in _checkpoints(client, job) if one.name not in before]
            if not later:
                raise Refused(f"no checkpoint of job {job} was made", hint=f"multiverse explain {job} says why")
            made = later[-1]
            time.sleep(_POLL)
    if made is not None:
        typer.echo(f"A checkpoint of job {job} was made: {made.bytes >> 20} MiB.")


def _checkpoints(client: Client | UsersClient, job: str) -> list[api.SavedView]:
    return [one for one in decode(list[api.SavedView], client.saved()) if one.job_id == job and one.checkpoint]


def resume(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job that was saved, and is held.")],
    anew: Annotated[bool, typer.Option("--anew", help="Discard its state, and let it begin anew.")] = False,
    controller: Controller = "",
) -> None:
    """Let a saved job go on that is held."""
    with asker(controller) as client:
        client.resume(job, anew=anew)


def saved(controller: Controller = "", json: render.Json = False) -> None:
    """Show the jobs that are saved, or are being saved, and the checkpoints of jobs: to users their own ones."""
    with asker(controller) as client:
        document = client.saved()
    if json:
        return render.as_json(document)
    found, wide = decode(list[api.SavedView], document), render.is_wide()
    columns: dict[str, Callable[[api.SavedView], str | Text]] = {
        "JOB": lambda one: one.job_id,
        "STATE": lambda one: render.state("checkpoint" if one.checkpoint and one.state == "stored" else one.state),
        "SINCE": lambda one: render.age(one.since),
        "SIZE": lambda one: "in memory" if one.in_memory else f"{one.bytes >> 20} MiB" if one.bytes else "–",
        "STORAGE": lambda one: one.storage or "–",
        "COPY": lambda one: one.copy or "–",
        "HELD": lambda one: "yes" if one.held else "–",
        "VM": lambda one: ", ".join(one.vms),
        "REASON": lambda one: one.reason,
    }
    below = () if wide else ("COPY", "VM", "REASON")
    shown = {title: cell for title, cell in columns.items() if title not in below}
    render.listed(found, "No job is saved.", shown, right=("SINCE", "SIZE"), fold=("VM", "REASON") if wide else ())
    for one in found if below else ():
        copy = [f"copy in {one.copy}"] if one.copy else []
        render.say(f"{one.job_id}: {'; '.join([', '.join(one.vms), *copy, one.reason])}", indent=1)
