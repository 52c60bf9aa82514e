"""The agent's service for VMs inside jobs, with a host that makes none."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import structlog

from multiverse.agent import jobs
from multiverse.agent.jobs import JobVm, JobVmService, JobVmSizes
from multiverse.config import AgentSettings, JobVmSettings, Settings
from multiverse.core.errors import Broken, Gone, Unknown
from multiverse.core.model.identity import User
from multiverse.service import job_vms
from multiverse.system.kernel import SharedMemory

ME = os.getuid()


@dataclass
class FakeHost:
    """Remembers which VMs it has."""

    vms: dict[tuple[int, int], JobVm] = field(default_factory=dict)  # by job and index
    networks: set[int] = field(default_factory=set)
    made: list[JobVm] = field(default_factory=list)
    shared: dict[int, SharedMemory] = field(default_factory=dict)  # by job
    dead: set[tuple[int, int]] = field(default_factory=set)
    failure: Exception | None = None
    failing: int = 0  # the index of the VM that fails
    hold: threading.Event | None = None
    killed: threading.Event = field(default_factory=threading.Event)
    guest: socket.socket | None = None
    guests: list[socket.socket] = field(default_factory=list)  # open, as long as a VM lives
    silent: threading.Event | None = None  # the guests do not answer until it is set
    removable: threading.Event | None = None  # no VM can be removed until it is set
    removing: bool = False
    unremovable: int = 0  # so many removals fail
    returned: int = 0  # how often what no VM has was to be returned

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        return (f"/groups/job_{job}",)

    def connect_network(self, vms: tuple[JobVm, ...]) -> None:
        self.networks.add(vms[0].number)

    def remove_network(self, vms: tuple[JobVm, ...]) -> None:
        assert not self.vms.keys() & {(vm.job, vm.index) for vm in vms}
        self.networks.discard(vms[0].number)

    def control_groups(self, vm: JobVm) -> list[str]:
        return [f"{group}/vm{vm.index}" for group in vm.groups]

    def share_memory(self, vms: tuple[JobVm, ...]) -> SharedMemory:
        found = SharedMemory(vms[0].regions, 1)
        self.shared[vms[0].job] = found
        return found

    def make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        assert vm in vms and vm.number in self.networks
        assert len(memory.fds) == len(vm.regions) and self.shared[vm.job] is memory and memory.close.alive
        self.vms[vm.job, vm.index] = vm
        self.made.append(vm)
        if self.hold is not None:
            self.hold.set()
            assert self.killed.wait(10)
            raise Gone("its QEMU has ended")
        if self.failure is not None and vm.index == self.failing:
            raise self.failure
        return [f"{group}/vm{vm.index}" for group in vm.groups]

    def is_alive(self, vm: JobVm) -> bool:
        return (vm.job, vm.index) in self.vms and (vm.job, vm.index) not in self.dead

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        if self.silent is not None:
            assert self.silent.wait(60)
        ours, self.guest = socket.socketpair()
        self.guests.append(self.guest)
        return ours, os.open(os.devnull, os.O_RDONLY)

    def kill(self, vm: JobVm) -> None:
        self.killed.set()

    def close(self) -> None: ...

    def return_rest(self) -> None:
        self.returned += 1

    def remove(self, vm: JobVm) -> None:
        self.removing = True
        if self.removable is not None:
            assert self.removable.wait(60)
        if self.unremovable:
            self.unremovable -= 1
            raise Broken("its process cannot be ended")
        self.vms.pop((vm.job, vm.index), None)


@dataclass
class Served:
    host: FakeHost
    service: JobVmService
    directory: Path
    prolog: str = ""

    async def ask(self, line: str) -> str:
        reader, writer = await asyncio.open_unix_connection(self.directory / "sock")
        writer.write(line.encode() + b"\n")
        answered = await reader.read()
        writer.close()
        return answered.decode()

    async def task_prolog(self) -> str:
        return self.prolog

    def files(self) -> set[str]:
        return {path.name for name in ("state", "records") for path in (self.directory / name).iterdir()}

    def again(self) -> JobVmService:
        """The next agent."""
        return JobVmService(
            self.host,
            _user,
            self.directory / "state",
            self.directory / "records",
            JobVmSizes("slim", 256, 192, Path("/usr/bin"), self.task_prolog, 32),
        )


async def _user(uid: int) -> User:
    return User("ada", uid, uid, "/home/ada", "/bin/sh")


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(jobs, "PLUGIN_UID", ME)
    (tmp_path / "records").mkdir()
    found = Served(FakeHost(), None, tmp_path)  # type: ignore[arg-type]
    found.service = found.again()
    await found.service.start()
    server = await asyncio.start_unix_server(found.service.serve, tmp_path / "sock")
    yield found
    server.close()
    await found.service.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it does not become so")


def provide(job: int, vms: int = 1, regions: str = "") -> str:
    asked = f"image= cpus= memory= disk= vms={vms} regions={regions}"
    return f"provide job={job} uid={ME} cores=2 allocated=1000 {asked} nodes=n1 node=n1"


async def test_a_jobs_vm_is_made_once_and_released_twice(served: Served) -> None:
    assert await asyncio.gather(served.ask(provide(7)), served.ask(provide(7))) == ["ok\n", "ok\n"]
    (vm,) = served.host.made
    assert (vm.cpus, vm.memory, vm.image, vm.groups) == (2, 808, "slim", ("/groups/job_7",))
    assert served.files() == {"7.json", "7.groups"}
    assert (served.directory / "records" / "7.groups").read_text() == "/groups/job_7/vm0\n"
    assert [await served.ask("release job=7") for _ in range(2)] == ["ok\n", "ok\n"]
    assert not served.host.vms and not served.files()


async def test_two_jobs_have_different_addresses_and_tokens(served: Served) -> None:
    await asyncio.gather(served.ask(provide(7)), served.ask(provide(8)))
    one, two = served.host.made
    assert one.number != two.number and one.token != two.token and one.task_token != two.task_token


async def test_a_job_has_as_many_vms_as_it_asked_for_and_the_next_agent_knows_them(served: Served) -> None:
    (served.directory / "records" / "7").write_text("image=slim\n")
    assert await served.ask(provide(7, vms=2)) == "ok\n"
    assert sorted(served.host.vms) == [(7, 0), (7, 1)]
    one, two = (served.host.vms[7, index] for index in (0, 1))
    assert (one.cpus, one.memory) == (two.cpus, two.memory) == (1, 308)
    assert one.number == two.number and (one.rank, two.rank) == (0, 1)
    for own in ("run", "token", "task_token"):
        assert getattr(one, own) != getattr(two, own), own
    lines = (served.directory / "records" / "7.groups").read_text().splitlines()
    assert sorted(lines) == ["/groups/job_7/vm0", "/groups/job_7/vm1"]
    following = served.again()
    await following.start()
    assert following._known == served.service._known and len(served.host.vms) == 2
    await following.close()
    assert await served.ask("release job=7") == "ok\n"
    assert not served.host.vms and not served.host.networks and served.files() == {"7"}


async def test_the_vms_of_a_job_share_regions_that_no_other_job_has_and_the_agent_keeps_none(served: Served) -> None:
    assert await served.ask(provide(7, vms=2, regions="2")) == "ok\n"
    assert await served.ask(provide(8, regions="2")) == "ok\n"
    one, two, other = (served.host.vms[key] for key in ((7, 0), (7, 1), (8, 0)))
    assert one.regions == two.regions and len({*one.regions, *other.regions}) == 4
    assert one.memory == (1000 - 2 * 32) // 2 - 192, "what the regions take is left"
    served.host.failure = Broken("no room", hint="make some")
    assert await served.ask(provide(9, regions="1")) == "error no room (make some)\n"
    assert len(served.host.shared) == 3 and not any(memory.close.alive for memory in served.host.shared.values())
    following = served.again()
    (served.directory / "records" / "7").write_text("image=slim\n")
    await following.start()
    assert following._known[7] == served.service._known[7]
    await following.close()


async def test_what_an_earlier_release_wrote_of_a_job_is_understood(served: Served) -> None:
    (served.directory / "records" / "7").write_text("image=slim\n")
    await served.ask(provide(7))
    file = served.directory / "state" / "7.json"
    earlier = json.loads(file.read_text())
    assert earlier[0].pop("regions") == []
    file.write_text(json.dumps(earlier))
    following = served.again()
    await following.start()
    assert following._known == served.service._known
    await following.close()


async def test_if_one_vm_of_a_job_fails_none_is_left(served: Served) -> None:
    served.host.failure, served.host.failing = Broken("no room", hint="make some"), 1
    assert await served.ask(provide(7, vms=2)) == "error no room (make some)\n"
    assert len(served.host.made) == 2 and not served.host.networks
    assert not served.host.vms and not served.files() and not served.service._known


async def test_a_job_one_of_whose_vms_died_gets_no_further_task(served: Served) -> None:
    await served.ask(provide(7, vms=2))
    served.host.dead.add((7, 1))
    assert "submit the job again" in await served.ask(provide(7, vms=2))


async def test_a_task_gets_a_connection_to_the_vm_that_it_names(served: Served) -> None:
    await served.ask(provide(7, vms=2))
    for index in (1, 0):
        assert await served.ask(f"enter job=7 vm={index}") == "ok /usr/bin\n"
        assert served.host.guest is not None
        greeting = json.loads(served.host.guest.recv(1000))
        assert greeting["token"] == served.host.vms[7, index].task_token
    assert "no VM of yours" in await served.ask("enter job=7 vm=2")


async def test_a_vm_that_died_is_not_made_again_for_the_same_run_but_for_the_next(served: Served) -> None:
    await served.ask(provide(7))
    served.host.dead.add((7, 0))
    assert "submit the job again" in await served.ask(provide(7))
    assert len(served.host.made) == 1
    served.host.dead.clear()
    (served.directory / "records" / "7").write_text("image=slim\n")  # as the prolog of the next run does
    assert [await served.ask(provide(7)) for _ in range(2)] == ["ok\n", "ok\n"]
    assert len(served.host.made) == 2 and served.host.vms[7, 0] is served.host.made[1]


async def test_after_a_failure_nothing_is_left(served: Served) -> None:
    served.host.failure = Broken("no room", hint="make some")
    assert await served.ask(provide(7)) == "error no room (make some)\n"
    assert not served.host.vms and not served.files()


async def test_a_job_that_ends_while_its_vm_is_made_leaves_none(served: Served) -> None:
    served.host.hold = threading.Event()
    asked = asyncio.create_task(served.ask(provide(7)))
    assert await asyncio.to_thread(served.host.hold.wait, 10)
    assert await served.ask("release job=7") == "ok\n"
    assert (await asked).startswith("error ")
    assert not served.host.vms and not served.files()


async def test_a_vm_that_could_not_be_removed_as_its_job_ended_fails_no_later_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(vm: JobVm) -> None:
        raise Broken("its process cannot be ended")

    served.host.hold = threading.Event()
    asked = asyncio.create_task(served.ask(provide(7)))
    assert await asyncio.to_thread(served.host.hold.wait, 10)
    with monkeypatch.context() as patched:
        patched.setattr(served.host, "remove", remove)
        assert "cannot be ended" in await served.ask("release job=7")
        assert (await asked).startswith("error ")
    served.host.hold = None
    (served.directory / "records" / "7").write_text("image=slim\n")  # it was requeued
    assert await served.ask(provide(7)) == "ok\n"
    assert served.host.vms[7, 0] is served.host.made[1]


async def test_a_second_request_for_the_end_of_a_job_lets_its_guests_write_back(served: Served) -> None:
    assert await served.ask(provide(7)) == "ok\n"
    served.host.removable = threading.Event()
    first = asyncio.create_task(served.ask("release job=7"))
    await until(lambda: served.host.removing)
    second = asyncio.create_task(served.ask("release job=7"))
    await until(lambda: served.service._open[ME] == 2)
    assert await served.ask("test") == "ok\n"  # by then, the second one was looked at
    served.host.removable.set()
    assert [await first, await second] == ["ok\n", "ok\n"]
    assert not served.host.killed.is_set()


async def test_a_job_ends_while_as_many_vms_of_others_are_being_made_as_there_are_threads(served: Served) -> None:
    assert await served.ask(provide(7)) == "ok\n"
    served.host.hold = threading.Event()
    most = provide(8, vms=2 * jobs._THREADS).replace("cores=2 allocated=1000", "cores=64 allocated=40000")
    asked = asyncio.create_task(served.ask(most))
    await until(lambda: len(served.host.made) == 1 + jobs._THREADS)
    assert await served.ask("release job=7") == "ok\n" and (7, 0) not in served.host.vms
    assert len(served.host.made) == 1 + jobs._THREADS, "no thread was waited for"
    assert await served.ask("release job=8") == "ok\n"
    assert (await asked).startswith("error ") and not served.host.vms
    assert len(served.host.made) == 1 + jobs._THREADS, "none is begun for a job that has ended"


async def test_what_could_not_be_removed_at_a_jobs_end_is_removed_later_unless_the_job_uses_it_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(vm: JobVm) -> None:
        raise Unknown("the platform does not answer")

    for job in (7, 8):
        assert await served.ask(provide(job)) == "ok\n"
    with monkeypatch.context() as patched:
        patched.setattr(served.host, "remove", remove)
        for job in (7, 8):
            assert "does not answer" in await served.ask(f"release job={job}")
        await served.service.release_again()
        assert served.host.vms.keys() == {(7, 0), (8, 0)}
    assert await served.ask(provide(8)) == "ok\n"
    await served.service.release_again()
    assert served.host.vms.keys() == {(8, 0)} and served.files() == {"8.json", "8.groups"}


async def test_the_next_agent_keeps_the_vms_of_running_jobs_and_releases_the_others(served: Served) -> None:
    for job in (7, 8):
        await served.ask(provide(job))
    (served.directory / "records" / "8").write_text("image=slim\n")  # the plugin's record of a job that runs
    service = served.again()
    await service.start()
    assert served.host.vms.keys() == {(8, 0)}
    await service.close()


async def test_a_vm_that_an_agent_did_not_finish_is_removed_by_the_next_and_made_again(served: Served) -> None:
    (served.directory / "records" / "7").write_text("image=slim\n")
    served.host.hold = threading.Event()
    asked = asyncio.create_task(served.ask(provide(7)))
    assert await asyncio.to_thread(served.host.hold.wait, 10)
    await served.service.close()
    assert await asked == ""
    # The thread that makes the VM goes on, so what is known of the VM must last.
    assert served.files() == {"7", "7.json", "7.making"}
    served.host.killed.set()
    served.host.hold = None
    assert (7, 0) in served.host.vms
    served.service = served.again()
    await served.service.start()
    assert not served.host.vms and served.files() == {"7"}
    server = await asyncio.start_unix_server(served.service.serve, served.directory / "sock")
    assert await served.ask(provide(7)) == "ok\n"
    assert served.host.vms[7, 0] is served.host.made[1]
    server.close()


async def test_a_file_that_cannot_be_read_is_named_in_the_log_and_the_others_are_known(served: Served) -> None:
    (served.directory / "records" / "7").write_text("image=slim\n")
    assert await served.ask(provide(7)) == "ok\n"
    (damaged,) = (path.with_name("8.json") for path in served.directory.rglob("7.json"))
    damaged.write_text("{")
    served.service = served.again()
    with structlog.testing.capture_logs() as logged:
        await served.service.start()
    (warning,) = (line for line in logged if line["log_level"] == "warning")
    assert warning["path"] == str(damaged) and "remove the file" in warning["event"]
    assert (7, 0) in served.host.vms


async def test_only_the_plugins_user_may_make_and_release_vms(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PLUGIN_UID", ME + 1)
    for line in (provide(7), "release job=7"):
        assert "only root" in await served.ask(line)
    assert not served.host.made


async def test_a_task_gets_a_connection_to_its_own_guest_only(served: Served) -> None:
    await served.ask(provide(7))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(served.directory / "sock"))
    sock.sendall(b"enter job=7\n")
    data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 100, 2)
    assert data == b"ok /usr/bin\n" and len(fds) == 2
    assert served.host.guest is not None
    greeting = json.loads(served.host.guest.recv(1000))
    assert greeting == {"token": served.host.made[0].task_token, "name": "ada", "uid": ME, "gid": os.getgid()}
    for fd in fds:
        os.close(fd)
    assert "no VM of yours" in await served.ask("enter job=8")
    served.service._known[9] = (JobVm(9, 0, 0, ME + 1, 3, "slim", 1, 256, 0, "t", "secret", ()),)
    assert "no VM of yours" in await served.ask("enter job=9")


async def test_a_user_whose_guest_does_not_answer_keeps_no_other_job_waiting(served: Served) -> None:
    await served.ask(provide(7))
    served.host.silent = threading.Event()
    try:
        entering = [asyncio.create_task(served.ask("enter job=7")) for _ in range(100)]
        await until(lambda: len(served.service._serving) == 100)
        async with asyncio.timeout(30):
            assert await served.ask(provide(8)) == "ok\n"
            assert await served.ask("release job=8") == "ok\n"
            assert served.service._entering._work_queue.qsize() == 0, "the threads are left to other jobs"
    finally:
        served.host.silent.set()
    assert set(await asyncio.gather(*entering)) == {"ok /usr/bin\n"}


async def test_what_users_and_guests_do_is_no_defect_of_the_agent_and_fills_no_log(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(vm: JobVm) -> tuple[socket.socket, int]:
        ours, guest = socket.socketpair()
        guest.close()
        return ours, os.open(os.devnull, os.O_RDONLY)

    await served.ask(provide(7))
    monkeypatch.setattr(served.host, "connect", connect)
    monkeypatch.setattr(jobs, "PLUGIN_UID", ME + 1)
    with structlog.testing.capture_logs() as logged:
        assert "closed its connection" in await served.ask("enter job=7")
        assert "no VM of yours" in await served.ask("enter job=8")
        assert "only root" in await served.ask("release job=7")
    assert {each["log_level"] for each in logged} == {"debug"}


async def test_a_user_has_so_many_connections_and_the_plugin_any(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CONNECTIONS_OF_ONE", 3)
    idle = [await asyncio.open_unix_connection(served.directory / "sock") for _ in range(3)]
    assert await served.ask(provide(7)) == "ok\n"
    monkeypatch.setattr(jobs, "PLUGIN_UID", ME + 1)
    with pytest.raises(ConnectionError):
        await served.ask("enter job=7")
    for _, writer in idle:
        writer.close()
    await until(lambda: not served.service._open)
    assert await served.ask("enter job=7") == "ok /usr/bin\n"


@pytest.mark.parametrize("failures", [0, 2])  # of the agent, and of who asks for it
async def test_a_job_that_ends_while_an_agent_starts_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    state = tmp_path / "agent"
    settings = Settings(
        agent=AgentSettings(state_dir=state),
        job_vms=JobVmSettings(socket=tmp_path / "sock", records=tmp_path / "records"),
    )
    tmp_path.chmod(0o755)
    (state / "jobs").mkdir(parents=True)
    vm = JobVm(7, 0, 0, ME, 0, "slim", 1, 256, 0, "t", "secret", ())
    (state / "jobs" / "7.json").write_text(json.dumps([asdict(vm)]))
    host = FakeHost({(7, 0): vm}, removable=threading.Event(), unremovable=failures)
    monkeypatch.setattr(job_vms, "_AGAIN", 0.01)
    monkeypatch.setattr(jobs, "PLUGIN_UID", ME)
    monkeypatch.setattr(job_vms, "QemuJobVms", lambda settings: host)

    async def serve() -> None:
        async with job_vms.serve_jobs(settings):
            await asyncio.sleep(60)

    serving = asyncio.create_task(serve())
    await until((tmp_path / "sock").exists)
    assert stat.S_IMODE((tmp_path / "sock").stat().st_mode) == 0o666
    reader, writer = await asyncio.open_unix_connection(tmp_path / "sock")
    writer.write(b"release job=7\n")
    host.removable.set()
    assert (await reader.read() == b"ok\n") is not bool(failures)
    writer.close()
    await until(lambda: not host.vms)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
