"""The initial ramdisk of slim images. It loads a few kernel modules, mounts the disk and switches to its root.

Debian's initial ramdisk supports any machine and spends seconds in udev. All our VMs have the same devices.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

from multiverse.core.errors import Broken

# The root file system cannot be mounted without the first ones. Clones need the later ones at once, so they are loaded
# before the fork point.
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
    """Files of the wanted modules and of their dependencies, relative to `lib/modules/<release>` below `root`.

    Each file comes after the files that it depends on. Modules that are built into the kernel are left out. A line of
    modules.dep(5) is `path: dependencies`, and lists indirect dependencies too. Raises `Broken` for an unknown module.
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
            raise Broken(
                f"kernel {release} has no module {name}", hint="use Debian's generic kernel, linux-image-amd64"
            )
        path = path_of[name]
        # The nearest dependency is listed first; loading begins with the farthest.
        for each in [*reversed(needs[path]), path]:
            if each not in ordered:
                ordered.append(each)
    return ordered


def make(root: Path, release: str, init: str, out: Path, work: Path) -> None:
    """Write the ramdisk for the system in `root` to the file `out`; `work` is for temporary files.

    `init` is the path, in the guest, of the program that becomes the first process. Raises `Broken` if the system has
    no busybox or lacks a module, or cpio fails.
    """
    tree = work / "initramfs"
    for name in ("bin", "dev", "proc", "root", "lib"):
        (tree / name).mkdir(parents=True)
    busybox = next((p for p in (root / "bin/busybox", root / "usr/bin/busybox") if p.is_file()), None)
    if busybox is None:
        raise Broken("the image has no busybox", hint="add the package busybox-static")
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
        raise Broken(
            f"cpio failed: {packed.stderr.decode(errors='replace').strip()}",
            hint="check with `df` that the directory of the images has free space",
        )
    out.write_bytes(gzip.compress(packed.stdout, compresslevel=1))
    shutil.rmtree(tree)


def _module_name(path: str) -> str:
    return Path(path).name.split(".", 1)[0].replace("-", "_")
