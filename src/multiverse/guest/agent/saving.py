"""A job whose VM is saved: its processes are frozen, cut off from Slurm, and taken over by the job's next run.

A job of several VMs has its batch script in one of them. The others have processes of steps of srun at most, in a group
of the job that slurmstepd makes with the first step. A step that began while the VMs were being frozen is frozen as the
job is cut off. Slurm starts nothing in these VMs for the next run: `attach` lets the processes go on where they are.

Needs control groups of version 2, with a group `job_ID` for the job, as Slurm's task/cgroup makes them. Order of calls:

1. `freeze` stops all processes of the job, and writes the network file systems back. `thaw` undoes it.
2. `cut` keeps all packets of other machines from the job, and kills the slurmstepd of the batch script, and that of the
   extern step. Slurm is then told to requeue the job. An srun must not hear of that: it would end its step.
3. `rest` ends slurmd and munged, so that nothing of the guest waits for other machines when it wakes up.
4. After the VM was restored: `wake` moves the frozen processes out of the way of the next run, and starts new daemons.
5. The next run's slurmstepd starts the program `attach_program` in place of the batch script. It writes its pid into
   ATTACH, and waits. `attach` moves the frozen processes into its control group, where they go on. The program forwards
   signals to the old shell, and ends as that ends.

A checkpoint is the state of a frozen job that goes on (`thaw`). In a VM that is restored from it the calls from `cut`
on follow. Files on network file systems are then newer than the job: the output of its script is cut back to what it
was, and a job that writes other such files is refused a checkpoint, unless its user has said that this does no harm.

The slurmstepds of steps of srun go on too, in a group of their own: srun gets the output and the exit code from them.
They are killed as the job ends. Until then they must not harm the new run, whose steps have the same numbers:

- slurmctld would take the end of such a step for that of the new run's step. So they are refused connections to it, and
  try for ever. They are known by their pids, because slurmstepd leaves its control group before it tells that end. In a
  job of several VMs they tell it to the slurmd of another one, which asks the slurmstepd of the new step: they are
  refused connections to slurmd, too.
- slurmstepd knows the groups of its step by their paths, looks into them, and kills what is in them as it ends. The new
  run's groups have these paths. So the paths in the memory of old slurmstepds are changed to those of empty groups.
"""

# ruff: noqa: PTH106, PTH108, PTH115, PTH116, PTH119, PTH123, PTH208

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import time
from typing import Any

from multiverse.guest.agent.packets import drop_incoming, refuse_ports
from multiverse.guest.agent.system import (
    CGROUPS,
    GuestAgentError,
    kill_and_wait,
    make_directory,
    make_pipe,
    read,
    suppress,
    write,
    write_kernel_file,
)
from multiverse.guest.agent.usage import PERIOD, SPOOLS, GroupUsage, make_slurmstepd_look

# Named pipes, and the program of the next run: see there.
ATTACH, ANSWER, ATTACHER = (f"/run/multiverse/attach{end}" for end in ("", "-answer", "-program"))
SLURM_CONFS = "/etc/slurm"
STEP, EMPTY = "step_", "gone_"  # how the names of groups begin; equally long
MOST_MEMORY = 16 << 20  # bytes of a mapping of slurmstepd that can hold paths: stacks of threads are not much smaller
SLURMCTLD_PORT, SLURMD_PORT = 6817, 6818  # Slurm's defaults
FREEZE_TIMEOUT = 20.0  # seconds until every process has stopped: one may wait for a file server
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def job_groups() -> list[str]:
    """The control groups of the jobs that slurmstepd has made here."""
    found = []
    for parent, directories, _ in os.walk(f"{CGROUPS}/system.slice"):
        found += [f"{parent}/{name}" for name in directories if name.startswith("job_")]
        directories[:] = [name for name in directories if not name.startswith("job_")]
    return sorted(found)


