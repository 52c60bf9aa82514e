"""Looks up users in this machine's name service (files, LDAP or whatever nsswitch.conf names)."""

from __future__ import annotations

import grp
import os
import pwd

from multiverse.core.errors import Gone
from multiverse.core.model import User


def lookup(uid: int) -> User:
    """The user with all groups. Blocks while the name service answers. `Gone` if there is no such user."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError as error:
        raise Gone(f"no user has uid {uid}", hint="check getent passwd on the controller's machine") from error
    gids = dict.fromkeys((entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)))
    return User(
        name=entry.pw_name,
        uid=entry.pw_uid,
        gid=entry.pw_gid,
        home=entry.pw_dir,
        shell=entry.pw_shell or "/bin/sh",
        groups=tuple((_group_name(gid), gid) for gid in gids),
    )


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid{gid}"
