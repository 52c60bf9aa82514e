"""Why jobs wait, and what would start at once."""

from __future__ import annotations

from dataclasses import dataclass

from multiverse.api.machines import SizeView


@dataclass(frozen=True, slots=True)
class ReasonView:
    """A reason as a value: its `kind`, figures, ids of jobs and names of hosts (empty where these are not shown), and
    the reasons that it rests on. `text` says the same in words."""

    kind: str
    text: str
    figures: dict[str, int | float | str]
    jobs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    because: tuple[ReasonView, ...] = ()


@dataclass(frozen=True, slots=True)
class HostGroupView:
    """Hosts of which the same is true, for one job: a node set (empty where host names are not shown), and their
    number. `fits`: they could take at least one of its VMs now. `why` says why they are passed over, or what fits;
    `kind` is the kind of that reason."""

    hosts: str
    count: int
    fits: bool
    why: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ExplanationView:
    """What is said of one job, or of one task of an array. `attempt` is its latest attempt (None: it has none yet),
    `state` the attempt's state, `waiting_since` when it was submitted in Unix time (None: it does not wait). `short` is
    what its user reads in Slurm's AdminComment, `text` one to three sentences, and `todo` what its user can do (empty:
    nothing). `ahead` is the number of jobs before it, `behind` the job that keeps it waiting (empty: none, or it may
    not be named), `expected` when it starts at the latest in Unix time (None: nobody can tell). `hosts` has each host
    of the site in one group while it waits for VMs. `reasons` are the sentences of `text` as values."""

    job_id: str
    name: str
    uid: int
    attempt: int | None
    state: str
    waiting_since: float | None
    short: str
    text: str
    todo: str
    ahead: int
    behind: str
    expected: float | None
    hosts: tuple[HostGroupView, ...] = ()
    reasons: tuple[ReasonView, ...] = ()


@dataclass(frozen=True, slots=True)
class ExplanationsView:
    """A job, or the first tasks of an array, the live ones first. `more` is the number of tasks that are left out."""

    jobs: tuple[ExplanationView, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class StartableView:
    """A size of a node. So many jobs of one such node would start at once (`now`); `with_template` more fit on hosts
    that have to build the template first."""

    cpus: int
    memory: int
    disk: int
    now: int
    with_template: int


@dataclass(frozen=True, slots=True)
class CapacityUsageView:
    """What may be claimed on the hosts in sight (`total`), what VMs of jobs, spares and templates claim of it, what is
    free on hosts that take new VMs, and what is free on those that take none (`closed`)."""

    hosts: int
    closed_hosts: int
    total: SizeView
    jobs: SizeView
    spares: SizeView
    templates: SizeView
    free: SizeView
    closed: SizeView


@dataclass(frozen=True, slots=True)
class CapacityView:
    """What would start at once. `image` is the image that this was computed for. `blocked_by` is the job that waits for
    capacity and comes before all later ones (empty: none does, or it may not be named), `waiting` the number of jobs in
    the queue. While a job blocks, a later one starts only if it does not delay that job."""

    image: str
    usage: CapacityUsageView
    sizes: tuple[StartableView, ...]
    waiting: int
    blocked: bool
    blocked_by: str


@dataclass(frozen=True, slots=True)
class TrialView:
    """What would become of one request. `starts`: it would start at once, on `hosts` (a node set). `never`: it would be
    cancelled. `why` says why it would wait, or what its VMs would be. `ahead`, `behind` and `expected` are as in
    `ExplanationView`; `alone` is when it would start at the latest if no other job waited."""

    starts: bool
    never: bool
    why: str
    hosts: str
    ahead: int
    behind: str
    expected: float | None
    alone: float | None
    groups: tuple[HostGroupView, ...] = ()
