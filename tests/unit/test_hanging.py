"""Calls that may hang, as of a file system whose server is away."""

from __future__ import annotations

import threading

import pytest

from multiverse.system.hanging import MayHang


class Server:
    """Answers with the number of the call, unless it is away."""

    def __init__(self) -> None:
        self.calls, self.back, self.threads = 0, threading.Event(), set[threading.Thread]()
        self.back.set()

    def __call__(self) -> int:
        self.calls += 1
        number = self.calls
        self.threads.add(threading.current_thread())
        self.back.wait()
        return number


def test_a_call_that_hangs_is_the_only_one_until_it_ends() -> None:
    server = Server()
    one = MayHang(server, "look")
    assert (one.call(60), one.hangs) == (1, False)
    server.back.clear()
    try:
        assert (one.call(0.01), one.hangs) == (None, True)
        assert one.call(60) is None, "it is not waited for again"
        assert server.calls == 2
    finally:
        server.back.set()
    for thread in server.threads:
        thread.join(60)
    assert (one.call(60), one.hangs) == (3, False), "what the second one returned late is dropped"


def test_a_call_that_fails_is_told_from_one_that_is_wrong() -> None:
    failures: list[Exception] = [OSError("stale file handle"), ValueError("a defect")]

    def fail() -> None:
        raise failures.pop(0)

    one = MayHang(fail, "look")
    assert one.call(60) is None and not one.hangs
    with pytest.raises(ValueError, match="a defect"):
        one.call(60)
