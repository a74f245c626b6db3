"""Who a peer is, once the handshake has shown it."""

from shoal.protocols.crowd import Met
from shoal.protocols.macfleet.desk import Seat
from shoal.protocols.macfleet.handshake import Agreed, Strength
from shoal.protocols.macfleet.life import SILENCE_MAX
from shoal.protocols.macfleet.ourselves import WORKS, Ourselves, Role
from shoal.protocols.macfleet.peer import Caller, Peer


def peer_of(own: Ourselves, agreed: Agreed, *, encrypted: bool) -> Peer:
    """Return who a peer is, by what it has shown.

    A token makes it trusted where what it says is ``encrypted`` as well: else somebody
    in between could put in what he likes, once it has shown its token.
    """
    strong = agreed.strong
    if strong is None:
        asks = True  # it has the fleet's token, or there is none
        trusted = encrypted and agreed.strength is not Strength.OPEN
        return Peer(agreed.peer_id, trusted=trusted, asks=asks)
    works = WORKS in strong.features
    has_token = strong.has_token or bool(strong.admitted.token_id)
    may_ask = strong.has_token or own.is_open or own.role is Role.WORKER
    return Peer(
        agreed.peer_id,
        ours=True,
        trusted=encrypted and has_token,
        works=works,
        asks=may_ask and not works,
        admitted=strong.admitted,
        public_key=strong.public_key,
    )


def met(peer: Peer, caller: Caller) -> Met:
    """Return how a peer is introduced; real ones cannot be told to stop."""
    return Met(
        peer.name,
        cancels=peer.ours,
        asks=peer.asks,
        admitted=peer.admitted,
        protection=caller.protection,
    )


def seat_of(peer: Peer, caller: Caller, now: float) -> Seat:
    """Return the seat that a peer takes: ours have to say that they are there."""
    return Seat(
        peer.name,
        peer.public_key,
        caller.host,
        outbound=caller.dialled,
        heard=now,
        silence_max=SILENCE_MAX if peer.ours else None,
    )
