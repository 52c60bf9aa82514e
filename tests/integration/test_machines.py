"""docs/install.md is followed on fresh machines, block by block, as it is written. Afterwards they are as before.

The time that it takes is printed, without what apt and the builder of images would fetch: that is there already.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.fresh_machines import (
    ADDRESSES,
    GROUPS_V2,
    RELEASES,
    ROOT,
    Cable,
    FreshMachine,
    image_of,
    prepare,
    start_site,
)
from tests.integration.watch import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(GROUPS_V2 is None, reason="there are no control groups of version 2"),
]
PAGE = ROOT / "docs/install.md"
PACKAGES = ("common", "controller", "host")
APART = "A controller without VMs"

# What an administrator changes in the settings: at first the sizes, and then what a second host needs.
EDITOR = """\
#!/bin/sh -e
if grep -q "^memory = 3000" "$1"; then
    sed -i 's/^nodes = "ctl1"/nodes = "ctl1,n2"/' "$1"
    printf '\\n[vxlan]\\nenabled = true\\n' >> "$1"
else
    sed -i -e 's/^cores = [0-9]*/cores = 2/' -e 's/^memory = [0-9]*/memory = 3000/' "$1"
fi
"""
EDITOR_APART = """\
#!/bin/sh -e
cat > "$1" << end
[[hosts]]
nodes = "n2"
cores = 2
memory = 3000
[slurm]
conf = "/etc/slurm/slurm.conf"
partition = "vm"
[network]
subnet = "10.213.0.0/16"
gateway = "10.213.0.1"
[vxlan]
enabled = true
addresses = [["ctl1", "192.0.2.1"], ["n2", "192.0.2.2"]]
[image]
default = "slim"
end
"""
# What a removal has to leave as it was. Left out is what apt, dpkg, the journal and Slurm keep of what they did, and a
# group that Debian's libibverbs1, on which QEMU depends, makes and never removes.
STATE = {
    "files": r"""find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/tmp
        -o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/lib/systemd
        -o -path /var/lib/slurm -o -name '*.deb' -o -path /root/multiverse-backup.tar.gz \) -prune
        -o -printf '%p %y %m %u:%g %l\n' | sort""",
    "contents": r"""find /etc /root /home /usr/local -type f ! -name '*.deb' ! -name '*.tar.gz' ! -name ld.so.cache
        ! -path '/etc/group*' ! -path '/etc/gshadow*' -exec sha256sum {} + | sort -k 2""",
    "users": "getent passwd; getent group | grep -v ^rdma:",
    "units": "systemctl list-unit-files --no-legend --no-pager | sort",
    "links": "ls /sys/class/net; ip -o -4 address | awk '{print $2, $4}'",
    "nft": "nft list ruleset",
    "slurm": "scontrol show config 2>&1 | grep -ve ' as of ' -e ^BOOT_TIME -e ^NEXT_JOB_ID; sinfo -hNo '%N %P' || true",
}


class Block(NamedTuple):
    """Commands of the page."""

    machine: str
    user: str  # empty: root
    commands: str


def sections(suite: str) -> dict[str, list[Block]]:
    """The blocks of the page by its headings, for a release of Debian."""
    text = PAGE.read_text().replace("~deb12_", f"~{RELEASES[suite]}_")
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    found = re.compile(r"^```sh\n# on (\w+)(?:, as (\w+))?\n(.*?)^```$", re.M | re.S)
    return {
        name: [Block(one[1], one[2] or "", one[3]) for one in found.finditer(part)]
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }


def built(suite: str) -> list[Path]:
    """The packages of the release, from `make packages`."""
    dist = ROOT / "dist"
    if len([*dist.glob(f"*~{RELEASES[suite]}_*.deb")]) < 6:
        subprocess.run([ROOT / "scripts/packages", suite], cwd=ROOT, check=True)
    return [next(dist.glob(f"multiverse-{name}_*~{RELEASES[suite]}_*.deb")) for name in PACKAGES]


def later(debs: list[Path], number: int, into: Path) -> list[Path]:
    """The same packages as of a later version."""
    made = []
    for deb in debs:
        tree = into / deb.name.partition("_")[0]
        subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)
        control = tree / "DEBIAN/control"
        control.write_text(re.sub(r"(?<=\d-)1(?=~deb)", f"1.{number}", control.read_text()))
        name = re.sub(r"(?<=\d-)1(?=~deb)", f"1.{number}", deb.name)
        subprocess.run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree, into / name], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        shutil.rmtree(tree)
        made.append(into / name)
    return made


@pytest.fixture(params=RELEASES)
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(suite: str) -> tuple[Path, Path]:
    return image_of(suite)


@pytest.fixture
def machines(suite: str, image: tuple[Path, Path]) -> Iterator[dict[str, FreshMachine]]:
    base = prepare(suite, built(suite), image[1])
    top = ROOT / f"var/machines-{suite}"
    shutil.rmtree(top, ignore_errors=True)
    cable = Cable()
    made = {name: FreshMachine(name, base, top, cable) for name in ADDRESSES}
    try:
        start_site(*made.values())
        for machine in made.values():
            machine.put("/usr/local/bin/editor", EDITOR.encode(), "755")
        yield made
    finally:
        for machine in made.values():
            machine.off()
        cable.end()
        shutil.rmtree(top)


def states(machines: dict[str, FreshMachine]) -> dict[str, list[str]]:
    """What there is on each machine."""
    return {
        f"{what} of {name}": machine.shell(command.replace("\n", " ")).splitlines()
        for name, machine in machines.items()
        for what, command in STATE.items()
    }


class Guide:
    """Follows the page, and notes the time."""

    def __init__(self, machines: dict[str, FreshMachine], suite: str) -> None:
        self._machines, self._sections = machines, sections(suite)
        self.seconds: dict[str, float] = {}

    def follow(self, section: str, *, backwards: bool = False) -> str:
        """Type the commands of a section, and answer yes to what they ask. Returns what they have printed."""
        began, blocks = time.monotonic(), self._sections[section]
        said = [
            self._machines[one.machine].run("sh", "-c", 'yes | sh -ec "$0"', one.commands, user=one.user).stdout
            for one in (reversed(blocks) if backwards else blocks)
        ]
        self.seconds[section] = self.seconds.get(section, 0) + time.monotonic() - began
        assert said, f"the page has no commands in {section}"
        return "".join(said)


@pytest.fixture
def guide(machines: dict[str, FreshMachine], suite: str) -> Guide:
    return Guide(machines, suite)


def vms(ctl1: FreshMachine) -> dict[str, str]:
    """The host of each VM."""
    return {one["name"]: one["host"] for one in json.loads(ctl1.run("multiverse", "vms", "--json").stdout)}


def test_a_site_is_installed_grows_is_upgraded_restored_and_removed(
    machines: dict[str, FreshMachine],
    guide: Guide,
    suite: str,
    image: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ctl1 = machines["ctl1"]
    before = states(machines)
    debs = built(suite)
    bring(debs, machines)
    for section in ("1. Packages", "2. Settings"):
        guide.follow(section)
    bring_image(image[0], ctl1)
    assert "up to date" in guide.follow("3. An image")
    assert "Include multiverse.conf" in guide.follow("4. Beside your Slurm")
    assert "0 wrong" in guide.follow("5. Five jobs")
    assert "connected: n2" in guide.follow("A second host")
    assert len(re.findall(r"^mv\w+-\w+$", guide.follow("Jobs"), re.M)) >= 2

    trap = "trap 'exit 7' USR1; while :; do sleep 1; done"
    submit = ("sbatch", "--parsable", "--partition=vm", "--cpus-per-task=2", "--output=/dev/null", f"--wrap={trap}")
    jobs = [ctl1.run(*submit, user="ada").stdout.strip() for _ in machines]
    until("both run", lambda: len(running(ctl1)) == 2, limit=600)
    own, processes = vms(ctl1), qemus(machines)
    assert {*own.values()} == {*machines} and all(processes.values())
    for number, backwards in enumerate((False, True), 1):
        bring(later(debs, number, tmp_path), machines)
        assert "Nothing is missing" in guide.follow("Upgrade", backwards=backwards)
        until("both hosts answer", lambda: are_up(ctl1))
        assert (vms(ctl1), qemus(machines), len(running(ctl1))) == (own, processes, 2)
    guide.follow("Backup and restore")
    until("both hosts answer", lambda: are_up(ctl1))
    assert (vms(ctl1), qemus(machines), len(running(ctl1))) == (own, processes, 2)
    ctl1.run("scancel", "--batch", "--signal=USR1", *jobs)
    until("they have ended", lambda: not running(ctl1), limit=120)
    ends = ctl1.run("scontrol", "show", "job", "--oneliner").stdout
    assert all(re.search(rf"^JobId={job} .* ExitCode=7:0 ", ends, re.M) for job in jobs), ends
    until("no VM is left", lambda: not vms(ctl1), limit=120)

    guide.follow("Removal")
    after = states(machines)
    differences = [line for what in before for line in compared(what, before[what], after[what])]
    with capsys.disabled():
        took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in guide.seconds.items())
        print(f"\n{suite}: docs/install.md took {sum(guide.seconds.values()) / 60:.1f} min: {took}")
    assert not differences, "\n".join(differences)
    followed = {name for name, blocks in sections(suite).items() if blocks} - {APART}
    assert {*guide.seconds} == followed, "all of the page was followed"
    until("the site's own jobs run", lambda: ctl1.run("srun", "hostname", user="ada").stdout == "ctl1\n")


@pytest.mark.parametrize("suite", ["bookworm"], indirect=True)
def test_a_controller_without_vms_has_neither_qemu_nor_an_agent(
    machines: dict[str, FreshMachine], guide: Guide, suite: str, image: tuple[Path, Path]
) -> None:
    ctl1 = machines["ctl1"]
    ctl1.put("/usr/local/bin/editor", EDITOR_APART.encode(), "755")
    before = states(machines)
    bring(built(suite), machines)
    bring_image(image[0], ctl1)
    said = guide.follow(APART)
    assert "the settings do not name it among the hosts" in said and "Nothing is missing" in said
    assert "up to date" in guide.follow("3. An image")
    assert "0 wrong" in guide.follow("5. Five jobs")
    assert ctl1.run("multiverse", "hosts", "--json").stdout.count('"state": "up"') == 1
    assert ctl1.run("systemctl", "list-unit-files", "multiverse-agent.service", check=False).returncode
    assert ctl1.run("sh", "-c", "command -v qemu-system-x86_64", check=False).returncode
    guide.follow("Removal")
    after = states(machines)
    differences = [line for what in before for line in compared(what, before[what], after[what])]
    assert not differences, "\n".join(differences)


def compared(what: str, before: list[str], after: list[str]) -> list[str]:
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return [f"{what}: {line}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def bring(debs: list[Path], machines: dict[str, FreshMachine]) -> None:
    for machine in machines.values():
        machine.shell("rm -f *.deb")
        for deb in debs:
            machine.put(f"/root/{deb.name}", deb.read_bytes())


def bring_image(image: Path, machine: FreshMachine) -> None:
    """The image that `image build` would build, with its holes."""
    packed = subprocess.run(["tar", "-C", image.parent, "-S", "-c", image.name], stdout=subprocess.PIPE, check=True)
    machine.put("/root/image.tar", packed.stdout)
    machine.shell(
        "cd /var/lib; mkdir -p multiverse/images; tar -C multiverse/images -S -xf /root/image.tar; rm /root/image.tar"
    )


def are_up(ctl1: FreshMachine) -> bool:
    """Whether the table of hosts shows both as up."""
    return len(re.findall(r"^ *(?:ctl1|n2) +up ", ctl1.run("multiverse", "hosts").stdout, re.MULTILINE)) == 2


def running(ctl1: FreshMachine) -> list[str]:
    return ctl1.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").stdout.split()


def qemus(machines: dict[str, FreshMachine]) -> dict[str, list[str]]:
    """The processes of VMs on each machine. Templates have none."""
    asked = ("pgrep", "-x", "qemu-system-x86")
    return {name: machine.run(*asked, check=False).stdout.split() for name, machine in machines.items()}
