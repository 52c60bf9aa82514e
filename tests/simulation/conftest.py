"""Switches the controller's log off, which has thousands of lines for each scenario."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from multiverse_lab.simulation.fuzz import silence_logs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    silence_logs()
    yield
    structlog.configure(**before)
