"""VMs inside jobs: Slurm's plugin, the agent and guests, on a plain slurmd that limits jobs by control groups."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from multiverse import config
from multiverse_lab.bench.ivshmem import measure_passing
from multiverse_lab.lab import baremetal, spank
from multiverse_lab.lab.configure import BARE_FEATURE, changed_conf, hostname
from multiverse_lab.lab.services import AGENT
from tests.integration.bare_node import FEATURE, IN_A_VM, BareNode, bare_node, ensure_agent
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, below, kill, matching, until, written

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def node(lab: LabUnderTest, _images: None) -> Iterator[BareNode]:
    with bare_node(lab) as node:
        assert node.srun("true").returncode == 0, "the first VM, whose template has to be built"
        yield node


@pytest.fixture(autouse=True)
def _nothing_left(node: BareNode) -> Iterator[None]:
    yield
    node.nothing_left()


def test_srun_runs_its_tasks_in_a_vm_as_the_user_in_the_directory_and_environment(node: BareNode) -> None:
    done = node.srun(
        "--ntasks=2", "--label", "--export=ALL,COLOUR=blue sky", "sh", "-c",
        'echo $(hostname) $(id -un) $PWD "$COLOUR" $(nproc); echo oops >&2; exit $((3 + SLURM_PROCID))',
    )  # fmt: skip
    user = node.under_test.user
    said = sorted(done.stdout.splitlines())
    assert all(line.split()[1].startswith("mvjob-") for line in said) and len(said) == 2
    assert {" ".join(line.split()[2:]) for line in said} == {f"{user.name} {user.home} blue sky 2"}
    assert done.stderr.count("oops") == 2 and done.returncode == 4


def test_input_and_output_are_carried_whole_and_a_signal_ends_the_task_as_it_ended_in_the_guest(node: BareNode) -> None:
    data = os.urandom(300_000)
    node.output("data").write_bytes(data)
    command = f"--input={node.output('data')}", "sh", "-c", "sha256sum; kill -USR1 $$"
    done = node.srun(*command)
    assert done.stdout.split()[0] == hashlib.sha256(data).hexdigest()
    assert done.returncode == 128 + signal.SIGUSR1


def test_a_batch_script_runs_in_the_vm_and_gets_signals_alone_or_with_all_its_processes(node: BareNode) -> None:
    out = node.output("batch.out")
    script = (
        "trap 'echo SHELL' USR1; sh -c \"trap 'echo CHILD' USR1; while :; do sleep 0.1; done\" & "
        "echo $(hostname) $0; while :; do sleep 0.1; done"
    )
    job = node.sbatch(script, f"--output={out}")
    until("the script runs", lambda: out.exists() and out.read_text().startswith("mvjob-"), 120)
    slurm = node.under_test.run
    slurm("scancel", "--batch", "--signal=USR1", job)
    until("the script got the signal", lambda: out.read_text().count("SHELL") == 1, 60)
    assert "CHILD" not in out.read_text()
    slurm("scancel", "--full", "--signal=USR1", job)
    until("both got it", lambda: [out.read_text().count(who) for who in ("SHELL", "CHILD")] == [2, 1], 60)
    slurm("scancel", job)
    assert accounted(node.under_test, job, 90)[0] == "CANCELLED"


def test_the_tasks_of_a_step_are_divided_over_the_vms_of_the_node(node: BareNode) -> None:
    several = ("--ntasks=2", "--mem=1000", "--vm-per-node=2")
    done = node.srun(*several, "sh", "-c", "echo $SLURM_LOCALID $(hostname) $(nproc); exit $((SLURM_LOCALID * 2))")
    assert done.returncode == 2, done.stderr
    said = {task: (name, cpus) for task, name, cpus in map(str.split, done.stdout.splitlines())}
    assert said.keys() == {"0", "1"} and said["0"][0] != said["1"][0]
    assert {cpus for _, cpus in said.values()} == {"1"}, "each VM has half of the CPUs"
    refused = node.srun(*several, "--mpi=pmi2", "hostname")
    assert refused.returncode != 0 and not refused.stdout and "use --mpi=none" in refused.stderr


def test_each_mistake_has_a_sentence(node: BareNode) -> None:
    for option, sentence in (
        ("--vm-image=../x", "an image's name has letters"),
        ("--vcpu-per-vm=none", "a number of virtual CPUs"),
        ("--memory-per-vm=3X", "a size in MiB"),
        ("--disk-size=0", "a size in MiB"),
        ("--vm-per-node=0", "a number of VMs"),
        ("--sriov=5", "a number of virtual functions, from 1 to 4"),
        ("--ivshmem=0", "a number of regions of shared memory, from 1 to 32"),
        ("--ivshmem=65", "a number of regions of shared memory, from 1 to 32"),
        ("--ivshmem=abc", "a number of regions of shared memory, from 1 to 32"),
    ):
        refused = node.srun(option, "true", vm=False)
        assert refused.returncode != 0 and sentence in refused.stderr, refused.stderr
    for options, sentence in (
        (("--mem=100", "--vm-image=slim"), "submit the job with --mem="),
        (("--mem=700", "--vm-image=unknown"), "no image 'unknown'"),
        (("--mem=700", "--vcpu-per-vm=64"), "submit it with --cpus-per-task=64"),
        (("--mem=700", "--vm-per-node=2"), "submit it with --cpus-per-task=2"),
        (("--mem=700", "--sriov"), "no virtual functions that job_vms.sriov offers"),
        (("--mem=700", "--comment=vm:sriov=2"), "no virtual functions that job_vms.sriov offers"),
        (("--mem=511", "--ivshmem=1"), "submit the job with --mem=512"),
    ):
        failed = node.srun(*options, "hostname", vm=False)
        assert failed.returncode == 1 and sentence in failed.stderr and not failed.stdout, failed.stderr


def test_jobs_without_options_do_not_need_the_agent_and_others_fail_with_a_message(node: BareNode) -> None:
    where = node.under_test.where
    asyncio.run(AGENT.stop(where))
    try:
        assert node.srun("hostname", vm=False).returncode == 0
        failed = node.srun("hostname")
        assert failed.returncode == 1 and not failed.stdout
        assert "the agent of this host does not answer" in failed.stderr
    finally:
        ensure_agent(node.lab)


def test_a_step_without_the_options_in_its_environment_runs_in_the_jobs_vm_too(node: BareNode) -> None:
    """The batch script has the environment of sbatch, which has none of the options. Whether a job has a VM is decided
    for the job."""
    out = node.output("bare-environment.out")
    job = node.sbatch("hostname", f"--output={out}", "--export=NONE")
    assert accounted(node.under_test, job, 180) == ("COMPLETED", "0:0")
    assert written(out).startswith("mvjob-")


def test_the_vm_of_another_user_cannot_be_entered(node: BareNode) -> None:
    job = node.sbatch("sleep 60", "--output=/dev/null")
    until("its VM runs", lambda: (node.under_test.where.run / "jobs" / f"{job}.groups").exists(), 120)
    socket = str(node.under_test.where.run / "jobs.sock")
    tried = node.under_test.run(
        spank.installed(node.under_test.where, "mventer"),
        *(socket, job, "0", "command", "id"),
        user=node.under_test.other,
        check=False,
    )
    assert tried.returncode == 1 and "has no VM of yours" in tried.stderr and not tried.stdout
    node.under_test.run("scancel", job)


def test_the_epilog_ends_the_vm_though_the_agent_is_dead_and_the_next_agent_removes_the_rest(node: BareNode) -> None:
    lab = node.under_test
    job = node.sbatch("sleep 300", "--output=/dev/null", "--ivshmem=1")
    groups = lab.where.run / "jobs" / f"{job}.groups"
    until("its VM runs", groups.exists, 120)
    procs = [Path(one, "cgroup.procs") for one in groups.read_text().split()]
    assert any("/job_" in str(path) for path in procs), "QEMU is in a control group of the job"
    for path in procs:  # as an agent leaves it that dies while it allocates the regions
        path.parent.with_name(f"{path.parent.name}-ivshmem").mkdir()
    kill(_pid_of_agent(node))
    lab.run("scancel", job)
    until("QEMU is dead", lambda: not any(path.exists() and path.read_text() for path in procs), 120)
    ensure_agent(node.lab)


def _pid_of_agent(node: BareNode) -> int:
    running = AGENT.running(node.under_test.where)
    assert running is not None
    return running.pid


@contextmanager
def _plugstack(node: BareNode, plugin: str) -> Iterator[None]:
    """Another plugin in plugstack.conf meanwhile."""
    file = node.under_test.where.etc / "plugstack.conf"
    before = file.read_text()
    file.write_text(before.replace(spank.installed(node.under_test.where, "multiverse.so"), plugin))
    try:
        yield
    finally:
        file.write_text(before)
        until("the node takes jobs with VMs again", node.has_feature, 60)


def _of_another_release(directory: Path) -> Path:
    """The plugin, built for another release of Slurm."""
    headers = directory / "include" / "slurm"
    shutil.copytree("/usr/include/slurm", headers)
    for header in headers.glob("*.h"):
        text = header.read_text()
        header.write_text(re.sub(r"(define SLURM_VERSION_NUMBER\s+)\S+", r"\g<1>SLURM_VERSION_NUM(20,11,0)", text))
    built = directory / "multiverse.so"
    sources = [Path(__file__).parents[2] / "spank" / name for name in ("multiverse.c", "options.c", "client.c")]
    subprocess.run(["cc", f"-I{headers.parent}", "-shared", "-fPIC", "-o", built, *sources], check=True)
    return built


@pytest.mark.parametrize("defect", ["missing", "another release"])
def test_a_job_does_not_run_where_the_plugin_cannot_be_loaded_and_other_jobs_do(
    node: BareNode, tmp_path: Path, defect: str
) -> None:
    tmp_path.chmod(0o755)
    plugin = tmp_path / "absent.so" if defect == "missing" else _of_another_release(tmp_path)
    asked, out = "--comment=vm:image=slim", node.output("never.out")
    with _plugstack(node, str(plugin)):
        until("the agent has seen it", lambda: not node.has_feature(), 60)
        other = node.under_test.run("srun", "-Q", "-p", "bare", "hostname", user=node.under_test.other, timeout=240)
        assert other.stdout.strip()
        refused = node.srun("--mem=700", asked, f"--output={out}", "hostname", vm=False)
        assert refused.returncode != 0 and "Unable to allocate resources" in refused.stderr
        assert f"on a node with the feature {FEATURE}" in refused.stderr
        assert not out.exists()


def _forget_feature(node: BareNode) -> None:
    """As slurmctld does when it reads its configuration again: the feature is in no slurm.conf."""
    features = (f"{which}Features={BARE_FEATURE}" for which in ("Available", "Active"))
    node.under_test.run("scontrol", "update", f"NodeName={baremetal.NODE}", *features)


def test_the_agent_tells_slurmctld_again_what_it_has_forgotten(node: BareNode) -> None:
    _forget_feature(node)
    until("the node has its feature again", node.has_feature, 60)
    shown = node.under_test.run("scontrol", "show", "node", "--oneliner", baremetal.NODE).stdout
    assert f"ActiveFeatures={BARE_FEATURE},{FEATURE} " in shown


@pytest.mark.slow
def test_a_waiting_job_without_a_node_that_has_the_feature_starts_when_there_is_one(node: BareNode) -> None:
    """Slurm sets its priority to 0 meanwhile, and takes that back within half a minute after features were updated."""
    out, lab = node.output("waiting.out"), node.under_test
    blocker = lab.sbatch("sleep 600", "--partition=bare", "--exclusive", "--output=/dev/null")
    until("it runs", lambda: lab.run("squeue", "-h", "-j", blocker, "-o", "%T").stdout.strip() == "RUNNING", 60)
    job = node.sbatch("hostname", f"--output={out}")
    asyncio.run(AGENT.stop(lab.where))
    try:
        _forget_feature(node)
        shown = ("squeue", "-h", "-j", job, "-o", "%r %Q")
        until("no node has the feature", lambda: lab.run(*shown).stdout.strip() == "BadConstraints 0", 120)
    finally:
        ensure_agent(node.lab)
        lab.run("scancel", blocker)
    assert accounted(lab, job, 240) == ("COMPLETED", "0:0")
    assert written(out).startswith("mvjob-")


def test_a_comment_asks_for_a_vm_as_the_options_do(node: BareNode) -> None:
    """Without the plugin on the machine where the job is submitted, too, which a comment does not need."""
    out = node.output("comment.out")
    script, where = "hostname; nproc", ("--partition=bare", "--mem=700", f"--output={out}")
    with _plugstack_of_clients(node) as env:
        done = subprocess.run(
            ["sbatch", "--parsable", *where, "--comment=mine vm:image=slim,vcpu=1", f"--wrap={script}"],
            env=node.under_test.env | env | {"HOME": str(node.under_test.user.home)},
            user=node.under_test.user.uid, group=node.under_test.user.uid, extra_groups=[],
            cwd=node.under_test.user.home, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    assert FEATURE in done.stderr
    assert accounted(node.under_test, done.stdout.strip(), 240) == ("COMPLETED", "0:0")
    host, cpus = written(out).split()
    assert host.startswith("mvjob-") and cpus == "1"
    refused = node.srun("--comment=vm:image=slim,vcpu=none", "true", vm=False)
    assert refused.returncode != 0 and "give a number of virtual CPUs" in refused.stderr


@contextmanager
def _plugstack_of_clients(node: BareNode) -> Iterator[dict[str, str]]:
    """The environment of a machine without the plugin."""
    where = node.under_test.where
    conf = where.etc / "client.conf"
    conf.write_text(changed_conf(where.slurm_conf.read_text(), {"PlugStackConfig": "/dev/null"}))
    try:
        yield {"SLURM_CONF": str(conf)}
    finally:
        conf.unlink()


def test_the_options_are_refused_where_each_node_is_a_vm(node: BareNode) -> None:
    refused = node.under_test.run(
        "sbatch", "--partition=vm", "--vm-image=slim", "--wrap=true", user=node.under_test.user, check=False
    )
    assert refused.returncode != 0 and "in partition vm each node is a VM" in refused.stderr


def test_a_job_whose_record_cannot_be_written_does_not_run(node: BareNode) -> None:
    """Its prolog cancels it. A failure of the prolog would drain the node."""
    records, out = config.load(node.under_test.where.settings).job_vms.records, node.output("unrecorded.out")
    asyncio.run(AGENT.stop(node.under_test.where))  # else it takes the feature away
    moved = records.with_name("elsewhere")
    records.rename(moved)
    try:
        records.write_text("no directory")
        jobs = [node.sbatch("hostname", f"--output={out}", f"--export={export}") for export in ("NONE", "ALL")]
        for job in jobs:
            assert accounted(node.under_test, job, 180)[0].startswith("CANCELLED")
        assert not out.exists() or not {hostname(), "mvjob-"} & set(re.split(r"[\s\d]", out.read_text()))
    finally:
        records.unlink()
        moved.rename(records)
        ensure_agent(node.lab)


def test_a_batch_script_in_the_vm_uses_slurms_commands_and_its_steps_run_in_the_vm(node: BareNode) -> None:
    out, second = node.output("commands.out"), node.output("second.out")
    options = f"#SBATCH --partition=bare --mem=700 --output={second}"
    (node.under_test.user.home / "second.sh").write_text(f"#!/bin/sh\n{options}\nhostname\n")
    script = (
        "export COLOUR='blue sky' LD_LIBRARY_PATH=/mine; hostname; "
        "srun --quiet --ntasks=2 sh -c 'echo \"$(hostname) $SLURM_PROCID $COLOUR $LD_LIBRARY_PATH\"' | sort; "
        "squeue --noheader --jobs=$SLURM_JOB_ID --format='%i %T'; "
        "export SLURM_NTASKS=1; srun sh -c 'exit 7' 2>/dev/null; echo step $?; echo word | srun --quiet cat; "
        "echo copied > copied; sbcast copied /tmp/there; srun --quiet cat /tmp/there; "
        "salloc true; echo salloc $?; sbatch --parsable second.sh"
    )
    job = node.sbatch(script, f"--output={out}", "--ntasks=2")
    assert accounted(node.under_test, job, 240) == ("COMPLETED", "0:0"), out.read_text()
    said = [line for line in out.read_text().splitlines() if not line.startswith("multiverse:")]
    name = said[0]
    assert name.startswith("mvjob-")
    assert said[1:-1] == [
        *(f"{name} {task} blue sky /mine" for task in (0, 1)), f"{job} RUNNING", "step 7", "word", "copied", "salloc 1"
    ]  # fmt: skip
    assert "salloc cannot be run from the VM" in out.read_text()
    assert accounted(node.under_test, said[-1], 120) == ("COMPLETED", "0:0")
    assert written(second).startswith("mvjob-"), "it has the options of the job that submitted it"


@pytest.mark.slow
def test_task_prologs_run_in_the_vm_and_not_on_the_node(node: BareNode) -> None:
    ran, conf = node.output("prologs.ran"), node.under_test.where.etc / "site.conf"
    sites, users = (node.output(name) for name in ("sites-prolog", "users-prolog"))
    for path, said in ((sites, "export COLOUR=blue"), (users, "export COLOUR=$COLOUR sky")):
        path.write_text(f'#!/bin/sh\necho $(hostname) {path.name} >> {ran}\necho "{said}"\necho print {path.name}\n')
        path.chmod(0o755)
    before = conf.read_text()
    with _task_prolog(node, conf, f"{before}\nTaskProlog={sites}\n", before):
        for export in ("ALL", "NONE"):
            done = node.srun(f"--task-prolog={users}", f"--export={export}", "sh", "-c", 'echo "$COLOUR"')
            assert done.stdout == "sites-prolog\nusers-prolog\nblue sky\n", done.stderr
    hosts, names = zip(*(line.split() for line in ran.read_text().splitlines()), strict=True)
    assert names == ("sites-prolog", "users-prolog") * 2
    assert all(host.startswith("mvjob-") for host in hosts)


@contextmanager
def _task_prolog(node: BareNode, conf: Path, during: str, after: str) -> Iterator[None]:
    """Other settings of the site meanwhile."""
    _configure(node, conf, during)
    try:
        yield
    finally:
        _configure(node, conf, after)


def _configure(node: BareNode, conf: Path, text: str) -> None:
    """Change the settings of the site, and let slurmctld, slurmd and the agent know. slurmctld does not reach the
    dynamic node any more after it has read its configuration again: slurmd registers anew."""
    node.nothing_left()
    asyncio.run(baremetal.stop(node.lab))
    conf.write_text(text)
    node.under_test.run("scontrol", "reconfigure")
    asyncio.run(AGENT.stop(node.under_test.where))
    ensure_agent(node.lab)
    asyncio.run(baremetal.start(node.lab, memory_limited=True))
    until("the node takes jobs with VMs", node.has_feature, 60)


def test_the_end_of_a_job_ends_the_commands_that_its_vm_has_running_on_the_host(node: BareNode) -> None:
    out = node.output("ended.out")
    job = node.sbatch("srun --quiet sh -c 'echo step; sleep 300' & squeue --iterate=1; wait", f"--output={out}")
    until("the step runs", lambda: out.exists() and "step" in out.read_text(), 180)
    until("both run in the job", lambda: {"srun", "squeue"} <= _programs_of_script(node, job), 60)
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 90)[0] == "CANCELLED"


def _programs_of_script(node: BareNode, job: str) -> set[str]:
    """The names of the programs in the control group of a job's batch script."""
    found = set()
    for own in baremetal.control_groups_of(node.lab):
        for group in matching(own, f"slurm_*/uid_*/job_{job}/step_batch/**/cgroup.procs"):
            for pid in group.read_text().split():
                with suppress(OSError):  # it has ended
                    found.add(Path("/proc", pid, "comm").read_text().strip())
    return found


