"""The bridge, tested from inside guests: a VM reaches the VMs of its job only, and sends from its own address only."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multiverse.core.model.identity import Daemon
from multiverse.core.model.vm import VmRef, VmSpec
from multiverse.drivers.qemu.driver import QemuHypervisor
from tests.integration.conftest import GUESTS_NETWORK
from tests.integration.test_qemu_driver import HEAD, SITE, Lab, lab, swept, until

__all__ = ["lab", "swept"]  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

# Runs in a guest, as root: executes the orders it receives, and records all frames that arrive at its interface.
_CONTROLLED = """
import json, socket, struct, threading
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)); wire.bind(("eth0", 0))
heard = []
def hear():
    while True:
        frame, about = wire.recvfrom(65536)
        if about[2] != socket.PACKET_OUTGOING: heard.append(frame.hex())
threading.Thread(target=hear, daemon=True).start()
mac = lambda text: bytes.fromhex(text.replace(":", ""))
def ether(to, sender, kind, body): wire.send(mac(to) + mac(sender) + struct.pack("!H", kind) + body)
def arp(to, sender, claimed, address, asked):
    ether(to, sender, 0x806, struct.pack("!HHBBH6s4s6s4s", 1, 0x800, 6, 4, 1, mac(claimed), socket.inet_aton(address),
          bytes(6), socket.inet_aton(asked)))
def udp(to, sender, source, target, port, text, tagged=0):
    data = struct.pack("!HHHH", 9, port, 8 + len(text), 0) + text.encode()
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0, socket.inet_aton(source),
                       socket.inet_aton(target))
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xffff) + (total >> 16)
    total = ~((total & 0xffff) + (total >> 16)) & 0xffff
    packet = head[:10] + struct.pack("!H", total) + head[12:] + data
    ether(to, sender, tagged or 0x800, struct.pack("!HH", 7, 0x800) + packet if tagged else packet)
def say(target, port, text): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(text.encode(), (target, port))
def connect(target):
    with socket.socket() as sock:
        sock.settimeout(20)
        return sock.connect_ex((target, 9))
line = socket.create_connection(("HEAD", PORT)).makefile("rw")
print(json.dumps(socket.gethostname()), file=line, flush=True)
for order in line:
    print(json.dumps(eval(order)), file=line, flush=True)
