"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`, `began`) come from
`Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""

from multiverse.core.model.host import (
    OFF_STATES,
    Claim,
    DiskCost,
    Drain,
    Host,
    HostFault,
    HostState,
    HypervisorView,
    ImageDisk,
    KnownHost,
    NumaNode,
    Overcommitment,
)
from multiverse.core.model.identity import (
    Daemon,
    GuestFile,
    Identity,
    Mount,
    Neighbour,
    NodeBootstrap,
    TaskAccess,
    User,
    UserSeen,
)
from multiverse.core.model.job import (
    ENDING_STATES,
    MOST_SHORT_RUNS,
    PINNED_STATES,
    SHORT_RUN,
    WAITING_STATES,
    YEAR,
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
    SchedulerPart,
    SchedulerView,
)
from multiverse.core.model.keys import ClaimKey, Key, RowKind
from multiverse.core.model.lease import (
    COMING_LEASES,
    GIVEN_UP_LEASES,
    OPEN_LEASES,
    Lease,
    LeasedHost,
    LeaseSpec,
    LeaseState,
    PilotSeen,
    PilotState,
)
from multiverse.core.model.limits import MOST_NODES, OTHER_IMAGES, EqualHosts, JobLimit, JobLimits
from multiverse.core.model.names import (
    LAST_DECIMAL,
    LAST_SERIAL,
    SERIAL,
    is_site,
    lease_name,
    mac_of,
    machine_id,
    network_id_of,
    serial_of,
    site_of,
    token_of,
    vm_name,
    vm_prefix,
)
from multiverse.core.model.offer import Offer, OfferState
from multiverse.core.model.reach import OF_SITE, Member, Reach, group_of
from multiverse.core.model.reason import Reason, Why, said, text_of
from multiverse.core.model.reservation import NodeReservation, first_keeping, first_on
from multiverse.core.model.sizes import CloneKind, Depth, Placement, Size
from multiverse.core.model.template import Template, TemplateCondition, TemplateKey, TemplateSeen, TemplateState
from multiverse.core.model.usage import HostUsage, Load, Usage, VmUsage
from multiverse.core.model.vm import (
    FAILED_STATES,
    LEAVING_STATES,
    UPCOMING_STATES,
    Fault,
    Place,
    Stage,
    Vm,
    VmCondition,
    VmRef,
    VmSeen,
    VmSpec,
    VmState,
)
from multiverse.core.model.world import Forecast, Observation, Row, Seen, World
