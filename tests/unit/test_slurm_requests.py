"""What a job asks for by its comment: read alike by the driver and by the script that checks submissions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiverse.config import SaveSettings, Settings, SlurmSettings
from multiverse.drivers.slurm.reading.parse import Wishes, read_wishes
from tests.unit.slurm_lua import install_scripts, needs_lua, submit_each


@pytest.mark.parametrize(
    ("comment", "wishes"),
    [
        ("", Wishes()),
        ("a comment of the user's own", Wishes()),
        ("vm:net=1G", Wishes(net=1000)),
        ("vm:net=250", Wishes(net=250)),
        ("run 7 vm:net=10m,per-host=2 vm:mem-per-task=2G", Wishes(net=10, per_host=2)),
        ("avm:net=1G vm:", Wishes()),
        ("run\tvm:net=1G\n", Wishes(net=1000)),
        ("no-break\u00a0vm:net=1G \x1fvm:speed=1", Wishes()),
    ],
)
def test_words_that_begin_with_vm_are_read_and_others_are_the_users(comment: str, wishes: Wishes) -> None:
    assert read_wishes(comment) == wishes


_PIECES = [
    "vm:",
    "net",
    "per-host",
    "mem-per-task",
    "speed",
    "save",
    "restart",
    "=",
    ",",
    " ",
    "\t",
    "\u00a0",
    "1",
    "0",
    "25",
    "G",
    "m",
    "h",
    "s",
    "T",
    "x",
    "9" * 10,
]


@needs_lua
@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.sampled_from(_PIECES), max_size=10).map("".join), min_size=20, max_size=40))
def test_the_script_refuses_exactly_the_comments_that_the_driver_does_not_understand(
    tmp_path_factory: pytest.TempPathFactory, comments: list[str]
) -> None:
    comments = [*comments, *(f"vm:{comment}" for comment in comments)]
    directory: Path = tmp_path_factory.mktemp("site")
    slurm = SlurmSettings(conf=directory / "slurm.conf", inbox=directory / "inbox")
    site = Settings(slurm=slurm, save=SaveSettings(enabled=True))
    fields = [f"user_id = 1000, script = 'x', comment = '{comment}'" for comment in comments]
    answers = submit_each(install_scripts(site), fields)
    for comment, answer in zip(comments, answers, strict=True):
        assert answer.accepted == (not read_wishes(comment).problem), (comment, answer.message)
