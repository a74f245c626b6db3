"""What a peer is told of us, and when: our heartbeats.

Source: TealeNet's "Cluster Messages", "heartbeat"; real peers send one every few
seconds, and one at once when something has changed.
"""

from msgspec import UNSET

from shoal.domain.worker import Condition, Health, Offer
from shoal.protocols.tealenet.greetings import model_names
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.ourselves import Ourselves
from shoal.protocols.tealenet.peer import Peer
from shoal.protocols.tealenet.wire.extension import Pulse, write
from shoal.protocols.tealenet.wire.messages import Heartbeat, HeartbeatAck, encode
from shoal.protocols.tealenet.wire.offerings import offerings_of
from shoal.protocols.tealenet.wire.scalars import (
    TEXT_MAX,
    Extra,
    Thermal,
    date_of,
    well_formed,
)

PATIENCE = 1.5  # heartbeats of a peer's that are waited for before we send our own
CHANGES_APART = 1.0  # seconds between heartbeats that are sent because of changes


class Heart:
    """Our state as one peer is to know it, and the time of the next heartbeat.

    ``leads``: between two of ours it is us who send heartbeats, and the other answers.
    """

    def __init__(self, own: Ourselves, manners: Manners, *, leads: bool) -> None:
        self._own = own
        self._leads = leads
        self._manners = manners
        self._tell_of(own.offers)
        self.condition = Condition()
        self.draining: str | None = None
        self.machine: Health | None = None
        self.proof = ""  # of our key, for the first heartbeat
        self._told: tuple[Offer, ...] | None = None  # offers, to a peer of ours
        self._busy = False
        self._named: tuple[tuple[Offer, ...], tuple[str, ...]] = ((), ())
        self._last = 0.0
        self.due: float | None = None

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What we can run."""
        return self._offers

    @offers.setter
    def offers(self, offers: tuple[Offer, ...]) -> None:
        self._tell_of(offers)

    def change(self, now: float) -> None:
        """Have a change told at once, unless there was one just now."""
        if self.due is not None:
            self.due = min(self.due, max(now, self._last + CHANGES_APART))

    def occupy(self, jobs: int, now: float) -> None:
        """Take note of how many jobs the peer has here."""
        busy = jobs > 0 and jobs >= self.slots
        if busy is not self._busy:
            self._busy = busy
            self.change(now)

    def beat(self, peer: Peer, now: float, farewell: str | None = None) -> bytes:
        """Return a heartbeat; the next one is due after the carrier's interval.

        ``farewell`` tells a peer of ours why we hang up.
        """
        self._last = now
        waits = peer.ours and not self._leads
        self.due = now + (PATIENCE if waits else 1.0) * self._manners.heartbeat
        shoal = write(self._pulse(peer, farewell)) if peer.ours else UNSET
        self.proof = ""
        return self._encoded(Heartbeat, peer, shoal, now)

    def answer(self, peer: Peer, now: float) -> bytes:
        """Return the answer to a heartbeat: how we are."""
        if peer.ours and not self._leads and self.due is not None:
            # That we are there is said with this.
            self.due = now + PATIENCE * self._manners.heartbeat
        return self._encoded(HeartbeatAck, peer, UNSET, now)

    # Private parts, in the order in which they are called.

    def _tell_of(self, offers: tuple[Offer, ...]) -> None:
        self._offers = offers
        # Wanted for each token, and so no properties.
        self.slots = sum(offer.slots for offer in offers)  # jobs that we run at a time
        self.models = frozenset[str]().union(*(offer.models for offer in offers))

    def _pulse(self, peer: Peer, farewell: str | None) -> Pulse:
        shown = self._shown(peer)
        offers = None if shown == self._told else offerings_of(shown)
        self._told = shown
        machine = self.machine or Health()
        unfit = self.condition.unfit
        return Pulse(
            proof=self.proof,
            offers=offers,
            draining=_short(self.draining),
            farewell=_short(farewell),
            jobs=machine.jobs,
            cpu=machine.cpu,
            memory=machine.memory,
            unfit=_short(unfit) if unfit else None,
        )

    def _shown(self, peer: Peer) -> tuple[Offer, ...]:
        """Return what a peer is shown: nothing, if it may not ask for it."""
        return self.offers if peer.asks else ()

    def _names(self, shown: tuple[Offer, ...]) -> tuple[str, ...]:
        if shown is not self._named[0]:
            self._named = (shown, model_names(shown))
        return self._named[1]

    def _encoded(
        self,
        kind: type[Heartbeat] | type[HeartbeatAck],
        peer: Peer,
        shoal: Extra,
        now: float,
    ) -> bytes:
        condition = self.condition
        # Others than ours find out in this way that nothing new is taken.
        models = () if self.draining is not None else self._names(self._shown(peer))
        beat = kind(
            device_id=self._own.device_id,
            timestamp=date_of(now + self._own.epoch),
            thermal_level=Thermal.NOMINAL.value,
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


def _short(text: str | None) -> str | None:
    return None if text is None else well_formed(text[:TEXT_MAX])
