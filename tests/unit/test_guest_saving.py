"""Saved jobs in a guest, without a guest: the program of the next run, and what the agent reads."""

from __future__ import annotations

import base64
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.guest import protocol
from multiverse.guest.agent import identity, packets, saving
from multiverse.guest.agent.system import make_pipe


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Attacher:
    """The program of the next run, with an old shell that writes the numbers of the signals that it gets."""

    def __init__(self, place: Path) -> None:
        self.asking, self.answering = make_pipe(str(place / "attach")), make_pipe(str(place / "attach-answer"))
        self.got = place / "got"
        self.got.touch()
        traps = "; ".join(f"trap 'echo {name} >>{self.got}' {name}" for name in ("TERM", "USR1", "40"))
        loop = f"{traps}; echo ready >>{self.got}; while :; do sleep 0.02; done"
        self.old = subprocess.Popen(["bash", "-c", loop])
        until(lambda: "ready" in self.signals())
        text = protocol.program("attach_program.sh").replace("/run/multiverse/", f"{place}/")
        (place / "program").write_text(text)
        self.process = subprocess.Popen(["dash", "-c", f". {place}/program"])
        told = b""
        while not told:
            time.sleep(0.01)
            try:
                told = os.read(self.asking, 100)
            except BlockingIOError:
                continue
        assert int(told) == self.process.pid

    def answer(self, line: str) -> None:
        os.write(self.answering, f"\n{line}\n".encode())

    def signals(self) -> list[str]:
        return self.got.read_text().split()

    def close(self) -> None:
        for process in (self.old, self.process):
            process.kill()
            process.wait()
        os.close(self.asking)
        os.close(self.answering)


@pytest.fixture
def attacher(tmp_path: Path) -> Iterator[Attacher]:
    made = Attacher(tmp_path)
    yield made
    made.close()


def test_signals_of_before_and_after_the_attach_reach_the_old_shell_once(attacher: Attacher) -> None:
    attacher.process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert attacher.signals() == ["ready"]
    attacher.answer(str(attacher.old.pid))
    until(lambda: "USR1" in attacher.signals())
    for number in (signal.SIGTERM, 40):
        attacher.process.send_signal(number)
    until(lambda: len(attacher.signals()) == 4)
    attacher.answer("exit 7")
    assert attacher.process.wait(20) == 7
    assert sorted(attacher.signals()) == ["40", "TERM", "USR1", "ready"]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGPIPE])
def test_the_program_ends_by_the_signal_that_ended_the_old_shell(attacher: Attacher, number: int) -> None:
    attacher.answer(str(attacher.old.pid))
    attacher.answer(f"signal {number}")
    # A shell cannot restore a signal that was ignored as it began, as Python's children do with SIGPIPE.
    assert attacher.process.wait(20) in (-number, 128 + number)


def test_the_program_fails_without_an_agent(tmp_path: Path) -> None:
    text = protocol.program("attach_program.sh").replace("/run/multiverse/", f"{tmp_path}/none/")
    done = subprocess.run(["dash", "-c", text], capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 125 and "multiverse: " in done.stderr


@pytest.mark.parametrize(
    ("lines", "ports"),
    [
        ("ClusterName=c\n", (6817, 6817)),
        ("SlurmctldPort=7000\n", (7000, 7000)),
        (" slurmctldport = 7000-7003 # several\nSlurmdPort=6818\n", (7000, 7003)),
        ("#SlurmctldPort=7000\nSlurmctldPort=wrong\n", (6817, 6817)),
    ],
)
def test_the_ports_of_slurmctld_are_those_of_the_nodes_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, ports: tuple[int, int]
) -> None:
    (tmp_path / "slurm.conf").write_text("Include more.conf\n")
    (tmp_path / "more.conf").write_text(lines)
    (tmp_path / "other").write_text("SlurmctldPort=1")
    monkeypatch.setattr(saving, "SLURM_CONFS", str(tmp_path))
    assert saving.ports_of("slurmctldport", saving.SLURMCTLD_PORT) == ports


