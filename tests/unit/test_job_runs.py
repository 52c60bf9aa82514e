"""What Slurm 22.05 and 24.11 print of a job that asks for VMs."""

from __future__ import annotations

import pytest

from multiverse.agent.job_tasks import JobRun
from multiverse.core.errors import Unknown
from multiverse.drivers.slurm.job_vms import parse_run, parse_share

SHOWN = """\
JobId=12 JobName=x
   Nodes=n1 CPU_IDs=0-99 Mem=99999 GRES=
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   NodeList=n[1-3]
   JOB_GRES=(null)
     Nodes=n[1-2] CPU_IDs=0-1,4 Mem=700 GRES=
     Nodes=n3 CPU_IDs=0 Mem=300 GRES=
   MinCPUsNode=1 MinMemoryNode=700M MinTmpDiskNode=0

JobId=123 JobName=y
     Nodes=n4 CPU_IDs=0 Mem=1 GRES=
"""


def test_the_run_of_one_task_is_found_among_those_of_its_array() -> None:
    shown = "11|1000|PENDING|N/A|\n12|1000|RUNNING|1700000000|n[2,10]\n123|1000|RUNNING|1700000000|n1\n"
    assert parse_run(shown, 12) == JobRun(12, 1000, 1700000000, ("n2", "n10"))
    assert parse_run(shown, 11) is None and parse_run(shown, 13) is None


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "REQUEUED", "PENDING", "NODE_FAIL"])
def test_a_job_that_ends_or_waits_again_has_no_run(state: str) -> None:
    assert parse_run(f"12|1000|{state}|1700000000|n1\n", 12) is None


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "A_STATE_OF_A_LATER_RELEASE"])
def test_a_job_in_any_other_state_keeps_its_vms(state: str) -> None:
    assert parse_run(f"12|1000|{state}|1700000000|n1\n", 12) is not None


@pytest.mark.parametrize("line", ["12", "12|ada|RUNNING|1700000000|n1", "12|1000|RUNNING|Unknown|n1", "12|1000||1|n1"])
def test_a_line_that_cannot_be_read_is_no_absence(line: str) -> None:
    with pytest.raises(Unknown, match="squeue shows job 12"):
        parse_run(line + "\n", 12)


def test_cpus_and_memory_are_those_of_the_job_on_the_node() -> None:
    assert parse_share(SHOWN, 12, "n2") == (3, 700)
    assert parse_share(SHOWN, 12, "n3") == (1, 300)
    with pytest.raises(Unknown):
        parse_share(SHOWN, 12, "n4")
