"""The configuration of guests, the files that a site installs, and the inbox."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.config import Settings, SlurmSettings
from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import User
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm.acting.jobs import _cells
from multiverse.drivers.slurm.command import meaning
from multiverse.drivers.slurm.site import bootstrap, conf, install
from multiverse.drivers.slurm.submission import Hint, hints, take
from multiverse.guest.agent import system as agent
from multiverse.guest.protocol import USER_ADDED
from tests.unit.slurm_lua import rendered
from tests.unit.test_slurm_conf_hash import slurms_hash

SITE_CONF = """\
# the site's
ClusterName=prod  # its name
SlurmctldHost=head(192.0.2.1)
SlurmctldHost=spare(192.0.2.2)
AuthInfo=cred_expire=60,socket=/site/munge
DefMemPerCPU=2048
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
Prolog=/site/prolog
SlurmdSpoolDir=/site/spool
PrologFlags=Alloc,\\
Contain
NodeName=n[1-9] CPUs=4
PartitionName=all Nodes=ALL
Include more.conf
"""


def test_a_guests_slurm_conf_is_derived_from_the_sites() -> None:
    made = conf.for_guest(SITE_CONF, [conf.Slurmctld("head", "10.1.0.1"), conf.Slurmctld("spare", "192.0.2.2")])
    keys = {key.lower(): value for key, value in conf.settings(made)}
    assert keys["clustername"] == "prod"
    assert [value for key, value in conf.settings(made) if key == "SlurmctldHost"] == [
        "head(10.1.0.1)",
        "spare(192.0.2.2)",
    ]
    assert keys["authinfo"] == "socket=/run/munge/munge.socket.2,cred_expire=60"
    assert (keys["proctracktype"], keys["taskplugin"]) == ("proctrack/linuxproc", "task/affinity,task/cgroup")
    assert keys["prologflags"] == "Alloc,Contain"
    assert "PrologFlags=DeferBatch,Contain\n" in conf.for_guest("PrologFlags=DeferBatch,X11\n", [])
    for dropped in ("prolog", "nodename", "partitionname", "include"):
        assert dropped not in keys
    assert "/site" not in made


def test_steps_of_a_resumed_job_leave_the_files_of_earlier_steps_of_their_number_alone() -> None:
    made = conf.for_guest("TmpFS=/scratch\n", [], resumed=2)
    assert "TmpFS=/var/spool/slurmd-2/tmp\n" in made and "SlurmdSpoolDir=/var/spool/slurmd-2\n" in made
    assert "JobFileAppend=1\n" in made and "/scratch" not in made
    assert "TmpFS=/scratch\n" in conf.for_guest("TmpFS=/scratch\n", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"AccountingStorageHost": "10.213.0.1"}),
        ("AccountingStorageHost=localhost\n", {"AccountingStorageHost": "10.213.0.1"}),
        ("DefaultStorageHost=127.0.0.1\n", {"AccountingStorageHost": "10.213.0.1"}),
        ("AccountingStorageHost=head\n", {"AccountingStorageHost": "10.213.0.1"}),
        (
            "AccountingStorageHost=192.0.2.5\nAccountingStorageBackupHost=accounts\n",
            {"AccountingStorageHost": "192.0.2.5", "AccountingStorageBackupHost": "192.0.2.6"},
        ),
    ],
)
def test_a_guest_reaches_slurmdbd(site: Settings, text: str, expected: dict[str, str]) -> None:
    """The name localhost in the site's slurm.conf is not the guest itself."""
    own = replace(site, network=replace(site.network, hosts=(("accounts", "192.0.2.6"),)))
    kind = "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStoragePort=7000\nSlurmctldHost=head\n"
    slurmctlds = bootstrap.controllers(own, kind + text)
    made = conf.for_guest(kind + text, slurmctlds, databases=bootstrap.databases(own, kind + text, slurmctlds))
    found = dict(conf.settings(made))
    assert {key: host for key, host in found.items() if "Host" in key and "Storage" in key} == expected
    assert found["AccountingStoragePort"] == "7000"
    assert bootstrap.databases(own, text, slurmctlds) == {}, "without slurmdbd"


