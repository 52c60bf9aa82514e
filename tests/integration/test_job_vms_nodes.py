"""VMs inside jobs of several nodes: bare-metal nodes of a lab, each with an agent and the plugin."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse_lab.lab import spank
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.service import Lab
from tests.integration.conftest import LabUnderTest
from tests.integration.physical_nodes import lab_of, networks, nothing_left
from tests.integration.watch import accounted, kill, until

pytestmark = pytest.mark.integration

TWO_NODES = ("--quiet", "--partition=physical", "--nodes=2", "--vm-image=slim")


@pytest.fixture(autouse=True)
def _nothing_left(lab_of_two: LabUnderTest) -> Iterator[None]:
    """After each test, no part of a VM remains on a node, and the nodes take jobs."""
    yield
    nothing_left(lab_of_two)


TALK = """
import os, pathlib, socket, sys, threading, time
here, all_ = pathlib.Path(sys.argv[1]), int(sys.argv[2])
server = socket.create_server(("", 5000))
def serve():
    while True:
        connection, _ = server.accept()
        connection.sendall(socket.gethostname().encode())
        connection.close()
threading.Thread(target=serve, daemon=True).start()
names = [line.split()[1] for line in open("/etc/hosts") if "mvjob-" in line]
answers = set()
for name in sorted(set(names)):
    for _ in range(60):
        try:
            with socket.create_connection((name, 5000), 5) as connection:
                answers.add((name, connection.recv(100).decode()))
                break
        except OSError:
            time.sleep(1)
print(socket.gethostname(), *(name for name, said in sorted(answers) if name == said), flush=True)
(here / f"done-{socket.gethostname()}").touch()
while len(list(here.glob("done-*"))) < all_:
    time.sleep(0.2)
"""
REACH = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 5001), 3).close()
        print("reached", address)
    except OSError:
        print("unreachable", address)
"""
LISTEN = """
import pathlib, socket, sys
server = socket.create_server(("", 5001))
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[2], 9))
shared = [line.split()[0] for line in open("/etc/hosts") if line.split()[1] == socket.gethostname()]
place = pathlib.Path(sys.argv[1])
place.with_suffix(".new").write_text(f"{probe.getsockname()[0]} {shared[0]}")
place.with_suffix(".new").rename(place)
while True:
    server.accept()[0].close()
"""


def _program(lab: LabUnderTest, name: str, text: str) -> str:
    """A program that guests find in the user's home."""
    path = lab.user.home / f"{name}.py"
    path.write_text(text)
    return str(path)


def _srun(lab: LabUnderTest, *argv: str) -> subprocess.CompletedProcess[str]:
    return lab.run("srun", *TWO_NODES, *argv, user=lab.user, check=False, timeout=300)


def test_the_tasks_of_a_job_run_in_the_vms_of_all_its_nodes(lab_of_two: LabUnderTest) -> None:
    command = "echo $SLURM_PROCID $SLURMD_NODENAME $(hostname) $(nproc); [ $SLURM_PROCID != 3 ] || exit 5"
    done = _srun(lab_of_two, "--ntasks-per-node=2", "--vm-per-node=2", "--mem=1000", "sh", "-c", command)
    said = {int(task): rest for task, *rest in map(str.split, done.stdout.splitlines())}
    assert sorted(said) == [0, 1, 2, 3] and done.returncode == 5, done.stderr
    assert [said[task][0] for task in range(4)] == ["mvp1", "mvp1", "mvp2", "mvp2"]
    assert len({name for _, name, _ in said.values()}) == 4, "each task is in a VM of its own"
    assert {cpus for _, _, cpus in said.values()} == {"1"}


def test_a_signal_reaches_the_tasks_of_all_nodes(lab_of_two: LabUnderTest) -> None:
    lab, out = lab_of_two, lab_of_two.user.home / "signal"
    command = (
        f"trap 'echo got >> {out}.$SLURM_PROCID; exit 0' USR1; touch {out}.$SLURM_PROCID; while :; do sleep 0.1; done"
    )
    files = [Path(f"{out}.{task}") for task in (0, 1)]
    argv = ["srun", *TWO_NODES, "--job-name=signalled", "--mem=700", "sh", "-c", command]
    with subprocess.Popen(argv, env=lab.env, user=lab.user.uid, group=lab.user.uid, cwd=lab.user.home) as running:
        until("both tasks run", lambda: all(file.exists() for file in files), 180)
        job = lab.run("squeue", "-h", "-n", "signalled", "-o", "%A").stdout.strip()
        lab.run("scancel", "--signal=USR1", job)
        assert running.wait(120) == 0
    assert [file.read_text() for file in files] == ["got\n", "got\n"]
    assert accounted(lab, job, 90)[0] == "COMPLETED"


def test_the_vms_of_a_job_reach_each_other_by_name_on_all_its_nodes(lab_of_two: LabUnderTest) -> None:
    here = lab_of_two.user.home / "talk"
    here.mkdir()
    os.chown(here, lab_of_two.user.uid, lab_of_two.user.uid)
    program = _program(lab_of_two, "talk", TALK)
    several = ("--ntasks-per-node=2", "--vm-per-node=2", "--mem=1000")
    done = _srun(lab_of_two, *several, "python3", program, str(here), "4")
    said = {name: names for name, *names in map(str.split, done.stdout.splitlines())}
    assert len(said) == 4, done.stderr
    assert all(names == sorted(said) for names in said.values()), said


