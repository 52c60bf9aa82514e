"""The host library for QEMU: all operations on the VMs of one machine.

It needs no controller, database, settings or event loop. Several processes may use it for the same host at once, as
long as they agree on its directories. Calls block; they may be made from any thread. All calls that change something
mean *ensure*: repeating one is success, and after an error or an interruption the same call may be repeated.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import Identity, Member, Neighbour, User
from multiverse.core.model.vm import Stage, TemplateKey, VmCondition, VmSeen
from multiverse.guest.protocol import (
    ATTACH,
    AUDIT,
    CUT,
    REST,
    THAW,
    WRITES_SHARED_FILES,
    JobGuest,
    add_user_message,
    freeze_message,
    join_job_message,
    serve_tasks_message,
    take_functions_message,
    take_regions_message,
)
from multiverse.host import manifest, namespaces, path_security, process
from multiverse.host.manifest import Specification
from multiverse.host.network import open_tap, set_isolated
from multiverse.host.qemu import lifecycle, saves, sleeping, templates
from multiverse.host.qemu.channels import AgentChannel, Monitor
from multiverse.host.qemu.checkpoints import Checkpoint
from multiverse.host.qemu.context import HostContext, MoveConfig, QemuHostConfig
from multiverse.host.qemu.hotplug import allocate_regions, allocation_group, plug_functions, plug_regions, region_places
from multiverse.host.qemu.machine import PORTS
from multiverse.host.qemu.moves import VmMoves
from multiverse.host.qemu.observation import HostObserver
from multiverse.host.vxlan import members_owner
from multiverse.system.kernel import SharedMemory
from multiverse.system.locks import locked_directory

_ANSWER_TIMEOUT = 10.0  # seconds for an answer that needs no work; a guest may be busy
_SYNC_TIMEOUT = 20.0  # seconds for a guest to write its file systems back before it is saved
_FREEZE_TIMEOUT = 50.0  # the same, and for all processes to stop
_DRIVER_TIMEOUT = 240.0  # seconds until a guest has found and taken functions: see `guest.agent.devices`
_PLUG_TIMEOUT = 60.0  # seconds for devices to appear in a guest
_OPEN_FILES = 65536
_GIVEN = {"took_functions": "virtual functions", "took_regions": "shared memory"}


log = structlog.get_logger(__name__)


class QemuHost:
    """One host. Its errors are those of `core.errors`.

    A call about a running VM raises `Gone` if it is not started, `Unknown` if it does not answer, and `Broken` if its
    guest or QEMU reports a failure.
    """

    def __init__(self, config: QemuHostConfig) -> None:
        """Raises `Refused` if there is no such QEMU, and `Broken` if KVM is wanted and does not run guests. On the host
        this only writes caches and the firewall's table."""
        self.config = config
        _raise_file_limit()
        process.set_all_close_on_exec()
        self._context = HostContext(config)
        self.accelerator = self._context.accelerator
        self._observer = HostObserver(self._context)
        self.moves = VmMoves(self._context, config.moves or MoveConfig())
        self._closed = False
        self._settling = threading.Thread()

    def check(self) -> None:
        """Make the host's directories. Raises `Refused` or `Broken` if this process may not give VMs users, namespaces
        and taps of their own, or if others can write to the directories."""
        config = self.config
        self._context.uids.check()
        os.close(open_tap("mvt%d", None))
        for place, mode in ((config.templates, 0o711), (config.vms, 0o711), (config.run, 0o700)):
            path_security.make_directory(place, mode)
        if self._context.uids.template_user is not None:
            namespaces.check(self._context.system, config.run)
        if config.saves is not None:
            saves.prepare(config.saves, config.prefix)
            sleeping.remove_orphans(self._context)
        if config.copies is not None and not saves.prepare_copies(config.copies, config.prefix):
            reason = f"there is no directory {config.copies}: mount its file system, or make the directory"
            log.warning("states are not copied (save.copy)", reason=reason)
        if config.images.exists():  # each image is checked when it is used
            path_security.check(config.images)

    def restore_vxlan(self) -> None:
        """Make the VXLAN, its rules and the entries of this host's VMs, if there is to be one. See `Vxlan.restore`."""
        vms = self.config.vms
        if (vxlan := self._context.vxlan) is not None:
            own = members_owner(self.config.host)
            vxlan.restore(lambda owner: vxlan.config.is_of_others(owner) or owner == own or (vms / owner).exists())

    def close(self) -> None:
        """End all connections and builds of templates. Calls that wait end with an error. VMs and templates stay."""
        self._closed = True
        self.moves.close()
        for name in templates.list_builds(self.config.templates):
            templates.kill_builds(self.config.templates, name)
        self._context.names.close()
        self._context.connections.shut_down()
        self._context.outputs.close()

    def observe(self) -> HypervisorView:
        """The host, its templates and its VMs, with the remains of dead ones, and with those that are to come from
        other hosts."""
        coming = self.moves.coming()  # first: one that has come is shown as it is
        view = self._observer.observe()
        if any(seen.condition is VmCondition.ASLEEP and seen.reason for seen in view.vms.values()):
            self.settle_sleepers()
        host = self.config.host
        news = {name: VmSeen(name, host, VmCondition.CREATING, "it is to come from another host", token=spec.token)
                for name, spec in coming.items() if name not in view.vms}  # fmt: skip
        return replace(view, vms={**view.vms, **news}) if news else view

    def resume_paused(self) -> None:
        """Let guests go on that were paused because the disk was full, if it has room again."""
        self._context.paused.resume()

    def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """See `HostObserver.measure`."""
        return self._observer.measure()

    def list_vms(self) -> list[str]:
        """The names of all VMs, also of those that exist in part."""
        return [path.name for path in self._observer.vm_directories()]

    def image_abilities(self, name: str) -> frozenset[str]:
        """The abilities of guests of that image on this host; none if there is no such image."""
        try:
            found = self._context.images.found(name)
        except Refused:
            return frozenset()
        return self._context.abilities.abilities(found)

    def audit(self, name: str) -> Mapping[str, str | int]:
        """Facts of the guest's start: digests of ids and random bytes, CPUs, memory. Empty after a restart."""
        return self._context.connections.audit(name)

    def examine(self, name: str) -> Mapping[str, str | int]:
        """Current facts of a running guest, with those of its start. `skew` is how far its clock is from ours, in
        milliseconds beyond what asking took."""
        channel = self._context.connections.started_channel(name)
        asked = time.time_ns() // 1_000_000
        facts = dict(channel.ask(AUDIT, "audited", _ANSWER_TIMEOUT).audit)
        answered = -(-time.time_ns() // 1_000_000)
        now = int(facts.pop("now", 0))
        return {**facts, "skew": min(0, now - asked) or max(0, now - answered)}

    def build_template(self, which: TemplateKey, abandoned: Callable[[], bool] = lambda: False) -> list[Stage]:
        """Boot and freeze a template; templates that cannot be used any more are removed first. `abandoned` says
        whether the template was deleted since this call was asked for; then `Gone` is raised. Raises `Refused` if there
        is no such image, `Broken` if it does not boot, `Exhausted` if there is no room, and `Gone` if there is no such
        host."""
        self._check_host(which.host)
        context, config = self._context, self.config
        context.uids.check()
        image = context.image(which.image)
        path_security.make_directory(config.templates, 0o711)
        for stale in templates.delete_unusable(config.templates, partial(templates.is_usable, context)):
            context.sealed.discard(config.templates / stale / "memory")
        return templates.build(context, image, which, lambda: self._closed or abandoned())

    def delete_template(self, which: TemplateKey) -> None:
        """Remove a template. A build in progress is ended, not waited for. VMs that were forked from the template go
        on; absent is success. Raises `Gone` if there is no such host."""
        self._check_host(which.host)
        self._delete(templates.directory_name(which))

    def delete_all_templates(self) -> None:
        """Remove every template of this host, finished or not, whichever process built it."""
        if self.config.templates.exists():
            path_security.check(self.config.templates)
        for name in templates.list_names(self.config.templates):
            self._delete(name)

    def _delete(self, name: str) -> None:
        self._context.sealed.discard(self.config.templates / name / "memory")
        templates.delete(self.config.templates, name)

    def share_memory(self, spec: Specification, ids: Sequence[str], size: int) -> SharedMemory:
        """Memory for this VM inside of a job to share with others: a region of `size` MiB for each id. Raises `Refused`
        if such a VM has no room for them, and what `allocate_regions` raises."""
        region_places(len(ids), size, len(PORTS) - spec.functions)
        return allocate_regions(self._context.groups(spec.job_groups), allocation_group(spec.name), ids, size)

    def forget_sharing(self, name: str, job_groups: Sequence[str]) -> None:
        """Remove the remains of a process that ended within `share_memory` for that VM. Absent is success."""
        self._context.groups(job_groups).remove(allocation_group(name))

    def create(self, spec: Specification, memory: SharedMemory | None = None) -> list[Stage]:
        """Create a VM, paused and without an identity. See `lifecycle.create`."""
        return lifecycle.create(self._context, spec, memory)

    def start(self, name: str, size: Size, identity: Identity, token: str = "") -> list[Stage]:
        """Let a VM run until its daemons have been started, and until it accepts tasks of its job. See
        `lifecycle.start`."""
        stages = lifecycle.start(self._context, name, size, identity, token)
        if (tasks := identity.tasks) is not None:
            guest = JobGuest(tasks.hostname, identity.address, tasks.hosts, tasks.vms, tasks.nodes, mtu=0)
            self.join_job(name, guest)
            self.serve_tasks(name, tasks.token, tasks.commands)
        return stages

    def add_user(self, name: str, user: User, group: int = 0, token: str = "") -> None:
        """Add a user to a started guest, and set its clock. Before the user's job can begin, the VM may reach `group`,
        if it is not 0. Raises also what `manifest.refuse_other` raises."""
        self._context.check_name(name)
        manifest.refuse_other(manifest.read(self._context.paths(name).home), token)
        channel = self._context.connections.started_channel(name)
        home = self._context.paths(name).home
        if group:
            self._join_group(name, group)
        names = self._context.names.first(name, group)
        channel.ask(add_user_message(user, names), "user_added", _ANSWER_TIMEOUT)
        with locked_directory(home, create=False):
            known = manifest.read(home)
            if known is not None and user.uid not in known.users_added:
                manifest.write(home, replace(known, users_added=(*known.users_added, user.uid)))

    def _join_group(self, name: str, group: int) -> None:
        """Let a VM that has had no group reach this one."""
        home, firewall = self._context.paths(name).home, self._context.firewall
        with locked_directory(home, create=False):
            known = manifest.read(home)
            if known is None:
                return
            if known.group != group:
                known = replace(known, group=group)
                manifest.write(home, known)
            firewall.allow(known)
            if firewall.separates(known):
                set_isolated(name, False)

    def freeze(self, name: str, token: str = "", *, script: bool = True) -> None:
        """Freeze the processes of a VM's job. See `guest.agent.saving`. That is recorded before: whoever finds them
        stopped without knowing why lets them go on. `script`: the VM has the batch script."""
        self._check_stays(name, token)
        self._record(name, freezing=True)
        message = freeze_message(_SYNC_TIMEOUT, script=script)
        self._ask_to_save(name, token, message, "frozen", _FREEZE_TIMEOUT, frozen=True)

    def cut(self, name: str, token: str = "") -> None:
        """Cut the frozen job of a VM off from the scheduler."""
        self._ask_to_save(name, token, CUT, "cut", _ANSWER_TIMEOUT, frozen=True)

    def save(self, name: str, token: str, saved: str, key: str = "") -> list[Stage]:
        """Write a VM to the storage, encrypted if there is a key. See `saves.save`."""
        self._let_rest(name, token)
        return saves.save(self._context, name, saved, key)

    def checkpoint(
        self, name: str, token: str, saved: str, key: str = "", *, shared_files: bool = False
    ) -> list[Stage]:
        """Write a VM to the storage while its job goes on. Without `shared_files` that is refused to a job that writes
        to shared files beside the output of its script. See `Checkpoint.write`."""
        self._context.check_name(name)
        return self._checkpoint(name, saved, key, shared_files=shared_files).write(token)

    def settle_checkpoints(self) -> None:
        """Let VMs go on whose checkpoints an earlier process has begun, in threads."""
        for name in self.list_vms():
            known = manifest.read(self._context.paths(name).home)
            if known is not None and known.checkpoint:
                checkpoint = self._checkpoint(name, known.checkpoint)
                threading.Thread(target=_settle, args=(checkpoint,), name="checkpoint", daemon=True).start()

    def _checkpoint(self, name: str, saved: str, key: str = "", *, shared_files: bool = False) -> Checkpoint:
        message = freeze_message(_SYNC_TIMEOUT, checkpoint=True, shared_files=shared_files)
        freeze = partial(self._ask_guest, name, message, "frozen", _FREEZE_TIMEOUT, frozen=True)
        thaw = partial(self._thaw, name)
        return Checkpoint(self._context, name, saved, key, freeze, thaw, lambda: self._closed)

    def sleep(self, name: str, token: str, number: int, identity: Identity, bridge: str, key: str = "") -> list[Stage]:
        """Free the memory of a VM whose job is suspended. See `sleeping.sleep`."""
        found = sleeping.StandIn(identity=identity, bridge=bridge)
        return sleeping.sleep(self._context, name, token, number, found, key)

    def wake(self, name: str, token: str, number: int, *, runs: bool, key: str = "") -> list[Stage]:
        """Let a VM go on that sleeps. See `sleeping.wake`."""
        return sleeping.wake(self._context, name, token, number, runs=runs, key=key)

    def settle_sleepers(self) -> None:
        """Complete what an earlier process has left incomplete, and start what stands in for VMs again, in a thread: a
        VM that is falling asleep or waking is waited for."""
        if not self._settling.is_alive() and not self._closed:
            settle = partial(sleeping.settle, self._context)
            self._settling = threading.Thread(target=settle, name="sleepers", daemon=True)
            self._settling.start()

    def copy_saved(self, saved: str, key: str = "") -> None:
        """Copy a saved VM to the other storage. See `saves.copy`."""
        saves.copy(self._context, saved, key)

    def keep(self, name: str, token: str, saved: str) -> None:
        """Keep a VM in memory, because it cannot be written to the storage. See `saves.keep`."""
        self._let_rest(name, token)
        saves.keep(self._context, name, saved)

    def _let_rest(self, name: str, token: str) -> None:
        """Cut the job off from its run, in case somebody else queued it again before that, and end the daemons."""
        self._check_stays(name, token)
        if saves.is_running(self._context, name):  # or else an earlier call has stopped it
            self.cut(name, token)
            self._ask_to_save(name, token, REST, "rests", _ANSWER_TIMEOUT, frozen=True)

    def thaw(self, name: str, token: str = "") -> None:
        """Let the frozen processes of a VM go on: in a restored one within the next run of the job."""
        self._check_stays(name, token)
        self._thaw(name)

    def _thaw(self, name: str) -> None:
        known = manifest.read(self._context.paths(name).home)
        restored = known is not None and known.saved
        message, answer = (ATTACH, "attached") if restored else (THAW, "thawed")
        self._ask_guest(name, message, answer, _ANSWER_TIMEOUT, frozen=False)

    def discard(self, saved: str) -> None:
        """Remove a saved VM from the storages, complete or not, and from memory. Absent is success."""
        self.discard_kept(saved)
        self.discard_files(saved)

    def discard_kept(self, saved: str) -> None:
        lifecycle.discard_kept(self._context, saved)

    def discard_files(self, saved: str) -> None:
        """Hangs for as long as a file system of a storage does."""
        saves.discard(self._context, saved)

    def _check_stays(self, name: str, token: str) -> None:
        """Raise `Refused` if a VM of that name is moving, or a checkpoint of it is being made, and what
        `manifest.refuse_other` raises."""
        self._context.check_name(name)
        known = manifest.read(self._context.paths(name).home)
        manifest.refuse_other(known, token)
        manifest.refuse_moving(known)
        if known is not None and known.checkpoint:
            raise Refused(f"a checkpoint of VM {name} is being made", hint="try again when it is complete")

    def _ask_to_save(self, name: str, token: str, message: bytes, answer: str, timeout: float, *, frozen: bool) -> None:
        """Ask a guest for a step, and record whether its job is frozen then. Raises also what `manifest.refuse_other`
        raises."""
        self._check_stays(name, token)
        self._ask_guest(name, message, answer, timeout, frozen=frozen)

    def _ask_guest(self, name: str, message: bytes, answer: str, timeout: float, *, frozen: bool) -> None:
        report = self._context.connections.started_channel(name).ask(message, answer, timeout, or_else="refused")
        if report.type == "refused" and report.reason.startswith(WRITES_SHARED_FILES):
            raise Refused(report.reason, hint="if newer files do no harm, ask for checkpoints with shared-files")
        if report.type == "refused":
            raise Broken(f"in the guest of VM {name}: {report.reason}", hint="see its console log beside its manifest")
        self._record(name, frozen=frozen, freezing=False)

    def _record(self, name: str, **changes: bool) -> None:
        home = self._context.paths(name).home
        with locked_directory(home, create=False):
            known = manifest.read(home)
            if known is not None and (changed := replace(known, **changes)) != known:  # type: ignore[arg-type]
                manifest.write(home, changed)

    def tell(self, members: Collection[Member], gone: Collection[str], *, whole: bool) -> None:
        """Let VMs reach each other, by address and by name: see `ports.Groups.tell`. Raises `Exhausted` or `Broken` if
        a part of it failed; then the controller tells all again."""
        firewall, vxlan = self._context.firewall, self._context.vxlan
        for name in firewall.learn(members, gone, whole=whole):
            set_isolated(name, False)
        if vxlan is not None:
            vxlan.replace_members(self.config.host, firewall.members.values())
        self._context.names.changed()

    def connect(self, name: str, neighbours: Iterable[Neighbour], token: str = "") -> None:
        """Let a VM reach these addresses of other hosts through the VXLAN, beside those that it was started with.
        Raises `Gone` if there is no such VM, and what `Vxlan.add` and `manifest.refuse_other` raise."""
        self._context.check_name(name)
        vxlan, home = self._context.vxlan, self._context.paths(name).home
        if vxlan is None:
            raise Refused(f"host {self.config.host} has no VXLAN", hint="set vxlan.enabled on all hosts")
        manifest.refuse_other(manifest.read(home), token)
        if home.exists():
            vxlan.add(name, neighbours)
            if home.exists():
                return
            vxlan.drop(name)  # it was destroyed meanwhile
        raise Gone(f"there is no VM {name}", hint="create it first")

    def join_job(self, name: str, guest: JobGuest) -> None:
        """Give the guest of a VM inside of a job its name and address in the job's network, and the job's VMs."""
        channel = self._context.connections.started_channel(name)
        channel.ask(join_job_message(guest), "joined_job", _ANSWER_TIMEOUT)

    def plug_functions(self, name: str, uid: int) -> None:
        """Plug the virtual functions of a running VM, and make the guest give them to that user."""
        channel = self._context.connections.started_channel(name)
        message = take_functions_message(plug_functions(self._context, name), uid)
        _give(channel, name, message, "took_functions", _DRIVER_TIMEOUT)

    def return_functions(self) -> None:
        """Return the virtual functions that are recorded for VMs that do not exist."""
        self._context.functions.release_unclaimed(lambda name: (self.config.vms / name).exists())

    def serve_tasks(self, name: str, token: str, directory: str) -> None:
        """Make the guest accept the tasks of its job, on connections to its `TASKS_PORT` that begin with this token.
        The host has Slurm's commands in `directory`."""
        channel = self._context.connections.started_channel(name)
        channel.ask(serve_tasks_message(token, directory), "serving_tasks", _ANSWER_TIMEOUT)

    def plug_regions(self, name: str, memory: SharedMemory, uid: int) -> None:
        """Plug the shared memory of a running VM, and make the guest give it to that user (`guest.agent.devices`)."""
        channel = self._context.connections.started_channel(name)
        places = region_places(len(memory.fds), memory.size)
        with Monitor.connect(self._context.paths(name).monitor) as monitor:
            plug_regions(monitor, name, places)
        devices = [(PORTS[place.port], place.function) for place in places]
        _give(channel, name, take_regions_message(devices, uid), "took_regions", _PLUG_TIMEOUT)

    def control_groups(self, name: str, job_groups: Sequence[str]) -> list[str]:
        """The directories of the control groups of a VM inside the job that has these groups."""
        return self._context.groups(job_groups).directories(name)

    def open_process(self, name: str) -> int:
        """A pidfd of the QEMU of a VM, which the caller closes."""
        known = manifest.read(self._context.paths(name).home)
        handle = known.process.open() if known is not None and known.process.is_alive() else None
        if handle is None:
            raise Gone(f"VM {name} does not run", hint="see the log of the agent")
        return handle

    def kill(self, names: Collection[str]) -> None:
        """Kill the QEMUs of these VMs, and what stands in for them, at once, without waiting for their ends or for a
        VM's lock. `destroy` removes the rest, and ends a QEMU that is not recorded. Absent is success."""
        for name in names:
            if (known := manifest.read(self._context.paths(name).home)) is not None:
                process.kill(known.process, timeout=0.0)
                if known.sleep is not None:
                    process.kill(known.sleep.process, timeout=0.0)

    def destroy(self, name: str, grace: float, token: str = "") -> None:
        """End a VM and remove all of it. See `lifecycle.destroy`."""
        self.moves.withdraw(name)
        sleeping.end(self._context, name, token)
        lifecycle.destroy(self._context, name, grace, token)

    def _check_host(self, host: str) -> None:
        if host != self.config.host:
            raise Gone(f"there is no host {host}", hint=f"this is {self.config.host}")


def _give(channel: AgentChannel, name: str, message: bytes, answer: str, timeout: float) -> None:
    try:
        channel.ask(message, answer, timeout)
    except Unknown as error:
        hint = "is its image of this release? Build it again"
        raise Broken(f"the guest of VM {name} did not take its {_GIVEN[answer]}", hint=hint) from error


def _raise_file_limit() -> None:
    """Let this process keep connections to a thousand VMs: the usual soft limit is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _settle(checkpoint: Checkpoint) -> None:
    try:
        checkpoint.settle()
    except MultiverseError as error:  # the controller asks for the checkpoint again
        log.warning("a VM does not go on after its checkpoint", vm=checkpoint.name, reason=str(error))
