"""The first process of a lab host, as a program:
python -m multiverse_lab.lab.hosts.init NAME STORAGE PLACE GROUP [--all SHARE...].

The host has the directory STORAGE of this machine, which it sees at PLACE, and a control group below GROUP: in the
hierarchies for VMs, or in all with `--all`. It sees each SHARE where this machine has it, also below PLACE. It has a
network of its own without any link, and a boot id of its own. It ends with this process: the kernel then kills all its
processes, and removes its network and its mounts.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from multiverse.system import files, kernel
from multiverse.system.kernel import mount_new, mount_sys
from multiverse_lab.lab.hosts import control_groups, detached
from multiverse_lab.lab.own_etc import ETC, mount_own_etc

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
_ALL = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWCGROUP
)


class _Host(NamedTuple):
    name: str
    storage: Path
    place: Path
    groups: Mapping[Path, Path]
    shares: tuple[Path, ...]


def main() -> None:
    name, storage, place, lab, *more = sys.argv[1:]
    try:
        groups = control_groups.create(lab, name, every="--all" in more[:1])
        host = _Host(name, Path(storage), Path(place), groups, tuple(map(Path, more[1:])))
        kernel.unshare(_ALL)  # what this process is in becomes the root of the new cgroup namespace
    except OSError as error:
        raise SystemExit(str(error)) from error
    detached.run(lambda: _boot(host), _reap_until_terminated, first=True)


def _boot(host: _Host) -> None:
    """Give the host, in whose namespaces this process is, its name, files and control groups."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # from the first moment on: PID 1 would ignore them
    socket.sethostname(host.name)
    kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
    boot_id = host.storage / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    for share in host.shares:
        if share.is_relative_to(host.place):  # it would be hidden
            beside = host.storage / share.relative_to(host.place)
            beside.mkdir(parents=True, exist_ok=True)
            kernel.mount(str(share), beside, kernel.MS_BIND)
    kernel.mount(str(host.storage), host.place, kernel.MS_BIND | kernel.MS_REC)
    for path in (Path("/run"), Path("/dev/shm")):
        mount_new(path, "tmpfs", "mode=1777" if path.name == "shm" else "mode=0755")
    Path("/run/sshd").mkdir(mode=0o755)  # sshd wants it (Debian's tmpfiles.d makes it)
    mount_new(Path("/proc"), "proc")
    kernel.mount(str(host.place / boot_id.name), _BOOT_ID, kernel.MS_BIND)
    if (shadow := host.place / "etc" / "shadow").exists():  # only a host with an sshd needs it
        mount_own_etc()  # mounted over the machine's file, it would be lost when somebody there replaces that
        files.replace(ETC / shadow.name, shadow.read_bytes(), mode=0o600)
    mount_sys(host.groups, Path("/run"))
    control_groups.join_daemons()
    os.chdir("/")


def _reap_until_terminated() -> None:
    while signal.sigwait(_SIGNALS) is not signal.SIGTERM:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
