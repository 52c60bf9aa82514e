"""How the controller of a lab reaches the hosts by ssh: with keys that are in the lab's directory only."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabHost

PORT = 22

_SSHD_CONFIG = """# Written by `multiverse lab up`.
ListenAddress {address}
Port {port}
HostKey {etc}/ssh_host_key
AuthorizedKeysFile {etc}/authorized_keys
# Below /tmp, where everybody may write, sshd would accept no file. Only root can write to the lab's directory.
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
X11Forwarding no
PidFile none
"""

_SSH_CONFIG = """# Written by `multiverse lab up`. Use it as: ssh -F {where.ssh_config} HOST
{hosts}
Host *
    User root
    Port {port}
    IdentityFile {where.ssh}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {where.ssh}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    ControlMaster no
    ControlPath none
    ServerAliveInterval 15
    LogLevel ERROR
"""


def connect_command(where: Layout, remote: list[str]) -> list[str]:
    """`agent.connect` of the lab's controller, which runs the command `remote` on the host {host}."""
    quoted = [shlex.quote(word) for word in remote]  # the host's shell reads it
    return ["ssh", "-F", str(where.ssh_config), "-T", "-oClearAllForwardings=yes", "--", "{host}", *quoted]


def write(where: Layout, hosts: tuple[LabHost, ...]) -> None:
    """Make the keys that are missing, and write the files of ssh and of each host's sshd."""
    where.ssh.mkdir(exist_ok=True)
    where.ssh.chmod(0o700)
    own = _key(where.ssh / "key", "controller")
    known, places = [], []
    for host in hosts:
        etc = where.host(host.name).etc
        known.append(f"{host.address} {_key(etc / 'ssh_host_key', host.name)}")
        places.append(f"Host {host.name}\n    HostName {host.address}")
        (etc / "authorized_keys").write_text(own)
        # As the host sees it, this is in the lab's own etc.
        (etc / "sshd_config").write_text(_SSHD_CONFIG.format(address=host.address, port=PORT, etc=where.etc))
    (where.ssh / "known_hosts").write_text("".join(known))
    where.ssh_config.write_text(_SSH_CONFIG.format(where=where, hosts="\n".join(places), port=PORT))


def _key(path: Path, comment: str) -> str:
    """The public key of the key in that file, which is made if it is missing."""
    public = path.with_suffix(".pub")
    if not public.exists():
        path.unlink(missing_ok=True)  # incomplete, after an interruption
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
        try:
            subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            raise Broken(
                f"cannot make the key {path}: {error}", hint="install the lab's packages: make setup"
            ) from error
    return public.read_text()
