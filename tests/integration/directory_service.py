"""Users of an LDAP directory, for this process and what it starts: a real slapd, and a real sssd that asks it.

Both run in a Debian of their own (a chroot), which is built once and kept beside the tests' images. The machine gets
nothing of it: glibc finds sssd's module by an ld.so.cache of a private /etc, and sssd's sockets by a mount that only
this mount namespace has. Names are of the form USER@example.org, as where an Active Directory is joined.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from multiverse.images.build import mmdebstrap
from multiverse_lab.lab.own_etc import ETC
from multiverse_lab.lab.service import answers
from tests.integration.images import CACHE
from tests.integration.watch import until

ROOT = CACHE / "directory"
DOMAIN = "example.org"
_BASE, _ADMIN, _PASSWORD = "dc=example,dc=org", "cn=admin,dc=example,dc=org", "secret"
_PACKAGES = ("slapd", "ldap-utils", "sssd-ldap", "libnss-sss")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_SSS = Path("/var/lib/sss")  # compiled into sssd and its module
_SLAPD = f"""\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/nis.schema
modulepath /usr/lib/ldap
moduleload back_mdb
database mdb
suffix "{_BASE}"
rootdn "{_ADMIN}"
rootpw {_PASSWORD}
directory /mnt/ldap
"""
# sssd asks slapd again for what is a second old, and as soon as slapd is back.
_SSSD = f"""\
[sssd]
services = nss
domains = {DOMAIN}
[nss]
memcache_timeout = 0
entry_negative_timeout = 1
[domain/{DOMAIN}]
id_provider = ldap
ldap_uri = ldap://127.0.0.1:{{port}}
ldap_search_base = {_BASE}
use_fully_qualified_names = true
entry_cache_timeout = 1
offline_timeout = 1
offline_timeout_max = 1
offline_timeout_random_offset = 0
"""
# $1 is the root, $2 the directory of this service's files, the rest a command in the root.
_INSIDE = """\
for place in dev proc; do mount --rbind /$place "$1/$place"; done
mount -t tmpfs tmpfs "$1/run"
mount --bind "$2" "$1/mnt"
mount --bind "$2/sss" "$1/var/lib/sss"
root=$1; shift 2
exec chroot "$root" "$@"
"""


class LdapUser(NamedTuple):
    """A user as the directory has it; `login` is what nss knows it by."""

    name: str
    uid: int
    gid: int
    home: Path

    @property
    def login(self) -> str:
        return f"{self.name}@{DOMAIN}"


class Directory:
    """The directory and its sssd. Needs a private /etc (`enter_private_namespace`)."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._nsswitch = (ETC / "nsswitch.conf").read_text()
        self._slapd: subprocess.Popen[bytes] | None = None
        self._sssd: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port: int = probe.getsockname()[1]

    def start(self) -> None:
        _build_root()
        for name in ("ldap", "module", "sss/db", "sss/mc", "sss/pipes/private", "sss/pubconf"):
            (self.place / name).mkdir(parents=True)
        (self.place / "slapd.conf").write_text(_SLAPD)
        sssd = self.place / "sssd.conf"
        sssd.touch(0o600)
        sssd.write_text(_SSSD.format(port=self._port))
        self.serve()
        self.change(f"dn: {_BASE}\nchangetype: add\nobjectClass: domain\ndc: example\n")
        self._sssd = self._begin("sssd", "-i", "-c", "/mnt/sssd.conf", "--logger=stderr")
        _SSS.mkdir(exist_ok=True)
        _mount("--bind", str(self.place / "sss"), str(_SSS))
        until("sssd answers", lambda: answers(str(_SSS / "pipes/nss")))
        self._add_to_name_service()

    def _add_to_name_service(self) -> None:
        module = "libnss_sss.so.2"
        shutil.copy(ROOT / _LIBRARIES / module, self.place / "module" / module)
        (ETC / "ld.so.conf.d/directory.conf").write_text(f"{self.place}/module\n")
        cache = "/var/cache/ldconfig"
        _mount("-t", "tmpfs", "tmpfs", cache)
        try:
            subprocess.run(["/sbin/ldconfig"], check=True)
        finally:
            subprocess.run(["umount", cache], check=True)
        lines = self._nsswitch.splitlines()
        own = [line for line in lines if line.partition(":")[0] not in ("passwd", "group")]
        text = "\n".join([*own, "passwd: files sss", "group: files sss", ""])
        (ETC / "nsswitch.conf").write_text(text)

    def serve(self) -> None:
        """Start slapd."""
        address = f"ldap://127.0.0.1:{self._port}"
        self._slapd = self._begin("slapd", "-f", "/mnt/slapd.conf", "-h", address, "-d", "0")
        until("slapd answers", lambda: self._ldap("ldapsearch", "-b", _BASE, "-s", "base").returncode in (0, 32))

    def silence(self) -> None:
        """Stop slapd."""
        _end(self._slapd)

    def _begin(self, *argv: str) -> subprocess.Popen[bytes]:
        spaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        inside = (*spaces, "sh", "-ec", _INSIDE, "sh", str(ROOT), str(self.place), *argv)
        with (self.place / f"{argv[0]}.log").open("ab") as log:
            return subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _ldap(self, command: str, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        argv = ["chroot", str(ROOT), command, "-x", "-H", f"ldap://127.0.0.1:{self._port}"]
        argv += ["-D", _ADMIN, "-w", _PASSWORD, *words]
        return subprocess.run(argv, input=text, capture_output=True, text=True, check=False)

    def change(self, ldif: str) -> None:
        done = self._ldap("ldapmodify", text=ldif)
        assert done.returncode == 0, done.stderr

    def add_user(self, user: LdapUser) -> None:
        self.change(
            f"dn: {_dn('uid', user.name)}\nchangetype: add\nobjectClass: account\nobjectClass: posixAccount\n"
            f"cn: {user.name}\nuidNumber: {user.uid}\ngidNumber: {user.gid}\nhomeDirectory: {user.home}\n"
            "loginShell: /bin/sh\n"
        )

    def add_groups(self, groups: Iterable[tuple[str, int]], members: Sequence[LdapUser] = ()) -> None:
        names = "".join(f"memberUid: {user.name}\n" for user in members)
        for name, gid in groups:
            self.change(
                f"dn:: {_base64(_dn('cn', name))}\nchangetype: add\nobjectClass: posixGroup\ngidNumber: {gid}\n{names}"
            )

    def change_member(self, group: str, how: str, user: LdapUser) -> None:
        """`how` is `add` or `delete`."""
        dn = _base64(_dn("cn", group))
        self.change(f"dn:: {dn}\nchangetype: modify\n{how}: memberUid\nmemberUid: {user.name}\n")

    def rename(self, user: LdapUser, name: str, groups: Iterable[str]) -> LdapUser:
        """Give the user, who is in these groups, another name."""
        renamed = user._replace(name=name)
        self.change(f"dn: {_dn('uid', user.name)}\nchangetype: modrdn\nnewrdn: uid={name}\ndeleteoldrdn: 1\n")
        for group in groups:
            self.change_member(group, "delete", user)
            self.change_member(group, "add", renamed)
        return renamed

    def end(self) -> None:
        for process in (self._sssd, self._slapd):
            _end(process)
        (ETC / "nsswitch.conf").write_text(self._nsswitch)
        subprocess.run(["umount", str(_SSS)], check=False)
        with contextlib.suppress(OSError):  # it was not made, or the machine's own sssd has files there
            _SSS.rmdir()


def _build_root() -> None:
    if ROOT.exists():
        return
    work = ROOT.with_name(f".directory-{os.getpid()}")
    work.mkdir(parents=True)
    try:
        conf = work / "apt.conf"
        conf.write_text(subprocess.check_output(("apt-config", "dump", "Acquire"), text=True))
        options = ("--mode=root", "--variant=minbase", f"--aptopt={conf}", "--dpkgopt=force-unsafe-io")
        mmdebstrap([*options, f"--include={','.join(_PACKAGES)}", "bookworm", work / "root"], work, print)
        (work / "root").replace(ROOT)
    finally:
        shutil.rmtree(work)


def _dn(key: str, name: str) -> str:
    return f"{key}={name},{_BASE}"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGKILL)  # unshare, with which the kernel ends all others
        process.wait()
