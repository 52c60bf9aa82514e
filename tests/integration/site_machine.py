"""The machine of a site that has a Slurm of its own, in namespaces of files, processes, network and host name.

The site's Slurm is configured as a site's may be, and not as the lab's: another SlurmUser, nodes, partitions, accounts,
a job_submit.lua and an epilog of its own, and a backup slurmctld on a second machine. Nothing is changed outside of the
namespaces, and every process ends with the first process of the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.integration.watch import until

SLURM_UID, ADA_UID = 61871, 61872
ADDRESSES = {"ctl1": "192.0.2.1", "ctl2": "192.0.2.2"}
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A node at the address that the gate would have, a partition with all nodes, defaults above, no room for more nodes.
SLURM_CONF = """\
ClusterName=prod
SlurmctldHost=ctl1(192.0.2.1)
SlurmctldHost=ctl2(192.0.2.2)
SlurmUser=ctl
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SlurmctldTimeout=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
EpilogSlurmctld=/etc/slurm/site-epilog
JobSubmitPlugins=require_timelimit,lua
ReturnToService=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl1
AccountingStorageEnforce=associations,limits

NodeName=DEFAULT CPUs=2 RealMemory=400 CoreSpecCount=0
NodeName=n1 NodeHostname=ctl1 NodeAddr=127.0.1.1
PartitionName=DEFAULT MaxTime=2-0 State=UP
PartitionName=batch Nodes=n1 Default=YES
PartitionName=everything Nodes=ALL
"""
JOB_SUBMIT = """\
-- The site's own rules.
function slurm_job_submit(job, partitions, uid)
  if job.account == "closed" then
    slurm.log_user("the account is closed")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
"""
EPILOG = """\
#!/bin/sh
echo "$SLURM_JOB_ID" >> /var/spool/slurmctld/ended
"""
SLURMDBD_CONF = """\
DbdHost=ctl1
SlurmUser=ctl
AuthType=auth/munge
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=ctl
StorageLoc=slurm_acct
"""
# The site's accounting: grace is in the account `physics`, and nobody is in `closed`.
_ACCOUNTING = """\
install -d -o mysql /run/mysqld
mariadb-install-db --no-defaults --user=mysql --datadir=/var/lib/mysql --auth-root-authentication-method=socket \
    --skip-test-db --skip-name-resolve > /var/log/mariadb-install 2>&1
mariadbd --no-defaults --user=mysql --datadir=/var/lib/mysql --socket=/run/mysqld/mysqld.sock --skip-networking \
    --innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-lock-wait-timeout=900 > /var/log/mariadb 2>&1 &
until mariadb --no-defaults -e "CREATE DATABASE IF NOT EXISTS slurm_acct" 2> /dev/null; do sleep 0.1; done
mariadb --no-defaults -e "CREATE USER 'ctl'@'localhost' IDENTIFIED VIA unix_socket;
    GRANT ALL ON slurm_acct.* TO 'ctl'@'localhost'"
setpriv --reuid=ctl --regid=ctl --clear-groups slurmdbd
until sacctmgr -n show cluster > /dev/null 2>&1; do sleep 0.1; done
sacctmgr -i add cluster prod
sacctmgr -i add account physics,closed
sacctmgr -i add user grace account=physics
"""
SLURMCTLD = """\
[Service]
User=ctl
ExecStart=/usr/sbin/slurmctld -D
"""
# What the tests do not install from a registry is there already, and this says so.
APT = """\
#!/bin/sh -e
shift 2
for package; do test "$(dpkg-query -W -f '${db:Status-Status}' "$package")" = installed; done
"""
# There is no systemd in the namespaces. Units are read for what they run, as whom, and with which capabilities.
SYSTEMCTL = """\
#!/usr/bin/python3
import os, shlex, signal, subprocess, sys, time
from pathlib import Path

def settings(unit, key):
    text = Path(f"/etc/systemd/system/{unit}.service").read_text()
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]

def stop(record):
    if not record.exists():
        return
    os.kill(int(record.read_text()), signal.SIGTERM)
    while Path(f"/proc/{record.read_text()}").exists():
        time.sleep(0.05)
    record.unlink()

