"""Slurm's commands in the VM of a job, without a VM: the program that stands for them there, the part of the guest
agent that asks for connections, and the part of mventer that runs commands, each as it is."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.guest import protocol
from multiverse.guest.agent import requests
from multiverse.guest.slurm_command import LAUNCHERS
from tests.unit.entered_task import LIMIT, NEEDS_COMPILER, SOURCES, FakeAgent, agents, build

pytestmark = NEEDS_COMPILER

ON_THE_HOST = """#!/bin/sh
echo "$0|$PWD|$COLOUR|$#|$1|$2"
"""


class Guest:
    """A task whose script calls Slurm's commands. `host` are scripts that are these commands on the host."""

    def __init__(self, agent: FakeAgent, text: str, **host: str) -> None:
        self.agent = agent
        self.places = agent.directory / "guest"
        for directory in (self.places, agent.commands):
            directory.mkdir()
        for name, script in host.items():
            self._write(agent.commands / name, script)
        for name in (*protocol.INSTALLED, *LAUNCHERS):
            self._write(self.places / name, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, data: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        return self.agent.run("sh", "-c", script, data=data, PATH=f"{self.places}:{os.environ['PATH']}", **more)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        return self.agent.start("env", f"PATH={self.places}:{os.environ['PATH']}", "sh", "-c", script)


@pytest.fixture(scope="module")
def mventer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


@pytest.fixture
def guest(mventer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Guest]]:
    group = tmp_path / "cgroup"
    group.write_text(f"0::/multiverse-tasks/{os.getpid()}\n")
    text = protocol.program("slurm_command.py").replace("/proc/self/cgroup", str(group))
    text = text.replace("/run/multiverse/tasks", str(tmp_path / "sockets"))
    text = text.replace("/run/multiverse/mpi", str(tmp_path))
    making = agents(mventer, tmp_path, monkeypatch)
    make = next(making)
    yield lambda **host: Guest(make(), text, **host)
    for _ in making:
        pass


def test_the_host_runs_a_command_in_the_directory_and_environment_of_the_guest_and_its_exit_code_comes_back(
    guest: Callable[..., Guest],
) -> None:
    one = guest(squeue=ON_THE_HOST + "echo oops >&2; exit 3")
    done = one.run('COLOUR="blue sky" squeue "" "two words"; echo $?')
    assert done.stdout.decode() == f"{one.agent.commands}/squeue|{one.agent.directory}|blue sky|2||two words\n3\n"
    assert done.stderr == b"oops\n"


def test_a_job_that_is_submitted_here_does_not_look_for_the_launcher_of_mpi_and_a_step_does(
    guest: Callable[..., Guest], tmp_path: Path
) -> None:
    shown = '#!/bin/sh\necho "${OMPI_MCA_plm-none}"\n'
    one = guest(sbatch=shown, srun=shown)
    told = f"export OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent={tmp_path}/launch"
    assert one.run(f"{told}; sbatch job.sh; srun true").stdout == b"none\nrsh\n"


def test_a_command_has_the_limits_of_the_process_in_the_guest(guest: Callable[..., Guest]) -> None:
    one = guest(srun="#!/bin/sh\nulimit -Sn; ulimit -Sc")
    done = one.run("ulimit -Sn 77; ulimit -Sc 0; srun")
    assert done.stdout == b"77\n0\n"


def test_input_and_output_of_any_length_are_carried_whole(guest: Callable[..., Guest]) -> None:
    data = os.urandom(3_000_001)
    assert guest(srun="#!/bin/sh\nexec cat").run("srun | cat", data=data).stdout == data


def test_a_command_ends_in_the_guest_as_it_ended_on_the_host(guest: Callable[..., Guest]) -> None:
    done = guest(srun="#!/bin/sh\nkill -TERM $$").run("srun; echo $?")
    assert done.stdout.strip() == str(128 + signal.SIGTERM).encode()


def test_only_the_commands_of_the_list_run_and_none_by_a_path_of_the_guest(guest: Callable[..., Guest]) -> None:
    one = guest(salloc="#!/bin/sh\necho ran", other="#!/bin/sh\necho ran")
    (one.agent.directory / "squeue").write_text("#!/bin/sh\necho ran")
    done = one.run("salloc true; echo $?")
    assert b"salloc cannot be run from the VM of a job" in done.stderr and done.stdout == b"1\n"
    text = (one.places / "srun").read_text()
    for wanted in ("other", "../squeue", str(one.agent.directory / "squeue"), "", "sh"):
        program = one.places / "lying"
        program.write_text(text.replace("os.path.basename(sys.argv[0])", repr(wanted)))
        program.chmod(0o755)
        done = one.run("lying; echo $?")
        assert b"cannot be run from the VM" in done.stderr and done.stdout == b"1\n"


