"""`multiverse demo`: real jobs in VMs of their own, from nothing and leaving nothing running."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiverse.cli import render
from multiverse.cli.render import console, duration
from multiverse.client import Client
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.guest import image
from multiverse.lab.layout import layout
from multiverse.lab.lifecycle import Progress
from multiverse.lab.plan import LabOptions
from multiverse.lab.services import SERVICES
from multiverse.lab.session import LabSession, session

IMAGE = "hpc"
LIMIT = 600.0
ATTEMPTS = 3  # a job that was requeued so often would be so for ever
LOG = "see log/controller.log in the lab's directory"

HELLO = """#!/bin/sh
echo "hello from $(hostname): $(nproc) CPU, $(awk '/MemTotal/{print int($2/1024)}' /proc/meminfo) MiB, as $(id -un)"
"""

ARRAY = """#!/bin/sh
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT ran on $(hostname)"
"""

# HPCC's input, in its own order of lines: one small HPL problem and one process grid of 1 × 2.
HPCC_INPUT = """HPLinpack benchmark input file
Multiverse demo
HPL.out      output file name (if any)
6            device out (6=stdout,7=stderr,file)
1            # of problems sizes (N)
480          Ns
1            # of NBs
48           NBs
0            PMAP process mapping (0=Row-,1=Column-major)
1            # of process grids (P x Q)
1            Ps
2            Qs
16.0         threshold
1            # of panel fact
2            PFACTs (0=left, 1=Crout, 2=Right)
1            # of recursive stopping criterium
4            NBMINs (>= 1)
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact.
1            RFACTs (0=left, 1=Crout, 2=Right)
1            # of broadcast
1            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)
1            # of lookahead depth
1            DEPTHs (>=0)
2            SWAP (0=bin-exch,1=long,2=mix)
64           swapping threshold
0            L1 in (0=transposed,1=no-transposed) form
0            U  in (0=transposed,1=no-transposed) form
1            Equilibration (0=no,1=yes)
8            memory alignment in double (> 0)
##### This line (no. 32) is ignored (it serves as a separator). ######
0            Number of additional problem sizes for PTRANS
1200         values of N
0            number of additional blocking sizes for PTRANS
40           values of NB
"""

HPCC = f"""#!/bin/sh
mkdir -p hpcc && cd hpcc && rm -f hpccoutf.txt
cat > hpccinf.txt <<'END'
{HPCC_INPUT}END
mpirun hpcc
"""


@dataclass
class Row:
    """One line of the demonstration: a job, or an array's task, and how it came out."""

    what: str
    job: str
    expected: str  # Slurm's word for how it must end
    state: str = "submitted"
    vm: str = ""
    note: str = ""
    said: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("done", "cancelled", "revoked", "failed", "refused")


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the lab is kept.")] = Path("/var/lib/multiverse/demo"),
    images: Annotated[Path, typer.Option("--images", help="Where images are kept.")] = Path(
        "/var/lib/multiverse/images"
    ),
) -> None:
    """Build the image, start a lab, run real jobs in VMs, show where their time went, leave nothing running.

    Ctrl-C ends everything as well. What is left of one that was killed: multiverse lab down --dir DIR.
    """
    if os.geteuid() != 0:
        raise Refused("the demonstration needs root: it makes links and starts daemons", hint="sudo make demo")
    with render.step("guest image") as say:
        image.build(
            IMAGE, "slim", images, packages=("hpcc",), progress=lambda line: say(line.removeprefix(f"image {IMAGE}: "))
        )
    asyncio.run(_demo(directory, images))


def _parts(say: Callable[[str], None]) -> Progress:
    """A line for each part of the lab, and the word that the next one is being started."""
    names = ["bridge", *(service.name for service in SERVICES)]
    following = dict(pairwise(names))

    def progress(name: str, word: str, seconds: float) -> None:
        console.print(f"  [green]✓[/] {name} {word} [dim]{duration(seconds)}[/]")
        if name in following:
            say(f"starting {following[name]}")

    return progress


async def _demo(directory: Path, images: Path) -> None:
    wishes = LabOptions(cores=8, memory=16384, image=IMAGE, images=images)
    stack = AsyncExitStack()
    try:
        with render.step("lab, a whole cluster on this machine") as say:
            lab = await stack.enter_async_context(session(layout(directory), wishes, _parts(say)))
        with Client(lab.settings.socket) as client:
            await _template(client)
            rows = await _run(lab, client)
            wrong = await _report(lab, client, rows)
    finally:
        with render.step("ending everything", "everything ended"):
            await stack.aclose()
    if wrong:
        raise Broken(f"not as expected: {', '.join(wrong)}", hint=f"see the logs in {directory}/log")


