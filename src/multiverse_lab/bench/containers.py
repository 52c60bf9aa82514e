"""What rootless containers cost to start, and isolate, beside VMs and bare metal: ways to start the same job.

Containers run on a bare-metal node of the lab: by podman, which the job's script calls, and by Slurm's `--container`,
which calls crun. Both have the root file system of the image of the VMs. The podman image is in the user's storage
before the first job, and so is the bundle, which a site would have in a shared file system.

The node gets what any Debian gives its users: ranges of further uids, a directory in /run, and /dev/net/tun for all.
All of it is mounted in the node's namespace alone, and is gone with the node. What the node has mounted in its /proc
would keep users from mounting a /proc in their containers (`mount_too_revealing` in the kernel's fs/namespace.c), so
another one without such mounts is in sight.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse_lab.bench import baremetal, latency
from multiverse_lab.bench.latency import SCRIPT, BareMetalComparison, JobKind, LatencySamples, beside_bare_metal
from multiverse_lab.bench.stats import Summary, summary
from multiverse_lab.lab.hosts.machine import HostInit
from multiverse_lab.lab.session import LabSession

BARE = "bare_metal"
_IMAGE = "localhost/slim"
_STORAGE = "STORAGE_DRIVER=overlay"
"""By itself podman may choose vfs, which copies the image for each container: 20 s and more of a start."""
_SUBORDINATE = (1_000_000_000, 65536)
"""The user's further uids and gids, which nobody else has."""

PROGRAMS = {"podman": "podman", "crun": "crun", "newuidmap": "uidmap", "slirp4netns": "slirp4netns"}
"""The programs that containers need, and Debian's packages that have them."""


@dataclass(frozen=True, slots=True)
class StartWay:
    """A way to start a job, as options of sbatch. With `network` its script runs in a container of podman with that
    network, or podman's own choice if it is empty; with `bundle` sbatch is told to run it in a container."""

    name: str
    options: tuple[str, ...]
    vm: bool = False
    network: str | None = None
    bundle: bool = False

    @property
    def contained(self) -> bool:
        return self.network is not None or self.bundle

    def script(self, text: str, home: Path) -> str:
        """The job's script that runs this script in that way. `home` is there in each way."""
        if self.network is None:
            return text
        # Control groups below the job's are not the user's to make, so the container stays in those of the job.
        words = ["podman", "run", "--rm", "--interactive", "--cgroups=disabled", "--env=SLURM_JOB_ID"]
        words += [f"--volume={home}:{home}", *([f"--network={self.network}"] if self.network else []), _IMAGE]
        command = f"{shlex.join(words)} bash -s <<'END'\n{text}END\n"
        return f"#!/bin/bash\nexport XDG_RUNTIME_DIR=/run/user/$UID {_STORAGE}\n{command}"

    def submitted(self, home: Path) -> tuple[str, ...]:
        """The options of sbatch."""
        return (*self.options, *((f"--container={bundle_of(home)}",) if self.bundle else ()))

    def kind(self, home: Path) -> JobKind:
        """The same for `bench latency`."""
        return JobKind(self.name, self.submitted(home), self.vm, self.script(SCRIPT, home))


_PHYSICAL = ("--partition=physical", "--mem=150")
_SPARE = {kind.name: kind.options for kind in latency.KINDS}
WAYS = (
    StartWay(BARE, _PHYSICAL),
    StartWay("podman", _PHYSICAL, network=""),
    StartWay("podman_host_network", _PHYSICAL, network="host"),
    StartWay("slurm_container", _PHYSICAL, bundle=True),
    StartWay("joined", _SPARE["joined"], vm=True),
    StartWay("parked", _SPARE["parked"], vm=True),
    StartWay("instant", _SPARE["instant"], vm=True),
    StartWay("linked", ("--constraint=slim&linked",), vm=True),
    StartWay("full", _SPARE["full_same"], vm=True),
)


def lacking() -> list[str]:
    """The packages that containers need and this machine does not have."""
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})


def check_packages() -> None:
    """Raises `Refused` with the packages that this machine lacks."""
    if missing := lacking():
        raise Refused(
            f"containers need packages that are not installed: {', '.join(missing)}",
            hint=f"apt install --no-install-recommends {' '.join(missing)}, or leave containers out with --kinds",
        )


def bundle_of(home: Path) -> Path:
    """The directory of the bundle for Slurm's `--container`."""
    return home / "bundle"


def node_group(lab: LabSession) -> str:
    """The control group of the bare-metal node."""
    return f"{lab.where.control_group}/{lab.lab.plan.physical_nodes[0].name}"


# --- what containers need --------------------------------------------------------------------------


