"""Plugging virtual functions into a running VM: what QEMU is asked, and what it may keep in place."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiverse.core.errors import Broken, Gone
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest, process
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.hotplug import plug_functions
from multiverse.host.qemu.session import Paths
from multiverse.system.processes import ProcessIdentity, boot_id
from tests.unit.test_virtual_functions import Tree

NAME = "mvjob-1"


class Qemu:
    """A monitor that knows which devices there are, and adds some."""

    def __init__(self, path: Path) -> None:
        self.devices: dict[str, dict[str, Any]] = {}
        self.refusal = ""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._server.accept()
            with peer, peer.makefile("r") as commands:
                peer.sendall(b'{"QMP": {}}\n')
                for line in commands:
                    peer.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        arguments = command.get("arguments", {})
        if command["execute"] == "qom-list":
            return {"return": [{"name": name} for name in self.devices]}
        if command["execute"] == "device_add":
            if self.refusal:
                return {"error": {"desc": self.refusal}}
            self.devices[arguments["id"]] = arguments
        return {"return": {}}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with a VM, whose QEMU is this process, and a tree with functions."""
    limits: list[int] = []
    monkeypatch.setattr(process, "limit_locked_memory", lambda whose, size: limits.append(size >> 20))
    paths = Paths(tmp_path / "home", tmp_path / "run")
    for directory in (paths.home, paths.run):
        directory.mkdir()
    own = ProcessIdentity.of(os.getpid())
    known = Manifest(NAME, CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:05", 1, 256, own.pid, own.started,
                     boot_id(), os.getuid(), total_memory=4096)  # fmt: skip
    manifest.write(paths.home, known)
    tree = Tree(tmp_path)
    return SimpleNamespace(paths=lambda name: paths, functions=tree.functions(), tree=tree, qemu=Qemu(paths.monitor),
                           limits=limits)  # fmt: skip


def plug(host: SimpleNamespace) -> list[int]:
    return plug_functions(cast(HostContext, host), NAME)


def test_functions_are_plugged_into_the_last_ports_once(host: SimpleNamespace) -> None:
    addresses = [host.tree.add(number) for number in range(3)]
    host.functions.claim(NAME, 2)
    host.functions.claim("mvjob-2", 1)
    assert plug(host) == [0x11, 0x10]
    plugged = dict(host.qemu.devices)
    assert [(one["bus"], Path(one["sysfsdev"]).name) for one in plugged.values()] == [
        ("rp3", addresses[0]),
        ("rp2", addresses[1]),
    ]
    assert host.limits[0] > 4096, "all of the guest's memory stays in place"
    assert plug(host) == [0x11, 0x10] and host.qemu.devices == plugged
    assert (host.tree.devices / "10").stat().st_mode & 0o777 == 0o600


def test_a_vm_that_does_not_run_gets_none(host: SimpleNamespace) -> None:
    (host.paths(NAME).home / manifest.FILE).unlink()
    with pytest.raises(Gone):
        plug(host)


def test_what_qemu_refuses_is_said_with_the_next_step(host: SimpleNamespace) -> None:
    host.tree.add(0)
    host.functions.claim(NAME, 1)
    host.qemu.refusal = "vfio 0000:3b:02.0: group 10 is not viable"
    with pytest.raises(Broken, match="group 10 is not viable") as error:
        plug(host)
    assert "dmesg" in error.value.hint
