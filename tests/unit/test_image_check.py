"""What a trial of an image says about jobs, and what the program in its guest finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Refused
from multiverse.drivers.qemu.image_trial import ImageTrial
from multiverse.drivers.slurm.site.requirements import Version, version
from multiverse.guest import check_program
from multiverse.images.catalog import ABILITIES
from multiverse.site.image_check import CheckLine, CheckVerdict, fails, judge, refusal, release_of_slurm

SITE = version("slurm 22.05.8")
FACTS: dict[str, Any] = {
    "expected": {"hostname": "mvcheck-1", "machine_id": "ab", "user": "uid=1(u)"},
    "hostname": "mvcheck-1", "machine_id": "ab", "clock": 0.1, "secrets": [], "user": "uid=1(u)",
    "tmp": {"mode": "1777", "free": 2000, "error": ""}, "nfs": True, "interface": "eth0", "address": "198.51.100.1/24",
    "munge": {"version": "munge-0.5.15", "error": ""}, "slurmd": {"version": "22.05.8", "error": ""},
    "units": {"failed": [], "waiting": [], "slow": []}, "programs": [], "kernel": "6.1",
}  # fmt: skip
TRIAL = ImageTrial("kvm", frozenset(ABILITIES), 1024, "instant", 3.0, 0.2, facts=FACTS)


def lines(verdict: CheckVerdict, trial: ImageTrial = TRIAL, release: Version | None = SITE) -> list[CheckLine]:
    return [line for line in judge(trial, release) if line.verdict is verdict]


def test_an_image_in_which_all_is_right_passes_without_a_remedy() -> None:
    found = judge(TRIAL, SITE)
    assert {line.verdict for line in found} == {CheckVerdict.RIGHT} and not fails(found)
    assert not any(line.remedy for line in found)
    assert {line.what for line in found} >= {"guest agent", "clone", "time", "mounts", "munge", "slurmd", "/tmp",
                                             "name service of users", "units", "release of slurmd"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hostname": "localhost"}, "host name"),
        ({"machine_id": "cd"}, "machine-id"),
        ({"clock": -3600.0}, "time"),
        ({"secrets": ["/etc/munge/munge.key"]}, "secrets"),
        ({"user": ""}, "name service of users"),
        ({"tmp": {"mode": "755", "free": 2000, "error": "a job cannot use it"}}, "/tmp"),
        ({"tmp": {"mode": "1777", "free": 120, "error": ""}}, "/tmp"),
        ({"nfs": False}, "mounts"),
        ({"munge": {"version": "", "error": "there is no user munge"}}, "munge"),
        ({"slurmd": {"version": "", "error": "No such file"}}, "slurmd"),
        ({"slurmd": {"version": "22.05.8", "error": "it ends at once: fatal"}}, "slurmd"),
        ({"slurmd": {"version": "23.02.1", "error": ""}}, "release of slurmd"),
        ({"programs": ["/bin/bash"]}, "programs"),
    ],
)
def test_what_would_make_a_job_fail_is_wrong_and_has_a_remedy(changes: dict[str, Any], what: str) -> None:
    (line,) = lines(CheckVerdict.WRONG, replace(TRIAL, facts=FACTS | changes))
    assert line.what == what and line.remedy
    assert fails([line])


@pytest.mark.parametrize(
    ("trial", "what"),
    [
        (replace(TRIAL, boot=None, facts=None, fault="no word of it; its console: Kernel panic"), "guest agent"),
        (replace(TRIAL, facts=None, fault="the image has no user 'munge'"), "identity"),
        (replace(TRIAL, facts=None, silence="timed out"), "network"),
    ],
)
def test_an_image_that_does_not_get_as_far_as_its_examination_is_wrong(trial: ImageTrial, what: str) -> None:
    (line,) = lines(CheckVerdict.WRONG, trial)
    assert line.what == what and (trial.fault or trial.silence) in line.said


def test_what_only_costs_time_is_a_note() -> None:
    units = {"failed": [["ssh.service", "exit-code"]], "waiting": ["cloud-init.service"],
             "slow": [["apparmor.service", 29.2], ["cron.service", 1.1]]}  # fmt: skip
    trial = replace(TRIAL, accelerator="tcg", boot=80.0, abilities=frozenset({"fork"}), facts=FACTS | {"units": units})
    said = {line.what: line.said for line in lines(CheckVerdict.NOTE, trial)}
    assert said["unit ssh.service"] == "it failed (exit-code)"
    assert said["units"] == "still starting: cloud-init.service"
    assert said["slow to start"] == "apparmor.service 29.2 s"
    assert said["guest agent"].startswith("at the fork point after 80.0 s")
    assert "plug_memory" in said["abilities"]
    assert not fails(judge(trial, SITE))


def test_an_image_without_systemd_has_no_lines_about_units() -> None:
    found = judge(replace(TRIAL, facts=FACTS | {"units": None}), SITE)
    assert not fails(found) and not [line for line in found if "unit" in line.what]


def test_the_release_of_the_site_is_given_or_asked_for_or_unknown(tmp_path: Path) -> None:
    nowhere = Settings(slurm=SlurmSettings(conf=tmp_path / "slurm.conf"))
    assert release_of_slurm("24.11", nowhere) == (24, 11, 0)
    assert release_of_slurm(None, nowhere) is None
    with pytest.raises(Refused, match="latest"):
        release_of_slurm("latest", nowhere)
    (line,) = lines(CheckVerdict.NOTE, release=None)
    assert line.what == "release of slurmd" and "--slurm" in line.remedy
    assert refusal(SITE, "24.11.5-4") and not refusal(SITE, "22.05.8-4+deb12u1") and not refusal(None, "24.11.5")


# --- the program in the guest ------------------------------------------------------------------------


def test_the_times_of_units_are_read_as_systemd_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "1min 2.500s apparmor.service\n   3.100s dev-vda.device\n   2.000s a.service\n   900ms b.service\nx y\n"
    monkeypatch.setattr(check_program, "output", lambda *argv: (said, True))
    assert check_program.slowest() == [("apparmor.service", 62.5), ("a.service", 2.0)]


def test_a_log_is_told_by_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_program, "WORK", str(tmp_path))
    assert check_program.tail("slurmd") == ""
    (tmp_path / "slurmd.log").write_text("slurmd: started\nslurmd: error: no cgroup\nslurmd: ended\n")
    assert check_program.tail("slurmd") == "slurmd: error: no cgroup"
    (tmp_path / "slurmd.log").write_text("one\ntwo\n")
    assert check_program.tail("slurmd") == "one; two"


def test_a_program_that_is_absent_or_fails_is_told() -> None:
    assert check_program.output("/bin/sh", "-c", "echo no; exit 3") == ("no", False)
    assert check_program.output("/bin/echo", "yes") == ("yes", True)
    assert not check_program.output("/nowhere/program")[1]
