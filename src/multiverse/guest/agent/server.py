"""The agent itself: it answers the host's messages, which come by a virtio port, and watches the daemons."""

# ruff: noqa: PTH110, PTH112, PTH123, PTH208

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from typing import Any

from multiverse.guest.agent.connections import end_connections
from multiverse.guest.agent.daemons import Children, DaemonProcess, stop_daemons_at_entry, stopped_pids
from multiverse.guest.agent.devices import take_functions, take_regions
from multiverse.guest.agent.identity import (
    StageTimer,
    add_users,
    clone_facts,
    current_facts,
    mount_one,
    set_host_names,
    set_names,
    set_random_state,
    write_node_files,
)
from multiverse.guest.agent.network import interface, join_network, learn_names, set_mtu, set_network
from multiverse.guest.agent.nfs import forget_client
from multiverse.guest.agent.requests import JobVms, install_commands, install_launcher, uncover
from multiverse.guest.agent.resources import (
    count_cpus,
    raise_kernel_limits,
    raise_process_limits,
    set_allowance,
    use_huge_pages,
    use_plugged,
)
from multiverse.guest.agent.saving import SavedJob
from multiverse.guest.agent.sleeping import fall_asleep, settle_steps
from multiverse.guest.agent.system import (
    DAEMON_TIMEOUT,
    MAX_LINE,
    MNT_DETACH,
    MOST_WAIT,
    PORT,
    USER_ADDED,
    VERSION,
    GuestAgentError,
    ending,
    load_on_demand,
    make_pipe,
    preload_job_programs,
    suppress,
    unmount,
)
from multiverse.guest.agent.tasks import TaskListener

IDENTITY = b'{"type":"identity"'  # how an identity message begins
SAVING = ("freeze", "thaw", "cut", "rest", "attach", "sleep", "rise")  # messages whose failure ends nothing
FORKED = b'{"type":"forked"}\n'


def find_port() -> str:
    """The device of the virtio port that QEMU calls PORT. Waits for the driver to add it. Raises GuestAgentError."""
    base = "/sys/class/virtio-ports"
    deadline = time.monotonic() + DAEMON_TIMEOUT
    while True:
        for entry in os.listdir(base) if os.path.isdir(base) else ():
            with open(f"{base}/{entry}/name") as file:
                if file.read().strip() == PORT and os.path.exists(f"/dev/{entry}"):
                    return f"/dev/{entry}"
        if time.monotonic() > deadline:
            raise GuestAgentError(f"the VM has no virtio port {PORT}")
        time.sleep(0.01)


