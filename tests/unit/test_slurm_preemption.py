"""Which jobs may preempt which: what Slurm prints of it, and when it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import OverflowSettings, Settings, SlurmSettings
from multiverse.core.errors import Unknown
from multiverse.core.model.job import Job, Preemption
from multiverse.drivers.slurm.reading import preemption
from multiverse.drivers.slurm.reading.parse import SiteNames
from multiverse.drivers.slurm.reading.preemption import (
    BY_PARTITION,
    BY_QOS,
    by_partition,
    by_qos,
    cluster_rules,
    partition_rules,
    preempt_type,
    qos_rules,
)
from multiverse.drivers.slurm.reading.reader import SlurmReader
from tests.unit.slurm_records import jobs_of
from tests.unit.test_slurm_overflow import RECORD
from tests.unit.test_slurm_reader import Commands as TableCommands

CONFIG = """\
Configuration data as of 2026-11-29T10:00:00
PluginDir               = /usr/lib/x86_64-linux-gnu/slurm-wlm
PlugStackConfig         = (null)
PowerParameters         = (null)
PowerPlugin             =
PreemptMode             = REQUEUE
PreemptType             = preempt/qos
PreemptExemptTime       = 00:05:00
PrEpParameters          = (null)
PriorityType            = priority/multifactor
SLURM_VERSION           = 22.05.8
"""
CONFIG_24 = CONFIG.replace("PreemptMode ", "PreemptParameters       = (null)\nPreemptMode ").replace(
    "22.05.8", "24.11.5"
)
QOS = """\
Name|Preempt|PreemptMode|PreemptExemptTime|GraceTime|Flags
normal||cluster||00:00:00|
urgent|low,normal|cluster||00:00:00|
low||cancel|1-00:00:10|00:02:00|DenyOnLimit,OverPartQOS
limits||cluster|00:30:00|00:00:00|
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS={qos} "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime={grace} Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes={nodes} PriorityJobFactor=1 "
    "PriorityTier={tier} RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode={mode} State=UP "
    "TotalCPUs=8 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED "
    "MaxMemPerNode=UNLIMITED TRES=cpu=8,mem=4M\n"
)


def partition(
    name: str, tier: int, mode: str = "REQUEUE", grace: int = 0, qos: str = "N/A", nodes: str = "n[1-4]"
) -> str:
    return PARTITION.format(name=name, tier=tier, mode=mode, grace=grace, qos=qos, nodes=nodes)


def config(kind: str, mode: str = "REQUEUE", exempt: str = "NONE") -> str:
    text = CONFIG.replace(BY_QOS, kind).replace("= REQUEUE", f"= {mode}")
    return text.replace("00:05:00", exempt)


def of_qos(text: str, mode: str = "REQUEUE", limiting: str = "") -> Preemption:
    return by_qos(cluster_rules(config(BY_QOS, mode)), qos_rules(text), limiting)


def row(name: str, takes: str = "", mode: str = "cluster", exempt: str = "", flags: str = "") -> str:
    return f"{name}|{takes}|{mode}|{exempt}|00:00:00|{flags}\n"


TITLE = QOS.splitlines(keepends=True)[0]


# --- what Slurm prints --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CONFIG, CONFIG_24])
def test_a_qos_preempts_those_of_its_list(text: str) -> None:
    rules = by_qos(cluster_rules(text), qos_rules(QOS), "")
    assert rules == Preemption(
        takes={"urgent": frozenset(("low", "normal"))},
        exempt={"normal": 300.0, "urgent": 300.0, "low": 86410.0, "limits": 1800.0},
        modes={"normal": "requeue", "urgent": "requeue", "low": "cancel", "limits": "requeue"},
        grace={"low": 120.0},
    )


def test_the_qos_of_the_partition_exempts_jobs_unless_their_own_goes_before_it() -> None:
    rules = by_qos(cluster_rules(CONFIG), qos_rules(QOS), "limits")
    assert rules.exempt == {"normal": 1800.0, "urgent": 1800.0, "low": 86410.0, "limits": 1800.0}
    own = TITLE + row("a", exempt="00:00:07") + row("limits") + row("never", exempt="00:00:00")
    assert by_qos(cluster_rules(CONFIG), qos_rules(own), "limits").exempt == {"a": 7.0, "limits": 300.0}


@pytest.mark.parametrize(
    ("cluster", "own", "applied"),
    [
        ("CANCEL", "cluster", "cancel"),
        ("GANG,SUSPEND", "cluster", "suspend"),
        ("GANG,SUSPEND", "requeue", "requeue"),
        ("REQUEUE", "suspend", "cancel"),  # slurmctld kills what it cannot suspend
        ("REQUEUE", "within,requeue", "requeue"),
        ("WITHIN,CANCEL", "cluster", "cancel"),
        ("REQUEUE", "within", "off"),
        ("REQUEUE", "gang", "off"),
    ],
)
def test_the_mode_of_a_qos_goes_before_that_of_the_cluster(cluster: str, own: str, applied: str) -> None:
    rules = of_qos(TITLE + row("high", "low,high") + row("low", mode=own), cluster)
    assert rules.modes["low"] == applied
    assert rules.takes == ({} if applied == "off" else {"high": {"low"}}), "none takes the place of its own"


