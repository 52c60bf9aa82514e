"""The services of a lab, in the order in which they are started."""

from __future__ import annotations

import pwd
import re
import shutil
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.drivers.slurm.site import conf, install
from multiverse_lab.lab.configure import CLUSTER, SLURM_USER, environment
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.munge import munged_command, prepare_munge
from multiverse_lab.lab.plan import LabPlan
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.program import multiverse
from multiverse_lab.lab.service import Lab, Service, answers, directory, run

_MYSQL_USER = "mysql"


# --- mariadb ---------------------------------------------------------------------------------------


def _prepare_mariadb(lab: Lab) -> None:
    where = lab.where
    directory(where.database_socket.parent, _MYSQL_USER, 0o755)
    if (where.database / "made").exists():
        return
    shutil.rmtree(where.database, ignore_errors=True)  # incomplete, after an interruption
    directory(where.database, _MYSQL_USER, 0o700)
    run(
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
    run(lab, "mariadb", "--no-defaults", f"--socket={lab.where.database_socket}", "-e", statements)


# --- slurmdbd and slurmctld ------------------------------------------------------------------------


def _slurmdbd(lab: Lab) -> DaemonCommand:
    where = lab.where
    # slurmdbd has no setting for the database's socket, but its client library reads this variable.
    env = environment(where) | {"MYSQL_UNIX_PORT": str(where.database_socket)}
    return DaemonCommand(["slurmdbd", "-D"], where.log / "slurmdbd.log", user=SLURM_USER, env=env)


def _initialize_slurmdbd(lab: Lab) -> None:
    if CLUSTER not in run(lab, "sacctmgr", "-nP", "show", "cluster", "format=cluster").split():
        run(lab, "sacctmgr", "-i", "add", "cluster", CLUSTER)
        run(lab, "sacctmgr", "-i", "add", "account", "users", "Description=users", "Organization=lab")


def _prepare_slurmctld(lab: Lab) -> None:
    directory(lab.where.slurmctld, SLURM_USER, 0o700)
    install.make_inbox(lab.where.inbox, pwd.getpwnam(SLURM_USER).pw_uid)


def _slurmctld(lab: Lab) -> DaemonCommand:
    where = lab.where
    return DaemonCommand(["slurmctld", "-D"], where.log / "slurmctld.log", user=SLURM_USER, env=environment(where))


def _without_features(name: str, text: str) -> str:
    """What slurmctld has to be restarted for. The features of nodes, which name the images, can be set."""
    if name != conf.OURS:
        return text
    return "\n".join(re.sub(r"\bFeature=\S+", "", f"{key}={value}") for key, value in conf.settings(text))


def _set_features(lab: Lab) -> None:
    """Give the gate's nodes the features of our file, by which jobs request images. `scontrol reconfigure` would do it,
    too, but it makes every slurmd register again."""
    for node in conf.records((lab.where.etc / conf.OURS).read_text(), "NodeName"):
        features = (f"{which}Features={node['feature']}" for which in ("Available", "Active"))
        run(lab, "scontrol", "update", f"NodeName={node['nodename']}", *features)


def _slurmctld_ready(lab: Lab) -> bool:
    return answers((lab.plan.gateway, lab.plan.slurmctld_port)) and "UP" in run(lab, "scontrol", "ping", check=False)


# --- ganesha, the agent and the controller --------------------------------------------------------------------


def _prepare_ganesha(lab: Lab) -> None:
    # Ganesha reads the file systems from there. Without the file it runs with no export at all.
    if not Path("/etc/mtab").exists():
        raise Broken("/etc/mtab is missing, which NFS-Ganesha reads", hint="link it to /proc/self/mounts: make setup")
    directory(lab.where.nfs, "root", 0o755)


def _ganesha(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = ["ganesha.nfsd", "-F", "-f", f"{where.etc}/ganesha.conf", "-L", "STDOUT"]
    return DaemonCommand([*argv, "-p", f"{where.nfs}/pid"], where.log / "ganesha.log")


def _agent(lab: Lab) -> DaemonCommand:
    where = lab.where
    # The log is private, because it contains lines from guests' consoles.
    return DaemonCommand(multiverse("agent", "--config", str(where.settings)), where.log / "agent.log", log_mode=0o600)


def _controller(lab: Lab) -> DaemonCommand:
    where = lab.where
    argv = multiverse("daemon", "--config", str(where.settings))
    return DaemonCommand(argv, where.log / "controller.log", log_mode=0o600)


AGENT = Service(
    "agent",
    _agent,
    ready=lambda lab: answers(str(lab.where.agent_socket)),
    prepare=lambda lab: directory(lab.where.controller, "root", 0o711),  # the uids of VMs need to pass through
    config_files=("multiverse.toml", "site.toml"),
    grace=20.0,
)

CONTROLLER = Service(
    "controller",
    _controller,
    ready=lambda lab: answers(str(lab.where.socket)),
    prepare=lambda lab: directory(lab.where.controller, "root", 0o711),  # the uids of VMs need to pass through
    config_files=("multiverse.toml", "site.toml"),
    grace=20.0,
)

SERVICES = (
    Service(
        "munged",
        lambda lab: munged_command(lab.where),
        ready=lambda lab: answers(str(lab.where.munge_socket)),
        prepare=lambda lab: prepare_munge(lab.where),
    ),
    Service(
        "mariadb",
        _mariadbd,
        ready=lambda lab: answers(str(lab.where.database_socket)),
        prepare=_prepare_mariadb,
        initialize=_initialize_mariadb,
        timeout=60.0,
        grace=30.0,
    ),
    Service(
        "slurmdbd",
        _slurmdbd,
        ready=lambda lab: answers(("127.0.0.1", lab.plan.slurmdbd_port)),
        prepare=lambda lab: directory(lab.where.slurmdbd, SLURM_USER, 0o755),
        initialize=_initialize_slurmdbd,
        config_files=("slurmdbd.conf",),
        timeout=60.0,
    ),
    Service(
        "slurmctld",
        _slurmctld,
        ready=_slurmctld_ready,
        prepare=_prepare_slurmctld,
        # The scripts are read again by themselves, because job_submit.lua is written anew each time.
        config_files=("slurm.conf", "site.conf", "multiverse.conf"),
        essence=_without_features,
        reread=_set_features,
    ),
    Service(
        "ganesha",
        _ganesha,
        ready=lambda lab: answers((lab.plan.gateway, lab.plan.nfs_port)),
        prepare=_prepare_ganesha,
        config_files=("ganesha.conf",),
    ),
    AGENT,
    CONTROLLER,
)
"""The services of a lab whose only host is this machine."""


def services(plan: LabPlan | None) -> tuple[Service, ...]:
    """The services of a lab with this plan, in the order in which they are started. Each host with namespaces of its
    own has services in place of this machine's agent, and each bare-metal node has its own before the agents."""
    if plan is None:
        return SERVICES
    physical = plan.physical_nodes
    nodes = tuple(service for node in physical for service in physical_services(node, agent=plan.job_vms))
    agents = tuple(service for host in plan.own_hosts for service in host_services(host)) or (AGENT,)
    return (*(service for service in SERVICES if service not in (AGENT, CONTROLLER)), *nodes, *agents, CONTROLLER)
