"""Adds the lines that a site's own files need, and takes back what Multiverse has put on a machine.

Nothing records what was done: each file itself tells what is ours in it, and whether somebody has changed that since.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from multiverse.api import VmView, decode
from multiverse.client import Client
from multiverse.config import Settings
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.core.model.basics import number_of
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import conf, install, requirements
from multiverse.drivers.slurm.site.conf import SiteConf
from multiverse.host.vxlan import Vxlan, VxlanConfig
from multiverse.ports.site import Addition, Finding, InstallationPlan, Level, Removal
from multiverse.site import rendering
from multiverse.site.machine import problem
from multiverse.site.rendering import beside
from multiverse.system import blocks, files
from multiverse.system.files import Origin, SiteFile

_SHELL = re.compile(r"#!\s*(/usr)?/bin/(env )?(ba|da)?sh\b")
_PLUGSTACK = "plugstack.conf"


def original(path: Path) -> Path:
    """Where a file of the site's is kept as it was before."""
    return path.with_name(f"{path.name}.before-multiverse")


def plan(settings: Settings, config: Path, release: requirements.Version) -> InstallationPlan:
    """The plan for the machine of slurmctld. Changes nothing. Raises `Broken` if a file cannot be read."""
    site = conf.read(settings.slurm.conf, blocks.without)
    found = [*requirements.examine(settings, site, release)]
    fits = [one for one in found if is_added(one, site)]
    wanted = [
        _for_slurm_conf(settings.slurm.conf, site, fits),
        *_for_scripts(settings, site),
        *_for_plugstack(settings),
    ]
    changed = [one for one in wanted if _is_changed(one.path)]
    by_hand = [one for one in found if one.level is Level.PROBLEM and one not in fits]
    by_hand += [_changed(one.path) for one in changed]
    left = [one for one in found if one.level is Level.NOTE and one not in fits]
    left += [_no_shell(path) for path in _other_epilogs(settings, site)]
    wanted = [one for one in wanted if one not in changed and _after(one) != _text(one.path)]
    return InstallationPlan(tuple(rendering.render(settings, config, site)), tuple(wanted), tuple(by_hand), tuple(left))


def is_added(finding: Finding, site: SiteConf) -> bool:
    """Whether an installation adds a line for it: one whose key slurm.conf does not have yet."""
    return bool(finding.line) and not site.value(_key(finding.line))


def plan_agent(settings: Settings, config: Path) -> InstallationPlan:
    """The plan for a host with an agent and no controller."""
    wanted = [one for one in _for_plugstack(settings) if _after(one) != _text(one.path)]
    changed = [one for one in wanted if _is_changed(one.path)]
    additions = tuple(one for one in wanted if one not in changed)
    return InstallationPlan(
        tuple(rendering.render_agent(settings, config)), additions, tuple(_changed(one.path) for one in changed)
    )


def add(addition: Addition) -> None:
    """Add the lines, in place of those of an earlier installation. The original is kept beside the file. Raises
    `Refused` if the file cannot be written."""
    path, before = addition.path, _text(addition.path)
    try:
        if before and not blocks.lines_of(before) and not original(path).exists():
            shutil.copy2(path, original(path))
        _write(path, _after(addition))
    except OSError as error:
        raise Refused(f"cannot write {path}: {error.strerror}", hint="run this command as root") from error


def _write(path: Path, text: str) -> None:
    """Replace a text, and keep its owner and mode. What a link names is replaced, and not the link."""
    if not path.exists():
        files.replace(path, text, mode=0o644)
        return
    about = path.stat()
    files.replace(path.resolve(), text, mode=about.st_mode & 0o7777, uid=about.st_uid, gid=about.st_gid)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Broken(f"cannot read {path}: {error}", hint="run this command as root") from error


def _after(addition: Addition) -> str:
    bare = blocks.without(_text(addition.path))
    return blocks.added(bare, addition.lines, addition.at, addition.comment) if addition.lines else bare


def _is_changed(path: Path) -> bool:
    return blocks.is_changed(_text(path))


def _changed(path: Path) -> Finding:
    return problem(
        str(path), "the lines that an installation had added were changed here", "take these lines out by hand"
    )


# --- which lines ------------------------------------------------------------------------------------


def _key(line: str) -> str:
    return line.partition("=")[0]


