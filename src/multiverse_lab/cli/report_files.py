"""Where a report goes: one HTML page, and the data of its figures as CSV files."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from multiverse.cli.render import console
from multiverse.core.errors import Refused
from multiverse.system import files

if TYPE_CHECKING:  # the simulator is an extra, and its imports must not delay other commands
    from multiverse_lab.bench.paper.page import PaperReport


def check_destinations(html: Path | None, csv: Path | None = None) -> None:
    """Raise `Refused` if a report cannot be written there. Called first, because a run takes up to an hour, and its
    figures are lost with it."""
    if html is not None and html.is_dir():
        raise Refused(f"{html} is a directory", hint=f"give a file: --html {html / 'report.html'}")
    if html is not None and not os.access(html.parent, os.W_OK | os.X_OK):
        raise Refused(f"nothing can be written in {html.parent}", hint="make that directory, or give another --html")
    if csv is not None and csv.exists() and not csv.is_dir():
        raise Refused(f"{csv} is no directory", hint="give a directory with --csv; it is made if there is none")


def command_here() -> str:
    """The command line of this process."""
    return shlex.join(["multiverse", *sys.argv[1:]])


def say_where(html: Path | None) -> None:
    if html is not None:
        console.print(f"The report is in {html}.", markup=False, soft_wrap=True)


def write_report(report: PaperReport, html: Path | None, csv: Path | None = None) -> None:
    from multiverse_lab.bench.paper.page import csv_files, page

    if html is not None:
        files.replace(html, page(report), mode=0o644)
    if csv is not None:
        csv.mkdir(parents=True, exist_ok=True)
        for name, text in csv_files(report).items():
            files.replace(csv / name, text, mode=0o644)
