"""A lab of its own for the whole session, with users that exist nowhere else; it is taken down whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.config import HostSettings, ImageSettings, JobVmSettings, QemuSettings, Settings
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.host.qemu import abilities
from multiverse_lab.lab import configure, lifecycle
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.service import patience
from multiverse_lab.lab.services import AGENT, CONTROLLER
from multiverse_lab.lab.users import PrivateUser, enter_private_namespace, private_users, remove_private_users
from tests.integration.images import IMAGES, slim
from tests.integration.restarting_daemon import RestartingDaemon, StartDaemon
from tests.integration.watch import until

_NEEDED = ("slurmctld", "slurmdbd", "slurmd", "munged", "mariadbd", "ganesha.nfsd", "sshd")
GUESTS_NETWORK = f"10.219.{os.getpid() % 256}"
"""Of the guests of tests without a lab. Two runs at the same time must not share routes."""
BUILT = Path(__file__).parents[2] / "var" / "spank"
TEMPLATES = "MULTIVERSE_TEST_TEMPLATES"
"""The variable with the directory in which the hosts of a lab share templates."""
SCRATCH = 128
"""MiB that a guest of these tests may write, so that it is soon full."""
_labs = itertools.count(1)
"""Labs exist side by side in one mount namespace, with one /etc/passwd: the users of each have names of their own."""


@dataclass(frozen=True)
class LabUnderTest:
    where: Layout
    settings: Settings
    user: PrivateUser
    other: PrivateUser

    @property
    def env(self) -> dict[str, str]:
        return os.environ | configure.users_environment(self.where)

    def run(
        self, *argv: str, user: PrivateUser | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A command as `user`, in his home; as root, in /, if none is given."""
        return subprocess.run(
            argv,
            env=self.env | ({"HOME": str(user.home)} if user else {}),
            cwd=user.home if user else "/",
            user=user.uid if user else None,
            group=user.uid if user else None,
            extra_groups=[] if user else None,
            capture_output=True,
            text=True,
            timeout=timeout * patience(),
            check=check,
        )

    def sbatch(self, script: str, *options: str, user: PrivateUser | None = None) -> str:
        """Submit a script as the user; the job id."""
        done = self.run("sbatch", "--parsable", *options, f"--wrap={script}", user=user or self.user, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextmanager
def more_settings(lab: LabUnderTest, text: str) -> Iterator[None]:
    """The lab's controller runs with these settings (TOML) in addition while the context lasts."""
    site = lab.where.etc / "site.toml"
    site.write_text(text)
    try:
        asyncio.run(lifecycle.up(lab.where, LabOptions()))
        yield
    finally:
        site.write_text("")
        asyncio.run(lifecycle.up(lab.where, LabOptions()))


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which a state directory keeps whether KVM runs guests here: to find that out takes seconds."""
    file, binary = tmp_path_factory.mktemp("probe") / "kvm.json", QemuSettings().binary
    abilities.accelerator("auto", binary, abilities.qemu_version(binary), file)
    return file


@pytest.fixture(scope="session")
def settings(accelerator: Path) -> Iterator[Settings]:
    """Settings of one host for tests without a lab, with directories and a bridge of its own, which are removed
    afterwards. All of these tests share its template: to build one takes ten seconds."""
    slim()
    place, memory = Path(tempfile.mkdtemp(prefix="mvq-")), Path(tempfile.mkdtemp(prefix="mvq-", dir="/dev/shm"))
    for path in (place, memory):
        path.chmod(0o711)  # the users of VMs pass through it
    shutil.copy(accelerator, place)
    bridge = f"mvq{os.getpid()}"
    qemu = QemuSettings(images=IMAGES, templates=memory / "t", vms=place / "vms", run=place / "run", bridge=bridge)
    try:
        for command in (
            f"link add {bridge} type bridge",
            f"addr add {GUESTS_NETWORK}.254/24 dev {bridge}",
            f"link set {bridge} up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        image = ImageSettings(scratch=SCRATCH)
        yield Settings(state_dir=place, host=HostSettings("h", 4, 8192), qemu=qemu, image=image)
    finally:
        subprocess.run(["ip", "link", "del", bridge], check=False)
        shutil.rmtree(place)
        shutil.rmtree(memory)


@contextmanager
def new_lab(accelerator: Path, wishes: LabOptions, *, controller: bool) -> Iterator[LabUnderTest]:
    """A lab with users and a directory of its own, which is removed with it. Guests see the users' homes."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    missing = [program for program in _NEEDED if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")]
    assert not missing, f"not installed: {' '.join(missing)}; run make setup"
    directory = Path(tempfile.mkdtemp(prefix="mvlab-"))
    directory.chmod(0o755)  # users go through it
    where, users = layout(directory / "lab"), list[PrivateUser]()
    try:
        enter_private_namespace()
        lab = next(_labs)
        ada, bob = f"ada{lab}", f"bob{lab}"
        user, other = users = private_users(
            [(ada, 61820 + 2 * lab, directory / "home" / ada), (bob, 61821 + 2 * lab, directory / "home" / bob)],
        )
        where.controller.mkdir(parents=True)
        shutil.copy(accelerator, where.controller)
        (where.controller / accelerator.name).chmod(0o600)
        options = replace(wishes, shares=(directory / "home",), images=wishes.images or IMAGES)
        settings = asyncio.run(lifecycle.up(where, options, controller=controller))
        if not controller:  # whose first observation closes the gate, without which no job is accepted
            asyncio.run(SlurmScheduler(settings, "tests").observe())
        yield LabUnderTest(where, settings, user, other)
    finally:
        asyncio.run(lifecycle.down(where))
        remove_private_users(users)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def lab(accelerator: Path) -> Iterator[LabUnderTest]:
    """Everything but the controller: it is in the tests' hands (see `controller`)."""
    with new_lab(accelerator, LabOptions(cores=8, memory=16384), controller=False) as made:
        yield made


def nodes_with_job_vms(number: int) -> LabOptions:
    """The options of a lab with bare-metal nodes. They copy their templates from TEMPLATES, if it is set."""
    settings: dict[str, dict[str, object]] = {"job_vms": {"timeout": int(JobVmSettings().timeout * patience())}}
    if templates := os.environ.get(TEMPLATES):
        settings["image"] = {"templates": templates}
    return LabOptions(cores=4, memory=4096, physical=number, settings=settings)


@pytest.fixture(scope="session")
def lab_of_two(accelerator: Path, _images: None) -> Iterator[LabUnderTest]:
    """Two bare-metal nodes with Slurm's plugin, each with an agent: for VMs inside jobs. No controller."""
    missing = [name for name in ("multiverse.so", "mventer") if not (BUILT / name).exists()]
    assert not missing, f"not built: {' '.join(missing)}; run make spank"
    with new_lab(accelerator, nodes_with_job_vms(2), controller=False) as made:
        shown = ("sinfo", "-h", "-p", "physical", "-N", "-o", "%f")
        until(
            "the agents have tested the plugin",
            lambda: set(made.run(*shown).stdout.split()) == {JobVmSettings().feature},
            60,
        )
        yield made


@pytest.fixture(scope="session")
def _images() -> None:
    slim()


@pytest.fixture(scope="module")
def controller(lab: LabUnderTest, _images: None) -> Iterator[Callable[[], int]]:
    """The lab's controller runs, and goes on until a module wants none. Call it for its pid; it starts again if it
    has died."""

    def ensure() -> int:
        asyncio.run(lifecycle.up(lab.where, LabOptions()))
        return int(lifecycle.status(lab.where)["controller"]["pid"])

    ensure()
    yield ensure
    lab.run("scancel", "--partition=vm", check=False)  # what a failed test left is not the next module's trouble


@pytest.fixture(scope="module")
def client(lab: LabUnderTest, controller: Callable[[], int]) -> Client:
    return Client(lab.settings.socket)


@pytest.fixture(scope="module")
def no_controller(lab: LabUnderTest) -> None:
    """Jobs and nodes are in the tests' hands alone. Templates stay, for whoever comes next."""
    asyncio.run(CONTROLLER.stop(lab.where))


@pytest.fixture
def start_daemon(lab: LabUnderTest, _images: None) -> Iterator[StartDaemon]:
    """Stops the usual daemon and agent, and starts those with crash points in their place."""
    asyncio.run(CONTROLLER.stop(lab.where))
    asyncio.run(AGENT.stop(lab.where))
    daemons: list[RestartingDaemon] = []

    def begin(crash_points: Sequence[str]) -> RestartingDaemon:
        daemons.append(RestartingDaemon(lab, crash_points))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.close()
