"""Builds images: bootable disks with everything that a job needs, made from the host's own apt sources.

An image is a directory with `disk.raw` (ext4 without a partition table, sparse), `vmlinuz`, `initrd.img`
and `image.json`. Its key is a hash of all that went into it: the same key is never built twice. It is
built beside its place and renamed into it, so whatever interrupts a build leaves no half image.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from multiverse.core.errors import Broken, Refused
from multiverse.guest import agent, initramfs

Flavour = Literal["slim", "stock"]
Progress = Callable[[str], None]

ABILITIES = ("fork", "plug_cpus", "plug_memory")
"""What an image of ours can do: be forked at its agent's fork point, and take up CPUs and memory that come later."""

BUILDER_VERSION = 1  # raise it when the steps below change what comes out
DISK_MIB = 16384  # the disk as the guest sees it; sparse, so only what is written takes space
AGENT_PATH = "/usr/lib/multiverse/agent.py"

_COMMON = ("linux-image-amd64", "slurmd", "slurm-client", "munge", "nfs-common", "python3", "iproute2")
_PACKAGES: dict[Flavour, tuple[str, ...]] = {
    "slim": (*_COMMON, "busybox-static", "libpam-modules"),
    "stock": (*_COMMON, "systemd-sysv", "udev", "dbus", "initramfs-tools"),
}
_VARIANT: dict[Flavour, str] = {"slim": "minbase", "stock": "important"}
# Files that no job needs. The drivers are for devices that a VM of ours can never have.
_EXCLUDED = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*",
    *(f"/lib/modules/*/kernel/{name}/*" for name in (
        "sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/staging", "drivers/isdn",
        "drivers/iio", "drivers/hwmon", "drivers/input", "drivers/bluetooth", "drivers/usb", "drivers/scsi")),
)  # fmt: skip
_BOOT = ("root=/dev/vda", "rw", "console=ttyS0", "quiet", "net.ifnames=0", "panic=-1",
         # A plugged DIMM is usable at once, and brings the memory for its own page structures.
         "memhp_default_state=online", "memory_hotplug.memmap_on_memory=1", "swiotlb=noforce")  # fmt: skip
# What a single job's VM has no use for, and every clone would otherwise pay for: pressure figures, audit,
# mandatory access control between services, watchdogs, IPv6 autoconfiguration (identities have IPv4 addresses).
_LEAN = ("psi=0", "audit=0", "lsm=", "nowatchdog", "ipv6.disable_ipv6=1", "transparent_hugepage=madvise")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.:-]*")

