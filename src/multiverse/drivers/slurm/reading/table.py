"""The tables that Slurm's commands print for us: which columns, and how rows become records.

squeue prints 15,000 jobs in a fifteenth of the time that it needs for their JSON, and asks slurmctld for one job or one
user if it is told to; the JSON of 22.05 is always that of the whole cluster (decision 26). With -r it prints a row for
each task of an array.

A user chooses some of the text: names of jobs and directories may contain any character but NUL. The cells of a row are
separated by a text that only this process knows, so that no job can pretend to have other cells. It is given to squeue
in the environment, which other users cannot read. The rows of unchanged jobs are equal from load to load.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from multiverse.core.errors import Unknown
from multiverse.drivers.slurm.site.time_limits import NEVER, minutes_of

Record = Mapping[str, Any]

_CELL = "\x1f"  # after numbers and words of Slurm's own

# squeue's columns, by the key that the record has for each. The first ones are followed by _CELL.
_WORDS = {
    "id": "JobArrayID",
    "partition": "Partition",
    "job_state": "State",
    "restart_cnt": "RestartCnt",
    "submit_time": "SubmitTime",
    "end_time": "EndTime",
    "eligible_time": "EligibleTime",
    "user_id": "UserID",
    "priority": "PriorityLong",
    "exit_code": "exit_code",
    "het_job_id": "HetJobID",
    "node_count": "NumNodes",
    "cpus": "NumCPUs",
    "tasks": "NumTasks",
    "tasks_per_node": "NTPerNode",
    "cpus_per_task": "CPUsPerTask",
    "memory": "MinMemory",
    "minimum_cpus_per_node": "MinCPUs",
    "minimum_tmp_disk_per_node": "MinTmpDisk",
    "association_id": "AssocID",
    "core_spec": "CoreSpec",
    "profile": "Profile",
    "time_limit": "TimeLimit",
    "sockets_per_node": "Sockets",
    "tasks_per_socket": "NTPerSocket",
    "requeue": "Requeue",
    "batch_flag": "BatchFlag",
    "tres_req_str": "tres-alloc",  # of a waiting job: what it requests
}
_TEXTS = {
    "state_reason": "Reason",
    "features": "Feature",
    "dependency": "Dependency",
    "nodes": "NodeList",
    "account": "Account",
    "qos": "QOS",
    "resv_name": "Reservation",
    "required_nodes": "ReqNodes",
    "tres_per_job": "tres-per-job",
    "tres_per_node": "tres-per-node",
    "tres_per_socket": "tres-per-socket",
    "tres_per_task": "tres-per-task",
    "cluster_features": "ClusterFeature",
    "prefer": "Prefer",
    "licenses": "Licenses",
    "container_id": "ContainerID",
    "comment": "Comment",
    "name": "Name",
    "current_working_directory": "WorkDir",
}
# What tells which jobs of physical nodes a VM can serve: read only where a partition overflows into VMs.
_PHYSICAL = {
    "oversubscribe": "OverSubscribe",
    "reboot": "Reboot",
    "threads_per_core": "Threads",
    "tasks_per_core": "NTPerCore",
    "container": "Container",
    "network": "Network",
    "burst_buffer": "BurstBuffer",
}
_LATER = {"container_id", *_PHYSICAL}
"""Columns that a release may lack: it prints them empty, with an empty title. 22.05 lacks the first."""

_NOTHING = ("(null)", "N/A", "NotSet")
_FREE = {"name", "current_working_directory"}  # a user may choose any text, these words too
_MIB = {"": 1.0, "K": 2**-10, "M": 1, "G": 2**10, "T": 2**20, "P": 2**30}

# What squeue shows in place of the reason where slurmctld has a description. Both texts say that the gate's nodes,
# which are drained, are not available (node_scheduler.c, job_scheduler.c).
_DESCRIPTIONS = (
    ("ReqNodeNotAvail", "ReqNodeNotAvail"),
    ("Nodes required for job are DOWN, DRAINED", "Resources"),
)


class JobColumns:
    """The format of a table of jobs, and the reader of its rows. `physical`: with jobs of partitions of physical
    nodes."""

    def __init__(self, secret: str | None = None, *, physical: bool = False) -> None:
        self._texts = _TEXTS | _PHYSICAL if physical else _TEXTS
        self._end = f"{_CELL}{secret or secrets.token_hex(6)}{_CELL}"
        words = [f"{column}:0{_CELL}" for column in _WORDS.values()]
        words[-1] = words[-1][: -len(_CELL)] + self._end
        self.format = ",".join([*words, *(f"{column}:0{self._end}" for column in self._texts.values())])
        """The value of SQUEUE_FORMAT2. With the width 0 a column is printed in full."""

    def rows(self, output: str) -> list[str]:
        """The rows of a table. Raises `Unknown` unless it is complete and each column has its title."""
        rows = output.split(self._end + "\n")
        if rows.pop() or not rows:
            raise Unknown("squeue's table is incomplete", hint="see whether squeue works on this machine")
        titles = self._cells(rows[0])
        missing = [key for key, title in titles.items() if not title and key not in _LATER]
        if missing:
            raise Unknown(f"squeue's table has no column {', '.join(missing)}", hint="report scontrol --version")
        return rows[1:]

    def record(self, row: str) -> Record:
        """A row with the keys and values of a job in the JSON of 22.05. Raises `Unknown` for a row that is damaged."""
        cells = self._cells(row)
        try:
            return _record({k: "" if text in _NOTHING and k not in _FREE else text for k, text in cells.items()})
        except ValueError as error:
            raise Unknown(f"cannot understand a row of squeue: {error}", hint="report scontrol --version") from error

    def _cells(self, row: str) -> dict[str, str]:
        first, *texts = row.split(self._end)
        words = first.split(_CELL)
        if len(words) != len(_WORDS) or len(texts) != len(self._texts):
            raise Unknown("a row of squeue's table is damaged", hint="see whether squeue works on this machine")
        return dict(zip((*_WORDS, *self._texts), (*words, *texts), strict=True))


def _record(cells: dict[str, str]) -> Record:
    base, task = cells.pop("id"), None
    if "_" in base:
        base, _, task = base.partition("_")
    nodes, cpus = _number(cells["node_count"]) or 1, _number(cells["cpus"]) or 1
    memory = int(_mib(cells.pop("memory")))
    per_cpu = is_per_cpu(memory, nodes, cpus, cells["tres_req_str"])
    threads = re.fullmatch(r"(\d+) Threads", cells["core_spec"])
    reason = cells.pop("state_reason")
    return {
        **cells,
        **{key: _number(cells[key]) for key in _NUMBERS},
        "job_id": int(base.partition("+")[0]),
        "array_job_id": int(base) if task is not None else 0,
        "array_task_id": int(task) if task is not None else None,
        "time_limit": minutes_of(cells["time_limit"]),
        "end_time": NEVER if cells["end_time"] == "NONE" else _number(cells["end_time"]),
        "exit_code": _exit_status(cells["exit_code"]),
        "minimum_tmp_disk_per_node": int(_mib(cells["minimum_tmp_disk_per_node"])),
        "memory_per_node": None if per_cpu else memory,
        "memory_per_cpu": memory if per_cpu else None,
        # The total of the memory is the same for both, and a node may get more CPUs than the total says: also with
        # --overcommit and --ntasks-per-node.
        "memory_is_ambiguous": bool(memory) and nodes == cpus and _least_cpus(cells) > 1,
        "core_spec": None if threads else _number(cells["core_spec"]),
        "thread_spec": int(threads[1]) if threads else None,
        "state_reason": next((word for text, word in _DESCRIPTIONS if reason.startswith(text)), reason),
        "state_description": reason if " " in reason else "",
    }


_NUMBERS = (
    "restart_cnt",
    "submit_time",
    "eligible_time",
    "user_id",
    "priority",
    "het_job_id",
    "node_count",
    "cpus",
    "tasks",
    "tasks_per_node",
    "cpus_per_task",
    "minimum_cpus_per_node",
    "association_id",
    "requeue",
    "batch_flag",
)


def _least_cpus(cells: Mapping[str, str]) -> int:
    """The fewest CPUs of a node on which Slurm starts the job, as far as the row tells."""
    return max(_number(cells[key]) or 1 for key in ("minimum_cpus_per_node", "tasks_per_node"))


def is_per_cpu(memory: int, nodes: int, cpus: int, tres: str) -> bool:
    """Whether the memory of a job is that of each CPU, and not of each node: squeue does not say so, but the job's
    total does (job_get_tres_mem in job_mgr.c)."""
    match = re.search(r"(?:^|,)mem=([\d.]+)([KMGTP]?)", tres)
    total = round(float(match[1]) * _MIB[match[2]]) if match else 0
    return bool(memory) and total == memory * cpus and total != memory * nodes


def _number(text: str) -> int | None:
    return int(text) if text else None


def _mib(text: str) -> float:
    """`200M` in MiB."""
    return float(text[:-1]) * _MIB[text[-1]] if text and not text[-1].isdigit() else float(text or 0)


def _exit_status(text: str) -> int:
    """The wait status: 22.05 prints it as it is, later releases as `CODE:SIGNAL`."""
    code, _, signal = text.partition(":")
    return int(code) << 8 | int(signal) if signal else int(code or 0)