def test_only_a_task_of_the_batch_step_is_taken_for_the_program_of_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = saving.SavedJob()
    job.group = "/groups/job_1"
    places = {os.getpid(): "/groups/job_1/step_0/user/task_0"}
    monkeypatch.setattr(saving, "group_of", places.__getitem__)
    for word in (b"x", b"-1", b"9" * 12, str(os.getpid()).encode()):
        job.take_attacher(word)
        assert not job.attacher and job.watched == []
    places[os.getpid()] = "/groups/job_1/step_batch/user/task_0"
    job.take_attacher(str(os.getpid()).encode())
    assert job.attacher == os.getpid()
    job.forget_attacher()
    assert job.watched == []


def test_a_job_that_packets_cannot_be_kept_from_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    job = saving.SavedJob()
    job.group, job.shell = "/groups/job_1", 5
    monkeypatch.setattr(saving, "kill_and_wait", killed.append)
    monkeypatch.setattr(saving, "processes_in", lambda _: [4])
    monkeypatch.setattr(saving, "is_frozen", lambda _: True)

    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(packets, "bpf", refuse)
    monkeypatch.setattr(saving, "drop_incoming", lambda group: packets.drop_incoming(group))
    with pytest.raises(saving.GuestAgentError, match="cannot keep packets"):
        job.cut()
    assert killed == []


def test_a_job_that_was_cut_off_goes_on_in_its_next_run_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    thawed: list[str] = []
    job = saving.SavedJob()
    job.group, job.shell = "/groups/job_1", 5
    monkeypatch.setattr(saving, "SPOOLS", str(tmp_path))
    monkeypatch.setattr(saving, "set_frozen", lambda group, frozen: thawed.append(group))
    monkeypatch.setattr(saving, "processes_in", lambda _: [])
    monkeypatch.setattr(saving, "drop_incoming", lambda _: os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(saving, "is_frozen", lambda _: True)
    job.cut()
    with pytest.raises(saving.GuestAgentError, match="cut off"):
        job.thaw()
    assert thawed == [] and job.group, "it stays frozen, and is known"


@pytest.mark.parametrize("group", ["", "/groups/job_1"])
def test_a_late_call_cuts_no_job_off_that_goes_on(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    killed: list[int] = []
    job = saving.SavedJob()
    job.group, job.shell = group, 5
    monkeypatch.setattr(saving, "kill_and_wait", killed.append)
    monkeypatch.setattr(saving, "processes_in", lambda _: [4])
    monkeypatch.setattr(saving, "is_frozen", lambda _: False)
    with pytest.raises(saving.GuestAgentError, match="no job is frozen"):
        job.cut()
    assert killed == [] and not job.run_is_over


# --- checkpoints -------------------------------------------------------------------------------------


def test_files_of_network_file_systems_that_are_written_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the file system of this test in place of a network's."""
    info = tmp_path.stat()
    device = f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}"
    with (tmp_path / "written").open("w") as written, (tmp_path / "read").open("w+") as also:
        mount = Path(f"/proc/self/fdinfo/{written.fileno()}").read_text().split("mnt_id:")[1].split()[0]
        read = os.open(tmp_path / "read", os.O_RDONLY)
        also.close()
        monkeypatch.setattr(saving, "network_mounts", lambda _: {mount: device})
        found = set(saving.written_by(os.getpid()).values())
        os.close(read)
        assert str(tmp_path / "written") in found and str(tmp_path / "read") not in found
        monkeypatch.setattr(saving, "network_mounts", lambda _: {})
        assert saving.written_by(os.getpid()) == {}


def test_a_job_that_writes_shared_files_is_refused_unless_they_are_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("out", "a", "b", "c", "d")]
    for file in files:
        file.touch()
    monkeypatch.setattr(saving, "processes_in", lambda _: [os.getpid()])
    monkeypatch.setattr(saving, "written_by", lambda _: {str(file): str(file) for file in files})
    output = saving.Output(os.getpid(), str(files[0]))
    with pytest.raises(saving.GuestAgentError, match=f"^{protocol.WRITES_SHARED_FILES}: .*/a, .*/b, .*/c and 1 more$"):
        saving.refuse_writers("/groups/job_1", [output])
    del files[1:]
    saving.refuse_writers("/groups/job_1", [output])


