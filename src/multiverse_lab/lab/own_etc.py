"""A copy of /etc in place of this machine's, for one mount namespace.

A file that is mounted over /etc/passwd is lost as soon as anybody on the machine replaces that file, as useradd(8) and
packages do: the kernel then takes away what is mounted on the old one in all namespaces (mount_namespaces(7)). Nothing
replaces a directory that is in nobody else's sight.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.system import kernel

ETC = Path("/etc")
_NEEDED = ("passwd", "group")
_SOURCE = "multiverse-etc"


def has_own_etc() -> bool:
    """Whether this process has a copy of /etc: what it changes there is seen only in its mount namespace."""
    lines = (line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    mounted = {before.split()[4]: after.split()[1] for before, after in lines}
    return mounted.get(str(ETC)) == _SOURCE


def mount_own_etc() -> None:
    """Mount a file system in memory with a copy of /etc in place of it. It ends with the mount namespace, which must be
    one whose mounts no other sees. Raises OSError."""
    stage = Path(tempfile.mkdtemp(prefix="mvetc-"))
    try:
        kernel.mount(_SOURCE, stage, kernel.MS_NOSUID | kernel.MS_NODEV, "tmpfs", "mode=0755")
        done = subprocess.run(["cp", "-a", f"{ETC}/.", str(stage)], capture_output=True, text=True, check=False)
        # What a package replaces meanwhile may be missing; cp then says so.
        if done.returncode and not all((stage / name).exists() for name in _NEEDED):
            raise Broken(f"cannot copy /etc: {done.stderr.strip()[-300:]}", hint="repeat it")
        kernel.mount(str(stage), ETC, kernel.MS_MOVE)
    finally:
        stage.rmdir()
