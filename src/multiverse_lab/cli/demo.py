"""`multiverse demo`: builds an image, starts a lab, runs real jobs in VMs, and ends everything."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import HostView, SizeView, TemplateView, TimelineView, decode
from multiverse.cli import progress, render
from multiverse.cli.render import console, duration
from multiverse.client import Client
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.images.build import build as build_image
from multiverse.system import interrupts
from multiverse_lab.bench.hpcc import HPCC_INPUT, hpcc_figures
from multiverse_lab.cli.demo_first import first_impression
from multiverse_lab.cli.demo_jobs import LOG_HINT, DemoJob, eventually, follow, text_of
from multiverse_lab.cli.demo_physical import NODES, physical_nodes
from multiverse_lab.cli.demo_preempt import demo_preempt
from multiverse_lab.cli.demo_saved import saved_job
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.lifecycle import Progress
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.services import services
from multiverse_lab.lab.session import LabSession, session

IMAGE = "hpc"
HOSTS, CORES, MEMORY = 2, 4, 8192  # of each host; memory in MiB
ACCOUNTING_LIMIT = 30.0
"""Seconds after which Slurm's accounting must know the end of every job."""

NO_JOB = "–"
"""Shown instead of a job id where sbatch refused the job."""

HELLO = """#!/bin/sh
echo "hello from $(hostname): $(nproc) CPU, $(awk '/MemTotal/{print int($2/1024)}' /proc/meminfo) MiB, as $(id -un)"
"""

ARRAY = """#!/bin/sh
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT ran on $(hostname)"
"""

# Of a size of which a host holds one VM only.
GANG = """#!/bin/sh
srun sh -c 'echo "rank $SLURM_PROCID of $SLURM_NTASKS ran on $(hostname)"'
"""

HPCC = f"""#!/bin/sh
mkdir -p hpcc && cd hpcc && rm -f hpccoutf.txt
cat > hpccinf.txt <<'END'
{HPCC_INPUT}END
mpirun hpcc
"""


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the lab is kept.")] = Path("/var/lib/multiverse/demo"),
    images: Annotated[Path, typer.Option("--images", help="Where images are kept.")] = Path(
        "/var/lib/multiverse/images"
    ),
    preempt: Annotated[
        bool, typer.Option("--preempt", help="Another story: urgent jobs take the places of others, which go on later.")
    ] = False,
) -> None:
    """Build the image, start a lab, run real jobs in VMs, show where their time went, leave nothing running.

    Ctrl-C ends everything as well. If the demonstration was killed, end the rest by: multiverse lab down --dir DIR.
    """
    if os.geteuid() != 0:
        raise Refused("the demonstration needs root: it makes links and starts daemons", hint="sudo make demo")
    # The other story's lines for Slurm refuse this one's user.
    (layout(directory).etc / "site.conf").unlink(missing_ok=True)
    with progress.step("guest image") as say:
        build_image(
            IMAGE, "slim", images, packages=("hpcc",), progress=lambda line: say(line.removeprefix(f"image {IMAGE}: "))
        )
    if preempt:
        interrupts.run(demo_preempt(directory, IMAGE, images, _lab_progress, _templates))
    else:
        interrupts.run(_demo(directory, images))


def _lab_progress(where: Layout, say: Callable[[str], None]) -> Progress:
    """Prints a line for each service of the lab that has started, and shows which one is starting."""

    def progress(name: str, word: str, seconds: float) -> None:
        console.print(f"  [green]✓[/] {name} {word} [dim]{duration(seconds)}[/]")
        following = dict(pairwise(["bridge", *(service.name for service in services(load(where)))]))
        if name in following:
            say(f"starting {following[name]}")

    return progress


