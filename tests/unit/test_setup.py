"""scripts/setup: it installs nothing on a machine that has a Slurm of its own, and says what fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

SETUP = Path(__file__).parents[2] / "scripts/setup"
OLDEST = "3.11.2"
"""The Python of Debian 12."""


def run(tmp_path: Path, *commands: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script as a user on a machine where no package is installed, and where these commands exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    replaced = {"dpkg-query": "exit 1", "id": "echo 1000", "apt-get": f"touch {tmp_path}/installed"}
    for name, script in (replaced | dict.fromkeys(commands, "exit 0")).items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    for name in ("dirname", "grep", "sh", "mount", "unshare", "touch"):
        (programs / name).symlink_to(next(path for path in (f"/usr/bin/{name}", f"/bin/{name}") if Path(path).exists()))
    done = subprocess.run(
        ["/bin/sh", "-c", f'{prefix} exec /bin/sh "$0"', str(SETUP)],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not (tmp_path / "installed").exists()
    return done


def test_on_another_machine_packages_are_installed_by_root(tmp_path: Path) -> None:
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine has a slurm.conf")
    assert "run it as root" in run(tmp_path).stderr


def test_nothing_is_installed_beside_a_slurmctld_that_is_no_package(tmp_path: Path) -> None:
    said = run(tmp_path, "slurmctld").stderr
    assert f"{tmp_path}/bin/slurmctld" in said and "site render" in said and "run it as root" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_nothing_is_installed_beside_a_slurm_conf(tmp_path: Path) -> None:
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/slurm.conf").touch()
    script = f"mount --bind {tmp_path}/etc /etc && exec sh {SETUP}"
    said = run(tmp_path, prefix=f"unshare --mount sh -c '{script}'; exit $?;").stderr
    assert "/etc/slurm/slurm.conf" in said and "site render" in said and "run it as root" not in said


@pytest.mark.parametrize("status", [0, 1])
def test_pip_is_heard_only_if_it_fails(tmp_path: Path, status: int) -> None:
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    for path in (checkout / "scripts", checkout / ".venv/bin", programs):
        path.mkdir(parents=True)
    for name in ("requirements.txt", "pyproject.toml"):
        (checkout / name).touch()
    script = shutil.copy(SETUP, checkout / "scripts")
    says = f"echo 'WARNING: Location is ignored' >&2; echo 'ERROR: no such package' >&2; exit {status}"
    replaced = {"dpkg-query": "echo installed", "id": "echo 1000"}
    for path, text in ((checkout / ".venv/bin/pip", says), (checkout / ".venv/bin/python", "exit 0"),
                       *((programs / name, text) for name, text in replaced.items())):  # fmt: skip
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", script], env={"PATH": f"{programs}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout == "setup: Python environment in .venv\n"
    assert done.stderr == ("" if status == 0 else "WARNING: Location is ignored\nERROR: no such package\n")
    assert (checkout / ".venv/.multiverse-setup").exists() is (status == 0), "a failed one is repeated"


def test_each_pinned_version_runs_with_the_python_of_debian_12() -> None:
    pins = [Requirement(line) for line in (SETUP.parents[1] / "requirements.txt").read_text().splitlines() if line]
    assert len(pins) > 50
    needs = {str(pin): metadata(pin.name).get("Requires-Python") or "" for pin in pins}
    assert not {pin: said for pin, said in needs.items() if OLDEST not in SpecifierSet(said)}
