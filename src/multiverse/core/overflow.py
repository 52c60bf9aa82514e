"""Which jobs of a partition of physical nodes may run in VMs, by the site's rule and by what a VM can be."""

from __future__ import annotations

from multiverse.core.model import Job, Reason, Why
from multiverse.core.policy import Policy


def why_stays(job: Job, policy: Policy) -> Reason | None:
    """Why a job that waits for physical nodes is not moved to a VM, whatever is free; None if it may be."""
    rule = next((one for one in policy.overflows if one.partition == job.origin), None)
    if rule is None:
        return Why.NO_OVERFLOW(partition=job.origin)
    if job.problem:
        return Why.PROBLEM(text=job.problem)
    request = job.request
    if rule.accounts and job.account not in rule.accounts:
        accounts = ", ".join(rule.accounts)
        if len(rule.accounts) > 1:
            return Why.ONLY_ACCOUNTS(accounts=accounts, partition=rule.partition)
        return Why.ONLY_ACCOUNT(account=accounts, partition=rule.partition)
    if request is None or (rule.constraint and rule.constraint not in request.features):
        return Why.ONLY_FEATURE(constraint=rule.constraint, partition=rule.partition)
    if request.nodes != 1:
        return Why.SEVERAL_NODES(nodes=request.nodes)
    if not job.requeues:
        return Why.NO_REQUEUE()
    if not job.eligible:
        return Why.TOO_EARLY(partition=rule.partition)
    return None
