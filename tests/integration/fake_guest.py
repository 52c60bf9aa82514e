"""A node without a VM: slurmd in a network namespace of its own, with the bootstrap of a guest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import NodeBootstrap
from multiverse.core.model.job import NodeSpec
from multiverse.guest.agent.system import MOST_WAIT, make_pipe
from multiverse.guest.protocol import USER_ADDED

SITE = f"t{os.getpid() % 65536:04x}"  # of this process: two test runs must not share network namespaces


def node_spec(serial: int, address: str, size: Size, features: tuple[str, ...], tag: str) -> NodeSpec:
    """A node of this site for a job's pin."""
    return NodeSpec(f"mv{SITE}-{serial}", address, size, (*features, tag), tag, "slim")


class FakeGuest:
    """A node. Call `start`, and always `stop`; both may be repeated."""

    def __init__(self, settings: Settings, name: str, address: str, directory: Path) -> None:
        self.name = name
        self._bridge = settings.qemu.bridge
        self._munge = settings.slurm.munge_key.parent / "socket"
        self._address = address
        self._link = name.replace("mv", "mf", 1)
        self._directory = directory / name
        self._process: asyncio.subprocess.Process | None = None
        self._user_added: int | None = None

    async def start(self, bootstrap: NodeBootstrap, peers: tuple[tuple[str, str], ...] = ()) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o755)
        for file in bootstrap.files:
            path = self._directory / Path(file.path).name
            path.write_bytes(self._moved(file.path, file.content))
            path.chmod(file.mode | 0o444)
        hosts = "".join(f"{address} {name}\n" for name, address in peers)
        (self._directory / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self._link, "master", self._bridge, "up")
        _ip("-n", self.name, "addr", "add", self._address, "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", link, "up")
        slurmd = next(daemon for daemon in bootstrap.daemons if daemon.name == "slurmd")
        argv = [word.replace("/etc/slurm/", f"{self._directory}/") for word in slurmd.argv]
        # A host name, and a network, of its own; the rest is this machine's. Dies with the namespace's first process.
        setup = f'hostname {self.name} && mount --bind {self._directory}/hosts /etc/hosts && exec "$@"'
        with (self._directory / "out").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                "nsenter",
                f"--net=/run/netns/{self.name}",
                *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", setup, "slurmd"),
                *argv,
                stdout=log,
                stderr=log,
                cwd=self._directory,  # where slurmd looks for the program of its steps
            )

    def _moved(self, path: str, content: bytes) -> bytes:
        content = content.replace(b"/etc/slurm/", f"{self._directory}/".encode())
        if path.endswith("/multiverse-slurmd.conf"):
            for old, new in (
                ("/var/spool/slurmd", f"{self._directory}/spool"),
                ("/run/slurmd.pid", f"{self._directory}/pid"),
                ("/var/log/slurmd.log", f"{self._directory}/log"),
                ("/run/munge/munge.socket.2", str(self._munge)),
            ):
                content = content.replace(old.encode(), new.encode())
            (self._directory / "spool").mkdir(exist_ok=True)
        if path.endswith("/multiverse-prolog"):
            self._user_added = make_pipe(str(self._directory / "user-added"))
            return content.replace(USER_ADDED.encode(), f"{self._directory}/user-added".encode())
        if path.endswith("/cgroup.conf"):
            version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
            return f"CgroupPlugin=cgroup/{version}\nCgroupMountpoint=/sys/fs/cgroup\nIgnoreSystemd=yes\n".encode()
        return content

    def add_user(self) -> None:
        """Let waiting jobs go on, as the guest agent does after it has added a user."""
        assert self._user_added is not None
        os.write(self._user_added, b"\n" * MOST_WAIT)

    async def stop(self) -> None:
        if self._user_added is not None:
            os.close(self._user_added)
            self._user_added = None
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.name)  # with its end of the link, and so the other
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._link)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
