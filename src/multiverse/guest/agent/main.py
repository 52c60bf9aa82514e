"""The agent's program: prepare the guest, report the fork point, serve."""

# ruff: noqa: PTH103

from __future__ import annotations

import gc
import os
import signal
import sys

from multiverse.guest.agent.allowance import reserve_disk
from multiverse.guest.agent.boot import protect_from_oom_killer, set_up_cgroups, set_up_system
from multiverse.guest.agent.channel import HostChannel, find_port
from multiverse.guest.agent.contract import LOGS, TEMPLATE
from multiverse.guest.agent.files import read
from multiverse.guest.agent.hotplug import remember_boot_memory
from multiverse.guest.agent.limits import remember_limits, set_node_limits
from multiverse.guest.agent.modules import load_modules, load_on_demand
from multiverse.guest.agent.network import interface, link_up
from multiverse.guest.agent.rehearsal import load_programs, rehearse
from multiverse.guest.agent.server import GuestAgent
from multiverse.guest.agent.stopped import stop_daemons_at_entry


def main() -> None:
    """Prepare the guest, report the fork point, and serve until the VM ends."""
    first = os.getpid() == 1
    if first:
        set_up_system()
        set_up_cgroups()
    protect_from_oom_killer()
    set_node_limits()
    load_modules()
    os.makedirs(LOGS, exist_ok=True)
    wake = _catch_signals(first)
    channel = HostChannel(find_port())
    try:
        remember_boot_memory()
        remember_limits()
        link_up(interface())
        load_on_demand(False)
        options = read("/proc/cmdline").split()
        reserve_disk(options)
        if TEMPLATE in options:
            load_programs()
            rehearse()
            stop_daemons_at_entry()
            os.sync()  # otherwise each clone would begin with writing this back
        agent = GuestAgent(channel, wake)
        # The objects that exist now are never freed. The garbage collector must not touch them, because that would give
        # each clone its own copy of their memory pages.
        gc.collect()
        gc.freeze()
        gc.disable()
        channel.send(**agent.state)
        agent.serve()
    except BaseException as error:
        channel.send("failed", reason=f"the agent ended: {type(error).__name__}: {error}")
        raise


def _catch_signals(first: bool) -> int:
    """Make each SIGCHLD and SIGIO write a byte into a pipe, and return its reading end.

    The first process of a guest ignores signals that ask it to end.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, lambda *_: None)
    if first:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return reading


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
