"""What is missing or different on a site's machine, each with its remedy."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pyroute2 import IPRoute

from multiverse.config import Settings, host_names, is_host, site_cpus, vxlan_address
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import bootstrap, conf, gate, install, requirements
from multiverse.drivers.slurm.site.conf import SiteConf
from multiverse.images.catalog import list_images
from multiverse.ports.site import Finding, Level
from multiverse.site.machine import note, problem
from multiverse.site.rendering import AGENT_SERVICE, SERVICE, own_job_submit, render, render_agent
from multiverse.system.files import Origin, SiteFile, origin

FILES = "files"  # the part that compares the files that a site installs
_UNIT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # systemd's, of services (systemd.exec(5))
_RENDER = "run multiverse site render /"
_INTERFACES = Path("/sys/class/net")
_ETC = Path("/etc")
_START_BRIDGE = "systemctl enable multiverse-bridge and systemctl restart multiverse-bridge"


PATIENCE = 5.0  # seconds
NO_ANSWER = "slurmctld does not answer"

Part = Callable[[], Iterable[Finding]]  # a part of an examination


def check(settings: Settings, config: Path, slurm_conf: Path) -> list[Finding]:
    """All findings, in the order in which an administrator should deal with them. Blocks: asks slurmctld and the name
    service. Raises `Broken` if slurm.conf cannot be read."""
    site = conf.read(slurm_conf)
    found = [each for part in parts(settings, config, site, release_of(settings)).values() for each in tried(part)]
    return [*dict.fromkeys(found)]


def release_of(settings: Settings) -> requirements.Version:
    """The release of Slurm's commands here. Raises `Unknown` or `Refused` if they cannot be run."""
    return requirements.version(asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "--version")))


def parts(settings: Settings, config: Path, site: SiteConf, release: requirements.Version) -> dict[str, Part]:
    """What `check` examines, by name, in order."""
    return {
        "slurm.conf": lambda: requirements.examine(settings, site, release),
        FILES: lambda: [*_differences(render(settings, config, site)), *_clients(settings, release)],
        "job_submit.lua and epilog": lambda: _scripts(settings, site),
        "inbox, bridge, image and munge key": lambda: _machine(settings, site),
        "slurmctld": lambda: _slurmctld(settings, site),
        "daemon": lambda: _daemon(settings),
    }


def tried(part: Part) -> list[Finding]:
    """The findings of a part. What could not be examined is one, too."""
    try:
        return [*part()]
    except MultiverseError as error:
        return [problem("check", error.message, error.hint or "see the message")]


def check_agent(settings: Settings, config: Path) -> list[Finding]:
    """All findings on a host that runs an agent and no controller."""
    return [*_differences(render_agent(settings, config)), *check_network_and_agent(settings)]


def check_network_and_agent(settings: Settings) -> Iterator[Finding]:
    """The findings on such a host that are not of its files."""
    if not is_host(settings):
        yield problem(
            "hosts",
            f"no class of hosts in the settings names {settings.host.name}: it has the values of [host]",
            "add it to the nodes of a class, or set host.name if the site knows it by another name",
        )
    bridge, uplink = settings.qemu.bridge, settings.qemu.uplink
    if not (_INTERFACES / bridge / "bridge").exists():
        yield problem(bridge, f"there is no bridge {bridge}", f"run {_START_BRIDGE}")
    elif uplink and not (_INTERFACES / bridge / "brif" / uplink).exists():
        yield problem(bridge, f"{uplink} is no port of the bridge {bridge}", f"run {_START_BRIDGE}")
    yield from _vxlan(settings, [settings.host.name])
    yield from _answers(settings.agent.socket, AGENT_SERVICE, "the agent")


def _vxlan(settings: Settings, names: Iterable[str]) -> Iterator[Finding]:
    """A finding for each of these machines without an address in the network of the hosts, if there is a VXLAN."""
    for name in names if settings.vxlan.enabled else ():
        try:
            vxlan_address(settings, name)
        except Refused as error:
            yield problem("vxlan", error.message, error.hint)


