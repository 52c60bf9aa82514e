"""libnftables in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse.host.network import Nft


def test_one_that_is_not_used_any_more_leaves_no_socket() -> None:
    try:
        Nft()
    except OSError as error:
        pytest.skip(str(error))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        Nft()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
