"""A lab with two hosts in namespaces of their own: jobs across them, and what a host can suffer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.agent.connection import CommandTransport, command_of, other_command
from multiverse.client import Client
from multiverse.host import manifest
from multiverse.images import transfer
from multiverse.images.catalog import Image, list_images, write_manifest
from multiverse.system.processes import stat_fields
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.plan import LabHost, LabOptions, load
from multiverse_lab.lab.services import CONTROLLER
from tests.contract.test_hypervisor_contract import SUITE, Check
from tests.contract.test_hypervisor_troubles import TROUBLES
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import IMAGES, mpi, slim
from tests.integration.moving_jobs import digest_of, install, move, result
from tests.integration.test_agent import THROUGH_THE_AGENT, Behind, Controller, connected
from tests.integration.test_contract_qemu import LONG, Real
from tests.integration.test_gangs import MPICH, OPEN_MPI, allreduce
from tests.integration.watch import accounted, ended, kill, latest, output_of, qemu_of, until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]


@pytest.fixture(scope="module")
def two(accelerator: Path) -> Iterator[LabUnderTest]:
    """Two hosts with four cores each, and the controller outside of them."""
    slim()
    # A silent agent is noticed sooner than by default, and its VMs count for their jobs as long as any test lasts.
    wishes = LabOptions(
        hosts=2, cores=4, memory=8192, settings={"pacing": {"silence": 600.0}, "fence": {"after": 600.0}}
    )
    with new_lab(accelerator, wishes, controller=True) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(two: LabUnderTest) -> Iterator[Client]:
    with Client(two.settings.socket) as client:
        until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(two.where)))
        for host in plan_of(two.where):  # at the same time, so that no job waits for one after the other
            client.template("build", "slim", host.name)
        yield client


def plan_of(where: Layout) -> tuple[LabHost, ...]:
    plan = load(where)
    assert plan is not None
    return plan.own_hosts


def pid_of(where: Layout, host: LabHost, part: int = 0) -> int:
    """The pid of a host's first process, its sshd or its agent, as this machine sees it."""
    running = host_services(host)[part].running(where)
    assert running is not None
    return running.pid


def on(lab: LabUnderTest, host: LabHost, command: str) -> str:
    """The output of a command on a host, by the lab's ssh."""
    argv = ["ssh", "-F", str(lab.where.ssh_config), host.name, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def reached(client: Client, name: str) -> bool:
    return bool(next(source for source in client.status()["sources"] if source["name"] == name)["known"])


def host_of(client: Client, job: str) -> str:
    """The host of the only VM of a job that runs."""
    until("the job runs", lambda: latest(client, job).get("state") == "allocated")
    return str(next(vm["host"] for vm in client.vms() if vm["job_id"] == job))


def named(lab: LabUnderTest, name: str) -> LabHost:
    return next(host for host in plan_of(lab.where) if host.name == name)


def up_again(lab: LabUnderTest) -> None:
    asyncio.run(lifecycle.up(lab.where, LabOptions()))


_WAITS = "touch {0}.runs; until [ -e {0}.ends ]; do sleep 0.2; done; echo went on as $(hostname)"
"""A job that runs until the test ends it."""


def waiting_job(lab: LabUnderTest, client: Client, name: str, *options: str) -> tuple[str, Path, str]:
    """The id of such a job that runs, the file that ends it, and its host."""
    file = lab.user.home / name
    job = lab.sbatch(_WAITS.format(file), "-c3", f"--output={file}.out", *options)
    host = host_of(client, job)
    until("the job's script runs", Path(f"{file}.runs").exists)
    return job, file, host


# --- the hosts -----------------------------------------------------------------------------------------


def test_each_host_has_namespaces_a_boot_id_and_control_groups_of_its_own(two: LabUnderTest, hosts: Client) -> None:
    first, second = plan_of(two.where)
    facts = (
        "hostname; cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/net /proc/self/ns/pid /proc/self/ns/mnt"
    )
    seen = [on(two, host, facts).splitlines() for host in (first, second)]
    seen.append(subprocess.run(["sh", "-c", facts], capture_output=True, text=True, check=True).stdout.splitlines())
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))
    assert [one[0] for one in seen[:2]] == ["mvh1", "mvh2"]
    for host in (first, second):
        assert on(two, host, "cat /proc/1/cgroup | grep -c multiverse-lab || true") == "0", (
            "it sees no group above its own"
        )
        assert two.where.control_group in Path(f"/proc/{pid_of(two.where, host)}/cgroup").read_text()
        assert on(two, host, f"ls {two.where.root}").split() == on(two, host, f"ls {two.where.root}").split()
        assert "munge" not in on(two, host, f"ls {two.where.root}").split(), "the controller's files are not there"
    status = lifecycle.status(two.where)
    assert all(part["alive"] for part in status.values())
    assert {"mvh1", "mvh1-sshd", "mvh1-agent", "mvh2-agent"} <= status.keys() and "agent" not in status
    assert [(one["name"], one["reachable"]) for one in hosts.hosts()] == [("mvh1", True), ("mvh2", True)]


