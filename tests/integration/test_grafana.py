"""Each query of the board for Grafana, asked of a real Prometheus that reads a simulated site."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "packaging/grafana/multiverse.json"
WATCHED = 30.0
"""Seconds for which Prometheus reads the metrics before it is asked."""

MAY_BE_EMPTY = ("Effects that failed",)
"""Panels of what need not happen on a simulated site."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def queries() -> list[tuple[str, str]]:
    """The title of its panel and the expression of each query of the board."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has read the metrics of a simulated site for some time."""
    directory, site_port, port = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    config = (ROOT / "packaging/grafana/prometheus.yml").read_text()
    assert "127.0.0.1:8642" in config
    config = config.replace("127.0.0.1:8642", f"127.0.0.1:{site_port}").replace(
        "scrape_interval: 15s", "scrape_interval: 1s"
    )
    (directory / "prometheus.yml").write_text(config)
    words = ["--trouble", "--evictions", "--jobs", "12", "--hosts", "3", "--seconds", "10"]
    site = subprocess.Popen([sys.executable, "-m", "tests.integration.page_site", str(site_port), *words], cwd=ROOT)
    server = subprocess.Popen(
        ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not ask(url, "multiverse_phase_seconds_count{phase='reclaim'} > 0"):
            assert time.monotonic() < deadline, "no job has ended"
            time.sleep(1)
        time.sleep(WATCHED)
        yield url
    finally:
        for process in (server, site):
            process.terminate()
            process.wait(30)


def ask(url: str, expression: str) -> list[dict[str, Any]]:
    """The result of a query; empty while Prometheus does not answer. An expression that is wrong is an error."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30)
    except httpx.TransportError:
        return []
    if answer.status_code == 503:  # it starts
        return []
    document = answer.json()
    assert document["status"] == "success", (expression, document)
    return list(document["data"]["result"])


def test_each_query_of_the_board_finds_something(prometheus: str) -> None:
    assert len(queries()) >= 20
    for title, expression in queries():
        found = ask(prometheus, expression.replace("$__rate_interval", "20s"))
        assert found or title.startswith(MAY_BE_EMPTY), (title, expression)
        for one in found:
            float(one["value"][1])


def test_what_the_board_shows_is_what_happened(prometheus: str) -> None:
    def value(expression: str) -> float:
        (one,) = ask(prometheus, expression)
        return float(one["value"][1])

    started = value("sum(multiverse_phase_seconds_count{phase='start'})")
    assert 0 < value("histogram_quantile(0.5, sum by (le) (multiverse_phase_seconds_bucket{phase='start'}))") < 60
    assert value("sum(multiverse_events_total{of='attempt',event='runs'})") == started
    assert value("sum(multiverse_clones_total)") >= started
    assert value("sum(multiverse_host_usable{resource='cpus'})") == 32 + 24 + 16


def test_the_metrics_are_as_prometheus_wants_them(prometheus: str) -> None:
    targets = httpx.get(f"{prometheus}/api/v1/targets", timeout=30).json()["data"]["activeTargets"]
    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")]
