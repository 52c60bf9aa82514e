"""Which of Slurm's commands the VM of a job has, the program that stands for them there, and the one that passes data
through the memory that VMs share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

COMMANDS = ("sacct", "sacctmgr", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "sprio", "squeue", "sreport",
            "srun", "sshare", "sstat")  # fmt: skip
"""Those that the host runs for a guest: `names` in spank/commands.c."""

INSTALLED = (*COMMANDS, "salloc", "sbcast")
"""Those that a guest has. The host refuses salloc with a sentence, because it would run its command on the host; sbcast
is a step of srun's."""


@cache
def program() -> str:
    """The text of the program."""
    return (Path(__file__).parent / "slurm_command.py").read_text()


@cache
def shared_memory_program() -> str:
    """The text of the program that passes data through shared memory."""
    return (Path(__file__).parent / "shared_memory_program.py").read_text()
