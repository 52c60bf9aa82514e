"""The hypervisor's contract (tests/contract), kept by QEMU with real guests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import QemuSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Daemon, Identity, NodeBootstrap, vm_prefix
from multiverse.core.model.vm import VmRef, VmSpec
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import manifest
from multiverse.host.qemu import saves
from multiverse.host.qemu.channels import Monitor
from tests.contract.test_hypervisor_contract import SUITE, Check, Harness
from tests.contract.test_hypervisor_troubles import TROUBLES, only_an_instant_clone_needs_a_template
from tests.integration.watch import kill

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]


# Checks that delete the template come last, and the one that needs none last of all: the next check builds it again.
CHECKS = sorted((*SUITE, *TROUBLES), key=lambda c: (c is only_an_instant_clone_needs_a_template, "delet" in c.__name__))


_JOB = """\
batch=/sys/fs/cgroup/system.slice/job_1/step_batch
mkdir -p $batch/slurm $batch/user/task_0
if [ -e /run/multiverse/attach-program ]; then
    setsid sh -c "echo \\$\\$ >$batch/user/task_0/cgroup.procs; exec sh /run/multiverse/attach-program" &
else
    setsid sh -c "echo \\$\\$ >$batch/slurm/cgroup.procs
        sh -c 'echo \\$\\$ >$batch/user/task_0/cgroup.procs; exec sleep 1000000' & wait" &
fi
exec sleep 1000000
"""
"""What slurmd and slurmstepd do for a batch job in a guest, and for its next run in one that was restored."""


class Real(Harness):
    host, image, size = "h", "slim", Size(1, QemuSettings().base_memory)
    jobs_begin_by_themselves = True
    site = f"c{os.getpid() % 10000:04d}"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hypervisor = QemuHypervisor(settings, self.site)

    def identity(self, spec: VmSpec) -> Identity:
        daemon = Daemon("job", ("/bin/sh", "-c", _JOB))
        return replace(super().identity(spec), bootstrap=NodeBootstrap(daemons=(daemon,)))

    async def kill(self, name: str) -> None:
        known = manifest.read(self.settings.qemu.vms / name)
        assert known is not None
        kill(known.pid)

    def cpus(self, name: str) -> int:
        with Monitor.connect(self.settings.qemu.run / name / "qmp") as monitor:
            return len(monitor.execute("query-cpus-fast"))

    def remains(self, name: str) -> list[str]:
        qemu = self.settings.qemu
        places = [qemu.vms / name, qemu.run / name, Path("/sys/class/net") / name]
        found = [str(path) for path in places if path.exists()]
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if f"{qemu.vms / name}/".encode() in entry.read_bytes():
                    found.append(str(entry))
            except OSError:
                continue
        return found


@pytest.fixture
async def harness(settings: Settings) -> AsyncIterator[Real]:
    saved, copies = (settings.qemu.vms.parent / name for name in ("saved", "copies"))
    for place in (saved, copies):
        saves.prepare(place, vm_prefix(Real.site))
    real = Real(replace(settings, save=replace(settings.save, enabled=True, directory=saved, copy=copies)))
    yield real
    for name in (await real.hypervisor.observe()).vms:
        await real.hypervisor.destroy(VmRef(name), 0)
        assert not real.remains(name)
    real.hypervisor.close()  # type: ignore[attr-defined]


# Each boots a template, several times.
LONG = ("building_and_deleting_a_template_is_repeated_after_lost_replies",
        "a_create_while_its_template_is_deleted_leaves_a_whole_vm_or_none",
        "a_template_that_is_deleted_while_it_is_built_stays_deleted")  # fmt: skip
MARKED = [
    pytest.param(check, marks=[pytest.mark.slow] * (check.__name__ in LONG), id=check.__name__) for check in CHECKS
]


@pytest.mark.parametrize("check", MARKED)
async def test_qemu(check: Check, harness: Real) -> None:
    await check(harness)
