"""For all tests: they assert behaviour, never time, and none sees how another has set up the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)
