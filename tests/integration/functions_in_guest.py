"""What is tried with real virtual functions, inside of the guest: `python -m tests.integration.functions_in_guest`.

It prints a line of JSON for each trial, which test_virtual_functions.py judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from multiverse.core.errors import Exhausted, Refused
from multiverse.host import virtual_functions
from multiverse.host.virtual_functions import VirtualFunctions
from multiverse.system import files
from tests.integration import nvme_functions

RECORDS = Path("/run/functions")
OWNER, STRANGER = 200123, 200124
ROUNDS = 2


def offered(what: str) -> VirtualFunctions:
    return VirtualFunctions((what,), RECORDS)


def state(functions: VirtualFunctions) -> dict[str, Any]:
    """Drivers, owners of device files and records, as they are now."""
    found = functions.listed()
    nodes = {function.address: functions.device_of(function) for function in found}
    return {
        "drivers": {function.address: function.driver for function in found},
        "owners": {address: node.stat().st_uid for address, node in nodes.items() if node.exists()},
        "records": {address: record.vm for address, record in functions.records().items()},
    }


def in_child(work: Callable[[], int]) -> int:
    """The exit status of a process that does this."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_user(uid: int, work: Callable[[], object]) -> str:
    """How that fails for a user; nothing if it does not."""
    read, write = os.pipe()

    def attempt() -> int:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            work()
        except OSError as error:
            os.write(write, error.strerror.encode() if error.strerror else b"?")
        return 0

    assert in_child(attempt) == 0
    os.close(write)
    return os.fdopen(read).read()


def found(controller: str, ids: str) -> dict[str, Any]:
    listed = {
        what: [f.address for f in offered(what).listed()] for what in (controller, controller[5:], ids, "1af4:1041")
    }
    groups = [function.group for function in offered(controller).listed()]
    return {"listed": listed, "groups": groups, "problems": [f.problem for f in offered(controller).listed()]}


def one_vm(controller: str) -> dict[str, Any]:
    """Claim two for a VM, let its user open one as a QEMU does, and return them."""
    functions = offered(controller)
    before = state(functions)
    held = functions.claim("mvjob-a", 2)
    again = functions.claim("mvjob-a", 2)
    functions.lend("mvjob-a", OWNER)
    during = state(functions)
    container, node = functions.device_files(held[0])

    def use() -> None:
        for path in (container, node):
            os.close(os.open(path, os.O_RDWR))

    trials = {
        "owner": as_user(OWNER, use),
        "stranger": as_user(STRANGER, use),
        "stranger reads records": as_user(STRANGER, lambda: list(RECORDS.iterdir())),
        "stranger reads a record": as_user(STRANGER, (RECORDS / held[0].address).read_text),
        "stranger changes it": as_user(STRANGER, lambda: files.replace(RECORDS / held[0].address, "{}")),
    }
    functions.release("mvjob-b")
    other = state(functions)
    functions.release("mvjob-a")
    functions.release("mvjob-a")
    return {"before": before, "held": [f.address for f in held], "again": [f.address for f in again], "during": during,
            "trials": trials, "other released": other == during, "after": state(functions)}  # fmt: skip


def too_many(controller: str) -> dict[str, str]:
    functions = offered(controller)
    said = {}
    for name, attempt in {
        "more than there are": lambda: functions.claim("mvjob-c", 5),
        "of other groups": lambda: functions.claim("mvjob-c", 1, groups={99}),
        "where none is": lambda: offered("ffff:ffff").claim("mvjob-c", 1),
    }.items():
        try:
            attempt()
        except (Exhausted, Refused) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said | {"records": str(functions.records())}


