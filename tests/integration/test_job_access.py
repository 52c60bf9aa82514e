"""What users of a node can do to the VM of a job there: nothing but enter their own, tried at every socket and file."""

from __future__ import annotations

import json
from ipaddress import IPv4Network

import pytest

from multiverse import config
from multiverse.agent.jobs import JobVm
from multiverse.drivers.qemu.job_vms import JobAddresses
from multiverse.guest.protocol import TASKS_PORT
from tests.integration.conftest import LabUnderTest
from tests.integration.job_nodes import JobNode, job_nodes
from tests.integration.watch import until

pytestmark = pytest.mark.integration

TRY = """
import json, os, signal, socket, sys
given = json.load(open(sys.argv[1]))
done = []

def attempt(what, action):
    try:
        result = action()
    except OSError:
        return
    done.append(f"{what}: {result!r}" if isinstance(result, (str, bytes)) else what)

def ask(path, line):
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(10)
        asked.connect(path)
        asked.sendall(line.encode() + b"\\n")
        answer = asked.recv(1000).decode()
        if answer.startswith("error "):
            raise OSError(answer)
        return answer

def entries(top):
    yield top
    for directory, directories, files in os.walk(top):
        for name in directories + files:
            yield os.path.join(directory, name)

for line in given["requests"]:
    attempt(line, lambda: ask(given["agent"], line))
for top in given["private"]:
    for path in entries(top):
        attempt(f"read {path}", lambda: os.listdir(path) and None if os.path.isdir(path) else open(path, "rb").close())
for path in given["sockets"]:
    attempt(f"connect to {path}", lambda: ask(path, '{"execute": "qmp_capabilities"}'))
for path in given["files"]:
    attempt(f"read {path}", lambda: open(path, "rb").close())
for top in given["unwritable"] + given["private"]:
    for path in entries(top):
        if os.path.isdir(path):
            attempt(f"create in {path}", lambda: open(os.path.join(path, "mine"), "w").close())
        else:
            attempt(f"write {path}", lambda: open(path, "r+b").close())
            attempt(f"remove {path}", lambda: os.unlink(path))
for pid in given["processes"]:
    attempt(f"kill {pid}", lambda: os.kill(pid, signal.SIGTERM))
    for name in ("mem", "maps", "environ", "auxv", "io", "syscall", "stack"):
        attempt(f"read /proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1) and None)
    for name in ("fd", "root", "cwd", "map_files"):
        attempt(f"list /proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}") and None)
for group in given["groups"]:
    attempt(f"join {group}", lambda: open(group + "/cgroup.procs", "w").write("0") and None)
    attempt(f"make a group in {group}", lambda: os.mkdir(group + "/mine"))
for address in given["addresses"]:
    attempt(f"connect to {address}", lambda: socket.create_connection(tuple(address), 5).close())
print(json.dumps(done))
"""


def _attempts(node: JobNode, uid: int, given: dict[str, object]) -> list[str]:
    """What a user on the node succeeds in."""
    home = node.under_test.user.home
    program, words = home / "try.py", home / "try.json"
    program.write_text(TRY)
    words.write_text(json.dumps(given))
    done = node.under_test.run(
        *node.inside,
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "/usr/bin/python3",
        str(program),
        str(words),
    )
    return [str(one) for one in json.loads(done.stdout)]


@pytest.mark.slow
def test_no_user_of_the_node_reaches_the_vm_of_a_job_by_any_socket_file_or_process(lab_of_two: LabUnderTest) -> None:
    node = job_nodes(lab_of_two)[0]
    lab, settings = node.under_test, config.load(node.own.settings)
    job, _ = node.begun("sleep 600")
    (name,) = (path.name for path in (node.own.controller / "vms").glob("mvjob-*"))
    (known,) = json.loads((node.own.agent / "jobs" / f"{job}.json").read_text())
    vms, sockets = settings.qemu.vms / name, settings.qemu.run / name
    groups = (node.own.run / "jobs" / f"{job}.groups").read_text().split()
    vm = JobVm(**known | {key: tuple(known[key]) for key in ("groups", "nodes")})
    local = JobAddresses(IPv4Network(settings.job_vms.subnet)).local(vm)
    qemu, agent = node.processes("qemu-system-x86_64"), node.processes("agent")
    assert qemu and agent and groups
    others = [f"provide job={job} uid={lab.other.uid} cores=1 allocated=700 nodes={node.name} node={node.name}",
              f"provide job={job} uid={lab.user.uid} cores=1 allocated=700 nodes={node.name} node={node.name}",
              f"release job={job}"]  # fmt: skip
    given = {
        "agent": str(settings.job_vms.socket),
        "requests": others,
        "private": [str(vms), str(sockets), str(settings.agent.state_dir), str(settings.qemu.templates)],
        "files": [f"{vms}/disk.qcow2", f"{vms}/manifest.json", f"{settings.agent.state_dir}/jobs/{job}.json"],
        "sockets": [f"{sockets}/qmp", f"{sockets}/agent"],
        "unwritable": [str(settings.job_vms.records), str(settings.qemu.images), str(settings.qemu.run)],
        "processes": [*qemu, *agent],
        "groups": groups,
        "addresses": [[local, TASKS_PORT]],
    }
    try:
        assert _attempts(node, lab.user.uid, given) == []
        assert _attempts(node, lab.other.uid, {**given, "requests": [*others, f"enter job={job} vm=0"]}) == []
        unchanged = {key: [] for key in ("requests", "private", "unwritable", "processes", "groups")}
        as_root = _attempts(node, 0, {**given, **unchanged})
        assert f"connect to {[local, TASKS_PORT]}" in as_root, "it is there, and only root reaches it"
        assert {f"read {path}" for path in given["files"]} <= set(as_root)  # type: ignore[attr-defined]
        assert lab.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "RUNNING"
    finally:
        lab.run("scancel", job)
        until("the node is idle", lambda: node.state() == "idle", 90)
