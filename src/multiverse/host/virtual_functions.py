"""Virtual functions of this host's devices (SR-IOV). A VM has a function alone.

sysfs shows the functions and their drivers. Records, one file for each function, named by its address, say which VM has
it. A function is chosen and recorded under a lock, before anything is done with it; it is returned under a lock of its
own, and its record is removed last. So any process that finds a record can return the function.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.system import files
from multiverse.system.files import matching
from multiverse.system.locks import locked_file

log = structlog.get_logger(__name__)

DRIVER = "vfio-pci"  # gives a function to a process of the host
RECORDS = ".functions"  # directory of the records, in that of the VMs
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NO_GROUP = "it has no IOMMU group: turn the IOMMU on in the firmware and by intel_iommu=on or amd_iommu=on"


@dataclass(frozen=True, slots=True)
class VirtualFunction:
    address: str  # `0000:3b:02.1`
    ids: str  # vendor and device: `8086:154c`
    parent: str  # the address of its device
    group: int | None  # its IOMMU group
    driver: str  # that it is bound to, if any
    directory: Path  # its place in sysfs
    problem: str = ""  # why no VM can have it


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """That a VM has a function, and the function's settings before."""

    vm: str  # empty: the function could not be returned
    driver: str = ""  # before
    override: str = ""  # the name that was to override the choice of a driver
    problem: str = ""  # why it could not be returned


