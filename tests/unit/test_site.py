"""The files that a site installs: how they are derived and written, and how the site's machine is checked."""

from __future__ import annotations

import configparser
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from multiverse.bundles.slurm.scheduler import NodeCount
from multiverse.config import AgentSettings, HostClass, HostSettings, QemuSettings, Settings, SlurmSettings
from multiverse.core.errors import Broken
from multiverse.core.model.identity import User
from multiverse.drivers.slurm.site import bootstrap, conf, install, requirements
from multiverse.drivers.slurm.site.conf import SiteConf
from multiverse.drivers.slurm.site.requirements import Finding, Level, Version
from multiverse.site import checking, rendering
from multiverse.site.rendering import WriteOutcome, write
from multiverse.system import files
from multiverse.system.files import Origin

SLURM_CONF = """\
ClusterName=prod
SlurmctldHost=head(192.0.2.1)
SlurmUser=root
SelectType=select/cons_tres
MaxNodeCount=1024
TreeWidth=65533
CommunicationParameters=keepalivetime=300,keepaliveinterval=10
DefMemPerCPU=2048
JobSubmitPlugins=lua
EpilogSlurmctld={directory}/multiverse-epilog
SchedulerParameters=bf_continue,partition_job_depth=50,bf_yield_interval=100000
Include multiverse.conf
NodeName=DEFAULT CPUs=64 RealMemory=256000
NodeName=n[1-9] NodeAddr=192.0.2.[11-19] Feature=skylake
NodeName=gpu1 Gres=gpu:4
PartitionName=batch Nodes=n[1-9] Default=YES MaxTime=1-0
PartitionName=gpu Nodes=gpu1
"""
RELEASE = Version(22, 5)
CONFIG = Path("/etc/multiverse/multiverse.toml")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A site whose slurm.conf has all that is needed. There is no job_submit.lua yet."""
    directory = tmp_path / "slurm"
    directory.mkdir()
    (directory / "slurm.conf").write_text(SLURM_CONF.format(directory=directory))
    slurm = SlurmSettings(conf=directory / "slurm.conf", inbox=Path("/run/multiverse/inbox"))
    return Settings(slurm=slurm, host=HostSettings(cores=48), qemu=QemuSettings(images=tmp_path / "images"))


def site_of(settings: Settings) -> SiteConf:
    return conf.read(settings.slurm.conf)


def contents(settings: Settings) -> dict[str, str]:
    """All files by name. Two are named multiverse.conf: that for tmpfiles.d is called `tmpfiles` here."""
    files = rendering.render(settings, CONFIG, site_of(settings))
    return {"tmpfiles" if "tmpfiles.d" in str(path) else path.name: content for path, content, *_ in files}


def change(settings: Settings, old: str, new: str) -> None:
    text = settings.slurm.conf.read_text()
    assert old in text
    settings.slurm.conf.write_text(text.replace(old, new))


# --- what is derived -------------------------------------------------------------------------------


def test_the_gate_is_derived_from_the_settings_and_is_never_the_default_partition(settings: Settings) -> None:
    files = contents(settings)
    gate = files["multiverse.conf"]
    assert "NodeName=mvgate[1-250] NodeAddr=127.0.1.[1-250] " in gate and "Default=YES" not in gate
    assert gate.count("Default=NO") == 1
    assert (
        "memory_per_cpu = 2048," in files["multiverse_site.lua"] and "max_nodes = 250," in files["multiverse_site.lua"]
    )
    assert str(settings.slurm.conf.parent) in files["multiverse_submit.lua"]
    (settings.slurm.conf.parent / "multiverse.conf").write_text(gate)
    assert contents(settings) == files, "our own file, once it is included, changes nothing"


def test_the_rendered_files_have_nothing_of_a_lab(settings: Settings) -> None:
    for name, content in contents(settings).items():
        assert "/lab/" not in content and "mvlab" not in content and "`multiverse lab" not in content, name


def test_the_gates_addresses_are_not_those_of_the_sites_nodes(settings: Settings) -> None:
    change(settings, "NodeAddr=192.0.2.[11-19]", "NodeAddr=127.0.1.[11-19]")
    assert "NodeAddr=127.0.77.[1-250]" in contents(settings)["multiverse.conf"]


def test_included_files_are_read_as_slurm_reads_them(settings: Settings) -> None:
    parts = settings.slurm.conf.parent / "parts"
    parts.mkdir()
    (parts / "nodes.conf").write_text("NodeName=m[1-3] CPUs=2\nInclude parts/more.conf\n")  # relative to slurm.conf
    (parts / "more.conf").write_text("NodeName=k7\n")
    change(settings, "NodeName=gpu1", "include parts/nodes.conf\nNodeName=gpu1")
    assert set(site_of(settings).nodes()) == {*(f"n{i}" for i in range(1, 10)), "gpu1", "m1", "m2", "m3", "k7"}
    (parts / "more.conf").unlink()
    with pytest.raises(Broken, match=r"more\.conf"):
        site_of(settings)


def test_a_job_submit_script_of_the_site_is_not_rendered_and_has_to_call_ours(settings: Settings) -> None:
    path = settings.slurm.conf.with_name(install.JOB_SUBMIT)
    assert install.JOB_SUBMIT in contents(settings)
    path.write_text("function slurm_job_submit() return 0 end\n-- multiverse_submit.lua\nreturn 0\n")
    assert install.JOB_SUBMIT not in contents(settings)
    (finding,) = checking._scripts(settings, site_of(settings))
    assert (finding.level, finding.name) == (Level.PROBLEM, str(path))
    lines = finding.remedy.splitlines()[1:]
    assert len(lines) == 2 and install.HOOK in lines[0]
    path.write_text("function slurm_job_submit() return 0 end\n" + "\n".join(lines) + "\nreturn 0\n")
    assert list(checking._scripts(settings, site_of(settings))) == []


def test_our_job_submit_script_belongs_to_the_site_once_it_has_rules_of_its_own(settings: Settings) -> None:
    path = settings.slurm.conf.with_name(install.JOB_SUBMIT)
    ours = contents(settings)[install.JOB_SUBMIT]
    path.write_text(ours)
    assert contents(settings)[install.JOB_SUBMIT] == ours
    path.write_text(ours.replace("  return slurm.SUCCESS", "  return check(job)", 1))
    assert install.JOB_SUBMIT not in contents(settings)
    assert list(checking._scripts(settings, site_of(settings))) == []


def test_an_epilog_of_the_site_has_to_call_ours(settings: Settings, tmp_path: Path) -> None:
    epilog = tmp_path / "epilog"
    epilog.write_text("#!/bin/sh\nlogger over\n")
    change(settings, f"{settings.slurm.conf.parent}/multiverse-epilog", str(epilog))
    (finding,) = checking._scripts(settings, site_of(settings))
    assert (finding.level, finding.name) == (Level.NOTE, str(epilog)) and "multiverse-epilog" in finding.remedy
    epilog.write_text("#!/bin/sh\nlogger over\n" + finding.remedy.rpartition(": ")[2])
    assert list(checking._scripts(settings, site_of(settings))) == []


# --- writing ---------------------------------------------------------------------------------------


def test_rendering_again_changes_nothing_and_keeps_what_was_changed_by_hand(settings: Settings, tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = rendering.render(settings, CONFIG, site_of(settings))
    assert {outcome for _, outcome in write(files, root)} == {WriteOutcome.CREATED}
    modes = {path.name: path.stat().st_mode & 0o7777 for path in root.rglob("*") if path.is_file()}
    assert modes.pop("multiverse-epilog") == 0o755 and set(modes.values()) == {0o644}
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert {outcome for _, outcome in write(files, root)} == {WriteOutcome.UNCHANGED}
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before

    unit = root / "etc/systemd/system/multiverse.service"
    unit.write_text(unit.read_text().replace("RestartSec=2", "RestartSec=9"))
    new = replace(settings, slurm=replace(settings.slurm, partition="virtual"))
    outcomes = dict(write(rendering.render(new, CONFIG, site_of(new)), root))
    done = {path.name: outcome for path, outcome in outcomes.items()}
    assert done["multiverse_site.lua"] is WriteOutcome.UPDATED
    assert outcomes[root / str(settings.slurm.conf.parent)[1:] / "multiverse.conf"] is WriteOutcome.UPDATED
    assert done["multiverse.service"] is WriteOutcome.KEPT and done["multiverse.lua"] is WriteOutcome.UNCHANGED
    assert "RestartSec=9" in unit.read_text()
    beside = unit.with_name("multiverse.service.new")
    assert "RestartSec=2" in beside.read_text()
    forced = {path.name: outcome for path, outcome in write(files, root, force=True)}
    assert forced["multiverse.service"] is WriteOutcome.UPDATED and "RestartSec=2" in unit.read_text()
    assert not beside.exists()


def test_the_file_of_addresses_is_begun_and_is_the_daemons_from_then_on(settings: Settings, tmp_path: Path) -> None:
    files = rendering.render(settings, CONFIG, site_of(settings))
    (begun,) = (file for file in files if file.begun)
    assert begun.path == settings.slurm.addresses_file() and begun.mode == 0o644
    assert checking._difference(begun) == ("the file is missing", "run multiverse site render /, then nothing else")
    path = tmp_path / "root" / str(begun.path)[1:]
    assert dict(write([begun], tmp_path / "root"))[path] is WriteOutcome.CREATED
    path.write_text("NodeName=mvab-1 NodeAddr=10.1.2.3\n")
    assert dict(write([begun], tmp_path / "root", force=True))[path] is WriteOutcome.UNCHANGED
    assert path.read_text() == "NodeName=mvab-1 NodeAddr=10.1.2.3\n" and not path.with_name(f"{path.name}.new").exists()
    begun.path.write_text(path.read_text())
    assert checking._difference(begun) is None
    begun.path.chmod(0o600)
    assert checking._difference(begun) is not None, "users read it"


def test_slurm_is_restarted_for_nodes_and_reads_all_else_again(settings: Settings) -> None:
    file = next(one for one in rendering.render(settings, CONFIG, site_of(settings)) if one.path.name == conf.OURS)
    before = file.content.replace("Feature=mvgate", "Feature=mvgate,older").replace("PriorityTier=0", "PriorityTier=9")
    assert before.count("older") == 1 and "PriorityTier=9" in before
    assert checking._after_change(file, before) == "run scontrol reconfigure"
    for old, new in (("CoresPerSocket=128", "CoresPerSocket=64"), ("NodeName=mvgate[1-", "NodeName=mvgate[3-")):
        assert old in before
        assert checking._after_change(file, before.replace(old, new)) == "restart slurmctld"
    assert checking._after_change(file, "") == "restart slurmctld", "it is installed for the first time"


def test_users_who_cannot_find_vms_after_a_restart_are_noted_where_slurm_needs_it(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_ETC", tmp_path / "etc")
    (tmp_path / "etc/profile.d").mkdir(parents=True)
    settings = replace(settings, slurm=replace(settings.slurm, addresses=Path("/usr/a.conf")))  # where all users come
    (note,) = checking._clients(settings, RELEASE)
    assert (note.level, note.name) == (Level.NOTE, install.CLIENT)
    assert not [*checking._clients(settings, Version(23, 11, 4))] and [*checking._clients(settings, Version(23, 11, 3))]
    (tmp_path / "etc/profile.d/site.sh").write_text(note.remedy.rpartition(": ")[2] + "\n")
    assert not [*checking._clients(settings, RELEASE)]
    shell = [
        "env",
        "-i",
        "sh",
        "-c",
        "id() { echo $UID_; }; . $0; echo $SLURM_CONF",
        str(tmp_path / "etc/profile.d/site.sh"),
    ]
    said = {
        uid: subprocess.run(["env", "-i", f"UID_={uid}", *shell[2:]], capture_output=True, text=True) for uid in (0, 5)
    }
    assert said[0].stdout.strip() == "" and said[5].stdout.strip() == str(settings.slurm.conf.with_name(install.CLIENT))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    far = replace(settings, slurm=replace(settings.slurm, addresses=closed / "a.conf"))
    (problem,) = checking._clients(far, RELEASE)
    assert problem.level is Level.PROBLEM and str(closed) in problem.message and "slurm.addresses" in problem.remedy


def test_a_file_that_we_never_wrote_is_kept(settings: Settings, tmp_path: Path) -> None:
    files = rendering.render(settings, CONFIG, site_of(settings))
    path = tmp_path / "root" / str(settings.slurm.conf.parent)[1:] / "multiverse.conf"
    path.parent.mkdir(parents=True)
    path.write_text("NodeName=theirs\n")
    assert dict(write(files, tmp_path / "root"))[path] is WriteOutcome.KEPT
    assert path.read_text() == "NodeName=theirs\n"


def test_a_rendered_file_tells_whether_it_was_changed() -> None:
    text = files.signed("one\ntwo\n", "--")
    assert text.startswith("one\ntwo\n-- ") and text.endswith("\n")
    assert files.origin(text) is Origin.RENDERED
    for changed in (text.replace("two", "three"), text + "more\n", "# first\n" + text, text[:-1]):
        assert files.origin(changed) is Origin.CHANGED
    assert files.origin("one\ntwo\n") is files.origin("") is Origin.FOREIGN


# --- what systemd gets -----------------------------------------------------------------------------


def unit_of(settings: Settings, name: str) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string(contents(settings)[name])
    return unit


def test_the_daemon_starts_after_the_agent_and_slurm(settings: Settings) -> None:
    unit = unit_of(settings, rendering.SERVICE)
    service, before = unit["Service"], {*unit["Unit"]["After"].split()}
    assert service["ExecStart"] == f"{rendering.program()} daemon --config {CONFIG}"
    assert (service["Type"], service["Restart"]) == ("exec", "always")
    assert {"munge.service", "slurmctld.service", "network-online.target", rendering.AGENT_SERVICE} <= before
    assert rendering.AGENT_SERVICE in unit["Unit"]["Wants"]


def test_a_controller_that_is_no_host_starts_no_agent(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = replace(settings, hosts=(HostClass("n[1-4]", cores=48),), host=replace(settings.host, name="head"))
    assert rendering.AGENT_SERVICE not in contents(apart)
    assert "multiverse-agent" not in contents(apart)[rendering.SERVICE]
    monkeypatch.setattr(rendering, "SYSTEMD", tmp_path)
    monkeypatch.setattr(rendering, "PACKAGED", {tmp_path: tmp_path, rendering.TMPFILES: tmp_path})
    (tmp_path / rendering.AGENT_SERVICE).write_text("of earlier settings")
    assert rendering.AGENT_SERVICE in contents(apart), "a removal takes it away"


@pytest.mark.parametrize("name", [rendering.SERVICE, rendering.AGENT_SERVICE])
def test_a_reload_checks_the_settings_before_they_are_read_again(settings: Settings, name: str) -> None:
    lines = [line for line in contents(settings)[name].splitlines() if line.startswith("ExecReload=")]
    check = f"ExecReload={rendering.program()} config check {CONFIG}"
    assert lines == [check, "ExecReload=/bin/kill -HUP $MAINPID"], "systemd runs them in order, until one fails"


def test_the_agents_unit_lets_vms_outlive_the_agent(settings: Settings) -> None:
    service = unit_of(settings, rendering.AGENT_SERVICE)["Service"]
    assert service["ExecStart"] == f"{rendering.program()} agent --config {CONFIG}"
    assert (service["Type"], service["Restart"], service["KillMode"]) == ("exec", "always", "process")
    # With any of these the agent has a mount namespace or a list of devices of its own (systemd.exec(5)).
    views = ("private", "protect", "readonly", "readwrite", "inaccessible", "device", "restrictnamespaces", "bind")
    assert not [key for key in service if key.startswith(views)]


def test_a_host_without_a_controller_gets_the_units_of_the_agent_and_its_bridge(
    settings: Settings, tmp_path: Path
) -> None:
    alone = {path.name: content for path, content, *_ in rendering.render_agent(settings, CONFIG)}
    assert alone.keys() == {rendering.AGENT_SERVICE, rendering.BRIDGE_SERVICE, "multiverse-agent.conf"}
    assert alone[rendering.AGENT_SERVICE] == contents(settings)[rendering.AGENT_SERVICE]
    assert "d /run/multiverse 0755 root root -" in alone["multiverse-agent.conf"].splitlines()
    classes = replace(settings, hosts=(HostClass("n[1-4]"),), agent=AgentSettings(socket=tmp_path / "agent.sock"))
    stranger = replace(classes, host=replace(settings.host, name="n9"))
    bridge = QemuSettings(bridge="mvnone0", uplink="up0")
    with mock.patch.object(checking, "render_agent", lambda *_: []):
        names = [one.name for one in checking.check_agent(replace(stranger, qemu=bridge), CONFIG)]
        assert names == ["hosts", "mvnone0", rendering.AGENT_SERVICE]
        with mock.patch.object(checking, "_INTERFACES", tmp_path), socket.socket(socket.AF_UNIX) as agent:
            agent.bind(str(tmp_path / "agent.sock"))
            agent.listen()
            known = replace(classes, host=replace(settings.host, name="n2"), qemu=bridge)
            (tmp_path / "mvnone0" / "bridge").mkdir(parents=True)
            (finding,) = checking.check_agent(known, CONFIG)
            assert finding.message == "up0 is no port of the bridge mvnone0" and "multiverse-bridge" in finding.remedy
            (tmp_path / "mvnone0" / "brif" / "up0").mkdir(parents=True)
            assert checking.check_agent(known, CONFIG) == []


def in_a_namespace(*commands: str) -> subprocess.CompletedProcess[str]:
    script = " && ".join(commands)
    return subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.skipif(in_a_namespace("ip link").returncode != 0, reason="needs root and ip(8)")
@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("uplink", ["", "up0"])
def test_the_bridges_unit_makes_a_bridge_and_may_run_again(settings: Settings, agent: bool, uplink: str) -> None:
    settings = replace(settings, qemu=replace(settings.qemu, uplink=uplink))
    files = rendering.render_agent(settings, CONFIG) if agent else rendering.render(settings, CONFIG, site_of(settings))
    (text,) = (file.content for file in files if file.path.name == rendering.BRIDGE_SERVICE)
    lines = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    run = [f"({line[1:]} || true)" if line.startswith("-") else line for line in lines]
    shown = in_a_namespace(
        "ip link add up0 type veth peer name up1", *run, *run, "ip address show mvbr0", "ip link show up0"
    )
    assert shown.returncode == 0, shown.stderr
    assert "UP" in shown.stdout and ("inet 10.213.0.1/16" in shown.stdout) is not agent
    assert ("master mvbr0" in shown.stdout) is bool(uplink)
    assert (rendering.bridge_mac("10.213.0.1") in shown.stdout) is not agent, "no two bridges have the same address"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(settings: Settings, tmp_path: Path) -> None:
    for name in (rendering.SERVICE, rendering.AGENT_SERVICE, rendering.BRIDGE_SERVICE):
        (tmp_path / name).write_text(contents(settings)[name].replace(str(rendering.program()), "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", f"./{name}"], cwd=tmp_path, capture_output=True, text=True
        )
        own = [line for line in done.stderr.splitlines() if name in line]
        assert not own, own


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemd-tmpfiles"), reason="needs root, systemd-tmpfiles")
def test_the_inbox_is_created_for_slurms_user_at_each_boot(settings: Settings, tmp_path: Path) -> None:
    change(settings, "SlurmUser=root", "SlurmUser=games")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/run").mkdir()
    (tmp_path / "tmpfiles.conf").write_text(contents(settings)["tmpfiles"])
    root = f"--root={tmp_path / 'root'}"
    subprocess.run(["systemd-tmpfiles", "--create", root, str(tmp_path / "tmpfiles.conf")], check=True)
    inbox = (tmp_path / "root/run/multiverse/inbox").stat()
    assert (inbox.st_uid, inbox.st_mode & 0o7777) == (5, 0o700)
    assert (tmp_path / "root/run/multiverse").stat().st_uid == 0


# --- what is checked -------------------------------------------------------------------------------


def examined(settings: Settings, release: Version = RELEASE) -> list[Finding]:
    return list(requirements.examine(settings, site_of(settings), release))


def test_nothing_is_found_in_a_slurm_conf_that_has_all_that_is_needed(settings: Settings) -> None:
    assert examined(settings) == []


def test_an_alert_says_what_the_hosts_need_and_a_changed_file_is_read_again_and_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site has 10 nodes, the gate 250, and two nodes are counted for each CPU."""
    change(settings, "MaxNodeCount=1024", "Include more.conf")
    more, reads = settings.slurm.conf.parent / "more.conf", []
    more.write_text("MaxNodeCount=1024\n")
    read = conf.read
    monkeypatch.setattr(conf, "read", lambda path: reads.append(path) or read(path))
    count = NodeCount(settings.slurm.conf)
    assert count.lack(382) == count.lack(382) == [] and len(reads) == 1
    (alert,) = count.lack(383)
    assert (alert.kind, alert.name) == ("nodes", "MaxNodeCount") and "1026 nodes can exist" in alert.message
    assert "MaxNodeCount=1280" in alert.remedy and "restart slurmctld" in alert.remedy
    assert count.lack(383) == [alert] and len(reads) == 2
    more.write_text("MaxNodeCount=1280\n")
    assert count.lack(383) == [] and len(reads) == 3
    more.unlink()
    assert count.lack(4096) == count.lack(4096) == [] and len(reads) == 5, "the site's check says so"
    more.write_text("MaxNodeCount=1280\n")
    assert count.lack(4096) != []


