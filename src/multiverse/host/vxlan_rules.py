"""The rules of a VXLAN (`host.vxlan`): who may send to its port from here, and whose packets are accepted.

They are about the whole port, not about the id in the packet: the kernel may carry several datagrams of one sender as
one packet, of which a rule sees the first id only (udp(7), UDP_SEGMENT).
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

OVERHEAD = {4: 50, 6: 70}
"""Bytes that a packet grows by: outer Ethernet header, IPv4 or IPv6, UDP and VXLAN (RFC 7348, section 5)."""

_MARK = 0x6D76_4F56
"""Of frames that leave by a VXLAN of ours. Only root can mark a packet of its own (socket(7), SO_MARK)."""

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


def tables(table: str, device: str, port: int, address: str, machines: Iterable[str]) -> str:
    """The commands that make both tables anew. `address` is the host's own; `machines` are those whose packets are
    accepted, of the same version of IP."""
    elements = ", ".join(sorted(machines))
    return _TABLES.format(
        table=table,
        device=device,
        port=port,
        address=address,
        mark=_MARK,
        elements=f"elements = {{ {elements} }};" if elements else "",
        **_WORDS[ip_address(address).version],
    )
