"""The host library, as far as it can be tested without a QEMU."""

from __future__ import annotations

import asyncio
import fcntl
import filecmp
import gc
import json
import os
import re
import resource
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
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import manifest, process
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import abilities, disks, templates
from multiverse.host.qemu.abilities import AbilityCache, save
from multiverse.host.qemu.channels import Monitor, QmpError
from multiverse.host.qemu.hotplug import dimm_sizes
from multiverse.host.qemu.machine import DIMMS, Accelerator, Memory, QemuMachine, Wiring, limits
from multiverse.host.qemu.session import GuestOutput, OutputStore, Paths, remove_files
from multiverse.images.catalog import Image
from multiverse.system import kernel
from multiverse.system.locks import locked_directory
from multiverse.system.processes import ProcessIdentity


def sleeper(tmp_path: Path, *fds: int) -> ProcessIdentity:
    return process.spawn([sys.executable, "-c", "import time; time.sleep(600)", f"path={tmp_path}/console.log"], fds,
                         tmp_path / "log", dict(os.environ))  # fmt: skip


def test_a_process_is_killed_and_killing_it_again_is_success(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    assert one.is_alive()
    assert os.getsid(one.pid) == one.pid
    assert process.kill(one)
    assert not one.is_alive()
    assert process.kill(one)


async def test_a_qemu_is_killed_at_once_though_its_lock_is_held_and_all_threads_wait(tmp_path: Path) -> None:
    """As self-fencing needs it: a start or an observation that hangs keeps no VM alive."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    settings = QemuSettings(str(binary), "tcg", templates=tmp_path / "t", vms=tmp_path / "vms", run=tmp_path / "run")
    hypervisor = QemuHypervisor(Settings(state_dir=tmp_path, host=HostSettings("h", 1, 256), qemu=settings), "a")
    (home := tmp_path / "vms" / "mva-1").mkdir(parents=True)
    qemu, end = sleeper(tmp_path), threading.Event()
    manifest.write(home, Manifest("mva-1", CloneKind.FULL, VmPhase.STARTED, "", 1, 256, qemu.pid, qemu.started,
                                  qemu.boot_id))  # fmt: skip

    def ended() -> None:
        while qemu.is_alive():
            time.sleep(0.01)

    waiting = [asyncio.create_task(hypervisor._in_thread(end.wait)) for _ in range(100)]
    try:
        with locked_directory(home, create=False):
            await asyncio.sleep(0)
            assert await asyncio.wait_for(hypervisor.list_vms(), 5) == ["mva-1"]
            await asyncio.wait_for(hypervisor.kill(["mva-1", "mva-2"]), 5)
            await asyncio.wait_for(asyncio.to_thread(ended), 5)
    finally:
        end.set()
        await asyncio.gather(*waiting)
        hypervisor.close()
        process.kill(qemu)


def test_when_memory_runs_out_a_vm_ends_before_this_process(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    try:
        ours = int(Path("/proc/self/oom_score_adj").read_text())
        assert int(Path(f"/proc/{one.pid}/oom_score_adj").read_text()) == 500 > ours
    finally:
        process.kill(one)


def test_private_memory_is_distinguished_from_mapped_files(tmp_path: Path) -> None:
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
        private, shared = process.resident_memory(one.pid)
        exact, _ = process.exact_memory(one.pid, "/template")
        one.communicate("\n")
    assert 8 <= private < 24 <= shared < 48
    assert exact == pytest.approx(private, abs=4)
    assert process.resident_memory(one.pid) == (0.0, 0.0)


def test_another_process_with_the_same_pid_is_not_killed(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    try:
        for other in (replace(one, started=one.started - 1), replace(one, boot_id="another boot")):
            assert not other.is_alive()
            assert process.kill(other)
        assert one.is_alive()
    finally:
        process.kill(one)


def test_a_zombie_does_not_count_as_alive_and_is_reaped(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    handle = os.pidfd_open(one.pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
    assert not one.is_alive()
    process.reap(one)
    with pytest.raises(ChildProcessError):
        os.waitpid(one.pid, os.WNOHANG)
    os.close(handle)


def test_a_process_is_found_by_its_command_line_alone(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    argument = f"path={tmp_path}/console.log"
    try:
        deadline = time.monotonic() + 5
        while (found := list(process.find_by_argument(argument))) == [] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == [one]
        assert list(process.find_by_argument(f"path={tmp_path}/console")) == []
    finally:
        process.kill(one)


def test_only_the_passed_descriptors_are_inherited(tmp_path: Path) -> None:
    handed, kept = os.pipe(), os.pipe()
    os.set_inheritable(kept[0], True)  # as if this process had inherited it
    process.set_all_close_on_exec()
    one = sleeper(tmp_path, handed[0])
    try:
        deadline = time.monotonic() + 5
        while b"python" not in Path(f"/proc/{one.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        opened = {int(p.name) for p in Path(f"/proc/{one.pid}/fd").iterdir()}
        assert handed[0] in opened and not opened & {handed[1], *kept}
    finally:
        process.kill(one)
        for fd in (*handed, *kept):
            os.close(fd)


def test_a_copied_disk_keeps_its_holes_on_another_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        file.write(b"boot" * 1024)
        file.truncate(64 << 20)
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))  # another file system, so there is nothing to share
    try:
        assert disks.copy_disk(disk, other / "disk.raw") == "copy"
        assert filecmp.cmp(disk, other / "disk.raw", shallow=False)
        assert (other / "disk.raw").stat().st_blocks * 512 < 1 << 20
        with pytest.raises(Exhausted, match="is the disk full"):
            disks.copy_disk(disk, Path("/dev/full"))
    finally:
        shutil.rmtree(other)


def test_the_cache_of_translated_code_is_limited_and_counted_in_the_memory_limit() -> None:
    plain, spare, kvm = Accelerator("tcg"), Accelerator("tcg", 32), Accelerator("kvm", 32)
    assert [each.options for each in (plain, spare, kvm)] == ["tcg,thread=multi", "tcg,thread=multi,tb-size=32", "kvm"]
    assert plain.footprint(256) - spare.footprint(256) == 1024 - 32
    assert kvm.footprint(256) == spare.footprint(256) - 32


def test_address_randomization_is_off_only_for_an_emulation_that_would_lose_translated_code() -> None:
    kvm, late, early = Accelerator("kvm", relocates=False), Accelerator("tcg"), Accelerator("tcg", relocates=False)
    assert ["norandmaps" in each.cmdline("quiet").split() for each in (kvm, late, early)] == [False, False, True]


def test_an_emulated_guest_is_told_the_frequency_of_the_hosts_time_stamp_counter() -> None:
    def append(accelerator: Accelerator) -> list[str]:
        argv = machine(accelerator=accelerator).argv("qemu", Wiring(5, 6, 7, Path("/c")), paused=True)
        return argv[argv.index("-append") + 1].split()

    each = [Accelerator("tcg", tsc_khz=2_596_118), Accelerator("tcg"), Accelerator("kvm", tsc_khz=2_596_118)]
    assert [append(one) for one in each] == [["quiet", "tsc_early_khz=2596118"], ["quiet"], ["quiet"]]
    slim = Image("slim", "slim", "k1", "b1", Path("/i"), "quiet", "6.1", "bookworm")
    keys = {templates.key_of(slim, machine(accelerator=one), "7.2") for one in each[:2]}
    assert len(keys) == 1  # a new measurement does not make templates unusable


@pytest.mark.skipif(kernel.measured_khz(0.001) is None, reason="this machine has no counter of constant frequency")
def test_the_frequency_of_the_time_stamp_counter_is_measured() -> None:
    first, second = kernel.measured_khz(0.05), kernel.measured_khz(0.1)
    assert first is not None and second is not None and first > 100_000
    assert abs(first - second) < first / 1000


def test_a_version_line_tells_the_release() -> None:
    said = {
        "7.2.22 (Debian 1:7.2)": False,
        "8.1.0": False,
        "8.2": True,
        "8.2.0-rc1": True,
        "10.0.2": True,
        "of mine": False,
    }
    assert {word: abilities.is_since(f"QEMU emulator version {word}", 8, 2) for word in said} == said


def test_an_unreadable_manifest_reads_as_none(tmp_path: Path) -> None:
    kept = Manifest("mva-1", CloneKind.INSTANT, VmPhase.PARKED, "02:00:00:00:00:01", 1, 256, 7, 8, "boot")
    manifest.write(tmp_path, kept)
    assert manifest.read(tmp_path) == kept
    (tmp_path / manifest.FILE).write_text('{"name": "mva-1"')
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "nowhere") is None


def test_a_manifest_for_which_there_is_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    kept = Manifest("mva-1", CloneKind.INSTANT, VmPhase.PARKED, "02:00:00:00:00:01", 1, 256, 7, 8, "boot")
    manifest.write(tmp_path, kept)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # bytes
    try:
        with pytest.raises(Exhausted, match=r"mva-1.*is there room in"):
            manifest.write(tmp_path, replace(kept, phase=VmPhase.STARTING))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manifest.read(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [manifest.FILE], "no temporary file is left"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[QemuHypervisor]:
    """A driver whose QEMU prints its version and does nothing else."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    qemu = QemuSettings(
        str(binary), "tcg", images=tmp_path, templates=tmp_path / "t", vms=tmp_path / "vms", run=tmp_path / "run"
    )
    made = QemuHypervisor(Settings(state_dir=tmp_path, host=HostSettings("h", 1, 256), qemu=qemu), "a")
    yield made
    made.close()


