"""The commands with which users look at their jobs and act on them: each option of the man pages of Slurm 22.05 with
what is compared, or with the reason why nothing is.

test_commands_of_users.py gives the same jobs to the VM partition and to bare metal, and compares what the commands say.
docs/options.md has the tables of this file (`make docs`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """What a command shows of a VM and its job that differs from bare metal on purpose. `fields` are its names in
    tables, in what scontrol shows, and in JSON, some of them of one command alone."""

    what: str
    note: str
    fields: str


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


SQUEUE_FIELDS = """
Account ArrayJobID ArrayTaskID BatchFlag BatchHost BoardsPerNode BurstBuffer BurstBufferState Cluster
ClusterFeature Command Comment Contiguous Container Cores CoreSpec Deadline DelayBoot Dependency DerivedEC
EligibleTime EndTime exit_code Feature GroupID GroupName HetJobID HetJobIDSet HetJobOffset JobArrayID JobID
Licenses MaxCPUs MaxNodes MCSLabel MinCpus MinMemory MinTime MinTmpDisk Name Network Nice NodeList NTPerBoard
NTPerCore NTPerNode NTPerSocket NumCPUs NumNodes NumTasks Origin OverSubscribe Partition Prefer Priority
PriorityLong Profile QOS Reason ReasonList Reboot ReqNodes ReqSwitch Requeue Reservation ResizeTime RestartCnt
SchedNodes SCT SelectJobInfo Shared Sockets SPerBoard StartTime State StateCompact STDERR STDIN STDOUT
SubmitTime Threads TimeLeft TimeLimit TimeUsed UserID UserName Wait4Switch WCKey WorkDir
"""
"""Of squeue's --Format."""

SINFO_FIELDS = """
AllocMem AllocNodes Available Cluster Comment Cores CPUs CPUsLoad CPUsState DefaultTime Disk Extra Features
features_act FreeMem Gres GresUsed Groups MaxCPUsPerNode Memory NodeAddr NodeAI NodeAIOT NodeHost NodeList
Nodes OverSubscribe Partition PartitionName Port PreemptMode PriorityJobFactor PriorityTier Reason Root Size
SocketCoreThread Sockets StateCompact StateLong StateComplete Threads Time TimeStamp User UserLong Version
Weight
"""
"""Of sinfo's --Format."""

OPTIONS = {
    "squeue": "-A/--account -a/--all -r/--array --array-unique -M/--clusters --federation -o/--format -O/--Format "
    "--help --hide -i/--iterate -j/--jobs -L/--licenses --local -l/--long --me -n/--name --noconvert "
    "-w/--nodelist -h/--noheader -p/--partition -P/--priority -q/--qos -R/--reservation --sibling "
    "-S/--sort --start -t/--states -s/--steps --usage -u/--user -v/--verbose -V/--version --json --yaml",
    "sinfo": "-a/--all -M/--clusters -d/--dead -e/--exact --federation -o/--format -O/--Format --help --hide "
    "-i/--iterate -R/--list-reasons --local -l/--long --noconvert -N/--Node -n/--nodes -h/--noheader "
    "-p/--partition -T/--reservation -r/--responding -S/--sort -t/--states -s/--summarize --usage "
    "-v/--verbose -V/--version --json --yaml",
    "scancel": "-A/--account -b/--batch -M/--clusters --ctld -f/--full --help -H/--hurry -i/--interactive "
    "-n/--jobname/--name --me -w/--nodelist -p/--partition -q/--qos -Q/--quiet -R/--reservation --sibling "
    "-s/--signal -t/--state --usage -u/--user -v/--verbose -V/--version --wckey",
    "scontrol": "-a/--all -M/--clusters -d/--details --federation -F/--future -h/--help --hide --local -o/--oneliner "
    "-Q/--quiet --sibling -u/--uid -v/--verbose -V/--version",
    "sacct": "-A/--accounts -L/--allclusters -X/--allocations -a/--allusers -x/--associations -B/--batch-script "
    "-b/--brief -M/--clusters -c/--completion -C/--constraints --delimiter -D/--duplicates -E/--endtime "
    "--env-vars --federation -f/--file -F/--flags -o/--format -g/--gid/--group -h/--help -e/--helpformat "
    "-j/--jobs --json --local -l/--long --name -i/--nnodes -I/--ncpus --noconvert -N/--nodelist "
    "-n/--noheader -p/--parsable -P/--parsable2 -r/--partition -q/--qos -R/--reason -S/--starttime "
    "-s/--state -K/--timelimit-max -k/--timelimit-min -T/--truncate -u/--uid/--user --units --usage "
    "--use-local-uid -v/--verbose -V/--version -W/--wckeys --whole-hetjob --yaml",
    "sstat": "-a/--allsteps -o/--format/--fields -h/--help -e/--helpformat -j/--jobs --noconvert -n/--noheader "
    "-p/--parsable -P/--parsable2 -i/--pidformat --usage -v/--verbose -V/--version",
    "sprio": "-M/--clusters --federation -o/--format --help -j/--jobs --local -l/--long -h/--noheader -n/--norm "
    "-p/--partition --sibling -S/--sort --usage -u/--user -v/--verbose -V/--version -w/--weights",
    "sshare": "-A/--accounts -a/--all -M/--clusters -o/--format --help -l/--long -n/--noheader -p/--parsable "
    "-P/--parsable2 -m/--partition --usage -u/--users -U/--Users -v/--verbose -V/--version "
    "-e/--helpformat",
    "sreport": "-a/--all_clusters -M/--cluster --federation -h/--help --local -n/--noheader -p/--parsable "
    "-P/--parsable2 -Q/--quiet -t -T/--tres -v/--verbose -V/--version",
    "sattach": "--error-filter -h/--help --input-filter -l/--label --layout --output-filter --pty -Q/--quiet "
    "-u/--usage -V/--version -v/--verbose",
    "sbcast": "-C/--compress --exclude -F/--fanout -f/--force -j/--jobid -p/--preserve --send-libs -s/--size "
    "-t/--timeout -v/--verbose -V/--version --help --usage",
    "scrontab": "-e -l -r -u",
}
"""The options of each command, from its man page (22.05.8) and its `--help`, aliases joined by a slash."""

