"""The guest agent takes virtual functions, on a tree like that of sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiverse.guest.agent import functions
from multiverse.guest.agent.contract import GuestAgentError


class Guest:
    """A guest whose modprobe binds the driver `nvme`, which makes a device with a file of its own."""

    def __init__(self, top: Path) -> None:
        self.bridge, self.files = top / "pci/0000:00:11.0", top / "dev"
        self.device = self.bridge / "0000:04:00.0"
        self.child = self.device / "nvme/nvme0"
        self.loaded: list[str] = []
        self.drives = True
        self.bridge.mkdir(parents=True)
        self.files.mkdir()

    def plug(self) -> None:
        self.device.mkdir()
        for name, text in (("vendor", "0x1b36"), ("device", "0x0010"), ("modalias", "pci:v1B36"), ("uevent", "")):
            (self.device / name).write_text(f"{text}\n")

    def modprobe(self, argv: list[str], timeout: float) -> int:
        self.loaded.append(argv[-1])
        if self.drives and argv[-1] == "pci:v1B36":
            (self.device / "driver").mkdir()
            self.child.mkdir(parents=True)
            (self.child / "uevent").write_text("MAJOR=240\nMINOR=0\nDEVNAME=nvme0\n")
            (self.child / "modalias").write_text("auxiliary:nvme\n")
            (self.files / "nvme0").touch()
        return 0


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guest:
    found = Guest(tmp_path)
    monkeypatch.setattr(functions, "PCI_DEVICES", str(tmp_path / "pci"))
    monkeypatch.setattr(functions, "DEVICE_FILES", str(found.files))
    monkeypatch.setattr(functions, "APPEARANCE_TIMEOUT", 0.2)
    monkeypatch.setattr(functions, "DRIVER_TIMEOUT", 0.2)
    monkeypatch.setattr(functions, "run", found.modprobe)
    return found


def test_the_drivers_of_a_function_are_loaded_and_its_device_files_are_the_users(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.update({str(path): (uid, gid)}))
    guest.plug()
    functions.take_function(0x11, 4711)
    assert guest.loaded == ["pci:v1B36", "auxiliary:nvme"], "of devices that the driver makes, too"
    assert given == {str(guest.files / "nvme0"): (4711, -1)}


def test_a_function_that_does_not_appear_is_a_failure(guest: Guest) -> None:
    with pytest.raises(GuestAgentError, match="port 0x11 did not appear"):
        functions.take_function(0x11, 4711)
    with pytest.raises(GuestAgentError, match="port 0x8 did not appear"):
        functions.take_function(0x08, 4711)


def test_a_function_that_no_driver_takes_is_a_failure_that_names_the_next_step(guest: Guest) -> None:
    guest.drives = False
    guest.plug()
    with pytest.raises(
        GuestAgentError, match="no driver of this image takes the virtual function 1b36:0010: use another"
    ):
        functions.take_function(0x11, 4711)
    assert guest.loaded == ["pci:v1B36"]
