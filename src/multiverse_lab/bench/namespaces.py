"""Compare ways to start a program in namespaces of its own (docs/decisions/0031-namespaces-of-qemu.md).

    python -m multiverse_lab.bench.namespaces [--scale N]

Each round starts `true`, as a user of its own, once by the host library and once in another way, in alternating order.
The time ends when the program has run. Ways whose program is not installed are named and left out. Root is needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from multiverse.host import namespaces, process
from multiverse.host.namespaces import System, View
from multiverse.host.uids import ProcessUser
from multiverse_lab.bench.libraries import Case, compare

_USER = ProcessUser(70001, 70000)
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_ROUNDS = 300
_BUBBLEWRAP = ("--unshare-net", "--unshare-ipc", "--unshare-pid", "--ro-bind", "/usr", "/usr", "--symlink",
          "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--dev-bind", "/dev/null", "/dev/null",
          "--cap-add", "ALL", "--")  # fmt: skip


class Starter:
    """Starts programs and waits until they have run; `reap` waits for their ends, which is not timed."""

    def __init__(self, place: Path) -> None:
        self._log = place / "log"
        self._view = View(System.of("true", ()), place / "base", outputs=(self._log,), owner=_USER.uid)
        self._view.base.mkdir()
        self._pids: list[int] = []

    def contained(self, proc: bool = False) -> None:
        """As the host library starts a QEMU; with `proc`, as it starts a QEMU before 8.2."""
        view = View(self._view.system, self._view.base, outputs=(self._log,), owner=_USER.uid, proc=proc)

        def start(end: int) -> int:
            argv = [*namespaces.command_prefix(view), *_USER.command_prefix(), "true"]
            pid, outputs = namespaces.start(
                view, lambda out: process.execute(argv, (end,), out[self._log], _ENVIRONMENT)
            )
            for fd in outputs.values():
                os.close(fd)
            return pid

        self._until_run(start)

    def outside(self, *command: str) -> None:
        """By executing another program first, or none: then the program is not contained."""
        argv = [*command, *_USER.command_prefix(), "true"]

        def start(end: int) -> int:
            with self._log.open("ab") as log:
                return process.execute(argv, (end,), log.fileno(), _ENVIRONMENT)

        self._until_run(start)

    def reap(self) -> None:
        while self._pids:
            os.waitpid(self._pids.pop(), 0)

    def _until_run(self, start: Callable[[int], int]) -> None:
        """The program holds the only other end of a pipe: the pipe ends when the program does."""
        ours, end = os.pipe()
        try:
            self._pids.append(start(end))
        finally:
            os.close(end)
        os.read(ours, 1)
        os.close(ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of rounds")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("Root is needed to make namespaces: use sudo.", file=sys.stderr)
        return 2
    place = Path(tempfile.mkdtemp(prefix="mvbench-"))
    try:
        starter = Starter(place)
        ways = {
            "not contained": starter.outside,
            "with /proc, for QEMU before 8.2": lambda: starter.contained(proc=True),
            "unshare(1)": lambda: starter.outside("unshare", "-n", "-i", "-m", "-p", "-f", "--"),
            "bubblewrap": lambda: starter.outside(str(shutil.which("bwrap")), *_BUBBLEWRAP),
            "a launcher in Python": lambda: starter.outside(
                sys.executable, "-I", "-S", "-c", "import ctypes, os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
            ),
        }
        print(f"{'ms':34}{'namespaces':>11}{'other':>8}{'ratio':>7}   95 %")
        for name, way in ways.items():
            if name == "bubblewrap" and shutil.which("bwrap") is None:
                print(f"{name}: not installed, so it is not measured")
                continue
            row = compare(Case(name, starter.contained, way, starter.reap, _ROUNDS), options.scale)
            figures = f"{row.ours / 1000:11.2f}{row.theirs / 1000:8.2f}{row.ratio:7.2f}"
            print(f"{name:34}{figures}   {row.low:.2f} to {row.high:.2f}")
    finally:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