@pytest.mark.parametrize("option", ["--prolog=/bin/true", "--prolo=x", "--epilog", "--ep=x"])
def test_no_program_of_the_users_runs_on_the_host_by_an_option_of_sruns(
    guest: Callable[..., Guest], option: str
) -> None:
    done = guest(srun="#!/bin/sh\necho ran $*").run(f"srun {option} hostname; echo $?")
    assert b"would run a program outside of the VM" in done.stderr and done.stdout == b"1\n"


def test_options_that_only_look_alike_are_no_concern(guest: Callable[..., Guest]) -> None:
    done = guest(srun='#!/bin/sh\necho "$*"').run("srun --propagate=NONE --export=A prog --epochs=3")
    assert done.stdout == b"--propagate=NONE --export=A prog --epochs=3\n"


def test_what_the_loader_would_load_is_kept_for_the_step(guest: Callable[..., Guest]) -> None:
    """srun hands its environment on to its step, whose mventer takes the prefix off again."""
    shown = 'echo "$LD_LIBRARY_PATH|$MULTIVERSE_KEPT_LD_LIBRARY_PATH|$SLURM_CONF|$SLURM_PROLOG"'
    one = guest(srun=f"#!/bin/sh\n{shown}")
    script = "LD_LIBRARY_PATH=/mine SLURM_CONF=/mine SLURM_PROLOG=/mine srun; echo $LD_LIBRARY_PATH"
    done = one.run(script, SLURM_CONF="/the/sites", MULTIVERSE_KEPT_LD_LIBRARY_PATH="/users")
    assert done.stdout == b"|/mine|/the/sites|\n/users\n"


def test_a_signal_for_the_program_reaches_the_command(guest: Callable[..., Guest]) -> None:
    waits = "#!/bin/sh\ntrap 'echo got; exit 5' USR1\necho ready\nwhile :; do sleep 0.05; done"
    script = "srun > out & while ! grep -q ready out; do sleep 0.05; done; kill -USR1 $!; wait $!; echo $?; cat out"
    assert guest(srun=waits).run(script).stdout == b"5\nready\ngot\n"


@pytest.mark.parametrize("ending", ["kill -9 $!; wait $!", ""])
def test_a_command_ends_with_the_program_in_the_guest_and_with_the_task(
    guest: Callable[..., Guest], ending: str
) -> None:
    """The task's own end kills what it has left: here, what the control group would do is done by hand."""
    one = guest(srun="#!/bin/sh\ntrap 'echo ended > ended; exit' TERM\necho $$ > began\nwhile :; do sleep 0.05; done")
    script = f"srun & while ! test -s began; do sleep 0.05; done; {ending or 'kill -9 $!'}; sleep 0.2; exit 3"
    assert one.run(script).returncode == 3
    assert (one.agent.directory / "ended").read_text() == "ended\n"


def test_more_commands_than_run_at_once_wait_for_their_turn(guest: Callable[..., Guest]) -> None:
    one = guest(squeue="#!/bin/sh\necho $1")
    done = one.run("for i in $(seq 40); do squeue $i & done; wait")
    assert sorted(map(int, done.stdout.split())) == list(range(1, 41))


def test_an_agent_that_does_not_answer_fails_the_command_with_a_message(guest: Callable[..., Guest]) -> None:
    one = guest(squeue="#!/bin/sh\necho ran")
    started = one.start("echo ready; read word; squeue; echo $?")
    assert started.stdin is not None and started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    one.agent.stop()
    started.stdin.write(b"go\n")
    started.stdin.close()
    assert started.stdout.read() == b"1\n" and started.wait(LIMIT) == 0


def test_a_terminal_in_the_guest_is_a_terminal_on_the_host(guest: Callable[..., Guest]) -> None:
    one = guest(srun='#!/bin/sh\ntest -t 0 && test -t 1 && stty size; read word; echo "<$word>"; exit 4')
    ours, theirs = pty.openpty()
    argv = one.agent.argv("sh", "-c", f"stty rows 11 cols 22; {one.places}/srun; echo $?")
    started = subprocess.Popen(argv, stdin=theirs, stdout=theirs, cwd=one.agent.directory, start_new_session=True)
    os.close(theirs)
    said, sent = b"", False
    while True:
        try:
            data = os.read(ours, 1000)
        except OSError:  # the last process has closed it
            break
        said += data
        if not sent and b"11 22" in said:
            os.write(ours, b"hello\r")
            sent = True
    assert started.wait(LIMIT) == 0
    assert said.split() == [b"11", b"22", b"hello", b"<hello>", b"4"]


