"""What a foreign system needs to become an image: decided from what was found in it, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_PYTHON = (3, 11)  # of the guest agent
OWN_PYTHON = "/usr/bin/python3"

# Drivers without which no guest of ours gets further than its kernel.
DRIVERS = ("virtio_pci", "virtio_blk", "virtio_net", "virtio_console")
NFS_DRIVER = "nfsv4"
# What the kernel's configuration must have for each ability of an image.
_ABILITIES = {
    "plug_cpus": ("HOTPLUG_CPU", "ACPI_HOTPLUG_CPU"),
    "plug_memory": ("MEMORY_HOTPLUG", "ACPI_HOTPLUG_MEMORY"),
}
_ALWAYS = ("fork", "limit_disk")

# Units that do nothing for the VM of a job, or work against the guest agent; each with the reason that is shown.
UNITS: Mapping[str, str] = {
    **dict.fromkeys(
        ("systemd-networkd.service", "systemd-networkd.socket", "systemd-networkd-wait-online.service",
         "NetworkManager.service", "NetworkManager-wait-online.service", "networking.service",
         "systemd-resolved.service"),
        "the guest agent sets up the network",
    ),
    **dict.fromkeys(
        ("systemd-timesyncd.service", "chronyd.service", "chrony.service"), "the guest agent sets the clock"
    ),
    **dict.fromkeys(
        ("cloud-init.service", "cloud-init-local.service", "cloud-init-main.service", "cloud-init-network.service",
         "cloud-config.service", "cloud-final.service"),
        "the identity of a VM comes from the guest agent",
    ),
    **dict.fromkeys(("ssh.service", "ssh.socket", "sshd.service"), "an image has no host keys"),
    **dict.fromkeys(
        ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service", "dnf-makecache.timer",
         "snapd.service", "snapd.socket", "snapd.seeded.service", "packagekit.service"),
        "the VM of a job is not upgraded",
    ),
    **dict.fromkeys(
        ("e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer", "multipathd.service", "multipathd.socket",
         "lvm2-monitor.service", "systemd-growfs-root.service"),
        "a VM has one plain disk",
    ),
    "tmp.mount": "what a job writes to /tmp belongs on the disk, and not into memory",
    "apparmor.service": "loading the profiles of services takes long, and the VM of a job has none",
    **dict.fromkeys(("serial-getty@ttyS0.service", "getty@tty1.service"), "nobody logs in at a console"),
}  # fmt: skip


class Family(NamedTuple):
    """What distributions with one package manager have in common."""

    manager: str
    packages: Mapping[str, str]  # by what each is for
    python: str  # a package with a newer Python, beside the distribution's own
    repository: str  # a package that adds a repository which has slurmd; empty: the usual ones have it


FAMILIES: Mapping[str, Family] = {
    "debian": Family(
        "apt",
        {"slurmd": "slurmd", "Slurm's commands": "slurm-client", "munge": "munge", "NFS client": "nfs-common"},
        "python3.11",
        "",
    ),
    "redhat": Family(
        "dnf",
        {"slurmd": "slurm-slurmd", "Slurm's commands": "slurm", "munge": "munge", "NFS client": "nfs-utils"},
        "python3.11",
        "epel-release",
    ),
}


@dataclass(frozen=True)
class ForeignSystem:
    """What was found in a foreign system."""

    title: str  # as its makers call it
    family: str  # a key of FAMILIES; empty for others
    architecture: str = "x86_64"
    has_systemd: bool = True
    kernel: str = ""  # the release of the newest that has modules; empty if there is none
    drivers: frozenset[str] = frozenset()  # that this kernel has, built in or as modules
    config: frozenset[str] | None = None  # options that are on; None: it does not tell
    installed: Mapping[str, str] = field(default_factory=dict)  # versions of packages by name
    offered: Mapping[str, str] | None = None  # that its package manager would install; None: not asked
    pythons: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # versions by path
    units: frozenset[str] = frozenset()  # that exist
    selinux: str = ""  # as in /etc/selinux/config
    maker: str = ""  # of initial ramdisks: mkinitramfs or dracut

    @property
    def slurmd(self) -> str:
        """The version of slurmd that it will have; empty if it has none and is offered none."""
        name = FAMILIES[self.family].packages["slurmd"] if self.family else "slurmd"
        return self.installed.get(name) or (self.offered or {}).get(name, "")


class Lack(NamedTuple):
    """What a system lacks that importing it cannot give, and how to get it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class ImportPlan:
    """What importing does, or why it cannot."""

    lacking: tuple[Lack, ...]
    install: tuple[str, ...]
    first: str  # a package to install before the others, because it adds their repository; empty: none
    python: str  # that runs the guest agent
    masked: tuple[str, ...]  # units
    kernel_arguments: tuple[str, ...]
    abilities: tuple[str, ...]
    notes: tuple[str, ...]


Judge = Callable[[str], str]
"""Says why slurmctld of the site refuses a slurmd of that version; empty if it does not."""


