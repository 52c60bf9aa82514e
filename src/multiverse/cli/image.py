"""`multiverse image build|list|push`: bootable disks with everything that a job needs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from multiverse.agent.connection import other_command
from multiverse.cli import progress, render
from multiverse.config import Settings, load, names_of_hosts
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.images import catalog, transfer
from multiverse.images.build import build as build_image
from multiverse.images.build import expected_duration

_COPIES = 4  # to hosts at the same time

app = typer.Typer(help="Images: bootable disks with everything that a job needs.", no_args_is_help=True)

Directory = Annotated[
    Path | None,
    typer.Option("--images", help="Where images are kept; else that of $MULTIVERSE_CONFIG, or the default."),
]


def images_dir(directory: Path | None) -> Path:
    """The images' directory: the given one, else that of the settings in $MULTIVERSE_CONFIG, else the default."""
    if directory is not None:
        return directory
    config = os.environ.get("MULTIVERSE_CONFIG")
    return load(Path(config)).qemu.images if config else Settings().qemu.images


@app.command()
def build(
    flavour: Annotated[str, typer.Argument(metavar="slim|stock", help="slim: no service manager; stock: systemd.")],
    name: Annotated[str | None, typer.Option("--name", "-n", help="The image's name; else the flavour's.")] = None,
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="A Debian package to add.")] = None,
    hooks: Annotated[
        Path | None, typer.Option("--hooks", help="A directory of programs, run in the image in the order of names.")
    ] = None,
    directory: Directory = None,
    json: render.Json = False,
) -> None:
    """Build an image from this machine's own apt sources. Built before from the same inputs, it is kept."""
    if flavour not in ("slim", "stock"):
        raise Refused(f"there is no flavour {flavour}", hint="use one of: multiverse image build slim|stock")
    if os.geteuid() != 0:
        raise Refused("building an image needs root", hint="run it with sudo")
    where = images_dir(directory)
    with progress.working(f"image {name or flavour}", expected_duration(where, flavour)) as work:

        def say(line: str) -> None:
            work.say(line)
            if not json:
                render.console.print(f"  {line}", markup=False)

        made = build_image(
            name or flavour,
            "slim" if flavour == "slim" else "stock",
            where,
            packages=tuple(package or ()),
            hooks=hooks,
            progress=say,
        )
    if json:
        render.as_json({"name": made.name, "flavour": made.flavour, "key": made.key, "path": str(made.path)})
    else:
        render.console.print(f"image {made.name} ({made.flavour}) {made.key[:12]} in {made.path}", markup=False)


@app.command("list")
def list_(directory: Directory = None, json: render.Json = False) -> None:
    """Show the images that there are."""
    found = catalog.list_images(images_dir(directory))
    if json:
        render.as_json(
            [{"name": i.name, "flavour": i.flavour, "key": i.key, "packages": list(i.packages), "path": str(i.path)}
             for i in found]
        )  # fmt: skip
        return
    table = render.table("IMAGE", "FLAVOUR", "KEY", "DISK", "PACKAGES", right=("DISK",), fold=("PACKAGES",))
    for one in found:
        taken = (one.path / "disk.raw").stat().st_blocks * 512 / 2**20
        table.add_row(one.name, one.flavour, one.key[:12], render.memory(taken), " ".join(one.packages))
    render.show(table, "No images; multiverse image build slim makes one.")


@app.command()
def push(
    name: Annotated[str, typer.Argument(metavar="IMAGE", help="An image of this machine.")],
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="Hosts, also as n[1-32].")],
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="MULTIVERSE_CONFIG", help="The settings, a TOML file.")
    ] = Path("/etc/multiverse/multiverse.toml"),
    directory: Directory = None,
) -> None:
    """Copy an image to hosts, by the way of the setting agent.connect. It appears there when it is complete."""
    settings = load(config)
    image = catalog.load(directory or settings.qemu.images, name)
    names = [name for word in hosts for name in names_of_hosts(word)]
    if settings.host.name in names:
        raise Refused(f"{settings.host.name} is this machine", hint=f"its images are in {settings.qemu.images}")
    commands = {host: other_command(settings.agent.connect, host, "receive-image") for host in names}
    failed = []
    with ThreadPoolExecutor(_COPIES) as threads:
        begun = {threads.submit(transfer.send, image, command): host for host, command in commands.items()}
        for done in as_completed(begun):
            try:
                word = "copied" if done.result() else "there already"
            except MultiverseError as error:
                word = f"failed: {error.message}"
                failed.append(begun[done])
            render.console.print(f"{begun[done]}: {word}", markup=False)
    if failed:
        raise Broken(f"{name} is not on {', '.join(sorted(failed))}", hint="repeat this command for these hosts")
