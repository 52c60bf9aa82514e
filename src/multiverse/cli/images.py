"""`multiverse image` and `multiverse template`: bootable disks, and the frozen parents that clones are forked from."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.text import Text

from multiverse.agent.connection import other_command
from multiverse.api import TemplateRequest, TemplateView, decode
from multiverse.cli import progress, render
from multiverse.cli.arguments import DEFAULT_CONFIG
from multiverse.cli.commands import NOT_DONE
from multiverse.client import Client
from multiverse.config import Settings, load, names_of_hosts
from multiverse.core.errors import Broken, MultiverseError, Refused, Unknown
from multiverse.images import catalog, transfer
from multiverse.images.build import build_described, expected_duration, plain_description
from multiverse.images.catalog import Image
from multiverse.images.description import ImageDescription, read_description
from multiverse.images.foreign import Import
from multiverse.site import image_check as image_check_lines
from multiverse.site.image_check import CheckLine, CheckVerdict
from multiverse.system import kernel

# --- multiverse image -------------------------------------------------------------------------------


_COPIES = 4  # to hosts at the same time

image_app = typer.Typer(help="Images: bootable disks with everything that a job needs.", no_args_is_help=True)

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


@image_app.command("build")
def image_build(
    what: Annotated[
        str,
        typer.Argument(
            metavar="slim|stock|FILE.toml",
            help="slim: no service manager; stock: systemd; or a file that describes the image.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="The image's name; else the flavour's, or the file's.")
    ] = None,
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="A Debian package to add.")] = None,
    hooks: Annotated[
        Path | None, typer.Option("--hooks", help="A directory of programs, run in the image in the order of names.")
    ] = None,
    directory: Directory = None,
    json: render.Json = False,
) -> None:
    """Build an image from apt sources of this machine. Built before from the same inputs, it is kept."""
    described, origin = _described(what, name, tuple(package or ()))
    _must_be_root("building an image")
    where = images_dir(directory)
    assert described.name is not None
    with progress.working(f"image {described.name}", expected_duration(where, described.flavour)) as work:
        made = build_described(described, where, origin=origin, hooks=hooks, progress=_printer(work, json))
    _show_image(made, json)


def _described(what: str, name: str | None, packages: tuple[str, ...]) -> tuple[ImageDescription, str]:
    """The image that is asked for, and the name of the file that describes it."""
    if not what.endswith(".toml"):
        if what not in ("slim", "stock"):
            hint = "use one of: multiverse image build slim|stock|FILE.toml"
            raise Refused(f"there is no flavour {what}", hint=hint)
        return plain_description(name or what, "slim" if what == "slim" else "stock", packages), ""
    if packages:
        raise Refused("a file that describes an image has its packages, too", hint=f"add them to packages in {what}")
    found = read_description(Path(what))
    if name is not None:
        catalog.check_name(name)
        found = replace(found, name=name)
    return found, Path(what).name


def _must_be_root(doing: str) -> None:
    if os.geteuid() != 0:
        raise Refused(f"{doing} needs root", hint="run it with sudo")


def _printer(work: progress.Work, json: bool) -> Callable[[str], None]:
    """Tells each step: as the present one, and, unless the output is JSON, as a line."""

    def say(line: str) -> None:
        work.say(line.removeprefix(f"{work.what}: "))
        if not json:
            render.console.print(f"  {line}", markup=False, soft_wrap=True)

    return say


def _show_image(made: Image, json: bool) -> None:
    if json:
        render.as_json({"name": made.name, "flavour": made.flavour, "key": made.key, "path": str(made.path)})
    else:
        render.console.print(f"image {made.name} ({made.flavour}) {made.key[:12]} in {made.path}", markup=False)


@image_app.command("list")
def image_list(directory: Directory = None, json: render.Json = False) -> None:
    """Show the images that there are, and what they were made from. --json shows each input."""
    where = images_dir(directory)
    found = catalog.list_images(where)
    if json:
        render.as_json(
            [{"name": i.name, "flavour": i.flavour, "key": i.key, "packages": list(i.packages), "path": str(i.path),
              "made_from": list(i.made_from)} for i in found]
        )  # fmt: skip
        return
    table = render.table(
        "IMAGE", "FLAVOUR", "KEY", "DISK", "FROM", "PACKAGES", right=("DISK",), fold=("FROM", "PACKAGES")
    )
    for one in found:
        taken = (one.path / "disk.raw").stat().st_blocks * 512 / 2**20
        origin = one.made_from[0] if one.made_from else f"Debian {one.suite}"
        table.add_row(one.name, one.flavour, one.key[:12], render.memory(taken), origin, " ".join(one.packages))
    render.show(table, "No images; multiverse image build slim makes one.")
    for name, why in catalog.incomplete_images(where).items():
        render.say(f"{name} {why}, so no VM is made of it", indent=0, style="yellow")
        render.say(f"to do: build it again (multiverse image build), or remove {where / name}")


SlurmRelease = Annotated[
    str | None, typer.Option("--slurm", help="The site's release of Slurm, as 24.11; else that of scontrol here.")
]


@image_app.command("check")
def image_check(
    name: Annotated[str, typer.Argument(metavar="IMAGE", help="An image of this machine.")],
    slurm: SlurmRelease = None,
    directory: Directory = None,
    json: render.Json = False,
) -> None:
    """Boot an image in a VM beside all others, without Slurm, and say what would fail. Takes a minute where guests are
    emulated. Exits with 1 if a job would fail, or if all VMs would share a secret."""
    _must_be_root("checking an image")
    from multiverse.drivers.qemu.image_trial import try_image

    settings = _settings_of_machine()
    release = image_check_lines.release_of_slurm(slurm, settings)
    image = catalog.load(images_dir(directory), name)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # the lines say it
    with progress.working(f"checking {name}") as work:
        lines = image_check_lines.judge(try_image(image, settings, _printer(work, json)), release)
    if json:
        render.as_json([one._asdict() for one in lines])
    else:
        _show_lines(name, lines)
    if image_check_lines.fails(lines):
        raise typer.Exit(NOT_DONE)


def _show_lines(name: str, lines: Sequence[CheckLine]) -> None:
    for one in lines:
        style = {CheckVerdict.RIGHT: "green", CheckVerdict.NOTE: "yellow", CheckVerdict.WRONG: "bold red"}[one.verdict]
        said = Text.assemble((f"{one.verdict:<6}", style), render.plain(f"{one.what}: {one.said}"))
        render.console.print(said, soft_wrap=True)
        if one.remedy:
            render.say(one.remedy, indent=6, style="dim")
    word = "not fit for jobs" if image_check_lines.fails(lines) else "fit for jobs"
    render.console.print(f"{name}: {word}", markup=False)


@image_app.command("import")
def image_import(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.qcow2", help="A disk image with systemd, such as a cloud image.")
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="The image's name; else the file's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it lacks, and what would be done.")] = False,
    slurm: SlurmRelease = None,
    directory: Directory = None,
    json: render.Json = False,
) -> None:
    """Make an image of a copy of a foreign disk image: Debian's, Ubuntu's or Rocky's. Its package manager installs
    slurmd, munge and the NFS client, as root in a chroot on this machine: import only what you trust. Exits with 1 if
    it lacks something that cannot be installed, and says how to get it."""
    _must_be_root("importing an image")
    from multiverse.images.foreign import DURATION, import_image, present_import

    settings = _settings_of_machine()
    release = image_check_lines.release_of_slurm(slurm, settings)
    called = name or re.sub(r"[^a-z0-9.-]+", "-", file.name.removesuffix(file.suffix).lower())
    catalog.check_name(called)
    where = images_dir(directory)
    if not dry_run and (present := present_import(file, called, where)) is not None:
        return _show_image(present, json)
    kernel.unshare(kernel.CLONE_NEWNS)  # whatever happens, its mounts end with this process
    kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
    with progress.working(f"importing {file.name}", expected_duration(where, DURATION)) as work:
        found = import_image(
            file,
            called,
            where,
            refuses=partial(image_check_lines.refusal, release),
            dry=dry_run,
            progress=_printer(work, json),
        )
    _show_import(found, json)
    if found.plan.lacking:
        raise typer.Exit(NOT_DONE)


def _show_import(found: Import, json: bool) -> None:
    system, plan = found.system, found.plan
    if json:
        facts = {"system": system.title, "slurmd": system.slurmd, "image": found.image and found.image.name}
        return render.as_json(facts | asdict(plan))
    say = partial(render.console.print, markup=False, soft_wrap=True)
    for lack in plan.lacking:
        say(f"lacks: {lack.what}")
        render.say(lack.remedy, indent=7, style="dim")
    verb = "would be " if found.image is None else ""
    for done, what in (("installed", plan.install), ("masked", plan.masked)):
        if what and not plan.lacking:
            say(f"{verb}{done}: {' '.join(what)}")
    for note in plan.notes:
        say(f"note: {note}")
    if found.image is not None:
        _show_image(found.image, json)
        say(f"Next: multiverse image check {found.image.name}")


def _settings_of_machine() -> Settings:
    """This machine's settings, or the defaults if it has none."""
    config = Path(os.environ.get("MULTIVERSE_CONFIG") or DEFAULT_CONFIG)
    return load(config) if config.exists() else Settings()


@image_app.command("push")
def image_push(
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


# --- multiverse template ----------------------------------------------------------------------------


template_app = typer.Typer(help="Templates: frozen parents that clones are forked from.", no_args_is_help=True)

Host = Annotated[str, typer.Option("--host", help="On this host; needed when there are several.")]
Cpus = Annotated[int | None, typer.Option(help="Of this many CPUs; the base's if only --memory is given.")]
Memory = Annotated[int | None, typer.Option(help="Of this much memory, in MiB; the base's if only --cpus is given.")]
Account = Annotated[str | None, typer.Option(help="For the jobs of this account alone; empty for those of all.")]
LIMIT = 900.0  # seconds to wait for a template to be built or dropped


@template_app.command("list")
def template_list(json: render.Json = False) -> None:
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


@template_app.command("build")
def template_build(
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


@template_app.command("drop")
def template_drop(
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
