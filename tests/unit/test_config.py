"""Reading of settings. An error names each wrong key."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiverse import config
from multiverse.config import Settings, host_names, load, on_machine, parse, site_cpus
from multiverse.controller.policy import policy_of
from multiverse.core.errors import Refused
from multiverse.core.model.host import Overcommitment
from multiverse.core.model.identity import Mount
from multiverse.core.policy import Backfill
from multiverse.drivers.qemu.driver import host_config


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("")
    assert load(tmp_path / "m.toml") == Settings()


def test_values_are_read_into_their_types(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        '[host]\ncores = 8\n[[mounts]]\nsource = "a:/b"\ntarget = "/b"\n[slurm]\ninbox = "/run/x"\n'
    )
    got = load(tmp_path / "m.toml")
    assert got.host.cores == 8 and got.mounts == (Mount("a:/b", "/b"),) and got.slurm.inbox == Path("/run/x")


def test_a_lease_is_of_a_whole_node_unless_the_site_says_how_much() -> None:
    whole = parse({"lease": [{"partition": "physical", "become": ["sudo", "-n"]}]}, "x").lease[0]
    assert (whole.cpus, whole.memory, whole.become, whole.preemptable_ok) == (0, 0, ("sudo", "-n"), False)
    part = parse({"lease": [{"partition": "physical", "cpus": 4, "memory": 8192}]}, "x").lease[0]
    assert (part.cpus, part.memory) == (4, 8192)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"hots": {}}, "hots: no such key, did you mean host"),
        ({"hosts": [{"cores": 2}]}, "hosts.1.nodes"),
        ({"hosts": [{"nodes": "n[1-"}]}, "hosts.1.nodes: 'n[1-' is no node set"),
        ({"hosts": [{"nodes": ""}]}, "hosts.1.nodes: names no host"),
        ({"hosts": [{"nodes": "n1"}, {"nodes": "n1,-oProxyCommand=x"}]}, "hosts.2.nodes: '-oProxyCommand=x'"),
        ({"hosts": [{"nodes": "n[1-3]"}, {"nodes": "n[3-4]"}]}, "hosts: n3 in more than one place"),
        (
            {"hosts": [{"nodes": "n1", "overcommit": 0.5}]},
            "hosts.1.overcommit: must be at least 1",
        ),
        ({"hosts": [{"nodes": "n1", "run": "/run/" + "x" * 100}]}, "hosts.1: qemu.run"),
        ({"agent": {"connect": ["ssh", "n1"]}}, "agent.connect"),
        ({"lease": [{}]}, "lease.1.partition"),
        ({"lease": [{"partition": "a,b"}]}, "lease.1.partition: must be the name of one partition"),
        ({"lease": [{"partition": "p", "max": -1}]}, "lease.1.max: must be"),
        ({"lease": [{"partition": "p", "cpus": -1}]}, "lease.1.cpus: must be"),
        ({"lease": [{"partition": "p", "memory": 64}]}, "lease.1.memory: a whole node has all its memory"),
        ({"lease": [{"partition": "p", "idle": 0}]}, "lease.1.idle: must be above 0"),
        ({"lease": [{"partition": "p"}, {"partition": "p"}]}, "lease: two leases of one partition"),
        ({"host": {"core": 1}}, "host.core: no such key, did you mean cores"),
        ({"host": {"cores": "many"}}, "host.cores"),
        ({"slurm": {"commands": 1}}, "slurm.commands"),
        ({"host": {"cores": 0}}, "host.cores: must be"),
        ({"host": {"memory": 100}}, "host.memory: must be at least qemu.base_memory"),
        ({"host": {"overcommit": 0.5}}, "host.overcommit"),
        ({"host": {"cpu_overcommit": 0.5}}, "host.cpu_overcommit"),
        ({"host": {"floor": -1}}, "host.floor"),
        ({"host": {"disk_overcommit": 0.9}}, "host.disk_overcommit"),
        ({"host": {"disk_floor": -1}}, "host.disk_floor"),
        ({"qemu": {"tb_size": 4}}, "qemu.tb_size"),
        ({"mounts": [{"sourse": "x"}]}, "mounts.1.sourse: no such key, did you mean source"),
        ({"mounts": [{"source": "", "target": "/a"}]}, "mounts.1.source: must not be empty"),
        ({"mounts": [{"source": "a:/b", "target": "home"}]}, 'mounts.1.target: must be an absolute path, not "home"'),
        (
            {"mounts": [{"source": "a:/b", "target": "/home"}, {"source": "a:/c", "target": "/home/"}]},
            "mounts: two file systems are mounted at /home",
        ),
        ({"slurm": {"partition": "my partition"}}, "slurm.partition: must be the name of one partition"),
        ({"qemu": {"accel": "xen"}}, "qemu.accel"),
        ({"network": {"subnet": "10.0.0.0/16", "gateway": "10.1.0.1"}}, "network.gateway"),
        ({"network": {"subnet": "what"}}, "network"),
        ({"qemu": {"bridge": "a-name-that-is-too-long"}}, "qemu.bridge"),
        ({"qemu": {"uplink": "a/b"}}, "qemu.uplink"),
        ({"qemu": {"uplink": "mvup0"}}, "qemu.uplink"),
        ({"qemu": {"run": "/run/" + "x" * 100}}, "qemu.run"),
        ({"vxlan": {"addresses": [["n1", "n1.site"]]}}, "vxlan.addresses: 'n1.site' of n1 is no address"),
        ({"vxlan": {"addresses": [["n1", "fe80::1"]]}}, "vxlan.addresses: fe80::1 of n1 is of one link only"),
        (
            {"vxlan": {"addresses": [["n1", "fd00::1"], ["n2", "192.0.2.2"]]}},
            "vxlan.addresses: IPv4 and IPv6 cannot be mixed",
        ),
        ({"vxlan": {"port": 0}}, "vxlan.port"),
        ({"vxlan": {"mtu": 100}}, "vxlan.mtu"),
        ({"vxlan": {"network": 1 << 24}}, "vxlan.network"),
        ({"vxlan": {"enabled": True}, "qemu": {"uplink": "up0"}}, "vxlan: with qemu.uplink"),
        ({"vxlan": {"enabled": True}, "hosts": [{"nodes": "n1", "uplink": "up0"}]}, "vxlan: with qemu.uplink"),
        ({"backfill": {"depth": 0}}, "backfill.depth: must be"),
        ({"backfill": {"overtakes": -1}}, "backfill.overtakes: must be"),
    ],
)
def test_an_error_names_each_wrong_key(raw: dict[str, object], said: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(raw, "m.toml")
    assert said in str(caught.value) and caught.value.hint


CLASSES = """
[host]
cores = 4
memory = 8000
[[hosts]]
nodes = "n[1-3]"
[[hosts]]
nodes = "big1"
cores = 64
cpu_overcommit = 2.0
overcommit = 1.5
vms = "/scratch/vms"
"""


def test_a_machine_finds_its_class_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.toml").write_text(CLASSES)
    monkeypatch.setattr(config.socket, "gethostname", lambda: "big1.example.org")
    mine = load(tmp_path / "m.toml")
    assert (mine.host.name, mine.host.cores, mine.host.memory, mine.host.overcommit) == ("big1", 64, 8000, 1.5)
    assert host_config(mine, "site").overcommit == Overcommitment(cpus=2.0, memory=1.5)
    assert (mine.qemu.vms, mine.qemu.images) == (Path("/scratch/vms"), Settings().qemu.images)
    other = on_machine(parse({"host": {"name": "n2"}, "hosts": [{"nodes": "n[1-3]", "memory": 512}]}, "m"), "big1")
    assert (other.host.name, other.host.memory) == ("n2", 512), "unless the settings say its name"
    outside = on_machine(parse({"hosts": [{"nodes": "n[1-3]", "memory": 512}]}, "m"), "head")
    assert (outside.host.name, outside.host.memory) == ("head", 4096) and "head" not in host_names(outside)
    assert host_names(mine) == ["n1", "n2", "n3", "big1"] and site_cpus(mine) == 3 * 4 + 2 * 64
    assert host_names(Settings()) == ["localhost"] and site_cpus(Settings()) == Settings().host.cores


def test_an_error_names_a_missing_or_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot read"):
        load(tmp_path / "none.toml")
    (tmp_path / "m.toml").write_text("[[")
    with pytest.raises(Refused, match="not TOML"):
        load(tmp_path / "m.toml")


def test_backfill_can_be_turned_off_and_limited() -> None:
    assert policy_of(Settings()).backfill == Backfill(100, 20)
    assert policy_of(parse({"backfill": {"enabled": False}}, "x")).backfill is None
    limited = policy_of(parse({"backfill": {"depth": 7, "overtakes": 0}, "poll": 4.0}, "x"))
    assert limited.backfill == Backfill(7, 0) and limited.reclaim == policy_of(Settings()).reclaim + 4.0
