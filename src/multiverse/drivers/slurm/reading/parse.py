"""Converts records of jobs and nodes to values of the model, and the comments by which jobs ask for more. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from multiverse.config import OverflowSettings
from multiverse.core.model.basics import CloneKind, Size, is_pin
from multiverse.core.model.job import CheckpointWish, Job, JobRef, JobState, Node, NodeState, Request, SaveWish
from multiverse.drivers.slurm.reading.preemption import BY_PARTITION, BY_QOS
from multiverse.drivers.slurm.site import gate
from multiverse.drivers.slurm.site.conf import MEMORY_PER_CPU, NEVER, TimeLimits
from multiverse.drivers.slurm.site.gate import MOVED_FROM, PLACE

Record = Mapping[str, Any]
Uses = tuple[tuple[str, int], ...]

_BEHIND_THE_GATE = 1 << 137  # added to a rank, more than any rank is
PENDING_WORDS = frozenset(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"))
_FAILED_WORDS = ("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
ENDED_WORDS = frozenset((*_FAILED_WORDS, "CANCELLED", "COMPLETED", "PREEMPTED", "REVOKED"))
_STATES = {
    JobState.COMPLETING: frozenset(("COMPLETING", "STAGE_OUT")),
    JobState.PENDING: PENDING_WORDS,
    JobState.SUSPENDED: frozenset(("SUSPENDED", "STOPPED")),
    JobState.ENDED: ENDED_WORDS,
}
# Reasons of jobs that may get VMs: they wait for their turn, or Slurm has not checked them yet. With BeginTime the
# begin time itself decides, with Reservation the reservations. Any other reason is a dependency, a hold, a closed
# partition or a limit that is not counted here: such a job waits, because its VM would be idle.
_NODES_AWAITED = ("Resources", "ReqNodeNotAvail", "NodeDown", "PartitionConfig", "BadConstraints")
_FREE_REASONS = frozenset(("", "None", "Priority", "BeginTime", "Reservation", *_NODES_AWAITED))
_GATE_REASONS = _FREE_REASONS | {"Licenses"}  # of jobs at the gate, which wait for its licence; others are counted
_LASTING_HOLDS = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
# The first state counts that has one of a node's words. slurmctld ends the jobs of a node that is DOWN. Jobs run on
# until SlurmdTimeout on a node that it does not reach, and as long as they like on a drained one.
_NODE_STATES = {
    NodeState.DOWN: frozenset(("DOWN",)),
    NodeState.SILENT: frozenset(("NOT_RESPONDING", "POWERED_DOWN")),
    NodeState.DRAINED: frozenset(("DRAIN", "DRAINED", "DRAINING", "FAIL", "ERROR", "INVALID_REG")),
    NodeState.BUSY: frozenset(("ALLOCATED", "MIXED", "COMPLETING")),
    NodeState.IDLE: frozenset(("IDLE",)),
}
INVALID_USER = "Invalid user"  # squeue 22.05 says so to a user that it cannot name, shows no job, and exits with 0
RESERVED = frozenset(("RESERVED", "MAINT", "MAINTENANCE"))  # of a node in a reservation that has begun
_KINDS = frozenset(kind.value for kind in CloneKind)
_FULL = frozenset(["Resources", "Priority"])  # reasons of jobs that wait for nodes of their own partition
_NO_THREADS = 0x7FFE  # an unset --thread-spec in 24.11's JSON: NO_VAL16 without its highest bit
_NO_SOCKETS = 0xFFFE  # an unset number of sockets (NO_VAL16)
_SKEW = 5  # seconds by which slurmctld's clock may be ahead of this machine's
REQUEUE_DELAY = 130  # seconds; a requeued job may start 121 s later (job_mgr.c: credential lifetime + 1)
_MIB = {"": 1, "M": 1, "G": 1024, "T": 1 << 20}
_MBIT = {"": 1, "M": 1, "G": 1000}
_SECONDS = {"S": 1, "M": 60, "H": 3600, "D": 86400}
# The units of each key in the comment of a job. A key in _BARE may have no value.
_UNITS = {"mem-per-task": _MIB, "net": _MBIT, "per-host": {"": 1}, "save": _SECONDS, "checkpoint": _SECONDS}
_BARE = ("save", "restart", "shared-files")
_SPACES = re.compile(r"[ \t\n\v\f\r]+")  # that separate words for Lua; for Python also a no-break space would


@dataclass(frozen=True, slots=True)
class Wishes:
    """Requests in the comment of a job, because Slurm has no option for them: words such as `vm:net=1G,per-host=2`.

    multiverse.lua reads the same (`wishes` there), and refuses at submission what cannot be understood. It makes the
    job's memory per node of `mem-per-task`, so that Slurm counts and limits it: nothing here depends on that key.
    """

    net: int = 0  # bandwidth of each VM in Mbit/s; 0: not asked for
    per_host: int = 0  # how many VMs of the job may be on one host; 0: not asked for
    save: SaveWish | None = None
    checkpoint: CheckpointWish | None = None
    problem: str = ""  # why the comment cannot be understood


def read_wishes(comment: str) -> Wishes:
    if "vm:" not in comment:
        return Wishes()
    found: dict[str, int] = {}
    for word in _SPACES.split(comment):
        for wish in word.removeprefix("vm:").split(",") if word.startswith("vm:") else ():
            key, _, text = wish.partition("=")
            value = 0 if wish in _BARE else _quantity(text, _UNITS.get(key, {}))
            if wish and (value is None or key in found):
                return Wishes(problem=f"vm:{wish} in --comment cannot be understood: submit the job again without it")
            found[key] = value or 0
    save = SaveWish(found["save"], "restart" in found) if "save" in found else None
    checkpoint = CheckpointWish(found["checkpoint"], "shared-files" in found) if "checkpoint" in found else None
    if "restart" in found and save is None:
        return Wishes(problem="vm:restart in --comment is for jobs that are saved: submit the job with vm:save,restart")
    if "shared-files" in found and checkpoint is None:
        example = "vm:checkpoint=6h,shared-files"
        return Wishes(problem=f"vm:shared-files in --comment is for jobs with checkpoints: submit it with {example}")
    return Wishes(found.get("net", 0), found.get("per-host", 0), save, checkpoint)


def _quantity(text: str, units: dict[str, int]) -> int | None:
    match = re.fullmatch(r"(\d{1,9})([A-Za-z]?)", text, re.ASCII)
    times = units.get(match[2].upper()) if match else None
    return (int(match[1]) * times or None) if match and times else None


@dataclass(frozen=True, slots=True)
class SiteNames:
    """Names and settings of the site."""

    site: str
    partition: str
    gate_feature: str
    licence: str
    memory_per_cpu: int = MEMORY_PER_CPU  # DefMemPerCPU in MiB
    per_account: bool = False  # each account has templates of its own
    time_limits: TimeLimits = TimeLimits()  # of Multiverse's partitions
    overflowing: tuple[OverflowSettings, ...] = ()  # partitions of physical nodes
    preempt_type: str = ""  # BY_QOS or BY_PARTITION, if jobs preempt each other

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions whose jobs are read."""
        return self.partition, *(one.partition for one in self.overflowing)

    def overflow_of(self, partition: str) -> OverflowSettings | None:
        return next((one for one in self.overflowing if one.partition == partition), None)