EXCLUDED = {
    "tell of the command itself": "--help --usage --version --helpformat",
    "there are no burst buffers": "--hurry",
    "only in a federation": "scancel:--sibling",
    "Debian 12 has no scrontab": "scrontab:-e scrontab:-l scrontab:-r scrontab:-u",
}
"""Options with which nothing is compared, by the reason; some of them of one command alone."""

SHOWN = _lines("""\
squeue --me -p {partition}
squeue --me -p {partition} --all
squeue --me -p {partition} --hide
squeue --me -p {partition} -l
squeue -A physics -p {partition} -h -o %i
squeue -A nobody -p {partition} -h -o %i
squeue --me -p {partition} --array
squeue --me -p {partition} --array-unique
squeue --me -p {partition} -M multiverse
squeue --me -p {partition} --federation
squeue --me -p {partition} --sibling
squeue --me -p {partition} --local
squeue --me -p {partition} -o %all
squeue --me -p {partition} -O "{squeue_fields}"
squeue -j {running} --noconvert -o "%m %i"
squeue -j {waiting},{ended} -t all -o "%i %T %r %E %u"
squeue -j {array}_2 -o "%i %F %K"
squeue -p {partition} -L seat -o %i
squeue -p {partition} -n same-running -o %j
squeue -p {partition} --name=other -o %j
squeue -w {node} -o "%i %N"
squeue --me -p {partition} -P -o %i
squeue -p {partition} -q normal -o "%i %q"
squeue -p {partition} -R none
squeue --me -p {partition} --sort=-i -o %i
squeue --me -p {partition} -S t,i -o "%i %t"
squeue -j {waiting},{eligible} --start -o "%i %r"
squeue -u {user} -p {partition} -t PENDING -h -o %i
squeue -u {user} -p {partition} -t RUNNING -o "%.18i %.9P %.8j %.8u %.2t %D %C"
squeue -s -j {running} -o "%i %j %P %u %N"
squeue -s {running}.0
squeue --me -p {partition} -v -o %i
lines 1 squeue -i 1 -j {running} -h -o %i
squeue --me --json | python3 {dir}/flat job_id {running}
squeue --me --yaml | grep -c "str command: !!str {dir}/running.sh$"
sinfo -n {node} -p {partition} -o %P
sinfo -n {node} -p {partition} -a -o "%P %t %D"
sinfo -n {node} -p {partition} --hide -o "%P %t %D"
sinfo -n {node} -p {partition} -N -l | awk "{print \\$1, \\$2, \\$3, \\$4, \\$5}"
sinfo -n {node} -p {partition} -N -o %all
sinfo -n {node} -p {partition} -O "{sinfo_fields}"
sinfo -n {node} -p {partition} -e -o "%P %D %t"
sinfo -n {node} -p {partition} -d
sinfo -n {node} -p {partition} -r -h -o "%D %T"
sinfo -n {node} -p {partition} -R
sinfo -n {node} -p {partition} -s
sinfo -n {node} -p {partition} -S t,n -N -h -o "%N %t"
sinfo -n {node} -p {partition} -t alloc,mixed -h -o "%D %T"
sinfo -n {node} -p {partition} -t idle -h -o "%D %T"
sinfo -n {node} -p {partition} --noconvert -h -o "%D"
sinfo -n {node} -p {partition} -M multiverse -o "%P %D"
sinfo -n {node} -p {partition} --federation -o "%P %D"
sinfo -n {node} -p {partition} --local -o "%P %D"
sinfo -n {node} -p {partition} -v -o "%P %D"
lines 1 sinfo -i 1 -n {node} -p {partition} -h -o %D
sinfo -T
sinfo --json | python3 {dir}/flat name {node}
sinfo --yaml | grep -c "str name: !!str {node}$"
scontrol show job {running}
scontrol -d show job {running}
scontrol -o show job {waiting}
scontrol show job {array}
scontrol -o show job {array}_2
scontrol -a show job {ended}
scontrol --hide show job {running}
scontrol -Q show job 99999999
scontrol -v show job 99999999
scontrol -M multiverse show job {running}
scontrol --federation show job {running}
scontrol --local show job {running}
scontrol --sibling show job {running}
scontrol -F show job {running}
scontrol -u {user} show job {running}
scontrol show step {running}
scontrol -d show step {running}.0
scontrol -o show step {running}
scontrol show node {node}
scontrol -d show node {node}
scontrol -o show partition {partition}
scontrol show hostnames {node}
scontrol show hostlist {node}
scontrol show licenses seat
scontrol show reservation none
scontrol show assoc_mgr users={user} flags=users
scontrol show topology
scontrol show burstbuffer
scontrol show federation
scontrol show frontend
scontrol write batch_script {running} -
scontrol write batch_script {ended} -
scontrol completing
scontrol ping
scontrol errnumstr 2017
sacct -j {ended} -P -o ALL
sacct -j {ended}
sacct -j {running} -X -P -o ALL
sacct -j {waiting} -X -P -o ALL
sacct -j {ended} -b
sacct -j {ended} -l -P
sacct -j {ended}.0 -n -P -o JobID,State,ExitCode,NTasks
sacct -j {ended} -p -o JobID,State
sacct -j {ended} -P --delimiter=";" -o JobID,State
sacct -j {ended} -A physics -n -X -o State
sacct -j {ended} -A nobody -n -X -o State
sacct -L -j {ended} -n -X -o Cluster,State
sacct -a -j {ended} -n -X -o State
sacct -x 1 -j {ended} -n -X -o State
sacct -j {ended} -B
sacct -j {ended} --env-vars
sacct -j {ended} -M multiverse -n -X -o State
sacct -j {ended} -c
sacct -j {ended} -C slim -n -X -o JobID
sacct -j {ended} -D -n -X -o JobID
sacct -S now-1hour -E now -s CD,F -r {partition} -n -X -o JobID,State
sacct -S now-1hour -s R -r {partition} -n -X -o JobID,State
sacct -j {ended} --federation -n -X -o State
sacct -j {ended} --local -n -X -o State
sacct -f /dev/null -j {ended}
sacct -j {ended} -F SchedBackfill,SchedMain,SchedSubmit -n -X -o JobID
sacct -j {ended} -g {user} -n -X -o Group
sacct -j {ended} -u {user} -n -X -o User
sacct -j {ended} --json | python3 {dir}/flat job_id {ended}
sacct -j {ended} --yaml | grep "partition:"
sacct --name=same-ended -r {partition} -n -X -o JobName%20
sacct -j {ended} -i 1-1 -n -X -o NNodes
sacct -j {ended} -I 2-2 -n -X -o NCPUS
sacct -j {ended} -I 3-4 -n -X -o NCPUS
sacct -j {ended} --noconvert -n -X -o ReqMem
sacct -j {ended} --units=K -n -X -o ReqMem
sacct -N {ended_node} -j {ended} -n -X -o JobID
sacct -j {ended} -q normal -n -X -o QOS
sacct -j {ended} -R Dependency -n -X -o JobID
sacct -j {ended} -k 29 -K 31 -n -X -o Timelimit
sacct -S now-1hour -E now -T -j {ended} -n -X -o JobID,State
sacct -j {ended} --use-local-uid -n -X -o UID
sacct -j {ended} -v -n -X -o State
sacct -j {ended} -W key -n -X -o WCKey
sacct -j {ended} --whole-hetjob=yes -n -X -o State
sstat -j {running} -P
sstat -a -j {running} -P -n -o JobID,NTasks
sstat -j {running}.0 -o JobID,NTasks
sstat -j {running}.batch -o JobID,NTasks
sstat -j {running} -n --noconvert -o JobID,NTasks
sstat -j {running} -p -o JobID,NTasks
sstat -i -j {running} | awk "{print \\$1, \\$2}"
sstat -v -j {running} -n -o JobID
sstat -j {waiting} -o JobID
sstat -j {ended} -o JobID
sprio -j {eligible} -o "%i %r %u"
sprio -p {partition} -u {user} -l
sprio -p {partition} -u {user}
sprio -j {eligible} -h -n
sprio -j {eligible} -M multiverse -o %i
sprio -j {eligible} --federation -o %i
sprio -j {eligible} --local -o %i
sprio -j {eligible} --sibling -o %i
sprio -p {partition} -u {user} --sort=-i -o %i
sprio -j {eligible} -v -o %i
sprio -w
sshare -A physics -u {user} -P
sshare -A physics -a -p
sshare -A physics -u {user} -m -n
sshare -A physics -u {user} -l -P
sshare -U -o Account,User
sshare -U -v
sshare -M multiverse -U
sreport -n -P job sizesbyaccount partitions={partition} start=now-1hour end=now+1hour PrintJobCount
sreport -p -t Hour job sizesbyaccount partitions={partition} start=now-1hour end=now+1hour
sreport -a -t Seconds job sizesbyaccount partitions={partition} start=now-1hour end=now+1hour
sreport --federation -T cpu job sizesbyaccount partitions={partition} start=now-1hour end=now+1hour
sreport --local -Q -v job sizesbyaccount partitions={partition} start=now-1hour end=now+1hour
sreport -M multiverse -n user topusage users={user} start=now-1hour end=now+1hour
lines 4 sattach {running}.0
lines 4 sattach -l {running}.0
lines 2 sattach -Q --output-filter=1 --error-filter=1 --input-filter=1 {running}.0
lines 6 sattach -v {running}.0
lines 4 sattach --pty {running}.0
sattach --layout {running}.0
sattach {ended}.0
""")
"""Asked while a job runs, others wait, and one has ended. `lines` ends a command that has written as many."""

