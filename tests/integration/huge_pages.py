"""Huge pages that are reserved for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

RESERVED = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """MiB that are reserved in huge pages for a test: enough for one VM."""
    before = RESERVED.read_text()
    wanted = int(before) + 256
    try:
        try:
            RESERVED.write_text(str(wanted))
        except OSError as error:
            pytest.skip(f"huge pages cannot be reserved here: {error}")
        if int(RESERVED.read_text()) < wanted:
            pytest.skip("this machine has no contiguous memory for 256 huge pages")
        yield 512
    finally:
        RESERVED.write_text(before)
