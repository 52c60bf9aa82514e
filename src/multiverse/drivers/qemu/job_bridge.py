"""The network of a job's VMs on this machine: a bridge that no other job is on, with an address of the host's."""

from __future__ import annotations

import threading
from contextlib import suppress

from pyroute2 import IPRoute, NetlinkError

from multiverse.core.errors import Broken
from multiverse.core.model.identity import mac_of_address
from multiverse.guest.protocol import TASKS_PORT
from multiverse.host.network import Nft

# Only the agent connects to guests' port of tasks. A guest tells others by the token, but its queue of connections that
# have sent nothing yet has an end, and each user of the node could fill it.
_RULES = """
table inet {table} {{
    chain leaving {{
        type filter hook output priority 0; policy accept;
        oifname "{bridge}" tcp dport {port} meta skuid != 0 reject with tcp reset
    }}
}}
"""

_one_at_a_time = threading.Lock()


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
                self._guard()
                ip.route("replace", dst=self._guests, oif=found[0], prefsrc=self._address, scope="link")
        except (NetlinkError, OSError) as error:
            raise Broken(f"cannot make the bridge {self.name}: {error}", hint="see job_vms in the settings") from error

    def remove(self) -> None:
        """Absent is success."""
        remove(self.name)

    def _guard(self) -> None:
        """Let only root reach the port of tasks in the guests. The table is replaced in one transaction."""
        rules = _RULES.format(table=_table(self.name), bridge=self.name, port=TASKS_PORT)
        if problem := _change(_absent(self.name) + rules):
            raise Broken(f"cannot guard the bridge {self.name}: {problem}", hint="see `nft list ruleset`")


def remove(name: str) -> None:
    """Remove a bridge, and what guards it. Absent is success."""
    with suppress(NetlinkError, OSError), IPRoute() as ip:
        for index in ip.link_lookup(ifname=name):
            ip.link("del", index=index)
    _change(_absent(name))


def _table(bridge: str) -> str:
    return f"tasks-{bridge}"


def _absent(bridge: str) -> str:
    """Deletes the table, whether there is one or not."""
    return f"add table inet {_table(bridge)}\ndelete table inet {_table(bridge)}\n"


def _change(commands: str) -> str:
    """Run these as one transaction. Returns the problem; none where there is no nftables, as the host's firewall says
    then."""
    with _one_at_a_time:
        try:
            return Nft().run(commands)
        except OSError:
            return ""
