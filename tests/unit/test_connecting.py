"""`multiverse hosts connect` and `disconnect`: what a controller brings to a host, and what becomes of it there."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multiverse.cli.commands import build
from multiverse.config import AgentSettings, load
from multiverse.core.errors import Refused, Unknown
from multiverse.site import connecting, installing, rendering

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is not installed")

SITE = '[[hosts]]\nnodes = "n[1-3]"\n[qemu]\nvms = "{0}/vms"\nimages = "{0}/images"\n[agent]\nconnect = {1}\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The controller's settings."""
    connect = ["ssh", f"-oIdentityFile={tmp_path}/ctl/ssh_key", "{host}", "multiverse", "agent", "dial-stdio"]
    (tmp_path / "ctl").mkdir()
    (tmp_path / "ctl/multiverse.toml").write_text(SITE.format(tmp_path, connect))
    (tmp_path / "ctl/multiverse.toml").chmod(0o640)
    return tmp_path / "ctl/multiverse.toml"


class HostMachine:
    """A host whose files are in a directory, and whose units are only noted."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.keys = top / "etc/multiverse/multiverse.toml", top / "root/.ssh/authorized_keys"
        self.units = top / "systemd"
        self.ran: list[tuple[str, ...]] = []
        (top / "root").mkdir()
        monkeypatch.setattr("socket.gethostname", lambda: "n2.example.org")
        monkeypatch.setattr(rendering, "SYSTEMD", self.units)
        monkeypatch.setattr(rendering, "TMPFILES", top / "tmpfiles.d")
        monkeypatch.setattr(rendering, "PACKAGED", {self.units: top / "lib", top / "tmpfiles.d": top / "lib"})
        monkeypatch.setattr(connecting, "_authorized_keys", lambda: self.keys)
        monkeypatch.setattr(connecting, "_systemctl", lambda *words: self.ran.append(words))
        monkeypatch.setattr(connecting, "check_agent", lambda *_: [])
        monkeypatch.setattr(installing.subprocess, "run", lambda argv, **_: self.ran.append(tuple(argv[1:])))

    def trust(self, setup: connecting.HostSetup) -> list[object]:
        return [*connecting.trust(setup, self.config)]

    def distrust(self, setup: connecting.HostSetup) -> list[str]:
        return [*connecting.distrust(setup, self.config)]

    def files(self) -> dict[Path, str]:
        top = self.config.parents[2]
        return {path: path.read_text() for one in ("etc", "root", "systemd", "tmpfiles.d")
                for path in sorted((top / one).rglob("*")) if path.is_file()}  # fmt: skip


@pytest.fixture
def setup(site: Path) -> connecting.HostSetup:
    return connecting.setup_for(load(site), "n2", site)


@pytest.fixture
def host(setup: connecting.HostSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostMachine:
    return HostMachine(tmp_path, monkeypatch)


def test_the_controller_makes_one_key_and_sends_only_its_public_half(site: Path) -> None:
    first, again = (connecting.setup_for(load(site), host, site) for host in ("n2", "n3"))
    assert first.key == again.key and connecting.received(connecting._SETUP.dump_json(first)) == first
    private = site.with_name("ssh_key")
    assert private.stat().st_mode & 0o777 == 0o600
    shown = subprocess.run(["ssh-keygen", "-l", "-f", private], capture_output=True, text=True, check=True).stdout
    assert connecting.fingerprint(first.key) in shown


def test_the_key_of_the_default_settings_is_beside_them() -> None:
    assert any(word == "-oIdentityFile=/etc/multiverse/ssh_key" for word in AgentSettings().connect)


def test_a_command_without_a_key_of_its_own_says_what_to_do(site: Path) -> None:
    settings = load(site)
    without = replace(settings, agent=replace(settings.agent, connect=("rsh", "{host}")))
    with pytest.raises(Refused) as caught:
        connecting.setup_for(without, "n2", site)
    assert "-oIdentityFile=FILE" in caught.value.message and "authorized_keys" in caught.value.hint
    with pytest.raises(Refused, match="is this machine"):
        connecting.setup_for(settings, settings.host.name, site)


def test_a_host_accepts_the_key_for_its_agent_alone_and_starts_it(
    host: HostMachine, setup: connecting.HostSetup
) -> None:
    host.keys.parent.mkdir(mode=0o700)
    host.keys.write_text("ssh-ed25519 AAAAadmin admin")
    host.trust(setup)
    own, ours = host.keys.read_text().splitlines()
    assert own == "ssh-ed25519 AAAAadmin admin"
    assert ours.endswith(f' agent --config {host.config} from-ssh",restrict {setup.key} multiverse')
    assert load(host.config).host.name == "n2" and host.config.stat().st_mode & 0o777 == 0o640
    units = (rendering.BRIDGE_SERVICE, rendering.AGENT_SERVICE)
    assert host.ran == [("daemon-reload",), ("enable", *units), ("restart", *units)]
    assert (host.units / rendering.BRIDGE_SERVICE).exists()


def test_twice_is_as_once_and_new_settings_replace_the_old_ones(host: HostMachine, setup: connecting.HostSetup) -> None:
    host.trust(setup)
    before = host.files()
    host.trust(setup)
    assert host.files() == before
    said = host.trust(replace(setup, settings=f"{setup.settings}[image]\ntmp_disk = 12000\n"))
    assert f"{host.config}: updated" in said and load(host.config).image.tmp_disk == 12000


def test_it_is_taken_back_by_its_opposite_also_twice(host: HostMachine, setup: connecting.HostSetup) -> None:
    before = host.files()
    host.trust(setup)
    assert host.files() != before
    host.distrust(setup)
    assert host.files() == before and not host.keys.parent.exists()
    assert ("disable", "--now", rendering.AGENT_SERVICE) in host.ran
    host.distrust(setup)
    assert host.files() == before


def test_other_keys_and_settings_of_the_administrators_stay(host: HostMachine, setup: connecting.HostSetup) -> None:
    host.keys.parent.mkdir(mode=0o700)
    host.keys.write_text("ssh-ed25519 AAAAadmin admin\n")
    host.config.parent.mkdir(parents=True)
    host.config.write_text(f"# Written by the configuration management.\n{setup.settings}")
    own = host.files()
    said = host.trust(setup)
    assert any("it was changed here, and stays" in str(one) for one in said)
    host.config.with_name("multiverse.toml.new").unlink()
    host.distrust(setup)
    assert host.files() == own


def test_settings_that_are_the_same_already_are_left_to_who_brought_them(
    host: HostMachine, setup: connecting.HostSetup
) -> None:
    host.config.parent.mkdir(parents=True)
    host.config.write_text(setup.settings)
    host.trust(setup)
    assert host.config.read_text() == setup.settings
    host.distrust(setup)
    assert host.config.read_text() == setup.settings


def test_a_host_with_vms_keeps_its_agent(host: HostMachine, setup: connecting.HostSetup, tmp_path: Path) -> None:
    host.trust(setup)
    before = host.files()
    (tmp_path / "vms/mvab12c-1").mkdir(parents=True)
    with pytest.raises(Refused) as caught:
        host.distrust(setup)
    assert "mvab12c-1" in caught.value.message and "drain n2" in caught.value.hint
    assert host.files() == before


def test_settings_that_name_another_machine_are_refused(host: HostMachine, setup: connecting.HostSetup) -> None:
    with pytest.raises(Refused) as caught:
        host.trust(replace(setup, settings=f'[host]\nname = "n1"\n{setup.settings}'))
    assert "call this machine n1" in caught.value.message and "[host]" in caught.value.hint
    assert not host.keys.exists() and host.ran == []


@pytest.mark.parametrize("data", [b"", b"{}", b"ssh-ed25519 AAAA"])
def test_what_is_no_setup_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="no setup"):
        connecting.received(data)


@pytest.mark.parametrize("key", ["", "ssh-rsa AAAA", 'ssh-ed25519 AAAA",command="sh', "ssh-ed25519 {}\nssh-ed25519 {}"])
def test_a_key_that_would_be_more_than_one_key_is_refused(setup: connecting.HostSetup, key: str) -> None:
    wrong = replace(setup, key=key.replace("{}", setup.key.split()[1]))
    with pytest.raises(Refused, match="no ed25519 key"):
        connecting.received(connecting._SETUP.dump_json(wrong))


def by(program: str) -> str:
    """A command that is given in place of ssh."""
    return shlex.join([sys.executable, "-c", program, "{host}"])


def connect(site: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(["hosts"]), ["hosts", *words, "--config", str(site)])
    return done.exit_code, f"{done.output}{done.exception}"


def test_the_setup_goes_by_the_command_that_is_given(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    monkeypatch.setattr(connecting, "check_reached", lambda _, host: reached.append(host))
    program = f"import sys; open('{tmp_path}/' + sys.argv[1], 'w').write(' '.join(sys.argv[2:]) + sys.stdin.read())"
    code, said = connect(site, "connect", "n[2-3]", "--by", by(program))
    assert code == 0 and reached == ["n2", "n3"], said
    assert "connected: n2\nconnected: n3\n" in said
    for name in reached:
        words, _, document = (tmp_path / name).read_text().partition("{")
        assert words == "multiverse agent trust"
        assert connecting.received(f"{{{document}".encode()).host == name
    assert connect(site, "disconnect", "n2", "--by", by(program))[0] == 0
    assert (tmp_path / "n2").read_text().startswith("multiverse agent distrust{")


def test_a_host_that_fails_is_named_and_the_others_are_connected(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "check_reached", lambda *_: None)
    code, said = connect(site, "connect", "n1,n2,n3", "--by", by("import sys; sys.exit(sys.argv[1] == 'n2')"))
    assert code == 1 and "connected: n1\n" in said and "connected: n3\n" in said
    assert "agent trust ended with 1" in said and "failed: n2" in said


def test_a_host_that_the_settings_do_not_name_gets_no_key(site: Path) -> None:
    code, said = connect(site, "connect", "n4", "--by", by("import sys; sys.exit(7)"))
    assert code == 1 and "the settings name no host n4" in said and "[[hosts]]" in said
    assert not site.with_name("ssh_key").exists()


@pytest.mark.parametrize(("command", "said"), [("exit 0", ""), ("echo Host key unknown >&2; exit 255", "key unknown")])
def test_whether_the_daemon_will_reach_the_host_is_tried(site: Path, command: Sequence[str], said: str) -> None:
    settings = load(site)
    tried = replace(settings, agent=replace(settings.agent, connect=("sh", "-c", command, "{host}")))
    if not said:
        connecting.check_reached(tried, "n2")
        return
    with pytest.raises(Unknown) as caught:
        connecting.check_reached(tried, "n2")
    assert said in caught.value.message and "PermitRootLogin" in caught.value.hint