def test_sbcast_is_a_step_that_reads_the_file(guest: Callable[..., Guest]) -> None:
    one = guest(srun='#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done; exec "$@"')
    (one.agent.directory / "from").write_text("content")
    (one.agent.directory / "from").chmod(0o750)
    done = one.run(
        "sbcast -p from to; echo $?; sbcast from to; echo $?; echo new > from; sbcast -f -F 2 from to; echo $?"
    )
    assert done.stdout.split()[0] == b"0" and done.stdout.split()[2] == b"0", done.stderr
    assert done.stdout.split()[1] != b"0", "a file that exists is kept"
    assert (one.agent.directory / "to").read_text() == "new\n"
    assert (one.agent.directory / "to").stat().st_mode & 0o777 == 0o750


STEP = """#!/bin/sh
echo "$MULTIVERSE_VM|$SLURM_JOB_ID|$SLURM_NTASKS|$PMIX_NAMESPACE|$PMIX_MCA_gds"
while [ "$1" != sh ]; do echo "$1"; shift; done
exec "$@"
"""


def test_the_launcher_of_mpi_starts_a_step_in_the_vm_that_it_names(guest: Callable[..., Guest], tmp_path: Path) -> None:
    (tmp_path / "vms").write_text("mvjob-7-0 n1 0\nmvjob-7-1 n1 1\nmvjob-7-2 n2 0\nmvjob-7-3 n2 1\n")
    said = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "PMIX_NAMESPACE": "one", "PMIX_MCA_gds": "hash"}
    one = guest(srun=STEP)
    done = one.run('launch -x -l ada mvjob-7-3 \'"echo"\' "\\"two  words\\"" "; cat"; echo $?', data=b"input", **said)
    vm, *options, words, code = done.stdout.decode().splitlines()
    assert vm == "1|7|||hash" and {"--nodelist=n2", "--ntasks=1", "--overlap", "--mpi=none"} <= set(options), (
        done.stderr
    )
    assert (words, code) == ("two  words", "0"), "it reads no input, which is that of mpirun"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("launch elsewhere true", "elsewhere is no VM of this job; its VMs are mvjob-7-0, mvjob-7-1, mvjob-7-2 ..."),
        ("launch mvjob-7-0", "usage: launch VM COMMAND"),
        ("launch-hydra mvjob-7-0 true", "33 VMs at most; submit the job with --vm-per-node=1"),
    ],
)
def test_the_launcher_says_what_it_cannot_start(
    guest: Callable[..., Guest], tmp_path: Path, command: str, sentence: str
) -> None:
    (tmp_path / "vms").write_text("".join(f"mvjob-7-{number} n{number} 0\n" for number in range(34)))
    done = guest(srun=STEP).run(f"{command}; echo $?")
    assert done.stdout == b"1\n" and sentence in done.stderr.decode()


def test_the_host_and_the_guest_know_the_same_commands() -> None:
    (source,) = [path.read_text() for path in SOURCES if path.name == "commands.c"]
    listed = re.search(r"names\[\] = \{(.*?)\};", source, re.DOTALL)
    assert listed is not None and re.findall(r'"(\w+)"', listed[1]) == list(protocol.COMMANDS)


def test_the_program_is_put_over_an_images_commands_and_beside_none_of_a_mounted_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("local", "bin")]
    for place in places:
        place.mkdir()
    (places[1] / "srun").write_text("the image's")
    covered: list[str] = []
    monkeypatch.setattr(requests, "PROGRAM", str(tmp_path / "program"))
    monkeypatch.setattr(requests, "PLACES", tuple(map(str, places)))
    monkeypatch.setattr(requests, "write", lambda path, text, mode: Path(path).write_text(text))
    monkeypatch.setattr(requests, "mount", lambda source, target, kind, flags, data: covered.append(target))
    told = {"names": ["srun", "squeue"], "directory": str(tmp_path / "site" / "bin"), "program": "text"}
    seen = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: seen("/" if path == str(tmp_path) else path, **more))
    assert requests.install_commands(told) == covered == [str(places[1] / "srun")]
    site = tmp_path / "site" / "bin"
    if site.exists():  # it is on the file system of /
        assert (site / "squeue").read_text() == "text" and (site / "srun").read_text() == "text"
    else:
        assert not list(places[0].iterdir())
    assert not (places[1] / "squeue").exists()
