"""Features of a host: when VMs have them, what tries them, QEMU's arguments for each, and memory in huge pages."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from multiverse.agent.protocol import HypervisorAnswer
from multiverse.config import HostSettings, QemuSettings, Settings, parse
from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.drivers.qemu.driver import QemuHypervisor, host_config
from multiverse.host import manifest, process
from multiverse.host.manifest import Manifest, Specification, VmPhase
from multiverse.host.qemu import abilities, observation, saves, session, templates
from multiverse.host.qemu.abilities import HostFeatures, huge_page_trial, trials, vhost_net_trial
from multiverse.host.qemu.channels import Command, Monitor, QmpError
from multiverse.host.qemu.context import HostContext, QemuHostConfig
from multiverse.host.qemu.hotplug import plug
from multiverse.host.qemu.machine import Accelerator, Feature, Memory, QemuMachine, Wiring
from multiverse.host.qemu.observation import HostObserver
from multiverse.host.qemu.session import Launch, Paths, QemuSession
from multiverse.images.catalog import Image

F = Feature
ALL = frozenset(Feature)
ASKED = {F.IOTHREAD: "on", F.NATIVE_AIO: "on"}
KVM, TCG = Accelerator("kvm"), Accelerator("tcg")


def machine(*used: Feature, **changes: object) -> QemuMachine:
    facts = {"name": "mva-1", "accelerator": TCG, "cpus": 1, "memory": Memory(256, Path("/t/memory")),
             "limits": Size(8, 4096), "disk": Path("/v/disk"), "disk_format": "qcow2", "mac": "02:00:00:00:00:01",
             "kernel": Path("/k"), "initrd": Path("/i"), "cmdline": "quiet", **changes}  # fmt: skip
    return QemuMachine(features=frozenset(used), **facts)  # type: ignore[arg-type]


# --- QEMU's arguments -------------------------------------------------------------------------------


def argv(*used: Feature, vhost: int | None = None) -> list[str]:
    return machine(*used).argv("qemu", Wiring(5, 6, 7, Path("/c"), vhost), paused=True)


def test_without_features_qemu_has_the_arguments_that_it_always_had() -> None:
    words = " ".join(argv())
    assert "tap,id=net,fd=7 " in words and "filename=/v/disk,discard=unmap " in words
    assert not [word for word in ("vhost", "iothread", "aio", "direct", "hugetlb") if word in words]
    assert argv(F.HUGE_PAGES) == argv(), "that is for memory that is plugged later"


@pytest.mark.parametrize(
    ("feature", "before", "after"),
    [
        (F.VHOST_NET, "tap,id=net,fd=7", "tap,id=net,fd=7,vhost=on,vhostfd=8"),
        (F.NATIVE_AIO, "driver=file,node-name=file,filename=/v/disk,discard=unmap",
         "driver=file,node-name=file,filename=/v/disk,discard=unmap,cache.direct=on,aio=native"),
    ],
)  # fmt: skip
def test_a_feature_adds_to_one_argument(feature: Feature, before: str, after: str) -> None:
    expected = [after if word == before else word for word in argv()]
    assert argv(feature, vhost=8 if feature is F.VHOST_NET else None) == expected != argv()


def test_the_thread_of_a_disk_exists_before_the_disk() -> None:
    words = argv(F.IOTHREAD)
    (disk,) = [number for number, word in enumerate(words) if word.startswith("virtio-blk-pci")]
    assert words[disk].endswith(",iothread=io") and words[: words.index("iothread,id=io")][-1] == "-object"
    assert words.index("iothread,id=io") < disk
    rest = [word for word in words if word != "iothread,id=io"]
    rest.pop(rest.index("-object", rest.index("-append")))
    assert [word.removesuffix(",iothread=io") for word in rest] == argv()


def test_devices_are_in_the_same_order_and_places_whatever_the_features() -> None:
    def devices(words: Sequence[str]) -> list[list[str]]:
        made = [word.split(",") for flag, word in pairwise(words) if flag == "-device"]
        return [[one[0], *(part for part in one if part.startswith(("bus=", "addr=")))] for one in made]

    assert devices(argv(*ALL, vhost=8)) == devices(argv())


def test_a_template_made_with_other_devices_is_another_template() -> None:
    image = Image("slim", "slim", "k", "b", Path("/images/slim"), "", "", "", ())
    keys = {used: templates.key_of(image, machine(*used), "7.2") for used in ((), (F.VHOST_NET,), (F.IOTHREAD,))}
    assert len(set(keys.values())) == 3


# --- which are used ---------------------------------------------------------------------------------


def tried(**reasons: str) -> tuple[dict[Feature, Callable[[], str]], list[Feature]]:
    """Trials with these outcomes, by the features' names in capitals, and those that were run."""
    run: list[Feature] = []

    def trial(feature: Feature) -> Callable[[], str]:
        def one() -> str:
            run.append(feature)
            return reasons.get(feature.name, "")

        return one

    return {feature: trial(feature) for feature in Feature}, run


