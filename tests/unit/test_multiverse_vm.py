"""What steps of a batch file call, built from its source; the test is the agent of the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multiverse.agent.job_protocol import (
    LONGEST_ANSWER,
    MOST_VMS,
    LaunchVms,
    PlainRequest,
    ReleaseVm,
    answer,
    parse,
)
from multiverse.core.errors import Refused

SPANK = Path(__file__).parents[2] / "spank"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

# In place of mventer: what it was started with.
MVENTER = """#!/bin/sh
echo "$1" "$2" "$3" "$4" "$5" "$6" $MULTIVERSE_VMS_PER_NODE $MULTIVERSE_IVSHMEM "$MULTIVERSE_KEPT_LD_PRELOADED"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("vm") / "multiverse-vm"
    sources = [SPANK / name for name in ("multiverse_vm.c", "options.c", "client.c")]
    subprocess.run(["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", built, *sources], check=True)
    (built.parent / "mventer").write_text(MVENTER)
    (built.parent / "mventer").chmod(0o755)
    return built


@dataclass
class Agent:
    """Answers each request with the next of `answers`."""

    program: Path
    path: Path
    answers: list[bytes] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asked, _ = self.listener.accept()
            except OSError:
                return
            with asked:
                self.requests.append(asked.recv(4096))
                asked.sendall(self.answers.pop(0))

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # ends accept(2) in the thread, too
        self.listener.close()

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": os.environ["PATH"], "MULTIVERSE_JOBS_SOCKET": str(self.path), **env}
        return subprocess.run(
            [self.program, *argv], env=variables, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def agent(program: Path, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(program, tmp_path / "sock")
    yield made
    with contextlib.suppress(OSError):  # the test has stopped it
        made.stop()


VMS = answer(told="12 3 mvjob-12-0=10.0.0.1 mvjob-12-1=10.0.0.2")


def test_the_launcher_asks_for_what_its_options_say_and_prints_names_and_addresses(agent: Agent) -> None:
    agent.answers = [VMS]
    asked = ("--vm-image", "slim", "--memory-per-vm=1G", "--vm-per-node=2", "--sriov", "--ivshmem=3")
    done = agent.run("launch", *asked, "--timeout=5")
    assert (done.returncode, done.stdout) == (0, "mvjob-12-0 10.0.0.1\nmvjob-12-1 10.0.0.2\n"), done.stderr
    wanted = parse(agent.requests[0])
    assert isinstance(wanted, LaunchVms)
    assert (wanted.wanted.image, wanted.wanted.memory, wanted.wanted.vms, wanted.wanted.cpus) == ("slim", 1024, 2, 0)
    assert (wanted.wanted.functions, wanted.wanted.regions) == (1, 3)


def test_without_options_the_comment_of_the_job_says_what_is_wanted(agent: Agent) -> None:
    agent.answers = [answer(told="mine\nvm:image=slim,vcpu=2 and more"), VMS]
    assert agent.run("launch").returncode == 0
    wanted = parse(agent.requests[1])
    assert agent.requests[0] == b"comment\n" and isinstance(wanted, LaunchVms)
    assert (wanted.wanted.image, wanted.wanted.cpus) == ("slim", 2)
    agent.answers = [answer(told="vm:vcpu=none")]
    done = agent.run("launch")
    assert done.returncode == 1 and "a number of virtual CPUs" in done.stderr and len(agent.requests) == 3


def test_a_mistake_has_a_sentence_and_is_not_asked_for(agent: Agent) -> None:
    for argv, sentence in (
        (("launch", "--vm-image=../x"), "an image's name has letters"),
        (("launch", "--disk-size=0"), "a size in MiB"),
        (("launch", "--vm-per-node=65"), "a number of VMs, from 1 to 64"),
        (("launch", "--timeout=x"), "a number of at most"),
        (("launch", "--vm=1"), "has no such option"),
        (("run", "--vm-image=slim", "--", "true"), "has no such option"),
        (("run",), "which command"),
    ):
        done = agent.run(*argv)
        assert done.returncode == 1 and sentence in done.stderr, done.stderr
    for argv in ((), ("lunch",), ("launch", "--nothing"), ("reclaim", "all")):
        done = agent.run(*argv)
        assert done.returncode == 2 and "usage: " in done.stderr
    assert not agent.requests


def test_a_command_runs_in_the_vm_of_its_task(agent: Agent) -> None:
    agent.answers = [VMS] * 5
    for local, tasks, node, vm in (("1", "2(x2)", "1", "1"), ("1", "2,4", "1", "0"), ("3", "2,4", "1", "1")):
        step = {"SLURM_LOCALID": local, "SLURM_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
        done = agent.run("run", "--", "echo", "-n", **step)
        assert done.stdout == f"{agent.path} 12 {vm} step echo -n 2 3 \n", done.stderr
    done = agent.run("run", "--vm=1", "--", "true", LD_PRELOADED="x")
    assert done.stdout == f"{agent.path} 12 1 step true  2 3 x\n"
    assert "a number of at most 1" in agent.run("run", "--vm=2", "--", "true").stderr
    assert parse(agent.requests[0]) is PlainRequest.LIST


def test_a_command_without_a_vm_does_not_run(agent: Agent) -> None:
    agent.answers = [answer(Refused("job 12 has no VM on this node", hint="launch it first")), VMS]
    done = agent.run("run", "--", "true")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "multiverse: this task cannot run in a VM: job 12 has no VM on this node (launch it first)\n"
    assert "--mpi=none" in agent.run("run", "--", "true", PMI_FD="5").stderr
    agent.stop()
    done = agent.run("run", "--", "true")
    assert done.returncode == 1 and not done.stdout


def test_vms_are_given_back_by_a_step_or_by_an_epilog_of_the_site(agent: Agent) -> None:
    agent.answers = [answer(told="12"), answer()]
    assert agent.run("reclaim").returncode == 0 and agent.run("reclaim", "--job=12").returncode == 0
    assert [parse(line) for line in agent.requests] == [PlainRequest.RECLAIM, ReleaseVm(12)]


def test_an_answer_about_the_most_vms_fits() -> None:
    told = " ".join(
        ["67108863", "32", *(f"mvjob-67108863-{place}=10.214.255.254" for place in range(65471, 65471 + MOST_VMS))]
    )
    assert len(answer(told=told)) < LONGEST_ANSWER
    assert f"#define LONGEST_ANSWER {LONGEST_ANSWER} " in (SPANK / "client.h").read_text()
