"""Pilots as Slurm's commands are asked for them and show them, with a fake of these commands."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import AgentSettings, LeaseSettings, Settings, SlurmSettings, VxlanSettings
from multiverse.core.errors import Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.job import LeasedHost, LeaseSpec, PilotState
from multiverse.core.model.reason import text_of
from multiverse.drivers.slurm import leases as slurm_leases
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.leases import (
    PilotColumns,
    PilotReader,
    PilotSteps,
    SlurmLeases,
    as_user,
    boot_time,
    bring_command,
    leasable,
    preempted_at,
    read_nodes,
    submission,
)
from multiverse.drivers.slurm.site import conf as site_conf
from multiverse.drivers.slurm.site.requirements import lease_sources
from multiverse.pilot.lease import LeaseDirectory

SPEC = LeaseSpec("lease-ab12c-7", "t0ken", "physical", time_limit=3601.0)
ME = pwd.getpwuid(os.geteuid()).pw_name
SETTINGS = Settings(
    lease=(LeaseSettings("physical", become=("sudo", "-n")),), agent=AgentSettings(program=("/opt/mv", "agent"))
)
SECRET = "5ec3e7"
END = f"\x1f{SECRET}\x1f"
COLUMNS = TITLES = ("JOBID", "NAME", "STATE", "COMMENT", "END_TIME", "NODELIST", "REASON", "RESTARTS", "PARTITION")
NODES = ("NODELIST", "PARTITION", "CPUS", "MEMORY", "STATE")


def table(titles: Sequence[str], end: str, rows: Sequence[Sequence[str]]) -> str:
    return "".join(end.join(row) + end + "\n" for row in (titles, *rows))


def pilot(**cells: str) -> list[str]:
    """A row of a pilot that runs."""
    usual = ("17", SPEC.name, "RUNNING", "t0ken", "5000", "n1", "None", "0", "physical")
    return [*{**dict(zip(COLUMNS, usual, strict=True)), **cells}.values()]


class Commands:
    """Slurm's commands. `down` are the words of node n1's state."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.state = "idle"
        self.boot = 100
        self.calls: list[tuple[str, ...]] = []

    async def run(
        self, *command: str, env: Mapping[str, str] | None = None, refused: str = "", via: Sequence[str] = ()
    ) -> str:
        self.calls.append((*via, *command))
        match command[0]:
            case "squeue":
                if refused and "nobody-here" in command:
                    raise Refused("squeue: error: Invalid user")
                return table(TITLES, END, self.rows)
            case "sinfo":
                rows = [["n1", "physical", "8", "16000", self.state], ["n[2-3]", "physical*", "4", "20000", "down*"]]
                return table(NODES, "\x1f", rows)
            case "scontrol":
                return f"NodeName=n1 BootTime={self.boot} SlurmdStartTime=1"
        return ""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    known = PilotColumns.__init__
    monkeypatch.setattr(PilotColumns, "__init__", lambda self, secret=None: known(self, SECRET))
    return Commands()


def reader(commands: Commands) -> PilotReader:
    return PilotReader(SETTINGS, "ab12c", commands)  # type: ignore[arg-type]


# --- requesting and releasing --------------------------------------------------------------------------


async def test_a_pilot_is_submitted_unless_one_of_that_token_is_shown(commands: Commands) -> None:
    lender = SlurmLeases(SETTINGS, commands)  # type: ignore[arg-type]
    await lender.request(SPEC)
    assert [call[0] for call in commands.calls] == ["squeue", "sbatch"]
    for row, submits in (
        (pilot(STATE="PENDING", NODELIST="", END_TIME="N/A"), False),
        (pilot(STATE="COMPLETED"), False),
        (pilot(COMMENT="t0ken ending"), False),
        (pilot(COMMENT="other"), True),
    ):
        commands.calls, commands.rows = [], [row]
        await lender.request(SPEC)
        assert ("sbatch" in [call[0] for call in commands.calls]) is submits, row


async def test_pilots_are_cancelled_by_name_and_id(commands: Commands) -> None:
    lender = SlurmLeases(SETTINGS, commands)  # type: ignore[arg-type]
    await lender.release(SPEC.name, ["17", "18"])
    await lender.release(SPEC.name, [])
    assert commands.calls == [("scancel", f"--name={SPEC.name}", *ids) for ids in (("17", "18"), ())]


