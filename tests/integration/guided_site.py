"""A site's machine, and the commands that docs/install.md has for it."""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.images import IMAGES, slim
from tests.integration.site_machine import SiteMachine
from tests.integration.watch import matching

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/install.md"

EDITOR = """#!/bin/sh
# What an administrator changes in the example.
sed -i -e 's/^cores = [0-9]*/cores = 8/' -e 's/^memory = [0-9]*/memory = 16384/' -e 's/^#names = /names = /' "$1"
"""


def blocks() -> list[str]:
    """The commands that a site types, block by block."""
    section = PAGE.read_text().partition("## With pip, and by hand\n")[2].partition("\n## ")[0]
    return [textwrap.dedent(block) for block in re.findall(r"^ *```sh\n(.*?)^ *```$", section, re.M | re.S)]


@contextmanager
def guided_site(accelerator: Path) -> Iterator[SiteMachine]:
    """A machine with a site's own Slurm, on which `editor` does what an administrator does."""
    slim()
    top = Path(tempfile.mkdtemp(prefix="mvsite-"))
    top.chmod(0o755)
    made = SiteMachine(top, IMAGES)
    try:
        (top / "var/lib/multiverse").mkdir(parents=True)
        shutil.copy(accelerator, top / "var/lib/multiverse")
        (top / "var/lib/multiverse" / accelerator.name).chmod(0o600)
        made.start()
        editor = top / "usr/local/bin/editor"
        editor.write_text(EDITOR)
        editor.chmod(0o755)
        yield made
    finally:
        made.end()
        _remove_cgroups(top)
        shutil.rmtree(top)


def follow_install(machine: SiteMachine, install: str) -> None:
    """Type the first of the blocks. pip takes what this machine has."""
    for line in install.splitlines():
        if "pip install" in line:
            machine.provide_packages()
            line = f"PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 {line}"
        machine.shell(line, cwd=str(REPOSITORY))


def _remove_cgroups(top: Path) -> None:
    """The control groups of VMs are outside of the machine."""
    for vm in (top / "var/lib/multiverse/vms").glob("mv*"):
        for group in matching(Path("/sys/fs/cgroup"), f"**/multiverse/{vm.name}"):
            group.rmdir()
