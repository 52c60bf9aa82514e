"""The log's bound on repeated warnings."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import pytest
import structlog
from structlog.typing import FilteringBoundLogger

from multiverse.cli.daemon import daemon
from multiverse.system.logs import LossyStream, RepeatLimiter


class Lines:
    """A log with the limiter, whose clock is set by the test."""

    def __init__(self, **options: int) -> None:
        self.now = 0.0
        self._file = io.StringIO()
        limiter = RepeatLimiter(seconds=600.0, clock=lambda: self.now, **options)
        self.log: FilteringBoundLogger = structlog.wrap_logger(
            structlog.PrintLogger(self._file),
            processors=[limiter, structlog.processors.KeyValueRenderer(sort_keys=True)],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.getvalue().splitlines())


def test_a_guest_that_repeats_itself_causes_one_line() -> None:
    lines = Lines()
    for _ in range(100_000):
        lines.log.warning("daemon ended in guest", vm="mv-1", reason="exit code 1")
    assert len(list(lines)) == 1


def test_the_next_line_after_a_while_tells_how_many_were_dropped() -> None:
    lines = Lines()
    for second in (0, 1, 2, 599, 600, 601):
        lines.now = second
        lines.log.warning("source is unknown", source="slurm", reason="timeout")
    first, second_line = lines
    assert "repeated" not in first and "repeated=3" in second_line


def test_a_guest_that_says_something_else_each_time_is_bounded_too() -> None:
    lines = Lines(lines=3)
    for number in range(1000):
        lines.log.warning("daemon ended in guest", vm="mv-1", reason=f"exit code {number}")
    assert len(list(lines)) == 3


def test_another_object_or_another_event_is_not_concerned() -> None:
    lines = Lines()
    for vm in ("mv-1", "mv-2"):
        for event in ("daemon ended in guest", "guest channel closed"):
            lines.log.warning(event, vm=vm, reason="the same")
            lines.log.warning(event, vm=vm, reason="the same")
    assert len(list(lines)) == 4


def test_information_is_not_limited() -> None:
    lines = Lines()
    for _ in range(3):
        lines.log.info("daemon started")
    assert len(list(lines)) == 3


def test_different_exceptions_of_one_object_are_all_logged() -> None:
    lines = Lines()
    for error in (ValueError("one"), ValueError("two"), ValueError("two")):
        try:
            raise error
        except ValueError:
            lines.log.exception("effect failed unexpectedly", key="vm 1")
    assert len(list(lines)) == 2


@pytest.mark.parametrize("objects", [1, 8])
def test_what_is_remembered_is_bounded(objects: int) -> None:
    lines = Lines(objects=objects)
    for turn in range(2):
        for number in range(100):
            lines.log.warning("effect failed", key=f"vm {number}", reason="x")
        assert len(list(lines)) == 100 * (turn + 1), "all but the last few were forgotten"


def test_the_daemon_logs_through_the_limiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def serve(settings: object, file: object) -> None:
        for _ in range(3):
            structlog.get_logger().warning("daemon ended in guest", vm="mv-1", reason="exit code 1")

    monkeypatch.setattr("multiverse.service.daemon.serve", serve)
    (tmp_path / "settings.toml").write_text("")
    try:
        daemon(tmp_path / "settings.toml", verbose=False)
    finally:
        structlog.reset_defaults()
    assert capfd.readouterr().err.count("daemon ended in guest") == 1


def test_a_line_that_cannot_be_written_is_dropped_and_the_next_one_is_not() -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115  (to close it fails, too: each write does, full(4))
    for _ in range(1000):
        print("a line", file=cast(TextIO, LossyStream(full)), flush=True)
    with suppress(OSError):
        full.close()
    kept = io.StringIO()
    print("a line", file=cast(TextIO, LossyStream(kept)), flush=True)
    assert kept.getvalue() == "a line\n"
