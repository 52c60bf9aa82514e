"""Two hosts with a router between them, and a stranger, as a program: without VMs, in namespaces of its own.

Run it as `unshare --net --mount python -m tests.integration.vxlan_hosts DIRECTORY`. Each host has a bridge with a
guest, which is a namespace too. It prints what reaches whom, as JSON. Nothing of it is left when it has ended.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from multiverse.core.errors import Broken, Refused
from multiverse.core.model.identity import Member, Neighbour
from multiverse.host.vxlan import Vxlan, VxlanConfig, machine_owner
from multiverse.pilot.lease import LeaseDirectory, join_vxlan, leave_vxlan, vxlan_of_node
from multiverse.system import kernel

PORT, NETWORK, MTU = 14789, 0x123456, 1450
HOSTS = ("h1", "h2", "stranger")
WORD = b"forged"
FORGED, PLAIN = 7001, 7002  # UDP ports of the guests
NOBODY = 65534
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2  # <linux/in.h>


def run(command: str, within: str = "") -> str:
    argv = [*(("ip", "netns", "exec", within) if within else ()), *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in the namespace."""
    with Path("/proc/self/ns/net").open() as own, Path(f"/run/netns/{name}").open() as other:
        kernel.setns(other.fileno(), kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.setns(own.fileno(), kernel.CLONE_NEWNET)


def machine(n: int) -> str:
    return f"10.9.{n}.2"


def guest(n: int) -> Neighbour:
    return Neighbour(f"10.77.0.{n}", f"02:00:00:00:00:0{n}", machine(n))


def build() -> None:
    run("mount --make-rprivate /")
    Path("/run/netns").mkdir(exist_ok=True)
    run("mount -t tmpfs tmpfs /run/netns")
    for name in ("router", *HOSTS, "g1", "g2"):
        run(f"ip netns add {name}")
        run("ip link set lo up", name)
    for n, host in enumerate(HOSTS, 1):
        run(f"ip link add under netns {host} type veth peer name r{n} netns router")
        run(f"ip addr add {machine(n)}/24 dev under", host)
        run("ip link set under up", host)
        run(f"ip addr add 10.9.{n}.1/24 dev r{n}", "router")
        run(f"ip link set r{n} up", "router")
        run(f"ip route add default via 10.9.{n}.1", host)
    run("sysctl -q net.ipv4.ip_forward=1", "router")
    for n in (1, 2):
        run("ip link add bridge0 type bridge", f"h{n}")
        run("ip link set bridge0 up", f"h{n}")
        run(f"ip link add tap netns h{n} type veth peer name eth0 netns g{n}")
        run("ip link set tap master bridge0 up", f"h{n}")
        run(f"ip link set eth0 address {guest(n).mac} mtu {MTU}", f"g{n}")
        run(f"ip addr add {guest(n).address}/16 dev eth0", f"g{n}")
        run("ip link set eth0 up", f"g{n}")


def vxlan(directory: Path, n: int, *, port: int = PORT, mtu: int = MTU, address: str = "") -> Vxlan:
    """Made where this thread is in the host's namespace."""
    records = directory / f"records{n}"
    return Vxlan(VxlanConfig("test0", NETWORK, port, lambda: address or machine(n), mtu, "bridge0", records))


def passes(size: int, target: str = guest(2).address, tries: int = 10) -> bool:
    """Whether a packet of `size` bytes of the first guest, which must not be fragmented, arrives, and its answer."""
    ends = []
    for n, address in ((1, guest(1).address), (2, guest(2).address)):
        with inside(f"g{n}"):
            ends.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        ends[-1].setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        ends[-1].bind((address, PLAIN))
        ends[-1].settimeout(0.5)
    first, second = ends
    with first, second:
        for _ in range(tries):  # the first one may wait until the router has been found
            try:
                first.sendto(bytes(size - 28), (target, PLAIN))
                _, sender = second.recvfrom(1 << 16)
                second.sendto(bytes(size - 28), sender)
                return len(first.recv(1 << 16)) == size - 28
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMSGSIZE, errno.EHOSTUNREACH):
                    raise
                return False
    return False


