"""VMs on this host: create, start, destroy, each from what is on disk alone."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model import CloneKind, Identity, Size, Stage, User, VmSpec
from multiverse.guest.protocol import AUDIT, FLUSH, HELLO, Report, identity_message
from multiverse.guest.protocol import add_user_message as introduction
from multiverse.host import copies, link, manifest, process, templates
from multiverse.host.cages import Cages
from multiverse.host.channel import Channel
from multiverse.host.filter import Filter
from multiverse.host.machine import DIMMS, Accelerator, Machine
from multiverse.host.manifest import Manifest, Phase
from multiverse.host.owners import Owners
from multiverse.host.qmp import Command, QmpError
from multiverse.host.sealed import Sealed
from multiverse.host.session import Paths, Session, remove
from multiverse.host.templates import BOOT_TIMEOUT, Template
from multiverse.images.catalog import Image

_BLOCK = 128  # MiB: x86 Linux takes plugged memory in blocks of this
_WAKE_TIMEOUT = 30.0  # seconds for a restored guest's first byte
_ASK_TIMEOUT = 10.0  # seconds for an answer that needs no work; a guest may be busy
_START_TIMEOUT = 120.0  # seconds for its mounts and daemons
_WORKERS = 128  # QEMU's pool has 64 at most (util/thread-pool.c), and some it starts for a moment
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Laps:
    """Measures stages that follow each other."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self.stages.append(Stage(name, now - self._last))
        self._last = now


@dataclass(frozen=True)
class Places:
    """Where VMs are kept on this host, what they are connected to, and the QEMU that runs them."""

    vms: Path
    run: Path
    bridge: str
    binary: str
    uids: tuple[int, int] = (0, 0)  # the first user for QEMUs, and how many; none: they run as ours
    maps_readonly: bool = True  # that QEMU can, by rom=off: 8.2 and later; see `sealed`
    prefix: str = "mv"  # what the names of our VMs begin with
    accelerator: Accelerator = Accelerator("tcg")

    def of(self, name: str) -> Paths:
        return Paths(self.vms / name, self.run / name)


