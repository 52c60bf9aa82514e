"""A host with taps in place of VMs, as a program: which of them hear each other, by their groups.

Run it as `unshare --net --mount python -m tests.integration.group_taps DIRECTORY`. It prints what was heard, as JSON.
VMs 1 and 2 are of one user, 3 of another one, and 4 is a spare; 11 and 12 are the users' VMs on another host.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from multiverse.core.model.basics import CloneKind
from multiverse.core.model.identity import Member
from multiverse.host import manifest, network
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase

ONE, OTHER, SPARE = 1000, 2000, 0
GROUPS = {1: ONE, 2: ONE, 3: OTHER, 4: SPARE}
ELSEWHERE = {11: ONE, 12: OTHER}
END = b"the end of it"
SETS = ("guests", "groups", "members", "elsewhere", "pairs", "peers", "owners", "addresses")


def run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def name(n: int) -> str:
    return f"mvg-{n}"


def mac(n: int) -> str:
    return f"02:00:00:00:00:{n:02x}"


def address(n: int) -> str:
    return f"10.9.1.{n}"


def member(n: int, group: int) -> Member:
    return Member(name(n), address(n), mac(n), "h1" if n in GROUPS else "h2", group)


def octets(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def packet(sender: int, to: str, target: str, word: bytes) -> bytes:
    """A frame with a datagram, as a guest writes it."""
    data = struct.pack("!HHHH", 9, 9, 8 + len(word), 0) + word
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0, socket.inet_aton(address(sender)),
                     socket.inet_aton(target))  # fmt: skip
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + ip[12:]
    return bytes(10) + octets(to) + octets(mac(sender)) + struct.pack("!H", 0x800) + ip + data


class Host:
    """The bridge with its taps, an uplink among them, and the rules."""

    def __init__(self, vms: Path) -> None:
        self.vms, self.taps = vms, dict[int, int]()
        for command in ("mount -t sysfs sysfs /sys", "ip link set lo up", "ip link add bridge0 type bridge",
                        "ip addr add 10.9.0.1/16 dev bridge0", "ip link set bridge0 up"):  # fmt: skip
            run(command)
        self.uplink = network.open_tap("uplink", None)
        run("ip link set uplink master bridge0 up")
        self.head = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.restart()
        for n, group in GROUPS.items():
            self.taps[n] = network.open_tap(name(n), "bridge0", mac(n))
            (vms / name(n)).mkdir()
            run(f"ip neigh replace {address(n)} lladdr {mac(n)} dev bridge0")
            self.allow(n, group)
        run(f"ip neigh replace 10.9.0.2 lladdr {mac(99)} dev bridge0")
        run(f"bridge fdb replace {mac(99)} dev uplink master static")
        for n in ELSEWHERE:
            run(f"bridge fdb replace {mac(n)} dev uplink master static")
        self.settle()

    def known(self, n: int, group: int) -> Manifest:
        return Manifest(name(n), CloneKind.INSTANT, VmPhase.STARTED, mac(n), 1, 256, address=address(n), group=group)

    def allow(self, n: int, group: int) -> None:
        manifest.write(self.vms / name(n), self.known(n, group))
        self.rules.allow(self.known(n, group))
        network.set_isolated(name(n), not self.rules.separates(self.known(n, group)))

    def learn(self, members: Iterable[Member] = (), gone: Iterable[str] = (), *, whole: bool = False) -> list[str]:
        regrouped = self.rules.learn([*members], [*gone], whole=whole)
        for each in regrouped:
            network.set_isolated(each, False)
        return sorted(regrouped)

    def restart(self) -> None:
        """Another process takes over."""
        self.rules = Firewall("mvg-", self.vms, ("10.9.1.0", "10.9.255.254"), "h1")

    def settle(self) -> None:
        """Frames are lost until the kernel has noticed, asynchronously, that the devices have carriers."""
        for n in (*self.taps, 99):
            for _ in range(200):
                self._end(n, b"settled?")
                if select.select([self._file(n)], [], [], 0.1)[0] and b"settled?" in os.read(self._file(n), 65536):
                    break
            else:
                raise AssertionError(f"tap {n} never came up")

    def _file(self, n: int) -> int:
        return self.uplink if n == 99 else self.taps[n]

    def _end(self, n: int, word: bytes) -> None:
        self.head.sendto(word, ("10.9.0.2" if n == 99 else address(n), 9))

    def _heard(self, n: int) -> bytes:
        """All that has come to a tap before the host's own frame, which is sent last."""
        self._end(n, END)
        found = b""
        while END not in found:
            assert select.select([self._file(n)], [], [], 10)[0], f"the host's frame did not arrive at {n}"
            found += os.read(self._file(n), 65536)
        return found

    def heard(self) -> list[str]:
        """Who hears whom, as "1>2"; in capitals if also what is for all."""
        for sender in self.taps:
            for n in (*self.taps, *ELSEWHERE):
                os.write(self.taps[sender], packet(sender, mac(n), address(n), f"<{sender}>{n}>".encode()))
            os.write(self.taps[sender], packet(sender, "ff:ff:ff:ff:ff:ff", "10.9.1.200", f"<all{sender}>".encode()))
        found = list[str]()
        for n in (*self.taps, 99):
            frames = self._heard(n)
            found += [f"{sender}>all {n}" for sender in self.taps if f"<all{sender}>".encode() in frames]
            for target in ELSEWHERE if n == 99 else (n,):
                found += [f"{s}>{target}" for s in self.taps if f"<{s}>{target}>".encode() in frames]
        return sorted(found)

    def counts(self) -> dict[str, int]:
        """How many elements each set or map of the table has."""
        try:
            listed = json.loads(run("nft -j list table bridge mvg"))["nftables"]
        except subprocess.CalledProcessError:
            return {}
        sets = (each.get("set") or each.get("map") for each in listed)
        return {one["name"]: len(one.get("elem", ())) for one in sets if one and one["name"] in SETS}


def main(vms: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    host = Host(vms)
    found["at first"] = host.heard()
    everybody = [member(n, group) for n, group in (GROUPS | ELSEWHERE).items() if group]
    found["regrouped"] = host.learn(everybody, whole=True)
    found["told"] = host.heard()
    host.allow(4, ONE)
    found["taken"] = host.heard()
    host.learn([member(4, ONE)])
    found["counts"] = host.counts()
    host.restart()
    found["restarted"] = host.heard()
    run("nft flush ruleset")
    host.allow(1, ONE)
    found["after a flush"] = host.heard()
    found["another user's"] = host.learn([replace(member(3, ONE), name=name(3))], [name(11)])
    found["changed"] = host.heard()
    found["told again"] = [host.learn([member(3, ONE)]), host.heard() == found["changed"]]
    host.learn(whole=True)
    found["forgotten"] = host.heard()
    found["files"] = sorted(path.name for path in vms.iterdir() if path.is_file())
    for n, group in (*GROUPS.items(), (4, ONE)):
        host.rules.revoke(host.known(n, group))
    found["at the end"] = host.counts()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
