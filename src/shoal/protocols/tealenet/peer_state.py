"""The state of a peer, as events: offers, load, draining, health and liveness.

Only a heartbeat or its answer counts as a sign of life.  A peer that joined with a
token can only offer the models that its token permits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from enum import Enum

from shoal.domain.vocabulary import (
    Draining,
    Event,
    HealthReported,
    LoadChanged,
    OffersChanged,
)
from shoal.domain.worker import MachineHealth, Offer, WorkerLoad, machine_load
from shoal.protocols.seam.peer_session import PeerDescribed
from shoal.protocols.seam.session import UNDESCRIBED, PeerProfile
from shoal.protocols.tealenet.admission import (
    PeerCredentials,
    PeerPermissions,
    permitted_models,
)
from shoal.protocols.tealenet.codec.extension import (
    HeartbeatExtension,
    IntroductionExtension,
    WireOffer,
    read_heartbeat,
    read_offers,
)
from shoal.protocols.tealenet.codec.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.codec.scalars import thermal_level, well_formed
from shoal.protocols.tealenet.codec.signatures import HEX_KEY
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import (
    PeerDescription,
    PeerSoftware,
    TealePeer,
    offers_by_name,
)

REASON_MAX = 1000  # characters that are kept of a reason
QUEUED_MAX = 10_000  # jobs that a peer may report as queued
AFTER_LIMIT = 0.001  # seconds: a time limit counts once it has passed
PROBE_TIMEOUT = 10.0  # seconds in which a peer answers a heartbeat that probes it


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


class PeerHealth:
    """A peer's liveness and the load that it reports.

    ``available``: whether a relay reports it as available.  ``deadline``: when its
    liveness next changes if it stays silent.
    """

    def __init__(self, profile: LinkProfile, now: float) -> None:
        self._profile = profile
        self._last_heard = now
        self._liveness = PeerLiveness.CONNECTED
        self._lost_at: float | None = None  # unless the peer answers a probe
        self._reported = WorkerLoad()
        self.available = True
        self._last_load = WorkerLoad()
        self.deadline = self._next_deadline()

    def receive(
        self,
        heartbeat: Heartbeat | HeartbeatAck,
        software: PeerSoftware,
        outstanding_jobs: int,
        now: float,
        extension: HeartbeatExtension | None = None,
    ) -> bool:
        """Apply a heartbeat or its answer; return whether it has any information.

        A Mac's answers always have the same values.  ``outstanding_jobs``: how many
        jobs of this end the peer has.
        """
        self.note_alive(now)
        # Shoal peers announce changes in heartbeats, not in the answers.
        answers = isinstance(heartbeat, HeartbeatAck)
        if answers and (software is PeerSoftware.SHOAL or not heartbeat.loaded_models):
            return False
        jobs = None if extension is None else extension.queued
        self._reported = _reported_load(heartbeat, outstanding_jobs, jobs)
        return True

    def note_alive(self, now: float) -> None:
        """Record a sign of life."""
        self._last_heard = now
        self._lost_at = None
        self._liveness = PeerLiveness.CONNECTED
        self.deadline = self._next_deadline()

    @property
    def silence(self) -> str:
        """Why the peer is lost."""
        if self._lost_at is not None:
            return (
                f"no answer within {PROBE_TIMEOUT:g} s after it joined the relay anew"
            )
        return f"silent for {self._profile.disconnected_after:g} s"

    def expect_answer(self, now: float) -> None:
        """Count the peer as lost unless it answers a probe that is sent now."""
        if self._lost_at is None:
            self._lost_at = now + PROBE_TIMEOUT
            self.deadline = self._next_deadline()

    def update(self, now: float) -> PeerLiveness:
        """Return the peer's liveness by the time since its last heartbeat."""
        self._liveness = liveness_after(now - self._last_heard, self._profile)
        if self._lost_at is not None and now >= self._lost_at:
            self._liveness = PeerLiveness.DISCONNECTED
        self.deadline = self._next_deadline()
        return self._liveness

    def changed_load(self, unfit: str) -> WorkerLoad | None:
        """Return the peer's load; None if it has not changed since the last call.

        ``unfit``: the peer's reason to get no work, if any.
        """
        if self._liveness is not PeerLiveness.CONNECTED:
            load = WorkerLoad(f"silent for {self._profile.degraded_after:g} s")
        elif unfit:
            load = replace(self._reported, unfit=unfit)
        elif not self.available:
            load = WorkerLoad("not available")
        else:
            load = self._reported
        if load == self._last_load:
            return None
        self._last_load = load
        return load

    def _next_deadline(self) -> float:
        profile = self._profile
        connected = self._liveness is PeerLiveness.CONNECTED
        limit = profile.degraded_after if connected else profile.disconnected_after
        changes_at = self._last_heard + limit + AFTER_LIMIT
        return changes_at if self._lost_at is None else min(changes_at, self._lost_at)


