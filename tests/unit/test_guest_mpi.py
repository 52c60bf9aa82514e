"""What the guest agent tells the launchers of MPI of a job's VMs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiverse.guest.agent import requests
from multiverse.guest.agent.requests import JobVms, prepare_mpi, remove_files, slots_of
from multiverse.guest.slurm_command import forget_mpi


def vms(nodes: int, each: int) -> JobVms:
    return [(f"v{node * each + number}", f"n{node}", number) for node in range(nodes) for number in range(each)]


@pytest.mark.parametrize(
    ("tasks", "nodes", "each", "slots"),
    [
        ("4(x2)", 2, 2, [2, 2, 2, 2]),
        ("3,1", 2, 2, [2, 1, 1, 1]),  # a VM without a task of srun's has one of mpirun's
        ("5", 1, 3, [2, 2, 1]),
        ("2(x2),1", 3, 1, [2, 2, 1]),
    ],
)
def test_the_tasks_of_a_node_are_divided_over_its_vms_as_those_of_srun_are(
    tasks: str, nodes: int, each: int, slots: list[int]
) -> None:
    assert slots_of({b"SLURM_TASKS_PER_NODE": tasks.encode()}, vms(nodes, each)) == slots


def test_a_step_that_does_not_know_the_tasks_of_all_nodes_counts_cores() -> None:
    step = {b"SLURM_TASKS_PER_NODE": b"1", b"SLURM_JOB_CPUS_PER_NODE": b"4(x2)"}
    assert slots_of(step, vms(2, 2)) == [2, 2, 2, 2]
    assert slots_of({**step, b"SLURM_CPUS_PER_TASK": b"2"}, vms(2, 2)) == [1, 1, 1, 1]
    assert slots_of({}, vms(2, 2)) == [1, 1, 1, 1]


def test_a_task_finds_the_launcher_and_the_vms_and_keeps_what_its_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "DIRECTORY", str(tmp_path))
    monkeypatch.setattr(requests, "write", lambda path, text: Path(path).write_text(text))
    users = {b"OMPI_MCA_plm": b"slurm", b"SLURM_TASKS_PER_NODE": b"4"}
    of_another_task = {b"HYDRA_HOST_FILE": f"{tmp_path}/1.hydra".encode()}
    environment = {**users, **of_another_task}
    files = prepare_mpi(environment, vms(1, 2))
    assert environment.items() >= users.items()
    openmpi, hydra = (
        Path(os.fsdecode(environment[name])) for name in (b"OMPI_MCA_orte_default_hostfile", b"HYDRA_HOST_FILE")
    )
    assert [openmpi.read_text(), hydra.read_text()] == ["v0 slots=2\nv1 slots=2\n", "v0:2\nv1:2\n"]
    assert files == [str(openmpi), str(hydra)]
    remove_files(files)
    assert not list(tmp_path.iterdir())
    assert prepare_mpi({}, []) == [], "a VM that is a node has no launcher"


def test_a_job_that_is_submitted_in_a_vm_is_not_told_how_mpi_reaches_the_vms_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "write", lambda path, text: None)
    users = {"HYDRA_LAUNCHER": "slurm", "OMPI_MCA_btl": "^openib", "PATH": "/usr/bin"}
    told = {os.fsencode(name): os.fsencode(value) for name, value in users.items()}
    prepare_mpi(told, vms(1, 2))
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in told.items()}
    assert environment != users
    forget_mpi(environment)
    assert environment == users
    environment["OMPI_MCA_plm"] = "rsh"  # of the user's own, where nothing else is ours
    forget_mpi(environment)
    assert environment["OMPI_MCA_plm"] == "rsh"
