"""What a VM is to be: one whole value, from which this library creates the VM without asking anybody."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass, fields
from typing import Any

from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, VmSpec

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BRIDGE = re.compile(r"[^\s/]{1,15}")
_HINT = "correct the specification"


@dataclass(frozen=True, slots=True)
class Specification(VmSpec):
    """One VM. Everything that tells it from other VMs was chosen by whoever wrote the specification: name, token, MAC
    and address, which has a prefix length. The host adds what is its own: uid, tap and directory. Token and address may
    be empty, for callers that know neither yet; then nothing is checked about them.
    """

    bridge: str = ""
    job_groups: tuple[str, ...] = ()  # directories of the control groups of the job that it is inside of, if it is
    job_address: str = ""  # with prefix length: a second one that such a VM has in the network of its job
    functions: int = 0  # virtual functions of this host that it has
    function_groups: tuple[int, ...] | None = None  # the IOMMU groups that these may be of; None: any

    @property
    def bare_address(self) -> str:
        """The address without its prefix length."""
        return self.address.partition("/")[0]

    def check(self) -> None:
        """Raise `Refused`, naming the field, if a value makes no sense."""
        problem = self._problem()
        if problem:
            raise Refused(f"the specification of VM {self.name!r} is wrong: {problem}", hint=_HINT)

    def _problem(self) -> str:
        if not _MAC.fullmatch(self.mac) or int(self.mac[1], 16) & 1:
            return f"mac: {self.mac!r} is no unicast MAC, six pairs of lower-case hex digits"
        if self.token and not _TOKEN.fullmatch(self.token):
            return "token: 1 to 64 letters, digits, - and _"
        if not _BRIDGE.fullmatch(self.bridge):
            return f"bridge: {self.bridge!r} is no name of an interface"
        if self.size.cpus < 1 or self.size.memory < 1:
            return f"size: {self.size}, at least 1 CPU and 1 MiB"
        if self.kind is CloneKind.AUTO:
            return "kind: a VM is instant, linked or full"
        if self.address:
            try:
                ipaddress.IPv4Interface(self.address)
            except ValueError:
                return f"address: {self.address!r} is no IPv4 address with a prefix length"
        return ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Specification:
        """The specification that is a JSON object with these fields; a size is an object with `cpus`, `memory` and
        `disk` (MiB). Raises `Refused`, naming every wrong field; token, address and bridge too must be there."""
        from pydantic import TypeAdapter, ValidationError  # a tenth of a second that nobody else needs

        try:
            raw: Any = json.loads(text)
            unknown = sorted(set(raw) - {one.name for one in fields(cls)}) if isinstance(raw, dict) else []
            if unknown:
                raise Refused(f"unknown fields in a specification: {', '.join(unknown)}", hint=_HINT)
            found = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in error.errors()]
            raise Refused(f"this is no specification of a VM: {'; '.join(problems)}", hint=_HINT) from error
        except ValueError as error:
            raise Refused(f"this is not JSON: {error}", hint=_HINT) from error
        empty = [field for field in ("token", "address") if not getattr(found, field)]
        if empty:
            raise Refused(f"the specification of VM {found.name!r} lacks: {', '.join(empty)}", hint=_HINT)
        found.check()
        return found
