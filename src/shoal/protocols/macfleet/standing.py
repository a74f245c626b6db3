"""How we stand with a peer of ours: what each tells the other of itself.

Both say it when it changes.  A worker tells whoever may ask it; who is there to work is
told nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.vocabulary import (
    Conditioned,
    Draining,
    Event,
    Offered,
    Reported,
)
from shoal.domain.worker import Condition, Health, Offer
from shoal.protocols.macfleet.offers import condition_of, heard, told
from shoal.protocols.macfleet.ourselves import Role
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire import control
from shoal.protocols.macfleet.wire.frames import FrameType
from shoal.protocols.session import Output

State: TypeAlias = Offered | Conditioned | Draining | Reported


class Standing:
    """What a peer was told of us, and what it has told of itself."""

    def __init__(self, peer: Peer, role: Role) -> None:
        self._peer = peer
        self._from_pool = role is Role.COORDINATOR
        self._offers: Sequence[Offer] | None = None  # None: nobody has said yet
        self._condition = Condition()
        self._said: control.Offer | None = None
        self._their_offers: tuple[Offer, ...] | None = None
        self._their_condition = Condition()
        self._draining = False

    def say(self, state: State, voice: Voice) -> Sequence[Output]:
        """Return how the peer is told what has changed, if it is one to be told."""
        if not self._peer.ours or self._peer.works:
            return ()
        word: control.Word
        match state:
            case Offered(offers):
                self._offers = offers
                return self._say_offer(voice)
            case Conditioned(condition):
                self._condition = condition
                return self._say_offer(voice)
            case Draining(reason):
                word = control.Draining(reason[: control.TEXT_MAX])
            case Reported(health):
                word = control.Reported(health.cpu, health.memory, health.jobs)
        return (voice.say(FrameType.CONTROL, control.write_word(word)),)

    def hear(
        self, word: control.Offer | control.Draining | control.Reported
    ) -> Sequence[Event]:
        """Return what is new of what the peer says of itself."""
        match word:
            case control.Offer():
                return self._hear_offer(word)
            case control.Draining(reason=reason):
                if self._draining:  # it never comes back from it: once is enough
                    return ()
                self._draining = True
                return (Draining(reason),)
            case control.Reported(cpu=cpu, memory=memory, jobs=jobs):
                return (Reported(Health(cpu, memory, jobs)),)

    def _say_offer(self, voice: Voice) -> Sequence[Output]:
        if self._offers is None:
            return ()
        word = told(
            self._offers, self._condition, self._peer, from_pool=self._from_pool
        )
        if word == self._said:
            return ()
        self._said = word
        return (voice.say(FrameType.CONTROL, control.write_word(word)),)

    def _hear_offer(self, word: control.Offer) -> Sequence[Event]:
        events: list[Event] = []
        offers, condition = heard(word, self._peer), condition_of(word)
        if offers != self._their_offers:
            self._their_offers = offers
            events.append(Offered(offers))
        if condition != self._their_condition:
            self._their_condition = condition
            events.append(Conditioned(condition))
        return events