@contextmanager
def containers(lab: LabSession, image: Path) -> Iterator[None]:
    """Make the node ready for containers with the root file system of an image's disk. It is removed afterwards."""
    _remove(lab.user.home)  # what a run left that was killed
    try:
        _prepare_node(lab)
        _make_bundle(lab, image)
        node = lab.where.host(lab.lab.plan.physical_nodes[0].name)
        (node.etc / "oci.conf").write_text(_OCI_CONF)
        # As a job, which ends what podman leaves behind: a process that keeps the user's namespaces.
        importing = (
            f"tar -C {bundle_of(lab.user.home)}/rootfs --owner=0 --group=0 -c . | podman import --quiet - {_IMAGE}"
        )
        options = ("--partition=physical", "--mem=2G", "env", f"XDG_RUNTIME_DIR=/run/user/{lab.user.uid}", _STORAGE)
        _checked(
            lab.run("srun", "--quiet", *options, "bash", "-o", "pipefail", "-c", importing, timeout=300.0), "podman"
        )
        yield
    finally:
        _remove(lab.user.home)


def _remove(home: Path) -> None:
    """Remove the bundle, and what podman keeps, whose owners are the user's further uids."""
    for path in (bundle_of(home), home / ".local"):
        shutil.rmtree(path, ignore_errors=True)


_OCI_CONF = "".join(
    f'RunTime{name}="crun --root=/run/user/$(id -u)/crun --cgroup-manager=disabled {words} %n.%j.%s.%t"\n'
    for name, words in (("Query", "state"), ("Kill", "kill -a"), ("Delete", "delete --force"), ("Run", "run -b %b"))
)

_PREPARE = """set -e
mkdir -p /run/proc /run/devices /run/user
mount -t proc proc /run/proc
mount -t tmpfs -o mode=0755 devices /run/devices
mknod -m 0666 /run/devices/tun c 10 200
mount --bind /run/devices/tun /dev/net/tun
mkdir -m 0700 -p /run/user/{uid}
chown {uid} /run/user/{uid}
for name in subuid subgid; do
    echo {name}:{first}:{count} > /run/$name
    mount --bind /run/$name /etc/$name
done
"""


def _prepare_node(lab: LabSession) -> None:
    (node,) = lab.lab.plan.physical_nodes
    running = HostInit(node).service.running(lab.where)
    if running is None:
        raise Broken(f"node {node.name} has ended", hint="see its log in the lab's log directory")
    enter = ("nsenter", "--mount", "--pid", f"--target={running.pid}")
    first, count = _SUBORDINATE
    script = _PREPARE.format(uid=lab.user.uid, name=lab.user.name, first=first, count=count)
    _checked(subprocess.run([*enter, "sh", "-c", script], capture_output=True, text=True, check=False), node.name)


def _make_bundle(lab: LabSession, image: Path) -> None:
    """A bundle of the user's: root in the container is the user."""
    home, root = lab.user.home, bundle_of(lab.user.home) / "rootfs"
    root.mkdir(parents=True)
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    _checked(run(["debugfs", "-R", f"rdump / {root}", str(image)]), "debugfs")
    _checked(run(["chown", "-R", f"{lab.user.uid}:{lab.user.uid}", str(root.parent)]), "chown")
    _checked(lab.run("sh", "-c", f"cd {root.parent} && crun spec --rootless"), "crun")
    place = root.parent / "config.json"
    place.write_text(json.dumps(bundle_configuration(json.loads(place.read_text()), home)))


def bundle_configuration(found: Mapping[str, object], home: Path) -> dict[str, object]:
    """What `crun spec` has written, changed: with the node's network, as jobs of several nodes need it, the user's
    home, and without a mount of control groups, which only root can make on version 1."""
    document = json.loads(json.dumps(found))
    document["root"] = {"path": "rootfs", "readonly": False}
    linux = document["linux"]
    linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] != "network"]
    document["mounts"] = [
        *(one for one in document["mounts"] if one["type"] != "cgroup"),
        {"destination": str(home), "type": "none", "source": str(home), "options": ["rbind", "rw"]},
    ]
    return dict(document)


def _checked(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise Broken(f"containers are not possible: {what} failed: {said}", hint="see the lab's log directory")


# --- what is measured ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WayFigures:
    """The figures of one way: seconds, and MiB of memory that nothing else maps. None: there is none."""

    submit_to_start: Summary | None
    cpu_s: Summary | None
    uss_mib: Summary | None


def figures(samples: LatencySamples) -> WayFigures:
    return WayFigures(summary(samples.submit_to_start), summary(samples.cpu_s), summary(samples.uss_mib))


def compared(found: Mapping[str, LatencySamples]) -> list[BareMetalComparison]:
    return beside_bare_metal(found, BARE)


def node_cost(lab: LabSession) -> latency.BareCost:
    """The cost of a job on the bare-metal node, with what it has detached."""
    return partial(baremetal.cost, node=node_group(lab))


def ways_of(names: str) -> list[StartWay]:
    """The ways with these names, which are separated by commas. Raises `Refused` for a name that there is not."""
    known = {way.name: way for way in WAYS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if wrong := [name for name in asked if name not in known]:
        raise Refused(f"no such kind: {', '.join(wrong)}", hint=f"there are: {', '.join(known)}")
    return [known[name] for name in asked]


def versions(ways: Sequence[StartWay], run: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, str]:
    """The versions of the programs that make the containers of these ways."""
    if not any(way.contained for way in ways):
        return {}
    return {program: run(program, "--version").stdout.split("\n")[0] for program in ("podman", "crun")}