def transfers(octets: int) -> bool:
    """Whether the second guest gets all that the first one sends by TCP."""
    with inside("g2"):
        server = socket.create_server((guest(2).address, 7003))
    with inside("g1"):
        client = socket.create_connection((guest(2).address, 7003), 10)
    accepted, _ = server.accept()
    with server, client, accepted:
        accepted.settimeout(10)
        if os.fork() == 0:
            client.sendall(bytes(octets))
            os._exit(0)
        client.close()
        got = 0
        while data := accepted.recv(1 << 16):
            got += len(data)
        os.wait()
    return got == octets


# --- forged packets ---------------------------------------------------------------------------------


def forged_packet(network: int, source: tuple[str, str], target: tuple[str, str]) -> bytes:
    """A VXLAN packet (RFC 7348) with a frame from one guest to another, each given by MAC and address."""
    octets = [bytes.fromhex(mac.replace(":", "")) for mac, _ in (target, source)]
    data = struct.pack("!HHHH", FORGED, FORGED, 8 + len(WORD), 0) + WORD
    addresses = socket.inet_aton(source[1]) + socket.inet_aton(target[1])
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0) + addresses
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + ip[12:]
    return struct.pack("!II", 0x0800_0000, network << 8) + b"".join(octets) + b"\x08\x00" + ip + data


def send(where: str, uid: int = 0, target: str = machine(2)) -> None:
    """Send from there to the second host, as that user, what only the first host may send."""
    packet = forged_packet(NETWORK, *((guest(n).mac, guest(n).address) for n in (1, 2)))
    child = os.fork()
    if child == 0:
        try:
            with Path(f"/run/netns/{where}").open() as other:
                kernel.setns(other.fileno(), kernel.CLONE_NEWNET)
            os.setresuid(uid, uid, uid)
            with suppress(PermissionError):  # a packet that is dropped where it is sent
                family = socket.AF_INET6 if ":" in target else socket.AF_INET
                socket.socket(family, socket.SOCK_DGRAM).sendto(packet, (target, PORT))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"nothing could be sent from {where}")


class Guest:
    """What the second guest hears."""

    def __init__(self) -> None:
        with inside("g2"):
            self._heard = {port: socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for port in (FORGED, PLAIN)}
            for port, one in self._heard.items():
                one.bind((guest(2).address, port))
        with inside("g1"):
            self._honest = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def hears(self, where: str, uid: int = 0, target: str = machine(2)) -> bool:
        """Whether a forged packet comes through: if so, before one that the first guest sends after it. Each is sent
        until that one arrives: a first packet may wait for the router to be found, and be lost."""
        heard, end = False, time.monotonic() + 20
        self._heard[PLAIN].settimeout(0.3)
        while time.monotonic() < end:
            for _ in range(3):
                send(where, uid, target)
            self._honest.sendto(b"honest", (guest(2).address, PLAIN))
            try:
                self._heard[PLAIN].recv(100)
            except TimeoutError:
                continue
            self._heard[FORGED].settimeout(0.3)
            try:
                while self._heard[FORGED].recv(100) == WORD:
                    heard = True
            except TimeoutError:
                return heard
        raise RuntimeError("the honest packet never arrived")


def forging(second: Guest) -> dict[str, bool]:
    found = {
        "stranger": second.hears("stranger"),
        "user": second.hears("h1", NOBODY),
        "root": second.hears("h1"),
    }
    # The host translates the addresses of what its guests send to the network of the hosts.
    run("ip addr add 10.77.255.1/16 dev bridge0", "h1")
    run("sysctl -q net.ipv4.ip_forward=1", "h1")
    run("ip route add 10.9.0.0/16 via 10.77.255.1", "g1")
    run("nft add table ip site", "h1")
    run("nft add chain ip site nat { type nat hook postrouting priority 100 ; }", "h1")
    run("nft add rule ip site nat oifname under masquerade", "h1")
    found["guest"] = second.hears("g1")
    # That each of them would come through, if there were no such rule.
    run("nft flush chain inet mvtest0.vxlan leaving", "h1")
    found["user without rule"] = second.hears("h1", NOBODY)
    found["guest without rule"] = second.hears("g1")
    run("nft flush chain inet mvtest0.vxlan arriving", "h2")
    found["stranger without rule"] = second.hears("stranger")
    return found


# --- entries ----------------------------------------------------------------------------------------


