"""Heartbeats: when to send them, and what a peer's heartbeats and silence mean.

Source: TealeNet's "Cluster Messages", "heartbeat", and what real peers do: they send a
heartbeat every few seconds, and one at once after a change.  Only a heartbeat or its
answer counts as a sign of life; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Mapping
from enum import Enum

from msgspec import UNSET

from shoal.domain.worker import MachineHealth, Offer, WorkerLoad
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.extension import (
    HeartbeatExtension,
    wire_offers,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.codec.scalars import (
    TEXT_MAX,
    ShoalField,
    ThermalLevel,
    thermal_level,
    to_date,
    well_formed,
)
from shoal.protocols.tealenet.greeting import model_names
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import PeerSoftware, TealePeer

WAIT_FACTOR = 1.5  # heartbeats of a peer's that are waited for before we send our own
CHANGE_INTERVAL = 1.0  # seconds between heartbeats that are sent because of changes


class HeartbeatSender:
    """Our state as one peer is to know it, and the time of the next heartbeat.

    ``initiates``: between two of ours it is us who send heartbeats, and the other
    answers.
    """

    def __init__(
        self, own: TealeLocalNode, profile: LinkProfile, *, initiates: bool
    ) -> None:
        self._own = own
        self._initiates = initiates
        self._profile = profile
        self._set_offers(own.offers)
        self.condition = WorkerLoad()
        self.draining: str | None = None
        self.machine_health: MachineHealth | None = None
        self.key_proof = ""  # of our key, for the first heartbeat
        self._sent_offers: tuple[Offer, ...] | None = None  # offers, to a peer of ours
        self._busy = False
        self._cached_names: tuple[tuple[Offer, ...], tuple[str, ...]] = ((), ())
        self._sent_at = 0.0
        self.due: float | None = None

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What we can run."""
        return self._offers

    @offers.setter
    def offers(self, offers: tuple[Offer, ...]) -> None:
        self._set_offers(offers)

    def schedule_change(self, now: float) -> None:
        """Have a change told at once, unless there was one just now."""
        if self.due is not None:
            self.due = min(self.due, max(now, self._sent_at + CHANGE_INTERVAL))

    def set_open_jobs(self, jobs: int, now: float) -> None:
        """Take note of how many jobs the peer has here."""
        busy = jobs > 0 and jobs >= self.slots
        if busy is not self._busy:
            self._busy = busy
            self.schedule_change(now)

    def heartbeat(
        self, peer: TealePeer, now: float, farewell: str | None = None
    ) -> bytes:
        """Return a heartbeat; the next one is due after the carrier's interval.

        ``farewell`` tells a peer of ours why we hang up.
        """
        self._sent_at = now
        waits = peer.runs_shoal and not self._initiates
        self.due = (
            now + (WAIT_FACTOR if waits else 1.0) * self._profile.heartbeat_interval
        )
        shoal = (
            write_extension(self._extension(peer, farewell))
            if peer.runs_shoal
            else UNSET
        )
        self.key_proof = ""
        return self._encode(Heartbeat, peer, shoal, now)

    def heartbeat_ack(self, peer: TealePeer, now: float) -> bytes:
        """Return the answer to a heartbeat: how we are."""
        if peer.runs_shoal and not self._initiates and self.due is not None:
            # That we are there is said with this.
            self.due = now + WAIT_FACTOR * self._profile.heartbeat_interval
        return self._encode(HeartbeatAck, peer, UNSET, now)

    # Private parts, in the order in which they are called.

    def _set_offers(self, offers: tuple[Offer, ...]) -> None:
        self._offers = offers
        # Wanted for each token, and so no properties.
        self.slots = sum(offer.slots for offer in offers)  # jobs that we run at a time
        self.models = frozenset[str]().union(*(offer.models for offer in offers))

    def _extension(self, peer: TealePeer, farewell: str | None) -> HeartbeatExtension:
        shown = self._visible_offers(peer)
        offers = None if shown == self._sent_offers else wire_offers(shown)
        self._sent_offers = shown
        machine = self.machine_health or MachineHealth()
        unfit = self.condition.unfit
        return HeartbeatExtension(
            proof=self.key_proof,
            offers=offers,
            draining=_truncated(self.draining),
            farewell=_truncated(farewell),
            jobs=machine.jobs,
            cpu=machine.cpu,
            memory=machine.memory,
            unfit=_truncated(unfit) if unfit else None,
        )

    def _visible_offers(self, peer: TealePeer) -> tuple[Offer, ...]:
        """Return what a peer is shown: nothing, if it may not ask for it."""
        return self.offers if peer.submits_jobs else ()

    def _model_names(self, shown: tuple[Offer, ...]) -> tuple[str, ...]:
        if shown is not self._cached_names[0]:
            self._cached_names = (shown, model_names(shown))
        return self._cached_names[1]

    def _encode(
        self,
        kind: type[Heartbeat] | type[HeartbeatAck],
        peer: TealePeer,
        shoal: ShoalField,
        now: float,
    ) -> bytes:
        condition = self.condition
        # Others than ours find out in this way that nothing new is taken.
        models = (
            ()
            if self.draining is not None
            else self._model_names(self._visible_offers(peer))
        )
        beat = kind(
            device_id=self._own.device_id,
            timestamp=to_date(now + self._own.epoch),
            thermal_level=ThermalLevel.NOMINAL.value,
            throttle_level=0
            if condition.unfit
            else max(1, round(condition.speed * 100)),
            loaded_models=models,
            is_generating=self._busy or condition.queued > 0,
            queue_depth=condition.queued,
            organization_id=self._own.passcode if peer.knows_passcode else None,
            shoal=shoal,
        )
        return encode(beat, self._own.flat)


