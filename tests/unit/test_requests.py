"""A request in sbatch's words, as `multiverse capacity --for` takes it."""

from __future__ import annotations

from typing import Any

import pytest

from multiverse.api import TrialRequest
from multiverse.cli.arguments import parse_request
from multiverse.core.errors import Refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--mem 8G", {"nodes": 1, "cpus": 1, "memory": 8192, "limit": None}),
        ("-N 2 -c 4 --mem=8G -t 30", {"nodes": 2, "cpus": 4, "memory": 8192, "limit": 1800.0}),
        ("-n 6 -N 2 --mem-per-cpu=100M", {"nodes": 2, "cpus": 3, "memory": 300}),
        ("-n 3 -N2 -c2 --mem 1T", {"nodes": 2, "cpus": 4, "memory": 1 << 20}),
        ("--mem 1000K --tmp 2G -t 1-12", {"memory": 1, "disk": 2048, "limit": 36 * 3600.0}),
        ("--mem 1 -t 1:30", {"limit": 90.0}),
        ("--mem 1 -t 2:00:30", {"limit": 7230.0}),
        ("--mem 1 -t 1-2:03:04", {"limit": 93784.0}),
        ("--mem 1 -t 1-2:03", {"limit": 93780.0}),
        ("--mem 1 -t UNLIMITED", {"limit": None}),
        ("--mem 1 -C stock", {"image": "stock"}),
        ("--mem 1 -C 'full&stock'", {"kind": "full", "image": "stock"}),
    ],
)
def test_what_sbatch_takes_is_read(text: str, expected: dict[str, Any]) -> None:
    found = parse_request(text)
    assert {key: found.get(key) for key in expected} == expected
    TrialRequest(**found)


@pytest.mark.parametrize(
    "text", ["", "-c 2", "-N 0 --mem 1", "-N x --mem 1", "--mem lots", "--mem 1 -t soon", "--gres=gpu --mem 1", "'",
             "--mem 1 --mem-per-cpu 1", "--mem 0"],
)  # fmt: skip
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_request(text)
    assert caught.value.message.startswith("--for: ") and "--mem=8G" in caught.value.hint
