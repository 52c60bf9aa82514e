"""Which controller an agent obeys: the one with the highest epoch that the agent has ever seen, for each site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.system.files import Record


@dataclass(frozen=True, slots=True)
class Epoch:
    """`number` orders the controllers of a site; `holder` names the run of a controller that took it."""

    number: int = 0
    holder: str = ""


class Epochs:
    """The highest epoch of each site."""

    def __init__(self, highest: Mapping[str, Epoch] | None = None) -> None:
        self._highest = dict(highest or {})

    def highest(self, site: str) -> Epoch:
        """The highest epoch that was taken of this site."""
        return self._highest.get(site, Epoch())

    def take(self, site: str, epoch: Epoch) -> None:
        """Obey this controller from here on. Raises `Refused` if a later one was seen, or another one of the same
        epoch, and `Broken` if the epoch cannot be kept."""
        self.check(site, epoch)
        if epoch != self.highest(site):
            highest = {**self._highest, site: epoch}
            self._keep(highest)
            self._highest = highest

    def check(self, site: str, epoch: Epoch) -> None:
        """Raises `Refused` if this controller is not to be obeyed (any more)."""
        highest = self.highest(site)
        if epoch.number < highest.number or (epoch.number == highest.number and epoch.holder != highest.holder):
            raise Refused(
                f"another controller of site {site} has commanded this host, with epoch {highest.number};"
                f" this one has {epoch.number}",
                hint="end the other controller; if there is none, as after a database was restored, restart this one",
            )

    def _keep(self, highest: Mapping[str, Epoch]) -> None:
        """Keep this for the next run of the agent. Raises `Broken` if that fails."""


class EpochFile(Epochs):
    """Epochs that outlive the agent, so that one that starts again obeys no older controller. A new one is obeyed also
    while the disk is full: it destroys the VMs that fill it, once their jobs have ended."""

    def __init__(self, path: Path) -> None:
        """Read the file, or allocate it. Raises `Broken` if it cannot be read: nothing else says whom to obey."""
        self._path = path
        try:
            self._record = Record(path)
            kept = json.loads(self._record.text or "{}")
            super().__init__({site: Epoch(int(one["number"]), str(one["holder"])) for site, one in kept.items()})
        except OSError as error:
            raise Broken(f"cannot use {path}: {error.strerror}", hint="see its directory, agent.state_dir") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "end all other controllers of this site, and remove the file"
            raise Broken(f"cannot read {path}: {error}", hint=hint) from error

    def _keep(self, highest: Mapping[str, Epoch]) -> None:
        try:
            self._record.write(json.dumps({site: asdict(epoch) for site, epoch in highest.items()}))
        except (OSError, ValueError) as error:
            message = f"cannot keep the epoch in {self._path}: {getattr(error, 'strerror', error)}"
            raise Broken(message, hint="see whether its disk works, and start the agent again") from error