TALK = """
echo $(mvshm list | wc -l) $MULTIVERSE_IVSHMEM
if [ $SLURM_PROCID = 0 ]
then mvshm send 8 < data
else mvshm receive 8 | sha256sum
fi
"""


def test_two_vms_of_a_job_pass_data_through_the_regions_that_they_share(node: BareNode) -> None:
    data = os.urandom(5_000_000)
    node.output("data").write_bytes(data)
    shared = ("--ntasks=2", "--vm-per-node=2", "--mem=1300", "--ivshmem=9")
    done = node.srun(*shared, "--label", "sh", "-c", TALK)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"0: 9 9", "1: 9 9", f"1: {hashlib.sha256(data).hexdigest()}  -"}


@pytest.mark.slow
def test_the_memory_that_vms_share_is_measured_beside_tcp_on_their_bridge(node: BareNode) -> None:
    def srun(argv: Sequence[str]) -> str:
        done = node.srun("--mem=1300", "--vm-image=slim", *argv, vm=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = measure_passing(srun, 3)
    print("\n".join(found.lines()))
    assert len(found.shared_memory) == len(found.tcp) == 3
    assert all(one.microseconds > 0 and one.mib_per_second > 0 for one in (*found.shared_memory, *found.tcp))


MARK = """import mmap, os
memory = mmap.mmap(os.open("/dev/ivshmem/0", os.O_RDWR), 0)
memory[8192:8198] = b"secret"
"""
LOOK = """import mmap, os
memory = mmap.mmap(os.open("/dev/ivshmem/0", os.O_RDWR), 0)
print(len(os.listdir("/dev/ivshmem")), len(memory) >> 20, memory[:].count(0) == len(memory))
"""
TRY = """import os, socket, sys
for path in sys.stdin.read().split("\\n"):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.open(path, flags)
            print(path)
        except OSError:
            pass
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print(path)
    except OSError:
        pass
"""


def test_the_regions_of_a_job_are_its_own_and_of_its_memory(node: BareNode) -> None:
    lab, out = node.under_test, node.output("regions.out")
    script = f"python3 -c '{MARK}'; stat -L -c '%u %a' /dev/ivshmem/*; sleep 300"
    job = node.sbatch(script, f"--output={out}", "--ivshmem=2")
    try:
        until("it has used its regions", lambda: out.exists() and out.read_text().count("\n") == 2, 180)
        assert out.read_text() == f"{lab.user.uid} 600\n" * 2
        groups = baremetal.control_groups_of(node.lab)
        (stat,) = [path for group in groups for path in matching(group, f"slurm_*/uid_*/job_{job}/memory.stat")]
        assert max(int(each) for each in re.findall(r"(?m)^(?:total_)?shmem (\d+)$", stat.read_text())) >= 64 << 20
        inodes = {descriptor.stat().st_ino for descriptor in node.regions()}
        assert len(inodes) == 2

        where = ("--quiet", "--partition=bare", *IN_A_VM, "--ivshmem=1")
        others = lab.run("srun", *where, "python3", "-c", LOOK, user=lab.other, timeout=240)
        assert others.stdout.split() == ["1", "32", "True"], "another job has another region"
        tried = "\n".join(map(str, _everything_of_vms(node)))
        opened = subprocess.run(
            ["/usr/bin/python3", "-c", TRY], input=tried, user=lab.other.uid, group=lab.other.uid, extra_groups=[],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert tried.count("/fd/") > 20 and tried.count("/vms/mvjob-") > 3 and not opened.stdout
    finally:
        lab.run("scancel", job)


def _everything_of_vms(node: BareNode) -> list[Path]:
    """What another user could try to open of VMs inside jobs: their files and sockets, what the agent knows of them,
    and what the kernel shows of their processes and of the agent."""
    where = node.under_test.where
    places = (where.controller / "vms", where.run / "vms", where.agent / "jobs")
    found = [path for place in places if place.is_dir() for path in below(place)]
    pids = {descriptor.parts[2] for descriptor in node.regions()} | {str(_pid_of_agent(node))}
    for process in (Path("/proc", pid) for pid in pids):
        found += [*(process / "fd").iterdir(), *(process / "map_files").iterdir()]
        found += [process / name for name in ("mem", "environ", "root", "cwd")]
    return found
