"""The host side, as far as it goes without a QEMU."""

from __future__ import annotations

import asyncio
import fcntl
import filecmp
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import HostSettings, QemuSettings, Settings
from multiverse.core.errors import Broken, Exhausted, Unknown
from multiverse.core.model import CloneKind, Size, TemplateKey
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import copies, manifest, probe, process, templates
from multiverse.host.found import Found
from multiverse.host.machine import DIMMS, Accelerator, Machine, Memory, Wiring, limits
from multiverse.host.manifest import Manifest, Phase
from multiverse.host.qmp import Monitor, QmpError
from multiverse.host.session import Paths
from multiverse.host.vms import ladder
from multiverse.images.catalog import Image


def sleeper(tmp_path: Path, *fds: int) -> tuple[int, int]:
    return process.spawn([sys.executable, "-c", "import time; time.sleep(600)", f"path={tmp_path}/console.log"], fds,
                         tmp_path / "log", dict(os.environ))  # fmt: skip


def test_a_process_is_ended_once_and_found_gone_after(tmp_path: Path) -> None:
    pid, started = sleeper(tmp_path)
    assert process.alive(pid, started)
    assert os.getsid(pid) == pid
    assert process.end(pid, started)
    assert not process.alive(pid, started)
    assert process.end(pid, started)


def test_when_memory_runs_out_it_goes_before_us(tmp_path: Path) -> None:
    pid, started = sleeper(tmp_path)
    try:
        ours = int(Path("/proc/self/oom_score_adj").read_text())
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 500 > ours
    finally:
        process.end(pid, started)


def test_what_a_process_has_alone_is_told_from_what_it_maps(tmp_path: Path) -> None:
    (tmp_path / "template").write_bytes(b"x" * (32 << 20))
    code = """
import mmap, sys
file = open(sys.argv[1], "rb")
seen = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
sum(seen[at] for at in range(0, len(seen), 4096))
for at in range(0, 8 << 20, 4096):
    seen[at] = 1
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "template")], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:  # fmt: skip
        assert one.stdout is not None
        one.stdout.readline()
        private, shared = process.resident(one.pid)
        exact, _ = process.memory(one.pid, "/template")
        one.communicate("\n")
    assert 8 <= private < 24 <= shared < 48
    assert exact == pytest.approx(private, abs=4)
    assert process.resident(one.pid) == (0.0, 0.0)


def test_one_that_got_the_number_is_not_killed(tmp_path: Path) -> None:
    pid, started = sleeper(tmp_path)
    try:
        assert process.end(pid, started - 1)
        assert process.alive(pid, started)
    finally:
        process.end(pid, started)


def test_the_dead_are_seen_before_they_are_reaped(tmp_path: Path) -> None:
    pid, started = sleeper(tmp_path)
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
    assert not process.alive(pid, started)
    process.reap(pid, started)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    os.close(handle)


def test_a_process_is_found_by_its_command_line_alone(tmp_path: Path) -> None:
    pid, started = sleeper(tmp_path)
    try:
        deadline = time.monotonic() + 5
        while (found := list(process.with_part(f"path={tmp_path}/console.log"))) == [] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == [(pid, started)]
        assert list(process.with_part(f"path={tmp_path}/console")) == []
    finally:
        process.end(pid, started)


def test_only_what_is_handed_over_is_inherited(tmp_path: Path) -> None:
    handed, kept = os.pipe(), os.pipe()
    os.set_inheritable(kept[0], True)  # as what whoever started us has left open
    process.hand_on_nothing()
    pid, started = sleeper(tmp_path, handed[0])
    try:
        deadline = time.monotonic() + 5
        while b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        opened = {int(p.name) for p in Path(f"/proc/{pid}/fd").iterdir()}
        assert handed[0] in opened and not opened & {handed[1], *kept}
    finally:
        process.end(pid, started)
        for fd in (*handed, *kept):
            os.close(fd)


def test_a_disk_is_copied_without_its_holes_where_nothing_can_be_shared(tmp_path: Path) -> None:
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        file.write(b"boot" * 1024)
        file.truncate(64 << 20)
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))  # another file system, so there is nothing to share
    try:
        assert copies.copy(disk, other / "disk.raw") == "copy"
        assert filecmp.cmp(disk, other / "disk.raw", shallow=False)
        assert (other / "disk.raw").stat().st_blocks * 512 < 1 << 20
        with pytest.raises(Exhausted, match="is the disk full"):
            copies.copy(disk, Path("/dev/full"))
    finally:
        shutil.rmtree(other)


def test_emulation_keeps_as_much_code_as_it_may_and_is_let_have_that() -> None:
    plain, spare, kvm = Accelerator("tcg"), Accelerator("tcg", 32), Accelerator("kvm", 32)
    assert [each.options for each in (plain, spare, kvm)] == ["tcg,thread=multi", "tcg,thread=multi,tb-size=32", "kvm"]
    assert plain.footprint(256) - spare.footprint(256) == 1024 - 32
    assert kvm.footprint(256) == spare.footprint(256) - 32


def test_programs_lie_where_chance_puts_them_unless_emulation_would_forget_their_code() -> None:
    kvm, late, early = Accelerator("kvm", relocates=False), Accelerator("tcg"), Accelerator("tcg", relocates=False)
    assert ["norandmaps" in each.cmdline("quiet").split() for each in (kvm, late, early)] == [False, False, True]


def test_a_qemu_tells_its_release() -> None:
    said = {
        "7.2.22 (Debian 1:7.2)": False,
        "8.1.0": False,
        "8.2": True,
        "8.2.0-rc1": True,
        "10.0.2": True,
        "of mine": False,
    }
    assert {word: probe.is_since(f"QEMU emulator version {word}", 8, 2) for word in said} == said


def test_a_manifest_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    kept = Manifest("mva-1", CloneKind.INSTANT, Phase.PARKED, "02:00:00:00:00:01", 1, 256, 7, 8, "boot")
    manifest.write(tmp_path, kept)
    assert manifest.read(tmp_path) == kept
    (tmp_path / manifest.FILE).write_text('{"name": "mva-1"')
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "nowhere") is None


def test_a_manifest_for_which_there_is_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    kept = Manifest("mva-1", CloneKind.INSTANT, Phase.PARKED, "02:00:00:00:00:01", 1, 256, 7, 8, "boot")
    manifest.write(tmp_path, kept)
    (tmp_path / f"{manifest.FILE}.new").symlink_to("/dev/full")
    with pytest.raises(Exhausted, match=r"mva-1.*is there room in"):
        manifest.write(tmp_path, replace(kept, phase=Phase.STARTING))
    assert manifest.read(tmp_path) == kept


@pytest.fixture
def host(tmp_path: Path) -> Iterator[QemuHypervisor]:
    """A host side whose QEMU only says its version."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    qemu = QemuSettings(
        str(binary), "tcg", images=tmp_path, templates=tmp_path / "t", vms=tmp_path / "vms", run=tmp_path / "run"
    )
    made = QemuHypervisor(Settings(state_dir=tmp_path, host=HostSettings("h", 1, 256), qemu=qemu), "a")
    yield made
    made.close()


