"""Builds images from the host's own apt sources.

The key of an image is a hash of everything that it is made of; an image with the same key is not built again. An image
is built in a directory beside its final place and then renamed, so an interrupted build leaves no incomplete image.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.guest.assemble import assemble
from multiverse.images import catalog, initramfs, sources
from multiverse.images.catalog import Flavour, Image, load, write_manifest
from multiverse.images.description import DISK_MIB, SUITES, ImageDescription, ImageDistribution, wrong_packages
from multiverse.system import files

BUILDER_VERSION = 2  # increase it when a change of the builder's steps changes the images that it makes

_COMMON = ("linux-image-amd64", "slurmd", "slurm-client", "munge", "nfs-common", "python3", "iproute2")
PACKAGES: dict[Flavour, tuple[str, ...]] = {
    "slim": (*_COMMON, "busybox-static", "libpam-modules", "procps"),  # procps: ps, pgrep, free, as users expect
    "stock": (*_COMMON, "systemd-sysv", "udev", "dbus", "initramfs-tools"),
}
VARIANT: dict[Flavour, str] = {"slim": "minbase", "stock": "important"}
# Files that no job needs. The drivers are for devices that QEMU never gives to our VMs.
EXCLUDED = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*",
    *(f"/lib/modules/*/kernel/{name}/*" for name in (
        "sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/staging", "drivers/isdn",
        "drivers/iio", "drivers/hwmon", "drivers/input", "drivers/bluetooth", "drivers/usb", "drivers/scsi")),
)  # fmt: skip
BOOT_ARGUMENTS = ("root=/dev/vda", "rw", "console=ttyS0", "quiet", "net.ifnames=0", "panic=-1",
         # A plugged DIMM is usable at once, and its own memory holds its page structures.
         "memhp_default_state=online", "memory_hotplug.memmap_on_memory=1", "swiotlb=noforce")  # fmt: skip
# These switch off what the VM of a single job does not need and every clone would spend time on: pressure figures,
# audit, mandatory access control between services, watchdogs, IPv6 autoconfiguration (identities have IPv4 addresses).
_LEAN = ("psi=0", "audit=0", "lsm=", "nowatchdog", "ipv6.disable_ipv6=1", "transparent_hugepage=madvise")


@dataclass(frozen=True)
class Input:
    """A file that goes into an image, or is used to make it."""

    name: str
    content: bytes
    target: str = ""  # in the image; none for files that are only used
    mode: str = ""
    owner: str = ""
    at: str = ""  # when it runs, if it is a hook in the image

    @classmethod
    def read(cls, path: Path, **how: str) -> Input:
        """Raises `Refused` if it cannot be read."""
        try:
            return cls(path.name, path.read_bytes(), **how)
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}", hint="check its owner and mode") from error

    @property
    def about(self) -> str:
        """What it is, and of which content."""
        what = f"file {self.target} {self.mode} {self.owner}" if self.target else f"hook {self.name} at {self.at}"
        if not self.target and not self.at:
            what = self.name
        return f"{what} {hashlib.sha256(self.content).hexdigest()[:12]}"


@dataclass(frozen=True)
class Recipe:
    """All inputs of an image. They are read once, so that the keys describe the very image."""

    flavour: Flavour
    suite: str  # the name of Debian's release
    packages: tuple[str, ...]
    sources: tuple[Input, ...]  # files of apt sources
    hooks: tuple[Path, ...]  # programs of this machine that change the root file system
    agent: str  # program text of the guest agent
    files: tuple[Input, ...] = ()
    steps: tuple[Input, ...] = ()  # hooks that run in the image
    kernel_arguments: tuple[str, ...] = ()
    size: int = DISK_MIB

    @classmethod
    def of(cls, described: ImageDescription, hooks: Path | None = None) -> Recipe:
        """The recipe on this host now. Raises `Refused` if the host lacks the apt sources, if `hooks` is no directory,
        or if a file cannot be read."""
        suite, listed = _sources_of(described.distribution)
        return cls(
            described.flavour,
            suite,
            tuple(sorted(set(described.packages))),
            listed,
            _hooks(hooks),
            assemble(),
            tuple(Input.read(f.source, target=f.target, mode=f.mode, owner=f.owner) for f in described.files),
            tuple(Input.read(hook.program, at=hook.at) for hook in described.hooks),
            described.kernel_arguments,
            described.size,
        )

    @property
    def cmdline(self) -> str:
        ours = (*BOOT_ARGUMENTS, *_LEAN, f"init={AGENT_PATH}") if self.flavour == "slim" else BOOT_ARGUMENTS
        return " ".join((*ours, *self.kernel_arguments))

    @property
    def release(self) -> str:
        """The distribution's release as people call it."""
        number = next((number for number, suite in SUITES.items() if suite == self.suite), "")
        return f"Debian {number} ({self.suite})" if number else f"Debian {self.suite}"

    def keys(self) -> tuple[str, str]:
        """(key of everything but the guest agent, key of everything), each of 16 hex digits."""
        hashed = hashlib.sha256()
        facts = (BUILDER_VERSION, self.flavour, self.suite, self.packages, PACKAGES[self.flavour], EXCLUDED,
                 self.cmdline, AGENT_UNIT, self.size)  # fmt: skip
        hashed.update(json.dumps(facts).encode() + "".join(MASKED[self.flavour]).encode())
        hashed.update(Path(initramfs.__file__).read_bytes())
        for name, content in (
            *((each.name, each.content) for each in self.sources),
            *((path.name, path.read_bytes()) for path in self.hooks),
            *((json.dumps([each.target, each.mode, each.owner, each.at]), each.content)
              for each in (*self.files, *self.steps)),
        ):  # fmt: skip
            hashed.update(f"{name} {len(content)}\n".encode() + content)
        base = hashed.hexdigest()[:16]
        hashed.update(self.agent.encode())
        return base, hashed.hexdigest()[:16]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Everything that the image is made of, a short line each."""
        hooks = [f"program {Input.read(path).about}" for path in self.hooks]
        return (
            self.release,
            f"flavour {self.flavour}, of builder {BUILDER_VERSION}",
            *(f"package {name}" for name in self.packages),
            *(f"apt sources {each.about}" for each in self.sources),
            *hooks,
            *(each.about for each in (*self.files, *self.steps)),
            f"kernel arguments {self.cmdline}",
            f"size {self.size} MiB",
            f"guest agent {hashlib.sha256(self.agent.encode()).hexdigest()[:12]}",
        )


def _suite() -> str:
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = facts.get("VERSION_CODENAME", "").strip('"')
    if not suite:
        raise Refused("/etc/os-release names no release of Debian", hint="build images on a Debian host")
    return suite


def _sources() -> tuple[Input, ...]:
    """The host's files of apt sources (sources.list(5)), without those that name no source."""
    parts = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list"), *sorted([*parts.glob("*.list"), *parts.glob("*.sources")])]
    used = tuple(Input.read(p) for p in found if p.is_file() and re.search(r"(?m)^\s*(deb\s|Types:)", p.read_text()))
    if not used:
        raise Refused("this host has no apt sources to build an image from", hint="add some, see sources.list(5)")
    return used


