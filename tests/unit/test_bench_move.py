"""The CPU time of hosts while a VM moves between them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from multiverse_lab.bench import move
from multiverse_lab.bench.move import HostsCpu


@pytest.fixture
def busy() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compute."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


def test_what_each_host_took_counts_from_the_beginning_also_of_processes_that_end(
    busy: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(name: str) -> None:
        busy.append(subprocess.Popen(["/bin/sh", "-c", f"echo {name} > /proc/self/comm; while :; do :; done"]))

    on: dict[str, list[int]] = {"h1": [0], "h2": []}
    monkeypatch.setattr(move.control_groups, "processes", lambda group, host: {*on[host]})
    begin("qemu-system-x86")
    earlier = busy[0].pid
    until_it_took(earlier, 0.1)
    on["h1"] = [earlier]
    with HostsCpu("lab", on) as cpu:
        begin("qemu-system-x86")
        begin("multiverse")
        on["h2"] = [one.pid for one in busy[1:]]
        for one in busy:
            until_it_took(one.pid, 0.3)
        time.sleep(4 * move.CPU_PERIOD)
        busy[0].kill()
        busy[0].wait()
    assert cpu.of("h1", qemu=True) >= 0.1 and cpu.of("h1", qemu=False) == 0
    assert min(cpu.of("h2", qemu=True), cpu.of("h2", qemu=False)) >= 0.3


def until_it_took(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + 60
    while move.cpu_seconds(pid) < seconds:
        assert time.monotonic() < deadline
        time.sleep(0.01)
