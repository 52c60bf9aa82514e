"""The three ways in which applications share VMs and nodes (Slurm-V): one after the other on nodes of their own,
several at once on these, and jobs of different users on the same nodes. What keeps them apart is looked at from inside.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multiverse.guest.protocol import TASKS_PORT
from multiverse_lab.lab import spank
from multiverse_lab.lab.hosts.machine import HostInit
from multiverse_lab.lab.users import PrivateUser
from tests.integration.conftest import LabUnderTest
from tests.integration.physical_nodes import inside, lab_of, nothing_left
from tests.integration.watch import accounted, below, until

pytestmark = pytest.mark.integration

TWO_NODES = ("--partition=physical", "--nodes=2", "--vm-image=slim", "--vcpu-per-vm=1", "--memory-per-vm=300")


@pytest.fixture(autouse=True)
def _nothing_left(lab_of_two: LabUnderTest) -> Iterator[None]:
    """After each test, no part of a VM remains on a node, and the nodes take jobs."""
    yield
    nothing_left(lab_of_two)


def _place(user: PrivateUser, name: str) -> Path:
    """A directory of the user's that guests and nodes see."""
    here = user.home / name
    here.mkdir()
    os.chown(here, user.uid, user.uid)
    return here


def _read(here: Path, pattern: str, count: int) -> list[dict[str, Any]]:
    """What so many tasks have written, in the order of their names."""
    files: list[Path] = until(
        f"{count} files are {pattern}", lambda: len(all_ := sorted(here.glob(pattern))) == count and all_, 180
    )
    return [json.loads(file.read_text()) for file in files]


APPLICATION = """
import json, os, pathlib, subprocess, sys, time
here, name, until = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
number = {"first": 90001, "second": 90002, "third": 90003}
file = pathlib.Path("/tmp/of-first")
found = file.exists()
if name == "first":
    file.touch()
child = subprocess.Popen(["sleep", str(number[name])], start_new_session=True)
def running():
    lines = {path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")}
    return [name for name, seconds in number.items() if b"sleep\\0%d\\0" % seconds in lines]
def say(suffix):
    facts = {
        "step": os.environ["SLURM_STEP_ID"], "host": os.uname().nodename, "running": running(), "file": found,
        "boot": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(), "alive": child.poll() is None,
    }
    place = here / f"{name}-{os.environ['SLURM_PROCID']}{suffix}"
    place.with_suffix(".new").write_text(json.dumps(facts))
    place.with_suffix(".new").rename(place)
while not running():
    time.sleep(0.05)
say(".began")
for each in until:
    while not (here / each).exists():
        time.sleep(0.2)
if until:
    say(".ended")
"""


def test_applications_that_run_one_after_the_other_have_the_vms_of_their_job_and_nothing_of_the_one_before(
    lab_of_two: LabUnderTest,
) -> None:
    lab, here = lab_of_two, _place(lab_of_two.user, "sequential")
    program = here / "application.py"
    program.write_text(APPLICATION)
    run = f"srun --quiet python3 {program} {here}"
    script = f"{run} first; while [ ! -e {here}/go ]; do sleep 0.2; done; {run} second"
    job = lab.sbatch(script, *TWO_NODES, "--exclusive", "--ntasks-per-node=1", "--mem=700", "--output=/dev/null")
    first = _read(here, "first-*.began", 2)
    other = lab.sbatch("true", *TWO_NODES[:1], "--nodelist=mvp1", "--mem=10", "--output=/dev/null", user=lab.other)
    until("nobody else's job starts", lambda: _reason(lab, other) in ("PENDING Resources", "PENDING Priority"), 30)
    lab.run("scancel", other)
    (here / "go").touch()
    second = _read(here, "second-*.began", 2)
    assert accounted(lab, job, 60) == ("COMPLETED", "0:0")
    assert [one["running"] for one in first] == [["first"]] * 2
    assert [one["running"] for one in second] == [["second"]] * 2, "what the first has started ends with its step"
    assert [(one["host"], one["boot"]) for one in first] == [(one["host"], one["boot"]) for one in second]
    assert all(one["file"] for one in second), "its files are on the job's disks"
    assert len({one["boot"] for one in first}) == 2
    nothing_left(lab)
    lab.run("srun", "--quiet", *TWO_NODES, "--mem=700", "python3", str(program), str(here), "third", user=lab.user)
    third = _read(here, "third-*.began", 2)
    assert not {one["boot"] for one in third} & {one["boot"] for one in first}, "the next job has other VMs"
    assert [(one["running"], one["file"]) for one in third] == [(["third"], False)] * 2


