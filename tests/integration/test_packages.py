"""The packages in a root file system of their release of Debian: installed, used, removed and purged. What RPMs have.

They are built first, unless dist/ has them: `make packages`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import multiverse
from multiverse.site.rendering import AGENT_SERVICE, BRIDGE_SERVICE, SERVICE
from tests.integration.fresh_machines import RELEASES, ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

DIST = ROOT / "dist"


@pytest.fixture(scope="module")
def built() -> Path:
    """The directory of the packages of all releases."""
    if len([*DIST.glob("*.deb")]) + len([*DIST.glob("*.rpm")]) < 18:
        subprocess.run([ROOT / "scripts/packages"], cwd=ROOT, check=True)
    return DIST


@pytest.fixture(scope="module", params=RELEASES)
def said(request: pytest.FixtureRequest, built: Path) -> dict[str, list[str]]:
    """What the parts of packages.sh have printed in a release, by their names."""
    suite: str = request.param
    argv = [ROOT / "scripts/in-debian", "--copy", suite, "sh", "tests/integration/packages.sh", RELEASES[suite]]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    parts = re.split(r"^== (.*)\n", done.stdout, flags=re.M)
    return {name: text.splitlines() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_packages_are_installed_and_work(said: dict[str, list[str]]) -> None:
    version = [f"multiverse {multiverse.__version__}"]
    assert said["first version"] == said["version of a user"] == version
    assert float(said["seconds of CPU for the help"][0]) < 1, "the machine may be busy: 0.3 s are promised"
    files = {*said["files"]}
    for path in (
        f"/usr/lib/systemd/system/{SERVICE}",
        f"/usr/lib/systemd/system/{AGENT_SERVICE}",
        "/usr/lib/tmpfiles.d/multiverse-agent.conf",
        "/usr/share/man/man1/multiverse.1.gz",
        "/usr/share/man/man5/multiverse.toml.5.gz",
        "/usr/share/bash-completion/completions/multiverse",
        "/usr/share/multiverse/grafana/multiverse.json",
        "/usr/share/multiverse/prometheus/rules.yml",
        "/usr/share/doc/multiverse-common/sbom.cdx.json",
        "/usr/share/doc/multiverse-common/copyright",
        "/usr/lib/slurm/multiverse.so",
        "/usr/libexec/multiverse/mventer",
        "/usr/bin/multiverse-vm",
        "/etc/profile.d/multiverse.sh",
    ):
        assert path in files, path
    assert said["units"] == [] and said["enabled"] == [], "the units are right, and nothing starts by itself"
    assert "multiverse-explain" in "".join(said["manual page"])


def test_what_is_lacking_before_an_installation_is_said(said: dict[str, list[str]]) -> None:
    assert "examinations" in said["before"][-1]
    assert not [line for line in said["before"] if "Include" in line or "MaxNodeCount" in line], (
        "site install adds these"
    )


def test_the_site_is_installed_and_removed_with_the_units_of_the_packages(said: dict[str, list[str]]) -> None:
    assert "  + Include multiverse.conf" in said["install"]
    installed = {*said["installed"]}
    assert {"multiverse.conf", "slurm.conf.before-multiverse", "plugstack.conf", BRIDGE_SERVICE} <= installed
    assert not installed & {SERVICE, AGENT_SERVICE}, "the packages have them"
    assert said["the plugin"] and "--vm-image" in said["the plugin"][0], "this Slurm loads the plugin"
    assert "  - Include multiverse.conf" in said["remove"]
    assert said["removed"] == ["as before"]


def test_a_purge_leaves_nothing(said: dict[str, list[str]]) -> None:
    assert said["the directory of add-ons"] == ["/opt"], "it is not the package's"
    assert said["left by name"] == said["changed files of packages"] == []
    kept = {"/etc/multiverse", "/etc/multiverse/multiverse.toml", "/etc/profile.d/multiverse.sh"}
    assert {*said["after removal"]} <= kept, "what an administrator may have changed"
    assert said["differences after the purge"] == [] and "end" in said


def test_rpms_have_the_same_files(built: Path) -> None:
    """They are untried: only their contents are compared with those of the Debian packages."""
    if shutil.which("rpm") is None:
        pytest.skip("rpm is not installed")
    for rpm in sorted(built.glob("*.rpm")):
        name = re.split(r"-\d", rpm.name)[0]
        (deb,) = built.glob(f"{name}_*deb12*.deb")
        shown = subprocess.run(["rpm", "-qpl", rpm], capture_output=True, text=True, check=True).stdout
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, check=True).stdout
        listed = subprocess.run(["tar", "-t"], input=packed, stdout=subprocess.PIPE, check=True).stdout.decode()
        ours = {path.removeprefix(".") for path in listed.splitlines() if not path.endswith("/")}
        ours = {path for path in ours if "lintian" not in path and "changelog" not in path and "zsh" not in path}
        assert ours <= {*shown.splitlines()}, name
        needs = subprocess.run(["rpm", "-qpR", rpm], capture_output=True, text=True, check=True).stdout
        assert name == "multiverse-slurm-plugin" or re.search(r"^(multiverse-common = |python3\.11)", needs, re.M)