def test_an_observation_forgets_vms_that_are_gone(tmp_path: Path, host: QemuHypervisor) -> None:
    home = tmp_path / "vms" / "mva-1"
    home.mkdir(parents=True)
    manifest.write(home, Manifest(home.name, CloneKind.INSTANT, VmPhase.CREATING, "02:00:00:00:00:01", 1, 256))

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, Manifest) and each.name == home.name for each in gc.get_objects())

    before = held()
    assert set(asyncio.run(host.observe()).vms) == {home.name}
    assert held() == before + 1
    shutil.rmtree(home)
    assert not asyncio.run(host.observe()).vms
    assert held() == before


def test_an_observation_measures_a_vm(tmp_path: Path, host: QemuHypervisor) -> None:
    one = sleeper(tmp_path)
    home = tmp_path / "vms" / "mva-1"
    home.mkdir(parents=True)
    facts = Manifest(home.name, CloneKind.INSTANT, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, one.pid, one.started,
                     one.boot_id)  # fmt: skip
    manifest.write(home, facts)
    try:
        deadline = time.monotonic() + 5
        while not min(process.resident_memory(one.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)  # it has not been executed yet
        view = asyncio.run(host.observe())
        seen = view.vms[home.name]
        assert 0 < seen.private < 64 and 0 < seen.shared < 64
        assert 0 < view.hosts["h"].available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    finally:
        process.kill(one)


def test_a_lock_holds_until_the_directory_is_gone(tmp_path: Path) -> None:
    home = tmp_path / "vm"
    order: list[str] = []

    def second() -> None:
        with locked_directory(home, create=False) as there:
            order.append(f"second: {there}")

    with locked_directory(home, create=True) as there:
        assert there
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.05)
        order.append("first")
        home.rmdir()
    waiting.join(5)
    assert order == ["first", "second: False"]