def _sources_of(distribution: ImageDistribution) -> tuple[str, tuple[Input, ...]]:
    """The name of the release, and its apt sources: those of the description, or of this host. Raises `Refused`."""
    suite = SUITES[distribution.release] if distribution.release is not None else _suite()
    if distribution.sources is not None:
        own = Input.read(distribution.sources)
        if distribution.release is not None and not sources.of_suite(own.name, own.content.decode(), suite):
            raise Refused(f"{distribution.sources} has no sources of {suite}", hint=f"add {suite} to the suites in it")
        return suite, (own,)
    present = _sources()
    if suite == _suite():
        return suite, present
    chosen = [replace(each, content=text.encode()) for each in present
              if (text := sources.of_suite(each.name, each.content.decode(), suite))]  # fmt: skip
    if not chosen:
        others = ", ".join(
            sorted({one for each in present for one in sources.suites(each.name, each.content.decode())})
        )
        raise Refused(
            f"the apt sources of this machine have no {suite} (Debian {distribution.release}), but {others}",
            hint=f"name a file with sources of {suite} as distribution.sources, for example a copy of this machine's"
            f" file in which {_suite()} is replaced by {suite}",
        )
    return suite, tuple(chosen)


def _hooks(directory: Path | None) -> tuple[Path, ...]:
    if directory is None:
        return ()
    if not directory.is_dir():
        raise Refused(f"{directory} is not a directory", hint="give --hooks a directory of executables")
    return tuple(sorted(p.resolve() for p in directory.iterdir() if p.is_file() and os.access(p, os.X_OK)))


