"""What a guest sends is not trusted; what it is sent is whole."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.errors import Refused
from multiverse.core.model import GuestFile, Identity, NodeBootstrap, Stage, User
from multiverse.guest.agent.channel import IDENTITY
from multiverse.guest.protocol import _TYPES, MAX_LINE, Lines, identity_message


def identity(content: bytes = b"\x00key") -> Identity:
    user = User("alice", 2000, 2000, "/home/alice", "/bin/bash", (("hpc", 2100),))
    files = (GuestFile("/etc/munge/munge.key", content, 0o400, "munge"),)
    return Identity(
        "mva-1", "02:00:00:00:00:01", "10.0.0.9/16", "", "0" * 32, users=(user,), bootstrap=NodeBootstrap(files)
    )


def test_an_identity_is_one_line_that_begins_as_the_agent_expects() -> None:
    line = identity_message(identity(), cpus=2, plugged=256)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert line.startswith(IDENTITY)
    message = json.loads(line)
    assert base64.b64decode(message["identity"]["membership"]["files"][0]["content"]) == b"\x00key"
    assert len(base64.b64decode(message["random"])) == 64
    assert (message["cpus"], message["plugged"]) == (2, 256)


def test_no_two_messages_carry_the_same_random_bytes() -> None:
    one, two = (json.loads(identity_message(identity(), 1, 0))["random"] for _ in range(2))
    assert one != two


def test_an_identity_that_is_too_long_is_refused() -> None:
    with pytest.raises(Refused, match="mva-1"):
        identity_message(identity(bytes(MAX_LINE)), 1, 0)


def test_reports_come_out_however_the_bytes_are_cut() -> None:
    lines = Lines()
    data = b'{"type":"forked"}\n{"type":"started","stages":[["mounts",0.25]],"audit":{"cpus":2}}\n'
    found = [report for i in range(len(data)) for report in lines.feed(data[i : i + 1])]
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
def test_what_makes_no_sense_is_passed_over(line: bytes) -> None:
    lines = Lines()
    assert lines.feed(line + b"\n") == []
    assert [report.type for report in lines.feed(b'{"type":"forked"}\n')] == ["forked"]


def test_fields_of_wrong_types_are_left_out() -> None:
    raw = {
        "type": "started",
        "stages": [["a", "b"], ["c", -1], ["d", 10**400], ["n", float("nan")], "e", ["f", 1]],
        "audit": [1],
        "reason": 5,
    }
    (report,) = Lines().feed(json.dumps(raw).encode() + b"\n")
    assert report.stages == (Stage("f", 1.0),)
    assert (report.audit, report.reason) == ({}, "")


@pytest.mark.parametrize(("said", "possible"), [("8", 8), ("-1", 0), ("1e9", 0), ("true", 0), ('"8"', 0), ("[]", 0)])
def test_how_many_cpus_it_has_room_for_is_a_number_or_unknown(said: str, possible: int) -> None:
    (report,) = Lines().feed(b'{"type":"fork_point","possible":%s}\n' % said.encode())
    assert report.possible == possible


def test_control_characters_do_not_reach_a_screen() -> None:
    raw = {"type": "failed", "reason": "\x1b[2Jgone" + "x" * 5000}
    (report,) = Lines().feed(json.dumps(raw).encode() + b"\n")
    assert "\x1b" not in report.reason and len(report.reason) <= 1000


def test_a_line_without_end_is_not_kept() -> None:
    lines = Lines()
    for _ in range(40):
        assert lines.feed(b"x" * (MAX_LINE // 8)) == []
        assert len(lines._rest) <= MAX_LINE + MAX_LINE // 8
    assert [report.type for report in lines.feed(b'"}\n{"type":"forked"}\n')] == ["forked"]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50) | st.sampled_from(sorted(_TYPES)),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=50), inner, max_size=40),
    max_leaves=30,
)
_KEYS = st.sampled_from(["type", "reason", "name", "stages", "audit"])


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_break_it(chunks: list[bytes]) -> None:
    lines = Lines()
    for chunk in chunks:
        lines.feed(chunk)


@given(st.sampled_from(sorted(_TYPES)), st.dictionaries(_KEYS, _VALUES), st.binary(max_size=100), st.integers(1, 500))
def test_what_comes_of_any_message_is_bounded_and_of_its_types(
    kind: str, fields: dict[str, object], rubbish: bytes, cut: int
) -> None:
    """Messages as an agent makes them, with anything in them, among anything else."""
    line = json.dumps({**fields, "type": kind}).encode() + b"\n"
    data = rubbish + b"\n" + line + rubbish + b"\n" + line
    lines = Lines()
    found = [report for at in range(0, len(data), cut) for report in lines.feed(data[at : at + cut])]
    assert len([report for report in found if report.type == kind]) >= 2
    for report in found:
        assert report.type in _TYPES and len(report.reason) <= 2002 and report.reason.isprintable()
        assert len(report.stages) <= 64 and all(0 <= stage.seconds < 3600 for stage in report.stages)
        assert len(report.audit) <= 32 and all(len(key) <= 40 for key in report.audit)
        assert all(isinstance(value, int) or len(value) <= 1000 for value in report.audit.values())
