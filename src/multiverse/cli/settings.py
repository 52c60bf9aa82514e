"""`multiverse config`: an example of a file of settings, what is wrong in one, and where each value comes from."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.cli import render as output
from multiverse.cli.arguments import DEFAULT_CONFIG, Config
from multiverse.cli.commands import NOT_DONE
from multiverse.config import Settings, toml_value
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of
from multiverse.site.setting_files import DEFAULT, FileLine, SettingValue, mistakes_in, values_in

config_app = typer.Typer(help="Write, check and explain the settings.", no_args_is_help=True)

_MIB = 1 << 20


@config_app.command()
def example(
    full: Annotated[bool, typer.Option("--all", help="Every key with its meaning and its default.")] = False,
) -> None:
    """Print a file of settings. It has what each site decides, with the values of this machine, or every key."""
    # Imported late: they read the source of the settings.
    from multiverse.site.setting_examples import Resources, full_example, short_example
    from multiverse.site.setting_keys import setting_tables

    if full:
        sys.stdout.write(full_example(setting_tables()))
        return
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB
    place = next(one for one in Settings().qemu.vms.parents if one.exists())
    offered = Resources(
        cpus=os.cpu_count() or 1,
        memory=max(Settings().qemu.base_memory, _rounded(pages * 3 // 4)),  # the rest is for the machine itself
        disk=_rounded(shutil.disk_usage(place).free // _MIB // 2),
    )
    sys.stdout.write(short_example(socket.gethostname().partition(".")[0], offered))


def _rounded(mib: int) -> int:
    """Whole GiB, if there is one."""
    return mib - mib % 1024 if mib > 1024 else mib


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="A file of settings.")] = DEFAULT_CONFIG) -> None:
    """Show every mistake, with its line. Exits with 1 if there is one, and with 0 otherwise.

    An image that does not exist is a mistake where the directories of images can be read and have any."""
    found = mistakes_in(file, images=True)
    for line, mistake in found:
        where = Text(f"{line or file}:", style="bold")
        output.console.print(Text.assemble(where, " ", output.plain(str(mistake))), soft_wrap=True)
    if found:
        output.errors.print(f"{number_of(len(found), 'mistake')}; multiverse.toml(5) explains each key", style="dim")
        raise typer.Exit(NOT_DONE)
    output.console.print(f"{file}: no mistakes", markup=False, soft_wrap=True)


@config_app.command()
def show(
    key: Annotated[str, typer.Argument(help="Only this key, or the keys of this table: host, host.cores.")] = "",
    config: Config = DEFAULT_CONFIG,
    changed: Annotated[bool, typer.Option("--changed", help="Only values that are not defaults.")] = False,
    json: output.Json = False,
) -> None:
    """Show all values, and where each comes from. They are those of this machine, from FILE:LINE, by default, or
    computed. Passwords in commands are not shown."""
    of_key = [one for one in values_in(config, socket.gethostname()) if _is_below(one.key, key)]
    if not of_key:
        raise Refused(f"there is no key {key}", hint="multiverse config show has all keys that can be given")
    found = [one for one in of_key if one.source != DEFAULT or not changed]
    if json:
        output.as_json([_as_json(one) for one in found])
        return
    columns = {"KEY": lambda one: one.key, "VALUE": _value, "FROM": lambda one: _source(one, config)}
    output.listed(found, "All values are defaults.", columns, fold=("VALUE", "FROM"))


def _is_below(path: str, key: str) -> bool:
    return not key or path == key or path.startswith(f"{key}.")


def _value(one: SettingValue) -> str:
    return "not set" if one.value is None else toml_value(one.value)


def _source(one: SettingValue, config: Path) -> Text:
    style = "dim" if one.source == DEFAULT else "cyan" if isinstance(one.source, FileLine) else "yellow"
    return Text(str(one.source), style=style)


def _as_json(one: SettingValue) -> dict[str, Any]:
    line = one.source if isinstance(one.source, FileLine) else None
    return {
        "key": one.key,
        "value": one.value,
        "source": "file" if line else one.source,
        "file": line and str(line.file),
        "line": line and line.number,
    }