def _for_slurm_conf(path: Path, site: SiteConf, fits: Iterable[Finding]) -> Addition:
    lines: dict[str, list[str]] = {}
    for one in fits:
        key, _, words = one.line.partition("=")
        lines.setdefault(key, []).extend([words] if words else [])
    text = tuple(f"{key}={','.join(words)}" if words else key for key, words in lines.items())
    return Addition(path, text, _above_defaults(path))


def _above_defaults(path: Path) -> int:
    """The number of the first line from which on nodes have defaults, also by a file that it includes; else the end."""
    lines = blocks.without(_text(path)).splitlines()
    continued = False
    for number, line in enumerate(lines):
        names = () if continued else conf.included(line)
        continued = line.endswith("\\")
        defaults = [one for one in conf.records(line, "NodeName") if one["nodename"].lower() == "default"]
        if defaults or any(conf.read(path.parent / name).defaults_above("NodeName") for name in names):
            return number
    return len(lines)


def _for_scripts(settings: Settings, site: SiteConf) -> Iterator[Addition]:
    path = settings.slurm.conf.with_name(install.JOB_SUBMIT)
    own = rendering.own_job_submit(settings)
    if own is not None and not conf.is_ours(bare := blocks.without(own)):
        lines = bare.splitlines()
        last = max((number for number, line in enumerate(lines) if re.match(r"return\b", line)), default=len(lines))
        yield Addition(path, tuple(install.hook_lines(settings).splitlines()), last, "--")
    ours = settings.slurm.conf.with_name(install.EPILOG)
    for epilog in _own_epilogs(settings, site):
        if _SHELL.match(_text(epilog)):
            yield Addition(epilog, (f"{ours} || true",), 1)


def _own_epilogs(settings: Settings, site: SiteConf) -> list[Path]:
    """The site's first EpilogSlurmctld, unless one of them is ours or calls ours."""
    ours = settings.slurm.conf.with_name(install.EPILOG)
    found = [Path(program) for program in requirements.epilogs(site)]
    called = (one == ours or conf.is_ours(blocks.without(_text(one))) for one in found)
    return [] if any(called) else found[:1]


def _other_epilogs(settings: Settings, site: SiteConf) -> list[Path]:
    return [path for path in _own_epilogs(settings, site) if not _SHELL.match(_text(path))]


def _no_shell(path: Path) -> Finding:
    message = "this EpilogSlurmctld is no shell script, so no line was added to it"
    return Finding(
        Level.NOTE, str(path), message, "let it run multiverse-epilog, which is beside slurm.conf, or leave it"
    )


def _for_plugstack(settings: Settings) -> Iterator[Addition]:
    """The line that loads the plugin for VMs inside jobs."""
    path, ours = settings.slurm.conf.with_name(_PLUGSTACK), settings.slurm.conf.with_name(install.PLUGSTACK)
    bare = blocks.without(_text(path))
    if install.loads_plugin(settings.job_vms) and install.PLUGSTACK not in bare:
        yield Addition(path, (f"include {ours}",), len(bare.splitlines()))


# --- taking it back ---------------------------------------------------------------------------------


def removals(settings: Settings, config: Path, *, agent: bool = False) -> list[Removal]:
    """What a removal does to each file in which something is ours. Changes nothing. Raises `Refused` where slurm.conf
    needs our file by a line that is not ours to take out."""
    if agent:
        rendered, scripts = rendering.render_agent(settings, config), []
    else:
        site = conf.read(settings.slurm.conf, blocks.without)
        if site.above is not None:
            raise Refused(
                f"{settings.slurm.conf} includes {conf.OURS} by a line that was added by hand",
                hint="take that line out, and what multiverse site check had asked for; then run this command again",
            )
        rendered = rendering.render(settings, config, conf.read(settings.slurm.conf))
        scripts = [Path(one) for one in requirements.epilogs(site)]
    own = [settings.slurm.conf, *scripts, *(settings.slurm.conf.with_name(n) for n in (install.JOB_SUBMIT, _PLUGSTACK))]
    found = [_lines_removed(path) for path in dict.fromkeys(own) if "multiverse site install" in _text(path)]
    for file in rendered:
        found += [_file_removed(path, file) for path in (file.path, beside(file.path)) if path.exists()]
    if conf.is_ours(_text(own[-2])) and own[-2] not in {one.path for one in found}:
        found.append(Removal(own[-2], why="it calls our part by lines that were added or changed by hand"))
    return found


def _lines_removed(path: Path) -> Removal:
    if _is_changed(path):
        return Removal(path, why="the lines that an installation had added were changed here: take them out by hand")
    return Removal(path, tuple(blocks.lines_of(_text(path))))


