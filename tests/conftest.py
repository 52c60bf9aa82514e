"""For all tests: they assert behaviour, never time, and none sees how another has set up the log or the umask."""

from __future__ import annotations

import os
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


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    """The daemon and the agent set one for their process, which is that of the tests that start them in it."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
