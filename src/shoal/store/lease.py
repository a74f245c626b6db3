"""The lease of a database that several coordinators share: who has it, and is it lost?

A coordinator that shares its database is a node; the others stand by.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from shoal.store.port import Store

LOOK_MAX = 1.0  # seconds between the ends of two looks; one that takes more has failed
SILENT_MAX = 3.0  # seconds without a sign of the holder, after which it is lost
FREE_FOR = 0.5  # seconds without a session of the holder, after which it is lost


class LeaseRow(NamedTuple):
    """Who has the lease.

    ``held``: a session of it is there.  ``beat`` changes as long as the ``holder``
    runs; its name is empty after it has left.  Other nodes reach it at ``node``,
    HOST:PORT, where it presents a certificate with this SHA-256, and expects the
    ``secret``, once it has one; ``ports`` are those of its wires, by name.  A
    coordinator that is no node has none of these.  ``older``: why no node may take it.
    """

    held: bool
    holder: str = ""
    beat: int = 0
    node: str = ""
    certificate: str = ""
    secret: str = ""
    ports: str = "{}"
    older: str = ""


class Lease(Protocol):
    """Looks at the lease, and keeps it for its holder.

    All methods raise StoreError if the database cannot be reached; ``name`` names it.
    """

    name: str

    async def look(self) -> LeaseRow:
        """Return who has it."""

    async def beat(self, holder: str) -> bool:
        """Show that the holder runs; False: another has taken over."""

    async def publish(
        self, holder: str, node: str, certificate: bytes, secret: str, ports: object
    ) -> None:
        """Let other nodes reach the holder."""

    async def note(self, name: str, urls: Sequence[str]) -> list[str]:
        """Note that a node is there, at these URLs; return those of all, its own first.

        ``name`` is what tells it from others.
        """

    async def end_holder(self) -> None:
        """End the session that has the lease."""


class SharedStore(Store, Protocol):
    """A store that several coordinators share; ``holder`` is how the lease names it."""

    holder: str

    async def resume(self) -> None:
        """Lock the database again if the connection was lost.

        Raises StoreError; Fenced if another has had the lock.
        """


class LeaseVerdict(Enum):
    """What follows from a look at the lease."""

    WAIT = auto()
    TAKE_OVER = auto()
    END_HOLDER = auto()
    """It has stopped, and its session keeps others out."""


class LeaseWatch:
    """Decides when the holder of the lease is lost.

    It compares no clocks of different machines.  Where the database, or this process,
    was away for a while, the time begins anew: the holder may have to find the database
    again, too.  ``at_once``: the holder was of this machine, and has ended.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._steady = True  # all looks of the last SILENT_MAX have succeeded
        self._looked_at: float | None = None
        self._good_since = 0.0
        self._free_since: float | None = None
        self._shown: tuple[str, int] | None = None
        self._shown_since = 0.0

    def on_look(self, row: LeaseRow | None, now: float) -> LeaseVerdict:
        """Take what a look has found at ``now``, in seconds; None: it has failed."""
        before, self._looked_at = self._looked_at, now
        if row is None or (before is not None and now - before > LOOK_MAX):
            self._steady = False
            self._good_since = now
            self._free_since = self._shown = None
        if row is None:
            return LeaseVerdict.WAIT
        if not self._steady and now - self._good_since >= SILENT_MAX:
            self._steady = True
        if not row.held:
            return self._on_free(row, now)
        self._free_since = None
        self._at_once = False
        if self._shown != (row.holder, row.beat):
            self._shown, self._shown_since = (row.holder, row.beat), now
        elif row.node and now - self._shown_since >= SILENT_MAX:
            self._shown_since = now
            return LeaseVerdict.END_HOLDER
        return LeaseVerdict.WAIT

    def _on_free(self, row: LeaseRow, now: float) -> LeaseVerdict:
        if self._free_since is None:
            self._free_since = now
        patience = FREE_FOR if self._steady else SILENT_MAX
        if not row.holder or self._at_once:
            patience = 0.0
        if now - self._free_since >= patience:
            return LeaseVerdict.TAKE_OVER
        return LeaseVerdict.WAIT
