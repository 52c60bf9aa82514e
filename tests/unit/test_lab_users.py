"""Users of a lab exist in a mount namespace alone, whatever is done to the machine's files meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")

_MACHINE = """
import os, pwd, shutil, subprocess, sys
from pathlib import Path
from multiverse_lab.lab import users
from multiverse_lab.lab.own_etc import has_own_etc, mount_own_etc
from multiverse.system import kernel

PASSWD, GROUP = Path("/etc/passwd"), Path("/etc/group")
# A machine of its own, so that this one's users stay as they are.
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
mount_own_etc()
assert has_own_etc()
before = [PASSWD.read_text(), GROUP.read_text()]
home = Path(sys.argv[1])

def on_the_machine(script):
    subprocess.run(["nsenter", f"--mount=/proc/{os.getppid()}/ns/mnt", "sh", "-c", script], check=True)

child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    assert [PASSWD.read_text(), GROUP.read_text()] == before, "the machine's files are as they were"
    sys.exit(os.waitstatus_to_exitcode(status))
users.enter_private_namespace()
"""

_LOSES = """
made = users.private_users([("ada", 61111, home / "ada"), ("root", 61112, home / "root")])
# As useradd(8) replaces it; it may do so more than once.
on_the_machine("for n in 1 2; do for f in passwd group; do cp -p /etc/$f /etc/$f+ && mv /etc/$f+ /etc/$f; done; done")
for name, uid in (("ada", 61111), ("root", 61112)):
    assert pwd.getpwnam(name).pw_uid == uid and pwd.getpwuid(uid).pw_name == name
shown = subprocess.run(["getent", "passwd", "ada"], capture_output=True, text=True, check=True)
assert shown.stdout.startswith("ada:x:61111:61111:")
assert os.stat(home / "ada").st_uid == 61111
more = users.private_users([("bob", 61113, home / "bob")])
users.remove_private_users(made)
assert pwd.getpwnam("root").pw_uid == 0 and pwd.getpwnam("bob").pw_uid == 61113
users.remove_private_users(more)
assert [sorted(path.read_text().split()) for path in (PASSWD, GROUP)] == [sorted(text.split()) for text in before]
os._exit(0)
"""


def run(script: str, *arguments: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_users_of_a_lab_stay_when_the_machines_files_are_replaced(tmp_path: Path) -> None:
    run(_MACHINE + _LOSES, tmp_path)
    assert not list(Path("/tmp").glob("mvetc-*/passwd"))


def test_nobody_outside_sees_the_users(tmp_path: Path) -> None:
    run(
        _MACHINE + 'users.private_users([("ada", 61111, home)]); on_the_machine("! getent passwd ada"); os._exit(0)',
        tmp_path,
    )
    assert "61111" not in Path("/etc/passwd").read_text()
