"""A virtual machine with control groups of version 2 alone, which has this machine's files: for what a kernel with
version 1 cannot show.

Its kernel, modules and initramfs are those of the test image. It sees the files of this machine, below a layer in
memory that takes what is written, so the same checkout, Slurm and QEMU run there, emulated: VMs in it are emulated by
an emulated machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.integration.images import IMAGES

MEMORY = 6144  # MiB
_READY, _ENDED = "the unified machine is ready", "the unified machine has ended with"

# The first process, where the guest agent is in the image. The image's own root file system is only where modules are.
_BOOT = """\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys
modprobe -a 9pnet_virtio 9p overlay tun  # others are loaded when they are used
mount -t tmpfs -o size=100% tmpfs /mnt; cd /mnt; mkdir lower upper work root
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro host lower
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root
for each in proc sys dev; do mount --rbind /$each root/$each; done
mkdir -p root/lib/modules root/dev/pts root/dev/shm
mount --bind /lib/modules root/lib/modules
mount -t devpts devpts root/dev/pts; mount -t tmpfs -o mode=1777 tmpfs root/dev/shm
mount -t tmpfs -o mode=755 tmpfs root/run; mount -t tmpfs -o mode=1777 tmpfs root/tmp
mount -t cgroup2 cgroup2 root/sys/fs/cgroup
hostname unified
printf '%s' '{script}' > root/run/script
cd root; mkdir -p mnt/image; pivot_root . mnt/image  # a process that enters a mount namespace is at its root
exec chroot . /bin/sh -c 'umount -l /mnt/image; exec /bin/sh /run/script' > /dev/ttyS0 2>&1
"""
_PROGRAM = "/usr/lib/multiverse/agent.py"


def run(directory: Path, command: list[str], timeout: float) -> tuple[int, str]:
    """Run a command of this machine there, as root in the directory of this checkout. Its exit code, and what it and
    the machine said. `directory` is for files that this needs."""
    checkout = Path(__file__).parents[2]
    path = f"{checkout}/.venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    end = f'echo "{_ENDED} $?"; sync; echo o > /proc/sysrq-trigger; while :; do :; done\n'
    script = (
        f"export PATH={path} HOME=/root LC_ALL=C.UTF-8\nip link set lo up\ncd {shlex.quote(str(checkout))}\n"
        f'echo "{_READY}"\n{shlex.join(command)}\n{end}'
    )
    disk, boot = directory / "disk.raw", directory / "boot.sh"
    boot.write_text(_BOOT.format(script=script.replace("'", "'\\''")))
    image = IMAGES / "slim"
    subprocess.run(["cp", "--sparse=always", image / "disk.raw", disk], check=True)
    changes = f"rm {_PROGRAM}\nwrite {boot} {_PROGRAM}\nset_inode_field {_PROGRAM} mode 0100755\n"
    subprocess.run(["debugfs", "-w", "-f", "-", disk], input=changes, text=True, check=True, capture_output=True)
    log = directory / "console"
    argv = [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "q35",
        "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(min(os.cpu_count() or 1, 4)), "-m", str(MEMORY),
        "-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd.img"),
        "-append", "console=ttyS0 quiet panic=-1 net.ifnames=0",
        "-drive", f"file={disk},format=raw,if=virtio,cache=unsafe",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-serial", f"file:{log}",
    ]  # fmt: skip
    subprocess.run(argv, timeout=timeout, check=True, stdin=subprocess.DEVNULL)
    said = log.read_text(errors="replace").replace("\r", "")
    assert _READY in said, said[-3000:]
    code = said.rpartition(_ENDED)[2].split()
    return int(code[0]) if _ENDED in said and code else -1, said.partition(_READY)[2]