def test_a_guest_limits_memory_as_the_site_does_on_bare_metal() -> None:
    limited = "ConstrainRAMSpace=Yes\nAllowedRAMSpace=90\nMinRAMSpace=20\nMaxRAMPercent=50\nConstrainDevices=yes\n"
    keys = dict(conf.settings(conf.cgroup_for_guest(SITE_CONF, limited)))
    assert keys == {
        "IgnoreSystemd": "yes",
        "CgroupPlugin": "cgroup/v2",
        "ConstrainRAMSpace": "yes",
        "AllowedRAMSpace": "90",
    }


@pytest.mark.parametrize(("allowed", "kept"), [("99.5", "99.5"), ("100", ""), ("101", ""), ("110.5", "")])
def test_a_guest_never_allows_more_memory_than_its_vm_has(allowed: str, kept: str) -> None:
    made = conf.cgroup_for_guest(SITE_CONF, f"ConstrainRAMSpace=yes\nAllowedRAMSpace={allowed}\n")
    assert conf.value(made, "AllowedRAMSpace") == kept


@pytest.mark.parametrize(
    ("slurm_conf", "cgroup_conf"),
    [
        (SITE_CONF, ""),
        (SITE_CONF, "ConstrainRAMSpace=no\nAllowedRAMSpace=90\n"),
        ("TaskPlugin=task/none\n", "ConstrainRAMSpace=yes\nAllowedRAMSpace=90\n"),
    ],
)
def test_a_guest_limits_memory_to_what_the_job_asked_for_if_the_site_does_not(
    slurm_conf: str, cgroup_conf: str
) -> None:
    made = conf.cgroup_for_guest(slurm_conf, cgroup_conf)
    assert conf.limits_memory(made) and "AllowedRAMSpace" not in made


@pytest.mark.parametrize(
    ("params", "left"),
    [("OverMemoryKill", None), ("UsePss, overmemorykill,NoShared", "UsePss,NoShared"), ("NoShared", "NoShared")],
)
def test_slurmd_in_a_guest_is_not_given_a_second_limit_of_memory(params: str, left: str | None) -> None:
    made = conf.for_guest(f"JobAcctGatherParams={params}\n", [conf.Slurmctld("head", "10.1.0.1")])
    found = dict(conf.settings(made)).get("JobAcctGatherParams")
    assert (found and found.replace(" ", "")) == left
    assert all(value for _, value in conf.settings(made)), "Slurm refuses a key without a value"


def test_values_are_read_from_slurm_conf() -> None:
    assert conf.memory_per_cpu(SITE_CONF, 7) == 2048
    assert conf.memory_per_cpu("", 7) == 7
    assert conf.included(SITE_CONF) == ["more.conf"]
    assert conf.node_conf(Size(2, 300, 50), ("vm", "a", "vm", "mv_1")) == (
        "CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=300 TmpDisk=50 Feature=vm,a,mv_1"
    )
    assert conf.node_conf(Size(6, 300), ("vm",), 2).startswith("CPUs=6 Sockets=2 CoresPerSocket=3 ThreadsPerCore=1 ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("SlurmctldHost=head\n", [("head", "")]),
        ("SlurmctldHost=head(192.0.2.1)\nslurmctldhost = spare ( 192.0.2.2 )\n",
         [("head", "192.0.2.1"), ("spare", "192.0.2.2")]),
        ("SlurmctldHost=a,b(192.0.2.9)\n", [("a,b", "192.0.2.9")]),  # one address that moves between two machines
        ("ControlMachine=head\nControlAddr=192.0.2.1\nBackupController=spare\n",
         [("head", "192.0.2.1"), ("spare", "")]),
        ("SlurmctldHost=head\nBackupController=old\n", [("head", "")]),
    ],
)  # fmt: skip
def test_every_slurmctld_is_found(text: str, found: list[tuple[str, str]]) -> None:
    assert conf.controllers(text) == found