# --- values ----------------------------------------------------------------------------------------

_IO_ERROR = 4021  # ESLURMD_IO_ERROR of slurm_errno.h, the same number in all releases so far


def number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def words(value: Any) -> tuple[str, ...]:
    return tuple(word for word in str(value or "").split(",") if word)


def exit_code(status: int) -> int:
    """An exit code as a shell shows it: 128 + signal for a killed job. `status` is the raw wait status."""
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF


def was_unopened(status: int) -> bool:
    """Whether slurmstepd could not open a batch job's input, output or error file, and so did not start its script.

    It then gives the job the error's number instead of a wait status (_fork_all_tasks in mgr.c). From 23.02 on squeue
    prints only what the wait macros make of that number, 0:53. No more can be told of a process that signal 53 ended.
    """
    return status in (_IO_ERROR, _IO_ERROR & 0x7F)


def features(text: str, gate_feature: str) -> tuple[tuple[str, ...], str | None]:
    """The features that a job's user asked for, and the tag of the nodes that the job is pinned to, if it is."""
    all_of = [word.strip() for word in re.split(r"[&,]", "" if text == "(null)" else text) if word.strip()]
    pins = [word for word in all_of if is_pin(word)]
    own = (word for word in all_of if word != gate_feature and not is_pin(word) and not word.startswith(MOVED_FROM))
    return tuple(dict.fromkeys(own)), pins[-1] if pins else None


