"""The benchmark of containers on a small lab: all figures and cells are there, and nothing is left.

What a job isolates is checked where nothing but its way decides it; times are not, because they vary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.bench import containers, isolation, latency
from multiverse_lab.bench.containers import BARE, bundle_of, node_group, ways_of
from multiverse_lab.bench.latency import LatencyPlan
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.session import LabSession, session_environment
from tests.integration.conftest import new_lab
from tests.integration.images import BUILT, plain

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(bool(containers.lacking()), reason=f"not installed: {' '.join(containers.lacking())}"),
]

WAYS = ways_of(f"{BARE},podman,podman_host_network,slurm_container,instant")
CONTAINERS = ("podman", "podman_host_network", "slurm_container")


@pytest.fixture(scope="module")
def bench(accelerator: Path) -> Iterator[LabSession]:
    plain()
    options = LabOptions(physical=1, cores=4, memory=8192, images=BUILT, settings={"job_vms": {"enabled": False}})
    with new_lab(accelerator, options, controller=True) as lab:
        plan = load(lab.where)
        assert plan is not None
        own = Lab(lab.where, plan)
        yield LabSession(lab.where, lab.settings, lab.user, own, session_environment(lab.where), lab.other)


def test_containers_are_measured_and_tried_beside_bare_metal_and_a_vm(bench: LabSession) -> None:
    kinds = [way.kind(bench.user.home) for way in WAYS]
    with containers.containers(bench, BUILT / "slim" / "disk.raw"), Client(bench.settings.socket) as client:
        samples = latency.run(bench, client, LatencyPlan(1, 1, kinds), containers.node_cost(bench), lambda *_: None)
        found = isolation.table(bench, WAYS, lambda *_: None)
    for name, one in samples.items():
        assert len(one.submit_to_start) == len(one.cpu_s) == len(one.uss_mib) == 1 and min(one.uss_mib) > 0, name
    assert samples["podman"].uss_mib[0] > samples[BARE].uss_mib[0]  # podman's own processes count
    assert found["sees another user's process on its machine"] == {
        BARE: "yes",
        **dict.fromkeys(CONTAINERS, "no"),
        "instant": "no",
    }
    assert found["reads another user's file in /tmp"] == {
        BARE: "yes",
        **dict.fromkeys(CONTAINERS, "no"),
        "instant": "no",
    }
    ports = found["reaches another user's port on the loopback"]
    assert [way for way, said in ports.items() if said == "yes"] == [BARE, "podman_host_network", "slurm_container"]
    assert found["has the machine's kernel"] == {BARE: "yes", **dict.fromkeys(CONTAINERS, "yes"), "instant": "no"}
    assert all(found["is root inside"][way] == "yes" for way in CONTAINERS)
    assert set(found["makes a file of root's in the shared directory"].values()) == {"no: it is the user's"}
    assert (
        found["has its processes among the machine's"][BARE].startswith("yes: 200")
        and "none" in found["has its processes among the machine's"]["instant"]
    )
    assert all(said.startswith("no") for said in found["uses more memory than it requested"].values())


def test_nothing_is_left_of_containers(bench: LabSession) -> None:
    assert not bundle_of(bench.user.home).exists() and not (bench.user.home / ".local").exists()
    assert not list(Path("/tmp").glob("mv-neighbour-*"))
    assert not [pid for pid in control_groups.processes(*node_group(bench).split("/")) if _user(pid) == bench.user.uid]
    for name in ("subuid", "subgid"):
        assert bench.user.name not in Path("/etc", name).read_text()


def _user(pid: int) -> int:
    """Whose a process is; -1: it has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
