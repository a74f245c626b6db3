"""How we stand with a peer that was met: what it says of itself, as events."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.vocabulary import Conditioned, Draining, Event, Offered, Reported
from shoal.domain.worker import Health as Machine
from shoal.domain.worker import Offer
from shoal.protocols.tealenet.health import Health, Life
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.peer import Breed, Described, Peer
from shoal.protocols.tealenet.stock import Stock
from shoal.protocols.tealenet.wire.extension import Introduction, Pulse, read_pulse
from shoal.protocols.tealenet.wire.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.wire.scalars import well_formed

REASON_MAX = 1000  # characters of a reason that are kept


class Standing:
    """A peer from the time at which it is met.

    What it says is passed on when it changes, and not each time that it is said.
    """

    def __init__(self, peer: Peer, stock: Stock, manners: Manners, now: float) -> None:
        self.peer = peer
        self._stock = stock
        self._health = Health(manners, now)
        self._described = Described()
        self._unfit = ""
        self._draining: str | None = None
        self._machine = Machine()
        self.farewell: str | None = None  # why it is about to hang up

    @property
    def deadline(self) -> float:
        """When its silence next means something."""
        return self._health.deadline

    def life(self, now: float) -> Life:
        """Return what its silence means now."""
        return self._health.live(now)

    def alive(self, now: float) -> None:
        """Take something else for a sign of life."""
        self._health.alive(now)

    def describe(self, described: Described) -> Sequence[Event]:
        """Take what the carrier tells of a peer that does not say it itself."""
        self._described = described
        self._health.offer(available=described.available)
        return self._offered(self._stock.describe(self.peer, described))

    def introduce(
        self, said: Introduction | None, models: Sequence[str]
    ) -> Sequence[Event]:
        """Take what it said when it greeted."""
        if said is not None and said.offers is not None:
            return self._offered(self._stock.declare(self.peer, said.offers))
        return self.describe(replace(self._described, models=tuple(models)))

    def hear(
        self, beat: Heartbeat | HeartbeatAck, ours_there: int, now: float
    ) -> Sequence[Event]:
        """Take a heartbeat or an answer to one.

        ``ours_there`` is how many jobs of ours it has.
        """
        events: list[Event] = []
        peer = self.peer
        if peer.breed is Breed.MAC and beat.ewma_tokens_per_second is not None:
            peer = self.peer = replace(peer, breed=Breed.RUST)
        if self._health.hear(beat, peer.breed, ours_there, now):
            if not peer.ours:
                described = replace(self._described, models=beat.loaded_models)
                events += self._offered(self._stock.describe(peer, described))
            elif (pulse := read_pulse(beat.shoal)) is not None:
                events += self._feel(pulse)
        return [*events, *self.conditioned()]

    def conditioned(self) -> Sequence[Event]:
        """Return how much it can take, if that has changed."""
        condition = self._health.news(self._unfit)
        return () if condition is None else (Conditioned(condition),)

    # Private parts.

    def _feel(self, pulse: Pulse) -> list[Event]:
        """Take what only a peer of ours says."""
        events: list[Event] = []
        if pulse.offers is not None:
            events += self._offered(self._stock.declare(self.peer, pulse.offers))
        self._unfit = well_formed((pulse.unfit or "")[:REASON_MAX])
        if pulse.draining is not None and self._draining is None:
            # Each one is stored, and it never comes back from it: once is enough.
            self._draining = well_formed(pulse.draining[:REASON_MAX])
            events.append(Draining(self._draining))
        if pulse.farewell is not None:
            self.farewell = well_formed(pulse.farewell[:REASON_MAX])
        machine = Machine(pulse.cpu, pulse.memory, pulse.jobs)
        if machine != self._machine:
            self._machine = machine
            events.append(Reported(machine))
        return events

    def _offered(self, offers: tuple[Offer, ...] | None) -> Sequence[Event]:
        return () if offers is None else (Offered(offers),)
