"""Examples of a file of settings: one with what each site decides, and one with every key."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from multiverse.site.setting_keys import SettingKey, SettingTable

WIDTH = 100


class Resources(NamedTuple):
    """What a machine has to offer to VMs. Memory and disk in MiB."""

    cpus: int
    memory: int
    disk: int


def short_example(name: str, machine: Resources) -> str:
    """What each site decides, with the values of one machine. It can be used as it is."""
    return f"""\
# Settings of Multiverse: the same for the controller and for the agents of all hosts.
# All keys: multiverse.toml(5), or: multiverse config example --all
# Is it right?  multiverse config check     Where does each value come from?  multiverse config show

# A table for hosts that are alike. A machine finds its own by its host name.
[[hosts]]
nodes = {f"{json.dumps(name)}":<21} # more hosts of this kind: "n[1-32]"
cores = {f"{machine.cpus}":<21} # CPUs that VMs may use
memory = {f"{machine.memory}":<20} # MiB that VMs may use: leave some to the machine itself
disk = {f"{machine.disk}":<22} # MiB below /var/lib/multiverse/vms that VMs may use

[slurm]
conf = "/etc/slurm/slurm.conf"
partition = "vm"              # users submit jobs to it

[network]                     # of VMs: it must be used for nothing else at the site
subnet = "10.213.0.0/16"
gateway = "10.213.0.1"        # this machine in that network
#names = "/etc/hosts"         # keep the names of VMs in this file, so that users can log in to them

[image]
default = "slim"              # of jobs that name no image

# A table for each file system that jobs need, such as that of the users' homes.
#[[mounts]]
#source = "fileserver:/home"
#target = "/home"
#options = "nosuid,nodev"
"""


def full_example(tables: Iterable[SettingTable]) -> str:
    """Every key with its meaning. All are comments, so that the file changes no default."""
    lines = [
        *_comment("All settings of Multiverse. A line that begins with # and a word is a key with its default: remove"
                  " the # and change the value. Keys without a default show an example, and say so."),
    ]  # fmt: skip
    for table in tables:
        lines += ["", *_comment(table.meaning)]
        # A table may be empty. An element of an array would be one without the keys that it needs.
        lines += [f"#{table.heading}" if table.is_array else table.heading] if table.heading else []
        for key in table.keys:
            lines += ["", *_comment(key.meaning), *_comment(facts_of(key)), f"#{key.name} = {_shown(key)}"]
    return "\n".join(lines) + "\n"


def facts_of(key: SettingKey, *, default: bool = False) -> str:
    """The kind, the unit and the range of a key, whether it has a default, and whether reload applies it."""
    return " ".join(_facts(key, default))


def _facts(key: SettingKey, default: bool) -> Iterator[str]:
    kind = key.kind[:1].upper() + key.kind[1:]
    yield kind + (f" ({key.unit})" if key.unit else "") + (f": {key.limits}." if key.limits else ".")
    if key.required:
        yield "It must be given."
    elif key.default is None:
        yield "By default it is not set."
    elif default:
        yield f"Default: {key.default}."
    if key.example and (default or key.default is not None):
        yield f"Example: {key.example}."
    if key.reloaded:
        yield "Reload applies a change."


def _shown(key: SettingKey) -> str:
    return key.example if key.default is None else key.default


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
