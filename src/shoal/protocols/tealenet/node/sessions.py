"""A node's sessions with others: opened, found, and carried over the relay."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from shoal.domain.vocabulary import Event, Offered
from shoal.protocols.crowd import Protection
from shoal.protocols.session import Data, Identity, Send
from shoal.protocols.tealenet.conversation import Conversation
from shoal.protocols.tealenet.encryption.secure import Ends
from shoal.protocols.tealenet.manners import WAN, Manners
from shoal.protocols.tealenet.node.known import Acquaintance, is_bound
from shoal.protocols.tealenet.node.talk import Talk
from shoal.protocols.tealenet.ourselves import Ourselves, uuid_of
from shoal.protocols.tealenet.peer import Breed, Caller
from shoal.protocols.tealenet.relay.messages import (
    Answer,
    ConnectionInfo,
    Offer,
    RelayClose,
    RelayData,
    RelayOpen,
    RelayReady,
    encode,
)
from shoal.protocols.tealenet.wire.proving import noise_binding

SESSIONS_MAX = 8192  # open at a time
STRANGERS_MAX = 1024  # of them by peers that were not let in, or not yet
ID_MAX = 256  # characters of a session's id
SILENCE_MAX = 3600.0  # seconds without a heartbeat, where none is to be expected
ID_SIZE = 16  # bytes of one of ours

AddressOf: TypeAlias = Callable[[str], str]
"""Returns where the node of an id comes from; empty where that is not known."""


def unknown(node_id: str) -> str:
    """Return that it is not known."""
    return ""


_NODE_ID = re.compile("[0-9a-f]{64}")


class Sessions:
    """All sessions of a node.  Their ids differ in more than case.

    ``said`` is what everybody is told of us, by its kind.
    """

    def __init__(
        self, own: Ourselves, identity: Identity, address_of: AddressOf
    ) -> None:
        self._own, self._identity = own, identity
        self._address_of = address_of
        self.id = identity.public_key.hex()
        self._signature = identity.sign(noise_binding(identity.exchange_key))
        self._talks: dict[str, Talk] = {}  # by their ids in upper case
        self._strangers: dict[Talk, None] = {}  # whose peers are not let in, in order
        self.said: dict[type, Event] = {}

    def __len__(self) -> int:
        return len(self._talks)

    def all(self) -> Iterable[Talk]:
        """Return them, as they are now."""
        return [*self._talks.values()]

    def find(self, session_id: str) -> Talk | None:
        """Return the session of an id."""
        return self._talks.get(session_id) or self._talks.get(session_id.upper())

    def takes(self, peer_id: str, session_id: str) -> bool:
        """Say whether there is room for a session that a peer wants to open."""
        return (
            _NODE_ID.fullmatch(peer_id) is not None
            and peer_id != self.id
            and 0 < len(session_id) <= ID_MAX
            and len(self._talks) < SESSIONS_MAX
        )

    def call(self, node: Acquaintance, now: float) -> tuple[Talk, Send]:
        """Open a session; return it and what to say."""
        session_id = uuid_of(self._own.draw(ID_SIZE))
        talk = self._begin(node, session_id, now, begins=True)
        return talk, Send(encode(RelayOpen(self.id, node.id, session_id)))

    def take(self, node: Acquaintance, session_id: str, now: float) -> Talk:
        """Take a session that a peer opens."""
        talk = self._begin(node, session_id, now, begins=False)
        self._strangers[talk] = None
        return talk

    def met(self, talk: Talk) -> None:
        """Take note that the peer was let in."""
        self._strangers.pop(talk, None)

    @property
    def one_too_many(self) -> Talk | None:
        """The session that has to end, so that others can be let in."""
        if len(self._strangers) <= STRANGERS_MAX:
            return None
        return next(iter(self._strangers))

    def end(self, talk: Talk) -> None:
        """Forget a session."""
        self._talks.pop(talk.id.upper(), None)
        self._strangers.pop(talk, None)

    # What is said in a session, or about one.

    def ready(self, peer_id: str, session_id: str) -> Send:
        """Return that a session may be used."""
        return Send(encode(RelayReady(self.id, peer_id, session_id)))

    def close(self, peer_id: str, session_id: str) -> Send:
        """Return that a session is over."""
        return Send(encode(RelayClose(self.id, peer_id, session_id)))

    def carry(self, talk: Talk, data: Data) -> Send:
        """Return what a session's data is to the relay."""
        message = data if isinstance(data, bytes) else data.encode()
        return Send(encode(RelayData(self.id, talk.peer_id, talk.id, message)))

    def answer(self, offer: Offer) -> Send:
        """Answer a peer that would rather connect directly: only the relay will do."""
        peer_id, session_id = offer.from_node_id, offer.session_id
        # With a NAT like this at one end, Macs do not even try.
        key = self._identity.exchange_key.hex()
        info = ConnectionInfo("", 0, "symmetric", wg_public_key=key)
        text = f"{self.id}:{peer_id}:{session_id}".encode(errors="replace")
        signature = self._identity.sign(text).hex()
        return Send(encode(Answer(self.id, peer_id, session_id, info, signature)))

    # Private parts, in the order in which they are called.

    def _begin(
        self, node: Acquaintance, session_id: str, now: float, *, begins: bool
    ) -> Talk:
        ends = Ends(
            own=self._identity,
            own_id=self.id,
            peer_id=node.id,
            session_id=session_id,
            draw=self._own.draw,
            is_bound=partial(is_bound, node.id),
            signature=self._signature,
            epoch=self._own.epoch,
            noise_key=node.noise_key,
            teale_key=node.teale_key,
        )
        converse = partial(self._converse, node, begins)
        talk = Talk(ends, begins=begins, converse=converse, news=self._news, now=now)
        self._talks[session_id.upper()] = talk
        return talk

    def _converse(
        self, node: Acquaintance, begins: bool, protection: Protection, now: float
    ) -> Conversation:
        own = self._own
        if isinstance(offered := self.said.get(Offered), Offered):
            own = replace(own, offers=offered.offers)
        noise = protection is Protection.NOISE
        caller = Caller(
            dialled=begins,
            name=node.id,
            breed=Breed.OURS if noise else node.breed,
            described=node.described,
            address=self._address_of(node.id),
            protection=protection,
        )
        return Conversation(own, caller, _manners(caller.breed))

    def _news(self) -> Sequence[Event]:
        return [word for kind, word in self.said.items() if kind is not Offered]


def _manners(breed: Breed) -> Manners:
    """Return how long a peer may be silent, beside the rest."""
    if breed is Breed.RUST:
        # Its nodes hear nothing while they answer a request, and its gateways never
        # say how they are: the relay tells when they are gone.
        return replace(WAN, degraded_after=SILENCE_MAX, gone_after=SILENCE_MAX)
    return WAN
