"""The published sizes: the file that the driver writes, and what multiverse.lua refuses by it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from multiverse.config import ImageSettings, Settings, SlurmSettings
from multiverse.core.errors import Exhausted
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import EqualHosts, JobLimit, JobLimits
from multiverse.drivers.slurm import submission
from multiverse.drivers.slurm.submission import SubmissionFile
from tests.unit.slurm_lua import install_scripts, modify, needs_lua, submit

SIZES = (Size(2, 1500, 65536), Size(4, 700, 65536))
ACCEPTED = "|0|"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", inbox=tmp_path / "inbox")
    return Settings(slurm=slurm, image=ImageSettings(default="slim"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "inbox.limits"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [1000.0]
    monkeypatch.setattr(submission.time, "time", lambda: moment[0])
    return moment


def submission_file(settings: Settings, term: float = 60.0) -> SubmissionFile:
    return SubmissionFile(settings.slurm.inbox, term)


def sizes(**largest: Sequence[Size]) -> JobLimits:
    """Limits of nine hosts for each image and size, which hold one node each."""
    hosts = {
        image: tuple(EqualHosts(9, one.cpus, one.disk, (one.memory,)) for one in some)
        for image, some in largest.items()
    }
    limits = {image: (JobLimit(frozenset(CloneKind), some),) for image, some in hosts.items()}
    return JobLimits("slim", CloneKind.INSTANT, limits)


# --- the file --------------------------------------------------------------------------------------


async def test_each_number_of_equal_hosts_is_a_line(settings: Settings, file: Path, now: list[float]) -> None:
    before = os.umask(0o077)
    try:
        await submission_file(settings).publish(sizes(slim=SIZES, big=[Size(8, 9000)]))
    finally:
        os.umask(before)
    kinds = "auto,default,full,instant,linked"
    assert file.read_text().splitlines() == [
        "1 1060",
        f"big 0 1 {kinds} 9 8/8 0/0/0/0 9000",
        f"slim 1 1 {kinds} 9 2/2 65536/0/0/0 1500",
        f"slim 1 1 {kinds} 9 4/4 65536/0/0/0 700",
    ]
    assert file.stat().st_mode & 0o777 == 0o644, "slurmctld's user reads it"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("image", ["two words", "line\nbreak", "", "-x", 'a"b'])
async def test_an_image_whose_name_would_break_the_format_is_left_out(
    settings: Settings, file: Path, now: list[float], image: str
) -> None:
    await submission_file(settings).publish(sizes(**{image: SIZES}))
    assert file.read_text() == "1 1060\n"


async def test_published_sizes_stay_valid_while_they_are_renewed(
    settings: Settings, file: Path, now: list[float]
) -> None:
    published = submission_file(settings)
    published.renew()
    assert not file.exists(), "nothing was published yet"
    await published.publish(sizes(slim=SIZES))
    lines = file.read_text().splitlines()[1:]
    for now[0], valid_until in ((1029.0, 1060), (1031.0, 1091), (1100.0, 1160)):
        published.renew()
        assert file.read_text().splitlines() == [f"1 {valid_until}", *lines]


async def test_a_new_daemon_does_not_renew_what_an_earlier_one_published(
    settings: Settings, file: Path, now: list[float]
) -> None:
    await submission_file(settings).publish(sizes(slim=SIZES))
    now[0] = 1059.0
    second = submission_file(settings)
    second.renew()
    assert file.read_text().startswith("1 1060\n")
    second.close()
    second.close()
    assert not file.exists()


async def test_an_unwritable_directory_is_reported_and_tried_again(tmp_path: Path) -> None:
    published = SubmissionFile(tmp_path / "missing" / "inbox", 60.0)
    with pytest.raises(Exhausted, match=r"inbox\.limits") as caught:
        await published.publish(sizes(slim=SIZES))
    assert caught.value.hint and "slurm.inbox" in caught.value.hint
    published.renew()
    (tmp_path / "missing").mkdir()
    published.renew()
    assert (tmp_path / "missing" / "inbox.limits").exists()


async def test_no_symbolic_link_is_followed(settings: Settings, file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("unchanged")
    for name in (file.name, f".{file.name}.{os.getpid()}-{threading.get_native_id()}.new"):
        (tmp_path / name).symlink_to(secret)
    await submission_file(settings).publish(sizes(slim=SIZES))
    assert secret.read_text() == "unchanged" and not file.is_symlink()


# --- multiverse.lua --------------------------------------------------------------------------------


@needs_lua
@pytest.mark.parametrize(
    ("fields", "refused_size"),
    [
        ("num_tasks = 1, min_mem_per_node = 1500", ""),
        ("num_tasks = 1, min_mem_per_node = 1501", "1 CPU and 1501 MiB"),
        ("num_tasks = 2, min_cpus = 2, min_mem_per_node = 1500", ""),
        ("num_tasks = 3, min_cpus = 3, min_mem_per_node = 1500", "3 CPUs and 1500 MiB"),
        ("num_tasks = 4, min_cpus = 4, min_mem_per_node = 700", ""),
        ("num_tasks = 4, min_cpus = 4, min_mem_per_node = 701", "4 CPUs and 701 MiB"),
        ("num_tasks = 4, min_cpus = 4", ""),  # by DefMemPerCPU: 600 MiB
        ("num_tasks = 5, min_cpus = 5", "5 CPUs and 750 MiB"),
        ("cpus_per_task = 2, min_cpus = 2, min_mem_per_cpu = 750", ""),
        ("cpus_per_task = 2, min_cpus = 2, min_mem_per_cpu = 751", "2 CPUs and 1502 MiB"),
        ("min_nodes = 3, num_tasks = 3, min_cpus = 3, min_mem_per_node = 1500", ""),
        ("min_nodes = 3, num_tasks = 3, min_cpus = 3, min_mem_per_node = 1501", "1 CPU and 1501 MiB"),
        ("num_tasks = 1, min_mem_per_node = 1500, pn_min_tmp_disk = 9000", ""),
        ("num_tasks = 1, min_mem_per_node = 1501, pn_min_tmp_disk = 9000", "1501 MiB of memory with 9000 MiB of disk"),
        ("num_tasks = 1, min_mem_per_node = 1501, features = 'slim'", "1 CPU and 1501 MiB"),
        ("num_tasks = 1, min_mem_per_node = 1501, features = 'instant&slim'", "1 CPU and 1501 MiB"),
        ("num_tasks = 1, min_mem_per_node = 1501, features = 'auto'", "1 CPU and 1501 MiB"),
        ("num_tasks = 1, min_mem_per_node = 9000, features = 'big'", ""),
        ("num_tasks = 1, min_mem_per_node = 9001, features = 'big&full'", "1 CPU and 9001 MiB"),
        (
            "pn_min_cpus = 16959",
            "16959 CPUs and 2543850 MiB of memory on one node (Slurm takes --mincpus modulo 65536)",
        ),
        ("num_tasks = 1, min_mem_per_node = 1501, pn_min_cpus = 1", "1501 MiB of memory on one node, but"),
        ("num_tasks = 1, min_mem_per_node = 99999, features = 'unlisted'", ""),
        ("num_tasks = 1, min_mem_per_node = 99999, partition = 'other'", ""),
    ],
)
async def test_a_job_that_no_published_size_holds_is_refused(
    settings: Settings, fields: str, refused_size: str
) -> None:
    directory = install_scripts(settings)
    await submission_file(settings).publish(sizes(slim=SIZES, big=[Size(8, 9000)]))
    said = submit(directory, f"user_id = 1000, {fields}")
    if not refused_size:
        assert said.startswith(ACCEPTED)
        return
    message, code, *_ = said.split("|")
    assert code == "2014" and refused_size in message and "-N" in message
    largest = ("8 CPUs and 9000 MiB",) if "big" in fields else ("2 CPUs and 1500 MiB", "4 CPUs and 700 MiB")
    assert all(size in message for size in largest)


@needs_lua
@pytest.mark.parametrize(
    ("default", "memory"),
    [
        ("", 300),
        ("def_mem_per_cpu = 0, def_mem_per_node = 0", 300),
        ("def_mem_per_cpu = 900", 1800),
        ("def_mem_per_node = 1600", 1600),
    ],
)
async def test_a_job_that_requests_no_memory_has_the_default_of_the_partition(
    settings: Settings, default: str, memory: int
) -> None:
    directory, job = install_scripts(settings), "user_id = 1000, num_tasks = 2, min_cpus = 2"
    partitions = f"{{ vm = {{ state_up = 3, {default} }} }}"
    await submission_file(settings).publish(sizes(slim=[Size(2, memory)]))
    assert submit(directory, job, partitions).startswith(ACCEPTED)
    await submission_file(settings).publish(sizes(slim=[Size(2, memory - 1)]))
    assert f"requests 2 CPUs and {memory} MiB" in submit(directory, job, partitions)


@needs_lua
async def test_a_disk_that_no_host_has_is_refused(settings: Settings) -> None:
    directory = install_scripts(settings)
    await submission_file(settings).publish(sizes(slim=[Size(8, 9000, 5000)]))
    assert submit(directory, "user_id = 1000, pn_min_tmp_disk = 5000").startswith(ACCEPTED)
    message = submit(directory, "user_id = 1000, pn_min_tmp_disk = 5001")
    assert "|2014|" in message and "5001 MiB of disk" in message and "5000 MiB of disk" in message


@needs_lua
@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "\n",
        "1\nslim 1 1 default 1 1/1 0/0/0/0 100\n",
        "1 1000\nslim 1 1 default 1 1/1 0/0/0/0 100\n",  # expired
        "2 99999999999\nslim 1 1 default 1 1/1 0/0/0/0 100\n",  # of another release
        "1 99999999999\nslim 1 1 default 1 1/1 0/0/0/0 many\nslim 1 1 100\nslim\n1 1 100 0\n",
        "99999999999\nslim 1 1 default 1 1/1 0/0/0/0 100\n",
        "\0\0\0",
    ],
)
def test_nothing_is_refused_by_a_file_that_is_missing_expired_or_damaged(
    settings: Settings, file: Path, content: str | None
) -> None:
    directory = install_scripts(settings)
    if content is not None:
        file.write_text(content)
    assert submit(directory, "user_id = 1000, num_tasks = 1, min_mem_per_node = 99999").startswith(ACCEPTED)


@needs_lua
def test_nothing_is_refused_where_a_directory_has_the_files_name(settings: Settings, file: Path) -> None:
    directory = install_scripts(settings)
    file.mkdir()
    assert submit(directory, "user_id = 1000, num_tasks = 1, min_mem_per_node = 99999").startswith(ACCEPTED)


@needs_lua
@pytest.mark.parametrize(
    ("changes", "record", "accepted"),
    [
        ("min_mem_per_node = 1500", "features = 'mvgate'", True),
        ("min_mem_per_node = 1501", "features = 'mvgate'", False),
        ("min_mem_per_node = 1501", "", False),
        ("min_mem_per_node = 9000", "features = 'big&mvgate'", True),
        ("min_mem_per_node = 9001", "features = 'big&instant&mvgate'", False),
        ("min_cpus = 5", "features = 'mvgate', min_mem_per_node = 100", False),
        ("nice = 7", "features = 'mvgate', min_mem_per_node = 99999", True),  # submitted before the hosts shrank
        ("priority = 0, min_mem_per_node = nil", "features = 'mv_7', min_mem_per_node = 99999", True),
    ],
)
async def test_an_update_is_refused_only_if_it_makes_the_job_too_large(
    settings: Settings, changes: str, record: str, accepted: bool
) -> None:
    directory = install_scripts(settings)
    await submission_file(settings).publish(sizes(slim=SIZES, big=[Size(8, 9000)]))
    said = modify(directory, changes, f"partition = 'vm', job_state = 0, min_nodes = 1, min_cpus = 1, {record}")
    assert ("|0|" in said) == accepted
    assert ("the largest VM" in said) != accepted