def processes_in(group: str) -> list[int]:
    """The pids of a control group and of the groups below it."""
    found = []
    for directory, _, _ in os.walk(group):
        with suppress(OSError):
            found += [int(word) for word in read(f"{directory}/cgroup.procs").split()]
    return found


def parent_of(pid: int) -> int:
    return int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])


def shell_of(job: str) -> int:
    """The pid of the first process of the batch script. Raises GuestAgentError if there is none."""
    daemons = processes_in(f"{job}/step_batch/slurm")
    tasks = [pid for pid in processes_in(f"{job}/step_batch/user") if parent_of(pid) in daemons]
    if not tasks:
        raise GuestAgentError("the batch script of the job was not found")
    return min(tasks)


def is_stopped(pid: int) -> bool:
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def is_frozen(group: str) -> bool:
    return "frozen 1" in read(f"{group}/cgroup.events")


def set_frozen(group: str, frozen: bool) -> None:
    """Freeze or thaw a group, and wait until all of its processes are. Raises GuestAgentError."""
    write_kernel_file(f"{group}/cgroup.freeze", "1" if frozen else "0")
    deadline = time.monotonic() + FREEZE_TIMEOUT
    while f"frozen {int(frozen)}" not in read(f"{group}/cgroup.events"):
        if time.monotonic() > deadline:
            raise GuestAgentError(f"a process of the job does not stop: see {group}")
        time.sleep(0.005)


