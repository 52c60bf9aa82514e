"""The benchmark of containers: the ways to start a job, what a job's answers say in the table, and what is compared."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.core.errors import Refused
from multiverse_lab.bench import baremetal, containers, isolation
from multiverse_lab.bench.containers import BARE, WAYS, bundle_configuration, check_packages, compared, figures, ways_of
from multiverse_lab.bench.isolation import IsolationAnswers, cells, program
from multiverse_lab.bench.latency import LatencySamples
from multiverse_lab.bench.report import BenchmarkRun, region

USER = 30707
HOME = Path("/home/ada")
_ALONE = {
    "other_process": False, "other_file": False, "other_port": False, "kernel": ["6", "#1"], "kernel_log": ["a line"],
    "uid": 30707, "module": False, "mounting": "no", "clock": False, "owner": False, "started": 200, "memory": "killed",
}  # fmt: skip


def test_podman_runs_the_same_script_that_bare_metal_runs() -> None:
    bare, own, host, bundle = WAYS[:4]
    text = "#!/bin/bash\necho '$SLURM_JOB_ID'\n"
    assert bare.script(text, HOME) == bundle.script(text, HOME) == text
    assert "STORAGE_DRIVER=overlay" in own.script(text, HOME)  # vfs would copy the image for each container
    assert text in own.script(text, HOME) and "--network" not in own.script(text, HOME)
    assert "--network=host" in host.script(text, HOME) and "--volume=/home/ada:/home/ada" in host.script(text, HOME)
    assert bundle.submitted(HOME) == (*bare.submitted(HOME), "--container=/home/ada/bundle")
    assert [way.name for way in WAYS if way.contained] == ["podman", "podman_host_network", "slurm_container"]


def test_the_script_that_is_measured_has_the_listener_in_each_way() -> None:
    for way in WAYS:
        kind = way.kind(HOME)
        assert "/dev/tcp/10.0.0.1/99" in kind.script.format(host="10.0.0.1", port=99) and kind.vm == way.vm


def test_a_way_that_there_is_not_is_refused() -> None:
    assert [way.name for way in ways_of("full, podman")] == ["full", "podman"]
    with pytest.raises(Refused, match="no such kind: docker"):
        ways_of("podman,docker")


def test_the_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers.shutil, "which", lambda program: program in ("podman", "crun"))
    with pytest.raises(Refused, match="not installed: slirp4netns, uidmap") as refused:
        check_packages()
    assert "apt install --no-install-recommends slirp4netns uidmap" in str(refused.value.hint)
    monkeypatch.setattr(containers.shutil, "which", lambda program: program)
    check_packages()


def test_a_bundle_has_the_nodes_network_and_the_users_home() -> None:
    found = bundle_configuration(
        {
            "root": {"path": "rootfs", "readonly": True},
            "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "user"}]},
            "mounts": [{"destination": "/proc", "type": "proc"}, {"destination": "/sys/fs/cgroup", "type": "cgroup"}],
        },
        HOME,
    )
    assert found["linux"] == {"namespaces": [{"type": "pid"}, {"type": "user"}]}
    assert found["root"] == {"path": "rootfs", "readonly": False}
    assert [one["destination"] for one in json.loads(json.dumps(found["mounts"]))] == ["/proc", "/home/ada"]


def test_all_ways_are_compared_with_bare_metal() -> None:
    samples = {
        BARE: LatencySamples(submit_to_start=[1.0, 1.0, 1.0], cpu_s=[0.5] * 3, uss_mib=[2.0] * 3),
        "podman": LatencySamples(submit_to_start=[1.5, 1.5, 1.5]),
    }
    (one,) = compared(samples)
    assert one.kind == "podman" and one.ratio is not None and one.ratio.value == 1.5
    assert one.excess is not None and one.excess.low == one.excess.high == 0.5
    bare = figures(samples[BARE])
    assert bare.cpu_s is not None and bare.cpu_s.p50 == 0.5 and bare.uss_mib is not None and bare.uss_mib.high == 2.0
    assert figures(samples["podman"]).cpu_s is None


def test_a_job_in_a_vm_isolates_all() -> None:
    found = cells(IsolationAnswers(_ALONE, owner=USER, seen=0), USER)
    assert found["has the machine's kernel"] == "no"
    assert found["reads the machine's kernel log"] == "no: that of a kernel of its own"
    assert found["is root inside"] == "no: uid 30707"
    assert found["has its processes among the machine's"] == "no: none of 200"
    assert found["makes a file of root's in the shared directory"] == "no: it is the user's"
    assert found["uses more memory than it requested"] == "no: killed"


def test_a_job_that_isolates_nothing_says_so() -> None:
    said = {
        **_ALONE, "other_process": True, "other_file": True, "other_port": True, "uid": 0, "module": True,
        "mounting": "yes", "clock": True, "memory": "got it",
    }  # fmt: skip
    found = cells(IsolationAnswers(said, machine_kernel=True, machine_log=True, owner=0, seen=200), USER)
    stays, memory = found.pop("has its processes among the machine's"), found.pop("uses more memory than it requested")
    assert set(found.values()) == {"yes"}
    assert stays == "yes: 200 of 200" and memory == "yes"


def test_what_was_not_tried_is_not_called_isolated() -> None:
    assert set(cells(IsolationAnswers(), USER).values()) == {"the job did not report"}
    found = cells(IsolationAnswers({"other_process": True}), USER)
    assert found["sees another user's process on its machine"] == "yes"
    assert {word for row, word in found.items() if row != "sees another user's process on its machine"} == {"not tried"}
    failed = cells(IsolationAnswers({**_ALONE, "memory": None}), USER)  # for another reason than memory
    assert failed["uses more memory than it requested"] == "not tried"
    ended = cells(IsolationAnswers({**_ALONE, "memory": "tries"}), USER)
    assert ended["uses more memory than it requested"] == "no: the job ended"


def test_only_processes_of_the_job_on_its_node_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = Path(f"/proc/{os.getpid()}/cgroup").read_text()
    assert baremetal.cost("no-such-job", "no/such/node") is None
    monkeypatch.setattr(baremetal, "_command", lambda pid: "slurmstepd: [77.batch]" if pid == os.getpid() else "")
    assert baremetal.cost("77") is not None and baremetal.cost("78") is None
    assert baremetal.cost("77", "multiverse-lab-other/mvp1") is None and "multiverse-lab-other" not in own


def test_the_program_finds_another_users_process_file_and_port(tmp_path: Path) -> None:
    """Run as a process of this machine, the program sees what is there, and its own processes are on the machine."""
    token, bomb = f"mv-neighbour-{os.getpid()}", f"mv-process-{os.getpid()}"
    file = Path(f"/tmp/{token}-test")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        neighbour = subprocess.Popen([sys.executable, "-c", isolation.NEIGHBOUR, token, str(port), "test"])
        tried = {"host": "127.0.0.1", "port": listener.getsockname()[1], "token": token, "loopback": port,
                 "shared": str(tmp_path), "processes": 3, "memory": 8}  # fmt: skip
        job = subprocess.Popen(
            [sys.executable, "-", bomb], stdin=subprocess.PIPE, env={**os.environ, "SLURM_JOB_ID": "7"}
        )
        assert job.stdin is not None
        try:
            isolation.until(file.exists, "the neighbour did not start")
            job.stdin.write(program(tried).encode())
            job.stdin.close()
            listener.settimeout(60)
            connection, _ = listener.accept()
            connection.settimeout(60)
            with connection, connection.makefile("r") as lines:
                assert lines.readline() == "7\n"
                connection.sendall(b"go\n")
                command = f"{sys.executable}\0-\0{bomb}\0".encode()
                found = isolation.answers(lines, connection, lambda: isolation.processes(command))
        finally:
            for one in (job, neighbour):
                one.send_signal(signal.SIGKILL)
                one.wait()
            file.unlink(missing_ok=True)
    assert found.said["other_process"] and found.said["other_file"] and found.said["other_port"]
    assert found.said["kernel"] == [os.uname().release, os.uname().version] and found.said["uid"] == os.getuid()
    assert found.said["started"] == found.seen == 3 and found.said["memory"] == "got it"
    assert (tmp_path / f"{token}-7").exists()


def test_the_page_has_each_figure_beside_bare_metal_and_what_each_way_isolates() -> None:
    middle = {"p50": 1.0, "low": 0.5, "high": 2.0}
    times = {"value": 1.5, "low": 1.25, "high": 1.75}
    run = BenchmarkRun(("containers",), "2026-11-30", "", None, {
        "programs": {"podman": "podman version 4.3.1", "crun": "crun version 1.8.1"},
        "kinds": {way: {"submit_to_start": middle, "cpu_s": middle, "uss_mib": middle} for way in (BARE, "podman")},
        "beside": [{"kind": "podman", "ratio": times, "excess": times}],
        "isolation": {"is root inside": {BARE: "no: uid 30707", "podman": "yes"}},
    })  # fmt: skip
    text = region(run)
    assert "| bare_metal | 1.00 s (0.50 to 2.00) | 1 | 0 | 1.00 s (0.50 to 2.00) | 1.0 MiB (0.5 to 2.0) |" in text
    assert "| podman | 1.00 s (0.50 to 2.00) | 1.50 (1.25 to 1.75) | 1.50 s (1.25 to 1.75) |" in text
    assert "| a job … | bare_metal | podman |\n| --- | --- | --- |\n| is root inside | no: uid 30707 | yes |" in text
    assert text.endswith("Containers by podman version 4.3.1; crun version 1.8.1.\n")
