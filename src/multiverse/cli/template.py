"""`multiverse template build|list|drop`: the frozen parents that clones are forked from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.api import TemplateRequest, TemplateView, decode
from multiverse.cli import progress, render
from multiverse.client import Client
from multiverse.core.errors import Broken, Unknown

app = typer.Typer(help="Templates: frozen parents that clones are forked from.", no_args_is_help=True)

Host = Annotated[str, typer.Option("--host", help="On this host; needed when there are several.")]
Cpus = Annotated[int | None, typer.Option(help="Of this many CPUs; the base's if only --memory is given.")]
Memory = Annotated[int | None, typer.Option(help="Of this much memory, in MiB; the base's if only --cpus is given.")]
Account = Annotated[str | None, typer.Option(help="For the jobs of this account alone; empty for those of all.")]
LIMIT = 900.0  # seconds to wait for a template to be built or dropped


@app.command("list")
def list_(json: render.Json = False) -> None:
    """Show templates, and how many VMs were forked from each."""
    with Client() as client:
        document = client.templates()
    if json:
        return render.as_json(document)
    columns: dict[str, Callable[[TemplateView], str | Text]] = {
        "IMAGE": lambda one: one.image,
        "HOST": lambda one: one.host,
        "STATE": lambda one: render.state(one.state),
        "FOR": lambda one: render.age(one.since),
        "CPUS": lambda one: str(one.cpus),
        "MEMORY": lambda one: render.memory(one.memory),
        "ACCOUNT": lambda one: one.account,
        "VMS": lambda one: str(one.references),
        "REASON": lambda one: one.reason,
    }
    found, empty = decode(list[TemplateView], document), "No templates. A template is built when a job first needs it."
    render.listed(found, empty, columns, right=("FOR", "CPUS", "MEMORY", "VMS"), fold=("REASON",))


@app.command()
def build(
    image: Annotated[str, typer.Argument(help="The image's name.")],
    host: Host = "",
    cpus: Cpus = None,
    memory: Memory = None,
    account: Account = None,
) -> None:
    """Build a template now, and wait until it is ready. By default it has the base size and is for all accounts."""
    with Client() as client:
        request = _request(client, "build", image, host, cpus=cpus, memory=memory, account=account)
        with progress.step(f"template of {image} on {request.host}"):
            found = _wait(
                client, request, lambda found: bool(found) and all(one.state in ("ready", "broken") for one in found)
            )
    for template in found:
        if template.state == "broken":
            raise Broken(
                f"the template of {image} is broken: {template.reason}",
                hint="build a better image, then build the template again",
            )


@app.command()
def drop(
    image: Annotated[str, typer.Argument(help="The image's name.")],
    host: Host = "",
    cpus: Cpus = None,
    memory: Memory = None,
    account: Account = None,
) -> None:
    """Free the memory of an image's templates: of all, or of those of a size or an account. VMs that were forked from
    them go on."""
    with Client() as client:
        request = _request(client, "drop", image, host, cpus=cpus, memory=memory, account=account)
        with progress.step(f"dropping the template of {image} on {request.host}"):
            _wait(client, request, lambda found: not found)


def _request(client: Client, verb: str, image: str, host: str, **which: int | str | None) -> TemplateRequest:
    """Send the request; return it as the daemon committed it, with its defaults filled in."""
    return TemplateRequest.model_validate(client.template(verb, image, host, **which))


def _wait(
    client: Client, request: TemplateRequest, over: Callable[[Sequence[TemplateView]], bool]
) -> Sequence[TemplateView]:
    """The matching templates, once `over` is true of them. The request was committed before: templates that are absent
    are gone."""
    wanted: dict[str, Any] = request.model_dump(exclude_none=True)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        templates = decode(list[TemplateView], client.templates())
        found = [one for one in templates if all(getattr(one, name) == value for name, value in wanted.items())]
        if over(found):
            return found
        time.sleep(0.1)
    raise Unknown(
        f"the templates of {request.image} are not as requested after {LIMIT:g} s", hint="see: multiverse template list"
    )
