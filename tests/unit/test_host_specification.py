"""A specification is whole: what is missing or makes no sense is refused, and the field is named."""

from __future__ import annotations

import json
import re

import pytest

from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import TemplateKey
from multiverse.host.manifest import Specification

RAW = {
    "name": "mva-1",
    "host": "h",
    "token": "t-0_9",
    "image": "slim",
    "kind": "instant",
    "size": {"cpus": 2, "memory": 512},
    "mac": "02:00:00:00:00:01",
    "address": "10.1.2.3/16",
    "bridge": "br0",
    "template": ["h", "slim", {"cpus": 1, "memory": 256}, ""],
}


def test_a_specification_is_read_from_json() -> None:
    found = Specification.from_json(json.dumps(RAW))
    assert found.kind is CloneKind.INSTANT and found.bare_address == "10.1.2.3"
    assert (found.size, found.template) == (Size(2, 512), TemplateKey("h", "slim", Size(1, 256)))
    assert found.spare is False


@pytest.mark.parametrize("field", ["name", "host", "token", "image", "kind", "size", "mac", "address", "bridge"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(Refused, match=field):
        Specification.from_json(json.dumps({key: value for key, value in RAW.items() if key != field}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", ""),
        ("token", "a/b"),
        ("token", "x" * 65),
        ("address", ""),
        ("address", "10.1.2.300/16"),
        ("mac", "02:00:00:00:00"),
        ("mac", "01:00:00:00:00:01"),
        ("mac", "02:00:00:00:00:0G"),
        ("kind", "auto"),
        ("kind", "twin"),
        ("size", {"cpus": 0, "memory": 256}),
        ("size", {"cpus": "2", "memory": 256}),
        ("bridge", "a/b"),
        ("spare", "yes"),
        ("novelty", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(Refused, match=re.escape(field)):
        Specification.from_json(json.dumps(RAW | {field: value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"mva-1"', "\ud800"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        Specification.from_json(text)
