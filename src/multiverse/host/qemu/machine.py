"""QEMU's command line: the machine that a template and its clones share, device by device, in the same order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from multiverse.core.model.basics import Size
from multiverse.core.model.machine import HOST_CPU
from multiverse.guest.protocol import PORT

# System calls that QEMU does not need, above all to run a program, are refused (seccomp(2)): a guest that has taken
# over its QEMU cannot use them.
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_MODERN = "disable-legacy=on,disable-modern=off"
# Numbers of the devices that are PCI Express root ports, for devices plugged later.
PORTS = (0x08, 0x09, 0x10, 0x11)
WINDOW = 256  # MiB that the guest's kernel keeps below each of them for large BARs
DIMMS = 8  # slots for memory plugged later
HUGE_PAGE = 2 << 20  # bytes; memory is plugged in blocks of 128 MiB, so pages of 1 GiB would not fit
# An emulated CPU needs no mitigations and has one clock. Without `lpj` each plugged CPU calibrates for 0.2 s; the value
# scales only the delays of drivers for real devices, which an emulated device does not need.
_TCG_CMDLINE = ("mitigations=off", "tsc=reliable", "lpj=4000000", "cpu_init_udelay=0")
# A kernel that boots with one CPU removes the lock prefixes from its code, and restores them when a CPU is plugged.
# This takes half a second under emulation, and the code is no longer shared with the template.
_CMDLINE = ("noreplace-smp",)
# Emulation before QEMU 8 finds translated code again only at the same virtual address, and address space randomization
# changes it at each start: /bin/true starts in 67 ms with randomization and in 16 ms without; with QEMU 10, in 15 ms
# either way.
_NO_RANDOMIZATION = ("norandmaps",)


class Feature(StrEnum):
    """Features of VMs that a host may support. Operators see these names."""

    VHOST_NET = "vhost-net"  # the kernel moves a VM's frames; its QEMU does not
    HUGE_PAGES = "huge-pages"  # plugged memory consists of pages of 2 MiB
    NATIVE_AIO = "native-aio"  # the kernel reads and writes a full clone's disk asynchronously, past its page cache
    IOTHREAD = "iothread"  # QEMU serves the disk in a thread of its own


@dataclass(frozen=True)
class Accelerator:
    """How guests' instructions are executed."""

    name: str  # `kvm` or `tcg` (emulation)
    tb_size: int = 0  # MiB of emulation's cache of translated code; 0: QEMU's own default, one GiB
    relocates: bool = True  # emulation finds translated code again when the same program lies at another address
    tsc_khz: int = 0  # frequency of the host's time-stamp counter; 0: unknown
    model: str = HOST_CPU  # QEMU's CPU model of guests that run on KVM; emulated guests have all that QEMU emulates

    @property
    def options(self) -> str:
        if self.name == "kvm":
            return "kvm"
        return "tcg,thread=multi" + (f",tb-size={self.tb_size}" if self.tb_size else "")

    @property
    def cpu(self) -> str:
        return self.model if self.name == "kvm" else "max"

    @property
    def cpu_option(self) -> str:
        """QEMU would leave out what the host's CPU lacks of a model, without a word. It ends if it is to enforce it."""
        return self.cpu + ("" if self.cpu in (HOST_CPU, "max") else ",enforce")

    def footprint(self, memory: int) -> int:
        """MiB that the QEMU of a guest with `memory` MiB may take, with its own memory and translated code."""
        return memory + 256 + (0 if self.name == "kvm" else self.tb_size or 1024)  # accel/tcg/region.c

    def devices(self) -> tuple[Path, ...]:
        device = Path("/dev/kvm")
        return (device,) if self.name == "kvm" and device.exists() else ()

    def groups(self) -> list[int]:
        """The groups that may use the accelerator: a QEMU that runs as a user of its own must be in them."""
        try:
            device = Path("/dev/kvm").stat() if self.name == "kvm" else None
        except FileNotFoundError:
            device = None
        return [device.st_gid] if device is not None and device.st_gid else []

    def cmdline(self, image: str) -> str:
        emulated = () if self.name == "kvm" else (*_TCG_CMDLINE, *(() if self.relocates else _NO_RANDOMIZATION))
        return " ".join((image, *_CMDLINE, *emulated))

    @property
    def clock(self) -> tuple[str, ...]:
        """The kernel's parameters for the clock. An emulated CPU shows the host's time-stamp counter
        (softmmu/cpu-timers.c). A guest that waits for the host's CPU while it measures that counter gets a frequency
        that is several times too low (seen: 976 instead of 2596 MHz on a busy host), and its clock is too fast as long
        as it lives."""
        return (f"tsc_early_khz={self.tsc_khz}",) if self.tsc_khz and self.name != "kvm" else ()


