"""Builds images from the host's own apt sources.

The key of an image is a hash of everything that it is made of; an image with the same key is not built again. An image
is built in a directory beside its final place and then renamed, so an interrupted build leaves no incomplete image.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.images import digest, durations, initramfs, install
from multiverse.images.catalog import Flavour, Image, load, write_manifest
from multiverse.images.commands import Progress, mmdebstrap, run
from multiverse.images.recipe import DISK_MIB, EXCLUDED, PACKAGES, VARIANT, Recipe
from multiverse.images.root import (
    AGENT_PATH,
    enable_unit,
    install_agent,
    kernel_release,
    remove_dead_plugins,
    strip_identity,
)

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.:-]*")
_SPACE = "check with `df` that the directory of the images has free space"


def build(
    name: str,
    flavour: Flavour,
    out_dir: Path,
    *,
    packages: Sequence[str] = (),
    hooks: Path | None = None,
    progress: Progress | None = None,
) -> Image:
    """Build the image `name` in `out_dir`, or return the present one if it was made of the same inputs.

    `hooks` is a directory of executables. They run in the order of their names, each with the image's root directory as
    its argument, before the disk is made. `progress` gets a short line before each long step. Raises `Refused` for
    wrong arguments and `Broken` if a step fails; no incomplete image is left behind.
    """
    say = progress or (lambda line: None)
    _check_arguments(name, flavour, packages)
    recipe = Recipe.of(flavour, packages, hooks)
    base, key = recipe.keys()
    out_dir.mkdir(parents=True, exist_ok=True)
    with install.locked(out_dir, name):
        try:
            old = load(out_dir, name)
        except Refused:
            old = None
        if old is not None and old.key == key:
            say(f"image {name}: is up to date")
            return old
        with install.beside(out_dir, name) as work:
            if old is not None and old.base == base and flavour == "slim":
                say(f"image {name}: replacing the guest agent")
                release = _refresh(old, recipe, work)
            else:
                began = time.monotonic()
                release = _bootstrap(recipe, name, work, say)
                durations.keep(out_dir, flavour, time.monotonic() - began)
            image = Image(
                name, flavour, key, base, out_dir / name, recipe.cmdline, release, recipe.suite, recipe.packages
            )
            write_manifest(image, work)
            digest.record(work, digest.digest_of(work))
            install.put(work, out_dir, name)
    say(f"image {name}: ready, {image.disk.stat().st_blocks * 512 >> 20} MiB on disk")
    return image


def _check_arguments(name: str, flavour: Flavour, packages: Sequence[str]) -> None:
    install.check_name(name)
    wrong = [p for p in packages if not _PACKAGE.fullmatch(p)]
    if wrong:
        raise Refused(f"not valid names of packages: {' '.join(wrong)}", hint="use names that `apt-cache show` knows")
    if flavour not in PACKAGES:
        raise Refused(f"there is no image flavour {flavour!r}", hint="use slim or stock")


def _bootstrap(recipe: Recipe, name: str, work: Path, say: Progress) -> str:
    """Make disk, kernel and initial ramdisk in `work`, from packages. Returns the kernel's release."""
    root = work / "root"
    say(f"image {name}: installing Debian {recipe.suite} with mmdebstrap, which takes minutes")
    _install_packages(recipe, root, work, say)
    release = kernel_release(root)
    strip_identity(root)
    remove_dead_plugins(root)
    install_agent(root, recipe.agent)
    if recipe.flavour == "slim":
        say(f"image {name}: making the initial ramdisk")
        initramfs.make(root, release, AGENT_PATH, work / "initrd.img", work)
    else:
        say(f"image {name}: making the initial ramdisk with initramfs-tools")
        enable_unit(root)
        run(["chroot", root, "mkinitramfs", "-o", "/boot/initrd.img", release], "mkinitramfs", _SPACE)
        shutil.move(root / "boot/initrd.img", work / "initrd.img")
    shutil.copy2(root / "boot" / f"vmlinuz-{release}", work / "vmlinuz")
    (work / "initrd.img").chmod(0o644)
    say(f"image {name}: making the disk")
    # No journal and no checksums: the disk of a VM is never used again after a crash, and both cost CPU time, which is
    # scarce where CPUs are emulated.
    run(["mke2fs", "-q", "-t", "ext4", "-L", "root", "-O", "^has_journal,^metadata_csum,uninit_bg", "-m", "0", "-E",
         "lazy_itable_init=0,nodiscard,assume_storage_prezeroed=1", "-d", root, work / "disk.raw",
         f"{DISK_MIB}M"], "mke2fs", _SPACE)  # fmt: skip
    shutil.rmtree(root)
    return release


def _install_packages(recipe: Recipe, root: Path, work: Path, say: Progress) -> None:
    """Install Debian with the recipe's packages into `root`, and run the recipe's hooks on it."""
    apt_conf = work / "apt.conf"
    # How the host reaches its sources: proxies, checks of dates. mmdebstrap does not read the host's configuration.
    apt_conf.write_text(run(["apt-config", "dump", "Acquire"], "apt-config", "check apt's configuration on this host"))
    wanted = ",".join((*PACKAGES[recipe.flavour], *recipe.packages))
    argv: list[str | Path] = ["--mode=root", f"--variant={VARIANT[recipe.flavour]}"]
    argv += [f"--include={wanted}", f"--aptopt={apt_conf}", "--dpkgopt=force-unsafe-io"]
    argv += [f"--dpkgopt=path-exclude={path}" for path in EXCLUDED]
    argv += [f"--customize-hook={hook}" for hook in recipe.hooks]
    mmdebstrap([*argv, recipe.suite, root, *recipe.sources], work, say)
    apt_conf.unlink()


def _refresh(old: Image, recipe: Recipe, work: Path) -> str:
    """Copy `old` into `work` and replace the guest agent in it, which takes seconds. Returns the kernel's release."""
    run(["cp", "--reflink=auto", "--sparse=always", old.disk, old.kernel, old.initrd, work], "cp", _SPACE)
    source = work / "agent.py"
    source.write_text(recipe.agent)
    source.chmod(0o755)
    commands = work / "commands"
    directory, _, file = AGENT_PATH.rpartition("/")
    commands.write_text(f"cd {directory}\nrm {file}\nwrite {source} {file}\nset_inode_field {file} mode 0100755\n")
    hint = "remove the image and build it again"
    run(["debugfs", "-w", "-f", commands, work / "disk.raw"], "debugfs", hint)
    # debugfs exits with 0 whatever happens, so the file is read back.
    if run(["debugfs", "-R", f"cat {AGENT_PATH}", work / "disk.raw"], "debugfs", hint) != recipe.agent:
        raise Broken(f"debugfs did not replace the guest agent in image {old.name}", hint=hint)
    source.unlink()
    commands.unlink()
    return old.release
