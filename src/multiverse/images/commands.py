"""The programs that build an image: mmdebstrap, mke2fs, debugfs and others, run without a terminal."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from multiverse.core.errors import Broken

Progress = Callable[[str], None]
"""Gets one short line before each step that takes long."""


def run(argv: Sequence[str | Path], what: str, hint: str) -> str:
    """Run a program to its end and return its standard output.

    Raises `Broken` if it cannot be started or fails; the message begins with `what` and ends with the last lines that
    the program wrote.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=_environment(), stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise Broken(f"{what}: {error}", hint="install it; docs/operations.md lists the packages") from error
    if done.returncode != 0:
        tail = "; ".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise Broken(f"{what} failed: {tail}", hint=hint)
    return done.stdout


def mmdebstrap(arguments: Sequence[str | Path], work: Path, say: Progress) -> None:
    """Run mmdebstrap with its temporary files in `work`; `say` gets the name of each of its steps.

    It runs in a PID namespace of its own. If mmdebstrap is interrupted, or this process is killed, the kernel ends all
    processes of the namespace (apt, dpkg and their scripts) and undoes their mounts. Raises `Broken` if it fails.
    """
    namespace = ("setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--pid", "--mount-proc", "--kill-child=KILL")
    tail: deque[str] = deque(maxlen=6)
    with subprocess.Popen(
        (*namespace, "mmdebstrap", *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**_environment(), "TMPDIR": str(work)}, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.strip())
                if line.startswith("I: ") and line.endswith("...\n"):
                    say(line[3:-4])
        except BaseException:
            process.kill()
            # The pipe ends when the last process of the namespace has ended. Only then can the caller remove the root.
            process.stdout.read()
            raise
    if process.returncode != 0:
        raise Broken(f"mmdebstrap failed: {'; '.join(tail)}", hint="check that `apt-get update` works on this host")


def _environment() -> dict[str, str]:
    return {**os.environ, "INITRD": "No", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
