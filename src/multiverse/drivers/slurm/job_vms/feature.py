"""The feature of nodes that take jobs with VMs inside: a node has it as long as our plugin passes a test there.

Such jobs have the feature as a constraint (multiverse_jobs.lua). It is in no slurm.conf: slurmctld takes features from
there when it starts or reads its configuration again, and must not believe then what was not tested. A
waiting job whose feature no node has gets the reason BadConstraints and the priority 0; slurmctld takes both back when
features of a node are updated (job_time_limit in slurmctld/job_mgr.c, from 22.05 to 24.11).
"""

from __future__ import annotations

import re

from multiverse.core.errors import Broken, MultiverseError, Refused, Unknown
from multiverse.drivers.slurm.command import SlurmCommands

TEST = "MULTIVERSE_PLUGIN_TEST"
"""The variable that makes the plugin test itself as srun loads it (spank/multiverse.c)."""

_LINE = re.compile(r"^multiverse-plugin (.*)$", re.MULTILINE)
_HINT = "build and install the plugin for this release of Slurm, and include its file in plugstack.conf"
_FEATURES = re.compile(r"\b(Available|Active)Features=(\S*)")


async def check_plugin(commands: SlurmCommands, expected: dict[str, str]) -> None:
    """Let Slurm load the plugin on this node, as it does for a step: by plugstack.conf, and only one that was built for
    this release. The plugin tries what it needs there. `expected` is what it has to say of itself, such as `protocol`.

    Raises `Refused` if jobs cannot have VMs here, `Broken` and `Unknown` if that cannot be found out.
    """
    said = _LINE.findall(await commands.run("srun", "--help", env={TEST: "1"}))
    if len(said) != 2:
        raise Refused("Slurm does not load the plugin on this node", hint=_HINT)
    found = dict(word.partition("=")[::2] for word in said[0].split())
    for key, value in expected.items():
        if found.get(key) != value:
            raise Refused(
                f"the plugin on this node has {key} {found.get(key, 'unknown')}, and this agent {value}",
                hint="install the plugin of this release, and the plugstack file that multiverse site render writes",
            )
    if said[1] != "works":
        raise Refused(f"the plugin does not work on this node: {said[1]}", hint="see the agent's log and job_vms")


async def set_feature(commands: SlurmCommands, node: str, feature: str, wanted: bool) -> bool:
    """Give a node a feature, or take it away; whether the node was changed. Its other features stay.

    Raises `Broken` if Slurm has no such node, and what a command raises.
    """
    try:
        shown = await commands.run("scontrol", "show", "node", "--oneliner", node)
    except Refused as error:
        raise Broken(f"Slurm knows no node {node}", hint="set job_vms.node to the NodeName of this host") from error
    lists = dict(_FEATURES.findall(shown))
    if lists.keys() != {"Available", "Active"}:
        raise Unknown(f"scontrol shows no features of {node}")
    changed = {key: _changed(text, feature, wanted) for key, text in lists.items()}
    if changed == {key: _words(text) for key, text in lists.items()}:
        return False
    # Both in one update: slurmctld refuses active features that are not available.
    updates = [f"{key}Features={','.join(words)}" for key, words in changed.items()]
    await commands.run("scontrol", "update", f"NodeName={node}", *updates)
    return True


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word and word != "(null)"]


def _changed(text: str, feature: str, wanted: bool) -> list[str]:
    words = _words(text)
    if wanted:
        return words if feature in words else [*words, feature]
    return [word for word in words if word != feature]


async def why_not(commands: SlurmCommands, expected: dict[str, str]) -> MultiverseError | None:
    """Why jobs cannot have VMs on this node, or None. `Unknown`, if that cannot be found out."""
    try:
        await check_plugin(commands, expected)
    except MultiverseError as error:
        return error
    return None