def plan_import(system: ForeignSystem, refuses: Judge = lambda version: "") -> ImportPlan:
    """Decide what importing a system does. Nothing of it has been changed."""
    family = FAMILIES.get(system.family)
    lacking = [*_unusable(system)]
    wanted: list[str] = []
    if family is not None:
        wanted = [name for name in family.packages.values() if name not in system.installed]
        lacking += _not_offered(system, family, wanted)
    elif not system.slurmd:
        lacking.append(
            Lack(
                f"{system.title} has no slurmd, and its package manager is neither apt nor dnf",
                "install slurmd, munge and an NFS client in it first",
            )
        )
    python = _python(system)
    if not python:
        if family is not None and (system.offered is None or family.python in system.offered):
            wanted.append(family.python)
            python = f"/usr/bin/{family.python}"
        else:
            least = ".".join(map(str, LEAST_PYTHON))
            lacking.append(Lack(f"it has no Python {least} or newer", f"take a later release of {system.title}"))
    if system.slurmd and (why := refuses(system.slurmd)):
        lacking.append(
            Lack(
                f"its slurmd is {system.slurmd}: {why}",
                "add a repository with the right release of Slurm to it, or take another release of the distribution",
            )
        )
    masked = tuple(unit for unit in UNITS if unit in system.units)
    enforcing = system.selinux in ("enforcing", "permissive")
    return ImportPlan(
        tuple(lacking),
        tuple(wanted),
        family.repository if family is not None and wanted and family.repository not in system.installed else "",
        python or OWN_PYTHON,
        masked,
        ("selinux=0",) if enforcing else (),
        _abilities(system),
        tuple(_notes(system, enforcing=enforcing)),
    )


def _unusable(system: ForeignSystem) -> list[Lack]:
    """What makes it useless, whatever is installed."""
    found = []
    if system.architecture != "x86_64":
        found.append(Lack(f"it is of {system.architecture}, and hosts are x86_64", "take the image for x86_64 (amd64)"))
    if not system.has_systemd:
        found.append(
            Lack(
                "it has no systemd, which starts the guest agent",
                "take an image with systemd, or build a slim one: multiverse image build slim",
            )
        )
    if not system.kernel:
        found.append(Lack("it has no kernel with modules", "install a kernel in it, or take an image for machines"))
    elif missing := [name for name in (*DRIVERS, NFS_DRIVER) if name not in system.drivers]:
        found.append(
            Lack(
                f"its kernel {system.kernel} has no {', '.join(missing)}",
                "install the distribution's generic kernel in it (linux-image-amd64, linux-image-generic, kernel-core)",
            )
        )
    if not system.maker:
        found.append(
            Lack(
                "it has no program that makes an initial ramdisk",
                "install initramfs-tools (Debian, Ubuntu) or dracut in it",
            )
        )
    return found


def _not_offered(system: ForeignSystem, family: Family, wanted: list[str]) -> list[Lack]:
    if system.offered is None:
        return []
    missing = [name for name in wanted if name not in system.offered]
    if not missing:
        return []
    where = "its files of apt sources (Ubuntu has them in universe)" if family.manager == "apt" else "EPEL"
    return [Lack(f"its sources have no {', '.join(missing)}", f"add a repository that has them to {where}")]


def _python(system: ForeignSystem) -> str:
    """The Python for the guest agent: the distribution's own if it is new enough, else another one."""
    usable = sorted(path for path, version in system.pythons.items() if version >= LEAST_PYTHON)
    return OWN_PYTHON if OWN_PYTHON in usable else next(iter(usable), "")


def _abilities(system: ForeignSystem) -> tuple[str, ...]:
    if system.config is None:
        return _ALWAYS
    can = [name for name, options in _ABILITIES.items() if system.config.issuperset(options)]
    return ("fork", *can, "limit_disk")


def _notes(system: ForeignSystem, *, enforcing: bool) -> list[str]:
    found = []
    if enforcing:
        found.append("SELinux is off in its VMs (selinux=0): files that the guest agent writes have no labels")
    if system.config is None:
        found.append("its kernel's configuration is unknown: nothing is plugged, and templates have the sizes of jobs")
    elif lacking := [name for name in _ABILITIES if name not in _abilities(system)]:
        found.append(f"its kernel cannot {' or '.join(lacking)}: templates have the sizes of jobs")
    return found


# --- parts of files ----------------------------------------------------------------------------------

_NETWORKED = re.compile(r"nfs4?|cifs|ceph|lustre|beegfs\w*|glusterfs|fuse\.\w+")
_IN_MEMORY = ("tmpfs", "proc", "sysfs", "devpts", "hugetlbfs", "cgroup2")


def fstab_of_image(text: str) -> str:
    """A file of file systems (fstab(5)) without those on the partitions that the image has no more. Their units would
    wait for a minute and a half, and fail."""
    kept = []
    for line in text.splitlines():
        fields = line.split("#", 1)[0].split()
        if len(fields) >= 3 and (_NETWORKED.fullmatch(fields[2]) or fields[2] in _IN_MEMORY):
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def os_facts(text: str) -> dict[str, str]:
    """The facts in os-release(5)."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def family_of(facts: Mapping[str, str]) -> str:
    """The family of a distribution, by its own name and those that it is like; empty for others."""
    names = {facts.get("ID", ""), *facts.get("ID_LIKE", "").split()}
    if names & {"debian", "ubuntu"}:
        return "debian"
    return "redhat" if names & {"rhel", "fedora", "centos"} else ""


def installed_packages(status: str) -> dict[str, str]:
    """The versions of installed packages, from dpkg's status."""
    found = {}
    for entry in status.split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Status|Version): (.*)$", entry))
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields["Version"]
    return found


def offered_packages(policy: str) -> dict[str, str]:
    """The versions that apt would install, from the output of `apt-cache policy`."""
    found = {}
    for name, rest in re.findall(r"(?m)^(\S+):\n((?:[ ].*\n?)*)", policy):
        candidate = re.search(r"Candidate: (\S+)", rest)
        if candidate and candidate[1] != "(none)":
            found[name] = candidate[1]
    return found


def kernel_options(text: str) -> frozenset[str]:
    """The options of a kernel's configuration that are on, built in or as modules."""
    return frozenset(re.findall(r"(?m)^CONFIG_(\w+)=[ym]$", text))