_CONNECTS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)
    print("reached", sys.argv[1])
except OSError:
    print("not", sys.argv[1])
"""

_GANG = """#!/bin/sh
srun -Q sh -c 'for peer in $(scontrol show hostnames); do python3 {home}/connects.py $peer {port}; done'
touch {home}/connected
until [ -e {home}/tried ]; do sleep 0.2; done
"""


def test_a_job_runs_on_two_hosts_and_others_do_not_reach_it(two: LabUnderTest, hosts: Client) -> None:
    """Each VM connects to the slurmd of the other one across the switch; the VM of another user's job does not."""
    plan, home = load(two.where), two.user.home
    assert plan is not None
    (home / "connects.py").write_text(_CONNECTS)
    (home / "gang.sh").write_text(_GANG.format(home=home, port=plan.slurmd_port))
    out, other = home / "gang.out", two.other.home / "stranger.out"
    apart = ("--comment=vm:per-host=1", "--constraint=place-pack")
    gang = two.sbatch(f"sh {home}/gang.sh", "-N2", *apart, "--mem=300", f"--output={out}")
    until("the job's VMs have connected", (home / "connected").exists)
    vms = [vm for vm in hosts.vms() if vm["job_id"] == gang]
    assert sorted(vm["host"] for vm in vms) == ["mvh1", "mvh2"]
    addresses = [vm["address"].partition("/")[0] for vm in vms]
    tries = "; ".join(f"python3 {home}/connects.py {address} {plan.slurmd_port}" for address in addresses)
    stranger = two.sbatch(tries, "-c1", "--mem=300", f"--output={other}", user=two.other)
    ended(hosts, stranger, "done")
    (home / "tried").touch()
    ended(hosts, gang, "done")
    assert sorted(output_of(out).split("\n")[:-1]) == sorted(f"reached {vm['name']}" for vm in vms for _ in range(2))
    assert output_of(other).split("\n")[:-1] == [f"not {address}" for address in addresses]


@pytest.mark.slow
def test_open_mpi_runs_across_hosts(two: LabUnderTest, hosts: Client) -> None:
    """One VM on each host, two ranks in each, by Open MPI's own launcher."""
    allreduce(two, hosts, "mpirun", library=OPEN_MPI, options=("--comment=vm:per-host=1",))
    until("its VMs are gone", lambda: not hosts.vms())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "ways"),
    [(MPICH, ("mpirun.mpich", "srun -Q --mpi=pmi2")), (OPEN_MPI, ("mpirun.openmpi", "srun -Q --mpi=pmix"))],
)
def test_each_mpi_runs_across_hosts_by_mpirun_and_by_srun(
    two: LabUnderTest, hosts: Client, library: str, ways: tuple[str, ...]
) -> None:
    mpi()
    up_again(two)  # writes the image into Slurm's configuration
    allreduce(two, hosts, *ways, library=library, options=("--comment=vm:per-host=1", "--constraint=mpi"))
    until("its VMs are gone", lambda: not hosts.vms())


_MOVES = """
python3 {home}/files.py {home} own /var/tmp &
python3 {home}/files.py {home} shared {home} &
srun -Q --overlap python3 {home}/clock.py {home} clock
wait
"""


