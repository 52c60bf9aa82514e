"""The way from this host's bridge to VMs of other hosts, where no layer 2 connects the hosts: a VXLAN (RFC 7348).

Nothing is learnt from packets, and nothing is flooded. For each address that a VM of this host may need, one entry
names its machine, and another lets the kernel answer ARP for it here. A frame for any other address ends at this host.
Entries belong to owners, mostly VMs, in whose files they are recorded; they end with the last owner that has them. An
entry that is told anew, because its VM has moved, is so for all owners.

Packets are accepted from machines of such entries only. Packets of this host to the port have to come from its bridge:
frames that leave by the VXLAN are marked, and a packet with this host's address and without the mark is dropped,
whichever user or guest has made it. The VXLAN and these two rules stay when there is no entry, because other hosts may
still accept packets of this one.

The rules are about the whole port, not about the id in the packet: the kernel may carry several datagrams of one sender
as one packet, and a rule sees the first id only (udp(7), UDP_SEGMENT).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model.identity import Member, Neighbour
from multiverse.host.network import Nft
from multiverse.system import files, kernel
from multiverse.system.locks import locked_file

if TYPE_CHECKING:
    from pyroute2 import IPRoute

# Bytes that a packet grows by: outer Ethernet header, IPv4 or IPv6, UDP and VXLAN (RFC 7348, section 5).
OVERHEAD = {4: 50, 6: 70}
_MARK = 0x6D76_4F56  # of frames that leave by our VXLAN; only root can mark other packets (socket(7), SO_MARK)
# The last chain runs after the translation of source addresses (priority 100). So it also sees what guests or
# containers send, if it leaves with this host's address.
_TABLES = """
add table bridge {table}
delete table bridge {table}
table bridge {table} {{
    chain leaving {{
        type filter hook postrouting priority 0; policy accept;
        oifname "{device}" meta mark set {mark}
    }}
}}
add table inet {table}
delete table inet {table}
table inet {table} {{
    set machines {{ type {kind}; {elements} }}
    chain arriving {{
        type filter hook input priority -200; policy accept;
        meta nfproto {own} udp dport {port} {ip} saddr != @machines drop
        meta nfproto {other} udp dport {port} drop
    }}
    chain leaving {{
        type filter hook postrouting priority 200; policy accept;
        {ip} saddr {address} udp dport {port} meta mark != {mark} drop
    }}
}}
"""
_WORDS = {
    4: {"kind": "ipv4_addr", "own": "ipv4", "other": "ipv6", "ip": "ip"},
    6: {"kind": "ipv6_addr", "own": "ipv6", "other": "ipv4", "ip": "ip6"},
}


_MACHINE = "machine:"
_MEMBERS = "members:"
_LOCK = ".lock"
_LOCAL = {4: "vxlan_local", 6: "vxlan_local6"}  # by the version of IP
# <linux/neighbour.h>, <errno.h>
NTF_SELF, NUD_PERMANENT = 0x02, 0x80
ENOENT, EEXIST = 2, 17


def machine_owner(vm: str) -> str:
    """The owner of the entry by which this machine itself reaches a VM of another host."""
    return f"{_MACHINE}{vm}"


def members_owner(host: str) -> str:
    """The owner of the entries for the groups of the VMs of this host, which may be a lease of the machine."""
    return f"{_MEMBERS}{host}"


def is_of_machine(owner: str) -> bool:
    return owner.startswith(_MACHINE)


@dataclass(frozen=True)
class VxlanConfig:
    site: str
    network: int  # its 24-bit id, the same on all hosts
    port: int  # its UDP port, the same on all hosts
    # Gives the host's own address in the network of the hosts, or raises `Refused`. Only `restore` calls it, because
    # VMs must be observed and removed also while a name service does not answer.
    find_address: Callable[[], str]
    mtu: int  # of guests
    bridge: str
    records: Path  # the directory with the entries; all processes of the host agree on it
    namespace: int | None = None  # descriptor of the network namespace of the bridge, if it is not the caller's
    is_of_others: Callable[[str], bool] = is_of_machine  # whether an owner is somebody else's on the machine

    @property
    def device(self) -> str:
        """The interface. The firewall of the bridge takes only interfaces named "mv…" for VMs."""
        return f"vx{self.site}"

    @property
    def table(self) -> str:
        """The nftables tables, of the families bridge and inet."""
        return f"mv{self.site}.vxlan"


class Vxlan:
    """See the module. Calls block for milliseconds, and may be made from any process, and any thread without an event
    loop. All of them mean *ensure*; after an error or an interruption the same call may be repeated."""

    def __init__(self, config: VxlanConfig) -> None:
        """Raises `Refused` if this machine has no nftables: then everybody could send packets to VMs."""
        self.config = config
        self._lock = threading.Lock()
        self._is_sure = True  # the kernel has what is recorded, unless a change by this process has failed
        try:
            with kernel.in_network(self.config.namespace):
                self._nft = Nft()
        except OSError as error:
            what = f"a VXLAN needs nftables on this host: {error}"
            raise Refused(what, hint="install libnftables, or set vxlan.enabled") from error

    def restore(self, keep: Callable[[str], bool] = lambda owner: True) -> None:
        """Make the VXLAN, its rules and the entries of recorded owners, and remove all other entries, also of recorded
        owners that are not to be kept. Raises `Refused` if the settings do not fit this machine, or if another VXLAN
        has the port, and `Broken` if the kernel refuses it."""
        with self._changing() as ip:
            for owner in self._owners():
                if not keep(owner):
                    (self.config.records / owner).unlink(missing_ok=True)
            self._restore(ip)

    def neighbours_of(self, owner: str) -> list[Neighbour]:
        """What that owner can reach."""
        return self._recorded(owner)

    def owners(self) -> frozenset[str]:
        return frozenset(self._owners())

    def add(self, owner: str, neighbours: Iterable[Neighbour]) -> None:
        """Let VMs behind this host's bridge reach these addresses too, until `owner` is dropped."""
        with self._changing() as ip:
            self._become(ip, owner, {one.address: one for one in (*self._recorded(owner), *neighbours)})

    def replace(self, owner: str, neighbours: Iterable[Neighbour]) -> None:
        """As `add`, but the owner's earlier entries end, unless another owner has them, too."""
        wanted = {one.address: one for one in neighbours}
        if not wanted and not (self.config.records / owner).exists():
            return
        with self._changing() as ip:
            if not self._is_sure or set(self._recorded(owner)) != set(wanted.values()):
                self._become(ip, owner, wanted)

    def _become(self, ip: IPRoute, owner: str, wanted: Mapping[str, Neighbour]) -> None:
        """Let an owner have these entries, by address. What has an address is where it was told last to be, for all
        owners: as a VM that has moved, which the VMs of its job knew elsewhere."""
        is_sure, self._is_sure = self._is_sure, False
        before = set(self._recorded(owner))
        gone, new = before - set(wanted.values()), [one for one in wanted.values() if one not in before]
        self._record(owner, wanted.values())
        for other in self._owners():
            found = self._recorded(other)
            now = [wanted.get(one.address, one) for one in found]
            if now != found:
                gone |= set(found) - set(now)
                self._record(other, now)
        if not is_sure or (index := self._intact(ip)) is None:
            self._restore(ip)
        else:
            left = set(self._entries())
            self._unprogram(ip, index, gone - left, left)
            self._program(ip, index, new)
        self._is_sure = True

    def _intact(self, ip: IPRoute) -> int | None:
        """The index of the VXLAN; None if somebody has removed it, or flushed all rules."""
        index = self._index(ip)
        return index if index is not None and self._has_tables() else None

    def replace_members(self, host: str, members: Iterable[Member]) -> None:
        """As `replace`, for the groups of the VMs of this host: to those members that are on other machines."""
        there = [Neighbour(one.address, one.mac, one.machine) for one in members if one.machine]
        self.replace(members_owner(host), there)

    def drop(self, owner: str) -> None:
        """Remove the entries that no other owner has. Unknown is success."""
        record = self.config.records / owner
        if not record.exists():
            return
        with self._changing() as ip:
            left = set(self._entries(without=owner))
            index = self._index(ip)
            if index is not None:
                self._unprogram(ip, index, set(self._recorded(owner)) - left, left)
            record.unlink(missing_ok=True)

    def remove(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Remove all of it from this machine, unless `unless` says so under the lock. Absent is success."""
        with self._changing() as ip:
            if unless():
                return
            index = self._index(ip)
            if index is not None:
                ip.link("del", index=index)
            table = self.config.table
            for family in ("bridge", "inet"):
                self._run(f"add table {family} {table}\ndelete table {family} {table}")
            for owner in self._owners():
                (self.config.records / owner).unlink(missing_ok=True)

    @contextmanager
    def _changing(self) -> Iterator[IPRoute]:
        """Hold the lock of the records, with a connection to the kernel. Its errors become `Broken`."""
        from pyroute2 import IPRoute  # a tenth of a second, and most hosts have no VXLAN
        from pyroute2.netlink.exceptions import NetlinkError

        records = self.config.records
        try:
            records.mkdir(parents=True, exist_ok=True)
            with self._lock, locked_file(records / _LOCK), kernel.in_network(self.config.namespace), IPRoute() as ip:
                yield ip
        except (NetlinkError, OSError) as error:
            what = f"cannot change the VXLAN {self.config.device}: {error}"
            raise Broken(what, hint=f"see `ip -d link show {self.config.device}`") from error

    def _owners(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self.config.records) if not entry.name.startswith("."))
        return []

    def _recorded(self, owner: str) -> list[Neighbour]:
        """The recorded entries of an owner. A file that cannot be read says nothing, as after a crash."""
        try:
            return [Neighbour(**each) for each in json.loads((self.config.records / owner).read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def _record(self, owner: str, entries: Collection[Neighbour]) -> None:
        try:
            if entries:
                files.replace(self.config.records / owner, json.dumps([asdict(one) for one in entries]))
            else:
                (self.config.records / owner).unlink(missing_ok=True)
        except OSError as error:
            hint = f"is there room in {self.config.records}?"
            raise Exhausted(f"cannot record the network of {owner}: {error}", hint=hint) from error

    def _entries(self, without: str = "") -> list[Neighbour]:
        return [one for owner in self._owners() if owner != without for one in self._recorded(owner)]

    def _index(self, ip: IPRoute) -> int | None:
        found = ip.link_lookup(ifname=self.config.device)
        return int(found[0]) if found else None

    def _restore(self, ip: IPRoute) -> None:
        address = str(ip_address(self.config.find_address()))
        entries = list({one.address: one for one in self._entries()}.values())
        self._check_underlay(ip, address)
        self._make_tables(entries, address)  # first: without them, forged packets would be accepted
        index = self._make_device(ip, address)
        _forget_others(ip, index, entries)
        self._program(ip, index, entries)

    def _check_underlay(self, ip: IPRoute, address: str) -> None:
        config = self.config
        own = [each["index"] for each in ip.get_addr() if each.get_attr("IFA_ADDRESS") == address]
        if not own:
            problem = f"no interface of this host has the address {address}"
            raise Refused(problem, hint="give the host's own address in vxlan.addresses")
        mtu = ip.get_links(own[0])[0].get_attr("IFLA_MTU")
        overhead = OVERHEAD[ip_address(address).version]
        if mtu < config.mtu + overhead:
            what = f"packets of {config.mtu} bytes and the VXLAN's {overhead} do not fit the MTU {mtu} of this host"
            raise Refused(what, hint=f"set vxlan.mtu to {mtu - overhead} or less on all hosts")

    def _make_tables(self, entries: Collection[Neighbour], address: str) -> None:
        config, elements = self.config, ", ".join(sorted({one.machine for one in entries}))
        names = {"table": config.table, "device": config.device, "port": config.port, "address": address, "mark": _MARK}
        elements = f"elements = {{ {elements} }};" if elements else ""
        self._run(_TABLES.format(**names, elements=elements, **_WORDS[ip_address(address).version]))

    def _make_device(self, ip: IPRoute, address: str) -> int:
        """The index of the VXLAN, as a port of the bridge. One with other settings is replaced."""
        config = self.config
        bridge = ip.link_lookup(ifname=config.bridge)
        if not bridge:
            raise Broken(f"there is no bridge {config.bridge}", hint="start it: systemctl start multiverse-bridge")
        index = self._index(ip)
        if index is not None and not self._is_as_configured(ip.get_links(index)[0], address):
            ip.link("del", index=index)
            index = None
        if index is None:
            self._check_port(ip)
            # A bridge without an address of its own takes the lowest of its ports. A high one keeps the bridge's.
            mac = f"fe:4d:{ip_address(address).packed[-4:].hex(':')}"
            settings = {"vxlan_id": config.network, "vxlan_port": config.port, "vxlan_learning": False,
                        "vxlan_proxy": True, _LOCAL[ip_address(address).version]: address}  # fmt: skip
            ip.link("add", ifname=config.device, kind="vxlan", address=mac, mtu=config.mtu, **settings)
            (index,) = ip.link_lookup(ifname=config.device)
        ip.link("set", index=index, master=bridge[0], state="up")
        ip.brport("set", index=index, learning=0)
        return int(index)

    def _is_as_configured(self, link: Any, address: str) -> bool:
        config, found = self.config, _vxlan(link)
        wanted = {
            "IFLA_VXLAN_ID": config.network,
            f"IFLA_{_LOCAL[ip_address(address).version].upper()}": address,
            "IFLA_VXLAN_PORT": config.port,
            "IFLA_VXLAN_LEARNING": 0,
            "IFLA_VXLAN_PROXY": 1,
        }
        return found is not None and link.get_attr("IFLA_MTU") == config.mtu and wanted.items() <= found.items()

    def _check_port(self, ip: IPRoute) -> None:
        """The rules are about the port, so no other VXLAN may have it, be its id the same or not."""
        for link in ip.get_links():
            found, name = _vxlan(link), link.get_attr("IFLA_IFNAME")
            if found is not None and found["IFLA_VXLAN_PORT"] == self.config.port:
                raise Refused(
                    f"another VXLAN of this host, {name} with the id {found['IFLA_VXLAN_ID']}, has the port "
                    f"{self.config.port}",
                    hint=f"give this site another vxlan.port; if {name} is not needed: ip link del {name}",
                )

    def _program(self, ip: IPRoute, index: int, entries: Collection[Neighbour]) -> None:
        if machines := ", ".join(sorted({one.machine for one in entries})):
            self._run(f"add element inet {self.config.table} machines {{ {machines} }}")
        for one in entries:
            ip.fdb("replace", flags=NTF_SELF, ifindex=index, lladdr=one.mac, dst=one.machine)
            ip.neigh("replace", ifindex=index, dst=one.address, lladdr=one.mac, state=NUD_PERMANENT)

    def _unprogram(self, ip: IPRoute, index: int, gone: set[Neighbour], left: set[Neighbour]) -> None:
        macs, addresses = {one.mac for one in left}, {one.address for one in left}
        for one in gone:
            if one.address not in addresses:
                _ensure_absent(ip.neigh, ifindex=index, dst=one.address, lladdr=one.mac)
            if one.mac not in macs:
                _ensure_absent(ip.fdb, flags=NTF_SELF, ifindex=index, lladdr=one.mac, dst=one.machine)
        table = self.config.table
        if not self._has_tables():  # somebody has flushed all rules
            return
        for machine in {one.machine for one in gone} - {one.machine for one in left}:
            # Added first, because an element that is absent cannot be deleted.
            self._run("\n".join(f"{verb} element inet {table} machines {{ {machine} }}" for verb in ("add", "delete")))

    def _has_tables(self) -> bool:
        return not any(self._nft.run(f"list table {family} {self.config.table}") for family in ("bridge", "inet"))

    def _run(self, commands: str) -> None:
        problem = self._nft.run(commands)
        if problem:
            raise Broken(f"cannot change the rules of {self.config.device}: {problem}", hint="see `nft list ruleset`")


def _vxlan(link: Any) -> dict[str, Any] | None:
    """The attributes of a VXLAN; None for another interface."""
    info = link.get_attr("IFLA_LINKINFO")
    if info is None or info.get_attr("IFLA_INFO_KIND") != "vxlan":
        return None
    return dict(info.get_attr("IFLA_INFO_DATA")["attrs"])


def _forget_others(ip: IPRoute, index: int, entries: Iterable[Neighbour]) -> None:
    """Remove the entries of the VXLAN that are not among these."""
    known = {(one.mac, one.machine) for one in entries}
    addresses = {one.address for one in entries}
    for each in ip.fdb("dump", ifindex=index):
        mac, machine = each.get_attr("NDA_LLADDR"), each.get_attr("NDA_DST")
        if machine is not None and (mac, machine) not in known:
            _ensure_absent(ip.fdb, flags=NTF_SELF, ifindex=index, lladdr=mac, dst=machine)
    for each in ip.get_neighbours(ifindex=index):
        if each.get_attr("NDA_DST") not in addresses and each["state"] == NUD_PERMANENT:
            address, mac = each.get_attr("NDA_DST"), each.get_attr("NDA_LLADDR")
            _ensure_absent(ip.neigh, ifindex=index, dst=address, lladdr=mac)


def _ensure_absent(change: Callable[..., object], **entry: object) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        change("del", **entry)
    except NetlinkError as error:
        if error.code != ENOENT:
            raise
