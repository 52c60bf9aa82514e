"""Users of an LDAP directory in guests: a real slapd, sssd, and jobs in VMs of a real Slurm."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.config import JobVmSettings
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from multiverse_lab.lab.users import enter_private_namespace
from tests.integration.conftest import LabUnderTest, new_lab, nodes_with_job_vms
from tests.integration.directory_service import DOMAIN, Directory, LdapUser
from tests.integration.images import slim
from tests.integration.watch import ended, latest, until, written

pytestmark = [pytest.mark.integration, pytest.mark.slow]

_FIRST = 71820
_uids = itertools.count(_FIRST)
_SHARED_BY_USERS = "domain users"
_UMLAUTS = "Müller & Söhne"


@dataclass
class Site:
    """A lab whose users are in the directory. Their homes are in the export of the lab."""

    lab: LabUnderTest
    directory: Directory

    def new_user(self, name: str, groups: int = 1) -> LdapUser:
        """A user who is in this many groups of their own, named `NAME's group N`, beside the primary one."""
        uid = next(_uids)
        home = self.lab.user.home.parent / name
        user = LdapUser(name, uid, 72000, home)
        home.mkdir(mode=0o755)
        os.chown(home, uid, user.gid)
        self.directory.add_groups(((f"{name}'s group {n}", _gid(user, n)) for n in range(groups)), [user])
        self.directory.add_user(user)
        return user

    def as_user(self, user: LdapUser, *argv: str, groups: str = "--init-groups") -> str:
        """What a command says at the submit host, with all groups of the user, as after a login."""
        become = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", groups, "--", *argv]
        done = subprocess.run(
            become, env=self.lab.env | {"HOME": str(user.home)}, cwd=user.home,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def sbatch(self, user: LdapUser, script: str, *options: str, groups: str = "--init-groups") -> str:
        argv = ("sbatch", "--parsable", "--output=%j.out", *options, f"--wrap={script}")
        return self.as_user(user, *argv, groups=groups)

    def output(self, client: Client, user: LdapUser, job: str) -> str:
        ended(client, job, "done")
        return written(user.home / f"{job}.out").strip()


def _gid(user: LdapUser, number: int) -> int:
    return 73000 + 1000 * (user.uid - _FIRST) + number


@pytest.fixture(scope="module")
def directory() -> Iterator[Directory]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place = Path(tempfile.mkdtemp(prefix="mvdir-"))
    place.chmod(0o755)  # each process loads sssd's module from there
    enter_private_namespace()
    made = Directory(place)
    try:
        made.start()
        made.add_groups([(_SHARED_BY_USERS, 72000), (_UMLAUTS, 72001)])
        yield made
    finally:
        made.end()
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def site(directory: Directory, accelerator: Path) -> Iterator[Site]:
    slim()
    with new_lab(accelerator, LabOptions(cores=4, memory=8192), controller=True) as lab:
        # For how long slurmctld keeps the groups that it sends with a job: ten minutes if nothing is said.
        (lab.where.etc / "site.conf").write_text("GroupUpdateTime=1\n")
        lab.run("scontrol", "reconfigure")
        yield Site(lab, directory)


@pytest.fixture(scope="module")
def client(site: Site) -> Client:
    return Client(site.lab.settings.socket)


def _known(user: LdapUser) -> bool:
    try:
        return pwd.getpwuid(user.uid).pw_name == user.login
    except KeyError:
        return False


@pytest.mark.parametrize(("name", "groups"), [("grace.hopper", 3), ("many", 20), ("most", 200)])
def test_a_user_is_in_the_guest_who_they_are_on_the_submit_host(
    site: Site, client: Client, name: str, groups: int
) -> None:
    """Also with a dot and a domain in the name, spaces and umlauts in those of groups, and more than 16 groups."""
    user = site.new_user(name, groups)
    site.directory.change_member(_UMLAUTS, "add", user)
    until("the directory has the user", lambda: _known(user))
    shared = site.lab.user.home.parent / f"shared-{name}"  # by the last group alone, which AUTH_SYS cuts off
    shared.mkdir(mode=0o770)
    os.chown(shared, 0, _gid(user, groups - 1))
    shared.chmod(0o2770)
    job = site.sbatch(user, f"id; getent passwd {user.uid}; touch mine {shared}/ours; echo $?")
    identity, entry, *_, status = site.output(client, user, job).splitlines()
    here = site.as_user(user, "id")
    assert here.count(f"{name}'s group") == groups and f"({_SHARED_BY_USERS}@{DOMAIN})" in here
    assert f"({_UMLAUTS}@{DOMAIN})" in here
    assert identity == here
    assert entry.split(":")[0] == user.login and entry.split(":")[5:] == [str(user.home), "/bin/sh"]
    assert status == "0", "the file server gives a user all groups that it knows"
    mine, ours = (user.home / "mine").stat(), (shared / "ours").stat()
    assert (mine.st_uid, mine.st_gid) == (user.uid, user.gid)
    assert (ours.st_uid, ours.st_gid) == (user.uid, _gid(user, groups - 1))


def test_a_later_job_has_the_users_new_name_and_groups(site: Site, client: Client) -> None:
    user = site.new_user("ada.byron", 3)
    until("the directory has the user", lambda: _known(user))
    before = site.output(client, user, site.sbatch(user, "id"))
    assert before == site.as_user(user, "id") and "(ada.byron@" in before
    groups = [f"ada.byron's group {number}" for number in range(3)]
    site.directory.change_member(groups.pop(), "delete", user)
    user = site.directory.rename(user, "ada.lovelace", groups)
    until("the directory has the new name", lambda: _known(user))
    asyncio.run(CONTROLLER.stop(site.lab.where))  # which asks for a user again after five minutes, or anew
    asyncio.run(lifecycle.up(site.lab.where, LabOptions()))
    after = site.output(client, user, site.sbatch(user, "id"))
    assert after == site.as_user(user, "id") and "(ada.lovelace@" in after
    assert after.count("'s group") == 2 and before.count("'s group") == 3


def test_jobs_while_the_directory_is_away(site: Site, client: Client) -> None:
    """sssd answers for the users for whom it has asked before. Jobs of others wait until the directory is back."""
    known, half, unknown = (site.new_user(name, 2) for name in ("known", "half", "unknown"))
    until("the directory has the first user", lambda: _known(known))
    whole = site.as_user(known, "id")
    until("the directory has the second user", lambda: _known(half))
    site.directory.silence()
    try:
        job = site.sbatch(unknown, "id", groups="--clear-groups")
        until("its user is waited for", lambda: f"who uid {unknown.uid} is" in latest(client, job).get("waiting", ""))
        assert site.output(client, known, site.sbatch(known, "id")) == whole and whole.count("'s group") == 2
        # sssd was asked who this user is, but not for the groups: then it says, as a success, that there are none.
        partial = site.output(client, half, site.sbatch(half, "id"))
        assert partial == site.as_user(half, "id") and "'s group" not in partial
        assert latest(client, job)["state"] == "queued"
    finally:
        site.directory.serve()
    assert site.output(client, unknown, job) == site.as_user(unknown, "id")
    assert site.as_user(unknown, "id").count("'s group") == 2


def test_a_task_in_a_vm_inside_a_job_has_the_users_groups(directory: Directory, accelerator: Path) -> None:
    """Their numbers are the guest's there: no slurmstepd runs in it."""
    slim()
    with new_lab(accelerator, nodes_with_job_vms(1), controller=False) as lab:
        shown = ("sinfo", "-h", "-p", "physical", "-N", "-o", "%f")
        until("the agent has tested the plugin", lambda: lab.run(*shown).stdout.strip() == JobVmSettings().feature)
        site = Site(lab, directory)
        user = site.new_user("tasks", 20)
        until("the directory has the user", lambda: _known(user))
        script = f'id; mkdir made; chgrp "{user.name}\'s group 19@{DOMAIN}" made; hostname; echo over'
        job = site.sbatch(user, script, "--partition=physical", "--mem=600", "--vm-image=slim")
        out = user.home / f"{job}.out"
        until("the script has ended", lambda: out.exists() and out.read_text().endswith("over\n"))
        identity, host, _ = out.read_text().splitlines()
        assert host.startswith("mvjob-") and identity == site.as_user(user, "id")
        made = (user.home / "made").stat()
        assert (made.st_uid, made.st_gid) == (user.uid, _gid(user, 19))
