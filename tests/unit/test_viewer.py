"""What a user is told of others."""

from __future__ import annotations

from multiverse.bundles.contract import Privacy
from multiverse.core.model.reason import Reason, Why, said
from multiverse.service.explanations import OPERATOR, Viewer

REASON = Why.AHEAD(
    Why.CAPACITY(Why.AWAY_NOW(hosts=("n1", "n2")), Why.MAY_DELAY(job="12_3"), said("QEMU on n1 says no to job 9")),
    number=2,
    job="7",
)


def told(reason: Reason, own: str, *, others: bool = True, hosts: bool = True) -> str:
    return Viewer(1000, others=others, hosts=hosts).teller(own)(reason)


def test_what_is_not_private_is_told() -> None:
    assert told(REASON, "7") == (
        "2 jobs are ahead of it; job 7 keeps them waiting: waiting for capacity: out of reach now: n1, n2; "
        "by its time limit it may delay job 12_3, which is earlier and waits for room; QEMU on n1 says no to job 9."
    )
    assert OPERATOR.hidden(REASON, "7") == REASON and OPERATOR.may_see(1000) and OPERATOR.may_see(0)


def test_jobs_of_others_lose_their_names_and_ones_own_keep_them() -> None:
    for own in ("7", "7_2"):  # a task of the same array is one's own, too
        text = told(REASON, own, others=False)
        assert "job 7 keeps them" in text and "delay another job" in text and "12_3" not in text and "n1, n2" in text
    assert "another job keeps them" in told(REASON, "8", others=False)
    value = Viewer(1000, others=False).hidden(REASON, "8")
    assert value.jobs == ("",) and "12_3" not in repr(value), "the value has no names either"


def test_hosts_lose_their_names() -> None:
    text = told(REASON, "7", hosts=False)
    assert "out of reach now: 2 hosts" in text and "n1" not in text and "12_3" in text
    assert told(Why.BEING_BUILT(image="slim", host="n1"), "7", hosts=False).endswith("being built on a host")


def test_text_from_outside_is_told_only_where_all_may_be_named() -> None:
    for private in ({"others": False}, {"hosts": False}):
        text = told(REASON, "7", **private)
        assert "QEMU" not in text and "job 9" not in text and str(Why.HIDDEN()) in text


def test_only_ones_own_jobs_are_seen() -> None:
    assert Viewer(1000).may_see(1000) and not Viewer(1000).may_see(1001) and not Viewer(0).may_see(1000)


def test_a_user_is_told_what_the_scheduler_permits() -> None:
    assert Viewer.of(1000, Privacy(others=False)) == Viewer(1000, others=False)
    assert Viewer.of(1000, Privacy(hosts=False)) == Viewer(1000, hosts=False)