def test_no_vm_reaches_the_vms_of_another_job(lab_of_two: LabUnderTest) -> None:
    lab, addresses = lab_of_two, lab_of_two.user.home / "addresses"
    listen, reach = _program(lab, "listen", LISTEN), _program(lab, "reach", REACH)
    gateway = lab_of(lab).plan.gateway
    options = ("--partition=physical", "--nodelist=mvp1", "--vm-image=slim")
    # The second VM of the job listens: the first one of each job has the same address in the network of its job.
    second = f'[ "$SLURM_LOCALID" = 0 ] && exec sleep 600; exec python3 {listen} {addresses} {gateway}'
    argv = ["srun", "--quiet", *options, "--ntasks=2", "--vm-per-node=2", "--mem=1000", "sh", "-c", second]
    with subprocess.Popen(argv, env=lab.env, user=lab.user.uid, group=lab.user.uid, cwd=lab.user.home) as listening:
        try:
            until("a VM listens", addresses.exists, 180)
            others = addresses.read_text().split()
            own = lab.run(
                "srun", "--quiet", *options, "--mem=700", "python3", reach, *others, user=lab.other, timeout=180
            )
        finally:
            lab.run("scancel", "--user", lab.user.name)
            listening.wait(120)
    assert own.stdout.splitlines() == [f"unreachable {address}" for address in others] and len(others) == 2


def test_without_its_agent_a_node_runs_nothing_bare_and_the_next_agent_removes_what_is_left(
    lab_of_two: LabUnderTest,
) -> None:
    lab, user = lab_of(lab_of_two), lab_of_two.user
    (agent,) = (one for one in physical_services(lab.plan.physical_nodes[1]) if one.name.endswith("-agent"))
    argv = ["srun", *TWO_NODES, "--mem=700", "sh", "-c", "echo runs; sleep 600"]
    with subprocess.Popen(
        argv, env=lab_of_two.env, user=user.uid, group=user.uid, cwd=user.home, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and [running.stdout.readline() for _ in range(2)] == ["runs\n"] * 2
        assert {name.partition(".")[0] for name in networks(lab_of_two)} >= {lab.plan.job_bridge, "vxjob0", "mvjob0"}
        process = agent.running(lab.where)
        assert process is not None
        kill(process.pid)
        lab_of_two.run("scancel", "--user", user.name)
    try:
        failed = _srun(lab_of_two, "--kill-on-bad-exit", "--mem=700", "sh", "-c", "hostname; sleep 600")
        assert failed.returncode != 0 and "the agent of this host does not answer" in failed.stderr
        assert all(line.startswith("mvjob-") for line in failed.stdout.splitlines()), "nothing ran on a bare node"
    finally:
        asyncio.run(agent.ensure(lab))


@pytest.fixture
def by_tasks(lab_of_two: LabUnderTest) -> Iterator[None]:
    """Agents that serve steps in place of the plugin."""
    lab = lab_of(lab_of_two)
    files = [lab.where.host(node.name).etc / "site.toml" for node in lab.plan.physical_nodes]
    before = [file.read_text() for file in files]
    try:
        for file, text in zip(files, before, strict=True):
            file.write_text(f'{text}\n[job_vms]\ndesign = "tasks"\n')
        _start_agents_again(lab)
        yield
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        _start_agents_again(lab)


def _start_agents_again(lab: Lab) -> None:
    for node in lab.plan.physical_nodes:
        (agent,) = (one for one in physical_services(node) if one.name.endswith("-agent"))
        asyncio.run(agent.stop(lab.where))
        asyncio.run(agent.ensure(lab))


@pytest.mark.usefixtures("by_tasks")
def test_where_no_plugin_does_steps_launch_vms_on_all_nodes_which_go_with_the_job(lab_of_two: LabUnderTest) -> None:
    lab, out, here = lab_of_two, lab_of_two.user.home / "tasks.out", lab_of_two.user.home / "tasks"
    here.mkdir()
    os.chown(here, lab.user.uid, lab.user.uid)
    vm, program = spank.installed(lab.where, "multiverse-vm"), _program(lab, "talk", TALK)
    options = ("--partition=physical", "--nodes=2", "--ntasks-per-node=1", "--mem=700", f"--output={out}")
    script = (
        f"export MULTIVERSE_JOBS_SOCKET={lab.where.jobs_socket}; "
        f"srun --quiet --ntasks-per-node=1 {vm} launch --vm-image=slim | sort; "
        f"srun --quiet {vm} run -- python3 {program} {here} 2; echo status $?; srun --quiet {vm} run -- sleep 600"
    )
    job = lab.sbatch(script, *options)  # without a comment, which the plugin of these nodes would act on
    until("the VMs have talked", lambda: out.exists() and "status" in out.read_text(), 240)
    lines = out.read_text().splitlines()
    names = [f"mvjob-{job}-{place}" for place in (0, 1)]
    assert [line.split()[0] for line in lines[:2]] == names, lines
    assert {tuple(line.split()) for line in lines[2:4]} == {(name, *names) for name in names}, lines
    assert lines[4] == "status 0"
    lab.run("scancel", job)
    assert accounted(lab, job, 90)[0] == "CANCELLED"