def _reason(lab: LabUnderTest, job: str) -> str:
    return lab.run("squeue", "-h", "-j", job, "-o", "%T %r").stdout.strip()


def test_applications_that_run_at_once_in_the_vms_of_a_job_end_alone(lab_of_two: LabUnderTest) -> None:
    lab, here = lab_of_two, _place(lab_of_two.user, "concurrent")
    program = here / "application.py"
    program.write_text(APPLICATION)
    run = f"srun --quiet --overlap --ntasks=2 --ntasks-per-node=1 python3 {program} {here}"
    script = f"{run} first go & {run} second never & wait %1; echo $? > {here}/first; wait %2; echo $? > {here}/second"
    job = lab.sbatch(script, *TWO_NODES, "--ntasks-per-node=2", "--mem=700", "--output=/dev/null")
    first, second = _read(here, "first-*.began", 2), _read(here, "second-*.began", 2)
    assert [one["boot"] for one in first] == [one["boot"] for one in second], "both run in the job's VMs"
    (step,) = {one["step"] for one in second}
    assert {one["step"] for one in first} != {step}
    lab.run("scancel", f"{job}.{step}")
    until("the second has ended", lambda: not lab.run("squeue", "-h", "-s", f"{job}.{step}").stdout.strip(), 60)
    (here / "go").touch()
    ended = _read(here, "first-*.ended", 2)
    assert [(one["running"], one["alive"]) for one in ended] == [(["first"], True)] * 2
    accounted(lab, job, 60)
    assert (here / "first").read_text() == "0\n" and (here / "second").read_text() != "0\n"
    assert not list(here.glob("second-*.ended"))


NEIGHBOUR = """
import json, os, pathlib, socket, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
here, marker, name, task = pathlib.Path(sys.argv[1]), sys.argv[2], os.uname().nodename, os.environ["SLURM_PROCID"]
tcp, udp = socket.create_server(("", 5001)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("", 5001))
def serve_tcp():
    while True:
        connection = tcp.accept()[0]
        connection.sendall(name.encode())
        connection.close()
def serve_udp():
    while True:
        udp.sendto(name.encode(), udp.recvfrom(10)[1])
for serve in (serve_tcp, serve_udp):
    threading.Thread(target=serve, daemon=True).start()
places = [pathlib.Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm")]
for place in places:
    (place / marker).write_text(marker)
    (place / marker).chmod(0o666)
def ask_tcp(address, port=5001):
    try:
        with socket.create_connection((address, port), 5) as connection:
            return connection.recv(100).decode() if port == 5001 else "accepted"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return ""
def ask_udp(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(1)
        for _ in range(3):
            try:
                probe.sendto(b"?", (address, 5001))
                return probe.recv(100).decode()
            except ConnectionRefusedError:
                return "refused"
            except OSError:
                pass
        return ""
def say(suffix, facts):
    path = here / f"{task}{suffix}"
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").rename(path)
def processes():
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            found.append((path.stat().st_uid, (path / "cmdline").read_bytes().decode()))
        except OSError:
            pass
    return found
shared = {line.split()[1]: line.split()[0] for line in open("/etc/hosts") if line.split()[1].startswith("mvjob-")}
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[3], 9))
    local = probe.getsockname()[0]
say(".began", {"name": name, "local": local, "shared": shared, "node": os.environ["SLURMD_NODENAME"],
               "machine": pathlib.Path("/etc/machine-id").read_text()})
while not (here / "go").exists():
    time.sleep(0.2)
other = json.loads((here / "go").read_text())
with ThreadPoolExecutor(32) as threads:
    addresses = other["addresses"]
    tcps, udps = threads.map(ask_tcp, addresses), threads.map(ask_udp, addresses)
    tasks = threads.map(lambda address: ask_tcp(address, other["port"]), addresses)
    peers = {peer: [ask_tcp(peer), ask_udp(peer)] for peer in shared if peer != name}
    answers = {address: list(all_) for address, *all_ in zip(addresses, tcps, udps, tasks)}
say(".found", {
    "name": name, "answers": answers, "peers": peers,
    "uids": sorted({uid for uid, _ in processes()}),
    "processes": [line for _, line in processes() if other["marker"] in line],
    "files": [str(path) for place in places for path in place.iterdir() if other["marker"] in path.name],
    "own": all((place / marker).read_text() == marker for place in places),
    "accounts": [line.split(":")[0] for line in open("/etc/passwd") if line.split(":")[0] == other["user"]],
})
while not (here / "end").exists():
    time.sleep(0.2)
"""


@contextmanager
def _job(lab: LabUnderTest, user: PrivateUser, here: Path, *options: str) -> Iterator[str]:
    """A job whose VMs run NEIGHBOUR until the context ends."""
    program = here / "neighbour.py"
    program.write_text(NEIGHBOUR)
    command = f"srun --quiet python3 {program} {here} marker-{user.name} {lab_of(lab).plan.gateway}"
    job = lab.sbatch(command, *TWO_NODES, *options, f"--output={here}/out", user=user)
    try:
        yield job
    finally:
        (here / "end").touch()
    assert accounted(lab, job, 60) == ("COMPLETED", "0:0"), (here / "out").read_text()


def test_jobs_of_two_users_on_the_same_nodes_reach_nothing_of_each_other(lab_of_two: LabUnderTest) -> None:
    lab, ada, bob = lab_of_two, lab_of_two.user, lab_of_two.other
    hers, his = _place(ada, "shared"), _place(bob, "shared")
    several = ("--ntasks-per-node=2", "--vm-per-node=2", "--mem=1000")
    with (
        _job(lab, ada, hers, *several) as her_job,
        _job(lab, bob, his, "--ntasks-per-node=1", "--mem=500") as his_job,
    ):
        of_her, of_him = _read(hers, "*.began", 4), _read(his, "*.began", 2)
        assert sorted({one["node"] for one in of_her}) == [one["node"] for one in of_him] == ["mvp1", "mvp2"]
        for one in (*of_her, *of_him):  # what is not reached by the others is there
            reached = lab.run(*inside(lab, int(one["node"][-1])), "bash", "-c", f"cat < /dev/tcp/{one['local']}/5001")
            assert reached.stdout == one["name"]
        _go(hers, of_him, bob)
        _go(his, of_her, ada)
        for here, job, others in ((hers, of_her, of_him), (his, of_him, of_her)):
            for one, found in zip(job, _read(here, "*.found", len(job)), strict=True):
                near = {other["local"] for other in others if other["node"] == one["node"]}
                _assert_apart(found, {each["name"] for each in job}, near)
        assert len({one["machine"] for one in (*of_her, *of_him)}) == 6
        _assert_no_file_of_two(_qemus(lab, her_job), _qemus(lab, his_job))
        _assert_out_of_reach_on_the_node(lab, her_job, his)


def _go(here: Path, others: list[dict[str, Any]], user: PrivateUser) -> None:
    """Tell the tasks of a job what the other user's job consists of."""
    addresses = sorted({one["local"] for one in others} | {each for one in others for each in one["shared"].values()})
    told = {"addresses": addresses, "port": TASKS_PORT, "marker": f"marker-{user.name}", "user": user.name}
    (here / "go.new").write_text(json.dumps(told))
    (here / "go.new").rename(here / "go")


def _assert_apart(found: dict[str, Any], job: set[str], near: set[str]) -> None:
    """This VM of a job, whose VMs have these names, has found nothing of the other job, whose VMs on this node have the
    addresses `near`. Each job uses the same addresses in its own network, and each node in those of its jobs: there,
    VMs of its own job answer."""
    assert found["own"] and found["peers"] == {name: [name, name] for name in job - {found["name"]}}
    for address, (tcp, udp, tasks) in found["answers"].items():
        assert tcp == udp and tcp in {"", *job} and bool(tcp) == bool(tasks), address
    assert {tuple(found["answers"][address]) for address in near} == {("", "", "")}
    assert (found["processes"], found["files"], found["accounts"]) == ([], [], [])


