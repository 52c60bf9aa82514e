"""Reasons: why a job waits, was moved back or failed, why a host is passed over, what was chosen.

A reason is a value: its kind, figures, ids of jobs and names of hosts, and the reasons that it rests on. It is made
where the decision is made. The words of each kind stand beside it in `Why`, and nowhere else is a reason worded.

The words of reasons and of alerts are written alike. `{name}` is a figure; a form may follow it after a colon. In a
reason, `{job}` and `{jobs}` are the jobs, `{host}` and `{hosts}` the hosts, and `{because}` the reasons that it rests
on. A part in [ ] is left out if something named in it is missing, zero or empty. Reasons that the words do not name
follow them, each after a semicolon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum, unique
from functools import cache
from math import ceil
from string import Formatter
from typing import Any

from multiverse.core.model.basics import number_of

_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def some(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence: the first ones if they are many."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def when(at: float) -> str:
    """A time for people, rounded up to the minute."""
    return f"by {_minute(ceil(at / 60) * 60)} UTC"


def moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def for_long(seconds: float) -> str:
    """A length of time for a sentence: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit, below, word, smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {word}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def _span(seconds: float) -> str:
    """Whole seconds, minutes or hours: a figure that is as old as the last observation."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"


def _minute(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


_FORMS: dict[str, Any] = {
    "when": when,
    "moment": moment,
    "minute": _minute,
    "long": for_long,
    "if": lambda _: "",
    "span": _span,
    "or now": lambda left: f"in {_span(left)} at the earliest" if left > 0 else "now",
    "or at once": lambda left: f"in {_span(left)} at the earliest" if left > 0 else "at once",
    "times": lambda number: "once" if number == 1 else f"{number} times in a row",
    "jobs": lambda number: f"{number_of(number, 'job')} {'is' if number == 1 else 'are'}",
    "vms": lambda number: "a VM of " if number == 1 else f"{number} VMs of ",
    "vms fit": lambda number: "fits" if number == 1 else "fit",
    "vms fit together": lambda number: "fits on no host" if number == 1 else "do not fit on all hosts together",
    "vms are": lambda number: "VM is" if number == 1 else f"{number} VMs are",
    "list": lambda texts: ", ".join(texts),
    "four": lambda texts: some(texts, 4),
    "": lambda value: "; ".join(value) if isinstance(value, list) else str(value),
}
"""How a figure is written; `n host` is a number of hosts, and others are as in Python."""


class _Words(Formatter):
    """A reason that lacks what its words name is still worded: who asks why a job waits must not be refused."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key, "")

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("n "):
            return number_of(value, format_spec[2:]) if value != "" else ""
        form = _FORMS.get(format_spec)
        return "" if value == "" else str(form(value) if form else format(value, format_spec))


_WORDS = _Words()


@cache
def parts_of(words: str) -> tuple[tuple[str, bool, frozenset[str]], ...]:
    """The parts of a kind's words, each with whether it may be left out, and what it names."""

    def found() -> Iterator[tuple[str, bool, frozenset[str]]]:
        for number, part in enumerate(_OPTIONAL.split(words)):
            yield part, bool(number % 2), frozenset(name for _, name, _, _ in _WORDS.parse(part) if name)

    return tuple(found())


def worded(words: str, values: Mapping[str, Any]) -> str:
    parts = parts_of(words)
    shown = [part for part, optional, names in parts if not optional or all(values.get(name) for name in names)]
    return _WORDS.vformat("".join(shown), (), values)


Figure = str | int | float


