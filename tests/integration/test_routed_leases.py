"""Leased hosts where a router is between the machines: a job on a static and a leased host, seen from inside guests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.model.identity import mac_of, network_id_of, serial_of, site_of
from multiverse.pilot.lease import port_name
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.plan import LabOptions
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.moving_jobs import install, result, vms_of
from tests.integration.test_reach import server, tried_in
from tests.integration.test_routed_hosts import GANG, TALK, entries, plan_of, send
from tests.integration.vxlan_hosts import forged_packet
from tests.integration.watch import accounted, ended, output_of, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

NODE = "mvp1"

_MEET = """
import os, socket, subprocess
names = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True).stdout.split()
(peer,) = {*names} - {socket.gethostname()}
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("", 7002))
end.settimeout(1)
for _ in range(60):
    end.sendto(b"hello", (peer, 7002))
    try:
        print("met" if end.recv(100) == b"hello" else "strange", flush=True)
        break
    except TimeoutError:
        continue
for _ in range(5):  # the peer may have begun later
    end.sendto(b"hello", (peer, 7002))
"""


@pytest.fixture(scope="module")
def routed(accelerator: Path) -> Iterator[LabUnderTest]:
    """Two hosts and a bare-metal node, of which one host is drained. A job of two whole hosts needs a lease."""
    slim()
    options = LabOptions(hosts=2, physical=1, routed=True, cores=4, memory=6144)
    with new_lab(accelerator, options, controller=False) as made:
        lease = '[[lease]]\npartition = "physical"\nmin_wait = 1\nidle = 5\ntime_limit = 1800\nmax = 2\n'
        # Two of them fit on the node.
        (made.where.etc / "site.toml").write_text(
            f"{lease}cpus = 2\nmemory = 2800\n[rebalance]\nkeeps = 86400\n"  # packing alone moves nothing
        )
        with (made.where.etc / "site.conf").open("a") as file:
            file.write("KillWait=75\n")  # VMs leave a pilot that is told to end
        asyncio.run(lifecycle.up(made.where, options))
        yield made


@pytest.fixture(scope="module")
def client(routed: LabUnderTest) -> Iterator[Client]:
    with Client(routed.settings.socket) as made:
        until("both hosts are observed", lambda: all(each["known"] for each in made.status()["sources"]))
        made.change_hosts("drain", "mvh2")
        yield made


def on_node(lab: LabUnderTest, *argv: str) -> str:
    """The output of a command in the node's network."""
    first = physical_services(plan_of(lab).physical_nodes[0])[0].running(lab.where)
    assert first is not None
    argv = ("nsenter", f"--net=/proc/{first.pid}/ns/net", *argv)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def remains(lab: LabUnderTest) -> list[str]:
    """What is on the node of leases: directories, interfaces, rules."""
    own = lab.where.host(NODE)
    links = [each["ifname"] for each in json.loads(on_node(lab, "ip", "-j", "link"))]
    tables = on_node(lab, "nft", "list", "tables").splitlines()
    return [
        *(f"lease {path.name}" for path in own.leases.glob("lease-*")),
        *(str(path) for path in own.leases.glob(".vxlan-*/[!.]*")),
        *(name for name in links if name.startswith(("vx", "lse"))),
        *(table for table in tables if "vxlan" in table),
    ]


def leases(client: Client) -> dict[str, str]:
    """The pilots of the leases that are held, by the leases' names."""
    return {one["name"]: one["pilot"] for one in client.leases() if one["state"] == "held"}


def test_a_job_on_a_static_and_a_leased_host(routed: LabUnderTest, client: Client) -> None:
    plan, home = plan_of(routed), routed.user.home
    for name, text in (("talk.py", TALK), ("gang.sh", GANG.format(home=home))):
        (home / name).write_text(text)
    out = home / "gang.out"
    size = ("-N2", "--comment=vm:per-host=1", "-c2", "--mem=1000", "--time=15")
    gang = routed.sbatch(f"sh {home}/gang.sh", *size, f"--output={out}")
    until("both VMs listen", lambda: len(list(home.glob("listens.*"))) == 2, 300)
    vms = {vm["host"].partition("-")[0]: vm for vm in client.vms() if vm["job_id"] == gang}
    assert set(vms) == {"mvh1", "lease"}
    site, static, leased = site_of(vms["lease"]["name"]), vms["mvh1"], vms["lease"]
    macs = {which: mac_of(site, serial_of(vm["name"])) for which, vm in vms.items()}
    known = entries(routed, site)
    assert known["mvh1"].count(macs["lease"]) == 1 and macs["lease"] in known["controller"]
    assert macs["mvh1"] in on_node(routed, "bridge", "fdb", "show", "dev", f"vx{site}")

    # A user of the node, and root of another machine, send what only the node's vxlan may.
    addresses = {which: vm["address"].partition("/")[0] for which, vm in vms.items()}
    packet = forged_packet(network_id_of(site), *((macs[which], addresses[which]) for which in ("lease", "mvh1")))
    first = physical_services(plan.physical_nodes[0])[0].running(routed.where)
    assert first is not None
    node, target = Path(f"/proc/{first.pid}/ns/net"), plan.own_hosts[0].address
    for namespace, uid in ((node, routed.other.uid), (node, 0), (Path(f"/run/netns/{plan.router}"), 0)):
        for _ in range(5):
            send(namespace, uid, packet, target, routed.settings.vxlan.port)
    (home / "sent").touch()
    ended(client, gang, "done")
    talked = f"mtu 1450 heard 1450 larger EMSGSIZE got {8 << 20}"
    assert sorted(output_of(out).split("\n")[:-1]) == [talked, talked, "open"]
    assert static["host"] == "mvh1" and leased["host"].startswith("lease-")
    until("the lease is given back", lambda: not client.leases())
    until("nothing is left on the node", lambda: not remains(routed))
    until("nothing is left elsewhere", lambda: not any(entries(routed, site).values()))


