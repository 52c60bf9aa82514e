"""The control groups of a job, and those of a VM inside of it, on directories that stand for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse.core.errors import Broken
from multiverse.host.cgroups import Cgroups
from multiverse.host.job_groups import JobGroups, find_job_groups

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
