"""Makes an image of a foreign disk image with systemd, such as a distribution's cloud image.

The file is only read. Its root partition becomes the disk of the image, without the boot loader, because our VMs are
booted by their kernel. Packages are installed by the system's own programs, which run as root in a chroot with the
network of this machine: whoever made the image is trusted with this machine while it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.guest.assemble import assemble
from multiverse.images import catalog, importing
from multiverse.images.build import (
    AGENT_UNIT,
    BOOT_ARGUMENTS,
    Progress,
    enable_unit,
    install_agent,
    keep_duration,
    mask_units,
    remove_dead_plugins,
    run,
    strip_identity,
)
from multiverse.images.catalog import Image, load, write_manifest
from multiverse.images.description import DISK_MIB
from multiverse.images.importing import FAMILIES, ForeignSystem, ImportPlan, Judge, plan_import

IMPORTER_VERSION = 1  # increase it when a change of the steps changes the images that they make
DURATION = "import"  # the name under which the time of an import is kept
_TOOLS = "install qemu-utils, util-linux and e2fsprogs"
_MODULES_AT = "usr/lib/modules"  # not lib/modules, whose link may lead to this machine's
_MODULES = ("modules.dep", "modules.builtin")


@dataclass(frozen=True)
class Import:
    """What was found in a foreign image, and what importing it does."""

    system: ForeignSystem
    plan: ImportPlan
    image: Image | None = None  # None if it was only looked at


def import_image(
    file: Path, name: str, out_dir: Path, *, refuses: Judge, dry: bool = False, progress: Progress | None = None
) -> Import:
    """Make the image `name` in `out_dir` of a copy of `file`; with `dry`, only look at it. An image that was made of
    the same file is kept. Mounts; the caller is in a mount namespace of its own.

    Raises `Refused` if the file is no image that can be imported, and `Broken` if a step fails. No incomplete image is
    left behind. A system that lacks something is not imported: `image` is None then.
    """
    say = progress or (lambda line: None)
    catalog.check_name(name)
    if not file.is_file():
        raise Refused(f"there is no file {file}", hint="give the file of a disk image, such as FILE.qcow2")
    _refuse_others(file)
    out_dir.mkdir(parents=True, exist_ok=True)
    agent, digest = assemble(), _sha256(file)
    base, key = _keys(digest, agent)
    with catalog.locked(out_dir, name), catalog.beside(out_dir, name) as work:
        began = time.monotonic()
        say(f"{file.name}: copying its root partition")
        disk = _copy_root(file, work)
        with _mounted(disk, work / "root") as root:
            say(f"{file.name}: looking at the system")
            system = look(root, _ask_packages(root))
            plan = plan_import(system, refuses)
            does = not dry and not plan.lacking
            installed = _install(root, system, plan, agent, say) if does else {}
            if does:
                _make_ramdisk(root, system, work, say)
        if not does:
            shutil.rmtree(work)
            return Import(system, plan)
        (work / "whole.raw").unlink()
        say(f"image {name}: checking the disk")
        if _kind_of(disk, 0, disk.stat().st_size).startswith("ext"):
            _check_file_system(disk)
        made_from = (
            f"{file.name}: {system.title}",
            f"file sha256 {digest}",
            *(f"package {package} {version}" for package, version in installed.items()),
            *(f"masked {unit}" for unit in plan.masked),
            f"guest agent {hashlib.sha256(agent.encode()).hexdigest()[:12]}",
        )
        cmdline = " ".join((*BOOT_ARGUMENTS, *plan.kernel_arguments))
        image = Image(
            name, "stock", key, base, out_dir / name, cmdline, system.kernel, system.title, plan.install,
            plan.abilities, made_from,
        )  # fmt: skip
        write_manifest(image, work)
        catalog.record_digest(work, catalog.digest_of(work))
        catalog.put_in_place(work, out_dir, name)
    keep_duration(out_dir, DURATION, time.monotonic() - began)
    say(f"image {name}: ready, {image.disk.stat().st_blocks * 512 >> 20} MiB on disk")
    return Import(system, plan, image)


def present_import(file: Path, name: str, out_dir: Path) -> Image | None:
    """The image of that name, if it was imported from the same file by the same release of Multiverse."""
    try:
        old = load(out_dir, name)
    except Refused:
        return None
    return old if file.is_file() and old.key == _keys(_sha256(file), assemble())[1] else None


def _keys(digest: str, agent: str) -> tuple[str, str]:
    """As those of a recipe: without the guest agent, and with it."""
    steps = (sorted(importing.UNITS), sorted(importing.FAMILIES.items()))
    facts = (IMPORTER_VERSION, digest, DISK_MIB, BOOT_ARGUMENTS, AGENT_UNIT, steps)
    hashed = hashlib.sha256(json.dumps(facts).encode())
    base = hashed.hexdigest()[:16]
    hashed.update(agent.encode())
    return base, hashed.hexdigest()[:16]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _refuse_others(file: Path) -> None:
    """Refuse a disk image that would have other files of this machine read, too."""
    hint = f"is {file.name} a disk image? {_TOOLS}"
    about = json.loads(run(["qemu-img", "info", "--output=json", file], "qemu-img", hint))
    other = about.get("backing-filename") or about.get("format-specific", {}).get("data", {}).get("data-file")
    if other:
        raise Refused(f"{file.name} needs another file, {other}", hint="make it one file: qemu-img convert")


# --- the disk ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """A part of a disk, in bytes."""

    start: int
    size: int
    kind: str  # of its content: ext4, xfs, vfat, LVM2_member; empty: unknown


def partitions(listed: str) -> list[tuple[int, int]]:
    """Start and size in bytes of each partition, from the output of `partx --bytes --pairs`."""
    return [(int(start) * 512, int(size)) for start, size in re.findall(r'START="\s*(\d+)"\s+SIZE="\s*(\d+)"', listed)]


def _copy_root(file: Path, work: Path) -> Path:
    """Copy the partition with the root file system to a disk of our size, with the kernels of a boot partition."""
    whole, disk = work / "whole.raw", work / "disk.raw"
    run(["qemu-img", "convert", "-O", "raw", file, whole], "qemu-img", f"is {file.name} a disk image? {_TOOLS}")
    found = _partitions_of(whole)
    roots = [each for each in found if _has(whole, each, work, "usr/lib/os-release")]
    if len(roots) != 1:
        kinds = ", ".join(each.kind or "unknown" for each in found)
        raise Refused(
            f"{file.name} has {len(roots)} partitions with a system that this machine can read, not one: {kinds}",
            hint="take an image with a plain root partition: no LVM, no encryption, no btrfs subvolume, and a file"
            " system that this machine's kernel mounts",
        )
    root = roots[0]
    boots = [each for each in found if each != root and _has(whole, each, work, "vmlinuz-*")]
    part = f"driver=raw,offset={root.start},size={root.size},file.driver=file,file.filename={whole}"
    run(["qemu-img", "convert", "--image-opts", part, "-O", "raw", disk], "qemu-img", _TOOLS)
    os.truncate(disk, max(root.size, DISK_MIB << 20))
    if root.kind.startswith("ext"):
        _check_file_system(disk)
        # As in our own images: the disk of a VM is never used again after a crash.
        run(["tune2fs", "-O", "^has_journal", disk], "tune2fs", _TOOLS)
        run(["resize2fs", disk], "resize2fs", _TOOLS)
    for boot in boots:
        with _mounted(whole, work / "boot", boot) as source, _mounted(disk, work / "root") as target:
            shutil.copytree(source, target / "boot", symlinks=True, dirs_exist_ok=True)
    return disk


def _partitions_of(whole: Path) -> list[Partition]:
    """The partitions of a disk; the whole disk if it has none."""
    try:
        listed = run(["partx", "--bytes", "--pairs", "--output", "START,SIZE", whole], "partx", _TOOLS)
    except Broken:
        listed = ""
    spans = partitions(listed) or [(0, whole.stat().st_size)]
    return [Partition(start, size, _kind_of(whole, start, size)) for start, size in spans]


def _kind_of(whole: Path, start: int, size: int) -> str:
    argv = ["blkid", "--probe", "--offset", str(start), "--size", str(size), "-s", "TYPE", "-o", "value", str(whole)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip()


def _has(whole: Path, part: Partition, work: Path, pattern: str) -> bool:
    """Whether a file system has such a file."""
    if not part.kind or part.kind in ("vfat", "swap", "LVM2_member", "crypto_LUKS"):
        return False
    try:
        with _mounted(whole, work / "part", part, readonly=True) as place:
            return any(place.glob(pattern))
    except Broken:
        return False


@contextmanager
def _mounted(disk: Path, place: Path, part: Partition | None = None, *, readonly: bool = False) -> Iterator[Path]:
    """A file system in a file, mounted at a directory of our own. The loop device goes with the mount."""
    place.mkdir(exist_ok=True)
    options = "loop" if part is None else f"loop,offset={part.start},sizelimit={part.size}"
    hint = "this machine needs loop devices, and a kernel that knows the file system"
    run(["mount", "-o", f"{options}{',ro' if readonly else ''}", disk, place], "mount", hint)
    try:
        yield place
    finally:
        run(["umount", place], "umount", "see `mount`")
        place.rmdir()


def _check_file_system(disk: Path) -> None:
    done = subprocess.run(["e2fsck", "-fp", str(disk)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode > 1:  # 1: errors were corrected
        raise Broken(f"e2fsck failed: {done.stdout.strip()[-300:]}", hint="the file may be damaged: get it again")


# --- the system --------------------------------------------------------------------------------------


def look(root: Path, offered: dict[str, str] | None) -> ForeignSystem:
    """What is in the root directory of a system. `offered` are packages that it could install."""
    facts = importing.os_facts(_text(root / "usr/lib/os-release") or _text(root / "etc/os-release"))
    family = importing.family_of(facts)
    kernel = _newest_kernel(root)
    modules = "".join(_text(root / _MODULES_AT / kernel / name) for name in _MODULES) if kernel else ""
    config = _text(root / "boot" / f"config-{kernel}") or _text(root / _MODULES_AT / kernel / "config")
    selinux = re.search(r"(?m)^SELINUX=(\w+)", _text(root / "etc/selinux/config"))
    return ForeignSystem(
        title=facts.get("PRETTY_NAME") or facts.get("ID", "an unknown system"),
        family=family,
        architecture=_architecture(root),
        has_systemd=(root / "usr/lib/systemd/systemd").is_file(),
        kernel=kernel,
        drivers=frozenset(
            Path(line.partition(":")[0]).name.split(".", 1)[0].replace("-", "_") for line in modules.splitlines()
        ),
        config=importing.kernel_options(config) if config else None,
        installed=_installed(root, family),
        offered=offered,
        pythons=_pythons(root),
        units=frozenset(_units(root)),
        selinux=selinux[1] if selinux else "",
        maker=next((name for name in ("mkinitramfs", "dracut") if _program(root, name)), ""),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _newest_kernel(root: Path) -> str:
    """The newest kernel with modules, by the numbers in its name."""
    present = [path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")]
    whole = [release for release in present if (root / _MODULES_AT / release / "modules.dep").is_file()]
    return max(whole, key=lambda release: [int(word) for word in re.findall(r"\d+", release)], default="")


def _architecture(root: Path) -> str:
    """That of its first program, from the header of the file (elf(5))."""
    machines = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64", 22: "s390x"}
    try:
        header = (root / "usr/lib/systemd/systemd").read_bytes()[:20]
    except OSError:
        return platform.machine()
    return machines.get(int.from_bytes(header[18:20], "little"), "another machine")


def _program(root: Path, name: str) -> bool:
    return any((root / place / name).is_file() for place in ("usr/sbin", "usr/bin"))


def _pythons(root: Path) -> dict[str, tuple[int, int]]:
    """The versions of Python, by path. The links lead to files named by version."""
    found = {}
    for path in (root / "usr/bin").glob("python3*"):
        name = path.readlink().name if path.is_symlink() else path.name
        if match := re.fullmatch(r"python3\.(\d+)", name):
            found[f"/usr/bin/{path.name}"] = (3, int(match[1]))
    return found


def _units(root: Path) -> Iterator[str]:
    for place in ("usr/lib/systemd/system", "etc/systemd/system"):
        if (root / place).is_dir():
            names = [path.name for path in (root / place).iterdir()]
            yield from names
            # Instances that a template could have, too.
            yield from (unit for unit in importing.UNITS if re.sub(r"@[^.]*", "@", unit) in names)


def _installed(root: Path, family: str) -> dict[str, str]:
    if family == "redhat":
        listed = _in_root(root, 'rpm -qa --qf "%{NAME} %{VERSION}-%{RELEASE}\\n"')
        return dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    return importing.installed_packages(_text(root / "var/lib/dpkg/status"))


def _ask_packages(root: Path) -> dict[str, str] | None:
    """What apt would install in it; None where the package manager cannot be asked before repositories are added."""
    facts = importing.os_facts(_text(root / "usr/lib/os-release") or _text(root / "etc/os-release"))
    if importing.family_of(facts) != "debian" or not _program(root, "apt-get"):
        return None
    family = FAMILIES["debian"]
    names = " ".join((*family.packages.values(), family.python))
    return importing.offered_packages(
        _in_root(root, f"apt-get -q update -o APT::Update::Error-Mode=any >&2; apt-cache policy {names}")
    )


# --- changes -----------------------------------------------------------------------------------------

# How this machine reaches the sources, as mmdebstrap would do it; and no service is started in the chroot.
_FOREIGN_APT = "etc/apt/apt.conf.d/99multiverse"
_POLICY = "usr/sbin/policy-rc.d"
# In a mount and a PID namespace of its own: everything that is started here ends with it.
_ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=0755 tmpfs "$1/run"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
exec chroot "$1" /bin/sh -euc "$2"
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root",
    "DEBIAN_FRONTEND": "noninteractive", "INITRD": "No",
}  # fmt: skip


def _in_root(root: Path, script: str) -> str:
    """Run a script of the shell in the system, with the network of this machine. Returns what it prints. Raises
    `Broken`."""
    with _visiting(root):
        namespaces = ["unshare", "--mount", "--fork", "--pid", "--mount-proc", "--kill-child=KILL"]
        words = ["setpriv", "--pdeathsig=KILL", *namespaces, "sh", "-euc", _ENTER, "sh", str(root), script]
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | proxies,
        )  # fmt: skip
    if done.returncode:
        tail = "; ".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise Broken(f"in the system this failed: {script.splitlines()[0][:60]}: {tail}",
                     hint="check that this machine reaches the sources of the system's packages")  # fmt: skip
    return done.stdout


@contextmanager
def _visiting(root: Path) -> Iterator[None]:
    """The system has this machine's name service and its way to package sources meanwhile."""
    resolv, kept = root / "etc/resolv.conf", root / "etc/resolv.conf.multiverse"
    hosts, hosts_kept = root / "etc/hosts", _text(root / "etc/hosts")
    _without_link(hosts)
    if resolv.is_symlink() or resolv.exists():
        resolv.rename(kept)
    try:
        resolv.write_text(_text(Path("/etc/resolv.conf")))
        hosts.write_text(_text(Path("/etc/hosts")))
        if (root / _FOREIGN_APT).parent.is_dir() and shutil.which("apt-config"):
            (root / _FOREIGN_APT).write_text(run(["apt-config", "dump", "Acquire"], "apt-config", "see apt.conf(5)"))
        (root / _POLICY).write_text("#!/bin/sh\nexit 101\n")
        (root / _POLICY).chmod(0o755)
        yield
    finally:
        for path in (resolv, root / _FOREIGN_APT, root / _POLICY):
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            kept.rename(resolv)
        hosts.write_text(hosts_kept)


