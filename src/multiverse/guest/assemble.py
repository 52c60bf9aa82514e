"""Assembles the modules of the guest agent into the one file that a guest runs.

In a guest, one file starts faster than a package, and the initial ramdisk can name it as the first process. The file is
made of the modules' text alone, without docstrings, comment lines and imports of `typing`, because a guest parses it at
each boot. The modules share one namespace there, so the assembler refuses code that would behave differently than in
the package.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "multiverse.guest.agent"
MAIN = "main"
_HEADER = f"""#!/usr/bin/python3 -IS
# The guest agent of Multiverse, assembled from the modules of {PACKAGE}. Change those, not this file.
from __future__ import annotations
"""


class AssemblyError(Exception):
    """The modules cannot be assembled. The text names the module and, where it can, the line."""


@dataclass(frozen=True)
class _Module:
    name: str
    imports: Mapping[str, str]  # of the standard library: statements of one name, and the name that each binds
    uses: Mapping[str, frozenset[str]]  # names that are imported, by other module of the package
    defines: frozenset[str]  # the other names that the module binds at its top level
    body: str  # its text without docstrings, comment lines and imports


@cache
def assemble() -> str:
    """The program text of the guest agent, made once in each process. Raises `AssemblyError`."""
    directory = Path(__file__).parent / "agent"
    paths = [path for path in directory.glob("*.py") if path.stem != "__init__"]
    return assemble_sources({path.stem: path.read_text() for path in paths})


def assemble_sources(sources: Mapping[str, str]) -> str:
    """Join modules, given by name, into one program that runs the module `main`. Raises `AssemblyError`. Each module
    may import modules and names of the standard library, and names of other modules of the package by `from
    multiverse.guest.agent.MODULE import NAME`, both at its top level and without renaming. Names of `typing` may be
    used in annotations only. No two modules may bind the same name to different objects, and no module may hide a
    builtin."""
    modules = {name: _take_apart(name, sources[name]) for name in sorted(sources)}
    if MAIN not in modules:
        raise AssemblyError(f"there is no module {MAIN}")
    _check_uses(modules)
    _check_names(modules)
    imports = {statement for module in modules.values() for statement in module.imports}
    ordered = sorted(imports, key=lambda statement: (statement.startswith("from "), statement))
    parts = [f"\n# --- {name}.py\n{modules[name].body}\n" for name in _order(modules)]
    text = _HEADER + "".join(f"{statement}\n" for statement in ordered) + "".join(parts)
    compile(text, "agent.py", "exec", dont_inherit=True)
    return text


def _take_apart(name: str, text: str) -> _Module:
    tree = ast.parse(text, f"{name}.py")
    imports: dict[str, str] = {}
    uses: dict[str, frozenset[str]] = {}
    defines: set[str] = set()
    body: list[ast.stmt] = []
    future = False
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            defines |= set(_bound(statement))
            body.append(statement)
            continue
        source = _source_of(statement)
        if source == "__future__":
            future = True
        elif source == "typing":
            _check_annotations(name, tree, set(_imported_names(name, statement)))
        elif source.startswith(f"{PACKAGE}."):
            other = source.removeprefix(f"{PACKAGE}.")
            uses[other] = uses.get(other, frozenset()) | set(_imported_names(name, statement))
        else:
            imports |= _standard_imports(name, statement)
    if not future:
        raise AssemblyError(f"{name}.py must have `from __future__ import annotations`, as the assembled file has")
    return _Module(name, imports, uses, frozenset(defines), _text_of(name, body))


def _text_of(name: str, body: list[ast.stmt]) -> str:
    """The text of these statements without comments and docstrings. Imports below the top level are refused."""
    module = ast.Module(body, [])
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            raise AssemblyError(f"{_place(name, node)} is not at the top level")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)] or [ast.Pass()]
    return ast.unparse(module)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _source_of(statement: ast.Import | ast.ImportFrom) -> str:
    """The module that a `from` statement names; nothing for a relative one and for `import`."""
    return (statement.module or "") if isinstance(statement, ast.ImportFrom) and not statement.level else ""


def _imported_names(module: str, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The names that an import binds: those of the imported objects, or of the top-level packages."""
    for alias in statement.names:
        if alias.asname is not None or alias.name == "*":
            raise AssemblyError(f"{_place(module, statement)} renames what it imports, or imports everything")
        yield alias.name if isinstance(statement, ast.ImportFrom) else alias.name.partition(".")[0]


def _standard_imports(module: str, statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """An import of the standard library as statements of one name each, with the name that each binds."""
    if isinstance(statement, ast.ImportFrom):
        sources = [_source_of(statement)] * len(statement.names)
        statements = [f"from {statement.module} import {alias.name}" for alias in statement.names]
    else:
        sources = [alias.name for alias in statement.names]
        statements = [f"import {alias.name}" for alias in statement.names]
    for source in sources:
        if source.partition(".")[0] not in sys.stdlib_module_names:
            raise AssemblyError(
                f"{_place(module, statement)} names neither the standard library nor a module of {PACKAGE}"
            )
    return dict(zip(statements, _imported_names(module, statement), strict=True))


def _place(module: str, statement: ast.stmt) -> str:
    return f"{module}.py, line {statement.lineno}: `{ast.unparse(statement)}`"


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _check_annotations(name: str, tree: ast.Module, names: set[str]) -> None:
    """Refuse the use of `names` outside annotations, which Python does not evaluate in the assembled file."""
    annotations = [
        part
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
    ]
    allowed = {id(node) for part in annotations for node in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in allowed:
            raise AssemblyError(f"{name}.py, line {node.lineno} uses {node.id} of typing outside an annotation")


def _check_uses(modules: Mapping[str, _Module]) -> None:
    for module in modules.values():
        for source, names in module.uses.items():
            if source not in modules:
                raise AssemblyError(f"{module.name}.py imports from {source}.py, which does not exist")
            if absent := names - modules[source].defines:
                raise AssemblyError(f"{module.name}.py imports {', '.join(sorted(absent))}, not defined in {source}.py")


def _check_names(modules: Mapping[str, _Module]) -> None:
    """Refuse names that would get another meaning in the common namespace."""
    binder: dict[str, str] = {}
    for module in modules.values():
        bindings = [(name, statement) for statement, name in module.imports.items()]
        bindings += [(name, f"{module.name}.py") for name in sorted(module.defines)]
        for name, bound_by in bindings:
            if hasattr(builtins, name):
                raise AssemblyError(f"{module.name}.py binds {name}, which would hide the builtin in all modules")
            if binder.setdefault(name, bound_by) != bound_by:
                raise AssemblyError(f"{name} is bound by `{bound_by}` and by `{binder[name]}`")


def _order(modules: Mapping[str, _Module]) -> list[str]:
    """The modules' names, each after those that it uses, otherwise sorted; `main` is the last."""
    sorter = TopologicalSorter({name: sorted(modules[name].uses) for name in modules})
    sorter.add(MAIN, *(name for name in modules if name != MAIN))
    try:
        sorter.prepare()
    except CycleError as error:
        raise AssemblyError(f"modules import each other: {' -> '.join(error.args[1])}") from error
    ordered: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        ordered += ready
        sorter.done(*ready)
    return ordered