"""


@dataclass
class ControlledGuest:
    """A guest that the test controls."""

    spec: VmSpec
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def address(self) -> str:
        return f"{GUESTS_NETWORK}.{int(self.spec.name.partition('-')[2])}"

    async def do(self, order: str) -> Any:
        self.writer.write(order.encode() + b"\n")
        return json.loads(await asyncio.wait_for(self.reader.readline(), 60))

    async def heard(self, mark: str) -> list[str]:
        """The frames that arrived at its interface, once one of them holds `mark`."""

        async def there() -> bool:
            return any(mark.encode().hex() in frame for frame in await self.do("heard"))

        await until(there, 30.0)
        return list(await self.do("heard"))


@pytest.fixture
async def guests(lab: Lab) -> AsyncIterator[list[ControlledGuest]]:
    """Two VMs of one job, and one of another."""
    arrived: asyncio.Queue[tuple[str, asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await arrived.put((json.loads(await reader.readline()), reader, writer))

    server = await asyncio.start_server(welcome, HEAD, 0, limit=1 << 24)
    script = _CONTROLLED.replace("HEAD", HEAD).replace("PORT", str(server.sockets[0].getsockname()[1]))
    daemon = Daemon("guest", ("/usr/bin/python3", "-c", script))
    specs = [lab.spec() for _ in range(3)]
    gang = tuple((spec.name, f"{GUESTS_NETWORK}.{int(spec.name.partition('-')[2])}") for spec in specs[:2])
    async with server:
        await asyncio.gather(
            *(lab.started(spec, daemon, peers=(("head", HEAD), *(gang if spec in specs[:2] else ()))) for spec in specs)
        )
        found = {}
        for _ in specs:
            name, reader, writer = await asyncio.wait_for(arrived.get(), 60)
            found[name] = (reader, writer)
        yield [ControlledGuest(spec, *found[spec.name]) for spec in specs]
        for _, writer in found.values():
            writer.close()


def _address_of(link: str) -> str:
    return Path(f"/sys/class/net/{link}/address").read_text().strip()


async def test_only_vms_of_one_job_reach_each_other(lab: Lab, guests: list[ControlledGuest]) -> None:
    one, two, other = guests
    assert await one.do(f"connect({two.address!r})") == await two.do(f"connect({one.address!r})") == errno.ECONNREFUSED
    # To the broadcast address, to the other's own, and to one that no VM has.
    sender = f"{one.spec.mac!r}"
    for to in ("ff:ff:ff:ff:ff:ff", other.spec.mac, "02:00:00:00:99:99"):
        await one.do(f"arp({to!r}, {sender}, {sender}, {one.address!r}, {other.address!r})")
        await one.do(f"udp({to!r}, {sender}, {one.address!r}, {other.address!r}, 9, 'hello other')")
    await one.do(f"udp({two.spec.mac!r}, {sender}, {one.address!r}, {two.address!r}, 9, 'hello two')")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as head:
        head.sendto(b"head to other", (other.address, 9))
    # The bridge forwards in order: a frame that was sent before the mark has arrived before it, or never arrives.
    mine = one.spec.mac.replace(":", "")
    assert any(mine in frame[12:24] for frame in await two.heard("hello two"))
    assert not any(mine in frame for frame in await other.heard("head to other"))
    assert not any(b"head to other".hex() in frame for frame in await one.do("heard"))


async def test_a_vm_cannot_send_from_another_address(lab: Lab, guests: list[ControlledGuest]) -> None:
    one, two, other = guests
    bridge = _address_of(lab.settings.qemu.bridge)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as head:
        head.bind((HEAD, 0))
        head.settimeout(30)
        port = head.getsockname()[1]
        for sender, address in ((one.spec.mac, other.address), (other.spec.mac, one.address),
                                (other.spec.mac, other.address), (one.spec.mac, f"{GUESTS_NETWORK}.250")):  # fmt: skip
            await one.do(f"udp({bridge!r}, {sender!r}, {address!r}, {HEAD!r}, {port}, 'spoof')")
            for claimed in (one.spec.mac, other.spec.mac):
                if (sender, claimed, address) != (one.spec.mac, one.spec.mac, one.address):
                    await one.do(f"arp('ff:ff:ff:ff:ff:ff', {sender!r}, {claimed!r}, {address!r}, {HEAD!r})")
                    await one.do(f"arp({two.spec.mac!r}, {sender!r}, {claimed!r}, {HEAD!r}, {two.address!r})")
        await one.do(f"ether('ff:ff:ff:ff:ff:ff', {one.spec.mac!r}, 0x86dd, bytes(60))")
        # What it may send, but tagged (802.1Q, 802.1ad): it has no VLAN.
        for kind in (0x8100, 0x88A8):
            await one.do(f"udp({two.spec.mac!r}, {one.spec.mac!r}, {one.address!r}, {two.address!r}, 9, 'tag', {kind})")
        await one.do(f"udp({bridge!r}, {one.spec.mac!r}, {one.address!r}, {HEAD!r}, {port}, 'honest')")
        said, speaker = await asyncio.to_thread(head.recvfrom, 100)
        assert (said, speaker[0]) == (b"honest", one.address)
    await one.do(f"udp({two.spec.mac!r}, {one.spec.mac!r}, {one.address!r}, {two.address!r}, 9, 'the end')")
    heard = await two.heard("the end")
    claims_head = ipaddress.IPv4Address(HEAD).packed.hex()
    mine = one.spec.mac.replace(":", "")
    assert not any(b"tag".hex() in frame for frame in heard)
    assert not any(frame[24:28] == "86dd" or (frame[24:28] == "0806" and frame[56:64] == claims_head)
                   for frame in heard if frame[12:24] == mine)  # fmt: skip
    known = subprocess.run(["ip", "neigh", "show", other.address], capture_output=True, text=True, check=True).stdout
    assert one.spec.mac not in known
    fdb = ["bridge", "fdb", "show", "br", lab.settings.qemu.bridge]
    ports = subprocess.run(fdb, capture_output=True, text=True, check=True)
    assert f"dev {one.spec.name}" not in "".join(line for line in ports.stdout.splitlines() if other.spec.mac in line)


async def test_the_firewall_outlives_the_driver_and_is_removed_with_the_last_vm(
    lab: Lab, guests: list[ControlledGuest]
) -> None:
    one, two, other = guests

    def table() -> str:
        done = subprocess.run(["nft", "list", "table", "bridge", f"mv{SITE}"], capture_output=True, text=True)
        return done.stdout

    before = table()
    assert all(f'"{p.spec.name}" . {p.spec.mac} . {p.address}' in before for p in guests)
    assert f'"{one.spec.name}" . "{two.spec.name}"' in before and f'. "{other.spec.name}"' not in before
    # An administrator flushes all rules: the next driver makes them again from the manifests.
    subprocess.run(["nft", "delete", "table", "bridge", f"mv{SITE}"], check=True)
    lab.hypervisor.close()
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)
    assert table() == before
    subprocess.run(["nft", "delete", "table", "bridge", f"mv{SITE}"], check=True)
    late = lab.spec()
    await lab.started(late)
    await lab.hypervisor.destroy(VmRef(late.name), 0)
    assert table() == before
    for guest in guests:
        assert guest.spec.name in table()
        await lab.hypervisor.destroy(VmRef(guest.spec.name), 0)
        assert guest.spec.name not in table()
    assert table() == ""
