"""The examples of a file of settings can be used as they are."""

from __future__ import annotations

import re
import tomllib

from multiverse.config import HostClass, HostSettings, Settings, host_settings, parse
from multiverse.site.setting_examples import Resources, facts_of, full_example, short_example
from multiverse.site.setting_keys import setting_tables

TABLES = setting_tables()
KEYS = {table.path(key): key for table in TABLES for key in table.keys}
FULL, SHORT = full_example(TABLES), short_example("vmhost1", Resources(16, 49152, 200000))


def uncommented(text: str) -> str:
    """With the lines that are commented keys or tables, as somebody would change them."""
    return re.sub(r"^#(?=\w|\[\[)", "", text, flags=re.MULTILINE)


def test_the_short_example_gives_a_site_its_own_values() -> None:
    settings = parse(tomllib.loads(SHORT), "example")
    assert settings == Settings(hosts=(HostClass("vmhost1", cores=16, memory=49152, disk=200000),))
    assert host_settings(settings, "vmhost1") == HostSettings(cores=16, memory=49152, disk=200000)
    whole = parse(tomllib.loads(uncommented(SHORT)), "example")
    assert whole.network.names == "/etc/hosts" and whole.mounts[0].target == "/home"


def test_the_full_example_changes_nothing() -> None:
    assert parse(tomllib.loads(FULL), "example") == Settings()


def test_every_key_in_the_full_example_has_its_default_or_its_example() -> None:
    document = tomllib.loads(uncommented(FULL))
    for table in TABLES:
        found = document if not table.name else document[table.name][0] if table.is_array else document[table.name]
        for key in table.keys:
            value = found[key.name]
            wanted = key.example if key.default is None else key.default
            assert value == tomllib.loads(f"x = {wanted}")["x"], table.path(key)


def test_lines_fit_a_terminal_except_those_of_long_values() -> None:
    assert max(len(line) for line in FULL.splitlines() if line.startswith("# ")) <= 100
    assert max(map(len, SHORT.splitlines())) <= 105


def test_facts_are_one_sentence_each() -> None:
    assert facts_of(KEYS["host.cores"], default=True) == "Whole number (CPUs): at least 1. Default: 2."
    assert facts_of(KEYS["lease.partition"]) == "Text. It must be given."
    assert facts_of(KEYS["slurm.bin_dir"]) == "Path. By default it is not set."
    assert facts_of(KEYS["qemu.uplink"]) == 'Text. Example: "eth1".'
    assert facts_of(KEYS["pool.offer"], default=True) == "True or false. Default: true. Reload applies a change."