def start(unit):
    limits = ["setpriv"]
    for user in settings(unit, "User"):
        limits += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    for dropped in settings(unit, "CapabilityBoundingSet"):
        assert dropped.startswith("~")
        names = [name.lower().removeprefix("cap_") for name in dropped[1:].split()]
        limits.append("--bounding-set=" + ",".join(f"-{name}" for name in names))
    if settings(unit, "NoNewPrivileges") == ["yes"]:
        limits.append("--no-new-privs")
    for command in settings(unit, "ExecStart"):
        may_fail, argv = command.startswith("-"), [*limits, *shlex.split(command.lstrip("-"))]
        if settings(unit, "Type") == ["oneshot"]:
            subprocess.run(argv, check=not may_fail)
            continue
        with open(f"/var/log/{unit}.out", "ab") as log:
            made = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        Path(f"/run/units/{unit}").write_text(str(made.pid))

verb, *units = [word for word in sys.argv[1:] if not word.startswith("--")]
assert verb in ("daemon-reload", "disable", "enable", "restart", "stop"), verb
for unit in (unit.removesuffix(".service") for unit in units):
    record = Path(f"/run/units/{unit}")
    if verb in ("disable", "restart", "stop"):
        stop(record)
    if verb not in ("disable", "stop"):
        start(unit)
"""
# The first process. Mounts hide the directories that a site's machine has of its own.
_BOOT = """\
set -e
mount --make-rprivate /
hostname {name}
ip link set lo up
mkdir -p {top}/cgroup
mount --rbind /sys/fs/cgroup {top}/cgroup
mount -t sysfs sysfs /sys
mount --rbind {top}/cgroup /sys/fs/cgroup
for each in etc opt home usr/local/bin var/spool var/log var/lib/munge var/lib/mysql var/lib/multiverse; do
    mkdir -p /$each
    mount --bind {top}/$each /$each
