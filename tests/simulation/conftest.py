"""The controller's log says thousands of lines for each scenario; the journal in a failure's story says it better."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from multiverse.simulation.fuzz import hush


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    hush()
    yield
    structlog.configure(**before)
