"""The submit script that a site installs: what it refuses, which offered nodes it gives to jobs, and its own errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.drivers.slurm.site import install
from multiverse.drivers.slurm.submission import Hint, take
from tests.unit.slurm_lua import (
    install_scripts,
    modify,
    needs_lua,
    rendered,
    run,
    run_with_cpus,
    run_with_memory,
    submit,
    with_slurm,
)

pytestmark = needs_lua

FAILED = "Multiverse could not check this job: ask an administrator to read slurmctld's log"


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    return Settings(slurm=SlurmSettings(conf=tmp_path / "slurm.conf", inbox=tmp_path / "inbox"))


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("user_id = 1000, min_cpus = 1", "|0|mvgate"),
        ("user_id = 1000, features = 'slim'", "|0|slim&mvgate"),
        ("user_id = 1000, partition = 'other', features = 'a|b'", "|0|a|b"),
        ("user_id = 0", "Multiverse runs no jobs of root: submit as a user, e.g. sbatch --uid=NAME|2010|nil"),
        ("user_id = 1000, features = {}", f"{FAILED}|2090|"),
        ("user_id = 1000, partition = 'vm', features = {}", f"{FAILED}|2090|"),
        ("user_id = 1000, partition = 'other', features = {}", "|0|table"),  # an error blocks no other partition
        ("user_id = 1000, num_tasks = 2, min_cpus = 2", "|mvgate|1-1"),  # without -N: one VM
        ("user_id = 1000, num_tasks = 2, min_cpus = 2, ntasks_per_node = 1", "|mvgate|2-2"),
        ("user_id = 1000, min_nodes = 2, max_nodes = 3, num_tasks = 4294967294", "|mvgate|2-2"),
        ("user_id = 1000, min_nodes = 250", "|mvgate|250-250"),
        ("user_id = 1000, min_nodes = 251", "request fewer nodes|2014"),
        ("user_id = 1000, contiguous = 65534, req_switch = 4294967294, delay_boot = 4294967294", "|0|mvgate"),
        ("user_id = 1000, contiguous = 1", "--contiguous changes nothing: VMs are connected to one network|0|mvgate"),
        ("user_id = 1000, shared = 1", "--oversubscribe changes nothing: a VM runs one job only|0|mvgate"),
        ("user_id = 1000, exc_nodes = 'mvab12c-7'", "|0|mvgate"),
        ("user_id = 1000, tres_per_job = 'gres:gpu:0'", "|0|mvgate"),
        ("user_id = 1000, tres_per_node = 'gres:gpu:0,gres:gpu:a100:0'", "|0|mvgate"),
        ("user_id = 1000, tres_per_node = 'gres:gpu:0,gres:gpu:a100:10'", "without --gres and GPUs|2072"),
        ("user_id = 1000, tres_per_node = 'gres:gpu'", "without --gres and GPUs|2072"),
        ("user_id = 1000, bitflags = 503316736", "--spread-job is not supported"),
        *((f"user_id = 1000, bitflags = 2^{bit}", "without --gres-flags") for bit in (4, 19, 38, 39, 40)),
        ("user_id = 1000, bitflags = 2^42 + 2^37 + 2^20 + 2^5", "|0|mvgate"),
        ("user_id = 1000, bitflags = 2^41", "--stepmgr is not supported"),
        ("user_id = 1000, min_mem_per_node = 0", "give the size with --mem"),
        ("user_id = 1000, num_tasks = 3, min_cpus = 1", "|0|mvgate|1-1"),  # --overcommit
        ("user_id = 1000, immediate = 1", "no VM is ready for this job: give the seconds in which there may be one"),
        ("user_id = 1000, immediate = 0", "|0|mvgate"),  # salloc waits itself with --immediate=60
        ("user_id = 1000, partition = 'vm,other'", "submit to vm only|2000"),
        ("user_id = 1000, het_job_offset = 0", "submit each component as a separate job|2036"),
        ("user_id = 1000, features = 'a|b'", "join features with &|2029"),
        ("user_id = 1000, prefer = 'slim'", "use --constraint instead|2133"),
        ("user_id = 1000, req_nodes = 'mv1'", "submit without --nodelist|2018"),
        ("user_id = 1000, reservation = 'x'", "submit without --reservation|2053"),
        ("user_id = 1000, licenses = 'vm:1'", "reserved for Multiverse: submit without it|2048"),
        ("user_id = 1000, min_mem_per_node = 0", "give the size with --mem|2044"),
        ("user_id = 1000, immediate = 1", "as in --immediate=60|2078"),
        ("user_id = 1000, burst_buffer = 'x'", "without --bb and --bbf|2094"),
        ("user_id = 1000, threads_per_core = 2", "--ntasks-per-core and --hint|2132"),
        ("user_id = 1000, core_spec = 1", "submit without --core-spec and --thread-spec|2036"),
        ("user_id = 1000, thread_spec = 2", "submit without --core-spec and --thread-spec|2036"),
        ("user_id = 1000, core_spec = 0", "|0|mvgate"),
        ("user_id = 1000, script = '#!/bin/sh'", "|0|mvgate"),
        *(
            (f"user_id = 1000, {fields}", answer)
            for fields, answer in (
                (
                    "script = 'x', environment = { SLURM_PROFILE = 'Task' }",
                    "profiles of VMs are not supported: submit without",
                ),
                ("script = 'x', environment = { SLURM_PROFILE = 'None' }", "|0|mvgate"),
                ("script = 'x', environment = { SLURM_PROFILE = '' }", "|0|mvgate"),
                (
                    "script = 'x', environment = { SLURM_PROFILE = 'Task', SLURM_JOB_ID = '7' }",
                    "|0|mvgate",
                ),  # of that job
                ("script = 'x', environment = { SLURM_CONTAINER_ID = 'box' }", "--container-id is not supported"),
                ("script = 'x', environment = { SLURM_CONTAINER_ID = 'box', SLURM_JOB_ID = '7' }", "|0|mvgate"),
                ("environment = { SLURM_PROFILE = 'Task' }", "|0|mvgate"),  # of no batch job
                (
                    "features = 'slim&other'",
                    "a job has one image, not slim and other: name one of them with --constraint",
                ),
                ("features = 'full&slim&linked'", "a job has one kind of clone, not full and linked: name one of them"),
                ("features = 'slim&full&slim'", "|0|slim&full&slim&mvgate"),
                ("features = 'slim&place-pack'", "|0|slim&place-pack&mvgate"),
                (
                    "features = 'place-fast'",
                    "there is no placement policy fast: use --constraint=place-NAME with one of worst-fit, best-fit,"
                    " first-fit, random-fit, pack, spread, least-loaded|2029",
                ),
                ("features = 'place-'", "there is no placement policy : use"),
                (
                    "features = 'place-pack&place-first-fit'",
                    "a job has one placement policy, not place-pack and place-first-fit: name one of them",
                ),
            )
        ),
        ("user_id = 1000, comment = 'said vm:net=1G,per-host=2 vm:mem-per-task=1G'", "|0|mvgate"),
        ("user_id = 1000, comment = 'vm: vms:net=x'", "|0|mvgate"),
        ("user_id = 1000, comment = 'vm:speed=3'", "vm:speed=3 in --comment is not supported: use mem-per-task, net"),
        (
            "user_id = 1000, comment = 'vm:net=fast'",
            "vm:net=fast in --comment is wrong: give bits a second such as 100M",
        ),
        ("user_id = 1000, comment = 'vm:net=0'", "vm:net=0 in --comment is wrong"),
        ("user_id = 1000, comment = 'vm:net=1T'", "vm:net=1T in --comment is wrong"),
        ("user_id = 1000, comment = 'vm:net'", "vm:net in --comment is wrong"),
        ("user_id = 1000, comment = 'vm:per-host=2M'", "vm:per-host=2M in --comment is wrong: give a number of VMs"),
        ("user_id = 1000, comment = 'vm:per-host=1 vm:per-host=1'", "vm:per-host is given twice in --comment"),
        ("user_id = 1000, comment = 'a vms:x vm:', partition = 'other'", "|0|nil"),
        ("user_id = 1000, partition = 'other', contiguous = 1, min_mem_per_node = 0", "|0|nil|nil-nil"),
    ],
)
def test_a_job_is_sent_to_the_gate_or_refused_with_a_message(site: Settings, fields: str, answer: str) -> None:
    said = submit(install_scripts(site), fields)
    assert answer in said
    assert ("error multiverse: " in said) == (FAILED in answer), "an error is logged"


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("num_tasks = 2, cpus_per_task = 2, min_cpus = 4", "1024|1"),
        ("num_tasks = 3, min_nodes = 2, min_cpus = 3", "1024|2"),  # two tasks on one of the nodes
        ("num_tasks = 4, ntasks_per_node = 4, min_cpus = 4", "2048|1"),
        ("num_tasks = 2, min_cpus = 2, min_mem_per_node = 1024", "1024|1"),
        ("num_tasks = 2, min_cpus = 2, min_mem_per_cpu = 512", "1024|1"),
        (
            "num_tasks = 2, min_cpus = 2, min_mem_per_node = 512",
            "gives each node 1024 MiB, but --mem gives it 512: submit",
        ),
        ("num_tasks = 2, cpus_per_task = 2, min_cpus = 4, min_mem_per_cpu = 512", "but --mem-per-cpu gives it 2048"),
    ],
)
def test_memory_for_each_task_makes_the_memory_of_the_node(site: Settings, fields: str, answer: str) -> None:
    said = run_with_memory(install_scripts(site), f"user_id = 1000, comment = 'vm:mem-per-task=512', {fields}")
    assert answer in said


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("num_tasks = 4, min_cpus = 4, sockets_per_node = 2", "|4|1"),
        ("num_tasks = 3, min_cpus = 3, sockets_per_node = 2", "|4|1"),  # two on each socket
        ("num_tasks = 3, min_cpus = 3, ntasks_per_socket = 1", "|3|1"),
        ("num_tasks = 3, min_cpus = 6, cpus_per_task = 2, ntasks_per_socket = 2", "|8|1"),
        ("num_tasks = 4, min_nodes = 2, min_cpus = 4, ntasks_per_socket = 1", "|2|2"),
        ("num_tasks = 1, min_cpus = 1, ntasks_per_socket = 4", "|nil|1"),
        ("num_tasks = 1, min_cpus = 1, sockets_per_node = 2, cores_per_socket = 3", "|6|1"),
        ("num_tasks = 1, min_cpus = 1, sockets_per_node = 65534, ntasks_per_socket = 65535", "|nil|1"),
        (
            "num_tasks = 1, min_cpus = 1, sockets_per_node = 9",
            "the job requests 9 sockets on a node, but a VM has 8 at",
        ),
        (
            "num_tasks = 9, min_cpus = 9, ntasks_per_socket = 1",
            "the job requests 9 sockets on a node, but a VM has 8 at",
        ),
    ],
)
def test_the_cpus_of_a_node_are_divided_evenly_among_its_sockets(site: Settings, fields: str, answer: str) -> None:
    assert answer in run_with_cpus(install_scripts(site), f"user_id = 1000, {fields}")


@pytest.mark.parametrize(
    ("change", "comment", "message"),
    [
        ("comment = 'other vm:per-host=2'", "vm:per-host=2", ""),
        ("comment = 'vm:net=1000,per-host=2'", "vm:per-host=2 vm:net=1G", ""),
        ("comment = 'done'", "vm:per-host=2", "cannot be changed: cancel the job"),
        ("comment = 'vm:net=2G'", "vm:net=1G", "cannot be changed: cancel the job"),
        ("comment = 'vm:speed=3'", "", "cannot be changed: cancel the job"),
        ("num_tasks = 4", "vm:mem-per-task=1G", "the memory of this job is that of its tasks"),
        ("num_tasks = 4", "vm:net=1G", ""),
    ],
)
def test_what_a_comment_asks_for_stays_as_it_was_submitted(
    site: Settings, change: str, comment: str, message: str
) -> None:
    record = f"user_id = 1000, partition = 'vm', job_state = 0, min_nodes = 1, min_cpus = 1, comment = '{comment}'"
    said = modify(install_scripts(site), change, record)
    assert said == "|0|" if not message else message in said and "|2036|" in said


def test_a_submission_and_a_change_leave_a_hint_with_the_user_of_the_job(site: Settings) -> None:
    directory = install_scripts(site)
    submit(directory, "user_id = 1000, partition = 'other'")
    submit(directory, "user_id = 0")
    assert list(take(site.slurm.inbox)) == [], "the job is not ours, or refused"
    submit(directory, "user_id = 1000")
    submit(directory, "user_id = 1000")
    assert list(take(site.slurm.inbox)) == [Hint("submit", uid=1000)]
    modify(directory, "nice = 5", "user_id = 1001, partition = 'vm', job_state = 0")
    assert list(take(site.slurm.inbox)) == [Hint("submit", uid=1001)]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ("num_tasks = 8, min_cpus = 1", "1|1"),
        ("num_tasks = 8, min_cpus = 1, cpus_per_task = 2", "2|1"),
        ("num_tasks = 8, min_cpus = 2, min_nodes = 2", "1|2"),
        ("num_tasks = 8, min_cpus = 1, ntasks_per_node = 4", "4|2"),  # Slurm uses no node with fewer
        ("num_tasks = 8, min_cpus = 8, min_nodes = 2", "4|2"),
    ],
)
def test_tasks_that_share_cpus_have_those_of_one_on_each_node(site: Settings, fields: str, size: str) -> None:
    """--overcommit. A request for cores makes the size show."""
    assert run_with_cpus(install_scripts(site), f"user_id = 1000, {fields}, cores_per_socket = 1") == f"|{size}"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_running_job_may_give_nodes_up(site: Settings, nodes: int) -> None:
    """Slurm refuses more nodes than the job has. A waiting job may have another number, and then exactly that."""
    record = "user_id = 1000, partition = 'vm', min_nodes = 2, max_nodes = 2, min_cpus = 2"
    program = (
        "local job = {{ min_nodes = {nodes} }}\n"
        "local code = slurm_job_modify(job, {{ {record}, job_state = {state} }}, partitions, 1000)\n"
        'io.write(code, " ", tostring(job.max_nodes))'
    )
    directory = install_scripts(site)
    for state, most in (("1", "nil"), ("0", str(nodes))):
        said = with_slurm(directory, program.format(nodes=nodes, record=record, state=state))
        assert said == f"0 {most}"


@pytest.mark.parametrize(
    ("change", "record", "named"),
    [
        ("array_inx = '2'", "array_job_id = 7, job_id = 9", "7"),
        ("min_mem_per_node = 200", "array_job_id = 0, job_id = 9", "9"),
        ("min_mem_per_cpu = 200", "array_job_id = 0, job_id = 9", "9"),
        ("nice = 5", "array_job_id = 7, job_id = 9", None),
    ],
)
@pytest.mark.parametrize("uid", [1000, 64], ids=["user", "administrator"])
def test_a_change_that_squeue_does_not_show_leaves_a_hint_with_the_job(
    site: Settings, change: str, record: str, named: str | None, uid: int
) -> None:
    directory = install_scripts(site)
    modify(directory, change, f"user_id = 1000, partition = 'vm', job_state = 0, min_nodes = 1, {record}", uid)
    left = [hint.job_id for hint in take(site.slurm.inbox) if hint.kind == "change"]
    assert left == ([named] if named else [])
    modify(directory, change, f"user_id = 1000, partition = 'other', job_state = 0, {record}", uid)
    assert list(take(site.slurm.inbox)) == [], "the job is not ours"


# --- offered nodes ---------------------------------------------------------------------------------


OFFERED = """\
mvab-1 mv_v1 warm 0 0 1 300 0
mvab-2 mv_v2 slim 1 1 1 300 500
mvab-3 mv_v3 slim 1 1 2 900 0
"""


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ("min_cpus = 1", "mv_v2"),
        ("min_cpus = 1, features = 'slim'", "slim&mv_v2"),
        ("min_cpus = 1, features = 'slim&auto'", "slim&auto&mv_v2"),
        ("min_cpus = 1, features = 'instant'", "instant&mv_v2"),
        ("min_cpus = 1, features = 'warm&instant'", "warm&instant&mv_v1"),
        ("min_cpus = 1, features = 'warm'", "warm&mvgate"),  # by default the site makes other kinds of clones
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
    ],
)
def test_a_job_takes_an_offered_node_that_fits(site: Settings, fields: str, feature: str) -> None:
    directory = install_scripts(site)
    files = offer_nodes(site, int(time.time()) + 10)
    assert f"|0|{feature}|" in submit(directory, f"user_id = 1000, {fields}")
    tag = feature.rpartition("&")[2] if "mv_v" in feature else ""
    taken = sorted(path.name for path in files.glob("taken.*"))
    assert taken == ([f"taken.mvab-{tag[-1]}.1000"] if tag else [])
    assert len(list(files.glob("open.*"))) == 3 - len(taken)


def test_a_node_is_taken_once_and_an_expired_or_damaged_list_is_ignored(site: Settings) -> None:
    directory = install_scripts(site)
    files = offer_nodes(site, int(time.time()) + 10)
    assert "|0|mv_v2|" in submit(directory, "user_id = 1000, min_cpus = 1")
    assert "|0|mvgate|" in submit(directory, "user_id = 1000, min_cpus = 1"), "the list still names the taken node"
    (files / "taken.mvab-2.1000").rename(files / "open.mvab-2")
    for text in (f"{int(time.time()) - 1}\n{OFFERED}", "", "soon\nmv_v2\n", f"{int(time.time()) + 10}\nmv_v2 slim\n"):
        (files / "list").write_text(text)
        assert "|0|mvgate|" in submit(directory, "user_id = 1000, min_cpus = 1")


@pytest.mark.parametrize(
    ("line", "excluded"),
    [
        ("excluded", False),
        ("excluded 1000", True),
        ("excluded 1 1000 2000", True),
        ("excluded 100 10000 21000 10001", False),
        ("excluded 1000,2000", True),  # not a line of ours
    ],
)
def test_the_jobs_of_an_excluded_user_take_no_node(site: Settings, line: str, excluded: bool) -> None:
    directory = install_scripts(site)
    files = offer_nodes(site, int(time.time()) + 10, f"{line}\n")
    assert ("|0|mvgate|" if excluded else "|0|mv_v2|") in submit(directory, "user_id = 1000, min_cpus = 1")
    assert len(list(files.glob("taken.*"))) == (not excluded)


@pytest.mark.parametrize(
    ("partitions", "feature"),
    [
        ("vm = { state_up = 3, max_time = 60 }", "mv_v2"),
        ("vm = { state_up = 1 }", "mvgate"),  # jobs may be submitted but not start
        ("vm = { state_up = 3, max_mem_per_cpu = 100 }", "mvgate"),
        ("vm = { state_up = 3, max_mem_per_cpu = 150 }", "mv_v2"),
    ],
)
def test_no_job_skips_the_gate_of_a_partition_that_is_down_or_gives_it_more_cpus(
    site: Settings, partitions: str, feature: str
) -> None:
    directory = install_scripts(site)
    offer_nodes(site, int(time.time()) + 10)
    assert f"|0|{feature}|" in submit(directory, "user_id = 1000, min_cpus = 1", f"{{ {partitions} }}")


def offer_nodes(site: Settings, valid_until: int, excluded: str = "excluded\n") -> Path:
    """Offer three nodes, as the daemon does; the directory of the files."""
    files = site.slurm.inbox / "spares"
    files.mkdir()
    (files / "list").write_text(f"{valid_until}\n{excluded}{OFFERED}")
    for number in (1, 2, 3):
        (files / f"open.mvab-{number}").touch()
    return files


# --- a script that is broken -----------------------------------------------------------------------


# A site's own rules in both functions, and the two lines that the site adds.
_SITE_RULES = """
function slurm_job_submit(job, partitions, uid)
  if job.account == "closed" then slurm.log_user("%s", "this account is closed"); return slurm.ERROR end
  if job.account == "defect" then error("a defect in the rules of the site") end
  if job.account == "vms" then job.partition = "vm" end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
  if job.account == "closed" then slurm.log_user("%s", "this account is closed"); return slurm.ERROR end
