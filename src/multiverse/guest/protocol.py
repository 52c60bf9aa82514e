"""What host and guest say to each other: one JSON object a line, at most `MAX_LINE` bytes.

What comes from a guest is never trusted, for its user may be root there one day: types are checked,
unknown messages are passed over, and nothing is kept without bound.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from multiverse.core.errors import Refused
from multiverse.core.model import Identity, Stage, User
from multiverse.guest.agent import INTRODUCED, MAX_LINE, PORT, TEMPLATE

__all__ = [
    "AUDIT",
    "FLUSH",
    "HELLO",
    "INTRODUCED",
    "MAX_LINE",
    "PORT",
    "TEMPLATE",
    "Lines",
    "Report",
    "identity_message",
    "introduction",
]

HELLO = b'{"type":"hello"}\n'
FLUSH = b'{"type":"flush"}\n'
AUDIT = b'{"type":"audit"}\n'
_TEXT = 1000  # characters of any text that is kept
_TYPES = frozenset(
    {"fork_point", "forked", "becoming", "started", "failed", "flushed", "daemon_ended", "audited", "introduced"}
)


@dataclass(frozen=True, slots=True)
class Report:
    """A message from the agent. `audit` says what tells clones apart, see `Agent.audit`; `possible` how many CPUs its
    kernel has room for, 0 if it did not say."""

    type: str
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    audit: Mapping[str, str | int] = field(default_factory=lambda: MappingProxyType({}))
    possible: int = 0


def identity_message(identity: Identity, cpus: int, plugged: int) -> bytes:
    """The line that makes a clone itself: with fresh random bytes and the time, so never keep or resend it.

    `cpus` are the CPUs it must find, `plugged` the MiB of memory plugged. `Refused` if it is too long.
    """

    def plain(value: object) -> str:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        raise TypeError(f"cannot send {type(value).__name__}")

    fields = asdict(identity)
    fields["membership"] = fields.pop("bootstrap")  # its name on the wire, which templates of earlier releases know
    # The type comes first: the agent knows the message by its first bytes, before it has parsed any.
    message = {
        "type": "identity",
        "random": base64.b64encode(os.urandom(64)).decode(),
        "cpus": cpus,
        "plugged": plugged,
        "identity": fields,
        "time": time.time(),
    }
    line = json.dumps(message, default=plain, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise Refused(f"the identity of {identity.hostname} has {len(line)} bytes, over {MAX_LINE}",
                      hint="are there very large files in the guests' configuration?")  # fmt: skip
    return line


def introduction(user: User) -> bytes:
    """The line that tells a VM of one more user, and the time."""
    message = {"type": "introduce", "user": asdict(user), "time": time.time()}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Makes reports of the bytes that come from a guest; holds at most one line of them."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[Report]:
        """Reports completed by `data`. Lines that are too long or make no sense are passed over."""
        found = []
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if self._skipping:
                self._skipping = False
            elif (report := _parse(line)) is not None:
                found.append(report)
        if len(self._rest) > MAX_LINE:
            self._rest.clear()
            self._skipping = True
        return found


def _parse(line: bytes) -> Report | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str) or raw["type"] not in _TYPES:
        return None
    reason = raw.get("reason")
    name = raw.get("name")
    text = ": ".join(_clean(part) for part in (name, reason) if isinstance(part, str))
    audit = MappingProxyType(_audit(raw.get("audit")))
    return Report(raw["type"], text, _stages(raw.get("stages")), audit, _count(raw.get("possible")))


def _count(raw: Any) -> int:
    return raw if type(raw) is int and 0 <= raw < 1 << 20 else 0  # a bool is no number


def _clean(text: str) -> str:
    """Text for operators' screens: bounded, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_TEXT])


def _stages(raw: Any) -> tuple[Stage, ...]:
    items = raw[:64] if isinstance(raw, list) else []
    pairs = [item for item in items if isinstance(item, list) and len(item) == 2]
    # Compared before it is converted: a number of JSON may be too large for a float.
    return tuple(
        Stage(_clean(name)[:40], float(seconds))
        for name, seconds in pairs
        if isinstance(name, str) and isinstance(seconds, int | float) and 0 <= seconds < 3600
    )


def _audit(raw: Any) -> dict[str, str | int]:
    if not isinstance(raw, dict):
        return {}
    kept = {k[:40]: v for k, v in list(raw.items())[:32] if isinstance(v, str | int)}
    return {k: _clean(v) if isinstance(v, str) else v for k, v in kept.items()}
