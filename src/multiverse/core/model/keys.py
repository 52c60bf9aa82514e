"""What names a row."""

from __future__ import annotations

from typing import Literal, NamedTuple

RowKind = Literal["attempt", "vm", "template"]


class Key(NamedTuple):
    """Names a row: an attempt by its number, a VM by its serial, a template by its number."""

    kind: RowKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"
