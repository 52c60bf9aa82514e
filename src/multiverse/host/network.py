"""Changes of this machine's network without running a program: taps and ports by ioctl(2), rules by libnftables(3)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import weakref
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted

# <linux/if_tun.h>, <linux/sockios.h>, <linux/rtnetlink.h>, <linux/neighbour.h>
TUNSETIFF, TUNSETPERSIST = 0x400454CA, 0x400454CB
RTM_NEWNEIGH, NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE = 28, 0x1, 0x4, 0x400
NUD_NOARP, NTF_MASTER, NDA_LLADDR = 0x40, 0x4, 2
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCBRADDIF, SIOCBRDELIF, IFF_UP = 0x8913, 0x8914, 0x89A2, 0x89A3, 0x1
ETH_P_ARP = 0x0806  # <linux/if_ether.h>
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1


def open_tap(name: str, bridge: str | None, mac: str = "") -> int:
    """Create a tap and return its descriptor. With a bridge, the tap is up, and an isolated port of the bridge. The
    kernel removes the tap when the QEMU that holds its descriptor ends. The bridge forwards to the port frames for
    `mac` and broadcasts, but not frames for unknown addresses. Raises `Exhausted` if there is an interface of that
    name, `Broken` if there is no such bridge or for want of permission."""
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        what = f"cannot open /dev/net/tun: {error.strerror}"
        raise Broken(what, hint="load the tun module, or run as root") from error
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        if bridge is not None:
            _add_to_bridge(name, bridge, mac)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EBUSY:
            raise Exhausted(f"the interface {name} is in use", hint="is a VM of that name still running?") from error
        if error.errno == errno.EPERM:
            raise Broken(f"cannot create the tap {name}: {error.strerror}", hint="run it as root") from error
        raise Broken(f"cannot create the tap {name} on {bridge}: {error.strerror}",
                     hint=f"is there a bridge {bridge}? see `multiverse lab up`") from error  # fmt: skip
    return fd


def open_vhost_net() -> int:
    """A descriptor of /dev/vhost-net, by which the kernel moves the frames of one tap. Raises `Broken`."""
    try:
        return os.open("/dev/vhost-net", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Broken(f"cannot open /dev/vhost-net: {error.strerror}", hint="load the vhost_net module") from error


def set_isolated(name: str, isolated: bool) -> None:
    """Isolate a bridge port from other isolated ports, or end that. A tap that is gone, or no port, is success."""
    try:
        Path(f"/sys/class/net/{name}/brport/isolated").write_text("1" if isolated else "0")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # the second if it is removed during the write
            raise Broken(f"cannot isolate the tap {name}: {error.strerror}", hint="run it as root") from error


def join_bridge(name: str, bridge: str, mac: str) -> None:
    """Make a tap an isolated port of the bridge, as `open_tap` does. The same again is success. Raises `Broken`."""
    try:
        _add_to_bridge(name, bridge, mac)
    except OSError as error:
        what = f"cannot add the tap {name} to {bridge}: {error.strerror}"
        raise Broken(what, hint=f"is there a bridge {bridge}?") from error


def bridge_of(name: str) -> tuple[str, bool] | None:
    """The bridge of which a tap is a port, and whether it is an isolated one; None if it is on no bridge."""
    port = Path(f"/sys/class/net/{name}")
    try:
        return (port / "master").readlink().name, (port / "brport/isolated").read_text().strip() == "1"
    except OSError:
        return None


def leave_bridge(name: str) -> None:
    """Take a tap off its bridge, which forgets what it knew of it. One that is on no bridge is success. Raises
    `Broken`."""
    found = bridge_of(name)
    if found is None:
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            index = socket.if_nametoindex(name)
            fcntl.ioctl(sock, SIOCBRDELIF, struct.pack("16si20x", found[0].encode(), index))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENODEV):  # it has just left, or is gone
            what = f"cannot take the tap {name} off its bridge: {error.strerror}"
            raise Broken(what, hint="run it as root") from error


def announce(bridge: str, mac: str, address: str) -> None:
    """Say on a bridge, and to all that it leads to, that the VM with this MAC and address is here now (RFC 5227,
    section 3). Failure is no error: the VM's next frame says so, too."""
    if not (bridge and address):
        return
    octets, ip = bytes.fromhex(mac.replace(":", "")), socket.inet_aton(address)
    request = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + octets + ip + bytes(6) + ip
    frame = b"\xff" * 6 + octets + struct.pack("!H", ETH_P_ARP) + request
    with suppress(OSError), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((bridge, ETH_P_ARP))
        sock.send(frame)


