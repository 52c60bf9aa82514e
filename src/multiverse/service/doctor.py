"""All that can be examined of a site from the controller's machine, or of a host from that host, before and after
installation: what the scheduler and the platforms examine of themselves, and all hosts through the daemon. Every
finding says what was seen, and has its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from multiverse.api import HostView, StatusView, decode
from multiverse.bundles.contract import Examination, platform_bundles, scheduler_bundle
from multiverse.client import Client
from multiverse.config import Settings, folded, is_host, web_address
from multiverse.core.errors import MultiverseError
from multiverse.ports.site import Finding, Level
from multiverse.service.lab_advice import in_lab, lab_of
from multiverse.site import checking
from multiverse.site.checking import tried
from multiverse.site.machine import note, problem
from multiverse.system.processes import unreachable


def examine(settings: Settings, config: Path, source: Path, *, kvm: bool = True) -> Iterator[Examination]:
    """Examine the controller's machine and its site, or a lab; `source` is its scheduler's configuration. With `kvm`
    small guests are run, for seconds. Blocks."""
    lab = lab_of(config)
    yield Examination("settings", tuple(tried(partial(_settings_file, config))))
    own = _of_controller(settings, config, source)
    own = own if lab is None else _of_lab(lab, own)
    yield from _advised(lab, chain(own, _as_host(settings, kvm=kvm), _through_the_daemon(settings, kvm=kvm)))


def examine_before(settings: Settings, config: Path, source: Path, *, kvm: bool = True) -> Iterator[Examination]:
    """Examine what the controller's machine lacks before anything is installed."""
    yield Examination("settings", tuple(tried(partial(_settings_file, config))))
    files = scheduler_bundle(settings).files
    if files is not None:
        yield from files.before(settings, source)
    yield from _as_host(settings, kvm=kvm)


def examine_agent(settings: Settings, config: Path, *, kvm: bool = True, before: bool = False) -> Iterator[Examination]:
    """Examine a host that runs an agent and no controller; `before` anything is installed, without the agent."""
    lab = lab_of(config)
    if lab is not None and not before:
        found = tuple(tried(lambda: checking.check_network_and_agent(settings)))
        yield from _of_lab(lab, [Examination("agent", found)])
    elif not before:
        yield Examination("agent", tuple(tried(lambda: checking.check_agent(settings, config))))
    yield from _advised(lab, _of_platforms(settings, kvm=kvm))


