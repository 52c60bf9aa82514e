"""Packets between VMs on a host that routes, tested with taps without VMs in a network namespace of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps need root")]

# Prints which taps receive each word. The first two taps are VMs of one job.
_HOST = """
import json, os, select, socket, struct, subprocess, sys
from pathlib import Path
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.network import open_tap, set_isolated

def run(command): subprocess.run(command.split(), check=True)
def name(n): return f"mvr-{n}"
def mac(n): return f"02:00:00:00:00:0{n}"
def address(n): return f"10.1.2.{n}"
uplink = "7c:00:00:00:00:01"  # the bridge takes its address from its lowest port, as many sites' do
for command in ("mount -t sysfs sysfs /sys", "ip link set lo up", "ip link add bridge0 type bridge",
                "ip tuntap add uplink mode tap", f"ip link set uplink address {uplink} master bridge0 up",
                "ip addr add 10.1.2.254/24 dev bridge0", "ip link set bridge0 up"):
    run(command)
Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
vms = Path(sys.argv[1])
rules, taps = Firewall("mvr-", vms, ("10.9.1.0", "10.9.255.254")), {}
for n, peers in ((1, (name(2),)), (2, (name(1),)), (3, ())):
    taps[n] = open_tap(name(n), "bridge0", mac(n))
    known = Manifest(name(n), CloneKind.INSTANT, VmPhase.STARTED, mac(n), 1, 256, address=address(n), peers=peers)
    (vms / name(n)).mkdir()
    manifest.write(vms / name(n), known)
    rules.allow(known)
    set_isolated(name(n), not peers)
    assert Path("/sys/class/net/bridge0/address").read_text().strip() == uplink, "the bridge took a tap's address"
    run(f"ip neigh replace {address(n)} lladdr {mac(n)} dev bridge0")
head = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
octets = lambda text: bytes.fromhex(text.replace(":", ""))
def say(to, target, word, tag=b""):
    data = struct.pack("!HHHH", 9, 9, 8 + len(word), 0) + word
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0, socket.inet_aton(address(1)),
                     socket.inet_aton(target))
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xffff) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~((total & 0xffff) + (total >> 16)) & 0xffff) + ip[12:]
    os.write(taps[1], bytes(10) + octets(to) + octets(mac(1)) + tag + struct.pack("!H", 0x800) + ip + data)
def hear(n, end):  # all frames until the host's own, which is sent last
    head.sendto(end, (address(n), 9))
    found = b""
    while end not in found:
        assert select.select([taps[n]], [], [], 10)[0], "the host's frame did not arrive"
        found += os.read(taps[n], 65536)
    return found
def settle(n):  # frames are lost until the kernel has noticed, asynchronously, that the device has a carrier
    for _ in range(200):
        head.sendto(b"settled?", (address(n), 9))
        if select.select([taps[n]], [], [], 0.1)[0] and b"settled?" in os.read(taps[n], 65536):
            return
    raise AssertionError("the host's taps never came up")
bridge = Path("/sys/class/net/bridge0/address").read_text().strip()
def tell(end):
    for n in (2, 3):
        say(mac(n), address(n), b"by the bridge")
        say(bridge, address(n), b"by the host")
        say("ff:ff:ff:ff:ff:ff", address(n), b"to all")
        say(mac(n), address(n), b"8021q", struct.pack("!HH", 0x8100, 7))
        say(mac(n), address(n), b"8021ad", struct.pack("!HH", 0x88a8, 7))
        say(bridge, address(n), b"tagged", struct.pack("!HH", 0x8100, 7))
    words = (b"by the bridge", b"by the host", b"to all", b"8021q", b"8021ad", b"tagged")
    heard = {n: hear(n, end) for n in (2, 3)}
    return {word.decode(): [n for n in heard if word in heard[n]] for word in words}
for n in (2, 3):
    settle(n)
found = [tell(b"the end")]
run("nft flush chain bridge mvr routed")
print(json.dumps([*found, tell(b"the last")]))
"""

# Prints which words leave the host by its uplink, or reach its only VM. VMs have the addresses 10.9.1.*.
_UPLINK = """
import json, os, select, socket, struct, subprocess, sys
from pathlib import Path
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.network import open_tap, set_isolated

