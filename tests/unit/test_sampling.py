"""Sampling: of real processes, whose VMs come, vanish in the middle and end; and what an hour of it comes to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from multiverse.core.model.basics import CloneKind
from multiverse.core.model.usage import MEANS, PEAKS, Usage, combined
from multiverse.host import manifest, sampling
from multiverse.host.cgroups import Hierarchy
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.sampling import CHUNK, UNKNOWN, WIDTH, History, HostProbe, Sampler, VmProbe, active_bytes
from multiverse.system.processes import ProcessIdentity

ALLOCATE = "import sys; held = bytearray(b'x' * ({mib} << 20)); print(flush=True); sys.stdin.read()"
BURN = "import time; print(flush=True)\nwhile True: pass"
SLEEP = "print(flush=True); import sys; sys.stdin.read()"

MEMORY_STAT_V2 = (
    b"anon 10\nfile 20\ninactive_anon 5\nactive_anon 4096\ninactive_file 7\nactive_file 8192\nunevictable 0\n"
)


class Machine:
    """A directory of VMs whose QEMUs are other programs."""

    def __init__(self, directory: Path) -> None:
        self.vms, self.running = directory / "vms", dict[str, subprocess.Popen[str]]()
        self.vms.mkdir()
        self.groups = Hierarchy(directory / "groups", 2, ("memory", "pids"))

    def add(self, name: str, program: str = SLEEP, **values: int) -> None:
        """A VM, which runs when this returns."""
        argv = [sys.executable, "-c", program]
        self.running[name] = process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        who = ProcessIdentity.of(process.pid)
        self.write(name, pid=who.pid, started=who.started, boot_id=who.boot_id, **values)

    def write(self, name: str, phase: VmPhase = VmPhase.STARTED, **values: int | str) -> None:
        """The VM's manifest."""
        (self.vms / name).mkdir(exist_ok=True)
        one = Manifest(name, CloneKind.INSTANT, phase, "", 1, 256, **values)  # type: ignore[arg-type]
        manifest.write(self.vms / name, one)

    def kill(self, name: str) -> None:
        """End it, but do not reap it: a zombie."""
        self.running[name].kill()
        os.waitid(os.P_PID, self.running[name].pid, os.WEXITED | os.WNOWAIT)

    def end(self, name: str) -> None:
        """End its process, which leaves the VM's directory."""
        process = self.running.pop(name)
        process.kill()
        process.communicate()

    def sampler(self) -> Sampler:
        return Sampler(self.vms, 1.0, lambda: [self.groups])

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def open_files() -> list[str]:
    """The paths of what this process has open."""
    return [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


# --- the samples of one VM ------------------------------------------------------------------------


def sample(cpus: float, memory: float = 100.0, active: float = UNKNOWN) -> list[float]:
    return [cpus, memory, 0.0, 0.0, 0.0, 0.0, active, UNKNOWN, UNKNOWN, 0.5]


def test_the_figures_are_those_of_samples_and_of_the_database() -> None:
    assert {one.name for one in fields(Usage)} == {"span", *PEAKS, *MEANS} and 1 + len(MEANS) == WIDTH


def test_means_and_peaks_are_those_of_the_span() -> None:
    history = History()
    for second in range(200):
        history.add(1000.0 + second, sample(cpus=1.0 if second < 150 else 3.0, memory=float(second)))
    whole, last = history.usage(0.0, 1.0), history.usage(1199.0 - 60.0, 1.0)
    assert whole and last
    assert (whole.span, last.span) == (200.0, 60.0)
    assert (whole.cpus, whole.cpus_peak) == (1.5, 3.0)
    assert last.cpus == pytest.approx((10 * 1.0 + 50 * 3.0) / 60) and last.memory == 169.5 and last.memory_peak == 199.0
    assert (last.active, last.cpu_pressure, last.io_pressure) == (None, None, 0.5)
    assert history.usage(1199.0, 1.0) is None, "no sample is later than the last one"


def test_samples_that_do_not_know_a_figure_are_left_out_of_its_mean() -> None:
    history = History()
    for second in range(2 * CHUNK):
        history.add(float(second), sample(1.0, active=UNKNOWN if second % 3 else 90.0 + second % 2 * 60.0))
    usage = history.usage(-1.0, 1.0)
    assert usage and (usage.active, usage.cpu_pressure, usage.cpus) == (120.0, None, 1.0)
    for second in range(2 * CHUNK, 4 * CHUNK):
        history.add(float(second), sample(1.0, active=0.0))
    usage = history.usage(float(2 * CHUNK) - 1.0, 1.0)
    assert usage and usage.active == 0.0, "nothing is known, and that it is 0, are different"


def test_an_hour_is_kept_and_no_more_memory_is_taken() -> None:
    history = History(limit=600)
    for second in range(5000):
        history.add(float(second), sample(1.0, float(second)))
        assert len(history) <= 600 + CHUNK
    usage = history.usage(4999.0 - 600.0, 1.0)
    assert usage and usage.span == 600.0 and usage.memory == pytest.approx(4999 - 299.5)


def test_spans_that_follow_each_other_are_weighted() -> None:
    one = Usage(60.0, 1.0, 2.0, 100.0, 110.0, 0.0, 0.0, 0.0, 0.0, None, 0.5)
    other = Usage(20.0, 3.0, 4.0, 300.0, 310.0, 8.0, 0.0, 0.0, 0.0, 50.0)
    both = combined([one, other])
    assert (both.span, both.cpus, both.cpus_peak, both.memory, both.memory_peak) == (80.0, 1.5, 4.0, 150.0, 310.0)
    assert (both.active, both.cpu_pressure, both.received, both.io_pressure) == (50.0, 0.5, 2.0, None)


# --- VMs ------------------------------------------------------------------------------------------


def test_memory_and_cpu_are_those_of_the_process(machine: Machine) -> None:
    machine.add("mvt-1", ALLOCATE.format(mib=64))
    machine.add("mvt-2", BURN, huge_memory=512)
    one = machine.sampler()
    first = time.monotonic()
    one.sample(first)
    burner = machine.running["mvt-2"].pid
    stat = Path(f"/proc/{burner}/schedstat")
    spent = int(stat.read_text().split()[0])
    until(lambda: int(stat.read_text().split()[0]) > spent + 300_000_000)
    one.sample(time.monotonic())
    vms = one.usage(3600.0).vms
    idle, busy = vms["mvt-1"].usage, vms["mvt-2"].usage
    assert idle and busy
    assert 64 < idle.memory < 128 and vms["mvt-1"].peak >= idle.memory and idle.cpus < busy.cpus
    assert vms["mvt-2"].cpu_s > 0.2 and 512 < busy.memory < 576, "huge pages are in no process's resident memory"
    assert one.usage(3600.0, "mvother-").vms == {}, "of another site"
    one.close()


def test_a_vm_that_ends_in_the_middle_leaves_the_others_and_its_last_figures(machine: Machine) -> None:
    machine.add("mvt-1", ALLOCATE.format(mib=32))
    machine.add("mvt-2")
    one = machine.sampler()
    for now in (1.0, 2.0):
        one.sample(now)
    pids = [[str(process.pid)] for process in machine.running.values()]
    assert [path for path in open_files() if path.split("/")[2:3] in pids]
    machine.kill("mvt-1")
    one.sample(3.0)
    machine.close()
    one.sample(4.0)
    ended = one.usage(60.0).vms
    assert ended["mvt-1"].usage is None and ended["mvt-2"].usage is None
    assert ended["mvt-1"].peak > 32
    assert not [path for path in open_files() if path.split("/")[2:3] in pids], "they were closed when the VMs ended"
    one.close()
    assert one.usage(60.0).vms.keys() == {"mvt-1", "mvt-2"}


def test_a_vm_counts_from_when_its_qemu_is_recorded(machine: Machine) -> None:
    machine.write("mvt-1")
    (machine.vms / "mvt-2").mkdir()
    (machine.vms / "something else").mkdir()
    one = machine.sampler()
    for now in (1.0, 2.0):
        one.sample(now)
    assert one.usage(60.0).vms == {}
    machine.add("mvt-1")
    for now in (3.0, 4.0):
        one.sample(now)
    assert one.usage(60.0).vms.keys() == {"mvt-1"}
    one.close()


def busy_vm(machine: Machine) -> tuple[Sampler, float]:
    """Let mvt-1 use CPU for a while. The sampler that has seen it at 1 s and 2 s, and the CPU seconds that it has used
    at least."""
    machine.add("mvt-1", BURN)
    one = machine.sampler()
    one.sample(1.0)
    stat = Path(f"/proc/{machine.running['mvt-1'].pid}/schedstat")
    until(lambda: int(stat.read_text().split()[0]) > 300_000_000)
    one.sample(2.0)
    return one, 0.28  # the counter that is sampled has ticks of 10 ms


def test_another_vm_of_the_same_name_is_found_at_once_and_counts_from_zero(machine: Machine) -> None:
    one, spent = busy_vm(machine)
    assert one.usage(60.0).vms["mvt-1"].cpu_s >= spent
    machine.end("mvt-1")
    machine.add("mvt-1")  # before the end of the other one was seen
    one.sample(3.0)
    assert not one.usage(60.0).vms["mvt-1"].lives
    one.sample(4.0)
    found = one.usage(60.0).vms["mvt-1"]
    assert found.lives and found.cpu_s < spent
    one.close()


def test_a_vm_that_slept_goes_on_counting(machine: Machine) -> None:
    one, spent = busy_vm(machine)
    machine.write("mvt-1", VmPhase.ASLEEP, pid=machine.running["mvt-1"].pid)
    machine.end("mvt-1")
    later = 2.0 + 2 * sampling.KNOWN_AFTER_END
    for now in (3.0, later):
        one.sample(now)
    machine.add("mvt-2")
    one.sample(later + 1.0)
    machine.end("mvt-2")
    one.sample(later + 2.0)
    asleep = one.usage(60.0).vms["mvt-1"]
    assert not asleep.lives and asleep.cpu_s >= spent, "it is remembered for as long as it sleeps"
    machine.add("mvt-1")
    one.sample(later + 3.0 + sampling._LOOK_AGAIN)
    awake = one.usage(60.0).vms["mvt-1"]
    assert awake.lives and awake.cpu_s >= asleep.cpu_s and awake.peak >= asleep.peak
    one.close()


def test_another_process_with_the_same_pid_is_not_the_vm(machine: Machine) -> None:
    machine.add("mvt-1")
    pid = machine.running["mvt-1"].pid
    for wrong in (ProcessIdentity(pid, 1, ProcessIdentity.of(pid).boot_id), ProcessIdentity(pid, 1, "another boot")):
        with pytest.raises(ProcessLookupError):
            VmProbe("mvt-1", wrong, [])


def test_active_memory_and_pressure_come_from_the_control_group(machine: Machine) -> None:
    machine.add("mvt-1")
    group = machine.groups.parent / "mvt-1"
    group.mkdir(parents=True)
    (group / "memory.stat").write_bytes(MEMORY_STAT_V2)
    for what, total in (("cpu", 1_000_000), ("memory", 0), ("io", 500_000)):
        (group / f"{what}.pressure").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull total=9\n")
    one = machine.sampler()
    one.sample(1.0)
    (group / "cpu.pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1250000\n")
    one.sample(2.0)
    usage = one.usage(1e9).vms["mvt-1"].usage
    assert usage and (usage.cpu_pressure, usage.memory_pressure, usage.io_pressure) == (0.25, 0.0, 0.0)
    assert usage.active == pytest.approx((4096 + 8192) / 2**20)
    one.close()


def test_active_memory_is_told_apart_from_inactive_memory() -> None:
    assert active_bytes(MEMORY_STAT_V2) == 4096 + 8192
    version_1 = b"cache 1\ninactive_anon 9\nactive_anon 3\nactive_file 4\ntotal_active_anon 99\ntotal_active_file 99\n"
    assert active_bytes(version_1) == 7


# --- the host -------------------------------------------------------------------------------------


def test_the_host_counts_with_hardware_only(tmp_path: Path) -> None:
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    for place in (
        "proc/net",
        "sys/class/net/eth0/device",
        "sys/class/net/mvbr0",
        "sys/block/sda/device",
        "sys/block/dm-0",
    ):
        (tmp_path / place).mkdir(parents=True)
    (proc / "stat").write_text("cpu  100 10 20 5000 30 5 6 7 50 0\ncpu0 1 1 1 1\n")
    (proc / "meminfo").write_text(
        "MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\nBuffers: 0 kB\nCached: 0 kB\nSwapCached: 0 kB\n"
        "Active: 1024 kB\nInactive: 5 kB\n"
    )
    line = "{}: {} 1 0 0 0 0 0 0 {} 1 0 0 0 0 0 0\n"
    (proc / "net/dev").write_text("Inter-|\n face |\n" + line.format("  eth0", 1000, 200) + line.format("mvbr0", 7, 7))
    (proc / "diskstats").write_text(
        "8 0 sda 1 0 10 0 2 0 20 0 0 0 0\n8 1 sda1 1 0 10 0 2 0 20 0 0 0 0\n253 0 dm-0 1 0 9 0 2 0 9 0 0 0 0\n"
    )
    probe = HostProbe(proc, sys_)
    reading, traffic = probe.read()
    ticks = os.sysconf("SC_CLK_TCK")
    assert reading.cpu_s == (100 + 10 + 20 + 5 + 6 + 7) / ticks, "guests' time is within the users'"
    assert (reading.memory, reading.active) == (6.0, 1.0)
    assert (reading.received, reading.sent) == (1000, 200) and traffic[b"mvbr0"] == (7, 7)
    assert (reading.read, reading.written) == (10 * 512, 20 * 512)
    assert reading.pressures == (UNKNOWN,) * 3, "this kernel does not tell"
    probe.close()


def test_the_load_is_rounded_and_unknown_without_samples(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine.sampler()
    assert one.load() is None
    now = time.monotonic()
    for second in range(3):
        one.sample(now + second)
    load = one.load()
    assert load is not None and load.memory % 64 == 0 and round(load.cpus, 1) == load.cpus
    monkeypatch.setattr(sampling, "_LOAD_STALE", -1e9)
    assert one.load() is None
    one.close()


def test_the_thread_goes_on_after_a_defect_and_ends_when_it_is_told(machine: Machine) -> None:
    one = Sampler(machine.vms, 0.01, lambda: [machine.groups])
    taken, real = [], one.sample

    def fail_first(now: float) -> None:
        taken.append(now)
        if len(taken) < 3:
            raise ZeroDivisionError
        real(now)

    one.sample = fail_first  # type: ignore[method-assign]
    stop = threading.Event()
    thread = threading.Thread(target=one.run, args=(stop,))
    thread.start()
    until(lambda: one.usage(60.0).usage is not None)
    stop.set()
    thread.join(30)
    assert not thread.is_alive() and len(taken) >= 4


def test_all_samples_together_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_BYTES", 100 * 4 * WIDTH * 3)
    for number in (1, 2):
        machine.add(f"mvt-{number}")
    one = machine.sampler()
    for now in range(500):
        one.sample(float(now))
    for name in ("mvt-1", "mvt-2"):
        usage = one.usage(1e9).vms[name].usage
        assert usage and usage.span <= 100 + CHUNK
    one.close()
