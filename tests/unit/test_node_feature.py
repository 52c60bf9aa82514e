"""The agent's part that keeps the feature of its node, with programs in the place of Slurm's commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from multiverse.agent.job_protocol import PROTOCOL
from multiverse.config import HostSettings, JobVmSettings, Settings, SlurmSettings
from multiverse.service.job_vms import NodeFeature

WORKS = "works"
HANGS = "exec sleep 60"


class Node:
    """`features` of a node in a file, and what the plugin says."""

    def __init__(self, place: Path) -> None:
        slurm = SlurmSettings(bin_dir=place, command_timeout=20.0)
        self.settings = Settings(slurm=slurm, host=HostSettings(name="n1"), job_vms=JobVmSettings(records=place / "r"))
        self._place, self._features = place, place / "features"
        self._features.write_text("gpu")
        self._program(
            "scontrol",
            f'echo "$*" >> {place}/said\n'
            f"f=$(cat {self._features})\n"
            '[ "$1" = show ] && echo "AvailableFeatures=$f ActiveFeatures=$f" && exit\n'
            f'echo "${{4#ActiveFeatures=}}" > {self._features}\n',
        )
        self.plugin(WORKS)

    def _program(self, name: str, script: str) -> None:
        path = self._place / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)

    def plugin(self, said: str) -> None:
        head = f"multiverse-plugin protocol={PROTOCOL} feature=job-vms records={self.settings.job_vms.records}"
        self._program("srun", HANGS if said == HANGS else f"echo '{head}'; echo 'multiverse-plugin {said}'\n")

    @property
    def features(self) -> str:
        return self._features.read_text().strip()

    def forget(self) -> None:
        self._features.write_text("gpu")

    def updates(self) -> int:
        return (self._place / "said").read_text().count("update NodeName=n1 ")


async def test_the_node_has_the_feature_as_long_as_the_plugin_works_and_each_reason_is_logged_once(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    feature = NodeFeature(node.settings)
    with capture_logs() as logs:
        for said, features in (
            (WORKS, "gpu,job-vms"),
            (WORKS, "gpu,job-vms"),
            ("no space", "gpu"),
            ("no space", "gpu"),
            (WORKS, "gpu,job-vms"),
        ):
            node.plugin(said)
            await feature.test()
            assert node.features == features
        node.forget()
        await feature.test()
        assert node.features == "gpu,job-vms"
    assert node.updates() == 4
    reasons = [log["reason"] for log in logs if log["log_level"] == "warning"]
    assert len(reasons) == 1 and "no space" in reasons[0]


@pytest.mark.parametrize("had", [True, False])
async def test_a_test_that_does_not_end_changes_nothing(tmp_path: Path, had: bool) -> None:
    node = Node(tmp_path)
    if had:
        await NodeFeature(node.settings).test()
    before, said = node.features, HANGS
    node.plugin(said)
    impatient = replace(node.settings, slurm=replace(node.settings.slurm, command_timeout=0.2))
    await NodeFeature(impatient).test()
    assert node.features == before == ("gpu,job-vms" if had else "gpu")