def run(command): subprocess.run(command.split(), check=True)
for command in ("mount -t sysfs sysfs /sys", "ip link set lo up", "ip link add bridge0 type bridge",
                "ip link set bridge0 up"):
    run(command)
vm, elsewhere = "02:00:00:00:00:01", "02:00:00:00:00:09"
own, peer, stranger, late, gateway = "10.9.1.1", "10.9.1.2", "10.9.1.3", "10.9.1.4", "10.9.0.1"
uplink = open_tap("uplink", None)
run("ip link set uplink master bridge0 up")
vms = Path(sys.argv[1])
rules = Firewall("mvr-", vms, ("10.9.1.0", "10.9.255.254"))
guest = open_tap("mvr-1", "bridge0", vm)
known = Manifest("mvr-1", CloneKind.INSTANT, VmPhase.STARTED, vm, 1, 256, address=own, peers=("mvr-2",),
                 peer_addresses=(peer,))
(vms / "mvr-1").mkdir()
manifest.write(vms / "mvr-1", known)
rules.allow(known)
octets = lambda text: bytes.fromhex(text.replace(":", ""))
def frame(to, sender, kind, body): return bytes(10) + octets(to) + octets(sender) + struct.pack("!H", kind) + body
def ip(to, sender, source, target, word):
    data = struct.pack("!HHHH", 9, 9, 8 + len(word), 0) + word
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0, socket.inet_aton(source),
                       socket.inet_aton(target))
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xffff) + (total >> 16)
    head = head[:10] + struct.pack("!H", ~((total & 0xffff) + (total >> 16)) & 0xffff) + head[12:]
    return frame(to, sender, 0x800, head + data)
def arp(to, sender, source, target, word):  # the word is padding
    return frame(to, sender, 0x806, struct.pack("!HHBBH6s4s6s4s", 1, 0x800, 6, 4, 1, octets(sender),
                 socket.inet_aton(source), bytes(6), socket.inet_aton(target)) + word)
def passed(source, target, frames, make_last):  # the words that come out, until the last one's, which is repeated
    for one in frames:
        os.write(source, one)
    found = b""
    for _ in range(200):
        os.write(source, make_last)
        while select.select([target], [], [], 0.1)[0]:
            found += os.read(target, 65536)
        if b"the-last" in found:
            words = ("asks", "gateway", "late", "peer", "stranger")
            return [word for word in words if f"{word}!".encode() in found]
    raise AssertionError("nothing came through")
ends = {guest: ip(elsewhere, vm, own, gateway, b"the-last"), uplink: ip(vm, elsewhere, gateway, own, b"the-last")}
def sent(make):
    to = {"peer": peer, "stranger": stranger, "late": late, "gateway": gateway}
    return passed(guest, uplink, [make(elsewhere, vm, own, to[word], f"{word}!".encode()) for word in to], ends[guest])
settled = passed(uplink, guest, [], ends[uplink]), passed(guest, uplink, [], ends[guest])
found = {"ip": sent(ip), "arp": sent(arp)}
found["in"] = passed(uplink, guest, [arp("ff:ff:ff:ff:ff:ff", elsewhere, stranger, late, b"asks!"),
                                     arp(vm, elsewhere, late, own, b"late!")], ends[uplink])
found |= {"ip then": sent(ip), "arp then": sent(arp)}
print(json.dumps(found))
"""


def test_a_vm_sends_to_other_hosts_only_what_is_for_its_peers(tmp_path: Path) -> None:
    """A VM that asks for this one's address is a late peer: its own host has let it ask. Who asks for another one's is
    a stranger still."""
    argv = ["unshare", "--net", "--mount", sys.executable, "-c", _UPLINK, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, after = ["gateway", "peer"], ["gateway", "late", "peer"]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ip": before,
        "arp": before,
        "in": ["asks", "late"],
        "ip then": after,
        "arp then": after,
    }


def test_a_host_that_routes_forwards_nothing_between_vms(tmp_path: Path) -> None:
    argv = ["unshare", "--net", "--mount", sys.executable, "-c", _HOST, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ours, open_host = json.loads(done.stdout.splitlines()[-1])
    assert ours == {"by the bridge": [2], "by the host": [], "to all": [2], "8021q": [], "8021ad": [], "tagged": []}
    assert open_host == ours | {"by the host": [2, 3]}, "the host does route"