def test_jobs_of_one_user_reach_each_other_on_a_static_and_a_leased_host(routed: LabUnderTest, client: Client) -> None:
    """Also by name and in both directions; a job of another user on the leased host reaches nothing."""
    whole_host = ("-c4", "--mem=5000", "--time=15")
    with server(routed, client, *whole_host) as where:
        (static,) = client.vms()
        assert (static["name"], static["host"]) == (where[0], "mvh1")
        reached = {"name": [where[0], ""], "address": [where[0], ""]}
        for user, expected in ((routed.user, reached), (routed.other, {"name": "unknown", "address": "refused"})):
            vm, found = tried_in(routed, client, user, where, "-c2", "--mem=1000", "--time=15")
            assert vm != where[0] and found == expected
            assert client.leases(), "no other host had room"
    until("the lease is given back", lambda: not client.leases())
    until("nothing is left on the node", lambda: not remains(routed))


def test_leases_of_one_node_share_its_vxlan_until_the_last_one_ends(routed: LabUnderTest, client: Client) -> None:
    """VMs of a job on two leases of one node reach each other by its bridge. A pilot that is killed leaves nothing, and
    the VXLAN stays for the other lease."""
    home, out = routed.user.home, routed.user.home / "both.out"
    client.change_hosts("drain", "mvh1")
    (home / "meet.py").write_text(_MEET)
    met = f"cd {home}; srun -Q python3 meet.py; sleep 900"
    size = ("-N2", "--comment=vm:per-host=1", "-c2", "--mem=1000", "--time=15")
    job = routed.sbatch(met, *size, f"--output={out}")
    until("they have met", lambda: out.exists() and output_of(out).split() == ["met", "met"], 300)
    held = leases(client)
    assert len(held) == 2
    site = site_of(client.vms()[0]["name"])
    assert json.loads(on_node(routed, "ip", "-j", "link", "show", f"vx{site}"))
    first, _ = held
    routed.run("scancel", "--signal=KILL", held[first])
    until("nothing is left of the first", lambda: not {f"lease {first}", port_name(first)} & set(remains(routed)))
    assert {f"vx{site}", f"table inet mv{site}.vxlan"} <= set(remains(routed)), "the other lease needs it"
    routed.run("scancel", job)
    until("its job is over", lambda: not client.vms())
    client.change_hosts("resume", "mvh1")
    until("the other lease is given back", lambda: not client.leases())
    until("nothing is left on the node", lambda: not remains(routed))


def test_a_vm_moves_between_leases_of_one_node_and_off_it(routed: LabUnderTest, client: Client) -> None:
    """Its stream to a VM of another host goes on: from another port of the node, and then, as that lease ends, from
    another host of the VXLAN."""
    home = routed.user.home
    for name in ("stop", "peer.listens"):  # of an earlier test
        (home / name).unlink(missing_ok=True)
    install(home)
    peer = routed.sbatch(f"exec python3 {home}/server.py {home} peer", "-c4", "--mem=5000", "--time=15")
    until("the peer listens", (home / "peer.listens").exists, 300)
    where = " ".join(map(str, json.loads((home / "peer.listens").read_text())))

    def begin(name: str, script: str) -> str:
        job = routed.sbatch(script, "-c1", "--mem=250", "--time=10", f"--output={home}/{name}.out")
        until(f"{name} runs on a lease", lambda: on_lease(job), 240)
        return job

    def on_lease(job: str) -> bool:
        found = vms_of(client, job)
        return bool(found) and found[0]["state"] == "serving" and found[0]["host"].startswith("lease-")

    def host_of(job: str) -> str:
        found = vms_of(client, job)
        assert found, (client.jobs(job), client.timeline(job))
        return str(found[0]["host"]) if found[0]["state"] == "serving" else ""

    waits = "until [ -e {}/{}.ends ]; do sleep 0.2; done"
    leaves, stays = (begin(name, waits.format(home, name)) for name in ("leaves", "stays"))
    moves = begin("moves", f"exec python3 {home}/stream.py {home} moves {where}")
    first, second = host_of(stays), host_of(moves)
    assert first == host_of(leaves) != second and len(leases(client)) == 2, (
        "the third job has no room on the first lease"
    )
    (home / "leaves.ends").touch()
    ended(client, leaves, "done")
    client.move(moves, first)
    until("it is on the other lease", lambda: host_of(moves) == first, 60)
    until("its lease is given back", lambda: [*leases(client)] == [first])

    client.change_hosts("resume", "mvh2")
    routed.run("scancel", leases(client)[first])
    until("both have left", lambda: {host_of(moves), host_of(stays)} == {"mvh2"}, 75)
    until("the lease is over", lambda: not client.leases())
    until("nothing is left on the node", lambda: not remains(routed))
    for name in ("stays.ends", "stop"):
        (home / name).touch()
    for job in (moves, stays, peer):
        ended(client, job, "done")
        assert accounted(routed, job, 90) == ("COMPLETED", "0:0")
    sent, got = result(home, "moves"), result(home, "peer")
    assert sent["wrong"] == got["wrong"] == 0 and sent["sent"] == got["got"] > 0 and sent["digest"] == got["digest"]