class VirtualFunctions:
    """The functions of one host. VMs may have those that are `offered`: all of a device, by its address or network
    interface, or all with these ids. Only this library uses the directory `records`. Calls block; any thread and
    process may make them."""

    def __init__(
        self, offered: Sequence[str], records: Path, sysfs: Path = Path("/sys"), devices: Path = Path("/dev/vfio")
    ) -> None:
        self._offered, self._records, self._sysfs, self._devices = frozenset(offered), records, sysfs, devices

    def listed(self) -> list[VirtualFunction]:
        """The functions that are offered, also those that no VM can have now."""
        return sorted(self._listed(), key=lambda found: found.address)

    def records(self) -> dict[str, FunctionRecord]:
        """The records, by the addresses of the functions."""
        names = os.listdir(self._records) if self._records.is_dir() else []  # noqa: PTH208  (names, not paths)
        found = {name: self._read(name) for name in sorted(names) if _ADDRESS.fullmatch(name)}
        return {address: record for address, record in found.items() if record is not None}

    def claim(self, vm: str, count: int, groups: Collection[int] | None = None) -> list[VirtualFunction]:
        """Choose so many functions for a VM, with those that it has, and bind them to `DRIVER`. With `groups`, only
        functions of these IOMMU groups are chosen. Raises `Refused` if no function is offered here, `Exhausted` if too
        few are free, and `Broken` if one cannot be bound; the VM then keeps its functions until `release`."""
        self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_file(self._records / ".lock"):
            held = self._choose(vm, count, groups)
        for address in held:
            with self._locked(address):
                self._bind(address)
        return [self._found(address) for address in held]

    def lend(self, vm: str, uid: int) -> list[VirtualFunction]:
        """Make the device files of a VM's functions this user's own. Returns the functions. Raises `Broken`."""
        found = [self._found(address) for address, record in self.records().items() if record.vm == vm]
        for function in found:
            node = self.device_of(function)
            try:
                os.chown(node, uid, uid)
                node.chmod(0o600)
            except OSError as error:
                raise Broken(f"cannot give {node} to user {uid}: {error.strerror}", hint="see `dmesg`") from error
        return found

    def device_of(self, function: VirtualFunction) -> Path:
        """The device file of a function's IOMMU group, which exists while the function is bound to `DRIVER`."""
        return self._devices / str(function.group)

    def device_files(self, function: VirtualFunction) -> tuple[Path, Path]:
        """The files that a process opens in order to use a function."""
        return self._devices / "vfio", self.device_of(function)

    def release(self, vm: str) -> None:
        """Return all functions of a VM, whose process has ended. Absent is success. A function that cannot be returned
        is given to no VM until a later `release_unclaimed` has returned it."""
        for address, record in self.records().items():
            if record.vm == vm:
                self._return(address, lambda found: found.vm == vm)

    def release_unclaimed(self, exists: Callable[[str], bool]) -> None:
        """Return all functions that are recorded for a VM that does not exist, or could not be returned before."""
        for address in self.records():
            self._return(address, lambda found: not found.vm or not exists(found.vm))

    def _listed(self) -> Iterator[VirtualFunction]:
        for entry in (self._sysfs / "bus/pci/devices").glob("*/physfn"):
            directory = entry.parent.resolve()
            with suppress(OSError, ValueError):  # the function has just been removed
                ids = ":".join((directory / name).read_text().strip()[2:] for name in ("vendor", "device"))
                parent = (directory / "physfn").resolve()
                interfaces = [path.name for path in matching(parent, "net/*")]
                if not self._offered & {ids, parent.name, parent.name.removeprefix("0000:"), *interfaces}:
                    continue
                link = directory / "iommu_group"
                group = int(link.resolve().name) if link.exists() else None
                yield VirtualFunction(
                    directory.name, ids, parent.name, group, _driver(directory), directory,
                    self._problem(directory, group),
                )  # fmt: skip

    def _problem(self, directory: Path, group: int | None) -> str:
        """Why no VM can have the function, apart from its record."""
        if group is None:
            return _NO_GROUP
        others = sorted({path.name for path in (directory / "iommu_group/devices").iterdir()} - {directory.name})
        if others:
            return f"{', '.join(others)} is in its IOMMU group {group}: use another slot, whose bridges isolate (ACS)"
        if not (directory / "reset").exists():
            return "it cannot be reset, so the next VM would find what this one has left"
        for flags in matching(directory, "net/*/flags"):
            if int(flags.read_text(), 16) & 1:  # IFF_UP, netdevice(7)
                return f"this host uses it as {flags.parent.name}: set that interface down, or offer other functions"
        with suppress(FileNotFoundError):
            owner = (self._devices / str(group)).stat().st_uid
            if owner and self._read(directory.name) is None:
                return f"user {owner} has {self._devices}/{group}, so another program uses it"
        return ""

    def _found(self, address: str) -> VirtualFunction:
        found = next((function for function in self._listed() if function.address == address), None)
        if found is None:
            raise Broken(f"the function {address} does not exist any more", hint="see `dmesg` and job_vms.sriov")
        return found

    def _choose(self, vm: str, count: int, groups: Collection[int] | None) -> list[str]:
        """Record functions for a VM until it has so many. Returns their addresses."""
        records = self.records()
        held = [address for address, record in records.items() if record.vm == vm]
        if len(held) >= count:
            return held
        offered = self.listed()
        if not offered:
            raise Refused(
                "this host has no virtual functions that job_vms.sriov offers",
                hint="ask an administrator to create them (sriov_numvfs) and to run `multiverse doctor`",
            )
        free = [function for function in offered if not function.problem and function.address not in records
                and (groups is None or function.group in groups)]  # fmt: skip
        missing = count - len(held)
        if len(free) < missing:
            what = f"the VM is to have {count} virtual functions, and {len(free)} of the host's {len(offered)} are free"
            if groups is not None and not groups:
                hint = "the job may use no IOMMU group: with job_vms.sriov_gres, only Slurm's plugin finds those it may"
            elif groups is not None:
                hint = (
                    f"the job may use the IOMMU groups {sorted(groups)}: has it the GRES for all functions of its VMs?"
                )
            elif problem := next((f"{each.address}: {each.problem}" for each in offered if each.problem), ""):
                hint = problem
            else:
                hint = "wait until another job ends, or submit the job with fewer"
            raise Exhausted(what, hint=hint)
        for function in free[:missing]:
            override = (function.directory / "driver_override").read_text().strip().replace("(null)", "")
            record = FunctionRecord(vm, function.driver, override)
            files.replace(self._records / function.address, json.dumps(asdict(record)))
            held.append(function.address)
        return held

    def _read(self, address: str) -> FunctionRecord | None:
        """The record of a function; None if there is none. A damaged one names no VM, so the function is returned."""
        try:
            raw = json.loads((self._records / address).read_text())
            return FunctionRecord(**{key: str(value) for key, value in raw.items()})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            return FunctionRecord("", problem=f"its record cannot be read: {error}")

    def _locked(self, address: str) -> AbstractContextManager[None]:
        return locked_file(self._records / f".{address}.lock")

    def _bind(self, address: str) -> None:
        """Bind a function to `DRIVER`; again is success."""
        pci, device = self._sysfs / "bus/pci", self._sysfs / "bus/pci/devices" / address
        try:
            if _driver(device) == DRIVER:
                return
            if not (pci / "drivers" / DRIVER).exists():
                subprocess.run(["modprobe", DRIVER], check=False, capture_output=True)
            _write(device / "driver_override", DRIVER)
            if _driver(device):
                _write(device / "driver/unbind", address)
            _write(pci / "drivers_probe", address)
        except OSError as error:
            raise Broken(f"cannot bind {address} to {DRIVER}: {error}", hint="see `dmesg`") from error
        if _driver(device) != DRIVER:
            raise Broken(f"{address} was not bound to {DRIVER}", hint=f"modprobe {DRIVER}, and see `dmesg`")

    def _return(self, address: str, which: Callable[[FunctionRecord], bool]) -> None:
        """Return a function if `which` accepts its record."""
        with self._locked(address):
            record = self._read(address)
            if record is None or not which(record):
                return
            path = self._records / address
            try:
                self._give_back(address, record)
            except OSError as error:
                reason = f"it could not be returned: {error}"
                log.warning("virtual function not returned", function=address, vm=record.vm, reason=str(error))
                kept = FunctionRecord("", record.driver, record.override, reason)
                files.replace(path, json.dumps(asdict(kept)))
            else:
                path.unlink()

    def _give_back(self, address: str, record: FunctionRecord) -> None:
        """Reset a function, and give it its former driver. Each step may have been done before. Raises OSError."""
        device = self._sysfs / "bus/pci/devices" / address
        if not device.exists():  # as after a new start of the machine
            return
        if _driver(device) == DRIVER:
            node = self._devices / (device / "iommu_group").resolve().name
            if node.exists():
                os.chown(node, 0, 0)
            _write(device / "reset", "1")
        if record.driver != DRIVER:
            _write(device / "driver_override", f"{record.override}\n")
            if _driver(device) == DRIVER:
                _write(device / "driver/unbind", address)
            if record.driver and not _driver(device):
                _write(self._sysfs / "bus/pci/drivers_probe", address)


def _driver(device: Path) -> str:
    link = device / "driver"
    return link.resolve().name if link.exists() else ""


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
