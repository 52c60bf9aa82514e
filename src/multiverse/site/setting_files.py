"""Files of settings, with the line of each key: what is wrong in them, and where each value comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from multiverse.config import (
    HostClass,
    Mistake,
    Settings,
    documents,
    examined,
    key_text,
    merged,
    names_of_hosts,
    on_machine,
    parse,
    users_socket,
)
from multiverse.images.catalog import list_images
from multiverse.system.toml_positions import KeyPath, positions

DEFAULT, COMPUTED = "default", "computed"
HIDDEN = "(hidden)"


class FileLine(NamedTuple):
    """A line of a file."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class WrongLine(NamedTuple):
    """A mistake, with its line; None for one that no line of the file shows."""

    line: FileLine | None
    mistake: Mistake


class SettingValue(NamedTuple):
    """The value of a key, and where it comes from: a line, the default, or this machine."""

    key: str
    value: Any
    source: FileLine | str


Lines = Mapping[KeyPath, FileLine]


def mistakes_in(path: Path, *, images: bool = False) -> list[WrongLine]:
    """All mistakes in a file and the one that it includes, in the order of their lines; with `images`, also names of
    images that there are not. Raises `Refused` if one of the files cannot be read, or is not TOML."""
    raw, lines = _read(path)
    settings, found = examined(raw)
    if settings is not None and images:
        found = [*found, *_absent_images(settings)]
    wrong = [WrongLine(_line_of(one, lines), one) for one in found]
    return sorted(wrong, key=lambda one: (one.line is None, one.line))


def _absent_images(settings: Settings) -> Iterator[Mistake]:
    """Images that the settings name, and that no directory of images has. Says nothing while one of the directories
    cannot be read here, or none of them has an image yet."""
    places = [settings.qemu.images, settings.image.source, *(one.images for one in settings.hosts)]
    directories = list(dict.fromkeys(place for place in places if place is not None))
    if not all(os.access(place, os.R_OK | os.X_OK) for place in directories):
        return
    there = sorted({image.name for place in directories for image in list_images(place)})
    named: list[tuple[KeyPath, str]] = [(("image", "default"), settings.image.default)]
    named += [(("pool", number, "image"), one.image) for number, one in enumerate(settings.pool)]
    for key, name in named if there else ():
        if not any((place / name).is_dir() for place in directories):
            where = ", ".join(map(str, directories))
            yield Mistake(key, f"there is no image {name!r} in {where}: build it, or name one of {', '.join(there)}")


def values_in(path: Path, machine: str) -> list[SettingValue]:
    """All values that a file gives to the machine of that host name. Raises `Refused` as `load`."""
    raw, lines = _read(path)
    given = parse(raw, str(path))
    here = on_machine(given, machine)
    own = _class_of(given, here.host.name)
    computed = {
        "users.socket": users_socket(here),
        "slurm.addresses": here.slurm.addresses_file(),
        "slurm.bin_dir": here.slurm.directory(),
    }
    found = []
    for path_, value in _leaves(replace(here, hosts=given.hosts), ()):
        key = key_text(path_)
        source: FileLine | str = lines.get(path_, DEFAULT)
        of_class = ("hosts", own, path_[-1])
        if path_[0] in ("host", "qemu") and of_class in lines:
            source = lines[of_class]
        elif value != _at(given, path_) or (value is None and key in computed):
            source, value = COMPUTED, computed.get(key, value)
        found.append(SettingValue(key, _without_secrets(value), source))
    return found


def _read(path: Path) -> tuple[dict[str, Any], Lines]:
    """A file with the one that it includes, as one document, and the line of each path in it."""
    read, lines = documents(path), dict[KeyPath, FileLine]()
    for document in read:
        found = positions(document.text)
        whole = {one for one in found if not isinstance(_value_at(document.raw, one), dict)}
        # What is no table is overridden as a whole.
        lines = {one: line for one, line in lines.items() if not any(one[:n] in whole for n in range(1, len(one) + 1))}
        lines |= {one: FileLine(document.path, number) for one, number in found.items()}
    return merged(read), lines


def _value_at(raw: Any, path: KeyPath) -> Any:
    for step in path:
        raw = raw[step]
    return raw


_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


def _line_of(mistake: Mistake, lines: Lines) -> FileLine | None:
    """Where to correct it: where the key is, or another key that the message names, or their table."""
    named: list[KeyPath] = [tuple(key.split(".")) for key in _KEY.findall(mistake.message)]
    tables = [mistake.key[:n] for n in range(len(mistake.key) - 1, 0, -1)]
    return next((lines[one] for one in (mistake.key, *named, *tables) if one in lines), None)


# --- values ------------------------------------------------------------------------------------------


def _class_of(settings: Settings, host: str) -> int:
    """The index of the class of a host; -1 if it has none."""
    return next((i for i, one in enumerate(settings.hosts) if host in names_of_hosts(one.nodes)), -1)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if is_dataclass(value):
        for one in fields(value):
            inner = getattr(value, one.name)
            if not (isinstance(value, HostClass) and inner is None):  # it is as in [host] and [qemu]
                yield from _leaves(inner, (*path, one.name))
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for i, inner in enumerate(value):
            yield from _leaves(inner, (*path, i))
    else:
        yield path, value


def _at(settings: Any, path: KeyPath) -> Any:
    for step in path:
        settings = settings[step] if isinstance(step, int) else getattr(settings, step)
    return settings


_SECRET = re.compile(r"(--?pass\w*)(=).*|(--?pass\w*|-p)()", re.IGNORECASE)


def _without_secrets(value: Any) -> Any:
    """A value; of a command, without the password that it may be given as an option."""
    if not isinstance(value, tuple) or not all(isinstance(word, str) for word in value):
        return value
    words: list[str] = []
    for word in value:
        before = _SECRET.fullmatch(words[-1]) if words else None
        match = _SECRET.fullmatch(word)
        if before is not None and not before[2]:
            words.append(HIDDEN)
        else:
            words.append(f"{match[1]}={HIDDEN}" if match is not None and match[2] else word)
    return tuple(words)
