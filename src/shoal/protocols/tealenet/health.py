"""How a peer is doing, by its heartbeats and by its silence.

Source: TealeNet's "Cluster Messages", "heartbeat", and what real peers do: only a
heartbeat or its answer counts as a sign of life; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Mapping
from enum import Enum

from shoal.domain.worker import Condition
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.peer import Breed
from shoal.protocols.tealenet.wire.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.wire.scalars import Thermal, thermal_of

QUEUED_MAX = 10_000  # jobs that we believe others to have at a peer
THROTTLE_MAX = 100  # percent: full speed

HEAT: Mapping[Thermal, float] = {Thermal.NOMINAL: 1.0, Thermal.FAIR: 0.8}
"""What is left of a machine's speed; hotter ones are left alone."""

JUST_AFTER = 0.001  # seconds


class Life(Enum):
    """What to make of how long a peer has been silent."""

    CONNECTED = "connected"
    DEGRADED = "degraded"
    DISCONNECTED = "disconnected"


def life_after(silent: float, manners: Manners) -> Life:
    """Say what becomes of a peer that was last heard of ``silent`` seconds ago."""
    if silent > manners.gone_after:
        return Life.DISCONNECTED
    return Life.DEGRADED if silent > manners.degraded_after else Life.CONNECTED


class Health:
    """When a peer was last heard of, and what it said of itself."""

    def __init__(self, manners: Manners, now: float) -> None:
        self._manners = manners
        self._heard = now
        self._life = Life.CONNECTED
        self._said = Condition()
        self._available = True
        self._told = Condition()
        self.deadline = self._limit()  # when its silence next means something

    def hear(
        self, beat: Heartbeat | HeartbeatAck, breed: Breed, ours_there: int, now: float
    ) -> bool:
        """Take note of a heartbeat or its answer; return whether it tells anything.

        ``ours_there`` is how many jobs of ours the peer has.  A Mac answers with the
        same words however it is doing.
        """
        self.alive(now)
        # One of ours says what has changed in a heartbeat.
        answers = isinstance(beat, HeartbeatAck)
        if answers and (breed is Breed.OURS or not beat.loaded_models):
            return False
        self._said = _condition(beat, breed, ours_there)
        return True

    def alive(self, now: float) -> None:
        """Take something for a sign of life."""
        self._heard = now
        self._life = Life.CONNECTED
        self.deadline = self._limit()

    def offer(self, *, available: bool) -> None:
        """Take note of what the carrier says of the peer."""
        self._available = available

    def live(self, now: float) -> Life:
        """Return what its silence means now."""
        self._life = life_after(now - self._heard, self._manners)
        self.deadline = self._limit()
        return self._life

    def news(self, unfit: str) -> Condition | None:
        """Return its condition, if that has changed since it was asked for.

        ``unfit`` is what it says itself of why it is to get nothing.
        """
        if self._life is not Life.CONNECTED:
            condition = Condition(f"silent for {self._manners.degraded_after:g} s")
        elif unfit:
            condition = Condition(unfit)
        elif not self._available:
            condition = Condition("says that it is not available")
        else:
            condition = self._said
        if condition == self._told:
            return None
        self._told = condition
        return condition

    def _limit(self) -> float:
        connected = self._life is Life.CONNECTED
        manners = self._manners
        limit = manners.degraded_after if connected else manners.gone_after
        return self._heard + limit + JUST_AFTER  # a limit counts once it is passed


def _condition(
    beat: Heartbeat | HeartbeatAck, breed: Breed, ours_there: int
) -> Condition:
    level = thermal_of(beat.thermal_level)
    heat = HEAT.get(level)
    if heat is None:
        return Condition(f"too hot: {level.value}")
    if beat.throttle_level <= 0:
        return Condition("throttled to a standstill")
    queued = min(max(0, beat.queue_depth), QUEUED_MAX)
    if breed is not Breed.OURS:
        # It counts ours as well, and may be at work on one that it does not count.
        queued = max(0, queued - ours_there)
        if beat.is_generating and not ours_there:
            queued = max(1, queued)
    throttle = min(beat.throttle_level, THROTTLE_MAX) / THROTTLE_MAX
    return Condition(queued=queued, speed=throttle * heat)
