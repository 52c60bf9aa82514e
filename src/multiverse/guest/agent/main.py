"""The agent's program: set the guest up, rehearse what clones will do, report the fork point, serve."""

# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH110, PTH112, PTH114, PTH123, PTH208, PTH211

from __future__ import annotations

import base64
import errno
import gc
import json
import os
import pwd
import signal
import sys
import time

from multiverse.guest.agent.daemons import DaemonProcess, stop_daemons_at_entry
from multiverse.guest.agent.identity import add_users
from multiverse.guest.agent.network import interface, link_up, remove_address, set_hosts, set_network
from multiverse.guest.agent.resources import (
    remember_boot_memory,
    remember_limits,
    reserve_disk,
    set_node_limits,
    use_plugged,
)
from multiverse.guest.agent.saving import become_subreaper
from multiverse.guest.agent.server import GuestAgent, HostChannel, find_port
from multiverse.guest.agent.system import (
    CGROUPS,
    LOGS,
    TEMPLATE,
    GuestAgentError,
    add_entropy,
    load_modules,
    load_on_demand,
    mount,
    read,
    run,
    suppress,
    write,
    write_kernel_file,
)

# --- set-up, in place of a service manager -----------------------------------------------------------


def set_up_system() -> None:
    """Mount the kernel's file systems, make the usual links in /dev, and set up the loopback interface."""
    for source, target, kind, flags, data in (
        ("proc", "/proc", "proc", 14, ""), ("sysfs", "/sys", "sysfs", 14, ""),
        ("dev", "/dev", "devtmpfs", 2, "mode=0755"),
        ("devpts", "/dev/pts", "devpts", 10, "gid=5,mode=620,ptmxmode=000"),
        ("shm", "/dev/shm", "tmpfs", 6, "mode=1777"),
        ("run", "/run", "tmpfs", 6, "mode=0755"), ("mqueue", "/dev/mqueue", "mqueue", 14, ""),
    ):  # fmt: skip
        try:
            os.makedirs(target, exist_ok=True)
            mount(source, target, kind, flags, data)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENODEV):
                raise
    os.makedirs("/run/lock", exist_ok=True)
    os.chmod("/run/lock", 0o1777)
    for link, target in (("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"),
                         ("/dev/stdout", "/proc/self/fd/1"), ("/dev/stderr", "/proc/self/fd/2")):  # fmt: skip
        if not os.path.islink(link):
            os.symlink(target, link)
    os.umask(0o022)
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    link_up("lo")


def set_up_cgroups() -> None:
    """Make the hierarchy, controllers and `system.slice` that slurmd needs on cgroup v2 without systemd. They are made
    before the fork point, because the kernel rewrites parts of its code with the first group of a controller."""
    if not os.path.exists(f"{CGROUPS}/cgroup.controllers") and not _mount_cgroups():
        return  # the guest uses cgroup v1; the site's cgroup.conf must be made for that
    slice_ = f"{CGROUPS}/system.slice"
    os.makedirs(slice_, exist_ok=True)
    with open(f"{CGROUPS}/cgroup.controllers") as file:
        wanted = " ".join(f"+{name}" for name in file.read().split())
    for directory in (CGROUPS, slice_):
        with suppress(OSError), open(f"{directory}/cgroup.subtree_control", "w") as file:
            file.write(wanted)  # fails where a service manager controls these


def _mount_cgroups() -> bool:
    """Mount cgroup v2; False if the kernel cannot. With `favordynmods` (Linux 6.0) moving a process, which slurmstepd
    does while a job starts, does not wait for a quiescent state of RCU on all CPUs."""
    for options in ("favordynmods", ""):
        try:
            mount("cgroup2", CGROUPS, "cgroup2", 14, options)
        except OSError:
            continue
        return True
    return False


