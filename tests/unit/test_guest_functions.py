"""The guest agent takes virtual functions, on a tree like that of sysfs."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from multiverse.guest.agent import devices
from multiverse.guest.agent.system import GuestAgentError
from multiverse.host.qemu import library


class Guest:
    """A guest with two root ports, whose modprobe loads the driver `nvme`, which makes a device with a file of its own
    for each function that is there. Both functions reach one namespace, of their subsystem."""

    def __init__(self, top: Path) -> None:
        self.bridges = {0x11: top / "pci/0000:00:11.0", 0x10: top / "pci/0000:00:10.0"}
        self.devices = {port: bridge / f"0000:{port:02x}:00.0" for port, bridge in self.bridges.items()}
        self.subsystem, self.files = top / "devices/nvme-subsys0", top / "dev"
        self.loaded: list[str] = []
        self.drives, self.hangs = True, False
        for directory in (*self.bridges.values(), self.subsystem / "nvme0n1", self.files, top / "class"):
            directory.mkdir(parents=True)
        (self.subsystem / "uevent").touch()
        (self.subsystem / "nvme0n1/uevent").write_text("DEVNAME=nvme0n1\n")
        (self.files / "nvme0n1").touch()
        (top / "class/nvme-subsys0").symlink_to(self.subsystem)

    def plug(self, port: int = 0x11) -> None:
        device = self.devices[port]
        device.mkdir()
        for name, text in (("device", "0x0010"), ("modalias", "pci:v1B36"), ("uevent", ""), ("vendor", "0x1b36")):
            (device / name).write_text(f"{text}\n")

    def modprobe(self, argv: list[str], timeout: float) -> int:
        self.loaded.append(argv[-1])
        for number, device in enumerate(self.devices.values()):
            present = device.exists() and not (device / "driver").exists()
            if self.drives and argv[-1] == "pci:v1B36" and present and timeout > 0:
                child = device / f"nvme/nvme{number}"
                (device / "driver").mkdir()
                child.mkdir(parents=True)
                (child / "uevent").write_text(f"MAJOR=240\nMINOR=0\nDEVNAME=nvme{number}\n")
                (child / "modalias").write_text("auxiliary:nvme\n")
                (self.files / f"nvme{number}").touch()
                (self.subsystem / f"nvme{number}").symlink_to(child)
        return signal.SIGKILL if self.hangs else 0


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guest:
    found = Guest(tmp_path)
    monkeypatch.setattr(devices, "PCI_DEVICES", str(tmp_path / "pci"))
    monkeypatch.setattr(devices, "NVME_SUBSYSTEMS", str(tmp_path / "class"))
    monkeypatch.setattr(devices, "DEVICE_FILES", str(found.files))
    monkeypatch.setattr(devices, "TAKING_TIMEOUT", 0.4)
    monkeypatch.setattr(devices, "DRIVER_TIMEOUT", 0.2)
    monkeypatch.setattr(devices, "run", found.modprobe)
    return found


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The owners that device files were given, by their names."""
    owners: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: owners.update({Path(path).name: (uid, gid)}))
    return owners


def test_the_drivers_of_a_function_are_loaded_and_its_device_files_are_the_users(
    guest: Guest, given: dict[str, tuple[int, int]]
) -> None:
    guest.plug()
    devices.take_functions([0x11], 4711)
    assert guest.loaded == ["pci:v1B36", "auxiliary:nvme"], "of devices that the driver makes, too"
    assert given == {"nvme0": (4711, -1), "nvme0n1": (4711, -1)}, "and of the namespace, which is elsewhere in sysfs"


def test_namespaces_of_other_controllers_stay_roots(guest: Guest, given: dict[str, tuple[int, int]]) -> None:
    guest.plug()
    guest.plug(0x10)
    guest.modprobe(["pci:v1B36"], 1)
    (guest.subsystem / "nvme0").unlink()
    devices.take_functions([0x11], 4711)
    assert given == {"nvme0": (4711, -1)}


def test_several_functions_are_all_there_before_their_driver_is_loaded(
    guest: Guest, given: dict[str, tuple[int, int]]
) -> None:
    guest.plug(0x11)
    late = threading.Timer(0.1, guest.plug, [0x10])
    late.start()
    devices.take_functions([0x11, 0x10], 4711)
    late.join()
    assert guest.loaded == ["pci:v1B36", "auxiliary:nvme"]
    assert given == dict.fromkeys(("nvme0", "nvme1", "nvme0n1"), (4711, -1))


def test_a_function_that_does_not_appear_is_a_failure(guest: Guest) -> None:
    with pytest.raises(GuestAgentError, match="port 0x11 did not appear"):
        devices.take_functions([0x11], 4711)
    with pytest.raises(GuestAgentError, match="port 0x8 did not appear"):
        devices.take_functions([0x08], 4711)


def test_a_function_that_no_driver_takes_is_a_failure_that_names_the_next_step(guest: Guest) -> None:
    guest.drives = False
    guest.plug()
    with pytest.raises(
        GuestAgentError, match="no driver of this image takes the virtual function 1b36:0010: use another"
    ):
        devices.take_functions([0x11], 4711)
    assert guest.loaded == ["pci:v1B36"]


def test_a_driver_that_is_not_loaded_in_time_is_not_taken_for_one_that_is_missing(guest: Guest) -> None:
    guest.drives, guest.hangs = False, True
    guest.plug()
    with pytest.raises(GuestAgentError, match="were not loaded in"):
        devices.take_functions([0x11], 4711)


def test_the_host_waits_longer_than_the_guest_and_less_than_the_plugin() -> None:
    plugin = (Path(__file__).parents[2] / "spank/multiverse.c").read_text()
    (limit,) = re.findall(r"static int timeout = (\d+);", plugin)
    assert devices.TAKING_TIMEOUT < library._DRIVER_TIMEOUT < int(limit)
