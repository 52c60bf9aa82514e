"""The documentation as a site. `mkdocs build --strict` fails if a link or an anchor leads nowhere, or a page is not in
the navigation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS) for page in DOCS.rglob("*.md"))
KINDS = {"list_item_open": "<li>", "fence": "<pre>", "code_block": "<pre>", "table_open": "<table>"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", made]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return made


def html(site: Path, page: Path | str) -> str:
    return (site / page).with_suffix(".html").read_text()


def article(site: Path, page: Path) -> str:
    return html(site, page).partition("<main")[2].partition("<footer>")[0]


def test_each_page_is_there_as_html_and_as_plain_text(site: Path) -> None:
    assert len(PAGES) > 30
    for page in PAGES:
        first = (DOCS / page).read_text().partition("\n")[0]
        assert (site / page).with_suffix(".txt").read_text().startswith(first)
        assert "<h1" in article(site, page), page


def test_lists_code_and_tables_are_those_that_github_shows(site: Path) -> None:
    github = MarkdownIt("commonmark").enable("table")
    for page in PAGES:
        tokens = github.parse((DOCS / page).read_text())
        wanted = Counter(KINDS[one.type] for one in tokens if one.type in KINDS)
        diagrams = sum(one.type == "fence" and one.info == "mermaid" for one in tokens)  # are shown as tables
        wanted += Counter({"<table>": diagrams})
        wanted -= Counter({"<pre>": diagrams})
        found = Counter({kind: article(site, page).count(kind) for kind in KINDS.values()})
        assert +found == +wanted, page


def test_nothing_is_loaded_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)\"", page.read_text())
        assert len(loaded) >= 3
        assert not [one for one in loaded if "//" in one], page.name
    for name in ("style.css", "site.js"):
        assert not re.search(r"https?://|@import|url\(", (site / name).read_text()), name


def test_the_old_anchors_of_the_page_of_operations_lead_to_their_sections(site: Path) -> None:
    page = html(site, "operations.md")
    moved = dict(re.findall(r'<a id="([\w-]+)" class="moved"></a><a href="([^"]+)"', page))
    assert len(moved) > 50
    assert moved["web-page"] == "monitoring.html#web-page"
    assert moved["saved-jobs"] == "saved.html"
    assert moved["on-a-site"] == "install.html"
    assert moved["disk-1"] == "capacity.html#what-a-job-may-write"


def test_links_of_the_readme_lead_to_sections_that_are_there(site: Path) -> None:
    links = re.findall(r"\]\(docs/([\w/-]+\.md)(?:#([\w-]+))?\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for page, anchor in links:
        assert not anchor or f'id="{anchor}"' in html(site, page), f"{page}#{anchor}"


def test_pages_that_messages_and_comments_name_are_there() -> None:
    places = [ROOT / "Makefile", *(ROOT / "scripts").iterdir(), *(ROOT / "spank").glob("*.[ch]")]
    places += [path for folder in ("src", "tests", "packaging") for path in (ROOT / folder).rglob("*.*")]
    named = set()
    for path in places:
        if path.is_file() and path.suffix not in (".pyc", ".db", ".webp", ".zst"):
            named |= {(one, path) for one in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(errors="replace"))}
    assert len(named) > 10
    assert not [f"{path}: {one}" for one, path in named if not (ROOT / one).exists()]