def moved_from(text: str) -> str:
    """The partition that a job with these features was moved from; empty if it was not."""
    all_of = (word.strip() for word in re.split(r"[&,]", text))
    return next((word.removeprefix(MOVED_FROM) for word in all_of if word.startswith(MOVED_FROM)), "")


# --- jobs ------------------------------------------------------------------------------------------


def newest(found: Iterable[Job]) -> dict[str, Job]:
    """Jobs by id. The newer of two counts: Slurm keeps an ended job until MinJobAge, though a new job has its id."""
    by_id: dict[str, Job] = {}
    for job in found:
        other = by_id.get(job.ref.job_id)
        if other is None or other.ref.submitted <= job.ref.submitted:
            by_id[job.ref.job_id] = job
    return by_id


def is_ours(record: Record, names: SiteNames) -> bool:
    return not set(names.partitions).isdisjoint(words(record["partition"]))


def is_waiting(record: Record, names: SiteNames) -> bool:
    """Whether a job waits at the gate, or for physical nodes, and is not held."""
    return (
        "PENDING" in words(record["job_state"])
        and bool(number(record["priority"]))
        and features(str(record.get("features") or ""), names.gate_feature)[1] is None
    )


def is_gated(record: Record, names: SiteNames) -> bool:
    """Whether a job has what keeps it at the gate: its partition, its feature and its licence."""
    return (
        names.partition in words(record["partition"])
        and names.gate_feature in re.split(r"[&,]", str(record.get("features") or ""))
        and gate.has_licence(str(record.get("licenses") or ""), names.licence)
    )


def rank(priority: int, submitted: int, job_id: str) -> int:
    """Slurm's own order in a partition as one number, lower first: priority, submit time, job id (job_mgr.c,
    sort_job_queue2). It depends on the job alone, so that it does not change when other jobs come and go."""
    base, _, task = job_id.partition("_")
    return ((0xFFFFFFFF - priority) << 104) | submitted << 64 | int(base) << 32 | int(task or 0)


def changes_at(record: Record, names: SiteNames, now: float) -> float:
    """The Unix time from which on `job` may show an unchanged record differently; infinity if never."""
    eligible = number(record.get("eligible_time")) or 0
    waits = [one.min_wait for one in names.overflowing]
    times = (eligible, (number(record.get("end_time")) or 0) - _SKEW, *(eligible + wait for wait in waits))
    return min((time for time in times if time > now), default=inf)


def job_id_of(record: Record) -> str:
    """The id of a record's job, or of its task of an array."""
    task = record.get("array_task_id")
    return str(record["job_id"]) if task is None else f"{record['array_job_id']}_{task}"


