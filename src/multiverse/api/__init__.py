"""The types of the API: what the daemon transmits and what its clients read.

Shared by the service, the client, the command line and the web page. These types import nothing else of Multiverse. The
service converts rows to them in `service.convert`; a client decodes a document of JSON with `decode`. Field names are
those of the documents, unless an alias says otherwise: an alias is the transmitted name, which older and newer clients
read. Memory and disk are in MiB, durations in seconds.
"""

from multiverse.api.audit import IdentityAudit, VmIdentity
from multiverse.api.decode import decode
from multiverse.api.explain import (
    CapacityUsageView,
    CapacityView,
    ExplanationsView,
    ExplanationView,
    HostGroupView,
    ReasonView,
    StartableView,
    TrialView,
)
from multiverse.api.jobs import JobUsageView, JobView, PhaseView, TimelineEntry, TimelineView
from multiverse.api.machines import (
    HostFaultView,
    HostsChanged,
    HostView,
    LeaseView,
    NumaView,
    SizeView,
    TemplateView,
    VmView,
)
from multiverse.api.requests import HostRequest, PruneRequest, RepairRequest, TemplateRequest, TrialRequest
from multiverse.api.status import Alert, PoolView, PruneView, SourceView, StatusView
from multiverse.api.utilization import CompatibleHostView, UsagePoint, UsageView, UtilizationView
