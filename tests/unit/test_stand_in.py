"""The configuration of what stands in for the slurmd of a VM that sleeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon, Identity, NodeBootstrap
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm.site import conf
from multiverse.drivers.slurm.site.bootstrap import SLURMD_CONF, bootstrap
from multiverse.drivers.slurm.site.stand_in import stand_in
from multiverse.host import stand_in as host_stand_in
from tests.unit.test_slurm_conf_hash import slurms_hash

NODE = NodeSpec("mvs-1", "10.1.0.7/16", Size(2, 500), ("slim", "mv_1"), "mv_1", "slim", resumed=2)
SITE = """\
ClusterName=c
SlurmctldHost=m(10.1.0.1)
SlurmUser=root
Prolog=/etc/slurm/prolog
Epilog=/etc/slurm/epilog
PrologFlags=Contain
JobAcctGatherType=jobacct_gather/cgroup
SlurmdParameters=l3cache_as_socket
SlurmdPort=7000
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "slurm.conf").write_text(SITE)
    (tmp_path / "key").write_bytes(b"secret")
    return replace(Settings(), slurm=SlurmSettings(conf=tmp_path / "slurm.conf", munge_key=tmp_path / "key"))


def test_it_declares_the_same_node_and_runs_nothing_of_the_sites(settings: Settings) -> None:
    found, guest = stand_in(settings, NODE), bootstrap(settings, NODE)
    files = {file.path: file.content for file in found.files}
    text = files[SLURMD_CONF].decode()
    assert not any(path.startswith("/etc/slurm/multiverse-pro") for path in files)
    assert files["/etc/munge/munge.key"] == b"secret"
    assert conf.value(text, "SlurmdPort") == "7000"
    assert conf.value(text, "SlurmdSpoolDir") == conf.SPOOL
    assert conf.value(text, "SlurmdParameters") == "config_overrides"
    assert [conf.value(text, key) for key in ("Prolog", "Epilog", "TaskProlog", "PrologFlags")] == [""] * 4
    *_, slurmd = found.daemons
    *_, of_guest = guest.daemons
    assert slurmd.argv[slurmd.argv.index("--conf") :] == of_guest.argv[of_guest.argv.index("--conf") :]
    assert slurmd.argv[slurmd.argv.index("-d") + 1] == "/usr/bin/false"


def test_it_has_the_hash_of_the_sites_slurm_conf(settings: Settings) -> None:
    """As the guest's has, so that slurmctld does not complain about either."""

    (text,) = (file.content for file in stand_in(settings, NODE).files if file.path == SLURMD_CONF)
    assert slurms_hash(text) == slurms_hash(SITE.encode())


def test_a_host_without_its_programs_is_named() -> None:
    daemons = (Daemon("munged", ("/usr/sbin/no-munged",)), Daemon("true", ("/usr/bin/true",)))
    identity = Identity("mvs-1", "02:00:00:00:00:01", "10.1.0.7/16", "", "", bootstrap=NodeBootstrap(daemons=daemons))
    with pytest.raises(Refused, match="lacks no-munged"):
        host_stand_in.check(identity)
