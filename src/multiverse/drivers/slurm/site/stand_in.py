"""What stands in for slurmd of a VM that sleeps: a slurmd of the same node on the VM's host, which runs no job.

It answers slurmctld, registers the node, and knows the job's steps by sockets of `steps_program`. It has the guest's
configuration, without all that examines a machine or starts a process for a job.
"""

from __future__ import annotations

import re
from dataclasses import replace

from multiverse.config import Settings
from multiverse.core.model.identity import Daemon, GuestFile, NodeBootstrap
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm.site import bootstrap, conf
from multiverse.guest.protocol import STEPS, program

_DROPPED = ("slurmdspooldir", "proctracktype", "taskplugin", "jobacctgathertype", "prologflags", "slurmdparameters",
            *(key.lower() for key in bootstrap.RUN_IN_GUESTS))  # fmt: skip
_OWN = f"""\
SlurmdSpoolDir={conf.SPOOL}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
"""
# Of all plugins for control groups this one does nothing before a job starts. slurmd does not start without one.
_CGROUP = "CgroupPlugin=cgroup/v1\n"
_NO_STEPD = "/usr/bin/false"  # slurmd wants a slurmstepd, which it never starts
_PROGRAM = "/run/multiverse/steps-program"
_KEPT = re.compile(r"/etc/munge/.*|/etc/slurm/(?!multiverse-(?!slurmd)).*")  # no prolog or epilog


def stand_in(settings: Settings, node: NodeSpec) -> NodeBootstrap:
    """Files, directories and daemons of the stand-in for that node. Blocks as `bootstrap.bootstrap` does."""
    own = bootstrap.bootstrap(settings, node)
    munged, slurmd = own.daemons
    argv = tuple(_NO_STEPD if word == bootstrap.STEPD else word for word in slurmd.argv)
    steps = Daemon("steps", ("/usr/bin/python3", "-IS", _PROGRAM, conf.SPOOL, node.name, STEPS))
    site = bootstrap.as_slurm_reads_it(settings.slurm.conf, settings.slurm.conf.parent)
    kept = [file for file in own.files if _KEPT.fullmatch(file.path)]
    return replace(
        own,
        files=(*(_changed(file, site) for file in kept), GuestFile(_PROGRAM, program("steps_program.py").encode())),
        directories=tuple(one for one in own.directories if not one[0].startswith("/sys")),
        daemons=(munged, steps, replace(slurmd, argv=argv)),
    )


def _changed(file: GuestFile, site: bytes) -> GuestFile:
    if file.path.endswith("/cgroup.conf"):
        return replace(file, content=_CGROUP.encode())
    if file.path != bootstrap.SLURMD_CONF:
        return file
    pairs = conf.settings(file.content.decode(errors="replace"))
    lines = [f"{key}={value}\n" for key, value in pairs if key.lower() not in _DROPPED]
    return replace(file, content=bootstrap.with_hash_of(("".join(lines) + _OWN).encode(), site))
