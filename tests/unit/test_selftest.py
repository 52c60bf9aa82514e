"""`multiverse selftest`: how the jobs of a test are judged, and what counts as left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multiverse.cli import site as cli
from multiverse.cli.commands import build
from multiverse.config import QemuSettings, Settings, WebSettings
from multiverse.core.errors import Gone, Refused
from multiverse.site import selftest
from multiverse.site.selftest import JOBS, CheckedPart, SelfTest, Task, judged, page, tasks

BATCH, ARRAY, _, FAILING, CANCELLED = JOBS


class FakeSite:
    """A Slurm and a daemon. Jobs run at the second look at them and end at the third, as `ends` says of their names."""

    def __init__(self, vms: Path) -> None:
        self.vms, self.number, self.looks = vms, 10, dict[str, int]()
        self.jobs: dict[str, tuple[selftest.SampleJob, str]] = {}
        self.ends = {job.name: (job.state, job.exit_code) for job in JOBS}
        self.cancelled, self.stuck, self.refused = list[str](), set[str](), set[str]()
        self.nodes_stay = False

    async def run(self, program: str, *words: str) -> str:
        return str(
            {"sbatch": self.sbatch, "scontrol": self.show, "scancel": self.cancel}.get(program, self.rest)(*words)
        )

    def sbatch(self, *words: str) -> str:
        job = next(one for one in JOBS if f"--wrap={one.script}" in words)
        assert {*job.options, "--uid=ada", "--partition=vm"} <= {*words}
        if job.name in self.refused:
            raise Refused("sbatch: Batch job submission failed: Invalid account")
        self.number += 1
        self.jobs[str(self.number)] = (job, f"mvab-{self.number}")
        (self.vms / f"mvab-{self.number}").mkdir(parents=True)
        return f"{self.number}\n"

    def show(self, *words: str) -> str:
        own = words[-1]
        job, node = self.jobs[own]
        self.looks[own] = self.looks.get(own, 0) + 1
        state, code = "RUNNING", "0:0"
        is_over = self.looks[own] > 2 and (job is not CANCELLED or own in self.cancelled) and own not in self.stuck
        if is_over:
            state, code = self.ends[job.name]
            (self.vms / node).rmdir() if (self.vms / node).exists() else None
        array = [f"ArrayJobId={own} ArrayTaskId={number} " for number in range(1, job.tasks + 1)]
        return "".join(
            f"JobId={own} {each}JobState={state} Reason=None ExitCode={code} NodeList={node}\n"
            for each in (array if job.tasks > 1 else [""])
        )

    def cancel(self, *words: str) -> str:
        self.cancelled.append(words[0])
        return ""

    def rest(self, *words: str) -> str:
        """squeue and sinfo."""
        return "\n".join(node for _, node in self.jobs.values()) if "-N" in words and self.nodes_stay else ""

    def live(self) -> list[str]:
        return [path.name for path in self.vms.iterdir()]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    made = FakeSite(tmp_path / "vms")
    made.vms.mkdir()
    monkeypatch.setattr(selftest, "SlurmCommands", lambda _: made)
    monkeypatch.setattr(selftest, "POLL", 0.001)
    monkeypatch.setattr(selftest, "CLEARED_WITHIN", 0.05)

    def note(self: SelfTest) -> list[str]:
        self._vms.update(made.live())
        return made.live()

    monkeypatch.setattr(SelfTest, "_note_vms", note)
    return made


@pytest.fixture
def tested(site: FakeSite) -> Callable[..., list[CheckedPart]]:
    def run(limit: float = 30.0) -> list[CheckedPart]:
        found: list[CheckedPart] = []
        settings = Settings(qemu=QemuSettings(vms=site.vms))
        asyncio.run(SelfTest(settings, "ada", found.append).run(limit))
        return found

    return run


def test_on_a_site_that_works_nothing_is_wrong_and_nothing_left(
    site: FakeSite, tested: Callable[..., list[CheckedPart]]
) -> None:
    found = tested()
    assert all(one.fine for one in found), found
    assert {one.name for one in found} == {job.name for job in JOBS} | {
        f"{what} that are left" for what in ("jobs", "VMs", "nodes", "files")
    }
    assert found[-1].said == "none is left of 5 VMs"


def test_each_kind_of_trouble_is_told(site: FakeSite, tested: Callable[..., list[CheckedPart]]) -> None:
    site.ends["failing"] = ("COMPLETED", "0:0")
    site.ends["batch"] = ("FAILED", "3:0")
    site.refused = {"array"}
    site.nodes_stay = True
    wrong = {one.name: one.said for one in tested() if not one.fine}
    assert wrong.keys() == {"failing", "batch", "array", "nodes that are left"}
    assert wrong["failing"].endswith("is COMPLETED, exit code 0:0: not FAILED, exit code 7:0")
    assert wrong["batch"].endswith("it did not run in a VM") and "Invalid account" in wrong["array"]
    assert "mvab-11" in wrong["nodes that are left"]


def test_a_job_that_goes_on_is_told_of_and_cancelled(site: FakeSite, tested: Callable[..., list[CheckedPart]]) -> None:
    site.stuck = {"12"}
    wrong = {one.name: one.said for one in tested(limit=0.1) if not one.fine}
    assert wrong["array"].startswith("job 12_1 is RUNNING") and "12" in site.cancelled
    assert wrong["files that are left"].endswith("vms/mvab-12")


def test_a_job_whose_record_is_gone_is_judged_by_what_was_seen() -> None:
    assert not judged(BATCH, {}).fine
    assert judged(BATCH, {"7": Task("7", "COMPLETED", "0:0", "mvab-1", "None")}).fine
    only = {"8_1": Task("8_1", "COMPLETED", "0:0", "mvab-1", "None")}
    assert "does not show all" in judged(ARRAY, only).said
    assert judged(FAILING, {"9": Task("9", "FAILED", "7:0", "mvab-1", "NonZeroExitCode")}).fine


def test_what_scontrol_prints_is_read() -> None:
    shown = (
        "JobId=12 ArrayJobId=11 ArrayTaskId=2 JobName=x JobState=PENDING Reason=Licenses NodeList=(null) ExitCode=0:0\n"
        "JobId=9 JobName=x JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 NodeList=mvab-1\n\n"
    )
    assert [*tasks(shown)] == [
        Task("11_2", "PENDING", "0:0", "", "Licenses"),
        Task("9", "FAILED", "7:0", "mvab-1", "NonZeroExitCode"),
    ]
    assert not next(tasks(shown)).is_over


def test_the_page_is_named() -> None:
    assert "set listen" in page(Settings())
    assert page(Settings(web=WebSettings(listen="127.0.0.1:8642"))).endswith("http://127.0.0.1:8642/")
    assert "Unix socket /run/multiverse/web.sock" in page(Settings(web=WebSettings(listen="/run/multiverse/web.sock")))


@pytest.mark.parametrize("columns", [80, 140])
def test_the_command_prints_each_outcome_and_its_status_tells(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(cli, "load", lambda _: Settings(qemu=QemuSettings(vms=site.vms)))
    monkeypatch.setattr(cli.os, "geteuid", lambda: 0)
    monkeypatch.setattr(cli.output.console, "_width", columns)
    app = build(["selftest"])
    said = CliRunner().invoke(app, ["selftest", "--user", "ada"])
    assert said.exit_code == 0 and "✓ two nodes\n  job 13 on mvab-13: COMPLETED, exit code 0:0\n" in said.output
    assert "9 tests: 0 wrong." in said.output and max(map(len, said.output.splitlines())) <= columns
    site.refused = {"batch"}
    wrong = CliRunner().invoke(app, ["selftest", "--user", "ada", "--json"])
    assert wrong.exit_code == 1 and [one["name"] for one in json.loads(wrong.output) if not one["fine"]] == ["batch"]
    refused = CliRunner().invoke(app, ["selftest", "--user", "root"])
    assert isinstance(refused.exception, Refused) and "--user NAME" in refused.exception.hint


def test_a_job_that_slurm_has_forgotten_is_over(
    site: FakeSite, tested: Callable[..., list[CheckedPart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = site.show

    def forgets(*words: str) -> str:
        if words[-1] == "11" and site.looks.get("11", 0) >= 1:
            raise Gone("Invalid job id specified")
        return show(*words)

    monkeypatch.setattr(site, "show", forgets)
    assert "batch" in {one.name for one in tested() if not one.fine}, "it was last seen running"