def test_a_vm_moves_there_and_back_while_its_job_runs(two: LabUnderTest, hosts: Client) -> None:
    """A step, a file on its own disk and one on NFS go on. More of that is in `test_moves_of_jobs.py`."""
    home = two.user.home
    install(home)
    job = two.sbatch(_MOVES.format(home=home), "--mem=300", f"--output={home}/moves.out")
    first = host_of(hosts, job)
    until("the step runs", (home / "clock.time").exists)
    (vm,) = (vm["name"] for vm in hosts.vms() if vm["job_id"] == job)
    for _ in range(2):
        move(hosts, vm)
        said = (home / "clock.time").read_text()
        until("the step goes on", lambda said=said: (home / "clock.time").read_text() != said)
    assert host_of(hosts, job) == first
    (home / "stop").touch()
    ended(hosts, job, "done")
    (home / "stop").unlink()
    assert accounted(two, job) == ("COMPLETED", "0:0") and (home / "moves.out").read_text() == ""
    assert result(home, "own")["wrong"] == result(home, "shared")["wrong"] == result(home, "clock")["back"] == 0
    assert digest_of(home / "shared.blocks") == result(home, "shared")["digests"][0]


_TRANSFERS = """
a=$(date +%s%N)
dd if=/dev/zero of={home}/sent.{name} bs=64k count=64 conv=fsync status=none
b=$(date +%s%N)
cat {home}/given.{name} > /dev/null
c=$(date +%s%N)
echo $(((b - a) / 1000000)) $(((c - b) / 1000000))
touch {home}/moved.{name}
until [ -e {home}/seen ]; do sleep 0.2; done
"""


@pytest.mark.slow
def test_a_vm_sends_and_receives_no_faster_than_it_claims(two: LabUnderTest, hosts: Client) -> None:
    """4 MiB to the file server and back, with 10 Mbit/s and without a limit, one after the other."""
    home, took = two.user.home, {}
    for name, options in (("slow", ["--comment=vm:net=10M"]), ("free", [])):
        (home / f"given.{name}").write_bytes(os.urandom(4 << 20))
        out, script = home / f"{name}.rate", _TRANSFERS.format(home=home, name=name)
        job = two.sbatch(script, "--mem=200", f"--output={out}", *options)
        until("the job has moved its files", (home / f"moved.{name}").exists)
        where = next(vm["host"] for vm in hosts.vms() if vm["job_id"] == job)
        claimed = {one["name"]: one["claimed"]["net"] for one in hosts.hosts()}
        assert claimed == {"mvh1": 0, "mvh2": 0} | ({where: 10} if options else {})
        rules = on(two, named(two, where), "nft list ruleset")
        assert ("rate over 1250000 bytes/second" in rules) == bool(options)
        (home / "seen").touch()
        ended(hosts, job, "done")
        (home / "seen").unlink()
        took[name] = [int(word) for word in output_of(out).split()]
    # 33.5 Mbit at 10 Mbit/s, less what a second lets through at once.
    assert all(milliseconds > 2000 for milliseconds in took["slow"]), took
    assert sum(took["free"]) < sum(took["slow"]) / 2, took


# --- what a host can suffer ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_survives_an_agent_that_hangs(two: LabUnderTest, hosts: Client) -> None:
    job, file, name = waiting_job(two, hosts, "hangs")
    agent = pid_of(two.where, named(two, name), 2)
    os.kill(agent, signal.SIGSTOP)
    try:
        until("the host is not observed", lambda: not reached(hosts, name))
        assert latest(hosts, job)["state"] == "allocated"
    finally:
        os.kill(agent, signal.SIGCONT)
    until("the host is back", lambda: reached(hosts, name))
    Path(f"{file}.ends").touch()
    ended(hosts, job, "done")
    assert Path(f"{file}.out").read_text().startswith("went on as ")


@pytest.mark.slow
def test_a_job_ends_while_its_hosts_sshd_is_dead(two: LabUnderTest, hosts: Client) -> None:
    job, file, name = waiting_job(two, hosts, "survives")
    init = pid_of(two.where, named(two, name))
    kills = "for one in /proc/[0-9]*; do grep -qx sshd $one/comm && kill -9 ${one#/proc/}; done 2>&1"
    subprocess.run(["nsenter", f"--target={init}", "--pid", "--mount", "sh", "-c", kills], check=False)
    try:
        until("the host is out of reach", lambda: not reached(hosts, name))
        Path(f"{file}.ends").touch()
        until("Slurm has ended the job", lambda: "COMPLETED" in two.run("scontrol", "show", "job", job).stdout)
    finally:
        up_again(two)
    until("the host is back", lambda: reached(hosts, name))
    ended(hosts, job, "done")
    until("its VM is gone", lambda: not hosts.vms())
    assert Path(f"{file}.out").read_text().startswith("went on as ")


