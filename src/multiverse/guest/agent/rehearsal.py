"""What a template does before it is frozen, so that its clones share the memory and translated code of doing it."""

# ruff: noqa: PTH103, PTH106, PTH108, PTH112, PTH123, PTH208

from __future__ import annotations

import base64
import json
import os
import pwd
import signal
import time

from multiverse.guest.agent.contract import LOGS, GuestAgentError
from multiverse.guest.agent.daemons import DaemonProcess
from multiverse.guest.agent.files import read, write
from multiverse.guest.agent.hotplug import use_plugged
from multiverse.guest.agent.network import interface, remove_address, set_hosts, set_network
from multiverse.guest.agent.processes import run
from multiverse.guest.agent.syscalls import add_entropy
from multiverse.guest.agent.users import add_users

TEST_ADDRESS = "192.0.2.1/32"  # of TEST-NET-1 (RFC 5737), which nobody uses
REHEARSAL = "/run/multiverse-rehearsal"
SLURM_CONF = f"""ClusterName=rehearsal
SlurmctldHost=localhost(127.0.0.1)
AuthInfo=socket={REHEARSAL}/munge
SlurmdSpoolDir={REHEARSAL}
SlurmdPidFile={REHEARSAL}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
NodeName=rehearsal NodeAddr=127.0.0.1 CPUs=1
"""


def load_programs() -> None:
    """Run the programs that clones run, and read all libraries and plugins, so that clones share their memory.

    The programs are run so that they end by themselves and need neither key nor network. What this image lacks is
    skipped.
    """
    for argv in (["/usr/sbin/slurmd", "-V"], ["/usr/sbin/slurmd", "-C"], ["/usr/sbin/munged", "--version"],
                 ["/usr/sbin/slurmstepd"], ["/usr/bin/srun", "--version"], ["/bin/bash", "-c", "exit 0"],
                 ["/bin/bash", "-lc", "hostname; id; date; sleep 0"], ["/bin/sh", "-c", "exit 0"]):  # fmt: skip
        run(argv, 5.0)
    plugins = [f"{top}/{name}" for top in ("/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib/x86_64-linux-gnu/slurm")
               if os.path.isdir(top) for name in sorted(os.listdir(top))]  # fmt: skip
    for path in ["/usr/sbin/slurmd", "/usr/sbin/slurmstepd", "/usr/sbin/munged", *plugins]:
        try:
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        except OSError:
            continue


def rehearse() -> None:
    """Apply an invented identity, as each clone will apply a real one, and undo it.

    What this reads, resolves or allocates is then shared by all clones. The keys used here are invented, and end with
    the processes that held them.
    """
    line = json.dumps(
        {"type": "rehearsal", "random": base64.b64encode(os.urandom(64)).decode(), "list": [1.5, None, {}]}
    )
    add_entropy(base64.b64decode(json.loads(line)["random"]))
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    kept = {
        path: read(path) for path in ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/machine-id", "/etc/hostname")
    }
    user = {"name": "rehearsal", "uid": 64999, "gid": 64999, "home": "/", "shell": "/bin/sh"}
    add_users([{**user, "groups": [["rehearsal", 64999]]}])
    set_hosts("rehearsal", "127.0.0.1", [["a", "127.0.0.1"]], [["b", "127.0.0.1"]])
    for path, content in kept.items():
        write(path, content, 0o444 if path == "/etc/machine-id" else 0o644)
    name = interface()
    set_network(name, read(f"/sys/class/net/{name}/address").strip(), TEST_ADDRESS, "")
    remove_address(name, TEST_ADDRESS)
    use_plugged(1, 0)
    _rehearse_daemons()


def _rehearse_daemons() -> None:
    """Run munged and slurmd for some seconds with an invented key and configuration, and remove what they made."""
    try:
        owner = pwd.getpwnam("munge")
    except KeyError:
        return
    os.makedirs(REHEARSAL, exist_ok=True)
    os.chown(REHEARSAL, owner.pw_uid, owner.pw_gid)
    write(f"{REHEARSAL}/key", os.urandom(128), 0o400, (owner.pw_uid, owner.pw_gid))
    write(f"{REHEARSAL}/slurm.conf", SLURM_CONF)
    started: list[DaemonProcess] = []
    try:
        for daemon, seconds in zip(_daemons(), (1.0, 4.0), strict=True):
            daemon.start()
            started.append(daemon)
            deadline = time.monotonic() + seconds
            # slurmd has no controller and would try to register for ever. After these seconds it has loaded what it
            # needs.
            while time.monotonic() < deadline and os.waitpid(daemon.pid, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    except (GuestAgentError, ChildProcessError):
        pass
    finally:
        for daemon in started:
            _kill(daemon)
        for directory in (REHEARSAL, LOGS):
            _empty(directory)
        os.rmdir(REHEARSAL)


def _daemons() -> tuple[DaemonProcess, DaemonProcess]:
    """munged and slurmd."""
    options = [f"--{name}={REHEARSAL}/{value}" for name, value in (
        ("key-file", "key"), ("socket", "munge"), ("pid-file", "munged.pid"), ("seed-file", "seed"),
        ("log-file", "log"))]  # fmt: skip
    munged = ["/usr/sbin/munged", "-F", "-f", *options]
    slurmd = ["/usr/sbin/slurmd", "-D", "-N", "rehearsal", "-f", f"{REHEARSAL}/slurm.conf"]
    return (
        DaemonProcess({"name": "munged", "argv": munged, "user": "munge", "ready_path": f"{REHEARSAL}/munge"}),
        DaemonProcess({"name": "slurmd", "argv": slurmd, "user": "root", "ready_path": ""}),
    )


def _kill(daemon: DaemonProcess) -> None:
    try:
        os.killpg(daemon.pid, signal.SIGKILL)
        os.waitpid(daemon.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _empty(directory: str) -> None:
    for entry in os.listdir(directory):
        path = f"{directory}/{entry}"
        if os.path.isdir(path):
            run(["/bin/rm", "-rf", path])
        else:
            os.unlink(path)
