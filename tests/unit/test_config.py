"""Reading of settings. An error names each wrong key."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse.config import Settings, load, parse
from multiverse.core.errors import Refused
from multiverse.core.model import Mount


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("")
    assert load(tmp_path / "m.toml") == Settings()


def test_values_are_read_into_their_types(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        '[host]\ncores = 8\n[[mounts]]\nsource = "a:/b"\ntarget = "/b"\n[slurm]\ninbox = "/run/x"\n'
    )
    got = load(tmp_path / "m.toml")
    assert got.host.cores == 8 and got.mounts == (Mount("a:/b", "/b"),) and got.slurm.inbox == Path("/run/x")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"hots": {}}, "hots: no such key, did you mean host"),
        ({"host": {"core": 1}}, "host.core: no such key, did you mean cores"),
        ({"host": {"cores": "many"}}, "host.cores"),
        ({"slurm": {"commands": 1}}, "slurm.commands"),
        ({"host": {"cores": 0}}, "at least one core"),
        ({"host": {"overcommit": 0.5}}, "host.overcommit"),
        ({"host": {"cpu_overcommit": 0.5}}, "host.cpu_overcommit"),
        ({"host": {"floor": -1}}, "host.floor"),
        ({"host": {"disk_overcommit": 0.9}}, "host.disk_overcommit"),
        ({"host": {"disk_floor": -1}}, "host.disk_floor"),
        ({"qemu": {"tb_size": 4}}, "qemu.tb_size"),
        ({"mounts": [{"sourse": "x"}]}, "mounts.0.sourse: no such key, did you mean source"),
        ({"qemu": {"accel": "xen"}}, "qemu.accel"),
        ({"network": {"subnet": "10.0.0.0/16", "gateway": "10.1.0.1"}}, "network.gateway"),
        ({"network": {"subnet": "what"}}, "network"),
        ({"qemu": {"bridge": "a-name-that-is-too-long"}}, "qemu.bridge"),
        ({"qemu": {"run": "/run/" + "x" * 100}}, "qemu.run"),
    ],
)
def test_an_error_names_each_wrong_key(raw: dict[str, object], said: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(raw, "m.toml")
    assert said in str(caught.value) and caught.value.hint


def test_an_error_names_a_missing_or_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot read"):
        load(tmp_path / "none.toml")
    (tmp_path / "m.toml").write_text("[[")
    with pytest.raises(Refused, match="not TOML"):
        load(tmp_path / "m.toml")
