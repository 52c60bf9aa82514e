"""What `multiverse doctor` examines of a site's Slurm, from the controller's machine.

`multiverse site check` is a part of it: what a site still lacks. Beside that: whether releases go together, what of the
site's own would catch VMs, names, slurmctld's port and munge.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from multiverse.bundles.contract import Examination
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import conf, requirements
from multiverse.drivers.slurm.site.conf import SiteConf, munge_socket
from multiverse.images.catalog import list_images, package_version
from multiverse.ports.finding import Finding, Level
from multiverse.site import checking, machine_facts
from multiverse.site.checking import Part, tried
from multiverse.system.sockets import unreachable

SLURMCTLD_PORT = 6817  # Slurm's own default (slurm.conf(5))
SLOW_NAMES = 1.0
"""Seconds for one name from which on the name service is called slow: slurmctld asks it while it holds its locks."""


def examine(settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
    try:
        site = conf.read(source)
    except MultiverseError as error:
        yield _broken("slurm.conf", error)
    else:
        yield from _of_slurm(settings, config, site)
    yield Examination("munge", tuple(tried(partial(_munge, settings))))


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
        "node sets": lambda: requirements.node_sets(settings.slurm, site),
        "reservations": lambda: _reservations(settings),
        "name service": lambda: names(site),
        "port of slurmctld": lambda: _slurmctld_port(settings, site),
    }
    for name, part in more.items():
        yield Examination(name, tuple(tried(part)))


def _guests(settings: Settings) -> Iterator[Finding]:
    """Whether the slurmctld that runs accepts the slurmd of each image. Raises `Unknown` if none answers."""
    shown = asyncio.run(SlurmCommands(settings.slurm).run("scontrol", "show", "config"))
    found = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", shown, re.MULTILINE)
    running = requirements.version(f"slurm {found[1] if found else ''}")
    images = list_images(settings.qemu.images)
    yield from requirements.guests(running, {image.name: package_version(image.disk, "slurmd") for image in images})


def _reservations(settings: Settings) -> Iterator[Finding]:
    commands = SlurmCommands(settings.slurm)
    shown = asyncio.run(commands.run("scontrol", "show", "reservation", "--oneliner"))
    yield from requirements.reservations(settings.slurm, shown)


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


def _slurmctld_port(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Whether slurmctld listens where guests look for it."""
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


def _munge(settings: Settings) -> Iterator[Finding]:
    where = munge_socket(settings.slurm.conf)
    if problem := machine_facts.munge_problem(where):
        yield Finding(
            Level.PROBLEM,
            "munge",
            f"no credential can be made and decoded here: {problem}",
            "start munged (systemctl enable --now munge), with the key of the cluster",
        )


def _broken(name: str, error: MultiverseError) -> Examination:
    return Examination(name, (Finding(Level.PROBLEM, name, error.message, error.hint or "see the message"),))