class HostChannel:
    """JSON lines over the virtio port, each at most `MAX_LINE` bytes, in both directions."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._buffer = bytearray()

    def wait(self) -> list[dict[str, Any]]:
        """Block until messages come; return none if the host closed its end. Clones continue in this read."""
        while True:
            data = os.read(self.fd, 65536)
            if data.startswith(IDENTITY):
                os.write(self.fd, FORKED)  # before anything else, because the host measures the fork by it
            if not data:
                self._buffer.clear()
                return []
            messages = self._feed(data)
            if messages:
                return messages

    def watch(self) -> None:
        """Never block from now on. SIGIO tells when the host opens its end; poll(2) cannot, it returns at once."""
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)

    def send(self, type_: str, **fields: Any) -> None:
        """Send a message. It is lost if no host reads it; the host asks again for what it must know."""
        data = json.dumps({"type": type_, **fields}, separators=(",", ":")).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                if any(event & select.POLLHUP for _, event in poller.poll(5000)):
                    return
            except OSError:
                return

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the host's end is open. Never blocks."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not data:
                self._buffer.clear()  # an incomplete line will never be completed
                return messages, False
            messages += self._feed(data)

    def _feed(self, data: bytes) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        if len(self._buffer) > MAX_LINE:
            self._buffer.clear()
        return messages


CLOCK_TOLERANCE = 0.5  # seconds; a smaller difference is not corrected, because daemons run


def correct_clock(now: float) -> None:
    if abs(now - time.time()) > CLOCK_TOLERANCE:
        time.clock_settime(time.CLOCK_REALTIME, now)


class GuestAgent:
    """Answers the host's messages and watches the daemons. The pipe `wake` gets a byte for each signal."""

    def __init__(self, channel: HostChannel, wake: int) -> None:
        self.channel = channel
        self.wake = wake
        self.poller = select.poll()
        self.saved = SavedJob()
        self.watching: set[int] = set()  # its descriptors
        self.children = Children(self.saved.ended)
        self.mounts: list[str] = []
        self.tasks: TaskListener | None = None
        self.own_address = ("", "")  # and the gateway, as the identity said
        self.job_vms: JobVms = []  # all of the job that the VM is inside of
        self.covered: list[str] = []  # files that Slurm's commands were put over
        self.user_added: int | None = None  # the pipe from which a job reads until its user is known
        # The answer to `hello`. A host that missed a report, or has restarted, asks again.
        self.state: dict[str, Any] = {"type_": "fork_point", "version": VERSION, "possible": count_cpus("possible")}

    def serve(self) -> None:
        """Wait at the fork point for an identity, then answer messages until the VM ends."""
        while self.state["type_"] == "fork_point" and (messages := self.channel.wait()):
            for message in messages:
                self.handle(message)
        self.channel.watch()
        poller = self.poller
        poller.register(self.wake, select.POLLIN)
        poller.register(self.channel.fd, select.POLLIN)
        while True:
            messages, open_ = self.channel.receive()
            for message in messages:
                self.handle(message)
            if open_:
                poller.modify(self.channel.fd, select.POLLIN)
            else:
                # While the host's end is closed, polling the port returns at once. A signal ends this wait: SIGIO when
                # the host has opened its end, SIGCHLD when a child has ended.
                poller.unregister(self.channel.fd)
                poller.poll(self.saved.period)
                self.attend()
                poller.register(self.channel.fd, select.POLLIN)
            poller.poll(self.saved.period)
            self.attend()

    def handle(self, message: dict[str, Any]) -> None:
        """Do what a message asks for; ignore unknown ones. A failure is reported to the host and never raised."""
        handlers: dict[str, Any] = {
            "hello": lambda _: self.channel.send(**self.state),
            "identity": self.take_identity,
            "names": self.learn_names,
            "add_user": self.add_user,
            "audit": self.audit,
            "flush": lambda _: self.flush(),
            "join_job": self.join_job,
            "serve_tasks": self.serve_tasks,
            "take_functions": self.take_functions,
            "take_regions": self.take_regions,
            "freeze": self.freeze,
            "thaw": self.thaw,
            "cut": self.cut,
            "rest": self.rest,
            "wake": self.wake_up,
            "attach": self.attach,
            "sleep": self.sleep,
            "rise": self.rise,
        }
        try:
            if handler := handlers.get(str(message.get("type"))):
                handler(message)
        except GuestAgentError as error:
            if message.get("type") in SAVING:  # the job goes on, or waits
                self.channel.send("refused", reason=str(error))
                return
            self._report("failed", reason=str(error))
        except Exception as error:
            self._report("failed", reason=f"the agent failed: {type(error).__name__}: {error}")

    def audit(self, _: dict[str, Any]) -> None:
        facts = {**clone_facts(), **self.state.get("audit", {}), **current_facts()}
        self.channel.send("audited", audit=facts)

    def _report(self, type_: str, **fields: Any) -> None:
        """Send a message that also answers every later `hello`."""
        self.state = {"type_": type_, **fields}
        self.channel.send(**self.state)

    def take_identity(self, message: dict[str, Any]) -> None:
        """Apply an identity and start the daemons. A second identity changes nothing; it is answered with the state."""
        if self.state["type_"] != "fork_point":
            self.channel.send(**self.state)
            return
        self.state = {"type_": "becoming"}
        stage = StageTimer()
        set_random_state(message["random"])
        time.clock_settime(time.CLOCK_REALTIME, message["time"] + stage.elapsed())
        identity = message["identity"]
        bootstrap = identity["bootstrap"]
        set_names(identity, message["names"])
        add_users([*bootstrap["users"], *identity["users"]])
        stage("identity")
        self.own_address = (identity["address"], identity["gateway"])
        set_network(interface(), identity["mac"], *self.own_address)
        stage("network")
        write_node_files(bootstrap)
        stage("files")
        use_plugged(message["cpus"], message["plugged"])
        raise_process_limits(stopped_pids())
        stage("plugged")
        set_allowance(message["disk"])
        stage("disk")
        is_spare = not identity["users"]
        if is_spare:
            self.user_added = make_pipe(USER_ADDED)
        # The daemons are started before the file systems are mounted, because they wait for other machines, and the
        # mounts use that time. No job runs here before `started` is reported.
        for daemon in [DaemonProcess(spec) for spec in bootstrap["daemons"]]:
            self.children.start(daemon)
            stage(f"daemon_{daemon.name}")
        for each in identity["mounts"]:
            mount_one(each["source"], each["target"], each["type"], each["options"])
            self.mounts.append(each["target"])
        stage("mounts")
        load_on_demand(True)
        if is_spare:  # no job waits for a spare
            preload_job_programs()
            stage("practised")
        self._report("started", stages=stage.stages, audit=clone_facts())
        raise_kernel_limits()  # here it delays no job: Slurm is about to be told of this node
        if os.getpid() == 1:
            # Not earlier: each page that the agent touched first would become a huge page of 2 MiB that clones do not
            # share.
            use_huge_pages()

    def add_user(self, message: dict[str, Any]) -> None:
        """Add the user of a job that got this spare, correct the clock, and let the job continue."""
        add_users([message["user"]])
        self.learn_names({"names": message["names"], "gone": [], "whole": True})
        correct_clock(message["time"])
        if self.user_added is not None:
            with suppress(BlockingIOError):  # the pipe is full of lines of earlier messages
                os.write(self.user_added, b"\n" * MOST_WAIT)
        self.channel.send("user_added")

    @staticmethod
    def learn_names(message: dict[str, Any]) -> None:
        """Know the names of other VMs. Without room for them the VM serves its job all the same. One that has come from
        another host gets the time with them."""
        if "time" in message:
            correct_clock(message["time"])
        with suppress(OSError):
            learn_names(message["names"], message["gone"], message["whole"])

    def join_job(self, message: dict[str, Any]) -> None:
        """Take the VM's name and address in the network of its job, and know the names of the job's VMs."""
        if message["mtu"]:
            set_mtu(interface(), message["mtu"])
        join_network(interface(), message["address"], *self.own_address)
        set_host_names(message["hostname"], message["address"], message["peers"], [])
        names = [name for name, _ in message["peers"]]
        places = [(node, number) for node in message["nodes"] for number in range(message["vms"])]
        self.job_vms[:] = [(name, *place) for name, place in zip(names[-len(places) :], places, strict=True)]
        install_launcher(self.job_vms)
        self.channel.send("joined_job")

    def take_functions(self, message: dict[str, Any]) -> None:
        take_functions(message["ports"], message["uid"])
        self.channel.send("took_functions")

    def take_regions(self, message: dict[str, Any]) -> None:
        take_regions(message)
        self.channel.send("took_regions")

    def serve_tasks(self, message: dict[str, Any]) -> None:
        """Accept the tasks of the VM's job, on connections that begin with the token of the message."""
        if self.tasks is None:
            self.tasks = TaskListener(self.mounts, self.job_vms)
            self.poller.register(self.tasks.sock, select.POLLIN)
            self.covered = install_commands(message["commands"])
        self.tasks.token = message["token"]
        self.channel.send("serving_tasks")

    # --- saving: see `saving` ----------------------------------------------------------------------

    def freeze(self, message: dict[str, Any]) -> None:
        self.saved.freeze(message["sync"], message["script"], message["checkpoint"], message["shared_files"])
        self.channel.send("frozen")

    def thaw(self, _: dict[str, Any]) -> None:
        self.saved.thaw()
        self.channel.send("thawed")

    def cut(self, _: dict[str, Any]) -> None:
        self.saved.cut()
        self.watch_saved()
        self.channel.send("cut")

    def rest(self, _: dict[str, Any]) -> None:
        self.children.end_daemons()
        if not stopped_pids():
            stop_daemons_at_entry()  # they are loaded and linked then, as in a template
        self.channel.send("rests")

    def wake_up(self, message: dict[str, Any]) -> None:
        """Become a node again, after the VM was restored, or in place. Frozen processes stay frozen."""
        set_random_state(message["random"])
        time.clock_settime(time.CLOCK_REALTIME, message["time"])
        self.children.end_daemons()
        identity = message["identity"]
        bootstrap = identity["bootstrap"]
        set_names(identity, message["names"])
        add_users([*bootstrap["users"], *identity["users"]])
        write_node_files(bootstrap, anew=True)
        if self.saved.checkpoint:
            end_connections()
            forget_client()
        self.saved.wake(message["program"])
        self.watch_saved()
        for daemon in [DaemonProcess(spec) for spec in bootstrap["daemons"]]:
            self.children.start(daemon)
        self._report("started", stages=[], audit=clone_facts())

    def attach(self, _: dict[str, Any]) -> None:
        """The answer comes once the next run of the job has begun."""
        if self.saved.attach():
            self.channel.send("attached")

    # --- sleep: see `sleeping` ---------------------------------------------------------------------

    def sleep(self, message: dict[str, Any]) -> None:
        self.channel.send("may_sleep", audit=dict.fromkeys(fall_asleep(message["sync"]), 1))

    def rise(self, message: dict[str, Any]) -> None:
        """The VM goes on after it has slept. The message says whether Slurm has resumed its job."""
        correct_clock(message["time"])
        settle_steps(message["runs"])
        self.channel.send("risen")

    def attend(self) -> None:
        self.report_ended_daemons()
        if self.saved.attend():
            self.channel.send("attached")
        self.watch_saved()
        if self.tasks is not None:
            self.tasks.accept()

    def watch_saved(self) -> None:
        watched = set(self.saved.watched)
        for fd in self.watching - watched:
            self.poller.unregister(fd)
        for fd in watched - self.watching:
            self.poller.register(fd, select.POLLIN)
        self.watching = watched

    def report_ended_daemons(self) -> None:
        """Empty the wake-up pipe, collect children that have ended, and report and restart the daemons among them.
        Without slurmd the scheduler would give up a job that goes on in the guest, and wait for the end of one that has
        ended, both for SlurmdTimeout seconds."""
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)
        for daemon in self.children.collect():
            how = f"{ending(daemon.status or 0)}: {daemon.log_tail()}"
            again = "started again after " if daemon.start_again() else ""
            self.channel.send("daemon_ended", name=daemon.name, reason=again + how)

    def flush(self) -> None:
        """Write everything back and unmount the cluster's file systems. Processes that still use them may fail."""
        self.saved.end_in_place()
        os.sync()
        uncover(self.covered)
        for target in reversed(self.mounts):
            try:
                unmount(target)
            except OSError:
                try:
                    unmount(target, MNT_DETACH)
                except OSError:
                    continue
        self.mounts.clear()
        self.channel.send("flushed")