# --- rehearsal ---------------------------------------------------------------------------------------

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
    """Run the programs that clones run, and read all libraries and plugins, so that clones share their memory. The
    programs end by themselves and need neither key nor network. What this image lacks is skipped."""
    for argv in (["/usr/sbin/slurmd", "-V"], ["/usr/sbin/slurmd", "-C"], ["/usr/sbin/munged", "--version"],
                 ["/usr/sbin/slurmstepd"], ["/usr/bin/srun", "--version"], ["/bin/bash", "-c", "exit 0"],
                 ["/bin/bash", "-lc", "hostname; id; date; sleep 0"], ["/bin/sh", "-c", "exit 0"]):  # fmt: skip
        run(argv, 5.0)
    plugins = [f"{top}/{name}" for top in ("/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib/x86_64-linux-gnu/slurm")
               if os.path.isdir(top) for name in sorted(os.listdir(top))]  # fmt: skip
    for path in ["/usr/sbin/slurmd", "/usr/sbin/slurmstepd", "/usr/sbin/munged", *plugins]:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def rehearse() -> None:
    """Apply an invented identity, as each clone will apply a real one, and undo it. What this reads, resolves or
    allocates is then shared by all clones. The invented keys end with the processes that held them."""
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
    """Run munged and slurmd for some seconds with an invented key and configuration, and remove their files."""
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
            # slurmd has no controller and would try to register for ever. By then it has loaded what it needs.
            while time.monotonic() < deadline and os.waitpid(daemon.pid, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    except (GuestAgentError, ChildProcessError):
        pass
    finally:
        for daemon in started:
            with suppress(ProcessLookupError, ChildProcessError):
                os.killpg(daemon.pid, signal.SIGKILL)
                os.waitpid(daemon.pid, 0)
        for directory in (REHEARSAL, LOGS):
            _empty(directory)
        os.rmdir(REHEARSAL)


def _daemons() -> tuple[DaemonProcess, DaemonProcess]:
    options = [f"--{name}={REHEARSAL}/{value}" for name, value in (
        ("key-file", "key"), ("socket", "munge"), ("pid-file", "munged.pid"), ("seed-file", "seed"),
        ("log-file", "log"))]  # fmt: skip
    munged = ["/usr/sbin/munged", "-F", "-f", *options]
    slurmd = ["/usr/sbin/slurmd", "-D", "-N", "rehearsal", "-f", f"{REHEARSAL}/slurm.conf"]
    return (
        DaemonProcess({"name": "munged", "argv": munged, "user": "munge", "ready_path": f"{REHEARSAL}/munge"}),
        DaemonProcess({"name": "slurmd", "argv": slurmd, "user": "root", "ready_path": ""}),
    )


def _empty(directory: str) -> None:
    for entry in os.listdir(directory):
        path = f"{directory}/{entry}"
        if os.path.isdir(path):
            run(["/bin/rm", "-rf", path])
        else:
            os.unlink(path)


# --- the program -------------------------------------------------------------------------------------


def main() -> None:
    first = os.getpid() == 1
    if first:
        set_up_system()
        set_up_cgroups()
    else:
        become_subreaper()
    # The kernel never ends the agent when memory runs out, nor its daemons, which inherit this. slurmstepd undoes it
    # for the processes of a job.
    write_kernel_file("/proc/self/oom_score_adj", "-1000")
    set_node_limits()
    load_modules()
    os.makedirs(LOGS, exist_ok=True)
    wake = _catch_signals(first)
    channel = HostChannel(find_port())
    try:
        remember_boot_memory()
        remember_limits()
        link_up(interface())
        load_on_demand(False)
        options = read("/proc/cmdline").split()
        reserve_disk(options)
        if TEMPLATE in options:
            load_programs()
            rehearse()
            stop_daemons_at_entry()
            os.sync()  # otherwise each clone would begin with writing this back
        agent = GuestAgent(channel, wake)
        # The objects that exist now are never freed. The garbage collector must not touch them, because that would give
        # each clone its own copy of their memory pages.
        gc.collect()
        gc.freeze()
        gc.disable()
        channel.send(**agent.state)
        agent.serve()
    except BaseException as error:
        channel.send("failed", reason=f"the agent ended: {type(error).__name__}: {error}")
        raise


def _catch_signals(first: bool) -> int:
    """Make SIGCHLD and SIGIO write a byte into a pipe; returns its reading end. Process 1 ignores signals to end."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, lambda *_: None)
    if first:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return reading


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
