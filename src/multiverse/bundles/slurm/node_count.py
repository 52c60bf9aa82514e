"""Whether Slurm may have as many nodes as there can be VMs: hosts may have come that no settings name."""

from __future__ import annotations

from pathlib import Path

from multiverse.bundles.contract import Notice
from multiverse.drivers.slurm.site import requirements
from multiverse.drivers.slurm.site.site_conf import SiteConf, UntilChanged


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