@unique
class Why(StrEnum):
    """The kinds of reasons: each with its words, and the word by which a job that waits for it is counted."""

    words: str
    counted: str

    def __new__(cls, kind: str, words: str, counted: str = "other") -> Why:
        made = str.__new__(cls, kind)
        made._value_, made.words, made.counted = kind, words, counted
        return made

    def __call__(
        self,
        *because: Reason | None,
        job: str = "",
        host: str = "",
        hosts: Iterable[str] = (),
        **figures: Figure | None,
    ) -> Reason:
        """A reason of this kind. Figures, jobs and hosts that are None or empty are left out."""
        return Reason(
            self,
            tuple((name, value) for name, value in figures.items() if value is not None and value != ""),
            (job,) if job else (),
            (host,) if host else tuple(hosts),
            tuple(one for one in because if one is not None),
        )

    # fmt: off
    SAID = "said", "{text}"  # the text of something outside, such as QEMU, or of an operator
    HIDDEN = "hidden", "for a reason that operators are shown"  # in place of such text, where it may name others
    # --- why a job waits ---
    BEHIND = "behind", "waiting behind earlier jobs", "behind"
    TURN = "turn", "waiting for a turn: as many VMs as may be made at once are being made", "turn"
    PACE = "pace", "waiting for a turn: {clones} clones of {image} are made at {rate:g} a second", "turn"
    NO_ADDRESS = "no address", "waiting for a free address", "address"
    CAPACITY = "capacity", "waiting for capacity[: {because}]", "capacity"
    FULL = "full", "the hosts are full[, and at most {per_host} of the job's VMs may be on one of them]"
    NO_TEMPLATE_ROOM = "no template room", "no host has room for the template of image {image}"
    DISK = "disk", "waiting for disk: {because}", "disk"
    MEMORY = "memory", "waiting for memory: {because}[, and others there leave too little of it{others:if}]", "memory"
    MUST_KEEP = "must keep", "{hosts} must keep {floor} MiB available"
    MUST_HAVE = "must have", "{hosts} must have {floor} MiB available"
    BANDWIDTH = ("bandwidth", "waiting for bandwidth: hosts that have room otherwise have {most} Mbit/s free at most",
        "bandwidth")
    EXPECTED = "expected", "expected to start {at:when}"
    TO_BE_LEASED = "to be leased", "waiting for a host to be leased", "lease"
    ALL_DRAINED = "all drained", "waiting for a host that is drained: {because:list}", "drained"
    ALL_AVOIDED = "all avoided", "waiting for a host that is avoided: {because:four}", "avoided"
    THIS_HOST = "this host", "{host}[ ({because})]"
    AVOIDED_HOST = "avoided host", "{host} {because}"
    LEASE_MAY_END = "lease may end", "its lease may end before the job"
    NO_HOST = "no host", "no host is in sight", "no host"
    NO_IMAGE = "no image", "no host has image {image}", "image"
    TOO_LARGE = ("too large",
        "{vms:vms}{node}[ with at most {per_host} on a host] {vms:vms fit together}; the largest "
        "that fits is {fit} per node",
        "too large")
    UNABLE = "unable", "unable to make {clones} clones: {hosts}"
    WITHOUT_IMAGE = "without image", "without image {image}: {hosts}"
    AWAY_NOW = "away now", "out of reach now: {hosts}"
    NO_CLONES = "no clones", "no host can make {clones} clones of image {image}"
    BEING_BUILT = "being built", "the template of image {image} is being built[ on {host}]"
    TEMPLATE_BROKEN = "template broken", "the template of image {image} is broken[ on {host}][: {because}]"
    LIMIT = "limit", "held back by {limit}", "limit"
    RESERVED = "reserved", "reservation {name} keeps all nodes from {begins:minute} until {ends:minute} UTC"
    EARLIER_RUN_AWAY = ("earlier run away",
        "its earlier run may go on in {vm}: host {host} is out of reach, neither back nor fenced", "earlier run")
    EARLIER_RUN_ENDS = "earlier run ends", "waiting until {vm} of its earlier run is gone", "earlier run"
    EARLIER_RUN_FOUND = ("earlier run found", "its earlier run may go on in {vm}, which no record explained",
        "earlier run")
    EARLIER_RUN_UNKNOWN = ("earlier run unknown", "its earlier run may go on in {vm}, which has no record",
        "earlier run")
    IS_SAVED = "is saved", "it was saved"
    SAVED_SINCE = "saved since", ("saved since {at:moment}[ for {job}][ ({by})][ ({size} MiB in storage {storage})]"
        "[ in the memory of {host}][: {because}]"), "saved"
    SAVED_HELD = ("saved held", "saved since {at:moment} and held: multiverse resume {id} lets it go on",
        "saved")
    BEING_SAVED = "being saved", "waiting until it is saved", "saved"
    SAVE_ASKED = "save asked", "its user asked for it"
    RESUME_ASKED = "resume asked", "its user resumed it"
    SAVE_ORDERED = "save ordered", "an operator asked for it"
    PREEMPTED = "preempted", "{job} ({by}) takes its place"
    ENDS_BY_MODE = ("ends by mode", "it is {way}[ {at:moment}], as PreemptMode={mode} of {name} says[, and {word}]")
    REQUEUED_SINCE = "requeued since", "queued again {at:moment}, as {because}", "preempted"
    GIVES_WAY = "gives way", "waiting until {job}, for which it was evicted, has started", "preempted"
    EVICTED_OFTEN = ("evicted often",
        "it was evicted {times:times} in the last hour, the most that it may be (rebalance.per_job)")
    EVICTIONS_AT_ONCE = ("evictions at once",
        "as many jobs as may be evicted at once are being evicted: {limit} (rebalance.at_once)")
    EVICTION_RATE = ("eviction rate",
        "evictions have sent {sent} MiB in the last minute, and may send {rate} MiB a second (rebalance.bandwidth)")
    SAVE_AT_LIMIT = "save at limit", "its time limit is nearly over"
    CHECKPOINT_DUE = "checkpoint due", "its user asked for one every {pause:long}"
    NO_CHECKPOINT = "no checkpoint", "no checkpoint of it was made: {because}"
    CHECKPOINT_MADE = "checkpoint made", "a checkpoint of it was made"
    CHECKPOINT_OLD = "checkpoint old", "there is a newer state"
    CHECKPOINT_UNUSED = "checkpoint unused", "restart {restart} of {job} is over: the next one goes on from here again"
    NOT_SAVED = "not saved", "it is not saved: {because}"
    SAVE_UNDONE = "save undone", "it was not saved: {because}"
    SAVE_LATE = "save late", "{step} took more than {limit:g} s"
    SAVE_MUTE = "save mute", "the guest of its VM {vm} sent too much, and is told nothing any more"
    SAVED_VM_LOST = "saved vm lost", "its VM {vm} was lost before its state was complete"
    SAVED_JOB_OVER = "saved job over", "{job} is over: its state is of no use any more"
    SAVE_USER_QUOTA = ("save user quota",
        "its state may take {need} MiB, and those of its user take {taken} of {quota} MiB (save.user_quota)")
    SAVE_SITE_QUOTA = ("save site quota",
        "its state may take {need} MiB, and those of all jobs take {taken} of {quota} MiB (save.site_quota)")
    STORAGE_FULL = "storage full", "its state may take {need} MiB, and the storage {storage} has room for {free} MiB"
    SAVE_FAILED = "save failed", "its state could not be written ({tries:times})[: {because}]"
    COPY_FAILED = "copy failed", "its state could not be copied ({tries:times}): {because}"
    COPY_DAMAGED = "copy damaged", "its state in storage {storage} is of no use: {because}"
    SAVED_KEPT = "saved kept", "its state is kept in the memory of {host}[, because {because}]"
    SAVED_KEPT_LOST = "saved kept lost", "its state in the memory of {host} was lost"
    SAVED_DAMAGED = "saved damaged", "it cannot go on: {because}"
    SAVED_TOO_OLD = "saved too old", "it cannot go on: its state was discarded after {age:long}"
    SAVED_FAILS = "saved fails", "it cannot go on: it was tried {tries:times}: {because}"
    SAVED_GIVEN_UP = "saved given up", "an operator lets it begin anew"
    SAVED_HOLDING = "saved holding", "waiting until it is held, because it cannot go on", "saved"
    KEPT_AWAY = "kept away", "its state is in the memory of {host}, which is out of reach", "saved"
    SAVED_RUN_OVER = "saved run over", "restart {restart} of {job} does not go on with its state"
    REQUEUE_FORGOTTEN = ("requeue forgotten",
        "the scheduler was killed, and has forgotten that it queued the job again: it is to do so once more")
    SAVED_TOO_SMALL = ("saved too small",
        "it was changed since it was saved in a VM of {cpus:n CPU} with {memory} MiB: change it back", "saved")
    SAVED_FITS_NOWHERE = ("saved fits nowhere",
        "{vms:vms}{node}, as it was saved, {vms:vms fit} on no host that reaches its state",
        "saved")
    RESTORED = "restored", "restored on {hosts} from its state"
    NO_STORAGE = "no storage", "no host that takes VMs reaches the storage {storage} of its state", "saved"
    USER_AWAITED = "user awaited", "waiting until the name service says who uid {uid} is", "user"
    NO_USER = "no user", "{text}: its job cannot run"
    MAY_DELAY = "may delay", "by its time limit it may delay {job}, which is earlier and waits for room"
    PROBLEM = "problem", "{text}"  # what is wrong with the request, in the scheduler's words
    NO_OVERFLOW = "no overflow", "jobs of partition {partition} do not overflow into VMs"
    ONLY_ACCOUNT = "only account", "only jobs of account {account} are moved from partition {partition} to VMs"
    ONLY_ACCOUNTS = "only accounts", "only jobs of the accounts {accounts} are moved from partition {partition} to VMs"
    ONLY_FEATURE = ("only feature",
        "only jobs with --constraint={constraint} are moved from partition {partition} to VMs")
    SEVERAL_NODES = "several nodes", "it needs {nodes} nodes, and a job is moved to one VM"
    NO_REQUEUE = ("no requeue",
        "it could not be queued again if its VM were lost: srun, salloc and --no-requeue are not moved")
    TOO_EARLY = "too early", "it has not waited for nodes of partition {partition} long enough"
    # --- why a host is passed over ---
    HAS_ROOM = "has room", "has room for {least}[ to {most}] of its VMs"
    IS_OFF = "is off", "fenced: it counts as off"
    IS_AWAY = "is away", "out of reach"
    LACKS_IMAGE = "lacks image", "has no image {image}"
    MAKES_NONE = "makes none", "cannot make {clones} clones of image {image}"
    IS_AVOIDED = "is avoided", "avoided {because}"
    FAILS_UNTIL = "fails until", "until {until:moment}, because VMs of {image} fail there[: {because}]"
    FAILED_TRIED = "failed, tried", "while one job is tried there, because VMs of {image} failed there[: {because}]"
    LEASE_ENDS = "lease ends", "leased, and the lease may end before the job"
    WAKES_FIRST = "wakes first", "memory that is free there is for VM {vm}, whose job was resumed"
    TAKES_NONE = "takes none", "takes no new VM"
    IS_DRAINED = "is drained", "drained[ ({because})]"
    WILL_BE_DRAINED = "will be drained", "to be drained before the job has surely ended[ ({because})]"
    SHORT_OF_DISK = "short of disk", "less than {floor} MiB of disk are available there"
    PACED_THERE = "paced there", "{clones} clones wait for their pace there"
    TOO_SMALL = "too small", "too small: {cpus:n CPU} and {memory} MiB[ and {net} Mbit/s] for VMs"
    LACKS = ("lacks", "full: {need} {what} needed[ with its template{beside:if}], {least}[ to {most}] free"
        "[, because others on its machine hold memory{held:if}]")
    BEING_REMOVED = "being removed", "the template of image {image} is being removed"
    NOT_YET_THERE = "not yet there", "the template of image {image} is not there yet"
    # --- why a job was moved back, or ended ---
    AND = "and", "{because}"
    THEN = "then", "then {because}"
    NOW = "now", "now {because}"
    RESTART = "restart", "restart {number}"
    LAUNCH_PENDING = ("launch pending",
        "{because}, within {limit:g} s of its start: the scheduler has yet to give up that start")
    END_PENDING = ("end pending",
        "{because}: the scheduler has yet to give up telling the VM that is gone to end the job, which the restored VM "
        "would obey")
    SHORT_RUNS = ("short runs",
        "[held by Multiverse: {held:if}]its last {runs:n run} ended within {limit:g} s of their start; of the last "
        "one: {because}")
    ON_PHYSICAL = "on physical node", "it has started on a physical node of partition {partition}"
    RESULT = "result", "{word}[ (exit code {code})]"
    UNOPENED = ("unopened",
        "{word}: the scheduler could not open its input, output or error file in its VM, and did not start it")
    SHOWN_NO_MORE = "shown no more", "the scheduler no longer shows the job"
    REQUEUED = "requeued", "the scheduler requeued the job[: {because}]"
    CHANGED_WAITING = "changed waiting", "changed while waiting"
    MAY_START_THERE = "may start there", "it was submitted to partition {partition}, and may start there"
    ON_EARLIER_VM = "on earlier vm", "it runs on a VM of an earlier attempt"
    ON_UNEXPLAINED = "on unexplained", "its job runs on {every}, which no record explains"
    NOT_ON_OWN = "not on own", "its job runs on {every}, not on its own VMs"
    TOO_SOON = "too soon", "the job is {status} before it was given its nodes"
    JOB_HELD = "job held", "the job was held"
    REQUEST_CHANGED = "request changed", "the job's request was changed"
    VM_LOST = "vm lost", "a VM was lost"
    VM_LOST_BEFORE = "vm lost before", "a VM was lost before the job ran"
    NO_VM_CREATED = "no vm created", "no VM could be created for it in {attempts:n attempt}: {because}"
    NODE_UNUSABLE = "node unusable", "node {node} is {found}"
    NOT_STARTED = "not started", "the scheduler did not start it: {word}"
    USER_NOT_TOLD = "user not told", "its guest was not told of the user within {limit:g} s"
    COMPLETING = "completing", "its job is completing"
    TAKEN_BACK = "taken back", "the scheduler took the launch back"
    CHANGED_LATE = "changed late", "its user changed the job before it was cancelled"
    OFF_NODES = "off nodes", "its job is off its nodes"
    STARTED_AFTER_ALL = "started after all", "the job started after all"
    TIED = "tied", "its job is tied to its nodes"
    NO_USER_ADDED = "no user added", "its job started when no user was added any more"
    IMAGELESS = "imageless", "no host has its image"
    FAULT = "fault", "a fault of Multiverse, please report it: {because}"
    # --- what an attempt's VMs are, and why ---
    CHOICE = ("choice",
        "{clones} on {every}[, {pool} before][ by {policy} among {among}][, because {failed} failed][, {because}]")
    TOOK_SPARE = "took spare", "{clones} on {host}, joined before, taken as it was submitted"
    NONE_BOOTS = "none boots", "no host boots clones"
    NONE_FORKS = "none forks", "no host forks"
    IMAGE_NOT_FORKED = "image not forked", "no host can fork its image"
    NO_ROOM_BESIDE = "no room beside", "no host could hold the template beside it"
    NO_ROOM_BOOTED = "no room booted", "no host could hold it booted"
    PARKED = "parked", "one is parked"
    BROKEN_THERE = "broken there", "its template is broken on {host}"
    RARE = "rare", "no other job wants this image of late: not worth a template"
    TEMPLATE_SOONER = "template sooner", "its template is ready in {wait:.0f} s, sooner than a boot of {boot:.1f} s"
    BOOT_SOONER = "boot sooner", "a boot takes {boot:.1f} s, its template {wait:.0f} s more"
    FORK_SOONER = "fork sooner", "its template is ready: {fork:.1f} s, a boot {boot:.1f} s"
    QUEUED_FORKS = "queued forks", "clones queued on its template take {wait:.1f} s more, a boot {boot:.1f} s"
    AHEAD_UNKNOWN = "ahead, unknown", "ahead of {job}, whose start nobody can tell"
    AHEAD_IN_TIME = ("ahead, in time",
        "ahead of {job}, which starts {at:when}, when this one has ended by its time limit")
    AHEAD_BESIDE = "ahead, beside", "ahead of {job}, which starts {at:when} and for which other room is kept"
    # --- what happens to VMs, hosts, leases, templates and offers ---
    FOR_JOB = "for job", "by {job}"
    AS_IT_CAME = "as it came", "by {job}, as it came"
    OVERTAKEN = "overtaken", "by {job}, {times} of {most} times"
    IS_TO_HAVE = "is to have it", "{job} is to have it"
    JOB_NEEDS = "job needs it", "{job} needs it"
    OTHERS_NEED = "others need it", "others like this job will need it"
    HOST_OFF = "host off", "host {host} is off"
    NOT_THERE = "not there", "it is not on host {host} any more"
    HOST_AWAY = "host away", "host {host} is out of reach"
    HOST_WAS_AWAY = "host was away", "host {host} was out of reach"
    MOVES = "moves", "from {host} to {target}[: {because}]"
    GOES_ON = "goes on", "it goes on on host {host}"
    MOVE_LATE = "move late", "it did not move within {limit:g} s"
    SUSPENDED_LONG = "suspended long", "its job has been suspended for {limit:long}"
    MEMORY_FREED = "memory freed", "its memory on host {host} is free"
    IS_AWAKE = "is awake", "it goes on on host {host}"
    FOUND_ASLEEP = "found asleep", "it was found asleep"
    JOB_RESUMED = "job resumed", "its job was resumed"
    JOB_SUSPENDED = "job suspended", "its job was suspended again"
    NO_ROOM_TO_WAKE = "no room to wake", "its job was resumed, and host {host} has no memory for it"
    STAYS_AWAKE = "stays awake", "it does not sleep: {because}"
    GIVES_WAY_TO = "gives way to", "VM {vm} on its host is to go on"
    HOST_DRAINED = "host drained", "host {host} is drained"
    LEAVES_LEASE = "leaves lease", "leased host {host}: {because}"
    LEASE_EMPTIED = "lease emptied", "leased host {host} is emptied, so that it can be given back"
    HOST_TIGHT = "host tight", "host {host} is short of memory"
    RUNS_ON = "runs on", "its job runs on"
    VM_DIED = "vm died", "the VM died"
    DIED_CREATING = "died creating", "the VM died while it was created"
    UNCONFIRMED = "unconfirmed", "the daemon was restarted before it was created"
    UNBUILT = "unbuilt", "the daemon was restarted before it was built"
    NOT_CREATED = "not created", "it was not created within {limit:g} s"
    CAME_UP = "came up", "its node came up {found}: {because}"
    NOT_REGISTERED = "not registered", "its node did not register within {limit:g} s"
    NODE_LEFT = "node left", "its node is still to be deleted"
    NODE_FREE = "node free", "no job is on its node"
    JOB_ON_IT = "job on it", "{job} is on it"
    NO_JOB_ON_IT = "no job on it", "no job is on it"
    JOINED = "joined", "{vm} has joined"
    NO_LONGER_THERE = "no longer there", "it is no longer there"
    REBUILT = "rebuilt", "it was built anew"
    FOUND_THERE = "found there", "it was found on its host, and no record explained it"
    FOUND_FROZEN = "found frozen", "its processes were found stopped, and no record explained it"
    SERVES_UNTOLD = "serves untold", "it serves, or served, a job without a record"
    MEMORY_NEEDED = "memory needed", "its memory is needed"
    NO_POOL = "no pool", "no pool of the settings wants it"
    POOL_KEEPS = "pool keeps", "its pool keeps {wanted} now"
    POOL_OFFERS_NONE = "pool offers none", "its pool offers none"
    POOL_NEEDS = "pool needs it", "its pool needs it"
    FOR_POOL = "for pool", "for the {depth} pool of {image}"
    UNTAKEN = "untaken", "it was withdrawn, and nobody took it"
    JOBS_WAIT = "jobs wait", "jobs wait for room"
    NODE_STATE = "node state", "its node is {found}: {because}"
    NODE_GONE = "node gone", "its node is gone"
    IMAGE_GONE = "image gone", "its image is gone"
    TEMPLATE_GONE = "template gone", "its template is gone"
    TOO_OLD = "too old", "it is older than {limit:g} s"
    SERVES_NONE = "serves none", "its VM can serve no job"
    DID_NOT_COME = "did not come", "the job that took it did not come"
    SUBMITTED = "submitted", "by a submission[ of uid {uid}]"
    OFFERED = "offered", "to jobs as they come"
    OPERATOR = "operator", "an operator asked for it"
    OPERATOR_ADDED = "operator added", "an operator added it"
    OPERATOR_OFF = "operator says off", "an operator says that host {host} is off"
    MAINTENANCE = "maintenance", "reservation {name} for maintenance begins at {begins:moment}"
    MAINTENANCE_OVER = "maintenance over", "reservation {name} is over, or was deleted"
    OPERATOR_DRAINED = "operator drained", "an operator drained it"
    COMMAND_OFF = "command says off", "the fence command says that host {host} is off"
    SELF_FENCED = "self-fenced", "host {host} has ended its VMs by itself, after {limit:g} s without the site"
    IS_BACK = "is back", "it is back"
    NOT_SILENT = "not silent", "it is not silent any more, the scheduler reaches a VM of it, or no job waits for it"
    IS_SILENT = "is silent", "nothing is heard of it, the scheduler does not reach its VMs, and a job waits for it"
    HEARD_NOTHING = "heard nothing", "nothing was heard of it for {time:.0f} s"
    CONTROLLER_THERE = "controller there", "the controller runs on it: it is on"
    FEW_IN_SIGHT = "few in sight", "in sight is only {shown} of {total:n host}: the controller may be cut off from them"
    PILOT_GONE = "pilot gone", "its pilot[ {pilot}] is gone"
    PILOT_QUEUED = "pilot queued", "its pilot {pilot} was queued again"
    PILOT_ENDED = "pilot ended", "its pilot {pilot} ended[: {because}]"
    PILOT_ENDS = "pilot ends", "its pilot {pilot} is ending: {because}"
    PILOT_RUNS = "pilot runs", "pilot {pilot} runs on {node}"
    PILOT_OVER = "pilot over", "host {host}: its pilot {pilot} has ended"
    NODE_CLEAN = "node clean", "host {host}: its node {node} is clean of pilot {pilot}"
    OF_HOST = "of host", "host {host}: {because}"
    MAY_GO_ON = "may go on", "{because}, and whether its node {node} has ended its VMs is not known"
    AGENT_SAYS = "agent says", "its agent says that {because}"
    AGENT_SILENT = "agent silent", "nothing is heard of its agent, and a job waits for it"
    AGENT_ANSWERS = "agent answers", "its agent answers"
    AGENT_LATE = "agent late", "its agent did not answer within {limit:g} s"
    FOR_VM = "for vm", "for {vm}"
    NO_VM_LEFT = "no vm left", "no VM is left on it"
    LIMIT_CHANGED = "limit changed", "its time limit was changed"
    NOTHING_GOES_ON = "nothing goes on", "nothing of its VMs goes on"
    HOST_GIVEN_BACK = "host given back", "its host is given back"
    NO_JOB_NEEDS = "no job needs it", "no job needs it any more"
    WAS_IDLE = "was idle", "it was idle for {limit:g} s"
    # --- what is said of a job: whole sentences ---
    ABOUT_TO_CONSIDER = "about to consider", "it is about to be considered"
    HAS_WAITED = "has waited", "It has waited for {time:long}: {because}."
    NO_HOST_IN_REACH = "no host in reach", "no host is in reach"
    HOSTS_AWAY = "hosts away", "Nothing has been heard of {hosts} for {time:long}."
    SCHEDULER_AWAY = ("scheduler away",
        "The scheduler has not answered for {time:long}: until it does, no job is started and none is given up.")
    WAITS = "waits", "It has waited for {time:long}."
    NOT_SHOWN = "not shown", "It has waited for {time:long}. The scheduler does not show it."
    EITHER = "either", "It starts in a VM or in partition {partition}, whichever has room first."
    AGAIN_IN = "again in", "It is considered again in {time:long}.[ It failed {tries:times}.]"
    GIVEN_UP_BEFORE = "given up before", "Its previous attempt was given up: {because}."
    BESIDES = "besides", "Besides, {because}."
    BEFORE_THAT = "before that", "Before that: {because}."
    SLURM_DELAYS = ("delayed",
        "the scheduler queued it again, not because of Multiverse, and lets it start {until:moment} (in {time:long}) "
        "at the earliest")
    WAITS_LONGER = "waits longer", "It waits longer, because {because}."
    IS_HELD = "is held", "it is held[: {meaning}][ ({word})]"
    SLURM_KEEPS = "kept by the scheduler", "the scheduler itself keeps it waiting[: {meaning}][ ({word})]"
    AHEAD = "ahead", "{number:jobs} ahead of it[; {job} keeps them waiting: {because}]."
    QUARANTINED = "quarantined", "Its record has been quarantined for {time:long}: {because}."
    UNGATED = "ungated", "It left the gate {time:long} ago, and is being put back there."
    RESTORING = ("restoring",
        "It waits at the gate, and has been on its way back to partition {partition} for {time:long}.")
    TO_BE_HELD = "to be held", "It is about to be held: {because}."
    STRAY = ("stray",
        "The scheduler started it {time:long} ago on a VM of an earlier attempt; it is being queued again.")
    ON = "on", "{vm} on {host}"
    BEING_CREATED = ("being created",
        "It was admitted {time:long} ago, and its {vms:vms are} being created[ ({because:four})].")
    BEING_STARTED = ("being started",
        "Its VMs were created {time:long} ago and are being started[ ({because:four})]; {joined} of {vms} joined.")
    ABOUT_TO_START = ("about to start",
        "Its VMs joined {time:long} ago[ ({because:four})], and the scheduler is about to start it.")
    ADDING_USER = ("adding user",
        "It took an idle node[ ({because:four})] {time:long} ago, whose guest is learning of its user.")
    HAS_RUN = "has run", "It has run for {time:long}[ ({because:four})].[ It ends {ends:when} at the latest.]"
    SUSPENDED = "suspended", "It has run for {time:long}[ ({because:four})]. It is suspended."
    WILL_BE_SAVED = "will be saved", "It is saved {at:when}, and goes on in another run."
    LAST_RUN = "last run", "It is not saved any more: it has had {runs:n run}, as many as the site permits."
    WAS_NOT_SAVED = "was not saved", "It was not saved: {because}."
    CANNOT_BE_SAVED = "cannot be saved", "It is not saved ahead of its time limit: {because}."
    WAS_MOVED = ("was moved",
        "It left {host} at {at:moment}, because {because}: its VM moved within {took:long}.[ It was evicted "
        "{times:times}.]")
    WAS_SAVED = ("was saved",
        "It left {host} at {at:moment}, because {because}: it was saved, and went on after {took:long}."
        "[ It was evicted {times:times}.]")
    WAS_REQUEUED = ("was requeued",
        "Its run was ended at {at:moment}, because {because}: it began anew after {took:long}.[ It was evicted "
        "{times:times}.]")
    BEGAN_ANEW = "began anew", "Its earlier run ended with its VM: {because}. It began anew."
    IS_WARNED = "is warned", "It was told to end {time:long} ago: {because}."
    IS_PREEMPTED = "is preempted", "Its run is being ended: {because}."
    IS_MOVING = "is moving", "Its VM {vm} moves from {host} to {target}, and goes on meanwhile."
    IS_SETTLING = "is settling", "Hosts {host} and {target} settle which of them keeps its VM {vm} after a move."
    FALLS_ASLEEP = "falls asleep", "Its VM {vm} is falling asleep, and frees its memory on {host}."
    IS_ASLEEP = "is asleep", "Its VM {vm} sleeps, and has freed its memory on {host}, until the job is resumed."
    IS_DELAYED = ("is delayed",
        "It was resumed {time:long} ago, and its VM {vm} waits for memory on {host}. Its time limit grows by that.")
    IS_WAKING = "is waking", "Its VM {vm} is waking on {host}."
    KEEPS_MEMORY = "keeps memory", "Its VM keeps its memory: {because}."
    IS_CAPTURED = "is captured", "A checkpoint of it is being made: {because}."
    HAS_CHECKPOINT = ("has checkpoint",
        "Its last checkpoint is of {at:moment}[ ({size} MiB)][. The next one is made {next:when}].")
    CHECKPOINT_AT = "checkpoint at", "A checkpoint of it is made {at:when}."
    LACKS_CHECKPOINT = "lacks checkpoint", "No checkpoint of it was made: {because}."
    IS_BEING_SAVED = "is being saved", "It is being saved ({step}): {because}."
    HAS_STATE = ("has state",
        "It was saved at {at:moment}[, because {because}][: {size} MiB in storage {storage}], and goes on from there.")
    IN_MEMORY = "in memory", "Its state could not be written: it is in the memory of {host}, where it goes on."
    HELD_WITH_STATE = "held with state", "It is held until somebody resumes it[: {because}]."
    GOING_BACK = "going back", "It has been on its way back to the gate for {time:long}: {because}."
    CANCELLING = "cancelling", "Multiverse has been cancelling it for {time:long}: {because}."
    RELEASING = ("releasing",
        "It has been over for {time:long}, and its VMs are being released.[ {vms} of its VMs are left.]")
    CHOSEN = "chosen", "Chosen for it[ {first}]: {because}.[ It is one of partition {partition}, which was full.]"
    ENDED = "ended", "It ended {time:long} ago[: {because}]."
    GIVEN_UP = "given up", "Its attempt was given up {time:long} ago[: {because}]."
    ATTEMPT_ENDED = "attempt ended", "Its attempt ended {time:long} ago[: {because}]."
    CANCELLED = "cancelled", "It was cancelled {time:long} ago[: {because}]."
    REVOKED = "revoked", "Multiverse cancelled it {time:long} ago[: {because}]."
    FAILED = "failed", "It failed {time:long} ago[: {because}]."
    RUNS_AT_ORIGIN = "runs at origin", "It runs in partition {partition} on a physical node, or has run there."
    STAYS = "stays", "It waits in partition {partition} and is not moved to a VM: {because}."
    CANNOT_BE_SERVED = "cannot be served", "It cannot be served: {because}."
    NEW = "new", "The scheduler shows it, and the next pass considers it."
    # fmt: on


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is as it is. An empty job id or host name may not be told."""

    kind: Why
    figures: tuple[tuple[str, Figure], ...] = ()
    jobs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    because: tuple[Reason, ...] = field(default=())

    def __str__(self) -> str:
        return _worded(self)

    def also(self, *more: Reason | None) -> Reason:
        return replace(self, because=(*self.because, *(one for one in more if one is not None)))

    def hidden(self, own: str, *, others: bool, hosts: bool) -> Reason:
        """Itself as the owner of job `own` may read it: with other jobs, and with hosts, only if allowed."""
        if others and hosts:
            return self
        if self.kind is Why.SAID:
            return Why.HIDDEN()
        mine = own.partition("_")[0]  # a task of the same array is one's own, too
        return replace(
            self,
            jobs=tuple(job if others or job.partition("_")[0] == mine else "" for job in self.jobs),
            hosts=tuple(host if hosts else "" for host in self.hosts),
            because=tuple(one.hidden(own, others=others, hosts=hosts) for one in self.because),
        )


def said(text: str) -> Reason | None:
    """The text of something outside, as a reason; none if it says nothing."""
    return Why.SAID(text=text) if text else None


def text_of(reason: Reason | None) -> str:
    return "" if reason is None else str(reason)


def _number_of(hosts: Sequence[str]) -> str:
    return "a host" if len(hosts) == 1 else number_of(len(hosts), "host")


def _worded(reason: Reason) -> str:
    because = [str(one) for one in reason.because]
    values: dict[str, Any] = {
        **dict(reason.figures),
        "because": because,
        "job": reason.jobs and (f"job {reason.jobs[0]}" if reason.jobs[0] else "another job"),
        "host": reason.hosts and (reason.hosts[0] or "a host"),
        "target": reason.hosts[1:] and (reason.hosts[1] or "another host"),
        "hosts": some(reason.hosts) if all(reason.hosts) else _number_of(reason.hosts),
        "every": ", ".join(reason.hosts) if all(reason.hosts) else _number_of(reason.hosts),
    }
    words = reason.kind.words
    if not all(reason.hosts):  # the words for a host without a name have their article
        words = words.replace("host {host}", "{host}").replace("host {target}", "{target}")
    text = worded(words, values)
    named = any("because" in names for _, _, names in parts_of(words))
    return text if named else "; ".join([text, *because])
