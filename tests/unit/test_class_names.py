"""No two classes have the same name, so that a name in a log, a trace or a discussion means one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"


def duplicates(root: Path) -> dict[str, list[str]]:
    """The files, relative to `root`, that define each class name that more than one file defines."""
    found = defaultdict(set)
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(root)))
    return {name: sorted(files) for name, files in sorted(found.items()) if len(files) > 1}


def test_no_two_modules_define_classes_of_the_same_name() -> None:
    assert (SOURCES / "multiverse/guest/agent").is_dir()
    assert duplicates(SOURCES) == {}


@pytest.mark.parametrize(
    "second", ["class Name: ...", "def make():\n    class Name: ...", "class O:\n  class Name: ..."]
)
def test_a_name_of_two_classes_is_found(tmp_path: Path, second: str) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "one.py").write_text("class Name: ...\nclass Other: ...\n")
    (tmp_path / "part/two.py").write_text(second)
    assert duplicates(tmp_path) == {"Name": ["one.py", "part/two.py"]}
