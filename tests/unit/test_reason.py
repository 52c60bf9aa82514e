"""Reasons in words: each kind has some, whatever is known."""

from __future__ import annotations

import pytest

from multiverse.core.model.basics import number_of
from multiverse.core.model.reason import Reason, Why, parts_of, said, some, text_of

FIGURES = {"number": 2, "time": 5.0, "until": 60.0, "at": 61.0, "rate": 0.5}


def named(kind: Why) -> set[str]:
    return {name for _, _, names in parts_of(kind.words) for name in names}


@pytest.mark.parametrize("kind", list(Why))
def test_each_kind_has_words_with_all_it_names_and_with_nothing(kind: Why) -> None:
    figures = {name: FIGURES.get(name, 7) for name in named(kind) - {"job", "host", "hosts", "every", "because"}}
    whole = kind(Why.BEHIND(), job="5", hosts=("n1",), **figures)
    text = str(whole)
    assert text and "{" not in text and "[" not in text and str(Why.BEHIND()) in text
    assert ("job 5" in text) == ("job" in named(kind)) and ("n1" in text) == bool(
        {"host", "hosts", "every"} & named(kind)
    )
    assert "{" not in str(kind()), "what is not known is left out"


def test_what_is_not_known_is_left_out() -> None:
    assert str(Why.FULL(per_host=0)) == "the hosts are full"
    assert str(Why.AGAIN_IN(time=60.0, tries=0)) == "It is considered again in 1 min."
    assert str(Why.AGAIN_IN(time=60.0, tries=1)) == "It is considered again in 1 min. It failed once."
    assert said("") is None and text_of(None) == "" and text_of(said("no disk")) == "no disk"


def test_more_reasons_follow_each_after_a_semicolon() -> None:
    why = Why.CAPACITY(Why.FULL()).also(Why.EXPECTED(at=61.0), None)
    assert str(why) == "waiting for capacity: the hosts are full; expected to start by 1970-01-01 00:02 UTC"
    assert why.kind is Why.CAPACITY and why == Why.CAPACITY(Why.FULL(), Why.EXPECTED(at=61.0))


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    assert [number_of(count, "host") for count in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert number_of(2, "entry", "entries") == "2 entries"
    assert str(Why.TOO_SMALL(cpus=1, memory=64)) == "too small: 1 CPU and 64 MiB for VMs"
    assert str(Why.NO_VM_CREATED(attempts=3)).startswith("no VM could be created for it in 3 attempts")


def test_of_many_names_the_first_are_told() -> None:
    names = [f"n{number}" for number in range(10)]
    assert str(Why.AWAY_NOW(hosts=names)).endswith("n7 and 2 more") and some(names, 2) == "n0, n1 and 8 more"


def test_a_kind_is_told_apart_from_its_words() -> None:
    assert len(Why) == len(Why.__members__), "each is counted and kept by its own name"
    assert isinstance(Why.LIMIT(limit="QOSMaxJobs"), Reason) and Why.LIMIT(limit="QOSMaxJobs").kind.counted == "limit"
