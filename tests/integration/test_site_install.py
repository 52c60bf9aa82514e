"""`multiverse site install` beside a Slurm that runs, and `site remove` after jobs in VMs: the site is as before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.guided_site import blocks, follow_install, guided_site
from tests.integration.site_machine import ADA_UID, SiteMachine
from tests.integration.watch import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture
def machine(accelerator: Path) -> Iterator[SiteMachine]:
    """A site's machine, on which Multiverse is installed from its wheel, has settings, and nothing else."""
    with guided_site(accelerator) as made:
        install, settings, *_ = blocks()
        follow_install(made, install)
        made.shell(settings)
        yield made


def files(machine: SiteMachine) -> dict[str, str]:
    """The site's files beside slurm.conf and for systemd, with their texts and owners."""
    shown = machine.shell("find /etc/slurm /etc/systemd /etc/tmpfiles.d -type f -printf '%p %m %U\\n'").splitlines()
    return {line: (machine.top / line.split()[0].lstrip("/")).read_text() for line in sorted(shown)}


def test_a_site_is_installed_used_and_removed(machine: SiteMachine) -> None:
    refused = machine.run("multiverse", "site", "install", "--yes", check=False)
    assert refused.returncode == 1 and "list the nodes of partition everything by name" in refused.stdout
    conf = machine.top / "etc/slurm/slurm.conf"
    conf.write_text(conf.read_text().replace("Nodes=ALL", "Nodes=n1"))
    before = files(machine)
    said = machine.run("multiverse", "site", "install", "--yes").stdout
    assert "  + Include multiverse.conf" in said and "  + /etc/slurm/multiverse-epilog || true" in said
    assert "/etc/slurm/job_submit.lua, above line" in said
    for step in [line.strip() for line in said.partition("Next, to start it:\n")[2].splitlines()]:
        machine.shell(step)
    done = machine.run("srun", "--quiet", "--time=5", "--partition=vm", "hostname", uid=ADA_UID, cwd="/tmp")
    assert done.stdout.startswith("mv"), done.stdout
    tested = machine.run("multiverse", "selftest", "--user", "grace", "--limit", "120", check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr

    used = machine.run("sbatch", "--partition=vm", "--time=5", "--wrap=sleep 300", uid=ADA_UID, cwd="/tmp").stdout
    job = used.split()[-1]
    refused = machine.run("multiverse", "site", "remove", "--yes", check=False)
    assert refused.returncode == 1 and f"1 job in partition vm: {job}" in refused.stdout, refused.stdout
    machine.run("scancel", job)
    until("nothing is used", lambda: machine.run("multiverse", "vms", "--json").stdout.strip() == "[]", limit=120)
    until("the job has left", lambda: not machine.run("squeue", "-hap", "vm").stdout, limit=60)
    removed = machine.run("multiverse", "site", "remove", "--yes").stdout
    assert "failed" not in removed, removed
    assert files(machine) == before
    machine.shell("systemctl restart slurmctld")
    until("slurmctld answers", lambda: "is UP" in machine.run("scontrol", "ping", check=False).stdout)
    assert "mvgate" not in machine.run("scontrol", "show", "reservation").stdout + machine.run("sinfo", "-N").stdout
    own = machine.run("srun", "--time=5", "hostname", uid=ADA_UID, cwd="/tmp").stdout
    assert own == "ctl1\n", "the site's own jobs run as before"
