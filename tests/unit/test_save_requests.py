"""A job asks at submission to be saved at its time limit: what is refused, and when it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import SaveSettings, Settings, SlurmSettings
from multiverse.core.model.job import SaveWish
from multiverse.drivers.slurm.reading.parse import read_wishes
from tests.unit.slurm_lua import install_scripts, modify, needs_lua, run_with_comment
from tests.unit.test_job_limits import able, limits_of, publish

pytestmark = needs_lua

BATCH = "user_id = 1000, time_limit = 60, requeue = 65534"
ONE_TASK_EACH = "script = 'x', num_tasks = 4, min_cpus = 4, ntasks_per_node = 1"


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", inbox=tmp_path / "inbox")
    return Settings(slurm=slurm, save=SaveSettings(enabled=True))


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("script = 'x', comment = 'vm:save'", "|0|vm:save|1"),
        ("script = 'x', comment = 'vm:save=30m,restart'", "|0|vm:save=30m,restart|1"),
        ("script = 'x', comment = 'mine vm:net=1G vm:restart,save=90s'", "|0|mine vm:net=1G vm:restart,save=90s|1"),
        ("script = 'x', comment = 'vm:net=1G'", "|0|vm:net=1G|65534"),
        (
            "script = 'x', comment = 'vm:save=5'",
            "vm:save=5 in --comment is wrong: give the time before the end, such as",
        ),
        ("script = 'x', comment = 'vm:save=0s'", "vm:save=0s in --comment is wrong"),
        ("script = 'x', comment = 'vm:restart'", "for jobs that are saved: give vm:save,restart"),
        ("script = 'x', comment = 'vm:save,restart=2'", "vm:restart=2 in --comment is wrong: give it without a value"),
        ("script = 'x', comment = 'vm:save=31m'", "before half of its time is over: give a longer --time"),
        ("script = 'x', comment = 'vm:save', requeue = 0", "is queued again (vm:save): submit without --no-requeue"),
        ("script = 'x', comment = 'vm:save', min_nodes = 2", "|0|vm:save|1"),
        ("script = 'x', comment = 'vm:checkpoint=6h', min_nodes = 2", "jobs of several VMs have no checkpoints"),
        (f"{ONE_TASK_EACH}, comment = 'vm:save'", "|0|vm:save|1"),
        (f"{ONE_TASK_EACH}, comment = 'vm:checkpoint=1h'", "(vm:checkpoint), and this one would have 4"),
        ("comment = 'vm:save'", "jobs of srun and salloc cannot be saved (vm:save): submit with sbatch"),
        (r"script = '#!/bin/sh\n#SBATCH --open-mode=truncate\n', comment = 'vm:save'", "without --open-mode=truncate"),
        ("script = 'x', environment = { SLURM_OPEN_MODE = 't' }, comment = 'vm:save'", "without --open-mode=truncate"),
        (r"script = '#!/bin/sh\n#SBATCH --open-mode=append\n', comment = 'vm:save'", "|0|vm:save|1"),
        (r"script = '#!/bin/sh\ncd /\n#SBATCH --open-mode=truncate\n', comment = 'vm:save'", "|0|vm:save|1"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_submission(site: Settings, fields: str, answer: str) -> None:
    assert answer in run_with_comment(install_scripts(site), f"{BATCH}, {fields}")


def test_of_a_range_of_nodes_only_one_can_have_checkpoints(tmp_path: Path) -> None:
    hosts = [able("h1", 8, 15872), able("h2", 8, 15872)]
    scripts = publish(tmp_path, limits_of(hosts), SaveSettings(enabled=True))
    for tasks, refused in ((8, False), (16, True)):
        fields = f"script = 'x', min_nodes = 1, max_nodes = 4, num_tasks = {tasks}, comment = 'vm:checkpoint=1h'"
        assert ("would have 2: submit with --nodes=1" in run_with_comment(scripts, f"{BATCH}, {fields}")) == refused


def test_a_waiting_job_that_is_to_have_checkpoints_gets_no_second_vm(site: Settings) -> None:
    record = "partition = 'vm', job_state = 0, min_nodes = 1, max_nodes = 1, comment = 'vm:checkpoint=1h'"
    scripts = install_scripts(site)
    assert "would have 2: submit with --nodes=1" in modify(scripts, "min_nodes = 2", record)
    assert modify(scripts, "min_nodes = 1", record) == "|0|"


@pytest.mark.parametrize(
    ("asked", "signal", "comment"),
    [
        ("vm:save", "USR1@60", "vm:save"),  # at 90 s: the default of 120 s is earlier
        ("vm:save", "B:USR1@600", "vm:save=660s"),
        ("vm:save=15m", "USR1@600", "vm:save=15m"),
        ("vm:save=1m", "USR1", "vm:save=120s"),
        ("a vm:net=1G,save,restart b", "USR1@600", "a vm:net=1G,save=660s,restart b"),
    ],
)
def test_a_job_is_saved_before_it_gets_a_signal_that_it_asked_for(
    site: Settings, asked: str, signal: str, comment: str
) -> None:
    scripts = install_scripts(site)
    in_script = f"script = '#!/bin/bash\\n#SBATCH -n1 --signal={signal}\\ntrue\\n'"
    in_environment = f"script = 'x', environment = {{ SBATCH_SIGNAL = '{signal}' }}"
    for given in (in_script, in_environment):
        assert f"|0|{comment}|1" in run_with_comment(scripts, f"{BATCH}, {given}, comment = '{asked}'")


def test_a_signal_that_comes_in_the_first_half_of_the_job_is_refused(site: Settings) -> None:
    fields = "script = '#!/bin/sh\\n#SBATCH --signal=USR1@1770\\n', comment = 'vm:save'"
    assert "before half of its time is over" in run_with_comment(install_scripts(site), f"{BATCH}, {fields}")


@pytest.mark.parametrize(
    ("partition", "limit", "refused"),
    [
        ("default_time = 30, max_time = 600", 4294967294, True),
        ("default_time = 90, max_time = 600", 4294967294, False),
        ("default_time = 30, max_time = 600", 4294967295, False),  # UNLIMITED: as long as the partition lets it run
        ("max_time = 30", 4294967294, True),
        ("max_time = 30", 600, True),
        ("max_time = 4294967295", 4294967295, False),
    ],
)
def test_the_time_limit_is_that_of_the_partition_if_the_job_has_none(
    site: Settings, partition: str, limit: int, refused: bool
) -> None:
    partitions = f"{{ vm = {{ state_up = 3, {partition} }} }}"
    fields = f"user_id = 1000, script = 'x', time_limit = {limit}, comment = 'vm:save=20m'"
    assert ("half of its time" in run_with_comment(install_scripts(site), fields, partitions)) == refused


def test_a_site_that_saves_nothing_says_so(site: Settings) -> None:
    scripts = install_scripts(replace(site, save=SaveSettings()))
    said = run_with_comment(scripts, f"{BATCH}, script = 'x', comment = 'vm:save'")
    assert "jobs are not saved at this site: submit without vm:save" in said


def test_a_site_may_save_jobs_that_are_not_to_be_queued_again(site: Settings) -> None:
    scripts = install_scripts(replace(site, save=SaveSettings(enabled=True, no_requeue=True)))
    said = run_with_comment(scripts, "user_id = 1000, script = 'x', requeue = 0, comment = 'vm:save'")
    assert "|0|vm:save|0" in said


@pytest.mark.parametrize(
    ("comment", "wish"),
    [
        ("vm:save", SaveWish()),
        ("vm:save=30m", SaveWish(before=1800.0)),
        ("vm:save=2H,restart", SaveWish(before=7200.0, restart=True)),
        ("vm:restart vm:save=1d", SaveWish(before=86400.0, restart=True)),
        ("vm:net=1G", None),
    ],
)
def test_the_controller_reads_the_same(comment: str, wish: SaveWish | None) -> None:
    assert read_wishes(comment).save == wish and not read_wishes(comment).problem
