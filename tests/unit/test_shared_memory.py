"""Memory that the VMs of a job share: how it is allocated, where it is plugged, and how data is passed through it."""

from __future__ import annotations

import os
import re
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model.basics import Size
from multiverse.guest import shared_memory_program
from multiverse.guest.agent import devices
from multiverse.guest.agent.system import GuestAgentError
from multiverse.guest.protocol import take_regions_message
from multiverse.guest.shared_memory_program import END, HEAD, Region
from multiverse.host.qemu.channels import QmpError
from multiverse.host.qemu.hotplug import allocate_regions, plug_regions, region_places
from multiverse.host.qemu.machine import PORTS, Accelerator, Memory, QemuMachine, RegionPlace, Wiring
from multiverse.system.kernel import SharedMemory

NOWHERE = Path("/")


@pytest.mark.parametrize(("size", "each", "most"), [(1, 8, 32), (32, 8, 32), (64, 4, 16), (128, 2, 8), (256, 1, 4)])
def test_regions_fit_below_the_ports_and_what_does_not_fit_is_refused(size: int, each: int, most: int) -> None:
    places = region_places(most, size)
    assert len({(one.port, one.function) for one in places}) == most
    assert places[0] == RegionPlace(0, 0), "the last ports are left to other devices"
    for port in range(len(PORTS)):
        assert [one.function for one in places if one.port == port] == list(range(each))
    with pytest.raises(Refused, match=f"has room for {most} regions of {size} MiB"):
        region_places(most + 1, size)
    assert region_places(0, size) == []
    with pytest.raises(Refused, match=f"room for {3 * each} regions of {size} MiB beside 1 virtual functions"):
        region_places(3 * each + 1, size, 3)


@dataclass
class Groups:
    """Control groups that remember what happens to them."""

    log: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def set_limits(self, name: str, memory: int, threads: int) -> None:
        self.log.append(f"make {name}")

    def add_process(self, name: str, pid: int, threads: int) -> None:
        assert (Path("/proc") / str(pid)).exists()
        self.log.append("enter")
        if self.failure is not None:
            raise self.failure

    def remove(self, name: str) -> None:
        self.log.append(f"remove {name}")


def test_regions_are_allocated_by_a_process_of_the_jobs_groups_and_are_zero() -> None:
    groups = Groups()
    memory = allocate_regions(groups, "vm-1-ivshmem", ["a", "b"], 2)  # type: ignore[arg-type]
    assert groups.log == ["make vm-1-ivshmem", "enter", "remove vm-1-ivshmem"]
    for fd in memory.fds:
        found = os.fstat(fd)
        assert (found.st_size, found.st_blocks * 512) == (2 << 20, 2 << 20)
        assert os.pread(fd, 2 << 20, 0) == bytes(2 << 20)
    assert allocate_regions(groups, "none", [], 2).fds == () and len(groups.log) == 3  # type: ignore[arg-type]


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_nothing_is_left_where_the_regions_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _descriptors()
    groups = Groups(failure=Broken("the job has ended"))
    with pytest.raises(Broken, match="the job has ended"):
        allocate_regions(groups, "vm", ["a"], 1)  # type: ignore[arg-type]
    assert groups.log[-1] == "remove vm"
    monkeypatch.setattr("multiverse.host.qemu.hotplug._PROGRAM", "read -r go; echo full >&2; exit 1")
    with pytest.raises(Exhausted, match="no room for 1 regions of 1 MiB: full"):
        allocate_regions(Groups(), "vm", ["a"], 1)  # type: ignore[arg-type]
    assert _descriptors() == before


