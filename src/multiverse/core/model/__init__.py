"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`, `began`) come from
`Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""

from multiverse.core.model.basics import *
from multiverse.core.model.host import *
from multiverse.core.model.identity import *
from multiverse.core.model.job import *
from multiverse.core.model.reason import *
from multiverse.core.model.usage import *
from multiverse.core.model.vm import *
from multiverse.core.model.world import *
