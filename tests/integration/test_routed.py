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
from multiverse.core.model import CloneKind
from multiverse.host import manifest, tap
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase

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
rules, taps = Firewall("mvr-", vms), {}
for n, peers in ((1, (name(2),)), (2, (name(1),)), (3, ())):
    taps[n] = tap.open_tap(name(n), "bridge0", mac(n))
    known = Manifest(name(n), CloneKind.INSTANT, VmPhase.STARTED, mac(n), 1, 256, address=address(n), peers=peers)
    (vms / name(n)).mkdir()
    manifest.write(vms / name(n), known)
    rules.allow(known)
    tap.set_isolated(name(n), not peers)
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


def test_a_host_that_routes_forwards_nothing_between_vms(tmp_path: Path) -> None:
    argv = ["unshare", "--net", "--mount", sys.executable, "-c", _HOST, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ours, open_host = json.loads(done.stdout.splitlines()[-1])
    assert ours == {"by the bridge": [2], "by the host": [], "to all": [2], "8021q": [], "8021ad": [], "tagged": []}
    assert open_host == ours | {"by the host": [2, 3]}, "the host does route"
