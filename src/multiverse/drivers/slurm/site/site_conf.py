"""What a site's slurm.conf says about the whole cluster: nodes, partitions, scripts. Pure, but for `read` and
`UntilChanged`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ClusterShell.NodeSet import NodeSet, NodeSetException

from multiverse.core.errors import Broken, MultiverseError
from multiverse.drivers.slurm.site import conf

T = TypeVar("T")

OURS = "multiverse.conf"
"""The file that a site's slurm.conf includes. What it says is ours, not the site's."""

_PAIR = re.compile(r"([A-Za-z]+)\s*=\s*(\"[^\"]*\"|\S+)")
_DEFAULT = "default"  # NodeName=DEFAULT and PartitionName=DEFAULT hold for the lines below them


@dataclass(frozen=True, slots=True)
class SiteConf:
    """A slurm.conf with the files that it includes, but without ours. `above` is the text above our file; None if
    slurm.conf does not include our file. `ours` is the text of our file, as far as it can be read. `files` are those
    that the text was read from, with when they were changed, in nanoseconds."""

    text: str
    above: str | None = None
    files: Mapping[Path, int] = field(default_factory=dict, compare=False)
    ours: str = ""

    def value(self, key: str, default: str = "") -> str:
        """The last value of a key."""
        return conf.value(self.text, key, default)

    def words(self, key: str) -> list[str]:
        """The comma-separated words of a key's last value, in lower case."""
        return [word.strip().lower() for word in self.value(key).split(",") if word.strip()]

    def number(self, key: str) -> int | None:
        found = self.value(key)
        return int(found) if found.isdigit() else None

    def nodes(self) -> NodeSet:
        """The names of all nodes that slurm.conf declares."""
        return folded(record["nodename"] for record in self.records("NodeName"))

    def node_addresses(self) -> NodeSet:
        """The addresses that slurm.conf gives to nodes. A node without one is found by its name."""
        return folded(
            record.get("nodeaddr") or record.get("nodehostname") or record["nodename"]
            for record in self.records("NodeName")
        )

    def records(self, kind: str) -> list[dict[str, str]]:
        """Each line that begins with this key, by keys in lower case, without those named DEFAULT."""
        return [found for found in records(self.text, kind) if found[kind.lower()].lower() != _DEFAULT]

    def defaults_above(self, kind: str) -> bool:
        """Whether a line of this kind named DEFAULT holds for our file, too."""
        text = self.text if self.above is None else self.above
        return any(found[kind.lower()].lower() == _DEFAULT for found in records(text, kind))


def read(path: Path) -> SiteConf:
    """The slurm.conf at `path`. `Broken` if it, or a file that it includes, cannot be read. Our file may be missing."""
    text, above, files = "", None, dict[Path, int]()
    for included, part in _parts(path, path.parent, files):
        if included == OURS:
            above = text
        else:
            text += part
    own = path.parent / OURS
    return SiteConf(text, above, files, own.read_text() if above is not None and own.is_file() else "")


class UntilChanged(Generic[T]):
    """What is found in the slurm.conf at `path`, until it, or a file that it includes, changes: to read a large file
    takes a tenth of a second, in which the daemon does nothing else. `unread` counts while it cannot be read."""

    def __init__(self, path: Path, unread: T) -> None:
        self._path, self._unread = path, unread
        self._found = unread
        self._files: Mapping[Path, int] = {}

    def get(self, find: Callable[[SiteConf], T], *, anew: bool = False) -> T:
        """What `find` has found, or finds in the file if it has changed; with `anew` in any case."""
        if anew or self._has_changed():
            try:
                site = read(self._path)
            except Broken:
                self._found, self._files = self._unread, {}
            else:
                self._found, self._files = find(site), site.files
        return self._found

    def _has_changed(self) -> bool:
        try:
            return not self._files or any(file.stat().st_mtime_ns != at for file, at in self._files.items())
        except OSError:
            return True


def _parts(path: Path, directory: Path, files: dict[Path, int]) -> Iterator[tuple[str, str]]:
    """The text in parts, in Slurm's order, each with the name of the file that was included or an empty name. The files
    that are read are added to `files`.

    As in Slurm, the name of an included file is relative to the directory of slurm.conf.
    """
    try:
        files[path] = path.stat().st_mtime_ns
        text = path.read_text()
    except OSError as error:
        raise Broken(
            f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings, or give --slurm-conf"
        ) from error
    for line in re.sub(r"\\\n", "", text).splitlines(keepends=True):
        names = conf.included(line)
        if not names:
            yield "", line
        elif Path(names[0]).name == OURS:
            yield OURS, line
        else:
            yield from _parts(directory / names[0], directory, files)


def records(text: str, kind: str) -> list[dict[str, str]]:
    """Each line of a slurm.conf that begins with the key `kind`, by keys in lower case."""
    found = []
    for key, rest in conf.settings(text):
        if key.lower() == kind.lower():
            found.append({name.lower(): value.strip('"') for name, value in _PAIR.findall(f"{key}={rest}")})
    return found


def same_nodes(one: str, other: str) -> bool:
    """Whether two texts declare the same nodes, whatever their features and the state that they begin with. Slurm reads
    everything else again without a restart."""

    def declared(text: str) -> list[dict[str, str]]:
        return [
            {key: value for key, value in node.items() if key not in ("feature", "state", "reason")}
            for node in records(text, "NodeName")
        ]

    return declared(one) == declared(other)


def folded(texts: Iterator[str]) -> NodeSet:
    """All names in several lists of nodes, such as `n[1-3],m7`. A list that cannot be understood is left out."""
    found = NodeSet()
    for text in texts:
        try:
            found.update(NodeSet(text))
        except NodeSetException:
            continue
    return found


def is_ours(text: str) -> bool:
    """Whether a script calls Multiverse's: a line that is no comment names one of its files."""
    return any(
        re.search(r"multiverse(_submit)?\.lua|multiverse-epilog", line) and not re.match(r"\s*(--|#)", line)
        for line in text.splitlines()
    )


def munge_socket(conf: Path) -> Path | None:
    """The socket that AuthInfo in the slurm.conf at `conf` names; None: munge's own, also while it cannot be read."""
    try:
        words = read(conf).value("AuthInfo").split(",")
    except MultiverseError:
        return None
    return next((Path(word.removeprefix("socket=")) for word in words if word.startswith("socket=")), None)
