"""What Slurm keeps private, by PrivateData."""

from __future__ import annotations

import os
from pathlib import Path

from multiverse.bundles.contract import Privacy
from multiverse.bundles.slurm.scheduler import PrivateData


def test_private_data_is_read_again_when_it_changes(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    private = PrivateData(conf)
    assert private.privacy() == Privacy(others=False, hosts=False), "what cannot be read keeps everything private"
    for number, (value, expected) in enumerate(
        {
            "": Privacy(),
            "PrivateData=accounts": Privacy(),
            "PrivateData=Jobs,usage": Privacy(others=False),
            "PrivateData=nodes": Privacy(hosts=False),
            "PrivateData=all": Privacy(others=False, hosts=False),
        }.items(),
        1,
    ):
        conf.write_text(f"ClusterName=c\n{value}\n")
        os.utime(conf, ns=(number, number))
        assert private.privacy() == expected, value
    conf.unlink()
    assert private.privacy() == Privacy(others=False, hosts=False)
