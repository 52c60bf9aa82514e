"""`multiverse daemon --config FILE`: the controller with its API, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, TextIO, cast

import structlog
import typer

from multiverse.config import load
from multiverse.system.logs import LossyStream, RepeatLimiter


def daemon(
    config: Annotated[Path, typer.Option("--config", "-c", help="The settings, a TOML file.")] = Path(
        "/etc/multiverse/multiverse.toml"
    ),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Run the controller in the foreground. SIGTERM ends it and leaves VMs and jobs as they are."""
    settings = load(config)
    configure_log(verbose=verbose)
    from multiverse.service.daemon import serve  # imported late: it loads slowly, and only this command needs it

    asyncio.run(serve(settings))


def configure_log(*, verbose: bool) -> None:
    """Log to standard error, a line for each event."""
    structlog.configure(
        processors=[
            RepeatLimiter(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
