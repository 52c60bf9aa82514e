"""The boundaries: what the controller asks of a scheduler, of a hypervisor, and of time.

Every method that changes something means *ensure*: it may be repeated, and depends on no earlier call. Methods raise
the errors of `core.errors`, which say what is true afterwards. After a cancellation or `Unknown` the change may have
been made in full, in part or not at all; the same call may be repeated, and the opposite call undoes it.

An ability that not every driver has is an object that is present or None (`Scheduler.offers`, `Hypervisor.templates`).
Methods take values of `core.model`, never database rows.
"""

from multiverse.ports.hypervisor import (
    Groups,
    GuestUsers,
    Hypervisor,
    Measurements,
    Membership,
    Moves,
    Saves,
    Sleeps,
    Source,
    Templates,
)
from multiverse.ports.scheduler import (
    Addresses,
    Leases,
    Offers,
    Overflow,
    Parts,
    Preempting,
    Reports,
    Saving,
    Scheduler,
    StandingIn,
    SubmissionLimits,
)
from multiverse.ports.site import Clock, Fencing
