"""How Slurm's plugin asks the agent, built from its source with a main function in place of Slurm."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from tests.unit.plugin_harness import build, needs_plugin

LIMIT = 60
MAIN = """
int main(int count, char *arguments[])
{
	int failed;

	if (count == 3 && !strcmp(arguments[1], "groups")) {
		char list[64];

		strcpy(values[FUNCTIONS], "1");
		vfio = arguments[2];
		list_groups(list, sizeof list);
		return puts(list) < 0;
	}
	if (count == 3) {
		char *own[] = {arguments[1], arguments[2], "timeout=1"};

		return slurm_spank_task_init_privileged(0, 3, own);
	}
	if (count == 4) {
		printf("%u\\n", vm_of(atoi(arguments[1]), atoi(arguments[2]), atoi(arguments[3])));
		return 0;
	}
	agent = arguments[1];
	failed = ask(agent, 1, "release job=7\\n", answer);
	puts(problem);
	return failed ? 1 : 0;
}
"""

pytestmark = needs_plugin


@pytest.fixture
def asking(tmp_path: Path) -> list[str]:
    return [str(build(tmp_path, MAIN)), str(tmp_path / "sock")]


def test_an_agent_to_which_too_many_connect_holds_up_no_job_for_longer_than_asked(
    asking: list[str], tmp_path: Path
) -> None:
    others = []
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "sock"))
        agent.listen(1)
        while True:
            others.append(socket.socket(socket.AF_UNIX))
            others[-1].setblocking(False)
            if others[-1].connect_ex(str(tmp_path / "sock")):
                break
        done = subprocess.run(asking, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 1 and "the agent of this host does not answer" in done.stdout
    for other in others:
        other.close()


def test_the_tasks_of_a_step_are_divided_over_the_vms_of_the_node_in_blocks(asking: list[str]) -> None:
    def mapped(tasks: int, vms: int) -> list[int]:
        program = asking[0]
        return [
            int(subprocess.run([program, str(task), str(tasks), str(vms)], capture_output=True, check=True).stdout)
            for task in range(tasks)
        ]

    assert mapped(6, 2) == [0, 0, 0, 1, 1, 1]
    assert mapped(5, 4) == [0, 0, 1, 2, 3]
    assert mapped(2, 4) == [0, 1], "fewer tasks than VMs"
    assert mapped(3, 1) == [0, 0, 0]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_task_asks_the_agent_only_if_its_job_has_a_record(asking: list[str], tmp_path: Path, recorded: bool) -> None:
    """An agent that hangs must not hold up the other jobs of its node."""
    if recorded:
        (tmp_path / "7").write_text("image=slim nodes=n1 node=n1\n")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(asking[1])
        agent.listen(1)
        agent.setblocking(False)
        subprocess.run([asking[0], f"agent={asking[1]}", f"records={tmp_path}"], check=True, timeout=LIMIT)
        try:
            agent.accept()[0].close()
            asked = True
        except BlockingIOError:
            asked = False
    assert asked is recorded


def test_the_agent_is_told_of_the_iommu_groups_that_the_job_may_open(asking: list[str], tmp_path: Path) -> None:
    def listed() -> set[str]:
        done = subprocess.run([asking[0], "groups", tmp_path / "vfio"], capture_output=True, text=True, check=True)
        return set(done.stdout.strip().split(",")) - {""}

    assert listed() == set(), "there is no such directory"
    (tmp_path / "vfio").mkdir()
    for name in ("vfio", "4", "17", "noiommu-3"):
        (tmp_path / "vfio" / name).touch()
    assert listed() == {"4", "17"}
    for number in range(100, 200):
        (tmp_path / "vfio" / str(number)).touch()
    assert 10 < len(listed()) < 20 and all(len(name) <= 3 for name in listed()), "what there is room for, whole"


DEVICES = Path("/sys/fs/cgroup/devices")


@pytest.mark.skipif(not os.access(DEVICES / "cgroup.procs", os.W_OK), reason="needs the device controller, version 1")
def test_of_the_iommu_groups_those_are_listed_that_the_jobs_control_group_may_open(
    asking: list[str], tmp_path: Path
) -> None:
    """As task/cgroup does it with ConstrainDevices: it denies what is in gres.conf and not the job's."""
    for number in (4, 17):  # no such devices: what counts is whether they could be opened
        os.mknod(tmp_path / str(number), stat.S_IFCHR | 0o600, os.makedev(241, number))
    group = DEVICES / f"multiverse-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "devices.deny").write_text("c 241:17 rwm")
        enter = f"echo $$ > {group}/cgroup.procs && exec {asking[0]} groups {tmp_path}"
        done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, check=True)
        assert done.stdout == "4\n"
    finally:
        group.rmdir()
