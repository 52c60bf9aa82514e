"""Who may say what on the bridge: a table of nftables for each site, by libnftables(3), in a fraction of a millisecond.

A VM speaks as itself only: frames with another hardware or internet address, and all that is neither IPv4 nor ARP, end
at its tap, before the bridge learns from them. Between VMs only those of one job hear each other, and over the bridge
alone: what one would send another through this host, which may route, ends here. VMs that are not in the table say
nothing at all. What is in it is in the manifests too: it is made again from them whenever it is gone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog

from multiverse.core.errors import Broken
from multiverse.host import manifest
from multiverse.host.manifest import Manifest

log = structlog.get_logger(__name__)

_OPEN = "VMs' addresses are not checked, and jobs of several VMs reach each other"
_LIBRARY = "libnftables.so.1"
_TABLE = """
add table bridge {table}
delete table bridge {table}
table bridge {table} {{
    set guests {{ type ifname . ether_addr . ipv4_addr; }}
    set pairs {{ type ifname . ifname; }}
    set addresses {{ type ipv4_addr; }}
    chain arriving {{
        type filter hook prerouting priority -300; policy accept;
        iifname "{prefix}*" jump from_guest
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
    }}
    chain routed {{
        type filter hook input priority 0; policy accept;
        iifname "{prefix}*" ether type ip ip daddr @addresses drop
    }}
}}
"""


class Firewall:
    """The table of the VMs whose names begin with `prefix` and whose manifests are below `vms`."""

    def __init__(self, prefix: str, vms: Path) -> None:
        self._prefix, self._vms = prefix, vms
        self._table = prefix.rstrip("-")
        self._lock = threading.Lock()
        self._nft = _Nft.opened()
        if self._nft is not None and (problem := self._make()):
            log.warning(_OPEN, reason=problem)
            self._nft = None
        self.sweep()

    def admit(self, known: Manifest) -> None:
        """Let a VM speak as what its manifest says, and with its peers. Its manifest has been written."""
        with self._lock:
            if self._nft is None:
                return
            problem = self._nft.run("\n".join(self._elements("add", known)))
            if _absent(problem):  # somebody has flushed all rules, or the last VM has gone
                problem = self._make()
            if problem:
                raise Broken(f"cannot let VM {known.name} on the bridge: {problem}", hint="see `nft list ruleset`")

    def forget(self, known: Manifest) -> None:
        """Take back what `admit` gave."""
        with self._lock:
            if self._nft is not None and known.address:
                # Added first, for what is not there cannot be deleted.
                both = [line for verb in ("add", "delete") for line in self._elements(verb, known)]
                problem = self._nft.run("\n".join(both))
                if problem and not _absent(problem):
                    raise Broken(
                        f"cannot take VM {known.name} off the bridge: {problem}", hint="see `nft list ruleset`"
                    )

    def sweep(self) -> None:
        """Remove the table when there is no VM left."""
        with self._lock:
            if self._nft is not None and not any(self._homes()):
                self._nft.run(f"add table bridge {self._table}\ndelete table bridge {self._table}")

    def _make(self) -> str:
        """Make the whole table anew, in one transaction; what went wrong, if anything."""
        assert self._nft is not None
        lines = [_TABLE.format(table=self._table, prefix=self._prefix)]
        for home in self._homes():
            known = manifest.read(home)
            if known is not None and known.address:
                lines += self._elements("add", known)
        return self._nft.run("\n".join(lines))

    def _homes(self) -> Iterable[Path]:
        return self._vms.glob(f"{self._prefix}*")

    def _elements(self, verb: str, known: Manifest) -> list[str]:
        lines = [
            f'{verb} element bridge {self._table} guests {{ "{known.name}" . {known.mac} . {known.address} }}',
            f"{verb} element bridge {self._table} addresses {{ {known.address} }}",
        ]
        for peer in known.peers:
            for one, two in ((known.name, peer), (peer, known.name)):
                lines.append(f'{verb} element bridge {self._table} pairs {{ "{one}" . "{two}" }}')
        return lines


def _absent(problem: str) -> bool:
    return "No such file or directory" in problem


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


class _Nft:
    """libnftables, in this process. Not for two threads at once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run, self._said = library.nft_run_cmd_from_buffer, library.nft_ctx_get_error_buffer
        library.nft_ctx_new.restype = ctypes.c_void_p
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._said.argtypes, self._said.restype = [ctypes.c_void_p], ctypes.c_char_p
        before = _descriptors()
        self._context = ctypes.c_void_p(library.nft_ctx_new(0))
        for fd in _descriptors() - before:
            try:
                os.set_inheritable(fd, False)  # its socket is not for the programs that we start
            except OSError:
                continue
        for buffer in (library.nft_ctx_buffer_error, library.nft_ctx_buffer_output):
            buffer.argtypes = [ctypes.c_void_p]
            buffer(self._context)

    @classmethod
    def opened(cls) -> _Nft | None:
        try:
            return cls(ctypes.CDLL(_LIBRARY))
        except OSError as error:
            log.warning(_OPEN, reason=str(error))
            return None

    def run(self, commands: str) -> str:
        """Do all of it or nothing; what went wrong, if anything."""
        if self._run(self._context, commands.encode()) == 0:
            return ""
        return str(self._said(self._context).decode(errors="replace")).strip().partition("\n")[0] or "nftables refused"