def test_a_look_forgets_what_is_gone(tmp_path: Path, host: QemuHypervisor) -> None:
    home = tmp_path / "vms" / "mva-1"
    home.mkdir(parents=True)
    manifest.write(home, Manifest(home.name, CloneKind.INSTANT, Phase.MAKING, "02:00:00:00:00:01", 1, 256))

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, Manifest) and each.name == home.name for each in gc.get_objects())

    before = held()
    assert set(asyncio.run(host.observe()).vms) == {home.name}
    assert held() == before + 1
    shutil.rmtree(home)
    assert not asyncio.run(host.observe()).vms
    assert held() == before


def test_a_look_weighs_a_vm_and_keeps_its_console_short(tmp_path: Path, host: QemuHypervisor) -> None:
    pid, started = sleeper(tmp_path)
    home = tmp_path / "vms" / "mva-1"
    home.mkdir(parents=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    facts = Manifest(home.name, CloneKind.INSTANT, Phase.STARTED, "02:00:00:00:00:01", 1, 256, pid, started, boot)
    manifest.write(home, facts)
    (home / "console.log").write_bytes(b"x" * ((1 << 20) + 1))
    try:
        view = asyncio.run(host.observe())
        seen = view.vms[home.name]
        assert 0 < seen.private < 64 and 0 < seen.shared < 64
        assert (home / "console.log").stat().st_size == 0
        assert 0 < view.hosts["h"].available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    finally:
        process.end(pid, started)


def test_a_lock_holds_until_the_directory_is_gone(tmp_path: Path) -> None:
    home = tmp_path / "vm"
    order: list[str] = []

    def second() -> None:
        with manifest.locked(home, make=False) as there:
            order.append(f"second: {there}")

    with manifest.locked(home, make=True) as there:
        assert there
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.05)
        order.append("first")
        home.rmdir()
    waiting.join(5)
    assert order == ["first", "second: False"]


