"""Limits of resources in a guest: those of a node, and of the memory that was plugged."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.guest.agent import resources

Raised = list[tuple[int, int, tuple[int, int]]]
"""What was set: the process (0: this one), the limit, its values."""


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Raised:
    found: Raised = []
    monkeypatch.setattr(resources.resource, "setrlimit", lambda number, values: found.append((0, number, values)))
    monkeypatch.setattr(resources.resource, "prlimit", lambda pid, number, values: found.append((pid, number, values)))
    monkeypatch.setattr(resources.resource, "getrlimit", lambda number: (764, 764))
    return found


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A guest that booted with 200 MiB, and sets how much it has now. Its kernel's files are in the directory."""
    kernel = {
        "threads-max": "1528",
        "watches": "8192",
        "tcp_mem": "2000\t3000\t4000",
        "tcp_rmem": "4096 131072 2000000",
    }
    for name, text in kernel.items():
        (tmp_path / name).write_text(f"{text}\n")
    upper = {"watches": 100_000, "tcp_rmem": 6 << 20}
    names = (*kernel, "absent")
    monkeypatch.setattr(resources, "KERNEL_LIMITS", tuple((f"{tmp_path}/{name}", upper.get(name, 0)) for name in names))
    has = [200]
    monkeypatch.setattr(resources, "usable_memory", lambda: has[0])
    monkeypatch.setattr(resources, "mount", lambda *words: (tmp_path / "mounted").write_text(repr(words)))
    resources.remember_limits()
    return lambda more: has.append(has.pop() + more)


def test_daemons_inherit_the_limits_of_a_node_and_mappings_may_exceed_the_memory(
    raised: Raised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [(f"{tmp_path}/{Path(path).name}", text) for path, text in resources.KERNEL_FILES]
    for path, _ in files[:1]:
        Path(path).touch()
    monkeypatch.setattr(resources, "KERNEL_FILES", files)
    resources.set_node_limits()
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raised == [
        (0, resource.RLIMIT_NOFILE, (131072, 131072)), (0, resource.RLIMIT_MEMLOCK, endless),
        (0, resource.RLIMIT_STACK, endless),
    ]  # fmt: skip
    assert (tmp_path / "overcommit_memory").read_text() == "1"


@pytest.mark.parametrize(("memory", "kept"), [(200, 1810), (2000, 5724)])
def test_the_kernel_keeps_no_more_memory_free_than_without_huge_pages(
    memory: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, str] = {}
    monkeypatch.setattr(resources, "usable_memory", lambda: memory)
    monkeypatch.setattr(resources, "write_kernel_file", written.__setitem__)
    resources.use_huge_pages()
    pages, least = "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/sys/vm/min_free_kbytes"
    assert list(written.items()) == [(pages, "always"), (least, str(kept))], "the first one sets the second one, too"


def test_limits_grow_with_the_memory_that_was_plugged(
    raised: Raised, plug: Callable[[int], None], tmp_path: Path
) -> None:
    plug(4000 - 200)
    resources.raise_process_limits([7, 8])
    assert {number for _, number, _ in raised} == {resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING}
    assert [pid for pid, number, _ in raised if number == resource.RLIMIT_NPROC] == [0, 7, 8]
    assert {values for *_, values in raised} == {(764 * 20, 764 * 20)}
    assert "size=50%" in (tmp_path / "mounted").read_text()
    resources.raise_kernel_limits()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found["threads-max"] == str(1528 * 20) and found["watches"] == "100000", "which has an upper end"
    assert found["tcp_mem"].split() == ["40000", "60000", "80000"]
    assert found["tcp_rmem"].split() == ["4096", "131072", str(6 << 20)], "only the largest one depends on the memory"


def test_nothing_is_done_where_nothing_was_plugged(raised: Raised, plug: Callable[[int], None], tmp_path: Path) -> None:
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    plug(0)
    resources.raise_process_limits([7])
    resources.raise_kernel_limits()
    assert not raised and before == {path: path.read_text() for path in tmp_path.iterdir()}


def test_a_limit_that_is_above_its_upper_end_is_not_lowered(
    plug: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp_rmem").write_text("4096 131072 33554432\n")  # as newer kernels have it
    resources.remember_limits()
    plug(100)
    resources.raise_kernel_limits()
    assert (tmp_path / "tcp_rmem").read_text().split()[-1] == "33554432"