def ladder(memory: int, plugged: int) -> list[int]:
    """Sizes in MiB of the modules by which a guest of `memory` MiB gets `plugged` MiB more.

    Linux describes each page of 4 KiB in 64 bytes, of a whole module before any of it can be used: so none is more than
    eight times what is there before it, of which it then takes an eighth."""
    sizes: list[int] = []
    while (left := plugged - sum(sizes)) > 0:
        sizes.append(min(left, 8 * (memory + sum(sizes)) // _BLOCK * _BLOCK or left))
    return sizes


class Vms:
    """The VMs of one host. Open connections are a convenience: without one, it is made again."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._sessions: dict[str, Session] = {}
        self.channels: dict[str, Channel] = {}
        self.audits: dict[str, Report] = {}
        self.owners = Owners(places.vms, *places.uids)
        self.sealed = Sealed()
        self.cages = Cages()
        self.filter = Filter(places.prefix, places.vms)

    # --- create ---------------------------------------------------------------------------------------

    def create(self, spec: VmSpec, image: Image, template: Template | None,
               machine: Callable[[Path, str], Machine]) -> list[Stage]:  # fmt: skip
        """Bring a VM into being, paused; with a template as its instant clone, else ready to boot.

        `machine` makes the VM from its disk. One that exists whole is left as it is.
        """
        lap = Laps()
        self.owners.check()
        paths = self.places.of(spec.name)
        with manifest.locked(paths.home, make=True):
            known = manifest.read(paths.home)
            if known is not None and known.phase is not Phase.MAKING:
                if (known.mac, known.kind) != (spec.mac, spec.kind):
                    raise Refused(f"VM {spec.name} exists already, and is another", hint="destroy it first")
                if lives(known):
                    return []
                raise Broken(f"VM {spec.name} is dead", hint="destroy it first")
            if known is not None or any(paths.home.iterdir()):
                self._end(spec.name, paths, known)  # what a cut create left
                remove_files(paths)
            try:
                self._sessions[spec.name] = self._launch(spec, paths, image, template, machine, lap)
            except (OSError, Broken) as error:
                if template is not None and not template.state.exists():  # dropped under it, at whatever stage
                    raise Gone(f"the template of {spec.image} is gone", hint="it is made again on demand") from error
                if isinstance(error, Broken):
                    raise
                raise Exhausted(
                    f"cannot make VM {spec.name}: {error}", hint=f"is there room in {self.places.vms}?"
                ) from error
        return lap.stages

    def _launch(self, spec: VmSpec, paths: Paths, image: Image, template: Template | None,
                machine: Callable[[Path, str], Machine], lap: Laps) -> Session:  # fmt: skip
        disk, kind, how = self._disk(spec, paths, image, template)
        lap(how)
        made = machine(disk, kind)
        owner = self.owners.lease(spec.name)
        record = Manifest(spec.name, spec.kind, Phase.MAKING, spec.mac, made.cpus, made.memory.size, boot_id=_BOOT_ID,
                          uid=owner.uid if owner is not None else 0)  # fmt: skip
        manifest.write(paths.home, record)
        if owner is not None:
            owner.admit(paths.home)
            owner.give(disk)

        def spawned(pid: int, started: int) -> None:
            nonlocal record
            record = replace(record, pid=pid, started=started)
            manifest.write(paths.home, record)
            self.cages.put(spec.name, pid, tasks(spec.size))

        self.cages.limit(spec.name, self.places.accelerator.footprint(spec.size.memory), tasks(spec.size))
        with self._mapped(made, template) as (made, fds):
            session = Session.launch(
                made,
                paths,
                self.places.binary,
                tap=spec.name,
                bridge=self.places.bridge,
                paused=True,
                incoming=template is not None,
                owner=owner,
                fds=fds,
                spawned=spawned,
                lap=lap,
            )
        try:
            if template is not None:
                session.restore(template.state)
                lap("restore")
                if spec.spare:
                    self._try_out(session)
                    lap("tried")
            manifest.write(paths.home, replace(record, phase=Phase.PARKED))
        except BaseException:
            session.close()
            raise
        return session

    @staticmethod
    def _try_out(session: Session) -> None:
        """Let a clone that nobody waits for yet wake and say where it is, and stop it there again: then the way from
        its device to its agent is mapped, and emulation has translated it."""
        session.monitor.execute("cont")
        session.channel.send(HELLO, _WAKE_TIMEOUT)
        session.channel.expect(frozenset({"fork_point"}), _WAKE_TIMEOUT)
        session.monitor.execute("stop")

    @contextmanager
    def _mapped(self, machine: Machine, template: Template | None) -> Iterator[tuple[Machine, list[int]]]:
        """The machine as it maps its template's memory, which it cannot write to, and what it has to inherit for it."""
        if template is None:
            yield machine, []
        elif self.places.maps_readonly:
            yield replace(machine, memory=replace(machine.memory, readonly=True)), []
        else:
            fd = self.sealed.open(template)
            try:
                yield replace(machine, memory=replace(machine.memory, file=Path(f"/proc/self/fd/{fd}"))), [fd]
            finally:
                os.close(fd)

    def _disk(self, spec: VmSpec, paths: Paths, image: Image, template: Template | None) -> tuple[Path, str, str]:
        """The VM's disk, its format, and how it was made: `overlay`, `reflink` or `copy`."""
        if template is not None:
            templates.clone_overlay(template, paths.home / "disk.qcow2")
            return paths.home / "disk.qcow2", "qcow2", "overlay"
        if spec.kind is CloneKind.LINKED:
            templates.make_overlay(paths.home / "disk.qcow2", image.disk, "raw")
            return paths.home / "disk.qcow2", "qcow2", "overlay"
        return paths.home / "disk.raw", "raw", copies.copy(image.disk, paths.home / "disk.raw")

    # --- start ----------------------------------------------------------------------------------------

    def start(self, name: str, size: Size, identity: Identity) -> list[Stage]:
        """Plug a VM up to its size, let it run and make it someone; until its daemons have been started."""
        lap = Laps()
        paths = self.places.of(name)
        with manifest.locked(paths.home, make=False) as there:
            known = manifest.read(paths.home) if there else None
            if known is None or known.phase is Phase.MAKING:
                raise Gone(f"there is no VM {name} to start", hint="create it first")
            if not lives(known):
                raise Gone(f"VM {name} is dead", hint="destroy it and create another")
            if (identity.hostname, identity.mac) != (name, known.mac):
                raise Refused(
                    f"VM {name} cannot be {identity.hostname} with {identity.mac}", hint="destroy it and create another"
                )
            if known.phase is Phase.STARTED:
                return []
            session = self._session(name, known, paths)
            plugged = 0
            if known.kind is CloneKind.INSTANT:
                plugged = max(0, -(-(size.memory - known.memory) // _BLOCK) * _BLOCK)
                # It may have been made as another size, before anybody asked for it.
                self.cages.limit(name, self.places.accelerator.footprint(known.memory + plugged), tasks(size))
                self.cages.put(name, known.pid, tasks(size))
                self._plug(session, known, size.cpus, plugged)
            lap("plug")
            resumed = known.phase is Phase.STARTING
            booted = known.kind is not CloneKind.INSTANT
            # Peers are told by their names, which are those of their taps; other hosts are none of the bridge's ports.
            peers = tuple(peer for peer, _ in identity.peers if peer != name and peer.startswith(self.places.prefix))
            known = replace(known, phase=Phase.STARTING, address=identity.address.partition("/")[0], peers=peers)
            manifest.write(paths.home, known)
            self.filter.admit(known)
            link.isolate(name, not peers)
            cpus = known.cpus if booted else max(size.cpus, known.cpus)
            report = self._awaken(session, identity, cpus, plugged, lap, ask=resumed, booted=booted)
            try:
                manifest.write(paths.home, replace(known, phase=Phase.STARTED))
            except Exhausted as error:  # it runs all the same: when asked again, the guest says so
                raise Unknown(f"VM {name} has been started, but: {error.message}", hint=error.hint) from error
            self.audits[name] = report
            # The monitor is not needed while it runs; the channel tells if a daemon ends.
            self._sessions.pop(name, None)
            session.monitor.close()
            self.channels[name] = session.channel
        inside = sum(stage.seconds for stage in report.stages)
        lap("answer")
        *before, answer = lap.stages
        return [*before, *report.stages, Stage("answer", max(0.0, answer.seconds - inside))]

    def _awaken(self, session: Session, identity: Identity, cpus: int, plugged: int, lap: Laps, *,
                ask: bool, booted: bool) -> Report:  # fmt: skip
        """Let the guest run and become someone. `ask`: it may have been told before; `booted`: it comes up first."""
        channel = session.channel
        if ask or booted:
            session.monitor.execute("cont")
            channel.send(HELLO, _WAKE_TIMEOUT)
            word = channel.expect(frozenset({"fork_point", "becoming", "started"}), BOOT_TIMEOUT)
            lap("boot" if booted else "ask")
            if word.type == "started":
                return word
            if word.type == "becoming":
                return channel.expect(frozenset({"started"}), _START_TIMEOUT)
            channel.send(identity_message(identity, cpus, plugged), _WAKE_TIMEOUT)
        else:
            # The identity waits in the channel when the guest wakes.
            rest = channel.queue(identity_message(identity, cpus, plugged))
            session.monitor.execute("cont")
            channel.send(rest, _WAKE_TIMEOUT)
        channel.expect(frozenset({"forked"}), _WAKE_TIMEOUT)
        lap("first_byte")
        return channel.expect(frozenset({"started"}), _START_TIMEOUT)

    def _plug(self, session: Session, known: Manifest, cpus: int, plugged: int) -> None:
        """Plug what is missing. What an earlier, cut start has plugged is found by its id and left."""
        present = {d["name"] for d in session.monitor.execute("qom-list", path="/machine/peripheral")}
        commands: list[Command] = []
        for number, size in enumerate(ladder(known.memory, plugged)):
            if f"dimm{number}" in present:
                continue
            if number >= DIMMS:
                raise Exhausted(f"VM {known.name} has no memory slot left", hint="make it anew")
            backend = {"qom-type": "memory-backend-ram", "id": f"mem{number}", "size": size << 20}
            commands += [
                ("object-add", backend),
                ("device_add", {"driver": "pc-dimm", "id": f"dimm{number}", "memdev": f"mem{number}"}),
            ]
        if cpus > known.cpus:
            free = [c for c in session.monitor.execute("query-hotpluggable-cpus") if "qom-path" not in c]
            free.sort(key=lambda c: tuple(sorted(c["props"].items())))
            missing = [f"cpu{i}" for i in range(known.cpus, cpus) if f"cpu{i}" not in present]
            if len(free) < len(missing):
                raise Exhausted(
                    f"VM {known.name} cannot have {cpus} CPUs", hint="its template was made for fewer: drop it"
                )
            commands += [
                ("device_add", {"driver": c["type"], "id": i, **c["props"]})
                for i, c in zip(missing, free, strict=False)
            ]
        try:
            if commands:
                session.monitor.execute_all(commands)
        except QmpError as error:
            raise Exhausted(f"cannot plug VM {known.name} up to {cpus} CPUs and {plugged} MiB more: {error.message}",
                            hint="does its template allow as much? see host.cores, host.memory") from error  # fmt: skip

    def _session(self, name: str, known: Manifest, paths: Paths) -> Session:
        session = self._sessions.get(name)
        if session is None or (session.pid, session.started) != (known.pid, known.started):
            session = Session.rejoin(known.pid, known.started, paths)
            self._sessions[name] = session
        return session

    # --- examine --------------------------------------------------------------------------------------

    def introduce(self, name: str, user: User) -> None:
        """Tell a guest that has been started of one more user. `Gone` if it is not started, `Unknown` if it does not
        answer, `Broken` if it could not."""
        self._started_channel(name).ask(introduction(user), "introduced", _ASK_TIMEOUT)
        home = self.places.of(name).home
        with manifest.locked(home, make=False):
            known = manifest.read(home)
            if known is not None and user.uid not in known.introduced:
                manifest.write(home, replace(known, introduced=(*known.introduced, user.uid)))

    def examine(self, name: str) -> dict[str, str | int]:
        """What a guest that has been started says of itself, now and when it was; `skew` is how far its clock is from
        ours, in milliseconds beyond what asking took. `Gone` if it is not started, `Unknown` if it does not answer."""
        channel = self._started_channel(name)
        asked = time.time_ns() // 1_000_000
        facts = dict(channel.ask(AUDIT, "audited", _ASK_TIMEOUT).audit)
        heard = -(-time.time_ns() // 1_000_000)
        now = int(facts.pop("now", 0))
        return {**facts, "skew": min(0, now - asked) or max(0, now - heard)}

    def _started_channel(self, name: str) -> Channel:
        paths = self.places.of(name)
        known = manifest.read(paths.home)
        if known is None or known.phase is not Phase.STARTED or not lives(known):
            raise Gone(f"there is no VM {name} that runs", hint="see `multiverse vms`")
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = Channel(paths.agent)
        return channel

    # --- destroy --------------------------------------------------------------------------------------

    def destroy(self, name: str, grace: float) -> None:
        """End a VM and remove all of it. `Broken` if its process cannot be ended."""
        paths = self.places.of(name)
        if not paths.home.exists() and not paths.run.exists():
            return self._forget(name)
        known = manifest.read(paths.home)
        if grace > 0 and known is not None and known.phase in (Phase.STARTED, Phase.STARTING) and lives(known):
            self._flush(name, paths, grace)
        # Ended before the lock is had: whoever holds it, waiting for this guest, then lets go.
        if known is not None and lives(known):
            process.end(known.pid, known.started)
        # Not made anew: another destroy may have removed it meanwhile and returned, and then nothing is left.
        with manifest.locked(paths.home, make=False):
            known = manifest.read(paths.home)
            self._end(name, paths, known)
            self._forget(name)
            link.remove_tap(name)
            self.cages.remove(name)
            if known is not None:
                self.filter.forget(known)
            self.owners.release(name, known.uid if known is not None else 0)
            remove(paths)
        self.filter.sweep()

    def _flush(self, name: str, paths: Paths, grace: float) -> None:
        deadline = time.monotonic() + grace
        try:
            # Taken out, so that no look reads from it meanwhile; QEMU serves one connection at a time.
            channel = self.channels.pop(name, None)
            if channel is None and name in self._sessions:
                return  # its start is under way, or has failed: no job has written anything
            channel = channel or Channel(paths.agent)
        except MultiverseError:
            return
        try:
            channel.ask(FLUSH, "flushed", max(0.0, deadline - time.monotonic()))
        except MultiverseError:
            return  # it had its time
        finally:
            channel.close()

    def _end(self, name: str, paths: Paths, known: Manifest | None) -> None:
        """End its process, the one written down and any that was started before that could be done."""
        suspects = (
            {(known.pid, known.started)} if known is not None and known.pid and known.boot_id == _BOOT_ID else set()
        )
        if known is None or not known.pid:
            suspects.update(process.with_part(f"path={paths.console}"))
        for pid, started in suspects:
            if not process.end(pid, started):
                raise Broken(
                    f"the process {pid} of VM {name} cannot be ended", hint="is it stuck in the kernel? see its stack"
                )

    def close(self) -> None:
        """Hang up everywhere, which ends all waiting. VMs go on; what is on disk is enough to find them again."""
        for session in list(self._sessions.values()):
            session.hang_up()
        for channel in list(self.channels.values()):
            channel.hang_up()

    def _forget(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()
        channel = self.channels.pop(name, None)
        if channel is not None:
            channel.close()
        self.audits.pop(name, None)


def lives(known: Manifest) -> bool:
    """Does its process live? Pids of another boot mean nothing."""
    return known.boot_id == _BOOT_ID and process.alive(known.pid, known.started)


def tasks(size: Size) -> int:
    """How many threads a QEMU may have: one for each CPU, and those that wait for its disk."""
    return size.cpus + _WORKERS


def remove_files(paths: Paths) -> None:
    """Remove what a cut create left, the manifest last; not the directory, for its lock is held."""
    for entry in sorted(paths.home.iterdir(), key=lambda p: p.name == manifest.FILE):
        entry.unlink(missing_ok=True)
    for path in (paths.monitor, paths.agent):
        path.unlink(missing_ok=True)


def raise_file_limit() -> None:
    """Each VM keeps connections open: a thousand of them need more descriptors than the usual soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536, hard))
