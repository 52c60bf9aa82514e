#!/usr/bin/python3 -IS
"""mvshm: pass data between two VMs of a job through a region of memory that they share, and measure that.

The guest agent puts this file into a VM that has such regions (`guest.agent.devices`). Standard library only.

A region has a head and two rings of bytes, one for each direction; whatever is in it, it was zero at first. A message
is its length and its bytes, padded to words. One process sends in a direction, and one receives. The sender writes the
bytes first and then how many it has written in all; the receiver reads them first and then writes how many it has read.
x86-64 keeps the order of stores and that of loads (Intel SDM, volume 3, 9.2.2), and a word at an aligned address is
written and read at once. No other order matters here: nobody reads what it has just written to learn of the other.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import struct
import sys
import time

TYPE_CHECKING = False  # importing it from typing would take longer than all else
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never

REGIONS = "/dev/ivshmem"
HEAD = 4096  # bytes before the rings
LINE = 8  # words: what two CPUs write lies in different lines of their caches
WORD = 8  # bytes
END = (1 << 64) - 1  # the length that says that no message follows
LARGEST = 1 << 20  # bytes of a message
PEER_TIMEOUT = 60.0  # seconds for the other task of a measurement to come
ROUNDS, LARGE_ROUNDS = 200, 64
USAGE = """usage: mvshm list                 the regions that the VMs of this job share
       mvshm send REGION         pass the input on, to a receiver
       mvshm receive REGION      write out what a sender passes on
       mvshm clear REGION        forget what is in it, after a sender or receiver was killed
       mvshm bench [REGION] [--json]
                                 compare it with TCP: srun --ntasks=2 mvshm bench, with --vm-per-node=2"""


def fail(text: str) -> Never:
    sys.stderr.write(f"mvshm: {text}\n")
    sys.exit(1)


def list_regions() -> list[str]:
    """The paths of the regions, in the order of their numbers."""
    names = os.listdir(REGIONS) if os.path.isdir(REGIONS) else []  # noqa: PTH112, PTH208
    return [f"{REGIONS}/{name}" for name in sorted(names, key=int)]


class Region:
    def __init__(self, number: str) -> None:
        path = f"{REGIONS}/{number}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            fail(f"{path}: {error.strerror}; submit the job with --ivshmem=N, and see `mvshm list`")
        self.bytes = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        self.words = self.bytes[:HEAD].cast("Q")
        os.close(fd)

    def ring(self, direction: int) -> Ring:
        size = (len(self.bytes) - HEAD) // 2 // 64 * 64
        begin = HEAD + direction * size
        return Ring(self.words, (1 + 2 * direction) * LINE, self.bytes[begin : begin + size])

    def clear(self) -> None:
        self.bytes[:HEAD] = bytes(HEAD)


class Ring:
    """One direction of a region. `words[at]` counts the bytes that were written, the next line those that were read."""

    def __init__(self, words: memoryview, at: int, data: memoryview) -> None:
        self.words, self.written, self.read, self.data = words, at, at + LINE, data
        self.patience = 0.0  # seconds to wait for the other side; 0: for ever

    def send(self, message: bytes | memoryview) -> None:
        self._put(struct.pack("Q", len(message)))
        self._put(message)
        self._put(bytes(-len(message) % WORD))

    def end(self) -> None:
        """Say that no message follows, and wait until all was read."""
        self._put(struct.pack("Q", END))
        self._until(lambda: not self._unread())

    def receive(self, into: memoryview) -> int:
        """Receive one message. Returns its length, or -1 at the end."""
        head = memoryview(bytearray(WORD))
        self._get(head)
        (length,) = struct.unpack("Q", head)
        if length == END:
            return -1
        if length > len(into):
            fail(f"a message of {length} bytes is too long: was the sender killed? see `mvshm clear`")
        self._get(into[:length])
        self._get(memoryview(bytearray(-length % WORD)))
        return int(length)

    def _unread(self) -> int:
        return int(self.words[self.written] - self.words[self.read])

    def _room(self) -> int:
        return len(self.data) - self._unread()

    def _put(self, data: bytes | memoryview) -> None:
        written = self.words[self.written]
        while data:
            at = written % len(self.data)
            count = min(len(data), len(self.data) - at, self._until(self._room))
            self.data[at : at + count] = data[:count]
            written += count
            self.words[self.written] = written
            data = data[count:]

    def _get(self, into: memoryview) -> None:
        read = self.words[self.read]
        while into:
            at = read % len(self.data)
            count = min(len(into), len(self.data) - at, self._until(self._unread))
            into[:count] = self.data[at : at + count]
            read += count
            self.words[self.read] = read
            into = into[count:]

    def _until(self, count: Callable[[], int]) -> int:
        """Wait until this is not 0, and return it. At first without sleeping, because it may take microseconds."""
        for _ in range(2000):
            if found := count():
                return found
        began = time.monotonic()
        while not (found := count()):
            time.sleep(0.0001)
            if self.patience and time.monotonic() - began > self.patience:
                fail("the other side does not answer: bench needs two tasks, in two VMs of one node")
        return found


# --- measuring ----------------------------------------------------------------------------------------


class RegionLink:
    """Both directions of a region, as one of its two sides sees them."""

    def __init__(self, region: Region, side: int) -> None:
        outgoing, incoming = region.ring(side), region.ring(1 - side)
        outgoing.patience = incoming.patience = PEER_TIMEOUT
        self.send, self.receive = outgoing.send, incoming.receive


class TcpLink:
    """The same on a TCP connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(PEER_TIMEOUT)
        self.sock = sock

    def send(self, message: bytes) -> None:
        self.sock.sendall(struct.pack("Q", len(message)) + message)

    def receive(self, into: memoryview) -> int:
        head = memoryview(bytearray(WORD))
        self._fill(head)
        (length,) = struct.unpack("Q", head)
        self._fill(into[:length])
        return int(length)

    def _fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self.sock.recv_into(into[done:])
            if not count:
                fail("the other task has closed its connection")
            done += count


