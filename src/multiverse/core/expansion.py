"""Which jobs of a partition of physical nodes may run in VMs, by the site's rule and by what a VM can be."""

from __future__ import annotations

from multiverse.core.model import Job
from multiverse.core.policy import Policy


def why_stays(job: Job, policy: Policy) -> str:
    """Why a job that waits for physical nodes is not moved to a VM, whatever is free; empty if it may be."""
    rule = next((one for one in policy.expansions if one.partition == job.origin), None)
    if rule is None:
        return f"partition {job.origin} is not expanded"
    if job.problem:
        return job.problem
    request = job.request
    if rule.accounts and job.account not in rule.accounts:
        return f"only jobs of {_either('account', rule.accounts)} are moved from partition {rule.partition} to VMs"
    if request is None or (rule.constraint and rule.constraint not in request.features):
        return f"only jobs with --constraint={rule.constraint} are moved from partition {rule.partition} to VMs"
    if request.nodes != 1:
        return f"it needs {request.nodes} nodes, and a job is moved to one VM"
    if not job.requeues:
        return "it could not be queued again if its VM were lost: srun, salloc and --no-requeue are not moved"
    if not job.eligible:
        return f"it has not waited for nodes of partition {rule.partition} long enough"
    return ""


def _either(word: str, names: tuple[str, ...]) -> str:
    return f"{word} {names[0]}" if len(names) == 1 else f"the {word}s {', '.join(names)}"
