"""Names in a file of hosts(5), such as /etc/hosts: between two lines of our own, beside whatever others keep in it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from multiverse.system import files


def keep_names(path: Path, owner: str, names: Mapping[str, str]) -> None:
    """Have these names in the file, with their addresses, and no others of `owner`. All other lines stay as they are.
    Raises OSError."""
    try:
        before, about = path.read_text(encoding="utf-8", errors="surrogateescape"), path.stat()
    except FileNotFoundError:
        before, about = "", None
    after = _with_block(before, owner, [f"{address} {name}" for name, address in names.items()])
    if after == before:
        return
    data = after.encode("utf-8", errors="surrogateescape")
    if about is None:
        files.replace(path, data, mode=0o644)
        return
    try:
        files.replace(path.resolve(), data, mode=about.st_mode & 0o7777, uid=about.st_uid, gid=about.st_gid)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is mounted there, as in containers, cannot be replaced
            raise
        path.write_bytes(data)


def _with_block(text: str, owner: str, lines: list[str]) -> str:
    """The text with these lines between those of `owner`, at the place of the earlier ones. An end that somebody has
    removed is taken for the next line that names no VM of ours, so that nothing of others is lost."""
    first, last = f"# multiverse {owner}: names of VMs, kept by the daemon", f"# multiverse {owner}: end"
    old = text.splitlines()
    block = [first, *lines, last] if lines else []
    if first not in old:
        return "\n".join([*old, *block]) + "\n" if block else text
    at = old.index(first)
    end = at + 1
    while end < len(old) and old[end] != last and f" mv{owner}-" in old[end]:
        end += 1
    end += old[end : end + 1] == [last]
    return "\n".join([*old[:at], *block, *old[end:]]) + "\n"
