"""What the agent reports of its VM: facts that distinguish clones, and what the VM has."""

# ruff: noqa: PTH112, PTH208

from __future__ import annotations

import os
import socket
import time
from typing import Any

from multiverse.guest.agent.files import read
from multiverse.guest.agent.hotplug import count_cpus, usable_memory
from multiverse.guest.agent.network import current_address, interface

SSH = "/etc/ssh"


def clone_facts() -> dict[str, Any]:
    """What distinguishes clones, and their size (`memory` in MiB). The random bytes are used for nothing else."""
    boot_id = read("/proc/sys/kernel/random/boot_id").strip()
    return {"cpus": count_cpus("online"), "memory": usable_memory(), "machine_id": read("/etc/machine-id").strip(),
            "boot_id": boot_id, "random": os.urandom(8).hex()}  # fmt: skip


def current_facts() -> dict[str, Any]:
    """What the VM is now: its names on the network, the ends of its public host keys, the time in milliseconds."""
    name = interface()
    return {"hostname": socket.gethostname(), "mac": read(f"/sys/class/net/{name}/address").strip(),
            "address": current_address(name), "host_keys": " ".join(_host_keys()),
            "now": time.time_ns() // 1_000_000, "fresh": os.urandom(8).hex()}  # fmt: skip


def _host_keys() -> list[str]:
    if not os.path.isdir(SSH):
        return []
    return [read(f"{SSH}/{file}").split()[1][-20:] for file in sorted(os.listdir(SSH)) if file.endswith("_key.pub")]
