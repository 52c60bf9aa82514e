"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`, `began`) come from
`Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""

from multiverse.core.model.host import Claim, ClaimKey, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.identity import Daemon, GuestFile, Identity, Mount, NodeBootstrap, User
from multiverse.core.model.job import (
    ENDING_STATES,
    PINNED_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeSpec,
    NodeState,
    Outcome,
    Request,
    SchedulerView,
)
from multiverse.core.model.keys import Key, RowKind
from multiverse.core.model.limits import MOST_NODES, OTHER_IMAGES, EqualHosts, JobLimit, JobLimits
from multiverse.core.model.names import mac_of, machine_id, serial_of, site_of, token_of, vm_name, vm_prefix
from multiverse.core.model.offer import Offer, OfferState
from multiverse.core.model.sizes import CloneKind, Depth, Size
from multiverse.core.model.template import Template, TemplateCondition, TemplateKey, TemplateSeen, TemplateState
from multiverse.core.model.vm import (
    FAILED_STATES,
    LEAVING_STATES,
    UPCOMING_STATES,
    Stage,
    Vm,
    VmCondition,
    VmRef,
    VmSeen,
    VmSpec,
    VmState,
)
from multiverse.core.model.world import Forecast, Observation, Row, Seen, World

__all__ = [
    "ENDING_STATES",
    "FAILED_STATES",
    "LEAVING_STATES",
    "MOST_NODES",
    "OTHER_IMAGES",
    "PINNED_STATES",
    "UPCOMING_STATES",
    "WAITING_STATES",
    "Attempt",
    "AttemptState",
    "Claim",
    "ClaimKey",
    "CloneKind",
    "Daemon",
    "Depth",
    "EqualHosts",
    "Forecast",
    "GuestFile",
    "Host",
    "HostState",
    "HypervisorView",
    "Identity",
    "Job",
    "JobLimit",
    "JobLimits",
    "JobRef",
    "JobState",
    "Key",
    "KnownHost",
    "Mount",
    "Node",
    "NodeBootstrap",
    "NodeSpec",
    "NodeState",
    "Observation",
    "Offer",
    "OfferState",
    "Outcome",
    "Request",
    "Row",
    "RowKind",
    "SchedulerView",
    "Seen",
    "Size",
    "Stage",
    "Template",
    "TemplateCondition",
    "TemplateKey",
    "TemplateSeen",
    "TemplateState",
    "User",
    "Vm",
    "VmCondition",
    "VmRef",
    "VmSeen",
    "VmSpec",
    "VmState",
    "World",
    "mac_of",
    "machine_id",
    "serial_of",
    "site_of",
    "token_of",
    "vm_name",
    "vm_prefix",
]
