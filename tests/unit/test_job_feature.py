"""The feature of a node that takes jobs with VMs inside: the test of the plugin, and what slurmctld is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from multiverse.config import SlurmSettings
from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.drivers.slurm.command import Completed, SlurmCommands
from multiverse.drivers.slurm.job_vms import TEST, check_plugin, set_feature, why_not

EXPECTED = {"protocol": "1", "records": "/run/r"}
SAID = "multiverse-plugin protocol=1 feature=f records=/run/r\nmultiverse-plugin "


class Slurm:
    """A node with features, and what `srun --help` prints there."""

    def __init__(self, available: str = "(null)", active: str | None = None, said: str = f"{SAID}works\n") -> None:
        self.available, self.active, self.said = available, available if active is None else active, said
        self.updates: list[tuple[str, ...]] = []
        self.commands = SlurmCommands(SlurmSettings(), execute=self._execute)

    async def _execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        if argv[0] == "srun":
            return Completed(0, f"Usage: srun\n{self.said if TEST in env else ''}".encode(), b"")
        if argv[1] == "update":
            self.updates.append(tuple(argv[3:]))
            return Completed(0, b"", b"")
        if argv[-1] != "n1":
            return Completed(1, f"Node {argv[-1]} not found".encode(), b"")
        features = f"AvailableFeatures={self.available} ActiveFeatures={self.active}"
        return Completed(0, f"NodeName=n1 CPUTot=4 {features} Gres=(null)\n".encode(), b"")


@pytest.mark.parametrize(
    ("available", "active", "wanted", "update"),
    [
        ("(null)", "", True, ("AvailableFeatures=f", "ActiveFeatures=f")),
        ("a,b", "a", True, ("AvailableFeatures=a,b,f", "ActiveFeatures=a,f")),
        ("a,f", "a", True, ("AvailableFeatures=a,f", "ActiveFeatures=a,f")),
        ("a,f", "f,a", True, None),
        ("a,f", "a,f", False, ("AvailableFeatures=a", "ActiveFeatures=a")),
        ("f", "(null)", False, ("AvailableFeatures=", "ActiveFeatures=")),
        ("ff", "ff", False, None),
    ],
)
async def test_the_other_features_of_the_node_stay_and_nothing_is_said_twice(
    available: str, active: str, wanted: bool, update: tuple[str, ...] | None
) -> None:
    slurm = Slurm(available, active)
    assert await set_feature(slurm.commands, "n1", "f", wanted) == (update is not None)
    assert slurm.updates == ([update] if update else [])


async def test_a_node_that_slurm_does_not_know_is_named_with_the_setting() -> None:
    with pytest.raises(Broken, match="n2") as raised:
        await set_feature(Slurm().commands, "n2", "f", True)
    assert "job_vms.node" in raised.value.hint


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "Slurm does not load the plugin on this node"),
        (f"{SAID}cannot record jobs in /run/r: No space left on device\n", "No space left on device"),
        (SAID.replace("protocol=1", "protocol=2") + "works\n", "has protocol 2, and this agent 1"),
        (SAID.replace("/run/r", "/r") + "works\n", "has records /r, and this agent /run/r"),
    ],
)
async def test_a_node_whose_plugin_fails_the_test_takes_no_job_with_a_vm(said: str, reason: str) -> None:
    with pytest.raises(Refused) as raised:
        await check_plugin(Slurm(said=said).commands, EXPECTED)
    assert reason in raised.value.message and raised.value.hint


async def test_a_test_without_an_answer_tells_nothing() -> None:
    async def hangs(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        raise TimeoutError

    assert await why_not(Slurm().commands, EXPECTED) is None
    assert isinstance(await why_not(SlurmCommands(SlurmSettings(), execute=hangs), EXPECTED), Unknown)
