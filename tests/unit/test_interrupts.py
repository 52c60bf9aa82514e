"""Signals interrupt a command once; what it started is ended whatever comes meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

_SYNC = """
import time
from multiverse.system import interrupts
interrupts.handle()
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
    print("ending", flush=True)
    time.sleep(0.5)
    print("ended", flush=True)
"""
_ASYNC = """
import asyncio, time
from multiverse.system import interrupts
interrupts.handle()
async def main():
    try:
        print("begun", flush=True)
        await asyncio.sleep(60)
    finally:
        print("ending", flush=True)
        await asyncio.sleep(0.5)
        print("ended", flush=True)
interrupts.run(main())
"""
_HELD = """
import asyncio, time
from multiverse.system import interrupts
interrupts.handle()
async def main():
    with interrupts.held():
        print("begun", flush=True)
        print("ending", flush=True)
        await asyncio.sleep(0.5)
        print("ended", flush=True)
    await asyncio.sleep(60)
interrupts.run(main())
"""
_WHOLE = """
import asyncio, time
from multiverse.system import interrupts
interrupts.handle()
def make():
    print("begun", flush=True)
    print("ending", flush=True)
    time.sleep(0.5)
    print("ended", flush=True)
async def main():
    try:
        await interrupts.whole(make)
    finally:
        print("after it", flush=True)
interrupts.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (_SYNC, ["begun", "ending", "ended"]),
        (_ASYNC, ["begun", "ending", "ended"]),
        (_HELD, ["begun", "ending", "ended"]),
        (_WHOLE, ["begun", "ending", "ended", "after it"]),
    ],
    ids=["plain", "coroutine", "held", "thread"],
)
def test_a_signal_interrupts_once_and_the_end_is_whole(
    script: str, said: Sequence[str], number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline().strip()]
        if script in (_SYNC, _ASYNC):
            process.send_signal(number)  # the first one interrupts
        while lines[-1] != "ending":
            lines.append(process.stdout.readline().strip())
        process.send_signal(number)
        if script is not _WHOLE:  # which that one interrupts
            assert process.stderr.readline().startswith("What was started is being ended")
        for again in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(again)
        lines += process.stdout.read().split("\n")[:-1]
        assert (lines, process.wait()) == (list(said), -signal.SIGINT)
        assert process.stderr.read().rstrip().endswith("KeyboardInterrupt")


def test_an_event_is_set_in_place_of_an_interruption() -> None:
    script = """
import asyncio, signal
from multiverse.system import interrupts
interrupts.handle()
async def main():
    stop = asyncio.Event()
    with interrupts.noted(stop):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        await asyncio.wait_for(stop.wait(), 10)
    print("stopped")
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(60)
interrupts.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("stopped\n", -signal.SIGINT)


def test_a_daemon_ends_in_its_own_way() -> None:
    script = """
import asyncio, signal
from multiverse.system import interrupts
interrupts.handle()
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    signal.raise_signal(signal.SIGHUP)
    await asyncio.wait_for(stop.wait(), 10)
    print("stopped")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("stopped\n", 0), done.stderr


def test_what_is_ignored_stays_ignored_and_an_interruption_is_told_from_another_cancellation() -> None:
    script = """
import asyncio, signal
from multiverse.system import interrupts
signal.signal(signal.SIGHUP, signal.SIG_IGN)
interrupts.handle()
with interrupts.held():
    signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGHUP)
async def main():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)
try:
    interrupts.run(main())
except asyncio.CancelledError:
    print("cancelled")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "cancelled\n"


def test_a_signal_that_comes_while_python_ends_does_not_change_the_status_of_an_interruption() -> None:
    script = """
import os, signal, sys, time
from multiverse.cli import main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT, sleep=time.sleep):
        kill(pid, number)
        sleep(1)
late = Late()
def interrupted(*_arguments, **_more):
    raise KeyboardInterrupt
main.for_arguments = lambda *_: interrupted
main.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
