"""What the models say of each key of the settings."""

from __future__ import annotations

import tomllib

import pytest

from multiverse.config import parse
from multiverse.site.setting_keys import SettingKey, SettingTable, setting_tables

TABLES = setting_tables()
KEYS = {table.path(key): key for table in TABLES for key in table.keys}
BESIDE = {"web.group": 'listen = "/run/web.sock"\n'}  # what an example needs beside it


def test_every_table_and_every_key_has_a_meaning() -> None:
    for table in TABLES:
        assert table.meaning.endswith("."), table.name
    for path, key in KEYS.items():
        assert key.meaning.endswith(".") and key.kind, path
    assert len(KEYS) > 180


def test_every_number_says_what_it_counts_or_that_it_counts_nothing() -> None:
    for path, key in KEYS.items():
        assert (key.unit is not None) == (key.kind in ("whole number", "number")), path


@pytest.mark.parametrize(
    ("table", "key"), [(table, key) for table in TABLES for key in table.keys], ids=lambda one: one.name
)
def test_every_default_and_every_example_is_right(table: SettingTable, key: SettingKey) -> None:
    required = [f"{one.name} = {one.example}\n" for one in table.keys if one.required and one is not key]
    before = "".join([table.heading, "\n", *required, BESIDE.get(table.path(key), "")])
    for value in filter(None, (key.default, key.example)):
        parse(tomllib.loads(f"{before}{key.name} = {value}\n"), table.path(key))


def test_a_key_whose_default_says_nothing_has_an_example() -> None:
    assert not [path for path, key in KEYS.items() if key.default in (None, '""', "[]") and not key.example]


def test_types_are_read_through_annotations_and_optional_types() -> None:
    cores = KEYS["hosts.cores"]
    assert (cores.unit, cores.limits, cores.kind, cores.required) == ("CPUs", "at least 1", "whole number", False)
    assert KEYS["hosts.nodes"].required and KEYS["mounts.source"].example == '"fileserver:/home"'
    assert (
        KEYS["vxlan.network"].limits == "0 to 16777215" and KEYS["image.kind"].limits == "instant, linked, full, auto"
    )
    assert KEYS["move.downtime"].limits == "above 0, at most 10" and KEYS["fence.quorum"].limits == "0 to 1"
    assert KEYS["lease.cpus"].unit == "CPUs", "the outer unit counts"


def test_a_table_or_its_keys_say_that_reload_applies_them() -> None:
    assert KEYS["pool.min"].reloaded and KEYS["fence.after"].reloaded and KEYS["lease.max"].reloaded
    assert not KEYS["lease.user"].reloaded and not KEYS["slurm.conf"].reloaded