async def _template(client: Client) -> None:
    """The parent of all: it would be made for the first job, but here the wait is to be seen for what it is."""
    deadline = time.monotonic() + LIMIT
    host = (await _eventually(deadline, lambda: client.hosts() or None))[0]
    machine = host["machine"] or {}
    with render.step(f"template ({host['accelerator']}): boot it, freeze it at its fork point"):
        client.template("build", IMAGE, host["name"])
        row = await _eventually(
            deadline, lambda: next((t for t in client.templates() if t["state"] in ("ready", "broken")), None)
        )
    if row["state"] == "broken":
        raise Broken(f"the template is broken: {row['reason']}")
    declared = host["declared"]
    console.print(
        f"  declared for VMs: {declared['cpus']} cores, {render.memory(declared['memory'])}; "
        f"this machine has {machine.get('cpus')}, {render.memory(machine.get('memory', 0))}",
        style="dim",
    )


async def _eventually(deadline: float, ask: Any) -> Any:
    while time.monotonic() < deadline:
        answer = ask()
        if answer is not None:
            return answer
        await asyncio.sleep(0.05)
    raise Broken("the controller did not get that far in time", hint=LOG)


async def _run(lab: LabSession, client: Client) -> list[Row]:
    """Submit the jobs and follow them to their ends."""
    rows = [Row("hello", lab.submit(HELLO, "--job-name=hello", "--output=hello.out"), "COMPLETED")]
    array = lab.submit(ARRAY, "--job-name=array", "--array=1-3", "--output=array-%a.out")
    rows += [Row(f"array task {task}", f"{array}_{task}", "COMPLETED") for task in (1, 2, 3)]
    rows.append(Row("hpcc, 2 ranks", lab.submit(HPCC, "--job-name=hpcc", "-n2", "--mem=700"), "COMPLETED"))
    rows.append(Row("exits with 3", lab.submit("#!/bin/sh\nexit 3\n", "--job-name=fails"), "FAILED"))
    victim = Row("cancelled early", lab.submit(HELLO, "--job-name=victim"), "CANCELLED")
    rows.append(victim)
    try:
        huge = lab.submit(HELLO, "--job-name=huge", "--cpus-per-task=64", "--mem=1T")
        rows.append(Row("larger than any", huge, "refused"))
    except Refused as error:
        rows.append(
            Row("larger than any", "–", "refused", "refused", note="at submission, see below", said=error.message)
        )
    deadline = time.monotonic() + LIMIT
    with Live(console=console, auto_refresh=False) as live:
        while not all(row.over for row in rows):
            if time.monotonic() > deadline:
                late = ", ".join(row.what for row in rows if not row.over)
                raise Broken(f"not over after {duration(LIMIT)}: {late}", hint=LOG)
            _follow(client, rows)
            if victim.state in ("claimed", "spawning") and victim.note == "":
                victim.note = f"scancel while {victim.state}"
                await asyncio.to_thread(lab.run, "scancel", victim.job)
            if console.is_terminal:
                live.update(_table(rows), refresh=True)
            await asyncio.sleep(0.05)
        live.update(_table(rows), refresh=True)
    if not console.is_terminal:
        console.print()  # there Live does not end its last line
    for row in rows:
        if row.said:
            console.print(Text.assemble((f"{row.what}: ", "bold"), row.said))
    return rows


def _follow(client: Client, rows: Sequence[Row]) -> None:
    """Take over what the controller knows of each job: of its latest attempt, which is listed last."""
    jobs = client.jobs(ended=True)
    latest: dict[str, Mapping[str, Any]] = {job["job_id"]: job for job in jobs}
    for row in rows:
        job = latest.get(row.job)
        if job is None or row.over:
            continue
        if row.state != job["state"]:
            row.state = job["state"]
            if not console.is_terminal:
                console.print(f"  {row.job:>6}  {row.what:<16} {row.state}", markup=False)
        row.vm = job["vms"][-1] if job["vms"] else ""
        again = [one["reason"] for one in jobs if one["job_id"] == row.job and one["state"] == "requeued"]
        if len(again) == ATTEMPTS:
            raise Broken(f"{row.what} was requeued {ATTEMPTS} times: {again[-1]}", hint=LOG)
        if again:
            row.note = f"requeued: {again[-1]}"


