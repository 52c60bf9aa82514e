"""The parts of the guest agent that need no VM."""

from __future__ import annotations

import copy
import errno
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multiverse.guest.agent import daemons, identity, main, network, resources, server, system
from multiverse.guest.agent.server import GuestAgent, HostChannel
from multiverse.guest.agent.system import write


def test_a_file_is_made_with_its_mode_and_a_second_write_replaces_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    owner = (os.getuid(), os.getgid())
    write(str(path), "a long first content", 0o400, owner)
    write(str(path), b"short", 0o640, owner)
    assert path.read_bytes() == b"short"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        write(str(tmp_path / "link"), "x", 0o600, (os.getuid(), os.getgid()))
    assert not (tmp_path / "victim").exists()


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """/etc/passwd and /etc/group as the agent sees them."""
    files = {
        "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nalice:x:1:1::/old:/bin/sh\n",
        "/etc/group": "root:x:0:\nusers:x:100:bob\n",
    }
    monkeypatch.setattr(identity, "read", files.__getitem__)
    monkeypatch.setattr(identity, "write", files.__setitem__)
    return files


def test_a_user_is_added_with_every_group(accounts: dict[str, str]) -> None:
    alice = {"name": "alice", "uid": 2000, "gid": 2000, "home": "/home/alice", "shell": "/bin/bash",
             "groups": [["alice", 2000], ["staff", 100], ["hpc", 2100]]}  # fmt: skip
    identity.add_users([alice])
    assert accounts["/etc/passwd"].splitlines() == [
        "alice:*:2000:2000::/home/alice:/bin/bash",
        "root:x:0:0:root:/root:/bin/bash",
    ]
    groups = accounts["/etc/group"].splitlines()
    assert groups == ["root:x:0:", "users:x:100:bob,alice", "alice:*:2000:alice", "hpc:*:2100:alice"]
    before = dict(accounts)
    identity.add_users([alice])
    assert accounts == before


def test_a_user_comes_before_others_of_the_same_number(accounts: dict[str, str]) -> None:
    """uid 1 is the image's user alice, then the site's user bob, who is renamed while the VM is saved."""
    bob = {"name": "bob", "uid": 1, "gid": 1, "home": "/home/bob", "shell": "/bin/sh", "groups": []}
    for name in ("bob", "robert"):
        identity.add_users([bob | {"name": name}])
        first = next(line for line in accounts["/etc/passwd"].splitlines() if line.split(":")[2] == "1")
        assert first == f"{name}:*:1:1::/home/bob:/bin/sh"
    assert "alice:x:1:1::/old:/bin/sh" in accounts["/etc/passwd"].splitlines(), "a daemon of the image may need it"


def test_an_address_request_has_the_kernels_layout() -> None:
    raw = network.address_request(network.RTM_NEWADDR, 2, "10.1.2.3/16")
    length, kind, flags, _, _ = struct.unpack_from("IHHII", raw)
    assert (length, kind, flags) == (len(raw), 20, 0x505)
    assert struct.unpack_from("BBBBI", raw, 16) == (socket.AF_INET, 16, 0, 0, 2)
    assert struct.unpack_from("HH4s", raw, 24) == (8, 2, bytes([10, 1, 2, 3]))


