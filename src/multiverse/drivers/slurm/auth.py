"""How Slurm's daemons and commands authenticate: the socket of the munged that they use."""

from __future__ import annotations

from pathlib import Path

from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm import site_conf


def munge_socket(conf: Path) -> Path | None:
    """The socket that AuthInfo in the slurm.conf at `conf` names; None: munge's own, also while it cannot be read."""
    try:
        words = site_conf.read(conf).value("AuthInfo").split(",")
    except MultiverseError:
        return None
    return next((Path(word.removeprefix("socket=")) for word in words if word.startswith("socket=")), None)
