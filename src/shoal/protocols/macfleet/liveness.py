"""Whether a peer is still there, by what comes of it and by what others say.

One of ours sends heartbeats, so that its silence means something.  Others send none on
this port: they are lost with their connection, or when the fleet's heartbeats fail.
"""

from shoal.protocols.macfleet.codec.frames import Payload
from shoal.protocols.macfleet.codec.reserved_frames import (
    HeartbeatPayload,
    decode_heartbeat,
    encode_heartbeat,
)
from shoal.protocols.macfleet.membership import FleetRegistry

HEARTBEAT_INTERVAL = 3.0  # seconds
SILENCE_MAX = 10.0  # seconds without a word of one of ours
CHECK_INTERVAL = 1.0  # seconds from one look at what the fleet knows to the next


class HeartbeatLiveness:
    """The life of one of ours."""

    def __init__(self, now: float) -> None:
        self._last_received = now
        self._due = now + HEARTBEAT_INTERVAL
        self._sent = 0  # heartbeats
        self._last_number = 0  # the number of the last that came

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        return min(self._due, self._last_received + SILENCE_MAX)

    def on_activity(self, now: float) -> None:
        """Take a sign of life."""
        self._last_received = now

    def on_heartbeat(self, payload: Payload) -> None:
        """Take a heartbeat.  Raises PeerError if it is none."""
        self._last_number = decode_heartbeat(payload).number

    def lost_reason(self, now: float) -> str:
        """Say why the peer is to be taken as gone; empty: it is not."""
        if now - self._last_received < SILENCE_MAX:
            return ""
        return f"silent for {SILENCE_MAX:g} s"

    def next_heartbeat(self, now: float) -> bytes | None:
        """Return the heartbeat that is due, if one is."""
        if now < self._due:
            return None
        self._due = now + HEARTBEAT_INTERVAL
        self._sent += 1
        return encode_heartbeat(HeartbeatPayload(self._sent, self._last_number))


class RegistryLiveness:
    """The life of a peer that says nothing of it, as the fleet knows it."""

    def __init__(
        self, registry: FleetRegistry | None, node_id: str, now: float
    ) -> None:
        self._registry = registry
        self._node_id = node_id
        self._due = now + CHECK_INTERVAL

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due; None: never."""
        return None if self._registry is None else self._due

    def on_activity(self, now: float) -> None:
        """Take a sign of life, which says nothing about the next moment."""

    def on_heartbeat(self, payload: Payload) -> None:
        """Take a heartbeat, which no such peer sends."""

    def lost_reason(self, now: float) -> str:
        """Say why the peer is to be taken as gone; empty: it is not."""
        if now >= self._due:
            self._due = now + CHECK_INTERVAL
            if self._registry is not None and self._registry.has_failed(self._node_id):
                return "its heartbeats have stopped"
        return ""

    def next_heartbeat(self, now: float) -> bytes | None:
        """Return nothing: real peers would not know what to make of it."""
        return None
