"""How two peers come to know each other, before anything else is said.

Whoever dialled says ``hello`` and the other ``helloAck``; then each sends a heartbeat.
Source: what real peers do.  A Mac that dialled is deaf for a moment after its hello,
and both are after the helloAck: so that is held back and repeated, and until the first
heartbeat comes nothing else is sent; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Offer
from shoal.protocols.session import Close, Notice
from shoal.protocols.tealenet.admission import Leave, Presented, admit
from shoal.protocols.tealenet.desk import Desk, Seat
from shoal.protocols.tealenet.greetings import (
    Greeting,
    hello,
    hello_ack,
    read_greeting,
    refusal,
)
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.peer import Caller
from shoal.protocols.tealenet.wire.messages import Hello, HelloAck
from shoal.protocols.tealenet.wire.proving import CHALLENGE_SIZE, proof_of
from shoal.protocols.tealenet.wire.scalars import well_formed

# All in seconds.
GREETING_LIMIT = 10.0  # for a hello to come, or a helloAck
HELLO_AGAIN = 2.0  # until hello is said once more
ACK_AFTER = 0.15  # until helloAck is said to a peer that may be deaf before
ACK_AGAIN = 6.0  # without a heartbeat, until helloAck is said once more
HEARTBEAT_LIMIT = 30.0  # for the first heartbeat

Reply: TypeAlias = Hello | HelloAck | Notice | Close

OURSELVES = "this is the same device: a connection to oneself"
DUPLICATE = "there is another connection to this device, which is preferred"
UNPROVEN = "it has not proved the key that it names"


class Stage(Enum):
    """How far two peers have come."""

    APART = "apart"  # a hello or a helloAck is waited for
    HOLDING = "holding"  # our helloAck is held back
    GREETED = "greeted"  # both have said who they are
    OVER = "over"


class Handshake:
    """One side's part in it.

    ``greeting`` is what the other said, and ``leave`` what it may do, from ``GREETED``
    on.  ``desk`` is None where a carrier sees to it that there is one connection to
    each peer.
    """

    def __init__(self, own: Ourselves, caller: Caller, desk: Desk | None) -> None:
        self._own = own
        self._caller = caller
        self._desk = desk
        # Whoever cannot verify has no use for a proof.
        self._challenge = own.draw(CHALLENGE_SIZE) if own.verifies else b""
        self._limit = 0.0
        self._next: float | None = None  # when to say something
        self._seat: Seat | None = None
        self.stage = Stage.APART
        self.greeting: Greeting | None = None
        self.leave: Leave | None = None
        self.presented: Presented | None = None

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        return self._limit if self._next is None else min(self._limit, self._next)

    def begin(self, offers: Sequence[Offer], now: float) -> Sequence[Reply]:
        """Begin, and say hello if it was us who dialled."""
        self._limit = now + GREETING_LIMIT
        if not self._caller.dialled:
            return ()
        self._next = now + HELLO_AGAIN
        return (self._hello(offers, now),)

    def tick(self, offers: Sequence[Offer], now: float) -> Sequence[Reply]:
        """Repeat what may have been lost, and give up when it takes too long."""
        if now >= self._limit:
            return (self._give_up(),)
        if self._next is None or now < self._next:
            return ()
        if self.stage is Stage.APART:
            self._next = now + HELLO_AGAIN
            return (self._hello(offers, now),)
        if self.stage is Stage.HOLDING:
            return self._greet(offers, now)
        self._next = None
        return (self._ack(offers, now),)

    def hear(
        self, message: Hello | HelloAck, offers: Sequence[Offer], now: float
    ) -> Sequence[Reply]:
        """Take the other's greeting; one that comes late or too often is ignored."""
        expected = HelloAck if self._caller.dialled else Hello
        if not isinstance(message, expected) or self.stage is Stage.HOLDING:
            return ()
        if self.stage is not Stage.APART:
            # Our answer was lost, or the other did not wait for it.
            return () if self._caller.dialled else (self._ack(offers, now),)
        greeting = read_greeting(message)
        if greeting.device_id == self._own.device_id:
            return (self._close(OURSELVES),)
        if (why := self._objection(greeting)) is not None:
            return (self._turn_away(why),)
        self.presented = self._presented(greeting)
        try:
            self.leave = admit(self._own, self.presented)
        except NotAdmitted as error:
            return self._refuse(greeting, str(error), now)
        self.greeting = greeting
        seated = self._take_seat(greeting, now)
        if not self._caller.dialled:
            return self._answer(greeting, offers, now, seated=seated)
        if not seated:
            return (self._close(DUPLICATE),)
        self._greeted(now)
        return ()

    @property
    def proven_key(self) -> bytes:
        """The key that whom we dialled has proved; of others nothing is known yet."""
        greeting = self.greeting
        proved = self._caller.dialled and bool(self._challenge)
        return greeting.key if greeting is not None and proved else b""

    def proves(self, proof: bytes) -> bool:
        """Say whether this is the other's signature of our challenge."""
        own, greeting = self._own, self.greeting
        if own.verifies is None or own.identity is None or greeting is None:
            return False
        signed = proof_of(self._challenge, own.identity.public_key, greeting.key)
        return own.verifies(greeting.key, proof, signed)

    def heard(self, now: float) -> None:
        """Note that the peer is still there."""
        if self._seat is not None:
            self._seat.heard = now

    def end(self) -> None:
        """Make room for another connection to the same device."""
        self.stage = Stage.OVER
        if self._desk is not None and self._seat is not None:
            self._desk.leave(self._seat)

    # Private parts, in the order in which they are called.

    def _hello(self, offers: Sequence[Offer], now: float) -> Hello:
        return hello(self._own, offers, self._challenge, now)

    def _give_up(self) -> Close:
        if self.stage is Stage.GREETED:
            return self._close(f"no heartbeat within {HEARTBEAT_LIMIT:g} s of helloAck")
        waited_for = "helloAck" if self._caller.dialled else "hello"
        return self._close(f"no {waited_for} within {GREETING_LIMIT:g} s")

    def _greet(self, offers: Sequence[Offer], now: float) -> Sequence[Reply]:
        self._greeted(now)
        self._next = now + ACK_AGAIN
        return (self._ack(offers, now),)

    def _greeted(self, now: float) -> None:
        self.stage = Stage.GREETED
        self._limit = now + HEARTBEAT_LIMIT
        self._next = None

    def _ack(self, offers: Sequence[Offer], now: float) -> HelloAck:
        assert self.greeting is not None, "there is somebody to answer"
        assert self.leave is not None, "others are not answered"
        said = self.greeting.ours
        works = said is not None and said.role == Role.WORKER.value
        shown = offers if self.leave.asks and not works else ()
        return hello_ack(self._own, shown, self._challenge, self.greeting, now)

    def _objection(self, greeting: Greeting) -> str | None:
        """Say why whom we dialled will not do, or None."""
        if greeting.ours is not None and greeting.ours.refusal:
            return ascii(greeting.ours.refusal)[1:-1]
        if not self._caller.dialled or not greeting.key or not self._challenge:
            return None
        self.greeting = greeting
        return None if self.proves(greeting.proof) else UNPROVEN

    def _presented(self, greeting: Greeting) -> Presented:
        caller, said = self._caller, greeting.ours
        models = frozenset(greeting.models)
        if said is not None and said.offers is not None:
            models |= {name for offer in said.offers for name in offer.models}
        return Presented(
            name=known_as(caller, greeting),
            models=models,
            token="" if said is None else said.token,
            passcode=greeting.passcode,
            address=caller.address,
            named=caller.named,
        )

    def _refuse(self, greeting: Greeting, why: str, now: float) -> Sequence[Reply]:
        reason = f"{name_of(greeting)!a} is not let in: {why}"
        close = self._turn_away(reason)
        if self._caller.dialled:
            return (close,)
        notice = Notice(reason)  # an operator may have to do something about it
        if greeting.ours is None:
            return (notice, close)
        return (notice, refusal(self._own, why, now), close)

    def _take_seat(self, greeting: Greeting, now: float) -> bool:
        if self._desk is None:
            return True
        outbound = self._caller.dialled
        self._seat = self._desk.take(greeting.device_id, outbound=outbound, now=now)
        return self._seat is not None

    def _answer(
        self, greeting: Greeting, offers: Sequence[Offer], now: float, *, seated: bool
    ) -> Sequence[Reply]:
        if not seated:
            return (self._ack(offers, now), self._close(DUPLICATE))
        if greeting.ours is not None:
            return self._greet(offers, now)
        self.stage = Stage.HOLDING
        self._next = now + ACK_AFTER
        return ()

    def _turn_away(self, reason: str) -> Close:
        if self._caller.dialled:
            self._own.turned_away(reason)
        return self._close(reason)

    def _close(self, reason: str) -> Close:
        self.end()
        return Close(reason)


def known_as(caller: Caller, greeting: Greeting) -> str:
    """Return what a peer is known by, whichever way it comes.

    A worker is known by the name that it chose, a peer of a relay by its node's, and
    others by their device's.
    """
    said = greeting.ours
    chose = said is not None and said.role == Role.WORKER.value
    return name_of(greeting) if chose or not caller.name else caller.name


def name_of(greeting: Greeting) -> str:
    """Return what a peer is known by: workers of ours by a name that they choose."""
    said = greeting.ours
    if said is not None and said.role == Role.WORKER.value and said.name:
        return well_formed(said.name)
    return greeting.device_id
