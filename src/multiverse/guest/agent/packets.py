"""Programs in the kernel that decide about packets and connections of the sockets of a control group (bpf(2)).

A socket belongs to the control group in which it was made, wherever its process is moved later, and also when that
group has been removed. A program holds for all groups below the one that it was attached to, including removed ones.
"""

from __future__ import annotations

import ctypes
import os
import struct

SYS_BPF = 321  # <asm/unistd_64.h>
BPF_PROG_LOAD, BPF_LINK_CREATE = 5, 28  # <linux/bpf.h>, as all that follows
BPF_PROG_TYPE_CGROUP_SKB, BPF_PROG_TYPE_CGROUP_SOCK_ADDR = 8, 18
BPF_CGROUP_INET_INGRESS, BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT = 0, 10, 11
IFINDEX = 40  # place in struct __sk_buff
USER_PORT = 24  # place in struct bpf_sock_addr
LOOPBACK = 1  # the index of the interface lo

GET_CURRENT_PID_TGID = 14  # the number of that function of the kernel

# The codes of instructions. Each instruction is a code, registers, an offset and a number.
LOAD_WORD, SET, COPY, SHIFT_RIGHT, TO_BIG_ENDIAN = 0x61, 0xB7, 0xBF, 0x77, 0xDC
SKIP_IF_EQUAL, SKIP_IF_LESS, SKIP_IF_GREATER, CALL, RETURN = 0x15, 0xA5, 0x25, 0x85, 0x95
RESULT, CONTEXT, VALUE, KEPT = 0, 1, 2, 6  # registers: a call keeps those from 6 on


def drop_incoming(group: str) -> int:
    """Drop all packets from other machines to the sockets of a control group. Ends when the returned descriptor is
    closed. Raises OSError."""
    program = [
        (LOAD_WORD, VALUE | CONTEXT << 4, IFINDEX, 0),
        (SET, RESULT, 0, 1),
        (SKIP_IF_EQUAL, VALUE, 1, LOOPBACK),
        (SET, RESULT, 0, 0),
        (RETURN, 0, 0, 0),
    ]
    return load_program(group, BPF_PROG_TYPE_CGROUP_SKB, BPF_CGROUP_INET_INGRESS, program)


def refuse_ports(group: str, processes: list[int], first: int, last: int) -> list[int]:
    """Refuse new connections of these processes to these ports of any machine (EPERM), as long as they are in this
    control group or below it. Ends when the returned descriptors are closed. Raises OSError."""
    checks = len(processes)
    program = [
        (COPY, KEPT | CONTEXT << 4, 0, 0),  # a call overwrites the argument
        (CALL, 0, 0, GET_CURRENT_PID_TGID),
        (SHIFT_RIGHT, RESULT, 0, 32),  # the upper half is the process, the lower one the thread
        (LOAD_WORD, VALUE | KEPT << 4, USER_PORT, 0),
        (TO_BIG_ENDIAN, VALUE, 0, 16),  # the port was in that order: now it is in the machine's
        (SKIP_IF_LESS, VALUE, checks + 1, first),
        (SKIP_IF_GREATER, VALUE, checks, last),
        *((SKIP_IF_EQUAL, RESULT, checks + 1 - place, pid) for place, pid in enumerate(processes)),
        (SET, RESULT, 0, 1),
        (RETURN, 0, 0, 0),
        (SET, RESULT, 0, 0),
        (RETURN, 0, 0, 0),
    ]
    families = (BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT)
    return [load_program(group, BPF_PROG_TYPE_CGROUP_SOCK_ADDR, each, program) for each in families]


def load_program(group: str, kind: int, event: int, program: list[tuple[int, int, int, int]]) -> int:
    """Load a program and attach it to a control group. Returns the descriptor of the link: see `drop_incoming`."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("<BBhi", *each) for each in program))
    licence = ctypes.create_string_buffer(b"")
    loaded = bpf(BPF_PROG_LOAD, struct.pack("<IIQQ40xII", kind, len(program), ctypes.addressof(code),
                                            ctypes.addressof(licence), 0, event))  # fmt: skip
    try:
        directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return bpf(BPF_LINK_CREATE, struct.pack("<IIII", loaded, directory, event, 0))
        finally:
            os.close(directory)
    finally:
        os.close(loaded)


def bpf(command: int, attributes: bytes) -> int:
    """bpf(2), by number because glibc has no wrapper. Raises OSError."""
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(SYS_BPF), ctypes.c_int(command), buffer, ctypes.c_uint(len(attributes))))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "bpf")
    return result
