"""Users' files over NFS: a program of a user in a guest cannot claim to be another user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, nothing_left, written

pytestmark = pytest.mark.integration

# An NFSv4.1 client (RFC 8881) that claims the given uid, and prints the status of a lookup of the given file.
_CLIENT = """
import socket, struct, sys
server, port, uid, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sock = socket.socket()
if sys.argv[5:]:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", int(sys.argv[5])))
sock.connect((server, port))
words = lambda *found: struct.pack("!%dI" % len(found), *found)
text = lambda said: words(len(said)) + said + bytes(-len(said) % 4)
def ask(*operations):
    claimed = words(0) + text(b"guest") + words(uid, uid, 0)
    call = words(1, 0, 2, 100003, 4, 1) + words(1) + text(claimed) + words(0, 0)
    call += text(b"") + words(1, len(operations)) + b"".join(operations)
    sock.sendall(words(1 << 31 | len(call)) + call)
    size = struct.unpack("!I", sock.recv(4, socket.MSG_WAITALL))[0] & ~(1 << 31)
    answer = sock.recv(size, socket.MSG_WAITALL)
    return struct.unpack_from("!I", answer, 24)[0], answer[44:]  # status, the first operation's result
status, known = ask(words(42) + bytes(8) + text(b"forger %d" % uid) + words(0, 0, 0))  # EXCHANGE_ID
assert status == 0, status
fore = words(0, 4096, 4096, 4096, 16, 1, 0)
status, made = ask(words(43) + known[:12] + words(0) + fore + fore + words(0, 1, 0))  # CREATE_SESSION
assert status == 0, status
walk = [words(15) + text(name.encode()) for name in path.strip("/").split("/")]  # LOOKUP
print(ask(words(53) + made[:16] + words(1, 0, 0, 0), words(24), *walk, words(9, 1, 2))[0])  # SEQUENCE PUTROOTFH GETATTR
"""
_ACCESS = 13  # NFS4ERR_ACCESS


def test_a_user_in_a_vm_cannot_claim_another_uid_at_the_file_server(lab: LabUnderTest, client: Client) -> None:
    private = lab.other.home / "private"
    private.mkdir(mode=0o700)
    (private / "letter").write_text("for bob alone")
    for path in (private, private / "letter"):
        lab.run("chown", f"{lab.other.uid}", str(path))
    program, out = lab.user.home / "forger.py", lab.user.home / "forged.out"
    program.write_text(_CLIENT)
    mount = lab.settings.mounts[0]
    server, port = mount.source.partition(":")[0], mount.options.rpartition("=")[2]

    def told(uid: int, path: Path) -> list[str]:
        return [str(program), server, port, str(uid), str(path)]

    def by_root(uid: int, reserved: int) -> str:
        argv = [sys.executable, *told(uid, private / "letter"), str(reserved)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    assert (by_root(lab.other.uid, 990), by_root(lab.user.uid, 991)) == ("0", str(_ACCESS)), (
        "the server trusts root, so the client works"
    )
    forging, honest = " ".join(told(lab.other.uid, private / "letter")), " ".join(told(lab.user.uid, program))
    look = f"awk '$2 == \"{mount.target}\" {{ print $4 }}' /proc/mounts"
    job = lab.sbatch(f"python3 {forging}; python3 {honest}; {look}", f"--output={out}")
    ended(client, job, "done")
    *answers, options = written(out).split()
    assert len(answers) == 2 and all(answer.isdigit() for answer in answers)
    assert "0" not in answers, "the server trusts no unprivileged port, and shows no files there"
    assert {"nosuid", "nodev"} <= set(options.split(","))
    nothing_left(lab, client)


def test_a_file_that_is_open_after_another_vm_has_closed_it_has_what_was_written_there(
    lab: LabUnderTest, client: Client
) -> None:
    """Close-to-open, as on any nodes: each step ends before the next one begins, and all texts are of one length."""
    out = lab.user.home / "close-to-open.out"
    script = f'cd {lab.user.home}; for n in 1 2 3 4 5; do srun -Q -N1 -n1 -r0 sh -c "echo $n > turns"; '
    script += "srun -Q -N1 -n1 -r1 sh -c 'echo $(hostname) $(cat turns)'; done"
    job = lab.sbatch(script, "-N2", f"--output={out}")
    vms = ended(client, job, "done")["vms"]
    lines = [line.split() for line in written(out).splitlines()]
    assert [number for _, number in lines] == ["1", "2", "3", "4", "5"]
    (reader,) = {node for node, _ in lines}
    assert reader in vms and len(vms) == 2
    nothing_left(lab, client)
