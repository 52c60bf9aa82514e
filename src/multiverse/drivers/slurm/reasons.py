"""What Slurm's own reasons mean (squeue(1), JOB REASON CODES): the words that users ask about most."""

from __future__ import annotations

_WORDS = {
    "BeginTime": "its begin time has not come",
    "Dependency": "it depends on jobs that have not ended as it asks",
    "DependencyNeverSatisfied": "it depends on a job that did not end as it asks, so it will never start",
    "JobArrayTaskLimit": "its array runs as many tasks at a time as it permits",
    "JobHeldAdmin": "an operator holds it",
    "JobHeldUser": "its user holds it",
    "Licenses": "licences that it asks for are in use",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "its time limit exceeds that of its partition",
    "Prolog": "its prolog runs",
    "ReqNodeNotAvail": "nodes that it asks for are not available",
    "Reservation": "its reservation has not begun",
}
_PREFIXES = {
    "QOS": "a limit of its quality of service is reached",
    "Assoc": "a limit of its account is reached",
}


def in_words(reason: str) -> str:
    """What a reason means; empty for one that is not in this list."""
    word = reason.partition(",")[0].strip()
    if word in _WORDS:
        return _WORDS[word]
    return next((text for prefix, text in _PREFIXES.items() if word.startswith(prefix)), "")