async def _demo(directory: Path, images: Path) -> None:
    options = LabOptions(cores=CORES, memory=MEMORY, hosts=HOSTS, physical=NODES, image=IMAGE, images=images)
    stack, where = AsyncExitStack(), layout(directory)
    try:
        with progress.step(f"lab: a cluster of {HOSTS} hosts and {NODES} bare-metal nodes on this machine") as say:
            lab = await stack.enter_async_context(session(where, options, _lab_progress(where, say)))
        with Client(lab.settings.socket) as client:
            await _templates(client)
            await first_impression(lab, client)
            rows = await _run(lab, client)
            wrong = await saved_job(lab, client, options)
            wrong += await physical_nodes(lab, client)
            wrong += await _report(lab, client, rows)
    finally:
        with progress.step("ending everything", "everything ended"):
            await stack.aclose()
    if wrong:
        raise Broken(f"not as expected: {', '.join(wrong)}", hint=f"see the logs in {directory}/log")


async def _templates(client: Client) -> None:
    """Build the template on each host. It would be built for the first job too; here its time is shown apart from the
    job's."""
    hosts = await eventually(lambda: _reachable(client), "the hosts were not reached")
    with progress.step(f"templates ({hosts[0].accelerator}): copy the image, boot it, freeze it at its fork point"):
        for host in hosts:
            client.template("build", IMAGE, host.name)
        templates = await eventually(lambda: _built(client), "the templates were not built")
    if broken := next((template for template in templates if template.state == "broken"), None):
        raise Broken(f"the template on {broken.host} is broken: {broken.reason}", hint=LOG_HINT)
    machine = hosts[0].machine or SizeView(0, 0, 0)
    declared = hosts[0].declared
    console.print(
        f"  declared for VMs on each host: {declared.cpus} cores, {render.memory(declared.memory)}; "
        f"this machine has {machine.cpus}, {render.memory(machine.memory)}",
        style="dim",
    )


def _reachable(client: Client) -> list[HostView] | None:
    found = [host for host in decode(list[HostView], client.hosts()) if host.reachable]
    return found if len(found) == HOSTS else None


def _built(client: Client) -> list[TemplateView] | None:
    found = decode(list[TemplateView], client.templates())
    ended = [one for one in found if one.state in ("ready", "broken")]
    return ended if len(ended) == HOSTS else None


async def _run(lab: LabSession, client: Client) -> list[DemoJob]:
    """Submit the jobs and follow them until all have ended."""
    rows = [DemoJob("hello", lab.submit(HELLO, "--job-name=hello", "--output=hello.out"), "COMPLETED")]
    array = lab.submit(ARRAY, "--job-name=array", "--array=1-3", "--output=array-%a.out")
    rows += [DemoJob(f"array task {task}", f"{array}_{task}", "COMPLETED") for task in (1, 2, 3)]
    gang = lab.submit(GANG, "--job-name=gang", "-N2", f"-c{CORES - 1}", "--mem=300", "--output=gang.out")
    rows.append(DemoJob("on two hosts", gang, "COMPLETED"))
    rows.append(DemoJob("hpcc, 2 ranks", lab.submit(HPCC, "--job-name=hpcc", "-n2", "--mem=700"), "COMPLETED"))
    rows.append(DemoJob("exits with 3", lab.submit("#!/bin/sh\nexit 3\n", "--job-name=fails"), "FAILED"))
    victim = DemoJob("cancelled early", lab.submit(HELLO, "--job-name=victim"), "CANCELLED")
    rows.append(victim)
    try:
        huge = lab.submit(HELLO, "--job-name=huge", "--cpus-per-task=64", "--mem=1T")
        rows.append(DemoJob("larger than any", huge, "refused"))
    except Refused as error:
        rows.append(
            DemoJob(
                "larger than any", NO_JOB, "refused", "refused", note="at submission, see below", refusal=error.message
            )
        )

    async def cancel() -> None:
        if victim.state in ("claimed", "spawning") and victim.note == "":
            victim.note = f"scancel while {victim.state}"
            await asyncio.to_thread(lab.run, "scancel", victim.job)

    await follow(client, rows, cancel)
    for row in rows:
        if row.refusal:
            console.print(Text.assemble((f"{row.what}: ", "bold"), row.refusal))
    return rows


