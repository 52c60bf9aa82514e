"""All that can be examined of a site from the controller's machine, or of a host from that host, before and after
installation. `multiverse site check` is a part of it: what a site still lacks. Beside that: whether releases go
together, what of the site's own would catch VMs, names, ports, munge, this machine as a host, and all hosts through the
daemon. Every finding says what was seen, and has its remedy.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from multiverse.api import HostView, StatusView, decode
from multiverse.client import Client
from multiverse.config import Settings, host_names, web_address
from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm import catches, conf, requirements, site_conf
from multiverse.drivers.slurm.auth import munge_socket
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.finding import Finding, Level
from multiverse.drivers.slurm.site_conf import SiteConf
from multiverse.images.catalog import list_images
from multiverse.images.installed import package_version
from multiverse.site import checking, examine_machine, machine_facts
from multiverse.site.checking import Part, tried

SLURMCTLD_PORT = 6817
"""Slurm's own default (slurm.conf(5))."""

SLOW_NAMES = 1.0
"""Seconds for one name from which on the name service is called slow: slurmctld asks it while it holds its locks."""

_TIMEOUT = 3.0  # seconds for a connection


@dataclass(frozen=True, slots=True)
class Examination:
    """One thing that was examined, and what was found. `skipped` is why it was not."""

    name: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""


def examine(settings: Settings, config: Path, slurm_conf: Path, *, kvm: bool = True) -> Iterator[Examination]:
    """Examine the controller's machine and its site. With `kvm` small guests are run, which takes seconds. Blocks."""
    yield Examination("settings", tuple(tried(partial(_settings_file, config))))
    try:
        site = site_conf.read(slurm_conf)
    except MultiverseError as error:
        yield _broken("slurm.conf", error)
    else:
        yield from _of_slurm(settings, config, site)
    yield Examination("munge", tuple(tried(partial(_munge, settings))))
    if settings.host.name in host_names(settings):
        yield from examine_host(settings, kvm=kvm)
    else:
        yield Examination("this machine as a host", skipped="the settings do not name it among the hosts")
    yield from _through_the_daemon(settings)


def examine_agent(settings: Settings, config: Path, *, kvm: bool = True) -> Iterator[Examination]:
    """Examine a host that runs an agent and no controller."""
    yield Examination("agent", tuple(tried(lambda: checking.check_agent(settings, config))))
    yield from examine_host(settings, kvm=kvm)


def examine_host(settings: Settings, *, kvm: bool = True) -> Iterator[Examination]:
    """Examine this machine as a host."""
    facts = machine_facts.of_machine(settings, kvm=kvm)
    for name, found in examine_machine.examine(settings, facts):
        skipped = "not tried" if name == "KVM runs guests" and facts.kvm is None else ""
        yield Examination(name, tuple(found), skipped)


def _broken(name: str, error: MultiverseError) -> Examination:
    return Examination(name, (Finding(Level.PROBLEM, name, error.message, error.hint or "see the message"),))


def _settings_file(config: Path) -> Iterator[Finding]:
    if not config.exists():
        yield Finding(
            Level.NOTE,
            str(config),
            "there are no settings yet, so the defaults were examined",
            "write them (docs/operations.md, On a site), or give the file with --config",
        )


# --- Slurm -----------------------------------------------------------------------------------------


def _of_slurm(settings: Settings, config: Path, site: SiteConf) -> Iterator[Examination]:
    try:
        release = checking.release_of(settings)
    except MultiverseError as error:
        yield _broken("Slurm's commands", error)
        return
    for name, part in checking.parts(settings, config, site, release).items():
        yield Examination(name, tuple(tried(part)))
    more: dict[str, Part] = {
        "slurmd in the guests": lambda: _guests(settings),
        "node sets": lambda: catches.node_sets(settings.slurm, site),
        "reservations": lambda: _reservations(settings),
        "name service": lambda: names(site),
        "ports": lambda: _ports(settings, site),
    }
    for name, part in more.items():
        yield Examination(name, tuple(tried(part)))


def _guests(settings: Settings) -> Iterator[Finding]:
    """Whether the slurmctld that runs accepts the slurmd of each image. Raises `Unknown` if none answers."""
    shown = asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "show", "config"))
    found = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", shown, re.MULTILINE)
    running = requirements.version(f"slurm {found[1] if found else ''}")
    images = list_images(settings.qemu.images)
    yield from catches.guests(running, {image.name: package_version(image.disk, "slurmd") for image in images})


def _reservations(settings: Settings) -> Iterator[Finding]:
    commands = SlurmCommands(settings.slurm)
    shown = asyncio.run(commands.run("scontrol", "show", "reservation", "--oneliner"))
    yield from catches.reservations(settings.slurm, shown)