@pytest.mark.parametrize(
    ("old", "new", "level", "name", "words"),
    [
        ("Include multiverse.conf\n", "", "problem", "slurm.conf", "Include multiverse.conf"),
        ("SelectType=select/cons_tres", "", "problem", "SelectType", "select/linear"),
        ("SelectType=select/cons_tres", "SelectType=select/cons_res", "problem", "SelectType", "select/cons_res"),
        ("MaxNodeCount=1024", "", "problem", "MaxNodeCount", "not set"),
        ("MaxNodeCount=1024", "MaxNodeCount=355", "problem", "MaxNodeCount", "MaxNodeCount=512"),
        ("TreeWidth=65533", "", "problem", "TreeWidth", "TreeWidth=65533"),
        ("TreeWidth=65533", "TreeWidth=65533\nTopologyPlugin=topology/tree", "problem", "TopologyPlugin", "tree"),
        ("TreeWidth=65533", "TreeWidth=65533\nRoutePlugin=route/topology", "problem", "RoutePlugin", "route/topology"),
        ("JobSubmitPlugins=lua", "", "problem", "JobSubmitPlugins", "JobSubmitPlugins=lua"),
        ("JobSubmitPlugins=lua", "JobSubmitPlugins=partition", "problem", "JobSubmitPlugins", "=partition,lua"),
        ("EpilogSlurmctld=", "#EpilogSlurmctld=", "note", "EpilogSlurmctld", "multiverse-epilog"),
        ("CommunicationParameters", "SlurmdTimeout=90\n#Comm", "note", "CommunicationParameters", "keepalivetime=90,"),
        ("bf_continue,", "", "note", "SchedulerParameters", "bf_continue"),
        (",bf_yield_interval=100000", "", "note", "SchedulerParameters", "bf_yield_interval=100000"),
        ("partition_job_depth=50,", "", "note", "SchedulerParameters", "partition_job_depth=50"),
        ("JobSubmitPlugins", "Licenses=seat:2\nJobSubmitPlugins", "problem", "Licenses", "Licenses=seat:2,vm:1"),
        ("JobSubmitPlugins", "ResumeProgram=/up\nJobSubmitPlugins", "problem", "SuspendProgram", "/bin/true"),
        ("interval=100000", "interval=100001", "note", "SchedulerParameters", "bf_yield_interval=100000"),
        (
            "NodeName=gpu1 Gres",
            "PriorityWeightTRES=CPU=9\nNodeName=gpu1 Gres",
            "note",
            "PriorityWeightTRES",
            "fraction",
        ),
        ("PartitionName=gpu Nodes=gpu1", "PartitionName=gpu Nodes=ALL", "problem", "PartitionName=gpu", "Nodes=ALL"),
        ("PartitionName=gpu", "PartitionName=vm", "problem", "PartitionName=vm", "slurm.partition"),
        ("Feature=skylake", "Feature=skylake,vm", "problem", "NodeName=n[1-9]", "slurm.node_feature"),
        ("Feature=skylake", "Feature=skylake,job-vms", "problem", "NodeName=n[1-9]", "remove job-vms"),
        ("NodeName=gpu1", "NodeName=mvgate7", "problem", "NodeName=mvgate", "mvgate"),
        ("NodeName=gpu1", "NodeSet=mvvms Feature=x\nNodeName=gpu1", "problem", "NodeSet=mvvms", "name"),
        ("ClusterName=prod", "ClusterName=prod\nAuthType=auth/jwt", "problem", "AuthType", "munge"),
        (
            "CommunicationParameters=",
            "CommunicationParameters=NoCtldInAddrAny,",
            "problem",
            "CommunicationParameters",
            "10.213.0.1",
        ),
        ("SlurmUser=root", "SlurmUser=root\nPreemptType=preempt/qos", "note", "preemption", "preempt/qos"),
    ],
)
def test_what_is_missing_in_slurm_conf_is_found_with_a_remedy(
    settings: Settings, old: str, new: str, level: str, name: str, words: str
) -> None:
    change(settings, old, new)
    (finding,) = examined(settings)
    assert (finding.level.value, finding.name) == (level, name)
    assert words in finding.message + finding.remedy


