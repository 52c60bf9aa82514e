"""The CPU of this host as QEMU's guests can have it, and QEMU's CPU models that it runs."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multiverse.core.errors import Broken
from multiverse.core.model.machine import HOST_CPU, MachineKind

_LIMIT = 20.0  # seconds for QEMU to start and answer: it takes 0.2
_UNNAMED = "a feature without a name"  # QEMU shows some as an empty string


@dataclass(frozen=True)
class HostCpu:
    vendor: str
    name: str  # with family, model and stepping
    features: frozenset[str]  # of a guest that has all
    models: tuple[str, ...]  # of QEMU, all of whose features it has: the newest first
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of each other model, features it lacks
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models

    def named(self, model: str) -> str:
        """The model that has this name, perhaps among others."""
        return self.aliases.get(model, model)

    def why_not(self, model: str) -> str:
        """Why guests cannot have that model; empty if they can."""
        if self.named(model) in (HOST_CPU, *self.models):
            return ""
        lacks = self.lacking.get(self.named(model), ())
        return f"this CPU lacks {', '.join(lacks)}" if lacks else "QEMU has no such model for guests that move"

    def described(self, machine: MachineKind, wanted: str) -> MachineKind:
        """The machine that VMs see on this CPU; `wanted` is the model of the settings."""
        other = self.named(wanted) if self.why_not(wanted) else ""
        return replace(
            machine, features=self.features, vendor=self.vendor, processor=self.name, models=self.models,
            wanted=other, lacking=self.lacking.get(other, ()),
        )  # fmt: skip

    @property
    def identity(self) -> str:
        """Equal for CPUs of which guests that have all cannot tell which one they have."""
        facts = "\0".join((self.vendor, self.name, *sorted(self.features)))
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


def examine(binary: str, accelerator: str = "kvm") -> HostCpu:
    """Ask QEMU about this host's CPU. No guest runs. Takes 0.3 s. Raises `Broken` if QEMU does not answer."""
    model = HOST_CPU if accelerator == "kvm" else "max"
    host, known = _ask(binary, accelerator, [_expansion(model), {"execute": "query-cpu-definitions"}])
    if not host or not known:
        raise Broken(f"{binary} does not describe the host's CPU", hint="install another QEMU: see qemu.binary")
    wanted = [one["name"] for one in known if _is_model(one) and not one["unavailable-features"]]
    expanded = _ask(binary, accelerator, [_expansion(name) for name in wanted])
    return host_cpu(host, known, dict(zip(wanted, expanded, strict=True)))


def host_cpu(
    host: Mapping[str, Any], known: Sequence[Mapping[str, Any]], expanded: Mapping[str, Mapping[str, Any] | None]
) -> HostCpu:
    """The CPU, from QEMU's answers: `host` and `expanded` to query-cpu-model-expansion of the host's CPU and of the
    models, `known` to query-cpu-definitions. The newest of the models that a CPU runs is that with most features."""
    props = host["model"]["props"]
    runs = {one["name"]: _features(expanded.get(one["name"])) for one in known
            if _is_model(one) and not one["unavailable-features"]}  # fmt: skip
    return HostCpu(
        props["vendor"],
        f"{props['model-id'].strip()} (family {props['family']}, model {props['model']}, stepping {props['stepping']})",
        _features(host),
        tuple(sorted(runs, key=lambda name: (len(runs[name]), name), reverse=True)),
        {one["name"]: tuple(sorted({lacks or _UNNAMED for lacks in one["unavailable-features"]}))
         for one in known if _is_model(one) and one["unavailable-features"]},
        {one["name"]: one["alias-of"] for one in known if "alias-of" in one},
    )  # fmt: skip


def _is_model(known: Mapping[str, Any]) -> bool:
    """Whether guests with it look the same on every host that runs it. `base` is for computing with."""
    return bool(known["migration-safe"]) and not known["static"] and "alias-of" not in known


def _features(expansion: Mapping[str, Any] | None) -> frozenset[str]:
    """What is on. Some features have several names, which differ by their punctuation."""
    props = expansion["model"]["props"] if expansion else {}
    return frozenset(name.replace("_", "-").replace(".", "-") for name, value in props.items() if value is True)


def _expansion(model: str) -> dict[str, Any]:
    return {"execute": "query-cpu-model-expansion", "arguments": {"type": "full", "model": {"name": model}}}


def _ask(binary: str, accelerator: str, commands: Sequence[dict[str, Any]]) -> list[Any]:
    """What QEMU returns; None for a command that it refuses."""
    argv = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35",
            "-accel", accelerator, "-m", "32M", "-S", "-qmp", "stdio"]  # fmt: skip
    asked = [{"execute": "qmp_capabilities"}, *commands, {"execute": "quit"}]
    problem = f"{binary} says nothing of the host's CPU"
    try:
        done = subprocess.run(
            argv, input="\n".join(map(json.dumps, asked)), capture_output=True, text=True, errors="replace",
            timeout=_LIMIT,
        )  # fmt: skip
        answers = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise Broken(f"{problem}: {error}", hint="see qemu.binary in the configuration") from error
    found = [one.get("return") for one in answers if "return" in one or "error" in one]
    if len(found) < len(asked) - 1:
        raise Broken(f"{problem}: {done.stderr.strip()[-300:]}", hint="see qemu.binary in the configuration")
    return found[1 : len(commands) + 1]