def test_an_address_that_is_also_that_of_the_jobs_network_stays_on_its_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A VM of a platform has one address for both; without it on an interface, MPI would find no network."""
    sent: list[int] = []
    monkeypatch.setattr(
        network, "_send_netlink", lambda all_: sent.extend(struct.unpack_from("IH", one)[1] for one in all_)
    )
    network.join_network("lo", "10.5.0.7/16", "10.5.0.7/16", "10.5.0.1")
    assert network.RTM_DELADDR not in sent
    network.join_network("lo", "10.6.0.7/16", "10.5.0.7/16", "10.5.0.1")
    assert network.RTM_DELADDR in sent, "the host's own makes room for that of the job"


def test_the_ends_of_the_public_host_keys_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SSH", str(tmp_path / "ssh"))
    monkeypatch.setattr(identity, "interface", lambda: "lo")
    assert identity.current_facts()["host_keys"] == ""
    (tmp_path / "ssh").mkdir()
    for kind in ("rsa", "ed25519"):
        (tmp_path / f"ssh/ssh_host_{kind}_key").write_text("a secret")
        (tmp_path / f"ssh/ssh_host_{kind}_key.pub").write_text(f"ssh-{kind} AAAA{kind:.>30} root@here\n")
    assert identity.current_facts()["host_keys"] == f"{'ed25519':.>20} {'rsa':.>20}"


def test_cpu_lists_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, count in (("0\n", 1), ("0-3\n", 4), ("0-1,3,6-7\n", 5)):
        monkeypatch.setattr(resources, "read", lambda path, text=text: text)
        assert resources.count_cpus("online") == count


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A guest with one CPU online, a second one plugged, and 1024 MiB of memory in blocks of 128 MiB."""
    monkeypatch.setattr(resources, "CPUS", str(tmp_path / "cpu"))
    monkeypatch.setattr(resources, "BLOCKS", str(tmp_path / "memory"))
    monkeypatch.setattr(resources, "usable_memory", lambda: 128 * len(list((tmp_path / "memory").glob("memory*"))) - 30)
    (tmp_path / "cpu/cpu1").mkdir(parents=True)
    (tmp_path / "cpu/cpu1/online").write_text("0\n")
    (tmp_path / "cpu/online").write_text("0\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/block_size_bytes").write_text("8000000\n")
    add_blocks(tmp_path, 8)
    monkeypatch.setattr(resources, "_boot_blocks", 0)
    monkeypatch.setattr(resources, "_boot_usable", 0)
    resources.remember_boot_memory()
    return tmp_path


def add_blocks(sysfs: Path, count: int) -> None:
    """Bring `count` more blocks online."""
    first = len(list((sysfs / "memory").glob("memory*")))
    for number in range(first, first + count):
        block = sysfs / f"memory/memory{number}"
        block.mkdir()
        (block / "online").write_text("1\n")


