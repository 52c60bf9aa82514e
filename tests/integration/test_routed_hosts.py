"""A lab whose hosts are in different networks with a router between them: jobs across them, seen from inside guests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.model.identity import mac_of, network_id_of, serial_of, site_of
from multiverse.system import kernel
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.plan import LabHost, LabOptions, LabPlan, load
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.test_reach import server, tried
from tests.integration.vxlan_hosts import forged_packet
from tests.integration.watch import ended, kill, latest, output_of, qemu_of, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

TALK = """
import errno, os, socket, sys, time
own, peer, home = sys.argv[1:]
def connected(port):  # the peer may listen later
    for _ in range(60):
        try:
            return socket.create_connection((peer, port), 5)
        except OSError as error:
            why = error
            time.sleep(1)
    raise why
first = own < peer
with open("/sys/class/net/" + min(set(os.listdir("/sys/class/net")) - {"lo"}) + "/mtu") as file:
    mtu = int(file.read())
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((own, 7002))
end.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: nothing is fragmented
end.settimeout(1)
heard = 0
for _ in range(60):
    end.sendto(bytes(mtu - 28), (peer, 7002))
    try:
        heard = len(end.recv(65536)) + 28
        end.sendto(bytes(mtu - 28), (peer, 7002))  # the peer may have begun later
        break
    except TimeoutError:
        pass
try:
    end.sendto(bytes(mtu - 27), (peer, 7002))
    larger = "sent"
except OSError as error:
    larger = errno.errorcode[error.errno]
got, size = 0, 8 << 20
if first:
    server = socket.create_server((own, 7003))
    server.settimeout(60)
    with server.accept()[0] as connection:
        while data := connection.recv(65536):
            got += len(data)
else:
    connection = connected(7003)
    connection.sendall(bytes(size))
    connection.close()
print(f"mtu {mtu} heard {heard} larger {larger} got {got if first else size}", flush=True)
forged = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
forged.bind((own, 7001))
forged.settimeout(0.2)
open(f"{home}/listens.{own}", "w").close()
while not os.path.exists(f"{home}/sent"):
    try:
        print("forged", forged.recv(100), flush=True)
    except TimeoutError:
        pass
# The way is still open after all that.
if first:
    again = socket.create_server((own, 7004))
    again.settimeout(60)
    again.accept()[0].sendall(b"open")
else:
    print(connected(7004).recv(10).decode(), flush=True)
"""

GANG = """#!/bin/sh
srun -Q sh -c 'own=$(getent hosts $(hostname) | cut -d" " -f1)
for node in $(scontrol show hostnames); do
  peer=$(getent hosts $node | cut -d" " -f1); [ $peer = $own ] || exec python3 {home}/talk.py $own $peer {home}
done'
"""

_STRANGER = """
import socket, sys
for address in sys.argv[1:]:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.sendto(b"stranger", (address, 7001))
    try:
        socket.create_connection((address, 7001), 3)
        print("reached", address)
    except ConnectionRefusedError:
        print("reached", address)
    except OSError:
        print("not", address)
"""


@pytest.fixture(scope="module")
def routed(accelerator: Path) -> Iterator[LabUnderTest]:
    slim()
    with new_lab(accelerator, LabOptions(hosts=2, routed=True, cores=4, memory=8192), controller=True) as made:
        yield made


@pytest.fixture(scope="module")
def client(routed: LabUnderTest) -> Iterator[Client]:
    with Client(routed.settings.socket) as made:
        until("both hosts are observed", lambda: all(each["known"] for each in made.status()["sources"]))
        for host in plan_of(routed).own_hosts:
            made.template("build", "slim", host.name)
        yield made


def plan_of(lab: LabUnderTest) -> LabPlan:
    plan = load(lab.where)
    assert plan is not None
    return plan


def on(lab: LabUnderTest, host: LabHost, command: str) -> str:
    argv = ["ssh", "-F", str(lab.where.ssh_config), host.name, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def pid_of(lab: LabUnderTest, host: LabHost, part: int = 0) -> int:
    running = host_services(host)[part].running(lab.where)
    assert running is not None
    return running.pid


def send(namespace: Path, uid: int, packet: bytes, target: str, port: int) -> None:
    """Send a datagram from a network namespace, as a user."""
    child = os.fork()
    if child == 0:
        try:
            with namespace.open() as file:
                kernel.setns(file.fileno(), kernel.CLONE_NEWNET)
            os.setresuid(uid, uid, uid)
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(packet, (target, port))
        except PermissionError:  # it is dropped where it is sent
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def up_again(lab: LabUnderTest) -> None:
    asyncio.run(lifecycle.up(lab.where, LabOptions()))


def entries(lab: LabUnderTest, site: str) -> dict[str, list[str]]:
    """By machine, the VMs' MACs of other machines that it knows a way to."""
    command = f"bridge fdb show dev vx{site} | grep ' self' || true"
    found = {host.name: on(lab, host, command) for host in plan_of(lab).own_hosts}
    found["controller"] = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    return {name: sorted(line.split()[0] for line in text.splitlines()) for name, text in found.items()}


