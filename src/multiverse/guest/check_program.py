"""Runs in a guest, as root: examines it as the VM of a job, and sends what it found as JSON to the host.

    python3 -I check_program.py ADDRESS PORT EXPECTED

EXPECTED is a JSON object that comes back with the facts. It needs no module of ours.
"""

# ruff: noqa: PTH103, PTH110, PTH112, PTH116, PTH123, PTH208

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from typing import Any

WORK = "/run/multiverse-check"
SLURM_CONF = """ClusterName=check
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=6
AuthInfo=socket=%(work)s/munge
SlurmdSpoolDir=%(work)s
SlurmdPidFile=%(work)s/slurmd.pid
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
NodeName=check NodeAddr=127.0.0.1 CPUs=1
"""
CGROUP_CONF = "IgnoreSystemd=yes\nCgroupPlugin=cgroup/v2\nConstrainRAMSpace=yes\n"
LASTS = 8.0  # seconds after which a slurmd that has not ended has started
PROGRAMS = ("/bin/bash", "/bin/sh", "/usr/sbin/slurmstepd", "/usr/bin/srun", "/usr/bin/scontrol")
SECRETS = ("/etc/munge/munge.key", "/etc/ssh/ssh_host_rsa_key", "/etc/ssh/ssh_host_ed25519_key",
           "/etc/ssh/ssh_host_ecdsa_key")  # fmt: skip


