"""Which frames VMs may send on the bridge, and how many: one nftables table per site, changed through libnftables(3) in
a fraction of a millisecond.

A VM sends frames from its own MAC and IP address only; frames with other ones, and all that is neither IPv4 nor ARP,
are dropped at its tap, before the bridge learns from them. VMs of one job reach each other, over the bridge only:
packets between VMs that this host would route are dropped. A VM that is not in the table sends nothing. The table is
derived from the VMs' manifests, and is made again from them whenever it is missing.

Each host checks what its own VMs send to VMs of other hosts, through the bridge's uplink: they reach the addresses of
their peers, and addresses that have sent to them. The latter are VMs that replaced a peer after this VM was started;
their own host lets them send to their peers only.

A VM that claims bandwidth has two limits, for what it sends and for what it receives, at its tap: frames beyond the
rate are dropped, to which TCP adapts. Nothing is queued, so no other VM's frames wait behind them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import structlog

from multiverse.core.errors import Broken
from multiverse.host import manifest
from multiverse.host.manifest import Manifest
from multiverse.host.nft import Nft
from multiverse.host.registry import host_lock

log = structlog.get_logger(__name__)

_OPEN = "VMs' addresses are not checked, and VMs of different jobs reach each other"
# Bytes that a VM may send at once, beside what its rate lets it send in a second (net/netfilter/nft_limit.c counts so):
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
        iifname "{prefix}*" oifname "mv*" iifname . oifname != @pairs drop
        iifname != "mv*" oifname "{prefix}*" jump from_elsewhere
        iifname "{prefix}*" oifname != "mv*" jump to_elsewhere
    }}
    chain from_elsewhere {{
        ip saddr {guests} update @senders {{ oifname . ip saddr }}
        arp saddr ip {guests} oifname . arp daddr ip @owners update @senders {{ oifname . arp saddr ip }}
    }}
    chain to_elsewhere {{
        ip daddr {guests} iifname . ip daddr != @peers iifname . ip daddr != @senders drop
        arp daddr ip {guests} iifname . arp daddr ip != @peers iifname . arp daddr ip != @senders drop
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
    and the last address of VMs, on any host."""

    def __init__(self, prefix: str, vms: Path, guests: tuple[str, str]) -> None:
        self._prefix, self._vms, self._guests = prefix, vms, "-".join(guests)
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

    def allow(self, known: Manifest) -> None:
        """Let a VM send as its manifest says, and to its peers. The manifest has been written."""
        with self._locked():
            if self._nft is None:
                return
            problem = self._nft.run("\n".join([*self._limits("add", known), *self._elements("add", known)]))
            if _is_absent(problem):  # an administrator has flushed all rules, or the last VM was removed
                problem = self._create_table(self._nft)
            if problem:
                raise Broken(f"cannot let VM {known.name} on the bridge: {problem}", hint="see `nft list ruleset`")

    def revoke(self, known: Manifest) -> None:
        """Undo `allow`. A VM that was never allowed is success."""
        with self._lock:
            if self._nft is None or not known.on_network:
                return
            # Added first, because an element that is absent cannot be deleted.
            both = [*self._limits("add", known), *self._elements("add", known)]
            both += [*self._elements("delete", known), *self._limits("delete", known)]
            problem = self._nft.run("\n".join(both))
            if problem and not _is_absent(problem):
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
        """Hold the host's lock too: the table that another process makes from the manifests would lack a VM whose
        manifest was written after they were read, and whose elements were added before the table was replaced."""
        with self._lock, host_lock(self._vms) if self._vms.is_dir() else nullcontext():
            yield

    def _create_table(self, nft: Nft) -> str:
        """Create the whole table, or replace it, in one transaction. Returns the problem, or nothing."""
        lines = [_TABLE.format(table=self._table, prefix=self._prefix, guests=self._guests)]
        for home in self._homes():
            known = manifest.read(home)
            if known is not None and known.on_network:
                lines += [*self._limits("add", known), *self._elements("add", known)]
        return nft.run("\n".join(lines))

    def _homes(self) -> Iterable[Path]:
        return self._vms.glob(f"{self._prefix}*")

    def _limits(self, verb: str, known: Manifest) -> list[str]:
        """The limits to which `_elements` tie a VM that claims bandwidth. They are added before, and deleted after."""
        if not known.net:
            return []
        rate = known.net * 1_000_000 // 8  # bytes a second
        what = f" {{ rate over {rate} bytes/second burst {_BURST} bytes; }}" if verb == "add" else ""
        return [f"{verb} limit bridge {self._table} {known.name}.{way}{what}" for way in ("sending", "receiving")]

    def _elements(self, verb: str, known: Manifest) -> list[str]:
        lines = [
            f'{verb} element bridge {self._table} guests {{ "{known.name}" . {known.mac} . {known.address} }}',
            f"{verb} element bridge {self._table} addresses {{ {known.address} }}",
            f'{verb} element bridge {self._table} owners {{ "{known.name}" . {known.address} }}',
        ]
        if known.job_address:
            own = f'"{known.name}" . {known.mac} . {known.job_address}'
            lines.append(f"{verb} element bridge {self._table} guests {{ {own} }}")
        if known.net:
            lines += [
                f'{verb} element bridge {self._table} {way} {{ "{known.name}" : "{known.name}.{way}" }}'
                for way in ("sending", "receiving")
            ]
        lines += [
            f'{verb} element bridge {self._table} peers {{ "{known.name}" . {address} }}'
            for address in known.peer_addresses
        ]
        for peer in known.peers:
            for one, two in ((known.name, peer), (peer, known.name)):
                lines.append(f'{verb} element bridge {self._table} pairs {{ "{one}" . "{two}" }}')
        return lines


def _library() -> Nft | None:
    """The library; None, with a warning, if this machine has none."""
    try:
        return Nft()
    except OSError as error:
        log.warning(_OPEN, reason=str(error))
        return None


def _is_absent(problem: str) -> bool:
    return "No such file or directory" in problem