@pytest.mark.parametrize(
    ("machine", "given", "addresses"),
    [
        ("head", "", ["10.213.0.1", "192.0.2.2", "192.0.2.3"]),
        ("spare.example.org", "", ["192.0.2.1", "10.213.0.1", "192.0.2.3"]),
        ("another", "", ["192.0.2.1", "192.0.2.2", "192.0.2.3"]),
        ("head", "10.9.9.1, ,10.9.9.3", ["10.9.9.1", "192.0.2.2", "10.9.9.3"]),
    ],
)
def test_guests_know_every_slurmctld_by_an_address_that_they_reach(
    site: Settings, monkeypatch: pytest.MonkeyPatch, machine: str, given: str, addresses: list[str]
) -> None:
    monkeypatch.setattr(bootstrap.platform, "node", lambda: machine)
    monkeypatch.setattr(bootstrap.socket, "gethostbyname", {"192.0.2.1": "192.0.2.1", "192.0.2.2": "192.0.2.2"}.get)
    own = replace(
        site,
        slurm=replace(site.slurm, controller_address=given),
        network=replace(site.network, hosts=(("third", "192.0.2.3"),)),
    )
    found = bootstrap.controllers(own, SITE_CONF + "SlurmctldHost=third\n")
    assert found == list(zip(("head", "spare", "third"), addresses, strict=True))


def test_the_only_slurmctld_is_at_the_gateway_whatever_its_name(site: Settings) -> None:
    assert bootstrap.controllers(site, "SlurmctldHost=elsewhere(192.0.2.1)\n") == [("elsewhere", "10.213.0.1")]
    assert bootstrap.controllers(site, "") == [("slurmctld", "10.213.0.1")]


def test_a_slurmctld_whose_name_has_no_address_here_is_left_to_the_image(
    site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"backup.test": ["192.0.2.8"]}

    def look_up(name: str) -> str:
        if name not in answers:
            raise OSError("unknown")
        return answers[name].pop()

    monkeypatch.setattr(bootstrap.socket, "gethostbyname", look_up)
    text = "SlurmctldHost=one\nSlurmctldHost=backup.test\nSlurmctldHost=nameless.test\n"
    for _ in range(2):
        assert [one.address for one in bootstrap.controllers(site, text)][1:] == ["192.0.2.8", "nameless.test"]


# --- SlurmUser -------------------------------------------------------------------------------------


ENTRIES = [
    pwd.struct_passwd(("root", "x", 0, 0, "", "/root", "/bin/sh")),
    pwd.struct_passwd(("ctl", "x", 4242, 4343, "", "/var/lib/ctl", "")),
]


@pytest.fixture
def name_service(monkeypatch: pytest.MonkeyPatch) -> list[pwd.struct_passwd]:
    """The entries that it knows."""
    known = list(ENTRIES)

    def find(key: str | int) -> pwd.struct_passwd:
        for entry in known:
            if key in (entry.pw_name, entry.pw_uid):
                return entry
        raise KeyError(key)

    monkeypatch.setattr(bootstrap.pwd, "getpwnam", find)
    monkeypatch.setattr(bootstrap.pwd, "getpwuid", find)
    bootstrap._lookup_user.cache_clear()
    return known


@pytest.mark.parametrize(
    ("line", "users"),
    [
        ("", ()),  # root
        ("SlurmUser=root\n", ()),
        ("SlurmUser=ctl\n", (User("ctl", 4242, 4343, "/var/lib/ctl", "/bin/sh", (("gid4343", 4343),)),)),
        ("slurmuser=4242\n", (User("ctl", 4242, 4343, "/var/lib/ctl", "/bin/sh", (("gid4343", 4343),)),)),
    ],
)
def test_a_guest_knows_slurmctlds_user_by_name_and_number(
    site: Settings, name_service: object, line: str, users: tuple[User, ...]
) -> None:
    site.slurm.conf.write_text(SITE_CONF + line)
    given = bootstrap.bootstrap(site, SPARE)
    assert given.users == users
    made = next(file.content.decode() for file in given.files if file.path == SLURMD_CONF)
    assert line in made
    assert bootstrap.slurm_uid(site) == (4242 if users else 0)


