"""Slurm's commands say of a job in a VM what they say of the same job on bare metal, and do the same with it.

The cases, and what differs on purpose, are in commands.py.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.lab import baremetal, lifecycle
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.services import Lab
from tests.integration import commands
from tests.integration.commands import CANCELLED, DIFFERENCES, INSIDE, SHOWN, SIGNALLED, Difference
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, output_of, until

pytestmark = pytest.mark.integration

SITE = """
PriorityType=priority/multifactor
PriorityWeightQOS=1000
PriorityWeightFairshare=1000
Licenses=seat:9,vm:1
FirstJobId=771000
"""
"""The numbers of jobs are such that nothing else looks like them."""
_OPTIONS = "--account=physics --wckey=key --comment=said --ntasks=2 --mem=300 --time=30 --licenses=seat:1"
_RUNNING = """\
trap 'echo script USR1 >> signals' USR1
srun -Q sh ./task &
while [ ! -e over ]; do sleep 0.3; done
"""
_TASK = """\
trap 'echo task $SLURM_PROCID USR1 >> signals' USR1
echo task $SLURM_PROCID says
echo task $SLURM_PROCID complains >&2
while [ ! -e over ]; do sleep 0.3; done
"""
_ENDED = """\
srun -Q sh -c 'exit 3'
sh ./inside > inside.out
exit 4
"""
_FLAT = """\
import json, sys
def flat(value, name):
    if isinstance(value, (dict, list)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            flat(one, key if isinstance(value, dict) else name)
    else:
        print(f"{name}={value}")
key, wanted = sys.argv[1:]
for group in json.load(sys.stdin).values():
    for one in group if isinstance(group, list) else ():
        if str(one[key]) == wanted:
            flat(one, "")
"""
"""Prints what JSON has of a job or a node, each value with its name."""
_LINES = """\
lines() {
    wanted=$1; shift
    stdbuf -oL "$@" > lines.out 2>&1 & pid=$!
    for _ in $(seq 300); do
        [ $(wc -l < lines.out) -ge $wanted ] && break
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    kill $pid 2>/dev/null
    { wait $pid; } 2>/dev/null
    sort lines.out
}
signals() {
    for _ in $(seq 50); do [ $(cat signals 2>/dev/null | wc -l) -ge $1 ] && break; sleep 0.1; done
    sleep 0.3
    sort -u signals 2>/dev/null
    rm -f signals
}
"""
_KNOWN = """\
mkdir {tmp}
for _ in $(seq 100); do [ "$(sacct -nXPo Partition -j $SLURM_JOB_ID)" ] && break; sleep 0.2; done
"""
"""slurmdbd may learn of a step before it learns of its job."""
_CASE = "\n----- case\n"


def script(asked: list[str], before: str = "", after: str = "") -> str:
    """Shell commands that ask all of that, one after the other."""
    each = (f"{before}\necho '{_CASE}'\n( {case} ) < /dev/null\necho exit code $?\n{after}" for case in asked)
    return "\n".join(("exec 2>&1", _LINES, *each)) + "\n"


@dataclass
class Place:
    """A partition with its jobs."""

    lab: LabUnderTest
    partition: str
    directory: Path
    words: dict[str, str] = field(default_factory=dict)
    """What the words in braces stand for."""
    said: dict[str, str] = field(default_factory=dict)
    """What was said in each case."""

    def __post_init__(self) -> None:
        self.directory.mkdir()
        os.chown(self.directory, self.lab.user.uid, self.lab.user.uid)
        self.words = {
            "partition": self.partition,
            "user": self.lab.user.name,
            "dir": str(self.directory),
            "tmp": f"/tmp/{self.directory.name}-{os.getpid()}",
            "options": f"{_OPTIONS} --partition={self.partition} --chdir={self.directory} --output=%x.out",
            "squeue_fields": ",".join(f"{name}:|" for name in commands.SQUEUE_FIELDS.split()),
            "sinfo_fields": ",".join(f"{name}:|" for name in commands.SINFO_FIELDS.split()),
        }

    def filled(self, text: str) -> str:
        for word, value in self.words.items():
            text = text.replace(f"{{{word}}}", value)
        return text

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(self.filled(text))
        path.chmod(0o755)
        return path

    @property
    def env(self) -> tuple[str, ...]:
        """Users' commands find nodes of a lab only if a file names these. VMs are in a file of the controller's."""
        return ("env", f"--chdir={self.directory}", f"SLURM_CONF={self.directory}/slurm.conf")

    def submit(self, name: str, text: str, *options: str) -> None:
        words = [self.filled(word) for word in ("{options}", *options)]
        path = self.write(f"{name}.sh", f"#!/bin/sh\n{text}\n")
        command = (*self.env, "sbatch", "--parsable", f"--job-name=same-{name}", *" ".join(words).split(), str(path))
        self.words[name] = self.lab.run(*command, user=self.lab.user).stdout.strip()

    def state(self, name: str, form: str = "%T") -> str:
        return self.lab.run("squeue", "-ah", "-t", "all", "-o", form, "-j", self.words[name]).stdout.strip()

    def ask(self, asked: list[str], before: str = "", after: str = "") -> None:
        path = self.write("asked", script(asked, before, after))
        self.hear(asked, self.lab.run(*self.env, "sh", str(path), user=self.lab.user, timeout=120).stdout)

    def hear(self, asked: list[str], said: str) -> None:
        answers = said.split(_CASE)[1:]
        assert len(answers) == len(asked), (len(answers), len(asked))
        self.said |= dict(zip(asked, answers, strict=True))

    def comparable(self, case: str) -> list[str]:
        """What was said in that case, without numbers of jobs, times, and what differs on purpose."""
        command = "sacct" if "sacct" in case else ""
        return [found for part in self.parts(case) if (found := _part(command, part))]

    def parts(self, case: str) -> list[str]:
        """What was said in that case, without numbers of jobs and times."""
        text = self.said[case]
        for name in ("ended", "running", "waiting", "eligible", "array", "node", "ended_node", "dir", "tmp"):
            text = text.replace(self.words[name], f"<{name.removeprefix('ended_')}>")
        text = re.sub(r"\b77\d{4}\b", "<job>", text)
        text = re.sub(rf"\b({self.partition}\b\*?|{platform.node()}\b)", "<partition>", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "<time>", text)
        text = re.sub(r"(?<![\d:])(\d+-)?(\d+:)?\d+:\d\d(\.\d+)?\b", _span, text)
        if case.startswith(("sreport", "sshare", "sprio")):
            text = re.sub(r"\d+(\.\d+)?", "<number>", text)
        return list(_parts(case, text.splitlines()))


def _span(found: re.Match[str]) -> str:
    return "<half an hour>" if re.fullmatch("(00:)?30:00", found[0]) else "<span>"


def _parts(case: str, rows: list[str]) -> Iterator[str]:
    """Fields of tables, and those that scontrol shows, one by one as NAME=VALUE; other lines as they are."""
    heads: list[str] = []
    for row in rows:
        cells = row.split("|")
        if len(cells) > 4 and not heads:
            heads = cells
        elif heads and len(cells) == len(heads):
            yield from (f"{head.strip()}={cell.strip()}" for head, cell in zip(heads, cells, strict=True))
        elif case.startswith("scontrol") and "=" in row:
            yield from re.split(r"\s+(?=[\w:/]+=)", row.strip())
        else:
            yield " ".join(row.split())


_ON_PURPOSE = {field for difference in DIFFERENCES for field in difference.fields.split()}
_MEASURED = re.compile("|".join(commands.MEASURED.split()))


def _part(command: str, text: str) -> str:
    name, equals, _ = text.partition("=")
    if not equals:
        return text
    if name in _ON_PURPOSE or f"{command}:{name}" in _ON_PURPOSE:
        return ""
    return name if _MEASURED.fullmatch(name) else text


@pytest.fixture(scope="module")
def site(lab: LabUnderTest) -> Iterator[None]:
    """Priorities by fair share, an account, and licences enough for all jobs of this module."""
    conf = lab.where.etc / "site.conf"
    before = conf.read_text()
    try:
        for words in ("account physics", f"user {lab.user.name} account=physics"):
            lab.run("sacctmgr", "-i", "add", *words.split())
        conf.write_text(before + SITE)
        asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))
        yield
    finally:
        conf.write_text(before)
        lab.run("sacctmgr", "-i", "delete", "account", "physics", check=False)
        asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))


@pytest.fixture(scope="module")
def controller(site: None, controller: Callable[[], int]) -> Callable[[], int]:
    return controller


@pytest.fixture(scope="module")
def bare(lab: LabUnderTest, site: None) -> Iterator[None]:
    """A plain slurmd on this machine."""
    plan = load(lab.where)
    assert plan is not None
    own = Lab(lab.where, plan)
    asyncio.run(baremetal.start(own))
    yield
    asyncio.run(baremetal.stop(own))


@pytest.fixture(scope="module")
def places(lab: LabUnderTest, client: Client, bare: None) -> Iterator[tuple[Place, Place]]:
    """The VM partition and bare metal, after all has been asked."""
    found = Place(lab, "vm", lab.user.home / "commands-vm"), Place(lab, "bare", lab.user.home / "commands-bare")
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(_ask_all, found))
        yield found
    finally:
        lab.run("scancel", "--user", lab.user.name)
        until("its jobs are gone", lambda: not lab.run("squeue", "-h", "-u", lab.user.name).stdout)


def _ask_all(place: Place) -> None:
    lab, words = place.lab, place.words
    bare = place.partition == "bare"
    users_conf, address = lab.env["SLURM_CONF"], lab.settings.network.gateway
    more = (
        f"SlurmdSpoolDir={lab.where.run}/bare/spool\n"
        f"NodeName={baremetal.NODE} NodeHostname={platform.node()} NodeAddr={address}\n"
    )
    for name, text in (
        ("slurm.conf", f"Include {users_conf}\n" + (more if bare else "")),
        ("file", "given\n"),
        ("flat", _FLAT),
        ("task", _TASK),
        ("inside", ("export SLURM_CONF={dir}/slurm.conf\n" if bare else "") + _KNOWN + script(INSIDE)),
    ):
        place.write(name, text)
    place.submit("ended", _ENDED)
    until("it has ended", lambda: place.state("ended") == "FAILED")
    accounted(lab, words["ended"])
    place.hear(INSIDE, output_of(place.directory / "inside.out"))
    words["ended_node"] = lab.run("sacct", "-nXPo", "NodeList", "-j", words["ended"]).stdout.strip()
    place.submit("running", _RUNNING)
    place.submit("waiting", "true", "--dependency=afterany:{running}")
    place.submit("eligible", "true", "--licenses=seat:9")
    place.submit("array", "true", "--hold", "--array=1-3")
    out = place.directory / "same-running.out"
    until("its tasks run", lambda: out.exists() and out.read_text().count("says") == 2)
    words["node"] = place.state("running", "%N")
    until("Slurm says why the other waits", lambda: place.state("eligible", "%r") == "Licenses")
    started = ("sacct", "-nPo", "State", "-j", f"{words['running']}.0")
    until("its step is accounted", lambda: "RUNNING" in lab.run(*started).stdout)
    place.ask(SHOWN)
    place.ask(
        CANCELLED,
        "victim=$(sbatch --parsable --hold -J victim {options} --wrap=true)",
        'squeue -aht all -o "%T %r" -j $victim',
    )
    for case, seen in SIGNALLED.items():
        place.ask([case], after=f"signals {seen}")
    (place.directory / "over").touch()


def used(command: str) -> set[str]:
    """The options with which the command is compared."""
    found = set[str]()
    for case in (*SHOWN, *INSIDE, *CANCELLED, *SIGNALLED):
        for part in re.split(r"\||&&", case):
            before, name, after = part.partition(f"{command} ")
            if name and not before.strip().startswith(tuple(commands.OPTIONS)):
                found |= {word.partition("=")[0] for word in after.split() if re.match(r"--?[a-zA-Z]", word)}
    return found


@pytest.mark.parametrize("command", commands.OPTIONS)
def test_each_option_of_the_man_page_is_compared_or_excluded(command: str) -> None:
    excluded = set(" ".join(commands.EXCLUDED.values()).replace(f"{command}:", "").split())
    listed = [set(names.split("/")) for names in commands.OPTIONS[command].split()]
    assert not [names for names in listed if names.isdisjoint(used(command) | excluded)]
    assert used(command) <= set[str]().union(*listed), "no others"


@pytest.mark.parametrize("command", commands.OPTIONS)
def test_no_option_of_the_man_page_is_missing(lab: LabUnderTest, command: str) -> None:
    """As far as the command itself tells, which may abbreviate a name."""
    if not shutil.which(command):
        pytest.skip(f"{command} is not installed")
    listed = re.split("[/ ]", commands.OPTIONS[command])
    shown = re.findall(r"(?m)(?<![\w\]\[-])--?[a-zA-Z][\w-]*", lab.run(command, "--help").stdout)
    assert shown
    assert not [name for name in shown if not any(one.startswith(name) for one in listed)]


def differs(places: tuple[Place, Place], case: str) -> str:
    """What the two places say in a case, if that is not the same."""
    vm, bare = (place.comparable(case) for place in places)
    if vm == bare:
        return ""
    each = ("in the VM", [part for part in vm if part not in bare]), ("bare", [part for part in bare if part not in vm])
    return f"{case}\n" + "\n".join(f"  {where}: {parts}" for where, parts in each)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [SHOWN, INSIDE, CANCELLED, list(SIGNALLED)], ids=["shown", "inside", "cancelled", "signalled"]
)
def test_what_is_said_of_a_vm_is_what_is_said_of_bare_metal(places: tuple[Place, Place], asked: list[str]) -> None:
    different = [said for case in asked if (said := differs(places, case))]
    assert not different, "\n".join(different)


@pytest.mark.slow
def test_signals_reach_the_script_and_its_tasks(places: tuple[Place, Place]) -> None:
    for place in places:
        assert {case: place.said[case].count(" USR1\n") for case in SIGNALLED} == SIGNALLED, place.partition


@pytest.mark.slow
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda one: one.what)
def test_what_differs_on_purpose_does_differ(places: tuple[Place, Place], difference: Difference) -> None:
    """Otherwise it is compared."""

    def seen(place: Place) -> set[str]:
        return {
            part
            for case in (*SHOWN, *INSIDE)
            for part in place.parts(case)
            if part.partition("=")[0] in difference.fields.replace("sacct:", "").split()
        }

    vm, bare = places
    assert seen(vm) - seen(bare) and seen(vm)