def _add_to_bridge(name: str, bridge: str, mac: str) -> None:
    octets = bytes.fromhex(mac.replace(":", ""))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        index = socket.if_nametoindex(name)
        # A bridge without an address of its own takes the lowest of its ports. A high one keeps the bridge's address.
        own = b"\xfe" + octets[1:]
        fcntl.ioctl(sock, SIOCSIFHWADDR, struct.pack("16sH6s16x", name.encode(), ARPHRD_ETHER, own))
        try:
            fcntl.ioctl(sock, SIOCBRADDIF, struct.pack("16si20x", bridge.encode(), index))
        except OSError as error:
            if error.errno != errno.EBUSY:  # the tap is a port of it already
                raise
        set_isolated(name, isolated=True)
        Path(f"/sys/class/net/{name}/brport/unicast_flood").write_text("0")
        raw = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
        flags = struct.unpack_from("h", raw, 16)[0]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP))
        _add_fdb_entry(index, octets)  # only a port that is up accepts it


def _add_fdb_entry(index: int, octets: bytes) -> None:
    """Add a permanent entry to the bridge's table: a learnt one expires, and the bridge would then flood all ports."""
    lladdr = struct.pack("=HH6s2x", 10, NDA_LLADDR, octets)
    body = struct.pack("=BxxxiHBB", socket.AF_BRIDGE, index, NUD_NOARP, NTF_MASTER, 0) + lladdr
    head = struct.pack("=IHHII", 16 + len(body), RTM_NEWNEIGH, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.sendall(head + body)
        (code,) = struct.unpack_from("=i", sock.recv(4096), 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def link_rate(name: str) -> int:
    """Mbit/s that an interface can carry each way, as its driver reports; 0 if unknown, as of one that is down."""
    try:
        return max(0, int(Path(f"/sys/class/net/{name}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def remove_tap(name: str) -> None:
    """Remove a persistent tap that no process holds, such as one that an administrator made. Absent is success."""
    if not Path(f"/sys/class/net/{name}/tun_flags").exists():
        return
    try:
        fd = open_tap(name, None)
    except (Exhausted, Broken):
        return  # the kernel is removing it with its process, or another process holds it
    try:
        fcntl.ioctl(fd, TUNSETPERSIST, 0)
    finally:
        os.close(fd)


_LIBRARY = "libnftables.so.1"


def _descriptors() -> set[int]:
    """The open descriptors of this process, without that of this listing."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208  (numbers, not paths)
    return {int(number) for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


class Nft:
    """libnftables in this process: a change takes a fraction of a millisecond. One thread at a time may use it."""

    def __init__(self) -> None:
        """Raises `OSError` if this machine has no such library."""
        library = ctypes.CDLL(_LIBRARY)
        self._run, self._error = library.nft_run_cmd_from_buffer, library.nft_ctx_get_error_buffer
        library.nft_ctx_new.restype = ctypes.c_void_p
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._error.argtypes, self._error.restype = [ctypes.c_void_p], ctypes.c_char_p
        before = _descriptors()
        self._context = ctypes.c_void_p(library.nft_ctx_new(0))
        library.nft_ctx_free.argtypes, library.nft_ctx_free.restype = [ctypes.c_void_p], None
        weakref.finalize(self, library.nft_ctx_free, self._context)  # it has a socket, and megabytes
        for fd in _descriptors() - before:
            with suppress(OSError):
                os.set_inheritable(fd, False)  # programs that this process starts must not inherit its socket
        for buffer in (library.nft_ctx_buffer_error, library.nft_ctx_buffer_output):
            buffer.argtypes = [ctypes.c_void_p]
            buffer(self._context)

    def run(self, commands: str) -> str:
        """Run the commands as one transaction. Returns the problem, or nothing."""
        if self._run(self._context, commands.encode()) == 0:
            return ""
        return str(self._error(self._context).decode(errors="replace")).strip().partition("\n")[0] or "nftables refused"