def machine(**changes: object) -> QemuMachine:
    facts = {"name": "mva-1", "accelerator": Accelerator("tcg"), "cpus": 1, "memory": Memory(256, Path("/t/memory")),
             "limits": Size(8, 4096), "disk": Path("/v/a,b/disk"), "disk_format": "qcow2", "mac": "02:00:00:00:00:01",
             "kernel": Path("/k"), "initrd": Path("/i"), "cmdline": "quiet"}  # fmt: skip
    return QemuMachine(**{**facts, **changes})  # type: ignore[arg-type]


def test_unusable_templates_are_removed_but_not_usable_ones_nor_those_being_built(tmp_path: Path) -> None:
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
        dropped = templates.delete_unusable(tmp_path, lambda one: (one.path.name, one.key) == ("slim@1x256", "k"))
        assert templates.list_builds(tmp_path) == {"other@1x256": ("other", Size(1, 256), "physics")}
    assert dropped == ["slim", "slim@1x512", "slim@2x512"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"slim@1x256", ".other@1x256.building-now", ".other@1x256.lock"}


def test_the_directory_of_a_template_does_not_name_its_account() -> None:
    which = TemplateKey("h", "slim", Size(2, 512))
    assert templates.directory_name(which) == "slim@2x512"
    names = {
        templates.directory_name(which._replace(account=account)) for account in ("../../etc", "a/b", "a@b", "a b", "é")
    }
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


def test_a_refused_command_is_raised_after_all_commands_were_answered(tmp_path: Path) -> None:
    FakeQemu(tmp_path / "q", ['{"error": {"desc": "no such thing"}}'], ['{"return": 2}'], ['{"return": 3}'])
    with Monitor.connect(tmp_path / "q", timeout=5) as monitor:
        with pytest.raises(QmpError, match="refused one: no such thing"):
            monitor.execute_all([("one", {}), ("two", {})])
        assert monitor.execute("three") == 3


def test_a_qemu_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    FakeQemu(tmp_path / "q")
    with Monitor.connect(tmp_path / "q", timeout=5) as monitor, pytest.raises(Unknown):
        monitor.wait_event("STOP", 0.05)
    with pytest.raises(Unknown):
        Monitor.connect(tmp_path / "nobody")


def test_the_answer_of_the_probe_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(binary: str) -> str:
        asked.append(binary)
        return "it hung"

    monkeypatch.setattr(abilities, "why_no_kvm", ask)
    kept = tmp_path / "state/kvm.json"
    for _ in range(2):
        assert abilities.accelerator("auto", "qemu", "7.2", kept).name == "tcg"
    assert len(asked) == 1
    assert abilities.accelerator("auto", "qemu", "8.0", kept).name == "tcg"
    assert len(asked) == 2
    with pytest.raises(Broken, match="it hung"):
        abilities.accelerator("kvm", "qemu", "8.0", kept)
    assert abilities.accelerator("tcg", "qemu", "8.0", tmp_path / "none").name == "tcg"