def connect(region: RegionLink, side: int) -> TcpLink:
    """A TCP connection on the job's network, to the address that the other side sends through the region."""
    if side == 1:
        with socket.create_server((socket.gethostname(), 0)) as server:
            server.settimeout(PEER_TIMEOUT)
            region.send(json.dumps([socket.gethostname(), *server.getsockname()[:2]]).encode())
            return TcpLink(server.accept()[0])
    told = memoryview(bytearray(4096))
    name, address, port = json.loads(bytes(told[: region.receive(told)]))
    if name == socket.gethostname():
        fail(f"both tasks run in {name}: submit the job with --vm-per-node=2")
    return TcpLink(socket.create_connection((address, port), PEER_TIMEOUT))


def measure(link: RegionLink | TcpLink) -> dict[str, float]:
    """Half of a round trip of 8 bytes, and the throughput with messages of 1 MiB."""
    buffer, small, large = memoryview(bytearray(LARGEST)), bytes(WORD), bytes(LARGEST)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        link.send(small)
        link.receive(buffer)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(LARGE_ROUNDS):
        link.send(large)
    link.receive(buffer)
    took = time.perf_counter() - began
    return {"microseconds": statistics.median(times) * 5e5, "mib_per_second": LARGE_ROUNDS * LARGEST / 2**20 / took}


def answer(link: RegionLink | TcpLink) -> None:
    buffer = memoryview(bytearray(LARGEST))
    for _ in range(ROUNDS):
        link.receive(buffer)
        link.send(bytes(WORD))
    for _ in range(LARGE_ROUNDS):
        link.receive(buffer)
    link.send(bytes(WORD))


def bench(number: str, *, as_json: bool) -> None:
    """Measure, in the first task of a step; answer, in the second."""
    side = int(os.environ.get("SLURM_PROCID", "0"))
    if side > 1:
        return
    region = RegionLink(Region(number), side)
    links: dict[str, RegionLink | TcpLink] = {"shared_memory": region, "tcp": connect(region, side)}
    if side == 1:
        for link in links.values():
            answer(link)
        return
    found = {name: measure(link) for name, link in links.items()}
    if as_json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:13} {figures['microseconds']:9.1f} us for 8 bytes, {figures['mib_per_second']:8.1f} MiB/s")


def main() -> None:
    asked, *rest = sys.argv[1:] or [""]
    numbers = [each for each in rest if each.isdecimal()]
    if asked == "list" and not rest:
        for path in list_regions():
            print(path, f"{os.stat(path).st_size >> 20} MiB")  # noqa: PTH116
    elif asked == "bench" and not set(rest) - {"--json", *numbers[:1]}:
        bench(numbers[0] if numbers else "0", as_json="--json" in rest)
    elif asked in ("send", "receive", "clear") and rest == numbers[:1] and numbers:
        region = Region(numbers[0])
        if asked == "clear":
            region.clear()
        elif asked == "send":
            ring = region.ring(0)
            while data := os.read(0, LARGEST):
                ring.send(data)
            ring.end()
        else:
            ring, buffer = region.ring(0), memoryview(bytearray(LARGEST))
            while (length := ring.receive(buffer)) >= 0:
                sys.stdout.buffer.write(buffer[:length])
            sys.stdout.buffer.flush()
    else:
        fail(f"\n{USAGE}")


if __name__ == "__main__":
    main()