def entries(host: str) -> dict[str, list[str]]:
    """What the kernel and the firewall know of other hosts."""
    nft = json.loads(run("nft -j list set inet mvtest0.vxlan machines", host))
    elements = next(each["set"] for each in nft["nftables"] if "set" in each).get("elem", [])
    return {
        "fdb": sorted(line.split(" self")[0] for line in run("bridge fdb show dev vxtest0", host).splitlines()
                      if " self" in line),
        "neighbours": sorted(line.split(" PERM")[0] for line in run("ip neigh show dev vxtest0", host).splitlines()),
        "machines": sorted(elements),
    }  # fmt: skip


def sent(host: str) -> int:
    """How many packets the VXLAN has sent."""
    return int(json.loads(run("ip -j -s link show vxtest0", host))[0]["stats64"]["tx"]["packets"])


def refusal(directory: Path, n: int, **other: int | str) -> str:
    try:
        vxlan(directory, n, **other).restore()  # type: ignore[arg-type]
    except Refused as error:
        return error.message
    return ""


# --- leases -----------------------------------------------------------------------------------------


def over_ipv6(directory: Path) -> dict[str, bool]:
    """The first two hosts are connected by IPv6: 20 bytes less are left for packets of guests."""

    def six(n: int) -> str:
        return f"fd09:{n}::2"

    run("sysctl -q net.ipv6.conf.all.forwarding=1", "router")
    for n, host in enumerate(HOSTS, 1):
        run(f"ip addr add {six(n)}/64 dev under nodad", host)
        run(f"ip addr add fd09:{n}::1/64 dev r{n} nodad", "router")
        run(f"ip route add default via fd09:{n}::1", host)
    made = {}
    for n, other in ((1, 2), (2, 1)):
        with inside(f"h{n}"):
            records = directory / f"six{n}"
            made[n] = Vxlan(VxlanConfig("test0", NETWORK, PORT, partial(six, n), MTU - 20, "bridge0", records))
            for _ in range(2):  # the second time, it is there
                made[n].restore()
            made[n].add(f"mvtest0-{n}", [replace(guest(other), machine=six(other))])
    found = {"passes": passes(MTU - 20), "transfer": transfers(1 << 20)}
    second = Guest()
    found |= {"user": second.hears("h1", NOBODY, six(2)), "stranger": second.hears("stranger", 0, six(2))}
    found["by IPv4"] = second.hears("h1", NOBODY)
    run("nft flush chain inet mvtest0.vxlan leaving", "h1")
    found["user without rule"] = second.hears("h1", NOBODY, six(2))
    for n in (1, 2):
        with inside(f"h{n}"):
            made[n].drop(f"mvtest0-{n}")
    found["entries at the end"] = any(entries("h1").values())
    for n in (1, 2):
        with inside(f"h{n}"):
            made[n].remove()
    return found


def leases(directory: Path) -> dict[str, object]:
    """Two leases of the first host share its VXLAN, and end one after the other. Their agents are elsewhere, as this
    thread is: in networks of their own."""
    base = directory / "leases"
    with inside("h1"):
        config = vxlan_of_node(vxlan(directory, 1).config, base, lambda: machine(1))
    one, two = LeaseDirectory(base / "lease-test0-1"), LeaseDirectory(base / "lease-test0-2")
    for place, vm in ((one, "mvtest0-1"), (two, "mvtest0-2")):
        (place.vms / vm).mkdir(parents=True)
        with inside("h1"):
            join_vxlan(config, "10.77.0.1")
        Vxlan(config).add(vm, [guest(2)])
    Vxlan(config).restore(config.is_of_others)  # as the agent of one of them does when it starts again
    found: dict[str, object] = {"both": sorted(Vxlan(config).owners()), "reached": passes(MTU)}
    with inside("h1"):
        leave_vxlan(base, one)
        shutil.rmtree(one.root)
        found["other"] = sorted(Vxlan(config).owners()) == ["mvtest0-2"] and passes(MTU)
        leave_vxlan(base, two)
        leave_vxlan(base, two)
        found["left"] = "vxtest0" in run("ip link show") or "mvtest0" in run("nft list ruleset")
        try:
            join_vxlan(config, machine(1))
        except Refused as error:
            found["refused"] = error.message
    return found


