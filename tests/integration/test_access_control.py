"""What another user can read, write, create or connect to in a running lab: every path is tried as that user."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.test_isolation import allowed, everything
from tests.integration.test_jobs import ended, latest, nothing_left, until
from tests.integration.test_status import multiverse

pytestmark = pytest.mark.integration


def as_other(lab: LabUnderTest, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as another user. The process may read all files, because the sources of this checkout may be
    in a directory that the other user cannot enter."""
    caps = "-all,+dac_read_search"
    become = ["setpriv", f"--reuid={lab.other.uid}", f"--regid={lab.other.uid}", "--clear-groups",
              f"--inh-caps={caps}", f"--ambient-caps={caps}", f"--bounding-set={caps}", "--"]  # fmt: skip
    argv = [*become, str(Path(sys.executable).with_name("multiverse")), *words]
    return subprocess.run(argv, env=lab.env, cwd="/", capture_output=True, text=True, timeout=60, check=False)


# Paths that users of Slurm need, and paths that show only that there is a lab. The file of limits has the sizes that a
# refused submission shows to any user, and bin what users load and execute.
_PUBLIC = {"bin", "etc", "log", "lab.json", "munge", "munge/pid", "munge/socket", "run", "run/db", "run/db/socket",
           "run/nfs", "run/inbox.limits", "run/users.sock", "run/slurmdbd", "run/slurmdbd/pid"}  # fmt: skip
_CLOSED = ("controller", "run/vms", "run/inbox", "slurmctld", "db")


def test_other_users_have_access_to_public_paths_only(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    go = lab.user.home / "watched"
    job = lab.sbatch(f"until [ -e {go} ]; do sleep 0.2; done", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    root = lab.where.root
    things = everything(root, lab.where.memory)
    for needed in ("controller/multiverse.db", "run/api.sock", "run/inbox", "munge/key", "run/vms", "controller/vms",
                   "log/controller.log"):  # fmt: skip
        assert root / needed in things
    for uid in (lab.other.uid, 65534, lab.user.uid):  # the owner of the job has no more access than others
        found = {path: words for path, words in allowed(things, uid).items() if path not in (root, lab.where.memory)}
        assert {word for words in found.values() for word in words} == {"read", "connect"}
        sockets = {path for path, words in found.items() if "connect" in words}
        public = {root / "munge/socket", root / "run/db/socket", root / "run/users.sock"}
        assert sockets == public, "all three servers check the caller's credentials"
        hidden = {root / "run/api.sock", root / "munge/key", root / "etc/slurmdbd.conf", root / "run/inbox",
                  root / "log/controller.log"}  # fmt: skip
        assert not hidden & set(found)
        assert not [p for p in found if any(p.is_relative_to(root / place) for place in _CLOSED)]
        assert not [p for p in found if not p.is_relative_to(root)], "no file of a template is readable"
        rest = {str(path.relative_to(root)) for path in found} - _PUBLIC
        places = ("bin/", "etc/", "log/", "run/nfs/")
        assert not {path for path in rest if not path.startswith(places) and not path.endswith(".json")}
    slurm = pwd.getpwnam("slurm").pw_uid
    assert allowed([root / "run/inbox"], slurm) == {root / "run/inbox": ["read", "make"]}
    said = as_other(lab, "jobs")
    assert said.returncode == 3 and "not yours to use" in said.stderr
    go.touch()
    ended(client, job, "done")
    nothing_left(lab, client)


def test_services_without_root_report_what_they_cannot_do(lab: LabUnderTest, tmp_path: Path) -> None:
    place = lab.other.home / "own"
    settings = tmp_path / "multiverse.toml"

    def complaint(service: str, text: str) -> str:
        settings.write_text(text)
        for path in (settings, *settings.parents[:3]):
            path.chmod(0o755)
        done = as_other(lab, service, "--config", str(settings))
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        return " ".join(done.stderr.split())

    ours = f'[agent]\nstate_dir = "{place}/agent"\nsocket = "{place}/agent.sock"\n[qemu]\naccel = "tcg"\n'
    for service in ("daemon", "agent"):
        assert "cannot use /" in (said := complaint(service, "")) and "as root" in said
    assert "users of their own" in (said := complaint("agent", ours)) and "qemu.uids" in said
    assert "cannot" in (said := complaint("agent", f"{ours}uids = [0, 0]\n")) and "as root" in said


def test_hostile_job_names_are_not_interpreted_and_are_shown_unchanged(lab: LabUnderTest, client: Client) -> None:
    """A job whose name, comment, directory and environment hold what a shell, a parser or a terminal may interpret."""
    trap = lab.user.home / "trapped"
    hostile = f"a'b\"c`touch {trap}`$(touch {trap});touch {trap}|&\\\n\x1b[31m%x ü"
    raw = os.fsencode(hostile).replace(b"/", b"_") + b"\xff\xfe"  # not UTF-8; a slash would not be a file name
    where = os.fsencode(lab.user.home) + b"/" + raw.replace(b"%", b"_").replace(b"\\", b"_").replace(b"\n", b"_")
    there = Path(os.fsdecode(where))
    there.mkdir()
    os.chown(where, lab.user.uid, lab.user.uid)
    script = b"#!/bin/bash\nprintf '%s' \"$HOSTILE\" >said; pwd >where; echo ran\n"
    options = (b"--job-name=" + raw, b"--comment=" + raw, b"--chdir=" + where, b"--output=" + where + b"/out")
    done = subprocess.run(
        [b"sbatch", b"--parsable", b"--export=ALL", *options],
        input=script, env={**os.environb, **{os.fsencode(k): os.fsencode(v) for k, v in lab.env.items()},
                           b"HOSTILE": os.fsencode(hostile) + b"\xff"},
        user=lab.user.uid, group=lab.user.uid, extra_groups=[], cwd=lab.user.home, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.decode().strip()
    ended(client, job, "done")
    until("its output is there", lambda: (there / "out").exists() and (there / "out").read_bytes() == b"ran\n")
    assert (there / "said").read_bytes() == os.fsencode(hostile) + b"\xff"
    assert (there / "where").read_bytes() == where + b"\n"
    (row,) = client.jobs(job)
    assert row["name"].startswith("a'b\"c`touch ") and "$(touch " in row["name"]
    for words in (("jobs", "--all"), ("jobs", job), ("timeline", job, "--events")):
        shown = multiverse(lab, *words)
        assert shown.returncode == 0 and "\x1b" not in shown.stdout, shown
    assert not trap.exists()
    nothing_left(lab, client)