@pytest.mark.slow
def test_a_job_runs_again_after_its_host_was_killed(two: LabUnderTest, hosts: Client) -> None:
    """All processes of the host end with its first one. It comes back with another boot id, and without VMs."""
    job, file, name = waiting_job(two, hosts, "again", "--requeue")
    host = named(two, name)
    before = on(two, host, "cat /proc/sys/kernel/random/boot_id")
    inside = Path(f"/proc/{pid_of(two.where, host)}/ns/pid").readlink()
    kill(pid_of(two.where, host))
    try:
        until("its network is gone", lambda: not Path("/sys/class/net", host.uplink).exists())
        assert not [one for one in processes() if namespace(one) == inside]
        assert not lifecycle.status(two.where)[name]["alive"]
        until("the host is out of reach", lambda: not reached(hosts, name))
        Path(f"{file}.ends").touch()
        Path(f"{file}.runs").unlink()
    finally:
        up_again(two)
    assert on(two, host, "cat /proc/sys/kernel/random/boot_id") != before
    ended(hosts, job, "done")
    assert Path(f"{file}.runs").exists() and Path(f"{file}.out").read_text().count("went on") == 1


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def namespace(pid: int) -> Path | None:
    """The PID namespace of a process; None if it is dead, though perhaps not reaped."""
    try:
        alive = (stat_fields(pid) or ["Z"])[0] != "Z"
        return Path(f"/proc/{pid}/ns/pid").readlink() if alive else None
    except OSError:
        return None


_WRITES = """#!/bin/sh
run={0}.run${{SLURM_RESTART_COUNT:-0}}
until [ -e {0}.ends ]; do echo wrote >> $run; sleep 0.2; done
"""