def test_a_region_has_no_path_its_size_stays_and_its_descriptors_end_with_the_last_reference() -> None:
    memory = SharedMemory(["0123", "4567"], 1)
    fds = memory.fds
    for fd, name in zip(fds, ("0123", "4567"), strict=True):
        assert str(Path(f"/proc/self/fd/{fd}").readlink()) == f"/memfd:multiverse/ivshmem-{name} (deleted)"
        assert not os.get_inheritable(fd)
        for size in (0, 2 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    held = [memory]
    del memory
    assert stat.S_ISREG(os.fstat(fds[0]).st_mode)
    held.clear()
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_machine_maps_the_regions_and_has_the_shape_of_its_template_all_the_same() -> None:
    def machine(*shared: Memory) -> QemuMachine:
        return QemuMachine("vm", Accelerator("tcg"), 1, Memory(64), Size(1, 64), NOWHERE, "raw", "02:00:00:00:00:02",
                           NOWHERE, NOWHERE, "", regions=shared)  # fmt: skip

    wiring = Wiring(3, 4, 5, Path("/console"))
    sharing = machine(Memory(32, Path("/proc/self/fd/9")), Memory(32, Path("/proc/self/fd/10")))
    assert sharing.shape() == machine().shape()
    added = [one for one in sharing.argv("qemu", wiring, paused=True) if "id=region" in one]
    assert added == [f"memory-backend-file,id=region{n},size=32M,mem-path=/proc/self/fd/{fd},share=on"
                     for n, fd in enumerate((9, 10))]  # fmt: skip
    assert not [one for one in machine().argv("qemu", wiring, paused=True) if "region" in one]
    ports = [one for one in machine().shape() if one.startswith("pcie-root-port")]
    assert [int(re.findall(r"addr=(\w+)", one)[0], 16) for one in ports] == list(PORTS), "as the guest finds them"


class FakeMonitor:
    """A QEMU that has plugged some devices already."""

    def __init__(self, *present: str, refusal: str = "") -> None:
        self.present, self.refusal = present, refusal
        self.plugged: list[tuple[str, str, str]] = []

    def execute(self, command: str, **arguments: object) -> object:
        assert command == "qom-list"
        return [{"name": name} for name in self.present]

    def execute_all(self, commands: list[tuple[str, dict[str, str]]]) -> None:
        if self.refusal:
            raise QmpError(self.refusal)
        self.plugged += [(one["memdev"], one["bus"], one["addr"]) for _, one in commands]


def test_function_0_of_each_port_is_plugged_last_and_what_is_plugged_is_left() -> None:
    monitor = FakeMonitor("ivshmem1")
    plug_regions(monitor, "vm", region_places(10, 32))  # type: ignore[arg-type]
    assert len(monitor.plugged) == 9 and "region1" not in {name for name, _, _ in monitor.plugged}
    assert {name for name, _, _ in monitor.plugged[-2:]} == {"region0", "region8"}
    assert ("region9", "rp1", "0.1") in monitor.plugged and ("region7", "rp0", "0.7") in monitor.plugged
    with pytest.raises(Broken, match="no slot"):
        plug_regions(FakeMonitor(refusal="no slot"), "vm", region_places(1, 32))  # type: ignore[arg-type]


# --- in the guest -------------------------------------------------------------------------------------


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a guest in which two regions are plugged, beside another device."""
    for port, function, device in ((0x11, 0, "0x1110"), (0x11, 1, "0x1110"), (0x10, 0, "0x1041")):
        there = tmp_path / "pci" / f"0000:00:{port:02x}.0" / f"0000:0{port % 16 + 1}:00.{function}"
        there.mkdir(parents=True)
        for name, content in (("vendor", "0x1af4\n"), ("device", f"{device}\n"), ("enable", "0\n")):
            (there / name).write_text(content)
        (there / "resource2").write_bytes(bytes(64))
    for name, value in (("PCI", "pci"), ("REGIONS", "dev/ivshmem"), ("REGION_PROGRAM", "bin/mvshm")):
        monkeypatch.setattr(devices, name, str(tmp_path / value))
    return tmp_path


def test_the_guest_gives_each_region_to_the_user_by_its_number(guest: Path) -> None:
    message = {"devices": [[0x11, 1], [0x11, 0]], "uid": os.getuid(), "program": "text"}
    for _ in range(2):  # the host asks again after a lost answer
        devices.take_regions(message)
    for number, function in ((0, 1), (1, 0)):
        link = guest / "dev/ivshmem" / str(number)
        device = guest / "pci/0000:00:11.0" / f"0000:02:00.{function}"
        assert link.resolve() == device / "resource2" and (device / "enable").read_text()[:1] == "1"
    program = guest / "bin/mvshm"
    assert program.read_text() == "text" and os.access(program, os.X_OK)


def test_a_region_that_does_not_appear_is_a_failure(guest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DAEMON_TIMEOUT", 0.02)
    for missing in ([0x11, 7], [0x10, 0]):
        with pytest.raises(GuestAgentError, match="no shared memory appeared"):
            devices.take_regions({"devices": [missing], "uid": os.getuid(), "program": ""})


def test_the_message_says_where_the_regions_are_and_brings_the_program() -> None:
    line = take_regions_message([(0x11, 0)], 1000)
    assert line.startswith(b'{"type":"take_regions","devices":[[17,0]],"uid":1000,"program":"#!/usr/bin/python3 -IS')
    assert b"mvshm" in line and line.endswith(b"}\n")


# --- the program --------------------------------------------------------------------------------------


def _region(directory: Path, size: int) -> tuple[Region, Region]:
    """A region as two VMs map it."""
    (directory / "0").write_bytes(bytes(size))
    return Region("0"), Region("0")


@hypothesis_settings(deadline=None, max_examples=40)
@given(messages=st.lists(st.binary(max_size=700), max_size=12), size=st.sampled_from([HEAD + 128, HEAD + 1024]))
def test_messages_arrive_whole_and_in_their_order_however_small_the_ring_is(
    tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        directory = tmp_path_factory.mktemp("regions")
        patched.setattr(shared_memory_program, "REGIONS", str(directory))
        mine, theirs = _region(directory, size)
    for side in (0, 1):  # the two directions do not disturb each other
        outgoing, incoming = mine.ring(side), theirs.ring(side)
        received: list[bytes] = []

        def receive(incoming: shared_memory_program.Ring = incoming, received: list[bytes] = received) -> None:
            buffer = memoryview(bytearray(700))
            while (length := incoming.receive(buffer)) >= 0:
                received.append(bytes(buffer[:length]))

        thread = threading.Thread(target=receive)
        thread.start()
        for message in messages:
            outgoing.send(message)
        outgoing.end()
        thread.join(60)
        assert received == messages


def test_a_region_can_be_used_again_after_it_was_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_program, "REGIONS", str(tmp_path))
    mine, theirs = _region(tmp_path, 1 << 16)
    mine.ring(0)._put(b"x" * 8)  # of a sender that was killed
    theirs.clear()
    mine.ring(0).send(b"whole")
    buffer = memoryview(bytearray(8))
    assert theirs.ring(0).receive(buffer) == 5 and bytes(buffer[:5]) == b"whole"
    assert END > 1 << 63, "no length of a message"


def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_memory_program, "REGIONS", str(tmp_path))
    mine, _ = _region(tmp_path, 1 << 16)
    for argv, said in (
        (["send"], "usage: mvshm"),
        (["send", "x"], "usage: mvshm"),
        (["bench", "--fast"], "usage: mvshm"),
        (["receive", "7"], "No such file or directory; submit the job with --ivshmem=N"),
    ):
        monkeypatch.setattr("sys.argv", ["mvshm", *argv])
        with pytest.raises(SystemExit) as ended:
            shared_memory_program.main()
        assert ended.value.code == 1 and said in capsys.readouterr().err
    mine.ring(0)._put(b"\xff" * 7 + b"\x00")
    with pytest.raises(SystemExit):
        mine.ring(0).receive(memoryview(bytearray(8)))
    assert "see `mvshm clear`" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["mvshm", "list"])
    shared_memory_program.main()
    assert capsys.readouterr().out == f"{tmp_path}/0 0 MiB\n"