@pytest.mark.parametrize(
    ("release", "interval", "warned"),
    [
        (Version(22, 5, 8), "", True),
        (Version(23, 2, 3), "", True),
        (Version(23, 2, 3), ",bf_interval=30", True),
        (Version(23, 2, 3), ",bf_interval=5", False),
        (Version(23, 2, 4), "", False),
        (Version(24, 11, 0), "", False),
    ],
)
def test_several_slurmctlds_need_the_same_files_and_an_early_release_frequent_backfill(
    settings: Settings, release: Version, interval: str, warned: bool
) -> None:
    change(settings, "SlurmctldHost=head(192.0.2.1)", "SlurmctldHost=a\nSlurmctldHost=b")
    change(settings, "bf_yield_interval=100000", f"bf_yield_interval=100000{interval}")
    files, *backfill = examined(settings, release)
    assert (files.level.value, files.name) == ("note", "SlurmctldHost") and "a, b" in files.message
    assert [("only by backfill" in one.message, "bf_interval=5" in one.remedy) for one in backfill] == (
        [(True, True)] if warned else []
    )


def test_a_single_slurmctld_of_an_early_release_needs_no_frequent_backfill(settings: Settings) -> None:
    assert examined(settings, Version(22, 5, 8)) == []


def test_defaults_above_our_file_are_found(settings: Settings) -> None:
    change(settings, "Include multiverse.conf\n", "")
    change(settings, "PartitionName=gpu Nodes=gpu1", "PartitionName=DEFAULT MaxTime=5\nInclude multiverse.conf")
    assert [(f.level.value, f.name) for f in examined(settings)] == [
        ("problem", "NodeName=DEFAULT"),
        ("note", "PartitionName=DEFAULT"),
    ]