done
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /run/units /run/munge
chown munge: /run/munge
mount --bind {images} /var/lib/multiverse/images
exec python3 -c 'import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()'
"""
_BACKUP = """\
set -e
hostname ctl2
ip link set lo up
mount -t tmpfs -o uid={uid},mode=700 tmpfs /run/slurm
exec python3 -c 'import signal
print("ready", flush=True)
while True: signal.pause()'
"""


class SiteMachine:
    """`ctl1`, which runs the site's slurmctld, and `ctl2`, which runs the backup and has the same files."""

    def __init__(self, top: Path, images: Path) -> None:
        self.top, self.images = top, images
        self._first: subprocess.Popen[str] | None = None
        self._backup: subprocess.Popen[str] | None = None
        self._init = 0

    def start(self) -> None:
        """Boot both machines, and start the site's munged, slurmctlds and slurmd."""
        self._write_files()
        script = _BOOT.format(name="ctl1", top=self.top, images=self.images)
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._first = _boot(["unshare", *spaces, "sh", "-c", script])
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self._init = int(children.split()[0])
        self.shell(f"ip link add lan type bridge; ip addr add {ADDRESSES['ctl1']}/24 dev lan; ip link set lan up")
        self.shell(
            "setpriv --reuid=munge --regid=munge --clear-groups munged --num-threads=2\n"
            "install -d -o ctl -m 700 /var/spool/slurmctld /var/log/slurm /run/slurm; install -d /var/spool/slurmd\n"
        )
        self.shell(_ACCOUNTING)
        self.shell("systemctl restart slurmctld")
        self._connect_backup()
        until("slurmctld answers", lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout)
        self.shell("slurmd")
        until("the site's node is idle", lambda: "idle" in self.run("sinfo", "-hn", "n1", "-o", "%T").stdout)

    def _write_files(self) -> None:
        top = self.top
        shutil.copytree("/etc", top / "etc", symlinks=True)
        for name in (
            "opt",
            "home/grace",
            "usr/local/bin",
            "var/spool",
            "var/log/munge",
            "var/lib/munge",
            "var/lib/mysql",
        ):
            (top / name).mkdir(parents=True)
        (top / "var/lib/multiverse/images").mkdir(parents=True)
        etc, users = top / "etc", {"ctl": SLURM_UID, "grace": ADA_UID}
        for name, uid in users.items():
            _append(etc / "passwd", f"{name}:x:{uid}:{uid}::/home/{name}:/bin/sh")
            _append(etc / "group", f"{name}:x:{uid}:")
        os.chown(top / "home/grace", ADA_UID, ADA_UID)
        _append(etc / "hosts", "".join(f"{address} {name}\n" for name, address in ADDRESSES.items()))
        for name in ("slurm", "munge", "multiverse"):
            shutil.rmtree(etc / name, ignore_errors=True)
        (etc / "slurm").mkdir()
        (etc / "munge").mkdir()
        version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
        cgroup = f"CgroupPlugin=cgroup/{version}\nCgroupMountpoint=/sys/fs/cgroup\nIgnoreSystemd=yes\n"
        (etc / "munge/munge.key").write_bytes(secrets.token_bytes(128))
        for path, text, mode in (
            (etc / "slurm/slurm.conf", SLURM_CONF, 0o644),
            (etc / "slurm/cgroup.conf", cgroup, 0o644),
            (etc / "slurm/job_submit.lua", JOB_SUBMIT, 0o644),
            (etc / "slurm/site-epilog", EPILOG, 0o755),
            (etc / "systemd/system/slurmctld.service", SLURMCTLD, 0o644),
            (top / "usr/local/bin/apt", APT, 0o755),
            (top / "usr/local/bin/systemctl", SYSTEMCTL, 0o755),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(mode)
        database = etc / "slurm/slurmdbd.conf"
        database.write_text(SLURMDBD_CONF)
        database.chmod(0o600)
        os.chown(database, SLURM_UID, SLURM_UID)
        shutil.chown(top / "var/lib/mysql", "mysql", "mysql")
        for path, mode in ((etc / "munge", 0o700), (etc / "munge/munge.key", 0o400), (top / "var/lib/munge", 0o700),
                           (top / "var/log/munge", 0o700)):  # fmt: skip
            path.chmod(mode)
            shutil.chown(path, "munge", "munge")

    def _connect_backup(self) -> None:
        """The second machine shares the first one's files, and has a network and a host name of its own. The first one
        forwards between guests and the second, as the site's router would."""
        self._backup = _boot(
            [
                *self._enter("--mount", "--pid"),
                "unshare",
                "--net",
                "--uts",
                "--mount",
                "sh",
                "-c",
                _BACKUP.format(uid=SLURM_UID),
            ]
        )
        seen = self.run("pgrep", "-n", "-x", "python3").stdout.strip()
        self.shell(
            f"ip link add to-ctl2 type veth peer name eth0 netns {seen}\n"
            "ip link set to-ctl2 master lan up\n"
            f"nsenter --target={seen} --net ip addr add {ADDRESSES['ctl2']}/24 dev eth0\n"
            f"nsenter --target={seen} --net ip link set eth0 up\n"
            f"nsenter --target={seen} --net ip route add default via {ADDRESSES['ctl1']}\n"
            "echo 1 > /proc/sys/net/ipv4/ip_forward\n"
            f"echo {seen} > /run/ctl2\n"
        )
        self.on_backup("setpriv --reuid=ctl --regid=ctl --clear-groups slurmctld -D > /var/log/backup.out 2>&1 &")

    def on_backup(self, script: str) -> str:
        """Run a script on the second machine."""
        return self.shell(
            f"nsenter --target=$(cat /run/ctl2) --net --uts --mount sh -e <<'END-OF-SCRIPT'\n{script}\nEND-OF-SCRIPT"
        )

    def _enter(self, *spaces: str) -> list[str]:
        return ["nsenter", f"--target={self._init}", *(spaces or ("--mount", "--net", "--uts", "--ipc", "--pid"))]

    def run(
        self, *argv: str, uid: int | None = None, check: bool = True, cwd: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first machine, as root or as another user."""
        as_user = () if uid is None else ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
        home = "/root" if uid is None else "/home/grace"
        environment = {"PATH": PATH, "HOME": home, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [*self._enter(), f"--wd={cwd}", *as_user, *argv],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def shell(self, script: str, *, check: bool = True, cwd: str = "/") -> str:
        done = self.run("sh", "-ec", script, check=check, cwd=cwd)
        return done.stdout + done.stderr

    def provide_packages(self) -> None:
        """What pip would fetch from a registry for /opt/multiverse: the packages of these tests' own environment."""
        (target,) = (self.top / "opt/multiverse/lib").glob("python3.*/site-packages")
        registry = self.top / "opt/registry"
        registry.mkdir(exist_ok=True)
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if "multiverse" not in package.name:  # the laboratory is no part of a site
                _copy(package, registry / package.name)
        (target / "registry.pth").write_text("/opt/registry\n")

    def end(self) -> None:
        for process in (self._backup, self._first):
            if process is not None:
                process.kill()  # unshare, which then ends the first process, and with it all others
                process.wait()
        if self._init:
            until("the machine is off", lambda: not Path(f"/proc/{self._init}").exists())


def _copy(source: Path, target: Path) -> None:
    """Users read the copy. The checkout of these tests may lie below a directory that only root may enter."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def _boot(argv: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={"PATH": PATH}, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the machine does not boot"
    return process


def _append(path: Path, line: str) -> None:
    path.write_text(path.read_text().rstrip("\n") + "\n" + line.rstrip("\n") + "\n")