def _truncated(text: str | None) -> str | None:
    return None if text is None else well_formed(text[:TEXT_MAX])


QUEUED_MAX = 10_000  # jobs that we believe others to have at a peer
THROTTLE_MAX = 100  # percent: full speed

SPEED_BY_THERMAL_LEVEL: Mapping[ThermalLevel, float] = {
    ThermalLevel.NOMINAL: 1.0,
    ThermalLevel.FAIR: 0.8,
}
"""What is left of a machine's speed; hotter ones are left alone."""

AFTER_LIMIT = 0.001  # seconds


class PeerLiveness(Enum):
    """What to make of how long a peer has been silent."""

    CONNECTED = "connected"
    DEGRADED = "degraded"
    DISCONNECTED = "disconnected"


def liveness_after(silent: float, profile: LinkProfile) -> PeerLiveness:
    """Say what becomes of a peer that was last heard of ``silent`` seconds ago."""
    if silent > profile.disconnected_after:
        return PeerLiveness.DISCONNECTED
    return (
        PeerLiveness.DEGRADED
        if silent > profile.degraded_after
        else PeerLiveness.CONNECTED
    )


class PeerHealth:
    """When a peer was last heard of, and what it said of itself."""

    def __init__(self, profile: LinkProfile, now: float) -> None:
        self._profile = profile
        self._last_heard = now
        self._liveness = PeerLiveness.CONNECTED
        self._reported = WorkerLoad()
        self._available = True
        self._last_condition = WorkerLoad()
        self.deadline = self._next_deadline()  # when its silence next means something

    def receive(
        self,
        beat: Heartbeat | HeartbeatAck,
        software: PeerSoftware,
        own_jobs: int,
        now: float,
    ) -> bool:
        """Take note of a heartbeat or its answer; return whether it tells anything.

        ``own_jobs`` is how many jobs of ours the peer has.  A Mac answers with the
        same words however it is doing.
        """
        self.note_alive(now)
        # One of ours says what has changed in a heartbeat.
        answers = isinstance(beat, HeartbeatAck)
        if answers and (software is PeerSoftware.SHOAL or not beat.loaded_models):
            return False
        self._reported = _condition(beat, software, own_jobs)
        return True

    def note_alive(self, now: float) -> None:
        """Take something for a sign of life."""
        self._last_heard = now
        self._liveness = PeerLiveness.CONNECTED
        self.deadline = self._next_deadline()

    def set_available(self, *, available: bool) -> None:
        """Take note of what the carrier says of the peer."""
        self._available = available

    def update(self, now: float) -> PeerLiveness:
        """Return what its silence means now."""
        self._liveness = liveness_after(now - self._last_heard, self._profile)
        self.deadline = self._next_deadline()
        return self._liveness

    def changed_condition(self, unfit: str) -> WorkerLoad | None:
        """Return its condition, if that has changed since it was asked for.

        ``unfit`` is what it says itself of why it is to get nothing.
        """
        if self._liveness is not PeerLiveness.CONNECTED:
            condition = WorkerLoad(f"silent for {self._profile.degraded_after:g} s")
        elif unfit:
            condition = WorkerLoad(unfit)
        elif not self._available:
            condition = WorkerLoad("says that it is not available")
        else:
            condition = self._reported
        if condition == self._last_condition:
            return None
        self._last_condition = condition
        return condition

    def _next_deadline(self) -> float:
        connected = self._liveness is PeerLiveness.CONNECTED
        manners = self._profile
        limit = manners.degraded_after if connected else manners.disconnected_after
        return (
            self._last_heard + limit + AFTER_LIMIT
        )  # a limit counts once it is passed


def _condition(
    beat: Heartbeat | HeartbeatAck, software: PeerSoftware, own_jobs: int
) -> WorkerLoad:
    level = thermal_level(beat.thermal_level)
    heat = SPEED_BY_THERMAL_LEVEL.get(level)
    if heat is None:
        return WorkerLoad(f"too hot: {level.value}")
    if beat.throttle_level <= 0:
        return WorkerLoad("throttled to a standstill")
    queued = min(max(0, beat.queue_depth), QUEUED_MAX)
    if software is not PeerSoftware.SHOAL:
        # It counts ours as well, and may be at work on one that it does not count.
        queued = max(0, queued - own_jobs)
        if beat.is_generating and not own_jobs:
            queued = max(1, queued)
    throttle = min(beat.throttle_level, THROTTLE_MAX) / THROTTLE_MAX
    return WorkerLoad(queued=queued, speed=throttle * heat)
