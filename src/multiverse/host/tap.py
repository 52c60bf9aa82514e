"""Taps and bridge ports by ioctl(2): a fraction of a millisecond each, with no program run.

A tap is not persistent: it belongs to the QEMU that holds its descriptor and goes with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted

# <linux/if_tun.h>, <linux/sockios.h>, <linux/rtnetlink.h>, <linux/neighbour.h>
TUNSETIFF, TUNSETPERSIST = 0x400454CA, 0x400454CB
RTM_NEWNEIGH, NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE = 28, 0x1, 0x4, 0x400
NUD_NOARP, NTF_MASTER, NDA_LLADDR = 0x40, 0x4, 2
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCBRADDIF, IFF_UP = 0x8913, 0x8914, 0x89A2, 0x1
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1


def open_tap(name: str, bridge: str | None, mac: str = "") -> int:
    """Make a tap and return its descriptor; with a bridge, up and a port of it.

    The port is given frames to `mac` and to all, none that the bridge knows no port for, and it is isolated.
    `Exhausted` if the name is in use still.
    """
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Broken(
            f"cannot open /dev/net/tun: {error.strerror}", hint="load the tun module, or run as root"
        ) from error
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        if bridge is not None:
            _join(name, bridge, mac)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EBUSY:
            raise Exhausted(f"the link {name} is in use", hint="is a VM of that name still running?") from error
        if error.errno == errno.EPERM:
            raise Broken(f"cannot make the link {name}: {error.strerror}", hint="run it as root") from error
        raise Broken(f"cannot make the link {name} on {bridge}: {error.strerror}",
                     hint=f"is there a bridge {bridge}? see `multiverse lab up`") from error  # fmt: skip
    return fd


def isolate(name: str, isolated: bool) -> None:
    """An isolated port reaches no other isolated port. A tap that has gone, or is on no bridge, needs no such thing."""
    try:
        Path(f"/sys/class/net/{name}/brport/isolated").write_text("1" if isolated else "0")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # the second if it goes as we write
            raise Broken(f"cannot isolate the link {name}: {error.strerror}", hint="run it as root") from error


def _join(name: str, bridge: str, mac: str) -> None:
    octets = bytes.fromhex(mac.replace(":", ""))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        index = socket.if_nametoindex(name)
        # A bridge without an address of its own takes its ports' lowest: never this one's, so it keeps what it has.
        own = b"\xfe" + octets[1:]
        fcntl.ioctl(sock, SIOCSIFHWADDR, struct.pack("16sH6s16x", name.encode(), ARPHRD_ETHER, own))
        try:
            fcntl.ioctl(sock, SIOCBRADDIF, struct.pack("16si20x", bridge.encode(), index))
        except OSError as error:
            if error.errno != errno.EBUSY:  # it is a port of it already
                raise
        isolate(name, isolated=True)
        Path(f"/sys/class/net/{name}/brport/unicast_flood").write_text("0")
        raw = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
        flags = struct.unpack_from("h", raw, 16)[0]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP))
        _expect(index, octets)  # only a port that is up takes it


def _expect(index: int, octets: bytes) -> None:
    """Tell the bridge for good where that address is: else it would forget a silent guest, and ask all ports."""
    lladdr = struct.pack("=HH6s2x", 10, NDA_LLADDR, octets)
    body = struct.pack("=BxxxiHBB", socket.AF_BRIDGE, index, NUD_NOARP, NTF_MASTER, 0) + lladdr
    head = struct.pack("=IHHII", 16 + len(body), RTM_NEWNEIGH, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.sendall(head + body)
        (code,) = struct.unpack_from("=i", sock.recv(4096), 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def remove_tap(name: str) -> None:
    """Remove a tap that nobody holds, such as one made persistent by hand. Absent is success."""
    if not Path(f"/sys/class/net/{name}/tun_flags").exists():
        return
    try:
        fd = open_tap(name, None)
    except (Exhausted, Broken):
        return  # it is going with its process, or is not ours to take
    try:
        fcntl.ioctl(fd, TUNSETPERSIST, 0)
    finally:
        os.close(fd)