def test_an_image_is_brought_to_where_the_receiver_of_the_lease_expects_it(tmp_path: Path) -> None:
    host = LeasedHost(SPEC, "17", "n1", inf)
    leases = SETTINGS.agent.leases
    receives = PilotSteps(SETTINGS).receive(host)
    assert receives[-3:] == ["receive-image", f"--leased={SPEC.name}", f"--owner={os.geteuid()}"]
    assert receives[: receives.index("receive-image")] == PilotSteps(SETTINGS).dial(host)[: len(receives) - 3]
    bring = bring_command(SETTINGS, host, "/var/tmp/x", "slim")
    assert bring[-5:] == ["sbcast", "--jobid=17", "--force", "/var/tmp/x", f"{leases / SPEC.name}/incoming/slim.tar"]
    with LeaseDirectory(tmp_path).incoming("slim", os.geteuid()) as file:
        assert file == tmp_path / "incoming" / "slim.tar"
        file.write_text("archive")
    assert not file.exists()


def test_a_submission_asks_for_a_whole_node_or_for_a_part() -> None:
    whole = submission(SETTINGS, replace(SPEC, account="vms"))
    assert {"--exclusive", "--mem=0", "--time=61", "--no-requeue", "--account=vms", "--comment=t0ken"} <= set(whole)
    part = submission(SETTINGS, replace(SPEC, size=Size(4, 8000)))
    assert {"--cpus-per-task=4", "--mem=8000M"} <= set(part) and "--exclusive" not in part
    assert not any(
        word.startswith(("--mem", "--account")) for word in submission(SETTINGS, replace(SPEC, size=Size(4, 0)))
    )
    (script,) = (word for word in whole if word.startswith("--wrap="))
    assert ' sudo -n /opt/mv agent pilot lease-ab12c-7 --token=t0ken "--job=$SLURM_JOB_ID,' in script
    assert "SLURMD_NODENAME" not in script
    overlaid = submission(replace(SETTINGS, vxlan=VxlanSettings(enabled=True)), SPEC)
    assert overlaid[-1].endswith(',${SLURM_MEM_PER_NODE:-0},$SLURMD_NODENAME"')


def test_the_agent_of_a_lease_is_reached_by_a_step_of_the_pilots_user(monkeypatch: pytest.MonkeyPatch) -> None:
    host = LeasedHost(SPEC, "17", "n1")
    command = PilotSteps(SETTINGS).dial(host)
    assert "--jobid=17" in command and "setpriv" not in command
    socket = "--socket=/var/lib/multiverse/leases/lease-ab12c-7/agent.sock"
    assert command[command.index("sudo") :] == ["sudo", "-n", "/opt/mv", "agent", "dial-stdio", "--leased", socket]
    other = next(entry for entry in pwd.getpwall() if entry.pw_uid != os.geteuid())
    ids = [f"--reuid={other.pw_uid}", f"--regid={other.pw_gid}"]
    assert PilotSteps(SETTINGS).dial(replace(host, lease=replace(SPEC, user=other.pw_name)))[:3] == ["setpriv", *ids]
    assert as_user("") == as_user(ME) == []
    with pytest.raises(Refused, match="nobody-here"):
        as_user("nobody-here")


# --- observing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "state", "reason"),
    [
        ({"STATE": "PENDING", "NODELIST": "", "END_TIME": "N/A", "REASON": "Priority"}, PilotState.PENDING, "Priority"),
        ({}, PilotState.RUNNING, ""),
        ({"COMMENT": "t0ken ending"}, PilotState.ENDING, "it was told to end"),
        ({"STATE": "COMPLETING"}, PilotState.ENDING, "completing"),
        ({"STATE": "COMPLETING", "REASON": "TimeLimit"}, PilotState.ENDING, "TimeLimit"),
        ({"STATE": "CANCELLED"}, PilotState.ENDED, "cancelled"),
        ({"STATE": "PREEMPTED"}, PilotState.ENDED, "preempted"),
        ({"STATE": "TIMEOUT"}, PilotState.ENDED, "timeout"),
    ],
)
async def test_a_pilot_is_shown_as_slurm_shows_it(
    commands: Commands, cells: dict[str, str], state: PilotState, reason: str
) -> None:
    commands.rows = [pilot(**cells), pilot(JOBID="18", NAME="lease-other-7"), pilot(JOBID="19", NAME="mine")]
    pilots, free = await reader(commands).read()
    assert pilots.keys() == {"17"}
    seen = pilots["17"]
    assert (seen.name, seen.token, seen.state, text_of(seen.reason)) == (SPEC.name, "t0ken", state, reason)
    assert seen.ends == (inf if state is PilotState.PENDING else 5000.0)
    assert free == {"physical": Size(4, 16000 - 512)}, "the least of each, without what the pilot needs itself"


