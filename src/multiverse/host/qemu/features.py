"""Which features the VMs of this host have: those that work here, as trials show, unless they are turned off.

A trial does the thing. QEMU boots a sector from a disk, or with an interface, as VMs will have it; /dev/vhost-net is
made to work for this process; a huge page is allocated. What no trial shows, the first VM does: if its QEMU does not
start, VMs are started without these features from then on, until the next life of this process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, MultiverseError
from multiverse.core.model import Size
from multiverse.host.qemu import machine as machine_module
from multiverse.host.qemu import probe
from multiverse.host.qemu.ability_cache import save
from multiverse.host.qemu.machine import HUGE_PAGE, Accelerator, Feature, Memory, QemuMachine, Wiring
from multiverse.host.tap import open_tap, open_vhost_net

log = structlog.get_logger(__name__)

Trials = Mapping[Feature, Callable[[], str]]
"""By feature, what tries it: it returns why the feature cannot be used, or nothing if it can."""

_LIMIT = 10.0  # seconds for the boot of one sector: emulated, on a busy machine
_VHOST_SET_OWNER = 0xAF01  # <linux/vhost.h>
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_EMULATED = {
    Feature.VHOST_NET: "guests are emulated: QEMU would not notice that the kernel overwrites code it has translated",
    Feature.IOTHREAD: 'guests are emulated, and start later with it; to use it all the same, set qemu.iothread = "on"',
}
_ON_REQUEST = {
    Feature.NATIVE_AIO: "full clones start later with it, because it bypasses the page cache, which has their disks as"
    ' copied; to use it all the same, set qemu.native_aio = "on"',
}


class HostFeatures:
    """The features of one host. `modes` are `off`, `on` (used if it works) or `auto`, the default (used if it works and
    makes no VM slower). Trials run when the features are first asked for, because they take up to some seconds."""

    def __init__(self, modes: Mapping[Feature, str], accelerator: Accelerator, trials: Trials) -> None:
        self._modes, self._accelerator, self._trials = modes, accelerator, trials
        self._lock = threading.Lock()
        self._lacking: dict[Feature, str] | None = None
        self._proven: frozenset[Feature] = frozenset()  # with which a VM has started in this life of the process

    @property
    def lacking(self) -> Mapping[Feature, str]:
        """The features that VMs do not have, each with the reason."""
        with self._lock:
            if self._lacking is None:
                reasons = {feature: self._reason(feature) for feature in Feature}
                self._lacking = {feature: reason for feature, reason in reasons.items() if reason}
                used = sorted(str(one) for one in Feature if one not in self._lacking)
                log.info("host features", used=used, lacking={str(one): why for one, why in self._lacking.items()})
            return self._lacking

    @property
    def in_use(self) -> frozenset[Feature]:
        """The features that VMs have."""
        return frozenset(Feature) - self.lacking.keys()

    def started(self, used: frozenset[Feature]) -> None:
        """A QEMU with these features has started: if another one does not, they are not why."""
        self._proven |= used

    def failed(self, used: frozenset[Feature], reason: str) -> None:
        """A QEMU with these features did not start. Those with which none has started are used no more. It is not
        started again here: whoever asked for that VM asks again, for one without them."""
        suspects = used - self._proven
        if not suspects:
            return
        why = f"the first VM with {' and '.join(sorted(suspects))} did not start: {reason}"
        with self._lock:
            self._lacking = {**dict.fromkeys(suspects, why), **(self._lacking or {})}
        log.warning("features disabled", features=sorted(map(str, suspects)), reason=reason)

    def _reason(self, feature: Feature) -> str:
        mode = self._modes.get(feature, "auto")
        if mode == "off":
            return "turned off in the settings"
        unwanted = _ON_REQUEST if self._accelerator.name == "kvm" else _ON_REQUEST | _EMULATED
        if mode == "auto" and feature in unwanted:
            return unwanted[feature]
        return self._trials[feature]()


def trials(binary: str, version: str, accelerator: Accelerator, storage: Path, cache: Path) -> Trials:
    """The trials of this host, whose VMs have their disks in `storage`. The file `cache` keeps which boots have
    succeeded with this kernel, this QEMU and these arguments; one that failed is tried again by the next process."""
    arguments = zlib.crc32(Path(machine_module.__file__).read_bytes())
    key = f"{os.uname().release} {version} {accelerator.name} {storage} {arguments:x}"

    def boots(feature: Feature) -> Callable[[], str]:
        def boot() -> str:
            known = _succeeded(cache, key)
            if feature in known:
                return ""
            if not (reason := _boot(feature, binary, accelerator, storage)):
                save(cache, {"key": key, "succeeded": sorted({*known, feature})})
            return reason

        return boot

    return {
        Feature.VHOST_NET: lambda: vhost_net_trial() or boots(Feature.VHOST_NET)(),
        Feature.HUGE_PAGES: huge_page_trial,
        Feature.NATIVE_AIO: boots(Feature.NATIVE_AIO),
        Feature.IOTHREAD: boots(Feature.IOTHREAD),
    }


def vhost_net_trial() -> str:
    """Whether the kernel moves frames for this process: it has to start a thread for that."""
    try:
        fd = open_vhost_net()
    except Broken as error:
        return f"{error.message}; {error.hint}"
    try:
        fcntl.ioctl(fd, _VHOST_SET_OWNER)
    except OSError as error:
        return f"/dev/vhost-net does not serve this process: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def huge_page_trial(pool: Path = _POOL) -> str:
    """Whether memory can consist of huge pages. Where all are taken now, VMs get ordinary ones meanwhile."""
    try:
        fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB | os.MFD_CLOEXEC)
    except OSError as error:
        return f"the kernel has no huge pages of 2 MiB: {error.strerror}"
    try:
        os.posix_fallocate(fd, 0, HUGE_PAGE)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC) and any(_read(pool / name) for name in _SIZES):
            return ""
        return f"no huge page can be allocated: {error.strerror}; reserve some: sysctl vm.nr_hugepages=N"
    finally:
        os.close(fd)
    return ""


_SIZES = ("nr_hugepages", "nr_overcommit_hugepages")


def _read(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _succeeded(cache: Path, key: str) -> frozenset[str]:
    try:
        kept = json.loads(cache.read_text())
        return frozenset(kept["succeeded"]) if kept["key"] == key else frozenset()
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def _boot(feature: Feature, binary: str, accelerator: Accelerator, storage: Path) -> str:
    """Boot a sector with the devices of a machine that has the feature. Returns why that failed, or nothing."""
    nowhere = Path("/")
    machine = QemuMachine("trial", accelerator, 1, Memory(64), Size(1, 64), nowhere, "raw", "02:00:00:00:00:02",
                          nowhere, nowhere, "", features=frozenset({feature}))  # fmt: skip
    place = next(path for path in (storage, *storage.parents) if path.is_dir())
    fds: list[int] = []
    try:
        network: list[str] = []
        if feature is Feature.VHOST_NET:
            fds.append(open_tap("mvt%d", None))
            fds.append(open_vhost_net())
            network = machine.network_argv(Wiring(-1, -1, fds[0], nowhere, fds[1]))

        def devices(disk: Path) -> list[str]:
            return [*replace(machine, disk=disk).disk_argv(), *network]

        _, reason = probe.boot_sector(binary, accelerator, _LIMIT, devices, place, fds)
    except (OSError, MultiverseError) as error:
        return str(error)
    finally:
        for fd in fds:
            os.close(fd)
    return reason
