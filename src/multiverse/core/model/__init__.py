"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`,
`began`) come from `Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""

from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.identity import Daemon, GuestFile, Identity, Mount, NodeBootstrap, User
from multiverse.core.model.job import (
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
from multiverse.core.model.sizes import CloneKind, Depth, Size
from multiverse.core.model.template import Template, TemplateCondition, TemplateKey, TemplateSeen, TemplateState
from multiverse.core.model.vm import (
    Offer,
    Stage,
    Vm,
    VmCondition,
    VmRef,
    VmSeen,
    VmSpec,
    VmState,
    is_parked_spare,
    is_spare,
)
from multiverse.core.model.world import Forecast, Row, Seen, World

__all__ = [
    "Attempt",
    "AttemptState",
    "Claim",
    "CloneKind",
    "Daemon",
    "Depth",
    "Forecast",
    "GuestFile",
    "Host",
    "HypervisorView",
    "Identity",
    "Job",
    "JobRef",
    "JobState",
    "Key",
    "Mount",
    "Node",
    "NodeBootstrap",
    "NodeSpec",
    "NodeState",
    "Offer",
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
    "is_parked_spare",
    "is_spare",
]
