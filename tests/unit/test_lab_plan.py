"""The paths, plan, configuration and processes of a lab."""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from multiverse import config
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.identity import site_of, vm_name
from multiverse.system.locks import try_locked_directory
from multiverse_lab.cli.lab import app, chosen
from multiverse_lab.lab import configure, lifecycle, plan, process, users_command
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.plan import LabOptions, LabPlan
from multiverse_lab.lab.services import SERVICES, services
from multiverse_lab.lab.spank import built_plugin

PLAN = LabPlan(
    cores=8,
    memory=16384,
    image="slim",
    images="/var/lib/multiverse/images",
    shares=("/home", "/home/ada", "/srv/data"),
    bridge="mvlab210",
    subnet="10.210.0.0/16",
    slurmctld_port=20001,
    slurmd_port=20002,
    slurmdbd_port=20003,
    nfs_port=20004,
)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for sockets."""
    made = Path(tempfile.mkdtemp(prefix="mvlab-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_the_directory_of_a_lab_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MULTIVERSE_LAB", "/srv/lab")
    assert layout(None).root == Path("/srv/lab")
    assert layout(Path("/srv/other")).root == Path("/srv/other")
    assert layout(Path("/srv/a")).memory != layout(Path("/srv/b")).memory
    for wrong in ("/srv/a b", "/srv/a;b", "/srv/" + "x" * 60):
        with pytest.raises(Refused):
            layout(Path(wrong))


def test_a_directory_that_users_cannot_enter_is_refused(short: Path) -> None:
    closed = short / "closed"
    closed.mkdir(mode=0o700)
    for root in (closed, closed / "labs" / "one"):
        with pytest.raises(Refused, match=f"users cannot enter {closed}, ") as refused:
            layout(root).make()
        assert refused.value.hint.endswith(f"chmod o+x {closed}") and not list(closed.iterdir())
    closed.chmod(0o711)
    layout(closed / "labs" / "one").make()


def test_settings_are_read_from_the_command_line() -> None:
    words = ["host.overcommit=2.5", "image.kind=full", "host.floor=2048", "qemu.uids=[0, 0]"]
    assert chosen(words) == {
        "host": {"overcommit": 2.5, "floor": 2048}, "image": {"kind": "full"}, "qemu": {"uids": [0, 0]},
    }  # fmt: skip
    for wrong in ("pacing=8", "pacing.provisioning"):
        with pytest.raises(Refused, match="not a setting"):
            chosen([wrong])
    for wrong in ("host.overcomit=2", "pacing.provisioning=many"):
        with pytest.raises(Refused, match=wrong.partition("=")[0]):
            chosen([wrong])
    assert chosen(["pacing.provisioning="]) == {"pacing": {"provisioning": ""}}


def test_a_setting_is_added_to_those_given_before(short: Path) -> None:
    where = layout(short)
    where.make()
    for words, kept in (
        (["qemu.images=/srv/images", "pacing.provisioning=7"], ("/srv/images", 7)),
        (["web.listen=127.0.0.1:8080"], ("/srv/images", 7)),
        (["pacing.provisioning="], ("/srv/images", 4)),
    ):
        options = LabOptions(settings=plan.changed_settings(where, chosen(words)))
        settings = configure.configure(where, plan.decide(where, options))
        assert (str(settings.qemu.images), settings.pacing.provisioning) == kept
    assert settings.web.listen == "127.0.0.1:8080"


def test_the_controllers_settings_are_kept_until_new_ones_are_given(short: Path) -> None:
    where = layout(short)
    where.make()
    before = asdict(PLAN)
    del before["settings"]  # as a release without them wrote the plan
    where.state.write_text(json.dumps(before))
    requested = {"host": {"overcommit": 2.5}, "pacing": {"provisioning": 7, "spawn_timeout": 90.0}}
    for options, pacing in (
        (LabOptions(settings=requested), (7, 90.0)),
        (LabOptions(), (7, 90.0)),
        (LabOptions(settings={}), (4, 60.0)),
    ):
        settings = configure.configure(where, plan.decide(where, options))
        assert (settings.pacing.provisioning, settings.pacing.spawn_timeout) == pacing
        assert settings.host.overcommit == (2.5 if pacing[0] == 7 else 1.0) and len(settings.mounts) > 0
    with pytest.raises(Refused, match=r"host\.overcomit: no such key"):
        configure.configure(where, plan.decide(where, LabOptions(settings={"host": {"overcomit": 2}})))


def test_a_plan_is_chosen_once_and_kept(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "built_plugin", lambda: None)
    where = layout(short)
    where.state.write_text(json.dumps(asdict(PLAN)))
    kept = plan.decide(where, LabOptions())
    assert kept == PLAN
    more = plan.decide(where, LabOptions(cores=4, shares=(Path("/opt/x"),)))
    assert more == replace(PLAN, cores=4, shares=(*PLAN.shares, "/opt/x"))
    assert plan.load(where) == more
    where.state.write_text("{}")
    with pytest.raises(Broken):
        plan.load(where)


def test_two_new_labs_do_not_collide(short: Path) -> None:
    plans = []
    for name in ("one", "two"):
        (short / name).mkdir()
        plans.append(plan.decide(layout(short / name), LabOptions()))
    ports = [{p.slurmctld_port, p.slurmd_port, p.slurmdbd_port, p.nfs_port} for p in plans]
    assert [len(found) for found in ports] == [4, 4]
    assert all(0 < p.disk <= shutil.disk_usage(short).total >> 20 for p in plans)


@pytest.mark.parametrize(
    ("path", "fine"),
    [
        ("/", False),
        ("/etc/x", False),
        ("/usr", False),
        ("/tmp", False),
        ("/var", False),
        ("/tmp/x", True),
        ("/home", True),
        ('/srv/"x', False),
        ("/srv/a b", False),
    ],
)
def test_system_directories_cannot_be_mounted(path: str, fine: bool) -> None:
    assert plan.sharable(Path(path)) is fine


def test_a_later_command_from_another_directory_changes_nothing(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = layout(short)
    plans = []
    for number, requested in ((1, ()), (2, ()), (3, [tmp_path / "2"])):
        (tmp_path / f"{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number}")
        plans.append(plan.decide(where, LabOptions(shares=plan.shares(requested, where))))
    assert str(tmp_path / "1") in plans[0].shares and plans[1] == plans[0]
    assert plans[2].shares == (*plans[0].shares, str(tmp_path / "2")), "but for what is asked for"


def test_directories_for_guests_are_checked(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = layout(short)
    assert tmp_path in plan.shares((), where)
    monkeypatch.chdir("/")
    assert Path("/") not in plan.shares((), where)
    for wrong in (tmp_path / "missing", Path("/")):
        with pytest.raises(Refused):
            plan.shares([wrong], where)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "ab").mkdir()
    found = plan.outermost(str(tmp_path / name) for name in ("a/b", "a", "ab", "missing"))
    assert found == [str(tmp_path / "a"), str(tmp_path / "ab")]


@pytest.mark.skipif(os.geteuid() != 0, reason="files get their owners")
def test_configuration_is_read_back_as_settings(short: Path) -> None:
    if not _has_user("slurm"):
        pytest.skip("no slurm user here")
    where = layout(short / "lab")
    where.make()
    share = short / "data"
    share.mkdir()
    settings = configure.configure(where, replace(PLAN, shares=(str(share),)))
    assert settings == config.load(where.settings)
    assert (settings.host.cores, settings.host.memory, settings.qemu.bridge) == (8, 16384, "mvlab210")
    assert settings.host.disk == config.HostSettings.disk, "of a plan without a disk"
    assert configure.configure(where, replace(PLAN, shares=(str(share),), disk=5000)).host.disk == 5000
    configure.configure(where, replace(PLAN, shares=(str(share),)))
    assert settings.mounts[0].source == f"10.210.0.1:{share}"
    assert {"nosuid", "nodev", "port=20004"} <= set(settings.mounts[0].options.split(","))
    assert "PrivilegedPort = true;" in (where.etc / "ganesha.conf").read_text()
    assert (where.etc / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert where.slurm_conf.stat().st_mode & 0o777 == 0o644
    before = {path.name: path.read_bytes() for path in where.etc.iterdir()}
    configure.configure(where, replace(PLAN, shares=(str(share),)))
    assert before == {path.name: path.read_bytes() for path in where.etc.iterdir()}
    requested = {"qemu": {"images": str(share), "base_memory": 384}, "pacing": {"attempts": 3}}
    settings = configure.configure(where, replace(PLAN, settings=requested))
    assert (settings.qemu.images, settings.qemu.base_memory, settings.pacing.attempts) == (share, 384, 3)
    assert settings.qemu.bridge == "mvlab210"
    settings = configure.configure(where, replace(PLAN, settings={"image": {"default": ""}}))
    assert settings.image.default == config.ImageSettings.default, "an empty value removes the lab's own"


# --- several hosts -----------------------------------------------------------------------------------


def test_several_hosts_have_names_addresses_and_ports_of_their_own() -> None:
    hosts = replace(PLAN, hosts=plan.MOST_HOSTS).own_hosts
    assert [host.name for host in hosts] == ["mvh1", "mvh2", "mvh3", "mvh4"]
    network, first_vm = ipaddress.IPv4Network(PLAN.subnet), config.NetworkSettings.first
    addresses = [ipaddress.IPv4Address(host.address) for host in hosts]
    assert len({*addresses, ipaddress.IPv4Address(PLAN.gateway)}) == 5
    assert all(network[1] < address < network[first_vm] for address in addresses)
    assert len({host.uplink for host in hosts} | {PLAN.bridge}) == 5
    assert all(len(host.uplink) <= 15 for host in hosts)
    assert PLAN.own_hosts == (), "a single host is this machine"


def test_routed_hosts_are_in_networks_of_their_own(short: Path) -> None:
    made = replace(PLAN, hosts=2, routed=True)
    networks = [ipaddress.IPv4Interface(f"{host.address}/24").network for host in made.own_hosts]
    networks.append(ipaddress.IPv4Interface(f"{made.underlay(0)[1]}/24").network)
    assert len(set(networks)) == 3
    for network in networks:
        assert network.subnet_of(ipaddress.IPv4Network(made.underlays))
        assert not network.overlaps(ipaddress.IPv4Network(PLAN.subnet))
        assert not network.overlaps(ipaddress.IPv4Network(PLAN.job_subnet))
    assert all(ipaddress.IPv4Address(host.router) in net for host, net in zip(made.own_hosts, networks, strict=False))
    assert max(map(len, (made.router, made.machine_port))) <= 15
    assert not any(host.router for host in replace(PLAN, hosts=2).own_hosts)
    where = layout(short)
    where.make()
    sections = configure._sections(where, made)
    given = dict(sections["vxlan"]["addresses"])
    assert given == {configure.hostname(): made.underlay(0)[1]} | {one.name: one.address for one in made.own_hosts}
    other = configure._sections(where, replace(made, bridge="mvlab211", subnet="10.211.0.0/16"))
    assert sections["vxlan"]["port"] != other["vxlan"]["port"]
    assert "vxlan" not in configure._sections(where, replace(PLAN, hosts=2))
    with pytest.raises(Refused, match="this lab has one"):
        plan.decide(where, LabOptions(routed=True))
    assert plan.decide(where, LabOptions(hosts=2, routed=True)).routed == plan.decide(where, LabOptions()).routed


def test_bare_metal_nodes_are_beside_the_hosts(short: Path) -> None:
    made = replace(PLAN, hosts=2, physical=plan.MOST_PHYSICAL)
    nodes = made.physical_nodes
    assert [node.name for node in nodes] == ["mvp1", "mvp2", "mvp3", "mvp4"]
    everybody = (*made.own_hosts, *nodes)
    assert len({host.address for host in everybody}) == len({host.uplink for host in everybody}) == 6
    # The firewall of an agent on this machine takes ports "mv..." of the bridge for VMs'.
    assert not any(node.uplink.startswith("mv") or len(node.uplink) > 15 for node in nodes)
    names = [service.name for service in services(replace(PLAN, physical=1))]
    assert names[-5:] == ["mvp1", "mvp1-munged", "mvp1-slurmd", "agent", "controller"]
    where = layout(short)
    assert plan.decide(where, LabOptions(physical=2)).physical == plan.decide(where, LabOptions()).physical == 2
    where.run.mkdir()
    own = process.ProcessIdentity.of(os.getpid())
    running = process.RunningDaemon(own.pid, own.started, own.boot_id, "", 0.0)
    (where.run / "mvp2-slurmd.json").write_text(json.dumps(asdict(running)))
    with pytest.raises(Refused, match="runs with 1 host and 2 bare-metal nodes"):
        lifecycle._check_hosts(where, LabOptions(physical=0))
    assert plan.decide(where, LabOptions(physical=0)).physical_nodes == ()


def test_bare_metal_nodes_have_agents_for_vms_inside_jobs_if_the_plugin_is_built(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = layout(short)
    for built, requested, expected in (
        (None, None, False),
        ((Path("/p/multiverse.so"), Path("/p/mventer")), None, True),
        ((Path("/p/multiverse.so"), Path("/p/mventer")), {"job_vms": {"enabled": False}}, False),
    ):
        monkeypatch.setattr(plan, "built_plugin", lambda built=built: built)
        made = plan.decide(where, LabOptions(physical=1, settings=requested))
        names = [service.name for service in services(made)]
        assert made.job_vms is expected and ("mvp1-agent" in names) is expected
    assert not replace(PLAN, plugin="/p/multiverse.so").job_vms, "only bare-metal nodes have a slurmd"


def test_the_plugin_is_the_checkouts_or_an_installed_one(tmp_path: Path) -> None:
    places = [(tmp_path / name / "multiverse.so", tmp_path / name / "mventer") for name in ("built", "installed")]
    assert built_plugin(places) is None
    for plugin, enter in reversed(places):
        plugin.parent.mkdir()
        plugin.touch()
        before = built_plugin(places)
        assert before is None or before[0].parent.name == "installed", "one of the two alone is not enough"
        enter.touch()
        assert built_plugin(places) == (plugin, enter)


def _built(checkout: Path) -> dict[str, str]:
    """The plugin and its program, as a root that lets no other user in has built them."""
    checkout.mkdir(mode=0o700)
    for name in ("multiverse.so", "mventer"):
        (checkout / name).write_text(f"{name} of the first build")
        (checkout / name).chmod(0o700)
    return {"plugin": str(checkout / "multiverse.so"), "enter": str(checkout / "mventer")}


@pytest.mark.skipif(os.geteuid() != 0, reason="files get their owners")
def test_what_users_load_and_execute_is_where_they_can_read_it(short: Path) -> None:
    if not _has_user("slurm"):
        pytest.skip("no slurm user here")
    where = layout(short / "lab")
    where.make()
    made = replace(PLAN, physical=2, **_built(short / "checkout"))
    settings = configure.configure(where, made)
    nodes = [where.host(node.name) for node in made.physical_nodes]
    assert len(nodes) == 2
    for path in (settings.job_vms.plugin, settings.job_vms.enter):
        for own in (where, *nodes):  # a node has its own directory in place of the lab's
            copy = own.root / path.relative_to(where.root)
            assert copy.stat().st_mode & 0o777 == 0o755, copy
            assert all(each.stat().st_mode & 0o1 for each in (copy.parent, own.root)), copy
    for file in where.etc.iterdir():
        if file.stat().st_mode & 0o4 and file.suffix == ".conf":
            assert str(short / "checkout") not in file.read_text(), file

    copy, before = where.programs / "mventer", (where.programs / "mventer").stat()
    configure.configure(where, made)
    assert copy.stat().st_ino == before.st_ino, "what has not changed is left alone"
    Path(made.enter).write_text("mventer of the second build")
    with copy.open() as in_use:
        configure.configure(where, made)
        assert in_use.read() == "mventer of the first build", "a program that runs is not overwritten"
    assert copy.read_text() == "mventer of the second build"


def test_users_get_a_multiverse_that_they_can_execute(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = layout(short / "lab")
    where.make()
    private = short / "private"
    (private / "bin").mkdir(parents=True)
    private.chmod(0o700)
    (private / "bin" / "python3").symlink_to("/usr/bin/env")
    monkeypatch.setattr(users_command, "open_to_all", lambda path: private not in path.parents)
    users_command.install(where)
    command = where.programs / "multiverse"
    assert not command.exists(), "users execute the one of this process"

    monkeypatch.setattr(sys, "executable", str(private / "bin" / "python3"))
    monkeypatch.setattr(users_command, "_python", lambda: Path(os.__file__).parents[2] / "bin/python3")
    users_command.install(where)
    assert users_command.directories(where) == [private / "bin", where.programs], "root calls the one that is its own"
    packages = where.programs / "python"
    code = "import multiverse, typer; print(multiverse.__file__, typer.__file__)"
    interpreter, *words = shlex.split(command.read_text().splitlines()[1])[1:4]
    assert words == ["-I", "-c"]
    found = subprocess.run(
        [interpreter, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(packages)!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(Path(path).is_relative_to(packages) for path in found.stdout.split())
    shown = subprocess.run([command, "explain", "--help"], capture_output=True, text=True, check=True)
    assert "why a job waits" in shown.stdout
    for path in packages.rglob("*"):
        assert path.stat().st_mode & 0o4 and (path.is_file() or path.stat().st_mode & 0o1), path

    before = packages.stat().st_ino
    users_command.install(where)
    assert packages.stat().st_ino == before, "nothing has changed"
    monkeypatch.undo()
    assert not users_command.open_to_all(private / "bin") and users_command.open_to_all(Path("/usr/bin/env"))


@pytest.mark.skipif(os.geteuid() != 0, reason="files get their owners")
def test_the_agent_of_a_node_serves_vms_inside_jobs_alone(short: Path) -> None:
    if not _has_user("slurm"):
        pytest.skip("no slurm user here")
    where = layout(short / "lab")
    where.make()
    made = replace(PLAN, hosts=2, physical=1, **_built(short / "checkout"))
    settings = configure.configure(where, made)
    assert settings.job_vms.enabled and not settings.job_vms.only
    assert "PrologFlags=Alloc" in where.slurm_conf.read_text()
    line = (where.etc / "plugstack.conf").read_text()
    words = f"agent={where.jobs_socket} records={where.run}/jobs enter={where.programs}/mventer"
    assert f"optional {where.programs}/multiverse.so {words}" in line
    node, host = (tomllib.loads(where.host(name).settings.read_text())["job_vms"] for name in ("mvp1", "mvh1"))
    assert (node["enabled"], node["only"], node["socket"]) == (True, True, str(settings.job_vms.socket))
    assert not host["enabled"], "no slurmd is there"


@pytest.mark.skipif(os.geteuid() != 0, reason="files get their owners")
def test_bare_metal_nodes_are_declared_and_have_a_slurm_conf_of_their_own(short: Path) -> None:
    if not _has_user("slurm"):
        pytest.skip("no slurm user here")
    where = layout(short / "lab")
    where.make()
    configure.configure(where, PLAN)
    assert "physical" not in where.slurm_conf.read_text()
    configure.configure(where, replace(PLAN, physical=2))
    text = where.slurm_conf.read_text()
    assert "PartitionName=physical Nodes=mvp[1-2] " in text
    assert "NodeName=mvp2 NodeAddr=10.210.0.22 CPUs=8 RealMemory=16384 " in text
    own = where.host("mvp2").etc
    seen = (own / "slurm.conf").read_text().splitlines()
    assert "ProctrackType=proctrack/cgroup" in seen and "ProctrackType=proctrack/linuxproc" not in seen
    assert "ConstrainRAMSpace=yes" in (own / "cgroup.conf").read_text()


def test_each_host_has_services_in_place_of_this_machines_agent() -> None:
    names = [service.name for service in services(replace(PLAN, hosts=2))]
    assert names[-7:] == ["mvh1", "mvh1-sshd", "mvh1-agent", "mvh2", "mvh2-sshd", "mvh2-agent", "controller"]
    assert "agent" not in names
    assert services(PLAN) == services(None) == SERVICES


@pytest.mark.skipif(os.geteuid() != 0, reason="files get their owners")
def test_hosts_and_controller_read_the_same_settings_for_the_same_paths(short: Path) -> None:
    if not _has_user("slurm"):
        pytest.skip("no slurm user here")
    where = layout(short / "lab")
    where.make()
    (where.etc / "site.toml").write_text("[pacing]\nattempts = 3\n")
    settings = configure.configure(where, replace(PLAN, hosts=2, disk=4000))
    assert config.host_names(settings) == ["mvh1", "mvh2"]
    assert settings.qemu.images == Path(PLAN.images) == settings.image.source
    assert "{host}" in settings.agent.connect and settings.agent.connect[-1] == "dial-stdio"
    ranges = []
    for name in ("mvh1", "mvh2"):
        own = where.host(name)
        text = (own.etc / "multiverse.toml").read_text()
        # The host sees its own directory in place of the lab's.
        raw = config.parse(tomllib.loads(text) | {"include": str(own.etc / "site.toml")}, "test")
        seen = config.on_machine(raw, name)
        assert (seen.host.name, seen.host.cores, seen.host.disk) == (name, 8, 2000)
        assert (seen.agent.socket, seen.qemu.vms) == (where.agent_socket, settings.qemu.vms)
        assert seen.qemu.images == where.images
        assert (own.etc / "site.toml").read_text() == "[pacing]\nattempts = 3\n"
        assert "root:*:" in (own.etc / "shadow").read_text()
        first, count = seen.qemu.uids
        ranges += [*range(first, first + count)]
    assert len(set(ranges)) == len(ranges), "no user runs VMs of two hosts"
    keys = {path: path.read_bytes() for path in where.root.rglob("*key")}
    assert len(keys) == 3 and not any(path.stat().st_mode & 0o77 for path in keys)
    configure.configure(where, replace(PLAN, hosts=2))
    assert keys == {path: path.read_bytes() for path in where.root.rglob("*key")}, "keys are made once"


def test_the_number_of_hosts_does_not_change_while_something_runs(short: Path) -> None:
    where = layout(short)
    plan.decide(where, LabOptions(hosts=2))
    lifecycle._check_hosts(where, LabOptions(hosts=1))
    where.run.mkdir()
    own = process.ProcessIdentity.of(os.getpid())
    running = process.RunningDaemon(own.pid, own.started, own.boot_id, "", 0.0)
    (where.run / "mvh2-sshd.json").write_text(json.dumps(asdict(running)))
    for same in (LabOptions(), LabOptions(hosts=2)):
        lifecycle._check_hosts(where, same)
    with pytest.raises(Refused, match="runs with 2 hosts"):
        lifecycle._check_hosts(where, LabOptions(hosts=3))


def _has_user(name: str) -> bool:
    return name in {entry.pw_name for entry in pwd.getpwall()}


def test_directories_are_readable_whatever_the_umask(short: Path) -> None:
    before = os.umask(0o077)
    try:
        where = layout(short / "a" / "lab")
        where.make()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (where.root.parent, where.root, where.etc, where.run)} == {0o755}


# --- processes -------------------------------------------------------------------------------------


def command(log: Path, text: str) -> process.DaemonCommand:
    return process.DaemonCommand([sys.executable, "-c", text], log, user=_me())


def _me() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


async def test_a_recorded_process_is_identified_and_stopped(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    record, log = tmp_path / "record.json", tmp_path / "log"
    log.touch(mode=0o644)
    quiet = replace(command(log, "import time; time.sleep(100)"), log_mode=0o600)
    started = process.start(quiet, record, "abc")
    assert log.stat().st_mode & 0o777 == 0o600
    running = process.recorded(record)
    assert running is not None
    assert (running.pid, running.digest, running.alive()) == (started.pid, "abc", True)
    another = replace(running, born=running.born + 1)  # the pid came again
    assert not another.alive()
    await process.stop(another, 1.0)
    assert running.alive()
    await process.stop(running, 5.0)
    assert not running.alive()
    await process.stop(running, 5.0)
    assert process.recorded(record) is None


def test_daemons_of_a_lab_are_ended_whatever_its_records_say(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
    started = []
    for lab in ("one", "other"):
        (tmp_path / lab / "run").mkdir(parents=True)
        record, log = tmp_path / lab / "run" / "a.json", tmp_path / lab / "log"
        started.append(process.start(command(log, deaf), record, "abc"))
        while not log.read_text():
            time.sleep(0.01)
        record.unlink()
    assert process.end_unrecorded(tmp_path / "one") == 1
    assert [one.alive() for one in started] == [False, True]
    assert process.end_unrecorded(tmp_path / "one") == 0
    assert process.end_unrecorded(tmp_path / "other") == 1


async def test_a_port_that_another_program_has_is_told_with_a_remedy(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        binds = command(tmp_path / "log", f"import socket; socket.create_server({taken.getsockname()!r})")
        started = process.start(binds, tmp_path / "record.json", "abc")
        with pytest.raises(Broken, match="Address already in use") as raised:
            await process.until(lambda: False, started, binds, 20.0)
    assert raised.value.hint is not None and "ss -ltnp" in raised.value.hint


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    record, log = tmp_path / "record.json", tmp_path / "log"
    text = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
    started = process.start(command(log, text), record, "")
    await process.until(lambda: "up" in log.read_text(), started, command(log, ""), 10.0)
    running = process.recorded(record)
    assert running is not None
    began = time.monotonic()
    await process.stop(running, 0.2)
    assert not running.alive()
    assert time.monotonic() - began < 5


async def test_a_daemon_that_a_launcher_starts_is_recorded_in_its_place(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    record, log = tmp_path / "record.json", tmp_path / "launched.log"
    text = "import subprocess; print(subprocess.Popen(['sleep', '100'], start_new_session=True, stdout=2).pid)"
    running = process.start(replace(command(log, text), launcher=True), record, "abc")
    assert Path(f"/proc/{running.pid}/comm").read_text() == "sleep\n"
    assert process.recorded(record) == running
    await process.stop(running, 5.0)
    assert process.recorded(record) is None
    failing = replace(command(log, "raise SystemExit('no room')"), launcher=True)
    with pytest.raises(Broken, match="cannot start launched: no room"):
        process.start(failing, record, "")


def _let_end(child: int) -> None:
    """Wait until a child has ended, and start another, which reaps the children of deleted Popen objects."""
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    subprocess.run(["true"], check=True)


async def test_a_failed_start_is_reported_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets its user")
    log = tmp_path / "log"
    wanted = command(log, "print('no such key'); raise SystemExit(3)")
    started = process.start(wanted, tmp_path / "record.json", "")
    _let_end(started.pid)
    with pytest.raises(Broken, match="ended with 3: no such key"):
        await process.until(lambda: False, started, wanted, 10.0)
    with pytest.raises(Broken, match="cannot run"):
        process.start(process.DaemonCommand(["/nonexistent"], log), tmp_path / "record.json", "")


# --- locks and names -------------------------------------------------------------------------------


async def test_a_lab_that_another_command_uses_is_refused(short: Path) -> None:
    where = Layout(short / "lab")
    where.make()
    with try_locked_directory(where.root), pytest.raises(Refused, match="another command"):
        await lifecycle.down(where)
    await lifecycle.down(where)


def test_the_sites_of_a_labs_vms_are_read_from_their_names() -> None:
    assert site_of(vm_name("ab12", 7)) == "ab12"
    assert not any(site_of(name) for name in ("mvab-3.lock", ".t-1", "mvlab200", "x-3"))


def test_the_parts_of_a_lab_are_down_unless_some_of_them_live(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*alive: bool) -> list[str]:
        parts = {f"part{number}": {"pid": 7, "alive": one} for number, one in enumerate(alive)}
        monkeypatch.setattr(lifecycle, "status", lambda _: parts)
        done = CliRunner().invoke(get_command(app), ["status", "--dir", str(short)])
        assert done.exit_code == (0 if all(alive) else 3)
        return [line.split()[-1] for line in done.output.splitlines() if " part" in line]

    assert states(False, False) == ["down", "down"]
    assert states(True, False) == ["alive", "dead"]
    assert states(True, True) == ["alive", "alive"]
