"""The exit status of every command."""

from __future__ import annotations

DONE, NOT_DONE, USAGE, NO_ANSWER, SUPERSEDED, INTERRUPTED, CLOSED = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = {
    DONE: "It was done, and nothing is wrong.",
    NOT_DONE: (
        "It was refused or has failed, or what was asked for does not exist; for status, site check, doctor and"
        " audit: something is wrong that can be remedied."
    ),
    USAGE: "The command line is wrong.",
    NO_ANSWER: "The daemon could not be asked, or has not answered: it does not run, or may not be used.",
    SUPERSEDED: "Of multiverse daemon: another controller commands the site, so this one must not be started again.",
    INTERRUPTED: "It was interrupted (Ctrl-C, SIGTERM, SIGHUP). --watch ends so with 0.",
    CLOSED: "Its output was closed by the reader.",
}
