"""Offered nodes: the files that the driver writes for multiverse.lua."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from multiverse.config import ImageSettings, Settings, SlurmSettings
from multiverse.core.errors import Exhausted, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm import submission as files
from multiverse.drivers.slurm.submission import OfferFiles, SlurmOffers

NODE = "mvtest0-12"
LINE = f"{NODE} mv_v12 slim 1 0 1 100 0\n"


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [1000.0]
    monkeypatch.setattr(files.time, "time", lambda: moment[0])
    return moment


def names(inbox: Path) -> list[str]:
    return sorted(path.name for path in (inbox / "spares").iterdir())


def offers(inbox: Path) -> OfferFiles:
    return OfferFiles(inbox, "test0", 10.0)


def node_spec(name: str) -> NodeSpec:
    tag = f"mv_v{name.rpartition('-')[2]}"
    return NodeSpec(name, "10.0.0.1/16", Size(1, 100), ("slim", "instant", "auto", tag), tag, "slim", spare=True)


def offer(one: OfferFiles, name: str = NODE) -> None:
    one.offer(node_spec(name), any_image=True, any_kind=False)


def listed(inbox: Path) -> list[str]:
    """The lines of nodes."""
    return (inbox / "spares" / "list").read_text().splitlines()[2:]


def taken(inbox: Path, uid: int, node: str = NODE) -> None:
    """A submission of that user takes the node, as the script does."""
    (inbox / "spares" / f"open.{node}").rename(inbox / "spares" / f"taken.{node}.{uid}")


def test_an_offer_is_a_file_and_a_line_in_the_list(inbox: Path, now: list[float]) -> None:
    one = offers(inbox)
    offer(one)
    assert one.observe() == ({NODE: False}, {})
    assert (inbox / "spares" / "list").read_text() == f"1010\nexcluded\n{LINE}"
    assert (inbox / "spares").stat().st_mode & 0o777 == 0o700
    assert (inbox / "spares" / "list").stat().st_mode & 0o777 == 0o644


def test_a_node_is_taken_by_renaming_its_file_and_never_offered_again(inbox: Path) -> None:
    one = offers(inbox)
    offer(one)
    taken(inbox, 1000)
    offer(one)
    one.withdraw(NODE)
    one.withdraw_if_possible(NODE)
    assert one.observe() == ({NODE: True}, {NODE: 1000})
    one.renew([NODE])
    assert listed(inbox) == []


def test_files_with_other_names_are_ignored_and_stay(inbox: Path) -> None:
    one = offers(inbox)
    offer(one)
    taken(inbox, 1000)
    ends = (
        "taken.{}.",
        "taken.{}.-1",
        "taken.{}.1e3",
        "taken.{}.12345678901",
        "taken.{}.1.2",
        "taken.{}2x",
        "open.{}.1",
    )
    strange = ["taken.mvother-1.1000", *(name.format(NODE) for name in ends)]
    for name in strange:
        (inbox / "spares" / name).touch()
    (inbox / "spares" / f"taken.{NODE}9.1001").mkdir()
    assert one.observe() == ({NODE: True, f"{NODE}9": True}, {NODE: 1000, f"{NODE}9": 1001})
    one.forget(NODE)
    assert names(inbox) == sorted(["list", f"taken.{NODE}9.1001", *strange])
    one.forget(f"{NODE}9")  # nobody but slurmctld's user can have made a directory there


def test_excluded_users_are_in_the_list_from_the_call_on(inbox: Path, now: list[float]) -> None:
    one = offers(inbox)
    one.exclude([1001])
    assert not (inbox / "spares").exists(), "nothing is offered"
    offer(one)
    assert (inbox / "spares" / "list").read_text() == f"1010\nexcluded 1001\n{LINE}"
    one.exclude([1002, 999])
    assert (inbox / "spares" / "list").read_text() == f"1010\nexcluded 999 1002\n{LINE}"
    now[0] = 1006.0
    one.observe()
    one.renew([NODE])
    assert (inbox / "spares" / "list").read_text() == f"1016\nexcluded 999 1002\n{LINE}"
    one.exclude([])
    assert (inbox / "spares" / "list").read_text() == f"1016\nexcluded\n{LINE}"


def test_users_that_cannot_be_excluded_now_are_excluded_by_the_next_list(inbox: Path) -> None:
    one = offers(inbox)
    offer(one)
    (inbox / "spares").rename(inbox / "away")
    with pytest.raises(Exhausted):
        one.exclude([1000])
    (inbox / "away").rename(inbox / "spares")
    one.observe()
    one.renew([])
    assert (inbox / "spares" / "list").read_text().splitlines()[1:] == ["excluded 1000"]


def test_a_withdrawn_node_is_not_offered_again(inbox: Path) -> None:
    one = offers(inbox)
    one.withdraw(NODE)
    offer(one)
    assert one.observe() == ({}, {})
    other = "mvtest0-13"
    offer(one, other)
    one.withdraw(other)
    one.withdraw(other)
    assert one.observe() == ({}, {})


def test_nothing_remains_of_a_deleted_node(inbox: Path) -> None:
    one = offers(inbox)
    offer(one)
    one.forget(NODE)
    one.forget("mvtest0-99")
    one.observe()
    one.renew([NODE])
    assert names(inbox) == ["list"] and listed(inbox) == []


def test_the_list_names_known_nodes_and_is_renewed(inbox: Path, now: list[float]) -> None:
    one = offers(inbox)
    offer(one)
    for now[0] in (1004.0, 1006.0, 1012.0):
        one.observe()
        one.renew([NODE])
        assert int((inbox / "spares" / "list").read_text().split()[0]) > now[0] + 4
        assert listed(inbox) == [LINE.strip()]
    one.renew([])
    assert listed(inbox) == []
    one.close()
    assert not (inbox / "spares" / "list").exists()
    one.close()


def test_a_new_daemon_lists_a_node_again_once_it_offers_it(inbox: Path) -> None:
    first = offers(inbox)
    offer(first)
    first.close()
    second = offers(inbox)
    assert second.observe() == ({NODE: False}, {})
    second.renew([NODE])
    assert not (inbox / "spares" / "list").exists()
    offer(second)
    second.renew([NODE])
    assert listed(inbox) == [LINE.strip()]


def test_nodes_of_another_site_are_ignored(inbox: Path) -> None:
    offer(OfferFiles(inbox, "other", 10.0), "mvother-12")
    one = offers(inbox)
    assert one.observe() == ({}, {})
    offer(one)
    one.observe()
    one.renew([NODE, "mvother-12"])
    assert listed(inbox) == [LINE.strip()]


def test_offering_without_an_inbox_is_an_error(tmp_path: Path) -> None:
    one = offers(tmp_path / "none")
    assert one.observe() == ({}, {})
    with pytest.raises(Exhausted, match="cannot offer spares") as caught:
        offer(one)
    assert caught.value.hint
    with pytest.raises(Exhausted):
        one.withdraw(NODE)
    one.withdraw_if_possible(NODE)  # so that a node can always be set down or deleted
    one.forget(NODE)
    one.renew([NODE])
    one.close()


def test_an_unreadable_directory_is_unknown_and_not_empty(inbox: Path) -> None:
    one = offers(inbox)
    offer(one)
    one.observe()
    (inbox / "spares").rename(inbox / "away")
    (inbox / "spares").touch()
    assert one.observe() == ({NODE: False}, {}), "the previous answer"
    with pytest.raises(Unknown):
        offers(inbox).observe()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_symbolic_link_of_slurmctlds_user_is_followed(inbox: Path, tmp_path: Path) -> None:
    one = offers(inbox)
    offer(one)
    secret = tmp_path / "secret"
    secret.write_text("unchanged")
    temporary = f".list.{os.getpid()}-{threading.get_native_id()}.new"
    for name in (temporary, "list", f"open.{NODE}"):
        (inbox / "spares" / name).unlink(missing_ok=True)
        (inbox / "spares" / name).symlink_to(secret)
    one.observe()
    one.renew([NODE])
    offer(one, "mvtest0-13")
    assert secret.read_text() == "unchanged"
    (inbox / "spares").rename(inbox / "away")
    (inbox / "spares").symlink_to(tmp_path)
    with pytest.raises(Exhausted):
        offer(one, "mvtest0-14")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inbox", "secret"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_slurmctlds_user_may_take_offered_nodes(inbox: Path) -> None:
    os.chown(inbox, 12345, 12345)
    (inbox / "spares").mkdir()  # left by a daemon that died before it set the owner
    offer(offers(inbox))
    assert (inbox / "spares").stat().st_uid == 12345


# --- the driver's object ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "kind", "flags"),
    [
        ("slim", CloneKind.INSTANT, "1 1"),
        ("slim", CloneKind.AUTO, "1 1"),
        ("slim", CloneKind.FULL, "1 0"),
        ("another", CloneKind.LINKED, "0 0"),
    ],
)
async def test_jobs_that_name_no_image_or_kind_take_only_the_sites_defaults(
    inbox: Path, tmp_path: Path, image: str, kind: CloneKind, flags: str
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=one\n")
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", inbox=inbox)
    settings = Settings(slurm=slurm, image=ImageSettings(default=image, kind=kind))
    one = SlurmOffers(settings, offers(inbox))
    await one.offer(node_spec(NODE))
    assert listed(inbox) == [LINE.strip().replace("slim 1 0", f"slim {flags}")]
    await one.withdraw(NODE)
    assert offers(inbox).observe() == ({}, {})


async def test_a_node_whose_job_would_not_wait_for_its_user_is_not_offered(inbox: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("LaunchParameters=disable_send_gids\n")
    settings = Settings(slurm=SlurmSettings(conf=tmp_path / "slurm.conf", inbox=inbox))
    await SlurmOffers(settings, offers(inbox)).offer(node_spec(NODE))
    assert not (inbox / "spares").exists()
