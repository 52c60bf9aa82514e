"""The services of a lab, in the order in which they are started."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.drivers.slurm import install
from multiverse.lab import process
from multiverse.lab.configure import CLUSTER, SLURM_USER, environment
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabPlan
from multiverse.lab.process import DaemonCommand, RunningDaemon
from multiverse.system import files

_MYSQL_USER = "mysql"


@dataclass(frozen=True, slots=True)
class Lab:
    """One lab: its paths and its plan."""

    where: Layout
    plan: LabPlan


@dataclass(frozen=True, slots=True)
class Service:
    """A daemon of the lab.

    `prepare` creates what the daemon needs, and may block. `ready` tries to connect. `initialize` runs after the daemon
    is ready. A change of one of `config_files` requires a restart. `timeout` and `grace`, in seconds, limit the start
    and the stop.
    """

    name: str
    command: Callable[[Lab], DaemonCommand]
    ready: Callable[[Lab], bool]
    prepare: Callable[[Lab], None] = lambda lab: None
    initialize: Callable[[Lab], None] = lambda lab: None
    config_files: tuple[str, ...] = ()
    timeout: float = 30.0
    grace: float = 10.0

    def record(self, where: Layout) -> Path:
        return where.run / f"{self.name}.json"

    def running(self, where: Layout) -> RunningDaemon | None:
        return process.recorded(self.record(where))

    def digest(self, lab: Lab) -> str:
        """A digest of the command and of the configuration files."""
        found = hashlib.sha256(repr(self.command(lab).argv).encode())
        for name in self.config_files:
            found.update((lab.where.etc / name).read_bytes())
        return found.hexdigest()[:16]

    async def ensure(self, lab: Lab) -> bool:
        """Start the service unless it runs with this configuration; True if it was started.

        `Broken` if the service does not become ready; it has been stopped then.
        """
        running = self.running(lab.where)
        if running and running.digest == self.digest(lab) and await asyncio.to_thread(self.ready, lab):
            return False
        if running:
            await process.stop(running, self.grace)
        await asyncio.to_thread(self.prepare, lab)
        command = self.command(lab)
        started = process.start(command, self.record(lab.where), self.digest(lab))
        try:
            await process.until(lambda: self.ready(lab), started, command, self.timeout)
            await asyncio.to_thread(self.initialize, lab)
        except BaseException:
            await self.stop(lab.where)
            raise
        return True

    async def stop(self, where: Layout) -> bool:
        """Stop the service; True if it was alive."""
        running = self.running(where)
        if running:
            await process.stop(running, self.grace)
        self.record(where).unlink(missing_ok=True)
        return running is not None


# --- common functions ------------------------------------------------------------------------------


def _directory(path: Path, user: str, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    account = pwd.getpwnam(user)
    os.chown(path, account.pw_uid, account.pw_gid)


def _answers(address: str | tuple[str, int]) -> bool:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


def _run(lab: Lab, *argv: str, check: bool = True) -> str:
    """Run a command; its output. `Broken` with its error message if it fails and `check` is set."""
    done = subprocess.run(argv, env=os.environ | environment(lab.where), capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise Broken(f"{argv[0]}: {(done.stderr or done.stdout).strip()[-300:]}", hint=f"see {lab.where.log}")
    return done.stdout


# --- munged ----------------------------------------------------------------------------------------


def _prepare_munge(lab: Lab) -> None:
    where = lab.where
    _directory(where.munge, "munge", 0o755)
    where.munge_socket.unlink(missing_ok=True)
    if not where.munge_key.exists():
        account = pwd.getpwnam("munge")
        key = secrets.token_bytes(128)
        files.replace(where.munge_key, key, mode=0o400, uid=account.pw_uid, gid=account.pw_gid)


def _munged(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = [
        "munged",
        "--foreground",
        "--num-threads=4",
        f"--socket={where.munge_socket}",
        f"--key-file={where.munge_key}",
        f"--pid-file={where.munge}/pid",
        f"--log-file={where.munge}/log",
        f"--seed-file={where.munge}/seed",
    ]
    return DaemonCommand(argv, where.log / "munged.log", user="munge")


# --- mariadb ---------------------------------------------------------------------------------------


def _prepare_mariadb(lab: Lab) -> None:
    where = lab.where
    _directory(where.database_socket.parent, _MYSQL_USER, 0o755)
    if (where.database / "made").exists():
        return
    shutil.rmtree(where.database, ignore_errors=True)  # incomplete, after an interruption
    _directory(where.database, _MYSQL_USER, 0o700)
    _run(
        lab,
        "mariadb-install-db",
        "--no-defaults",
        f"--user={_MYSQL_USER}",
        f"--datadir={where.database}",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
        "--skip-name-resolve",
    )
    (where.database / "made").touch()


def _mariadbd(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = [
        "mariadbd",
        "--no-defaults",
        f"--datadir={where.database}",
        f"--socket={where.database_socket}",
        f"--pid-file={where.database_socket.parent}/pid",
        "--skip-networking",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=32M",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
    ]
    return DaemonCommand(argv, where.log / "mariadb.log", user=_MYSQL_USER)


def _initialize_mariadb(lab: Lab) -> None:
    # The server authenticates slurmdbd by its uid, so there is no password.
    statements = (
        "CREATE DATABASE IF NOT EXISTS slurm_acct; "
        f"CREATE USER IF NOT EXISTS '{SLURM_USER}'@'localhost' IDENTIFIED VIA unix_socket; "
        f"GRANT ALL ON slurm_acct.* TO '{SLURM_USER}'@'localhost';"
    )
    _run(lab, "mariadb", "--no-defaults", f"--socket={lab.where.database_socket}", "-e", statements)


# --- slurmdbd and slurmctld ------------------------------------------------------------------------


def _slurmdbd(lab: Lab) -> DaemonCommand:
    where = lab.where
    # slurmdbd has no setting for the database's socket, but its client library reads this variable.
    env = environment(where) | {"MYSQL_UNIX_PORT": str(where.database_socket)}
    return DaemonCommand(["slurmdbd", "-D"], where.log / "slurmdbd.log", user=SLURM_USER, env=env)


def _initialize_slurmdbd(lab: Lab) -> None:
    if CLUSTER not in _run(lab, "sacctmgr", "-nP", "show", "cluster", "format=cluster").split():
        _run(lab, "sacctmgr", "-i", "add", "cluster", CLUSTER)
        _run(lab, "sacctmgr", "-i", "add", "account", "users", "Description=users", "Organization=lab")


def _prepare_slurmctld(lab: Lab) -> None:
    _directory(lab.where.slurmctld, SLURM_USER, 0o700)
    install.make_inbox(lab.where.inbox, pwd.getpwnam(SLURM_USER).pw_uid)


def _slurmctld(lab: Lab) -> DaemonCommand:
    where = lab.where
    return DaemonCommand(["slurmctld", "-D"], where.log / "slurmctld.log", user=SLURM_USER, env=environment(where))


def _slurmctld_ready(lab: Lab) -> bool:
    return _answers((lab.plan.gateway, lab.plan.slurmctld_port)) and "UP" in _run(lab, "scontrol", "ping", check=False)


# --- ganesha, the agent and the controller --------------------------------------------------------------------


def _prepare_ganesha(lab: Lab) -> None:
    # Ganesha reads the file systems from there. Without the file it runs with no export at all.
    if not Path("/etc/mtab").exists():
        raise Broken("/etc/mtab is missing, which NFS-Ganesha reads", hint="link it to /proc/self/mounts: make setup")
    _directory(lab.where.nfs, "root", 0o755)


def _ganesha(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = ["ganesha.nfsd", "-F", "-f", f"{where.etc}/ganesha.conf", "-L", "STDOUT"]
    return DaemonCommand([*argv, "-p", f"{where.nfs}/pid"], where.log / "ganesha.log")


def _multiverse(*words: str) -> list[str]:
    """The `multiverse` of this process's Python, with these arguments."""
    program = Path(sys.executable).with_name("multiverse")
    argv = [str(program)] if program.exists() else [sys.executable, "-c", "import multiverse.cli.main as m; m.main()"]
    return [*argv, *words]


