"""What the guest agent and the host agree on, and the agent's limits and paths."""

from __future__ import annotations

VERSION = 1  # of the protocol
PORT = "org.multiverse.agent"  # name of the virtio port
MAX_LINE = 1 << 20  # bytes of one message, in either direction
TEMPLATE = "multiverse.template"  # on the kernel's command line of a VM that will be frozen as a template
DISK = "multiverse.disk="  # there, too: MiB of the disk that users may write; the rest of it is kept reserved
USER_ADDED = "/run/multiverse/user-added"  # a pipe that can be read once the job's user is known
MOST_WAIT = 64  # lines that are written to that pipe; each waiting process reads one

# TCP, where the agent accepts the tasks of a job. No user's process can listen there, and NFS mounts connect from other
# ports: from 600 on (bindresvport(3)), or 665 (sunrpc.min_resvport).
TASKS_PORT = 599
LONGEST_FRAME = 1 << 20  # bytes in a frame of a task's connection
SOCKETS = "/run/multiverse/tasks"  # of the processes that carry tasks, by pid

LOGS = "/var/log/multiverse"  # directory of the daemons' logs
DAEMON_TIMEOUT = 30.0  # seconds until a daemon must be ready, a plugged CPU or memory usable, or a mount done


class GuestAgentError(Exception):
    """The agent could not do what the host asked for. The text is for the operator."""
