"""Features of this host with real guests: what is there is used, what is not is said, and VMs start either way."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model.basics import CloneKind, Size
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import manifest
from multiverse.host.qemu import abilities, cpus
from multiverse.host.qemu.abilities import HostFeatures, huge_page_trial, trials
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.machine import Accelerator, Feature
from tests.integration.huge_pages import huge_pages
from tests.integration.test_qemu_driver import BASE, PARENT, SITE, Lab, answers_of, swept

__all__ = ["swept"]  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

__all__ = ["huge_pages"]  # a fixture

WROTE = "dd if=/dev/urandom of=/root/one bs=1M count=16 conv=fsync 2>/dev/null && sha256sum < /root/one"
READ = "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /root/one"


@pytest.fixture
async def lab(settings: Settings) -> Lab:
    """A host with all features that work here, also those that are used on request only."""
    own = settings.qemu.templates.with_name("features")  # the templates of other tests have other devices
    wanted = dataclasses.replace(
        settings, qemu=dataclasses.replace(settings.qemu, iothread="on", native_aio="on", templates=own)
    )
    hypervisor = QemuHypervisor(wanted, SITE)
    await hypervisor.build_template(PARENT)
    return Lab(wanted, hypervisor, int(time.monotonic() * 10) % 100)


async def shown(lab: Lab) -> tuple[frozenset[str], dict[str, str]]:
    """The features that the host has, and why it does without the others."""
    host = (await lab.hypervisor.observe()).hosts["h"]
    return host.features, dict(host.features_off)


def monitor(lab: Lab, name: str) -> Monitor:
    """The monitor of a VM's QEMU, by the driver's own connection: QEMU serves one at a time."""
    known = manifest.read(lab.settings.qemu.vms / name)
    assert known is not None
    return lab.hypervisor._host._context.connections.session(known).monitor


def is_direct(lab: Lab, name: str) -> dict[str, bool]:
    """By file, whether QEMU reads and writes it past the page cache."""
    nodes: list[dict[str, Any]] = monitor(lab, name).execute("query-named-block-nodes")
    return {Path(node["file"]).name: node["cache"]["direct"] for node in nodes if node["drv"] == "file"}


async def test_what_works_here_is_used_and_the_rest_has_a_reason(lab: Lab) -> None:
    used, lacking = await shown(lab)
    assert used | lacking.keys() == set(Feature) and not used & lacking.keys() and all(lacking.values())
    assert Feature.IOTHREAD in used, "QEMU alone decides"
    assert (Feature.VHOST_NET in used) <= Path("/dev/vhost-net").exists()


@pytest.mark.parametrize("kind", [CloneKind.INSTANT, pytest.param(CloneKind.FULL, marks=pytest.mark.slow)])
async def test_a_guest_works_with_all_that_its_host_has(lab: Lab, kind: CloneKind) -> None:
    spec = lab.spec(kind)
    await lab.hypervisor.create(spec)
    wrote, read = await answers_of(lab, spec, f"{WROTE}; {READ}")
    assert wrote == read
    assert [one["id"] for one in monitor(lab, spec.name).execute("query-iothreads")] == ["io"]
    direct = is_direct(lab, spec.name)
    if kind is CloneKind.FULL:
        assert direct == {"disk.raw": Feature.NATIVE_AIO in (await shown(lab))[0]}
    else:
        assert len(direct) > 1 and not any(direct.values()), "clones share what is cached of the disks below their own"


async def test_each_feature_of_disks_is_tried_by_a_boot(lab: Lab, tmp_path: Path) -> None:
    context = lab.hypervisor._host._context
    tried = trials(context.config.binary, context.version, context.accelerator, tmp_path, tmp_path / "features.json")
    assert tried[Feature.IOTHREAD]() == ""
    wrong = trials("/bin/false", context.version, context.accelerator, tmp_path, tmp_path / "other.json")
    assert "ended with 1" in wrong[Feature.IOTHREAD]()


def test_a_vhost_net_that_does_not_serve_qemu_is_found_by_a_boot(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor is of another device. QEMU accepts the arguments, and finds that out."""
    monkeypatch.setattr(abilities, "open_vhost_net", lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    monkeypatch.setattr(abilities, "vhost_net_trial", lambda: "")
    context, place = lab.hypervisor._host._context, lab.settings.state_dir
    tried = trials(context.config.binary, context.version, context.accelerator, place, place / "none.json")
    assert "instead of 85" in tried[Feature.VHOST_NET]()
    assert tried[Feature.IOTHREAD]() == "", "the same boot with another device"
    (place / "none.json").unlink()


async def test_plugged_memory_is_in_huge_pages_as_long_as_there_are_enough(huge_pages: int, lab: Lab) -> None:
    assert huge_page_trial() == ""
    lab.hypervisor.close()
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)  # as after a restart of the agent
    assert Feature.HUGE_PAGES in (await shown(lab))[0]
    size = Size(1, BASE.memory + huge_pages)
    first, second = lab.spec(size=size), lab.spec(size=size)
    for spec in (first, second):
        await lab.hypervisor.create(spec)
    touch = f"dd if=/dev/zero of=/dev/shm/x bs=1M count={huge_pages // 2} 2>/dev/null; stat -c %s /dev/shm/x"
    (one,) = await answers_of(lab, first, f"mount -o remount,size=90% /dev/shm; {touch}")
    (two,) = await answers_of(lab, second, "grep MemTotal /proc/meminfo")
    assert int(one) == huge_pages // 2 << 20 and int(two.split()[1]) > huge_pages << 10, "both have their memory"
    backends = {
        spec.name: [one["name"] for one in monitor(lab, spec.name).execute("qom-list", path="/objects")]
        for spec in (first, second)
    }
    assert "huge0" in backends[first.name] and "mem0" in backends[second.name]
    seen = (await lab.hypervisor.observe()).vms
    assert seen[first.name].private >= huge_pages > seen[second.name].private


