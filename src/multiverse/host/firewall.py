"""The frames that VMs may send on the bridge: one nftables table per site, changed in a fraction of a millisecond.

A VM sends frames from its own MAC and IP address only. Frames with other addresses, and protocols other than IPv4 and
ARP, are dropped at its tap, before the bridge learns from them. VMs of one group reach each other (see
`core.model.identity`), over the bridge only: packets between VMs that this host would route are dropped. A VM that is
not in the table sends nothing. The table is derived from the VMs' manifests and from the groups that the controller
told (`MemberRecord`), and is made again from them whenever it is missing.

A group is a mark: a frame gets the mark of its tap, and passes if its target, a tap or an address, has the same one. So
there are two elements for each VM of this host and one for each VM of another host, and none for any pair. Pairs are
for VMs without a group, which are inside jobs.

Each host checks the frames of its own VMs to VMs of other hosts, through the bridge's uplink: they reach the addresses
of their group, and addresses that have sent to them. The latter are VMs that this host was not told of yet; their own
host lets them send to their group only, because it lets nobody send from another's address.

A VM that claims bandwidth has a limit in each direction at its tap: frames beyond the rate are dropped, and TCP adapts.
Nothing is queued, so no other VM's frames wait behind them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Exhausted
from multiverse.core.model.identity import Member
from multiverse.host import manifest
from multiverse.host.manifest import Manifest
from multiverse.host.network import Nft
from multiverse.host.registry import host_lock
from multiverse.system import files

log = structlog.get_logger(__name__)

_Signature = tuple[int, int, int]


class MemberRecord:
    """The members of groups of one site, as the controller told them last. All processes of the host share the file,
    which outlives agents, controllers and their connections. Whoever changes it holds the host's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: _Signature | None = None  # of the file as it was read last
        self._members: Mapping[str, Member] = {}

    def read(self) -> Mapping[str, Member]:
        """All members, by name. A file that cannot be read says nothing, as after a crash of the machine."""
        found = _signature(self._path)
        if found is None or found != self._signature:
            members: dict[str, Member] = {}
            with suppress(OSError, ValueError, TypeError, KeyError):
                members = {each["name"]: Member(**each) for each in json.loads(self._path.read_text())}
            # The members first: another thread that sees the signature takes them as they are.
            self._members, self._signature = members, found
        return self._members

    def write(self, members: Mapping[str, Member]) -> None:
        """Replace all members. Raises `Exhausted`, and then the old ones stay."""
        try:
            if not members:
                self._path.unlink(missing_ok=True)
            else:
                files.replace(self._path, json.dumps([asdict(one) for one in members.values()]))
        except OSError as error:
            hint = f"is there room in {self._path.parent}?"
            raise Exhausted(f"cannot record which VMs reach each other: {error}", hint=hint) from error
        self._members, self._signature = dict(members), _signature(self._path)


def changed(
    known: Mapping[str, Member], members: Collection[Member], gone: Collection[str], *, whole: bool
) -> dict[str, Member]:
    """The members after a call of `ports.Groups.tell`."""
    left = {} if whole else {name: one for name, one in known.items() if name not in gone}
    return left | {one.name: one for one in members}


def _signature(path: Path) -> _Signature | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


_OPEN = "VMs' addresses are not checked, and VMs of different jobs reach each other"
# Bytes that a VM may send at once, beside those of its rate in a second (net/netfilter/nft_limit.c counts so):
# two frames as large as a guest may hand over (64 KiB, virtio's offloads).
_BURST = 128 << 10
_TABLE = """
add table bridge {table}
delete table bridge {table}
table bridge {table} {{
    set guests {{ type ifname . ether_addr . ipv4_addr; }}
    set pairs {{ type ifname . ifname; }}
    set addresses {{ type ipv4_addr; }}
    set owners {{ type ifname . ipv4_addr; }}
    set peers {{ type ifname . ipv4_addr; }}
    map groups {{ type ifname : mark; }}
    set members {{ type ifname . mark; }}
    set elsewhere {{ type ipv4_addr . mark; }}
    map sending {{ type ifname : limit; }}
    map receiving {{ type ifname : limit; }}
    set senders {{ type ifname . ipv4_addr; flags dynamic, timeout; timeout 1h; size 65536; }}
    chain arriving {{
        type filter hook prerouting priority -300; policy accept;
        iifname "{prefix}*" limit name iifname map @sending drop
        iifname "{prefix}*" jump from_guest
    }}
    chain leaving {{
        type filter hook postrouting priority 0; policy accept;
        oifname "{prefix}*" limit name oifname map @receiving drop
    }}
    chain from_guest {{
        ether type ip iifname . ether saddr . ip saddr @guests accept
        ether type != arp drop
        iifname . ether saddr . arp saddr ip @guests iifname . arp saddr ether . arp saddr ip @guests accept
        drop
    }}
    chain between {{
        type filter hook forward priority 0; policy accept;
        iifname "{prefix}*" oifname "mv*" jump within
        iifname != "mv*" oifname "{prefix}*" jump from_elsewhere
        iifname "{prefix}*" oifname != "mv*" jump to_elsewhere
    }}
    chain within {{
        iifname . oifname @pairs accept
        meta mark set 0
        meta mark set iifname map @groups
        oifname . meta mark @members meta mark set 0 accept
        drop
    }}
    chain from_elsewhere {{
        ip saddr {guests} update @senders {{ oifname . ip saddr }}
        arp saddr ip {guests} oifname . arp daddr ip @owners update @senders {{ oifname . arp saddr ip }}
    }}
    chain to_elsewhere {{
        ip daddr != {guests} return
        arp daddr ip != {guests} return
        iifname . ip daddr @peers accept
        iifname . ip daddr @senders accept
        iifname . arp daddr ip @peers accept
        iifname . arp daddr ip @senders accept
        meta mark set 0
        meta mark set iifname map @groups
        ip daddr . meta mark @elsewhere meta mark set 0 accept
        arp daddr ip . meta mark @elsewhere meta mark set 0 accept
        drop
    }}
    chain routed {{
        type filter hook input priority 0; policy accept;
        iifname "{prefix}*" ether type ip ip daddr {guests} drop
        iifname "{prefix}*" ether type ip ip daddr @addresses drop
    }}
}}
"""


