"""The agent of a node dies at each of its steps for a job with a VM inside, or is none, or talks nonsense."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from multiverse.system import files
from tests.integration.conftest import LabUnderTest
from tests.integration.crash_points import JOB_STEPS
from tests.integration.job_nodes import JobNode, job_nodes
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PHASES = ("creating", "parked", "starting", "started")
STEPS = (*(f"job:{step}" for step in JOB_STEPS), *(f"manifest:{phase}" for phase in PHASES), "qemu")


@pytest.fixture(scope="module")
def node(lab_of_two: LabUnderTest) -> JobNode:
    node = job_nodes(lab_of_two)[0]
    for suffix in ("", ".lock", ".agent"):
        (node.own.root / f"crash_points{suffix}").touch()
    node.begin()
    return node


@pytest.fixture(autouse=True)
def _usual_agent(node: JobNode) -> Iterator[None]:
    yield
    node.ensure("agent")
    node.nothing_left()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_an_agent_killed_at_a_step_leaves_nothing_and_no_task_runs_bare(node: JobNode, step: str, when: str) -> None:
    agent = node.crashing_agent(f"{when} {step} agent")
    asyncio.run(agent.ensure(node.lab))
    done = node.srun("hostname", timeout=120)
    assert done.stdout.startswith("mvjob-") if done.returncode == 0 else not done.stdout, done
    until("the agent died at that step", lambda: agent.running(node.lab.where) is None, 60)
    assert done.returncode == 0 or "the agent of this host" in done.stderr, done.stderr
    until(f"the node takes jobs all the same: {node.state()}", lambda: node.state() == "idle", 90)
    without = [one for one in node.remains() if "qemu-system" in one and one.startswith("process")]
    assert not without or step == "qemu", "the epilog has killed the QEMU, though the agent was dead"
    node.ensure("agent")
    node.nothing_left()
    node.ran_in_vm()


# --- agents that are none ---------------------------------------------------------------------------------------------


def _silent(asked: socket.socket) -> None:
    with suppress(OSError):
        while asked.recv(4096):
            pass


def _dribbling(asked: socket.socket) -> None:
    with suppress(OSError):
        while True:
            asked.sendall(b"o")
            time.sleep(0.2)


def _says(text: bytes) -> Callable[[socket.socket], None]:
    def answer(asked: socket.socket) -> None:
        asked.recv(4096)
        asked.sendall(text)

    return answer


def _endless(asked: socket.socket) -> None:
    asked.recv(4096)
    with suppress(OSError):
        while True:
            asked.sendall(b"x" * 65536)


@contextmanager
def _fake_agent(node: JobNode, answer: Callable[[socket.socket], None] | None) -> Iterator[None]:
    """Something else than an agent at its socket; None listens and accepts nothing. A VM is waited for only 3 s."""
    path, conf = node.own.jobs_socket, node.own.etc / "plugstack.conf"
    asyncio.run(node.service("agent").stop(node.lab.where))
    before = conf.read_text()
    files.replace(conf, before.replace("timeout=300", "timeout=3"), mode=0o644)  # slurmstepd may read it at any time
    assert "timeout=3 " in conf.read_text()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(0 if answer is None else 64)

        def serve(asked: socket.socket) -> None:
            with asked, suppress(OSError):
                assert answer is not None
                answer(asked)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    asked, _ = listener.accept()
                    threading.Thread(target=serve, args=(asked,), daemon=True).start()

        if answer is not None:
            threading.Thread(target=accept, daemon=True).start()
        full = []
        if answer is None:
            for _ in range(4):  # more connections than may wait
                waiting = socket.socket(socket.AF_UNIX)
                waiting.setblocking(False)
                with suppress(BlockingIOError):
                    waiting.connect(str(path))
                full.append(waiting)
        try:
            yield
        finally:
            for waiting in full:
                waiting.close()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            path.unlink()
            files.replace(conf, before, mode=0o644)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (_silent, "gave no answer within 3 s"),
        (_dribbling, "gave no answer within 3 s"),
        (None, "does not answer at"),
        (_endless, "makes no sense"),
        (_says(b""), "ended while it was asked"),
        (_says(b"\0\xff\n"), "makes no sense"),
        (_says(b"okay\n"), "makes no sense"),
        (_says(b"ok\n"), "gave no connection"),
        (_says(b"error no\n"), "cannot run in a VM: no"),
    ],
    ids=["silent", "dribbling", "full", "endless", "closing", "zero", "okay", "nothing", "refusing"],
)
def test_an_agent_that_is_none_fails_only_jobs_with_vms_and_drains_no_node(
    node: JobNode, answer: Callable[[socket.socket], None] | None, told: str
) -> None:
    lab, began = node.under_test, time.monotonic()
    with _fake_agent(node, answer):
        done = node.srun("hostname", timeout=150)
        assert done.returncode != 0 and not done.stdout and told in done.stderr, done.stderr
        other = lab.run(
            "srun", "-Q", "-p", "physical", "-w", node.name, "--mem=100", "hostname", user=lab.other, timeout=60
        )
        assert other.stdout.strip() == node.name, "a job without a VM does not ask the agent"
        until("the node is idle", lambda: node.state() == "idle", 60)
    print(f"{told}: {time.monotonic() - began:.1f} s")
