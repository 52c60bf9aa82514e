"""Each finding of the doctor appears if exactly that is broken, and has a remedy."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, PackageLoader
from typer.main import get_command

from multiverse.api import Alert, HostView, SizeView, StatusView
from multiverse.bundles.slurm import scheduler as of_slurm
from multiverse.cli.commands import build
from multiverse.config import (
    AgentSettings,
    HostSettings,
    JobVmSettings,
    QemuSettings,
    SaveSettings,
    Settings,
    SlurmSettings,
    UsersSettings,
    WebSettings,
)
from multiverse.core.errors import Unknown
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import install, requirements
from multiverse.drivers.slurm.site.conf import SiteConf, kill_wait, munge_socket
from multiverse.drivers.slurm.site.requirements import Finding, Level, Version
from multiverse.host.virtual_functions import VirtualFunction
from multiverse.images.catalog import package_version
from multiverse.service import alerts, doctor
from multiverse.service.lab_advice import in_lab
from multiverse.site import checking, machine
from multiverse.site.machine import FileSystem, MachineFacts
from multiverse.system import kernel

GOOD = MachineFacts(
    qemu="QEMU emulator version 9.0.1",
    kvm="",
    memory=65536,
    memory_available=60000,
    cpus=64,
    state=FileSystem(Path("/var/lib/multiverse"), "ext4", 100_000, 50_000),
    vms=FileSystem(Path("/var/lib/multiverse/vms"), "ext4", 100_000, 50_000),
    templates=FileSystem(Path("/dev/shm/multiverse/templates"), "tmpfs", 30_000, 30_000),
    clock=True,
)
SETTINGS = Settings(host=HostSettings(cores=8, memory=16384, disk=65536))


def found(facts: MachineFacts, settings: Settings = SETTINGS) -> list[Finding]:
    return [each for _, findings in machine.examine(settings, facts) for each in findings]


def test_a_machine_that_has_everything_has_no_finding() -> None:
    assert found(GOOD) == []
    assert found(replace(GOOD, iommu=False)) == [], "nothing needs an IOMMU"


FUNCTION = VirtualFunction("0000:3b:02.0", "8086:154c", "0000:3b:00.0", 7, "iavf", Path("/sys/devices/x"))


@pytest.mark.parametrize(
    ("broken", "level", "words"),
    [
        ({"iommu": False}, Level.PROBLEM, "the kernel uses no IOMMU"),
        ({"functions": ()}, Level.PROBLEM, "there is no virtual function of ens1"),
        ({"functions": (replace(FUNCTION, problem="it cannot be reset"),)}, Level.NOTE, "it cannot be reset"),
    ],
)
def test_what_virtual_functions_lack_is_found_where_they_are_offered(
    broken: dict[str, Any], level: Level, words: str
) -> None:
    settings = replace(SETTINGS, job_vms=JobVmSettings(sriov=("ens1",)))
    good = replace(GOOD, functions=(FUNCTION,))
    assert found(good, settings) == []
    (finding,) = found(replace(good, **broken), settings)
    assert finding.level is level and words in finding.message and finding.remedy


def test_what_a_host_lacks_to_let_vms_sleep_is_found_where_they_are_to() -> None:
    lacks = replace(GOOD, stand_in=("slurmd",))
    assert found(lacks) == []
    sleep = replace(SETTINGS, save=SaveSettings(enabled=True, sleep_after=60.0))
    assert found(GOOD, sleep) == []
    (finding,) = found(lacks, sleep)
    assert finding.level is Level.PROBLEM and "no program slurmd" in finding.message and finding.remedy


BROKEN: list[tuple[dict[str, Any], Level, str, str]] = [
    ({"root": False}, Level.PROBLEM, "root", "not root"),
    ({"unsafe": (("others may write to /x", "chmod go-w /x"),)}, Level.PROBLEM, "directories", "others may write"),
    ({"qemu": "", "qemu_error": "cannot run qemu"}, Level.PROBLEM, "qemu-system-x86_64", "cannot run qemu"),
    ({"qemu": "QEMU emulator version 6.2.0"}, Level.PROBLEM, "qemu-system-x86_64", "older than 7.2"),
    ({"qemu": "QEMU emulator version 7.2.9"}, Level.NOTE, "qemu-system-x86_64", "twice"),
    ({"programs": ("qemu-img",)}, Level.PROBLEM, "qemu-img", "no program qemu-img"),
    ({"programs": ("unmunge",)}, Level.PROBLEM, "unmunge", "no program unmunge"),
    ({"kvm": "a small guest had not finished"}, Level.NOTE, "KVM", "emulated"),
    ({"tun": "No such file or directory"}, Level.PROBLEM, "/dev/net/tun", "cannot be opened"),
    ({"net_namespaces": 0}, Level.PROBLEM, "user.max_net_namespaces", "no network namespaces"),
    ({"cgroups": False}, Level.NOTE, "cgroups", "no control group"),
    ({"libraries": ("libnftables.so.1",)}, Level.PROBLEM, "libnftables.so.1", "is missing"),
    ({"cpus": 4}, Level.NOTE, "host.cores", "has 4"),
    ({"memory": 8192, "memory_available": 8000}, Level.PROBLEM, "host.memory", "the machine has 8192"),
    ({"memory_available": 9000}, Level.NOTE, "host.memory", "9000 MiB are available"),
    ({"vms": FileSystem(Path("/v"), "ext4", 100_000, 1000)}, Level.PROBLEM, "/v", "no VM is added"),
    ({"vms": FileSystem(Path("/v"), "ext4", 60_000, 50_000)}, Level.PROBLEM, "host.disk", "has 60000 MiB"),
    ({"state": FileSystem(Path("/s"), "ext4", 1000, 100)}, Level.PROBLEM, "/s", "for the database"),
    ({"templates": FileSystem(Path("/t"), "ext4", 9000, 9000)}, Level.PROBLEM, "/t", "this is ext4"),
    ({"templates": FileSystem(Path("/t"), "tmpfs", 9000, 100)}, Level.PROBLEM, "/t", "a template takes 288"),
    ({"clock": False}, Level.NOTE, "clock", "nothing keeps the clock right"),
]


@pytest.mark.parametrize(("change", "level", "name", "message"), BROKEN)
def test_what_is_broken_on_a_machine_is_the_one_finding(
    change: dict[str, Any], level: Level, name: str, message: str
) -> None:
    (only,) = found(replace(GOOD, **change))
    assert (only.level, only.name) == (level, name) and message in only.message and only.remedy


def test_a_cpu_model_that_the_host_does_not_run_is_a_problem() -> None:
    settings = replace(SETTINGS, qemu=QemuSettings(cpu="Skylake-Server-v4"))
    (only,) = found(replace(GOOD, model="this CPU lacks avx512f"), settings)
    assert (only.level, only.name) == (Level.PROBLEM, "qemu.cpu")
    assert "not the model Skylake-Server-v4: this CPU lacks avx512f" in only.message


def test_the_model_is_proposed_with_which_vms_would_move_between_all_hosts() -> None:
    hosts = [replace(HOST, name=f"h{number}", common_cpu="Haswell-v2") for number in (1, 2)]
    (only,) = doctor.of_cpus([*hosts, replace(HOST, name="h3")])
    assert "h[1-2]" in only.name and 'cpu = "Haswell-v2"' in only.remedy
    assert not list(doctor.of_cpus([HOST]))


def test_kvm_that_the_settings_insist_on_is_a_problem() -> None:
    (only,) = found(replace(GOOD, kvm="it hangs"), replace(SETTINGS, qemu=QemuSettings(accel="kvm")))
    assert only.level is Level.PROBLEM and "it hangs" in only.message


def test_what_cannot_be_known_is_no_finding() -> None:
    assert found(replace(GOOD, kvm=None, clock=None, state=None, vms=None, templates=None)) == []


def test_facts_of_this_machine_are_those_that_other_commands_show(tmp_path: Path) -> None:
    qemu = QemuSettings(binary="/nowhere/qemu", vms=tmp_path / "a/b", templates=Path("/dev/shm/none"))
    facts = machine.of_machine(Settings(qemu=qemu, state_dir=tmp_path), kvm=False)
    shown = subprocess.run(["df", "-m", "--output=size,fstype", tmp_path], capture_output=True, text=True, check=True)
    size, kind = shown.stdout.split()[-2:]
    assert facts.vms is not None and (facts.vms.total, facts.vms.kind) == (pytest.approx(int(size), abs=1), kind)
    assert facts.templates is not None and facts.templates.in_memory
    meminfo = Path("/proc/meminfo").read_text().split()
    assert facts.memory == int(meminfo[1]) // 1024
    assert "cannot run /nowhere/qemu" in facts.qemu_error and facts.kvm is None
    assert kernel.is_synchronised() in (True, False, None)


def test_directories_that_others_can_change_are_found(tmp_path: Path) -> None:
    vms = tmp_path / "vms"
    vms.mkdir()
    vms.chmod(0o777)
    facts = machine.of_machine(Settings(qemu=QemuSettings(vms=vms, images=tmp_path / "none")), kvm=False)
    assert any(str(vms) in message and hint for message, hint in facts.unsafe)


# --- Slurm -------------------------------------------------------------------------------------------

SLURM = SlurmSettings()


@pytest.mark.parametrize(
    ("release", "slurmd", "level", "message"),
    [
        ((22, 5), "22.05.8-4+deb12u3", None, ""),
        ((23, 2), "22.05.8", None, ""),
        ((23, 11), "22.05.8", None, ""),
        ((24, 5), "22.05.8", Level.PROBLEM, "3 releases behind"),
        ((24, 11), "23.02.1", None, ""),
        ((24, 11), "22.05.8", Level.PROBLEM, "4 releases behind"),
        ((22, 5), "23.02.1", Level.PROBLEM, "newer than slurmctld 22.05"),
        ((24, 11), "1:24.11.3-2", None, ""),
        ((25, 5), None, Level.NOTE, "nobody can tell"),
        ((25, 5), "19.05.1", Level.NOTE, "nobody has tried these together"),
    ],
)
def test_slurmd_in_an_image_is_of_a_release_that_slurmctld_accepts(
    release: tuple[int, int], slurmd: str | None, level: Level | None, message: str
) -> None:
    findings = list(requirements.guests(Version(*release), {"slim": slurmd}))
    assert [each.level for each in findings] == ([level] if level else [])
    assert all(message in each.message and each.name == "image slim" and each.remedy for each in findings)


def test_a_node_set_that_would_catch_vms_is_found() -> None:
    text = f"NodeSet={install.NODE_SET} Feature=vm\nNodeSet=all Nodes=n[1-9]\nNodeSet=mine Feature=vm\n"
    text += "NodeSet=g Feature=mvgate,x\nNodeSet=other Feature=vmware\n"
    assert [each.name for each in requirements.node_sets(SLURM, SiteConf(text))] == ["NodeSet=mine", "NodeSet=g"]
    assert list(requirements.node_sets(SlurmSettings(node_feature="a", gate_feature="b"), SiteConf(text))) == []


def test_a_reservation_that_would_catch_jobs_at_the_gate_is_found() -> None:
    shown = (
        "ReservationName=maint StartTime=2026-11-24T00:00:00 EndTime=2026-11-25T00:00:00 Nodes=mvgate[1-250],n[1-9]"
        " PartitionName=(null) Flags=MAINT\n"
        "ReservationName=course StartTime=a EndTime=b Nodes=n[1-3] PartitionName=batch Flags=\n"
        "ReservationName=all StartTime=a EndTime=b Nodes=(null) PartitionName=vm Flags=\n"
        "No reservations in the system\n"
    )
    findings = list(requirements.reservations(SLURM, shown))
    assert [each.name for each in findings] == ["ReservationName=maint", "ReservationName=all"]
    assert "nodes of the gate from 2026-11-24T00:00:00" in findings[0].message
    assert "the partition vm from" in findings[1].message
    assert list(requirements.reservations(SLURM, "No reservations in the system\n")) == []


def test_a_slurmctld_that_the_name_service_does_not_know_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteConf("SlurmctldHost=here\nSlurmctldHost=there(192.0.2.9)\n")

    def known(name: str, _port: None) -> list[str]:
        if name == "there":
            raise OSError(-2, "Name or service not known")
        return []

    monkeypatch.setattr(of_slurm.socket, "getaddrinfo", known)
    (only,) = of_slurm.names(site)
    assert only.name == "SlurmctldHost=there" and "not known" in only.message and "getent" in only.remedy


def test_a_slow_name_service_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 5.0))
    monkeypatch.setattr(of_slurm.socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(of_slurm.time, "monotonic", lambda: next(times))
    (only,) = of_slurm.names(SiteConf("SlurmctldHost=here\n"))
    assert only.level is Level.NOTE and "took 5.0 s" in only.message


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_ports_at_which_nobody_answers_are_found(port: int) -> None:
    def ports(slurmctld: int, users: int, web: int = 0) -> list[str]:
        slurm = SlurmSettings(controller_address="127.0.0.1")
        page = WebSettings(listen=f"127.0.0.1:{web}" if web else "")
        settings = Settings(slurm=slurm, users=UsersSettings(listen="127.0.0.1", port=users), web=page)
        site = SiteConf(f"SlurmctldPort={slurmctld}-{slurmctld + 1}\n")
        return [each.name for each in (*of_slurm._slurmctld_port(settings, site), *doctor._ports(settings))]

    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    assert ports(port, port) == []
    assert ports(closed, port) == [f"127.0.0.1:{closed}"]
    assert ports(port, closed) == [f"127.0.0.1:{closed}"]
    assert ports(port, port, web=port) == []
    assert ports(port, port, web=closed) == [f"127.0.0.1:{closed}"]


@pytest.mark.parametrize("agent", [False, True])
def test_a_lab_is_not_told_to_become_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    config = tmp_path / "etc" / "multiverse.toml"
    slurm = SlurmSettings(conf=config.with_name("slurm.conf"), inbox=tmp_path / "inbox")
    settings = Settings(slurm=slurm, socket=tmp_path / "api.sock", agent=AgentSettings(socket=tmp_path / "agent.sock"))
    config.parent.mkdir()
    slurm.conf.write_text("ClusterName=c\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\n")
    monkeypatch.setattr(of_slurm.checking, "release_of", lambda _: Version(22, 5))
    monkeypatch.setattr(doctor, "platform_bundles", lambda _: {})

    async def silent(*_: object) -> str:  # as after the 40 s for which scontrol waits for a slurmctld
        raise Unknown("slurmctld does not answer")

    monkeypatch.setattr(of_slurm.SlurmCommands, "run", silent)

    def examined() -> str:
        found = doctor.examine_agent(settings, config) if agent else doctor.examine(settings, config, slurm.conf)
        return "\n".join(map(repr, found))

    config.write_text("")
    assert "run multiverse site render /" in examined() and "systemctl enable --now multiverse" in examined()
    template = PackageLoader("multiverse_lab.lab").get_source(Environment(), "multiverse.toml")[0]
    config.write_text(template.splitlines()[0])
    of_lab = examined()
    assert "systemctl" not in of_lab and "multiverse site" not in of_lab
    assert f"this is the lab in {tmp_path}: " in of_lab and f"multiverse lab up --dir {tmp_path}, and see" in of_lab


def test_a_labs_user_is_told_what_lab_up_does_and_never_of_files_or_services_of_a_site() -> None:
    lab = Path("/lab")
    for advice, own in (
        ("set cores = 2 in [host], or in this host's class, unless that is meant", "--cores 2, unless that is meant"),
        ("set memory = 900 or less in [host], or in the host's class", "--memory 900M"),
        ('make KVM work, or set accel = "auto" in [qemu]', '--set qemu.accel="auto"'),
    ):
        assert in_lab(lab, advice).endswith(f"multiverse lab up --dir /lab {own}")
    assert in_lab(lab, "see: systemctl status multiverse-agent; bye") == "see: multiverse lab status --dir /lab; bye"
    for verb in ("start", "restart", "reload", "enable --now"):
        assert in_lab(lab, f"do it: systemctl {verb} multiverse") == "do it: multiverse lab up --dir /lab"
    every = [one for one in vars(alerts).values() if isinstance(one, alerts.Wrong)]
    assert len(every) > 20 and not [one for one in every if "systemctl" in in_lab(lab, one.remedy)]
    machines = [replace(GOOD, cpus=4, memory=100, memory_available=90), replace(GOOD, kvm="it hangs")]
    remedies = [in_lab(lab, each.remedy) for facts in machines for each in found(facts)]
    assert len(remedies) == 3 and not [one for one in remedies if "[" in one or "class" in one]


def test_a_slurmctld_that_is_down_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "multiverse.toml"
    slurm = SlurmSettings(conf=config.with_name("slurm.conf"), inbox=tmp_path / "inbox")
    slurm.conf.write_text("ClusterName=c\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\n")
    monkeypatch.setattr(of_slurm.checking, "release_of", lambda _: Version(22, 5))
    waited = []

    async def hangs(_argv: object, _env: object, timeout: float) -> None:
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(SlurmCommands.__init__, "__defaults__", (None, hangs))
    found = {one.name: one for one in of_slurm.SLURM.examine(Settings(slurm=slurm), config, slurm.conf)}
    assert waited == [checking.PATIENCE]
    (only,) = found["slurmctld"].findings
    assert only.message == "slurmctld does not answer: scontrol did not end within 5 s" and "see its log" in only.remedy
    assert {found[name].skipped for name in ("slurmd in the guests", "reservations")} == {"slurmctld does not answer"}
    assert found["node sets"].skipped == ""


def test_the_munge_that_slurm_uses_is_the_one_that_is_tried(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"ClusterName=c\nAuthInfo=cred_expire=60,socket={tmp_path}/munge\n")
    assert munge_socket(conf) == tmp_path / "munge"
    (only,) = of_slurm._munge(Settings(slurm=SlurmSettings(conf=conf)))
    assert only.name == "munge" and str(tmp_path) in only.message
    conf.write_text("ClusterName=c\n")
    assert munge_socket(conf) is None and munge_socket(tmp_path / "none") is None


@pytest.mark.parametrize(("text", "seconds"), [("KillWait=90", 90.0), ("KillWait=1", 5.0), ("", 30.0)])
def test_how_long_slurmd_waits_before_it_kills_is_in_slurm_conf(tmp_path: Path, text: str, seconds: float) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"ClusterName=site\n{text}\n")
    assert kill_wait(conf) == seconds and kill_wait(tmp_path / "none") == 0.0


@pytest.mark.skipif(shutil.which("mke2fs") is None, reason="needs e2fsprogs")
def test_the_release_of_a_package_is_read_from_an_image(tmp_path: Path) -> None:
    tree = tmp_path / "tree/var/lib/dpkg"
    tree.mkdir(parents=True)
    (tree / "status").write_text(
        "Package: slurm\nVersion: 1\n\nPackage: slurmd\nStatus: ok\nConffiles:\n /etc/x abc\nVersion: 99.11.1-2\n\n"
        "Package: other\nVersion: 3\n"
    )
    disk = tmp_path / "disk.raw"
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tmp_path / "tree", disk, "8M"], check=True)
    assert package_version(disk, "slurmd") == "99.11.1-2" and package_version(disk, "other") == "3"
    assert package_version(disk, "slurmctld") is None and package_version(tmp_path / "none", "slurmd") is None


# --- hosts and the command ---------------------------------------------------------------------------

SIZE = SizeView(4, 8192, 65536)
HOST = HostView(
    "h1", True, SIZE, SIZE, SIZE, "kvm", (), {"slim": ()}, 0, 0, 0.0, 0.0, 0.0, 1, 1.0, 0, SIZE,
)  # fmt: skip


def test_a_host_that_is_not_up_is_found_with_what_to_do() -> None:
    assert list(doctor.of_host(HOST)) == []
    away = replace(HOST, state="away", reachable=False, why="no route to host", todo="see ssh h1")
    (only,) = doctor.of_host(away)
    assert only.level is Level.PROBLEM and "no route to host" in only.message and only.remedy == "see ssh h1"
    (only,) = doctor.of_host(replace(HOST, state="drained", reason="new fans"))
    assert only.level is Level.NOTE and "new fans" in only.message and "resume h1" in only.remedy
    (only,) = doctor.of_host(replace(HOST, accelerator="tcg"))
    assert only.level is Level.NOTE and "emulated" in only.message and "doctor --agent" in only.remedy
    (only,) = doctor.of_host(replace(HOST, accelerator="tcg"), own="h1", kvm=False)
    assert "multiverse doctor, without --no-kvm" in only.remedy and "no action is needed" in only.remedy
    assert list(doctor.of_host(replace(HOST, accelerator="tcg"), own="h1")) == [], "its own examination says why"
    (only,) = doctor.of_host(replace(HOST, declared=SizeView(4, 9000, 1)))
    assert only.level is Level.PROBLEM and "9000 MiB are declared" in only.message
    (only,) = doctor.of_host(replace(HOST, images={}))
    assert "no image" in only.message
    (only,) = doctor.of_host(replace(HOST, lacks=("stock",)))
    assert only.level is Level.NOTE and "no image stock" in only.message and "push stock h1" in only.remedy


def test_alerts_are_findings_with_their_remedies() -> None:
    alerts = (
        Alert("unserved", "Prolog", "it does not run", "do nothing"),
        Alert("disk", "h1", "it is full", "empty it"),
    )
    status = StatusView(1, "0", "s", 0.0, (), {}, {}, {}, {}, (), alerts)
    assert [(each.level, each.name, each.remedy) for each in doctor.of_status(status)] == [
        (Level.NOTE, "unserved Prolog", "do nothing"), (Level.PROBLEM, "disk h1", "empty it"),
    ]  # fmt: skip


def test_before_installation_it_says_what_is_missing_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "multiverse.toml"
    settings.write_text(f'socket = "{tmp_path}/api.sock"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\n')
    command = get_command(build(["doctor"]))
    status = command(["doctor", f"--config={settings}", "--no-kvm", "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert status == 1
    by_name = {one["name"]: one for one in document}
    assert "cannot read" in by_name["slurm.conf"]["findings"][0]["message"]
    assert by_name["hosts and alerts"]["skipped"] and by_name["KVM runs guests"]["skipped"]
    assert all(each["remedy"] and each["level"] in ("problem", "note") for one in document for each in one["findings"])
    status = command(["doctor", f"--config={settings}", "--no-kvm"], standalone_mode=False)
    text = capsys.readouterr().out
    assert status == 1 and "✗ slurm.conf" in text and "→ " in text and "examinations" in text


def test_before_an_installation_only_what_it_does_not_bring_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["ClusterName=prod", "SlurmctldHost=localhost", "SlurmUser=root", "SelectType=select/cons_tres"]
    source = tmp_path / "slurm.conf"
    source.write_text("\n".join([*lines, "NodeName=n1 CPUs=4", ""]))
    settings = replace(SETTINGS, slurm=SlurmSettings(conf=source, munge_key=source))
    monkeypatch.setattr(of_slurm.checking, "release_of", lambda _: Version(22, 5))
    monkeypatch.setattr(of_slurm.machine, "munge_problem", lambda _: "")
    examined = {one.name: one.findings for one in of_slurm.SLURM.before(settings, source)}
    assert len(examined) == 5 and not [each for findings in examined.values() for each in findings]
    source.write_text(source.read_text() + "Licenses=matlab:2\nPartitionName=all Nodes=ALL\n")
    changed = {one.name: one.findings for one in of_slurm.SLURM.before(settings, source)}
    assert [each.name for each in changed["slurm.conf, without what site install adds"]] == [
        "PartitionName=all",
        "Licenses",
    ]
    source.unlink()
    (broken,) = of_slurm.SLURM.before(settings, source)
    assert broken.findings[0].level is Level.PROBLEM and "cannot read" in broken.findings[0].message
