"""What a key may do that is in authorized_keys as docs/hosts.md says: on a real sshd, over a pipe."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from multiverse.agent.connection import CommandTransport, command_of, other_command
from multiverse.config import AgentSettings
from multiverse.core.errors import Broken
from multiverse.images import transfer
from multiverse.images.catalog import Image, list_images, write_manifest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd needs root"),
    pytest.mark.skipif(not shutil.which("sshd", path="/usr/sbin"), reason="sshd is not installed"),
]

DOCUMENTED = re.compile(r'^command="/usr/bin/(multiverse .*)",restrict ssh-ed25519 ', re.MULTILINE)

SSHD = """
HostKey {at}/host_key
AuthorizedKeysFile {at}/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
PidFile none
"""

# In a mount namespace of its own: sshd wants its directory in /run, and an account whose password is not locked.
PROXY = (
    "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && sed 's/^root:[^:]*/root:*/' /etc/shadow > /run/shadow"
    " && mount --bind /run/shadow /etc/shadow && exec /usr/sbin/sshd -i -f {at}/sshd_config"
)


@pytest.fixture
def connect(tmp_path: Path) -> list[str]:
    """`agent.connect` as it is by default, with a key of its own and an sshd that ssh starts."""
    at = tmp_path / "ssh"
    at.mkdir()
    (tmp_path / "images").mkdir()
    settings = tmp_path / "multiverse.toml"
    settings.write_text(f'[agent]\nsocket = "{tmp_path}/agent.sock"\n[qemu]\nimages = "{tmp_path}/images"\n')
    for key in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(at / key)], check=True)
    found = DOCUMENTED.search((Path(__file__).parents[2] / "docs/hosts.md").read_text())
    assert found is not None
    program = f"{sys.executable} -c 'import multiverse.cli.main as m; m.main()'"
    forced = found[1].replace("multiverse agent", f"{program} agent --config {settings}")
    (at / "authorized_keys").write_text(f'command="{forced}",restrict {(at / "key.pub").read_text()}')
    (at / "sshd_config").write_text(SSHD.format(at=at))
    (at / "known_hosts").write_text(f"n1 {(at / 'host_key.pub').read_text()}")
    proxy = shlex.join(["unshare", "--mount", "sh", "-c", PROXY.format(at=at)]).replace("%", "%%")
    (at / "ssh_config").write_text(
        f"Host n1\n User root\n IdentityFile {at}/key\n IdentitiesOnly yes\n IdentityAgent none\n"
        f" UserKnownHostsFile {at}/known_hosts\n ProxyCommand {proxy}\n"
    )
    ssh, *more = AgentSettings().connect
    return [ssh, "-F", str(at / "ssh_config"), *more]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket]:
    """Where the agent of the host listens."""
    with closing(socket(AF_UNIX)) as listening:
        listening.bind(str(tmp_path / "agent.sock"))
        listening.listen()
        listening.settimeout(60)
        yield listening


@pytest.fixture
def tiny(tmp_path: Path) -> Image:
    image = Image("tiny", "slim", "k", "b", tmp_path / "tiny", "quiet", "6.1", "bookworm")
    image.path.mkdir()
    for file in (image.kernel, image.initrd, image.disk):
        file.write_bytes(secrets.token_bytes(1 << 16))
    write_manifest(image, image.path)
    return image


async def test_the_key_reaches_the_agent(connect: list[str], agent: socket) -> None:
    stream = await CommandTransport(command_of(connect, "n1")).open()
    try:
        stream.writer.write(b"a question\n")
        with closing((await asyncio.to_thread(agent.accept))[0]) as served:
            assert await asyncio.to_thread(served.recv, 100) == b"a question\n"
            served.sendall(b"an answer\n")
            assert await stream.reader.readline() == b"an answer\n"
    finally:
        assert await stream.close() == ""


def test_images_are_copied_with_the_key(connect: list[str], tiny: Image, tmp_path: Path) -> None:
    command = other_command(connect, "n1", "receive-image")
    assert transfer.send(tiny, command) is True
    (got,) = list_images(tmp_path / "images")
    assert got.name == "tiny" and got.disk.read_bytes() == tiny.disk.read_bytes()
    assert transfer.send(tiny, command) is False


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "touch {0}",
        "multiverse agent dial-stdio; touch {0}",
        "multiverse agent dial-stdio --socket /run/docker.sock",
        "multiverse agent receive-image tiny 0123; touch {0}",
        "multiverse agent receive-image tiny $(touch\t{0})",
        "multiverse agent receive-image ../tiny 0123",
        "multiverse agent from-ssh",
    ],
)
def test_nothing_else_is_done_with_the_key(connect: list[str], asked: str, tmp_path: Path) -> None:
    *way, _, _, _ = command_of(connect, "n1")
    words = [asked.format(tmp_path / "harm")] if asked else []
    done = subprocess.run([*way, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "multiverse: " in done.stderr and "  next: " in done.stderr
    assert not (tmp_path / "harm").exists() and list(tmp_path.glob("images/[!.]*")) == []


def test_a_key_that_runs_something_else_is_named_as_the_cause(connect: list[str], tiny: Image, tmp_path: Path) -> None:
    keys = tmp_path / "ssh/authorized_keys"
    keys.write_text('command="true"' + keys.read_text()[keys.read_text().index(",restrict") :])
    with pytest.raises(Broken) as caught:
        transfer.send(tiny, other_command(connect, "n1", "receive-image"))
    assert "ended with 0" in str(caught.value) and "authorized_keys" in caught.value.hint
