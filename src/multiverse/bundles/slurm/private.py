"""What slurm.conf keeps private, as Slurm's own commands do."""

from __future__ import annotations

from pathlib import Path

from multiverse.bundles.contract import Privacy
from multiverse.drivers.slurm.site.site_conf import SiteConf, UntilChanged


class PrivateData:
    """What the slurm.conf at `conf` keeps private. While it cannot be read, everything is private."""

    def __init__(self, conf: Path) -> None:
        self._conf = UntilChanged(conf, Privacy(others=False, hosts=False))

    def privacy(self) -> Privacy:
        """What a user may be told of others."""
        return self._conf.get(_privacy)


def _privacy(site: SiteConf) -> Privacy:
    kept = set(site.words("PrivateData"))
    return Privacy(others=not kept & {"jobs", "all"}, hosts=not kept & {"nodes", "all"})