def test_newer_releases_of_slurm_need_less(settings: Settings) -> None:
    change(settings, "TreeWidth=65533", "TopologyPlugin=topology/tree")
    change(settings, "SelectType=select/cons_tres", "")
    assert {f.name for f in examined(settings, Version(22, 5))} == {"SelectType", "TreeWidth", "TopologyPlugin"}
    assert {f.name for f in examined(settings, Version(23, 2))} == {"SelectType", "TreeWidth"}
    assert examined(settings, Version(23, 11)) == []
    (old,) = [f for f in examined(settings, Version(21, 8)) if f.name == "Slurm"]
    (new,) = examined(settings, Version(26, 5))
    assert (old.level, new.level, new.name) == (Level.PROBLEM, Level.NOTE, "Slurm")
    assert requirements.version("slurm-wlm 22.05.8\n") == (22, 5, 8) and str(RELEASE) == "22.05"


def test_a_file_that_is_missing_outdated_or_changed_is_found(settings: Settings) -> None:
    ours = [
        f for f in rendering.render(settings, CONFIG, site_of(settings)) if f.path.parent == settings.slurm.conf.parent
    ]
    messages = {checking._difference(file) for file in ours}
    assert all(found and "missing" in found[0] and "site render /" in found[1] for found in messages)
    list(write(ours, Path("/")))
    assert {checking._difference(file) for file in ours} == {None}
    file = next(f for f in ours if f.path.name == "multiverse_site.lua")
    file.path.write_text(files.signed("return {}\n", "--"))
    outdated = checking._difference(file)
    file.path.write_text(file.content.replace("48", "49"))
    changed = checking._difference(file)
    assert outdated and "another release" in outdated[0] and "touch" in outdated[1]
    assert changed and "changed here" in changed[0] and ".new" in changed[1]
    file.path.write_text(file.content)
    file.path.chmod(0o600)
    unreadable = checking._difference(file)
    assert unreadable and "644" in unreadable[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_it_is_found_out_whether_slurms_user_can_write_hints(request: pytest.FixtureRequest) -> None:
    user = User("games", 5, 60, "/", "/bin/sh")
    top = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    request.addfinalizer(lambda: shutil.rmtree(top))
    top.chmod(0o755)
    inbox = top / "run" / "inbox"
    assert "does not exist" in (bootstrap.why_not_writable(inbox, user) or "")
    inbox.mkdir(parents=True)
    assert f"cannot write to {inbox}" in (bootstrap.why_not_writable(inbox, user) or "")
    os.chown(inbox, user.uid, -1)
    assert bootstrap.why_not_writable(inbox, user) is None
    inbox.parent.chmod(0o700)
    assert f"cannot pass through {inbox.parent}" in (bootstrap.why_not_writable(inbox, user) or "")


def test_a_daemon_that_has_not_opened_the_gate_yet_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ""

    class Slurm:
        def __init__(self, _: SlurmSettings) -> None: ...

        async def run(self, *_: str) -> str:
            return shown

    monkeypatch.setattr(checking, "SlurmCommands", Slurm)
    site = site_of(settings)
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as daemon:
        running = replace(settings, socket=Path(short) / "api.sock")
        examine = checking.parts(running, CONFIG, site, RELEASE)["daemon"]
        assert [one.name for one in examine()] == [rendering.SERVICE], "Slurm is not asked"
        daemon.bind(str(running.socket))
        daemon.listen()
        (found,) = examine()
        assert found.level is Level.PROBLEM and found.name == f"reservation {settings.slurm.gate_feature}"
        shown = f"ReservationName=other State=ACTIVE\nReservationName={settings.slurm.gate_feature} State=ACTIVE\n"
        assert not [*examine()]


def test_where_steps_launch_vms_slurm_loads_no_plugin_and_limits_jobs_by_control_groups(settings: Settings) -> None:
    by_tasks = replace(settings, job_vms=replace(settings.job_vms, enabled=True, design="tasks"))
    with_plugin = replace(settings, job_vms=replace(settings.job_vms, enabled=True))
    assert any(Path(name).name == "multiverse-plugstack.conf" for name in contents(with_plugin))
    assert not any(Path(name).name == "multiverse-plugstack.conf" for name in contents(by_tasks))
    assert [one.name for one in examined(with_plugin)] == ["PrologFlags"]
    assert examined(by_tasks) == []
    change(settings, "JobSubmitPlugins=lua", "JobSubmitPlugins=lua\nProctrackType=proctrack/linuxproc")
    (found,) = examined(by_tasks)
    assert found.name == "ProctrackType" and "task/cgroup" in found.remedy
    change(settings, "JobSubmitPlugins=lua", "JobSubmitPlugins=lua\nTaskPlugin=task/affinity,task/cgroup")
    assert examined(by_tasks) == []