def machine(**changes: object) -> Machine:
    facts = {"name": "mva-1", "accelerator": Accelerator("tcg"), "cpus": 1, "memory": Memory(256, Path("/t/memory")),
             "limits": Size(8, 4096), "disk": Path("/v/a,b/disk"), "disk_format": "qcow2", "mac": "02:00:00:00:00:01",
             "kernel": Path("/k"), "initrd": Path("/i"), "cmdline": "quiet"}  # fmt: skip
    return Machine(**{**facts, **changes})  # type: ignore[arg-type]


def test_templates_of_no_use_are_removed_but_not_what_is_in_use_or_being_made(tmp_path: Path) -> None:
    def made(name: str, **more: object) -> None:
        (tmp_path / name).mkdir()
        facts = {"image": "slim", "key": "k", "cpus": 1, "memory": 256, **more}
        (tmp_path / name / "template.json").write_text(json.dumps(facts))

    made("slim@1x256", account="")
    made("slim@2x512", account="", cpus=2, memory=512, key="of an older image")
    made("slim")  # from before templates had sizes in their names
    (tmp_path / ".slim@1x512.building-dead").mkdir()
    (tmp_path / ".slim@1x512.lock").touch()  # nobody holds it: whoever began has died
    (tmp_path / ".other@1x256.building-now").mkdir()
    with (tmp_path / ".other@1x256.lock").open("w") as held:
        held.write('["other", 1, 256, "physics"]')
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        dropped = templates.drop_stale(tmp_path, lambda one: (one.path.name, one.key) == ("slim@1x256", "k"))
        assert templates.building(tmp_path) == {"other@1x256": ("other", Size(1, 256), "physics")}
    assert dropped == ["slim", "slim@1x512", "slim@2x512"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"slim@1x256", ".other@1x256.building-now", ".other@1x256.lock"}


def test_a_template_s_directory_does_not_name_the_account_it_is_for() -> None:
    which = TemplateKey("h", "slim", Size(2, 512))
    assert templates.name_of(which) == "slim@2x512"
    names = {templates.name_of(which._replace(account=account)) for account in ("../../etc", "a/b", "a@b", "a b", "é")}
    assert len(names) == 5 and all(re.fullmatch(r"slim@2x512@[0-9a-f]{16}", name) for name in names)


def test_template_and_clone_are_the_same_machine() -> None:
    parent = machine(name="template", memory=Memory(256, Path("/w/memory"), shared=True), mac="02:00:00:00:00:09")
    assert parent.shape() == machine().shape()
    wiring = Wiring(5, 6, 7, Path("/c"))
    assert "share=on" in " ".join(parent.argv("qemu", wiring, paused=False))
    clone = machine().argv("qemu", wiring, paused=True, incoming=True)
    assert "share=off" in " ".join(clone) and "-S" in clone and "defer" in clone


def test_a_comma_in_a_path_does_not_end_the_option() -> None:
    assert "filename=/v/a,,b/disk,discard" in " ".join(machine().argv("qemu", Wiring(5, 6, 7, Path("/c")), paused=True))


def test_limits_are_the_hosts_but_never_below_the_base() -> None:
    assert limits(Size(1, 256), Size(8, 5000), Size(64, 262144)) == Size(8, 5120)
    assert limits(Size(2, 512), Size(1, 256), Size(64, 262144)) == Size(2, 512)


class FakeQemu:
    """Answers on a Unix socket with prepared lines, one batch for each command line received."""

    def __init__(self, path: Path, *batches: list[str]) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        self.thread = threading.Thread(target=self._serve, args=(batches,), daemon=True)
        self.thread.start()

    def _serve(self, batches: tuple[list[str], ...]) -> None:
        peer, _ = self.server.accept()
        with peer, peer.makefile("r") as commands:
            peer.sendall(b'{"QMP": {}}\n')
            for batch in (['{"return": {}}'], *batches):
                commands.readline()
                peer.sendall(("\n".join(batch) + "\n").encode())


def test_events_between_replies_are_kept(tmp_path: Path) -> None:
    FakeQemu(
        tmp_path / "q",
        ['{"event": "STOP"}', '{"return": 1}'],
        ['{"return": 2}', '{"event": "MIGRATION", "data": {"status": "done"}}'],
    )
    with Monitor.connect(tmp_path / "q", timeout=5) as monitor:
        assert monitor.execute_all([("one", {}), ("two", {})]) == [1, 2]
        assert monitor.wait_event("MIGRATION", 5, status="done") == {"status": "done"}


def test_a_refusal_is_raised_after_all_were_answered(tmp_path: Path) -> None:
    FakeQemu(tmp_path / "q", ['{"error": {"desc": "no such thing"}}'], ['{"return": 2}'], ['{"return": 3}'])
    with Monitor.connect(tmp_path / "q", timeout=5) as monitor:
        with pytest.raises(QmpError, match="refused one: no such thing"):
            monitor.execute_all([("one", {}), ("two", {})])
        assert monitor.execute("three") == 3