INSIDE = _lines("""\
sbcast {dir}/file {tmp}/a && cat {tmp}/a
sbcast {dir}/file {tmp}/a
sbcast -f {dir}/file {tmp}/a
sbcast -C {dir}/file {tmp}/b && cat {tmp}/b
sbcast --compress=lz4 {dir}/file {tmp}/c && cat {tmp}/c
sbcast -p {dir}/file {tmp}/d && stat -c "%a %Y" {tmp}/d
sbcast -F 2 -s 64 -t 10 {dir}/file {tmp}/e && cat {tmp}/e
sbcast -j $SLURM_JOB_ID {dir}/file {tmp}/f && cat {tmp}/f
sbcast --send-libs --exclude=/nowhere -f /bin/true {tmp}/g && {tmp}/g
sbcast --send-libs=no -v -f {dir}/file {tmp}/h
sbcast {dir}/absent {tmp}/i
squeue -h -j $SLURM_JOB_ID -o "%i %T %P %N"
scontrol show hostnames
scontrol -o show job $SLURM_JOB_ID | tr " " "\\n" | grep -E "^(JobId|JobState|NumCPUs|NumTasks|Partition|NodeList)="
scontrol show step $SLURM_JOB_ID.batch
scontrol listpids $SLURM_JOB_ID | awk "{print NF}" | sort -u
scontrol listpids $SLURM_JOB_ID.batch | head -1
scontrol pidinfo $$ | head -1
scontrol show slurmd | grep -E "^(Actual CPUs|Slurmd PID|Version)" | cut -d= -f1
sinfo -h -n $SLURMD_NODENAME -p $SLURM_JOB_PARTITION -o "%P %D"
sacct -n -X -j $SLURM_JOB_ID -o JobID,JobName%20,Partition
sstat -j $SLURM_JOB_ID.batch -n -o JobID,NTasks
sprio -j $SLURM_JOB_ID -o %i
sshare -U -o Account,User
scancel -s WINCH $SLURM_JOB_ID
srun -Q --label echo $SLURM_JOB_PARTITION | sort
""")
"""What the job that ends asks, on its node."""

