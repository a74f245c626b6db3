"""Getting to know a peer: until it is met, nothing else is said or heard."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.vocabulary import Event
from shoal.protocols.session import Close, Notice, Output, Send
from shoal.protocols.tealenet.admission import (
    Leave,
    Presented,
    admit,
    same_passcode,
)
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.greetings import (
    Greeting,
    hello_ack,
    prove,
    read_greeting,
)
from shoal.protocols.tealenet.handshake import (
    UNPROVEN,
    Handshake,
    Reply,
    Stage,
    name_of,
)
from shoal.protocols.tealenet.heart import Heart
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.peer import Breed, Caller, Peer
from shoal.protocols.tealenet.standing import Standing
from shoal.protocols.tealenet.stock import Stock
from shoal.protocols.tealenet.wire.extension import Ability, read_pulse
from shoal.protocols.tealenet.wire.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloAck,
    encode,
)
from shoal.protocols.tealenet.wire.proving import bytes_of


class Meeting:
    """The beginning of a conversation.

    ``peer`` is there once it has said who it is, or if it need not.  A first heartbeat
    tells that both can hear each other: then it is met.
    """

    def __init__(
        self,
        own: Ourselves,
        caller: Caller,
        manners: Manners,
        desk: Desk | None,
        heart: Heart,
    ) -> None:
        self._own = own
        self._caller = caller
        self._manners = manners
        self._heart = heart
        greets = manners.greets or caller.breed is Breed.OURS
        self._handshake = Handshake(own, caller, desk) if greets else None
        self.peer: Peer | None = None

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        return None if self._handshake is None else self._handshake.deadline

    @property
    def lets_in(self) -> bool:
        """Whether the peer has said who it is, and is let in."""
        handshake = self._handshake
        return handshake is not None and handshake.leave is not None

    def begin(self, now: float) -> Sequence[Output] | Standing:
        """Say hello if it is us who dialled; return a peer that says none as met."""
        if self._handshake is not None:
            return self._said(self._handshake.begin(self._heart.offers, now), now)
        self.peer, leave = unintroduced(self._own, self._caller)
        stock = Stock(self._own, None, leave)
        if not self.peer.refusal:
            self._heart.due = now
        return Standing(self.peer, stock, self._manners, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Act on time passing."""
        if self._handshake is None:
            return ()
        return self._said(self._handshake.tick(self._heart.offers, now), now)

    def greet(self, message: Hello | HelloAck, now: float) -> Sequence[Output]:
        """Take a greeting of the peer's."""
        if self._handshake is not None:
            replies = self._handshake.hear(message, self._heart.offers, now)
            return self._said(replies, now)
        if isinstance(message, HelloAck) or self.peer is None:
            return ()
        # It need not have said hello, and is told in return who we are.
        shown = self._heart.offers if self.peer.asks else ()
        answer = hello_ack(self._own, shown, b"", read_greeting(message), now)
        return (Send(encode(answer, self._own.flat)),)

    def meet(
        self, beat: Heartbeat | HeartbeatAck, now: float
    ) -> tuple[Standing, Sequence[Event]] | None:
        """Take the first heartbeat; None, if the peer has not greeted yet.

        Returns how we stand with it, and what it said when it greeted.

        Raises PeerError if it has not proved the key that it names.
        """
        handshake, peer = self._handshake, self.peer
        if handshake is None or handshake.greeting is None or peer is None:
            return None
        greeting = handshake.greeting
        if greeting.key and self._own.verifies is not None and not peer.public_key:
            pulse = read_pulse(beat.shoal)
            if pulse is None or not handshake.proves(bytes_of(pulse.proof)):
                raise PeerError(UNPROVEN)
            peer = self.peer = replace(peer, public_key=greeting.key)
        assert handshake.leave is not None, "it was let in"
        stock = Stock(self._own, handshake.presented, handshake.leave)
        standing = Standing(peer, stock, self._manners, now)
        return standing, standing.introduce(greeting.ours, greeting.models)

    def heard(self, now: float) -> None:
        """Note that the peer is still there."""
        if self._handshake is not None:
            self._handshake.heard(now)

    def end(self) -> None:
        """Make room for another connection to the same device."""
        if self._handshake is not None:
            self._handshake.end()

    def _said(self, replies: Sequence[Reply], now: float) -> Sequence[Output]:
        """Return what the handshake wants said, and then a first heartbeat."""
        handshake = self._handshake
        assert handshake is not None, "it has just replied"
        outputs: list[Output] = [
            each
            if isinstance(each, Close | Notice)
            else Send(encode(each, self._own.flat))
            for each in replies
        ]
        if handshake.stage is not Stage.GREETED or self.peer is not None:
            return outputs
        greeting, leave = handshake.greeting, handshake.leave
        assert greeting is not None, "it has greeted"
        assert leave is not None, "it was let in"
        self.peer = introduced(
            self._own, self._caller, greeting, leave, handshake.proven_key
        )
        if self._caller.dialled:
            self._heart.proof = prove(self._own, greeting)
        return [*outputs, Send(self._heart.beat(self.peer, now))]


def introduced(
    own: Ourselves, caller: Caller, greeting: Greeting, leave: Leave, key: bytes
) -> Peer:
    """Return a peer that has said who it is; ``key`` is what it has proved, if any.

    A worker is known by the name that it chose, a peer of a relay by its node's, and
    others by their device's.
    """
    said = greeting.ours
    works = said is not None and said.role == Role.WORKER.value
    name = name_of(greeting) if works or not caller.name else caller.name
    return Peer(
        name=name,
        breed=caller.breed if said is None else Breed.OURS,
        features=frozenset[Ability]() if said is None else said.abilities,
        asks=leave.asks and not works,
        admitted=leave.admitted,
        public_key=key,
        neighbour=said is not None and not works,
        knows_passcode=same_passcode(own.passcode, greeting.passcode),
    )


def unintroduced(own: Ourselves, caller: Caller) -> tuple[Peer, Leave]:
    """Return a peer of a relay that need not say who it is, let in or not."""
    presented = Presented(
        name=caller.name,
        models=frozenset(caller.described.models),
        address=caller.address,
        named=caller.named,
        greets=False,
    )
    try:
        leave = admit(own, presented)
    except NotAdmitted as error:
        return Peer(caller.name, caller.breed, refusal=str(error)), Leave(asks=False)
    peer = Peer(caller.name, caller.breed, asks=leave.asks, admitted=leave.admitted)
    return peer, leave