async def _report(lab: LabSession, client: Client, rows: Sequence[DemoJob]) -> list[str]:
    """Show where each job's time went, what it printed, and its accounting record. Returns what is not as expected."""
    console.rule("where the time went", style="dim")
    for row in rows:
        if row.job != NO_JOB:
            _show_times(client, row)
    console.print(_legend())
    wrong = _show_accounts(rows, await _accounts(lab, rows))
    wrong += _show_outputs(lab)
    console.print()
    return wrong


def _show_accounts(rows: Sequence[DemoJob], kept: Mapping[str, tuple[str, str, str, str]]) -> list[str]:
    """Show Slurm's accounting records. Returns the jobs that did not end as expected."""
    wrong: list[str] = []
    console.rule("what Slurm keeps (sacct)", style="dim")
    table = render.table("JOB", "NAME", "STATE", "EXIT", "NODE", right=("EXIT",))
    for row in rows:
        if row.job == NO_JOB:
            if row.expected != "refused":
                wrong.append(row.what)
            continue
        name, word, code, node = kept.get(row.job, (row.what, "unknown", "", ""))
        if not word.startswith(row.expected):
            wrong.append(f"{row.what} is {word}")
        table.add_row(row.job, name, word, code, node)
    console.print(table)
    return wrong


def _show_outputs(lab: LabSession) -> list[str]:
    """Show the files that the jobs wrote. Returns those that are missing or empty."""
    wrong: list[str] = []
    console.rule("what the jobs wrote, where they were submitted", style="dim")
    for name in ("hello.out", "array-1.out", "array-2.out", "array-3.out", "gang.out"):
        text = "; ".join(sorted(text_of(lab.user.home / name).splitlines()))
        console.print(Text.assemble((f"{name:<12}", "bold"), text or "(nothing)"))
        if not text:
            wrong.append(f"{name} is empty")
    figures = _hpcc(lab.user.home / "hpcc" / "hpccoutf.txt")
    console.print(Text.assemble(("hpcc        ", "bold"), figures or "(nothing)"))
    if not figures:
        wrong.append("hpcc printed no figures")
    return wrong


def _show_times(client: Client, row: DemoJob) -> None:
    """Print the job's bar and the seconds of its phases."""
    try:
        one = decode(list[TimelineView], client.timeline(row.job))[-1]
    except MultiverseError:
        return
    total = sum(phase.seconds for phase in one.phases)
    line = Text(f"{row.job:>6}  {row.what:<16}{duration(total):>8}  ")
    width = max(10, min(60, console.width - len(line.plain) - 2))
    line.append_text(render.bar([(phase.seconds, render.PHASE_STYLES[phase.name]) for phase in one.phases], width))
    console.print(line)
    parts = Text("        ")
    for phase in one.phases:
        parts.append(f"{phase.name} ", style=render.PHASE_STYLES[phase.name])
        parts.append(f"{phase.seconds:.2f}  ", style="dim")
    console.print(parts)


def _legend() -> Text:
    text = Text("        in seconds; ", style="dim")
    text.append("launch is Slurm's own turn, up to a second", style="dim")
    return text


async def _accounts(lab: LabSession, rows: Sequence[DemoJob]) -> dict[str, tuple[str, str, str, str]]:
    """Name, state, exit code and nodes of each job in Slurm's accounting, once slurmdbd knows every end."""
    jobs = [row.job for row in rows if row.job != NO_JOB]
    deadline = time.monotonic() + ACCOUNTING_LIMIT
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


def _hpcc(path: Path) -> str:
    """The figures of HPL and RandomAccess from HPCC's summary; empty unless HPL found its own result correct."""
    found = hpcc_figures(text_of(path))
    if not found:
        return ""
    return (
        f"HPL N={found.get('HPL_N')} on {found.get('CommWorldProcs')} ranks: "
        f"{float(found['HPL_Tflops']) * 1000:.3f} GFlop/s, "
        f"MPI RandomAccess {float(found['MPIRandomAccess_GUPs']) * 1000:.3f} MUP/s"
    )