def _file_removed(path: Path, file: SiteFile) -> Removal:
    ours = (
        path.read_text().startswith(install.ADDRESSES_HEAD)
        if file.begun
        else files.origin(_text(path)) is Origin.RENDERED
    )
    return Removal(path, why="" if ours else "it was changed here")


def take_back(removal: Removal) -> str:
    """Do it. Returns what an administrator should know of the file; empty: it is as before. Raises `Refused`."""
    path = removal.path
    try:
        if removal.why:
            return removal.why
        if not removal.lines:
            path.unlink(missing_ok=True)
            return ""
        return _without_lines(path)
    except OSError as error:
        raise Refused(f"cannot change {path}: {error.strerror}", hint="run this command as root") from error


def _without_lines(path: Path) -> str:
    bare, before = blocks.without(_text(path)), original(path)
    if before.exists() and _text(before).rstrip("\n") == bare.rstrip("\n"):
        _write(path, _text(before))
        before.unlink()
        return ""
    if not bare and not before.exists():  # there was no such file
        path.unlink()
        return ""
    _write(path, bare)
    return f"only our lines were taken out: the file has changed since, and is in {before} as it was before"


# --- what is still used -----------------------------------------------------------------------------


def in_use(settings: Settings) -> list[str]:
    """What would be lost, or stay behind, if Multiverse were removed now: jobs, VMs, reservations and licences."""
    try:
        found = [*asyncio.run(_used_in_slurm(settings))]
    except MultiverseError as error:
        found = [f"Slurm cannot be asked what is used: {error.message}"]
    return [*found, *_vms(settings)]


def _vms(settings: Settings) -> list[str]:
    try:
        with Client(settings.socket) as client:
            names = [one.name for one in decode(list[VmView], client.vms())]
    except MultiverseError:  # no daemon runs: what is on this machine
        names = [path.name for path in sorted(settings.qemu.vms.glob("mv*")) if path.is_dir()]
    return [f"{number_of(len(names), 'VM')}: {_some(names)}"] if names else []


async def _used_in_slurm(settings: Settings) -> list[str]:
    commands, slurm = SlurmCommands(settings.slurm), settings.slurm
    jobs = (await commands.run("squeue", "-h", "-a", "-p", slurm.partition, "-o", "%i")).split()
    found = [f"{number_of(len(jobs), 'job')} in partition {slurm.partition}: {_some(jobs)}"] if jobs else []
    shown = await commands.run("scontrol", "show", "reservation", "--oneliner")
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        name, licences = fields.get("ReservationName", ""), fields.get("Licenses", "").split(",")
        of_ours = fields.get("PartitionName") == slurm.partition or f"{slurm.licence}:1" in licences
        if of_ours and name != slurm.gate_feature:
            found.append(f"reservation {name}, which is of partition {slurm.partition} or holds its licence")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


UNITS = (rendering.SERVICE, rendering.AGENT_SERVICE, rendering.BRIDGE_SERVICE)


def stop(settings: Settings, *, agent: bool = False) -> list[str]:
    """End the services, and let none start at boot; remove the VXLAN and the reservation of the gate. Returns what has
    failed."""
    failed: list[str] = []
    for unit in UNITS[1:] if agent else UNITS:
        if any((place / unit).exists() for place in (rendering.SYSTEMD, rendering.PACKAGED[rendering.SYSTEMD])):
            try:
                subprocess.run(["systemctl", "disable", "--now", unit], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = (getattr(error, "stderr", "") or str(error)).strip()
                failed.append(f"systemctl disable --now {unit}: {said}")
    failed += _remove_vxlans(settings.state_dir)
    if not agent:
        gate = f"ReservationName={settings.slurm.gate_feature}"
        try:
            shown = asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "show", "reservation", "--oneliner"))
            if f"{gate} " in shown:
                asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "delete", gate))
        except MultiverseError as error:
            failed.append(f"scontrol delete {gate}: {error.message}")
    return failed


def _remove_vxlans(state: Path) -> Iterator[str]:
    """Remove those of all sites that this machine has served: their records tell. Yields what has failed."""
    for records in sorted(state.glob("vxlan-*")):
        site = records.name.removeprefix("vxlan-")
        try:
            Vxlan(VxlanConfig(site, 0, 0, str, 0, "", records)).remove()
        except MultiverseError as error:
            yield error.message