def test_a_slurm_user_that_the_name_service_does_not_know_is_unknown_until_it_does(
    site: Settings, name_service: list[pwd.struct_passwd]
) -> None:
    site.slurm.conf.write_text(SITE_CONF + "SlurmUser=ctl\n")
    entry = name_service.pop()
    with pytest.raises(Unknown, match="SlurmUser=ctl"):
        bootstrap.bootstrap(site, SPARE)
    assert bootstrap.slurm_uid(site) is None
    name_service.append(entry)
    assert bootstrap.slurm_uid(site) == 4242
    name_service.pop()
    assert bootstrap.slurm_uid(site) == 4242, "it is asked once"


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    (tmp_path / "slurm.conf").write_text(SITE_CONF)
    (tmp_path / "more.conf").write_text("KillWait=7\n")
    (tmp_path / "key").write_bytes(b"secret")
    slurm = SlurmSettings(conf=tmp_path / "slurm.conf", munge_key=tmp_path / "key", inbox=tmp_path / "inbox")
    return Settings(slurm=slurm)


SLURMD_CONF = "/etc/slurm/multiverse-slurmd.conf"

SPARE = NodeSpec(
    name="mvab12c-1",
    address="10.1.2.3/16",
    size=Size(2, 300),
    features=("slim", "instant", "auto", "mv_v1"),
    tag="mv_v1",
    image="slim",
    spare=True,
)


def test_settings_without_effect_on_vms_are_reported() -> None:
    assert conf.unsupported(SITE_CONF, preempts=False) == []
    assert conf.unsupported("PreemptType=preempt/none\n", preempts=False) == []
    (preemption,) = conf.unsupported("preempttype=preempt/qos\n", preempts=False)
    assert preemption.name == "preemption" and "preempt/qos" in preemption.message and "[save]" in preemption.remedy
    assert conf.unsupported("preempttype=preempt/qos\n", preempts=True) == []
    assert conf.unsupported("preempttype=preempt/own\n", preempts=True), "the rules of which are not known"
    (display,) = conf.unsupported("PrologFlags=Alloc,X11\n", preempts=True)
    assert display.name == "x11" and "display" in display.message
    (federation,) = conf.unsupported("FederationParameters=fed_display\n", preempts=True)
    assert federation.name == "federation" and "--clusters" in federation.remedy


