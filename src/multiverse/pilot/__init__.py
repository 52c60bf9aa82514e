"""The pilot of a lease: a job of the scheduler that makes the node, or a part of it, a host of ours while it runs.

It is the first process of a PID namespace, in which the agent and all QEMUs of the lease are, and has a mount and a
network namespace of its own. So all of them, with their taps, rules and mounts, end with it, however it ends; the
agent may end, and is started again. What remains in the file system and of control groups is removed by the pilot
itself, by the site's epilog, and by the next pilot on the node (`lease.sweep`).
"""