async def test_an_end_is_clean_if_the_node_answered_all_the_time(commands: Commands) -> None:
    watching = reader(commands)
    commands.rows = [pilot()]
    await watching.read()
    commands.rows = [pilot(STATE="COMPLETED")]
    assert (await watching.read())[0]["17"].clean
    # The node was down for a while as the job was completing: Slurm ended it without a word of the node.
    watching = reader(commands)
    commands.rows, commands.state = [pilot(STATE="COMPLETING")], "down*"
    assert not (await watching.read())[0]["17"].clean
    commands.rows, commands.state = [pilot(STATE="CANCELLED")], "idle"
    assert not (await watching.read())[0]["17"].clean
    commands.boot = 5001
    for _ in range(2):
        assert (await watching.read())[0]["17"].clean, "the node has rebooted since, and that is remembered"
    # slurmctld has started anew, and did not reach the node for a while.
    watching, commands.boot = reader(commands), 100
    for cells, state, clean in (
        ({}, "down*", True),
        ({"STATE": "COMPLETING"}, "unknown", False),
        ({"STATE": "CANCELLED"}, "idle+not_responding", False),
        ({"STATE": "CANCELLED"}, "idle", True),
    ):
        commands.rows, commands.state = [pilot(**cells)], state
        assert (await watching.read())[0]["17"].clean is clean, cells
    for cells, state, clean in (
        ({"STATE": "NODE_FAIL"}, "idle", False),
        ({"STATE": "CANCELLED"}, "NOT_RESPONDING+idle", False),
        ({"STATE": "CANCELLED", "NODELIST": ""}, "idle", True),
    ):
        commands.rows, commands.state, commands.boot = [pilot(**cells)], state, 100
        assert (await reader(commands).read())[0]["17"].clean is clean, cells


async def test_a_pilot_that_was_queued_again_is_judged_by_the_node_of_its_first_run(commands: Commands) -> None:
    """Its VMs are there, and Slurm shows no node of a job that waits."""
    again = {"STATE": "PENDING", "NODELIST": "", "END_TIME": "N/A", "RESTARTS": "1"}
    cancelled = {"STATE": "CANCELLED", "NODELIST": "", "RESTARTS": "1"}
    second = {"STATE": "CANCELLED", "NODELIST": "n3", "RESTARTS": "1"}
    for word, cells, clean in (("idle", cancelled, True), ("down*", cancelled, False), ("down*", second, False)):
        watching, commands.state, commands.boot = reader(commands), "idle", 9000
        commands.rows = [pilot()]
        await watching.read()
        commands.rows, commands.state = [pilot(**again)], word
        await watching.read()
        commands.rows, commands.state = [pilot(**cells)], "idle"
        assert (await watching.read())[0]["17"].clean is clean, (word, cells)
    assert not (await reader(commands).read())[0]["17"].clean, "of its first run nothing is known"


async def test_an_id_that_came_again_is_of_the_job_that_lives(commands: Commands) -> None:
    commands.rows = [pilot(), pilot(STATE="CANCELLED")]
    assert (await reader(commands).read())[0]["17"].state is PilotState.RUNNING


async def test_a_table_that_is_incomplete_shows_nothing() -> None:
    columns = PilotColumns(SECRET)
    for output in ("", "JOBID", table(TITLES, END, [pilot()])[:-3], table(TITLES, END, [["17"]])):
        with pytest.raises(Unknown):
            columns.pilots(output)
    for output in ("", "NODELIST"):
        with pytest.raises(Unknown):
            read_nodes(output)
    assert leasable([], 512) == {} and boot_time("NodeName=n1") == 0.0


def test_the_end_of_a_pilots_grace_is_read_and_there_is_none_of_one_that_is_not_preempted() -> None:
    shown = "JobId=7 JobState={} RunTime=00:01:00 EndTime={} Deadline=N/A PreemptEligibleTime=90 PreemptTime={} Node=n1"
    assert preempted_at(shown.format("RUNNING", "1700000100", "1700000040")) == 1700000100.0
    assert preempted_at(shown.format("RUNNING", "1700000100", "None")) == 0.0
    assert preempted_at(shown.format("PREEMPTED", "1700000100", "1700000040")) == 0.0, "KillWait has begun"
    assert preempted_at(shown.format("RUNNING", "Unknown", "1700000040")) == preempted_at("") == 0.0


