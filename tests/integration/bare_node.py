"""A plain slurmd of the lab whose jobs can have VMs inside, with the agent of its machine."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiverse import config
from multiverse.config import JobVmSettings
from multiverse.core.errors import Broken
from multiverse.core.model.identity import vm_prefix
from multiverse.drivers.slurm.site.install import loads_plugin, plugstack
from multiverse.service.job_vms import site_of_node
from multiverse_lab.lab import baremetal, spank
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.services import AGENT
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import matching, until

BUILT = Path(__file__).parents[2] / "var" / "spank"
IN_A_VM = ("--mem=700", "--vm-image=slim")
FEATURE = JobVmSettings().feature


@dataclass(frozen=True)
class BareNode:
    """A plain slurmd with the plugin, and the agent of its machine."""

    under_test: LabUnderTest
    lab: Lab

    def srun(self, *argv: str, vm: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a step of one task in a job of its own, as the user."""
        user, where = self.under_test.user, ("--quiet", "--partition=bare", *(IN_A_VM if vm else ()))
        return self.under_test.run("srun", *where, *argv, user=user, check=False, timeout=240)

    def sbatch(self, script: str, *options: str) -> str:
        return self.under_test.sbatch(script, "--partition=bare", *IN_A_VM, *options)

    def output(self, name: str) -> Path:
        return self.under_test.user.home / name

    def left(self) -> list[str]:
        """What exists of VMs inside jobs."""
        where, jobs = self.under_test.where, config.load(self.under_test.where.settings).job_vms
        places = [where.controller / "vms", where.run / "vms", where.agent / "jobs", jobs.records]
        found = [str(path) for place in places if place.is_dir() for path in place.iterdir() if _is_of_a_job(path)]
        found += [str(path) for path in Path("/sys/class/net").glob("mvjob-*")]
        found += [str(path) for path in Path("/sys/class/net").glob(f"{jobs.bridge}.*")]
        groups = [
            path
            for group in baremetal.control_groups_of(self.lab)
            for path in matching(group, "slurm_*/uid_*/job_*/mvjob-*")
        ]
        return found + [str(path) for path in (*groups, *self.regions())]

    def regions(self) -> list[Path]:
        """The descriptors of regions that VMs share, in the agent and in the QEMUs of this lab."""
        agent, found = AGENT.running(self.under_test.where), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                ours = str(self.under_test.where.controller).encode() in (process / "cmdline").read_bytes()
                if ours or (agent is not None and process.name == str(agent.pid)):
                    found += [one for one in (process / "fd").iterdir() if one.readlink().name.startswith("ivshmem-")]
        return found

    def has_feature(self) -> bool:
        """Whether the node takes jobs with VMs."""
        shown = self.under_test.run("sinfo", "-h", "-n", baremetal.NODE, "-o", "%f").stdout.strip()
        return FEATURE in shown.split(",")

    def nothing_left(self) -> None:
        """No part of a VM remains, and the node takes jobs."""
        until(f"nothing is left: {self.left()}", lambda: not self.left(), 120)
        until("the node is idle", lambda: self._state() == "idle", 90)

    def _state(self) -> str:
        return self.under_test.run("sinfo", "-h", "-n", baremetal.NODE, "-o", "%T").stdout.strip()


def ensure_agent(lab: Lab) -> None:
    """The agent runs, and serves jobs: it does so a little later than controllers."""
    asyncio.run(AGENT.ensure(lab))
    until("the agent serves jobs", lambda: _answers(config.load(lab.where.settings).job_vms.socket))


def _answers(path: Path) -> bool:
    """Whether somebody listens there: the socket of an agent that was killed stays."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def _is_of_a_job(path: Path) -> bool:
    of_a_platform = vm_prefix(site_of_node(baremetal.NODE))
    return path.name.startswith(("mvjob-", of_a_platform)) or path.stem.isdecimal()


@contextmanager
def bare_node(lab: LabUnderTest, *settings: str) -> Iterator[BareNode]:
    """The node meanwhile, with these lines in [job_vms]. It takes jobs with VMs."""
    where, plan = lab.where, load(lab.where)
    assert plan is not None
    own, site = Lab(where, plan), where.etc / "site.toml"
    missing = [name for name in ("multiverse.so", "mventer", "multiverse-vm") if not (BUILT / name).exists()]
    assert not missing, f"not built: {' '.join(missing)}; run make spank"
    before = site.read_text()
    spank.install(where, f"{BUILT}/multiverse.so", f"{BUILT}/mventer")
    plugin, enter = (spank.installed(where, name) for name in ("multiverse.so", "mventer"))
    lines = ("enabled = true", f'plugin = "{plugin}"', f'enter = "{enter}"', *settings)
    site.write_text("\n".join([before, "[job_vms]", *lines, ""]))
    jobs = config.load(where.settings).job_vms
    (where.etc / "plugstack.conf").write_text(plugstack(jobs) if loads_plugin(jobs) else "")
    try:
        asyncio.run(AGENT.stop(where))  # it may have run before this module, with the settings of then
        ensure_agent(own)
        try:
            asyncio.run(baremetal.start(own, memory_limited=True))
        except Broken as error:
            pytest.skip(f"slurmd does not run here: {error}")
        try:
            node = BareNode(lab, own)
            until("the agent has found that jobs can have VMs", node.has_feature, 60)
            yield node
        finally:
            asyncio.run(baremetal.stop(own))
    finally:
        site.write_text(before)
        (where.etc / "plugstack.conf").write_text("")
        asyncio.run(AGENT.stop(where))
        asyncio.run(AGENT.ensure(own))