def test_silence_is_unknown(tmp_path: Path) -> None:
    FakeQemu(tmp_path / "q")
    with Monitor.connect(tmp_path / "q", timeout=5) as monitor, pytest.raises(Unknown):
        monitor.wait_event("STOP", 0.05)
    with pytest.raises(Unknown):
        Monitor.connect(tmp_path / "nobody")


def test_the_probes_answer_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(binary: str) -> str:
        asked.append(binary)
        return "it hung"

    monkeypatch.setattr(probe, "_probe", ask)
    kept = tmp_path / "state/kvm.json"
    for _ in range(2):
        assert probe.accelerator("auto", "qemu", "7.2", kept).name == "tcg"
    assert len(asked) == 1
    assert probe.accelerator("auto", "qemu", "8.0", kept).name == "tcg"
    assert len(asked) == 2
    with pytest.raises(Broken, match="it hung"):
        probe.accelerator("kvm", "qemu", "8.0", kept)
    assert probe.accelerator("tcg", "qemu", "8.0", tmp_path / "none").name == "tcg"


def test_the_boot_sector_is_one() -> None:
    assert len(probe._BOOT_SECTOR) == 512 and probe._BOOT_SECTOR.endswith(b"\x55\xaa")


def test_unique_memory_leaves_out_the_shared_file(tmp_path: Path) -> None:
    shared = tmp_path / "memory"
    shared.write_bytes(bytes(32 << 20))
    code = ("import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY); "
            "[m[i] for i in range(0, len(m), 4096)]; m[0] = 1; print('ready', flush=True); input()")  # fmt: skip
    argv = [sys.executable, "-c", code, str(shared)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout and child.stdout.readline() == b"ready\n"
    apart, _ = process.memory(child.pid, "/memory")
    together, _ = process.memory(child.pid)
    child.communicate(b"\n")
    assert together - apart > 24


def test_what_guests_lack_is_kept_for_that_image_and_qemu_until_either_changes(tmp_path: Path) -> None:
    file = tmp_path / "state/guests.json"
    slim = Image("slim", "slim", "k1", "b1", tmp_path, "quiet", "6.1", "bookworm")
    others = [replace(slim, name="stock"), replace(slim, key="k2"), replace(slim, cmdline="nosmp")]
    found = Found(file, "8.2 tcg")
    assert found.abilities(slim) == {"fork", "plug_cpus", "plug_memory"}
    found.lacks(slim, "plug_cpus", "no room", [slim])
    found.lacks(slim, "plug_cpus", "no room", [slim])
    for reader in (found, Found(file, "8.2 tcg")):
        assert reader.abilities(slim) == {"fork", "plug_memory"}
        assert all("plug_cpus" in reader.abilities(other) for other in others)
    assert "plug_cpus" in Found(file, "8.2 kvm").abilities(slim)

    found.lacks(others[0], "plug_memory", "no room", [others[0]])
    assert "plug_cpus" in found.abilities(slim), "an image that is no more is forgotten"
    assert Found(file, "8.2 tcg").abilities(others[0]) == {"fork", "plug_cpus"}


def test_what_guests_lack_is_known_even_if_it_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "guests.json").write_text("[1]")
    slim = Image("slim", "slim", "k1", "b1", tmp_path, "quiet", "6.1", "bookworm")
    found = Found(tmp_path / "guests.json", "8.2 tcg")
    (tmp_path / "guests.new").mkdir()  # nothing can be written there
    found.lacks(slim, "plug_cpus", "no room", [slim])
    assert "plug_cpus" not in found.abilities(slim)


def test_of_a_console_only_the_end_is_read_however_long_its_qemu_has_made_it(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "run")
    assert paths.tail() == ""
    paths.log.write_text("short\n")
    with paths.console.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"x" * 300 + b"\nKernel\x1b panic\n")
    said = paths.tail()
    assert said.startswith("; QEMU: short; console: ") and said.endswith(f"{'x' * 300} | Kernel  panic")
    assert len(said) < 500


def test_memory_comes_in_modules_of_which_the_guest_can_describe_the_next() -> None:
    assert ladder(256, 0) == [] and ladder(256, 768) == [768] and ladder(100, 128) == [128]
    assert ladder(256, 32768) == [2048, 18432, 12288]
    found = ladder(150, 1 << 20)
    assert all(size <= 8 * (150 + sum(found[:number])) for number, size in enumerate(found))
    assert sum(found) == 1 << 20 and len(found) <= DIMMS