def test_the_boot_sector_is_one() -> None:
    assert len(abilities._BOOT_SECTOR) == 512 and abilities._BOOT_SECTOR.endswith(b"\x55\xaa")


def test_unique_memory_leaves_out_the_shared_file(tmp_path: Path) -> None:
    shared = tmp_path / "memory"
    shared.write_bytes(bytes(32 << 20))
    code = ("import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY); "
            "[m[i] for i in range(0, len(m), 4096)]; m[0] = 1; print('ready', flush=True); input()")  # fmt: skip
    argv = [sys.executable, "-c", code, str(shared)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout and child.stdout.readline() == b"ready\n"
    apart, _ = process.exact_memory(child.pid, "/memory")
    together, _ = process.exact_memory(child.pid)
    child.communicate(b"\n")
    assert together - apart > 24


def test_lacking_abilities_are_cached_until_image_or_qemu_changes(tmp_path: Path) -> None:
    file = tmp_path / "state/guests.json"
    slim = Image("slim", "slim", "k1", "b1", tmp_path, "quiet", "6.1", "bookworm")
    others = [replace(slim, name="stock"), replace(slim, key="k2"), replace(slim, cmdline="nosmp")]
    cache = AbilityCache(file, "8.2 tcg")
    assert cache.abilities(slim) == {"fork", "plug_cpus", "plug_memory", "limit_disk"}
    cache.record_lacking(slim, "plug_cpus", "no room", [slim])
    cache.record_lacking(slim, "plug_cpus", "no room", [slim])
    for reader in (cache, AbilityCache(file, "8.2 tcg")):
        assert reader.abilities(slim) == {"fork", "plug_memory", "limit_disk"}
        assert all("plug_cpus" in reader.abilities(other) for other in others)
    assert "plug_cpus" in AbilityCache(file, "8.2 kvm").abilities(slim)

    cache.record_lacking(others[0], "plug_memory", "no room", [others[0]])
    assert "plug_cpus" in cache.abilities(slim), "an image that is no more is forgotten"
    assert AbilityCache(file, "8.2 tcg").abilities(others[0]) == {"fork", "plug_cpus", "limit_disk"}


def test_other_users_pass_through_the_directory_of_a_cache_whatever_the_umask_is(tmp_path: Path) -> None:
    os.umask(0o077)
    save(tmp_path / "state" / "kvm.json", {})
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o711
    assert (tmp_path / "state" / "kvm.json").stat().st_mode & 0o777 == 0o600


def test_lacking_abilities_are_known_even_if_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "guests.json").write_text("[1]")
    slim = Image("slim", "slim", "k1", "b1", tmp_path, "quiet", "6.1", "bookworm")
    cache = AbilityCache(tmp_path / "guests.json", "8.2 tcg")
    (tmp_path / "guests.json").unlink()
    (tmp_path / "guests.json").mkdir()  # a directory cannot be replaced by a file
    cache.record_lacking(slim, "plug_cpus", "no room", [slim])
    assert "plug_cpus" not in cache.abilities(slim)


def test_only_the_end_of_a_long_console_is_read(tmp_path: Path) -> None:
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


def test_each_dimm_is_at_most_eight_times_the_memory_before_it() -> None:
    assert dimm_sizes(256, 0) == [] and dimm_sizes(256, 768) == [768] and dimm_sizes(100, 128) == [128]
    assert dimm_sizes(256, 32768) == [2048, 18432, 12288]
    found = dimm_sizes(150, 1 << 20)
    assert all(size <= 8 * (150 + sum(found[:number])) for number, size in enumerate(found))
    assert sum(found) == 1 << 20 and len(found) <= DIMMS


def test_the_output_of_a_qemu_that_has_ended_is_not_copied_to_a_directory_that_is_removed(tmp_path: Path) -> None:
    one = sleeper(tmp_path)
    assert process.kill(one)
    paths, store = Paths(tmp_path / "home", tmp_path / "run"), OutputStore()
    paths.home.mkdir()
    fd = os.open(tmp_path / "inside", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"the last words")
    store.keep("mv-1", GuestOutput({paths.console: fd}))
    store.finish("mv-1")
    assert paths.console.read_bytes() == b"the last words"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    paths.console.unlink()
    store.drop("mv-1")
    store.save("mv-1", one, paths.outputs)
    assert list(paths.home.iterdir()) == []


def test_a_file_that_appears_while_a_vm_is_removed_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that observes the host copies what QEMU has printed."""
    paths, rmdir = Paths(tmp_path / "home", tmp_path / "run"), Path.rmdir
    paths.home.mkdir()
    (paths.home / manifest.FILE).touch()
    late = [paths.console]

    def copied_first(path: Path) -> None:
        if late:
            late.pop().touch()
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", copied_first)
    remove_files(paths)
    assert late == [] and not paths.home.exists()
