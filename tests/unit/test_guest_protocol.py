"""The messages between host and guest agent: their JSON stays as it is, and nothing from a guest is trusted."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.errors import Refused
from multiverse.core.model.identity import Daemon, GuestFile, Identity, Mount, NodeBootstrap, User
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import Stage
from multiverse.guest import agent
from multiverse.guest.agent.server import IDENTITY
from multiverse.guest.protocol import (
    AUDIT,
    FLUSH,
    HELLO,
    MAX_LINE,
    Report,
    ReportParser,
    add_user_message,
    identity_message,
)

TYPES = (
    "fork_point", "forked", "becoming", "started", "failed", "flushed", "daemon_ended", "audited", "user_added",
    "joined_job", "serving_tasks", "took_functions", "took_regions", "frozen", "thawed", "cut",
    "rests", "attached", "refused", "may_sleep", "risen",
)  # fmt: skip
ALICE = User("alice", 2000, 2000, "/home/alice", "/bin/bash", (("alice", 2000), ("hpc", 2100)))

# What release 0.9.0 sends. Its guest agents run in VMs and lie in frozen templates, so the text of these lines, without
# random bytes and time, must stay as it is, but for new fields.
ALICE_ON_THE_WIRE = (
    '{"name":"alice","uid":2000,"gid":2000,"home":"/home/alice","shell":"/bin/bash",'
    '"groups":[["alice",2000],["hpc",2100]]}'
)
IDENTITY_ON_THE_WIRE = (
    '"cpus":2,"plugged":256,"disk":3000,"identity":{"hostname":"mva-1","mac":"02:00:00:00:00:01","address":"10.0.0.9/16",'
    '"gateway":"10.0.0.1","machine_id":"0123456789abcdef0123456789abcdef","users":[' + ALICE_ON_THE_WIRE + "],"
    '"mounts":[{"source":"10.0.0.1:/home","target":"/home","type":"nfs4","options":""},'
    '{"source":"work","target":"/work","type":"9p","options":"trans=virtio"}],'
    '"peers":[["mva-1","10.0.0.9"],["mva-2","10.0.0.10"]],'
    '"bootstrap":{"files":[{"path":"/etc/munge/munge.key","content":"AGtleQ==","mode":256,"owner":"munge"}],'
    '"directories":[["/var/spool/slurmd","root",493]],'
    '"daemons":[{"name":"munged","argv":["/usr/sbin/munged","-F"],"user":"munge",'
    '"ready_path":"/run/munge/munge.socket.2"},'
    '{"name":"slurmd","argv":["/usr/sbin/slurmd","-D"],"user":"root","ready_path":""}],"users":[]}},"names":[]'
)


def identity(content: bytes = b"\x00key") -> Identity:
    return Identity(
        hostname="mva-1",
        mac="02:00:00:00:00:01",
        address="10.0.0.9/16",
        gateway="10.0.0.1",
        machine_id="0123456789abcdef" * 2,
        users=(ALICE,),
        mounts=(Mount("10.0.0.1:/home", "/home"), Mount("work", "/work", "9p", "trans=virtio")),
        peers=(("mva-1", "10.0.0.9"), ("mva-2", "10.0.0.10")),
        bootstrap=NodeBootstrap(
            (GuestFile("/etc/munge/munge.key", content, 0o400, "munge"),),
            (("/var/spool/slurmd", "root", 0o755),),
            (
                Daemon("munged", ("/usr/sbin/munged", "-F"), "munge", "/run/munge/munge.socket.2"),
                Daemon("slurmd", ("/usr/sbin/slurmd", "-D")),
            ),
        ),
    )


def test_the_users_of_the_nodes_daemons_are_sent_beside_those_of_jobs() -> None:
    """A VM without users of jobs is a spare, whatever its daemons need."""
    spare = replace(identity(), users=(), bootstrap=NodeBootstrap(users=(ALICE,)))
    message = json.loads(identity_message(spare, cpus=1, plugged=0, disk=0))["identity"]
    assert message["users"] == [] and message["bootstrap"]["users"] == [json.loads(ALICE_ON_THE_WIRE)]


def test_an_identity_is_the_line_that_released_agents_read() -> None:
    line = identity_message(identity(), cpus=2, plugged=256, disk=3000)
    message = json.loads(line)
    assert len(base64.b64decode(message["random"])) == 64
    expected = f'{{"type":"identity","random":"{message["random"]}",{IDENTITY_ON_THE_WIRE},"time":{message["time"]}}}\n'
    assert line.decode() == expected


def test_an_identity_begins_with_the_bytes_by_which_the_agent_recognizes_it() -> None:
    line = identity_message(identity(), cpus=1, plugged=0, disk=0)
    assert line.startswith(IDENTITY)
    assert IDENTITY == b'{"type":"identity"', "released agents look for these bytes"


def test_a_user_is_the_line_that_released_agents_read() -> None:
    line = add_user_message(ALICE)
    expected = f'{{"type":"add_user","user":{ALICE_ON_THE_WIRE},"names":[],"time":{json.loads(line)["time"]}}}\n'
    assert line.decode() == expected


def test_the_requests_are_the_lines_that_released_agents_read() -> None:
    assert (HELLO, FLUSH, AUDIT) == (b'{"type":"hello"}\n', b'{"type":"flush"}\n', b'{"type":"audit"}\n')


@pytest.mark.parametrize(
    ("line", "report"),
    [
        (b'{"type":"fork_point","version":1,"possible":8}\n', Report("fork_point", possible=8)),
        (b'{"type":"fork_point","version":1}\n', Report("fork_point")),
        (b'{"type":"forked"}\n', Report("forked")),
        (b'{"type":"becoming"}\n', Report("becoming")),
        (
            b'{"type":"started","stages":[["identity",0.012],["daemon_slurmd",0.5],["practised",1]],'
            b'"audit":{"cpus":2,"memory":489,"machine_id":"0f","boot_id":"1-2","random":"ab"}}\n',
            Report(
                "started",
                stages=(Stage("identity", 0.012), Stage("daemon_slurmd", 0.5), Stage("practised", 1.0)),
                audit={"cpus": 2, "memory": 489, "machine_id": "0f", "boot_id": "1-2", "random": "ab"},
            ),
        ),
        (b'{"type":"failed","reason":"no interface"}\n', Report("failed", "no interface")),
        (
            b'{"type":"daemon_ended","name":"slurmd","reason":"exit code 1: fatal"}\n',
            Report("daemon_ended", "slurmd: exit code 1: fatal"),
        ),
        (
            b'{"type":"audited","audit":{"hostname":"mva-1","host_keys":"AAA BBB","now":1700000000000,"fresh":"cd"}}\n',
            Report(
                "audited",
                audit={"hostname": "mva-1", "host_keys": "AAA BBB", "now": 1700000000000, "fresh": "cd"},
            ),
        ),
        (b'{"type":"user_added"}\n', Report("user_added")),
        (b'{"type":"flushed"}\n', Report("flushed")),
    ],
)
def test_reports_of_released_agents_are_read(line: bytes, report: Report) -> None:
    (found,) = ReportParser().feed(line)
    assert found == report


def test_each_answer_of_the_guest_agent_is_read() -> None:
    """One that the host does not know is no message to it, and it would wait for ever."""
    sources = (Path(agent.__file__).parent).glob("*.py")
    answers = {found for source in sources for found in re.findall(r'channel\.send\("(\w+)"', source.read_text())}
    assert {"flushed", "joined_job", "took_functions", "took_regions"} <= answers
    for answer in answers:
        assert [report.type for report in ReportParser().feed(b'{"type":"%s"}\n' % answer.encode())] == [answer]


def test_no_two_messages_carry_the_same_random_bytes() -> None:
    one, two = (json.loads(identity_message(identity(), 1, 0, 0))["random"] for _ in range(2))
    assert one != two


def test_an_identity_that_is_too_long_is_refused() -> None:
    with pytest.raises(Refused, match="mva-1"):
        identity_message(identity(bytes(MAX_LINE)), 1, 0, 0)


def test_reports_are_the_same_wherever_the_bytes_are_cut() -> None:
    parser = ReportParser()
    data = b'{"type":"forked"}\n{"type":"started","stages":[["mounts",0.25]],"audit":{"cpus":2}}\n'
    found = [report for i in range(len(data)) for report in parser.feed(data[i : i + 1])]
    assert [report.type for report in found] == ["forked", "started"]
    assert found[1].stages == (Stage("mounts", 0.25),)
    assert found[1].audit == {"cpus": 2}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'{"type":7}',
        b'{"type":"reboot-the-host"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"type":["forked"]}',
    ],
)
def test_a_line_that_is_no_message_is_ignored(line: bytes) -> None:
    parser = ReportParser()
    assert parser.feed(line + b"\n") == []
    assert [report.type for report in parser.feed(b'{"type":"forked"}\n')] == ["forked"]


def test_fields_of_wrong_types_are_left_out() -> None:
    raw = {
        "type": "started",
        "stages": [["a", "b"], ["c", -1], ["d", 10**400], ["n", float("nan")], "e", ["f", 1]],
        "audit": [1],
        "reason": 5,
    }
    (report,) = ReportParser().feed(json.dumps(raw).encode() + b"\n")
    assert report.stages == (Stage("f", 1.0),)
    assert (report.audit, text_of(report.reason)) == ({}, "")


@pytest.mark.parametrize(("sent", "possible"), [("8", 8), ("-1", 0), ("1e9", 0), ("true", 0), ('"8"', 0), ("[]", 0)])
def test_the_number_of_possible_cpus_is_a_number_or_unknown(sent: str, possible: int) -> None:
    (report,) = ReportParser().feed(b'{"type":"fork_point","possible":%s}\n' % sent.encode())
    assert report.possible == possible


def test_control_characters_do_not_reach_a_screen() -> None:
    raw = {"type": "failed", "reason": "\x1b[2Jgone" + "x" * 5000}
    (report,) = ReportParser().feed(json.dumps(raw).encode() + b"\n")
    assert "\x1b" not in text_of(report.reason) and len(text_of(report.reason)) <= 1000


def test_a_line_without_end_is_not_kept() -> None:
    parser = ReportParser()
    for _ in range(40):
        assert parser.feed(b"x" * (MAX_LINE // 8)) == []
        assert len(parser._rest) <= MAX_LINE + MAX_LINE // 8
    assert [report.type for report in parser.feed(b'"}\n{"type":"forked"}\n')] == ["forked"]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50) | st.sampled_from(TYPES),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=50), inner, max_size=40),
    max_leaves=30,
)
_KEYS = st.sampled_from(["type", "reason", "name", "stages", "audit"])


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_raise_an_error(chunks: list[bytes]) -> None:
    parser = ReportParser()
    for chunk in chunks:
        parser.feed(chunk)


@given(st.sampled_from(TYPES), st.dictionaries(_KEYS, _VALUES), st.binary(max_size=100), st.integers(1, 500))
def test_the_report_of_any_message_is_bounded_and_of_its_types(
    kind: str, fields: dict[str, object], noise: bytes, cut: int
) -> None:
    """Messages of an agent with any values in them, between other bytes."""
    line = json.dumps({**fields, "type": kind}).encode() + b"\n"
    data = noise + b"\n" + line + noise + b"\n" + line
    parser = ReportParser()
    found = [report for at in range(0, len(data), cut) for report in parser.feed(data[at : at + cut])]
    assert len([report for report in found if report.type == kind]) >= 2
    for report in found:
        assert report.type in TYPES and len(text_of(report.reason)) <= 2002 and text_of(report.reason).isprintable()
        assert len(report.stages) <= 64 and all(0 <= stage.seconds < 3600 for stage in report.stages)
        assert len(report.audit) <= 32 and all(len(key) <= 40 for key in report.audit)
        assert all(isinstance(value, int) or len(value) <= 1000 for value in report.audit.values())