def _qemus(lab: LabUnderTest, job: str) -> list[Path]:
    """The processes in /proc that are QEMUs of the job."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            groups, name = (process / "cgroup").read_text(), (process / "comm").read_text()
        except OSError:
            continue
        if name.startswith("qemu-system") and lab.where.control_group in groups and f"/job_{job}/" in groups:
            found.append(process)
    return found


def _assert_no_file_of_two(*jobs: list[Path]) -> None:
    """Each QEMU has a user of its own, and none can write to a file, device or memory that another one has open."""
    qemus = [process for job in jobs for process in job]
    assert [len(job) for job in jobs] == [4, 2]
    assert len({process.stat().st_uid for process in qemus} - {0}) == len(qemus)
    for process in qemus:
        others = {key for other in qemus if other != process for key in _files(other)}
        written = {key for key, writable in _files(process).items() if writable}
        assert written and not written & others


def _files(process: Path) -> dict[tuple[int, int], bool]:
    """The open files and shared mappings of a process, and whether it can write to them."""
    found: dict[tuple[int, int], bool] = {}
    for fd in (process / "fd").iterdir():
        try:
            about, info = fd.stat(), (process / "fdinfo" / fd.name).read_text()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(about.st_mode) or stat.S_ISBLK(about.st_mode):
            flags = int(info.split("flags:")[1].split()[0], 8)
            key = (about.st_dev, about.st_ino)
            found[key] = found.get(key, False) or (flags & os.O_ACCMODE != os.O_RDONLY and not _is_sealed(fd))
    for line in (process / "maps").read_text().splitlines():
        _, permissions, _, device, inode, *_ = line.split()
        if permissions[3] == "s" and inode != "0":
            major, minor = (int(part, 16) for part in device.split(":"))
            key = (os.makedev(major, minor), int(inode))
            found[key] = found.get(key, False) or "w" in permissions
    return found


def _is_sealed(fd: Path) -> bool:
    """Whether nobody can write to a file in memory any more, whatever it was opened for: a template's."""
    with fd.open("rb") as file:
        try:
            return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
        except OSError:  # it is on a disk
            return False


INTRUDER = """
import json, os, pathlib, socket, stat, subprocess, sys
paths, sockets, program, jobs, job = json.loads(pathlib.Path(sys.argv[1]).read_text())
reached, looked = [], 0
for path in paths:
    try:
        open(path, "rb").close()
        reached.append(path)
    except PermissionError:
        looked += 1
for path in sockets:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
            reached.append(path)
        except PermissionError:
            looked += 1
qemus = 0
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if (process / "comm").read_text().startswith("qemu-system"):
        qemus += 1
        for attempt in (lambda: os.kill(int(process.name), 0), lambda: open(process / "mem", "rb"),
                        lambda: os.listdir(process / "fd"), lambda: os.listdir(process / "root")):
            try:
                attempt()
                reached.append(str(process))
            except PermissionError:
                pass
def ask(line):
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(jobs)
        agent.sendall(line.encode() + b"\\n")
        return agent.recv(1000).decode()
said = [ask(f"release job={job}"), ask(f"provide job={job} uid={os.getuid()} cores=1 memory=300 nodes=mvp1 node=mvp1"),
        ask(f"enter job={job} vm=0")]
entered = subprocess.run([program, jobs, job, "0", "command", "id"], capture_output=True, text=True)
print(json.dumps({"reached": reached, "looked": looked, "qemus": qemus, "said": said, "entered": entered.returncode,
                  "output": entered.stdout}))
"""


def _assert_out_of_reach_on_the_node(lab: LabUnderTest, job: str, here: Path) -> None:
    """A process of the other user on the bare node reaches no file, socket, memory or process of the job's VMs, and the
    agent does nothing for it."""
    own, where = lab.where.host("mvp1"), lab.where
    running = HostInit(lab_of(lab).plan.physical_nodes[0]).service.running(where)
    assert running is not None
    memory = Path(f"/proc/{running.pid}/root{where.memory}")
    trees = [(own.root, where.root, place) for place in (own.controller / "vms", own.run / "vms", own.agent)]
    trees.append((memory, where.memory, memory))
    paths, sockets = list[str](), list[str]()
    for outside, seen, tree in trees:
        for path in below(tree):
            kind = path.lstat().st_mode
            chosen = sockets if stat.S_ISSOCK(kind) else paths if stat.S_ISREG(kind) else None
            if chosen is not None:
                chosen.append(str(seen / path.relative_to(outside)))
    told, program = here / "told", here / "intruder.py"
    told.write_text(json.dumps([paths, sockets, spank.installed(where, "mventer"), str(where.jobs_socket), job]))
    program.write_text(INTRUDER)
    options = ("--quiet", "--partition=physical", "--nodelist=mvp1", "--mem=100")
    done = lab.run("srun", *options, "python3", str(program), str(told), user=lab.other, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["reached"] and found["looked"] == len(paths) + len(sockets) and paths and sockets
    assert found["qemus"] == 3, "it sees those of both jobs"
    refused = [*["error only root may do that: Slurm's plugin does it for the job\n"] * 2]
    assert found["said"][:2] == refused and "has no VM of yours" in found["said"][2]
    assert (found["entered"], found["output"]) == (1, "")