def moved(made: Vxlan, directory: Path) -> dict[str, object]:
    """The second guest moves from the second machine to the third. Two VMs of its job and its group know it."""

    def there(n: int) -> list[Member]:
        return [Member("mvtest0-2", guest(2).address, guest(2).mac, f"h{n}", 7, machine(n))]

    made.drop("mvtest0-1")
    for owner in ("mvtest0-1", "mvtest0-3"):
        made.add(owner, [guest(2)])
    made.replace_members("h1", there(2))
    made.add(machine_owner("mvtest0-2"), [guest(2)])
    made.replace_members("h1", there(3))
    found: dict[str, object] = {"where": entries("h1")}
    again = vxlan(directory, 1)  # the agent is started again
    again.restore()
    found["restarted"] = entries("h1") == found["where"]
    again.drop("mvtest0-3")
    found["one of the job has ended"] = entries("h1") == found["where"]
    again.replace_members("h1", [])
    again.drop("mvtest0-1")
    again.drop(machine_owner("mvtest0-2"))
    found["ended"] = (entries("h1"), sorted(again.owners()))
    return found


def failed(made: Vxlan) -> dict[str, object]:
    """A change fails in the middle, and is told again, as it was."""
    member = Member("mvtest0-2", guest(2).address, guest(2).mac, "h2", 7, machine(2))
    with mock.patch.object(made, "_program", side_effect=OSError("no memory")), suppress(Broken):
        made.replace_members("h1", [member])
    found: dict[str, object] = {"failed": entries("h1")}
    made.replace_members("h1", [member])
    found["again"] = entries("h1")
    made.replace_members("h1", [])
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    build()
    found: dict[str, object] = {}
    made = {}
    for n, other in ((1, 2), (2, 1)):
        with inside(f"h{n}"):
            made[n] = vxlan(directory, n)
            made[n].restore()
            made[n].add(f"mvtest0-{n}", [guest(other)])
    found["full size"] = passes(MTU)
    found["too large"] = passes(MTU + 1)
    found["transfer"] = transfers(4 << 20)
    before = sent("h1")
    found["unknown address"] = passes(100, "10.77.0.9", tries=2)
    found["sent for it"] = sent("h1") - before
    found["forged"] = forging(Guest())
    with inside("h1"):
        run("nft flush ruleset")
        made[1].add("mvtest0-1", [guest(2)])
        found["after a flush"] = passes(MTU) and "mark" in run("nft list chain inet mvtest0.vxlan leaving")
        made[1].add("mvtest0-4", [Neighbour("10.77.0.4", "02:00:00:00:00:04", machine(2))])
        run("nft flush ruleset")
        made[1].drop("mvtest0-4")
        found["dropped after a flush"] = "00:00:04" not in run("bridge fdb show dev vxtest0")
        made[1].add("mvtest0-1", [guest(2)])
    found["entries"] = entries("h1")
    with inside("h1"):
        run("ip link del vxtest0")
        run("nft delete table inet mvtest0.vxlan")
        again = vxlan(directory, 1)
        again.restore()
        found["restored"] = entries("h1") == found["entries"] and passes(MTU)
        again.add("mvtest0-3", [guest(2)])
        again.add("mvtest0-3", [Neighbour("10.77.0.8", "02:00:00:00:00:08", machine(3))])
        again.drop("mvtest0-1")
        found["a shared entry stays"] = passes(MTU)
        again.drop("mvtest0-3")
        again.drop("mvtest0-3")
        found["entries at the end"] = entries("h1")
        found["reached at the end"] = passes(100, tries=2)
        found["moved"] = moved(again, directory)
        found["failed"] = failed(again)
        again.add("mvtest0-1", [guest(2)])
        again.restore(lambda owner: False)
        found["not kept"] = entries("h1") == found["entries at the end"] and not again.owners()
        found["address"] = refusal(directory, 1, address="10.9.9.9")
        found["mtu"] = refusal(directory, 1, mtu=1460)
        run("ip link add other type vxlan id 9 dstport 14790 local 10.9.1.2")
        found["collision"] = refusal(directory, 1, port=14790)
        again.remove()
        again.remove()
        found["left"] = "vxtest0" in run("ip link show") or "mvtest0" in run("nft list ruleset")
    found["leases"] = leases(directory)
    with inside("h2"):
        made[2].remove()
    found["IPv6"] = over_ipv6(directory)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
