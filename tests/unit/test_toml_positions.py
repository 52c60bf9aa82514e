"""Lines of keys in TOML documents: by examples, and for documents of any form, compared with tomllib."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from multiverse.system.toml_positions import KeyPath, positions

DOCUMENT = """\
top = 1
# [not] a = "table"
[host]
cores = 4 # cores = 5
"quoted.key" = '''a
[no] # table'''
inline = { a = 1, b.c = [1, {d = 2}] }

[[hosts]]
nodes = "n[1-4]"
[[hosts]]
nodes = "m[1,2]"   # ] }
[hosts.more]
deep = [
  "a, b", # one
  'c',
  [1979-05-27 07:32:00, 2],
]
[a . "b"]
x.y.z = \"\"\"
q = 1 \\\"\"\"
\"\"\"\"\"
last = true
"""


def test_lines_in_a_document_of_all_forms() -> None:
    found = positions(DOCUMENT)
    lines = {
        ("top",): 1, ("host",): 3, ("host", "cores"): 4, ("host", "quoted.key"): 5,
        ("host", "inline", "b", "c", 1, "d"): 7,
        ("hosts",): 9, ("hosts", 0, "nodes"): 10, ("hosts", 1): 11, ("hosts", 1, "nodes"): 12, ("hosts", 1, "more"): 13,
        ("hosts", 1, "more", "deep"): 14, ("hosts", 1, "more", "deep", 1): 16, ("hosts", 1, "more", "deep", 2, 1): 17,
        ("a", "b", "x", "y", "z"): 20, ("a", "b", "last"): 23,
    }  # fmt: skip
    assert {path: found.get(path) for path in lines} == lines
    assert found.keys() == set(paths(tomllib.loads(DOCUMENT)))


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """All paths in a document as tomllib reads it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from paths(inner, (*path, key))


NAMES = st.text("abc_-1", min_size=1, max_size=3) | st.text(" .#=[]{}\"'\\aé\n", max_size=4)
TEXTS = st.text("ab #[]{}=,.'\"\\\n", max_size=8)
SCALARS = st.integers(-9, 9) | st.booleans() | TEXTS | st.sampled_from([1.5, -0.25])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=5)


class Writer:
    """Writes a document in forms that are drawn, and notes the line of each path."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.text, self.lines = draw, "", {}  # type: ignore[var-annotated]

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def write(self, text: str) -> None:
        self.text += text

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def blank(self) -> None:
        self.write(self.draw(st.sampled_from(["", "\n", "# a = 1\n", "  \n\t# [x]\n"])))

    def name(self, name: str) -> str:
        bare = name and name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
        if bare and self.chance():
            return name
        literal = "'" not in name and "\n" not in name
        return f"'{name}'" if literal and self.chance() else json.dumps(name)

    def string(self, text: str) -> str:
        forms = [json.dumps(text)]
        if "'" not in text and "\n" not in text:
            forms.append(f"'{text}'")
        if "'''" not in text and not text.endswith("'"):
            forms.append(f"'''\n{text}'''")
        escaped = text.replace("\\", "\\\\").replace('"""', '""\\"')
        forms.append(f'"""\n{escaped}"""')
        return str(self.draw(st.sampled_from(forms)))

    def value(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, list):
            self.write("[")
            for number, one in enumerate(value):
                self.blank()
                self.note((*path, number))
                self.value(one, (*path, number))
                self.write("," if number < len(value) - 1 or self.chance() else "")
            self.blank()
            self.write("]")
        elif isinstance(value, dict):
            self.write("{ ")
            for number, (key, one) in enumerate(value.items()):
                self.write(", " if number else "")
                self.pair(key, one, path)
            self.write(" }")
        else:
            self.write(self.string(value) if isinstance(value, str) else json.dumps(value))

    def pair(self, key: str, value: Any, path: KeyPath) -> None:
        self.note((*path, key))
        self.write(self.name(key))
        path = (*path, key)
        while isinstance(value, dict) and len(value) == 1 and self.chance():  # a dotted key
            ((key, value),) = value.items()
            self.note((*path, key))
            self.write(" . " + self.name(key))
            path = (*path, key)
        self.write(" = ")
        self.value(value, path)

    def table(self, table: dict[str, Any], path: KeyPath, heading: str = "") -> None:
        """Values before the tables in it, as TOML wants it."""
        below = []
        for key, value in table.items():
            if (isinstance(value, dict) and self.chance()) or (
                isinstance(value, list) and value and all(isinstance(one, dict) for one in value) and self.chance()
            ):
                below.append((key, value))
            else:
                self.blank()
                self.pair(key, value, path)
                self.write(self.draw(st.sampled_from(["\n", " # c\n", "\r\n"])))
        for key, value in below:
            name = f"{heading}.{self.name(key)}" if heading else self.name(key)
            for number, one in enumerate(value if isinstance(value, list) else [value]):
                inner = (*path, key, number) if isinstance(value, list) else (*path, key)
                self.blank()
                self.note((*path, key))
                self.note(inner)
                self.write(f"[[{name}]]\n" if isinstance(value, list) else f"[ {name} ]\n")
                self.table(one, inner, name)


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.data())
def test_every_path_is_found_in_the_line_where_it_was_written(document: dict[str, Any], data: st.DataObject) -> None:
    writer = Writer(data.draw)
    writer.table(document, ())
    assert tomllib.loads(writer.text) == document
    assert positions(writer.text) == writer.lines