def _answers(path: Path, service: str, who: str) -> Iterator[Finding]:
    """A finding if nothing listens at the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            name = service.removesuffix(".service")
            yield problem(
                service,
                f"{who} does not answer at {path}: {error.strerror or error}",
                f"run systemctl enable --now {name}, and see journalctl -u {name}",
            )


def _differences(wanted: Iterable[SiteFile]) -> Iterator[Finding]:
    for file in wanted:
        if (message := _difference(file)) is not None:
            yield problem(str(file.path), *message)


def _difference(file: SiteFile) -> tuple[str, str] | None:
    """What is wrong with a file on this machine, and the remedy; None if it is as rendered."""
    try:
        text = file.path.read_text()
    except FileNotFoundError:
        return "the file is missing", f"{_RENDER}, then {_after_change(file, '')}"
    except (OSError, UnicodeDecodeError) as error:
        return f"the file cannot be read: {error}", "run this command as root"
    if text == file.content or file.begun:
        if file.path.stat().st_mode & file.mode == file.mode:
            return None
        return f"the file has not the mode {file.mode:o}", f"chmod {file.mode:o} {file.path}"
    if origin(text) is Origin.RENDERED:
        return "the file is of other settings or of another release", f"{_RENDER}, then {_after_change(file, text)}"
    return (
        "the file was changed here, and differs from what the settings and slurm.conf need",
        f"{_RENDER}: it writes {file.path.name}.new beside the file; apply the difference, then run "
        "multiverse site render / --force",
    )


def _after_change(file: SiteFile, before: str) -> str:
    """What makes a changed file take effect."""
    path = file.path
    if path.suffix == ".lua":
        return f"touch {path.with_name(install.JOB_SUBMIT)}"
    if path.suffix == ".service":
        return f"systemctl daemon-reload and restart {path.name}"
    if path.parent.name == "tmpfiles.d":
        return f"systemd-tmpfiles --create {path}"
    if file.begun or path.name in (install.EPILOG, install.CLIENT):
        return "nothing else"
    return "run scontrol reconfigure" if conf.same_nodes(before, file.content) else "restart slurmctld"


def _clients(settings: Settings, release: requirements.Version) -> Iterator[Finding]:
    """Whether users' commands on this machine find VMs, where Slurm forgets these."""
    path = settings.slurm.addresses_file()
    closed = next((one for one in path.parents if one.is_dir() and not one.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None:
        yield problem(
            str(path),
            f"users cannot pass through {closed}, and their commands have to read {path.name}",
            f"chmod o+x {closed}, or set slurm.addresses in the settings",
        )
    client = settings.slurm.conf.with_name(install.CLIENT)
    has_it = os.environ.get("SLURM_CONF") == str(client) or any(client.name in each for each in _login_texts())
    if requirements.forgets_addresses(release) and not has_it:
        yield note(
            client.name,
            f"after a restart of slurmctld, Slurm {release} does not tell users on this machine where the VMs of "
            "running jobs are: srun --jobid, salloc and sattach do not reach these",
            "if users log in here, put this line into /etc/profile.d/multiverse.sh, and see docs/slurm.md: "
            f'[ "$(id -u)" = 0 ] || export SLURM_CONF={client}',
        )


def _login_texts() -> Iterator[str]:
    """The files from which the shells of users who log in have variables, usually."""
    names = ("profile", "environment", "bash.bashrc", "bashrc")
    for path in (*(_ETC / name for name in names), *sorted((_ETC / "profile.d").glob("*.sh"))):
        with suppress(OSError):
            yield path.read_text(errors="replace")


def _scripts(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    own = own_job_submit(settings)
    path = settings.slurm.conf.with_name(install.JOB_SUBMIT)
    if own is not None and not conf.is_ours(own):
        yield problem(
            str(path),
            "the site's own job_submit.lua does not call Multiverse's, so jobs are not sent to the gate",
            f"add these two lines before its last return:\n{install.hook_lines(settings).rstrip()}",
        )
    programs = requirements.epilogs(site)
    ours = settings.slurm.conf.with_name(install.EPILOG)
    if programs and not any(_calls_epilog(Path(program), ours) for program in programs):
        yield note(
            programs[0],
            "the site's EpilogSlurmctld does not call Multiverse's, so VMs are removed up to a poll interval later",
            f"add the line to this script: {ours} || true",
        )


def _calls_epilog(program: Path, ours: Path) -> bool:
    try:
        return program == ours or conf.is_ours(program.read_text())
    except (OSError, UnicodeDecodeError):
        return False


def _machine(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """What this machine needs: SlurmUser's access, the bridge, an image, the munge key, Slurm's commands."""
    reason = bootstrap.why_not_writable(settings.slurm.inbox, bootstrap.slurm_user(site.text))
    if reason is not None:
        yield problem(
            str(settings.slurm.inbox),
            f"slurmctld cannot write hints and take offers: {reason}",
            "run systemd-tmpfiles --create /etc/tmpfiles.d/multiverse.conf, and see the directories above",
        )
    if not has_address(settings.qemu.bridge, settings.network.gateway):
        yield problem(
            settings.qemu.bridge,
            f"there is no bridge {settings.qemu.bridge} with the address {settings.network.gateway}",
            f"run {_START_BRIDGE}",
        )
    machines = (settings.host.name, *host_names(settings), *gate.leased_nodes(settings, site))
    yield from _vxlan(settings, dict.fromkeys(machines))
    if settings.image.default not in {image.name for image in list_images(settings.qemu.images)}:
        yield problem(
            settings.image.default,
            f"there is no image {settings.image.default} in {settings.qemu.images}",
            f"multiverse image build slim --name {settings.image.default} --images {settings.qemu.images}",
        )
    yield from munge_key(settings)
    directory = settings.slurm.bin_dir
    if not shutil.which("scontrol", path=str(directory) if directory else _UNIT_PATH):
        where = Path(shutil.which("scontrol") or "/opt/slurm/bin/scontrol").parent
        yield problem(
            "scontrol",
            "the daemon's service does not find Slurm's commands",
            f'set bin_dir = "{where}" in [slurm] of the settings',
        )


def munge_key(settings: Settings) -> Iterator[Finding]:
    if not os.access(settings.slurm.munge_key, os.R_OK):
        yield problem(
            str(settings.slurm.munge_key),
            "the munge key cannot be read, and nodes in VMs need it",
            "set slurm.munge_key in the settings",
        )


def has_address(bridge: str, address: str) -> bool:
    with IPRoute() as ip:
        links = ip.link_lookup(ifname=bridge)
        found = ip.get_addr(family=socket.AF_INET, index=links[0]) if links else ()
        return address in {each.get_attr("IFA_ADDRESS") for each in found}


def asking(settings: Settings) -> SlurmCommands:
    """Slurm's commands for an examination. They wait no longer than `PATIENCE` for slurmctld: scontrol itself tries for
    most of a minute."""
    slurm = settings.slurm
    return SlurmCommands(replace(slurm, command_timeout=min(slurm.command_timeout, PATIENCE)))


def _slurmctld(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Whether the running slurmctld has read the files."""
    commands = asking(settings)
    try:
        shown = asyncio.run(commands.run("scontrol", "show", "config"))
    except Unknown as error:
        yield problem("slurmctld", f"{NO_ANSWER}: {error.message}", "start slurmctld; if it runs, see its log")
        return
    match = re.search(r"^MaxNodeCount\s*=\s*(\d+)", shown, re.MULTILINE)
    configured = site.number("MaxNodeCount") or 0
    if match and int(match[1]) < requirements.nodes_needed(site_cpus(settings), site) <= configured:
        yield problem("slurmctld", f"slurmctld still has MaxNodeCount {match[1]}", "restart slurmctld")
    partition = settings.slurm.partition
    try:
        asyncio.run(commands.run("scontrol", "show", "partition", partition))
    except (Gone, Refused):
        message = f"slurmctld does not know the partition {partition}"
        yield problem("slurmctld", message, "run scontrol reconfigure")


def _daemon(settings: Settings) -> Iterator[Finding]:
    """Whether the daemon answers, and has made the reservation without which no job can be submitted."""
    if silent := [*_answers(settings.socket, SERVICE, "the daemon")]:
        yield from silent
        return
    gate = settings.slurm.gate_feature
    try:
        shown = asyncio.run(asking(settings).run("scontrol", "show", "reservation", "--oneliner"))
    except Unknown:  # `_slurmctld` tells of that
        return
    if f"ReservationName={gate} " not in shown:
        yield problem(
            f"reservation {gate}",
            f"no job can be submitted to partition {settings.slurm.partition}, because the reservation is missing",
            "wait: the daemon makes it within a minute; if it does not, see journalctl -u multiverse",
        )


def is_ready(found: list[Finding]) -> bool:
    """Whether jobs in VMs can run: there are notes only."""
    return all(each.level is Level.NOTE for each in found)
