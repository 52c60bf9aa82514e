"""Lets the controller reach a host: a key that runs the host's agent and nothing else, and the settings of the site.

The controller writes a setup. The administrator's own way into the host, mostly ssh, brings it to `multiverse agent
trust` there. So who may do this is who may log in as root, and that ssh has checked which host it is.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from multiverse.agent.connection import command_of
from multiverse.config import Settings, load
from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.core.model.basics import number_of
from multiverse.ports.site import Finding
from multiverse.site.checking import check_agent, is_ready
from multiverse.site.installing import add, plan_agent, removals, stop, take_back
from multiverse.site.rendering import AGENT_SERVICE, BRIDGE_SERVICE, WriteOutcome, beside, program, write
from multiverse.system import files
from multiverse.system.files import Origin, SiteFile

_IDENTITY = "-oIdentityFile="
_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{60,80}={0,2}")
_START_WAIT, _POLL = 60.0, 0.5  # seconds for a new agent to answer, and between two looks


@dataclass(frozen=True)
class HostSetup:
    """What a controller sends to a host, as JSON. Neighbouring releases pass over fields that they do not know."""

    host: str  # as the controller calls it
    key: str  # the public key, in the format of authorized_keys
    settings: str  # the file
    mode: int  # of the file: commands in it may have passwords


_SETUP = TypeAdapter(HostSetup)


# --- on the controller ------------------------------------------------------------------------------


def setup_for(settings: Settings, host: str, config: Path) -> HostSetup:
    """The setup of a host, with the settings in the file `config`. The first one makes the key."""
    if host == settings.host.name:
        raise Refused(f"{host} is this machine", hint="its agent needs no key: systemctl enable --now multiverse-agent")
    text = config.read_text()
    whole = text if text.endswith("\n") else f"{text}\n"
    return HostSetup(host, _public_key(_key_file(settings)), whole, config.stat().st_mode & 0o777)


def send(setup: HostSetup, by: str, verb: str) -> None:
    """Run `multiverse agent VERB` on the host by the command `by`, in which {host} is its name. Its messages are shown.
    Raises `Refused`."""
    way = [word.replace("{host}", setup.host) for word in shlex.split(by)]
    command = [*way, "multiverse", "agent", verb]
    try:
        done = subprocess.run(command, input=_SETUP.dump_json(setup), check=False)
    except OSError as error:
        raise Refused(f"cannot start {way[0]}: {error.strerror}", hint="name another command with --by") from error
    if done.returncode:
        raise Refused(
            f"{shlex.join(command)} ended with {done.returncode}",
            hint="see above; the command needs root on that host, where multiverse-host has to be installed",
        )


def check_reached(settings: Settings, host: str) -> None:
    """Whether `agent.connect` reaches the agent, as the daemon will do it. Raises `Unknown`."""
    command = command_of(settings.agent.connect, host)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"{command[0]} ended with {done.returncode}"
        raise Unknown(
            f"the agent of {host} is not reached by agent.connect: {said}",
            hint=f"sshd on {host} has to let root in by a key (PermitRootLogin forced-commands-only is enough), and"
            f" root here has to know its host key by the name {host}; try {shlex.join(command)}",
        )


def fingerprint(key: str) -> str:
    """Of a public key, as ssh-keygen -l shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _key_file(settings: Settings) -> Path:
    for word in settings.agent.connect:
        if word.startswith(_IDENTITY):
            return Path(word.removeprefix(_IDENTITY))
    raise Refused(
        f"agent.connect has no word {_IDENTITY}FILE, so it is not known which key a host has to accept",
        hint="add that word, or put a line for your key into authorized_keys of the hosts, see docs/install.md",
    )


def _public_key(path: Path) -> str:
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _keygen("-q", "-t", "ed25519", "-N", "", "-C", "multiverse", "-f", str(path))
        return " ".join(_keygen("-y", "-f", str(path)).split()[:2])
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        hint = "run this command as root, where openssh-client is installed"
        raise Broken(f"cannot make or read the key {path}: {said.strip()}", hint=hint) from error


