"""What a pilot makes of its job: settings, control groups, directories. Without a job, a namespace or root."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import (
    LEASE_RESERVE,
    AgentSettings,
    JobVmSettings,
    MoveSettings,
    QemuSettings,
    RebalanceSettings,
    SaveSettings,
    Settings,
)
from multiverse.core.errors import Exhausted, Refused
from multiverse.pilot.lease import (
    NODE_SHARE,
    SLOTS,
    LeaseDirectory,
    PilotRecord,
    directory_of,
    job_of,
    lease_directories,
    make_groups,
    memory_limit,
    port_name,
    read_end,
    remove_groups,
    share_of,
    slot,
    sweep,
    write_end,
)
from multiverse.pilot.run import PilotOrder, _node_network, _note_end, leased_settings
from multiverse.service.agent import _holds_until
from multiverse.service.pilot import PilotJob, _address, _completed
from multiverse.system.locks import try_locked_directory

V1 = "8:pids:/system\n6:freezer:/slurm/uid_0/job_17/step_0\n4:memory:/slurm/uid_0/job_17/step_0/task_0\n0::/\n"


def test_the_job_is_what_the_environment_says() -> None:
    env = {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "4000"}
    assert _completed(PilotJob(token="t"), env) == PilotJob("17", 8, 4000, "t")
    assert _completed(PilotJob(), {**env, "SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "100"}).memory == 800
    assert _completed(PilotJob("9", 2, 100), {}) == PilotJob("9", 2, 100), "a command such as sudo clears it"
    assert _completed(PilotJob("9", 2), {}).memory > 0
    with pytest.raises(Refused, match="in no job"):
        _completed(PilotJob(), {})
    assert PilotJob.parse("17,8,4000", "t") == PilotJob("17", 8, 4000, "t")
    assert PilotJob.parse("17,8,4000,n7", "t") == PilotJob("17", 8, 4000, "t", "n7")
    assert _completed(PilotJob("9", 2, 100), {"SLURMD_NODENAME": "n7"}).node == "n7"
    assert PilotJob.parse("", "t") == PilotJob(token="t")
    with pytest.raises(Refused):
        PilotJob.parse("17", "")


def test_a_lease_is_a_host_of_its_own(tmp_path: Path) -> None:
    settings = Settings(
        qemu=QemuSettings(uids=(1000, 160)),
        agent=AgentSettings(self_fence=600.0, leases=tmp_path),
        job_vms=JobVmSettings(enabled=True, only=True),
    )
    place = LeaseDirectory(tmp_path / "lease-ab12c-1")
    place.root.mkdir()
    order = PilotOrder("lease-ab12c-1", "17", 8, 4000, settings, lambda *_: None)
    own = leased_settings(order, place, 3)
    assert (own.host.name, own.host.cores, own.host.memory) == ("lease-ab12c-1", 8, 4000 - LEASE_RESERVE)
    assert 0 < own.host.disk <= settings.host.disk
    assert own.agent.socket.parent == own.agent.state_dir.parent == place.root and own.agent.self_fence == 0
    assert not own.job_vms.enabled and not own.job_vms.only, "those are of the node's own agent"
    assert own.qemu.uids == (1027, 9)
    shares = [
        range(first, first + count) for first, count in (share_of((1000, 170), n) for n in (*range(SLOTS), NODE_SHARE))
    ]
    assert len({uid for share in shares for uid in share}) == 170, "nobody else on the node has a lease's users"
    assert share_of((0, 0), 5) == (0, 0)
    assert len({port_name(f"lease-ab12c-{n}") for n in range(100)}) == 100
    assert all(len(port_name(name)) <= 15 and not port_name(name).startswith("mv") for name in ("x", "y" * 40))


def test_the_agent_learns_when_its_pilot_is_killed(tmp_path: Path) -> None:
    place = LeaseDirectory(tmp_path / "lease-ab12c-1")
    place.make()
    order = PilotOrder("lease-ab12c-1", "17", 8, 4000, Settings(), lambda *_: None, kill_wait=30.0)
    assert read_end(place.state) == 0.0
    before = time.time()
    _note_end(order, place)
    first = read_end(place.state)
    assert before + 29.9 < first < time.time() + 30.1
    _note_end(order, place)
    assert read_end(place.state) == first, "the same signal comes twice"
    write_end(place.state, before + 300.0)  # it is preempted with a GraceTime
    _note_end(order, place)
    assert read_end(place.state) < time.time() + 30.1, "cancelled meanwhile"
    _note_end(replace(order, kill_wait=0.0), LeaseDirectory(tmp_path / "another"))
    assert read_end(tmp_path / "another" / "agent") == 0.0


def test_vms_are_held_for_as_long_as_there_is_time_to_end_them(tmp_path: Path) -> None:
    settings = Settings(agent=AgentSettings(state_dir=tmp_path), save=SaveSettings(enabled=True))
    assert _holds_until(settings) < 0.0, "nobody knows when the pilot is killed"
    write_end(tmp_path, 1000.0)
    takes = settings.pacing.reclaim_grace + settings.poll
    assert 1000.0 - 2 * takes < _holds_until(settings) < 1000.0 - takes


def test_a_pilot_listens_where_something_moves_or_leaves_and_each_lease_of_a_node_for_itself() -> None:
    known = Settings(move=MoveSettings(addresses=(("n1", "127.0.0.1"),), lease_port=14891))
    saves = replace(known, save=SaveSettings(enabled=True))
    assert _address(known, "n1") == "" and _address(saves, "n1") == "127.0.0.1"
    assert _address(replace(saves, rebalance=RebalanceSettings(leases=False)), "n1") == ""
    assert _address(replace(known, move=replace(known.move, enabled=True)), "n1") == "127.0.0.1"
    assert _address(saves, "no-such-node.invalid") == "", "it is a lease without an address"
    order = PilotOrder("lease-ab12c-1", "17", 8, 4000, saves, lambda *_: None, address="127.0.0.1")
    first, second, twice = (_node_network(order, slot).listening for slot in (0, 1, 1))
    assert first is not None and second is not None and twice is None
    assert [one.getsockname() for one in (first, second)] == [("127.0.0.1", 14891), ("127.0.0.1", 14892)]
    first.close()
    second.close()


def test_names_of_leases_are_checked(tmp_path: Path) -> None:
    assert directory_of(tmp_path, "lease-ab12c-1z").name == "lease-ab12c-1z"
    for wrong in ("", "..", "a/b", ".logs", "-x", "é", "x" * 41):
        with pytest.raises(Refused):
            directory_of(tmp_path, wrong)


def test_what_the_sweep_needs_is_written_down(tmp_path: Path) -> None:
    place = LeaseDirectory(tmp_path / "lease-ab12c-1")
    assert place.recorded() is None and lease_directories(tmp_path) == [] == lease_directories(tmp_path / "none")
    place.make()
    (tmp_path / ".logs").mkdir()
    assert [one.root for one in lease_directories(tmp_path)] == [place.root]
    known = PilotRecord("17", os.getpid(), 5, "boot", ("/sys/fs/cgroup/x",))
    place.record(known)
    assert place.recorded() == known
    (place.root / "pilot.json").write_text('{"job": "17"}')
    assert place.recorded() is None


def test_a_sweep_leaves_a_lease_alone_from_its_pilots_first_moment_on(tmp_path: Path) -> None:
    """A pilot that starts has recorded nothing yet."""
    place, ended = LeaseDirectory(tmp_path / "lease-ab12c-1"), LeaseDirectory(tmp_path / "lease-ab12c-2")
    ended.make()
    with place.held() as ours:
        assert ours and sweep(tmp_path) == [] and [one.root for one in lease_directories(tmp_path)] == [place.root]
        with place.held() as again:
            assert not again, "another pilot of this name"
    assert sweep(tmp_path) == [] and lease_directories(tmp_path) == []
    with ended.held() as ours, try_locked_directory(ended.root) as free:
        assert ours and free, "only while the directories are made"


def test_slots_are_held_one_by_one(tmp_path: Path) -> None:
    with slot(tmp_path) as first, slot(tmp_path) as second:
        assert (first, second) == (0, 1)
    with slot(tmp_path) as again:
        assert again == 0


def test_a_node_has_so_many_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse.pilot.lease.SLOTS", 1)
    with slot(tmp_path), pytest.raises(Exhausted), slot(tmp_path):
        pass


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Control groups as Slurm makes them in version 1, the mounts, and the groups of a task."""
    for each in ("memory/slurm/uid_0/job_17/step_0/task_0", "freezer/slurm/uid_0/job_17/step_0", "pids/system"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory/slurm/uid_0/job_17/memory.limit_in_bytes").write_text(f"{6 << 30}\n")
    (tmp_path / "memory/slurm/uid_0/job_17/step_0/task_0/memory.limit_in_bytes").write_text(f"{8 << 30}\n")
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    mounts.write_text("".join(f"cgroup {tmp_path}/{c} cgroup rw,{c} 0 0\n" for c in ("memory", "freezer", "pids")))
    own.write_text(V1)
    return tmp_path, mounts, own


def test_the_groups_of_a_lease_are_below_those_of_its_step(groups: tuple[Path, Path, Path]) -> None:
    root, mounts, own = groups
    made = {str(one.path.relative_to(root)): one for one in make_groups("lease-1", mounts, own)}
    step = "slurm/uid_0/job_17/step_0"
    assert made.keys() == {f"memory/{step}/task_0/lease-1", f"freezer/{step}/lease-1", "pids/system/lease-1"}
    assert all((one.path / "system").is_dir() and one.mount == root / path.split("/")[0] for path, one in made.items())
    assert job_of(V1) == "17" and job_of("0::/user.slice\n") == ""
    assert memory_limit(mounts, own) == 6 << 10, "the tightest counts, which is the job's"
    for file in root.rglob("memory.limit_in_bytes"):
        file.unlink()
    assert memory_limit(mounts, own) is None


def test_what_slurm_could_not_remove_goes_with_the_groups_of_a_lease(groups: tuple[Path, Path, Path]) -> None:
    root, mounts, own = groups
    made = [one.path for one in make_groups("lease-1", mounts, own)]
    for file in root.rglob("memory.limit_in_bytes"):  # rmdir of a real one takes its files along
        file.unlink()
    assert remove_groups(made) == [] == remove_groups(made)
    assert sorted(p.name for p in root.rglob("*") if p.is_dir()) == sorted(
        ["memory", "slurm", "uid_0", "freezer", "slurm", "uid_0", "pids", "system"]
    ), "those of Slurm's job are gone, and nothing else"


def test_a_lease_is_beside_its_task_in_version_2(tmp_path: Path) -> None:
    mount, user = tmp_path / "unified", "system.slice/slurmstepd.scope/job_17/step_0/user"
    (mount / user / "task_0").mkdir(parents=True)
    (mount / "cgroup.controllers").write_text("memory pids\n")
    (mount / user / "cgroup.subtree_control").write_text("")
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    mounts.write_text(f"cgroup2 {mount} cgroup2 rw 0 0\n")
    own.write_text(f"0::/{user}/task_0\n")
    (made,) = make_groups("lease-1", mounts, own)
    assert made.path == mount / user / "lease-1" and made.version == 2
    assert (mount / user / "cgroup.subtree_control").read_text() == "+memory +pids"
    (mount / user / "memory.max").write_text("max\n")
    (mount / user).parent.joinpath("memory.max").write_text(f"{2 << 30}\n")
    assert memory_limit(mounts, own) == 2 << 10
