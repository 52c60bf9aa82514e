"""The control groups of a lab's hosts, on directories that stand for the kernel's, and how long a lab waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse.core.errors import Refused
from multiverse.host.cgroups import inherit_cpuset
from multiverse_lab.lab.hosts.control_groups import join_daemons_of
from multiverse_lab.lab.service import PATIENCE, patience


def _group(root: Path, version: int, controllers: str = "cpuset memory") -> Path:
    root.mkdir()
    if version == 2:
        (root / "cgroup.controllers").write_text(controllers)
    (root / "cpuset.cpus").write_text("\n")
    return root


def test_a_group_of_version_2_is_below_the_uppermost_which_has_no_cpus(tmp_path: Path) -> None:
    """Also a lab's: it had no control groups there."""
    inherit_cpuset(_group(tmp_path / "lab", 2))
    assert (tmp_path / "lab/cpuset.cpus").read_text() == "\n"


def test_on_version_2_slurmd_finds_a_slice_with_all_controllers_as_systemd_makes_it(tmp_path: Path) -> None:
    root = _group(tmp_path / "mvp1", 2)
    (root / "system.slice").mkdir()
    (root / "system.slice" / "cgroup.controllers").write_text("cpuset memory")
    join_daemons_of(root)
    assert (root / "system/cgroup.procs").read_text() == "0"
    for group in (root, root / "system.slice"):
        assert (group / "cgroup.subtree_control").read_text() == "+cpuset +memory"


def test_on_version_1_there_is_no_slice(tmp_path: Path) -> None:
    join_daemons_of(_group(tmp_path / "mvp1", 1))
    assert [each.name for each in (tmp_path / "mvp1").glob("*/")] == ["system"]


@pytest.mark.parametrize("given", ["0", "0.5", "nan", "many", "101", ""])
def test_a_patience_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(PATIENCE, given)
    with pytest.raises(Refused, match="from 1 to 100"):
        patience()


def test_a_lab_waits_as_much_longer_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATIENCE, raising=False)
    assert patience() == 1
    monkeypatch.setenv(PATIENCE, "10")
    assert patience() == 10
