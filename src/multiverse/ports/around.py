"""A port all of whose calls go through one function: for traces, and for the faults of simulations."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

P = TypeVar("P")
T = TypeVar("T")
Make = Callable[..., Coroutine[Any, Any, Any]]

ABILITIES = frozenset({"offers", "submission", "parts", "leases", "overflow", "saving", "templates", "users", "saves",
                       "moves", "sleeps", "standing_in", "preempting"})  # fmt: skip
"""The attributes of ports that are ports themselves, or None."""


class PortCall(NamedTuple):
    """A call of a method."""

    method: str
    arguments: Mapping[str, Any]  # by the names of the parameters, in their order
    source: str = ""  # that is asked to observe; empty for other calls


class Through(Protocol):
    """Makes a call, which `make` does each time it is called, and returns its result."""

    def __call__(self, call: PortCall, make: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]: ...


def around(port: P, through: Through, besides: Collection[str] = ()) -> P:
    """The same port: its calls, and those of its abilities and sources, go through `through`; but for `besides`."""
    return cast(P, _Around(port, through, ABILITIES.difference(besides)))


class _Around:
    """Stands for a port. An ability and a source stay the same object for as long as the port's do."""

    def __init__(self, inner: Any, through: Through, abilities: frozenset[str]) -> None:
        self._inner, self._through, self._abilities = inner, through, abilities
        self._known: dict[str, _Around] = {}  # abilities, by their names
        self._sources: dict[Any, _Around] = {}
        self._signatures: dict[str, inspect.Signature] = {}  # of methods, which takes long to find out

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name == "sources":
            self._sources = {one: self._sources.get(one) or self._around(one) for one in value}
            return list(self._sources.values())
        if name in self._abilities and value is not None:
            if name not in self._known or self._known[name]._inner is not value:
                self._known[name] = self if value is self._inner else self._around(value)
            return self._known[name]
        return self._call(name, value) if inspect.iscoroutinefunction(value) else value

    def _around(self, port: object) -> _Around:
        return _Around(port, self._through, self._abilities)

    def _call(self, name: str, method: Make) -> Make:
        if name not in self._signatures:
            self._signatures[name] = inspect.signature(method)
        signature = self._signatures[name]
        # What observes and has hosts is a source.
        source = str(self._inner.name) if name == "observe" and hasattr(self._inner, "hosts") else ""

        async def call(*positional: Any, **named: Any) -> Any:
            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            return await self._through(PortCall(name, bound.arguments, source), lambda: method(*positional, **named))

        return call
