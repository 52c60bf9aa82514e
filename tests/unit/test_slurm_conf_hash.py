"""A guest's slurm.conf has the hash of the site's, as Slurm computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.drivers.slurm.site.bootstrap import with_hash_of

TEXTS = st.lists(st.integers(1, 255), max_size=60).map(bytes)


def slurms_hash(text: bytes) -> int:
    """`_compute_hash_val` of Slurm 22.05.8, line by line as it is there. Characters are signed in C."""
    value = 0
    for character in text:
        signed = character - 256 if character > 127 else character
        value = (value ^ signed << 8) & 0xFFFFFFFF
        for _ in range(8):
            value, carry = value << 1 & 0xFFFFFFFF, value & 0x8000
            value ^= 4129 if carry else 0
    return value


@given(TEXTS, TEXTS, st.sampled_from([b"x\n", b"\n\n", b"=2"]))
def test_the_hash_is_that_of_the_sites_file(text: bytes, site: bytes, ending: bytes) -> None:
    made = with_hash_of(text, site + ending)
    assert slurms_hash(made) == slurms_hash(site + ending)
    assert made.startswith(text + b"\n# ") and b"\n" not in made[len(text) + 1 : -2]


@pytest.mark.parametrize("site", [b"", b"x", b"SlurmctldHost=a\nx"])
def test_a_text_whose_end_would_be_a_line_of_its_own_is_left_alone(site: bytes) -> None:
    assert with_hash_of(b"SlurmctldHost=b\n", site) == b"SlurmctldHost=b\n"
