"""Gives a guest's slurm.conf the hash of the site's. Pure.

slurmd sends the hash of its slurm.conf as it registers. slurmctld logs an error for a node whose hash is another one,
unless DebugFlags=NO_CONF_HASH is in its own slurm.conf, where it holds for all nodes. A guest's slurm.conf is derived
from the site's, and differs from it. A comment at its end gives it the same hash, which says then from which slurm.conf
it was derived: slurmctld still tells a guest that has an earlier one (decision 92).

The hash (`_compute_hash_val` in parse_config.c, 22.05 to 25.05) is over all characters, comments and included files
too. Its 32 bits are the checksum CRC-16 before the last two characters, and these.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache

_ZERO, _ONE = b"AC"  # the characters of the comment that stand for a bit
_LENGTH = 32  # characters, of which some give any checksum of 16 bits
_LAST = 2  # characters at the end that must be the same


def with_hash_of(text: bytes, site: bytes) -> bytes:
    """A slurm.conf with a comment at its end by which it has the hash of the site's. The text as it is if a line of one
    character ends the site's, which would be a line of the result."""
    ending = site[-_LAST:]
    if len(ending) < _LAST or (ending.startswith(b"\n") and ending != b"\n\n"):
        return text
    begun = text + b"\n# The hash of the slurm.conf that this was derived from: "
    missing = crc_hqx(begun + bytes([_ZERO]) * _LENGTH, 0) ^ crc_hqx(site[:-_LAST], 0)
    chosen = 0
    for bit, effect, places in _changes():
        if missing >> bit & 1:
            missing, chosen = missing ^ effect, chosen ^ places
    return begun + bytes(_ONE if chosen >> place & 1 else _ZERO for place in range(_LENGTH)) + ending


@lru_cache(maxsize=1)
def _changes() -> tuple[tuple[int, int, int], ...]:
    """For each bit of the checksum a change of it, of which that is the highest bit, and the characters of the comment
    that make it. The checksum is linear: changes add up."""
    found: dict[int, tuple[int, int]] = {}
    for place in range(_LENGTH):
        effect, places = crc_hqx(bytes([_ZERO ^ _ONE]) + bytes(_LENGTH - 1 - place), 0), 1 << place
        while effect and (known := found.get(effect.bit_length() - 1)):
            effect, places = effect ^ known[0], places ^ known[1]
        if effect:
            found[effect.bit_length() - 1] = effect, places
    return tuple((bit, *found[bit]) for bit in sorted(found, reverse=True))
