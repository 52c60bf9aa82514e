"""The site of the documentation in Debian's Chromium, opened from the file system: its looks, search, theme and old
anchors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from tests.browser import Browser, browser

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LOOKS = [(width, theme) for width in (420, 1400) for theme in ("light", "dark")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", made]
    subprocess.run(words, cwd=ROOT, check=True)
    return made.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """A page that in the end has complained of nothing, and has loaded files alone."""
    chromium.show_as(1400, 900)
    chromium.events.clear()
    yield chromium
    assert chromium.complaints() == []
    requests = [
        one["params"]["request"]["url"]
        for one in chromium.events
        if one.get("method", "").endswith("requestWillBeSent")
    ]
    assert requests
    assert not [url for url in requests if not url.startswith("file:")]


@pytest.mark.parametrize(("width", "theme"), LOOKS)
@pytest.mark.parametrize("name", ["index", "operate", "commands", "architecture"])
def test_axe_finds_nothing_and_nothing_is_cut_off(page: Browser, site: str, name: str, width: int, theme: str) -> None:
    page.show_as(width, 900, theme)
    page.open(f"{site}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
    page.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text() + "; 0")
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(one["id"], node["html"][:200]) for one in found["violations"] for node in one["nodes"]] == []


def test_the_search_finds_the_section_that_explains_a_key_and_goes_there(page: Browser, site: str) -> None:
    page.open(f"{site}/index.html")
    page.evaluate("document.getElementById('query').focus()")
    page.call("Input.insertText", text="save.before")
    titles = page.until("[...document.querySelectorAll('#results a')].map(one => one.textContent)")
    assert titles[0].startswith("At the time limit · Saved jobs")
    page.press("Enter")
    page.until("location.href.endsWith('/saved.html#at-the-time-limit') && document.readyState === 'complete'")


def test_the_search_says_that_nothing_is_found(page: Browser, site: str) -> None:
    page.open(f"{site}/index.html?q=nosuchword")
    page.until("document.getElementById('results').textContent === 'No section has all of these words.'")
    page.press("Escape")
    assert page.evaluate("document.getElementById('results').hidden")


def test_an_old_anchor_leads_to_its_section(page: Browser, site: str) -> None:
    page.open(f"{site}/operations.html#leased-hosts")
    page.until("location.href.endsWith('/leases.html#leased-hosts') && document.readyState === 'complete'")


def test_the_theme_is_chosen_by_a_button_and_kept(page: Browser, site: str) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.open(f"{site}/index.html")
    light = page.evaluate(background)
    page.evaluate("document.getElementById('theme').click()")
    dark = page.evaluate(background)
    page.open(f"{site}/users.html")
    assert page.evaluate(background) == dark != light
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(background) == light


def test_the_pages_are_behind_a_button_on_a_phone(page: Browser, site: str) -> None:
    page.show_as(420, 900)
    page.open(f"{site}/users.html")
    shown = "document.getElementById('pages').checkVisibility()"
    assert not page.evaluate(shown)
    page.evaluate("document.getElementById('menu').click()")
    assert page.evaluate(shown)
