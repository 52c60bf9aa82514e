"""The users of jobs: entries in /etc/passwd and /etc/group."""

from __future__ import annotations

from typing import Any

from multiverse.guest.agent.files import read, write


def add_users(users: list[dict[str, Any]]) -> None:
    """Add passwd and group entries for `users`, replacing entries of the same user name.

    If the image has a group with the same number, that group keeps its name and gets the user as a member.
    """
    passwd = read("/etc/passwd").splitlines()
    groups = [line.split(":") for line in read("/etc/group").splitlines() if line.count(":") >= 3]
    for user in users:
        name = user["name"]
        passwd = [line for line in passwd if not line.startswith(f"{name}:")]
        passwd.append(f"{name}:*:{user['uid']}:{user['gid']}::{user['home']}:{user['shell']}")
        for group, gid in user["groups"]:
            _add_to_group(groups, group, str(gid), name)
    write("/etc/passwd", "".join(f"{line}\n" for line in passwd))
    write("/etc/group", "".join(":".join(entry) + "\n" for entry in groups))


def _add_to_group(groups: list[list[str]], group: str, gid: str, user: str) -> None:
    entry = next((g for g in groups if g[2] == gid), None)
    if entry is None:
        entry = [group, "*", gid, ""]
        groups.append(entry)
    members = [m for m in entry[3].split(",") if m]
    if user not in members:
        entry[3] = ",".join([*members, user])
