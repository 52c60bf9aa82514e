"""Images from a file and of a foreign cloud image: built, imported, checked, and used by a job."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.images.catalog import load
from multiverse_lab.lab.plan import LabOptions
from tests.integration import cloud_image
from tests.integration.conftest import new_lab
from tests.integration.images import CACHE
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.slow,
              pytest.mark.skipif(os.geteuid() != 0, reason="images need root")]  # fmt: skip

DESCRIPTION = """\
kernel_arguments = ["of.the.file=1"]
size = 8192
[[files]]
source = "motd"
target = "/etc/motd"
owner = "munge"
mode = "0640"
[[hooks]]
program = "hook"
"""
HOOK = """\
#!/bin/sh
set -eu
stat -c "%a %U" /etc/motd > /etc/hook-ran
[ -d /proc/self ] && ls /usr/sbin/slurmd >> /etc/hook-ran
"""


def multiverse(images: Path, *words: str, status: int = 0) -> str:
    """What `multiverse image` prints; it must end with that status."""
    argv = (str(Path(sys.executable).with_name("multiverse")), "image", *words, "--images", str(images))
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def content(disk: Path, path: str) -> str:
    return subprocess.check_output(("debugfs", "-R", f"cat {path}", str(disk)), text=True, stderr=subprocess.DEVNULL)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A directory that the users of VMs can pass through."""
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o711)
    (tmp_path / "images").mkdir(mode=0o755)
    return tmp_path / "images"


def test_an_image_is_built_from_a_file_once_and_a_check_says_what_was_broken_in_it(
    images: Path, tmp_path: Path
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(DESCRIPTION)
    (tmp_path / "motd").write_text("welcome\n")
    (tmp_path / "hook").write_text(HOOK)
    multiverse(images, "build", str(file))
    image = load(images, "small")
    assert content(image.disk, "/etc/motd") == "welcome\n"
    assert content(image.disk, "/etc/hook-ran") == "640 munge\n/usr/sbin/slurmd\n"
    assert image.disk.stat().st_size == 8192 << 20 and image.cmdline.endswith(" of.the.file=1")
    assert "is up to date" in multiverse(images, "build", str(file))
    (listed,) = json.loads(multiverse(images, "list", "--json"))
    assert listed["made_from"][0].startswith("small.toml: Debian ")
    motd = hashlib.sha256(b"welcome\n").hexdigest()[:12]
    assert f"file /etc/motd 0640 munge {motd}" in listed["made_from"]
    assert "fit for jobs" in multiverse(images, "check", "small", "--slurm", "22.05.8")
    refused = multiverse(images, "check", "small", "--slurm", "20.02", status=1)
    assert "wrong release of slurmd" in refused
    for path in ("/usr/sbin/munged", "/usr/sbin/slurmstepd"):
        subprocess.run(("debugfs", "-w", "-R", f"rm {path}", str(image.disk)), check=True, capture_output=True)
    broken = multiverse(images, "check", "small", status=1)
    assert "wrong munge" in broken and "there is no /usr/sbin/slurmstepd" in broken
    assert not Path("/sys/class/net/mvcheck").exists()
    assert not [*Path("/dev/shm").glob("mvcheck-*")]


def cloud() -> Path:
    """A cloud image, made once: it takes minutes."""
    file = CACHE / "cloud" / "debian-12-genericcloud.qcow2"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file if file.exists() else cloud_image.make(file)


def test_a_cloud_image_is_imported_from_a_copy_and_runs_a_job(images: Path, accelerator: Path) -> None:
    file = cloud()
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    lacking = multiverse(images, "import", str(file), "--name", "cloud", "--slurm", "20.02", status=1)
    assert "lacks: its slurmd is 22.05" in lacking and not (images / "cloud").exists()
    said = multiverse(images, "import", str(file), "--name", "cloud")
    assert "installed: slurmd slurm-client munge nfs-common" in said and "Next: multiverse image check cloud" in said
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    image = load(images, "cloud")
    assert content(image.disk, "/etc/fstab") == "" and content(image.disk, "/etc/machine-id") == ""
    assert multiverse(images, "import", str(file), "--name", "cloud").startswith("image cloud (stock)")
    assert "fit for jobs" in multiverse(images, "check", "cloud")
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(images) in line]
    with new_lab(accelerator, LabOptions(cores=2, memory=4096, images=images, image="cloud"), controller=True) as lab:
        out = lab.user.home / "out"
        job = lab.sbatch(
            '. /etc/os-release; echo "$ID $(hostname) $(id -un)"; srun true && echo ran', f"--output={out}"
        )
        shown = ("sacct", "-nXj", job, "-o", "state%-20")
        until("the job has ended", lambda: lab.run(*shown).stdout.split() == ["COMPLETED"], 300)
        system, node, user = out.read_text().splitlines()[0].split()
        assert (system, user) == ("debian", lab.user.name) and node.startswith("mv")
        assert out.read_text().splitlines()[1] == "ran"
