"""How much Slurm's limits still allow, and how much each job would use. Pure. Reads squeue's records and the text of
`scontrol show assoc_mgr` and `scontrol show licenses`.

The reason that Slurm shows for a job at the gate is not enough: Slurm searches for nodes before it checks most limits,
and does not count pinned jobs (decision 12). A limit is named by the reason that Slurm would show and by its owner:
`AssocGrpCpuLimit: account physics`. Limits of minutes, of single jobs, of partitions and of generic resources are not
counted here. They take effect when Slurm shows a reason for the pinned job.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from multiverse.drivers.slurm.reading.parse import Record, Uses, number, words

_KINDS = ("", "cpu", "mem", "node", "billing")  # "" for the number of jobs, then the TRES that every job has
_REASONS = {
    "Max": ("AssocMaxJobsLimit",),
    "Grp": ("AssocGrpJobsLimit", "AssocGrpCpuLimit", "AssocGrpMemLimit", "AssocGrpNodeLimit", "AssocGrpBilling"),
    "QOS": ("QOSGrpJobsLimit", "QOSGrpCpuLimit", "QOSGrpMemLimit", "QOSGrpNodeLimit", "QOSGrpBilling"),
    "PU": (
        "QOSMaxJobsPerUserLimit",
        "QOSMaxCpuPerUserLimit",
        "QOSMaxMemoryPerUser",
        "QOSMaxNodePerUserLimit",
        "QOSMaxBillingPerUser",
    ),
    "PA": ("MaxJobsPerAccount", "MaxCpuPerAccount", "MaxMemoryPerAccount", "MaxNodePerAccount", "MaxBillingPerAccount"),
}
_FAMILIES = {
    "GrpJobs": "Grp", "GrpTRES": "Grp", "MaxJobs": "Max",
    "MaxJobsPU": "PU", "MaxTRESPU": "PU", "MaxJobsPA": "PA", "MaxTRESPA": "PA",
}  # fmt: skip
MIB = {"K": 2**-10, "": 1, "M": 1, "G": 2**10, "T": 2**20, "P": 2**30}
_RUNNING = {"RUNNING", "SUSPENDED"}


@dataclass(slots=True)
class _Entry:
    """An association or a QOS."""

    fields: dict[str, str] = field(default_factory=dict)
    # How much its limits still allow, by family, kind and owner. The owner is empty; for limits of each user and
    # account of a QOS it is `U<uid>` and `A<account>`.
    left: dict[tuple[str, str, str], int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The owner of the limits, as shown to users."""
        if "QOS" in self.fields:
            return f"QOS {self.fields['QOS'].partition('(')[0]}"
        user, account = self.fields["UserName"].partition("(")[0], self.fields["Account"]
        return f"user {user} in account {account}" if user else f"account {account}"

    def limit(self, family: str, kind: str, whose: str) -> str:
        known = _REASONS["QOS" if family == "Grp" and "QOS" in self.fields else family]
        bound = {"U": f", uid {whose[1:]}", "A": f", account {whose[1:]}"}.get(whose[:1], "")
        return f"{known[_KINDS.index(kind)]}: {self.name}{bound}"


