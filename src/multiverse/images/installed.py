"""What is installed in an image, read from its disk without booting it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_STATUS = "/var/lib/dpkg/status"
_TIMEOUT = 30.0  # seconds


def package_version(disk: Path, package: str) -> str | None:
    """The version of a Debian package on the ext4 file system of a disk. None if nobody can tell: it is no image of
    Debian, it lacks the package, or e2fsprogs is not installed here."""
    try:
        done = subprocess.run(
            ["debugfs", "-R", f"cat {_STATUS}", str(disk)], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_TIMEOUT, check=False, env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.decode(errors="replace")
    found = re.search(rf"^Package: {re.escape(package)}\n(?:\S.*\n| .*\n)*?Version: (\S+)", text, re.MULTILINE)
    return found[1] if found else None
