"""An agent that gives the VM of a job a virtual function, inside of the guest with an IOMMU: `python -m
tests.integration.vm_with_function CONTROLLER IMAGES TEMPLATES MVENTER`.

It is the agent's own service with real QEMU. Only Slurm is missing, and the template is built outside, because a guest
within a guest boots for many minutes. It prints a line of JSON with what it has seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from multiverse.agent.jobs import JobVmService, JobVmSizes
from multiverse.config import AgentSettings, HostSettings, JobVmSettings, QemuSettings, Settings
from multiverse.core.model.identity import User
from multiverse.drivers.qemu.job_vms import QemuJobVms
from multiverse.host import manifest
from multiverse.host.virtual_functions import RECORDS, VirtualFunctions
from tests.integration import nvme_functions
from tests.integration.functions_in_guest import as_user, state

TOP = Path("/run/mv")
USER = User("ada", 4711, 4711, "/tmp", "/bin/sh")
STRANGER = 4712
BASE, ASKED, REGION = 288, 416, 32
# What the task prints: the serial number and a block's beginning, as the driver has read them from the function; the
# owners of its device files and of the region of memory; whose task it is; and where the function and the region are.
TASK = """cat /sys/class/nvme/nvme0/serial; head -c 512 /dev/nvme0n1 | tr -d '\\0'; echo
stat -L -c %u /dev/nvme0 /dev/nvme0n1 /dev/ivshmem/0 | uniq; id -u
basename $(dirname $(realpath /sys/class/nvme/nvme0/device))
basename $(dirname $(dirname $(realpath /dev/ivshmem/0)))
"""


def settings(controller: str, images: Path, templates: Path) -> Settings:
    """Those of the agent, and of whoever builds its template."""
    return Settings(
        state_dir=TOP / "state",
        agent=AgentSettings(state_dir=TOP / "agent"),
        host=HostSettings(name="inner", cores=2, memory=1024, disk=8192),
        qemu=QemuSettings(images=images, templates=templates, vms=TOP / "vms", run=TOP / "run",
                          accel="tcg", tb_size=64, base_memory=BASE, max_memory=1024, max_cpus=1),
        job_vms=JobVmSettings(enabled=True, sriov=(controller,), ivshmem_size=REGION),
    )  # fmt: skip


async def user_of(uid: int) -> User:
    return USER


async def no_prolog() -> str:
    return ""


async def ask(path: Path, line: str) -> str:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line.encode() + b"\n")
    answered = await reader.read()
    writer.close()
    return answered.decode().strip()


def of_qemu(vms: Path) -> dict[str, Any]:
    """What the VM's QEMU is: its user, what it may keep in place and keeps, and how much of its memory is its own
    (MiB)."""
    (home,) = vms.glob("mvjob-*")
    known = manifest.read(home)
    assert known is not None
    status = dict(line.split(":", 1) for line in Path(f"/proc/{known.pid}/status").read_text().splitlines())
    return {
        "uid": known.uid,
        "limit": resource.prlimit(known.pid, resource.RLIMIT_MEMLOCK)[0] >> 20,
        "kept": int(status["VmLck"].split()[0]) >> 10,
        "own": int(status["RssAnon"].split()[0]) >> 10,
        "total": known.total_memory,
        "template": known.template_build,
    }


async def main(controller: str, images: Path, templates: Path, mventer: Path) -> None:
    nvme_functions.make(controller, 2)
    site = settings(controller, images, templates)
    functions = VirtualFunctions((controller,), site.qemu.vms / RECORDS)
    found: dict[str, Any] = {"before": state(functions)}
    records, sock = TOP / "records", TOP / "sock"
    for directory in (TOP, records, site.qemu.vms, site.qemu.run):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
    (records / "7").write_text("functions=1\n")
    sizes = JobVmSizes("slim", BASE, 192, Path("/usr/bin"), no_prolog, REGION)

    def agent() -> JobVmService:
        return JobVmService(QemuJobVms(site), user_of, site.agent.state_dir / "jobs", records, sizes)

    service = agent()
    await service.start()
    server = await asyncio.start_unix_server(service.serve, sock)
    sock.chmod(0o666)
    request = f"uid={USER.uid} cores=1 allocated=1024 cpus=1 memory={ASKED} disk= image=slim nodes=n1 node=n1 vms=1"
    found["provided"] = await ask(sock, f"provide job=7 {request} functions=1 groups= regions=1")
    found["refused"] = await ask(sock, f"provide job=8 {request} functions=2 groups=")
    if found["provided"] == "ok":
        found["qemu"], found["during"] = of_qemu(site.qemu.vms), state(functions)
        node = functions.device_of(next(f for f in functions.listed() if f.driver == "vfio-pci"))
        found["stranger"] = as_user(STRANGER, lambda: os.close(os.open(node, os.O_RDWR)))
        found["stranger asks"] = as_user(STRANGER, lambda: list((site.qemu.vms / RECORDS).iterdir()))
        task = [mventer, sock, "7", "0", "command", "/bin/sh", "-c", TASK]
        done = await asyncio.to_thread(
            subprocess.run, task, user=USER.uid, group=USER.gid, extra_groups=[], cwd="/", env={"PATH": "/bin"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found["task"], found["errors"] = [line.strip() for line in done.stdout.splitlines()], done.stderr
    server.close()
    await service.close()
    # The next agent, after the end of the job.
    (records / "7").unlink()
    service = agent()
    await service.start()
    await service.close()
    found["after"], found["left"] = state(functions), [path.name for path in site.qemu.vms.glob("mv*")]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(Path, sys.argv[2:])))
