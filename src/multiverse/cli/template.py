"""`multiverse template build|list|drop`: the frozen parents that clones are forked from."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.client import Client
from multiverse.core.errors import Broken, Unknown

app = typer.Typer(help="Templates: frozen parents that clones are forked from.", no_args_is_help=True)

Host = Annotated[str, typer.Option("--host", help="On this host; needed when there are several.")]
LIMIT = 900.0


@app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show templates, and how many VMs live by them."""
    with Client() as client:
        found = client.templates()
    if json:
        render.as_json(found)
        return
    table = render.table(
        "IMAGE", "HOST", "STATE", "FOR", "MEMORY", "VMS", "REASON", right=("FOR", "MEMORY", "VMS"), fold=("REASON",)
    )
    for one in found:
        table.add_row(
            one["image"],
            one["host"],
            render.state(one["state"]),
            render.duration(one["age"]),
            render.memory(one["memory"]),
            str(one["references"]),
            one["reason"],
        )
    render.show(table, "No templates; they are made when a job first needs one.")


@app.command()
def build(image: Annotated[str, typer.Argument(help="The image's name.")], host: Host = "") -> None:
    """Make a template now, and wait until it is ready."""
    with Client() as client:
        host = client.template("build", image, host)["host"]
        with render.step(f"template of {image} on {host}"):
            row = _wait(client, image, host, lambda row: row is not None and row["state"] in ("ready", "broken"))
    if row is not None and row["state"] == "broken":
        raise Broken(f"the template of {image} is broken: {row['reason']}", hint="mend the image, then build again")


@app.command()
def drop(image: Annotated[str, typer.Argument(help="The image's name.")], host: Host = "") -> None:
    """Give a template's memory back. VMs that were forked from it go on."""
    with Client() as client:
        host = client.template("drop", image, host)["host"]
        with render.step(f"dropping the template of {image} on {host}"):
            _wait(client, image, host, lambda row: row is None)


def _wait(client: Client, image: str, host: str, over: Any) -> dict[str, Any] | None:
    """Ask until `over` says so of the template's row. The wish was accepted, so the row's absence counts
    only from the second look on."""
    deadline = time.monotonic() + LIMIT
    time.sleep(0.05)
    while time.monotonic() < deadline:
        row = next((t for t in client.templates() if t["image"] == image and t["host"] == host), None)
        if over(row):
            return row
        time.sleep(0.1)
    raise Unknown(f"nothing came of it within {LIMIT:g} s", hint="see: multiverse template list")
