"""The documentation agrees with the code, as far as that can be checked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.options import GROUPS, JOBS

ROOT = Path(__file__).parent.parent.parent
DECISIONS = ROOT / "docs/decisions"


def test_the_diagrams_are_drawn_from_the_tables() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/lifecycle", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_of_options_is_generated_from_its_tests() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/options", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_generated_from_the_commands_and_the_api_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/commands", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_generated_from_the_settings_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/settings", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_installation_says_on_which_machine_it_is_typed() -> None:
    """test_machines.py follows these; those of pip are followed by test_site.py."""
    by_packages = (ROOT / "docs/install.md").read_text().partition("## With pip")[0]
    first_lines = re.findall(r"^```sh\n(.*)\n", by_packages, re.M)
    assert len(first_lines) > 10
    assert {*first_lines} == {"# on ctl1", "# on ctl1, as ada", "# on n2"}


def test_each_module_with_slow_tests_belongs_to_one_group_which_the_page_shows() -> None:
    code = {"__name__": "slow", "__file__": str(ROOT / "scripts/slow")}
    exec(compile((ROOT / "scripts/slow").read_text(), "scripts/slow", "exec"), code)
    groups, others = code["GROUPS"], code["OTHERS"]
    listed = [module for modules in groups.values() for module in modules]
    texts = {path: path.read_text() for path in (ROOT / "tests").glob("*/test_*.py") if path != Path(__file__)}
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.stem for path, text in texts.items() if "mark.slow" in text or "one_in(" in text}
    assert list(code["rows"]((ROOT / "docs/testing.md").read_text())) == [*groups, *others]


def test_every_manual_page_can_be_formatted() -> None:
    pages = sorted((ROOT / "docs/man").glob("*.1"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text()
        assert text.startswith(".TH ") and ".SH NAME" in text and '.SH "EXIT STATUS"' in text
        requests = {line.split()[0] for line in text.splitlines() if line.startswith(".")}
        assert requests <= {".TH", ".SH", ".TP", ".nf", ".fi"}, page.name


def test_the_manual_page_of_the_settings_has_every_table_and_can_be_formatted() -> None:
    text = (ROOT / "docs/man5/multiverse.toml.5").read_text()
    assert text.startswith('.TH "MULTIVERSE.TOML" "5"') and '.SH "[host]"' in text and '.SH "[[hosts]]"' in text
    requests = {line.split()[0] for line in text.splitlines() if line.startswith(".")}
    assert requests <= {".TH", ".SH", ".TP", ".PP", ".br", ".nf", ".fi", ".nh", ".ad"}


def test_each_row_of_the_page_of_options_has_a_test() -> None:
    names = ("options", "hosts", "save_command", "saved_trouble")
    files = (ROOT / f"tests/integration/test_{name}.py" for name in names)
    tests = set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files)))
    for row in (row for group in GROUPS for row in group.rows):
        assert bool(row.test) + bool(row.command) + bool(row.job) == 1, row.names
        assert not row.test or row.test in tests, row.names
        assert not row.job or (row.job in JOBS and row.output_lines), row.names


def test_a_jobs_life_names_what_is_there_and_needs_at_most_35_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    life = page.partition("## A job's life, file by file\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in life.splitlines() if line.startswith("| ")][1:]
    files: list[str] = []
    for step, named, names in rows:
        found = re.findall(r"(\d+) `([^`]+)`", named)
        assert [int(number) for number, _ in found] == list(range(len(files) + 1, len(files) + len(found) + 1)), step
        files += [file for _, file in found]
        again = [files[int(number) - 1] for number in re.findall(r"\b(\d+)\b(?! `)", named)]
        texts = "".join((ROOT / "src/multiverse" / file).read_text() for file in [*again, *(file for _, file in found)])
        for name in re.findall(r"`([\w.]+)`", names):
            last = name.rpartition(".")[2]
            assert re.search(rf"\b(class|def|function) (\w+\.)?{last}\b", texts), (
                f"{name} is not in the files of: {step}"
            )
    assert len(files) == len(set(files)) <= 35


def test_links_between_pages_have_a_target() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_link_to_a_decision_resolves_with_its_anchor() -> None:
    pages = {page.resolve(): page.read_text() for page in DECISIONS.glob("*.md")}
    anchors = {page: set(re.findall(r'<a id="([^"]+)"></a>', text)) for page, text in pages.items()}
    found = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text()):
            target = (page.parent / name).resolve() if name else page.resolve()
            if target.parent == DECISIONS:
                found += 1
                assert anchor in anchors.get(target, ()), f"{page.relative_to(ROOT)}: {name}#{anchor}"
    for path in code_that_names_decisions():
        for name, anchor in re.findall(r"docs/decisions/([\w-]+\.md)(?:#(\w+))?", path.read_text()):
            found += 1
            assert not anchor or anchor in anchors[DECISIONS / name], f"{path.relative_to(ROOT)}: {name}#{anchor}"
            assert (DECISIONS / name).exists(), f"{path.relative_to(ROOT)}: {name}"
    assert found > 300


def test_the_index_of_decisions_finds_each_page_and_each_number() -> None:
    index = (DECISIONS / "index.md").read_text()
    pages = {page.name: page.read_text() for page in DECISIONS.glob("[a-z]*.md") if page.name != "index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == set(pages)
    sections = {int(number): page for page, text in pages.items() for number in re.findall(r'<a id="d(\d{4})">', text)}
    listed = re.findall(r"^\| (\d+) \| \[.*\]\(([\w-]+\.md)#d(\d{4})\) \|", index, re.M)
    assert {int(number): page for number, page, anchor in listed if int(number) == int(anchor)} == sections
    unfolded = {int(page.name[:4]) for page in DECISIONS.glob("[0-9]*.md")}  # new, in no page yet
    for path in [*code_that_names_decisions(), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for numbers in re.findall(r"\b[Dd]ecisions? (\d+(?:(?:,| and| to)\s+\d+)*)", path.read_text()):
            assert {int(number) for number in re.findall(r"\d+", numbers)} <= {*sections, *unfolded}, (path, numbers)


def test_every_page_of_decisions_says_its_status() -> None:
    for page in DECISIONS.glob("[a-z]*.md"):
        if page.name != "index.md":
            assert re.match(r"# .+\n\n\*\*Status:\*\* (in force|replaced by)", page.read_text()), page.name


def code_that_names_decisions() -> list[Path]:
    folders = ("src", "tests", "scripts", "spank", "packaging")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in files if path.suffix in {".py", ".c", ".h", ".lua", ".sh", ".toml", ".md", ""}]


def test_every_command_that_the_pages_name_exists() -> None:
    from typer.main import get_command

    from multiverse.cli.commands import build

    command = get_command(build())
    verbs = command.commands  # type: ignore[attr-defined]
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for verb, sub in re.findall(r"`?multiverse ([a-z]+)(?: ([a-z][a-z-]*))?", page.read_text()):
            if verb in verbs and hasattr(verbs[verb], "commands") and sub:
                assert sub in verbs[verb].commands, f"{page.name}: multiverse {verb} {sub}"


def test_commands_have_the_options_that_the_pages_give_them() -> None:
    from typer.main import get_command

    from multiverse.cli.commands import build

    command: Any = get_command(build())
    seen = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"(['\"])[^'\"`\n]*\1", "TEXT", page.read_text())  # what it quotes has options of its own
        for line in re.findall(r"(?:^ *|`)(multiverse [^`#;|\n]*)", text, re.MULTILINE):
            node, names = command, {"--help"}
            for word in [*line.split()[1:], ""]:
                names |= {name for one in node.params for name in (*one.opts, *one.secondary_opts)}
                if (node := getattr(node, "commands", {}).get(word)) is None:
                    break
            given = re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)
            assert not set(given) - names, f"{page.name}: {line}"
            seen += len(given)
    assert seen > 100
