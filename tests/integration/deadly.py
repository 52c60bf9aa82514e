"""The daemon, with death at chosen moments: `python -m tests.integration.deadly SETTINGS RECORDS FATES`.

FATES is a file of lines `WHEN POINT VICTIM`. WHEN is before or after. POINT is a state (`vm:parked`), as a commit makes
a row enter it; a phase of a VM's manifest (`manifest:started`), as it is written; `qemu`, as one is started; or
`scontrol:VERB`, as that is run. VICTIM is the `controller` itself, every `qemu` of a VM, or a part of the lab whose
record lies in RECORDS. Each line is struck out before its victim is killed: it dies once. The daemon is the usual one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multiverse import config
from multiverse.cli.daemon import daemon
from multiverse.core.rows import Move
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.host import manifest, process
from multiverse.lab.process import recorded
from multiverse.store import Store, Transaction


class Fates:
    """What is to die, and when."""

    def __init__(self, file: Path, records: Path, vms: Path) -> None:
        self._file, self._records, self._vms = file, records, vms
        self._lock = threading.Lock()  # never let go by whoever kills this process

    def reach(self, when: str, *points: str) -> None:
        """These points are reached: kill what is to die at any of them."""
        with self._lock:
            lines = self._file.read_text().splitlines()
            due = [line for line in lines if line.split()[:2] in [[when, point] for point in points]]
            if not due:
                return
            # One that shares its moment with another dies for both.
            self._file.write_text("".join(f"{line}\n" for line in lines if line not in due))
            for victim in {line.split()[2] for line in due}:
                for pid in self._pids(victim):
                    os.kill(pid, signal.SIGKILL)

    def _pids(self, victim: str) -> list[int]:
        if victim == "controller":
            return [os.getpid()]
        if victim == "qemu":
            known = [manifest.read(path) for path in self._vms.glob("mv*")]
            return [vm.pid for vm in known if vm and vm.pid and vm.process.is_alive()]
        running = recorded(self._records / f"{victim}.json")
        return [running.pid] if running else []


def watch_commits(fates: Fates) -> None:
    entered: set[str] = set()
    transaction, apply = Store.transaction, Transaction.apply

    def noted(self: Transaction, move: Move) -> None:
        rows = self.load_active()
        for change in move.changes:
            old = rows.get(change.row.key)
            if old is None or old.state != change.row.state:
                entered.add(f"{change.row.key.kind}:{change.row.state}")
        apply(self, move)

    @contextmanager
    def watched(self: Store) -> Iterator[Transaction]:
        entered.clear()
        with transaction(self) as tx:
            yield tx
            fates.reach("before", *entered)
        fates.reach("after", *entered)

    Store.transaction, Transaction.apply = watched, noted  # type: ignore[method-assign]


def around(fates: Fates, call: Callable[..., Any], point: Callable[..., str]) -> Callable[..., Any]:
    def watched(*args: Any, **more: Any) -> Any:
        fates.reach("before", point(*args))
        value = call(*args, **more)
        fates.reach("after", point(*args))
        return value

    return watched


def watch_effects(fates: Fates) -> None:
    manifest.write = around(fates, manifest.write, lambda directory, written: f"manifest:{written.phase}")
    process.spawn = around(fates, process.spawn, lambda *args: "qemu")
    run = SlurmCommands.run

    async def watched(self: SlurmCommands, program: str, *args: str) -> str:
        point = f"{program}:{args[0] if args else ''}"
        fates.reach("before", point)
        out = await run(self, program, *args)
        fates.reach("after", point)
        return out

    SlurmCommands.run = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    settings, records, file = map(Path, sys.argv[1:])
    all_fates = Fates(file, records, config.load(settings).qemu.vms)
    watch_commits(all_fates)
    watch_effects(all_fates)
    daemon(settings)
