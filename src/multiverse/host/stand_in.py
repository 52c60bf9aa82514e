"""The stand-in for a VM that sleeps: daemons that answer the scheduler as its node, in namespaces of their own.

They have the name, the MAC and the address of the VM, and the VM's place at the bridge: the interface of this host has
the name of its tap, so that the firewall's rules and the entries of the bridge and the VXLAN hold for it. What the
VM's connections get meanwhile is not answered: a reset would end connections with which the VM is to go on.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import shutil
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from multiverse.core.errors import Broken, Refused
from multiverse.core.model.identity import Daemon, Identity, NodeBootstrap
from multiverse.host import namespaces, process
from multiverse.host.namespaces import System, View
from multiverse.host.network import Nft, join_bridge
from multiverse.host.process import in_thread
from multiverse.system import kernel
from multiverse.system.processes import ProcessIdentity

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_PYTHON = "/usr/bin/python3"
_PROGRAM = Path(__file__).with_name("stand_in_program.py")
_INSIDE = "eth0"
_STARTS = 30.0  # seconds until the daemons of a stand-in have been started
_SILENT = """\
table inet stand_in {
    chain leaving {
        type filter hook output priority 0; policy accept;
        tcp flags & rst == rst drop
        icmp type destination-unreachable drop
    }
}
"""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def check(identity: Identity) -> None:
    """Raise `Refused` if this machine lacks a program of the stand-in for a VM of that identity."""
    programs = {Path(daemon.argv[0]).name: _program(daemon) for daemon in identity.bootstrap.daemons}
    if missing := sorted(name for name, path in programs.items() if not path):
        what = f"nothing can stand in for VM {identity.hostname}: this host lacks {', '.join(missing)}"
        raise Refused(what, hint="install slurmd and munge of the cluster's release")


def _program(daemon: Daemon) -> str:
    """The path of a daemon's program on this machine; empty if there is none. Debian's slurmd is a link into /etc."""
    found = shutil.which(Path(daemon.argv[0]).name, path=f"{Path(daemon.argv[0]).parent}:{_ENVIRONMENT['PATH']}")
    return os.path.realpath(found) if found else ""


@dataclass(frozen=True)
class StartingStandIn:
    """The first process of a stand-in, which waits to be told what to do."""

    process: ProcessIdentity
    _identity: Identity
    _socket: socket.socket

    def serve(self, bridge: str) -> None:
        """Give it the VM's place at the bridge, and start its daemons. Raises `Broken`."""
        try:
            _connect(self._identity, bridge, self.process.pid)
            self._socket.settimeout(_STARTS)
            self._socket.sendall(json.dumps(_specification(self._identity)).encode())
            self._socket.shutdown(socket.SHUT_WR)
            if not self._socket.recv(1):
                raise OSError(errno.ECHILD, "its first process has ended")
        except OSError as error:
            what = f"nothing stands in for VM {self._identity.hostname}: {error}"
            raise Broken(what, hint="see stand-in.log beside its manifest") from error


@contextmanager
def start(identity: Identity, run: Path, log: Path) -> Iterator[StartingStandIn]:
    """Start a stand-in for the VM of that identity, whose QEMU has ended. `run` is a directory for its root; its output
    is in `log`. It is to be recorded before it serves. After an error it is ended. Raises `Broken`, and what `check`
    raises."""
    check(identity)
    run.mkdir(parents=True, exist_ok=True)
    view = View(System.of(_program(identity.bootstrap.daemons[-1]), ()), run, (_PROGRAM,), proc=True)
    ours, its = socket.socketpair()
    command = ["unshare", "--uts", "--mount-proc=/proc", "--", _PYTHON, "-IS", str(_PROGRAM), str(its.fileno())]
    with ours:
        with its, log.open("ab") as out:
            spawn = partial(process.execute, command, (its.fileno(),), out.fileno(), _ENVIRONMENT)
            found = process.identify(namespaces.start(view, lambda _: spawn())[0])
        try:
            yield StartingStandIn(found, identity, ours)
        except BaseException:
            end(identity.hostname, found)
            raise


def end(name: str, found: ProcessIdentity) -> None:
    """End a stand-in, and remove the interface of this host. Absent is success. Raises `Broken` if it does not end."""
    if not process.kill(found):
        raise Broken(f"the stand-in {found.pid} of VM {name} does not end", hint="see what it waits for in /proc")
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        _remove(ip, name)


def _remove(ip: IPRoute, name: str) -> None:
    from pyroute2 import NetlinkError

    for index in ip.link_lookup(ifname=name):
        with suppress(NetlinkError):  # the kernel is removing it with the namespace
            ip.link("del", index=index)


def _connect(identity: Identity, bridge: str, pid: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        _remove(ip, identity.hostname)
        peer = {"ifname": _INSIDE, "net_ns_pid": pid, "address": identity.mac}
        ip.link("add", ifname=identity.hostname, kind="veth", peer=peer)
    in_thread(lambda: _set_up(identity, pid))
    join_bridge(identity.hostname, bridge, identity.mac)


def _set_up(identity: Identity, pid: int) -> None:
    """In the network namespace of that process."""
    from pyroute2 import IPRoute

    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(fd, kernel.CLONE_NEWNET)
    finally:
        os.close(fd)
    if problem := Nft().run(_SILENT):
        raise Broken(f"no rules for the stand-in of VM {identity.hostname}: {problem}", hint="see nft(8)")
    address, _, prefix = identity.address.partition("/")
    with IPRoute() as ip:
        (inside,), (loopback,) = (ip.link_lookup(ifname=name) for name in (_INSIDE, "lo"))
        for index in (loopback, inside):
            ip.link("set", index=index, state="up")
        ip.addr("add", index=inside, address=address, prefixlen=int(prefix))
        if identity.gateway:
            ip.route("add", dst="default", gateway=identity.gateway)


def _specification(identity: Identity) -> dict[str, object]:
    bootstrap = identity.bootstrap
    return {
        "hostname": identity.hostname,
        "users": {"passwd": "".join(_passwd(bootstrap)), "group": "".join(_group(bootstrap))},
        "directories": bootstrap.directories,
        "files": [(one.path, b64encode(one.content).decode(), one.mode, one.owner) for one in bootstrap.files],
        "daemons": [
            {"program": _program(one), "argv": one.argv, "user": one.user, "ready_path": one.ready_path}
            for one in bootstrap.daemons
        ],
    }


def _users(bootstrap: NodeBootstrap) -> list[str]:
    """The users of this machine that the daemons run as, and that own files."""
    owners = (*(one.owner for one in bootstrap.files), *(owner for _, owner, _ in bootstrap.directories))
    return sorted({"root", *owners, *(one.user for one in bootstrap.daemons)})


def _passwd(bootstrap: NodeBootstrap) -> Iterator[str]:
    for name in _users(bootstrap):
        entry = pwd.getpwnam(name)
        yield f"{name}:x:{entry.pw_uid}:{entry.pw_gid}::/:/bin/sh\n"
    for user in bootstrap.users:
        yield f"{user.name}:x:{user.uid}:{user.gid}::/:/bin/sh\n"


def _group(bootstrap: NodeBootstrap) -> Iterator[str]:
    for name in _users(bootstrap):
        entry = grp.getgrgid(pwd.getpwnam(name).pw_gid)
        yield f"{entry.gr_name}:x:{entry.gr_gid}:\n"
    for user in bootstrap.users:
        for name, gid in user.groups:
            yield f"{name}:x:{gid}:\n"
