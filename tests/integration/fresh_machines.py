"""Fresh machines of a release of Debian, with systemd and control groups of version 2 alone, and a site's own Slurm.

Each is a set of namespaces whose first process is systemd. Its root directory is an overlay on one that is installed
once (`scripts/in-debian --root`). Its apt finds in its cache all that it would fetch, because it has no way to a
registry. The kernel is that of this machine. Where the controllers belong to groups of version 1, those of version 2
have next to none: then `memory` and `pids` are mounted at a place of their own, where the agent finds them and
systemd does not look.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.integration.images import slim
from tests.integration.watch import until

ROOT = Path(__file__).parents[2]
RELEASES = {"bookworm": "deb12", "trixie": "deb13"}
GROUPS_V2 = next(
    (path for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()),
    None,
)
OLD_GROUPS = [path for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/pids")) if path.is_dir()]
ADDRESSES = {"ctl1": "192.0.2.1", "n2": "192.0.2.2"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What a site's machine has before: what each Debian that boots has, Slurm, sshd, and a user.
_INSTALL = """\
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
if ! dpkg -s slurmctld > /dev/null 2>&1; then
    printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends systemd systemd-sysv dbus libpam-systemd \\
        openssh-server openssh-client python3 iproute2 nftables e2fsprogs kmod munge slurmctld slurmd slurm-client
    apt-get autoremove -y -qq
    rm /usr/sbin/policy-rc.d /etc/ssh/ssh_host_*
    useradd --create-home --shell /bin/bash ada
    ln -sf /dev/null /etc/systemd/system/console-getty.service