@contextlib.contextmanager
def cut_off_but_for_files(lab: LabUnderTest, host: LabHost) -> Iterator[None]:
    """Nothing of a host and its VMs reaches the others any more, but for the shared file system, to which its VMs go on
    writing."""
    plan, table = load(lab.where), f"netdev {host.uplink}"
    assert plan is not None
    chain = (
        f"add table {table}",
        f"add chain {table} in {{ type filter hook ingress device {host.uplink} priority 0; }}",
        *(f"add rule {table} in {rule}" for rule in (f"tcp dport {plan.nfs_port} accept", "ip version 4 drop")),
    )
    subprocess.run(["nft", "-f", "-"], input="\n".join(chain), text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", f"delete table {table}"], check=True)


@contextlib.contextmanager
def own_settings(lab: LabUnderTest, text: str) -> Iterator[None]:
    """Settings of the controller and of all agents, which are started again with them."""
    file = lab.where.etc / "site.toml"
    file.write_text(text)
    up_again(lab)
    try:
        yield
    finally:
        file.write_text("")
        up_again(lab)


@contextlib.contextmanager
def slurm_on_hosts(lab: LabUnderTest) -> Iterator[None]:
    """Slurm's commands work on the hosts, as self-fencing needs it: with the site's files, and munge."""
    hosts = [lab.where.host(host.name) for host in plan_of(lab.where)]
    try:
        for own in hosts:
            for name in ("slurm.conf", "multiverse.conf", "site.conf", "plugstack.conf"):
                shutil.copy(lab.where.etc / name, own.etc)
            own.munge.mkdir()
            os.link(lab.where.munge_socket, own.munge_socket)
        yield
    finally:
        for own in hosts:
            shutil.rmtree(own.munge, ignore_errors=True)


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_its_vms_before_their_jobs_run_elsewhere(two: LabUnderTest, hosts: Client) -> None:
    """Neither the controller nor slurmctld hears of it. Its VM's last write precedes the next start of its job. While
    the controller alone is away, VMs go on."""
    assert two.settings.agent.self_fence == 0, "no agent does so by default"
    file = two.user.home / "fenced"
    (two.user.home / "fenced.sh").write_text(_WRITES.format(file))
    first, second = Path(f"{file}.run0"), Path(f"{file}.run1")
    with slurm_on_hosts(two), own_settings(two, "[agent]\nself_fence = 60\n[pacing]\nsilence = 5\n"):
        until("both hosts are observed", lambda: all(reached(hosts, host.name) for host in plan_of(two.where)))
        job = two.sbatch(f"sh {two.user.home}/fenced.sh", "-c3", "--requeue")
        name = host_of(hosts, job)
        until("the job writes", first.exists)
        (vm,) = (vm["name"] for vm in hosts.vms() if vm["job_id"] == job)
        qemu = qemu_of(vm)
        assert vm in on(two, named(two, name), f"SLURM_CONF={two.where.slurm_conf} timeout 20 sinfo -h -N 2>&1; true")
        asyncio.run(CONTROLLER.stop(two.where))
        time.sleep(80)
        assert namespace(qemu) is not None, "slurmctld reaches it"
        up_again(two)
        until("the host is back", lambda: reached(hosts, name))
        assert latest(hosts, job)["state"] == "allocated"
        with cut_off_but_for_files(two, named(two, name)):
            cut = time.time()
            until("its VM is ended", lambda: namespace(qemu) is None, 200)
            last = first.stat().st_mtime
            assert last > cut, "it went on until then"
            until("the job runs again", second.exists, 400)
            assert host_of(hosts, job) != name
            assert second.read_text().splitlines()[0] == "wrote" and first.stat().st_mtime == last
            Path(f"{file}.ends").touch()
            until("Slurm has ended the job", lambda: "COMPLETED" in two.run("scontrol", "show", "job", job).stdout)
        until("the host is back", lambda: reached(hosts, name))
        ended(hosts, job, "done")
        until("no VM is left", lambda: not hosts.vms())
    assert not Path(f"{file}.run2").exists()


@pytest.mark.slow
def test_a_job_survives_the_loss_of_its_hosts_link(two: LabUnderTest, hosts: Client) -> None:
    job, file, name = waiting_job(two, hosts, "link")
    host = named(two, name)
    subprocess.run(["ip", "link", "set", host.uplink, "down"], check=True)
    try:
        until("the host is out of reach", lambda: not reached(hosts, name))
        assert latest(hosts, job)["state"] == "allocated"
    finally:
        subprocess.run(["ip", "link", "set", host.uplink, "up"], check=True)
    until("the host is back", lambda: reached(hosts, name))
    Path(f"{file}.ends").touch()
    ended(hosts, job, "done")
    assert Path(f"{file}.out").read_text().startswith("went on as ")


@pytest.mark.slow
def test_a_host_that_cannot_create_vms_is_avoided_and_costs_no_attempt(two: LabUnderTest, hosts: Client) -> None:
    """Its directory of VMs takes no file. The other host serves the jobs, until an operator says that it is mended."""
    vms = f"{two.where.controller}/vms"
    until("no VM is left", lambda: not hosts.vms())
    both = two.sbatch("true", "-N2", "--comment=vm:per-host=1", "--output=/dev/null")
    ended(hosts, both, "done")  # from here on there is a template on each host
    until("no VM is left", lambda: not hosts.vms())
    free = {one["name"]: one["claimed"]["cpus"] for one in hosts.hosts()}
    name = min(free, key=lambda host: (free[host], host))  # which worst-fit chooses first
    host, other = named(two, name), next(host for host in free if host != name)
    on(two, host, f"chattr +i {vms}")
    try:
        jobs = [two.sbatch("hostname", "-c1", "--output=/dev/null") for _ in range(4)]
        for job in jobs:
            ended(hosts, job, "done")
            assert "failed" not in [row["state"] for row in hosts.jobs(job)]
        shown = next(one for one in hosts.hosts() if one["name"] == name)
        (fault,) = shown["faults"]
        assert (shown["state"], fault["image"]) == ("avoided", "slim") and "not permitted" in fault["reason"]
        assert "avoided for slim until" in shown["reason"] and "hosts resume" in shown["todo"]
        assert [one["kind"] for one in hosts.status()["alerts"] if name in one["message"]] == ["avoided"]
        job, file, where = waiting_job(two, hosts, "avoids")
        assert where == other
        waits = two.sbatch("hostname", "-c4", "--output=/dev/null")  # the other host is too full for it
        until("it is seen", lambda: latest(hosts, waits))
        why = lambda: hosts.explain(waits)["jobs"][0]  # noqa: E731
        until("it is said why", lambda: any("avoided until" in one["why"] for one in why()["hosts"] or ()))
        assert len(hosts.jobs(waits)) <= 6 and "failed" not in [row["state"] for row in hosts.jobs(waits)]
        on(two, host, f"chattr -i {vms}")
        hosts.change_hosts("resume", name)
        ended(hosts, waits, "done")
        assert not next(one for one in hosts.hosts() if one["name"] == name)["faults"]
        Path(f"{file}.ends").touch()
        ended(hosts, job, "done")
    finally:
        on(two, host, f"chattr -i {vms}")


@pytest.mark.slow
def test_no_vm_is_added_to_a_host_whose_disk_is_full(two: LabUnderTest, hosts: Client) -> None:
    """Its VMs' directory is on a file system with less room than `host.disk_floor`; the other host takes the job."""
    host = plan_of(two.where)[0]
    vms = f"{two.where.controller}/vms"
    on(two, host, f"mount -t tmpfs -o size=64m,mode=0711 tmpfs {vms}")
    kill(pid_of(two.where, host, 2))  # it has the old directory open
    up_again(two)
    try:
        until("the host says so", lambda: reached(hosts, host.name))
        for _ in range(2):
            job, file, name = waiting_job(two, hosts, "full")
            assert name == "mvh2"
            Path(f"{file}.ends").touch()
            ended(hosts, job, "done")
            for end in ("runs", "ends"):
                Path(f"{file}.{end}").unlink()
    finally:
        until("no VM is left", lambda: not hosts.vms())
        on(two, host, f"umount -l {vms}")
        kill(pid_of(two.where, host, 2))
        up_again(two)


# --- images --------------------------------------------------------------------------------------------


def test_an_image_is_pushed_to_hosts_and_appears_whole(two: LabUnderTest, hosts: Client, tmp_path: Path) -> None:
    tiny = Image("tiny", "slim", "k", "b", tmp_path / "tiny", "quiet", "6.1", "bookworm")
    tiny.path.mkdir()
    for file in (tiny.kernel, tiny.initrd, tiny.disk):
        file.write_bytes(secrets.token_bytes(1 << 20))
    os.truncate(tiny.disk, 1 << 30)
    write_manifest(tiny, tiny.path)
    program = [sys.executable, "-c", "import multiverse.cli.main as m; m.main()"]
    done = two.run(*program, "image", "push", "--images", str(tmp_path), "tiny", "mvh[1-2]", "nohost", check=False)
    first, second, third = sorted(done.stdout.splitlines())
    assert (first, second) == ("mvh1: copied", "mvh2: copied")
    assert third.startswith("nohost: failed: image tiny was not copied: ssh: ")
    assert done.returncode == 1 and "tiny is not on nohost" in done.stderr
    again = other_command(two.settings.agent.connect, "mvh1", "receive-image")
    assert transfer.send(tiny, again) is False, "it is there already"
    for host in plan_of(two.where):
        there = two.where.host(host.name).images
        (got,) = [image for image in list_images(there) if image.name == "tiny"]
        assert got.disk.read_bytes() == tiny.disk.read_bytes() and got.disk.stat().st_blocks * 512 < 8 << 20
    until("the hosts show it", lambda: all("tiny" in host["images"] for host in hosts.hosts()))


@pytest.mark.slow
def test_without_a_shared_directory_the_controller_copies_an_image_when_a_job_wants_it(accelerator: Path) -> None:
    slim()
    wishes = LabOptions(hosts=2, cores=4, memory=8192, settings={"image": {"source": ""}})
    with new_lab(accelerator, wishes, controller=True) as lab, Client(lab.settings.socket) as client:
        until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(lab.where)))
        assert all(not host["images"] for host in client.hosts())
        ended(client, lab.sbatch("true", "--mem=300"), "done")
        until("both have it", lambda: all("slim" in host["images"] for host in client.hosts()))


