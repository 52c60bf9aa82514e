"""Configuration that is derived and rendered, and the inbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model import AttemptState, CloneKind, Size, Vm, VmState
from multiverse.core.pool import node_spec
from multiverse.drivers.slurm import bootstrap, conf, install
from multiverse.drivers.slurm.command import meaning
from multiverse.drivers.slurm.inbox import Hint, hints, take
from multiverse.drivers.slurm.reread import _cells
from multiverse.guest import agent
from multiverse.guest.protocol import INTRODUCED
from tests.unit import rows as hand

SITE_CONF = """\
# the site's
ClusterName=prod  # its name
SlurmctldHost=head(192.0.2.1)
SlurmctldHost=spare(192.0.2.2)
AuthInfo=cred_expire=60,socket=/site/munge
DefMemPerCPU=2048
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
Prolog=/site/prolog
SlurmdSpoolDir=/site/spool
PrologFlags=Alloc,\\
Contain
NodeName=n[1-9] CPUs=4
PartitionName=all Nodes=ALL
Include more.conf
"""


def test_a_guests_slurm_conf() -> None:
    made = conf.for_guest(SITE_CONF, "10.1.0.1")
    keys = {key.lower(): value for key, value in conf.settings(made)}
    assert keys["clustername"] == "prod"
    assert keys["slurmctldhost"] == "head(10.1.0.1)"
    assert made.lower().count("slurmctldhost") == 1
    assert keys["authinfo"] == "socket=/run/munge/munge.socket.2,cred_expire=60"
    assert (keys["proctracktype"], keys["taskplugin"]) == ("proctrack/linuxproc", "task/affinity")
    assert keys["prologflags"] == "Alloc,Contain"
    assert "PrologFlags=DeferBatch,Contain\n" in conf.for_guest("PrologFlags=DeferBatch,X11\n", "10.1.0.1")
    for gone in ("prolog", "nodename", "partitionname", "include"):
        assert gone not in keys
    assert "/site" not in made


def test_values_of_slurm_conf() -> None:
    assert conf.memory_per_cpu(SITE_CONF, 7) == 2048
    assert conf.memory_per_cpu("", 7) == 7
    assert conf.included(SITE_CONF) == ["more.conf"]
    assert conf.node_conf(Size(2, 300, 50), ("vm", "a", "vm", "mv_1")) == (
        "CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=300 TmpDisk=50 Feature=vm,a,mv_1"
    )


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    (tmp_path / "slurm.conf").write_text(SITE_CONF)
    (tmp_path / "more.conf").write_text("KillWait=7\n")
    (tmp_path / "key").write_bytes(b"secret")
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", munge_key=tmp_path / "key", inbox=tmp_path / "inbox")
    return Settings(slurm=slurm)


VM = Vm(
    id=1,
    version=0,
    state=VmState.STARTING,
    since=0.0,
    name="mvab12c-1",
    host="localhost",
    image="slim",
    kind=CloneKind.INSTANT,
    size=Size(2, 384),
    told=Size(2, 300),
    mac="02:00:00:00:00:02",
    address="10.1.2.3/16",
)


def test_what_a_site_has_configured_in_vain_is_named() -> None:
    assert conf.unsupported(SITE_CONF) == conf.unsupported("PreemptType=preempt/none\n") == []
    (preemption,) = conf.unsupported("preempttype=preempt/qos\n")
    assert preemption.name == "preemption" and "preempt/qos" in preemption.message and "restart" in preemption.remedy
    (display,) = conf.unsupported("PrologFlags=Alloc,X11\n")
    assert display.name == "x11" and "display" in display.message
    (federation,) = conf.unsupported("FederationParameters=fed_display\n")
    assert federation.name == "federation" and "--clusters" in federation.remedy


def test_membership_of_a_pooled_vm(site: Settings, tmp_path: Path) -> None:
    given = bootstrap.bootstrap(site, node_spec(VM, None))
    files = {file.path: file for file in given.files}
    assert b"KillWait=7" in files["/etc/slurm/slurm.conf"].content
    assert b"head(10.213.0.1)" in files["/etc/slurm/slurm.conf"].content
    munged, slurmd = given.daemons
    assert (munged.user, munged.ready_path) == ("munge", "/run/munge/munge.socket.2")
    assert slurmd.argv[-1].startswith("CPUs=2 ")
    assert slurmd.argv[-1].endswith(f" RealMemory=300 TmpDisk=0 Feature=vm,{VM.image},instant,auto,mv_v{VM.id}")
    guest_conf = tmp_path / "guest"
    guest_conf.mkdir()
    (guest_conf / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    own = replace(site, slurm=replace(site.slurm, guest_conf=guest_conf, controller_address="10.9.9.9"))
    files = {file.path: file for file in bootstrap.bootstrap(own, node_spec(VM, None)).files}
    assert files["/etc/slurm/cgroup.conf"].content == b"CgroupPlugin=disabled\n"
    assert b"head(10.9.9.9)" in files["/etc/slurm/slurm.conf"].content


def test_a_job_that_took_a_spare_waits_there_for_its_user_and_no_other_does(site: Settings, tmp_path: Path) -> None:
    files = {file.path: file for file in bootstrap.bootstrap(site, node_spec(VM, None)).files}
    assert b"\nProlog=/etc/slurm/multiverse-prolog\n" in files["/etc/slurm/slurm.conf"].content
    assert (files["/etc/slurm/multiverse-prolog"].mode, agent.INTRODUCED) == (0o755, INTRODUCED)
    pipe = tmp_path / "pipe"
    waiting = files["/etc/slurm/multiverse-prolog"].content.replace(INTRODUCED.encode(), str(pipe).encode())
    descriptor = agent.make_pipe(str(pipe))
    with subprocess.Popen(["sh", "-c", waiting]) as job:
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.3)
        os.write(descriptor, b"\n" * agent.MOST_WAIT)
        assert job.wait(10.0) == 0
    os.close(descriptor)
    attempt = hand.attempt(AttemptState.SPAWNING)
    files = {file.path: file for file in bootstrap.bootstrap(site, node_spec(VM, attempt)).files}
    assert "/etc/slurm/multiverse-prolog" not in files and b"Prolog=" not in files["/etc/slurm/slurm.conf"].content


def test_with_a_slurm_conf_of_the_sites_own_in_guests_no_job_would_wait(site: Settings, tmp_path: Path) -> None:
    assert bootstrap.may_be_offered(site, node_spec(VM, None))
    own = replace(site, slurm=replace(site.slurm, guest_conf=tmp_path / "guest"))
    (tmp_path / "guest").mkdir()
    assert bootstrap.may_be_offered(own, node_spec(VM, None))
    (tmp_path / "guest" / "slurm.conf").write_text("ClusterName=own\n")
    assert not bootstrap.may_be_offered(own, node_spec(VM, None))


@pytest.mark.parametrize(
    ("line", "may"),
    [
        ("MaxMemPerCPU=150", True),
        ("MaxMemPerCPU=149", False),
        ("MaxMemPerCPU=UNLIMITED", True),
        ("LaunchParameters=use_interactive_step", True),
        ("LaunchParameters=Disable_Send_Gids,slurmstepd_memlock", False),
    ],
)
def test_nor_is_a_spare_offered_where_slurm_would_change_the_job_or_ask_for_its_user(
    site: Settings, line: str, may: bool
) -> None:
    site.slurm.conf.write_text(SITE_CONF + line + "\n")
    assert bootstrap.may_be_offered(site, node_spec(VM, None)) == may


def test_membership_without_a_key_is_broken(site: Settings) -> None:
    site.slurm.munge_key.unlink()
    with pytest.raises(Broken, match="munge_key"):
        bootstrap.bootstrap(site, node_spec(VM, None))


@pytest.mark.parametrize(
    ("complaint", "error"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Unknown),
        ("slurm_update error: Socket timed out on send/recv operation", Unknown),
        ("Unexpected missing socket error for job 66", Unknown),
        ("slurm_load_jobs error: Connection reset by peer", Unknown),
        ("Resource temporarily unavailable for job 8", Exhausted),
        ("Invalid job id specified for job 5", Gone),
        ("delete_node nodename=n1: Invalid node name specified", Gone),
        ("22_9: Invalid feature specification", Refused),
        ("Job is no longer pending execution for job 5", Stale),
        ("scontrol: fatal: Unable to process configuration file", Broken),
        ("", Refused),
    ],
)
def test_complaints(complaint: str, error: type[MultiverseError]) -> None:
    assert type(meaning("scontrol", complaint)) is error


def test_columns_cannot_be_forged_by_a_jobs_own_words() -> None:
    row = _cells(
        f"{'5_1':<40}{'PENDING':<16}{'vm':<256}{'a&mvgate':<2048}{'1':<12}{'1000':<24}{'N/A':<24}{'4':<24}{'None':<512}"
    )
    assert (row["JobArrayID"], row["Feature"], row["RestartCnt"]) == ("5_1", "a&mvgate", "1")


# --- what a site installs --------------------------------------------------------------------------


def rendered(settings: Settings) -> dict[str, str]:
    return install.render(
        settings,
        install.Site(
            images=("slim",), gate_nodes=4, largest=install.largest(settings), memory_per_cpu=150, slurm_uid=64
        ),
    )


def test_the_gate_is_as_large_as_the_largest_vm(site: Settings) -> None:
    text = rendered(site)["multiverse.conf"].replace("\\\n", "")
    gate = next(line for line in text.splitlines() if line.startswith("NodeName="))
    host = site.host
    assert f"CPUs={host.cores} Sockets=1 CoresPerSocket={host.cores} ThreadsPerCore=1 " in gate
    assert f"RealMemory={host.memory - 256 - 80} TmpDisk={site.image.tmp_disk} " in gate
    assert "Feature=mvgate,slim,instant,linked,full,auto State=DRAIN" in gate
    assert "mvgate[1-4] NodeAddr=127.0.1.[1-4] Port=1" in gate
    with pytest.raises(Refused):
        install.render(site, install.Site((), 0, Size(1, 1), 1, 0))


FAILED = "Multiverse cannot look at this job, so it is refused: tell an administrator, whom slurmctld's log tells why"
LUA = """
slurm = { SUCCESS = 0, ERROR = -1, STEPMGR_ENABLED = 2^41,
          log_user = function(f, ...) io.write(string.format(f, ...)) end,
          log_error = function(f, ...) io.write("error " .. string.format(f, ...)) end }