def test_what_works_is_used_and_each_thing_is_tried_once_and_not_before_it_is_asked_for() -> None:
    ways, run = tried(HUGE_PAGES="none is reserved")
    host = HostFeatures(ASKED, KVM, ways)
    assert run == []
    with capture_logs() as said:
        assert host.in_use == host.in_use == ALL - {F.HUGE_PAGES}
    assert host.lacking == {F.HUGE_PAGES: "none is reserved"} and sorted(run) == sorted(Feature)
    (line,) = said
    assert line["lacking"] == {"huge-pages": "none is reserved"} and "iothread" in line["used"]


def test_what_is_turned_off_is_not_tried() -> None:
    ways, run = tried()
    host = HostFeatures(dict.fromkeys(Feature, "off"), KVM, ways)
    assert host.in_use == frozenset() and run == [] and "settings" in host.lacking[F.IOTHREAD]


def test_what_makes_vms_slower_is_used_on_request_only() -> None:
    kvm, emulated = (HostFeatures({}, accelerator, tried()[0]) for accelerator in (KVM, TCG))
    assert kvm.in_use == {F.VHOST_NET, F.HUGE_PAGES, F.IOTHREAD} and emulated.in_use == {F.HUGE_PAGES}
    assert "emulated" in emulated.lacking[F.VHOST_NET]
    assert 'qemu.iothread = "on"' in emulated.lacking[F.IOTHREAD], "the next step"
    assert 'qemu.native_aio = "on"' in kvm.lacking[F.NATIVE_AIO] == emulated.lacking[F.NATIVE_AIO]
    assert HostFeatures(ASKED, TCG, tried()[0]).in_use == {F.HUGE_PAGES, F.IOTHREAD, F.NATIVE_AIO}


def test_features_with_which_the_first_vm_does_not_start_are_used_no_more() -> None:
    host = HostFeatures(ASKED, KVM, tried()[0])
    assert host.in_use == ALL
    used = frozenset({F.IOTHREAD, F.VHOST_NET})
    with capture_logs() as said:
        host.failed(used, "QEMU says no")
    assert host.in_use == ALL - used and "QEMU says no" in host.lacking[F.VHOST_NET]
    assert [line["log_level"] for line in said] == ["warning"]


def test_a_later_vm_that_does_not_start_is_not_the_features_fault() -> None:
    host = HostFeatures(ASKED, KVM, tried()[0])
    used = frozenset({F.IOTHREAD})
    host.started(used)
    host.failed(used | {F.NATIVE_AIO}, "QEMU says no")
    assert host.in_use == ALL - {F.NATIVE_AIO}, "with that none has started"
    host.failed(used, "QEMU says no")
    host.failed(frozenset(), "QEMU says no")
    assert host.in_use == ALL - {F.NATIVE_AIO}


def test_each_feature_can_be_turned_off_in_the_settings() -> None:
    names = {F.VHOST_NET: "vhost_net", F.HUGE_PAGES: "huge_pages", F.NATIVE_AIO: "native_aio", F.IOTHREAD: "iothread"}
    for feature, name in names.items():
        modes = host_config(parse({"qemu": {name: "off"}}, "here"), "a").features
        assert modes == {**dict.fromkeys(Feature, "auto"), feature: "off"}
        with pytest.raises(Refused, match=name):
            parse({"qemu": {name: "maybe"}}, "here")
    asked = host_config(Settings(qemu=QemuSettings(iothread="on", native_aio="on")), "a").features
    assert {feature: mode for feature, mode in asked.items() if mode == "on"} == ASKED
    with pytest.raises(Refused, match="vhost_net"):
        parse({"qemu": {"vhost_net": "on"}}, "here")


# --- trials -----------------------------------------------------------------------------------------