@pytest.mark.slow
def test_vms_of_a_job_on_two_networks_reach_each_other_and_nobody_else_them(
    routed: LabUnderTest, client: Client
) -> None:
    plan, home = plan_of(routed), routed.user.home
    for name, text in (("talk.py", TALK), ("gang.sh", GANG.format(home=home)), ("stranger.py", _STRANGER)):
        (home / name).write_text(text)
    out, other = home / "gang.out", routed.other.home / "stranger.out"
    apart = ("--comment=vm:per-host=1", "--constraint=place-pack")
    gang = routed.sbatch(f"sh {home}/gang.sh", "-N2", *apart, "--mem=300", f"--output={out}")
    until("both VMs listen", lambda: len(list(home.glob("listens.*"))) == 2)
    vms = sorted((vm for vm in client.vms() if vm["job_id"] == gang), key=lambda vm: vm["host"])
    assert [vm["host"] for vm in vms] == ["mvh1", "mvh2"]
    site, addresses = site_of(vms[0]["name"]), [vm["address"].partition("/")[0] for vm in vms]
    macs = {vm["host"]: mac_of(site, serial_of(vm["name"])) for vm in vms}
    known = entries(routed, site)
    assert macs["mvh2"] in known["mvh1"] and macs["mvh1"] in known["mvh2"]
    assert known["controller"] == sorted(macs.values())

    # Another machine, and a user of a host, send what only the first host may send to the second one's VM.
    packet = forged_packet(
        network_id_of(site), *((macs[name], where) for name, where in zip(macs, addresses, strict=True))
    )
    target, port = plan.own_hosts[1].address, routed.settings.vxlan.port
    host = Path(f"/proc/{pid_of(routed, plan.own_hosts[0])}/ns/net")
    for namespace, uid in ((Path(f"/run/netns/{plan.router}"), 0), (host, 0), (host, routed.other.uid)):
        for _ in range(5):
            send(namespace, uid, packet, target, port)
    tries = f"python3 {home}/stranger.py {' '.join(addresses)}"
    stranger = routed.sbatch(tries, "-c1", "--mem=300", f"--output={other}", user=routed.other)
    ended(client, stranger, "done")
    assert output_of(other).split("\n")[:-1] == [f"not {address}" for address in addresses]

    # The agent ends and its interface is removed: the next agent restores it, and the VMs go on.
    os.kill(pid_of(routed, plan.own_hosts[0], 2), signal.SIGKILL)
    on(routed, plan.own_hosts[0], f"ip link del vx{site}")
    up_again(routed)
    until("the way is there again", lambda: entries(routed, site) == known)
    (home / "sent").touch()
    ended(client, gang, "done")
    said = sorted(output_of(out).split("\n")[:-1])
    talked = f"mtu 1450 heard 1450 larger EMSGSIZE got {8 << 20}"
    assert said == [talked, talked, "open"]
    until("its VMs are gone", lambda: not client.vms())
    until("nothing of them is left", lambda: not any(entries(routed, site).values()))


@pytest.mark.slow
def test_a_vm_that_replaces_another_one_and_its_peer_reach_each_other(routed: LabUnderTest, client: Client) -> None:
    """The peer was started, and told of its peers, before there was that VM."""
    out = routed.user.home / "replaced.out"
    job = routed.sbatch("srun -Q -l hostname", "-N2", "--comment=vm:per-host=1", "--mem=300", f"--output={out}")
    kill(until("a VM has its QEMU while both are started", lambda: spawning(client, job)))
    row = ended(client, job, "done")
    ran = set(output_of(out).split()[1::2])
    assert len(ran) == 2 and ran <= set(row["vms"])
    until("its VMs are gone", lambda: not client.vms())
    until("nothing of them is left", lambda: not any(entries(routed, site_of(row["vms"][0])).values()))


def spawning(client: Client, job: str) -> int:
    """The pid of the QEMU of one of the job's VMs while these are started, or else 0."""
    row = latest(client, job)
    assert row.get("state") != "done", "the job ended before a VM could be killed"
    if row.get("state") != "spawning":
        return 0
    for vm in row["vms"]:
        try:
            return qemu_of(vm)
        except AssertionError:
            continue
    return 0


def only_on(client: Client, host: str) -> None:
    """Let jobs that come start on that host alone."""
    for one in ("mvh1", "mvh2"):
        client.change_hosts("resume" if one == host else "drain", one)


@pytest.mark.slow
def test_jobs_of_one_user_on_two_networks_reach_each_other_by_name(routed: LabUnderTest, client: Client) -> None:
    """And nothing is left of what the hosts were told of each other's VMs."""
    try:
        only_on(client, "mvh1")
        with server(routed, client) as where:
            only_on(client, "mvh2")
            reached = {"name": [where[0], ""], "address": [where[0], ""]}
            assert tried(routed, client, routed.user, where) == reached
            assert tried(routed, client, routed.other, where) == {"name": "unknown", "address": "refused"}
            os.kill(pid_of(routed, plan_of(routed).own_hosts[0], 2), signal.SIGKILL)  # the agent of the server's host
            up_again(routed)
            assert tried(routed, client, routed.user, where) == reached
    finally:
        client.change_hosts("resume", "mvh[1-2]")
    until("its VMs are gone", lambda: not client.vms())
    until("nothing of them is left", lambda: not any(entries(routed, site_of(where[0])).values()))
    for host in plan_of(routed).own_hosts:
        kept = f"{routed.settings.qemu.vms}/.mv*members {routed.where.controller}/vxlan-*/members:*"
        records = f"ls {kept} 2>/dev/null || true"
        assert on(routed, host, records) == ""
