"""Detects peers that are gone although their connection is still open.

A Shoal node sends heartbeats on the connection, so silence means that it is gone.
MacFleet's own programs send none there; they are gone when the fleet's gossip says so,
unless frames of theirs still arrive.
"""

from shoal.protocols.macfleet.codec.frames import Payload
from shoal.protocols.macfleet.codec.reserved_frames import (
    HeartbeatPayload,
    decode_heartbeat,
    encode_heartbeat,
)
from shoal.protocols.macfleet.membership import FleetRegistry

HEARTBEAT_INTERVAL = 3.0  # seconds
SILENCE_MAX = 10.0  # seconds for which a frame is a sign of life
CHECK_INTERVAL = 1.0  # seconds between looks into the registry


class HeartbeatLiveness:
    """The liveness of a Shoal node, by the frames it sends."""

    def __init__(self, now: float) -> None:
        self._last_received = now
        self._due = now + HEARTBEAT_INTERVAL
        self._sent = 0  # heartbeats
        self._last_number = 0  # of the last heartbeat received

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        return min(self._due, self._last_received + SILENCE_MAX)

    def on_activity(self, now: float) -> None:
        """Record that a frame has arrived."""
        self._last_received = now

    def on_heartbeat(self, payload: Payload) -> None:
        """Record a heartbeat.  Raises PeerError if it is malformed."""
        self._last_number = decode_heartbeat(payload).number

    def lost_reason(self, now: float) -> str:
        """Return why the peer counts as gone; empty: it does not."""
        # As the deadline computes it: their difference may be rounded down.
        if now < self._last_received + SILENCE_MAX:
            return ""
        return f"silent for {SILENCE_MAX:g} s"

    def next_heartbeat(self, now: float) -> bytes | None:
        """Return the next heartbeat if it is due."""
        if now < self._due:
            return None
        self._due = now + HEARTBEAT_INTERVAL
        self._sent += 1
        return encode_heartbeat(HeartbeatPayload(self._sent, self._last_number))


class RegistryLiveness:
    """The liveness of an upstream node, by the registry of the fleet."""

    def __init__(
        self, registry: FleetRegistry | None, node_id: str, now: float
    ) -> None:
        self._registry = registry
        self._node_id = node_id
        self._due = now + CHECK_INTERVAL
        self._last_received = now

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due; None: never."""
        return None if self._registry is None else self._due

    def on_activity(self, now: float) -> None:
        """Record that a frame has arrived."""
        self._last_received = now

    def on_heartbeat(self, payload: Payload) -> None:
        """Do nothing: the document specifies no content, and the frame was recorded."""

    def lost_reason(self, now: float) -> str:
        """Return why the peer counts as gone; empty: it does not."""
        if now < self._due:
            return ""
        self._due = now + CHECK_INTERVAL
        if now - self._last_received < SILENCE_MAX or self._registry is None:
            return ""
        if self._registry.has_failed(self._node_id):
            return "its heartbeats have stopped"
        return ""

    def next_heartbeat(self, now: float) -> bytes | None:
        """Return None: upstream nodes do not support heartbeats here."""
        return None
