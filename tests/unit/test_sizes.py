"""Sizes on the command line: the same text is the same size for each command."""

from __future__ import annotations

import pytest

from multiverse.cli.arguments import mebibytes, parse_request
from multiverse.cli.hosts import compatible
from multiverse.core.errors import Refused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16G", 16384),
        ("512M", 512),
        ("800", 800),
        ("1T", 1 << 20),
        ("1TB", 1 << 20),
        ("2GiB", 2048),
        ("2048k", 2),
        ("1K", 1),
        ("1025K", 2),
        ("0", 0),
        (" 8g ", 8192),
    ],
)
def test_sizes_are_read_with_their_units_and_rounded_up(text: str, size: int) -> None:
    assert mebibytes(text) == size
    if size:
        assert parse_request(f"--mem='{text}'")["memory"] == size


@pytest.mark.parametrize("text", ["", "G", "8 G", "-1", "8Gx", "1.5G", "8X", "٣G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is no size"):
        mebibytes(text)
    with pytest.raises(Refused, match="--for"):
        parse_request(f"--mem='{text}'")
    with pytest.raises(Refused, match="is no size"):
        compatible(memory=text)


def test_a_vm_needs_memory() -> None:
    with pytest.raises(Refused, match="needs memory"):
        compatible(memory="0G")