@pytest.mark.slow
async def test_a_host_goes_on_without_a_feature_with_which_its_first_vm_does_not_start(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = lab.hypervisor._host._context
    context.features = HostFeatures({}, context.accelerator, dict.fromkeys(Feature, lambda: ""))
    monkeypatch.setattr(abilities, "_EMULATED", {})
    monkeypatch.setattr(
        "multiverse.host.qemu.session.open_vhost_net", lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    )
    assert Feature.VHOST_NET in context.features.in_use
    with pytest.raises(Broken, match="did not start"):
        await lab.hypervisor.build_template(PARENT)
    used, lacking = await shown(lab)
    assert Feature.VHOST_NET not in used and "did not start" in lacking[Feature.VHOST_NET]
    await lab.hypervisor.build_template(PARENT)
    await lab.started(lab.spec())


def test_qemu_says_which_cpu_models_it_runs(settings: Settings) -> None:
    """By emulation, which does without many features, and so runs no model of a recent CPU."""
    found = cpus.examine(settings.qemu.binary, "tcg")
    assert {"Nehalem-v1", "Westmere-v1"} <= set(found.models) and "Icelake-Server-v1" not in found.models
    assert "avx512f" in found.lacking["Icelake-Server-v1"] and not set(found.models) & set(found.lacking)
    assert found.named("Haswell-noTSX") == "Haswell-v2"
    assert found.why_not("Haswell-noTSX") == found.why_not("Haswell-v2") != ""
    assert {"sse2", "lm"} <= found.features and found.name.startswith("QEMU TCG CPU")
    assert found.models.index("Westmere-v1") < found.models.index("Nehalem-v1") < found.models.index("kvm64-v1")
    assert cpus.examine(settings.qemu.binary, "tcg").identity == found.identity


def test_qemu_ends_if_the_cpu_lacks_something_of_the_model(settings: Settings) -> None:
    """Otherwise a guest would have another CPU on each host, without a word."""
    how = Accelerator("kvm", model="Icelake-Server-v1").cpu_option
    argv = [settings.qemu.binary, "-accel", "tcg", "-cpu", how, "-nodefaults", "-display", "none", "-S"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode and "avx512f" in done.stderr
