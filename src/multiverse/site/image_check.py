"""Whether jobs would work in VMs of an image: what a trial of it has found, as lines with their remedies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.drivers.qemu.image_trial import ImageTrial
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import requirements
from multiverse.ports.site import Level

SLOW_UNIT = 2.0  # seconds of a unit's start that are worth a line
SLOW_BOOT = 60.0  # seconds until the fork point, where guests are emulated


class CheckVerdict(StrEnum):
    RIGHT = "right"
    NOTE = "note"  # jobs run; something is slow, or not known
    WRONG = "wrong"  # a job would fail, or VMs would share a secret


class CheckLine(NamedTuple):
    verdict: CheckVerdict
    what: str
    said: str
    remedy: str = ""


def release_of_slurm(given: str | None, settings: Settings) -> requirements.Version | None:
    """The release of Slurm that images are for: the one that is given, else that of this machine's commands; None if
    it has none. Raises `Refused` if `given` is none."""
    if given is not None:
        try:
            return requirements.version(f"slurm {given}")
        except Unknown as error:
            raise Refused(f"{given} is no release of Slurm", hint="give it as 24.11 or 22.05.8") from error
    if not settings.slurm.conf.exists():  # scontrol would search the network for one
        return None
    try:
        return requirements.version(asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "--version")))
    except MultiverseError:
        return None


def refusal(release: requirements.Version | None, slurmd: str) -> str:
    """Why a slurmctld of that release refuses a slurmd; empty if it does not, or that is unknown."""
    if release is None:
        return ""
    found = [one.message for one in requirements.guests(release, {"": slurmd}) if one.level is Level.PROBLEM]
    return "; ".join(found)


def judge(trial: ImageTrial, release: requirements.Version | None) -> list[CheckLine]:
    """What a trial says about jobs. Lines about the guest are absent if it did not get that far."""
    lines = [*_start(trial)]
    facts = trial.facts
    if facts is not None:
        for part in (_identity, _users, _network, _munge, _services):
            lines += part(facts)
        lines += _tmp(facts, trial.scratch)
        lines += _slurmd(facts, release)
    return lines


def _line(right: bool, what: str, said: str, remedy: str) -> CheckLine:
    return CheckLine(CheckVerdict.RIGHT, what, said) if right else CheckLine(CheckVerdict.WRONG, what, said, remedy)


def _start(trial: ImageTrial) -> Iterator[CheckLine]:
    """Template and clone, which each job needs."""
    if trial.fault and trial.boot is None:
        yield CheckLine(
            CheckVerdict.WRONG, "guest agent", f"it did not answer: {trial.fault}",
            "read the console above; does the image start multiverse-agent.service, with Python 3.11 or newer?",
        )  # fmt: skip
        return
    boot = trial.boot or 0.0
    slow = boot > SLOW_BOOT and trial.accelerator != "kvm"
    yield CheckLine(
        CheckVerdict.NOTE if slow else CheckVerdict.RIGHT,
        "guest agent",
        f"at the fork point after {boot:.1f} s ({trial.accelerator})",
        "only templates boot; see what makes it slow below" if slow else "",
    )
    if trial.fault:
        yield CheckLine(
            CheckVerdict.WRONG, "identity", trial.fault, "the guest agent says what it could not do; add what it misses"
        )
        return
    yield CheckLine(CheckVerdict.RIGHT, "clone", f"{trial.kind}, ready {trial.start:.1f} s after its start")
    if lacking := sorted({"fork", "plug_cpus", "plug_memory", "limit_disk"} - trial.abilities):
        yield CheckLine(
            CheckVerdict.NOTE, "abilities", f"it lacks {', '.join(lacking)}",
            "jobs run; without plug_cpus or plug_memory each size of a job has a template of its own",
        )  # fmt: skip
    if trial.facts is None:
        yield CheckLine(
            CheckVerdict.WRONG, "network", f"nothing of the check in the guest came back: {trial.silence}",
            "the guest needs the driver virtio_net, and Python to run the check",
        )  # fmt: skip


def _identity(facts: Mapping[str, Any]) -> Iterator[CheckLine]:
    name = facts["hostname"] == facts["expected"]["hostname"]
    yield _line(name, "host name", facts["hostname"], "something sets another name at boot: mask cloud-init")
    own = facts["machine_id"] == facts["expected"]["machine_id"]
    yield _line(own, "machine-id", facts["machine_id"], "/etc/machine-id must be a file, empty in the image")
    off = abs(facts["clock"])
    yield _line(off < 5, "time", f"{off:.1f} s off", "mask services that set the clock: the guest agent does")
    yield _line(
        not facts["secrets"],
        "secrets",
        f"the image contains {', '.join(facts['secrets'])}" if facts["secrets"] else "none in the image",
        "remove them: all VMs would share them",
    )


def _users(facts: Mapping[str, Any]) -> Iterator[CheckLine]:
    yield _line(
        facts["user"] == facts["expected"]["user"],
        "name service of users",
        facts["user"] or "the job's user is not known",
        "files must come first for passwd and group in /etc/nsswitch.conf",
    )


def _tmp(facts: Mapping[str, Any], scratch: int) -> Iterator[CheckLine]:
    tmp = facts["tmp"]
    if not tmp["error"] and tmp["free"] < scratch:
        yield CheckLine(
            CheckVerdict.WRONG, "/tmp", f"{tmp['free']} MiB free, and jobs may write {scratch} (image.scratch)",
            "is it in memory? mask tmp.mount; else make the disk larger (size)",
        )  # fmt: skip
        return
    yield _line(
        not tmp["error"],
        "/tmp",
        tmp["error"] or f"mode {tmp['mode']}, {tmp['free']} MiB free",
        "it must be writable by all, with the sticky bit (mode 1777)",
    )


def _network(facts: Mapping[str, Any]) -> Iterator[CheckLine]:
    yield CheckLine(CheckVerdict.RIGHT, "network", f"{facts['address']} at {facts['interface']}")
    yield _line(
        facts["nfs"],
        "mounts",
        "the NFS client is there" if facts["nfs"] else "the kernel does not know nfs4",
        "install nfs-common (Debian, Ubuntu) or nfs-utils (Rocky), and a kernel with nfsv4",
    )


def _munge(facts: Mapping[str, Any]) -> Iterator[CheckLine]:
    found = facts["munge"]
    yield _line(not found["error"], "munge", found["error"] or found["version"], "install munge in the image")


def _slurmd(facts: Mapping[str, Any], release: requirements.Version | None) -> Iterator[CheckLine]:
    found = facts["slurmd"]
    if not found["version"]:
        yield CheckLine(CheckVerdict.WRONG, "slurmd", found["error"], "install slurmd (Debian) or slurm-slurmd (EPEL)")
        return
    why = refusal(release, found["version"])
    if why:
        yield CheckLine(
            CheckVerdict.WRONG, "release of slurmd", why, "install the site's release, or build on another Debian"
        )
    elif release is None:
        yield CheckLine(
            CheckVerdict.NOTE, "release of slurmd", f"{found['version']}; the site's is not known here",
            "give it: multiverse image check NAME --slurm 24.11",
        )  # fmt: skip
    else:
        yield CheckLine(CheckVerdict.RIGHT, "release of slurmd", f"{found['version']}, for slurmctld {release}")
    yield _line(
        not found["error"],
        "slurmd",
        found["error"] or "it starts, and looks for slurmctld",
        "its log says what it misses: a plugin, a library, control groups",
    )
    if missing := facts["programs"]:
        yield CheckLine(
            CheckVerdict.WRONG, "programs", f"there is no {', '.join(missing)}", "install them in the image"
        )


def _services(facts: Mapping[str, Any]) -> Iterator[CheckLine]:
    units = facts["units"]
    if units is None:
        return
    for name, state in units["failed"]:
        yield CheckLine(
            CheckVerdict.NOTE,
            f"unit {name}",
            f"it failed ({state})",
            f"mask it if no job needs it: systemctl mask {name}",
        )
    if not units["failed"]:
        yield CheckLine(CheckVerdict.RIGHT, "units", "none failed")
    if units["waiting"]:
        waiting = ", ".join(units["waiting"])
        remedy = "every clone goes on with that: mask what no job needs"
        yield CheckLine(CheckVerdict.NOTE, "units", f"still starting: {waiting}", remedy)
    slow = [f"{name} {seconds:.1f} s" for name, seconds in units["slow"] if seconds >= SLOW_UNIT]
    if slow:
        remedy = "only templates and booting clones wait for these: mask what no job needs (systemctl mask)"
        yield CheckLine(CheckVerdict.NOTE, "slow to start", ", ".join(slow), remedy)


def fails(lines: Sequence[CheckLine]) -> bool:
    """Whether the image is not fit for jobs."""
    return any(line.verdict is CheckVerdict.WRONG for line in lines)