def _install(root: Path, system: ForeignSystem, plan: ImportPlan, agent: str, say: Progress) -> dict[str, str]:
    """Make the changes of the plan. Returns the versions of the packages that were installed."""
    if plan.install:
        say(f"{system.title}: installing {' '.join(plan.install)}")
        _in_root(root, _install_script(system, plan))
    present = _installed(root, system.family)
    say(f"{system.title}: adding the guest agent")
    for name in ("hosts", "hostname", "machine-id", "shadow", "fstab"):
        _without_link(root / "etc" / name)
    strip_identity(root)
    remove_dead_plugins(root)
    install_agent(root, agent.replace(importing.OWN_PYTHON, plan.python, 1))
    (root / "etc/modules-load.d").mkdir(exist_ok=True)
    enable_unit(root)
    mask_units(root, plan.masked)
    if (root / "etc/cloud").is_dir():
        (root / "etc/cloud/cloud-init.disabled").touch()
    fstab = root / "etc/fstab"
    fstab.write_text(importing.fstab_of_image(_text(fstab)))
    return {name: present.get(name, "") for name in plan.install}


def _without_link(path: Path) -> None:
    """A link could lead to a file of this machine, which would be written."""
    if path.is_symlink():
        path.unlink()


def _install_script(system: ForeignSystem, plan: ImportPlan) -> str:
    names = " ".join(plan.install)
    if FAMILIES[system.family].manager == "apt":
        return f"apt-get -q install -y --no-install-recommends {names}; apt-get clean; rm -rf /var/lib/apt/lists/*"
    first = f"dnf -q install -y {plan.first}; " if plan.first else ""
    return f"{first}dnf -q install -y --setopt=install_weak_deps=False {names}; dnf -q clean all"


def _make_ramdisk(root: Path, system: ForeignSystem, work: Path, say: Progress) -> None:
    """Copy the kernel, and make its initial ramdisk: the system's own may be for another machine."""
    say(f"{system.title}: making the initial ramdisk with {system.maker}")
    made = "/boot/multiverse-initrd"
    scripts = {
        "mkinitramfs": f"mkinitramfs -o {made} {system.kernel}",
        "dracut": f"dracut --force --no-hostonly --kver {system.kernel}"
        f" --add-drivers '{' '.join(importing.DRIVERS)}' {made}",
    }
    _in_root(root, scripts[system.maker])
    shutil.move(root / made.lstrip("/"), work / "initrd.img")
    shutil.copy2(root / "boot" / f"vmlinuz-{system.kernel}", work / "vmlinuz")
    for name in ("initrd.img", "vmlinuz"):
        (work / name).chmod(0o644)
