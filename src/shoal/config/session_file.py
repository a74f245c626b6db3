"""The file that keeps browsers signed in while the coordinator restarts.

It holds digests alone: who reads it cannot make a cookie of it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from shoal.config.private_files import replace_private
from shoal.domain.credentials import BrowserSession

FILE = "browser-sessions.json"
SIZE_MAX = 1 << 20  # bytes


class SessionFile:
    """The sessions of browsers in a data directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def read(self) -> list[BrowserSession]:
        """Return the sessions; none if there is no file.

        Raises OSError, and ValueError if the file is damaged.
        """
        try:
            with self.path.open("rb") as kept:
                text = kept.read(SIZE_MAX)
        except FileNotFoundError:
            return []
        try:
            return [
                BrowserSession(
                    bytes.fromhex(each["session"]),
                    bytes.fromhex(each["key"]),
                    float(each["expires_at"]),
                )
                for each in json.loads(text)
            ]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it has no sessions: {error}") from error

    def write(self, sessions: Iterable[BrowserSession]) -> None:
        """Replace the file by these sessions; one thread at a time may.

        Raises OSError; then there is no file: sessions that have ended would otherwise
        begin again at the next start.
        """
        rows = [
            {
                "session": each.digest.hex(),
                "key": each.key_digest.hex(),
                "expires_at": each.expires_at,
            }
            for each in sessions
        ]
        self._replace(json.dumps(rows))

    def _replace(self, text: str) -> None:
        try:
            replace_private(self.path, text)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
