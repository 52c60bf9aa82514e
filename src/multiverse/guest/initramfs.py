"""A small initial ramdisk of our own for slim images: load a handful of modules, mount the disk, switch root.

Debian's own is made for any machine and spends seconds in udev; ours knows which devices there are.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

from multiverse.core.errors import Broken

# What must be there before the root file system is; then what a clone needs at once, loaded ahead of the fork point.
ROOT_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4")
LATER_MODULES = ("virtio_console", "virtio_net", "nfsv4", "nfs", "overlay")

_INIT = """#!/bin/busybox sh
bb=/bin/busybox
$bb mount -t devtmpfs -o mode=0755 dev /dev
$bb mount -t proc proc /proc
for module in $($bb cat /modules); do $bb insmod /lib/$module; done
$bb mount -t ext4 -o rw,noatime,noauto_da_alloc /dev/vda /root || $bb reboot -f
$bb umount /proc
$bb mount -o move /dev /root/dev
exec $bb switch_root /root "$(INIT)"
"""


def module_files(root: Path, release: str, wanted: tuple[str, ...]) -> list[str]:
    """Files of the wanted modules and of all that they need, each after what it needs, relative to
    `lib/modules/<release>`. What is built into the kernel is left out.

    modules.dep(5): `path: dependencies`, and a module's dependencies are already the full closure.
    """
    base = root / "lib/modules" / release
    needs: dict[str, list[str]] = {}
    path_of: dict[str, str] = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        path_of[_module_name(path)] = path
    built_in = {_module_name(line) for line in (base / "modules.builtin").read_text().splitlines()}
    ordered: list[str] = []
    for name in wanted:
        if name in built_in:
            continue
        if name not in path_of:
            raise Broken(f"kernel {release} has no module {name}", hint="the image needs Debian's generic kernel")
        path = path_of[name]
        # Listed nearest first: loading goes from the far end.
        for each in [*reversed(needs[path]), path]:
            if each not in ordered:
                ordered.append(each)
    return ordered


def make(root: Path, release: str, init: str, out: Path, work: Path) -> None:
    """Write the ramdisk for the system in `root`, whose first process is to be `init`, to `out`."""
    tree = work / "initramfs"
    for name in ("bin", "dev", "proc", "root", "lib"):
        (tree / name).mkdir(parents=True)
    busybox = next((p for p in (root / "bin/busybox", root / "usr/bin/busybox") if p.is_file()), None)
    if busybox is None:
        raise Broken("the image has no busybox", hint="busybox-static must be among its packages")
    shutil.copy2(busybox, tree / "bin/busybox")
    names = []
    for path in module_files(root, release, ROOT_MODULES + LATER_MODULES):
        names.append(Path(path).name)
        shutil.copy2(root / "lib/modules" / release / path, tree / "lib" / names[-1])
    (tree / "modules").write_text("\n".join(names) + "\n")
    (tree / "init").write_text(_INIT.replace("$(INIT)", init))
    (tree / "init").chmod(0o755)
    listing = "\n".join(sorted(str(p.relative_to(tree)) for p in tree.rglob("*")))
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], input=listing.encode(), cwd=tree, capture_output=True
    )
    if packed.returncode != 0:
        raise Broken(f"cpio failed: {packed.stderr.decode(errors='replace').strip()}", hint="is the disk full?")
    out.write_bytes(gzip.compress(packed.stdout, compresslevel=1))
    shutil.rmtree(tree)


def _module_name(path: str) -> str:
    return Path(path).name.split(".", 1)[0].replace("-", "_")
