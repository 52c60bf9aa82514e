"""No two VMs of a host share a name, token, MAC, address or uid."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiverse.core.errors import Broken, Gone, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity, Neighbour
from multiverse.core.model.vm import VmCondition
from multiverse.guest.protocol import Report
from multiverse.host import manifest, process
from multiverse.host.manifest import Manifest, Specification, VmPhase
from multiverse.host.qemu import lifecycle, saves
from multiverse.host.qemu.context import QemuHostConfig
from multiverse.host.qemu.library import QemuHost
from multiverse.host.registry import Resource, VmRegistry
from multiverse.system.processes import ProcessIdentity

ONE = Specification(
    name="mva-1",
    host="h",
    token="secret-one",
    image="slim",
    kind=CloneKind.LINKED,
    size=Size(1, 256),
    mac="02:00:00:00:00:01",
    address="10.1.2.1/24",
    bridge="br0",
)
TWO = replace(ONE, name="mva-2", token="secret-two", mac="02:00:00:00:00:02", address="10.1.2.2/24")


@pytest.fixture
def config(tmp_path: Path) -> QemuHostConfig:
    """A host whose QEMU prints its version and does nothing else, with an image of empty files."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    image = tmp_path / "images/slim"
    image.mkdir(parents=True)
    for name in ("disk.raw", "vmlinuz", "initrd.img"):
        (image / name).touch()
    facts = {"name": "slim", "flavour": "slim", "key": "k", "base": "b", "path": "", "cmdline": "", "release": "",
             "suite": "", "packages": [], "abilities": ["fork", "plug_cpus", "plug_memory"]}  # fmt: skip
    (image / "image.json").write_text(json.dumps(facts))
    return QemuHostConfig("h", "mva-", Size(1, 256), image.parent, tmp_path / "t", tmp_path / "vms", tmp_path / "run",
                          tmp_path / "cache", str(binary), "tcg")  # fmt: skip


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[ProcessIdentity]:
    """A process that stands for the QEMU of every VM."""
    one = process.spawn(["sleep", "600"], (), tmp_path / "log", dict(os.environ))
    yield one
    process.kill(one)


def record(vms: Path, spec: Specification, qemu: ProcessIdentity, **more: object) -> Manifest:
    """Let a VM exist, as far as the disk tells."""
    known = Manifest(spec.name, spec.kind, VmPhase.PARKED, spec.mac, 1, 256, qemu.pid, qemu.started, qemu.boot_id,
                     address=spec.bare_address, token=spec.token)  # fmt: skip
    known = replace(known, **more)  # type: ignore[arg-type]
    (vms / spec.name).mkdir(parents=True)
    manifest.write(vms / spec.name, known)
    return known


def names(vms: Path) -> set[str]:
    return {path.name for path in vms.glob("mv*")}


@pytest.mark.parametrize(
    ("field", "shown"),
    [("mac", "MAC 02:00:00:00:00:01"), ("address", "address 10.1.2.1"), ("token", "token")],
)
def test_what_another_vm_has_is_refused_and_that_vm_is_named(
    config: QemuHostConfig, qemu: ProcessIdentity, field: str, shown: str
) -> None:
    record(config.vms, ONE, qemu)
    host = QemuHost(config)
    clashing = replace(TWO, **{field: getattr(ONE, field)})
    with pytest.raises(Refused) as caught:
        host.create(clashing)
    assert "mva-2" in caught.value.message and "mva-1" in caught.value.message and shown in caught.value.message
    assert "mva-1" in caught.value.hint and ONE.token not in str(caught.value)
    assert names(config.vms) == {"mva-1"}, "nothing is left of a VM that was refused"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"token": "secret-other"}, "token"),
        ({"token": ""}, "token"),
        ({"mac": TWO.mac}, "MAC"),
        ({"address": TWO.address}, "address"),
        ({"kind": CloneKind.FULL}, "kind"),
    ],
)
@pytest.mark.parametrize("phase", [VmPhase.CREATING, VmPhase.PARKED, VmPhase.STARTED])
def test_a_name_in_use_by_another_vm_is_refused(
    config: QemuHostConfig, qemu: ProcessIdentity, change: dict[str, object], shown: str, phase: VmPhase
) -> None:
    known = record(config.vms, ONE, qemu, phase=phase)
    with pytest.raises(Refused, match=rf"mva-1.*another {shown}"):
        QemuHost(config).create(replace(ONE, **change))  # type: ignore[arg-type]
    assert manifest.read(config.vms / "mva-1") == known and qemu.is_alive()


def test_the_same_specification_again_is_success_and_a_dead_vm_is_broken(
    config: QemuHostConfig, qemu: ProcessIdentity
) -> None:
    record(config.vms, ONE, qemu)
    host = QemuHost(config)
    assert host.create(ONE) == []
    process.kill(qemu)
    with pytest.raises(Broken, match="mva-1 is dead"):
        host.create(ONE)


