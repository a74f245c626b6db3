"""Decides which chunk of a model is requested next, and from which source.

A state machine without I/O.  The caller sends the requests, hashes what arrives, and
reports both.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

AHEAD = 4  # chunks of one source that are on their way, or not written yet, at first
AHEAD_MAX = 8  # the same of a source that sends each within ``PROMPT``
PROMPT = 0.25  # seconds
SILENCE_TIMEOUT = 100.0  # seconds without a chunk: on a slow link one takes long
ELSEWHERE_TIMEOUT = 20.0  # seconds until a chunk that others shall have is not awaited
REPEAT_AFTER = 5.0  # seconds until an idle source is asked for what another one owes
# A scan of all chunks picks this share of them, so that large models scan seldom.
SCANS = 1024


class ChunkRequest(NamedTuple):
    """A chunk to request from a source."""

    source: str
    chunk: int


@dataclass(slots=True)
class _Source:
    """A source: the chunks that it has, and those that were requested from it.

    ``unchecked`` of these have arrived.  ``elsewhere`` are those that others shall be
    asked for, since when.  ``ahead`` is how many may be requested at a time.  ``near``:
    it is in a network of this machine.
    """

    has: npt.NDArray[np.bool_]
    near: bool = False
    elsewhere: dict[int, float] = field(default_factory=dict)
    requested: dict[int, float] = field(default_factory=dict)  # when, by chunk
    picked: list[int] = field(default_factory=list)  # to request next, in reverse
    heard_at: float = 0.0
    unchecked: int = 0
    ahead: int = AHEAD

    @property
    def in_flight(self) -> int:
        return len(self.requested) + self.unchecked

    def sends(self, chunk: int) -> bool:
        """Return whether it has a chunk, and has not named others for it."""
        return bool(self.has[chunk]) and chunk not in self.elsewhere

    def is_late(self, now: float) -> bool:
        """Return whether it owes a chunk for long."""
        requested = self.requested.values()
        return any(now - since >= REPEAT_AFTER for since in requested)


class ChunkSelection:
    """The chunks of one model, and the sources of them.

    Rarest first, and equally rare ones in the order in which disks read them fast,
    until ``shuffle``.  What a near source has, and does not owe for long, is not
    requested from those that are not near, unless it says that others have it.  Only
    those that are ``wanted`` are requested; None: all.
    """

    def __init__(
        self,
        chunks: int,
        held: Iterable[int] = (),
        wanted: Iterable[int] | None = None,
    ) -> None:
        self._held = np.zeros(chunks, bool)
        self._held[[*held]] = True
        self._wanted = np.zeros(chunks, bool)
        self.want(range(chunks) if wanted is None else wanted)
        self.held_count = int(self._held.sum())
        self._arrived = np.zeros(chunks, bool)  # and is not checked yet
        self._asked = np.zeros(chunks, np.int16)  # requests on their way
        self._sources_of = np.zeros(chunks, np.int16)
        self._order = np.arange(chunks)
        self._sources: dict[str, _Source] = {}
        self._batch = max(AHEAD_MAX, chunks // SCANS)
        self.failures: dict[str, str] = {}  # why a source was dropped

    def shuffle(self, seed: int) -> None:
        """Request equally rare chunks in another order than all other receivers.

        So they get different ones, which they can swap.
        """
        self._order = np.random.default_rng(seed).permutation(len(self._order))
        for source in self._sources.values():
            source.picked.clear()

    def want(self, chunks: Iterable[int]) -> None:
        """Request these chunks, too."""
        self._wanted[[*chunks]] = True
        self.wanted_count = int(self._wanted.sum())

    @property
    def complete(self) -> bool:
        """Whether all chunks are held that are wanted."""
        return self.held_count == self.wanted_count

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Which chunks are held: do not change it."""
        return self._held

    @property
    def sources(self) -> Iterable[str]:
        """The sources that are in use."""
        return self._sources

    def add_source(self, name: str, now: float, *, near: bool = False) -> None:
        """Add a source, which has nothing so far."""
        assert name not in self._sources, "each source is added once"
        has = np.zeros(len(self._held), bool)
        self._sources[name] = _Source(has, near, heard_at=now)

    def on_available(self, name: str, chunks: npt.NDArray[np.bool_]) -> None:
        """Record that a source has more chunks: a flag for each."""
        source = self._sources.get(name)
        if source is None:
            return
        if len(chunks) != len(self._held):
            self.drop(name, "it has another number of chunks")
            return
        self._sources_of += chunks & ~source.has
        source.has |= chunks

    def on_elsewhere(self, name: str, chunks: Iterable[int], now: float) -> None:
        """Ask other sources for requested chunks, and this one if that fails."""
        if (source := self._sources.get(name)) is None:
            return
        for chunk in chunks:
            if source.requested.pop(chunk, None) is not None:
                source.elsewhere[chunk] = source.heard_at = now
                self._asked[chunk] -= 1

    def drop(self, name: str, why: str) -> None:
        """Remove a source, which has failed."""
        if name in self._sources:
            self.failures[name] = why
            self.remove_source(name)

    def remove_source(self, name: str) -> None:
        """Remove a source; what it owes is requested from others."""
        source = self._sources.pop(name, None)
        if source is None:
            return
        self._sources_of -= source.has
        for chunk in source.requested:
            self._asked[chunk] -= 1

    def requests(self, now: float) -> list[ChunkRequest]:
        """Return the requests to send now, and count them as sent."""
        found = []
        for name, source in self._sources.items():
            if source.ahead == AHEAD_MAX and source.in_flight > AHEAD:
                continue  # several in one message, when they are as quick as this
            while source.in_flight < source.ahead:
                if (chunk := self._next(source, now)) is None:
                    break
                if not source.requested:
                    source.heard_at = now  # it owed nothing until now
                source.requested[chunk] = now
                self._asked[chunk] += 1
                found.append(ChunkRequest(name, chunk))
        return found

    def is_fast(self, name: str) -> bool:
        """Return whether a source sends as many chunks as it may at once promptly."""
        source = self._sources.get(name)
        return source is not None and source.ahead == AHEAD_MAX

    def expects(self, name: str, chunk: int, now: float) -> bool:
        """Count a chunk that has arrived; return whether it has to be checked.

        A source that sends what was not requested is dropped.
        """
        source = self._sources.get(name)
        if source is None:
            return False
        if (requested_at := source.requested.pop(chunk, None)) is None:
            self.drop(name, "it sent a chunk that was not requested")
            return False
        change = 1 if now - requested_at < PROMPT else -1
        source.ahead = min(max(source.ahead + change, AHEAD), AHEAD_MAX)
        source.heard_at = now
        self._asked[chunk] -= 1
        if self._held[chunk] or self._arrived[chunk]:
            return False  # another source was faster
        self._arrived[chunk] = True
        source.unchecked += 1
        return True

    def on_checked(self, name: str, chunk: int, *, right: bool) -> None:
        """Record whether a chunk is right, and written; a wrong one drops its source.

        ``chunk`` was expected.
        """
        self._arrived[chunk] = False
        if (source := self._sources.get(name)) is not None:
            # It may have come again since: then it begins anew.
            source.unchecked = max(source.unchecked - 1, 0)
        if right:
            self.held_count += not self._held[chunk]
            self._held[chunk] = True
        else:
            self.drop(name, f"chunk {chunk} has another hash: it sends other bytes")

    def drop_silent(self, now: float) -> float | None:
        """Drop sources that owe chunks and send none; return when to look again."""
        deadlines = []
        for name, source in [*self._sources.items()]:
            # Those that are over were requested, or wait for what is on its way.
            elsewhere = (t + ELSEWHERE_TIMEOUT for t in source.elsewhere.values())
            deadlines += [each for each in elsewhere if each > now]
            if not source.requested:
                continue
            if now - source.heard_at >= SILENCE_TIMEOUT:
                self.drop(name, f"it sent nothing for {SILENCE_TIMEOUT:g} s")
            else:
                deadlines.append(source.heard_at + SILENCE_TIMEOUT)
                repeated = min(source.requested.values()) + REPEAT_AFTER
                if repeated > now:
                    deadlines.append(repeated)
        return min(deadlines, default=None)

    def _next(self, source: _Source, now: float) -> int | None:
        """Return the chunk to request from a source; None: it has none of use."""
        nearer = [
            each
            for each in (() if source.near else self._sources.values())
            if each.near and not each.is_late(now)
        ]
        while source.picked:
            chunk = source.picked.pop()
            if (
                not (self._held[chunk] or self._arrived[chunk] or self._asked[chunk])
                and chunk not in source.elsewhere
                and not any(each.sends(chunk) for each in nearer)
            ):
                return chunk
        open_ = source.has & self._wanted & ~self._held & ~self._arrived
        fresh = open_ & (self._asked == 0)
        fresh[[*source.elsewhere]] = False
        for each in nearer:
            sent = each.has.copy()
            sent[[*each.elsewhere]] = False
            fresh &= ~sent
        found = np.flatnonzero(fresh)
        if len(found):
            rank = self._sources_of[found].astype(np.int64) * len(self._held)
            rank += self._order[found]
            best = np.argpartition(rank, min(self._batch, len(found)) - 1)[
                : self._batch
            ]
            best = best[np.argsort(rank[best])]
            source.picked = found[best[::-1]].tolist()
            return source.picked.pop()
        for chunk, since in [*source.elsewhere.items()]:
            if not open_[chunk]:
                del source.elsewhere[chunk]
            elif not self._asked[chunk] and now >= since + ELSEWHERE_TIMEOUT:
                return chunk
        return self._late(source, open_, now) if open_.any() else None

    def _late(
        self, source: _Source, open_: npt.NDArray[np.bool_], now: float
    ) -> int | None:
        """Return one of the ``open_`` chunks, which another source owes for long."""
        for other in self._sources.values():
            for chunk, since in other.requested.items():
                if (
                    now - since >= REPEAT_AFTER
                    and self._asked[chunk] == 1
                    and open_[chunk]
                    and chunk not in source.requested
                ):
                    return chunk
        return None
