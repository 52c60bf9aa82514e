"""How a lab runs `multiverse`."""

from __future__ import annotations

import sys
from pathlib import Path


def multiverse(*words: str) -> list[str]:
    """The `multiverse` of this process's Python, with these arguments."""
    program = Path(sys.executable).with_name("multiverse")
    argv = [str(program)] if program.exists() else [sys.executable, "-c", "import multiverse.cli.main as m; m.main()"]
    return [*argv, *words]
