"""The guest's network interface, its address and the names of other nodes."""

# ruff: noqa: PTH104, PTH110, PTH208

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from multiverse.guest.agent.system import GuestAgentError, write

# <linux/sockios.h>, <linux/if.h>, <linux/if_arp.h>, <linux/rtnetlink.h>, <linux/netlink.h>
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFHWADDR, SIOCGIFADDR, SIOCSIFMTU = 0x8913, 0x8914, 0x8924, 0x8915, 0x8922
IFF_UP, ARPHRD_ETHER = 0x1, 1
RTM_NEWADDR, RTM_DELADDR, RTM_NEWROUTE = 20, 21, 24
NLM_REQUEST_ACK, NLM_CREATE_REPLACE, NLMSG_ERROR = 0x5, 0x500, 2

HOSTS = "/etc/hosts"

_interface = ""  # name of the guest's network interface, once it is known
_own_hosts: list[str] = []  # the lines of /etc/hosts that came with the identity
_known: dict[str, str] = {}  # other VMs, by name: their addresses


def interface() -> str:
    """The first network interface of a device. Raises GuestAgentError."""
    global _interface
    if not _interface:
        names = sorted(n for n in os.listdir("/sys/class/net") if os.path.exists(f"/sys/class/net/{n}/device"))
        if not names:
            raise GuestAgentError("the guest has no network interface")
        _interface = names[0]
    return _interface


def link_up(name: str) -> None:
    """Set an interface up (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        raw = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
        flags = struct.unpack_from("h", raw, 16)[0]
        if not flags & IFF_UP:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP))


def set_network(name: str, mac: str, address: str, gateway: str) -> None:
    """Set MAC, address (with prefix length) and default route, if any, of an interface that is up (rtnetlink(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        raw = bytes.fromhex(mac.replace(":", ""))
        fcntl.ioctl(sock, SIOCSIFHWADDR, struct.pack("16sH6s8x", name.encode(), ARPHRD_ETHER, raw))
    index = socket.if_nametoindex(name)
    requests = [address_request(RTM_NEWADDR, index, address)]
    if gateway:
        requests.append(_route_request(index, gateway=gateway))
    _send_netlink(requests)


def join_network(name: str, address: str, own: str, gateway: str) -> None:
    """Replace the address `own` of an interface by that in the network of its VM's job (both with prefix length). Again
    is success. MPI takes all addresses of an interface for those of one network. So `own` moves to the loopback
    interface, which MPI leaves out, and stays the source of what is sent to its network and by the gateway. On a
    platform both are the same, because its one network is also the job's: then nothing is done."""
    if address == own:
        return
    index, (local, _, prefix) = socket.if_nametoindex(name), own.partition("/")
    source = socket.inet_aton(local)
    network = int.from_bytes(source, "big") >> (32 - int(prefix)) << (32 - int(prefix))
    _send_netlink([address_request(RTM_NEWADDR, index, address)])
    try:
        _send_netlink([address_request(RTM_DELADDR, index, own)])
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    requests = [
        address_request(RTM_NEWADDR, socket.if_nametoindex("lo"), f"{local}/32"),
        _route_request(index, source, network.to_bytes(4, "big"), int(prefix)),
    ]
    if gateway:
        requests.append(_route_request(index, source, gateway=gateway))
    _send_netlink(requests)


def _route_request(index: int, source: bytes = b"", network: bytes = b"", prefix: int = 0, gateway: str = "") -> bytes:
    """A netlink message that adds a route to a network on the interface `index`, or by a gateway there."""
    # Table main, protocol static, scope universe or link, unicast.
    body = struct.pack("BBBBBBBBI", socket.AF_INET, prefix, 0, 0, 254, 4, 0 if gateway else 253, 1, 0)
    body += _attribute(1, network) if network else b""  # RTA_DST
    body += _attribute(5, socket.inet_aton(gateway)) if gateway else b""  # RTA_GATEWAY
    body += _attribute(4, struct.pack("I", index))  # RTA_OIF
    body += _attribute(7, source) if source else b""  # RTA_PREFSRC
    return _request(RTM_NEWROUTE, body)


def set_mtu(name: str, mtu: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFMTU, struct.pack("16si20x", name.encode(), mtu))


def remove_address(name: str, address: str) -> None:
    _send_netlink([address_request(RTM_DELADDR, socket.if_nametoindex(name), address)])


def current_address(name: str) -> str:
    """The IPv4 address of an interface, without prefix length."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        raw = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("16s24x", name.encode()))[20:24]
    return socket.inet_ntoa(raw)


def set_hosts(hostname: str, address: str, peers: list[list[str]], others: list[list[str]]) -> None:
    """Write /etc/hosts: this node, its peers, and other VMs, all as pairs of name and address."""
    lines = ["127.0.0.1 localhost", f"{address} {hostname}", *(f"{peer} {name}" for name, peer in peers)]
    _own_hosts[:] = lines
    _known.clear()
    _known.update((name, where) for name, where in others)
    write(HOSTS, _hosts())


def learn_names(names: list[list[str]], gone: list[str], whole: bool) -> None:
    """Add names of other VMs to /etc/hosts and remove those that are gone; with `whole` replace all."""
    if whole:
        _known.clear()
    for name in gone:
        _known.pop(name, None)
    _known.update((name, where) for name, where in names)
    write(f"{HOSTS}.new", _hosts())
    os.rename(f"{HOSTS}.new", HOSTS)  # a job may be reading it


def _hosts() -> str:
    own = {line.rpartition(" ")[2] for line in _own_hosts}
    return "\n".join([*_own_hosts, *(f"{_known[name]} {name}" for name in _known if name not in own)]) + "\n"


def address_request(kind: int, index: int, address: str) -> bytes:
    """A netlink message that adds (RTM_NEWADDR) or deletes (RTM_DELADDR) an address of the interface `index`."""
    host, _, prefix = address.partition("/")
    local = socket.inet_aton(host)
    body = struct.pack("BBBBI", socket.AF_INET, int(prefix or "24"), 0, 0, index)
    return _request(kind, body + _attribute(2, local) + _attribute(1, local))  # IFA_LOCAL, IFA_ADDRESS


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value  # all values here are multiples of four bytes


def _request(kind: int, body: bytes) -> bytes:
    return struct.pack("IHHII", 16 + len(body), kind, NLM_REQUEST_ACK | NLM_CREATE_REPLACE, 0, 0) + body


def _send_netlink(requests: list[bytes]) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.bind((0, 0))
        for request in requests:
            netlink.send(request)
            answer = netlink.recv(4096)
            if struct.unpack_from("H", answer, 4)[0] == NLMSG_ERROR:
                code = -struct.unpack_from("i", answer, 16)[0]  # 0 acknowledges the request
                if code:
                    raise OSError(code, os.strerror(code), "rtnetlink")
