"""The files that tell users where VMs are: Slurm's commands, where Slurm itself does not (decision 84), and all other
programs, by the VMs' names (decision 91)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.drivers.slurm.site import conf
from multiverse.system import files
from multiverse.system.files import keep_names

HEAD = """\
# Where the VMs are, for commands of users: the daemon replaces this file whenever a VM comes or goes.
# Never include it in the slurm.conf of slurmctld or of a slurmd: there these lines would declare nodes.
"""
"""Slurm's commands wait for a minute for a file that is missing, and print a warning about an empty one."""


class AddressFile:
    """`ports.Addresses` by a file that the slurm.conf of users' commands includes, and by lines of the `site` in the
    file `names`, as in /etc/hosts. Both stay while no daemon runs."""

    def __init__(self, path: Path, names: Path | None = None, site: str = "") -> None:
        self._path, self._names, self._site = path, names, site

    async def tell(self, nodes: Mapping[str, str]) -> None:
        """See `ports.Addresses`. Raises `Exhausted` if a file cannot be written."""
        await self._tell_commands(nodes)
        if self._names is not None:
            try:
                await asyncio.to_thread(keep_names, self._names, self._site, nodes)
            except OSError as error:
                raise Exhausted(
                    f"cannot write {self._names}: {error.strerror}",
                    hint="let the daemon write it, or set network.names in the settings, to another file or to none; "
                    "until then users do not find newer VMs by their names",
                ) from error

    async def _tell_commands(self, nodes: Mapping[str, str]) -> None:
        try:
            await asyncio.to_thread(files.replace, self._path, HEAD + conf.addresses(nodes.items()), mode=0o644)
        except OSError as error:
            raise Exhausted(
                f"cannot write {self._path}: {error.strerror}",
                hint="check its directory, or set slurm.addresses in the settings; until then srun --jobid and salloc "
                "do not reach newer VMs after a restart of slurmctld",
            ) from error


def make(path: Path) -> None:
    """Make the file if there is none. What a daemon has written stays. Raises OSError."""
    if not path.exists():
        files.replace(path, HEAD, mode=0o644)
