"""Between which hosts VMs move with KVM, by the CPUs of real machines: see `recorded_cpus`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.machine import common_model, why_other_machine
from multiverse.host.manifest import Specification
from multiverse.host.qemu import abilities, cpus, saves
from multiverse.host.qemu.context import HostContext, QemuHostConfig
from multiverse.host.qemu.machine import Accelerator
from multiverse.host.qemu.saved_files import SavedFile
from multiverse.host.qemu.saves import SavedVm
from multiverse.host.qemu.templates import key_of
from multiverse.images.catalog import Image
from tests.unit.recorded_cpus import cpu, machine

IMAGE = Image("slim", "slim", "key", "base", Path("/images/slim"), "quiet", "6.1", "bookworm")
EQUAL = "and a VM with its host's CPU needs an equal one"


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("haswell", "haswell", ""),
        ("haswell", "broadwell", "its CPU lacks spec-ctrl"),
        ("broadwell", "haswell", "its CPU lacks 3dnowprefetch, adx, hle and more"),
        ("broadwell", "skylake", f"its CPU also has avx512bw, avx512cd, avx512dq and more, {EQUAL}"),
        ("skylake", "cascadelake", f"its CPU also has avx512vnni, ibrs-all, rdctl-no, {EQUAL}"),
        ("skylake", "cascadelake without TSX", "its CPU lacks hle, rtm"),
        ("cascadelake", "skylake", "its CPU lacks avx512vnni, ibrs-all, rdctl-no"),
        ("milan", "rome", "its CPU lacks erms, fsrm, invpcid and more"),
        ("skylake", "milan", "it has a CPU by AuthenticAMD, not GenuineIntel"),
        ("rome", "broadwell", "it has a CPU by GenuineIntel, not AuthenticAMD"),
    ],
)  # fmt: skip
def test_with_the_cpu_of_its_host_a_vm_moves_to_an_equal_cpu_alone(source: str, target: str, why: str) -> None:
    assert why_other_machine(machine(source), machine(target)) == why


@pytest.mark.parametrize(
    ("model", "source", "target", "why"),
    [
        ("Haswell-v2", "haswell", "broadwell", ""),
        ("Haswell-v2", "broadwell", "cascadelake", ""),
        ("Haswell", "broadwell", "haswell", "its CPU lacks hle, rtm of model Haswell-v1"),
        ("Broadwell-v2", "broadwell", "haswell",
         "its CPU lacks 3dnowprefetch, adx, rdseed and more of model Broadwell-v2"),
        ("Broadwell-v2", "skylake", "broadwell", ""),
        ("Skylake-Server-IBRS", "skylake", "cascadelake", ""),
        ("Skylake-Server-IBRS", "skylake", "cascadelake without TSX",
         "its CPU lacks hle, rtm of model Skylake-Server-v2"),
        ("Skylake-Server-noTSX-IBRS", "skylake", "cascadelake without TSX", ""),
        ("Cascadelake-Server-v5", "cascadelake without TSX", "skylake",
         "its CPU lacks avx512vnni, ibrs-all, mds-no and more of model Cascadelake-Server-v5"),
        ("EPYC-Rome", "rome", "milan", ""),
        ("EPYC-Rome", "milan", "rome", ""),
        ("EPYC-Milan-v1", "milan", "rome", "it does not run guests with CPU model EPYC-Milan-v1"),
        ("EPYC-v1", "rome", "skylake", "it has a CPU by GenuineIntel, not AuthenticAMD"),
        ("Haswell-v4", "milan", "haswell", "it has a CPU by GenuineIntel, not AuthenticAMD"),
    ],
)  # fmt: skip
def test_with_a_named_model_a_vm_moves_to_whatever_cpu_runs_it(model: str, source: str, target: str, why: str) -> None:
    found = why_other_machine(machine(source, model), machine(target, model))
    if machine(source, model).cpu == "host":
        assert found, "the source itself does not run the model"
    else:
        assert found == why


def test_a_host_whose_settings_name_another_model_takes_a_vm_if_it_runs_its_model() -> None:
    running, changed = machine("skylake", "Broadwell-v4"), machine("skylake", "Skylake-Server-v4")
    assert not why_other_machine(running, changed), "the VM was started before the settings were changed"
    assert not why_other_machine(running, machine("skylake"))
    assert why_other_machine(machine("skylake"), machine("cascadelake", "Skylake-Server-v2"))
    assert not why_other_machine(machine("skylake"), changed), "its CPU is equal"


def test_a_host_that_does_not_run_the_model_of_the_settings_says_so_and_its_guests_have_its_own() -> None:
    there = machine("haswell", "Haswell")
    assert (there.cpu, there.wanted, there.lacking) == ("host", "Haswell-v1", ("hle", "rtm"))
    assert cpu("haswell").why_not("Haswell") == "this CPU lacks hle, rtm"
    assert cpu("haswell").why_not("Haswell-v4") == cpu("haswell").why_not("host") == ""
    unnamed = machine("cascadelake", "Cascadelake-Server-v1")
    assert unnamed.lacking == ("a feature without a name",)
    unknown = machine("haswell", "Hasswell")
    assert (unknown.wanted, unknown.lacking) == ("Hasswell", ())
    assert cpu("haswell").why_not("Hasswell") == cpu("haswell").why_not("base") != ""


@pytest.mark.parametrize(
    ("names", "model"),
    [
        ("skylake", ""),
        ("skylake skylake", ""),
        ("haswell broadwell", "Haswell-v2"),
        ("haswell broadwell cascadelake", "Haswell-v2"),
        ("skylake cascadelake", "Skylake-Server-v2"),
        ("skylake cascadelake_without_TSX", "Skylake-Server-v5"),
        ("haswell skylake", "Nehalem-v1"),
        ("rome milan", "EPYC-Rome-v1"),
        ("rome skylake", ""),
    ],
)
def test_the_newest_model_that_all_cpus_run_is_proposed(names: str, model: str) -> None:
    machines = [machine(name.replace("_", " ")) for name in names.split(" ")]
    assert common_model(machines) == common_model(machines[::-1]) == model
    if model:
        with_it = [machine(name.replace("_", " "), model) for name in names.split(" ")]
        assert not any(why_other_machine(one, other) for one in with_it for other in with_it)
        assert common_model(with_it) == "", "nothing is left to propose"


def test_qemu_is_told_to_end_rather_than_to_leave_out_what_the_cpu_lacks() -> None:
    assert Accelerator("kvm", model="EPYC-v3").cpu_option == "EPYC-v3,enforce"
    assert Accelerator("kvm").cpu_option == "host" and Accelerator("tcg", model="EPYC-v3").cpu_option == "max"


# --- one host ---------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostContext]:
    """Makes a host with a CPU, and with a CPU model in its settings."""
    monkeypatch.setattr(abilities, "qemu_version", lambda binary: "QEMU emulator version 9.2.0")
    monkeypatch.setattr(abilities, "board", lambda binary: "pc-q35-9.2")

    def make(name: str, wanted: str = "host", how: str = "kvm") -> HostContext:
        monkeypatch.setattr(abilities, "accelerator", lambda *_: Accelerator(how))
        monkeypatch.setattr(cpus, "examine", lambda binary: cpu(name))
        at = tmp_path
        config = QemuHostConfig("h", "mva-", Size(1, 256), at / "images", at / "templates", at / "vms", at / "run",
                                at / "cache", cpu=wanted, saves=at / "saves",
                                template_source=at / "shared")  # fmt: skip
        return HostContext(config)

    return make


def test_a_host_gives_its_guests_the_model_of_the_settings_or_its_own_cpu(host: Callable[..., HostContext]) -> None:
    found = host("skylake", "Skylake-Server-IBRS")
    assert (found.accelerator.cpu, found.model_off) == ("Skylake-Server-v2", {})
    assert found.machine_kind() == machine("skylake", "Skylake-Server-IBRS")
    found = host("haswell", "Haswell")
    assert found.accelerator.cpu == "host"
    assert found.model_off == {"CPU model Haswell": "this CPU lacks hle, rtm"}
    assert found.machine_kind() == machine("haswell", "Haswell")
    emulated = host("haswell", "Haswell", "tcg")
    assert (emulated.accelerator.cpu, emulated.machine_kind().cpu, emulated.model_off) == ("max", "max", {})
    assert (emulated.machine_kind().tsc_khz % 1000, emulated.machine_kind().features) == (0, frozenset())


def test_a_template_is_of_one_model_and_copied_between_hosts_with_that_model(host: Callable[..., HostContext]) -> None:

    def of(found: HostContext) -> tuple[str, str]:
        shape = found.template_machine(IMAGE, Size(1, 256))(Path("/"), Path("/"))
        assert found.copies is not None
        return key_of(IMAGE, shape, found.version), found.copies.cpu

    assert of(host("skylake", "Skylake-Server-v2")) == of(host("cascadelake", "Skylake-Server-v2"))
    assert of(host("skylake", "Skylake-Server-v2"))[0] != of(host("skylake", "Skylake-Server-v3"))[0]
    assert of(host("skylake", "Skylake-Server-v2"))[0] != of(host("skylake"))[0]
    assert of(host("skylake"))[1] != of(host("cascadelake"))[1]
    assert of(host("skylake", "Nehalem-v1"))[1] != of(host("milan", "Nehalem-v1"))[1]


@pytest.mark.parametrize(
    ("saved_on", "resumed_on", "fits"),
    [
        (("skylake", "host"), ("skylake", "host"), True),
        (("skylake", "host"), ("cascadelake", "host"), False),
        (("skylake", "Skylake-Server-v2"), ("cascadelake", "Skylake-Server-v2"), True),
        (("skylake", "Skylake-Server-v2"), ("skylake", "Broadwell-v1"), True),
        (("skylake", "Skylake-Server-v2"), ("cascadelake without TSX", "Skylake-Server-v2"), False),
        (("skylake", "Nehalem-v1"), ("milan", "Nehalem-v1"), False),
        (("skylake", "host", "tcg"), ("milan", "host", "tcg"), True),
        (("skylake", "host", "tcg"), ("skylake", "host"), False),
    ],
)
def test_a_saved_vm_is_restored_where_it_can_have_the_same_cpu(
    host: Callable[..., HostContext], tmp_path: Path, saved_on: tuple[str, ...], resumed_on: tuple[str, ...], fits: bool
) -> None:
    source = host(*saved_on)
    place = tmp_path / "saves"
    (place / "s").mkdir(parents=True)
    file = SavedFile(0, "")
    facts = SavedVm("mva-1", "t", CloneKind.INSTANT, "slim", "key", source.version,
                    source.guest_cpu(source.accelerator.cpu), "02:00:00:00:00:02", "", 1, 256, 1, 256, 1, file, file,
                    0.0)  # fmt: skip
    (place / "s" / "save.json").write_text(json.dumps(asdict(facts)))
    (place / ".storage").write_text("here")
    spec = Specification("mva-1", "h", "slim", CloneKind.INSTANT, Size(1, 256), "02:00:00:00:00:02", saved="s",
                         storage="here")  # fmt: skip
    if fits:
        assert saves.find(host(*resumed_on), spec, IMAGE).cpu == ("" if len(saved_on) > 2 else source.accelerator.cpu)
    else:
        with pytest.raises(Refused, match="makes another machine"):
            saves.find(host(*resumed_on), spec, IMAGE)


# --- asking QEMU ------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Path]:
    """A program in place of QEMU."""
    path = tmp_path / "qemu"
    yield path
    assert not list(tmp_path.glob("core*"))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cat >/dev/null; echo no such accelerator >&2; exit 1", "no such accelerator"),
        ("cat >/dev/null; echo this is no JSON", "says nothing of the host's CPU"),
        ("""cat >/dev/null; for i in 1 2 3 4; do echo '{"error": {"desc": "no"}}'; done""", "does not describe"),
    ],
)
def test_a_qemu_that_does_not_answer_is_no_cpu(fake: Path, text: str, why: str) -> None:
    with pytest.raises(Broken, match=why):
        cpus.examine(script(fake, text))
    with pytest.raises(Broken, match="No such file"):
        cpus.examine("/nonexistent/qemu")


def test_features_with_several_names_count_once_and_those_that_are_off_do_not() -> None:
    props: dict[str, Any] = {"sse4.1": True, "sse4_1": True, "sse4-1": True, "avx": False, "min-level": 13}
    assert cpus._features({"model": {"props": props}}) == {"sse4-1"}
    assert cpus._features(None) == frozenset()