_UNIT = f"""[Unit]
Description=Multiverse guest agent
After=local-fs.target systemd-modules-load.service network-pre.target
FailureAction=poweroff-force
SuccessAction=poweroff-force

[Service]
Type=exec
ExecStart={AGENT_PATH}
Delegate=yes
KillMode=mixed
OOMScoreAdjust=-900
TasksMax=infinity
LimitNOFILE=131072
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Image:
    """An image on disk. `cmdline` is its kernel command line; `base` the key of all but the agent. `abilities` are
    some of ABILITIES; a manifest that does not tell means all."""

    name: str
    flavour: Flavour
    key: str
    base: str
    path: Path
    cmdline: str
    release: str
    suite: str
    packages: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ABILITIES

    @property
    def disk(self) -> Path:
        return self.path / "disk.raw"

    @property
    def kernel(self) -> Path:
        return self.path / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.path / "initrd.img"


def load(images: Path, name: str) -> Image:
    """The image of that name. `Refused` if there is none that is whole."""
    try:
        image = _read(images / name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        known = ", ".join(i.name for i in list_images(images)) or "none"
        raise Refused(
            f"no image {name!r} in {images}", hint=f"there are: {known}; see `multiverse image build`"
        ) from error
    if missing := _missing(image):
        raise Refused(f"image {name} lacks {', '.join(missing)}", hint="build it again: `multiverse image build`")
    return image


def list_images(images: Path) -> list[Image]:
    """All whole images, by name."""
    found = []
    for path in sorted(images.glob("*/image.json")):
        if not path.parent.name.startswith("."):
            try:
                image = _read(path.parent)
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if not _missing(image):  # it may be being copied
                found.append(image)
    return found


def _missing(image: Image) -> list[str]:
    return [file.name for file in (image.disk, image.kernel, image.initrd) if not file.is_file()]


def _read(path: Path) -> Image:
    raw = json.loads((path / "image.json").read_text())
    abilities = tuple(raw.get("abilities", ABILITIES))
    return Image(**{**raw, "path": path, "packages": tuple(raw["packages"]), "abilities": abilities})


def build(
    name: str,
    flavour: Flavour,
    out_dir: Path,
    *,
    packages: Sequence[str] = (),
    hooks: Path | None = None,
    progress: Progress | None = None,
) -> Image:
    """Make the image `name`, or return it if it is there and made of the same.

    `hooks` is a directory of executables that are run in order of name with the root directory of the
    image as their argument, before it is sealed. `progress` gets a short line before each long step.
    Raises `Refused` for wrong arguments and `Broken` if a step fails; nothing half is left behind.
    """
    say = progress or (lambda line: None)
    if not _NAME.fullmatch(name):
        raise Refused(f"{name!r} cannot name an image", hint="use lower-case letters, digits, dots and dashes")
    wrong = [p for p in packages if not _PACKAGE.fullmatch(p)]
    if wrong:
        raise Refused(f"not package names: {' '.join(wrong)}", hint="give them as apt knows them")
    if flavour not in _PACKAGES:
        raise Refused(f"no image flavour {flavour!r}", hint="there are slim and stock")
    recipe = _Recipe.of(flavour, packages, hooks)
    base, key = recipe.keys()
    out_dir.mkdir(parents=True, exist_ok=True)
    with _locked(out_dir / f".{name}.lock"):
        try:
            old = load(out_dir, name)
        except Refused:
            old = None
        if old is not None and old.key == key:
            say(f"image {name}: cached")
            return old
        for rubbish in [*out_dir.glob(f".{name}.building-*"), *out_dir.glob(f".{name}.old-*")]:
            shutil.rmtree(rubbish)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=out_dir))
        try:
            work.chmod(0o755)
            if old is not None and old.base == base and flavour == "slim":
                say(f"image {name}: putting in the new agent")
                release = _refresh(old, work)
            else:
                release = _bootstrap(recipe, name, work, say)
            image = Image(
                name, flavour, key, base, out_dir / name, recipe.cmdline, release, recipe.suite, recipe.packages
            )
            raw = {k: v for k, v in asdict(image).items() if k != "path"}
            (work / "image.json").write_text(json.dumps(raw, indent=1) + "\n")
            os.sync()
            if image.path.exists():
                image.path.rename(out_dir / f".{name}.old-{key}")
            work.rename(image.path)
            shutil.rmtree(out_dir / f".{name}.old-{key}", ignore_errors=True)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    say(f"image {name}: ready, {image.disk.stat().st_blocks * 512 >> 20} MiB on disk")
    return image


@dataclass(frozen=True)
class _Recipe:
    """All inputs of an image, read once, so that its key says what it was made of."""

    flavour: Flavour
    suite: str
    packages: tuple[str, ...]
    sources: tuple[Path, ...]
    hooks: tuple[Path, ...]

    @classmethod
    def of(cls, flavour: Flavour, packages: Sequence[str], hooks: Path | None) -> _Recipe:
        return cls(flavour, _suite(), tuple(sorted(set(packages))), _sources(), _hooks(hooks))

    @property
    def cmdline(self) -> str:
        return " ".join((*_BOOT, *_LEAN, f"init={AGENT_PATH}") if self.flavour == "slim" else _BOOT)

    def keys(self) -> tuple[str, str]:
        """(key of the base, key of all, the agent included)."""
        digest = hashlib.sha256()
        facts = (BUILDER_VERSION, self.flavour, self.suite, self.packages, _PACKAGES[self.flavour], _EXCLUDED,
                 self.cmdline, _UNIT, DISK_MIB)  # fmt: skip
        digest.update(json.dumps(facts).encode())
        digest.update(Path(initramfs.__file__).read_bytes())
        for path in (*self.sources, *self.hooks):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        base = digest.hexdigest()[:16]
        digest.update(Path(agent.__file__).read_bytes())
        return base, digest.hexdigest()[:16]


def _suite() -> str:
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = facts.get("VERSION_CODENAME", "").strip('"')
    if not suite:
        raise Refused(
            "/etc/os-release names no release of Debian", hint="images are made on a Debian host, from its sources"
        )
    return suite


def _sources() -> tuple[Path, ...]:
    """The host's apt sources, as they are (sources.list(5)): files that hold nothing are left out."""
    parts = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list"), *sorted([*parts.glob("*.list"), *parts.glob("*.sources")])]
    used = tuple(p for p in found if p.is_file() and re.search(r"(?m)^\s*(deb\s|Types:)", p.read_text()))
    if not used:
        raise Refused("this host has no apt sources", hint="see sources.list(5); images are made from the host's own")
    return used