@pytest.mark.parametrize("text", [config(BY_PARTITION), CONFIG_24.replace(BY_QOS, BY_PARTITION)])
def test_a_partition_preempts_those_of_lower_tiers_on_its_nodes(text: str) -> None:
    cluster = cluster_rules(text)
    shown = (
        partition("vm", 0, nodes="mvgate[1-250],mvab12c-7")
        + partition("batch", 5, "GANG,CANCEL", grace=30, nodes="n[1-4,9]")
        + partition("idle", 1)
        + partition("high", 9, "OFF", nodes="n9,m1")
        + partition("low", 1, "OFF")
        + partition("empty", 9, nodes="(null)")
    )
    rules = by_partition(cluster, partition_rules(shown), {})
    assert rules.takes == {"batch": {"idle"}, "high": {"batch"}}
    assert rules.modes == {
        "vm": "requeue", "batch": "cancel", "idle": "requeue", "high": "off", "low": "off", "empty": "requeue",
    }  # fmt: skip
    assert rules.grace == {"batch": 30.0}
    assert rules.exempt == ({} if cluster.exempt is None else dict.fromkeys(rules.modes, 300.0))


def test_a_partition_exempts_jobs_by_its_qos() -> None:
    shown = partition("vm", 1, qos="limits") + partition("batch", 1)
    rules = by_partition(cluster_rules(CONFIG), partition_rules(shown), qos_rules(QOS))
    assert rules.exempt == {"vm": 1800.0, "batch": 300.0}


def test_partitions_know_no_preemption_within() -> None:
    """Only the plugin of QOS removes the word from the mode: slurmctld kills what it does not know how to preempt."""
    shown = partition("vm", 1, "WITHIN,REQUEUE")
    assert by_partition(cluster_rules(CONFIG), partition_rules(shown), {}).modes == {"vm": "cancel"}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (cluster_rules, ""),
        (cluster_rules, CONFIG.replace("PreemptExemptTime", "Other")),
        (cluster_rules, config(BY_QOS, "UNKNOWN")),
        (cluster_rules, config(BY_QOS, exempt="INVALID")),
        (qos_rules, ""),
        (qos_rules, QOS.replace("PreemptMode|", "")),
        (qos_rules, TITLE + "normal||cluster\n"),
        (qos_rules, TITLE + row("normal", mode="gently")),
        (qos_rules, TITLE + row("normal", exempt="soon")),
        (partition_rules, ""),
        (partition_rules, "slurm_load_partitions error\n"),
        (partition_rules, partition("vm", 1, "")),
        (partition_rules, partition("vm", 1).replace("PriorityTier=1 ", "")),
        (partition_rules, partition("vm", 1).replace("GraceTime=0 ", "")),
        (partition_rules, partition("vm", 1).replace(" Nodes=n[1-4]", "")),
        (partition_rules, partition("vm", 1, nodes="n[1-")),
    ],
)
def test_other_texts_are_unknown(read: Any, text: str) -> None:
    with pytest.raises(Unknown) as error:
        read(text)
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", ""),
        ("PreemptType=preempt/none\n", ""),
        ("#PreemptType=preempt/qos\n", ""),
        ("PreemptType=preempt/qos\n", BY_QOS),
        ("preempttype=preempt/partition_prio # ours\n", BY_PARTITION),
    ],
)
def test_slurm_conf_says_whether_there_is_preemption(text: str, kind: str) -> None:
    assert preempt_type(text) == kind


# --- classes of jobs ----------------------------------------------------------------------------------

NAMES = SiteNames("ab12c", "vm", "mvgate", "vm", overflowing=(OverflowSettings("batch"),))


def class_of(kind: str, **changes: Any) -> str:
    (job,) = jobs_of([RECORD | {"qos": "urgent"} | changes], replace(NAMES, preempt_type=kind), 1_000_000.0).values()
    return job.preempt_class


def test_the_class_of_a_job_is_its_qos_or_the_partition_of_its_submission() -> None:
    assert class_of("") == ""
    assert class_of(BY_QOS) == "urgent" and class_of(BY_QOS, qos=None) == ""
    assert class_of(BY_PARTITION) == "batch"
    assert class_of(BY_PARTITION, partition="vm", features="mvgate") == "vm"
    assert class_of(BY_PARTITION, partition="vm", features="mv_from_batch&mv_7") == "batch"


# --- when Slurm is asked ------------------------------------------------------------------------------


