"""What Slurm's own reasons mean: those that users ask about most. See squeue(1), JOB REASON CODES."""

from __future__ import annotations

from multiverse.bundles.contract import SchedulerWords
from multiverse.core.model import Job

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


class SlurmWords(SchedulerWords):
    """`bundles.contract.SchedulerWords`."""

    def say(self, word: str) -> str:
        """See `SchedulerWords`."""
        first = word.partition(",")[0].strip()
        return _WORDS.get(first) or next((text for prefix, text in _PREFIXES.items() if first.startswith(prefix)), "")

    def advise(self, job: Job) -> str:
        """See `SchedulerWords`. A job that may begin and waits was queued again, and waits for its delay."""
        own = job.ref.job_id
        if job.held:
            admin = "Admin" in job.reason
            return "ask the administrators of Slurm, who hold it" if admin else f"release it: scontrol release {own}"
        if job.eligible:
            return f"wait; if the cause is gone, let it start at once: scontrol update JobId={own} StartTime=now"
        known = {
            "Dependency": f"see which jobs it depends on: squeue --job={own} --Format=Dependency",
            "BeginTime": f"see when it may begin: squeue --job={own} --Format=StartTime",
        }
        return known.get(job.reason, f"see what Slurm says of it: scontrol show job {own}")