CANCELLED = _lines("""\
scancel $victim
scancel -A physics $victim
scancel -A nobody $victim
scancel -M multiverse $victim
scancel --ctld $victim
scancel -n victim -p {partition}
scancel --me -p {partition} -n victim
scancel -w {node} $victim
scancel -p {partition} $victim
scancel -q normal $victim
scancel -q other $victim
scancel -R none $victim
scancel -Q $victim 99999999
scancel $victim 99999999
scancel -v $victim
scancel -t PENDING $victim
scancel -t RUNNING $victim
scancel -u {user} $victim
scancel --wckey=key $victim
scancel --wckey=other $victim
scancel -s USR1 $victim
scancel -b $victim
scancel -f $victim
echo y | scancel -i $victim
echo n | scancel -i $victim
scontrol hold $victim
scontrol release $victim && scontrol hold $victim
scontrol uhold $victim
scontrol requeue $victim
scontrol requeuehold $victim
scontrol suspend $victim
scontrol resume $victim
scontrol top $victim
scontrol notify $victim hello
scontrol update JobId=$victim TimeLimit=20
""")
"""What is done to a job that waits, held. Then its state is compared, too."""

SIGNALLED = {
    "scancel -s USR1 {running}": 2,
    "scancel -s USR1 -b {running}": 1,
    "scancel -s USR1 {running}.0": 2,
    "scancel -s USR1 {running}.batch": 0,
    "scancel -s 10 --ctld {running}": 2,
    "scancel -s 10 --ctld {running}.0": 2,
    "scancel -s NONE {running}": 0,
    "scontrol notify {running} hello": 0,
    "scontrol requeue {ended}": 0,
    "scontrol suspend {running}": 0,
    "scontrol top {running}": 0,
    "scancel -s USR1 -f {running}": 3,
}
"""What is done to a job that runs, and how many of its script and its two tasks see a signal."""