def test_the_output_is_cut_back_to_what_it_was(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("before")
    output = saving.Output(os.getpid(), str(file))
    file.write_text("before and after")
    saving.within(20.0, output.shorten, "it was not shortened")
    assert file.read_text() == "before"


def test_what_was_stopped_as_the_job_was_frozen_goes_on_in_the_next_run() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: saving.is_stopped(process.pid))
        job = saving.SavedJob()
        job.stopped = [process.pid, 2**22 + 1]  # one has ended
        job.continue_stopped()
        until(lambda: not saving.is_stopped(process.pid))
        assert job.stopped == [] and not saving.is_stopped(2**22 + 1)
    finally:
        process.kill()
        process.wait()


class Groups:
    """The control groups of a VM: those of its jobs, and which are frozen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[str] = []
        self.frozen: list[str] = []
        monkeypatch.setattr(saving, "job_groups", lambda: self.jobs)
        monkeypatch.setattr(saving, "processes_in", lambda _: [])
        monkeypatch.setattr(saving, "is_frozen", self.frozen.__contains__)
        monkeypatch.setattr(saving, "set_frozen", self.set_frozen)
        monkeypatch.setattr(saving, "within", lambda *_: None)
        monkeypatch.setattr(saving, "drop_incoming", lambda _: os.open("/dev/null", os.O_RDONLY))
        monkeypatch.setattr(saving, "SPOOLS", "/sys/fs")  # has no directory of slurmd

    def set_frozen(self, group: str, frozen: bool) -> None:
        (self.frozen.append if frozen else self.frozen.remove)(group)


def test_a_vm_without_a_process_of_its_job_is_frozen_and_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, job = Groups(monkeypatch), saving.SavedJob()
    with pytest.raises(saving.GuestAgentError, match="0 jobs"):
        job.freeze(1.0)
    with pytest.raises(saving.GuestAgentError, match="no job is frozen"):
        job.cut()
    job.freeze(1.0, script=False)
    job.cut()
    assert job.run_is_over and not job.group and not groups.frozen
    assert job.attach() and not job.run_is_over, "Slurm starts nothing there for the next run"


def test_a_step_that_begins_in_a_vm_that_is_frozen_is_frozen_as_the_job_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, job = Groups(monkeypatch), saving.SavedJob()
    job.freeze(1.0, script=False)
    groups.jobs.append("/groups/job_1")
    job.cut()
    assert groups.frozen == ["/groups/job_1"] and job.group == "/groups/job_1"
    assert job.closed is not None, "packets are kept from it"
    os.close(job.closed)


def test_a_frozen_vm_without_a_process_of_its_job_is_no_more_cut_off_after_it_was_thawed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = saving.SavedJob()
    Groups(monkeypatch)
    job.freeze(1.0, script=False)
    job.thaw()
    with pytest.raises(saving.GuestAgentError, match="no job is frozen"):
        job.cut()


def test_a_process_that_was_frozen_while_it_read_a_file_reads_the_same_file_on(tmp_path: Path) -> None:
    """An srun may be frozen as it reads slurm.conf, which is another one in the next run."""
    path = tmp_path / "slurm.conf"
    path.write_text("before")
    content = base64.b64encode(b"after").decode()
    file = {"path": str(path), "content": content, "mode": 0o644, "owner": pwd.getpwuid(os.getuid()).pw_name}
    with path.open() as opened:
        identity.write_node_files({"directories": [], "files": [file]}, anew=True)
        assert (opened.read(), path.read_text()) == ("before", "after")