def at_once(controller: str) -> dict[str, Any]:
    """Seven processes claim one of the four functions each, again and again. A directory made for the time that a
    process has a function would be there already if another one had it."""
    marks = Path("/run/marks")
    marks.mkdir()

    def work(name: str) -> int:
        functions, had = offered(controller), 0
        while had < ROUNDS:
            try:
                (function,) = functions.claim(name, 1)
            except Exhausted:
                continue
            (marks / function.address).mkdir()
            assert function.driver == "vfio-pci", function
            (marks / function.address).rmdir()
            functions.release(name)
            had += 1
        return 0

    children = []
    for number in range(7):
        if (pid := os.fork()) == 0:
            try:
                os._exit(work(f"mvjob-{number}"))
            except BaseException:
                traceback.print_exc()
                os._exit(99)
        children.append(pid)
    return {"exits": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children],
            "after": state(offered(controller))}  # fmt: skip


class Steps:
    """Kills this process at a step of what is done to files and to sysfs: before number `at` (even), or after it."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        virtual_functions._write = self.watched(virtual_functions._write)
        virtual_functions.files.replace = self.watched(files.replace)  # type: ignore[attr-defined]
        virtual_functions.os.chown = self.watched(os.chown)  # type: ignore[attr-defined]
        Path.unlink = self.watched(Path.unlink)  # type: ignore[method-assign]

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **more: Any) -> Any:
            self.reach()
            value = call(*arguments, **more)
            self.reach()
            return value

        return step

    def reach(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def killed(controller: str, make: bool) -> Iterator[dict[str, Any]]:
    """A process that claims two functions (or returns them) is killed at each of its steps. Then either the VM goes on,
    and claims again, or it does not exist, and the next agent returns what it had. Another VM claims the rest."""
    functions = offered(controller)
    before = state(functions)
    for at in range(100):
        if not make:
            functions.claim("mvjob-k", 2)
            functions.lend("mvjob-k", OWNER)

        def work(at: int = at) -> int:
            Steps(at)
            if make:
                functions.claim("mvjob-k", 2)
                functions.lend("mvjob-k", OWNER)
            else:
                functions.release("mvjob-k")
            return 0

        ended = in_child(work)
        if make:
            mine = {f.address for f in functions.claim("mvjob-k", 2)}
            others = {f.address for f in functions.claim("mvjob-o", 2)}
            bound = {a for a, driver in state(functions)["drivers"].items() if driver == "vfio-pci"}
            functions.release_unclaimed({"mvjob-k", "mvjob-o"}.__contains__)
            kept = {address for address, record in functions.records().items() if record.vm}
        else:
            mine, others, bound, kept = set(), set(), set(), set()
        functions.release_unclaimed(lambda name: False)
        now = state(functions)
        yield {"at": at, "ended": ended, "shared": sorted(mine & others), "bound": sorted(bound), "kept": sorted(kept),
               "all": sorted(mine | others), "as before": now == before, "now": now}  # fmt: skip
        if ended == 0:
            return


def main(controller: str) -> None:
    addresses = nvme_functions.make(controller, 4)
    # One with its own driver, one with another that was set by hand, two with none.
    own, other = addresses[:2]
    probe = Path("/sys/bus/pci/drivers_probe")
    probe.write_text(own)
    nvme_functions.until(lambda: any(Path(f"/sys/bus/pci/devices/{own}/nvme").glob("nvme*")))
    subprocess.run(["modprobe", "pci-stub"], check=True)
    override = Path(f"/sys/bus/pci/devices/{other}/driver_override")
    override.write_text("pci-stub")
    probe.write_text(other)
    show("found", found(controller, "1b36:0010"))
    show("one VM", one_vm(controller))
    Path("/sys/bus/pci/drivers/nvme/unbind").write_text(own)  # it takes half a second to start
    show("too many", too_many(controller))
    show("at once", at_once(controller))
    show("killed while claiming", list(killed(controller, make=True)))
    show("killed while returning", list(killed(controller, make=False)))
    show("left", {"addresses": addresses, "override": override.read_text().strip(), **state(offered(controller))})


def show(name: str, result: object) -> None:
    print(json.dumps({"name": name, "result": result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
