"""The first process of a lab's host, and what is started on the host after it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from multiverse.core.errors import Broken, Exhausted
from multiverse.host import process as processes
from multiverse_lab.lab.hosts import control_groups, network
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabHost, outermost
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.program import multiverse
from multiverse_lab.lab.service import Lab, Service, directory

SETTINGS = "multiverse.toml"
_INIT = "multiverse_lab.lab.hosts.init"
_KVM = "kvm.json"  # see `host.qemu.context.HostContext`


class HostInit:
    """The service that is a host's first process, with the host's namespaces."""

    def __init__(self, host: LabHost) -> None:
        self._host = host
        self.service = Service(
            host.name,
            self._run_init,
            ready=lambda lab: True,  # its launcher waits until it is
            prepare=self._prepare_host,
        )

    def _run_init(self, lab: Lab) -> DaemonCommand:
        where = lab.where
        words = (self._host.name, str(where.host(self._host.name).root), str(where.root), where.control_group)
        # A node of Slurm uses all controllers, and its users' files, which a VM mounts.
        more = ("--all", *outermost(lab.plan.shares)) if self._host.physical else ()
        argv = [sys.executable, "-m", _INIT, *words, *more]
        return DaemonCommand(argv, where.log / f"{self._host.name}.log", launcher=True)

    def _prepare_host(self, lab: Lab) -> None:
        remove_remains(lab.where, self._host)
        own = lab.where.host(self._host.name)
        shutil.rmtree(own.run, ignore_errors=True)  # as a machine's /run, it does not outlive the machine
        own.run.mkdir()
        own.run.chmod(0o755)

    def connect(self, lab: Lab) -> None:
        """Connect the host to the lab's switch."""
        network.connect(lab.plan, self._host, self._pid(lab))

    def run_agent(self, lab: Lab) -> DaemonCommand:
        """How to run the host's agent. Its log is private, because it contains lines from guests' consoles."""
        argv = multiverse("agent", "--config", f"{lab.where.etc}/{SETTINGS}")
        return replace(self.inside(lab, argv, "agent.log"), log_mode=0o600)

    def prepare_agent(self, lab: Lab) -> None:
        """Make what the agent needs. Whether KVM runs guests takes seconds to find out, and all hosts are the same
        machine."""
        own = lab.where.host(self._host.name)
        directory(own.controller, "root", 0o711)  # the uids of VMs need to pass through
        others = (*lab.plan.own_hosts, *lab.plan.physical_nodes)
        for known in (lab.where.controller, *(lab.where.host(one.name).controller for one in others)):
            if (known / _KVM).exists() and not (own.controller / _KVM).exists():
                shutil.copy(known / _KVM, own.controller)

    def masquerade(self, lab: Lab) -> None:
        """Let guests of the host's own networks reach the lab's file systems."""
        network.masquerade(self._pid(lab), lab.plan.job_subnet)

    def inside(self, lab: Lab, argv: Sequence[str], log: str) -> DaemonCommand:
        """How to run a daemon on the host, as root and with a log of this machine's."""
        launcher = [sys.executable, "-m", "multiverse_lab.lab.hosts.inside", str(self._pid(lab)), *argv]
        return DaemonCommand(launcher, lab.where.log / f"{self._host.name}-{log}", launcher=True)

    def _pid(self, lab: Lab) -> int:
        running = self.service.running(lab.where)
        if running is None:
            raise Broken(f"host {self._host.name} has ended", hint="see its log, and repeat `multiverse lab up`")
        return running.pid


def remove_remains(where: Layout, host: LabHost) -> None:
    """Remove what is left of a host whose services have ended, also if they were killed before they were recorded. Its
    directory stays."""
    inits = set(processes.find_by_argument(_INIT))
    for one in inits.intersection(processes.find_by_argument(str(where.host(host.name).root))):
        if not processes.kill(one):
            raise Exhausted(f"process {one.pid} of host {host.name} does not end", hint=f"see /proc/{one.pid}/stack")
    network.disconnect(host)
    control_groups.remove(where.control_group, host.name)