class Firewall:
    """The table of the VMs whose names begin with `prefix` and whose manifests are below `vms`. `guests` are the first
    and the last address of VMs, on any host; `host` is the name of this one."""

    def __init__(self, prefix: str, vms: Path, guests: tuple[str, str], host: str = "") -> None:
        self._prefix, self._vms, self._guests, self._host = prefix, vms, "-".join(guests), host
        self._record = MemberRecord(vms / f".{prefix}members")
        self._table = prefix.rstrip("-")
        self._lock = threading.Lock()
        self._nft = _library()
        with self._locked():
            problem = self._create_table(self._nft) if self._nft is not None else ""
        if problem:
            log.warning(_OPEN, reason=problem)
            self._nft = None
        self.remove_if_unused()

    @property
    def in_use(self) -> bool:
        """Whether frames are checked and limited on this machine."""
        return self._nft is not None

    @property
    def members(self) -> Mapping[str, Member]:
        """The members of groups that this host was told of, by name."""
        return self._record.read()

    def group(self, known: Manifest) -> int:
        """The group of a VM of this host: as the controller told last, or as at its start."""
        told = self._record.read().get(known.name)
        return told.group if told is not None else known.group

    def separates(self, known: Manifest) -> bool:
        """Whether the VM is in a group, which is kept apart from others by the rules alone."""
        return self._nft is not None and self.group(known) != 0

    def allow(self, known: Manifest) -> None:
        """Let a VM send as its manifest says, and to its peers and its group. The manifest has been written."""
        with self._locked():
            if self._nft is None:
                return
            group = self.group(known)
            problem = self._nft.run("\n".join([*self._limits("add", known), *self._elements("add", known, group)]))
            if problem:  # an administrator has flushed all rules, the last VM was removed, or it had another group
                problem = self._create_table(self._nft)
            if problem:
                raise Broken(f"cannot let VM {known.name} on the bridge: {problem}", hint="see `nft list ruleset`")

    def learn(self, members: Collection[Member], gone: Collection[str], *, whole: bool) -> list[str]:
        """Take the members of `ports.Groups.tell`. Returns the VMs of this host with a new group."""
        with self._locked():
            before = self._record.read()
            after = changed(before, members, gone, whole=whole)
            self._record.write(after)
            if self._nft is None:
                return []
            lines, regrouped = self._regrouping(before, after), [*self._regrouped(before, after)]
            for known, old, new in regrouped:
                # Added first, because an element that is absent cannot be deleted.
                lines += [line for verb in ("add", "delete") for line in self._elements(verb, known, old)]
                lines += self._elements("add", known, new)
            problem = self._nft.run("\n".join(lines)) if lines else ""
            if problem and any(self._homes()):
                problem = self._create_table(self._nft)
                if problem:
                    raise Broken(f"cannot change which VMs reach each other: {problem}", hint="see `nft list ruleset`")
            return [known.name for known, _, _ in regrouped]

    def _regrouping(self, before: Mapping[str, Member], after: Mapping[str, Member]) -> list[str]:
        """The commands for changes of VMs of other hosts."""
        old, new = self._elsewhere(before), self._elsewhere(after)
        lines = [line for verb in ("add", "delete") for line in self._addresses(verb, old - new)]
        return [*lines, *self._addresses("add", new - old)]

    def _regrouped(
        self, before: Mapping[str, Member], after: Mapping[str, Member]
    ) -> Iterator[tuple[Manifest, int, int]]:
        """The VMs of this host with another group, each with the old and the new one."""
        for name in before.keys() | after.keys():
            was, now = before.get(name), after.get(name)
            if self._host not in (one.host for one in (was, now) if one is not None) or was == now:
                continue
            known = manifest.read(self._vms / name)
            if known is not None and known.on_network:
                old, new = (one.group if one is not None else known.group for one in (was, now))
                if old != new:
                    yield known, old, new

    def _elsewhere(self, members: Mapping[str, Member]) -> set[tuple[str, int]]:
        """Address and group of each VM of another host."""
        return {(one.address, one.group) for one in members.values() if one.host != self._host}

    def _addresses(self, verb: str, which: Collection[tuple[str, int]]) -> list[str]:
        """The command about these addresses of VMs of other hosts, if there are any."""
        elements = ", ".join(f"{address} . {group}" for address, group in sorted(which))
        return [f"{verb} element bridge {self._table} elsewhere {{ {elements} }}"] if elements else []

    def revoke(self, known: Manifest) -> None:
        """Undo `allow`. A VM that was never allowed is success."""
        with self._lock:
            if self._nft is None or not known.on_network:
                return
            # Added first, because an element that is absent cannot be deleted.
            group = self.group(known)
            both = [*self._limits("add", known), *self._elements("add", known, group)]
            both += [*self._elements("delete", known, group), *self._limits("delete", known)]
            problem = self._nft.run("\n".join(both))
        if not problem or "No such file or directory" in problem:
            return
        with self._locked():  # an element is not what it should be, as after a change that failed
            problem = self._create_table(self._nft, without=known.name)
            if problem:
                raise Broken(f"cannot take VM {known.name} off the bridge: {problem}", hint="see `nft list ruleset`")

    def remove_if_unused(self) -> None:
        """Remove the table when there is no VM left."""
        if self._nft is None or any(self._homes()):  # asked without the lock first, because it is nearly always so
            return
        with self._locked():
            if self._nft is not None and not any(self._homes()):
                self._nft.run(f"add table bridge {self._table}\ndelete table bridge {self._table}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the host's lock too: otherwise a table that another process makes from the manifests could lack a VM
        whose manifest was written after they were read, and whose elements were added before the table was replaced."""
        with self._lock, host_lock(self._vms) if self._vms.is_dir() else nullcontext():
            yield

    def _create_table(self, nft: Nft, without: str = "") -> str:
        """Create the whole table, or replace it, without one of the VMs. Returns the problem, or nothing."""
        lines = [_TABLE.format(table=self._table, prefix=self._prefix, guests=self._guests)]
        for home in self._homes():
            known = manifest.read(home)
            if known is not None and known.on_network and known.name != without:
                lines += [*self._limits("add", known), *self._elements("add", known, self.group(known))]
        lines += self._addresses("add", self._elsewhere(self._record.read()))
        return nft.run("\n".join(lines))

    def _homes(self) -> Iterable[Path]:
        return self._vms.glob(f"{self._prefix}*")

    def _limits(self, verb: str, known: Manifest) -> list[str]:
        """The limits of a VM that claims bandwidth. `_elements` refer to them: add them before, delete them after."""
        if not known.net:
            return []
        rate = known.net * 1_000_000 // 8  # bytes a second
        what = f" {{ rate over {rate} bytes/second burst {_BURST} bytes; }}" if verb == "add" else ""
        return [f"{verb} limit bridge {self._table} {known.name}.{way}{what}" for way in ("sending", "receiving")]

    def _elements(self, verb: str, known: Manifest, group: int) -> list[str]:
        name, own = f'"{known.name}"', known.address
        found = [("guests", f"{name} . {known.mac} . {own}"), ("addresses", own), ("owners", f"{name} . {own}")]
        if known.job_address:
            found.append(("guests", f"{name} . {known.mac} . {known.job_address}"))
        if known.net:
            found += [(way, f'{name} : "{known.name}.{way}"') for way in ("sending", "receiving")]
        elsewhere: list[str] = []
        if group:
            found += [("groups", f"{name} : {group}"), ("members", f"{name} . {group}")]
            elsewhere = self._addresses(verb, self._peers_elsewhere(verb, known, group))
        else:
            found += [("peers", f"{name} . {address}") for address in known.peer_addresses]
            for peer in known.peers:
                found += [("pairs", f'{name} . "{peer}"'), ("pairs", f'"{peer}" . {name}')]
        lines = [f"{verb} element bridge {self._table} {which} {{ {element} }}" for which, element in found]
        return [*lines, *elsewhere]

    def _peers_elsewhere(self, verb: str, known: Manifest, group: int) -> set[tuple[str, int]]:
        """The peers of a VM on other hosts, which it reaches from its start on. Members stay that this host knows."""
        peers = zip(known.peers, known.peer_addresses, strict=False)
        found = {(address, group) for name, address in peers if not (self._vms / name).exists()}
        return found - self._elsewhere(self._record.read()) if verb == "delete" else found


def _library() -> Nft | None:
    """The library; None, with a warning, if this machine has none."""
    try:
        return Nft()
    except OSError as error:
        log.warning(_OPEN, reason=str(error))
        return None
