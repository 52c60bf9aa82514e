"""A cloud image of Debian 12, made as Debian makes its own (genericcloud): nothing else can be fetched for tests.

As there: a GPT with root (ext4, partition 1), a BIOS boot partition (14) and the EFI system partition (15); /etc/fstab
by PARTUUID, with growfs; the kernel for clouds, and its ramdisk of initramfs-tools with growroot; GRUB; cloud-init,
netplan, systemd-resolved, openssh-server, unattended-upgrades; no Slurm, no munge, no NFS client. Other than there:
Debian's fai makes the file system, here it is mmdebstrap; nothing is signed for Secure Boot.

`python -m tests.integration.cloud_image FILE.qcow2` makes one, which takes some minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from multiverse.images.build import mmdebstrap

PACKAGES = (
    "systemd-sysv", "udev", "dbus", "linux-image-cloud-amd64", "initramfs-tools", "cloud-init", "cloud-guest-utils",
    "cloud-initramfs-growroot", "netplan.io", "systemd-resolved", "systemd-timesyncd", "openssh-server", "sudo",
    "unattended-upgrades", "apparmor", "grub-efi-amd64-bin", "grub-pc-bin", "grub2-common", "fdisk", "dosfstools",
    "e2fsprogs", "mtools", "python3", "iproute2", "ca-certificates", "libnss-resolve", "libnss-myhostname", "polkitd",
)  # fmt: skip
_PARTITIONS = """\
label: gpt
first-lba: 2048
p14: start=2048, size=6144, type=21686148-6449-6E6F-744E-656564454649
p15: start=8192, size=253952, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B
p1: start=262144, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709
"""
# In a mount namespace of its own. $1 is the root directory, which has the tools; $2 is the directory of the disk.
_ASSEMBLE = """
mount --bind "$2" "$1/mnt"
for place in proc sys dev; do mount --rbind "/$place" "$1/$place"; done
cd "$2"
truncate -s 3G disk.raw
sed 's/^p\\([0-9]*\\): /disk.raw\\1: /' partitions > script
chroot "$1" sfdisk -q /mnt/disk.raw < script
efi=$(chroot "$1" sfdisk --part-uuid /mnt/disk.raw 15 | tr A-Z a-z)
root=$(chroot "$1" sfdisk --part-uuid /mnt/disk.raw 1 | tr A-Z a-z)
cat > "$1/etc/fstab" << END
PARTUUID=$root / ext4 rw,discard,errors=remount-ro,x-systemd.growfs 0 1
PARTUUID=$efi /boot/efi vfat defaults 0 0
END
chroot "$1" update-initramfs -c -k all
mkdir -p "$1/boot/efi"
truncate -s 124M efi.img
chroot "$1" mkfs.vfat -n EFI /mnt/efi.img > /dev/null
printf 'search.fs_uuid %s root\\nset prefix=($root)/boot/grub\\nconfigfile $prefix/grub.cfg\\n' "$root" > early.cfg
chroot "$1" grub-mkimage -O x86_64-efi -p /boot/grub -c /mnt/early.cfg -o /mnt/BOOTX64.EFI \
    part_gpt ext2 fat normal linux configfile search search_fs_uuid
chroot "$1" mmd -i /mnt/efi.img ::EFI ::EFI/BOOT
chroot "$1" mcopy -i /mnt/efi.img /mnt/BOOTX64.EFI ::EFI/BOOT/
dd if=efi.img of=disk.raw bs=1M seek=4 conv=notrunc,sparse status=none
for place in proc sys dev; do umount -l "$1/$place"; done
umount "$1/mnt"
printf 'datasource_list: [ NoCloud, ConfigDrive, Ec2, OpenStack, None ]\\n' > "$1/etc/cloud/cloud.cfg.d/90_dpkg.cfg"
rm -f "$1/etc/hostname" "$1/etc/apt/apt.conf.d/99mmdebstrap"
printf uninitialized > "$1/etc/machine-id"
mke2fs -q -t ext4 -d "$1" root.img $((3 * 1024 - 128 - 1))M
dd if=root.img of=disk.raw bs=1M seek=128 conv=notrunc,sparse status=none
"""


def make(out: Path, root: Path | None = None) -> Path:
    """Make the image, a qcow2 file. `root` is an installed system to use; else one is installed."""
    with tempfile.TemporaryDirectory(prefix=".cloud-", dir=out.parent) as name:
        work = Path(name)
        if root is None:
            root = work / "root"
            conf = work / "apt.conf"
            conf.write_text(subprocess.check_output(("apt-config", "dump", "Acquire"), text=True))
            argv = ["--mode=root", "--variant=important", f"--aptopt={conf}", "--dpkgopt=force-unsafe-io"]
            mmdebstrap([*argv, f"--include={','.join(PACKAGES)}", "bookworm", root], work, print)
        place = work / "disk"
        place.mkdir()
        (place / "partitions").write_text(_PARTITIONS)
        subprocess.run(("unshare", "--mount", "sh", "-euc", _ASSEMBLE, "sh", str(root), str(place)), check=True)
        made = work / out.name
        subprocess.run(("qemu-img", "convert", "-O", "qcow2", "-c", str(place / "disk.raw"), str(made)), check=True)
        made.replace(out)
    return out


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute())
