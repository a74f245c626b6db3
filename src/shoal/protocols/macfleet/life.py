"""Whether a peer is still there, by what comes of it and by what others say.

One of ours sends heartbeats, so that its silence means something.  Others send none on
this port: they are lost with their connection, or when the fleet's heartbeats fail.
"""

from shoal.protocols.macfleet.fleet.registry import Fleet
from shoal.protocols.macfleet.wire.beyond import Beat, read_beat, write_beat
from shoal.protocols.macfleet.wire.frames import Payload

BEAT_EVERY = 3.0  # seconds
SILENCE_MAX = 10.0  # seconds without a word of one of ours
LOOK_EVERY = 1.0  # seconds from one look at what the fleet knows to the next


class Beating:
    """The life of one of ours."""

    def __init__(self, now: float) -> None:
        self._heard = now
        self._due = now + BEAT_EVERY
        self._said = 0  # heartbeats
        self._theirs = 0  # the number of the last that came

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        return min(self._due, self._heard + SILENCE_MAX)

    def alive(self, now: float) -> None:
        """Take a sign of life."""
        self._heard = now

    def hear(self, payload: Payload) -> None:
        """Take a heartbeat.  Raises PeerError if it is none."""
        self._theirs = read_beat(payload).number

    def lost(self, now: float) -> str:
        """Say why the peer is to be taken as gone; empty: it is not."""
        if now - self._heard < SILENCE_MAX:
            return ""
        return f"silent for {SILENCE_MAX:g} s"

    def beat(self, now: float) -> bytes | None:
        """Return the heartbeat that is due, if one is."""
        if now < self._due:
            return None
        self._due = now + BEAT_EVERY
        self._said += 1
        return write_beat(Beat(self._said, self._theirs))


class Watched:
    """The life of a peer that says nothing of it, as the fleet knows it."""

    def __init__(self, fleet: Fleet | None, node_id: str, now: float) -> None:
        self._fleet = fleet
        self._node_id = node_id
        self._due = now + LOOK_EVERY

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due; None: never."""
        return None if self._fleet is None else self._due

    def alive(self, now: float) -> None:
        """Take a sign of life, which says nothing about the next moment."""

    def hear(self, payload: Payload) -> None:
        """Take a heartbeat, which no such peer sends."""

    def lost(self, now: float) -> str:
        """Say why the peer is to be taken as gone; empty: it is not."""
        if now >= self._due:
            self._due = now + LOOK_EVERY
            if self._fleet is not None and self._fleet.failed(self._node_id):
                return "its heartbeats have stopped"
        return ""

    def beat(self, now: float) -> bytes | None:
        """Return nothing: real peers would not know what to make of it."""
        return None
