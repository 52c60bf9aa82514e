"""Looks up users in this machine's name service (files, LDAP or whatever nsswitch.conf names).

A user that is not found need not be absent. `pwd.getpwuid` raises KeyError for every error, so getpwuid_r(3) is called
here and its error is read. That is not enough either: only the last service's answer decides (glibc,
nss/getXXbyYY_r.c), so a service that fails is hidden by one after it that does not know the user; sssd answers "not
found" while its server is away, and where it is the default plugin also while it does not run itself
(NONSTANDARD_SSS_NSS_BEHAVIOUR in its sss_client/common.c). A user is therefore surely absent only if all services of
nsswitch.conf are local, the look-up succeeded without a result, and /etc/passwd can be read and has no such uid.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import grp
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from multiverse.core.errors import Gone, MultiverseError, Unknown
from multiverse.core.model.identity import User

THREADS = 4  # look-ups at the same time. A thread that hangs is lost until its look-up ends
LIMIT = 10.0  # seconds that a caller waits for a look-up

PASSWD, NSSWITCH = Path("/etc/passwd"), Path("/etc/nsswitch.conf")
_LOCAL_SERVICES = frozenset({"files", "systemd", "mymachines", "altfiles", "extrausers"})
_ABSENT = (0, errno.ENOENT, errno.ESRCH)  # getpwuid_r(3): how systems say that there is no such user
_MOST = 1 << 24  # bytes of one entry


class _Passwd(ctypes.Structure):
    """struct passwd of glibc and musl on Linux, <pwd.h>."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("passwd", ctypes.c_char_p),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("gecos", ctypes.c_char_p),
        ("dir", ctypes.c_char_p),
        ("shell", ctypes.c_char_p),
    )


class NameService:
    """Looks users up in threads of its own, so that a name service that hangs holds up nothing else."""

    def __init__(self, find: Callable[[int], User] | None = None, threads: int = THREADS, limit: float = LIMIT) -> None:
        self._find, self._limit = find or lookup, limit
        self._free = asyncio.Semaphore(threads)
        self._asked: dict[int, asyncio.Future[User]] = {}  # look-ups that have not ended, by uid

    async def user(self, uid: int) -> User:
        """See `lookup`. `Unknown` too if the name service has not answered within the time limit."""
        try:
            async with asyncio.timeout(self._limit):
                if uid not in self._asked:
                    await self._free.acquire()
                    self._begin(uid)
                return await asyncio.shield(self._asked[uid])
        except TimeoutError as error:
            text = f"the name service has not said within {self._limit:g} s who uid {uid} is"
            raise Unknown(text, hint=_hint(uid)) from error

    def _begin(self, uid: int) -> None:
        if uid in self._asked:  # another caller had its turn meanwhile
            self._free.release()
            return
        loop = asyncio.get_running_loop()
        answer = self._asked[uid] = loop.create_future()
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have gone
        # A daemon thread: a look-up that hangs must not hold up the end of this process.
        threading.Thread(target=self._run, args=(uid, loop), name=f"user {uid}", daemon=True).start()

    def _run(self, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        result: User | MultiverseError
        try:
            result = self._find(uid)
        except MultiverseError as error:
            result = error
        except Exception as error:  # a thread has nobody to raise it to
            result = Unknown(f"looking up uid {uid} failed: {error!r}", hint=_hint(uid))
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._ended, uid, result)

    def _ended(self, uid: int, result: User | MultiverseError) -> None:
        self._free.release()
        answer = self._asked.pop(uid)
        if answer.cancelled():
            return
        if isinstance(result, User):
            answer.set_result(result)
        else:
            answer.set_exception(result)


def lookup(uid: int) -> User:
    """The user with all groups. Blocks while the name service answers. `Gone` if there surely is no such user,
    `Unknown` if that cannot be told."""
    entry = _entry(uid)
    gids = dict.fromkeys((entry.gid, *os.getgrouplist(entry.name, entry.gid)))
    groups = tuple((_group_name(gid), gid) for gid in gids)
    return replace(entry, shell=entry.shell or "/bin/sh", groups=groups)


def is_surely_absent(uid: int, passwd: Path | None = None, nsswitch: Path | None = None) -> bool:
    """Whether a user that the name service did not find does not exist: see above."""
    try:
        services = _services((nsswitch or NSSWITCH).read_text())
        lines = (passwd or PASSWD).read_bytes().splitlines()
    except OSError:
        return False
    in_file = any(line.split(b":")[2:3] == [b"%d" % uid] for line in lines)
    return not in_file and "files" in services and services <= _LOCAL_SERVICES


def _services(nsswitch: str) -> frozenset[str]:
    """The services for `passwd` in the text of nsswitch.conf(5); none if the text names none."""
    found = re.findall(r"^\s*passwd\s*:([^#\n]*)", nsswitch, re.MULTILINE)
    return frozenset(re.sub(r"\[[^]]*\]", " ", found[-1]).split()) if found else frozenset()


def _entry(uid: int) -> User:
    """The user's passwd entry, without groups. Raises `Gone` and `Unknown`."""
    getpwuid_r = ctypes.CDLL(None).getpwuid_r
    entry, found, size = _Passwd(), ctypes.POINTER(_Passwd)(), 1024
    while True:
        buffer = ctypes.create_string_buffer(size)
        result = ctypes.byref(entry), buffer, ctypes.c_size_t(size), ctypes.byref(found)
        failure = getpwuid_r(ctypes.c_uint32(uid), *result)
        if failure not in (errno.ERANGE, errno.EINTR) or size > _MOST:
            break
        size *= 2
    if not found:
        if failure in _ABSENT and is_surely_absent(uid):
            raise Gone(f"no user has uid {uid}", hint=_hint(uid))
        why = "does not know uid" if failure in _ABSENT else f"failed ({os.strerror(failure)}) for uid"
        raise Unknown(f"the name service {why} {uid}, which may be for want of an answer", hint=_hint(uid))
    name, home, shell = (os.fsdecode(text or b"") for text in (entry.name, entry.dir, entry.shell))
    return User(name, int(entry.uid), int(entry.gid), home, shell)


def _hint(uid: int) -> str:
    return f"check on the controller's machine: getent passwd {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid{gid}"