dofile("job_submit.lua")
local job = { %s }
local parts = { vm = { flag_default = 1 }, other = { flag_default = 0 } }
local answer = slurm_job_submit(job, parts, 1000)
io.write("|", answer, "|", tostring(job.features), "|", tostring(job.min_nodes), "-", tostring(job.max_nodes))
"""


def _lua() -> str | None:
    return next((path for name in ("lua5.1", "lua5.3", "lua5.4", "lua") if (path := shutil.which(name))), None)


@pytest.mark.skipif(_lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")
@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("user_id = 1000, min_cpus = 1", "|0|mvgate"),
        ("user_id = 1000, features = 'slim'", "|0|slim&mvgate"),
        ("user_id = 1000, partition = 'other', features = 'a|b'", "|0|a|b"),
        ("user_id = 0", "Multiverse runs no job as root: submit as a user, e.g. sbatch --uid=NAME|-1|nil"),
        ("user_id = 1000, features = {}", f"{FAILED}|-1|"),
        ("user_id = 1000, partition = 'vm', features = {}", f"{FAILED}|-1|"),
        ("user_id = 1000, partition = 'other', features = {}", "|0|table"),  # an error of ours blocks nobody else
        ("user_id = 1000, num_tasks = 2, min_cpus = 2", "|mvgate|1-1"),  # without -N: one VM
        ("user_id = 1000, num_tasks = 2, min_cpus = 2, ntasks_per_node = 1", "|mvgate|2-2"),
        ("user_id = 1000, min_nodes = 2, max_nodes = 3, num_tasks = 4294967294", "|mvgate|2-2"),
        ("user_id = 1000, contiguous = 65534, req_switch = 4294967294, delay_boot = 4294967294", "|0|mvgate"),
        ("user_id = 1000, contiguous = 1", "VMs have no neighbours: submit without --contiguous|-1"),
        ("user_id = 1000, bitflags = 503316736", "--spread-job is not served"),
        *((f"user_id = 1000, bitflags = 2^{bit}", "without --gres-flags") for bit in (4, 19, 38, 39, 40)),
        ("user_id = 1000, bitflags = 2^42 + 2^37 + 2^20 + 2^5", "|0|mvgate"),
        ("user_id = 1000, bitflags = 2^41", "--stepmgr is not served"),
        ("user_id = 1000, min_mem_per_node = 0", "say how much with --mem"),
        ("user_id = 1000, num_tasks = 3, min_cpus = 1", "--overcommit is not served"),
        ("user_id = 1000, partition = 'other', contiguous = 1, min_mem_per_node = 0", "|0|nil|nil-nil"),
    ],
)
def test_the_submit_script(site: Settings, tmp_path: Path, fields: str, answer: str) -> None:
    install.write(rendered(site), tmp_path)
    install.make_inbox(tmp_path / "inbox", 0)
    program = LUA % fields
    lua = _lua()
    assert lua
    done = subprocess.run([lua, "-"], input=program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer in done.stdout
    assert ("error multiverse: " in done.stdout) == (FAILED in answer)


SPARES = """\
mvab-1 mv_v1 warm 0 0 1 300 0
mvab-2 mv_v2 slim 1 1 1 300 500
mvab-3 mv_v3 slim 1 1 2 900 0
"""


@pytest.mark.skipif(_lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")
@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ("min_cpus = 1", "mv_v2"),
        ("min_cpus = 1, features = 'slim'", "slim&mv_v2"),
        ("min_cpus = 1, features = 'slim&auto'", "slim&auto&mv_v2"),
        ("min_cpus = 1, features = 'instant'", "instant&mv_v2"),
        ("min_cpus = 1, features = 'warm&instant'", "warm&instant&mv_v1"),
        ("min_cpus = 1, features = 'warm'", "warm&mvgate"),  # its kind is left to a site that makes others
        ("min_cpus = 1, features = 'full'", "full&mvgate"),
        ("min_cpus = 1, features = 'slim&linked'", "slim&linked&mvgate"),
        ("min_cpus = 1, min_mem_per_node = 300", "mv_v2"),
        ("min_cpus = 1, min_mem_per_node = 301", "mvgate"),
        ("min_cpus = 1, pn_min_tmp_disk = 500", "mv_v2"),
        ("min_cpus = 1, pn_min_tmp_disk = 501", "mvgate"),
        ("min_cpus = 2, num_tasks = 2", "mv_v3"),
        ("min_cpus = 2, cpus_per_task = 2, min_mem_per_cpu = 450", "mv_v3"),
        ("min_cpus = 2, cpus_per_task = 2, min_mem_per_cpu = 451", "mvgate"),
        ("min_cpus = 2, min_nodes = 2", "mvgate"),
        ("min_cpus = 1, priority = 0", "mvgate"),
        ("min_cpus = 1, priority = 4294967294, begin_time = 0, dependency = ''", "mv_v2"),
        ("min_cpus = 1, begin_time = os.time() + 60", "mvgate"),
        ("min_cpus = 1, begin_time = os.time() - 60", "mv_v2"),
        ("min_cpus = 1, dependency = 'afterok:7'", "mvgate"),
        ("min_cpus = 1, array_inx = '1-2'", "mvgate"),
        ("min_cpus = 1, licenses = 'matlab:1'", "mvgate"),
        ("min_cpus = 1, features = 'instant&auto'", "instant&auto&mvgate"),
    ],
)
def test_the_submit_script_takes_a_spare_that_fits(site: Settings, tmp_path: Path, fields: str, feature: str) -> None:
    spares = _spares(site, tmp_path, int(time.time()) + 10)
    said = _submitted(tmp_path, fields)
    assert f"|0|{feature}|" in said
    spare = feature.rpartition("&")[2] if "mv_v" in feature else ""
    taken = sorted(path.name for path in spares.glob("taken.*"))
    assert taken == ([f"taken.mvab-{spare[-1]}"] if spare else [])
    assert len(list(spares.glob("open.*"))) == 3 - len(taken)


@pytest.mark.skipif(_lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")
def test_the_submit_script_takes_each_spare_once_and_none_of_an_old_list(site: Settings, tmp_path: Path) -> None:
    spares = _spares(site, tmp_path, int(time.time()) + 10)
    assert "|0|mv_v2|" in _submitted(tmp_path, "min_cpus = 1")
    assert "|0|mvgate|" in _submitted(tmp_path, "min_cpus = 1"), "though the list names it yet"
    (spares / "taken.mvab-2").rename(spares / "open.mvab-2")
    for text in (f"{int(time.time()) - 1}\n{SPARES}", "", "soon\nmv_v2\n", f"{int(time.time()) + 10}\nmv_v2 slim\n"):
        (spares / "list").write_text(text)
        assert "|0|mvgate|" in _submitted(tmp_path, "min_cpus = 1")


@pytest.mark.skipif(_lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")
@pytest.mark.parametrize(
    ("partitions", "feature"),
    [
        ("gate = { state_up = 3, max_time = 60 }, run = { state_up = 3, max_time = 60 }", "mv_v2"),
        ("gate = { state_up = 1 }, run = { state_up = 3 }", "mvgate"),  # closed for jobs that start
        ("gate = { state_up = 3 }, run = { state_up = 1 }", "mvgate"),
        ("gate = { state_up = 3, allow_groups = 'staff' }, run = { state_up = 3 }", "mvgate"),
        ("gate = { state_up = 3 }, run = { state_up = 3, qos = 'short' }", "mvgate"),
        ("gate = { state_up = 3 }", "mvgate"),  # nor may he see where jobs run
        ("gate = { state_up = 3, max_mem_per_cpu = 100 }, run = { state_up = 3, max_mem_per_cpu = 100 }", "mvgate"),
        ("gate = { state_up = 3, max_mem_per_cpu = 150 }, run = { state_up = 3, max_mem_per_cpu = 150 }", "mv_v2"),
    ],
)
def test_no_job_passes_by_a_gate_that_is_closed_or_has_rules_of_its_own(
    site: Settings, tmp_path: Path, partitions: str, feature: str
) -> None:
    _spares(site, tmp_path, int(time.time()) + 10)
    assert f"|0|{feature}|" in _submitted(tmp_path, "min_cpus = 1", f"local p = {{ {partitions} }}")


def _spares(site: Settings, tmp_path: Path, until: int) -> Path:
    install.write(rendered(site), tmp_path)
    install.make_inbox(tmp_path / "inbox", 0)
    spares = tmp_path / "inbox" / "spares"
    spares.mkdir()
    (spares / "list").write_text(f"{until}\n{SPARES}")
    for number in (1, 2, 3):
        (spares / f"open.mvab-{number}").touch()
    return spares


def _submitted(tmp_path: Path, fields: str, partitions: str = "local p = { gate = OPEN, run = OPEN }") -> str:
    lua = _lua()
    assert lua
    parts = "local parts = { vm = p.gate, vmrun = p.run }\nif parts.vm then parts.vm.flag_default = 1 end"
    usual = "local parts = { vm = { flag_default = 1 }, other = { flag_default = 0 } }"
    program = LUA.replace(usual, f"local OPEN = {{ state_up = 3 }}\n{partitions}\n{parts}")
    program %= f"user_id = 1000, {fields}"
    return subprocess.run([lua, "-"], input=program, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


# A site's own rules beside ours, in both functions; its head is that of the script that we install.
_SITE_RULES = """
function slurm_job_submit(job, partitions, uid)
  if job.account == "closed" then slurm.log_user("%s", "this account is closed"); return slurm.ERROR end
  return multiverse.submit(job, partitions, uid)