def job(record: Record, names: SiteNames, now: float, uses: Uses = ()) -> Job:
    """The job of a record, or its task of an array. `now` is Unix time; `uses` are limits with the amounts that it
    takes."""
    job_id = job_id_of(record)
    states = [word.upper() for word in words(record["job_state"])]
    # An unknown state is taken for that of a job with nodes (CONFIGURING, RESIZING, SIGNALING and later additions):
    # taken for an ended job, it would end the job's VM.
    state = next((state for state, known in _STATES.items() if not known.isdisjoint(states)), JobState.RUNNING)
    restarts, submitted = number(record["restart_cnt"]) or 0, number(record["submit_time"]) or 0
    end = number(record.get("end_time")) or 0
    if state is JobState.COMPLETING and restarts and (end == 0 or end > now + _SKEW):
        # The job was requeued and its previous run is still completing. Slurm has counted the restart already, and
        # shows no end time or that of the next run. The next run gets a new submit time when it is pending.
        restarts -= 1
    partition, reason = str(record["partition"]), str(record.get("state_reason") or "")
    own, pinned = features(str(record.get("features") or ""), names.gate_feature)
    priority, begin = number(record["priority"]) or 0, number(record.get("eligible_time")) or 0
    dependency = str(record.get("dependency") or "")
    # The delay that Slurm adds after a requeue counts by itself (`delayed_until`): whether it is waited for depends on
    # who caused the requeue. A begin time of the user has passed by then.
    delayed = restarts > 0 and 0 < begin - submitted <= REQUEUE_DELAY
    early = begin > now and not delayed
    held = priority == 0 and not slurms_hold(str(record.get("state_description") or reason))
    batch = number(record.get("batch_flag")) != 0
    nodes = hosts(str(record.get("nodes") or ""))
    if gate.on_gate(nodes) and state is JobState.RUNNING:
        # The job got past the licence. It runs nothing, and is put back at the gate like a job that left it.
        state, nodes = JobState.PENDING, ()
        gated = False
    else:
        gated = is_gated(record, names) and pinned is None
    here = next(filter(None, map(names.overflow_of, words(partition))), None)
    origin = here.partition if here else moved_from(str(record.get("features") or ""))
    # Slurm's reason may be outdated. Of a limit that is counted here, the count decides until the job is pinned.
    counted = gated and reason in {limit.partition(":")[0] for limit, _ in uses}
    usual = reason in (_GATE_REASONS if gated else _FREE_REASONS)
    free = priority > 0 and not early and (counted or usual) and "(unfulfilled)" not in dependency
    if here:  # the partition may have room for it, unless it has waited for its nodes for some time
        free = free and reason in _FULL and pinned is None and now >= begin + here.min_wait
    request, problem = _request(record, own, names, origin)
    status, array = number(record.get("exit_code")) or 0, str(number(record.get("array_job_id")) or "")
    order = rank(priority, submitted, job_id) + (_BEHIND_THE_GATE if here else 0)
    return Job(
        ref=JobRef(job_id, submitted, restarts),
        name=str(record.get("name") or ""),
        uid=int(record["user_id"]),
        state=state,
        request=request,
        problem=problem,
        reason="" if reason == "None" else reason,
        rank=order if state is JobState.PENDING else 0,
        eligible=state is not JobState.PENDING or free,
        held=state is JobState.PENDING and held,
        gated=gated,
        pinned=pinned,
        nodes=nodes,
        result=states[0] if state is JobState.ENDED else "",
        exit_code=exit_code(status),
        unopened=state is JobState.ENDED and batch and was_unopened(status),
        work_dir=str(record.get("current_working_directory") or ""),
        uses=uses if state is JobState.PENDING else (),
        array=array,
        other_id=str(record["job_id"]) if array and array != str(record["job_id"]) else "",
        limit=names.time_limits.of(number(record.get("time_limit"))),
        batch=batch,
        script_node=str(record.get("batch_host") or "") if batch else "",
        requeues=all(number(record.get(key)) != 0 for key in ("requeue", "batch_flag")),
        # Slurm adds the time that a job was suspended to its end when the job is resumed.
        ends=end + names.time_limits.beyond if state is JobState.RUNNING and 0 < end < NEVER else None,
        deadline=end if state is JobState.RUNNING and 0 < end < NEVER else None,
        origin=origin,
        at_origin=here is not None,
        account=str(record.get("account") or ""),
        delayed_until=float(begin) if delayed and begin > now and state is JobState.PENDING else None,
        preempt_class=_preempt_class(record, names, origin or partition),
    )