def test_a_spare_is_given_files_daemons_and_features(
    site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.platform, "node", lambda: "head")
    given = bootstrap.bootstrap(site, SPARE)
    files = {file.path: file for file in given.files}
    assert b"KillWait=7" in files[SLURMD_CONF].content
    assert b"head(10.213.0.1)" in files[SLURMD_CONF].content
    munged, slurmd = given.daemons
    assert (munged.user, munged.ready_path) == ("munge", "/run/munge/munge.socket.2")
    assert slurmd.argv[-1].startswith("CPUs=2 ")
    assert slurmd.argv[-1].endswith(" RealMemory=300 TmpDisk=0 Feature=vm,slim,instant,auto,mv_v1")
    guest_conf = tmp_path / "guest"
    guest_conf.mkdir()
    (guest_conf / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    own = replace(site, slurm=replace(site.slurm, guest_conf=guest_conf, controller_address="10.9.9.9"))
    files = {file.path: file for file in bootstrap.bootstrap(own, SPARE).files}
    assert files["/etc/slurm/cgroup.conf"].content == b"CgroupPlugin=disabled\n"
    assert b"head(10.9.9.9)" in files[SLURMD_CONF].content
    assert b"task/cgroup" not in files[SLURMD_CONF].content, "slurmd would not start without cgroups"


def test_the_sites_own_cgroup_conf_is_read_beside_its_slurm_conf(site: Settings) -> None:
    site.slurm.conf.with_name("cgroup.conf").write_text("ConstrainRAMSpace=yes\nAllowedRAMSpace=95.5\n")
    files = {file.path: file.content.decode() for file in bootstrap.bootstrap(site, SPARE).files}
    assert conf.value(files["/etc/slurm/cgroup.conf"], "AllowedRAMSpace") == "95.5"
    assert "task/cgroup" in conf.value(files[SLURMD_CONF], "TaskPlugin")


def test_only_a_spare_makes_its_job_wait_for_the_user(site: Settings, tmp_path: Path) -> None:
    files = {file.path: file for file in bootstrap.bootstrap(site, SPARE).files}
    assert b"\nProlog=/etc/slurm/multiverse-prolog\n" in files[SLURMD_CONF].content
    assert (files["/etc/slurm/multiverse-prolog"].mode, agent.USER_ADDED) == (0o755, USER_ADDED)
    pipe = tmp_path / "pipe"
    waiting = files["/etc/slurm/multiverse-prolog"].content.replace(USER_ADDED.encode(), str(pipe).encode())
    descriptor = agent.make_pipe(str(pipe))
    with subprocess.Popen(["sh", "-c", waiting]) as job:
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.3)
        os.write(descriptor, b"\n" * agent.MOST_WAIT)
        assert job.wait(10.0) == 0
    os.close(descriptor)
    of_a_job = replace(SPARE, spare=False)
    files = {file.path: file for file in bootstrap.bootstrap(site, of_a_job).files}
    assert USER_ADDED.encode() not in files["/etc/slurm/multiverse-prolog"].content
    site.slurm.conf.write_text(site.slurm.conf.read_text().replace("Prolog=/site/prolog\n", ""))
    files = {file.path: file for file in bootstrap.bootstrap(site, of_a_job).files}
    assert "/etc/slurm/multiverse-prolog" not in files and b"Prolog=" not in files[SLURMD_CONF].content


