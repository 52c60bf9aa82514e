"""The place where Prometheus reads an agent's metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multiverse.config import listening_address, parse
from multiverse.core.errors import Refused
from multiverse.core.model.usage import HostUsage, Usage, VmUsage
from multiverse.service import metrics
from multiverse.service.metrics import scraped

USAGE = Usage(15.0, 1.5, 2.0, 512.0, 600.0, 10.0, 20.0, 30.0, 40.0, None, 0.25)
HOSTS = {"h0": HostUsage(USAGE, {"mvt-1": VmUsage(12.5, 600.0, USAGE), "mvt-2": VmUsage(3.0, 100.0)})}


async def ask(where: str, request: bytes) -> bytes:
    if where.startswith("/"):
        reader, writer = await asyncio.open_unix_connection(where)
    else:
        reader, writer = await asyncio.open_connection(*where.rsplit(":", 1))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_figures_of_hosts_and_vms_are_metrics() -> None:
    families = {one.name: one for one in text_string_to_metric_families(metrics.text(metrics.of_usage(HOSTS)).decode())}
    values = {
        (sample.name, sample.labels.get("vm")): sample.value for one in families.values() for sample in one.samples
    }
    assert values["multiverse_host_cpus_used", None] == 1.5
    assert values["multiverse_vm_memory_used_bytes", "mvt-1"] == 512 * 2**20
    assert values["multiverse_vm_cpu_seconds_total", "mvt-1"] == 12.5
    assert values["multiverse_host_cpu_pressure", None] == 0.25
    assert not families["multiverse_host_memory_active_bytes"].samples, "unknown is not 0"
    assert not [name for name, vm in values if vm == "mvt-2"], "it has ended"


@pytest.mark.parametrize("unix", [True, False])
def test_metrics_are_read_and_nothing_else(tmp_path: Path, unix: bool, unused_tcp_port: int) -> None:
    where = str(tmp_path / "metrics.sock") if unix else f"127.0.0.1:{unused_tcp_port}"

    async def main() -> None:
        async with scraped(where, "agent.metrics", lambda: b"some 1\n"):
            answer = await ask(where, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK") and b"Content-Length: 7" in head and body == b"some 1\n"
            for other in (b"GET / HTTP/1.1\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n"):
                assert (await ask(where, other)).startswith(b"HTTP/1.1 404")
            assert await ask(where, b"GET /metrics " + b"x" * (3 * metrics.LONGEST_HEAD)) == b""

    asyncio.run(main())
    assert not (tmp_path / "metrics.sock").exists()


def test_whoever_says_nothing_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT", 0.2)
    where = str(tmp_path / "metrics.sock")

    async def main() -> None:
        async with scraped(where, "agent.metrics", lambda: b"some 1\n"):
            silent = [await asyncio.open_unix_connection(where) for _ in range(metrics.AT_ONCE)]
            for reader, writer in silent:
                assert await reader.read() == b""
                writer.close()
            assert (await ask(where, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


def test_a_place_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(Refused, match="192\\.0\\.2\\.1 port 9341"):
            async with scraped("192.0.2.1:9341", "agent.metrics", bytes):
                pass
        async with scraped("", "agent.metrics", bytes):
            pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9341", ("127.0.0.1", 9341)),
        ("[fd00::7]:9341", ("fd00::7", 9341)),
        ("fd00::7:9341", None),
        ("host:9341", None),
        ("127.0.0.1", None),
        ("127.0.0.1:0", None),
        (":9341", None),
    ],
)
def test_addresses_to_listen_at(text: str, address: tuple[str, int] | None) -> None:
    assert listening_address(text) == address


@pytest.mark.parametrize(
    ("agent", "key"),
    [({"metrics": "everywhere"}, "agent.metrics"), ({"sample": 0.01}, "agent.sample"), ({"sample": 60}, "agent.sample"),
     ({"sample": 0, "metrics": "127.0.0.1:9341"}, "agent.metrics")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(agent: dict[str, object], key: str) -> None:
    with pytest.raises(Refused, match=key):
        parse({"agent": agent}, "settings")