async def test_nothing_is_asked_where_nothing_is_leased(commands: Commands) -> None:
    quiet = PilotReader(replace(SETTINGS, lease=()), "ab12c", commands)  # type: ignore[arg-type]
    assert await quiet.read() == ({}, {}) and not commands.calls
    assert slurm_leases.settings_of(SETTINGS, "gone") == LeaseSettings("gone")


async def test_leases_of_an_earlier_run_are_seen_though_the_settings_name_them_no_more(commands: Commands) -> None:
    """Otherwise their pilots would count as ended, and nobody would cancel them."""
    commands.rows, other = [pilot()], replace(SPEC, partition="big", user="mv")
    for left, partitions, users in (
        ((), "big,physical", {ME, "mv"}),
        ((LeaseSettings("new"),), "new,big,physical", {ME, "mv"}),
    ):
        commands.calls = []
        watching = PilotReader(replace(SETTINGS, lease=left), "ab12c", commands, [other, SPEC])  # type: ignore[arg-type]
        pilots, _ = await watching.read()
        assert pilots["17"].state is PilotState.RUNNING
        assert {call[call.index("-u") + 1] for call in commands.calls if call[0] == "squeue"} == users
        assert [call[call.index("-p") + 1] for call in commands.calls if call[0] == "sinfo"] == [partitions]
    none, some = (SlurmScheduler(Settings(), "ab12c", leased=known, env={}) for known in ([], [SPEC]))
    assert none.leases is None and some.leases is not None, "its pilots are cancelled"


# --- what a site must have -----------------------------------------------------------------------------

PARTITION = "PartitionName=physical Nodes=n1"


@pytest.mark.parametrize(
    ("text", "lease", "problems"),
    [
        (PARTITION, {}, []),
        ("PartitionName=other Nodes=n1", {}, ["there is no such partition"]),
        (f"PreemptMode=REQUEUE\n{PARTITION} PreemptMode=cancel", {}, []),
        (f"PreemptMode=SUSPEND,GANG\n{PARTITION}", {}, ["may be suspended (gang, suspend)"]),
        (f"PreemptMode=SUSPEND,GANG\n{PARTITION} PreemptMode=OFF", {}, ["may be suspended (gang)"]),
        (f"PartitionName=DEFAULT PreemptMode=SUSPEND\n{PARTITION}", {}, ["may be suspended (suspend)"]),
        (f"{PARTITION} PreemptMode=suspend", {}, ["may be suspended (suspend)"]),
        (f"DisableRootJobs=YES\n{PARTITION}", {}, ["no jobs of root"]),
        (f"DisableRootJobs=YES\n{PARTITION}", {"user": "multiverse", "become": ("sudo", "-n")}, []),
        (PARTITION, {"user": "multiverse"}, ["cannot become root"]),
    ],
)
def test_a_site_that_cannot_lend_is_told_why(
    tmp_path: Path, text: str, lease: dict[str, Any], problems: list[str]
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(text + "\n")
    settings = Settings(lease=(LeaseSettings("physical", **lease),), slurm=SlurmSettings(conf=conf))
    found = list(lease_sources(settings, site_conf.read(conf)))
    assert len(found) == len(problems) and all(p in f.message for p, f in zip(problems, found, strict=True)), found
    scheduler = SlurmScheduler(settings, "ab12c")
    if problems:
        with pytest.raises(Refused):
            scheduler.check_leases()
    else:
        scheduler.check_leases()


@pytest.mark.parametrize(
    ("partition", "user", "refused"),
    [("gone", "multiverse", True), ("gone", "root", False), ("gone", "", False), ("physical", "multiverse", False)],
)
def test_a_section_is_not_removed_while_its_hosts_need_it(
    tmp_path: Path, partition: str, user: str, *, refused: bool
) -> None:
    """It says how their pilots become root."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{PARTITION}\n")
    settings = Settings(lease=(LeaseSettings("physical", max=0),), slurm=SlurmSettings(conf=conf))
    scheduler = SlurmScheduler(settings, "ab12c", leased=[LeaseSpec("lease-ab12c-1", "t", partition, user=user)])
    if refused:
        with pytest.raises(Refused, match="their hosts cannot be reached") as caught:
            scheduler.check_leases()
        assert "max = 0" in caught.value.hint
    else:
        scheduler.check_leases()
