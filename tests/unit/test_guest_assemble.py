"""The assembler joins the guest agent's modules into one program, and refuses those that would change their meaning."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.guest import assemble as assembler
from multiverse.guest.assemble import AssemblyError, assemble, assemble_sources

# The agent may import these modules and no others. Each one that is added makes every guest boot slower.
IMPORTS = {"base64", "ctypes", "errno", "fcntl", "gc", "json", "math", "os", "pwd", "re", "resource", "select",
           "signal", "socket", "struct", "sys", "time"}  # fmt: skip

FUTURE = "from __future__ import annotations\n"
MAIN = {"main": f"{FUTURE}def main() -> None: ...\n"}


def test_the_agent_is_assembled_into_a_script_that_compiles_and_imports_the_known_modules_only() -> None:
    text = assemble()
    assert text.startswith("#!/usr/bin/python3 -IS\n")
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imports if isinstance(node, ast.ImportFrom)] == ["__future__"]
    assert {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names} == IMPORTS
    assert text == assemble(), "the text depends on the modules only"


def test_the_agent_loads_no_module_with_a_random_state_and_none_of_ours(tmp_path: Path) -> None:
    """All clones would share such a state."""
    script = tmp_path / "agent.py"
    script.write_text(assemble())
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-IS", "-c", code, script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= IMPORTS
    assert not loaded & {"random", "tempfile", "uuid", "secrets", "multiverse", "hashlib", "mmap", "subprocess"}
    assert {name.partition(".")[0] for name in loaded} <= set(sys.stdlib_module_names) | {"__main__", "__mp_main__"}


def test_every_function_of_the_modules_is_in_the_assembled_program() -> None:
    def functions(text: str) -> list[str]:
        """The code of each function and method, without docstring."""
        found = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                code = "\n".join(ast.unparse(part) for part in body)
                found.append(f"{node.name}({ast.unparse(node.args)}): {code}")
        return found

    package = Path(assembler.__file__).parent / "agent"
    modules = [path.read_text() for path in package.glob("*.py")]
    expected = [function for text in modules for function in functions(text)]
    assert len(expected) > 50
    assert sorted(functions(assemble())) == sorted(expected)


def test_modules_come_after_those_that_they_use_and_main_comes_last() -> None:
    text = assemble_sources(
        {
            "a": f"{FUTURE}from multiverse.guest.agent.z import SIZE\nDOUBLE = 2 * SIZE\n",
            "main": f"{FUTURE}from multiverse.guest.agent.a import DOUBLE\nRESULT = DOUBLE\n",
            "z": f"{FUTURE}SIZE = 3\n",
            "b": f"{FUTURE}OTHER = 1\n",
        }
    )
    names: dict[str, object] = {}
    exec(text, names)
    assert names["RESULT"] == 6
    assert [line for line in text.splitlines() if line.startswith("# ---")][-1] == "# --- main.py"


def test_docstrings_and_comment_lines_are_left_out_and_strings_that_look_like_them_are_kept() -> None:
    source = f'''"""About the module."""

# ruff: noqa: PTH123

{FUTURE}
import os

TEXT = """first
# second
"""  # a remark


class Empty(Exception):
    """Only this."""


def main() -> str:
    """About the function."""
    # About the line.
    return os.sep + TEXT
'''
    text = assemble_sources({"main": source})
    for absent in ("About", "ruff"):
        assert absent not in text
    names: dict[str, object] = {}
    exec(text, names)
    assert names["TEXT"] == "first\n# second\n"
    assert callable(names["main"]) and names["main"]() == "/first\n# second\n"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import structlog\n", "structlog"),
        ("from multiverse.core.model import Identity\n", "multiverse.core.model"),
        ("import multiverse.guest.agent.main\n", "multiverse.guest.agent.main"),
        ("from multiverse.guest.agent import main\n", "multiverse.guest.agent"),
        ("from . import main\n", "a.py, line 2"),
        ("import os as system\n", "renames"),
        ("from os import *\n", "everything"),
        ("from multiverse.guest.agent.main import main as other\n", "renames"),
        ("from multiverse.guest.agent.absent import x\n", "absent.py"),
        ("from multiverse.guest.agent.main import absent\n", "absent"),
        ("def f() -> None:\n    import os\n", "line 3"),
        ("def open() -> None: ...\n", "open"),
        ("def main() -> None: ...\n", "main"),
        ("from typing import Any, cast\nx = cast('Any', 1)\n", "cast"),
        ("from multiverse.guest.agent.main import main\nfrom multiverse.guest.agent.b import X\n", "each other"),
    ],
)
def test_modules_that_would_change_their_meaning_are_refused(source: str, named: str) -> None:
    others = {"b": f"{FUTURE}from multiverse.guest.agent.a import Y\nX = 1\n"} if "agent.b" in source else {}
    if others:
        source += "Y = 1\n"
    with pytest.raises(AssemblyError) as refused:
        assemble_sources({**MAIN, **others, "a": FUTURE + source})
    assert named in str(refused.value)


def test_a_name_that_two_modules_bind_is_refused_and_both_are_named() -> None:
    with pytest.raises(AssemblyError) as refused:
        assemble_sources({**MAIN, "a": f"{FUTURE}_state = 1\n", "b": f"{FUTURE}_state = 2\n"})
    assert "_state" in str(refused.value) and "a.py" in str(refused.value) and "b.py" in str(refused.value)


def test_a_name_that_an_import_of_another_module_binds_is_refused() -> None:
    with pytest.raises(AssemblyError, match="signal"):
        assemble_sources({**MAIN, "a": f"{FUTURE}import signal\n", "b": f"{FUTURE}signal = 2\n"})


def test_a_module_that_evaluates_its_annotations_is_refused() -> None:
    with pytest.raises(AssemblyError, match="__future__"):
        assemble_sources({"main": "def main() -> None: ...\n"})


def test_names_of_typing_are_allowed_in_annotations_of_the_modules() -> None:
    source = f"{FUTURE}from typing import Any\nx: dict[str, Any] = {{}}\ndef main(y: Any) -> list[Any]: return [y]\n"
    text = assemble_sources({"main": source})
    assert "import typing" not in text and "from typing" not in text
