"""Limits of resources in a VM: those of a well-kept node of the VM's size, whatever its template booted with."""

from __future__ import annotations

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import nothing_left, until

pytestmark = pytest.mark.integration

MIB = 1024  # of the VM's memory; the template has booted with 288

_SHOWS = """
ulimit -n; ulimit -Hn; ulimit -u; ulimit -i; ulimit -Hl; ulimit -Hs
ulimit -n 20000 && echo raised
cat /proc/sys/kernel/threads-max /proc/sys/kernel/pid_max /proc/sys/fs/file-max /proc/sys/vm/overcommit_memory
cut -f3 /proc/sys/net/ipv4/tcp_rmem
df --output=size -BM /dev/shm | tail -n 1
awk "/MemTotal/ {print int(\\$2 / 1024)}" /proc/meminfo
ps -o comm= -p $$; pgrep -c slurmd; free -m | head -n 1
"""


def job(lab: LabUnderTest, script: str, *options: str, soft: str = "") -> str:
    """What a job of the user prints, submitted from a shell with these limits."""
    out = lab.user.home / "limits.out"
    out.unlink(missing_ok=True)
    (lab.user.home / "limits.sh").write_text(f"#!/bin/bash\n{script}\n")
    submitted = f"{soft or ':'}; exec sbatch --parsable --output={out} {' '.join(options)} limits.sh"
    number = lab.run("bash", "-c", submitted, user=lab.user).stdout.strip()
    until("the job has ended", lambda: not lab.run("squeue", "-h", "-t", "PD,R,CG", "-j", number).stdout, 120)
    return out.read_text()


def test_a_vm_has_the_limits_of_a_node_of_its_size(lab: LabUnderTest, client: Client) -> None:
    said = job(lab, _SHOWS, f"--mem={MIB}", "--propagate=NONE").split("\n")
    soft, hard, processes, pending, locked, stack, raised, *said = said
    threads, pids, files, overcommit, rmem, shm, total, name, daemons, memory, *_ = said
    assert (soft, hard, locked, stack, raised) == ("131072", "131072", "unlimited", "unlimited", "raised")
    # kernel/fork.c: as many threads as need an eighth of the memory for stacks of 16 KiB. The kernel keeps some itself.
    wanted = int(total) * 8
    assert int(total) >= MIB
    assert wanted * 0.9 < int(threads) < wanted * 1.15
    assert int(processes) == int(pending) and abs(int(processes) - int(threads) // 2) <= 8
    assert int(pids) >= 1 << 22 and int(files) > 1 << 40 and overcommit == "1"
    assert int(rmem) >= 6 << 20
    assert abs(int(shm.strip(" M")) - int(total) // 2) <= 2
    assert name == "slurm_script" and int(daemons) >= 1 and memory.split()[:2] == ["total", "used"]
    nothing_left(lab, client)


def test_limits_of_the_submitting_shell_are_propagated(lab: LabUnderTest, client: Client) -> None:
    shell = "ulimit -Sn 20000; ulimit -Ss 4096; ulimit -Sl 4096; ulimit -Su 1500"
    said = job(lab, "ulimit -Sn; ulimit -Ss; ulimit -Sl; ulimit -Su; srun -n1 bash -c 'ulimit -Sn'", "--mem=600",
               soft=shell)  # fmt: skip
    assert said.split() == ["20000", "4096", "4096", "1500", "20000"], said
    nothing_left(lab, client)
