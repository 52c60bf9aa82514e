"""The network of a job's VMs on this machine: a bridge that no other job is on, with an address of the host's."""

from __future__ import annotations

from contextlib import suppress

from pyroute2 import IPRoute, NetlinkError

from multiverse.core.errors import Broken
from multiverse.core.model.names import mac_of_address


class JobBridge:
    """One bridge. Calls block for milliseconds, and mean *ensure*."""

    def __init__(self, name: str, address: str, guests: str) -> None:
        """`address` is the host's on it, and `guests` the network of the addresses that are reached by it."""
        self.name, self._address, self._guests = name, address, guests

    def make(self) -> None:
        """Raises `Broken` if it cannot be made; then a part of it may remain."""
        try:
            with IPRoute() as ip:
                found = ip.link_lookup(ifname=self.name)
                if not found:
                    ip.link("add", ifname=self.name, kind="bridge", address=mac_of_address(self._address))
                    found = ip.link_lookup(ifname=self.name)
                ip.addr("replace", index=found[0], address=self._address, prefixlen=32)
                ip.link("set", index=found[0], state="up")
                ip.route("replace", dst=self._guests, oif=found[0], prefsrc=self._address, scope="link")
        except (NetlinkError, OSError) as error:
            raise Broken(f"cannot make the bridge {self.name}: {error}", hint="see job_vms in the settings") from error

    def remove(self) -> None:
        """Absent is success."""
        with suppress(NetlinkError, OSError), IPRoute() as ip:
            for index in ip.link_lookup(ifname=self.name):
                ip.link("del", index=index)