@dataclass(frozen=True)
class Memory:
    """Boot memory, `size` in MiB. With `file` it is mapped from there: shared for a template, private (copy-on-write)
    for a clone. `readonly` opens the file, not the memory, read-only; QEMU before 8.2 does not distinguish the two."""

    size: int
    file: Path | None = None
    shared: bool = False
    readonly: bool = False
    restored: bool = False  # memory of its own, by the name that a clone's has: QEMU restores it by that


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """Where a region of shared memory is plugged: the number of the root port, and that of the function there."""

    port: int
    function: int


@dataclass(frozen=True)
class Wiring:
    monitor: int  # a listening socket
    agent: int  # a listening socket
    tap: int
    console: Path
    vhost: int | None = None  # /dev/vhost-net, for a machine with that feature


@dataclass(frozen=True)
class QemuMachine:
    name: str
    accelerator: Accelerator
    cpus: int
    memory: Memory
    limits: Size  # that it can have after plugging
    disk: Path
    disk_format: str
    mac: str
    kernel: Path
    initrd: Path
    cmdline: str
    # The guest is paused when the host's disk is full (see `PausedGuests`); otherwise it sees an error. Other errors,
    # as of a file that exceeds RLIMIT_FSIZE, are the guest's in any case.
    waits_for_room: bool = True
    features: frozenset[Feature] = frozenset()  # without HUGE_PAGES, which is for `hotplug`
    mtu: int = 0  # the largest packet that its interface sends; 0: Ethernet's 1500 bytes
    regions: tuple[Memory, ...] = ()  # memory that it shares with others, before a device for it is plugged

    def as_made(self, model: str, most: Size | None) -> QemuMachine:
        """The same with the CPU model of another QEMU, and the size up to which that can be plugged: QEMU restores a
        state only into the same. What is not known stays."""
        accelerator = replace(self.accelerator, model=model or self.accelerator.model)
        return replace(self, accelerator=accelerator, limits=most or self.limits)

    def shape(self) -> list[str]:
        """The arguments that must be the same for a template and its clones."""
        memory = f"{self.memory.size}M"
        if self.limits.memory > self.memory.size:
            memory += f",slots={DIMMS},maxmem={self.limits.memory}M"
        backing = ",memory-backend=ram" if self.memory.file is not None or self.memory.restored else ""
        board = "q35,usb=off,vmport=off,smm=off,sata=off,smbus=off,dump-guest-core=off,mem-merge=off"
        argv = ["-machine", f"{board}{backing}",
                "-accel", self.accelerator.options, "-cpu", self.accelerator.cpu_option,
                "-smp", f"{self.cpus},maxcpus={max(self.limits.cpus, self.cpus)}", "-m", memory]  # fmt: skip
        for i, device in enumerate(PORTS):
            # Without the reserve the guest cannot place the large BAR of a device that is plugged later.
            where = f"chassis={i + 1},addr={device:x},pref64-reserve={WINDOW}M"
            argv += ["-device", f"pcie-root-port,id=rp{i},bus=pcie.0,{where}"]
        return argv

    def argv(self, binary: str, wiring: Wiring, *, paused: bool, incoming: bool = False) -> list[str]:
        argv = [binary, "-name", self.name, "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none",
                "-no-reboot", "-action", "panic=shutdown,watchdog=shutdown", "-rtc", "base=utc",
                "-global", "migration.x-events=on", "-sandbox", _SANDBOX]  # fmt: skip
        if self.memory.file is not None:
            how = ("on" if self.memory.shared else "off") + (",readonly=on,rom=off" if self.memory.readonly else "")
            argv += [
                "-object",
                f"memory-backend-file,id=ram,size={self.memory.size}M,mem-path={_value(self.memory.file)},share={how}",
            ]
        if self.memory.restored:
            argv += ["-object", f"memory-backend-ram,id=ram,size={self.memory.size}M"]
        for number, region in enumerate(self.regions):
            argv += ["-object", f"memory-backend-file,id={region_id(number)},size={region.size}M,"
                     f"mem-path={region.file},share=on"]  # fmt: skip
        argv += self.shape()
        cmdline = " ".join((self.cmdline, *self.accelerator.clock))
        argv += ["-kernel", str(self.kernel), "-initrd", str(self.initrd), "-append", cmdline,
                 "-chardev", f"socket,id=qmp,fd={wiring.monitor},server=on,wait=off",
                 "-mon", "chardev=qmp,mode=control",
                 "-chardev", f"file,id=console,path={_value(wiring.console)},append=on", "-serial", "chardev:console",
                 "-device", f"virtio-serial-pci,id=vserial,bus=pcie.0,addr=3,max_ports=4,{_MODERN}",
                 "-chardev", f"socket,id=agent,fd={wiring.agent},server=on,wait=off",
                 "-device", f"virtserialport,bus=vserial.0,nr=1,chardev=agent,name={PORT}",
                 *self.disk_argv(), *self.network_argv(wiring)]  # fmt: skip
        if paused:
            argv.append("-S")
        if incoming:
            argv += ["-incoming", "defer"]
        return argv

    def disk_argv(self) -> list[str]:
        """Files below an overlay are opened as usual, so that all clones share the page cache."""
        on_error = f"werror={'enospc' if self.waits_for_room else 'report'},rerror=report"
        native = ",cache.direct=on,aio=native" if Feature.NATIVE_AIO in self.features else ""
        argv, served = [], ""
        if Feature.IOTHREAD in self.features:
            argv, served = ["-object", "iothread,id=io"], ",iothread=io"
        return [*argv, "-blockdev", f"driver=file,node-name=file,filename={_value(self.disk)},discard=unmap{native}",
                "-blockdev", f"driver={self.disk_format},node-name=disk,file=file,discard=unmap",
                "-device", f"virtio-blk-pci,drive=disk,bus=pcie.0,addr=4,num-queues=1,{on_error},{_MODERN}{served}",
                ]  # fmt: skip

    def network_argv(self, wiring: Wiring) -> list[str]:
        vhost = f",vhost=on,vhostfd={wiring.vhost}" if wiring.vhost is not None else ""
        mtu = f",host_mtu={self.mtu}" if self.mtu else ""
        quiet = "romfile=,guest_announce=off"  # no boot ROM; a clone announces itself once it has its address
        return ["-netdev", f"tap,id=net,fd={wiring.tap}{vhost}",
                "-device", f"virtio-net-pci,netdev=net,mac={self.mac},bus=pcie.0,addr=5,{quiet},{_MODERN}{mtu}",
                ]  # fmt: skip


def region_id(number: int) -> str:
    return f"region{number}"


def limits(base: Size, capacity: Size, most: Size) -> Size:
    """The size up to which VMs of a template of size `base` can be plugged: at most `most`, and the host's capacity.
    Each GiB of room costs the guest memory, even if it is never plugged."""
    return Size(
        max(base.cpus, min(most.cpus, capacity.cpus)),
        max(base.memory, min(most.memory, -(-capacity.memory // 128) * 128)),
    )


def _value(path: Path) -> str:
    """A path as a value in an option list, where commas are doubled (qemu(1))."""
    return str(path).replace(",", ",,")
