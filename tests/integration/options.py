"""Every option of sbatch, srun and salloc in a VM partition: honoured or refused, with a proof on the real lab.

docs/options.md is generated from these rows (`make docs`), and test_options.py proves each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Support(StrEnum):
    HONOURED = "honoured"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Submission:
    """A job whose output proves that options are honoured.

    In `options`, `{home}`, `{now}` and `{<job>}` stand for the user's home, the time and the id of an earlier job. The
    output is written to a file with the job's name in the home.
    """

    options: str
    script: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One row: `names` as in the man page, and `note` for the reason.

    An honoured option is proven by `output_lines`, regular expressions for lines in the output of `job`. A refused
    option is proven by the `message` that `command` prints. `test` names the test of test_options.py for all others.
    `since` is the first release of Slurm that has the option, if 22.05 has not. `until` is the first one without it.
    """

    names: str
    support: Support
    note: str
    job: str = ""
    output_lines: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    message: str = ""
    test: str = ""
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    rows: tuple[Option, ...] = field(default_factory=tuple)


def honoured(names: str, note: str, job: str, *output_lines: str) -> Option:
    return Option(names, Support.HONOURED, note, job=job, output_lines=output_lines)


def tested(names: str, note: str, test: str, since: str = "") -> Option:
    return Option(names, Support.HONOURED, note, test=test, since=since)


def refused(names: str, message: str, *command: str, note: str = "", since: str = "", until: str = "") -> Option:
    """`message` is what the user reads. The table shows it, too, unless there is a `note`."""
    return Option(names, Support.REFUSED, note or message, command=command, message=message, since=since, until=until)


def denied(names: str, note: str, test: str, since: str = "") -> Option:
    return Option(names, Support.REFUSED, note, test=test, since=since)


_SIZE = """\
echo nproc=$(nproc) nodes=$SLURM_NNODES tasks=$SLURM_TASKS_PER_NODE
echo per_node=$SLURM_MEM_PER_NODE per_cpu=$SLURM_MEM_PER_CPU
echo memory=$(awk '/MemTotal/{print int($2/1024)}' /proc/meminfo)
"""
_SPAN = "echo from=$(date +%s.%N); sleep 2; echo to=$(date +%s.%N)\n"

