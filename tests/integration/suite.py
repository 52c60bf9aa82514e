"""Slurm's own test suite (22.05.8, `testsuite/expect`) in the VM partition.

An ordinary user ran its tests on bare metal first, one at a time, and those that pass there in `vm`. Those that do not
pass in `vm` are here with the reason. docs/options.md has the table (`make docs`).
"""

from __future__ import annotations

OTHERWISE = (
    (
        "want a node by name, or one that is idle before there is a job: nodes are created for each job",
        "1.52, 1.84, 1.113, 1.114, 12.10, 14.10, 15.20, 15.37, 17.27, 17.60, 17.62",
    ),
    (
        "srun with `--exclude` of a VM that is gone: srun repeats the name for its step, which Slurm then refuses",
        "1.82",
    ),
    ("want numbers of nodes in a row, or names of one form", "1.83, 4.12"),
    ("want to see `--contiguous` and `--oversubscribe` in scontrol, which change nothing", "17.11"),
    ("want another message with the refusal: ours names what is wrong", "17.21, 17.28, 17.41"),
    ("`--immediate` without seconds, while no VM is ready", "1.13"),
    ("want 30 CPUs for a job without `-N`, which is one VM", "1.35"),
    ("want 30500 processes, or 512 tasks on one CPU, of a VM of 150 MiB", "1.22, 1.29"),
    ("read an output file as soon as it exists, or want 60 jobs in two minutes", "1.120, 17.44"),
    (
        "want 50 steps within a minute, or millions of tiny writes to a shared file in half of one, of emulated CPUs",
        "7.9, 12.2",
    ),
    ("wants a job's priority to stay while its VM is ready and it starts: it is higher then", "7.22"),
)
"""The reasons, each with its tests."""