def test_plugged_cpus_are_set_online_and_plugged_memory_is_waited_for(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def kernel_works(seconds: float) -> None:
        """The kernel brings one block online at a time."""
        waits.append(seconds)
        add_blocks(sysfs, 1)

    def set_online(path: str, text: str) -> None:
        assert (path, text) == (str(sysfs / "cpu/cpu1/online"), "1")
        (sysfs / "cpu/online").write_text("0-1\n")

    monkeypatch.setattr(resources.time, "sleep", kernel_works)
    monkeypatch.setattr(resources, "write_kernel_file", set_online)
    resources.use_plugged(2, 256)
    assert resources.count_cpus("online") == 2
    assert len(waits) == 2 and resources.memory_blocks() == 1024 + 256


def test_memory_that_does_not_come_is_a_failure_that_tells_how_much_came(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "DAEMON_TIMEOUT", 0.05)
    add_blocks(sysfs, 1)
    with pytest.raises(system.GuestAgentError) as failure:
        resources.use_plugged(1, 256)
    assert "256 MiB" in str(failure.value)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that reserves space on a guest's disk, of which 10000 MiB are free."""
    monkeypatch.setattr(resources, "RESERVE", str(tmp_path / "reserve"))
    monkeypatch.setattr(resources, "_allowance", 0)
    free = os.statvfs_result((4096, 4096, 0, 0, 10000 << 8, 0, 0, 0, 0, 255))
    monkeypatch.setattr(resources.os, "statvfs", lambda path: free)
    monkeypatch.setattr(resources, "fallocate", os.ftruncate)
    return tmp_path / "reserve"


NODE_FILES = resources.NODE_FILES >> 20


def test_all_but_the_allowance_is_reserved_and_only_root_can_read_it(disk: Path) -> None:
    resources.reserve_disk(["quiet", "multiverse.disk=2048"])
    assert disk.stat().st_size == 10000 - 2048 - NODE_FILES << 20
    assert stat.S_IMODE(disk.stat().st_mode) == 0o600


@pytest.mark.parametrize(("asked", "freed"), [(0, 0), (2048, 0), (2047, 0), (2049, 1), (5000, 2952), (9999, 7888)])
def test_a_larger_allowance_frees_the_difference(disk: Path, asked: int, freed: int) -> None:
    resources.reserve_disk(["multiverse.disk=2048"])
    before = disk.stat().st_size
    resources.set_allowance(asked)
    resources.set_allowance(asked)  # a second time it changes nothing
    assert before - disk.stat().st_size == freed << 20


@pytest.mark.parametrize("options", [["quiet"], ["multiverse.disk=10000"]])
def test_a_guest_without_an_allowance_or_without_more_space_reserves_nothing(disk: Path, options: list[str]) -> None:
    resources.reserve_disk(options)
    resources.set_allowance(12000)
    assert not disk.exists()


def test_blocks_are_allocated_and_not_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        system.fallocate(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError) as failed:
        system.fallocate(file.fileno(), 1 << 20)
    assert failed.value.errno == errno.EBADF


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where daemons write their logs."""
    monkeypatch.setattr(system, "LOGS", str(tmp_path))
    monkeypatch.setattr(daemons, "LOGS", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_daemon_that_ends_before_it_is_ready_is_a_failure_with_its_log(logs: Path) -> None:
    ready = logs / "ready"
    ready.touch()  # left by an earlier run
    argv = ["/bin/sh", "-c", "echo no configuration; exit 3"]
    daemon = daemons.DaemonProcess({"name": "slurmd", "argv": argv, "user": "root", "ready_path": str(ready)})
    with pytest.raises(system.GuestAgentError) as failure:
        daemons.Children(lambda pid, status: None).start(daemon)
    for fact in ("slurmd", "exit code 3", "no configuration"):
        assert fact in str(failure.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_daemon_that_ends_is_started_again_unless_it_ends_at_once_again(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(daemons.time, "monotonic", lambda: now)
    children = daemons.Children(lambda pid, status: None)
    argv = ["/bin/sh", "-c", "echo started; exit 3"]
    daemon = daemons.DaemonProcess({"name": "slurmd", "argv": argv, "user": "root", "ready_path": ""})
    children.start(daemon)

    def ended() -> daemons.DaemonProcess:
        os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
        (found,) = children.collect()
        return found

    assert ended().start_again()
    assert ended() is daemon
    assert not daemon.start_again()
    now += daemons.LASTING
    assert daemon.start_again()
    ended()
    assert (logs / "slurmd.log").read_text() == "started\n" * 3


def test_a_program_that_cannot_be_started_has_no_wait_status() -> None:
    assert system.run(["/nonexistent"]) == -1
    assert os.waitstatus_to_exitcode(system.run(["/bin/sh", "-c", "exit 4"])) == 4
    assert os.waitstatus_to_exitcode(system.run(["/bin/sleep", "60"], timeout=0.05)) == -9


@pytest.mark.parametrize("refused", [(), ("favordynmods",)], ids=["linux-6.0", "before"])
def test_cgroup_v2_is_mounted_with_what_the_kernel_supports_and_has_all_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    mounted: list[str] = []

    def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
        if data in refused:
            raise OSError(errno.EINVAL, "unknown option")
        mounted.append(data)
        (tmp_path / "cgroup.controllers").write_text("cpu memory\n")

    monkeypatch.setattr(main, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(main, "mount", mount)
    main.set_up_cgroups()
    assert mounted == ["" if refused else "favordynmods"]
    for directory in (tmp_path, tmp_path / "system.slice"):
        assert (directory / "cgroup.subtree_control").read_text() == "+cpu +memory"
    main.set_up_cgroups()
    assert len(mounted) == 1, "what a service manager has mounted is used"


def test_a_kernel_without_cgroup_v2_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mount(*_: object) -> None:
        raise OSError(errno.ENODEV, "no such file system")

    monkeypatch.setattr(main, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(main, "mount", mount)
    main.set_up_cgroups()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def wire() -> tuple[HostChannel, socket.socket]:
    """A channel, and the host's end of it."""
    ours, theirs = socket.socketpair()
    channel = HostChannel.__new__(HostChannel)
    channel.fd, channel._buffer = ours.detach(), bytearray()
    return channel, theirs


def test_forked_is_sent_before_the_identity_is_complete(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, host = wire
    host.send(b'{"type":"identity","x":')
    host.settimeout(5)
    reader = os.fork()
    if reader == 0:
        os._exit(0 if channel.wait() == [{"type": "identity", "x": 1}] else 1)
    assert json.loads(host.recv(100)) == {"type": "forked"}
    host.send(b"1}\n")
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_a_second_identity_is_answered_with_the_state_that_the_first_one_led_to(
    wire: tuple[HostChannel, socket.socket],
) -> None:
    channel, host = wire
    guest_agent = GuestAgent(channel, -1)
    guest_agent.state = {"type_": "started", "stages": []}
    guest_agent.handle({"type": "identity"})
    assert json.loads(host.recv(1000)) == {"type": "started", "stages": []}


def test_a_failure_is_reported_and_answers_later_requests_for_the_state(
    wire: tuple[HostChannel, socket.socket],
) -> None:
    channel, host = wire
    guest_agent = GuestAgent(channel, -1)
    guest_agent.handle({"type": "identity"})  # an identity without fields
    assert json.loads(host.recv(1000))["type"] == "failed"
    guest_agent.handle({"type": "hello"})
    assert json.loads(host.recv(1000))["type"] == "failed"
    guest_agent.handle({"type": "of a later release"})


def test_a_line_that_is_too_long_is_dropped(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, _ = wire
    for _ in range(5):
        assert channel._feed(b"x" * (system.MAX_LINE // 2)) == []
        assert len(channel._buffer) <= system.MAX_LINE


IDENTITY = {
    "type": "identity",
    "random": "AAAA",
    "cpus": 2,
    "plugged": 256,
    "disk": 3000,
    "identity": {
        "hostname": "mva-1",
        "mac": "02:00:00:00:00:01",
        "address": "10.0.0.9/16",
        "gateway": "10.0.0.1",
        "machine_id": "0" * 32,
        "users": [],
        "mounts": [{"source": "10.0.0.1:/home", "target": "/home", "type": "nfs4", "options": "ro"}],
        "peers": [["mva-2", "10.0.0.10"]],
        "bootstrap": {
            "files": [],
            "directories": [],
            "daemons": [{"name": "slurmd", "argv": ["/usr/sbin/slurmd", "-D"], "user": "root", "ready_path": ""}],
            "users": [],
        },
    },
    "names": [],
    "time": 1.7e9,
}


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The guest's file of names: tests run as root on a machine whose own file must stay as it is."""
    monkeypatch.setattr(network, "HOSTS", str(tmp_path / "hosts"))
    return tmp_path / "hosts"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[object, ...]]]:
    """The steps that the agent takes, with their arguments. None of them happens."""
    taken: list[tuple[str, tuple[object, ...]]] = []

    def record(name: str, result: object = None) -> Callable[..., object]:
        return lambda *arguments: (taken.append((name, arguments)), result)[1]

    for name in ("set_random_state", "set_names", "add_users", "set_network", "write_node_files",
                 "use_plugged", "raise_process_limits", "raise_kernel_limits", "set_allowance", "mount_one",
                 "load_on_demand", "preload_job_programs", "learn_names"):  # fmt: skip
        monkeypatch.setattr(server, name, record(name))
    monkeypatch.setattr(server, "interface", lambda: "eth0")
    monkeypatch.setattr(server, "make_pipe", record("make_pipe", -1))
    monkeypatch.setattr(server, "clone_facts", lambda: {"cpus": 2})
    monkeypatch.setattr(server.Children, "start", record("start_daemon"))
    monkeypatch.setattr(server.time, "clock_settime", record("clock_settime"))
    return taken


def test_an_identity_is_applied_with_randomness_first_and_mounts_after_the_daemons(
    wire: tuple[HostChannel, socket.socket], steps: list[tuple[str, tuple[object, ...]]]
) -> None:
    channel, host = wire
    message: dict[str, Any] = copy.deepcopy(IDENTITY)
    message["identity"]["users"] = [{"name": "alice"}]
    GuestAgent(channel, -1).handle(message)
    assert [name for name, _ in steps] == ["set_random_state", "clock_settime", "set_names", "add_users", "set_network",
                                           "write_node_files", "use_plugged", "raise_process_limits",
                                           "set_allowance", "start_daemon", "mount_one", "load_on_demand",
                                           "raise_kernel_limits"]  # fmt: skip
    arguments = dict(steps)
    assert arguments["set_network"] == ("eth0", "02:00:00:00:00:01", "10.0.0.9/16", "10.0.0.1")
    assert arguments["use_plugged"] == (2, 256)
    assert arguments["set_allowance"] == (3000,)
    assert arguments["mount_one"] == ("10.0.0.1:/home", "/home", "nfs4", "ro")
    assert arguments["load_on_demand"] == (True,)
    report = json.loads(host.recv(10000))
    assert (report["type"], report["audit"]) == ("started", {"cpus": 2})
    assert [name for name, _ in report["stages"]] == ["identity", "network", "files", "plugged", "disk",
                                                      "daemon_slurmd", "mounts"]  # fmt: skip


def test_a_spare_knows_the_users_of_its_daemons_and_stays_a_spare(
    wire: tuple[HostChannel, socket.socket], steps: list[tuple[str, tuple[object, ...]]]
) -> None:
    message: dict[str, Any] = copy.deepcopy(IDENTITY)
    message["identity"]["bootstrap"]["users"] = [{"name": "slurm"}]
    GuestAgent(wire[0], -1).handle(message)
    assert dict(steps)["add_users"] == ([{"name": "slurm"}],)
    assert "make_pipe" in dict(steps)


def test_a_spare_gets_a_pipe_for_its_job_and_loads_what_the_job_will_run(
    wire: tuple[HostChannel, socket.socket], steps: list[tuple[str, tuple[object, ...]]]
) -> None:
    channel, host = wire
    GuestAgent(channel, -1).handle(IDENTITY)
    names = [name for name, _ in steps]
    assert names.index("make_pipe") < names.index("start_daemon")
    assert names[-2:] == ["preload_job_programs", "raise_kernel_limits"]
    assert [name for name, _ in json.loads(host.recv(10000))["stages"]][-1] == "practised"


def test_a_user_is_added_before_the_job_continues(
    wire: tuple[HostChannel, socket.socket], steps: list[tuple[str, tuple[object, ...]]]
) -> None:
    channel, host = wire
    guest_agent = GuestAgent(channel, -1)
    reading, guest_agent.user_added = os.pipe2(os.O_NONBLOCK)
    guest_agent.handle({"type": "add_user", "user": {"name": "alice"}, "names": [], "time": time.time()})
    nobody = ("learn_names", ([], [], True))
    assert steps == [("add_users", ([{"name": "alice"}],)), nobody], "the clock was right"
    assert os.read(reading, 1000) == b"\n" * system.MOST_WAIT
    assert json.loads(host.recv(1000)) == {"type": "user_added"}
    guest_agent.handle({"type": "add_user", "user": {"name": "alice"}, "names": [], "time": time.time() + 10})
    assert [name for name, _ in steps] == ["add_users", "learn_names", "add_users", "learn_names", "clock_settime"]
    for descriptor in (reading, guest_agent.user_added):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("options", "flags", "data"),
    [
        ("", 0, []),
        ("defaults,_netdev,x-systemd.automount", 0, []),
        ("ro,nosuid,vers=4.2,nolock", 3, ["vers=4.2", "nolock"]),
    ],
)
def test_mount_options_are_flags_or_go_to_the_file_system(options: str, flags: int, data: list[str]) -> None:
    assert identity._kernel_options(options) == (flags, data)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_stopped_program_runs_when_it_is_released_and_with_the_arguments_of_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "LOGS", str(tmp_path))
    monkeypatch.setenv("KEPT", "from the agent")
    held = daemons.StoppedProcess("sh", "/bin/sh", "root")
    assert os.waitpid(held.pid, os.WNOHANG) == (0, 0)
    script = 'echo "$KEPT $# $1 ${#2}"; exit 7'
    pid = held.release(["/bin/sh", "-c", script, "x", "a b", "y" * 5000])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "sh.log").read_text() == "from the agent 2 a b 5000\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_program_that_is_missing_cannot_be_stopped_at_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "LOGS", str(tmp_path))
    with pytest.raises(OSError, match="did not stop"):
        daemons.StoppedProcess("nothing", "/nonexistent", "root")