def _agent(lab: Lab) -> DaemonCommand:
    where = lab.where
    # The log is private, because it contains lines from guests' consoles.
    return DaemonCommand(_multiverse("agent", "--config", str(where.settings)), where.log / "agent.log", log_mode=0o600)


def _controller(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = _multiverse("daemon", "--config", str(where.settings))
    return DaemonCommand(argv, where.log / "controller.log", log_mode=0o600)


AGENT = Service(
    "agent",
    _agent,
    ready=lambda lab: _answers(str(lab.where.agent_socket)),
    prepare=lambda lab: _directory(lab.where.controller, "root", 0o711),  # the uids of VMs need to pass through
    config_files=("multiverse.toml", "site.toml"),
    grace=20.0,
)

CONTROLLER = Service(
    "controller",
    _controller,
    ready=lambda lab: _answers(str(lab.where.socket)),
    prepare=lambda lab: _directory(lab.where.controller, "root", 0o711),  # the uids of VMs need to pass through
    config_files=("multiverse.toml", "site.toml"),
    grace=20.0,
)

SERVICES = (
    Service("munged", _munged, ready=lambda lab: _answers(str(lab.where.munge_socket)), prepare=_prepare_munge),
    Service(
        "mariadb",
        _mariadbd,
        ready=lambda lab: _answers(str(lab.where.database_socket)),
        prepare=_prepare_mariadb,
        initialize=_initialize_mariadb,
        timeout=60.0,
        grace=30.0,
    ),
    Service(
        "slurmdbd",
        _slurmdbd,
        ready=lambda lab: _answers(("127.0.0.1", lab.plan.slurmdbd_port)),
        prepare=lambda lab: _directory(lab.where.slurmdbd, SLURM_USER, 0o755),
        initialize=_initialize_slurmdbd,
        config_files=("slurmdbd.conf",),
        timeout=60.0,
    ),
    Service(
        "slurmctld",
        _slurmctld,
        ready=_slurmctld_ready,
        prepare=_prepare_slurmctld,
        config_files=(
            "slurm.conf",
            "site.conf",
            "multiverse.conf",
            "job_submit.lua",
            "multiverse.lua",
            "multiverse_site.lua",
            "multiverse_submit.lua",
        ),
    ),
    Service(
        "ganesha",
        _ganesha,
        ready=lambda lab: _answers((lab.plan.gateway, lab.plan.nfs_port)),
        prepare=_prepare_ganesha,
        config_files=("ganesha.conf",),
    ),
    AGENT,
    CONTROLLER,
)