end
function slurm_job_modify(job, record, partitions, uid)
  if job.account == "closed" then slurm.log_user("%s", "this account is closed"); return slurm.ERROR end
  return multiverse.modify(job, record, partitions, uid)
end
return slurm.SUCCESS
"""
_ASK = """
slurm = { SUCCESS = 0, ERROR = -1, log_user = function(f, ...) io.write(string.format(f, ...)) end,
          log_error = function(f, ...) logged = true end }
dofile("job_submit.lua")
local parts = { vm = { flag_default = 1 }, other = { flag_default = 0 } }
io.write("|", %s, "|", logged and "logged" or "")
"""


@pytest.mark.skipif(_lua() is None, reason="no Lua here; the integration tests run the script in slurmctld")
@pytest.mark.parametrize("own_rules", [False, True])
@pytest.mark.parametrize("harm", ["none", "missing", "empty", "syntax", "site missing"])
def test_what_our_script_cannot_look_at_is_refused_and_nothing_else(
    site: Settings, tmp_path: Path, harm: str, own_rules: bool
) -> None:
    files = rendered(site)
    if own_rules:
        head, function, _ = files["job_submit.lua"].partition("\nfunction slurm_job_submit")
        assert function
        files["job_submit.lua"] = head + _SITE_RULES
    install.write(files, tmp_path)
    ours = tmp_path / ("multiverse_site.lua" if harm == "site missing" else "multiverse.lua")
    if harm.endswith("missing"):
        ours.unlink()
    elif harm != "none":
        ours.write_text("" if harm == "empty" else "local x = = 1")
    lua = _lua()
    assert lua

    def answer(call: str) -> str:
        done = subprocess.run([lua, "-"], input=_ASK % call, cwd=tmp_path, capture_output=True, text=True, check=True)
        said, code, logged = done.stdout.split("|")
        assert (logged == "logged") == (harm != "none")
        return f"{code} {said}".strip()

    well = harm == "none"
    refused, fixed = f"-1 {FAILED}", "-1 a submitted job's constraint and nodes are fixed: cancel it and submit it anew"
    for partition in ("partition = 'vm', ", "partition = 'other,vm', ", "partition = 'vmrun', ", ""):
        said = answer(f"slurm_job_submit({{ {partition}user_id = 1000, min_cpus = 1 }}, parts, 1000)")
        assert said.startswith("0" if "'vm'" in partition or not partition else "-1") if well else said == refused
    assert answer("slurm_job_submit({ partition = 'other', user_id = 1000 }, parts, 1000)") == "0"
    record = "{ partition = 'vm', job_state = 0 }"
    assert answer(f"slurm_job_modify({{ features = 'x' }}, {record}, parts, 1000)") == (fixed if well else refused)
    assert answer(f"slurm_job_modify({{ features = 'x' }}, {record}, parts, 64)") == "0", "the controller goes on"
    moved = answer("slurm_job_modify({ partition = 'vm' }, { partition = 'other' }, parts, 1000)")
    assert moved.startswith("-1 submit the job to partition vm") if well else moved == refused
    assert answer("slurm_job_modify({ features = 'x' }, { partition = 'other' }, parts, 1000)") == "0"
    for call in ("slurm_job_submit({ partition = 'other', account = 'closed' }, parts, 0)",
                 "slurm_job_modify({ account = 'closed' }, { partition = 'other' }, parts, 0)"):  # fmt: skip
        assert answer(call) == ("-1 this account is closed" if own_rules else "0")


def test_the_epilog_leaves_a_hint_and_never_fails(site: Settings, tmp_path: Path) -> None:
    install.write(rendered(site), tmp_path)
    epilog = tmp_path / "multiverse-epilog"
    job = {"SLURM_JOB_PARTITION": "vmrun", "SLURM_JOB_ID": "7"}
    assert subprocess.run([epilog], env=job, check=False).returncode == 0  # no inbox
    (tmp_path / "inbox").mkdir()
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    for env in (job, job | task, job | {"SLURM_JOB_PARTITION": "other", "SLURM_JOB_ID": "8"}):
        assert subprocess.run([epilog], env=env, check=False).returncode == 0
    assert sorted(take(tmp_path / "inbox")) == [Hint("end", "5_2"), Hint("end", "7")]


# --- the inbox -------------------------------------------------------------------------------------


def _appears(path: Path) -> None:
    deadline = time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_hints_come_are_consumed_and_survive_the_directory(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "submit").touch()
    (inbox / "end.12;rm").touch()
    stream = hints(inbox)

    async def following() -> Hint:
        return await asyncio.wait_for(anext(stream), 5)

    assert await following() == Hint("submit", "")
    waiting = asyncio.create_task(following())
    await asyncio.sleep(0)
    (inbox / "end.12_3").touch()
    assert await waiting == Hint("end", "12_3")
    assert [path.name for path in inbox.iterdir()] == ["end.12;rm"]
    shutil.rmtree(inbox)
    waiting = asyncio.create_task(following())
    await asyncio.wait_for(asyncio.to_thread(_appears, inbox), 5)
    (inbox / "end.4").touch()
    assert await waiting == Hint("end", "4")