def _of_controller(settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
    yield from scheduler_bundle(settings).examine(settings, config, source)
    yield Examination("ports of the daemon", tuple(_ports(settings)))


def _as_host(settings: Settings, *, kvm: bool) -> Iterator[Examination]:
    """Examine the controller's machine as a host, if it is one."""
    if is_host(settings):
        yield from _of_platforms(settings, kvm=kvm)
    else:
        yield Examination("this machine as a host", skipped="the settings do not name it among the hosts")


def _of_platforms(settings: Settings, *, kvm: bool) -> Iterator[Examination]:
    """Examine this machine as a host."""
    for bundle in platform_bundles(settings).values():
        yield from bundle.examine(settings, run_guests=kvm)


def _settings_file(config: Path) -> Iterator[Finding]:
    if not config.exists():
        yield note(
            str(config),
            "there are no settings yet, so the defaults were examined",
            "write them (docs/install.md), or give the file with --config",
        )


def _ports(settings: Settings) -> Iterator[Finding]:
    """Whether the daemon listens where users and the reverse proxy look for it."""
    users = settings.users
    if users.enabled and users.listen and (why := unreachable(users.listen, users.port)):
        yield problem(
            f"{users.listen}:{users.port}",
            f"users of other machines ask there, and nobody answers: {why}",
            "start the daemon, or see users.listen in the settings",
        )
    web = web_address(settings.web.listen) if settings.web.listen else None
    if web and (why := unreachable(*web)):
        yield problem(
            settings.web.listen,
            f"the web page is to be there, and nobody answers: {why}",
            "start the daemon, or see web.listen in the settings",
        )


# --- a lab ----------------------------------------------------------------------------------------


_OF_SITES = re.compile(r"systemctl|systemd|multiverse site|^start |restart slurmctld|scontrol reconfigure")
"""In the remedies that begin with a site's services and files."""


def _advised(lab: Path | None, found: Iterable[Examination]) -> Iterator[Examination]:
    """The same, with the advice for a lab's user if it is a lab."""
    if lab is None:
        yield from found
        return
    for one in found:
        yield replace(one, findings=tuple(each._replace(remedy=in_lab(lab, each.remedy)) for each in one.findings))


def _of_lab(lab: Path, found: Iterable[Examination]) -> Iterator[Examination]:
    """What was examined of a lab, which has no files in /etc and no services of systemd. A site's remedies would
    install these, and `lab up` writes a lab's files and starts its services."""
    why = f"this is the lab in {lab}: multiverse lab up writes its files and starts its services"
    yield Examination("files and services of a site", skipped=why)
    remedy = f"multiverse lab up --dir {lab}, and see {lab}/log"
    for one in found:
        if one.name != checking.FILES:
            own = (each._replace(remedy=remedy) if _OF_SITES.search(each.remedy) else each for each in one.findings)
            yield replace(one, findings=tuple(own))


# --- through the daemon ----------------------------------------------------------------------------


def _through_the_daemon(settings: Settings, *, kvm: bool) -> Iterator[Examination]:
    """What the daemon knows of all hosts and of itself."""
    try:
        with Client(settings.socket) as client:
            hosts, status = decode(list[HostView], client.hosts()), decode(StatusView, client.status())
    except MultiverseError as error:
        yield Examination("hosts and alerts", skipped=f"{error.message}; see daemon")
        return
    for host in hosts:
        yield Examination(f"host {host.name}", tuple(of_host(host, settings.host.name, kvm=kvm)))
    yield Examination("CPUs of hosts between which VMs move", tuple(of_cpus(hosts)))
    yield Examination("alerts", tuple(of_status(status)))


def of_host(host: HostView, own: str = "", *, kvm: bool = True) -> Iterator[Finding]:
    """What the daemon says of a host that is not as it should be. `own`: the name of this machine as a host, on which
    KVM was tried with `kvm`."""
    if host.state != "up" or not host.reachable:
        said = "; ".join(filter(None, (host.reason, host.why))) or f"its state is {host.state}"
        level = Level.NOTE if host.reachable and host.state in ("closing", "draining", "drained") else Level.PROBLEM
        remedy = host.todo or f"multiverse hosts resume {host.name}"
        yield Finding(level, f"host {host.name}", f"it is {host.state}: {said}", remedy)
    elif not host.images:
        yield problem(
            f"host {host.name}",
            "it has no image, so no VM can be made there",
            f"multiverse image push NAME {host.name}, or set image.source",
        )
    elif host.lacks:
        yield note(
            f"images of {host.name}",
            f"it has no image {', '.join(host.lacks)}, so no job of that image starts there",
            f"it is copied there once a job waits for it, if the controller's machine has it: multiverse image list; "
            f"at once: multiverse image push {host.lacks[0]} {host.name}",
        )
    if host.accelerator == "tcg" and not (host.name == own and kvm):  # or else the machine's own examination says why
        where = "on that host: multiverse doctor --agent"
        if host.name == own:
            where = "here: multiverse doctor, without --no-kvm"
        yield note(
            f"KVM on {host.name}",
            "its guests are emulated, several times slower than on KVM",
            f"see why, {where}; if it has no KVM, no action is needed",
        )
    if host.machine is not None and host.declared.memory > host.machine.memory:
        yield problem(
            f"memory of {host.name}",
            f"{host.declared.memory} MiB are declared for VMs, but the machine has {host.machine.memory} MiB",
            f"set memory = {host.machine.memory} or less in [host], or in the host's class",
        )


def of_cpus(hosts: Sequence[HostView]) -> Iterator[Finding]:
    """Hosts between which no VM moves because it has the host's own CPU, or a model that not all of them run."""
    models: dict[str, list[str]] = {}
    for host in hosts:
        if host.common_cpu:
            models.setdefault(host.common_cpu, []).append(host.name)
    for model, names in models.items():
        yield note(
            f"CPUs of {folded(names)}",
            "VMs do not move between all of these hosts, because not all VMs can have the same CPU there",
            f'set cpu = "{model}" in [qemu] on all of them: it is the newest model that they all run',
        )


def of_status(status: StatusView) -> Iterator[Finding]:
    for alert in status.alerts:
        level = Level.NOTE if alert.kind == "unserved" else Level.PROBLEM
        yield Finding(level, f"{alert.kind} {alert.name}", alert.message, alert.remedy)