def _hooks(directory: Path | None) -> tuple[Path, ...]:
    if directory is None:
        return ()
    if not directory.is_dir():
        raise Refused(f"{directory} is no directory", hint="--hooks names a directory of executables")
    return tuple(sorted(p.resolve() for p in directory.iterdir() if p.is_file() and os.access(p, os.X_OK)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _environment() -> dict[str, str]:
    return {**os.environ, "INITRD": "No", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def _run(argv: Sequence[str | Path], what: str, hint: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=_environment(), stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise Broken(f"{what}: {error}", hint="`make setup` installs what is needed") from error
    if done.returncode != 0:
        tail = "; ".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise Broken(f"{what} failed: {tail}", hint=hint)
    return done.stdout


def _mmdebstrap(arguments: Sequence[str | Path], work: Path, say: Progress) -> None:
    """Run it in a PID namespace of its own: if it is interrupted, or this process is killed, the kernel ends all that
    it started (apt, dpkg and their scripts) and takes away what they mounted. Its own temporary files are in `work`.
    `say` gets its own word for each step."""
    alone = ("setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--pid", "--mount-proc", "--kill-child=KILL")
    tail: deque[str] = deque(maxlen=6)
    with subprocess.Popen(
        (*alone, "mmdebstrap", *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**_environment(), "TMPDIR": str(work)}, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.strip())
                if line.startswith("I: ") and line.endswith("...\n"):
                    say(line[3:-4])
        except BaseException:
            process.kill()
            process.stdout.read()  # its end: nobody is left who could write to it, nor below the image's root
            raise
    if process.returncode != 0:
        raise Broken(f"mmdebstrap failed: {'; '.join(tail)}", hint="does `apt-get update` work on this host?")


def _bootstrap(recipe: _Recipe, name: str, work: Path, say: Progress) -> str:
    """Make disk, kernel and ramdisk in `work`, from packages. Returns the kernel's release."""
    root = work / "root"
    say(f"image {name}: installing Debian {recipe.suite} with mmdebstrap, which takes minutes")
    apt_conf = work / "apt.conf"
    # The host's own way to reach its sources: proxies, date checks. mmdebstrap reads none of it by itself.
    apt_conf.write_text(_run(["apt-config", "dump", "Acquire"], "apt-config", "is apt in order here?"))
    wanted = ",".join((*_PACKAGES[recipe.flavour], *recipe.packages))
    argv: list[str | Path] = ["--mode=root", f"--variant={_VARIANT[recipe.flavour]}"]
    argv += [f"--include={wanted}", f"--aptopt={apt_conf}", "--dpkgopt=force-unsafe-io"]
    argv += [f"--dpkgopt=path-exclude={path}" for path in _EXCLUDED]
    argv += [f"--customize-hook={hook}" for hook in recipe.hooks]
    _mmdebstrap([*argv, recipe.suite, root, *recipe.sources], work, say)
    release = _release(root)
    _strip_identity(root)
    _install_agent(root)
    if recipe.flavour == "slim":
        say(f"image {name}: making the initial ramdisk")
        initramfs.make(root, release, AGENT_PATH, work / "initrd.img", work)
    else:
        say(f"image {name}: making the initial ramdisk with initramfs-tools")
        _enable_unit(root)
        _run(["chroot", root, "mkinitramfs", "-o", "/boot/initrd.img", release], "mkinitramfs", "is the disk full?")
        shutil.move(root / "boot/initrd.img", work / "initrd.img")
    shutil.copy2(root / "boot" / f"vmlinuz-{release}", work / "vmlinuz")
    (work / "initrd.img").chmod(0o644)
    say(f"image {name}: making the disk")
    # No journal, no checksums: a VM's disk never outlives a crash, and both cost emulated cycles.
    _run(["mke2fs", "-q", "-t", "ext4", "-L", "root", "-O", "^has_journal,^metadata_csum,uninit_bg", "-m", "0", "-E",
          "lazy_itable_init=0,nodiscard,assume_storage_prezeroed=1", "-d", root, work / "disk.raw",
          f"{DISK_MIB}M"], "mke2fs", "is the disk full?")  # fmt: skip
    shutil.rmtree(root)
    apt_conf.unlink()
    return release


def _release(root: Path) -> str:
    kernels = sorted((root / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise Broken("the image has no kernel", hint="do the host's sources hold linux-image-amd64?")
    return kernels[-1].name.removeprefix("vmlinuz-")


def _strip_identity(root: Path) -> None:
    """Nothing that two clones must not share: no keys, no machine-id, no way in for root by password."""
    for path in ("etc/munge/munge.key", "etc/resolv.conf", "var/lib/dbus/machine-id", "var/lib/systemd/random-seed",
                 "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/munge/munged.seed", "var/lib/nfs/state"):  # fmt: skip
        (root / path).unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "etc/hostname").write_text("")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shadow = root / "etc/shadow"
    shadow.write_text(re.sub(r"(?m)^root:[^:]*:", "root:!*:", shadow.read_text()))


def _install_agent(root: Path) -> None:
    target = root / AGENT_PATH.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(agent.__file__, target)
    target.chmod(0o755)


def _enable_unit(root: Path) -> None:
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "multiverse-agent.service").write_text(_UNIT)
    (units / "multi-user.target.wants/multiverse-agent.service").symlink_to(
        "/etc/systemd/system/multiverse-agent.service"
    )
    # The agent starts these itself, with the identity's files. Masked, so that no dependency brings them back.
    for unit in ("slurmd.service", "munge.service"):
        path = units / unit
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
        (units / "multi-user.target.wants" / unit).unlink(missing_ok=True)
    modules = root / "etc/modules-load.d/multiverse.conf"
    modules.write_text("\n".join(initramfs.LATER_MODULES) + "\n")


def _refresh(old: Image, work: Path) -> str:
    """A copy of an image in which only the agent is new: seconds instead of minutes."""
    _run(["cp", "--reflink=auto", "--sparse=always", old.disk, old.kernel, old.initrd, work], "cp", "is the disk full?")
    source = work / "agent.py"
    shutil.copyfile(agent.__file__, source)
    source.chmod(0o755)
    commands = work / "commands"
    directory, _, file = AGENT_PATH.rpartition("/")
    commands.write_text(f"cd {directory}\nrm {file}\nwrite {source} {file}\nset_inode_field {file} mode 0100755\n")
    again = "remove the image and build it anew"
    _run(["debugfs", "-w", "-f", commands, work / "disk.raw"], "debugfs", again)
    # debugfs ends with 0 whatever happened, so read back what it wrote.
    if _run(["debugfs", "-R", f"cat {AGENT_PATH}", work / "disk.raw"], "debugfs", again) != source.read_text():
        raise Broken("debugfs did not put the agent into the image", hint=again)
    source.unlink()
    commands.unlink()
    return old.release
