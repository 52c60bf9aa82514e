"""The doctor on the lab: each thing is broken for real, and is the one new finding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from multiverse.client import Client
from multiverse.config import Settings
from multiverse.drivers.slurm.site.requirements import Finding
from multiverse.service.doctor import examine
from tests.integration.conftest import LabUnderTest
from tests.integration.test_users import command
from tests.integration.watch import until

pytestmark = pytest.mark.integration

HERE = "inbox, bridge, image and munge key"
"""The name of the examination of what this machine needs for Slurm's sake."""


def findings(lab: LabUnderTest, settings: Settings, slurm_conf: Path) -> dict[tuple[str, str], Finding]:
    """By examination and name."""
    with mock.patch.dict(os.environ, lab.env):
        found = list(examine(settings, lab.where.settings, slurm_conf, kvm=False))
    return {(one.name, each.name): each for one in found for each in one.findings}


VARYING = "are available now"
"""What the machine has left for the lab's VMs changes with all that runs on it."""


class Doctor:
    """Examines the lab's machine, and knows what it finds there before anything is broken. The daemon has to know how
    the host runs guests: it may just have been started."""

    def __init__(self, lab: LabUnderTest) -> None:
        self.lab, self.settings, self.conf = lab, lab.settings, lab.where.slurm_conf
        until(
            "the host is observed", lambda: [one for one in Client(self.settings.socket).hosts() if one["accelerator"]]
        )
        self.before = findings(lab, self.settings, self.conf)

    def new(self, settings: Settings | None = None, conf: Path | None = None) -> dict[tuple[str, str], Finding]:
        after = findings(self.lab, settings or self.settings, conf or self.conf)
        return {
            key: value for key, value in after.items() if self.before.get(key) != value and VARYING not in value.message
        }


@pytest.fixture(scope="module")
def doctor(lab: LabUnderTest, controller: Callable[[], int]) -> Doctor:
    return Doctor(lab)


def test_the_lab_lacks_only_what_a_site_installs(doctor: Doctor) -> None:
    allowed = {
        "slurm.conf", "files", "job_submit.lua and epilog", HERE, "KVM runs guests",
        "QEMU and programs", "clock", "CPUs", "memory", "disk", "alerts", "cgroups", "kernel",
    }  # fmt: skip
    hosts = {f"host {one['name']}" for one in Client(doctor.settings.socket).hosts()}
    assert {examined for examined, _ in doctor.before} <= allowed | hosts, doctor.before
    assert all(each.remedy and each.message for each in doctor.before.values())
    for well in ("munge", "slurmctld", "slurmd in the guests", "reservations", "port of slurmctld", "node sets"):
        assert not [key for key in doctor.before if key[0] == well]


def _with_line(doctor: Doctor, place: Path, line: str) -> Path:
    """A copy of the lab's slurm.conf with one more line, which takes the place of earlier ones of its key."""
    key = line.partition("=")[0]
    for each in doctor.conf.parent.glob("*.conf"):
        if each.name != "slurmdbd.conf":
            shutil.copy(each, place)
    text = (place / doctor.conf.name).read_text()
    kept = [one for one in text.splitlines() if not one.startswith(f"{key}=") or key == "NodeSet"]
    (place / doctor.conf.name).write_text("\n".join([line, *kept]) + "\n")
    return place / doctor.conf.name


@pytest.mark.parametrize(
    ("line", "examined", "name"),
    [
        ("NodeSet=mine Feature=vm", "node sets", "NodeSet=mine"),
        ("SlurmctldHost=nohost.invalid", "name service", "SlurmctldHost=nohost.invalid"),
        ("SlurmctldPort=1", "port of slurmctld", "{gateway}:1"),
        ("JobSubmitPlugins=none", "slurm.conf", "JobSubmitPlugins"),
        ("MaxNodeCount=2", "slurm.conf", "MaxNodeCount"),
        ("TreeWidth=50", "slurm.conf", "TreeWidth"),
        ("SelectType=select/linear", "slurm.conf", "SelectType"),
    ],
)
def test_a_line_of_slurm_conf_that_is_wrong_is_found(
    doctor: Doctor, tmp_path: Path, line: str, examined: str, name: str
) -> None:
    if name == "TreeWidth" and "22.05" not in doctor.lab.run("scontrol", "--version").stdout:
        pytest.skip("only Slurm before 23.11 needs it")
    new = doctor.new(conf=_with_line(doctor, tmp_path, line))
    expected = (examined, name.format(gateway=doctor.settings.network.gateway))
    assert expected in new, new
    assert new[expected].remedy


