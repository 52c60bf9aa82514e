"""The web page in Debian's Chromium, on a simulated site: what it shows, its address, the keyboard, and axe."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, browser

pytestmark = pytest.mark.integration

SIZES = {"phone": (360, 740), "laptop": (1280, 800), "4K": (3840, 2160)}
ROOT = Path(__file__).parents[2]
STILL = "[...document.querySelectorAll('*')].filter(one => one.draw).forEach(one => { one.draw = () => {}; })"
"""The page draws nothing anew from now on. axe measures one element after the other, which takes a second, and would
measure some that are no longer shown."""


class Network:
    """A network namespace with a loopback interface alone: Chromium drops its connections whenever an interface of its
    machine comes or goes, as those of labs do. `inside` are the words that start a command in it."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"up\n"
        self.inside = ("nsenter", "--net", "--target", str(self.holder.pid), "--")

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


class Site:
    """A simulated site with its page at `url`, in a process of its own."""

    def __init__(self, network: Network, port: int, *words: str) -> None:
        self.url = f"http://127.0.0.1:{port}/"
        self.process = subprocess.Popen(
            [*network.inside, sys.executable, "-m", "tests.integration.page_site", str(port), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"served\n"

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with contextlib.closing(Network()) as made:
        yield made


@pytest.fixture(scope="module")
def site(network: Network) -> Iterator[Site]:
    made = Site(network, 8001, "--trouble", "--moves", "--jobs", "30", "--hosts", "5", "--seconds", "25")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def chromium(network: Network) -> Iterator[Browser]:
    with browser(*network.inside) as one:
        yield one


def snapshot(page: Browser) -> dict[str, Any]:
    return dict(page.evaluate("fetch('snapshot').then(answer => answer.json())"))


@pytest.fixture
def page(chromium: Browser, site: Site) -> Iterator[Browser]:
    """The page as it opens; in the end it has complained of nothing."""
    chromium.show_as(*SIZES["laptop"])
    chromium.events.clear()
    chromium.open(site.url)
    chromium.until("document.querySelectorAll('.vm').length >= 3 && document.querySelectorAll('.job').length >= 3")
    chromium.until("document.querySelectorAll('.alert').length >= 1")
    yield chromium
    assert chromium.complaints() == []


def test_hosts_with_their_vms_jobs_with_reasons_and_alerts_with_remedies_are_shown(page: Browser, site: Site) -> None:
    page.until("document.querySelectorAll('.vm.running').length > 0")
    text = page.text()
    for words in (
        "node01",
        "CPUs free",
        "no host has image cuda-12",
        "multiverse image build",
        "from submission to start",
    ):
        assert words in text
    known = {vm["name"] for vm in snapshot(page)["vms"]}
    shown = page.evaluate("[...document.querySelectorAll('.vm')].map(e => e.getAttribute('aria-label'))")
    assert shown
    assert all(label.startswith("VM mvaurora-") and "CPU" in label for label in shown)
    assert known


def test_vms_come_and_go_on_the_page(page: Browser, site: Site) -> None:
    names = "[...document.querySelectorAll('.vm:not(.gone)')].map(e => e.title.split(':')[0]).join()"
    before = set(page.evaluate(names).split(","))
    page.until(f"{names}.split(',').some(name => !{json.dumps(sorted(before))}.includes(name))")
    page.until(f"!{json.dumps(sorted(before))}.every(name => {names}.split(',').includes(name))", 120)


def test_a_vm_that_moves_is_shown_at_both_its_hosts(page: Browser, site: Site) -> None:
    coming, aside = "document.querySelector('.vm.coming')", "document.querySelector('aside')"
    page.until(f"{coming}?.getAttribute('aria-label').includes(', moving, from node')")
    page.until(f"{coming} && ({coming}.click(), {aside}.innerText.includes('Moves to'))")
    page.open(site.url + "?stage=running")
    page.until("[...document.querySelectorAll('.job .reason')].some(e => / → node/.test(e.textContent))")
    name, host = page.until("fetch('snapshot').then(answer => answer.json()).then(all => all.vms.filter("
                            "vm => vm.state === 'moving').map(vm => [vm.job_id, vm.other_host])[0])")  # fmt: skip
    page.open(f"{site.url}?job={name}")
    says = f"{aside}.querySelector('.says')?.textContent"
    page.until(f"{says} && ({says}.includes(' moves from ') || {says}.includes('on {host}'))")
    page.until(f"!{says}.includes(' moves from ')")
    page.open(f"{site.url}?host={host}")
    page.until(f"{aside}.innerText.includes('Room kept for')")


def type_filter(page: Browser, text: str) -> None:
    page.evaluate(f"(e => (e.value = '{text}', e.dispatchEvent(new Event('input'))))(document.querySelector('input'))")


def test_what_users_choose_is_text(page: Browser) -> None:
    type_filter(page, "bold")
    page.until("document.querySelector('.job .name')?.textContent === '<b>not bold</b>'")
    assert page.evaluate("document.querySelectorAll('.job .name b').length") == 0


def test_the_address_is_the_state(page: Browser, site: Site) -> None:
    job = page.evaluate("document.querySelector('.job b').textContent")
    page.evaluate("document.querySelector('.job').click()")
    page.until("!document.querySelector('aside').hidden")
    assert page.evaluate("location.search") == f"?job={job}"
    page.evaluate("document.querySelector('.stage.running').click()")
    page.evaluate("document.querySelector('.theme').click()")
    address = page.evaluate("location.href")
    assert address.endswith(f"?stage=running&job={job}&theme=dark")
    page.open("about:blank")
    page.open(address)
    page.until(f"document.querySelector('aside h2')?.textContent === 'Job {job}'")
    assert page.evaluate("document.querySelector('.stage.running').getAttribute('aria-pressed')") == "true"
    page.until("[...document.querySelectorAll('.job .pill')].every(e => e.textContent === 'Running')")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(12, 18, 24)"


def test_back_undoes_a_selection(page: Browser) -> None:
    page.evaluate("document.querySelector('.host .name').click()")
    page.until("!document.querySelector('aside').hidden")
    page.evaluate("history.back()")
    page.until("document.querySelector('aside').hidden && location.search === ''")


def test_a_page_that_was_left_is_no_viewer_any_more(page: Browser, site: Site) -> None:
    for number in range(4):
        page.open(f"{site.url}?q={number}")
        page.until("document.querySelectorAll('.vm').length >= 3")
    metrics = "fetch('metrics').then(answer => answer.text())"
    page.until(f"{metrics}.then(text => /^multiverse_viewers 1(\\.0)?$/m.test(text))", 10)
    page.evaluate("history.back()")
    page.until("location.search === '?q=2' && document.querySelectorAll('.vm').length >= 3")
    page.until("document.querySelector('.live')?.textContent === 'live'")


def test_a_job_s_timeline_shows_where_its_time_went(page: Browser, site: Site) -> None:
    page.open(site.url + "?stage=running")
    page.until("document.querySelectorAll('.job .pill.running').length > 0")
    page.evaluate("document.querySelector('.job').click()")
    page.until("document.querySelectorAll('aside .legend li').length >= 4")
    text = page.evaluate("document.querySelector('aside').innerText")
    for words in ("Size", "Image", "cloning", "joining", "events", "multiverse timeline"):
        assert words in text


def test_a_job_that_waits_is_explained_with_the_hosts_that_were_considered(page: Browser, site: Site) -> None:
    page.open(site.url + "?stage=waiting&q=viz")
    page.until("document.querySelectorAll('.job').length > 0")
    page.evaluate("document.querySelector('.job').click()")
    page.until("document.querySelectorAll('aside .considered li').length > 0")
    assert "no host has image" in page.evaluate("document.querySelector('aside .says').textContent")


def test_all_of_it_can_be_done_with_the_keyboard(page: Browser) -> None:
    page.evaluate("document.querySelector('.list').focus()")
    for _ in range(3):
        page.press("ArrowDown")
    active = "document.getElementById(document.querySelector('.list').getAttribute('aria-activedescendant'))"
    third = page.evaluate(f"{active}.querySelector('b').textContent")
    page.press("Enter")
    page.until(f"document.querySelector('aside h2').textContent === 'Job {third}'")
    page.press("Escape")
    page.until("document.querySelector('aside').hidden")
    page.evaluate("document.querySelector('mv-hosts button[tabindex=\"0\"]').focus()")
    assert page.evaluate("document.querySelectorAll('mv-hosts button[tabindex=\"0\"]').length") == 1, "one stop of Tab"
    page.press("ArrowRight")
    page.press("Enter")
    page.until("!document.querySelector('aside').hidden")
    assert page.evaluate("location.search").startswith("?vm=")


def test_a_command_can_be_copied(page: Browser) -> None:
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.evaluate("document.querySelector('.alert .copy').click()")
    page.until("document.querySelector('.alert .copy').textContent === 'Copied'")
    assert page.evaluate("window.copied").startswith("multiverse image build")


LOOKS = [("phone", "light"), ("laptop", "dark")]
OTHER_LOOKS = [("phone", "dark"), ("laptop", "light"), ("4K", "light"), ("4K", "dark")]


@pytest.mark.parametrize(
    ("size", "theme"), [*LOOKS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHER_LOOKS)]
)
def test_axe_finds_nothing_and_nothing_is_cut_off(page: Browser, site: Site, size: str, theme: str) -> None:
    page.show_as(*SIZES[size], theme)
    for address in ("", "?host=node01", f"?job={snapshot(page)['jobs'][-1]['job_id']}"):
        page.open(site.url + address)
        page.until("document.querySelectorAll('.vm').length >= 3 && document.querySelectorAll('.alert').length >= 1")
        page.until(
            "!location.search.includes('job=') || ['/timeline/', '/explain/'].every(asked =>"
            " performance.getEntriesByType('resource').some(one => one.name.includes(asked)))"
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
        assert problems(page) == [], (size, theme, address)


def problems(page: Browser) -> list[tuple[str, str, str]]:
    """What axe finds on a page, which draws nothing anew from now on."""
    page.evaluate(STILL)
    page.until("document.getAnimations().every(one => one.playState !== 'running')")
    page.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text() + "; 0")
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    return [
        (one["id"], node["html"][:200], node.get("failureSummary", "")[:300])
        for one in found["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.parametrize(("size", "theme"), [LOOKS[0], pytest.param(*LOOKS[1], marks=pytest.mark.slow)])
def test_evictions_are_shown_with_their_causes_and_what_a_limit_holds_back(
    chromium: Browser, network: Network, size: str, theme: str
) -> None:
    site = Site(network, 8004, "--evictions", "--jobs", "30", "--hosts", "4", "--seconds", "60")
    try:
        chromium.show_as(*SIZES[size], theme)
        chromium.events.clear()
        chromium.open(site.url)
        pills = "[...document.querySelectorAll('.leaving .pill')].map(e => e.textContent)"
        chromium.until(f"{pills}.includes('Held back') && {pills}.some(text => text !== 'Held back')", 60)
        assert "rebalance.at_once" in chromium.text()
        chromium.until(
            "document.querySelector('.evictions .part')?.innerText.match(/(urgent jobs|drained hosts) [1-9]/)"
        )
        assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
        assert problems(chromium) == []
        chromium.open(f"{site.url}?job={evicted(chromium)}")
        chromium.until(
            "[...document.querySelectorAll('aside summary')].some(e => e.textContent.startsWith('Evicted '))"
        )
        assert chromium.complaints() == []
    finally:
        site.end()


def evicted(page: Browser) -> str:
    """A job that was evicted."""
    return str(page.until("fetch('snapshot').then(answer => answer.json()).then(all => all.jobs.find("
                          "job => job.evictions.length)?.job_id)"))  # fmt: skip


def test_five_thousand_jobs_are_a_list_of_a_few_elements(chromium: Browser, network: Network) -> None:
    site = Site(network, 8002, "--blocked", "--jobs", "5000", "--vms", "500")
    try:
        chromium.show_as(*SIZES["laptop"])
        chromium.events.clear()
        chromium.open(site.url)
        chromium.until("document.querySelectorAll('.vm').length >= 490")
        chromium.until("document.querySelector('mv-jobs .hint').textContent.startsWith('5,')")
        assert chromium.evaluate("document.querySelectorAll('.job').length") < 60
        chromium.evaluate("document.querySelector('.list').focus()")
        chromium.press("End")
        chromium.until(
            "(e => e && e.getAttribute('aria-posinset') === e.getAttribute('aria-setsize'))"
            "(document.querySelector('.job.active'))"
        )

        assert chromium.evaluate("document.querySelectorAll('.job').length") < 60
        type_filter(chromium, "4321")
        chromium.until("[...document.querySelectorAll('.job b')].some(e => e.textContent === '4321')")
        assert chromium.complaints() == []
    finally:
        site.end()


@pytest.mark.slow
def test_a_viewer_is_told_when_the_controller_is_gone_and_comes_back_by_itself(
    chromium: Browser, network: Network
) -> None:
    site = Site(network, 8003, "--jobs", "5", "--hosts", "1")
    try:
        chromium.show_as(*SIZES["laptop"])
        chromium.open(site.url)
        chromium.until("document.querySelector('.live')?.textContent === 'live'")
    finally:
        site.end()
    chromium.until("document.querySelector('.live').textContent.startsWith('not connected')")
    chromium.events.clear()  # failed requests are as they should be
