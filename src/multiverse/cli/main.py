"""The entry point of the command line."""

from __future__ import annotations

import os
import sys

import typer

from multiverse.cli.commands import (
    CLOSED,
    COMPLETE,
    INTERRUPTED,
    NO_ANSWER,
    NOT_DONE,
    SUPERSEDED,
    completed_words,
    for_arguments,
)
from multiverse.core.errors import MultiverseError, Superseded, Unknown, Unreachable
from multiverse.system import interrupts


def _say(text: str, style: str | None = None) -> None:
    from multiverse.cli.render import errors  # it imports much that no help needs

    errors.print(text, markup=False, style=style)


def main() -> None:
    """Entry point. Errors for operators go to stderr with their next step. The exit status is one of `EXIT_CODES`."""
    interrupts.handle()
    try:
        given = completed_words() if COMPLETE in os.environ else sys.argv[1:]
        status = for_arguments(given)(prog_name="multiverse", standalone_mode=False)
    except MultiverseError as error:
        _say(f"multiverse: {error.message}")
        if error.hint:
            _say(f"  next: {error.hint}", style="dim")
        # The service manager does not start a superseded daemon again: the two would take turns.
        status = SUPERSEDED if isinstance(error, Superseded) else NOT_DONE
        sys.exit(NO_ANSWER if isinstance(error, (Unreachable, Unknown)) else status)
    except typer.TyperException as error:  # wrong usage of the command line
        show = getattr(error, "show", None)  # as typer does, with the command that shows help
        show() if show is not None else _say(error.format_message())
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(CLOSED)
    if status == INTERRUPTED:  # typer, too, makes this of `KeyboardInterrupt`
        interrupts.ignore()
    sys.exit(status if isinstance(status, int) else 0)