def output(*argv: str) -> tuple[str, bool]:
    """What a program prints, and whether it succeeded."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), False
    return done.stdout.decode(errors="replace").strip(), done.returncode == 0


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def user_of(name: str) -> str:
    """A user and his groups as the name service knows him."""
    said, known = output("id", name)
    return said if known else ""


def tmp(name: str) -> dict[str, Any]:
    """Whether that user can write to /tmp."""
    about = os.stat("/tmp")
    free = os.statvfs("/tmp")
    error = ""
    entry = None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        error = "the job's user is not known"
    if entry is not None:
        script = 'f=$(mktemp /tmp/check.XXXXXX) && echo "#!/bin/sh" > "$f" && chmod 700 "$f" && "$f" && rm "$f"'
        said, well = output("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups",
                            "/bin/sh", "-c", script)  # fmt: skip
        error = "" if well else "a job cannot use it: " + said[-200:]
    return {"mode": f"{about.st_mode & 0o7777:o}", "free": free.f_bavail * free.f_frsize >> 20, "error": error}


def nfs() -> bool:
    output("modprobe", "nfsv4")
    return "nfs4" in read("/proc/filesystems").split()


def interface() -> str:
    for name in sorted(os.listdir("/sys/class/net")):
        if os.path.exists(f"/sys/class/net/{name}/device"):
            return name
    return ""


def started(name: str, argv: list[str], user: str) -> subprocess.Popen[bytes]:
    """A daemon in the foreground, as that user, with its output in a log."""
    with open(f"{WORK}/{name}.log", "wb") as log:
        entry = pwd.getpwnam(user)

        def become() -> None:
            os.setgroups(os.getgrouplist(user, entry.pw_gid))
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)

        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=become)


def tail(name: str) -> str:
    lines = read(f"{WORK}/{name}.log").splitlines()
    wrong = [line for line in lines if "error" in line or "fatal" in line]
    return "; ".join((wrong or lines)[-3:])[-400:]


def munge() -> tuple[dict[str, str], subprocess.Popen[bytes] | None]:
    """A munged with an invented key serves credentials. Returns the facts and the daemon."""
    version, there = output("/usr/sbin/munged", "--version")
    facts = {"version": version.split(" (")[0], "error": ""}
    try:
        owner = pwd.getpwnam("munge")
    except KeyError:
        there, version = False, "there is no user munge"
    if not there:
        facts["error"] = version
        return facts, None
    os.chown(WORK, owner.pw_uid, owner.pw_gid)
    key = WORK + "/key"
    fd = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o400)
    os.write(fd, os.urandom(128))
    os.close(fd)
    os.chown(key, owner.pw_uid, owner.pw_gid)
    files = [f"--{name}={WORK}/{value}" for name, value in (
        ("key-file", "key"), ("socket", "munge"), ("pid-file", "munged.pid"), ("seed-file", "seed"),
        ("log-file", "munged.log"))]  # fmt: skip
    daemon = started("munged", ["/usr/sbin/munged", "-F", "-f", *files], "munge")
    deadline = time.monotonic() + 30
    while not os.path.exists(WORK + "/munge") and daemon.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    said, well = output("/bin/sh", "-c", f"munge -n -S {WORK}/munge | unmunge -S {WORK}/munge")
    if not well:
        facts["error"] = "it gives no credential: " + (tail("munged") or said[-200:])
    return facts, daemon


def slurmd() -> dict[str, str]:
    """slurmd starts, and goes on to look for its controller, which does not exist."""
    said, there = output("/usr/sbin/slurmd", "-V")
    facts = {"version": said.split()[-1] if there and said else "", "error": "" if there else said}
    if not there:
        return facts
    for name, text in (("slurm.conf", SLURM_CONF), ("cgroup.conf", CGROUP_CONF)):
        with open(f"{WORK}/{name}", "w") as file:
            file.write(text % {"work": WORK} if name == "slurm.conf" else text)
    try:
        os.makedirs("/sys/fs/cgroup/system.slice", exist_ok=True)
    except OSError as error:
        facts["error"] = str(error)
        return facts
    argv = ["/usr/sbin/slurmd", "-D", "-N", "check", "-f", WORK + "/slurm.conf"]
    daemon = started("slurmd", argv, "root")
    deadline = time.monotonic() + LASTS
    while daemon.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if daemon.poll() is not None:
        facts["error"] = "it ends at once: " + tail("slurmd")
    else:
        daemon.kill()
    return facts


def units() -> dict[str, Any] | None:
    """The units of systemd that failed, that are still being started, and that took longest; None without systemd."""
    if not os.path.isdir("/run/systemd/system"):
        return None
    failed = [line.split()[0] for line in output("systemctl", "list-units", "--failed", "--plain", "--no-legend")[0]
              .splitlines() if line.split()]  # fmt: skip
    states = [[name, output("systemctl", "show", "--value", "--property=Result", name)[0]] for name in failed]
    jobs = output("systemctl", "list-jobs", "--no-legend")[0]
    waiting = [line.split()[1] for line in jobs.splitlines() if len(line.split()) == 4]
    return {"failed": states, "waiting": waiting, "slow": slowest()}


def slowest() -> list[tuple[str, float]]:
    """Units that took at least a second to start, as pairs of name and seconds."""
    found = []
    for line in output("systemd-analyze", "blame", "--no-pager")[0].splitlines():
        *words, name = line.split() or [""]
        try:
            seconds = sum(float(word.rstrip("mins")) * {"min": 60, "ms": 0.001}.get(word.lstrip("0123456789."), 1)
                          for word in words)  # fmt: skip
        except ValueError:
            continue
        if seconds >= 1 and not name.endswith(".device"):
            found.append((name, round(seconds, 1)))
    return found[:8]


def examine(expected: dict[str, Any]) -> dict[str, Any]:
    """All facts."""
    os.makedirs(WORK, exist_ok=True)
    secrets = [path for path in SECRETS if os.path.exists(path)]
    name = expected["user"].split("(")[1].split(")")[0]
    credentials, daemon = munge()
    facts = {
        "expected": expected, "hostname": socket.gethostname(), "machine_id": read("/etc/machine-id"),
        "secrets": secrets, "user": user_of(name), "tmp": tmp(name), "nfs": nfs(), "interface": interface(),
        "address": expected["address"], "munge": credentials, "slurmd": slurmd(), "units": units(),
        "programs": [path for path in PROGRAMS if not os.path.exists(path)],
        "kernel": os.uname().release,
    }  # fmt: skip
    if daemon is not None:
        daemon.kill()
    return facts


def main() -> None:
    address, port, expected = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    found = examine(expected)
    with socket.create_connection((address, port), 60) as connection:
        found["clock"] = time.time()
        connection.sendall(json.dumps(found).encode())
    signal.pause()  # otherwise the guest agent would start it again


if __name__ == "__main__":
    main()