# All jobs are submitted at once, in this order.
JOBS = {
    # First, because it runs until its time limit.
    "signal": Submission(
        "--signal=B:USR1@10 --time=1",
        "trap 'echo signalled' USR1\nsleep 900 &\nwait\necho went on\nwait\n",
    ),
    "plain": Submission(
        "--job-name=named --output={home}/%x.out --error=%j.err --input={home}/in --open-mode=append"
        " --chdir={home}/dir --account=physics --qos=normal --wckey=key --comment=said --nice=3 --no-requeue"
        " --time=30 --time-min=5 --deadline=now+3hours --constraint=slim&instant&place-pack --batch=slim"
        " --clusters=multiverse"
        " --export=ALL,COLOUR=green --propagate=STACK --acctg-freq=task=1 --use-min-nodes"
        " --hint=nomultithread --mail-type=BEGIN --mail-user=ada --mcs-label=any --ignore-pbs",
        """\
cat
echo name=$SLURM_JOB_NAME account=$SLURM_JOB_ACCOUNT qos=$SLURM_JOB_QOS
echo directory=$PWD colour=$COLOUR stack=$(ulimit -s) home=$HOME
echo complaint >&2
lscpu | grep '^Thread'
squeue -h -a -j $SLURM_JOB_ID -O wckey
scontrol show job -o $SLURM_JOB_ID | tr ' ' '\\n'
dd if=/dev/zero bs=100M count=1 2>/dev/null | { head -c 1 > /dev/null; sleep 4; }
touch {home}/plain.over
""",
        prefix=("prlimit", "--stack=4194304:"),
    ),
    "size": Submission("--ntasks=2 --cpus-per-task=2 --mem-per-cpu=200", _SIZE),
    "per-task": Submission("--ntasks=2 --comment='mine vm:mem-per-task=200M,per-host=1'", _SIZE),
    "sockets": Submission(
        "--ntasks=4 --ntasks-per-socket=2 --sockets-per-node=2 --mem=300",
        "echo nproc=$(nproc) per=$SLURM_NTASKS_PER_SOCKET\n"
        "srun -Q --ntasks=1 --cpu-bind=sockets grep Cpus_allowed_list /proc/self/status\n",
    ),
    "memory": Submission(
        "--mem=700 --tmp=3000 --exclusive --sockets-per-node=1 --cores-per-socket=3 --threads-per-core=1"
        " --ntasks-per-core=1 --export-file={home}/variables",
        _SIZE + "echo colour=$COLOUR\nlscpu | grep -E '^(Thread|Core|Socket)'\n"
        "[ $(df -m --output=avail /tmp | tail -1) -ge 3000 ] && echo room=enough\n",
    ),
    "default": Submission(
        "--extra-node-info=1:2:1 --get-user-env",
        _SIZE
        + "echo home=$HOME user=$USER\n[ $(df -m --output=avail /tmp | tail -1) -ge 2048 ] && echo room=scratch\n",
    ),
    "steps": Submission(
        "--ntasks=2 --mem=300",
        """\
cd {home}
srun --quiet --label --unbuffered --threads=1 --input=none --msg-timeout=60 --wait=60 --propagate=NONE \\
     --preserve-env --disable-status --quit-on-interrupt --mpi=none --slurmd-debug=error \\
     --prolog=$PWD/epilog --epilog=$PWD/epilog hostname
srun --quiet --ntasks=1 --cpu-bind=map_cpu:1 grep Cpus_allowed_list /proc/self/status
srun --quiet --ntasks=1 --mem-bind=map_mem:0 grep -om1 bind:0 /proc/self/numa_maps
srun --quiet --ntasks=1 --resv-ports=2 true 2>&1
srun --quiet --ntasks=1 --het-group=1 true 2>&1
srun --quiet --ntasks=1 --accel-bind=gn echo nothing to bind to
srun --quiet --ntasks=1 --exact --cpus-per-task=1 sh -c 'echo exact=$(nproc)'
srun --quiet --multi-prog programs
srun --quiet --ntasks=1 --task-prolog=$PWD/prolog --task-epilog=$PWD/epilog sh -c 'echo prolog=$PROLOG'
cat epilogued
srun --quiet --ntasks=1 --bcast=/tmp/tool --bcast-exclude=/lib --compress --send-libs=no ./tool
sbcast in /tmp/in && cat /tmp/in
srun --quiet --kill-on-bad-exit=1 sh -c '[ $SLURM_PROCID = 1 ] && exit 3; sleep 900'
echo bad=$?
srun --quiet sleep 900 &
until srun --quiet --overlap --ntasks=1 echo overlapped; do sleep 1; done
srun --quiet --overcommit --overlap --ntasks=5 sh -c 'echo tasks=$SLURM_NTASKS'
scancel $SLURM_JOB_ID
""",
    ),
    "spread": Submission(
        "--nodes=2-3 --ntasks-per-node=2 --distribution=cyclic --wait-all-nodes=1 --mem=150",
        "echo nodes=$SLURM_NNODES\nsrun --quiet sh -c 'echo rank $SLURM_PROCID on $SLURM_NODEID'\n"
        "srun --quiet --relative=1 --nodes=1 --ntasks=1 sh -c 'echo $SLURMD_NODENAME of $SLURM_JOB_NODELIST'\n",
    ),
    "shared": Submission(
        "--overcommit --ntasks=5 --nodes=2 --mem=150", _SIZE + "srun --quiet sh -c 'echo sharing $SLURM_PROCID'\n"
    ),
    "crowded": Submission("--overcommit --nodes=1 --ntasks-per-node=2", _SIZE),
    "split": Submission("--ntasks=3 --ntasks-per-node=2 --mem=150", _SIZE),
    "array": Submission("--array=1-2%1 --output={home}/%A_%a-%N.out", _SPAN),
    "after": Submission("--dependency=afterok:{plain}", "ls {home}/plain.over\n"),
    "never": Submission("--dependency=afternotok:{plain} --kill-on-invalid-dep=yes", "echo ran\n"),
    "begin": Submission(
        "--begin=now+25 --mincpus=2 --export=ALL,ASKED={now}",
        _SIZE + "[ $(date +%s) -ge $((ASKED + 24)) ] && echo later=yes\n",
    ),
    "held": Submission("--hold --mem=150", _SIZE + "scontrol show job -o $SLURM_JOB_ID | tr ' ' '\\n'\n"),
    "busy": Submission(
        "--requeue --open-mode=append --time=60 --mem=150",
        "echo restarts=${SLURM_RESTART_COUNT:-0}\nsrun --quiet sh -c 'echo stepping; sleep 900' &\n"
        "until [ -e {home}/busy.over ]; do sleep 1; done\n",
    ),
    "first": Submission(
        "--licenses=seat:1 --exclude=mvgone-7,mvgate1 --contiguous --oversubscribe --gres=gpu:0 --gpus=0", _SIZE + _SPAN
    ),
    "nice": Submission("--licenses=seat:1 --nice=100", _SPAN),
    "second": Submission("--licenses=seat:1", _SPAN),
    "burn": Submission("--mem=150", "timeout 8 sh -c 'while :; do :; done'\n"),
}

