"""CPUs as QEMU describes them on real machines: facts from recordings of its answers to query-cpu-model-expansion and
query-cpu-definitions with KVM. They were taken from the files `FILES` in `tests/cputestdata` of libvirt (LGPL 2.1 or
later), of which nothing but these facts is here.

Of the features there are those that not all of these CPUs have, of the models those that matter here. Releases of QEMU
before 4.1 have no versions of models: of their answers the models have the names by which later releases know them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multiverse.core.model.machine import HOST_CPU, MachineKind
from multiverse.host.qemu.cpus import HostCpu, host_cpu

FILES = {
    "haswell": "x86_64-cpuid-Xeon-E5-2609-v3.json",
    "broadwell": "x86_64-cpuid-Xeon-E5-2650-v4.json",
    "skylake": "x86_64-cpuid-Xeon-Gold-6152.json",
    "cascadelake": "x86_64-cpuid-Xeon-Platinum-8268.json",
    "cascadelake without TSX": "x86_64-cpuid-Xeon-Silver-4214R.json",
    "rome": "x86_64-cpuid-EPYC-7502-32-Core.json",
    "milan": "x86_64-cpuid-EPYC-7713-64-Core.json",
}

_HASWELL = "pcid erms invpcid"
_BROADWELL = f"{_HASWELL} hle rtm adx rdseed smap 3dnowprefetch"
_AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"
_SKYLAKE = f"{_BROADWELL} {_AVX512} clflushopt clwb mpx pku spec-ctrl xgetbv1 xsavec"
_CASCADELAKE = f"{_SKYLAKE} avx512vnni ibrs-all rdctl-no"
_ROME = (
    "adx rdseed smap 3dnowprefetch clflushopt clwb spec-ctrl xgetbv1 xsavec rdctl-no"
    " clzero misalignsse perfctr-core rdpid sha-ni sse4a wbnoinvd"
)
_INTEL_LACKS = "sha-ni mmxext fxsr-opt cr8legacy sse4a misalignsse osvw"

_CPUS: dict[str, tuple[str, str, tuple[int, int, int], str, dict[str, str]]] = {
    "haswell": ("GenuineIntel", "Intel(R) Xeon(R) CPU E5-2609 v3 @ 1.90GHz", (6, 63, 2), f"{_HASWELL} spec-ctrl", {
        "Nehalem-v1": "", "Haswell-v1": "hle rtm", "Haswell-v2": "", "Haswell-v3": "hle rtm", "Haswell-v4": "",
        "Broadwell-v1": "hle rtm rdseed adx smap 3dnowprefetch", "Broadwell-v2": "rdseed adx smap 3dnowprefetch",
        "Broadwell-v4": "rdseed adx smap 3dnowprefetch",
        "Skylake-Server-v1": f"hle rtm mpx {_AVX512} rdseed adx smap clwb 3dnowprefetch xsavec xgetbv1",
    }),
    "broadwell": ("GenuineIntel", "Intel(R) Xeon(R) CPU E5-2650 v4 @ 2.20GHz", (6, 79, 1), _BROADWELL, {
        "Nehalem-v1": "", "Haswell-v1": "", "Haswell-v2": "", "Broadwell-v1": "", "Broadwell-v2": "",
        "Skylake-Client-v1": "mpx xsavec xgetbv1", "Opteron_G5-v1": "sse4a misalignsse xop fma4 tbm",
    }),
    "skylake": ("GenuineIntel", "Intel(R) Xeon(R) Gold 6152 CPU @ 2.10GHz", (6, 85, 4), _SKYLAKE, {
        "Nehalem-v1": "", "Nehalem-v2": "", "Broadwell-v1": "", "Broadwell-v2": "", "Broadwell-v3": "",
        "Broadwell-v4": "", "Skylake-Server-v1": "", "Skylake-Server-v2": "", "Skylake-Server-v3": "",
        "Skylake-Server-v4": "", "Skylake-Server-v5": "", "Cascadelake-Server-v1": "avx512vnni",
        "Cascadelake-Server-v2": "avx512vnni rdctl-no ibrs-all mds-no",
        "Cascadelake-Server-v5": "avx512vnni rdctl-no ibrs-all mds-no", "EPYC-v1": _INTEL_LACKS,
    }),
    "cascadelake": ("GenuineIntel", "Intel(R) Xeon(R) Platinum 8268 CPU @ 2.90GHz", (6, 85, 6), _CASCADELAKE, {
        "Nehalem-v1": "", "Nehalem-v2": "", "Haswell-v1": "", "Haswell-v2": "", "Haswell-v3": "", "Haswell-v4": "",
        "Skylake-Server-v1": "", "Skylake-Server-v2": "", "EPYC-v1": _INTEL_LACKS, "EPYC-v2": f"{_INTEL_LACKS} ibpb",
        "Cascadelake-Server-v1": "-", "Icelake-Server-v1": "- avx512vbmi avx512vbmi2 gfni vaes vpclmulqdq avx512bitalg"
        " avx512-vpopcntdq la57 wbnoinvd",
    }),
    "cascadelake without TSX": (
        "GenuineIntel", "Intel(R) Xeon(R) Silver 4214R CPU @ 2.40GHz", (6, 85, 7),
        _CASCADELAKE.replace("hle rtm ", ""), {
            "Nehalem-v1": "", "Nehalem-v2": "", "Broadwell-v1": "hle rtm", "Broadwell-v2": "",
            "Broadwell-v3": "hle rtm", "Broadwell-v4": "", "Skylake-Server-v1": "hle rtm",
            "Skylake-Server-v2": "hle rtm", "Skylake-Server-v3": "", "Skylake-Server-v4": "", "Skylake-Server-v5": "",
            "Cascadelake-Server-v1": "hle rtm", "Cascadelake-Server-v2": "hle rtm", "Cascadelake-Server-v3": "",
            "Cascadelake-Server-v5": "", "EPYC-v1": _INTEL_LACKS,
        },
    ),
    "rome": ("AuthenticAMD", "AMD EPYC 7502 32-Core Processor                ", (23, 49, 0), _ROME, {
        "EPYC-v1": "", "EPYC-v2": "", "EPYC-v3": "", "EPYC-Rome-v1": "", "Haswell-v1": "pcid hle erms invpcid rtm",
        "Haswell-v4": "pcid erms invpcid",
        "Cascadelake-Server-v3": f"pcid erms invpcid {_AVX512} pku avx512vnni ibrs-all",
    }),
    "milan": (
        "AuthenticAMD", "AMD EPYC 7713 64-Core Processor                ", (25, 1, 1),
        f"{_ROME} {_HASWELL} pku vaes vpclmulqdq fsrm", {
            "EPYC-v1": "", "EPYC-v2": "", "EPYC-v3": "", "EPYC-Rome-v1": "", "EPYC-Milan-v1": "",
            "Haswell-v1": "hle rtm", "Haswell-v4": "", "Skylake-Client-v3": "",
            "Cascadelake-Server-v3": f"{_AVX512} avx512vnni ibrs-all",
        },
    ),
}  # fmt: skip

ALIASES = {"Haswell": "Haswell-v1", "Skylake-Server": "Skylake-Server-v1", "Skylake-Server-IBRS": "Skylake-Server-v2",
           "Skylake-Server-noTSX-IBRS": "Skylake-Server-v3", "EPYC-Rome": "EPYC-Rome-v1"}  # fmt: skip

FEATURES = {
    "Nehalem-v1": 47, "Nehalem-v2": 48, "Haswell-v1": 72, "Haswell-v2": 70, "Haswell-v3": 73, "Haswell-v4": 71,
    "Broadwell-v1": 76, "Broadwell-v2": 74, "Broadwell-v3": 77, "Broadwell-v4": 75, "Skylake-Client-v1": 78,
    "Skylake-Client-v3": 77, "Skylake-Server-v1": 87, "Skylake-Server-v2": 87, "Skylake-Server-v3": 85,
    "Skylake-Server-v4": 85, "Skylake-Server-v5": 86, "Cascadelake-Server-v1": 90, "Cascadelake-Server-v2": 95,
    "Cascadelake-Server-v3": 93, "Cascadelake-Server-v5": 94, "Icelake-Server-v1": 100, "EPYC-v1": 85, "EPYC-v2": 86,
    "EPYC-v3": 90, "EPYC-Rome-v1": 95, "EPYC-Milan-v1": 103, "Opteron_G5-v1": 66,
}  # fmt: skip
"""How many features models have, as QEMU 7.2 tells with emulation."""


def expansion(features: list[str], **more: object) -> dict[str, Any]:
    """What query-cpu-model-expansion answers. Some features have several names there."""
    other = {name.replace("-", "_"): True for name in features}
    return {"model": {"name": "x", "props": {**dict.fromkeys(features, True), **other, "realized": False, **more}}}


def cpu(name: str) -> HostCpu:
    """One of the CPUs, read from answers of QEMU that hold these facts."""
    vendor, model_id, (family, model, stepping), features, models = _CPUS[name]
    numbers = {"vendor": vendor, "model-id": model_id, "family": family, "model": model, "stepping": stepping}
    common = {"typename": "x", "static": False}
    known: list[dict[str, Any]] = [
        {"name": "host", "unavailable-features": [], "migration-safe": False, **common},
        {"name": "base", "unavailable-features": [], "migration-safe": True, **common, "static": True},
        *({"name": one, "unavailable-features": lacks.replace("-", "", 1).split(" ") if lacks[:1] == "-" else
           lacks.split(), "migration-safe": True, **common} for one, lacks in models.items()),
        *({"name": alias, "alias-of": of, "unavailable-features": [], "migration-safe": True, **common}
          for alias, of in ALIASES.items() if of in models),
    ]  # fmt: skip
    expanded = {one: expansion([str(number) for number in range(FEATURES[one])]) for one in models}
    return host_cpu(expansion(features.split(), **numbers), known, expanded)


def machine(name: str, wanted: str = HOST_CPU) -> MachineKind:
    """The machine that VMs see on a host with that CPU, whose settings want that model."""
    found = cpu(name)
    plain = MachineKind("kvm", HOST_CPU, frozenset(), "QEMU emulator version 9.2.0", "pc-q35-9.2")
    model = HOST_CPU if found.why_not(wanted) else found.named(wanted)
    return found.described(replace(plain, cpu=model), wanted)
