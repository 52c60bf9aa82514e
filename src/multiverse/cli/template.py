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
Cpus = Annotated[int | None, typer.Option(help="Of this many CPUs; the base's if only --memory is given.")]
Memory = Annotated[int | None, typer.Option(help="Of this much memory, in MiB; the base's if only --cpus is given.")]
Account = Annotated[str | None, typer.Option(help="For the jobs of this account alone; empty for those of all.")]
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
        "IMAGE", "HOST", "STATE", "FOR", "CPUS", "MEMORY", "ACCOUNT", "VMS", "REASON",
        right=("FOR", "CPUS", "MEMORY", "VMS"), fold=("REASON",),
    )  # fmt: skip
    for one in found:
        table.add_row(
            one["image"],
            one["host"],
            render.state(one["state"]),
            render.duration(one["age"]),
            str(one["cpus"]),
            render.memory(one["memory"]),
            one["account"],
            str(one["references"]),
            one["reason"],
        )
    render.show(table, "No templates; they are made when a job first needs one.")


@app.command()
def build(
    image: Annotated[str, typer.Argument(help="The image's name.")],
    host: Host = "",
    cpus: Cpus = None,
    memory: Memory = None,
    account: Account = None,
) -> None:
    """Make a template now, and wait until it is ready. Unless told otherwise it has the base size and is for all."""
    with Client() as client:
        wish = client.template("build", image, host, cpus=cpus, memory=memory, account=account)
        host = wish["host"]
        with render.step(f"template of {image} on {host}"):
            rows = _wait(client, wish, lambda rows: rows and all(row["state"] in ("ready", "broken") for row in rows))
    for row in rows:
        if row["state"] == "broken":
            raise Broken(f"the template of {image} is broken: {row['reason']}", hint="mend the image, then build again")


@app.command()
def drop(
    image: Annotated[str, typer.Argument(help="The image's name.")],
    host: Host = "",
    cpus: Cpus = None,
    memory: Memory = None,
    account: Account = None,
) -> None:
    """Give the memory of an image's templates back: of all, or of those of a size or an account. VMs that were forked
    from them go on."""
    with Client() as client:
        wish = client.template("drop", image, host, cpus=cpus, memory=memory, account=account)
        with render.step(f"dropping the template of {image} on {wish['host']}"):
            _wait(client, wish, lambda rows: not rows)


def _wait(client: Client, wish: dict[str, Any], over: Any) -> list[dict[str, Any]]:
    """Ask until `over` says so of the rows of the templates wished for. The wish was committed, so that their absence
    counts."""
    told = {name: wish[name] for name in ("image", "host", "cpus", "memory", "account") if wish[name] is not None}
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        rows = [row for row in client.templates() if told.items() <= row.items()]
        if over(rows):
            return rows
        time.sleep(0.1)
    raise Unknown(f"nothing came of it within {LIMIT:g} s", hint="see: multiverse template list")