def test_programs_of_the_site_run_in_guests_that_have_them(site: Settings, tmp_path: Path) -> None:
    shared = tmp_path / "shared dir"
    shared.mkdir()
    for name, status in (("10-first", 0), ("20-last", 3), ("30-never", 0)):
        (shared / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        (shared / name).chmod(0o755)
    (shared / "15-text").write_text("no program")
    lines = f"Prolog={shared}/*\nEpilog=/nowhere/epilog\nTaskProlog={shared}/10-first\nHealthCheckProgram=/bin/true\n"
    site.slurm.conf.write_text(site.slurm.conf.read_text() + lines)
    files = {file.path: file for file in bootstrap.bootstrap(site, replace(SPARE, spare=False)).files}
    made = dict(conf.settings(files[SLURMD_CONF].content.decode()))
    assert "HealthCheckProgram" not in made and "TaskEpilog" not in made

    def run(key: str) -> tuple[int, str]:
        file = files[made[key]]
        assert file.mode == 0o755
        done = subprocess.run(["sh", "-c", file.content, "program", "x"], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run("Prolog") == (3, "10-first x\n20-last x\n"), "the first that fails is the last, as slurmd has it"
    assert run("Epilog") == (0, ""), "it is not here"
    assert run("TaskProlog") == (0, "10-first x\n")
    spare = {file.path: file for file in bootstrap.bootstrap(site, SPARE).files}[made["Prolog"]].content.decode()
    assert spare.index(USER_ADDED) < spare.index("for program"), "no program of the site runs before the user is known"


def test_mpi_and_launch_parameters_are_the_sites_in_guests() -> None:
    made = dict(conf.settings(conf.for_guest("MpiDefault=pmix\nLaunchParameters=mem_sort\n", [])))
    assert (made["MpiDefault"], made["LaunchParameters"]) == ("pmix", "mem_sort")
    assert "MpiDefault" not in dict(conf.settings(conf.for_guest("", []))), "which is Slurm's own: none"


def test_what_a_job_runs_knows_all_its_nodes_and_slurmd_all_but_its_own(site: Settings, tmp_path: Path) -> None:
    member = replace(SPARE, spare=False, peers=(("mvab12c-2", "10.1.2.4"), ("mvab12c-3", "10.1.2.5")))
    guest_conf = tmp_path / "guest"
    guest_conf.mkdir()
    (guest_conf / "slurm.conf").write_text("ClusterName=own")
    of_site = replace(site, slurm=replace(site.slurm, guest_conf=guest_conf))
    for settings, text in ((site, "KillWait=7\n"), (of_site, "ClusterName=own\n")):
        given = bootstrap.bootstrap(settings, member)
        files = {file.path: file for file in given.files}
        assert len(given.files) == len(files), "no file is written twice"
        argv = given.daemons[1].argv
        read_by_slurmd = files[argv[argv.index("-f") + 1]].content.decode()
        peers = "NodeName=mvab12c-[2-3] NodeAddr=10.1.2.[4-5]\n"
        assert text in read_by_slurmd and f"\n{peers}" in read_by_slurmd and member.name not in read_by_slurmd
        of_job = files["/etc/slurm/slurm.conf"].content.decode()
        assert of_job == f"Include {SLURMD_CONF}\nNodeName=mvab12c-1 NodeAddr=10.1.2.3\n"
        start = files["/slurmstepd"]
        assert start.mode == 0o755
    programs, root = tmp_path / "sbin", tmp_path / "root"
    for directory, script in (
        (programs, '#!/bin/sh\necho "$SLURM_CONF" "$#" "$2" $(readlink -f $STEPD)\n'),
        (root, start.content.decode().replace("/usr/sbin", str(programs))),
    ):
        directory.mkdir()
        (directory / "slurmstepd").write_text(script)
        (directory / "slurmstepd").chmod(0o755)
    path = argv[argv.index("-d") + 1]
    environment = {"SLURM_CONF": "x", "PATH": os.environ["PATH"], "STEPD": path}
    said = subprocess.run([path, "spank", "a b"], cwd=root, env=environment, capture_output=True, text=True)
    assert said.stdout == f"/etc/slurm/slurm.conf 2 a b {programs}/slurmstepd\n", "slurmstepd finds itself there"


def test_slurmctld_finds_no_other_hash_in_a_guest(site: Settings) -> None:
    above, included, below = "ClusterName=prod\nInclude more.conf\n", "KillWait=7", "# the end\nKillWait=8\n"
    site.slurm.conf.write_text(above + below)
    site.slurm.conf.with_name("more.conf").write_text(included)
    made = {file.path: file.content for file in bootstrap.bootstrap(site, SPARE).files}[SLURMD_CONF]
    assert slurms_hash(made) == slurms_hash((above + included + below).encode())


def expanded(text: str) -> dict[str, str]:
    """Names and addresses as Slurm pairs them: those of a line in the order in which they are written."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        each = [part.partition("=")[2] for part in line.split()]
        names, places = ([*_written_out(word)] for word in each)
        found |= dict(zip(names, places, strict=True))
    return found


def _written_out(word: str) -> Iterator[str]:
    stem, _, rest = word.partition("[")
    for part in rest.rstrip("]").split(",") if rest else [""]:
        first, _, last = part.partition("-")
        yield from (f"{stem}{n}" for n in range(int(first), int(last or first) + 1)) if part else [stem]


@given(st.sets(st.integers(1, 2000), max_size=40), st.integers(0, 3), st.booleans())
def test_few_lines_tell_where_many_nodes_are(serials: set[int], seed: int, computed: bool) -> None:
    """Of VMs whose addresses are computed from their serials, and of others."""
    drawn = Random(seed)
    places = {n: n + 255 if computed else drawn.randrange(2000) for n in serials}
    nodes = {f"mvab12c-{n}": f"10.1.{place // 256}.{place % 256}" for n, place in places.items()}
    nodes |= {"mvab12c-a000001": "10.1.9.9", "odd01": "10.1.9.1", "named-7": "host7", "six-1": "fd00::1"}
    text = conf.addresses(nodes.items())
    assert expanded(text) == nodes
    if computed:
        assert text.count("\n") <= 8 + 4, "one for each network of 256 addresses"


def test_users_commands_read_the_sites_slurm_conf_and_where_vms_are(site: Settings, tmp_path: Path) -> None:
    shared = replace(site, slurm=replace(site.slurm, addresses=Path("/shared/vms.conf")))
    for settings, path in ((site, tmp_path / "multiverse-addresses.conf"), (shared, Path("/shared/vms.conf"))):
        made = install.render(settings, install.Site(("slim",), 100, 0))[install.CLIENT]
        assert list(conf.settings(made)) == [("include", str(site.slurm.conf)), ("include", str(path))]


async def test_the_file_of_addresses_is_replaced_as_a_whole_and_begun_once(tmp_path: Path) -> None:
    path = tmp_path / "a.conf"
    install.make_address_file(path)
    begun = path.read_text()
    assert begun.startswith("#") and list(conf.settings(begun)) == []
    file = install.AddressFile(path)
    with path.open() as reader:
        await file.tell({"mvab12c-1": "10.1.2.3", "mvab12c-12": "10.1.2.14"})
        assert reader.read() == begun, "who has opened it reads all of the old one"
    told = path.read_text()
    assert told == f"{begun}NodeName=mvab12c-[1,12] NodeAddr=10.1.2.[3,14]\n"
    install.make_address_file(path)
    assert path.read_text() == told and path.stat().st_mode & 0o777 == 0o644, "all users read it"
    await file.tell({})
    assert path.read_text() == begun
    with pytest.raises(Exhausted, match="cannot write") as caught:
        await install.AddressFile(tmp_path / "none" / "a.conf").tell({})
    assert "slurm.addresses" in caught.value.hint


def test_a_node_with_the_sites_own_slurm_conf_is_not_offered(site: Settings, tmp_path: Path) -> None:
    assert bootstrap.may_be_offered(site, SPARE)
    own = replace(site, slurm=replace(site.slurm, guest_conf=tmp_path / "guest"))
    (tmp_path / "guest").mkdir()
    assert bootstrap.may_be_offered(own, SPARE)
    (tmp_path / "guest" / "slurm.conf").write_text("ClusterName=own\n")
    assert not bootstrap.may_be_offered(own, SPARE)


@pytest.mark.parametrize(
    ("line", "may"),
    [
        ("MaxMemPerCPU=150", True),
        ("MaxMemPerCPU=149", False),
        ("MaxMemPerCPU=UNLIMITED", True),
        ("LaunchParameters=use_interactive_step", True),
        ("LaunchParameters=Disable_Send_Gids,slurmstepd_memlock", False),
    ],
)
def test_a_node_is_not_offered_if_slurm_would_change_the_job_or_look_up_its_user(
    site: Settings, line: str, may: bool
) -> None:
    site.slurm.conf.write_text(SITE_CONF + line + "\n")
    assert bootstrap.may_be_offered(site, SPARE) == may


def test_bootstrap_without_a_munge_key_is_broken(site: Settings) -> None:
    site.slurm.munge_key.unlink()
    with pytest.raises(Broken, match="munge_key"):
        bootstrap.bootstrap(site, SPARE)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Unknown),
        ("slurm_update error: Socket timed out on send/recv operation", Unknown),
        ("Unexpected missing socket error for job 66", Unknown),
        ("slurm_load_jobs error: Connection reset by peer", Unknown),
        ("Resource temporarily unavailable for job 8", Exhausted),
        ("Invalid job id specified for job 5", Gone),
        ("delete_node nodename=n1: Invalid node name specified", Gone),
        ("22_9: Invalid feature specification", Refused),
        ("Job is no longer pending execution for job 5", Stale),
        ("scontrol: fatal: Unable to process configuration file", Broken),
        ("", Refused),
    ],
)
def test_each_message_of_slurm_means_an_error(output: str, error: type[MultiverseError]) -> None:
    assert type(meaning("scontrol", output)) is error


def test_columns_are_read_by_their_width() -> None:
    first = f"{'5_1':<40}{'7':<24}{'PENDING':<16}{'vm':<256}{'a&mvgate':<2048}"
    row = _cells(f"{first}{'1':<12}{'1000':<24}{'N/A':<24}{'4':<24}{'None':<512}")
    assert (row["JobArrayID"], row["Feature"], row["RestartCnt"]) == ("5_1", "a&mvgate", "1")


# --- files that a site installs --------------------------------------------------------------------


def test_the_gate_is_larger_than_any_host(site: Settings) -> None:
    text = rendered(site)["multiverse.conf"].replace("\\\n", "")
    gate = next(line for line in text.splitlines() if line.startswith("NodeName="))
    fields = dict(word.split("=", 1) for word in gate.split() if "=" in word)
    assert int(fields["CPUs"]) == 8 * int(fields["CoresPerSocket"])
    assert (fields["Sockets"], fields["ThreadsPerCore"]) == ("8", "1")
    assert site.qemu.max_cpus * 8 <= int(fields["CPUs"]) < 65536, "Slurm keeps CPUs in 16 bits"
    assert site.qemu.max_memory * 8 <= int(fields["RealMemory"])
    assert site.host.disk * 8 <= int(fields["TmpDisk"]) < 1 << 32, "Slurm keeps the disk in 32 bits"
    features = "mvgate,slim,instant,linked,full,auto"
    places = (
        "place-worst-fit,place-best-fit,place-first-fit,place-random-fit,place-pack,place-spread,place-least-loaded"
    )
    assert f"Feature={features},{places} State=CLOUD" in gate
    assert "mvgate[1-250] NodeAddr=127.0.1.[1-250] Port=1" in gate, "however few hosts there are"


def test_the_epilog_leaves_a_hint_and_never_fails(site: Settings, tmp_path: Path) -> None:
    install.write(rendered(site), tmp_path)
    epilog = tmp_path / "multiverse-epilog"
    job = {"SLURM_JOB_PARTITION": "vm", "SLURM_JOB_ID": "7"}
    assert subprocess.run([epilog], env=job, check=False).returncode == 0  # no inbox
    (tmp_path / "inbox").mkdir()
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    for env in (job, job | task, job | {"SLURM_JOB_PARTITION": "other", "SLURM_JOB_ID": "8"}):
        assert subprocess.run([epilog], env=env, check=False).returncode == 0
    assert sorted(take(tmp_path / "inbox")) == [Hint("end", "5_2"), Hint("end", "7")]


# --- the inbox -------------------------------------------------------------------------------------


def _appears(path: Path) -> None:
    deadline = time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
@pytest.mark.parametrize("there", [True, False])
async def test_the_inbox_belongs_to_slurmctlds_user(tmp_path: Path, there: bool) -> None:
    """The directory may be gone after a reboot, and the user may be another one than before."""
    inbox = tmp_path / "run" / "inbox"
    if there:
        inbox.mkdir(parents=True)
    waiting = asyncio.create_task(anext(hints(inbox, 4242)))
    await asyncio.wait_for(asyncio.to_thread(_appears, inbox), 5)
    await asyncio.sleep(0.05)
    assert inbox.stat().st_uid == 4242
    shutil.rmtree(inbox)
    await asyncio.wait_for(asyncio.to_thread(_appears, inbox), 5)
    (inbox / "submit.7").touch()
    assert (await asyncio.wait_for(waiting, 5)).kind == "submit"
    assert inbox.stat().st_uid == 4242


async def test_hints_are_consumed_also_after_the_directory_was_removed(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "submit.7").touch()
    (inbox / "end.12;rm").touch()
    stream = hints(inbox)

    async def following() -> Hint:
        return await asyncio.wait_for(anext(stream), 5)

    assert await following() == Hint("submit", uid=7)
    waiting = asyncio.create_task(following())
    await asyncio.sleep(0)
    (inbox / "end.12_3").touch()
    assert await waiting == Hint("end", "12_3")
    assert [path.name for path in inbox.iterdir()] == ["end.12;rm"]
    shutil.rmtree(inbox)
    waiting = asyncio.create_task(following())
    await asyncio.wait_for(asyncio.to_thread(_appears, inbox), 5)
    (inbox / "end.4").touch()
    assert await waiting == Hint("end", "4")