def _preempt_class(record: Record, names: SiteNames, partition: str) -> str:
    by = {BY_QOS: str(record.get("qos") or ""), BY_PARTITION: partition}
    return by.get(names.preempt_type, "")


def slurms_hold(reason: str) -> bool:
    """Whether Slurm itself holds a job of priority 0 because no node has its feature any more.

    Multiverse releases such a job. It does not release jobs that a user or an operator holds, or that Slurm holds after
    a failed launch or too many requeues. squeue shows the description, if there is one, in place of the reason.
    """
    return reason not in _LASTING_HOLDS and not reason.startswith(("job requeued in ", "launch failed"))


# --- requests --------------------------------------------------------------------------------------


def _request(record: Record, own: tuple[str, ...], names: SiteNames, origin: str) -> tuple[Request | None, str]:
    wishes = read_wishes(str(record.get("comment") or ""))
    rule = names.overflow_of(origin)
    wanted = tuple(word for word in own if rule is None or word != rule.constraint)
    problem = _problem(record, wanted, names, origin) or wishes.problem or (origin and _unlike_a_vm(record))
    if problem:
        return None, problem
    nodes = max(number(record.get("node_count")) or 1, 1)
    cpus = _cpus(record, nodes)
    per_node, per_cpu = number(record.get("memory_per_node")), number(record.get("memory_per_cpu"))
    # --mem=0 requests all memory of a node, and every job gets all memory of its VM.
    memory = per_node or (per_cpu or names.memory_per_cpu) * cpus
    request = Request(
        nodes=nodes,
        size=Size(cpus, memory, number(record.get("minimum_tmp_disk_per_node")) or 0, wishes.net),
        image=next(iter(_images(wanted)), None),
        kind=next((CloneKind(word) for word in own if word in _KINDS), None),
        placement=next((word.removeprefix(PLACE) for word in own if word.startswith(PLACE)), None),
        features=own,
        account=str(record.get("account") or "") if names.per_account else "",
        per_host=wishes.per_host,
        sockets=_sockets(record, nodes, cpus),
        save=wishes.save,
        checkpoint=wishes.checkpoint,
    )
    return request, ""


def _images(own: Iterable[str]) -> list[str]:
    """A job's features that are no kind of clone and no placement policy. Only the hosts know which images exist."""
    return [word for word in own if word not in _KINDS and not word.startswith(PLACE)]


