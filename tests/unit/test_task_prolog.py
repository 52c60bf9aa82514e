"""The prologs of a task in a VM, without a VM: mventer sends them, and the guest agent runs them before the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.core.errors import Unknown
from multiverse.drivers.slurm import job_vms
from multiverse.drivers.slurm.job_vms import TaskProlog
from multiverse.guest.agent.command import apply_output
from tests.unit.entered_task import NEEDS_COMPILER, FakeAgent, agents, build


@pytest.fixture(scope="module")
def mventer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


@pytest.fixture
def agent(mventer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeAgent]]:
    yield from agents(mventer, tmp_path, monkeypatch)


def prolog(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@NEEDS_COMPILER
def test_the_sites_and_the_users_prologs_run_once_each_before_the_command_and_make_its_environment(
    agent: Callable[..., FakeAgent], tmp_path: Path
) -> None:
    sites = prolog(
        tmp_path / "site", 'echo "export SITE=a b"; echo unset GONE; echo print hello; echo $0 >> ran; exit 3'
    )
    users = prolog(tmp_path / "user", 'echo "export SITE=$SITE c"; echo noise; echo oops >&2; echo $0 >> ran')
    one = agent(prolog=sites)
    command = 'echo "$SITE|${GONE-unset}|${SLURM_MULTIVERSE_TASK_PROLOG-unset}"'
    done = one.run("sh", "-c", command, GONE="x", SLURM_MULTIVERSE_TASK_PROLOG=users)
    assert done.stdout == b"hello\na b c|unset|unset\n" and not done.stderr and done.returncode == 0
    assert (one.directory / "ran").read_text() == f"{sites}\n{users}\n"


@NEEDS_COMPILER
def test_a_prolog_that_the_guest_has_not_runs_from_a_copy(
    agent: Callable[..., FakeAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multiverse.guest.agent import command as module

    monkeypatch.setattr(module, "_has", lambda path, content: False)
    sites = prolog(tmp_path / "site", 'echo "export FROM=$0"')
    done = agent(prolog=sites).run("sh", "-c", 'echo "$FROM"')
    assert done.stdout.startswith(b"/proc/self/fd/")


@NEEDS_COMPILER
def test_a_task_goes_on_without_a_prolog_that_it_may_not_run(agent: Callable[..., FakeAgent], tmp_path: Path) -> None:
    done = agent(prolog=str(tmp_path / "absent")).run("echo", "ran")
    assert done.stdout == b"ran\n" and b"cannot run the task prolog" in done.stderr


def test_lines_of_a_prologs_output() -> None:
    environment = {b"A": b"1", b"B": b"2"}
    output = b"export  C = x=y z\nunset A \nexport nothing\nprint   two  words\nB=3\nexported D=4\nprint last"
    assert apply_output(output, environment) == b"two  words\nlast\n"
    assert environment == {b"B": b"2", b"C": b" x=y z"}


def test_what_scontrol_shows() -> None:
    shown = "TaskEpilog              = (null)\nTaskProlog              = {}\nTCPTimeout = 2 sec\n"
    assert job_vms.task_prolog(shown.format("/etc/slurm/a b.sh")) == "/etc/slurm/a b.sh"
    assert job_vms.task_prolog(shown.format("(null)")) == job_vms.task_prolog("") == ""


async def test_what_was_known_holds_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Commands:
        answers: list[str]

        async def run(self, *argv: str) -> str:
            if not self.answers:
                raise Unknown("no answer")
            return self.answers.pop()

    commands = Commands()
    commands.answers = []
    asked = TaskProlog(commands)  # type: ignore[arg-type]
    with pytest.raises(Unknown):
        await asked.path()
    commands.answers = ["TaskProlog = /a\n"]
    assert await asked.path() == "/a"
    monkeypatch.setattr(job_vms, "_AGE", 0.0)
    assert await asked.path() == "/a"
