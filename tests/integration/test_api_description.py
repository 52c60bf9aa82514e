"""The API is as its description (OpenAPI) says, whatever it is asked: schemathesis makes the requests."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
EXAMPLES = 40


@pytest.fixture(scope="module")
def description() -> Iterator[Any]:
    """The description of the API of a simulated site."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.integration.page_site", str(port), "--api", "--jobs", "10", "--hosts", "3"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as site:
        assert site.stdout is not None
        assert site.stdout.readline() == b"served\n"
        try:
            yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
        finally:
            site.terminate()


NEVER_ENDS = "/events"


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_each_request_is_answered_as_described(description: Any, mode: GenerationMode) -> None:
    asked = []
    for found in description.get_all_operations():
        operation = found.ok()
        if operation.path != NEVER_ENDS:
            _ask(operation, mode)
            asked.append(operation.path)
    assert {"/status", "/jobs", "/timeline/{job}", "/hosts/{verb}", "/prune", "/snapshot"} <= set(asked)


def _ask(operation: Any, mode: GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:
        pass  # nothing that could be asked of it would be wrong
