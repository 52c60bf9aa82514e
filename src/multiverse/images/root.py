"""The root file system of an image, before it becomes a disk: what is removed from it and what is put into it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.images import initramfs

AGENT_PATH = "/usr/lib/multiverse/agent.py"
"""Where the guest agent lies in a guest."""

AGENT_UNIT = f"""[Unit]
Description=Multiverse guest agent
After=local-fs.target systemd-modules-load.service network-pre.target
FailureAction=poweroff-force
SuccessAction=poweroff-force

[Service]
Type=exec
ExecStart={AGENT_PATH}
Delegate=yes
KillMode=mixed
OOMScoreAdjust=-900
TasksMax=infinity
LimitNOFILE=131072
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
"""
"""The systemd unit that starts the guest agent in a stock image."""


def kernel_release(root: Path) -> str:
    """The release of the newest kernel in the image. Raises `Broken` if there is none."""
    kernels = sorted((root / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise Broken("the image has no kernel", hint="check that the host's apt sources have linux-image-amd64")
    return kernels[-1].name.removeprefix("vmlinuz-")


def strip_identity(root: Path) -> None:
    """Remove what two clones must not share: keys, machine-id, host name, random seeds and root's password."""
    for path in ("etc/munge/munge.key", "etc/resolv.conf", "var/lib/dbus/machine-id", "var/lib/systemd/random-seed",
                 "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/munge/munged.seed", "var/lib/nfs/state"):  # fmt: skip
        (root / path).unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "etc/hostname").write_text("")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shadow = root / "etc/shadow"
    shadow.write_text(re.sub(r"(?m)^root:[^:]*:", "root:!*:", shadow.read_text()))


def remove_dead_plugins(root: Path) -> None:
    """Remove Slurm's plugin for PMIx if the image has no library of PMIx, without which the plugin cannot be loaded.
    slurmd would try it twice at each start."""
    libraries = root / "usr/lib"
    if any("libpmix.so" in files for _, _, files in os.walk(libraries)):
        return
    for place in ("x86_64-linux-gnu/slurm-wlm", "x86_64-linux-gnu/slurm", "slurm"):
        for plugin in (libraries / place).glob("mpi_pmix*.so"):
            plugin.unlink()


def install_agent(root: Path, source: str) -> None:
    """Write the guest agent, whose program text is `source`, into the image."""
    target = root / AGENT_PATH.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)
    target.chmod(0o755)


def enable_unit(root: Path) -> None:
    """Make systemd start the guest agent, and none of the daemons that the agent itself starts."""
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "multiverse-agent.service").write_text(AGENT_UNIT)
    (units / "multi-user.target.wants/multiverse-agent.service").symlink_to(
        "/etc/systemd/system/multiverse-agent.service"
    )
    # The agent starts these two once the files of the clone's identity are written. They are masked, so that no unit
    # that depends on them starts them earlier.
    for unit in ("slurmd.service", "munge.service"):
        path = units / unit
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
        (units / "multi-user.target.wants" / unit).unlink(missing_ok=True)
    modules = root / "etc/modules-load.d/multiverse.conf"
    modules.write_text("\n".join(initramfs.LATER_MODULES) + "\n")