def _table(rows: Sequence[Row]) -> Table:
    table = render.table("JOB", "WHAT", "STATE", "VM", "", fold=("",))
    table.columns[2].min_width = table.columns[3].min_width = 10  # they hold still while states change
    for row in rows:
        table.add_row(row.job, row.what, render.state(row.state), row.vm, Text(row.note))
    return table


async def _report(lab: LabSession, client: Client, rows: Sequence[Row]) -> list[str]:
    """Where each job's time went, what it printed, and what Slurm keeps of it; the names of what went wrong."""
    wrong: list[str] = []
    console.rule("where the time went", style="dim")
    for row in rows:
        if row.job != "–":
            _times(client, row)
    console.print(_legend())
    console.rule("what Slurm keeps (sacct)", style="dim")
    kept = await _accounts(lab, rows)
    table = render.table("JOB", "NAME", "STATE", "EXIT", "NODE", right=("EXIT",))
    for row in rows:
        if row.job == "–":
            if row.expected != "refused":
                wrong.append(row.what)
            continue
        name, word, code, node = kept.get(row.job, (row.what, "unknown", "", ""))
        if not word.startswith(row.expected):
            wrong.append(f"{row.what} is {word}")
        table.add_row(row.job, name, word, code, node)
    console.print(table)
    console.rule("what the jobs wrote, where they were submitted", style="dim")
    for name in ("hello.out", "array-1.out", "array-2.out", "array-3.out"):
        text = _text(lab.user.home / name)
        console.print(Text.assemble((f"{name:<12}", "bold"), text or "(nothing)"))
        if not text:
            wrong.append(f"{name} is empty")
    figures = _hpcc(lab.user.home / "hpcc" / "hpccoutf.txt")
    console.print(Text.assemble(("hpcc        ", "bold"), figures or "(nothing)"))
    if not figures:
        wrong.append("hpcc printed no figures")
    console.print()
    return wrong


def _times(client: Client, row: Row) -> None:
    try:
        one = client.timeline(row.job)[-1]
    except MultiverseError:
        return
    phases = one["phases"]
    total = sum(phase["seconds"] for phase in phases)
    line = Text(f"{row.job:>6}  {row.what:<16}{duration(total):>8}  ")
    width = max(10, min(60, console.width - len(line.plain) - 2))
    line.append_text(render.bar([(p["seconds"], render.PHASE_STYLES[p["name"]]) for p in phases], width))
    console.print(line)
    parts = Text("        ")
    for phase in phases:
        parts.append(f"{phase['name']} ", style=render.PHASE_STYLES[phase["name"]])
        parts.append(f"{phase['seconds']:.2f}  ", style="dim")
    console.print(parts)


def _legend() -> Text:
    text = Text("        in seconds; ", style="dim")
    text.append("launch is Slurm's own turn, up to a second", style="dim")
    return text


async def _accounts(lab: LabSession, rows: Sequence[Row]) -> dict[str, tuple[str, str, str, str]]:
    """What sacct says, once slurmdbd has heard of every end."""
    jobs = [row.job for row in rows if row.job != "–"]
    deadline = time.monotonic() + 30
    while True:
        done = await asyncio.to_thread(
            lab.run, "sacct", "-X", "-n", "-P", "-o", "JobID,JobName,State,ExitCode,NodeList", "-j", ",".join(jobs)
        )
        kept = {}
        for line in done.stdout.splitlines():
            job, name, word, code, node = line.split("|")
            kept[job] = (name, word.split()[0] if word else "", code, node)
        ended = all(kept.get(job, ("", "PENDING", "", ""))[1] not in ("PENDING", "RUNNING", "") for job in jobs)
        if ended or time.monotonic() > deadline:
            return kept
        await asyncio.sleep(0.25)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _hpcc(path: Path) -> str:
    """HPL's and RandomAccess's figures from HPCC's summary, with HPL's own verdict on its result."""
    summary = _text(path)
    found = dict(
        re.findall(r"^(HPL_Tflops|MPIRandomAccess_GUPs|Success|HPL_N|CommWorldProcs)=(\S+)$", summary, re.MULTILINE)
    )
    if "HPL_Tflops" not in found or found.get("Success") != "1":
        return ""
    return (
        f"HPL N={found.get('HPL_N')} on {found.get('CommWorldProcs')} ranks: "
        f"{float(found['HPL_Tflops']) * 1000:.3f} GFlop/s, "
        f"MPI RandomAccess {float(found['MPIRandomAccess_GUPs']) * 1000:.3f} MUP/s"
    )
