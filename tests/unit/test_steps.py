"""What answers slurmd in place of slurmstepd while a VM sleeps, and what asks slurmstepd when it has woken."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from multiverse.guest import steps_program
from multiverse.guest.agent import sleeping
from multiverse.guest.agent.system import GuestAgentError
from tests.integration.watch import until

BATCH, STEP = "7.4294967291", "7.0"
OLD, NEW = 38 << 8, 40 << 8  # protocols of Slurm 22.05 and 23.11


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """The spool directory of a slurmd whose node is n1, with the sockets of two steps of job 7."""
    names = tmp_path / "names"
    names.write_text(f"{BATCH}\n{STEP}")
    program = str(Path(steps_program.__file__))
    child = subprocess.Popen([sys.executable, "-IS", program, str(tmp_path / "spool"), "n1", str(names)])
    try:
        until("both sockets listen", lambda: len(list((tmp_path / "spool").glob("n1_7.*"))) == 2, 10)
        yield tmp_path / "spool"
    finally:
        child.kill()
        child.wait()


def ask(path: Path, version: int, request: bytes, size: int) -> tuple[int, ...]:
    """What a step answers to a request of a slurmd of that version."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(struct.pack("i", version) + request)
        data = b""
        while len(data) < 4 + size and (more := sock.recv(64)):
            data += more
    return tuple(number for (number,) in struct.iter_unpack("i", data))


def test_a_step_runs_and_can_be_suspended_and_resumed(spool: Path) -> None:
    step = spool / f"n1_{STEP}"
    assert ask(step, OLD, struct.pack("i", 5), 4) == (OLD, 2)
    for request in (10, 11):
        assert ask(step, OLD, struct.pack("iH", request, 0xFFFE) + struct.pack("i", 5), 12) == (OLD, 0, 0, 2)
        assert ask(step, NEW, struct.pack("i", request) + struct.pack("i", 5), 12) == (NEW, 0, 0, 2)


def test_a_step_outlives_harmless_signals_and_ends_by_deadly_ones(spool: Path) -> None:
    step, batch = spool / f"n1_{STEP}", spool / f"n1_{BATCH}"
    assert ask(step, OLD, struct.pack("iiii5si", 4, 18, 0, 5, b"admin", 0), 8) == (OLD, 0, 0)
    assert step.exists()
    assert ask(step, OLD, struct.pack("iiiii", 4, 15, 0, 0, 0), 8) == (OLD, 0, 0)
    assert not step.exists()
    assert ask(batch, OLD, struct.pack("i", 12), 8) == (OLD, 0, 0)
    assert not batch.exists()


def test_what_a_step_does_not_know_ends_the_connection_alone(spool: Path) -> None:
    step = spool / f"n1_{STEP}"
    assert ask(step, OLD, struct.pack("i", 17), 4) == (OLD,)
    assert ask(step, OLD, struct.pack("i", 5), 4) == (OLD, 2)


@pytest.mark.parametrize("run", [True, False])
def test_the_guest_asks_each_step_of_its_job(spool: Path, monkeypatch: pytest.MonkeyPatch, *, run: bool) -> None:
    named = spool.rename(spool.with_name("slurmd-1"))
    monkeypatch.setattr(sleeping, "SPOOLS", str(named.parent))
    assert set(sleeping.steps_of("/sys/fs/cgroup/system.slice/job_7")) == {BATCH, STEP}
    assert sleeping.steps_of("/sys/fs/cgroup/system.slice/job_70") == {}
    monkeypatch.setattr(sleeping, "job_groups", lambda: ["/sys/fs/cgroup/system.slice/job_7"])
    sleeping.settle_steps(run)


def slurmstepd(path: Path, talk: Callable[[socket.socket], None]) -> Thread:
    """A slurmstepd that is asked once."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(1)

    def serve() -> None:
        with listening:
            connection, _ = listening.accept()
            with connection:
                talk(connection)

    thread = Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(("version", "size"), [(OLD, 6), (NEW, 4)])
def test_the_guest_asks_in_the_language_of_each_slurmstepd(tmp_path: Path, version: int, size: int) -> None:
    asked = list[bytes]()

    def talk(connection: socket.socket) -> None:
        connection.recv(4)
        connection.sendall(struct.pack("i", version))
        asked.append(connection.recv(64))
        connection.sendall(struct.pack("ii", -1, 4001))

    thread = slurmstepd(tmp_path / "s", talk)
    sleeping.settle_step(str(tmp_path / "s"), sleeping.RESUME)
    thread.join()
    assert asked[0][:4] == struct.pack("i", 11)
    assert len(asked[0]) == size


def test_a_slurmstepd_that_breaks_off_is_an_error_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    thread = slurmstepd(tmp_path / "s", lambda connection: None)
    with pytest.raises(GuestAgentError, match="does not answer"):
        sleeping.settle_step(str(tmp_path / "s"), sleeping.RESUME)
    thread.join()
    sleeping.settle_step(str(tmp_path / "s"), sleeping.RESUME)
    sleeping.settle_step(str(tmp_path / "missing"), sleeping.RESUME)