class PeerOffers:
    """A peer's offers, reported when they change.

    ``credentials`` and ``permissions`` decide which models a join token permits.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        credentials: PeerCredentials | None,
        permissions: PeerPermissions,
    ) -> None:
        self._local = local
        self._credentials = credentials
        self._permissions = permissions
        self._last: tuple[Offer, ...] | None = None

    def from_description(
        self, peer: TealePeer, description: PeerDescription
    ) -> tuple[Offer, ...] | None:
        """Return a plain peer's offers; None if they have not changed."""
        return self._if_changed(offers_by_name(peer.software, description))

    def from_extension(
        self, peer: TealePeer, entries: Iterable[WireOffer]
    ) -> tuple[Offer, ...] | None:
        """Return a Shoal peer's offers; None if they have not changed."""
        offers = read_offers(
            entries,
            coordinator=peer.is_coordinator,
            public_key=peer.public_key,
            proven=bool(peer.public_key),
        )
        return self._if_changed(self._permitted(offers))

    def _permitted(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        admission = self._local.admission
        if (
            self._permissions.models is None
            or admission is None
            or self._credentials is None
        ):
            return tuple(offers)
        names = frozenset[str]().union(*(offer.models for offer in offers))
        allowed = self._permissions.models
        if not names <= allowed:
            allowed = permitted_models(admission, self._credentials, names)
        return tuple(offer for offer in offers if offer.models <= allowed)

    def _if_changed(self, offers: tuple[Offer, ...]) -> tuple[Offer, ...] | None:
        if offers == self._last:
            return None
        self._last = offers
        return offers


class TealePeerState:
    """A peer that has joined.  Its state becomes an event whenever it changes.

    ``cluster`` is the hash of this end's passcode, or None.
    """

    def __init__(
        self,
        peer: TealePeer,
        offers: PeerOffers,
        profile: LinkProfile,
        now: float,
        cluster: str | None = None,
    ) -> None:
        self.peer = peer
        self._offers = offers
        self._cluster = cluster
        self._health = PeerHealth(profile, now)
        self._description = PeerDescription()
        self._unfit = ""
        self._draining: str | None = None
        self._machine_health = MachineHealth()
        self.profile = UNDESCRIBED
        self.farewell: str | None = None  # why the peer is about to disconnect

    @property
    def deadline(self) -> float:
        """When ``liveness`` next changes if the peer stays silent."""
        return self._health.deadline

    def liveness(self, now: float) -> PeerLiveness:
        """Return the peer's liveness by the time since its last heartbeat."""
        return self._health.update(now)

    @property
    def silence(self) -> str:
        """Why the peer is lost."""
        return self._health.silence

    def note_alive(self, now: float) -> None:
        """Count something else as a sign of life."""
        self._health.note_alive(now)

    def expect_answer(self, now: float) -> None:
        """Count the peer as lost unless it answers a probe that is sent now."""
        self._health.expect_answer(now)

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
            told = PeerProfile(owner=owner, organization=organization)
            merged = _merged(merged, told)
        if merged == self.profile:
            return ()
        self.profile = merged
        return (PeerDescribed(merged),)

    def update_description(self, description: PeerDescription) -> Sequence[Event]:
        """Apply what a relay reports about the peer."""
        self._description = description
        self._health.available = description.available
        return self._offer_events(self._offers.from_description(self.peer, description))

    def apply_introduction(
        self, introduction: IntroductionExtension | None, models: Sequence[str]
    ) -> Sequence[Event]:
        """Apply the contents of the peer's ``hello`` or ``helloAck``."""
        if introduction is not None and introduction.offers is not None:
            return self._offer_events(
                self._offers.from_extension(self.peer, introduction.offers)
            )
        return self.update_description(replace(self._description, models=tuple(models)))

    def receive_heartbeat(
        self, heartbeat: Heartbeat | HeartbeatAck, outstanding_jobs: int, now: float
    ) -> Sequence[PeerDescribed | Event]:
        """Apply a heartbeat or the answer to one.

        ``outstanding_jobs``: how many jobs of this end the peer has.
        """
        events: list[PeerDescribed | Event] = []
        if heartbeat.owner_user_id or heartbeat.organization_id:
            events += self.describe(UNDESCRIBED, heartbeat)
        peer = self.peer
        if (
            peer.software is PeerSoftware.MAC
            and heartbeat.ewma_tokens_per_second is not None
        ):
            peer = self.peer = replace(peer, software=PeerSoftware.RUST)
        extension = read_heartbeat(heartbeat.shoal) if peer.runs_shoal else None
        if self._health.receive(
            heartbeat, peer.software, outstanding_jobs, now, extension
        ):
            if not peer.runs_shoal:
                described = replace(self._description, models=heartbeat.loaded_models)
                events += self._offer_events(
                    self._offers.from_description(peer, described)
                )
            elif extension is not None:
                events += self._apply_extension(extension)
        return [*events, *self.load_events()]

    def load_events(self) -> Sequence[Event]:
        """Return the peer's load if it has changed."""
        load = self._health.changed_load(self._unfit)
        return () if load is None else (LoadChanged(load),)

    # Private parts.

    def _apply_extension(self, extension: HeartbeatExtension) -> list[Event]:
        events: list[Event] = []
        if extension.offers is not None:
            events += self._offer_events(
                self._offers.from_extension(self.peer, extension.offers)
            )
        self._unfit = well_formed((extension.unfit or "")[:REASON_MAX])
        if extension.draining is not None and self._draining is None:
            # The store records each event, and a peer never stops draining.
            self._draining = well_formed(extension.draining[:REASON_MAX])
            events.append(Draining(self._draining))
        if extension.farewell is not None:
            self.farewell = well_formed(extension.farewell[:REASON_MAX])
        health = MachineHealth(
            extension.cpu, extension.memory, extension.jobs, extension.temperature
        )
        if health != self._machine_health:
            self._machine_health = health
            events.append(HealthReported(health))
        return events

    def _offer_events(self, offers: tuple[Offer, ...] | None) -> Sequence[Event]:
        return () if offers is None else (OffersChanged(offers),)


def _merged(known: PeerProfile, told: PeerProfile) -> PeerProfile:
    given = {each.name: getattr(told, each.name) for each in fields(told)}
    return replace(known, **{name: value for name, value in given.items() if value})


def _organization(given: str | None, cluster: str | None) -> str:
    """Return an organization for people.

    Macs write the hash of the cluster's passcode there, which admits whoever has it.
    """
    if given is not None and given == cluster:
        return "this cluster"
    if given is not None and HEX_KEY.fullmatch(given.lower()):
        return "another cluster"
    return well_formed(given or "")


def _reported_load(
    heartbeat: Heartbeat | HeartbeatAck, outstanding_jobs: int, all_jobs: int | None
) -> WorkerLoad:
    """Return the load of a peer; ``all_jobs``: its jobs in slots and waiting, if told.

    ``queueDepth`` counts the jobs that wait for a slot, and ``isGenerating`` says that
    no slot is free.  Neither says whose jobs these are: some may be this end's.
    """
    load = machine_load(
        thermal_level(heartbeat.thermal_level), heartbeat.throttle_level
    )
    if load.unfit:
        return load
    jobs = heartbeat.queue_depth if all_jobs is None else all_jobs
    queued = max(0, min(jobs, QUEUED_MAX) - outstanding_jobs)
    if heartbeat.is_generating and not outstanding_jobs:
        queued = max(1, queued)
    return replace(load, queued=queued)