def test_what_is_wrong_with_this_machine_is_found(doctor: Doctor, tmp_path: Path) -> None:
    settings, qemu, host = doctor.settings, doctor.settings.qemu, doctor.settings.host
    plain, inbox = tmp_path / "templates", tmp_path / "inbox"
    plain.mkdir()
    inbox.mkdir(mode=0o700)
    cases: dict[tuple[str, str], Settings] = {
        ("QEMU and programs", "/bin/false"): replace(settings, qemu=replace(qemu, binary="/bin/false")),
        ("memory", "host.memory"): replace(settings, host=replace(host, memory=1 << 30)),
        ("CPUs", "host.cores"): replace(settings, host=replace(host, cores=5000)),
        ("disk", "host.disk"): replace(settings, host=replace(host, disk=1 << 40)),
        ("disk", str(qemu.vms)): replace(settings, host=replace(host, disk_floor=1 << 40)),
        ("disk", "/proc"): replace(settings, qemu=replace(qemu, templates=Path("/proc"))),
        (HERE, str(inbox)): replace(settings, slurm=replace(settings.slurm, inbox=inbox)),
        (HERE, "/nowhere"): replace(settings, slurm=replace(settings.slurm, munge_key=Path("/nowhere"))),
        (HERE, "none"): replace(settings, image=replace(settings.image, default="none")),
        (HERE, "nobridge"): replace(settings, qemu=replace(qemu, bridge="nobridge")),
        ("daemon", "multiverse.service"): replace(settings, socket=tmp_path / "none.sock"),
    }  # fmt: skip
    for expected, changed in cases.items():
        new = doctor.new(changed)
        assert expected in new, (expected, new)
    open_to_all = tmp_path / "vms"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert ("rights and directories", "directories") in doctor.new(
        replace(settings, qemu=replace(qemu, vms=open_to_all))
    )


def test_an_image_with_another_slurm_is_found(doctor: Doctor, tmp_path: Path) -> None:
    (source,) = (one.parent for one in doctor.settings.qemu.images.glob("slim/image.json"))
    image, tree = tmp_path / "images/slim", tmp_path / "tree/var/lib/dpkg"
    image.mkdir(parents=True)
    tree.mkdir(parents=True)
    for name in ("image.json", "vmlinuz", "initrd.img"):
        shutil.copy(source / name, image)
    (tree / "status").write_text("Package: slurmd\nVersion: 99.11.1\n\n")
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tmp_path / "tree", image / "disk.raw", "8M"], check=True)
    settings = doctor.settings
    new = doctor.new(replace(settings, qemu=replace(settings.qemu, images=image.parent)))
    assert "newer than slurmctld" in new["slurmd in the guests", "image slim"].message
    assert {examined for examined, _ in new} <= {"slurmd in the guests", "rights and directories"}, new


@contextmanager
def _reservation(lab: LabUnderTest) -> Iterator[None]:
    made = ("ReservationName=caught", "StartTime=now+1hour", "Duration=10", "Users=root", "Nodes=mvgate1")
    lab.run("scontrol", "create", *made)
    try:
        yield
    finally:
        lab.run("scontrol", "delete", "ReservationName=caught")


def test_a_reservation_that_holds_the_gate_is_found(doctor: Doctor) -> None:
    with _reservation(doctor.lab):
        new = doctor.new()
    assert set(new) == {("reservations", "ReservationName=caught")}
    assert not doctor.new()


def test_a_munged_that_does_not_answer_is_found(doctor: Doctor, tmp_path: Path) -> None:
    conf = _with_line(doctor, tmp_path, f"AuthInfo=socket={tmp_path}/munge")
    new = doctor.new(replace(doctor.settings, slurm=replace(doctor.settings.slurm, conf=conf)))
    assert "munge: Error" in new["munge", "munge"].message


def test_a_host_that_is_drained_is_found_through_the_daemon(doctor: Doctor, client: Client) -> None:
    (host,) = (one["name"] for one in client.hosts())
    client.change_hosts("drain", host, reason="new fans")
    try:
        until("it is drained", lambda: client.hosts()[0]["state"] in ("draining", "drained"))
        new = doctor.new()
        assert "new fans" in new[f"host {host}", f"host {host}"].message
    finally:
        client.change_hosts("resume", host)
        until("it is up", lambda: client.hosts()[0]["state"] == "up")


def test_the_command_prints_the_same_for_people_and_programs(lab: LabUnderTest, controller: Callable[[], int]) -> None:
    document: Any = json.loads(command(lab, 0, "doctor", "--no-kvm", "--json").stdout)
    names = [one["name"] for one in document]
    assert len(names) == len(set(names)) and {"munge", "memory", "ports of the daemon", "alerts"} <= set(names)
    nobody = command(lab, 65534, "doctor", "--no-kvm")
    assert nobody.returncode != 0 and "Traceback" not in nobody.stderr
