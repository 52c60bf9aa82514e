"""What a user is told of others."""

from __future__ import annotations

from multiverse.bundles.contract import Privacy
from multiverse.service.viewer import OPERATOR, Viewer

HOSTS = frozenset({"n1", "n2", "n-10"})
TEXT = "job 7 keeps them waiting, ahead of job 12_3; its VMs are on n1, n2 and n-10 (job in doubt)"


def test_what_is_not_private_is_told() -> None:
    assert Viewer(1000).told(TEXT, "7", HOSTS) == TEXT
    assert OPERATOR.told(TEXT, "7", HOSTS) == TEXT and OPERATOR.may_see(1000) and OPERATOR.may_see(0)


def test_jobs_of_others_lose_their_names_and_ones_own_keep_them() -> None:
    hidden = Viewer(1000, others=False)
    told = "job 7 keeps them waiting, ahead of another job; its VMs are on n1, n2 and n-10 (job in doubt)"
    assert hidden.told(TEXT, "7", HOSTS) == told
    assert hidden.told(TEXT, "7_2", HOSTS) == told, "a task of the same array is one's own, too"
    assert "7" not in hidden.told("by jobs 7", "8", HOSTS)


def test_hosts_lose_their_names() -> None:
    hidden = Viewer(1000, hosts=False)
    assert hidden.told("on n1, n2. It is n-10.", "7", HOSTS) == "on a host, a host It is a host"
    assert hidden.told("on n11", "7", HOSTS) == "on n11"


def test_only_ones_own_jobs_are_seen() -> None:
    assert Viewer(1000).may_see(1000) and not Viewer(1000).may_see(1001) and not Viewer(0).may_see(1000)


def test_a_user_is_told_what_the_scheduler_permits() -> None:
    assert Viewer.of(1000, Privacy(others=False)) == Viewer(1000, others=False)
    assert Viewer.of(1000, Privacy(hosts=False)) == Viewer(1000, hosts=False)
