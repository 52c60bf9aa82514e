"""What the site's slurm.conf says while the daemon runs: what is private, as for Slurm's own commands, and whether
Slurm may have as many nodes as there can be VMs. Hosts may have come that no settings name."""

from __future__ import annotations

from pathlib import Path

from multiverse.bundles.contract import Notice, Privacy
from multiverse.drivers.slurm.site import requirements
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


class NodeCount:
    """What the slurm.conf at `conf` lacks."""

    def __init__(self, conf: Path) -> None:
        self._conf, self._cpus = UntilChanged[list[Notice]](conf, []), -1

    def lack(self, cpus: int) -> list[Notice]:
        """What is lacking for VMs that claim so many CPUs together. Nothing while the file cannot be read, of which
        `multiverse site check` tells."""
        anew, self._cpus = cpus != self._cpus, cpus
        return self._conf.get(lambda site: _lack(site, cpus), anew=anew)


def _lack(site: SiteConf, cpus: int) -> list[Notice]:
    lack = requirements.lack_of_nodes(cpus, site)
    return [Notice("nodes", lack.name, lack.message, lack.remedy)] if lack else []