class AccountingLimits:
    """`left` tells how much more may run, by limit; negative after an operator has lowered the limit."""

    def __init__(
        self, records: Collection[Record] = (), assoc_mgr: str = "", licences_text: str = "", gate_licence: str = ""
    ) -> None:
        self._gate_licence = gate_licence
        entries = list(_entries(assoc_mgr))
        self._qos = {e.fields["QOS"].partition("(")[0]: e for e in entries if "QOS" in e.fields}
        self._associations = {int(e.fields["ID"]): e for e in entries if e.fields.get("ID", "").isdigit()}
        self._accounts = {e.fields["Account"]: e for e in self._associations.values() if not e.fields["UserName"]}
        self.left = {e.limit(*key): left for e in entries for key, left in e.left.items()}
        for name, free in re.findall(r"LicenseName=(\S+)\s.*?\bFree=(\d+)", licences_text, re.DOTALL):
            if name != gate_licence:
                self.left[f"Licenses: {name}"] = int(free)
        owners = ("ID", "UserName", "Account", "ParentAccount", "QOS")
        self.structure = (frozenset(self.left), frozenset(tuple(e.fields.get(key) for key in owners) for e in entries))
        """The limits and their owners. As long as they stay the same, `uses` of a record does."""
        self.left |= arrays_left(records)

    def uses(self, record: Record) -> Uses:
        """The limits that a job uses while it runs, each with the amount."""
        takes = {"": 1, **tres(str(record.get("tres_req_str") or ""))}
        found = {limit: takes.get(kind, 0) for limit, kind in self._bounds(record)}
        found |= {f"Licenses: {name}": count for name, count in licences(record, self._gate_licence).items()}
        if number(record.get("array_max_tasks")):
            found[f"JobArrayTaskLimit: {number(record.get('array_job_id'))}"] = 1
        return tuple((limit, count) for limit, count in found.items() if count and limit in self.left)

    def _bounds(self, record: Record) -> Iterator[tuple[str, str]]:
        """The limits that apply to a job, each with its kind. A limit of the job's QOS replaces the limits of its
        associations (Slurm's "Resource Limits": the first of QOS, user and account). Parent accounts count too."""
        qos = self._qos.get(str(record.get("qos") or ""))
        whose = ("", f"U{number(record.get('user_id'))}", f"A{record.get('account')}")
        binding = [key for key in qos.left if key[2] in whose] if qos else []
        yield from ((qos.limit(*key), key[1]) for key in binding if qos)
        taken = {("Max" if family != "Grp" and not kind else family, kind) for family, kind, _ in binding}
        own = here = self._associations.get(number(record.get("association_id")) or 0)
        while here is not None:
            for family, kind, _ in here.left:
                # Slurm copies an account's MaxJobs to its users when it is set, so only the users' own counts.
                if (family, kind) not in taken and (family == "Grp" or here is own):
                    yield here.limit(family, kind, ""), kind
            here = self._above(here)

    def _above(self, entry: _Entry) -> _Entry | None:
        if entry.fields["UserName"]:
            return self._accounts.get(entry.fields["Account"])
        return self._accounts.get(entry.fields.get("ParentAccount", "").partition("(")[0])


def licences(record: Record, gate_licence: str) -> dict[str, int]:
    """The licences that a job's user requests. Alternatives (`a|b`, from 24.05 on) are left to Slurm."""
    text = str(record.get("licenses") or "")
    found = re.findall(r"([^,;:=]+)(?:[:=](\d+))?", "" if "|" in text else text)
    return {name: int(count or 1) for name, count in found if name != gate_licence}


def _entries(text: str) -> Iterator[_Entry]:
    """The associations and QOS in the text of assoc_mgr. Each has one or more lines."""
    entry, section, whose = _Entry(), "", ""
    for word in text.replace("Account Limits", "Section=A").replace("User Limits", "Section=U").split():
        key, equals, value = word.partition("=")
        if equals and key in ("ClusterName", "QOS"):
            if entry.fields:
                yield entry
            entry, section, whose = _Entry(), "", ""
        if key == "Section":
            section = value
        elif not equals:
            whose = section and section + re.sub(r".+\((\d+)\)", r"\1", word)  # a user is `61801` or `ada(61801)`
        elif key in _FAMILIES:
            for kind, limit, used in re.findall(r"(?:^|,)(?:([\w/:]+)=)?(\d+)\((\d+)\)", value):
                if kind in _KINDS:
                    entry.left[_FAMILIES[key], kind, whose] = int(limit) - int(used)
        else:
            entry.fields.setdefault(key, value)
    if entry.fields:
        yield entry


def tres(text: str) -> dict[str, int]:
    """`cpu=2,mem=1.50G,node=1` by kind; memory in MiB."""
    found = re.findall(r"(\w+)=([\d.]+)([KMGTP]?)", text)
    return {kind: round(float(count) * MIB[unit]) for kind, count, unit in found}


def arrays_left(records: Iterable[Record]) -> dict[str, int]:
    """How many more tasks of each array may run by its `%limit`."""
    most, running = dict[str, int](), Counter[str]()
    for record in records:
        if limit := number(record.get("array_max_tasks")):
            name = f"JobArrayTaskLimit: {number(record['array_job_id'])}"
            most[name] = max(limit, most.get(name, 0))
            running[name] += not _RUNNING.isdisjoint(words(record["job_state"]))
    return {name: limit - running[name] for name, limit in most.items()}
