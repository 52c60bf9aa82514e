"""The keys by which saved VMs are encrypted: one for each user, made when it is first needed.

Files of root in a directory of their own. Each saved VM has a key derived from its user's, and hosts get only that.
Removing a user's file makes all states of the user unreadable.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted
from multiverse.system import files

_BYTES = 32


class SavedKeys:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, uid: int, saved: str) -> str:
        """The key of a saved VM of that user, hexadecimal. Makes the user's if there is none."""
        if not (found := self.find(uid, saved)):
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.create_whole(self._file(uid), secrets.token_hex(_BYTES).encode())
            except OSError as error:
                hint = f"is there room in {self._directory}?"
                raise Exhausted(f"cannot write the key of user {uid}: {error}", hint=hint) from error
            found = self.find(uid, saved)
        return found

    def find(self, uid: int, saved: str) -> str:
        """The same; empty if the user has no key."""
        try:
            own = bytes.fromhex(self._file(uid).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, ValueError) as error:
            hint = "restore the file from a backup; removing it gives up all states of the user"
            raise Broken(f"cannot read the key of user {uid}: {error}", hint=hint) from error
        if len(own) != _BYTES:
            raise Broken(f"{self._file(uid)} is no key", hint="restore the file from a backup")
        return hmac.digest(own, b"saved VM\0" + os.fsencode(saved) + b"\1", "sha256").hex()  # HKDF-Expand (RFC 5869)

    def _file(self, uid: int) -> Path:
        return self._directory / str(uid)