_GPUS = "generic resources are not supported: submit without GPUs"

GROUPS = (
    Group(
        "Size",
        (
            honoured("-n, --ntasks", "without `-N`: one VM for all tasks", "size", "nproc=4 nodes=1 tasks=2"),
            honoured("-c, --cpus-per-task", "the VM has as many CPUs for each task", "size", "nproc=4 .*"),
            honoured(
                "-N, --nodes",
                "as many VMs, all or none; of a range, the smallest number that could ever fit",
                "spread",
                "nodes=2",
                "rank 3 on 1",
            ),
            honoured(
                "--ntasks-per-node", "without `-N` it determines the number of VMs", "split", "nproc=2 nodes=2 .*"
            ),
            honoured(
                "--mem-per-cpu",
                "in MiB that the job may use",
                "size",
                "per_node= per_cpu=200",
                "memory=(?:[89]..|1...)",
            ),
            honoured("--mem", "in MiB that the job may use, in each VM", "memory", "per_node=700 .*", "memory=[7-9].."),
            honoured("no --mem", "`DefMemPerCPU` for each CPU", "default", "per_node= per_cpu=150", "memory=[3-4].."),
            refused(
                "--mem=0",
                "--mem=0 (all memory of a node) is not supported: give the size with --mem",
                "--mem=0",
            ),
            honoured("--mincpus", "the VM has as many CPUs", "begin", "nproc=2 .*"),
            honoured(
                "--tmp",
                "free on the VM's disk, up to `image.tmp_disk`",
                "memory",
                "room=enough",
            ),
            honoured("no --tmp", "`image.scratch` free on the VM's disk", "default", "room=scratch"),
            refused(
                "--tmp beyond that",
                "the job requests 204800 MiB of disk with --tmp, but a VM has 12288 MiB: use a shared file system",
                "--tmp=200G",
            ),
            honoured("--exclusive", "always: a VM runs one job only", "memory", "nproc=3 .*"),
            honoured("-s, --oversubscribe", "changes nothing: a VM runs one job only", "first", r"nproc=1 .*"),
            honoured(
                "-O, --overcommit",
                "each VM has the CPUs of one task, which its tasks share",
                "shared",
                "nproc=1 nodes=2 .*",
                "sharing 4",
            ),
            honoured(
                "-O, --overcommit with --ntasks-per-node",
                "each VM has CPUs and memory for its tasks side by side, because Slurm uses no node with less; "
                "the job gets as much of that as with --overcommit alone",
                "crowded",
                "nproc=1 nodes=1 .*",
            ),
            refused(
                "more than any host has",
                "the largest VM for a job here has 8 CPUs",
                "--cpus-per-task=64",
                note="the message names the largest VM for a job",
            ),
            honoured(
                "--comment=vm:mem-per-task=SIZE",
                "memory for each task, which makes that of the node",
                "per-task",
                "per_node=400 per_cpu=",
            ),
            refused(
                "--comment=vm:mem-per-task beside another --mem or --mem-per-cpu",
                "vm:mem-per-task in --comment gives each node 400 MiB, but --mem gives it 300: submit with one of them",
                "--ntasks=2",
                "--mem=300",
                "--comment=vm:mem-per-task=200M",
                note="refused unless it gives each node the same",
            ),
            tested(
                "--comment=vm:per-host=N",
                "at most N of the job's VMs are on one host",
                "test_a_job_runs_on_two_hosts_and_others_do_not_reach_it",
            ),
            refused(
                "--comment=vm:per-host that needs more hosts than there are",
                ", at most 1 on a host, but all hosts together can hold",
                "--nodes=64",
                "--comment=vm:per-host=1",
                note="the message says how many of the VMs the hosts can hold",
            ),
            tested(
                "--comment=vm:net=RATE",
                "each VM sends and receives up to RATE bits a second, which it claims of its host's network",
                "test_a_vm_sends_and_receives_no_faster_than_it_claims",
            ),
            refused(
                "--comment=vm:net beyond what any host has",
                "no host here has bandwidth to claim: submit without vm:net in --comment",
                "--comment=vm:net=1G",
                note="the message says what hosts have",
            ),
            refused(
                "--comment=vm:net that is no rate",
                "vm:net=fast in --comment is wrong: give bits a second such as 100M or 1G",
                "--comment=vm:net=fast",
            ),
            tested(
                "--comment=vm:save, vm:save=TIME",
                "before its time limit the job is saved and queued again, and goes on where it stopped",
                "test_a_job_is_saved_at_its_time_limit_and_others_wait_for_its_end",
            ),
            tested(
                "--comment=vm:save,restart",
                "a job that cannot go on with its state begins anew, and is not held",
                "test_a_job_whose_user_agreed_begins_anew_by_itself",
            ),
            refused(
                "--comment=vm:restart alone",
                "vm:restart in --comment is for jobs that are saved: give vm:save,restart",
                "--comment=vm:restart",
            ),
            tested(
                "--comment=vm:checkpoint=TIME, vm:checkpoint=TIME,shared-files",
                "the state of the job is written while it runs; if its VM is lost, it goes on from the last one",
                "test_a_job_goes_on_from_the_checkpoint_that_it_asked_for",
            ),
            refused(
                "--comment=vm:checkpoint=TIME with --no-requeue",
                "a job that is saved is queued again (vm:checkpoint): submit without --no-requeue",
                "--comment=vm:checkpoint=6h",
                "--no-requeue",
            ),
            refused(
                "--comment=vm:shared-files alone",
                "vm:shared-files in --comment is for jobs with checkpoints: give vm:checkpoint=6h,shared-files",
                "--comment=vm:shared-files",
            ),
            refused(
                "--comment=vm:save with --no-requeue",
                "a job that is saved is queued again (vm:save): submit without --no-requeue",
                "--comment=vm:save",
                "--no-requeue",
                note="refused unless the site has `save.no_requeue`",
            ),
            refused(
                "--comment=vm:checkpoint=TIME with --nodes above 1, or with tasks for several nodes",
                "jobs of several VMs have no checkpoints (vm:checkpoint), and this one would have 2: "
                "submit with --nodes=1",
                "--comment=vm:checkpoint=6h",
                "--nodes=2",
            ),
            refused(
                "srun --comment=vm:save",
                "jobs of srun and salloc cannot be saved (vm:save): submit with sbatch",
                "srun",
                "--comment=vm:save",
                "true",
            ),
            refused(
                "salloc --comment=vm:save",
                "jobs of srun and salloc cannot be saved (vm:save): submit with sbatch",
                "salloc",
                "--comment=vm:save",
                "true",
            ),
            denied(
                "--comment=vm:save with --open-mode=truncate",
                "the job must append to its output; since 24.11 the command line is looked at as it is saved",
                "test_a_job_that_truncates_its_output_cannot_ask_to_be_saved",
            ),
            refused(
                "--comment=vm:save=TIME beyond half of --time",
                "vm:save would save the job before half of its time is over: give a longer --time, or save it later",
                "--comment=vm:save=20m",
                "--time=30",
            ),
            refused(
                "--comment=vm: with another word",
                "vm:speed=1 in --comment is not supported: use mem-per-task, net, per-host, save, restart, "
                "checkpoint or shared-files",
                "--comment=vm:speed=1",
            ),
        ),
    ),
    Group(
        "Nodes and their inside",
        (
            honoured(
                "-C, --constraint",
                "images, kinds of clones and placement, joined by `&`",
                "plain",
                ".*slim&instant&place-pack.*",
            ),
            honoured("--batch", "a feature of `--constraint`", "plain", ".*slim.*"),
            refused(
                "--constraint with several images",
                "a job has one image, not slim and stock: name one of them with --constraint",
                "--constraint=slim&stock",
                note="a job has one image, one kind of clone, and one placement policy",
            ),
            refused(
                "--constraint with an unknown placement policy",
                "there is no placement policy fast: use --constraint=place-NAME with one of worst-fit, best-fit,"
                " first-fit, random-fit, pack, spread, least-loaded",
                "--constraint=place-fast",
            ),
            refused(
                "--constraint with alternatives",
                "alternatives and counts in --constraint are not supported: join features with &",
                "--constraint=slim|stock",
            ),
            refused(
                "--constraint with ours",
                "the constraint mv_1 is reserved for Multiverse: submit without it",
                "--constraint=mv_1",
            ),
            refused("--prefer", "--prefer is not supported: use --constraint instead", "--prefer=slim"),
            refused(
                "-w, --nodelist", "nodes are created for each job: submit without --nodelist", "--nodelist=mvgate1"
            ),
            refused(
                "-F, --nodefile", "nodes are created for each job: submit without --nodelist", "--nodefile={home}/nodes"
            ),
            honoured(
                "-x, --exclude",
                "of a VM that is gone, or of other nodes: no VM is one of them; with srun outside of a job only of "
                "nodes that exist, because its step names them, too",
                "first",
                r"nproc=1 .*",
            ),
            refused(
                "-p, --partition with several", "several partitions are not supported: submit to vm only", "-pvm,bare"
            ),
            honoured("--sockets-per-node=1", "a VM has one socket", "memory", r"Socket\(s\): +1"),
            honoured("--cores-per-socket", "a VM has a core for each CPU", "memory", r"Core\(s\) per socket: +3"),
            honoured("--threads-per-core=1", "a core has one thread", "memory", r"Thread\(s\) per core: +1"),
            honoured("-B, --extra-node-info", "as the three options above", "default", "nproc=2 .*"),
            honoured("--ntasks-per-core=1", "a core has one thread", "memory", "nproc=3 .*"),
            honoured(
                "--hint=nomultithread, compute_bound", "cores have one thread", "plain", r"Thread\(s\) per core: +1"
            ),
            refused(
                "--hint=multithread",
                "VM cores have one thread each: submit without --threads-per-core, --ntasks-per-core and --hint",
                "--hint=multithread",
            ),
            refused(
                "--hint=memory_bound",
                "--hint=memory_bound is not supported: a VM has as many cores as its job requests",
                "--hint=memory_bound",
            ),
            honoured(
                "--sockets-per-node above 1",
                "Slurm places and binds tasks by as many sockets, up to 8; the kernel in the VM shows one",
                "sockets",
                r"Cpus_allowed_list:\s+\d[-,]\d",
            ),
            refused(
                "--sockets-per-node above 8",
                "the job requests 9 sockets on a node, but a VM has 8 at most: request fewer",
                "--sockets-per-node=9",
                note="the message says how many a VM has",
            ),
            refused(
                "--threads-per-core, --ntasks-per-core above 1",
                "VM cores have one thread each: submit without --threads-per-core, --ntasks-per-core and --hint",
                "--threads-per-core=2",
            ),
            honoured(
                "--ntasks-per-socket",
                "the VM has as many sockets to Slurm as its tasks need",
                "sockets",
                "nproc=4 per=2",
            ),
            refused(
                "-S, --core-spec",
                "Ignoring -S since it's not allowed by configuration",
                "--core-spec=1",
                note="ignored with a message; with `AllowSpecResourcesUsage` refused from 26.05 on, and cancelled "
                "with a comment before",
            ),
            refused(
                "--thread-spec",
                "Ignoring --thread-spec since it's not allowed by configuration",
                "--thread-spec=1",
                note="ignored with a message; with `AllowSpecResourcesUsage` refused from 26.05 on, and cancelled "
                "with a comment before",
            ),
            honoured("--contiguous", "changes nothing: VMs are connected to one network", "first", r"nproc=1 .*"),
            refused("--switches", "VMs are connected to no network switch: submit without --switches", "--switches=1"),
            tested(
                "--segment",
                "by Slurm's rule only in a block topology; without one, any nodes fit",
                "test_options_of_newer_releases_work",
                since="24.05",
            ),
            refused(
                "--spread-job", "--spread-job is not supported: give the number of VMs with --nodes", "--spread-job"
            ),
            honoured(
                "--use-min-nodes", "always: of a range, the smallest number that could ever fit", "spread", "nodes=2"
            ),
            honoured("-m, --distribution", "of tasks to the job's VMs", "spread", "rank 1 on 1", "rank 2 on 0"),
            honoured("--wait-all-nodes", "all VMs have joined before the job starts", "spread", "rank 1 on 1"),
            honoured("--mcs-label", "no other job runs on the job's nodes", "plain", "name=named .*"),
            refused("--reboot", "rebooting of nodes is only allowed for admins", "--reboot", note="each VM is new"),
            refused("--delay-boot", "the features of a VM never change: submit without --delay-boot", "--delay-boot=1"),
            refused(
                "--cpu-freq",
                "a VM cannot set the CPU frequency of its host: submit without --cpu-freq",
                "--cpu-freq=high",
            ),
            refused("--power", "--power is not supported: submit without it", "--power=level", until="24.05"),
            refused("--network", "--network is not supported: a VM has one network", "--network=ib"),
            refused("--container", "--container is not supported: select an image with --constraint", "--container=/x"),
            refused(
                "sbatch --container-id",
                "--container-id is not supported: select an image with --constraint",
                "--container-id=x",
                since="23.02",
            ),
            denied(
                "srun, salloc --container-id",
                "cancelled with a comment: --container-id is not supported: select an image with --constraint",
                "test_a_container_id_that_only_the_controller_sees_revokes_the_job",
                since="23.02",
            ),
            tested(
                "--oom-kill-step",
                "guests have task/cgroup",
                "test_options_of_newer_releases_work",
                since="24.11",
            ),
            refused("--stepmgr", "--stepmgr is not supported: submit without it", "--stepmgr", since="24.05"),
        ),
    ),
    Group(
        "Generic resources",
        (
            refused("--gres", "generic resources are not supported: submit without --gres and GPUs", "--gres=gpu:1"),
            refused(
                "--gres-flags",
                "generic resources are not supported: submit without --gres-flags",
                "--gres-flags=disable-binding",
            ),
            refused(
                "--gres-flags=multiple-tasks-per-sharing",
                "generic resources are not supported: submit without --gres-flags",
                "--gres-flags=multiple-tasks-per-sharing",
                since="23.11",
            ),
            refused(
                "--tres-bind",
                "generic resources are not supported: submit without --gpu-bind",
                "--tres-bind=gres/gpu:closest",
                since="23.11",
            ),
            refused(
                "--tres-per-task",
                _GPUS,
                "--tres-per-task=license/seat:1",
                "--ntasks=1",
                note=f"except for CPUs, as -c: {_GPUS}",
                since="23.11",
            ),
            refused("-G, --gpus", _GPUS, "--gpus=1"),
            honoured("--gpus=0, --gres=gpu:0", "ask for nothing", "first", r"nproc=1 .*"),
            refused(
                "--gpus-per-node",
                "generic resources are not supported: submit without --gres and GPUs",
                "--gpus-per-node=1",
            ),
            refused(
                "--gpus-per-socket",
                _GPUS,
                "--gpus-per-socket=1",
                "--sockets-per-node=1",
                note=_GPUS,
            ),
            refused("--gpus-per-task", _GPUS, "--gpus-per-task=1", "--ntasks=1"),
            refused("--ntasks-per-gpu", _GPUS, "--ntasks-per-gpu=1", "--gpus=1"),
            refused("--cpus-per-gpu", _GPUS, "--cpus-per-gpu=1", "--gpus=1"),
            refused("--mem-per-gpu", _GPUS, "--mem-per-gpu=100", "--gpus=1"),
            refused("--gpu-bind", "generic resources are not supported: submit without --gpu-bind", "--gpu-bind=none"),
            refused("--gpu-freq", "generic resources are not supported: submit without --gpu-freq", "--gpu-freq=high"),
            refused("--bb", "burst buffers are not supported: stage files in the job itself", "--bb=capacity=1G"),
            refused("--bbf", "burst buffers are not supported: stage files in the job itself", "--bbf={home}/buffer"),
            tested(
                "-L, --licenses",
                "a job waits at the gate until the licences are free",
                "test_licences_are_never_exceeded",
            ),
            refused(
                "-L, --licenses with alternatives",
                "alternatives in --licenses are not supported: join licences with commas",
                "--licenses=seat|ice",
            ),
            refused(
                "-L, --licenses=vm",
                "the licence vm is reserved for Multiverse: submit without it",
                "--licenses=vm:1",
            ),
        ),
    ),
    Group(
        "When",
        (
            tested(
                "-t, --time",
                "the VM ends at the time limit",
                "test_a_job_gets_its_signal_and_ends_at_its_time_limit",
            ),
            honoured("--time-min", "the job gets at least that time", "plain", "TimeMin=00:05:00"),
            honoured(
                "--signal",
                "sent to the script or its steps; lost if it comes before the script has begun, as on any node, but"
                " with short time limits more often (see [operate](operate.md#by-symptom))",
                "signal",
                "signalled",
            ),
            tested(
                "--deadline",
                "Slurm cancels a job that cannot end before it",
                "test_a_deadline_ends_a_waiting_job",
            ),
            honoured("-b, --begin", "no VM is created before", "begin", "later=yes"),
            honoured("-d, --dependency", "no VM is created before it is met", "after", ".*/plain.over"),
            tested(
                "--kill-on-invalid-dep",
                "the job is cancelled without a VM",
                "test_a_job_whose_dependency_is_never_met_is_cancelled",
            ),
            tested(
                "-a, --array with %N",
                "each task has a VM of its own; at most N tasks run",
                "test_an_arrays_limit_holds",
            ),
            tested("-H, --hold", "no VM is created before the release", "test_a_held_job_is_changed_and_released"),
            tested("--nice", "orders the jobs at the gate", "test_a_job_with_a_nice_value_starts_after_others"),
            tested("--priority", "by Slurm's rule only operators may", "test_root_submits_for_a_user"),
            tested(
                "--requeue",
                "each run has new VMs; one of a job that was saved, or has a checkpoint, goes on from there",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
            tested("--no-requeue", "a lost VM ends the job", "test_a_job_that_must_not_be_requeued_ends_with_its_vm"),
            tested(
                "-k, --no-kill",
                "the job goes on without the lost VM; if that was the first VM, until its time limit",
                "test_a_job_with_no_kill_outlives_one_of_its_vms",
            ),
            tested(
                "-W, --wait",
                "sbatch exits with the job's exit code",
                "test_sbatch_waits_and_exits_with_the_jobs_code",
            ),
            tested("-I, --immediate=SECONDS", "the job waits that long for a VM", "test_srun_has_a_terminal_in_the_vm"),
            tested(
                "-I, --immediate",
                "the job starts on a joined spare that is on offer, or is refused",
                "test_without_a_spare_nothing_starts_immediately",
            ),
            tested(
                "--test-only",
                "the request is checked; the start that it prints says nothing, because Slurm knows no VM yet",
                "test_a_request_is_checked_without_a_job",
            ),
            refused(
                "--reservation",
                "reservations are not supported: submit without --reservation",
                "--reservation=any",
            ),
            denied(
                "jobs of several components (`:`)",
                "heterogeneous jobs are not supported: submit each component as a separate job",
                "test_heterogeneous_jobs_are_refused",
            ),
            honoured("-M, --clusters", "this cluster", "plain", "name=named .*"),
            refused(
                "-M, --clusters with others",
                "No cluster 'other' known by database",
                "--clusters=other",
                note="there is no federation: Slurm refuses an unknown cluster",
            ),
            denied(
                "--cluster-constraint",
                "cancelled with a comment: --cluster-constraint is not supported: submit without it",
                "test_an_option_that_only_the_controller_sees_revokes_the_job",
            ),
        ),
    ),
    Group(
        "Environment, files and accounting",
        (
            honoured("-J, --job-name", "", "plain", "name=named .*"),
            honoured("-A, --account", "", "plain", "name=named account=physics .*"),
            honoured("-q, --qos", "", "plain", ".* qos=normal"),
            honoured("--wckey", "", "plain", "key *"),
            honoured("--comment", "words that begin with `vm:` request something", "plain", "Comment=said"),
            tested("--extra", "a label", "test_options_of_newer_releases_work", since="23.11"),
            honoured("-D, --chdir", "on a file system that guests mount", "plain", "directory=.*/dir .*"),
            honoured("--export", "", "plain", ".* colour=green .*"),
            honoured("--export-file", "", "memory", "colour=blue"),
            honoured("--get-user-env", "as in the image", "default", r"home=.+ user=ada\d+"),
            honoured("--propagate", "limits of the submitting shell", "plain", ".* stack=4096 .*"),
            honoured("-i, --input", "", "plain", "given"),
            tested("-o, --output, -e, --error", "with Slurm's patterns", "test_files_are_named_by_slurms_patterns"),
            honoured("--open-mode", "a job with `truncate` cannot be saved", "plain", "before"),
            tested("--mail-type, --mail-user", "sent by slurmctld", "test_mail_is_sent"),
            tested("--acctg-freq", "steps are sampled in the VM", "test_a_step_is_sampled_at_the_requested_interval"),
            refused(
                "sbatch --profile",
                "profiles of VMs are not supported: submit without --profile, and unset SLURM_PROFILE",
                "--profile=task",
            ),
            denied(
                "srun, salloc --profile",
                "cancelled with a comment: profiles of VMs are not supported: submit without --profile",
                "test_an_option_that_only_the_controller_sees_revokes_the_job",
            ),
            tested("--uid, --gid", "root submits for a user, by Slurm's rule", "test_root_submits_for_a_user"),
            honoured("--ignore-pbs, --wrap, --parsable, --quiet, --verbose", "sbatch's own", "plain", "name=named .*"),
        ),
    ),
    Group(
        "srun, salloc and steps",
        (
            tested("srun --pty", "a terminal in the VM", "test_srun_has_a_terminal_in_the_vm"),
            tested(
                "salloc",
                "the command runs on the submitting machine, its steps run in the VM",
                "test_salloc_runs_steps_in_its_vm",
            ),
            Option(
                "--resv-ports",
                Support.REFUSED,
                "by Slurm's rule: no ports are reserved without `MpiParams`",
                job="steps",
                output_lines=(".*Requires more ports than can be reserved.*",),
            ),
            denied(
                "-Z, --no-allocate",
                "by Slurm's rule only root may use it",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
            Option(
                "--het-group",
                Support.REFUSED,
                "no job has a second component; outside of a job srun ignores it",
                job="steps",
                output_lines=(".*Requested het-group offset exceeds highest hetjob index.*",),
            ),
            honoured("--mem-bind", "a VM has one NUMA node", "steps", "bind:0"),
            honoured("--accel-bind", "to generic resources, which a VM does not have", "steps", "nothing to bind to"),
            tested("--external-launcher", "", "test_options_of_newer_releases_work", since="23.11"),
            tested("--treewidth", "srun's own", "test_options_of_newer_releases_work", since="24.05"),
            tested("--jobid", "a step in a job that has its VM", "test_salloc_without_a_shell_allocates_a_vm"),
            tested(
                "salloc --no-shell, --bell, --no-bell, --kill-command", "", "test_salloc_without_a_shell_allocates_a_vm"
            ),
            honoured(
                "--label, --unbuffered, --threads, --msg-timeout, --disable-status, --quit-on-interrupt, "
                "--preserve-env, --mpi=none, --slurmd-debug, --prolog, --epilog",
                "srun's own",
                "steps",
                "[01]: mv.*",
            ),
            honoured(
                "--cpu-bind",
                "to the VM's CPUs, by `task/affinity`; a job that a task submits inherits `SLURM_CPU_BIND`, as on "
                "nodes with it: unset that before its own srun",
                "steps",
                r"Cpus_allowed_list:\s*1",
            ),
            honoured("--exact", "", "steps", "exact=1"),
            honoured("--overlap", "", "steps", "overlapped"),
            honoured("srun --overcommit in a job", "", "steps", "tasks=5"),
            honoured("--multi-prog", "", "steps", "first", "second"),
            honoured("--task-prolog, --task-epilog", "run in the VM", "steps", "prolog=yes", "epilogued"),
            honoured(
                "--bcast, --bcast-exclude, --compress, --send-libs", "to the VM's own disk", "steps", "tool=/tmp/tool"
            ),
            honoured("sbcast", "to the VM's own disk", "steps", "given"),
            honoured("-K, --kill-on-bad-exit", "", "steps", "bad=[1-9].*"),
            honoured("-r, --relative", "", "spread", "mv.* of mv.*"),
            denied("--x11", "by Slurm's rule: not without `PrologFlags=X11`", "test_x11_is_not_forwarded"),
            tested("sattach", "before 23.11 with `multiverse-client.conf`", "test_sattach_shows_a_step"),
            tested("sstat", "", "test_a_running_job_is_updated_suspended_and_requeued"),
            tested(
                "sacct",
                "states, times and memory as on any node",
                "test_a_step_is_sampled_at_the_requested_interval",
            ),
            tested("seff", "the efficiency of a job, from sacct's figures", "test_sacct_shows_a_jobs_efficiency"),
        ),
    ),
    Group(
        "scontrol by the job's user",
        (
            tested(
                "update of a waiting job's memory, CPUs, time, name, comment, nice value",
                "the VM gets the new values",
                "test_a_held_job_is_changed_and_released",
            ),
            denied(
                "update of the words of a job's comment that begin with `vm:`",
                "cancel the job and submit it again",
                "test_users_cannot_update_what_multiverse_sets",
            ),
            denied(
                "update of a job's features, partition and nodes",
                "Multiverse sets them: cancel the job and submit it again",
                "test_users_cannot_update_what_multiverse_sets",
            ),
            tested(
                "update of a running job to fewer nodes",
                "it goes on without the others, whose VMs are removed when it ends",
                "test_a_running_job_gives_a_node_up",
            ),
            denied("update of a running job to more nodes", "Slurm refuses", "test_a_running_job_gives_a_node_up"),
            tested(
                "update of a running job's time, name and comment",
                "by Slurm's rules",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
            tested("hold, release of a waiting job", "", "test_a_held_job_is_changed_and_released"),
            denied(
                "requeue, suspend of a waiting job",
                "Slurm refuses; the job goes on waiting",
                "test_a_held_job_is_changed_and_released",
            ),
            tested(
                "hold, release of a running job",
                "the job goes on running",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
            tested(
                "requeue of a running job",
                "in a new VM; a job with a checkpoint goes on from the last one",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
            tested(
                "requeuehold of a running job",
                "the job waits without a VM until its release",
                "test_a_job_that_is_requeued_and_held_waits_without_a_vm",
            ),
            tested(
                "suspend, resume",
                "by Slurm's rule only operators may; the VM stays, or sleeps (`save.sleep_after`)",
                "test_a_running_job_is_updated_suspended_and_requeued",
            ),
        ),
    ),
)
