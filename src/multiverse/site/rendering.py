"""Renders the files that a site adds to its machine, and writes them. What an administrator has changed stays."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse.config import Settings, is_host, users_socket
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.identity import mac_of_address
from multiverse.drivers.slurm.site import bootstrap, install
from multiverse.drivers.slurm.site.conf import SiteConf
from multiverse.images.catalog import list_images
from multiverse.system import files
from multiverse.system.files import Origin, SiteFile

SYSTEMD, TMPFILES = Path("/etc/systemd/system"), Path("/etc/tmpfiles.d")
PACKAGED = {SYSTEMD: Path("/usr/lib/systemd/system"), TMPFILES: Path("/usr/lib/tmpfiles.d")}
"""Where packages have files of the same names, for the default settings. A file in /etc counts in place of theirs."""
SERVICE, AGENT_SERVICE = "multiverse.service", "multiverse-agent.service"
BRIDGE_SERVICE = "multiverse-bridge.service"


def render(settings: Settings, config: Path, site: SiteConf) -> list[SiteFile]:
    """All files, for the settings in the file `config`. The same input gives the same files. A job_submit.lua of the
    site's own is not among them: see `own_job_submit`. Raises `Unknown` if the name service does not know SlurmUser,
    and `Refused` if no address is left for the gate."""
    return [*_beside_slurm_conf(settings, site), *_beyond_packages(_for_systemd(settings, config, site))]


def render_agent(settings: Settings, config: Path) -> list[SiteFile]:
    """The files of a host with an agent and no controller. Its bridge has no address: guests reach slurmctld through
    the uplink."""
    return [*_plugstack(settings), *_beyond_packages(_of_agent(settings, config))]


def packaged() -> dict[Path, str]:
    """The files that packages have for systemd, for the default settings. A bridge is no such file: it has the site's
    address on the controller's machine, and none on a host."""
    settings, config = Settings(), Path("/etc/multiverse/multiverse.toml")
    values = {"run_directories": (), "bridge_mac": "", "bridge_address": ""}
    daemon = _render(settings, config, {SERVICE: SYSTEMD / SERVICE}, values)
    return {
        PACKAGED[file.path.parent] / file.path.name: file.content
        for file in (*daemon, *_of_agent(settings, config))
        if file.path.name != BRIDGE_SERVICE
    }


def _of_agent(settings: Settings, config: Path) -> list[SiteFile]:
    values = {"bridge_mac": "", "bridge_address": "", "run_directories": _below_run(*_agent_directories(settings))}
    return _render(settings, config, {"agent-tmpfiles.conf": TMPFILES / "multiverse-agent.conf"}, values)


def _beyond_packages(wanted: Iterable[SiteFile]) -> list[SiteFile]:
    """These files without those that a package has with the same content."""
    return [file for file in wanted if file.path.exists() or not _is_packaged(file)]


def _is_packaged(file: SiteFile) -> bool:
    try:
        return (PACKAGED[file.path.parent] / file.path.name).read_text() == file.content
    except OSError:
        return False


def own_job_submit(settings: Settings) -> str | None:
    """The site's own job_submit.lua, or what it made from ours; None: there is none. `Broken` if it cannot be read."""
    path = settings.slurm.conf.with_name(install.JOB_SUBMIT)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Broken(f"cannot read {path}: {error}", hint="run this command as root") from error
    return None if files.origin(text) is Origin.RENDERED else text


def _beside_slurm_conf(settings: Settings, site: SiteConf) -> Iterator[SiteFile]:
    images = (image.name for image in list_images(settings.qemu.images))
    facts = install.derive(settings, site, images, bootstrap.slurm_user(site.text).uid)
    own = own_job_submit(settings)
    for name, content in install.render(settings, facts).items():
        if name != install.JOB_SUBMIT or own is None:
            yield SiteFile(settings.slurm.conf.with_name(name), content, install.FILES[name])
    yield SiteFile(settings.slurm.addresses_file(), install.ADDRESSES_HEAD, 0o644, begun=True)
    yield from _plugstack(settings)


def _plugstack(settings: Settings) -> Iterator[SiteFile]:
    """What loads the plugin for VMs inside jobs, where they are enabled and the plugin launches them."""
    if install.loads_plugin(settings.job_vms):
        text = files.signed(install.plugstack(settings.job_vms))
        yield SiteFile(settings.slurm.conf.with_name(install.PLUGSTACK), text, 0o644)


