"""Two connections whose bytes go to each other."""

import asyncio
from collections.abc import Callable
from typing import cast

UNSENT_MAX = 1 << 20  # bytes that wait to be sent on until no more are read


class Spliced(asyncio.Protocol):
    """One of two connections; ``join`` makes them one.

    What arrives before is kept in ``early``; ``on_early`` is called then, ``on_made``
    and ``on_lost`` once each.

    ``held_up`` is for how many seconds the other one had to wait for this one most of
    the time, and ``sent`` how many bytes went meanwhile: so quick is the line.
    """

    def __init__(
        self,
        on_made: Callable[["Spliced"], None] | None = None,
        on_early: Callable[["Spliced"], None] | None = None,
        on_lost: Callable[["Spliced"], None] | None = None,
    ) -> None:
        self.early = bytearray()
        self._on_made = on_made
        self._on_early = on_early
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._other: Spliced | None = None
        self.held_up = 0.0
        self.sent = 0
        self._written = 0  # bytes, since ``_resumed_at``
        self._paused_at = 0.0
        self._resumed_at = 0.0

    @property
    def transport(self) -> asyncio.Transport | None:
        """None: it is closed."""
        return self._transport

    def join(self, other: "Spliced") -> None:
        """Send on what arrived at each of them, and what will."""
        self._other, other._other = other, self
        self._begin(other)
        other._begin(self)

    def pause(self) -> None:
        """Read no more until it is joined."""
        if self._transport is not None:
            self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Send something, if it is open."""
        self._written += len(data)
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Close it without sending what there is; the other closes, too."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self, other: "Spliced") -> None:
        if self.early:
            early, self.early = bytes(self.early), bytearray()
            other.write(early)
        if other._transport is None:
            self._close()
        elif self._transport is not None:
            self._transport.resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(UNSENT_MAX)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)
            return
        self.early += data
        if self._on_early is not None:
            self._on_early(self)

    def pause_writing(self) -> None:
        self._paused_at = asyncio.get_running_loop().time()
        if self._other is not None and self._other.transport is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        now = asyncio.get_running_loop().time()
        # As much is unsent each time, so what was written since has been sent.
        if (
            self._resumed_at
            and now - self._paused_at > self._paused_at - self._resumed_at
        ):
            self.held_up += now - self._resumed_at
            self.sent += self._written
        self._resumed_at, self._written = now, 0
        if self._other is not None and self._other.transport is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._other is not None:
            self._other._close()
        if self._on_lost is not None:
            self._on_lost(self)
