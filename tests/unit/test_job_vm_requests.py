"""What Slurm's plugin asks the agent, and the size of the VM that a job gets."""

from __future__ import annotations

import pytest

from multiverse.agent.job_protocol import EnterVm, ProvideVm, ReleaseVm, answer, parse, vm_size
from multiverse.config import JobVmSettings
from multiverse.core.errors import Gone, Refused
from multiverse.core.model.basics import Size
from multiverse.drivers.slurm.site.install import plugstack

REQUEST = ProvideVm(12, uid=1000, cores=2, allocated=1000)


def test_requests_are_parsed_as_the_plugin_writes_them() -> None:
    place = (("n2", "n10"), 1)
    line = (
        b"provide job=12 uid=1000 cores=2 allocated=1000 image=slim cpus= memory=512 disk= vms=2 "
        b"nodes=n[2,10] node=n10\n"
    )
    assert parse(line) == ProvideVm(12, 1000, 2, 1000, "slim", 0, 512, 0, 2, *place)
    assert parse(line.replace(b"vms=2", b"vms=")) == ProvideVm(12, 1000, 2, 1000, "slim", 0, 512, 0, 1, *place)
    functions = line.replace(b"vms=2", b"vms=2 functions=2 groups=4,17")
    assert parse(functions) == ProvideVm(12, 1000, 2, 1000, "slim", 0, 512, 0, 2, *place, 2, (4, 17))
    assert parse(line.replace(b"vms=2", b"vms=2 regions=32")).regions == 32  # type: ignore[union-attr]
    assert parse(b"enter job=12 vm=3\n") == EnterVm(12, 3)
    assert parse(b"release job=67108863\n") == ReleaseVm(67108863)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"destroy job=1\n",
        b"enter job=\n",
        b"enter job=../1\n",
        b"enter job=67108864\n",
        b"provide job=1 uid=-1\n",
        b"provide job=1 uid=1 image=../etc\n",
        b"provide job=1 uid=1 image=-x\n",
        b"provide job=1 uid=1 vms=65 nodes=n1 node=n1\n",
        b"provide job=1 uid=1 regions=33 nodes=n1 node=n1\n",
        b"provide job=1 uid=1 regions=abc nodes=n1 node=n1\n",
        b"provide job=1 uid=1 nodes=n[1-2] node=n3\n",
        b"provide job=1 uid=1 functions=5 nodes=n1 node=n1\n",
        b"provide job=1 uid=1 functions=1 groups=4,x nodes=n1 node=n1\n",
        b"provide job=1 uid=1 nodes=n[1- node=n1\n",
        b"provide job=1 uid=1 nodes= node=n1\n",
        b"provide job=1 uid=9999999999999999\n",
    ],
)
def test_what_makes_no_sense_is_refused(line: bytes) -> None:
    with pytest.raises(Refused):
        parse(line)


def test_an_answer_is_one_line_with_the_next_step() -> None:
    assert answer() == b"ok\n"
    assert answer(Gone("it ended\nbadly\x1b[0m", hint="submit it again")) == (
        b"error it ended badly [0m (submit it again)\n"
    )


def test_a_vm_has_what_its_job_has_unless_less_is_asked_for() -> None:
    assert vm_size(REQUEST, 256, 192) == Size(2, 808)
    assert vm_size(ProvideVm(12, 1000, 2, 1000, "", 1, 512, 300), 256, 192) == Size(1, 512, 300)
    assert vm_size(ProvideVm(12, 1000, 2, 0, "", 0, 512), 256, 192) == Size(2, 512), "Slurm counts no memory"


def test_the_vms_of_a_job_divide_what_it_has() -> None:
    assert vm_size(ProvideVm(12, 1000, 5, 1000, vms=2), 256, 192) == Size(2, 308)
    assert vm_size(ProvideVm(12, 1000, 2, 1000, cpus=1, memory=300, vms=2), 256, 192) == Size(1, 300)


@pytest.mark.parametrize(
    ("asked", "step"),
    [
        (ProvideVm(12, 1000, 1, 1000, vms=2), "--cpus-per-task=2"),
        (ProvideVm(12, 1000, 3, 1000, cpus=2, vms=2), "--cpus-per-task=4"),
        (ProvideVm(12, 1000, 2, 1000, memory=309, vms=2), "--mem=1002"),
        (ProvideVm(12, 1000, 2, 895, vms=2), "--mem=896"),
    ],
)
def test_what_all_vms_of_a_job_cannot_hold_is_refused_with_the_next_step(asked: ProvideVm, step: str) -> None:
    with pytest.raises(Refused) as refused:
        vm_size(asked, 256, 192)
    assert step in refused.value.hint


@pytest.mark.parametrize(
    ("cpus", "memory", "allocated", "step"),
    [
        (3, 0, 1000, "--cpus-per-task=3"),
        (0, 809, 1000, "--mem=1001"),
        (0, 0, 447, "--mem=448"),
        (0, 0, 100, "--mem=448"),
        (0, 255, 1000, "--mem=448"),
        (0, 0, 0, "--memory-per-vm"),
    ],
)
def test_what_the_job_cannot_hold_is_refused_with_the_next_step(
    cpus: int, memory: int, allocated: int, step: str
) -> None:
    with pytest.raises(Refused) as refused:
        vm_size(ProvideVm(12, 1000, 2, allocated, "", cpus, memory), 256, 192)
    assert step in refused.value.hint


def test_the_regions_that_the_vms_of_a_job_share_are_of_its_memory() -> None:
    asked = ProvideVm(12, 1000, 2, 1000, vms=2, regions=3)
    assert vm_size(asked, 192, 192, 32) == Size(1, (1000 - 96) // 2 - 192)
    with pytest.raises(Refused) as refused:
        vm_size(asked, 261, 192, 32)
    assert "and --ivshmem=3 takes 96" in refused.value.message and "--mem=1002" in refused.value.hint
    with pytest.raises(Refused) as refused:
        vm_size(ProvideVm(12, 1000, 2, 500, memory=300, regions=2), 256, 192, 32)
    assert "and --ivshmem=2 takes 64" in refused.value.message and refused.value.hint == "submit it with --mem=556"
    with pytest.raises(Refused, match="and this one would have 0, and --ivshmem=32 takes 8192"):
        vm_size(ProvideVm(12, 1000, 2, 1000, regions=32), 256, 192, 256)


def test_the_plugin_is_optional_and_gets_its_paths() -> None:
    *comments, line = plugstack(JobVmSettings(timeout=90)).splitlines()
    assert all(one.startswith("#") for one in comments)
    assert line.split() == [
        "optional",
        "/usr/lib/slurm/multiverse.so",
        "agent=/run/multiverse/jobs.sock",
        "records=/run/multiverse/jobs",
        "enter=/usr/libexec/multiverse/mventer",
        "timeout=90",
        "feature=job-vms",
    ]