# --- the contract by ssh -------------------------------------------------------------------------------


class OnHost(Behind):
    """The real driver behind the agent of a host, with the host's files as this machine sees them."""

    host = "mvh1"

    def __init__(self, lab: LabUnderTest, controller: Controller) -> None:
        own, root = lab.where.host(self.host), lab.where.root
        qemu = lab.settings.qemu
        outside = replace(qemu, vms=own.root / qemu.vms.relative_to(root), run=own.root / qemu.run.relative_to(root))
        super().__init__(replace(lab.settings, qemu=outside), controller)
        self._lab, self._inside = lab, qemu
        self._init = pid_of(lab.where, named(lab, self.host))

    async def kill(self, name: str) -> None:
        known = manifest.read(self.settings.qemu.vms / name)
        assert known is not None
        on(
            self._lab,
            named(self._lab, self.host),
            f"kill -9 {known.pid}; while kill -0 {known.pid}; do sleep 0.01; done 2>&1",
        )

    def remains(self, name: str) -> list[str]:
        tap = Path(f"/proc/{self._init}/root/sys/class/net/{name}")
        inner = Behind(replace(self.settings, qemu=self._inside), self.controller)
        return [*super().remains(name), *([str(tap)] if tap.exists() else []), *Real.remains(inner, name)]