class SavedJob:
    """The processes of the VM's job, from the freezing on. `shell` is the first process of the batch script."""

    def __init__(self) -> None:
        self.stopped: list[int] = []  # processes that were stopped (SIGSTOP) as the job was frozen
        self.group = ""  # that of the job; empty: nothing is frozen
        self.script = True  # whether the VM has the batch script
        self.empty = False  # whether it was frozen without having any process of the job
        self.shell = 0
        self.status: int | None = None  # the wait status of the shell, once it has ended
        self.closed: int | None = None  # the descriptor that keeps packets from the job
        self.run_is_over = False  # the job was cut off from its run, and no other one has taken the processes over
        self.daemons: set[int] = set()  # the slurmstepds of earlier runs' steps
        self.refused: list[int] = []  # the descriptors that keep them from slurmctld
        self.asking = self.answering = -1  # the named pipes
        self.attacher = 0  # the pid of the next run's program
        self.attacher_end = -1  # a descriptor that can be read once it has ended
        self.permitted = self.attached = False  # whether the old processes may go on, and whether they do
        self.usage: GroupUsage | None = None
        self.checkpoint = False  # whether another VM may have gone on from this state
        self.outputs: list[Output] = []  # the files that the script of a checkpoint writes its output to

    @property
    def held(self) -> str:
        """The group below the job's that the frozen processes wait in for the next run."""
        return f"{self.group}/multiverse-held"

    @property
    def steps(self) -> str:
        """The group below the job's of the slurmstepds of earlier runs' steps."""
        return f"{self.group}/multiverse-steps"

    @property
    def watched(self) -> list[int]:
        """The descriptors to watch: call `attend` when one can be read."""
        return [fd for fd in (self.asking, self.attacher_end) if fd >= 0]

    @property
    def period(self) -> float | None:
        """Milliseconds after which `attend` is to be called in any case."""
        return None if self.usage is None else PERIOD * 1000

    def freeze(
        self, sync_timeout: float, script: bool = True, checkpoint: bool = False, shared_files: bool = False
    ) -> None:
        """Freeze the job, and write all file systems back within `sync_timeout` seconds. After an error the job goes
        on. `script`: the VM has the batch script. Raises GuestAgentError if there is no job then, or more than one, and
        for a `checkpoint`, unless `shared_files`, if it has files of network file systems open for writing besides the
        output of its script."""
        groups = job_groups()
        if len(groups) > 1 or (script and not groups):
            raise GuestAgentError(f"there are {len(groups)} jobs with control groups in this VM")
        group = groups[0] if groups else ""
        try:
            self.stopped = [pid for pid in processes_in(group) if is_stopped(pid)] if group else []
            if group:
                set_frozen(group, True)
            within(sync_timeout, os.sync, "the file systems were not written back")
            self.outputs = outputs_of(self.shell or shell_of(group)) if checkpoint else []
            if checkpoint and not shared_files:
                refuse_writers(group, self.outputs)
            self.checkpoint, self.group, self.script, self.empty = checkpoint, group, script, not group
        except (OSError, GuestAgentError):
            if group:
                set_frozen(group, False)
            raise

    def thaw(self) -> None:
        """Let the job go on after all. Nothing is done for a job that is not frozen. Raises GuestAgentError for a job
        that was cut off: its next run may have begun in another VM."""
        if self.run_is_over:
            raise GuestAgentError("the job was cut off from its run")
        self.empty = False
        if self.group:
            self.let_packets_in()
            set_frozen(self.group, False)
            if not self.attached:
                self.group = ""

    def cut(self) -> None:
        """Keep packets from the job, and kill the slurmstepd of the batch script and of the extern step. Again is
        success. Raises GuestAgentError, before anything is killed: also if the job is not frozen, for a late call must
        not harm a job that goes on."""
        if not self.run_is_over and not self.empty and not (self.group and is_frozen(self.group)):
            raise GuestAgentError("no job is frozen in this VM")
        if self.script:
            self.shell = self.shell or shell_of(self.group)
        else:
            self.freeze_late_steps()
        if self.closed is None and self.group:
            try:
                self.closed = drop_incoming(self.group)
            except OSError as error:
                raise GuestAgentError(f"the kernel of the image cannot keep packets from the job: {error}") from error
        self.run_is_over = True
        # slurmd asks each slurmstepd that has a socket whether it goes on, and removes the script of one that does not
        # answer, which the job may read. Those of other steps are frozen, and stay.
        for job in job_groups():
            suffix = f"_{job.rpartition('_')[2]}."
            for place in os.listdir(SPOOLS):
                for name in os.listdir(f"{SPOOLS}/{place}") if place.startswith("slurmd") else ():
                    if suffix in name:
                        os.unlink(f"{SPOOLS}/{place}/{name}")
            # The slurmstepd first: it would report the end of the program that stands for the shell.
            for pid in [*processes_in(f"{job}/step_batch/slurm"), *processes_in(f"{job}/step_extern")]:
                kill_and_wait(pid)
        self.forget_attacher(kill=True)

    def freeze_late_steps(self) -> None:
        """Freeze what has begun in this VM since it was frozen."""
        for group in job_groups():
            set_frozen(group, True)
            self.group, self.empty = group, False

    def wake(self, program: str) -> None:
        """Let the frozen processes wait in groups of their own, so that the next run of the job can make its own
        groups, below that of the job, which goes on to limit the memory of both. Again is success."""
        if self.group:
            self.hold()
            write_kernel_file(f"{self.group}/cgroup.freeze", "0")
        make_directory("/run/multiverse")
        write(ATTACHER, program)
        if self.script:
            self.listen()

    def hold(self) -> None:
        """Move all processes of the job into the groups in which they wait."""
        places = (self.held, self.steps)
        for place in places:
            make_directory(place)
            write_kernel_file(f"{place}/cgroup.freeze", "1")
        left = True
        while left:  # none is started meanwhile: all are frozen
            left = False
            for directory, _, _ in os.walk(self.group):
                if directory not in places:
                    place = self.steps if directory.endswith("/slurm") else self.held
                    for pid in read(f"{directory}/cgroup.procs").split():
                        left = True
                        write_kernel_file(f"{place}/cgroup.procs", pid)
        self.daemons.update(processes_in(self.steps))
        self.refuse_slurm()
        for daemon in processes_in(self.steps):
            forget_groups(daemon, self.group)
        self.make_empty_groups()
        for directory, _, _ in os.walk(self.group, topdown=False):
            if directory not in (self.group, *places) and EMPTY not in directory:
                os.rmdir(directory)

    def refuse_slurm(self) -> None:
        """Keep the slurmstepds of earlier runs' steps from slurmctld and from the slurmds of other VMs, also those that
        have left their group."""
        before, self.refused = self.refused, []
        if self.daemons:
            for ports in (ports_of("slurmctldport", SLURMCTLD_PORT), ports_of("slurmdport", SLURMD_PORT)):
                self.refused += refuse_ports(CGROUPS, sorted(self.daemons), *ports)
        for fd in before:
            os.close(fd)

    def make_empty_groups(self) -> None:
        """Make a group for each group of an old step, with the same files."""
        for directory, _, _ in os.walk(self.group):
            if directory.startswith(f"{self.group}/{STEP}") and not re.search("/step_(batch|extern)", directory):
                empty = f"{self.group}/{EMPTY}{directory[len(self.group) + 1 + len(STEP) :]}"
                make_directory(empty)
                controllers = read(f"{directory}/cgroup.subtree_control").split()
                write_kernel_file(f"{empty}/cgroup.subtree_control", " ".join(f"+{each}" for each in controllers))

    def listen(self) -> None:
        """Make the named pipes. The job's user alone can use them."""
        if self.asking < 0:
            uid = os.stat(f"/proc/{self.shell}").st_uid
            self.asking, self.answering = make_pipe(ATTACH), make_pipe(ANSWER)
            for path in (ATTACH, ANSWER):
                os.chown(path, uid, -1)

    def attend(self) -> bool:
        """Know the program of the next run, when it has begun, and end what is left of the job with it. Whether the old
        processes have gone on because of that. Never blocks."""
        goes_on = False
        if self.asking >= 0:
            with suppress(BlockingIOError):
                for word in os.read(self.asking, 4096).split():
                    self.take_attacher(word)
                goes_on = self.permitted and not self.attached and self.attach()
        if self.usage is not None:
            with suppress(OSError):
                self.usage.look(at_once=False)
        if self.attacher and is_readable(self.attacher_end):
            was_attached = self.attached
            self.forget_attacher()
            if was_attached:
                self.end_steps()
        return goes_on

    def take_attacher(self, word: bytes) -> None:
        """Watch the process of that pid, if it is a task of the job's batch step. Any process of the job's user may
        have written that pid."""
        if self.attacher or not word.isdigit() or len(word) > 9:
            return
        pid = int(word)
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            if group_of(pid).startswith(f"{self.group}/step_batch/user/"):
                self.attacher, self.attacher_end = pid, handle
            else:
                os.close(handle)

    def forget_attacher(self, kill: bool = False) -> None:
        if self.usage is not None:
            self.usage.close()
            self.usage = None
        if self.attacher:
            if kill:  # and its child, which would go on to read what the next one is told
                children = [pid for pid in processes_in(self.group) if parent_of(pid) == self.attacher]
                for pid in [self.attacher, *children]:
                    kill_and_wait(pid)
            os.close(self.attacher_end)
        self.attacher, self.attacher_end = 0, -1
        self.permitted = self.attached = False

    def attach(self) -> bool:
        """Let the held processes go on in the control group of the next run's program, once that has begun. Whether
        they do now. Again is success, also for a job that was frozen once more: that is undone."""
        self.permitted = True
        if self.attached:
            self.thaw()
        if not self.script:
            return self.go_on_in_place()
        if not self.attacher:
            return False
        self.let_packets_in()
        begins = not self.attached
        if begins:
            self.cut_outputs_back()
            self.attached, self.run_is_over = True, False
            self.answer(str(self.shell))
        group = group_of(self.attacher)
        for one in processes_in(self.held):
            with suppress(ProcessLookupError):
                write_kernel_file(f"{group}/cgroup.procs", str(one))
        write_kernel_file(f"{self.steps}/cgroup.freeze", "0")
        if begins:
            self.continue_stopped()
        if self.usage is None:
            with suppress(OSError):  # accounting is not worth the job
                self.usage = GroupUsage(self.attacher, group)
        self.tell_end()
        return True

    def go_on_in_place(self) -> bool:
        """Let the processes of steps go on in a VM in which the next run starts nothing."""
        self.let_packets_in()
        begins, self.attached, self.run_is_over = not self.attached, True, False
        for place in (self.held, self.steps) if self.group else ():
            write_kernel_file(f"{place}/cgroup.freeze", "0")
        if begins:
            self.continue_stopped()
        return True

    def continue_stopped(self) -> None:
        """The earlier run may have been suspended as it was frozen. Slurm does not know that of the next one."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped = []

    def cut_outputs_back(self) -> None:
        """Cut off what a run that was lost has written to the output of the script after this state was made. A job
        goes on without that, too: then its output has these lines twice."""
        with suppress(GuestAgentError):
            for one in self.outputs:
                within(SHORTEN_TIMEOUT, one.shorten, "the output was not shortened")

    def let_packets_in(self) -> None:
        if self.closed is not None:
            os.close(self.closed)
            self.closed = None

    def ended(self, pid: int, status: int) -> None:
        """A process that this one inherited has ended."""
        if pid == self.shell:
            self.status = status
            self.tell_end()
        if pid in self.daemons:  # another process may get this pid
            self.daemons.remove(pid)
            self.refuse_slurm()

    def tell_end(self) -> None:
        if self.attached and self.status is not None:
            self.end_steps()
            if self.usage is not None:
                with suppress(OSError):
                    self.usage.look()
                    make_slurmstepd_look(self.group.rpartition("_")[2])
            code = os.waitstatus_to_exitcode(self.status)
            self.answer(f"exit {code}" if code >= 0 else f"signal {-code}")

    def end_in_place(self) -> None:
        """End what is left of the job in a VM in which Slurm has started nothing for this run, and ends nothing."""
        if self.attached and not self.script and self.group:
            write_kernel_file(f"{self.group}/cgroup.kill", "1")

    def end_steps(self) -> None:
        for pid in self.daemons:
            with suppress(FileNotFoundError, ProcessLookupError):
                if read(f"/proc/{pid}/comm").strip() == "slurmstepd":
                    os.kill(pid, signal.SIGKILL)

    def answer(self, line: str) -> None:
        """Tell the program of the next run a line, after one for its child."""
        os.write(self.answering, f"\n{line}\n".encode())


def forget_groups(pid: int, job: str) -> None:
    """Change the paths of groups of steps of this job, in the memory of a slurmstepd that is frozen, to those of empty
    groups."""
    known, changed = (f"/{os.path.basename(job)}/{name}".encode() for name in (STEP, EMPTY))
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        with open(f"/proc/{pid}/maps") as file:
            mappings = [line.split() for line in file]
        for place, access, _, _, _, *name in mappings:
            first, last = (int(word, 16) for word in place.split("-"))
            if access.startswith("rw") and name in ([], ["[heap]"]) and last - first <= MOST_MEMORY:
                data = os.pread(memory, last - first, first)
                at = -1
                while (at := data.find(known, at + 1)) >= 0:
                    os.pwrite(memory, changed, first + at)
    finally:
        os.close(memory)


def ports_of(wanted: str, default: int) -> tuple[int, int]:
    """The first and the last port of slurmctld or slurmd, by the key `wanted` in the configuration of this node."""
    first = last = default
    for name in os.listdir(SLURM_CONFS):
        for line in read(f"{SLURM_CONFS}/{name}").splitlines() if name.endswith(".conf") else ():
            key, _, value = line.partition("#")[0].partition("=")
            numbers = value.strip().split("-")
            if key.strip().lower() == wanted and all(each.isdigit() for each in numbers):
                first, last = int(numbers[0]), int(numbers[-1])
    return first, last


def group_of(pid: int) -> str:
    return CGROUPS + read(f"/proc/{pid}/cgroup").partition("::")[2].strip()


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def become_subreaper() -> None:
    """Inherit the orphans among the descendants of this process (prctl(2)), also where it is not process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def within(timeout: float, work: Any, problem: str) -> None:
    """Do something in a process of its own, because a file system whose server is away may take for ever. Raises
    GuestAgentError if it takes longer than `timeout` seconds."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    deadline = time.monotonic() + timeout
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise GuestAgentError(f"{problem} within {timeout:.0f} s")
        time.sleep(0.005)


# --- files on network file systems -------------------------------------------------------------------

# The types of file systems that are in the VM, and so in its state. Any other one may be shared with other machines.
LOCAL_TYPES = (
    "bpf", "btrfs", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "ext2", "ext3", "ext4",
    "hugetlbfs", "iso9660", "mqueue", "overlay", "proc", "pstore", "ramfs", "securityfs", "squashfs", "sysfs", "tmpfs",
    "tracefs", "vfat", "xfs",
)  # fmt: skip
SHORTEN_TIMEOUT = 20.0  # seconds for a file server
MOST_NAMED = 3  # files that a refusal names


class Output:
    """A file on a network file system that the script writes its output to, as it was when the job was frozen."""

    def __init__(self, pid: int, path: str) -> None:
        self.path, info = path, os.stat(path)
        self.identity, self.size = (info.st_dev, info.st_ino), info.st_size
        owner = os.stat(f"/proc/{pid}")
        self.uid, self.gid = owner.st_uid, owner.st_gid

    def shorten(self) -> None:
        """Cut off what was written since. For this process alone: it becomes the user, whom the server lets write."""
        os.setgid(self.gid)
        os.setuid(self.uid)
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        # The kernel sends no size that it believes to be the file's, and may believe this one.
        os.ftruncate(file, self.size + 1)
        os.ftruncate(file, self.size)


def network_mounts(pid: int) -> dict[str, str]:
    """The ids of the network file systems that a process sees, and their devices."""
    found = {}
    for line in read(f"/proc/{pid}/mountinfo").splitlines():
        mount, _, device, *rest = line.split()
        if rest[rest.index("-") + 1] not in LOCAL_TYPES:
            found[mount] = device
    return found


def written_by(pid: int) -> dict[str, str]:
    """The files on network file systems that a process can write without opening them again: their paths, by what names
    its descriptors and mappings of them."""
    found = {}
    mounts = network_mounts(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            facts = dict(line.split(":", 1) for line in read(f"/proc/{pid}/fdinfo/{name}").splitlines() if ":" in line)
            if int(facts["flags"], 8) & os.O_ACCMODE != os.O_RDONLY and facts["mnt_id"].strip() in mounts:
                found[f"/proc/{pid}/fd/{name}"] = os.readlink(f"/proc/{pid}/fd/{name}")
    devices = set(mounts.values())
    for line in read(f"/proc/{pid}/maps").splitlines():
        place, access, _, device, _, *path = line.split(None, 5)
        numbers = ":".join(str(int(each, 16)) for each in device.split(":"))
        if access[1] == "w" and access[3] == "s" and numbers in devices and path:
            found[f"/proc/{pid}/map_files/{place}"] = path[0]
    return found


def outputs_of(shell: int) -> list[Output]:
    """The output and the error output of the script, as far as they are files on network file systems."""
    written = written_by(shell)
    return [Output(shell, path) for path in (f"/proc/{shell}/fd/1", f"/proc/{shell}/fd/2") if path in written]


def refuse_writers(group: str, outputs: list[Output]) -> None:
    """Raise GuestAgentError if processes of that group can write files on network file systems, beside these."""
    found = dict[str, None]()
    for pid in processes_in(group):
        for place, path in written_by(pid).items():
            info = os.stat(place)
            if (info.st_dev, info.st_ino) not in [one.identity for one in outputs]:
                found[path] = None
    if found:
        named = ", ".join(list(found)[:MOST_NAMED]) + (
            f" and {len(found) - MOST_NAMED} more" * (len(found) > MOST_NAMED)
        )
        raise GuestAgentError(f"it writes to shared files: {named}")
