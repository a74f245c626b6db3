"""The state of a peer, as events: offers, load and liveness.

Only a heartbeat or its answer counts as a sign of life.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum

from msgspec import structs

from shoal.domain.vocabulary import Event, LoadChanged, OffersChanged
from shoal.domain.worker import Offer, WorkerLoad, machine_load
from shoal.protocols.seam.peer_session import PeerDescribed
from shoal.protocols.seam.session import UNDESCRIBED, PeerProfile
from shoal.protocols.tealenet.codec.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.codec.scalars import HEX_KEY, thermal_level, well_formed
from shoal.protocols.tealenet.peer import (
    LinkProfile,
    PeerDescription,
    PeerSoftware,
    TealePeer,
    offers_by_name,
)

QUEUED_MAX = 10_000  # jobs that a peer may report as queued
AFTER_LIMIT = 0.001  # seconds: a time limit counts once it has passed


class PeerLiveness(Enum):
    """Whether a peer counts as connected, by the time since its last heartbeat."""

    CONNECTED = "connected"
    DEGRADED = "degraded"
    DISCONNECTED = "disconnected"


def liveness_after(silent: float, profile: LinkProfile) -> PeerLiveness:
    """Return the liveness of a peer ``silent`` seconds after its last heartbeat."""
    if silent > profile.disconnected_after:
        return PeerLiveness.DISCONNECTED
    if silent > profile.degraded_after:
        return PeerLiveness.DEGRADED
    return PeerLiveness.CONNECTED


class TealePeerState:
    """A peer that has joined.  Its state becomes an event whenever it changes.

    ``cluster`` is the hash of this end's passcode, or None.
    """

    def __init__(
        self, peer: TealePeer, link: LinkProfile, now: float, cluster: str | None = None
    ) -> None:
        self.peer = peer
        self.profile = UNDESCRIBED
        self._link = link
        self._cluster = cluster
        self._last_heard = now
        self._liveness = PeerLiveness.CONNECTED
        self._description = PeerDescription()
        self._reported = WorkerLoad()
        self._last_load = WorkerLoad()
        self._last_offers: tuple[Offer, ...] | None = None
        self._offered_by: object = None  # what they were made of

    @property
    def deadline(self) -> float:
        """When ``liveness`` next changes if the peer stays silent."""
        connected = self._liveness is PeerLiveness.CONNECTED
        link = self._link
        limit = link.degraded_after if connected else link.disconnected_after
        return self._last_heard + limit + AFTER_LIMIT

    def liveness(self, now: float) -> PeerLiveness:
        """Return the peer's liveness by the time since its last heartbeat."""
        self._liveness = liveness_after(now - self._last_heard, self._link)
        return self._liveness

    @property
    def silence(self) -> str:
        """Why the peer is lost."""
        return f"silent for {self._link.disconnected_after:g} s"

    def note_alive(self, now: float) -> None:
        """Record a sign of life."""
        self._last_heard = now
        self._liveness = PeerLiveness.CONNECTED

    def learn_software(self, software: PeerSoftware, link: LinkProfile) -> None:
        """Apply what the peer runs; the next description reports its offers anew."""
        self.peer = replace(self.peer, software=software)
        self._link = link
        self._last_offers = self._offered_by = None

    def describe(
        self, profile: PeerProfile, heartbeat: Heartbeat | HeartbeatAck | None = None
    ) -> Sequence[PeerDescribed]:
        """Apply what the peer says about itself; return it if it has changed.

        What ``profile`` leaves out is kept: only hello has the version, only heartbeats
        have the organization, and both have the owner.
        """
        merged = _merged(self.profile, profile)
        if heartbeat is not None:
            owner = well_formed(heartbeat.owner_user_id or "")
            organization = _organization(heartbeat.organization_id, self._cluster)
            reported = PeerProfile(owner=owner, organization=organization)
            merged = _merged(merged, reported)
        if merged == self.profile:
            return ()
        self.profile = merged
        return (PeerDescribed(merged),)

    def update_description(self, description: PeerDescription) -> Sequence[Event]:
        """Apply what a relay reports about the peer."""
        self._description = description
        return self._offer_events(description)

    def update_models(self, models: tuple[str, ...]) -> Sequence[Event]:
        """Apply the models that the peer names."""
        made_of = (self.peer, self._description, models)
        if made_of == self._offered_by:
            return ()  # as nearly all heartbeats
        self._offered_by = made_of
        return self._offer_events(replace(self._description, models=models))

    def receive_heartbeat(
        self, heartbeat: Heartbeat | HeartbeatAck, outstanding_jobs: int, now: float
    ) -> Sequence[PeerDescribed | Event]:
        """Apply a heartbeat or the answer to one.

        ``outstanding_jobs``: how many jobs of this end the peer has.
        """
        self.note_alive(now)
        events: list[PeerDescribed | Event] = []
        if heartbeat.owner_user_id or heartbeat.organization_id:
            events += self.describe(UNDESCRIBED, heartbeat)
        is_rust = heartbeat.ewma_tokens_per_second is not None
        if is_rust and self.peer.software is PeerSoftware.MAC:
            self.peer = replace(self.peer, software=PeerSoftware.RUST)
        # A Mac's answers always have the same values.
        if isinstance(heartbeat, Heartbeat) or heartbeat.loaded_models:
            self._reported = _reported_load(heartbeat, outstanding_jobs)
            events += self.update_models(heartbeat.loaded_models)
        return [*events, *self.load_events()]

    def load_events(self) -> Sequence[Event]:
        """Return the peer's load if it has changed."""
        load = self._reported
        if self._liveness is not PeerLiveness.CONNECTED:
            load = WorkerLoad(f"silent for {self._link.degraded_after:g} s")
        elif not self._description.available:
            load = WorkerLoad("not available")
        if load == self._last_load:
            return ()
        self._last_load = load
        return (LoadChanged(load),)

    def _offer_events(self, description: PeerDescription) -> Sequence[Event]:
        offers = offers_by_name(self.peer, description)
        if offers == self._last_offers:
            return ()
        self._last_offers = offers
        return (OffersChanged(offers),)


def _merged(known: PeerProfile, reported: PeerProfile) -> PeerProfile:
    given = {each.name: getattr(reported, each.name) for each in fields(reported)}
    return replace(known, **{name: value for name, value in given.items() if value})


def _organization(given: str | None, cluster: str | None) -> str:
    """Return an organization for people.

    Macs write the hash of the cluster's passcode there, and that hash is sufficient for
    admission.
    """
    if given is not None and given == cluster:
        return "this cluster"
    if given is not None and HEX_KEY.fullmatch(given.lower()):
        return "another cluster"
    return well_formed(given or "")


def _reported_load(
    heartbeat: Heartbeat | HeartbeatAck, outstanding_jobs: int
) -> WorkerLoad:
    """Return the load of a peer.

    ``queueDepth`` counts the jobs that wait for a slot, and ``isGenerating`` says that
    no slot is free.  Neither says whose jobs these are: some may be this end's.
    """
    load = machine_load(
        thermal_level(heartbeat.thermal_level), heartbeat.throttle_level
    )
    if load.unfit:
        return load
    queued = max(0, min(heartbeat.queue_depth, QUEUED_MAX) - outstanding_jobs)
    if heartbeat.is_generating and not outstanding_jobs:
        queued = max(1, queued)
    return structs.replace(load, queued=queued)
