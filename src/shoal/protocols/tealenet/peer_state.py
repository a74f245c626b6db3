"""The state of a connected peer, as events: offers, load, draining and health.

A peer that joined by a token can only offer the models that its token permits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.domain.vocabulary import (
    Draining,
    Event,
    HealthReported,
    LoadChanged,
    OffersChanged,
)
from shoal.domain.worker import MachineHealth as Machine
from shoal.domain.worker import Offer
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
from shoal.protocols.tealenet.codec.scalars import well_formed
from shoal.protocols.tealenet.heartbeat import PeerHealth, PeerLiveness
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import (
    PeerDescription,
    PeerSoftware,
    TealePeer,
    offers_by_name,
)


class PeerOffers:
    """Reads what a peer offers; what is the same as before is no news.

    ``credentials`` and ``permissions`` say which models a join token is for, if there
    is one.
    """

    def __init__(
        self,
        own: TealeLocalNode,
        credentials: PeerCredentials | None,
        permissions: PeerPermissions,
    ) -> None:
        self._own = own
        self._credentials = credentials
        self._permissions = permissions
        self._last: tuple[Offer, ...] | None = None

    def from_description(
        self, peer: TealePeer, description: PeerDescription
    ) -> tuple[Offer, ...] | None:
        """Take what is told of a plain peer; return its offers, if they are others."""
        return self._if_changed(offers_by_name(peer.software, description))

    def from_extension(
        self, peer: TealePeer, offerings: Iterable[WireOffer]
    ) -> tuple[Offer, ...] | None:
        """Take what a peer of ours offers; return that, if it is something else."""
        offers = read_offers(
            offerings,
            coordinator=peer.is_coordinator,
            public_key=peer.public_key,
            proven=bool(peer.public_key),
        )
        return self._if_changed(self._permitted(offers))

    def _permitted(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        admission = self._own.admission
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


REASON_MAX = 1000  # characters of a reason that are kept


class TealePeerState:
    """A peer from the time at which it is met.

    What it says is passed on when it changes, and not each time that it is said.
    """

    def __init__(
        self, peer: TealePeer, offers: PeerOffers, profile: LinkProfile, now: float
    ) -> None:
        self.peer = peer
        self._offers = offers
        self._health = PeerHealth(profile, now)
        self._description = PeerDescription()
        self._unfit = ""
        self._draining: str | None = None
        self._machine_health = Machine()
        self.farewell: str | None = None  # why it is about to hang up

    @property
    def deadline(self) -> float:
        """When its silence next means something."""
        return self._health.deadline

    def liveness(self, now: float) -> PeerLiveness:
        """Return what its silence means now."""
        return self._health.update(now)

    def note_alive(self, now: float) -> None:
        """Take something else for a sign of life."""
        self._health.note_alive(now)

    def update_description(self, description: PeerDescription) -> Sequence[Event]:
        """Take what the carrier tells of a peer that does not say it itself."""
        self._description = description
        self._health.set_available(available=description.available)
        return self._offer_events(self._offers.from_description(self.peer, description))

    def apply_introduction(
        self, said: IntroductionExtension | None, models: Sequence[str]
    ) -> Sequence[Event]:
        """Take what it said when it greeted."""
        if said is not None and said.offers is not None:
            return self._offer_events(
                self._offers.from_extension(self.peer, said.offers)
            )
        return self.update_description(replace(self._description, models=tuple(models)))

    def receive_heartbeat(
        self, beat: Heartbeat | HeartbeatAck, own_jobs: int, now: float
    ) -> Sequence[Event]:
        """Take a heartbeat or an answer to one.

        ``own_jobs`` is how many jobs of ours it has.
        """
        events: list[Event] = []
        peer = self.peer
        if (
            peer.software is PeerSoftware.MAC
            and beat.ewma_tokens_per_second is not None
        ):
            peer = self.peer = replace(peer, software=PeerSoftware.RUST)
        if self._health.receive(beat, peer.software, own_jobs, now):
            if not peer.runs_shoal:
                described = replace(self._description, models=beat.loaded_models)
                events += self._offer_events(
                    self._offers.from_description(peer, described)
                )
            elif (pulse := read_heartbeat(beat.shoal)) is not None:
                events += self._apply_extension(pulse)
        return [*events, *self.load_events()]

    def load_events(self) -> Sequence[Event]:
        """Return how much it can take, if that has changed."""
        condition = self._health.changed_condition(self._unfit)
        return () if condition is None else (LoadChanged(condition),)

    # Private parts.

    def _apply_extension(self, pulse: HeartbeatExtension) -> list[Event]:
        """Take what only a peer of ours says."""
        events: list[Event] = []
        if pulse.offers is not None:
            events += self._offer_events(
                self._offers.from_extension(self.peer, pulse.offers)
            )
        self._unfit = well_formed((pulse.unfit or "")[:REASON_MAX])
        if pulse.draining is not None and self._draining is None:
            # Each one is stored, and it never comes back from it: once is enough.
            self._draining = well_formed(pulse.draining[:REASON_MAX])
            events.append(Draining(self._draining))
        if pulse.farewell is not None:
            self.farewell = well_formed(pulse.farewell[:REASON_MAX])
        machine = Machine(pulse.cpu, pulse.memory, pulse.jobs)
        if machine != self._machine_health:
            self._machine_health = machine
            events.append(HealthReported(machine))
        return events

    def _offer_events(self, offers: tuple[Offer, ...] | None) -> Sequence[Event]:
        return () if offers is None else (OffersChanged(offers),)