def test_a_vm_that_has_no_address_yet_matches_any(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    record(config.vms, ONE, qemu, address="")
    assert QemuHost(config).create(ONE) == []


def test_a_manifest_with_fields_of_a_later_release_is_read(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    known = record(config.vms, ONE, qemu)
    (config.vms / ONE.name / manifest.FILE).write_text(json.dumps(asdict(known) | {"of a later release": [1]}))
    assert manifest.read(config.vms / ONE.name) == known


def test_an_observation_shows_the_token_of_each_vm(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    record(config.vms, ONE, qemu)
    record(config.vms, TWO, qemu, token="", phase=VmPhase.CREATING)
    (config.vms / "mva-3").mkdir()
    host = QemuHost(config)
    assert {name: vm.token for name, vm in host.observe().vms.items()} == {"mva-1": ONE.token, "mva-2": "", "mva-3": ""}
    process.kill(qemu)
    seen = host.observe().vms["mva-1"]
    assert (seen.condition, seen.token) == (VmCondition.DEAD, ONE.token), "a dead VM is still the same VM"


def test_a_manifest_of_a_later_release_can_be_read(tmp_path: Path) -> None:
    known = Manifest("mva-1", CloneKind.LINKED, VmPhase.PARKED, ONE.mac, 1, 256)
    (tmp_path / manifest.FILE).write_text(json.dumps(asdict(known) | {"novelty": [1]}))
    assert manifest.read(tmp_path) == known


def test_another_identity_is_refused_at_the_start(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    record(config.vms, ONE, qemu)
    host = QemuHost(config)
    own = Identity(hostname=ONE.name, mac=ONE.mac, address=ONE.address, gateway="", machine_id="0" * 32)
    for other in (replace(own, hostname="mva-2"), replace(own, mac=TWO.mac), replace(own, address=TWO.address)):
        with pytest.raises(Refused, match="mva-1"):
            host.start(ONE.name, ONE.size, other)
    with pytest.raises(Gone, match="mva-3"):
        host.start("mva-3", ONE.size, replace(own, hostname="mva-3"))


def test_an_address_that_is_known_at_the_start_only_is_refused_if_another_vm_has_it(
    config: QemuHostConfig, qemu: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(config.vms, ONE, qemu)
    record(config.vms, replace(TWO, address=""), qemu, kind=CloneKind.LINKED)
    host = QemuHost(config)
    monkeypatch.setattr(host._context.connections, "session", lambda known: None)
    own = Identity(hostname=TWO.name, mac=TWO.mac, address=ONE.address, gateway="", machine_id="0" * 32)
    with pytest.raises(Refused, match=r"mva-2.*10\.1\.2\.1.*mva-1"):
        host.start(TWO.name, TWO.size, own)
    known = manifest.read(config.vms / TWO.name)
    assert known is not None and (known.phase, known.address) == (VmPhase.PARKED, "")


def test_names_that_are_not_of_this_site_are_refused(config: QemuHostConfig) -> None:
    host = QemuHost(config)
    for name in ("", "mva-", "mvb-1", "mva-../../etc", "mva-1234567890123", "mva-\u0661"):
        for call in (lambda name: host.create(replace(ONE, name=name)), lambda name: host.destroy(name, 0)):
            with pytest.raises(Refused, match="no VM of this site"):
                call(name)
    assert names(config.vms) == set()


def test_the_registry_follows_what_other_processes_do(tmp_path: Path, qemu: ProcessIdentity) -> None:
    registry = VmRegistry(tmp_path)
    registry.refresh()
    assert registry.holder(Resource.MAC, ONE.mac) == ""
    record(tmp_path, ONE, qemu)
    known = record(tmp_path, replace(TWO, address=""), qemu)
    (tmp_path / "mva-3").mkdir()  # its creation was begun
    registry.refresh()
    assert registry.holder(Resource.MAC, ONE.mac) == "mva-1" and registry.holder(Resource.ADDRESS, "10.1.2.2") == ""
    manifest.write(tmp_path / "mva-2", replace(known, address="10.1.2.2"))  # it was started
    manifest.write(tmp_path / "mva-3", replace(known, name="mva-3", mac="02:00:00:00:00:03", token="secret-three"))
    registry.refresh()
    assert registry.holder(Resource.ADDRESS, "10.1.2.2") == "mva-2"
    assert registry.holder(Resource.TOKEN, "secret-three") == "mva-3"
    registry.check_free("mva-1", {Resource.MAC: ONE.mac, Resource.ADDRESS: "", Resource.TOKEN: "new"})
    shutil.rmtree(tmp_path / "mva-1")
    registry.refresh()
    registry.check_free("mva-9", {Resource.MAC: ONE.mac, Resource.ADDRESS: "10.1.2.1", Resource.TOKEN: ONE.token})


def test_an_interrupted_creation_is_done_again_with_the_same_specification(
    config: QemuHostConfig, qemu: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(config.vms, ONE, qemu, phase=VmPhase.CREATING, pid=0)
    (config.vms / ONE.name / "disk.qcow2").touch()
    begun: list[list[str]] = []

    def created(host: object, spec: Specification, *_more: object) -> object:
        begun.append(sorted(path.name for path in (config.vms / spec.name).iterdir()))
        raise Broken("far enough")

    monkeypatch.setattr(lifecycle, "_create", created)
    with pytest.raises(Broken, match="far enough"):
        QemuHost(config).create(ONE)
    assert begun == [[]], "what the interrupted creation left was removed first"


def test_a_vm_with_another_token_is_not_destroyed(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    """A database that was restored from a copy gives the same name again, and another token."""
    record(config.vms, ONE, qemu)
    host = QemuHost(config)
    with pytest.raises(Refused, match="mva-1 is another VM") as caught:
        host.destroy("mva-1", 0, "secret-other")
    assert str(qemu.pid) in caught.value.hint and "secret" not in str(caught.value)
    assert qemu.is_alive() and names(config.vms) == {"mva-1"}
    host.destroy("mva-1", 0, ONE.token)
    assert not qemu.is_alive() and names(config.vms) == set()


def test_a_vm_with_another_token_gets_no_neighbours(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    record(config.vms, ONE, qemu)
    host, added = QemuHost(config), list[str]()
    there = [Neighbour("10.9.0.3", "02:00:00:00:00:03", "192.0.2.2")]
    host._context.vxlan = SimpleNamespace(add=lambda name, _: added.append(name))  # type: ignore[assignment]
    with pytest.raises(Refused, match="mva-1 is another VM"):
        host.connect("mva-1", there, "secret-other")
    assert added == []
    host.connect("mva-1", there, ONE.token)
    assert added == ["mva-1"]
    QemuHost(config).destroy("mva-1", 0)


def test_an_orphan_is_destroyed_whatever_its_token(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    record(config.vms, ONE, qemu)
    QemuHost(config).destroy("mva-1", 0)
    assert names(config.vms) == set()


def test_a_vm_that_is_kept_in_memory_is_taken_over_by_a_token_of_its_own(
    config: QemuHostConfig, qemu: ProcessIdentity
) -> None:
    record(config.vms, ONE, qemu, kept="mva-1-5", saved="mva-1-5")
    host, later = QemuHost(config), replace(ONE, token="secret-later", saved="mva-1-5")
    for wrong in (replace(later, saved="mva-1-6"), replace(later, mac=TWO.mac)):
        with pytest.raises(Refused):
            host.create(wrong)
    for _ in range(2):
        assert host.create(later) == []
    known = manifest.read(config.vms / "mva-1")
    assert known is not None and (known.token, known.kept, known.saved) == ("secret-later", "", "mva-1-5")
    for call in (host.freeze, host.cut, host.thaw):
        with pytest.raises(Refused, match="another token"):
            call("mva-1", ONE.token)
    with pytest.raises(Refused, match="another token"):
        host.destroy("mva-1", 0.0, ONE.token)


class Guest:
    """A guest, and its QEMU's status. It answers everything that is asked of it."""

    def __init__(self, status: str) -> None:
        self.status, self.asked = status, list[str]()

    @contextmanager
    def monitor(self, *_: object) -> Iterator[Guest]:
        yield self

    def execute(self, command: str) -> dict[str, object]:
        assert command == "query-status"
        return {"status": self.status, "running": self.status == "running"}

    def ask(self, message: bytes, answer: str, timeout: float, *, or_else: str) -> Report:
        self.asked.append(json.loads(message)["type"])
        return Report(answer)


@pytest.mark.parametrize("step", ["save", "keep"])
@pytest.mark.parametrize(
    ("status", "asked"),
    [
        pytest.param("running", ["cut", "rest"], id="somebody else may have queued its job again"),
        pytest.param("postmigrate", [], id="an earlier call has stopped it"),
        pytest.param("paused", [], id="an earlier call has stopped it, and was not done"),
        pytest.param("io-error", None, id="it is paused, because the disk of its host is full"),
    ],
)
def test_a_job_is_cut_off_before_its_vm_is_stopped(
    config: QemuHostConfig,
    qemu: ProcessIdentity,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    status: str,
    asked: list[str] | None,
) -> None:
    """Seed 63030 of saving: what is frozen and not cut off belongs to a run that is over."""
    record(config.vms, ONE, qemu, phase=VmPhase.STARTED, frozen=True)
    guest, host, done = Guest(status), QemuHost(config), list[str]()
    monkeypatch.setattr(saves.Monitor, "connect", guest.monitor)
    monkeypatch.setattr(host._context.connections, "started_channel", lambda name: guest)
    monkeypatch.setattr(saves, step, lambda *_: done.append(step))
    if asked is None:
        with pytest.raises(Unknown, match="the disk of its host is full"):
            getattr(host, step)("mva-1", ONE.token, "mva-1-5")
    else:
        getattr(host, step)("mva-1", ONE.token, "mva-1-5")
    assert guest.asked == (asked or []) and done == [step] * (asked is not None)