DIFFERENCES = (
    Difference(
        "the constraint of a job",
        "ends with `mvgate` while the job waits, and with a word such as `mv_382` then",
        "Features FEATURES features Constraints constraints",
    ),
    Difference("the licences of a job that waits", "`vm:1` among them", "Licenses LICENSES licenses"),
    Difference(
        "priority and nice value of a job that has its VM",
        "so that Slurm looks at it before those that wait",
        "Priority PRIORITY PRIORITY_LONG priority Nice NICE nice",
    ),
    Difference("AdminComment", "what Multiverse says of the job", "AdminComment admin_comment administrator"),
    Difference("the number of nodes of a job that waits", "`1-1` for a job without `-N`, which has one VM", "NumNodes"),
    Difference("why an ended job had waited, in sacct", "for its VM: `Licenses`", "sacct:Reason sacct:reason"),
    Difference(
        "the nodes of the partition",
        "the VMs, and `mvgate[1-250]`, which are powered down and run nothing",
        "Nodes TotalCPUs TotalNodes TRES NodeSets PriorityTier PRIO_TIER Default ResumeTimeout SuspendTimeout"
        " SuspendTime",
    ),
    Difference(
        "a node",
        "what the VM has: its memory, one socket, an address and a host name of its own, its own kernel",
        "AvailableFeatures ActiveFeatures ACTIVE_FEATURES AVAIL_FEATURES active_features MEMORY RealMemory real_memory"
        " FREE_MEM FreeMem free_memory CPU_LOAD CPULoad cpu_load HOSTNAMES NodeHostName hostname NODE_ADDR NodeAddr"
        " address S:C:T SOCKETS Sockets sockets CORES CoresPerSocket cores OS operating_system CfgTRES tres boot_time"
        " slurmd_start_time last_busy 0 1",
    ),
)

MEASURED = """
AllocNode:Sid SrunHost:Pid Used Free .*_time last_sched_evaluation elapsed eligible end start submission count
(micro)?seconds (Max|Ave|Min)\\w+ TRESUsage\\w+ \\w+RAW \\w+Raw DBIndex task
"""
"""Fields with other values each time. `task` is the one that used the most."""
