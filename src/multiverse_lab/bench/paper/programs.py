"""What runs in the paper's jobs: HPL and RandomAccess of HPCC, and conjugate gradients in the manner of HPCG.

A job runs its program in rounds, each of the same work, which begin at even intervals. So CPUs of the scaled cluster
compute a part of the time, and a job takes longer only if a round does not end before the next one is due. HPCC runs as
one process for each CPU, and checks its own results. On bare metal it is the program of the image, too, which is copied
out of the image's disk: no package has to be installed there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse_lab.bench.applications import compile_kernel
from multiverse_lab.bench.hpcc import HPCC_INPUT

SIZES = {"hpl": 240, "randomaccess": 120}
"""The matrix of HPL. RandomAccess has a table of half its memory, and takes more of the time if it is small."""
GRID = 16  # unknowns of conjugate gradients in each direction, for each CPU

DIRECTORY = "paper"
"""In the user's home, which guests see."""

_LIBRARIES = "/usr/lib/x86_64-linux-gnu"

# PROGRAM CPUS ROUNDS SECONDS [ROOT]. The last line says how many microseconds the rounds took.
_JOB = r"""program=$1 cpus=$2 rounds=$3 seconds=$4 root=$5
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_btl=self
hpcc=(hpcc)
if [ -n "$root" ]; then
    lib=$root{libraries}
    export OPAL_PREFIX=$root/usr
    hpcc=("$lib/ld-linux-x86-64.so.2" --library-path "$lib:$lib/blas:$lib/openmpi/lib" "$root/usr/bin/hpcc")
fi

one_hpcc() {{
    mkdir -p "$work/$1" && cd "$work/$1" && rm -f hpccoutf.txt && cp "$here/$program.txt" hpccinf.txt || return 1
    "${{hpcc[@]}}" > said 2>&1 && grep -q '^Success=1$' hpccoutf.txt || {{ tail -n 20 said; return 1; }}
}}

one_round() {{
    if [ "$program" = cg ]; then
        "$here/cg" {grid} {grid} {grid} "$cpus"
        return
    fi
    local cpu pid failed=0 pids=()
    for ((cpu = 0; cpu < cpus; cpu++)); do
        one_hpcc "$cpu" &
        pids+=($!)
    done
    for pid in "${{pids[@]}}"; do wait "$pid" || failed=1; done
    return $failed
}}

until_then() {{  # in microseconds since 1970
    local left=$(($1 - ${{EPOCHREALTIME/./}}))
    if ((left > 0)); then sleep "$(printf '%d.%06d' $((left / 1000000)) $((left % 1000000)))"; fi
}}

began=${{EPOCHREALTIME/./}} computed=0
whole=$(printf '%.6f' "$seconds"); whole=$((10#${{whole/./}}))
for ((round = 0; round < rounds; round++)); do
    until_then $((began + round * whole / rounds))
    at=${{EPOCHREALTIME/./}}
    one_round || {{ echo "round $round of $program failed"; exit 1; }}
    computed=$((computed + ${{EPOCHREALTIME/./}} - at))
done
until_then $((began + whole))
echo "computed=$computed"
"""


def write_programs(home: Path) -> Path:
    """Write what jobs run to the user's home. Returns the directory. Raises `Broken` without a C compiler."""
    here = home / DIRECTORY
    here.mkdir(exist_ok=True)
    here.chmod(0o777)  # jobs write what they say
    (here / "job.sh").write_text(_JOB.format(libraries=_LIBRARIES, grid=GRID))
    for name, size in SIZES.items():
        text = re.sub(r"(?m)^480 ", f"{size} ", HPCC_INPUT)
        (here / f"{name}.txt").write_text(re.sub(r"(?m)^2(\s+Qs)$", r"1\1", text))
    compile_kernel(here / "cg", "cg.c", "-pthread", "-lm")
    return here


def copy_hpcc(disk: Path, root: Path) -> None:
    """Copy HPCC with all that it needs from an image's disk to a directory. Raises `Broken` if that fails."""
    for directory in ("bin", "lib", "share"):
        (root / "usr" / directory).mkdir(parents=True, exist_ok=True)
    wanted = f"""dump /usr/bin/hpcc {root}/usr/bin/hpcc
rdump {_LIBRARIES} {root}/usr/lib
rdump /usr/share/openmpi {root}/usr/share
"""
    try:
        subprocess.run(["debugfs", "-f", "-", disk], input=wanted, capture_output=True, text=True, check=True)
        (root / "usr/bin/hpcc").chmod(0o755)
    except (OSError, subprocess.SubprocessError) as error:
        raise Broken(f"cannot copy hpcc from {disk}: {error}", hint="is e2fsprogs installed?") from error


def computed(said: str) -> float:
    """Seconds that a job's rounds took, by what it has said. Raises `Broken` if it failed."""
    if match := re.search(r"^computed=(\d+)$", said, re.MULTILINE):
        return int(match[1]) / 1e6
    raise Broken(f"a program of the paper's jobs failed: {said[-500:]}", hint="see whether the image has hpcc")