fi
ln -sf /dev/null /etc/systemd/system/systemd-sysctl.service  # the kernel is that of this machine
fetch() { apt-get install -y -qq --no-install-recommends --download-only ./dist/*.deb mmdebstrap cpio; }
fetch || { apt-get update -qq; fetch; }
"""
SLURM_CONF = """\
ClusterName=site
SlurmctldHost=ctl1(192.0.2.1)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=1

NodeName=ctl1 CPUs=2 RealMemory=400
PartitionName=batch Nodes=ctl1 Default=YES MaxTime=2-0 State=UP
"""
_BOOT = """\
base=$1 top=$2 name=$3 root=$2/root
mount --make-rprivate /
mkdir -p "$top/work" "$root"
mount -t overlay -o "lowerdir=$base,upperdir=$top/disk,workdir=$top/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/net" "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0" "net/tun 10 200"; do
    mknod -m 666 "$root/dev/${device%% *}" c ${device#* }
done
for link in "fd fd" "stdin fd/0" "stdout fd/1" "stderr fd/2"; do
    ln -s "/proc/self/${link#* }" "$root/dev/${link% *}"
done
mount -t tmpfs -o mode=755 tmpfs "$root/run"
for controller in memory pids; do
    test -d /sys/fs/cgroup/$controller || continue
    mkdir -p "$root/run/old-groups/$controller"
    mount -t cgroup -o $controller cgroup "$root/run/old-groups/$controller"
done
touch "$root/dev/console"
mount --bind "$top/console" "$root/dev/console"
hostname "$name"
cd "$root"
pivot_root . mnt
exec chroot . env -i container=namespaces PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -euc '
    umount -l /mnt
    exec /lib/systemd/systemd --system --log-target=console'
"""
_BOUND = ("setpriv", "--pdeathsig=KILL")  # ends with the process of the test


class Cable:
    """What connects the machines: a bridge in a network namespace of its own."""

    def __init__(self) -> None:
        script = "ip link set lo up; ip link add lan type bridge; ip link set lan up; echo ready; exec sleep infinity"
        self._process = subprocess.Popen(
            [*_BOUND, "unshare", "--net", "sh", "-ec", script], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def plug(self, first: int, name: str) -> None:
        """Give the machine with this first process an interface eth0 with its address."""
        here, there = (["nsenter", f"--net=/proc/{pid}/ns/net", "ip"] for pid in (self._process.pid, first))
        for argv in (
            [*here, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(first)],
            [*here, "link", "set", f"to-{name}", "master", "lan", "up"],
            [*there, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"],
            [*there, "link", "set", "eth0", "up"],
        ):
            subprocess.run(argv, check=True)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def image_of(suite: str) -> tuple[Path, Path]:
    """The default image as it is built on this release, and the directory of the apt sources that it was built from."""
    if suite == platform.freedesktop_os_release()["VERSION_CODENAME"]:
        return slim().path, Path("/etc/apt/sources.list.d")
    cache = "multiverse/var/cache/test"  # which in-debian keeps
    argv = [ROOT / "scripts/in-debian", suite, "make", "setup", "images"]
    subprocess.run(argv, cwd=ROOT, check=True, env=os.environ | {"MULTIVERSE_TEST_CACHE": f"/{cache}"})
    root = ROOT / "var/debian" / suite
    return root / cache / "images/slim", root / "etc/apt/sources.list.d"


def prepare(suite: str, debs: Sequence[Path], sources: Path) -> Path:
    """The root directory below machines of this release. In its apt's cache is all that these packages need. It has the
    files of `sources` as its apt sources, because they belong to the key of an image."""
    name = f"{suite}-site"
    in_release = [ROOT / "scripts/in-debian", "--root", name, suite, "sh", "-ec"]
    subprocess.run([*in_release, "mkdir -p dist"], cwd=ROOT, check=True)
    root = ROOT / "var/debian" / name
    shutil.rmtree(root / "etc/apt/sources.list.d")
    shutil.copytree(sources, root / "etc/apt/sources.list.d")
    shutil.rmtree(root / "multiverse/dist")
    (root / "multiverse/dist").mkdir()
    for deb in debs:
        shutil.copy(deb, root / "multiverse/dist")
    done = subprocess.run(
        [*in_release, _INSTALL], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return root


class FreshMachine:
    """A machine. The directory `disk` has what differs from its release."""

    def __init__(self, name: str, base: Path, top: Path, cable: Cable) -> None:
        assert GROUPS_V2 is not None
        self.name, self._base, self._top, self._cable = name, base, top / name, cable
        self.disk = self._top / "disk"
        self._group, *old = (place / f"mvtest-{top.name}-{name}" for place in (GROUPS_V2, *OLD_GROUPS))
        self._old_groups = old
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0
        self.disk.mkdir(parents=True, mode=0o755)
        (self._top / "console").touch()
        (self.disk / "etc/ssh").mkdir(parents=True)
        (self.disk / "etc/hostname").write_text(f"{name}\n")
        subprocess.run(["ssh-keygen", "-A", "-f", self.disk], check=True, stdout=subprocess.DEVNULL)

    def boot(self) -> None:
        for group in (self._group / "all", self._group / "commands", *self._old_groups):
            group.mkdir(parents=True, exist_ok=True)
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--fork", "--kill-child")
        words = [str(self._base), str(self._top), self.name]
        argv = [*self._in_group("all"), *_BOUND, "unshare", *spaces, "sh", "-euc", _BOOT, "sh", *words]
        with (self._top / "boot.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._first = int(until("its first process", lambda: children.read_text().split())[0])
        until("systemd runs", lambda: Path(f"/proc/{self._first}/comm").read_text() == "systemd\n")
        self._cable.plug(self._first, self.name)
        asked = ("systemctl", "is-system-running")
        until("it has booted", lambda: self.run(*asked, check=False).stdout in ("running\n", "degraded\n"))

    def _in_group(self, part: str) -> list[str]:
        groups = shlex.join(f"{group}/cgroup.procs" for group in (self._group / part, *self._old_groups))
        return ["sh", "-ec", f'for group in {groups}; do echo $$ > "$group"; done; exec "$@"', "sh"]

    def off(self) -> None:
        """As by a loss of power."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        until(
            "its processes have ended",
            lambda: not (self._group / "cgroup.events").read_text().startswith("populated 1"),
        )
        for top in (self._group, *self._old_groups):
            for group in sorted(top.glob("**/"), reverse=True):
                group.rmdir()

    def run(
        self, *argv: str, check: bool = True, given: str = "", user: str = "", limit: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the home of root, or of a user who logs in. Its standard input is `given`."""
        if user:
            argv = ("runuser", "-l", user, "-c", shlex.join(argv))
        done = subprocess.run(
            [*self._enter(), *argv], input=given, capture_output=True, text=True, timeout=limit, check=False
        )
        assert not check or done.returncode == 0, f"{self.name}: {argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def _enter(self) -> list[str]:
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--root")
        environment = ("env", "-C", "/root", "-i", f"PATH={PATH}", "HOME=/root", "USER=root", "LC_ALL=C.UTF-8")
        return [*self._in_group("commands"), "nsenter", f"--target={self._first}", *spaces, *environment]

    def put(self, path: str, data: bytes, mode: str = "644") -> None:
        """Write a file."""
        script = f"cat > {shlex.quote(path)}; chmod {mode} {shlex.quote(path)}"
        subprocess.run([*self._enter(), "sh", "-ec", script], input=data, check=True)

    def shell(self, script: str, *, given: str = "", user: str = "") -> str:
        done = self.run("sh", "-ec", script, given=given, user=user)
        return done.stdout + done.stderr


def start_site(ctl1: FreshMachine, n2: FreshMachine) -> None:
    """Boot both. A Slurm runs on ctl1, and root of ctl1 may log in to n2."""
    hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    for machine in (ctl1, n2):
        machine.boot()
        # What in-debian has brought from the machine that runs the tests.
        machine.shell("rm -rf /multiverse /etc/pip.conf; : > /etc/resolv.conf")
        machine.put("/etc/hosts", hosts.encode())
    ctl1.shell("ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")
    host_keys = n2.shell("cat /etc/ssh/ssh_host_*_key.pub").splitlines()
    ctl1.put("/root/.ssh/known_hosts", "".join(f"n2 {key}\n" for key in host_keys).encode())
    n2.shell("install -d -m 700 /root/.ssh")
    n2.put("/root/.ssh/authorized_keys", ctl1.run("cat", "/root/.ssh/id_ed25519.pub").stdout.encode(), "600")
    ctl1.put("/etc/slurm/slurm.conf", SLURM_CONF.encode())
    # slurmd 22.05 takes /proc/self/cgroup for a mixture of versions, which it refuses unless it is told one of them.
    ctl1.put("/etc/slurm/cgroup.conf", b"CgroupPlugin=cgroup/v1\n")
    ctl1.shell("install -d -o slurm -g slurm /var/lib/slurm/slurmctld /var/log/slurm; install -d /var/lib/slurm/slurmd")
    ctl1.shell("systemctl enable slurmctld slurmd; systemctl restart slurmctld slurmd")
    n2.shell("systemctl disable --now slurmctld slurmd")
    until("the site's node is idle", lambda: "idle" in ctl1.run("sinfo", "-h", "-o", "%T", check=False).stdout)
