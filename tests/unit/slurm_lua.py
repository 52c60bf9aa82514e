"""Runs the submit script that a site installs in a real Lua, with a stand-in for slurmctld's functions."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from multiverse.config import Settings
from multiverse.drivers.slurm.site import install

_PROGRAM = """
slurm = { SUCCESS = 0, ERROR = -1, STEPMGR_ENABLED = 2^41,
          reservations = { mvgate = {} },
          log_user = function(f, ...) io.write(string.format(f, ...)) end,
          log_error = function(f, ...) io.write("error " .. string.format(f, ...)) end }
dofile("job_submit.lua")
local UP = { state_up = 3 }
local partitions = %s
if partitions.vm then partitions.vm.flag_default = 1 end
"""
_SUBMIT = """
local job = { %s }
local answer = slurm_job_submit(job, partitions, 1000)
io.write("|", answer, "|", tostring(job.features), "|", tostring(job.min_nodes), "-", tostring(job.max_nodes))
"""
_SUBMIT_ONE_OF_MANY = """
do
  local job = { %s }
  local answer = slurm_job_submit(job, partitions, 1000)
  io.write("|", answer, "|", tostring(job.min_nodes), "\\n")
end
"""
_SUBMIT_AND_SHOW_MEMORY = """
local job = { %s }
slurm_job_submit(job, partitions, 1000)
io.write("|", tostring(job.min_mem_per_node), "|", tostring(job.min_nodes))
"""
_SUBMIT_AND_SHOW_CPUS = """
local job = { %s }
slurm_job_submit(job, partitions, 1000)
io.write("|", tostring(job.pn_min_cpus), "|", tostring(job.min_nodes))
"""
_SUBMIT_AND_SHOW_COMMENT = """
local job = { %s }
local answer = slurm_job_submit(job, partitions, 1000)
io.write("|", answer, "|", tostring(job.comment), "|", tostring(job.requeue))
"""
_MODIFY = """
io.write("|", slurm_job_modify({ %s }, { user_id = 1000, %s }, partitions, %d), "|")
"""
PARTITIONS = "{ vm = UP, other = { flag_default = 0 } }"


def lua() -> str | None:
    """The path of a Lua interpreter, of slurmctld's version if possible."""
    return next((path for name in ("lua5.1", "lua5.3", "lua5.4", "lua") if (path := shutil.which(name))), None)


needs_lua = pytest.mark.skipif(lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")


def rendered(settings: Settings) -> dict[str, str]:
    """The files of a site, by name."""
    site = install.Site(images=("slim",), memory_per_cpu=150, slurm_uid=64)
    return install.render(settings, site)


def install_scripts(settings: Settings) -> Path:
    """Install the scripts and the inbox of these settings; the directory of the scripts."""
    directory = settings.slurm.conf.parent
    install.write(rendered(settings), directory)
    install.make_inbox(settings.slurm.inbox, os.getuid())
    return directory


def submit(directory: Path, fields: str, partitions: str = PARTITIONS) -> str:
    """Submit a job with these fields: `MESSAGE|CODE|FEATURES|MIN_NODES-MAX_NODES`."""
    return run(directory, _PROGRAM % partitions + _SUBMIT % fields)


def run_with_memory(directory: Path, fields: str) -> str:
    """Submit a job with these fields: `MESSAGE|MEMORY PER NODE|NODES`."""
    return run(directory, _PROGRAM % PARTITIONS + _SUBMIT_AND_SHOW_MEMORY % fields)


def run_with_cpus(directory: Path, fields: str) -> str:
    """Submit a job with these fields: `MESSAGE|CPUS PER NODE|NODES`."""
    return run(directory, _PROGRAM % PARTITIONS + _SUBMIT_AND_SHOW_CPUS % fields)


def run_with_comment(directory: Path, fields: str, partitions: str = PARTITIONS) -> str:
    """Submit a job with these fields: `MESSAGE|CODE|COMMENT|REQUEUE`."""
    return run(directory, _PROGRAM % partitions + _SUBMIT_AND_SHOW_COMMENT % fields)


class Answer(NamedTuple):
    """The answer to one of several submissions."""

    accepted: bool
    nodes: int | None
    message: str


def submit_each(directory: Path, jobs: Sequence[str]) -> list[Answer]:
    """Submit jobs with these fields, one after the other, in one process."""
    said = run(directory, _PROGRAM % PARTITIONS + "".join(_SUBMIT_ONE_OF_MANY % fields for fields in jobs))
    answers = [line.split("|") for line in said.splitlines()]
    assert len(answers) == len(jobs), said
    return [
        Answer(code == "0", int(float(nodes)) if nodes != "nil" else None, message) for message, code, nodes in answers
    ]


def modify(directory: Path, fields: str, record: str, uid: int = 1000) -> str:
    """Change these fields of a job with that record, as user `uid`: `MESSAGE|CODE|`."""
    return run(directory, _PROGRAM % PARTITIONS + _MODIFY % (fields, record, uid))


def with_slurm(directory: Path, program: str) -> str:
    """The output of a Lua program that runs beside the loaded scripts."""
    return run(directory, _PROGRAM % PARTITIONS + program)


def run(directory: Path, program: str) -> str:
    """The output of a Lua program that runs in the directory of the scripts."""
    interpreter = lua()
    assert interpreter
    done = subprocess.run([interpreter, "-"], input=program, cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout
