"""A guest with an IOMMU, an emulated NVMe controller with virtual functions, and control groups of version 2 alone, for
what needs a machine with these.

It boots the kernel of the default image, with a ramdisk of its own. Its root directory is that of this machine, shared
with it; what is written is in the guest's memory only. A program of the tests runs there with the same Python, packages
and QEMU as here, and with the modules of the image's kernel. Where a program reads large files, the guest has a disk
with copies of them: the shared directory is slow, and shows no holes.
"""

from __future__ import annotations

import gzip
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from multiverse.images.catalog import Image
from multiverse.images.initramfs import module_files

CONTROLLER = "0000:01:00.0"
"""The address of the NVMe controller in the guest."""

FUNCTIONS = 4
SERIAL = "multiverse-vf"
"""What the controller says when it is asked for its serial number."""

DATA = "a block of the namespace"
"""How the namespace of the controller begins, which its functions reach, too."""

FILES = Path("/mnt")
"""Where the guest has its copies of files: not in /run, which nodes of a lab have for themselves."""

_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4", "9pnet_virtio", "9p", "overlay")
_INIT = """#!/bin/busybox sh
bb=/bin/busybox
$bb mount -t devtmpfs -o mode=0755 dev /dev
$bb mount -t proc proc /proc
for module in $($bb cat /modules); do $bb insmod /lib/$module; done
$bb mkdir -p /host /top /root
$bb mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
$bb mount -t tmpfs tmpfs /top
$bb mkdir /top/upper /top/work
$bb mount -t overlay -o lowerdir=/host,upperdir=/top/upper,workdir=/top/work overlay /root
for kind in devtmpfs:dev proc:proc sysfs:sys; do $bb mount -t ${kind%:*} ${kind%:*} /root/${kind#*:}; done
$bb mount -t tmpfs -o mode=0755 tmpfs /root/run
$bb mkdir -p /root/dev/shm /root/dev/pts
$bb mount -t tmpfs tmpfs /root/dev/shm
$bb mount -t tmpfs tmpfs /root/tmp  # an NFS server cannot export what an overlay has
$bb mount -t devpts devpts /root/dev/pts
$bb mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
$bb mkdir -p /disk /root/usr/lib/modules
$bb mount -t ext4 -o ro,noload /dev/vda /disk
$bb mount -o bind /disk/lib/modules /root/usr/lib/modules
[ -b /dev/vdb ] && $bb mount -t ext4 /dev/vdb /root/mnt
$bb hostname guest
$bb ip link set lo up
$bb cp /program /root/run/program
cd /root
$bb mount -o move . /  # a process that enters a mount namespace is at the uppermost mount of its root
exec $bb chroot . /bin/sh /run/program
"""
_PROGRAM = """
PATH=/usr/sbin:/usr/bin:/sbin:/bin
modprobe -a nvme tun
env -i PATH=$PATH LC_ALL=C COMMAND >/dev/ttyS1 2>&1
echo "exit $?" >/dev/ttyS1
echo o >/proc/sysrq-trigger
while :; do sleep 1; done
"""
# The kernel starts it from the root directory of the ramdisk. The first process has left that for the guest's.
_MODPROBE = """#!/bin/busybox sh
[ -e /proc/1/root/init ] || exec /bin/busybox chroot /proc/1/root /sbin/modprobe "$@"
"""


def run(
    image: Image,
    directory: Path,
    command: Sequence[str | Path],
    *,
    memory: int = 768,
    limit: float = 120,
    files: Path | None = None,
) -> str:
    """Boot the guest and run a command in it. Returns what it has printed. Raises AssertionError, with all output, if
    it fails. `directory` is for the files of the guest, `memory` its MiB, `limit` the seconds that it may take. What is
    in the directory `files` is copied to a disk of the guest, which has it in `FILES`."""
    program = _PROGRAM.replace("COMMAND", " ".join(shlex.quote(str(word)) for word in command))
    ramdisk = make_ramdisk(image, directory, _INIT, _MODULES, program)
    output, console = directory / "output", directory / "console"
    namespace = directory / "namespace"
    namespace.write_bytes(DATA.encode().ljust(1 << 20, b"\0"))
    pcie = "pcie-root-port,id=root,chassis=1"
    nvme = f"nvme,id=controller,bus=root,serial={SERIAL},subsys=subsystem,sriov_max_vfs={FUNCTIONS}"
    argv = ["qemu-system-x86_64", "-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-m", f"{memory}M", "-smp", "2", "-nodefaults", "-display", "none", "-no-reboot",
            "-serial", f"file:{console}", "-serial", f"file:{output}",
            "-kernel", image.kernel, "-initrd", ramdisk, "-append",
            "console=ttyS0 quiet intel_iommu=on panic=-1 mitigations=off norandmaps audit=0 nowatchdog",
            "-drive", f"file={image.disk},format=raw,if=none,id=disk,readonly=on",
            "-device", "virtio-blk-pci,drive=disk", "-device", "intel-iommu,intremap=on,caching-mode=on",
            "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
            "-device", pcie, "-device", "nvme-subsys,id=subsystem",
            "-device", f"{nvme},max_ioqpairs=16,sriov_vq_flexible=8,sriov_vi_flexible=4",
            "-drive", f"file={namespace},format=raw,if=none,id=namespace",
            "-device", "nvme-ns,drive=namespace,bus=controller,shared=on"]  # fmt: skip
    if files is not None:
        argv += ["-drive", f"file={_disk_of(files, directory)},format=raw,if=none,id=files",
                 "-device", "virtio-blk-pci,drive=files"]  # fmt: skip
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit, check=False)
        problem = done.stderr
    except subprocess.TimeoutExpired:
        problem = f"it took more than {limit} s"
    printed = output.read_text(errors="replace") if output.exists() else ""
    text, _, status = printed.rstrip().rpartition("exit ")
    if status != "0":
        said = console.read_text(errors="replace") if console.exists() else ""
        raise AssertionError(f"the guest failed: {problem}\n{printed}\n{said}")
    return text.replace("\r\n", "\n")


def _disk_of(files: Path, directory: Path) -> Path:
    """A file system with a copy of that directory. Holes stay holes."""
    disk, used = directory / "files", subprocess.run(["du", "-sm", files], capture_output=True, text=True, check=True)
    size = int(used.stdout.split()[0]) * 5 // 4 + 64
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", files, disk, f"{size}M"], check=True)
    return disk


def python() -> Path:
    """The interpreter of these tests, which is at the same path in the guest."""
    return Path(sys.executable)


def make_ramdisk(image: Image, directory: Path, init: str, modules: tuple[str, ...], program: str = "") -> Path:
    """A ramdisk with these modules of the image's kernel, of which the image's disk has the files, and that program as
    init. The file `modules` in it names those files, in the order in which they can be loaded; the file `program` is
    for init."""
    root, tree, release = directory / "image", directory / "ramdisk", image.release
    base = f"lib/modules/{release}"
    (root / base).mkdir(parents=True)
    (tree / "bin").mkdir(parents=True)
    for name in ("lib", "dev", "proc", "sbin"):
        (tree / name).mkdir()
    _copy_from_disk(image, {f"/{base}/{name}": root / base / name for name in ("modules.dep", "modules.builtin")})
    files = module_files(root, release, modules)
    wanted = {f"/{base}/{path}": tree / "lib" / Path(path).name for path in files}
    _copy_from_disk(image, {**wanted, "/bin/busybox": tree / "bin/busybox"})
    (tree / "bin/busybox").chmod(0o755)
    (tree / "modules").write_text("\n".join(Path(path).name for path in files) + "\n")
    for path, text in (("init", init), ("program", program), ("sbin/modprobe", _MODPROBE)):
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)
    listing = "\n".join(sorted(str(path.relative_to(tree)) for path in tree.rglob("*")))
    packed = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], input=listing.encode(), cwd=tree,
                            capture_output=True, check=True)  # fmt: skip
    ramdisk = directory / "initrd.img"
    ramdisk.write_bytes(gzip.compress(packed.stdout, compresslevel=1))
    shutil.rmtree(tree)
    return ramdisk


def _copy_from_disk(image: Image, files: dict[str, Path]) -> None:
    commands = "".join(f"dump {inside} {outside}\n" for inside, outside in files.items())
    subprocess.run(["debugfs", "-f", "-", image.disk], input=commands, text=True, capture_output=True, check=True)
    missing = [inside for inside, outside in files.items() if not outside.exists() or not outside.stat().st_size]
    assert not missing, f"the image lacks {missing}"