def _keygen(*words: str) -> str:
    argv = ["ssh-keygen", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


# --- on the host ------------------------------------------------------------------------------------


def received(data: bytes) -> HostSetup:
    """Raises `Refused` unless it is a setup."""
    try:
        found = _SETUP.validate_json(data)
    except ValidationError as error:
        raise Refused("this is no setup of a host", hint="run multiverse hosts connect on its machine") from error
    if not _KEY.fullmatch(found.key):
        raise Refused("the setup has no ed25519 key", hint="give agent.connect the IdentityFile of such a key")
    return found


def trust(setup: HostSetup, config: Path) -> Iterator[str | Finding]:
    """Have the controller's settings and key, and run the agent. Says what was done, and what is lacking then."""
    yield from _write(_settings_file(setup, config))
    settings = load(config)
    if settings.host.name != setup.host:
        raise Refused(
            f"the settings call this machine {settings.host.name}, and the controller calls it {setup.host}",
            hint="leave `name` out of [host] in the controller's settings, and name hosts as their host names are",
        )
    plan = plan_agent(settings, config)
    if plan.by_hand:
        raise Refused(plan.by_hand[0].message, hint=plan.by_hand[0].remedy)
    yield from _write(*plan.files)
    for addition in plan.additions:
        add(addition)
        yield f"changed: {addition.path}"
    keys = _authorized_keys()
    _set_keys(
        keys, f'command="{program()} agent --config {config} from-ssh",restrict {setup.key} multiverse\n', setup.key
    )
    yield f"the key {fingerprint(setup.key)} runs the agent, and nothing else: {keys}"
    _systemctl("daemon-reload")
    _systemctl("enable", BRIDGE_SERVICE, AGENT_SERVICE)
    _systemctl("restart", BRIDGE_SERVICE, AGENT_SERVICE)  # VMs go on; they may have been started with other settings
    began = time.monotonic()
    while not is_ready(found := check_agent(settings, config)) and time.monotonic() < began + _START_WAIT:
        time.sleep(_POLL)
    yield from found


def distrust(setup: HostSetup, config: Path) -> Iterator[str]:
    """Take back what `trust` has done. Raises `Refused` while there are VMs."""
    if config.exists():
        settings = load(config)
        vms = sorted(path.name for path in settings.qemu.vms.glob("mv*") if path.is_dir())
        if vms:
            raise Refused(
                f"{setup.host} has {number_of(len(vms), 'VM')}: {' '.join(vms[:8])}",
                hint=f"run multiverse hosts drain {setup.host} on the controller, and wait until the jobs have ended",
            )
        yield from (f"failed: {said}" for said in stop(settings, agent=True))
        for each in removals(settings, config, agent=True):
            yield f"{each.path}: {take_back(each) or 'removed'}"
        if files.origin(config.read_text()) is Origin.RENDERED:
            config.unlink()
            yield f"{config}: removed"
        else:
            yield f"{config}: it was not written by multiverse hosts connect, or was changed since, and stays"
        _systemctl("daemon-reload")
    keys = _authorized_keys()
    _set_keys(keys, "", setup.key)
    yield f"the key {fingerprint(setup.key)} is not accepted any more: {keys}"


def _settings_file(setup: HostSetup, config: Path) -> SiteFile:
    try:
        same = config.read_text() == setup.settings
    except (OSError, UnicodeDecodeError):
        same = False
    return SiteFile(config, setup.settings if same else files.signed(setup.settings), setup.mode)


def _write(*wanted: SiteFile) -> Iterator[str]:
    for path, outcome in write(wanted, Path("/")):
        if outcome is WriteOutcome.KEPT:
            yield f"{path}: it was changed here, and stays; the new content is in {beside(path)}"
        elif outcome is not WriteOutcome.UNCHANGED:
            yield f"{path}: {outcome}"


def _authorized_keys() -> Path:
    """That of root: with sudo, HOME may be that of another user."""
    return Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh/authorized_keys"


def _set_keys(path: Path, line: str, key: str) -> None:
    """Have this line in place of all with the key. A file or directory without anything in it goes."""
    try:
        before = path.read_text() if path.exists() else ""
        kept = [each for each in before.splitlines(keepends=True) if key.split()[1] not in each.split()]
        if kept and line:
            kept[-1] = kept[-1].rstrip("\n") + "\n"
        text = "".join([*kept, line])
        if text:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            mode = path.stat().st_mode & 0o7777 if path.exists() else 0o600
            files.replace(path.resolve(), text, mode=mode)
        elif path.exists():
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot change {path}: {error}", hint="run this command as root") from error


def _systemctl(*words: str) -> None:
    try:
        subprocess.run(["systemctl", *words], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise Broken(f"systemctl {' '.join(words)}: {said}", hint="see journalctl -xe on this host") from error
