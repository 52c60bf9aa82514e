"""The control groups of a job, and those of a VM inside of it, on directories that stand for the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Refused
from multiverse.host import cgroups
from multiverse.host.cgroups import Cgroups, JobGroups, find_job, find_job_groups, has_steps

V1 = """\
cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""
IN_V1 = """\
5:cpuset:/slurm/uid_1000/job_12/step_0
4:cpu,cpuacct:/
3:memory:/slurm/uid_1000/job_12/step_0/task_0
2:freezer:/slurm/uid_1000/job_12/step_0
0::/
"""


def proc(directory: Path, mounts: str, groups: str) -> Path:
    (directory / "5").mkdir()
    (directory / "mounts").write_text(mounts)
    (directory / "5" / "cgroup").write_text(groups)
    return directory


def test_the_jobs_groups_are_found_from_a_step_without_the_freezer(tmp_path: Path) -> None:
    found = find_job_groups("12", 5, proc(tmp_path, V1, IN_V1))
    assert found == ("/sys/fs/cgroup/cpuset/slurm/uid_1000/job_12", "/sys/fs/cgroup/memory/slurm/uid_1000/job_12")


def test_on_version_2_there_is_one_group(tmp_path: Path) -> None:
    groups = "0::/system.slice/n1_slurmstepd.scope/job_12/step_batch/user/task_0\n"
    found = find_job_groups("12", 5, proc(tmp_path, "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", groups))
    assert found == ("/sys/fs/cgroup/system.slice/n1_slurmstepd.scope/job_12",)


@pytest.mark.parametrize("groups", ["0::/\n", "0::/slurm/job_123/step_0\n", "0::/slurm/job_1/step_12\n"])
def test_the_groups_of_another_job_are_not_its(tmp_path: Path, groups: str) -> None:
    assert find_job_groups("12", 5, proc(tmp_path, "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", groups)) == ()


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy of control groups, with those of two jobs, which are as good as root's."""
    monkeypatch.setattr(cgroups, "_SLURMD", os.getuid())
    for job in (12, 13):
        (tmp_path / f"slurm/uid_1000/job_{job}/step_0/task_0").mkdir(parents=True)
    return tmp_path


def asker(mounted: Path, *groups: str) -> Path:
    directory = mounted / "proc"
    directory.mkdir()
    mounts = f"cgroup {mounted} cgroup rw,memory 0 0\ncgroup {mounted} cgroup rw,freezer 0 0\n"
    return proc(directory, mounts, "".join(f"{number}:{group}\n" for number, group in enumerate(groups, 1)))


@pytest.mark.parametrize("controller", ["memory", "freezer"])
def test_a_process_of_a_step_is_in_its_job(mounted: Path, controller: str) -> None:
    inside = asker(mounted, "cpuset:/", f"{controller}:/slurm/uid_1000/job_12/step_0/task_0")
    assert find_job(5, inside) == 12


@pytest.mark.parametrize(
    "groups",
    [
        ("memory:/",),
        ("memory:/slurm/uid_1000/job_12",),
        ("memory:/slurm/uid_1000/job_14/step_0",),
        ("memory:/slurm/uid_1000/job_12/step_0", "freezer:/slurm/uid_1000/job_13/step_0"),
        ("cpu:/slurm/uid_1000/job_12/step_0",),
    ],
    ids=["no job", "no step", "no such group", "two jobs", "no such hierarchy"],
)
def test_a_process_that_no_step_or_more_than_one_job_has_is_in_no_job(mounted: Path, groups: tuple[str, ...]) -> None:
    assert find_job(5, asker(mounted, *groups)) == 0


def test_control_groups_that_a_user_named_like_those_of_a_job_are_none(
    mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_SLURMD", os.getuid() + 1)
    assert find_job(5, asker(mounted, "memory:/slurm/uid_1000/job_12/step_0")) == 0


def test_a_jobs_name_below_a_step_of_another_job_means_nothing(mounted: Path) -> None:
    """A step's own groups are the user's."""
    (mounted / "slurm/uid_1000/job_12/step_0/job_13/step_0").mkdir(parents=True)
    assert find_job(5, asker(mounted, "memory:/slurm/uid_1000/job_12/step_0/job_13/step_0")) == 12


def test_a_process_that_has_ended_is_told_so(mounted: Path) -> None:
    with pytest.raises(Refused, match="has ended"):
        find_job(6, asker(mounted))


def test_a_job_has_steps_as_long_as_processes_are_in_them(mounted: Path) -> None:
    job = mounted / "slurm/uid_1000/job_12"
    (job / "mvjob-1").mkdir()
    groups = (str(mounted / "absent"), str(job))
    (job / "mvjob-1/cgroup.procs").write_text("7\n")
    processes = job / "step_0/task_0/cgroup.procs"
    for text, expected in (("", False), ("5\n", True)):
        processes.write_text(text)
        assert has_steps(groups) == expected, "Slurm may leave a directory without a process"
    processes.unlink()
    assert not has_steps(groups) and not has_steps(())


@pytest.fixture
def beside(tmp_path: Path) -> Cgroups:
    none = tmp_path / "mounts"
    none.write_text("")
    return Cgroups(none)


def test_a_vms_group_inherits_the_jobs_cpus_and_its_removal_removes_the_empty_ones_above(
    tmp_path: Path, beside: Cgroups
) -> None:
    job = tmp_path / "uid_1000" / "job_12"
    job.mkdir(parents=True)
    groups = JobGroups([str(job)], beside)
    groups.set_limits("vm", 512, 10)
    (job / "vm" / "cgroup.procs").touch()
    groups.add_process("vm", 4711, 10)
    assert (job / "vm" / "cgroup.procs").read_text() == "4711"
    assert groups.directories("vm") == [f"{job}/vm"]
    (job / "vm" / "cgroup.procs").unlink()
    groups.remove("vm")
    assert not (tmp_path / "uid_1000").exists()
    groups.remove("vm")


def test_other_jobs_of_the_user_keep_their_groups(tmp_path: Path, beside: Cgroups) -> None:
    job, other = (tmp_path / "uid_1000" / f"job_{number}" for number in (12, 13))
    for path in (job, other):
        path.mkdir(parents=True)
    groups = JobGroups([str(job)], beside)
    groups.set_limits("vm", 512, 10)
    groups.remove("vm")
    assert not job.exists() and other.exists()


def test_a_job_that_has_ended_has_no_group_for_a_vm(tmp_path: Path, beside: Cgroups) -> None:
    with pytest.raises(Broken, match="control group"):
        JobGroups([str(tmp_path / "gone")], beside).set_limits("vm", 512, 10)
