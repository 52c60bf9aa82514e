"""From a document of the API to its type."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


@cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(of)


def decode(of: type[T], document: Any) -> T:
    """The document as a value of type `of`, for example `decode(list[JobView], client.jobs())`. Fields that the type
    does not know are ignored, because a newer daemon may send more. Raises `pydantic.ValidationError` if a field is
    missing or of another type."""
    value: T = _adapter(of).validate_python(document)  # type: ignore[arg-type]  # a type is hashable
    return value
