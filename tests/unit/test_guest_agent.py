"""The parts of the guest agent that need no VM."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from pathlib import Path

import pytest

from multiverse.guest.agent import audit, contract, hotplug, network, processes, stopped, users
from multiverse.guest.agent.channel import HostChannel
from multiverse.guest.agent.files import write
from multiverse.guest.agent.server import GuestAgent


def test_a_file_is_made_with_its_mode_and_rewritten_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    owner = (os.getuid(), os.getgid())
    write(str(path), "a long first content", 0o400, owner)
    write(str(path), b"short", 0o640, owner)
    assert path.read_bytes() == b"short"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
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
    monkeypatch.setattr(users, "read", files.__getitem__)
    monkeypatch.setattr(users, "write", files.__setitem__)
    return files


def test_a_user_comes_with_every_group(accounts: dict[str, str]) -> None:
    alice = {"name": "alice", "uid": 2000, "gid": 2000, "home": "/home/alice", "shell": "/bin/bash",
             "groups": [["alice", 2000], ["staff", 100], ["hpc", 2100]]}  # fmt: skip
    users.add_users([alice])
    assert accounts["/etc/passwd"].splitlines() == [
        "root:x:0:0:root:/root:/bin/bash",
        "alice:*:2000:2000::/home/alice:/bin/bash",
    ]
    groups = accounts["/etc/group"].splitlines()
    assert groups == ["root:x:0:", "users:x:100:bob,alice", "alice:*:2000:alice", "hpc:*:2100:alice"]
    before = dict(accounts)
    users.add_users([alice])
    assert accounts == before


def test_an_address_request_is_laid_out_as_the_kernel_wants_it() -> None:
    raw = network.address_request(network.RTM_NEWADDR, 2, "10.1.2.3/16")
    length, kind, flags, _, _ = struct.unpack_from("IHHII", raw)
    assert (length, kind, flags) == (len(raw), 20, 0x505)
    assert struct.unpack_from("BBBBI", raw, 16) == (socket.AF_INET, 16, 0, 0, 2)
    assert struct.unpack_from("HH4s", raw, 24) == (8, 2, bytes([10, 1, 2, 3]))


def test_it_tells_the_ends_of_its_host_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SSH", str(tmp_path / "ssh"))
    monkeypatch.setattr(audit, "interface", lambda: "lo")
    assert audit.current_facts()["host_keys"] == ""
    (tmp_path / "ssh").mkdir()
    for kind in ("rsa", "ed25519"):
        (tmp_path / f"ssh/ssh_host_{kind}_key").write_text("a secret")
        (tmp_path / f"ssh/ssh_host_{kind}_key.pub").write_text(f"ssh-{kind} AAAA{kind:.>30} root@here\n")
    assert audit.current_facts()["host_keys"] == f"{'ed25519':.>20} {'rsa':.>20}"


def test_cpu_lists_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, count in (("0\n", 1), ("0-3\n", 4), ("0-1,3,6-7\n", 5)):
        monkeypatch.setattr(hotplug, "read", lambda path, text=text: text)
        assert hotplug.count_cpus("online") == count


@pytest.fixture
def wire() -> tuple[HostChannel, socket.socket]:
    """A channel whose other end is in our hands."""
    ours, theirs = socket.socketpair()
    channel = HostChannel.__new__(HostChannel)
    channel.fd, channel._buffer = ours.detach(), bytearray()
    return channel, theirs


def test_forked_is_said_before_the_message_is_whole(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, host = wire
    host.send(b'{"type":"identity","x":')
    host.settimeout(5)
    reader = os.fork()
    if reader == 0:
        os._exit(0 if channel.wait() == [{"type": "identity", "x": 1}] else 1)
    assert json.loads(host.recv(100)) == {"type": "forked"}
    host.send(b"1}\n")
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_a_second_identity_is_answered_with_what_became_of_the_first(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, host = wire
    someone = GuestAgent(channel, -1)
    someone.state = {"type_": "started", "stages": []}
    someone.handle({"type": "identity"})
    assert json.loads(host.recv(1000)) == {"type": "started", "stages": []}


def test_what_goes_wrong_is_reported_and_remembered(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, host = wire
    someone = GuestAgent(channel, -1)
    someone.handle({"type": "identity"})  # it lacks everything
    assert json.loads(host.recv(1000))["type"] == "failed"
    someone.handle({"type": "hello"})
    assert json.loads(host.recv(1000))["type"] == "failed"
    someone.handle({"type": "who knows"})


def test_a_flood_without_end_of_line_is_dropped(wire: tuple[HostChannel, socket.socket]) -> None:
    channel, _ = wire
    for _ in range(5):
        assert channel._feed(b"x" * (contract.MAX_LINE // 2)) == []
        assert len(channel._buffer) <= contract.MAX_LINE


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_held_program_runs_only_when_released_and_with_the_arguments_given_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOGS", str(tmp_path))
    monkeypatch.setenv("KEPT", "through it all")
    held = stopped.StoppedProcess("sh", "/bin/sh", "root")
    assert os.waitpid(held.pid, os.WNOHANG) == (0, 0)
    script = 'echo "$KEPT $# $1 ${#2}"; exit 7'
    pid = held.release(["/bin/sh", "-c", script, "x", "a b", "y" * 5000])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "sh.log").read_text() == "through it all 2 a b 5000\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a daemon's user")
def test_a_program_that_is_missing_cannot_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOGS", str(tmp_path))
    with pytest.raises(OSError, match="did not stop"):
        stopped.StoppedProcess("nothing", "/nonexistent", "root")
