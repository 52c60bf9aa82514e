"""The files of the web page: HTML, CSS and modules of JavaScript, as they are written. `service.web` serves them."""

from __future__ import annotations

from importlib.resources import files as resources

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types, by the end of a file's name."""


def files() -> dict[str, bytes]:
    """The content of each file, by its name."""
    return {
        one.name: one.read_bytes()
        for one in resources(__name__).iterdir()
        if one.is_file() and one.name.rpartition(".")[2] in TYPES
    }
