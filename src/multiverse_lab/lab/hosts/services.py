"""The services of a lab's hosts: each has a first process, an sshd and an agent."""

from __future__ import annotations

import shutil
from functools import cache

from multiverse.core.errors import Broken
from multiverse_lab.lab.hosts import ssh
from multiverse_lab.lab.hosts.machine import SETTINGS, HostInit
from multiverse_lab.lab.plan import LabHost
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.service import Lab, Service, answers


@cache
def host_services(host: LabHost) -> tuple[Service, ...]:
    """The services of a host, in the order in which they are started."""
    return _HostServices(host).all


class _HostServices:
    def __init__(self, host: LabHost) -> None:
        self._host = host
        self._init = HostInit(host)
        sshd = Service(
            f"{host.name}-sshd",
            self._run_sshd,
            ready=lambda lab: answers((host.address, ssh.PORT)),
            prepare=self._init.connect,
            config_files=(self._file("sshd_config"),),
        )
        agent = Service(
            f"{host.name}-agent",
            self._init.run_agent,
            ready=lambda lab: answers(str(lab.where.host(host.name).agent_socket)),
            prepare=self._init.prepare_agent,
            config_files=(self._file(SETTINGS), self._file("site.toml")),
            grace=20.0,
        )
        self.all = (self._init.service, sshd, agent)

    def _file(self, name: str) -> str:
        """A file that the host has in etc, from the lab's."""
        return f"../hosts/{self._host.name}/etc/{name}"

    def _run_sshd(self, lab: Lab) -> DaemonCommand:
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        if program is None:
            raise Broken("sshd is not installed", hint="install the lab's packages: make setup")
        argv = [program, "-D", "-e", "-f", f"{lab.where.etc}/sshd_config"]
        return self._init.inside(lab, argv, "sshd.log")
