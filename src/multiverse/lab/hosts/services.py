"""The services of a lab's hosts: each has a first process, an sshd and an agent."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import cache

from multiverse.core.errors import Broken, Exhausted
from multiverse.host import process as processes
from multiverse.lab.hosts import control_groups, network, ssh
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabHost
from multiverse.lab.process import DaemonCommand
from multiverse.lab.program import multiverse
from multiverse.lab.service import Lab, Service, answers, directory

SETTINGS = "multiverse.toml"
_INIT = "multiverse.lab.hosts.init"
_KVM = "kvm.json"  # see `host.qemu.context.HostContext`


@cache
def host_services(host: LabHost) -> tuple[Service, ...]:
    """The services of a host, in the order in which they are started."""
    return _HostServices(host).all


class _HostServices:
    def __init__(self, host: LabHost) -> None:
        self._host = host
        self._init = Service(
            host.name,
            self._run_init,
            ready=lambda lab: True,  # its launcher waits until it is
            prepare=self._prepare_host,
        )
        sshd = Service(
            f"{host.name}-sshd",
            self._run_sshd,
            ready=lambda lab: answers((host.address, ssh.PORT)),
            prepare=self._connect,
            config_files=(self._file("sshd_config"),),
        )
        agent = Service(
            f"{host.name}-agent",
            self._run_agent,
            ready=lambda lab: answers(str(lab.where.host(host.name).agent_socket)),
            prepare=self._prepare_agent,
            config_files=(self._file(SETTINGS), self._file("site.toml")),
            grace=20.0,
        )
        self.all = (self._init, sshd, agent)

    def _file(self, name: str) -> str:
        """A file that the host has in etc, from the lab's."""
        return f"../hosts/{self._host.name}/etc/{name}"

    def _run_init(self, lab: Lab) -> DaemonCommand:
        where = lab.where
        words = (self._host.name, str(where.host(self._host.name).root), str(where.root), where.control_group)
        argv = [sys.executable, "-m", _INIT, *words]
        return DaemonCommand(argv, where.log / f"{self._host.name}.log", launcher=True)

    def _prepare_host(self, lab: Lab) -> None:
        remove_remains(lab.where, self._host)
        own = lab.where.host(self._host.name)
        shutil.rmtree(own.run, ignore_errors=True)  # as a machine's /run, it does not outlive the machine
        own.run.mkdir()
        own.run.chmod(0o755)

    def _connect(self, lab: Lab) -> None:
        network.connect(lab.plan, self._host, self._pid(lab))

    def _run_sshd(self, lab: Lab) -> DaemonCommand:
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        if program is None:
            raise Broken("sshd is not installed", hint="install the lab's packages: make setup")
        argv = [program, "-D", "-e", "-f", f"{lab.where.etc}/sshd_config"]
        return self._inside(lab, argv, "sshd.log")

    def _run_agent(self, lab: Lab) -> DaemonCommand:
        # The log is private, because it contains lines from guests' consoles.
        argv = multiverse("agent", "--config", f"{lab.where.etc}/{SETTINGS}")
        return replace(self._inside(lab, argv, "agent.log"), log_mode=0o600)

    def _prepare_agent(self, lab: Lab) -> None:
        own = lab.where.host(self._host.name)
        directory(own.controller, "root", 0o711)  # the uids of VMs need to pass through
        # Whether KVM runs guests takes seconds to find out, and all hosts are the same machine.
        for known in (lab.where.controller, *(lab.where.host(one.name).controller for one in lab.plan.own_hosts)):
            if (known / _KVM).exists() and not (own.controller / _KVM).exists():
                shutil.copy(known / _KVM, own.controller)

    def _inside(self, lab: Lab, argv: list[str], log: str) -> DaemonCommand:
        launcher = [sys.executable, "-m", "multiverse.lab.hosts.inside", str(self._pid(lab)), *argv]
        return DaemonCommand(launcher, lab.where.log / f"{self._host.name}-{log}", launcher=True)

    def _pid(self, lab: Lab) -> int:
        running = self._init.running(lab.where)
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