def test_a_kernel_without_vhost_net_is_told_from_one_that_does_not_serve_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> int:
        raise Broken("cannot open /dev/vhost-net: No such file or directory", hint="load the vhost_net module")

    monkeypatch.setattr(abilities, "open_vhost_net", absent)
    assert vhost_net_trial().endswith("No such file or directory; load the vhost_net module")
    monkeypatch.setattr(abilities, "open_vhost_net", lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    assert "does not serve this process: Inappropriate ioctl" in vhost_net_trial()
    asked: list[int] = []
    monkeypatch.setattr(abilities.fcntl, "ioctl", lambda fd, request: asked.append(request))
    assert vhost_net_trial() == "" and asked == [0xAF01], "VHOST_SET_OWNER of <linux/vhost.h>"


@pytest.mark.parametrize(
    ("reserved", "code", "said"),
    [
        ({}, errno.ENOSPC, "vm.nr_hugepages"),
        ({"nr_hugepages": "0\n", "nr_overcommit_hugepages": "0\n"}, errno.ENOMEM, "vm.nr_hugepages"),
        ({"nr_hugepages": "8\n", "nr_overcommit_hugepages": "0\n"}, errno.ENOSPC, ""),
        ({"nr_hugepages": "0\n", "nr_overcommit_hugepages": "8\n"}, errno.ENOMEM, ""),
        ({"nr_hugepages": "8\n"}, errno.EPERM, "Operation not permitted"),
    ],
)
def test_huge_pages_that_are_all_taken_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: dict[str, str], code: int, said: str
) -> None:
    for name, content in reserved.items():
        (tmp_path / name).write_text(content)

    def allocate(_fd: int, _offset: int, size: int) -> None:
        assert size == 2 << 20
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    reason = huge_page_trial(tmp_path)
    assert said in reason and bool(said) == bool(reason)


def test_a_boot_that_succeeded_is_remembered_for_this_qemu_and_one_that_failed_is_not(tmp_path: Path) -> None:
    binary, runs, outcome = tmp_path / "qemu", tmp_path / "runs", tmp_path / "outcome"
    binary.write_text(f'#!/bin/sh\necho "$@" >> {runs}\necho no such option >&2\nexit $(cat {outcome})\n')
    binary.chmod(0o755)
    disks = tmp_path / "vms"  # is made later

    def boots(version: str = "7.2") -> tuple[str, str]:
        made = trials(str(binary), version, TCG, disks, tmp_path / "state" / "features.json")
        return made[F.NATIVE_AIO](), made[F.IOTHREAD]()

    outcome.write_text("1")
    assert all("no such option" in reason for reason in boots())
    outcome.write_text("85")  # what the sector makes QEMU end with
    assert boots() == boots() == ("", "")
    said = runs.read_text().splitlines()
    assert len(said) == 4 and "aio=native" in said[2] and "iothread=io" in said[3]
    assert "aio=native" not in said[3] and all(f"filename={tmp_path}/.trial-" in line for line in said)
    assert boots("8.0") == ("", "") and len(runs.read_text().splitlines()) == 6
    assert not list(tmp_path.glob(".trial-*"))


# --- the machines of one host -----------------------------------------------------------------------


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostContext:
    """A host where all works, with an image of empty files."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    monkeypatch.setattr(abilities, "trials", lambda *_: tried()[0])
    return HostContext(
        QemuHostConfig("h", "mva-", Size(1, 256), tmp_path, tmp_path / "t", tmp_path / "vms", tmp_path / "run",
                       tmp_path, str(binary), "tcg", features=ASKED)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "disk", "used"),
    [
        (CloneKind.FULL, "disk.raw", {F.IOTHREAD, F.NATIVE_AIO}),
        (CloneKind.LINKED, "disk.qcow2", {F.IOTHREAD}),
    ],
)
def test_only_the_disk_of_a_full_clone_is_read_past_the_page_cache(
    context: HostContext, tmp_path: Path, kind: CloneKind, disk: str, used: set[Feature]
) -> None:
    image = Image("slim", "slim", "k", "b", tmp_path, "", "", "", ())
    spec = Specification("mva-1", "h", "slim", kind, Size(1, 256), "02:00:00:00:00:01")
    assert context.vm_machine(spec, image, None, Path(disk)).features == used
    assert context.template_machine(image, Size(1, 256))(Path("/"), Path("/")).features == {F.IOTHREAD}


async def test_vms_are_listed_without_trying_anything(
    context: HostContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who only removes VMs, as the end of a lab does, waits for no trial."""
    ways, run = tried()
    monkeypatch.setattr(abilities, "trials", lambda *_: ways)
    (tmp_path / "vms" / "mva-1").mkdir(parents=True)
    qemu = QemuSettings(context.config.binary, "tcg", images=tmp_path, templates=tmp_path / "t",
                        vms=tmp_path / "vms", run=tmp_path / "run")  # fmt: skip
    hypervisor = QemuHypervisor(Settings(state_dir=tmp_path, host=HostSettings("h", 1, 256), qemu=qemu), "a")
    try:
        assert await hypervisor.list_vms() == ["mva-1"] and run == []
        assert list((await hypervisor.observe()).vms) == ["mva-1"] and run == [F.HUGE_PAGES]
    finally:
        hypervisor.close()