end
HOOK
return slurm.SUCCESS
"""


def _install(files: dict[str, str], site: Settings, own_rules: bool) -> Path:
    if own_rules:
        files["job_submit.lua"] = _SITE_RULES.replace("HOOK", install.hook_lines(site))
    install.write(files, site.slurm.conf.parent)
    return site.slurm.conf.parent


_CALL = """
slurm = { SUCCESS = 0, ERROR = -1, reservations = { mvgate = {} },
          log_user = function(f, ...) io.write(string.format(f, ...)) end,
          log_error = function(f, ...) logged = true end }
dofile("job_submit.lua")
local parts = { vm = { flag_default = 1 }, other = { flag_default = 0 } }
io.write("|", %s, "|", logged and "logged" or "")
"""


@pytest.mark.parametrize("own_rules", [False, True])
@pytest.mark.parametrize("defect", ["none", "missing", "empty", "syntax", "site missing"])
def test_a_broken_script_refuses_jobs_of_its_own_partitions_only(
    site: Settings, tmp_path: Path, defect: str, own_rules: bool
) -> None:
    files = rendered(site)
    _install(files, site, own_rules)
    broken = tmp_path / ("multiverse_site.lua" if defect == "site missing" else "multiverse.lua")
    if defect.endswith("missing"):
        broken.unlink()
    elif defect != "none":
        broken.write_text("" if defect == "empty" else "local x = = 1")

    def answer(call: str) -> str:
        message, code, logged = run(tmp_path, _CALL % call).split("|")
        assert (logged == "logged") == (defect != "none")
        return f"{code} {message}".strip()

    works = defect == "none"
    refused = f"2090 {FAILED}"
    for partition in ("partition = 'vm', ", "partition = 'other,vm', ", ""):
        said = answer(f"slurm_job_submit({{ {partition}user_id = 1000, min_cpus = 1 }}, parts, 1000)")
        accepted = partition in ("partition = 'vm', ", "")
        assert said == refused if not works else said.startswith("0" if accepted else "2000 ")
    assert answer("slurm_job_submit({ partition = 'other', user_id = 1000 }, parts, 1000)") == "0"
    record = "{ partition = 'vm', job_state = 0 }"
    changed = answer(f"slurm_job_modify({{ features = 'x' }}, {record}, parts, 1000)")
    assert changed == refused if not works else changed.startswith("2036 ") and "submit it again" in changed
    assert answer(f"slurm_job_modify({{ features = 'x' }}, {record}, parts, 64)") == "0", (
        "the controller may change jobs"
    )
    moved = answer("slurm_job_modify({ partition = 'vm' }, { partition = 'other' }, parts, 1000)")
    assert moved == refused if not works else moved.startswith("2000 submit the job to partition vm")
    assert answer("slurm_job_modify({ features = 'x' }, { partition = 'other' }, parts, 1000)") == "0"
    for call in ("slurm_job_submit({ partition = 'other', account = 'closed' }, parts, 0)",
                 "slurm_job_modify({ account = 'closed' }, { partition = 'other' }, parts, 0)"):  # fmt: skip
        assert answer(call) == ("-1 this account is closed" if own_rules else "0")


@pytest.mark.parametrize("own_rules", [False, True])
def test_without_the_file_that_a_site_loads_only_jobs_of_other_partitions_are_accepted(
    site: Settings, own_rules: bool
) -> None:
    directory = _install(rendered(site), site, own_rules)
    (directory / install.HOOK).unlink()
    job = "slurm_job_submit({ partition = '%s', user_id = 1000 }, parts, 1000)"
    assert run(directory, _CALL % (job % "vm")) == "|-1|logged"
    assert run(directory, _CALL % (job % "other")) == "|0|logged"


def test_the_sites_own_rules_come_first_and_hold_for_our_partitions(site: Settings) -> None:
    directory = _install(rendered(site), site, own_rules=True)
    job = "slurm_job_submit({ partition = '%s', account = '%s', user_id = %d, min_cpus = 1 }, parts, 1000)"
    assert run(directory, _CALL % (job % ("vm", "closed", 1000))) == "this account is closed|-1|"
    assert run(directory, _CALL % (job % ("vm", "open", 1000))) == "|0|"
    moved = run(directory, _CALL % (job % ("other", "vms", 0)))
    assert "no jobs of root" in moved and "|2010|" in moved, "our part sees the partition that the site's rules chose"
    changed = "slurm_job_modify({ account = '%s' }, { partition = 'vm', job_state = 0, user_id = 1000 }, parts, 1000)"
    assert run(directory, _CALL % (changed % "open")) == "|0|"
    assert "closed|-1" in run(directory, _CALL % (changed % "closed"))


def test_an_error_in_the_sites_own_rules_stays_slurms_to_handle(site: Settings) -> None:
    directory = _install(rendered(site), site, own_rules=True)
    job = "{ partition = '%s', account = 'defect', user_id = %d, min_cpus = 1 }"
    call = f"tostring(select(2, pcall(slurm_job_submit, {job}, parts, 1000)))"
    assert "a defect in the rules" in run(directory, _CALL % (call % ("other", 1000)))
    assert "a defect in the rules" in run(directory, _CALL % (call % ("vm", 1000)))
    refused = run(directory, _CALL % (call % ("vm", 0)))
    assert "no jobs of root" in refused and "|2010|" in refused, "what we refuse is refused all the same"


def test_the_two_lines_may_be_there_twice(site: Settings) -> None:
    files = rendered(site)
    files["job_submit.lua"] = _SITE_RULES.replace("HOOK", install.hook_lines(site) * 2)
    install.write(files, site.slurm.conf.parent)
    assert "|0|mvgate" in submit(site.slurm.conf.parent, "user_id = 1000, partition = 'vm', min_cpus = 1")
