"""The paths of a lab. All are in its directory, except the memory of templates, which is in /dev/shm."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Refused

DEFAULT = Path("/var/lib/multiverse/lab")
_UIDS = 4096  # of each lab, out of 65536 such ranges that nothing else uses (systemd's UIDS-GIDS)
_LONGEST = 60  # bytes, because a socket's path has at most 107 and those of VMs are in this directory


@dataclass(frozen=True, slots=True)
class Layout:
    root: Path

    @property
    def state(self) -> Path:
        return self.root / "lab.json"

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def settings(self) -> Path:
        return self.etc / "multiverse.toml"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        """Sockets and records of processes; deleted by `lab down`."""
        return self.root / "run"

    @property
    def programs(self) -> Path:
        """Copies of what users' processes load and execute. They may not be able to read this checkout."""
        return self.root / "bin"

    @property
    def munge(self) -> Path:
        """munged's own directory, because munged requires that nobody else can write there."""
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def munge_key(self) -> Path:
        return self.munge / "key"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def database_socket(self) -> Path:
        return self.run / "db" / "socket"

    @property
    def slurmctld(self) -> Path:
        return self.root / "slurmctld"

    @property
    def slurmdbd(self) -> Path:
        return self.run / "slurmdbd"

    @property
    def inbox(self) -> Path:
        return self.run / "inbox"

    @property
    def nfs(self) -> Path:
        return self.run / "nfs"

    @property
    def controller(self) -> Path:
        """The controller's state directory: its store and the directories of VMs."""
        return self.root / "controller"

    @property
    def images(self) -> Path:
        """The images of a host with namespaces of its own."""
        return self.root / "images"

    @property
    def socket(self) -> Path:
        return self.run / "api.sock"

    @property
    def agent(self) -> Path:
        """The agent's state directory."""
        return self.root / "agent"

    @property
    def leases(self) -> Path:
        """What leases have in the file system of a bare-metal node, as the node sees it."""
        return self.root / "leases"

    @property
    def agent_socket(self) -> Path:
        return self.run / "agent.sock"

    @property
    def jobs_socket(self) -> Path:
        """Where the agent of a node serves VMs inside jobs."""
        return self.run / "jobs.sock"

    def host(self, name: str) -> Layout:
        """The paths of a host with namespaces of its own, as this machine sees them. The host itself sees this
        directory in place of the lab's."""
        return Layout(self.root / "hosts" / name)

    @property
    def ssh(self) -> Path:
        """The key by which the controller reaches the hosts, and the keys of these."""
        return self.root / "ssh"

    @property
    def ssh_config(self) -> Path:
        return self.etc / "ssh_config"

    @property
    def control_group(self) -> str:
        """The name of the control group above those of the lab's hosts."""
        return f"multiverse-lab-{self._digest[:8]}"

    @property
    def memory(self) -> Path:
        """The templates' memory, in a file system in memory. The name is derived from the lab's directory, so that each
        lab has its own."""
        return Path("/dev/shm") / f"multiverse-{self._digest[:8]}"

    @property
    def uids(self) -> tuple[int, int]:
        """The first uid of the lab's QEMU processes, and how many there are. Other labs have other uids."""
        return 0x7000_0000 + int(self._digest[:4], 16) * _UIDS, _UIDS

    @property
    def _digest(self) -> str:
        return hashlib.sha256(bytes(self.root)).hexdigest()

    def make(self) -> None:
        """Create the directories, readable by users whatever the umask is: they need slurm.conf and munge's socket.

        `Refused` if other users than root cannot enter it or a directory above it. Nothing is created then.
        """
        paths = [*reversed(self.root.parents), self.root]
        closed = next((one for one in paths if one.exists() and not one.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            raise Refused(
                f"users cannot enter {closed}, and they use the lab in {self.root}",
                hint=f"choose another directory with --dir, or open this one: chmod o+x {closed}",
            )
        for path in [*paths, self.etc, self.log, self.run, self.programs]:
            if not path.exists():
                path.mkdir()
                path.chmod(0o755)


def layout(directory: Path | None) -> Layout:
    """The lab in `directory`, or else in $MULTIVERSE_LAB, or else in `DEFAULT`. `Refused` for an unusable path."""
    root = directory or Path(os.environ.get("MULTIVERSE_LAB") or DEFAULT)
    root = root.resolve()
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(root)):
        raise Refused(f"Slurm's files cannot name the path {root}", hint="use letters, digits and ._+- only")
    if len(bytes(root)) > _LONGEST:
        raise Refused(f"the path {root} is too long for the sockets in it", hint=f"use at most {_LONGEST} bytes")
    return Layout(root)