def _sockets(record: Record, nodes: int, cpus: int) -> int:
    """Sockets of each node: multiverse.lua has made the CPUs a multiple of them (`sockets_of` there). One socket if an
    operator has changed the CPUs to another number."""
    asked, each = _word(record, "sockets_per_node"), _word(record, "tasks_per_socket")
    sockets = max(asked, -(-_side_by_side(record, nodes) // each) if each else 1, 1)
    return sockets if cpus % sockets == 0 else 1


def _word(record: Record, key: str) -> int:
    """A number that squeue's table shows as a word, `*` if it is not set; 0 then."""
    value = record.get(key)
    found = int(value) if isinstance(value, str) and value.isdigit() else number(value)
    return found if found and found < _NO_SOCKETS else 0


def _cpus(record: Record, nodes: int) -> int:
    """CPUs of each node. `cpus_per_task` is null in 22.05's JSON, so it is computed from the totals."""
    cpus, tasks = number(record.get("cpus")) or 1, number(record.get("tasks")) or 1
    per_task = max(number(record.get("cpus_per_task")) or 1, cpus // tasks, 1)
    here = _side_by_side(record, nodes) * per_task
    return max(-(-cpus // nodes), here, number(record.get("minimum_cpus_per_node")) or 1)


def _side_by_side(record: Record, nodes: int) -> int:
    """The number of tasks on a node with CPUs of their own. With --overcommit all tasks share the CPUs of one: Slurm
    shows the option nowhere, but without it a job of more tasks than CPUs starts on no node. With --ntasks-per-node
    too, Slurm uses no node with fewer CPUs than that (can_job_run_on_node in select/cons_tres)."""
    cpus, tasks = number(record.get("cpus")) or 1, number(record.get("tasks")) or 1
    tasks_per_node = number(record.get("tasks_per_node")) or 0
    return max(tasks_per_node, 1 if tasks > cpus else -(-tasks // nodes))


def _unlike_a_vm(record: Record) -> str:
    """Why no VM can serve a job that waits for a physical node. At the gate such jobs are refused at submission."""
    checks = (
        (record.get("oversubscribe") in ("NO", "USER", "MCS"), "it asks for whole nodes (--exclusive)"),
        (not record.get("memory_per_node") and not record.get("memory_per_cpu"), "it asks for all memory of a node"),
        (record.get("reboot") in ("1", "yes"), "it asks for a reboot of its node (--reboot)"),
        (record.get("network"), "it asks for a network of its node (--network)"),
        (record.get("container"), "it has a container (--container)"),
        (_word(record, "threads_per_core") > 1, "it asks for several threads on each core"),
        (_word(record, "tasks_per_core") > 1, "it asks for several tasks on each core"),
        (record.get("burst_buffer"), "it has a burst buffer"),
    )
    return next((f"{text}: a VM cannot serve it" for wrong, text in checks if wrong), "")


def _problem(record: Record, own: tuple[str, ...], names: SiteNames, origin: str) -> str:
    images = _images(own)
    kinds = [word for word in own if word in _KINDS]
    policies = [word for word in own if word.startswith(PLACE)]
    gres = any("gres" in str(record.get(f"tres_per_{what}")) for what in ("node", "job", "socket", "task"))
    cores = number(record.get("core_spec")) or (number(record.get("thread_spec")) or _NO_THREADS) != _NO_THREADS
    profiles = set(words(record.get("profile"))) - {"None", "NONE", "NOT_SET"}
    alternatives = any(set(word) & set("|[]()*!") for word in own)
    checks = (
        (int(record["user_id"]) == 0, "Multiverse runs no jobs of root: submit as a user, e.g. sbatch --uid=NAME"),
        (record.get("het_job_id"), "heterogeneous jobs are not supported: submit each component as a separate job"),
        ("," in str(record["partition"]), f"name one partition only: {origin or names.partition}"),
        (record.get("resv_name"), "reservations are not supported: submit without --reservation"),
        # The submit script sees this option and --profile only in the environment of a batch job.
        (record.get("container_id"), "--container-id is not supported: select an image with --constraint"),
        (record.get("prefer"), "--prefer is not supported: use --constraint instead"),
        (record.get("required_nodes"), "nodes are created for each job: submit without --nodelist"),
        (gres, "generic resources are not supported: submit without GPUs and --gres"),
        (cores, "specialized cores are not supported: submit without --core-spec and --thread-spec"),
        (profiles, "profiles of VMs are not supported: submit without --profile"),
        (record.get("cluster_features"), "--cluster-constraint is not supported: submit without it"),
        (alternatives, "alternatives in --constraint are not supported: join with &"),
        (len(images) > 1, _one_of("image", images)),
        (len(policies) > 1, _one_of("placement policy", policies)),
        (len(kinds) > 1, _one_of("kind of clone", kinds)),
    )
    return next((text for wrong, text in checks if wrong), "")


def _one_of(what: str, words: list[str]) -> str:
    return f"a job has one {what}, not {' and '.join(words)}: name one of them with --constraint"


# --- nodes -----------------------------------------------------------------------------------------


def node(name: str, states: Iterable[str], features: str, reason: str) -> Node:
    shown = {word.upper() for word in states}
    state = next((state for state, words_of_it in _NODE_STATES.items() if shown & words_of_it), NodeState.JOINING)
    shown_features = words("" if features == "(null)" else features)
    return Node(name, state, shown_features, reason, reserved=not RESERVED.isdisjoint(shown))


def hosts(text: str) -> tuple[str, ...]:
    """The names in a Slurm host list."""
    return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP)) if text and text != "(null)" else ()