def names(site: SiteConf) -> Iterator[Finding]:
    """Whether the name service knows the machines of slurmctld, and soon. SlurmUser is looked up with the inbox."""
    for one in conf.controllers(site.text):
        began = time.monotonic()
        try:
            socket.getaddrinfo(one.name, None)
        except OSError as error:
            yield Finding(
                Level.PROBLEM,
                f"SlurmctldHost={one.name}",
                f"the name service does not know {one.name}: {error.strerror or error}",
                f"add {one.name} to /etc/hosts or to DNS: getent hosts {one.name}",
            )
            continue
        if (took := time.monotonic() - began) > SLOW_NAMES:
            yield Finding(
                Level.NOTE,
                f"SlurmctldHost={one.name}",
                f"the name service took {took:.1f} s to find {one.name}",
                "make it answer faster, for example with /etc/hosts before dns in /etc/nsswitch.conf, or nscd",
            )


def _ports(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Whether slurmctld listens where guests look for it, and the daemon where users and the reverse proxy do."""
    port = int(site.value("SlurmctldPort", str(SLURMCTLD_PORT)).partition("-")[0])
    chosen = settings.slurm.controller_address
    addresses = [one.strip() for one in chosen.split(",")] if chosen else []
    if not chosen and checking.has_address(settings.qemu.bridge, settings.network.gateway):
        addresses = [settings.network.gateway]  # without the bridge there is a finding already
    problems = {address: why for address in addresses if (why := unreachable(address, port))}
    if addresses and len(problems) == len(addresses):
        for address, why in problems.items():
            yield Finding(
                Level.PROBLEM,
                f"{address}:{port}",
                f"guests look for slurmctld there, and nobody answers: {why}",
                "start slurmctld, let the firewall pass this port from the bridge, or set slurm.controller_address",
            )
    users = settings.users
    if users.enabled and users.listen and (why := unreachable(users.listen, users.port)):
        yield Finding(
            Level.PROBLEM,
            f"{users.listen}:{users.port}",
            f"users of other machines ask there, and nobody answers: {why}",
            "start the daemon, or see users.listen in the settings",
        )
    web = web_address(settings.web.listen) if settings.web.listen else None
    if web and (why := unreachable(*web)):
        yield Finding(
            Level.PROBLEM,
            settings.web.listen,
            f"the web page is to be there, and nobody answers: {why}",
            "start the daemon, or see web.listen in the settings",
        )


def unreachable(address: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        with closing(socket.create_connection((address, port), _TIMEOUT)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _munge(settings: Settings) -> Iterator[Finding]:
    where = munge_socket(settings.slurm.conf)
    if problem := machine_facts.munge_problem(where):
        yield Finding(
            Level.PROBLEM,
            "munge",
            f"no credential can be made and decoded here: {problem}",
            "start munged (systemctl enable --now munge), with the key of the cluster",
        )


# --- through the daemon ----------------------------------------------------------------------------


def _through_the_daemon(settings: Settings) -> Iterator[Examination]:
    """What the daemon knows of all hosts and of itself."""
    try:
        with Client(settings.socket) as client:
            hosts, status = decode(list[HostView], client.hosts()), decode(StatusView, client.status())
    except MultiverseError as error:
        yield Examination("hosts and alerts", skipped=f"{error.message}; see daemon")
        return
    for host in hosts:
        yield Examination(f"host {host.name}", tuple(of_host(host, settings.host.name)))
    yield Examination("alerts", tuple(of_status(status)))


def of_host(host: HostView, own: str = "") -> Iterator[Finding]:
    """What the daemon says of a host that is not as it should be. `own`: the name of this machine as a host."""
    if host.state != "up" or not host.reachable:
        said = "; ".join(filter(None, (host.reason, host.why))) or f"its state is {host.state}"
        level = Level.NOTE if host.reachable and host.state in ("closing", "draining", "drained") else Level.PROBLEM
        remedy = host.todo or f"multiverse hosts resume {host.name}"
        yield Finding(level, f"host {host.name}", f"it is {host.state}: {said}", remedy)
    elif not host.images:
        yield Finding(
            Level.PROBLEM,
            f"host {host.name}",
            "it has no image, so no VM can be made there",
            f"multiverse image push NAME {host.name}, or set image.source",
        )
    if host.accelerator == "tcg":
        yield Finding(
            Level.NOTE,
            f"KVM on {host.name}",
            "its guests are emulated, several times slower than on KVM",
            f"see why, on that host: multiverse doctor{' --agent' if host.name != own else ''}",
        )
    if host.machine is not None and host.declared.memory > host.machine.memory:
        yield Finding(
            Level.PROBLEM,
            f"memory of {host.name}",
            f"{host.declared.memory} MiB are declared for VMs, but the machine has {host.machine.memory} MiB",
            "declare less memory in [host], or in the host's class",
        )


def of_status(status: StatusView) -> Iterator[Finding]:
    """The daemon's alerts."""
    for alert in status.alerts:
        level = Level.NOTE if alert.kind == "unserved" else Level.PROBLEM
        yield Finding(level, f"{alert.kind} {alert.name}", alert.message, alert.remedy)
