"""Slurm's physical nodes as hosts (see `ports.Leases`): each lease is a pilot job, named after it.

A pilot belongs to one user, by default this process's. Its commands, and the one that reaches its agent, run as that
user: Slurm lets nobody else, not even root, start a step in a job (slurmctld's step_mgr.c; "Access/permission denied").
"""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Sequence
from contextlib import suppress

from multiverse.config import LeaseSettings, Settings
from multiverse.core.errors import Gone, Refused, Stale
from multiverse.core.model import LeasedHost, LeaseSpec
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.leases.pilots import PilotColumns

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STEP = ("--ntasks=1", "--overlap", "--mem=0", "--export=ALL", "--chdir=/")
"""Options of a step that shares what its job has, and is not one of several."""


class SlurmLeases:
    def __init__(self, settings: Settings, commands: SlurmCommands) -> None:
        self._settings, self._commands = settings, commands
        self._columns = PilotColumns()

    async def request(self, lease: LeaseSpec) -> None:
        """See `ports.Leases`."""
        for pilot in self._columns.pilots(await self._show(lease)):
            if (pilot.name, pilot.token) == (lease.name, lease.token):
                return
        await self._commands.run("sbatch", *submission(self._settings, lease), via=as_user(lease.user))

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        """See `ports.Leases`. scancel(1) leaves jobs of another name alone, and has ended those that have ended."""
        with suppress(Gone, Stale):
            await self._commands.run("scancel", f"--name={name}", *pilots)

    async def _show(self, lease: LeaseSpec) -> str:
        user = user_of(lease.user)
        which = ("-a", "-t", "all", "-u", user, "-n", lease.name)
        return await self._commands.run("squeue", *which, env={"SQUEUE_FORMAT2": self._columns.format})


def user_of(name: str) -> str:
    """The user whose jobs pilots are, where the settings name this one or none. Raises `Refused` for an unknown one."""
    return name or pwd.getpwuid(os.geteuid()).pw_name


def as_user(name: str) -> list[str]:
    """The start of a command line that runs the rest as that user, with its groups: Slurm compares a step's user and
    group with its job's. Empty if that is this process's own user. Raises `Refused` if there is no such user."""
    try:
        account = pwd.getpwnam(user_of(name))
    except KeyError as error:
        raise Refused(f"there is no user {name}, whose jobs the pilots are", hint="see user under [[lease]]") from error
    if account.pw_uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", "--"]


def settings_of(settings: Settings, partition: str) -> LeaseSettings:
    """The settings of leases from a partition: the default ones once they name it no more."""
    return next((one for one in settings.lease if one.partition == partition), LeaseSettings(partition))


def submission(settings: Settings, lease: LeaseSpec) -> list[str]:
    """The arguments of sbatch(1) for the pilot of a lease.

    It is never queued again: its lease would have ended meanwhile, and the VMs' jobs are elsewhere. The time limit is
    rounded up to minutes, which Slurm counts in.
    """
    minutes = max(1, -int(-lease.time_limit // 60))
    size = [f"--cpus-per-task={lease.size.cpus}"] if lease.size.cpus else ["--exclusive"]
    if not lease.size.cpus:
        size.append("--mem=0")  # all of the node's
    elif lease.size.memory:
        size.append(f"--mem={lease.size.memory}M")
    return [
        f"--job-name={lease.name}",
        f"--comment={lease.token}",
        f"--partition={lease.partition}",
        *([f"--account={lease.account}"] if lease.account else []),
        "--nodes=1",
        "--ntasks=1",
        *size,
        f"--time={minutes}",
        "--no-requeue",
        "--export=NIL",
        "--chdir=/",
        "--output=/dev/null",
        f"--wrap={pilot_script(settings, lease)}",
    ]


def pilot_script(settings: Settings, lease: LeaseSpec) -> str:
    """The commands of a pilot's batch script. The pilot is in a step of its own, because GraceTime's first signal
    reaches steps only (slurm.conf(5)), and because only a step can start while another one of the job runs."""
    become = settings_of(settings, lease.partition).become
    pilot = [*become, *settings.agent.program, "pilot", lease.name, f"--token={lease.token}"]
    step = [_slurms(settings, "srun"), *_STEP]
    node = ",$SLURMD_NODENAME" if settings.vxlan.enabled else ""
    return (
        f"export PATH={_PATH} SLURM_CONF={shlex.quote(str(settings.slurm.conf))}; unset SLURM_EXPORT_ENV; "
        # A whole node's batch step has one task, but its job all CPUs.
        f'exec {shlex.join(step)} --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 {shlex.join(pilot)} '
        # A command such as sudo(8) removes the environment.
        f'"--job=$SLURM_JOB_ID,$SLURM_CPUS_ON_NODE,${{SLURM_MEM_PER_NODE:-0}}{node}"'
    )


def dial_command(settings: Settings, host: LeasedHost) -> list[str]:
    """The command that connects its input and output with the agent of a leased host, in a step of its pilot."""
    socket = settings.agent.leases / host.lease.name / "agent.sock"
    return _step_command(settings, host, "dial-stdio", "--leased", f"--socket={socket}")


def receive_command(settings: Settings, host: LeasedHost) -> list[str]:
    """The command that lets a leased host receive an image, if the name and digest of that are added. Its archive is
    the file of `bring_command`."""
    owner = pwd.getpwnam(user_of(host.lease.user)).pw_uid
    return _step_command(settings, host, "receive-image", f"--leased={host.lease.name}", f"--owner={owner}")


def bring_command(settings: Settings, host: LeasedHost, file: str, image: str) -> list[str]:
    """The command that brings a file to where that host expects the archive of an image."""
    there = settings.agent.leases / host.lease.name / "incoming" / f"{image}.tar"
    bring = [_slurms(settings, "sbcast"), f"--jobid={host.pilot}", "--force", file, str(there)]
    return [*as_user(host.lease.user), "env", f"SLURM_CONF={settings.slurm.conf}", f"PATH={_PATH}", *bring]


def _step_command(settings: Settings, host: LeasedHost, *words: str) -> list[str]:
    """A command that runs another one of `multiverse agent` in a step of a lease's pilot, with its input and output."""
    become = settings_of(settings, host.lease.partition).become
    environment = ["env", f"SLURM_CONF={settings.slurm.conf}", f"PATH={_PATH}"]
    step = [_slurms(settings, "srun"), f"--jobid={host.pilot}", *_STEP, "--unbuffered", "--quiet"]
    return [*as_user(host.lease.user), *environment, *step, *become, *settings.agent.program, *words]


def _slurms(settings: Settings, program: str) -> str:
    return str(settings.slurm.bin_dir / program) if settings.slurm.bin_dir else program