@contextlib.asynccontextmanager
async def by_ssh(lab: LabUnderTest) -> AsyncIterator[Controller]:
    transport = CommandTransport(command_of(lab.settings.agent.connect, OnHost.host))
    async with connected(transport, Real.site, OnHost.host) as controller:
        yield controller


@pytest.fixture
async def harness(two: LabUnderTest) -> AsyncIterator[OnHost]:
    async with by_ssh(two) as controller:
        yield OnHost(two, controller)
    async with by_ssh(two) as controller:  # a test may have superseded the first
        real = OnHost(two, controller)
        for name in (await real.observe()).vms:
            await real.hypervisor.destroy(real.ref(name), 0)
            assert not real.remains(name)


QUICK = {"an_observation_is_complete", "creating_twice_is_like_once", "a_destroy_whose_reply_was_lost_is_repeated"}
MARKED = [
    pytest.param(check, marks=[pytest.mark.slow] * (check.__name__ not in QUICK), id=check.__name__)
    for check in (*SUITE, *TROUBLES)
    if check.__name__ in THROUGH_THE_AGENT and check.__name__ not in LONG
]


@pytest.mark.parametrize("check", MARKED)
async def test_qemu_behind_an_agent_by_ssh(check: Check, harness: OnHost) -> None:
    await check(harness)


# --- what a killed start leaves ------------------------------------------------------------------------

_IS_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from multiverse.drivers.qemu.job_vms import make_bridge
from multiverse_lab.lab import bridge
from multiverse_lab.lab.configure import configure
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions, decide
from multiverse_lab.lab.service import Lab
where = layout(Path(sys.argv[1]))
where.make()
plan = decide(where, LabOptions(hosts=2, images=Path(sys.argv[2])))
configure(where, plan)
bridge.up(plan)
make_bridge(f"{plan.job_bridge}.7", "192.0.2.1", "192.0.2.0/28")
init, sshd, _ = host_services(plan.own_hosts[0])
asyncio.run(init.ensure(Lab(where, plan)))
asyncio.run(sshd.ensure(Lab(where, plan)))
init.record(where).unlink()  # as if it had been killed before it wrote that
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_what_a_killed_start_has_left_is_removed() -> None:
    directory = Path(tempfile.mkdtemp(prefix="mvlab-"))
    directory.chmod(0o755)
    where = layout(directory / "lab")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IS_KILLED, str(where.root), str(IMAGES)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        plan, groups = load(where), where.control_group
        assert plan is not None
        host, other = plan.own_hosts
        job_bridge = f"{plan.job_bridge}.7"
        assert Path("/sys/class/net", job_bridge).exists() and f"tasks-{job_bridge}" in tables()
        assert Path("/sys/class/net", host.uplink).exists() and own_processes(where) and own_groups(groups)
        await lifecycle.down(where)
        assert not own_processes(where) and not own_groups(groups)
        for link in (host.uplink, other.uplink, plan.bridge, job_bridge):
            assert not Path("/sys/class/net", link).exists()
        assert f"tasks-{job_bridge}" not in tables()
        assert str(where.root) not in Path("/proc/self/mounts").read_text()
    finally:
        await lifecycle.down(where)
        shutil.rmtree(directory, ignore_errors=True)


def tables() -> list[str]:
    """The names of nftables' tables on this machine."""
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout.split()


def own_processes(where: Layout) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(where.root).encode() in entry.read_bytes():
                found.append(str(entry))
    return found


def own_groups(name: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(name), *Path("/sys/fs/cgroup").glob(f"*/{name}")]