def _for_systemd(settings: Settings, config: Path, site: SiteConf) -> list[SiteFile]:
    network = ipaddress.IPv4Network(settings.network.subnet)
    sockets = (settings.socket.parent, users_socket(settings).parent, settings.slurm.inbox.parent)
    values = {
        "bridge_mac": bridge_mac(settings.network.gateway),
        "bridge_address": f"{settings.network.gateway}/{network.prefixlen}",
        "run_directories": _below_run(*sockets, *_agent_directories(settings)),
        "inbox": settings.slurm.inbox,
        # As a number: the name service may not answer yet when the directory is made.
        "slurm_uid": bootstrap.slurm_user(site.text).uid,
        "state": settings.state_dir,
    }
    targets = {SERVICE: SYSTEMD / SERVICE, "tmpfiles.conf": TMPFILES / "multiverse.conf"}
    found = _render(settings, config, targets, values)
    # The unit of an agent that is there from earlier settings is one of ours, which a removal takes away.
    return [file for file in found if is_host(settings) or file.path.name != AGENT_SERVICE or file.path.exists()]


def _render(
    settings: Settings, config: Path, targets: Mapping[str, Path], values: Mapping[str, object]
) -> list[SiteFile]:
    """Our templates, by name, at their places: those of the bridge and the agent, and `targets`."""
    units = {AGENT_SERVICE: SYSTEMD / AGENT_SERVICE, BRIDGE_SERVICE: SYSTEMD / BRIDGE_SERVICE}
    common = {
        "program": program(),
        "config": config,
        "bridge": settings.qemu.bridge,
        "uplink": settings.qemu.uplink,
        "bridge_service": BRIDGE_SERVICE,
        "agent_service": AGENT_SERVICE if is_host(settings) else "",
    }
    environment = Environment(
        loader=PackageLoader("multiverse.site"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return [
        SiteFile(path, files.signed(environment.get_template(name).render({**common, **values})), 0o644)
        for name, path in {**units, **targets}.items()
    ]


def program() -> Path:
    """The `multiverse` of the Python environment that runs this code."""
    return Path(sys.executable).with_name("multiverse")


def bridge_mac(gateway: str) -> str:
    """The bridge's MAC address. A bridge without one takes the lowest of its ports, which may change at any time."""
    return mac_of_address(gateway)


def _agent_directories(settings: Settings) -> tuple[Path, ...]:
    jobs = (settings.job_vms.socket.parent, settings.job_vms.records) if settings.job_vms.enabled else ()
    return (settings.agent.socket.parent, *jobs)


def _below_run(*paths: Path) -> list[Path]:
    """All directories on the way to these paths that disappear with a reboot."""
    run = Path("/run")
    found = [each for path in paths for each in reversed((path, *path.parents)) if run in each.parents]
    return [*dict.fromkeys(found)]


# --- writing ----------------------------------------------------------------------------------------


class WriteOutcome(StrEnum):
    CREATED = "created"
    UNCHANGED = "unchanged"
    UPDATED = "updated"
    KEPT = "kept: it was changed here"  # the new file is beside it


def write(wanted: Iterable[SiteFile], root: Path, *, force: bool = False) -> Iterator[tuple[Path, WriteOutcome]]:
    """Write each file below `root`; yields where, and what was done. A file that we did not write stays, and the new
    one is beside it as NAME.new; with `force` it is overwritten. Raises `Refused` if a file cannot be written."""
    for file in wanted:
        path = root / file.path.relative_to("/")
        try:
            yield path, _write_one(file, path, force=force)
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot write {path}: {error}", hint="run as root, or choose another directory") from error


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write_one(file: SiteFile, path: Path, *, force: bool) -> WriteOutcome:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = path.read_text()
    except FileNotFoundError:
        files.replace(path, file.content, mode=file.mode)
        return WriteOutcome.CREATED
    if file.begun:
        return WriteOutcome.UNCHANGED
    if before != file.content and files.origin(before) is not Origin.RENDERED and not force:
        files.replace(beside(path), file.content, mode=file.mode)
        return WriteOutcome.KEPT
    beside(path).unlink(missing_ok=True)
    if (before, path.stat().st_mode & 0o7777) == (file.content, file.mode):
        return WriteOutcome.UNCHANGED
    files.replace(path, file.content, mode=file.mode)
    return WriteOutcome.UPDATED