# Units that a flavour's system does not start. Debian 13 would have /tmp in memory, and not on the disk that a job may
# write to.
MASKED: dict[Flavour, tuple[str, ...]] = {"slim": (), "stock": ("tmp.mount",)}
AGENT_PATH = "/usr/lib/multiverse/agent.py"  # where the guest agent lies in a guest
AGENT_UNIT = f"""[Unit]
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
"""The systemd unit that starts the guest agent in a stock image."""


def kernel_release(root: Path) -> str:
    """The release of the newest kernel in the image. Raises `Broken` if there is none."""
    kernels = sorted((root / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise Broken("the image has no kernel", hint="check that the host's apt sources have linux-image-amd64")
    return kernels[-1].name.removeprefix("vmlinuz-")


def strip_identity(root: Path) -> None:
    """Remove what two clones must not share: keys, machine-id, host name, random seeds and root's password."""
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


def remove_dead_plugins(root: Path) -> None:
    """Remove Slurm's plugin for PMIx from an image without the library: slurmd would try it twice at each start."""
    libraries = root / "usr/lib"
    if any("libpmix.so" in files for _, _, files in os.walk(libraries)):
        return
    for place in ("x86_64-linux-gnu/slurm-wlm", "x86_64-linux-gnu/slurm", "slurm"):
        for plugin in (libraries / place).glob("mpi_pmix*.so"):
            plugin.unlink()


def install_agent(root: Path, source: str) -> None:
    target = root / AGENT_PATH.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)
    target.chmod(0o755)


def enable_unit(root: Path) -> None:
    """Make systemd start the guest agent, and none of the daemons that the agent itself starts."""
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "multiverse-agent.service").write_text(AGENT_UNIT)
    link = units / "multi-user.target.wants/multiverse-agent.service"
    link.symlink_to("/etc/systemd/system/multiverse-agent.service")
    # The agent starts these two once the files of the clone's identity are written. They are masked, so that no unit
    # that depends on them starts them earlier.
    for unit in ("slurmd.service", "munge.service"):
        path = units / unit
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
        (units / "multi-user.target.wants" / unit).unlink(missing_ok=True)
    modules = root / "etc/modules-load.d/multiverse.conf"
    modules.write_text("\n".join(initramfs.LATER_MODULES) + "\n")


def mask_units(root: Path, units: Sequence[str]) -> None:
    for unit in units:
        path = root / "etc/systemd/system" / unit
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")


Progress = Callable[[str], None]  # gets one short line before each step that takes long