def test_a_qemu_that_does_not_start_disables_its_features_and_a_lack_of_memory_does_not(
    context: HostContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(launch: Launch) -> tuple[object, None]:
        launch.paths.home.mkdir(exist_ok=True)
        one = process.spawn(["false"], (), launch.paths.log, {})
        launch.paths.log.write_text(said)
        return one, None

    monkeypatch.setattr(QemuSession, "_spawn", staticmethod(spawn))
    launch = Launch(machine(F.IOTHREAD), Paths(tmp_path / "vm", tmp_path / "run"), "qemu", "mva-1", None)
    said = "qemu: cannot allocate memory"
    with pytest.raises(Exhausted):
        context.launch(launch)
    assert F.IOTHREAD in context.features.in_use
    said = "qemu: transport does not support notifiers"
    with pytest.raises(Broken):
        context.launch(launch)
    assert "does not support notifiers" in context.features.lacking[F.IOTHREAD]
    assert context.features.in_use == {F.HUGE_PAGES, F.NATIVE_AIO}


def test_qemu_is_given_vhost_net_only_if_its_machine_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[list[str], tuple[int, ...]]] = []

    def execute(_launch: Launch, words: list[str], fds: tuple[int, ...]) -> tuple[None, None]:
        started.append((words, fds))
        assert all(os.fstat(fd) for fd in fds)
        return None, None

    monkeypatch.setattr(session, "_execute", execute)
    for name in ("open_tap", "open_vhost_net"):
        monkeypatch.setattr(session, name, lambda *_: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    for used in ((), (F.VHOST_NET,)):
        QemuSession._spawn(Launch(machine(*used), Paths(tmp_path, tmp_path / "run"), "qemu", "mva-1", None))
    (plain, three), (fast, four) = started
    assert len(three) == 3 and len(four) == 4
    assert not any("vhost=" in word for word in plain)
    assert f"tap,id=net,fd={four[2]},vhost=on,vhostfd={four[3]}" in fast
    for fd in four:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# --- what is shown ----------------------------------------------------------------------------------


def test_an_agent_of_the_release_before_reports_no_features_and_this_one_all() -> None:
    host = Host("h1", Size(4, 8192), features=frozenset({"iothread"}), features_off={"vhost-net": "no module"})
    kept = HypervisorAnswer.of(HypervisorView({"h1": host}))
    sent = json.loads(kept.model_dump_json())
    assert HypervisorAnswer.model_validate(sent).view().hosts["h1"] == host
    del sent["hosts"]["h1"]["features"], sent["hosts"]["h1"]["features_off"]
    assert HypervisorAnswer.model_validate(sent).view().hosts["h1"] == Host("h1", Size(4, 8192))


def test_a_host_is_described_by_values_alone(context: HostContext) -> None:
    kind = TypeAdapter(QemuHostConfig)
    assert kind.validate_json(kind.dump_json(context.config)) == context.config


# --- memory in huge pages ---------------------------------------------------------------------------


class FakeMonitor:
    """A QEMU that has `free` MiB in huge pages, as its monitor shows it."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.objects: dict[str, dict[str, Any]] = {}
        self.devices: dict[str, str] = {}

    def execute(self, command: str, **arguments: Any) -> Any:
        return self.execute_all([(command, arguments)])[0]

    def execute_all(self, commands: Sequence[Command]) -> list[Any]:
        return [getattr(self, name.replace("-", "_"))(dict(arguments)) for name, arguments in commands]

    def qom_list(self, asked: dict[str, Any]) -> list[dict[str, str]]:
        found = self.devices if asked["path"] == "/machine/peripheral" else self.objects
        return [{"name": name} for name in (*found, "type")]

    def object_add(self, asked: dict[str, Any]) -> None:
        if asked["id"] in self.objects:
            raise QmpError("QEMU refused object-add: attempt to add duplicate property")
        size = asked["size"] >> 20
        if asked.get("hugetlb"):
            assert asked["qom-type"] == "memory-backend-memfd" and asked["hugetlbsize"] == 2 << 20
            if size > self.free:
                raise QmpError("QEMU refused object-add: unable to map backing store: Cannot allocate memory")
            self.free -= size
        self.objects[asked["id"]] = asked

    def device_add(self, asked: dict[str, Any]) -> None:
        assert asked["id"] not in self.devices and asked["memdev"] in self.objects
        self.devices[asked["id"]] = asked["memdev"]

    def plug(self, plugged: int, *, huge: bool = True, backends: Collection[str] | None = None) -> int:
        known = Manifest("mva-1", CloneKind.INSTANT, VmPhase.STARTING, "02:00:00:00:00:01", 1, 256)
        return plug(cast(Monitor, self), known, 1, plugged, huge=huge, backends=backends)


def test_memory_is_in_huge_pages_if_there_are_enough() -> None:
    qemu = FakeMonitor(8192)
    assert qemu.plug(4096) == 4096 and qemu.free == 4096
    assert qemu.devices == {"dimm0": "huge0", "dimm1": "huge1"}, "2048 MiB, and the rest"
    other = FakeMonitor(8192)
    assert other.plug(4096, huge=False) == 0 and other.free == 8192
    assert other.devices == {"dimm0": "mem0", "dimm1": "mem1"}


def test_memory_for_which_there_are_too_few_huge_pages_is_ordinary_and_the_log_says_so() -> None:
    for free, used, devices in ((0, 0, ["mem0", "mem1"]), (3000, 2048, ["huge0", "mem1"])):
        qemu = FakeMonitor(free)
        with capture_logs() as said:
            assert qemu.plug(4096) == used
        assert list(qemu.devices.values()) == devices
        (line,) = said
        assert line["log_level"] == "warning" and line["mib"] == 4096 - used
        assert line["vm"] == "mva-1" and "Cannot allocate" in line["reason"]


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("free", [0, 2048, 8192])
@pytest.mark.parametrize("names", [["huge0", "huge1"], ["mem0", "mem1"], ["huge0", "mem1"]])
def test_memory_whose_state_is_read_has_the_names_that_it_had_whatever_its_pages_are(
    names: list[str], free: int, huge: bool
) -> None:
    """A VM with huge pages is saved, or moved, and goes on where there are none; and the other way round."""
    qemu, able = FakeMonitor(free), min(free, 2048 * sum(name.startswith("huge") for name in names))
    assert qemu.plug(4096, huge=huge, backends=["dev0", *names]) == able * huge
    assert list(qemu.devices.values()) == names
    assert sum(one.get("hugetlb", False) for one in qemu.objects.values()) == able * huge // 2048


def test_what_an_interrupted_call_has_plugged_is_left() -> None:
    whole = FakeMonitor(8192)
    whole.plug(4096)
    before = dict(whole.objects), dict(whole.devices), whole.free
    assert whole.plug(4096) == 4096 and (whole.objects, whole.devices, whole.free) == before
    for backend, free, used in (("huge0", 2048, 4096), ("mem0", 8192, 2048)):
        half = FakeMonitor(free)
        half.objects[backend] = {}
        assert half.plug(4096) == used, "its backend was made and no more"
        assert half.devices == {"dimm0": backend, "dimm1": "huge1"}


def test_a_storage_that_hangs_is_out_of_reach_and_delays_the_host_once(
    context: HostContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, copies, back, looks = tmp_path / "own", tmp_path / "copies", threading.Event(), list[Path]()
    for place in (own, copies):
        place.mkdir()
        (place / ".storage").write_text(place.name)
    context.config = replace(context.config, saves=own, copies=copies)
    look = saves.look

    def hang(host: HostContext, place: Path) -> saves.SeenStorage | None:
        looks.append(place)
        return back.wait() and look(host, place) if place == copies else look(host, place)

    monkeypatch.setattr(saves, "look", hang)
    monkeypatch.setattr(observation, "_STORAGE_ANSWERS", 0.05)
    observer = HostObserver(context)
    try:
        for _ in range(3):
            shown = observer.observe().hosts["h"]
            assert shown.storage is not None and shown.storage.name == "own" and shown.copies is None
        assert looks.count(copies) == 1, "it is not asked again before it has answered"
    finally:
        back.set()
    while not (seen := observer.observe().hosts["h"].copies):
        pass
    assert seen.name == "copies"


def test_memory_in_huge_pages_counts_as_taken(context: HostContext, tmp_path: Path) -> None:
    """The kernel shows it in no process's resident memory."""

    one = process.spawn(["sleep", "600"], (), tmp_path / "log", dict(os.environ))
    try:
        shown = {}
        for huge in (0, 4096):
            home = tmp_path / "vms" / "mva-1"
            home.mkdir(parents=True, exist_ok=True)
            known = Manifest("mva-1", CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, one.pid,
                             one.started, one.boot_id, huge_memory=huge)  # fmt: skip
            manifest.write(home, known)
            shown[huge] = HostObserver(context).observe().vms["mva-1"].private
        assert 4096 <= shown[4096] - shown[0] < 4097
    finally:
        process.kill(one)
