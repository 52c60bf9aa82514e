"""The bare-metal nodes of a lab: each has a munged and a slurmd in namespaces of its own.

Jobs of partition `physical` run on them directly, as on any site's nodes, each in control groups of its own. Where the
settings enable VMs inside jobs, each node has an agent, too; a lease has an agent of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache

from multiverse_lab.lab.hosts.machine import SETTINGS, HostInit
from multiverse_lab.lab.munge import munged_command, prepare_munge, write_munge_key
from multiverse_lab.lab.plan import LabHost
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.service import Lab, Service, answers, run

_UP = ("idle", "mixed", "allocated")


@cache
def physical_services(host: LabHost, *, agent: bool = True) -> tuple[Service, ...]:
    """The services of a node, in the order in which they are started, with or without an agent."""
    services = _NodeServices(host)
    return (*services.first, *((services.agent,) if agent else ()), services.slurmd)


class _NodeServices:
    def __init__(self, host: LabHost) -> None:
        self._host, self._init = host, HostInit(host)
        munged = Service(
            f"{host.name}-munged",
            lambda lab: self._init.inside(lab, _as_munge(munged_command(lab.where).argv), "munged.log"),
            ready=lambda lab: answers(str(lab.where.host(host.name).munge_socket)),
            prepare=self._prepare_munge,
        )
        self.slurmd = Service(
            f"{host.name}-slurmd",
            self._run_slurmd,
            ready=self._registered,
            prepare=self._connect,
            initialize=self._resume,
            config_files=(*self._files("slurm.conf", "cgroup.conf"), "plugstack.conf", "site.conf"),
        )
        self.agent = Service(
            f"{host.name}-agent",
            self._init.run_agent,
            # Users have jobs there before its other socket is made.
            ready=lambda lab: answers(str(lab.where.host(host.name).jobs_socket)),
            prepare=self._prepare_agent,
            config_files=self._files(SETTINGS, "site.toml"),
            grace=20.0,
        )
        self.first = (self._init.service, munged)

    def _files(self, *names: str) -> tuple[str, ...]:
        """Files that the node has in etc, from the lab's."""
        return tuple(f"../hosts/{self._host.name}/etc/{name}" for name in names)

    def _prepare_munge(self, lab: Lab) -> None:
        """Give the node the cluster's key."""
        own = lab.where.host(self._host.name)
        prepare_munge(own)
        write_munge_key(own, lab.where.munge_key.read_bytes())

    def _prepare_agent(self, lab: Lab) -> None:
        self._init.prepare_agent(lab)
        self._init.masquerade(lab)

    def _connect(self, lab: Lab) -> None:
        """Connect the node, and give slurmd its files and directories."""
        self._init.connect(lab)
        own = lab.where.host(self._host.name)
        for name in ("multiverse.conf", "site.conf", "plugstack.conf"):
            shutil.copy(lab.where.etc / name, own.etc)
        (own.run / "slurmd").mkdir(exist_ok=True)

    def _run_slurmd(self, lab: Lab) -> DaemonCommand:
        conf = str(lab.where.slurm_conf)
        argv = ["env", f"SLURM_CONF={conf}", "slurmd", "-D", "-N", self._host.name, "-f", conf]
        return self._init.inside(lab, argv, "slurmd.out")

    def _registered(self, lab: Lab) -> bool:
        return answers((self._host.address, lab.plan.slurmd_port)) and self._state(lab) != ""

    def _state(self, lab: Lab) -> str:
        return run(lab, "sinfo", "-h", "-n", self._host.name, "-o", "%T", check=False).strip()

    def _resume(self, lab: Lab) -> None:
        """Take back that somebody has set the node DOWN, as happens to one that was away for long."""
        if self._state(lab).rstrip("*") not in _UP:
            run(lab, "scontrol", "update", f"NodeName={self._host.name}", "State=RESUME", check=False)


def _as_munge(argv: Sequence[str]) -> list[str]:
    return ["setpriv", "--reuid=munge", "--regid=munge", "--init-groups", "--", *argv]