class Commands(TableCommands):
    """Slurm's commands, with the settings of preemption. `database` says whether slurmdbd answers."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.qos, self.partitions = CONFIG, QOS, partition("vm", 1)
        self.database = True

    async def run(self, *command: str, env: Mapping[str, str] | None = None, refused: str = "") -> str:
        found = await super().run(*command, env=env, refused=refused)
        match command:
            case ("sacctmgr", *_):
                assert command[1:] == ("--parsable2", "show", "qos", f"format={TITLE.strip().replace('|', ',')}")
                if not self.database:
                    raise Unknown("sacctmgr: Connection refused")
                return self.qos
            case ("scontrol", "show", "config"):
                return self.config
            case ("scontrol", "show", "partition", *_):
                return self.partitions
        return found


class Site:
    """A reader of a site's Slurm, which asks again as if a minute were over."""

    def __init__(self, directory: Path) -> None:
        self.conf = directory / "slurm.conf"
        self.conf.write_text("PreemptType=preempt/qos\n")
        self.commands = Commands()
        settings = Settings(slurm=SlurmSettings(conf=self.conf), overflow=(OverflowSettings("batch"),))
        self.reader = SlurmReader(settings, "ab12c", self.commands)  # type: ignore[arg-type]  # only run() is called

    async def read(self, *, again: bool = False) -> tuple[Preemption | None, int]:
        """The answer, and how many processes it took."""
        self.commands.calls.clear()
        self.reader._preemption._asked -= again * 2 * preemption._TERM
        return await self.reader.preemption(), len(self.commands.calls)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_nothing_is_asked_without_preemption(site: Site) -> None:
    site.conf.write_text("PreemptType=preempt/none\n")
    assert await site.read() == (None, 0)


async def test_the_rules_of_qos_are_asked_for_once_a_minute(site: Site) -> None:
    rules = by_qos(cluster_rules(CONFIG), qos_rules(QOS), "")
    assert await site.read() == (rules, 3)
    assert await site.read() == (rules, 0)
    site.commands.partitions = partition("vm", 1, qos="limits") + partition("batch", 1)
    assert await site.read(again=True) == (by_qos(cluster_rules(CONFIG), qos_rules(QOS), "limits"), 3)


async def test_partitions_are_asked_for_without_slurmdbd_unless_one_has_a_qos(site: Site) -> None:
    site.conf.write_text("PreemptType=preempt/partition_prio\n")
    site.commands.config = config(BY_PARTITION)
    site.commands.partitions = partition("vm", 3) + partition("other", 1, qos="limits") + partition("batch", 2)
    rules, processes = await site.read()
    assert rules is not None and rules.takes == {"vm": {"batch"}} and processes == 2, "other partitions are not ours"
    site.commands.partitions = partition("vm", 3) + partition("batch", 4, qos="limits")
    rules, processes = await site.read(again=True)
    assert rules is not None and (rules.takes, rules.exempt) == ({"batch": {"vm"}}, {"batch": 1800.0})
    assert processes == 3


async def test_the_last_rules_hold_while_slurmdbd_does_not_answer(site: Site) -> None:
    site.commands.database = False
    assert await site.read() == (None, 3)
    assert await site.read() == (None, 0), "it is not asked each time"
    site.commands.database = True
    rules, _ = await site.read(again=True)
    assert rules is not None
    site.commands.database = False
    assert await site.read(again=True) == (rules, 3)


async def test_what_cannot_be_understood_is_unknown_and_asked_again(site: Site) -> None:
    site.commands.qos = "damaged"
    for _ in range(2):
        with pytest.raises(Unknown):
            await site.read()
    site.commands.qos = QOS
    rules, _ = await site.read()
    assert rules is not None


async def test_slurmctld_must_have_read_what_slurm_conf_says(site: Site) -> None:
    site.commands.config = config(BY_PARTITION)
    assert await site.read() == (None, 2)
    site.commands.config = CONFIG
    rules, _ = await site.read(again=True)
    assert rules is not None
    site.conf.write_text("PreemptType=preempt/partition_prio\n")
    assert await site.read() == (None, 2), "what is known of QOS does not hold for partitions"
    site.conf.write_text("\n")
    assert await site.read() == (None, 0)


async def test_no_job_preempts_where_the_priorities_of_running_jobs_count(site: Site) -> None:
    site.commands.config = CONFIG_24.replace("= (null)\nPreemptMode", "= min_exempt_priority=500\nPreemptMode")
    assert await site.read() == (None, 2)


# --- the values ---------------------------------------------------------------------------------------


def test_a_waiting_job_may_take_the_place_of_jobs_of_the_classes_that_its_own_preempts() -> None:
    rules = of_qos(QOS)

    def job(qos: str) -> Job:
        (one,) = jobs_of([RECORD | {"qos": qos}], replace(NAMES, preempt_type=BY_QOS), 1_000_000.0).values()
        return one

    may = {(one, other) for one in ("urgent", "low", "") for other in ("urgent", "low", "") if one or other}
    classes = {qos: job(qos).preempt_class for qos in ("urgent", "low", "")}
    takes = {(one, other) for one, other in may if classes[other] in rules.takes.get(classes[one], ())}
    assert takes == {("urgent", "low")}
