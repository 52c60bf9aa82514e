"""What an image is made of: packages, sources, hooks, boot options, guest agent. The image's keys are hashes of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Refused
from multiverse.guest.assemble import assemble
from multiverse.images import initramfs
from multiverse.images.catalog import Flavour
from multiverse.images.root import AGENT_PATH, AGENT_UNIT

BUILDER_VERSION = 2  # increase it when a change of the builder's steps changes the images that it makes
DISK_MIB = 16384  # size of the disk that the guest sees; the file is sparse, so only what is written takes space

_COMMON = ("linux-image-amd64", "slurmd", "slurm-client", "munge", "nfs-common", "python3", "iproute2")
PACKAGES: dict[Flavour, tuple[str, ...]] = {
    "slim": (*_COMMON, "busybox-static", "libpam-modules", "procps"),  # procps: ps, pgrep, free, as users expect
    "stock": (*_COMMON, "systemd-sysv", "udev", "dbus", "initramfs-tools"),
}
VARIANT: dict[Flavour, str] = {"slim": "minbase", "stock": "important"}
# Files that no job needs. The drivers are for devices that QEMU never gives to our VMs.
EXCLUDED = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*",
    *(f"/lib/modules/*/kernel/{name}/*" for name in (
        "sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/staging", "drivers/isdn",
        "drivers/iio", "drivers/hwmon", "drivers/input", "drivers/bluetooth", "drivers/usb", "drivers/scsi")),
)  # fmt: skip
_BOOT = ("root=/dev/vda", "rw", "console=ttyS0", "quiet", "net.ifnames=0", "panic=-1",
         # A plugged DIMM is usable at once, and its own memory holds its page structures.
         "memhp_default_state=online", "memory_hotplug.memmap_on_memory=1", "swiotlb=noforce")  # fmt: skip
# These switch off what the VM of a single job does not need and every clone would spend time on: pressure figures,
# audit, mandatory access control between services, watchdogs, IPv6 autoconfiguration (identities have IPv4 addresses).
_LEAN = ("psi=0", "audit=0", "lsm=", "nowatchdog", "ipv6.disable_ipv6=1", "transparent_hugepage=madvise")


@dataclass(frozen=True)
class Recipe:
    """All inputs of an image. They are read once, so that the keys describe what the image is made of.

    `suite` is the name of Debian's release, `sources` the host's files of apt sources, `hooks` the programs that change
    the root file system, `agent` the program text of the guest agent.
    """

    flavour: Flavour
    suite: str
    packages: tuple[str, ...]
    sources: tuple[Path, ...]
    hooks: tuple[Path, ...]
    agent: str

    @classmethod
    def of(cls, flavour: Flavour, packages: Sequence[str], hooks: Path | None) -> Recipe:
        """The recipe on this host now. Raises `Refused` if the host has no apt sources, or `hooks` is no directory."""
        return cls(flavour, _suite(), tuple(sorted(set(packages))), _sources(), _hooks(hooks), assemble())

    @property
    def cmdline(self) -> str:
        """The kernel's command line."""
        return " ".join((*_BOOT, *_LEAN, f"init={AGENT_PATH}") if self.flavour == "slim" else _BOOT)

    def keys(self) -> tuple[str, str]:
        """(key of everything but the guest agent, key of everything), each of 16 hex digits."""
        digest = hashlib.sha256()
        facts = (BUILDER_VERSION, self.flavour, self.suite, self.packages, PACKAGES[self.flavour], EXCLUDED,
                 self.cmdline, AGENT_UNIT, DISK_MIB)  # fmt: skip
        digest.update(json.dumps(facts).encode())
        digest.update(Path(initramfs.__file__).read_bytes())
        for path in (*self.sources, *self.hooks):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        base = digest.hexdigest()[:16]
        digest.update(self.agent.encode())
        return base, digest.hexdigest()[:16]


def _suite() -> str:
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = facts.get("VERSION_CODENAME", "").strip('"')
    if not suite:
        raise Refused("/etc/os-release names no release of Debian", hint="build images on a Debian host")
    return suite


def _sources() -> tuple[Path, ...]:
    """The host's files of apt sources (sources.list(5)), without those that name no source."""
    parts = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list"), *sorted([*parts.glob("*.list"), *parts.glob("*.sources")])]
    used = tuple(p for p in found if p.is_file() and re.search(r"(?m)^\s*(deb\s|Types:)", p.read_text()))
    if not used:
        raise Refused("this host has no apt sources to build an image from", hint="add some, see sources.list(5)")
    return used


def _hooks(directory: Path | None) -> tuple[Path, ...]:
    if directory is None:
        return ()
    if not directory.is_dir():
        raise Refused(f"{directory} is not a directory", hint="give --hooks a directory of executables")
    return tuple(sorted(p.resolve() for p in directory.iterdir() if p.is_file() and os.access(p, os.X_OK)))