def run(argv: Sequence[str | Path], what: str, hint: str) -> str:
    """Run a program to its end, without a terminal, and return its standard output. Raises `Broken` if it fails; the
    message begins with `what` and ends with the last lines of the program."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=_environment(), stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise Broken(f"{what}: {error}", hint="install it; docs/install.md lists the packages") from error
    if done.returncode != 0:
        tail = "; ".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise Broken(f"{what} failed: {tail}", hint=hint)
    return done.stdout


def mmdebstrap(arguments: Sequence[str | Path], work: Path, say: Progress) -> None:
    """Run mmdebstrap with its temporary files in `work`; `say` gets the name of each of its steps.

    It runs in a PID namespace of its own. If mmdebstrap is interrupted, or this process is killed, the kernel ends all
    processes of the namespace (apt, dpkg and their scripts) and undoes their mounts. Raises `Broken` if it fails.
    """
    namespace = ("setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--pid", "--mount-proc", "--kill-child=KILL")
    tail: deque[str] = deque(maxlen=6)
    with subprocess.Popen(
        (*namespace, "mmdebstrap", *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**_environment(), "TMPDIR": str(work)}, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.strip())
                if line.startswith("I: ") and line.endswith("...\n"):
                    say(line[3:-4])
        except BaseException:
            process.kill()
            # The pipe ends when the last process of the namespace has ended. Only then can the caller remove the root.
            process.stdout.read()
            raise
    if process.returncode != 0:
        raise Broken(f"mmdebstrap failed: {'; '.join(tail)}", hint="check that `apt-get update` works on this host")


def _environment() -> dict[str, str]:
    return {**os.environ, "INITRD": "No", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


DURATIONS = ".durations.json"


def expected_duration(images: Path, flavour: str) -> float | None:
    """Seconds that the last build of this flavour took; None if that is unknown."""
    found = _durations(images).get(flavour)
    return float(found) if isinstance(found, int | float) else None


def keep_duration(images: Path, flavour: str, seconds: float) -> None:
    """Remember how long a build took. Errors are ignored."""
    with suppress(OSError):
        files.replace(images / DURATIONS, json.dumps(_durations(images) | {flavour: round(seconds, 1)}), mode=0o644)


def _durations(images: Path) -> dict[str, object]:
    try:
        found = json.loads((images / DURATIONS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
    """Build the image `name` of a flavour, with further packages: see `build_described`. `hooks` is a directory of
    executables. They run in the order of their names before the disk is made, with the image's root directory as
    argument."""
    described = plain_description(name, flavour, packages)
    return build_described(described, out_dir, hooks=hooks, progress=progress)


def plain_description(name: str, flavour: Flavour, packages: Sequence[str] = ()) -> ImageDescription:
    """An image of a flavour with further packages, without a file that describes it. Raises `Refused`."""
    catalog.check_name(name)
    if wrong := wrong_packages(tuple(packages)):
        raise Refused(f"not valid names of packages: {' '.join(wrong)}", hint="use names that `apt-cache show` knows")
    if flavour not in PACKAGES:
        raise Refused(f"there is no image flavour {flavour!r}", hint="use slim or stock")
    return ImageDescription(name, flavour, tuple(packages))


def build_described(
    described: ImageDescription,
    out_dir: Path,
    *,
    origin: str = "",
    hooks: Path | None = None,
    progress: Progress | None = None,
) -> Image:
    """Build an image in `out_dir`, or return the present one if it was made of the same inputs. `origin` is the name of
    the file that describes it.

    `progress` gets a short line before each long step. Raises `Refused` for wrong arguments and `Broken` if a step
    fails; no incomplete image is left behind.
    """
    say = progress or (lambda line: None)
    name, flavour = described.name or described.flavour, described.flavour
    recipe = Recipe.of(described, hooks)
    base, key = recipe.keys()
    out_dir.mkdir(parents=True, exist_ok=True)
    with catalog.locked(out_dir, name):
        try:
            old = load(out_dir, name)
        except Refused:
            old = None
        if old is not None and old.key == key:
            say(f"image {name}: is up to date")
            return old
        first, *rest = recipe.inputs
        made_from = (f"{origin}: {first}" if origin else first, *rest)
        if old is not None and (changed := sorted({*old.made_from} ^ {*made_from})):
            say(f"image {name}: it has changed: {', '.join(changed)}")
        with catalog.beside(out_dir, name) as work:
            if old is not None and old.base == base and flavour == "slim":
                say(f"image {name}: replacing the guest agent")
                release = _refresh(old, recipe, work)
            else:
                began = time.monotonic()
                release = _bootstrap(recipe, name, work, say)
                keep_duration(out_dir, flavour, time.monotonic() - began)
            image = Image(
                name, flavour, key, base, out_dir / name, recipe.cmdline, release, recipe.suite, recipe.packages,
                made_from=made_from,
            )  # fmt: skip
            write_manifest(image, work)
            catalog.record_digest(work, catalog.digest_of(work))
            catalog.put_in_place(work, out_dir, name)
    say(f"image {name}: ready, {image.disk.stat().st_blocks * 512 >> 20} MiB on disk")
    return image


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
        mask_units(root, MASKED[recipe.flavour])
        run(["chroot", root, "mkinitramfs", "-o", "/boot/initrd.img", release], "mkinitramfs", _SPACE)
        shutil.move(root / "boot/initrd.img", work / "initrd.img")
    shutil.copy2(root / "boot" / f"vmlinuz-{release}", work / "vmlinuz")
    (work / "initrd.img").chmod(0o644)
    say(f"image {name}: making the disk")
    # No journal and no checksums: the disk of a VM is never used again after a crash, and both cost CPU time, which is
    # scarce where CPUs are emulated.
    run(["mke2fs", "-q", "-t", "ext4", "-L", "root", "-O", "^has_journal,^metadata_csum,uninit_bg", "-m", "0", "-E",
         "lazy_itable_init=0,nodiscard,assume_storage_prezeroed=1", "-d", root, work / "disk.raw",
         f"{recipe.size}M"], "mke2fs", _SPACE)  # fmt: skip
    for made in (root, work / "sources", work / "inputs"):
        shutil.rmtree(made)
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
    argv += [f"--customize-hook={hook}" for hook in (*recipe.hooks, *_changes(recipe, work))]
    listed = _kept(recipe.sources, work / "sources")
    mmdebstrap([*argv, recipe.suite, root, *listed], work, say)
    apt_conf.unlink()


_IN_IMAGE = "/.multiverse-input"


def _changes(recipe: Recipe, work: Path) -> list[str]:
    """Commands of the shell for the recipe's files and hooks. `$1` is the image's root directory. They act in the
    image, where symbolic links lead to places in the image."""
    begin = [one for one in recipe.steps if one.at == "packages"]
    end = [one for one in recipe.steps if one.at != "packages"]
    commands = []
    ordered = (*begin, *recipe.files, *end)
    for one, path in zip(ordered, _kept(ordered, work / "inputs"), strict=True):
        copied = f'cp {shlex.quote(str(path))} "$1{_IN_IMAGE}"'
        if one.target:
            user, _, group = one.owner.partition(":")
            how = [
                "install",
                "-D",
                "-m",
                one.mode,
                "-o",
                user,
                *(["-g", group] if group else []),
                _IN_IMAGE,
                one.target,
            ]
        else:
            copied += f' && chmod 755 "$1{_IN_IMAGE}"'
            how = [_IN_IMAGE]
        commands.append(f'{copied} && chroot "$1" {shlex.join(how)} && rm "$1{_IN_IMAGE}"')
    return commands


def _kept(inputs: Sequence[Input], directory: Path) -> list[Path]:
    """Files with the content of these inputs, in their order. Their names end as those of the inputs do."""
    directory.mkdir()
    paths = [directory / f"{number}-{one.name}" for number, one in enumerate(inputs)]
    for one, path in zip(inputs, paths, strict=True):
        path.write_bytes(one.content)
    return paths


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
