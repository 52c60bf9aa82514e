"""The core stays readable: short functions, and machines that are built alike."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import multiverse.core
from multiverse.controller import loop
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.host import KnownHost
from multiverse.core.model.job import Attempt, Lease
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, Template, Vm

CORE = Path(multiverse.core.__file__).parent


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(CORE.rglob("*.py")):
        yield str(path.relative_to(CORE)), path.read_text()


def test_no_function_of_the_core_is_longer_than_60_lines() -> None:
    functions = [
        (name, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for name, text in modules()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 100
    assert [one for one in functions if one[2] > 60] == []


def test_the_planner_fits_on_one_screen() -> None:
    source = (CORE / "planner.py").read_text()
    (plan,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "plan"]
    assert (plan.end_lineno or 0) - plan.lineno < 40 and len(source.splitlines()) < 120


def test_each_state_machine_has_its_table_steps_and_effect_in_this_order() -> None:
    for machine in ("attempt", "vm", "offer", "template"):
        text = (CORE / "machines" / f"{machine}.py").read_text()
        table, step, effect = (
            text.index(what) for what in ("# --- table", "def step_", f"\n{machine.upper()}_EFFECTS")
        )
        assert table < step < effect, machine


ROWS = {"attempt": Attempt, "vm": Vm, "offer": Offer, "template": Template, "host": KnownHost, "lease": Lease,
        "saved": Saved}  # fmt: skip
STATES = {"A": "attempt", "V": "vm", "O": "offer", "T": "template", "H": "host", "L": "lease", "S": "saved"}
"""The kind of row that has these states, by what each machine calls its own, and by the names of the states' types."""
HALVES = {"checkpoint": "saved", "sleep": "vm"}
"""Modules that are a part of another one's machine."""
STATES |= {f"{(row.__name__ if kind != 'host' else 'Host')}State": kind for kind, row in ROWS.items()}


def states_given(text: str) -> Iterator[tuple[str, int]]:
    """The kinds of rows to whose state a call gives a value, each with the line. Any value but one of a named type is
    of the kind that is empty."""
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        for given in (keyword.value for keyword in call.keywords if keyword.arg == "state"):
            names = {node.id for node in ast.walk(given) if isinstance(node, ast.Name)}
            yield from ((STATES[name], call.lineno) for name in sorted(names & STATES.keys()))
            if not names & STATES.keys():
                yield "", call.lineno


def test_no_module_but_its_machine_gives_a_row_a_state() -> None:
    found = {name: list(states_given(text)) for name, text in modules()}
    assert {name for name, given in found.items() if given} == {f"machines/{kind}.py" for kind in (*ROWS, *HALVES)}
    for kind in ROWS:
        others = [line for of, line in found[f"machines/{kind}.py"] if of not in ("", kind)]
        assert not others, f"machines/{kind}.py gives other rows a state in the lines {others}"
    for half, kind in HALVES.items():
        assert {of for of, _ in found[f"machines/{half}.py"]} == {kind}, f"it is another half of the machine `{kind}`"


def test_changes_are_made_by_machines_and_those_without_a_state_by_two_modules_below_them() -> None:
    makers = {
        name
        for name, text in modules()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Change"
    }
    assert makers == {"avoidance.py", "state.py", *(f"machines/{kind}.py" for kind in (*ROWS, *HALVES))}


def test_a_new_row_is_in_a_state_in_which_its_machine_lets_one_begin() -> None:
    for kind, row in ROWS.items():
        (state,) = [field.default for field in fields(row) if field.name == "state"]
        assert None in {one.source for one in TABLES[kind] if one.target == state}, kind


def test_the_controllers_loop_names_no_state_and_no_effect() -> None:
    named = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(Path(loop.__file__).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper()
    }
    assert {name for name in named if name.split(".")[0] in {*STATES, "EffectKind", "Event"}} == set()
    assert "Awaiting.AT_ONCE" in named, "it is the loop that is looked at"
