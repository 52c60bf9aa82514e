"""What the daemon refuses at its start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from multiverse.config import LeaseSettings, OverflowSettings, Settings, SlurmSettings
from multiverse.core.errors import Refused
from multiverse.service import daemon

NODES = "NodeName=n1\nNodeName=n2"
BATCH = "PartitionName=batch Nodes=n1"


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        (f"{NODES}\n{BATCH} PreemptMode=SUSPEND", {"lease": (LeaseSettings("batch"),)}, "may be suspended"),
        (f"{NODES}\n{BATCH} OverSubscribe=EXCLUSIVE", {"overflow": (OverflowSettings("batch"),)}, "gets whole nodes"),
        (
            f"{NODES}\n{BATCH}\nPartitionName=lent Nodes=n[1-2]",
            {"overflow": (OverflowSettings("batch"),), "lease": (LeaseSettings("lent"),)},
            "shares n1 with partition lent",
        ),
    ],
)
def test_partitions_that_cannot_be_leased_or_overflow_are_refused(
    tmp_path: Path, text: str, more: dict[str, tuple[LeaseSettings | OverflowSettings, ...]], why: str
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{text}\n")
    slurm = SlurmSettings(conf=conf, inbox=tmp_path / "inbox")
    settings = Settings(state_dir=tmp_path / "state", socket=tmp_path / "run" / "api.sock", slurm=slurm, **more)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=why):
        asyncio.run(daemon.serve(settings))
    assert not settings.socket.exists()
