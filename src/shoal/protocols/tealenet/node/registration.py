"""How a node keeps itself known to a relay: it registers, and again and again.

Source: what real nodes do: again every four minutes, and when something changes.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Conditioned, Draining, Offered
from shoal.domain.work import Kind
from shoal.domain.worker import Condition, Offer
from shoal.protocols.session import Identity
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.relay.messages import (
    Proof,
    Register,
    RegisterAck,
    RegisterChallenge,
    challenge_text,
)
from shoal.protocols.tealenet.wire.extension import (
    VERSION,
    Ability,
    Introduction,
    write,
)
from shoal.protocols.tealenet.wire.hardware import capabilities_of
from shoal.protocols.tealenet.wire.proving import noise_fields
from shoal.protocols.tealenet.wire.scalars import MODELS_MAX, NAME_MAX, well_formed

AGAIN = 240.0  # seconds from one registration to the next
CHANGES_EVERY = 2.0  # seconds at least from one registration to the next, on changes
SHARE_OF_TTL = 0.8  # of the time for which the relay knows us, after which we register
ACK_LIMIT = 10.0  # seconds for the relay to acknowledge the first one
ABILITIES = tuple(Ability)


class Registration:
    """What a relay is told of us, and when.

    ``done`` says whether it has acknowledged that, and ``again_at`` when it is due to
    be told again.
    """

    def __init__(self, own: Ourselves, identity: Identity, now: float) -> None:
        self._own, self._identity = own, identity
        self._offers = own.offers
        self._condition = Condition()
        self._draining = False
        self._said: Register | None = None
        self._said_at = now
        self._limit = now + ACK_LIMIT
        self.done = False
        self.again_at = now

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        return self.again_at if self.done else min(self.again_at, self._limit)

    def tick(self, now: float) -> Register | None:
        """Return what to say, if it is time to; PeerError if the relay says nothing."""
        if not self.done and now >= self._limit:
            raise PeerError(
                f"the relay did not acknowledge our registration within {ACK_LIMIT:g} s"
            )
        if now < self.again_at:
            return None
        self._said, self._said_at = self._registration(), now
        self.again_at = now + AGAIN
        return self._said

    def answer(self, challenge: RegisterChallenge) -> Register:
        """Return the registration with what proves that we have the key now."""
        said = self._said or self._registration()
        text = challenge_text(challenge.challenge, said.node_id)
        proof = Proof(challenge.challenge, self._identity.sign(text).hex())
        return msgspec.structs.replace(said, shoal=proof)

    def acknowledged(self, ack: RegisterAck, now: float) -> None:
        """Take note that the relay knows us, and for how long."""
        self.done = True
        lifetime = min(ack.ttl_seconds, AGAIN / SHARE_OF_TTL)  # it may be any number
        again = max(CHANGES_EVERY, SHARE_OF_TTL * lifetime)
        self.again_at = min(self.again_at, now + again)

    def expired(self, now: float) -> None:
        """Register again: the relay does not know us any more."""
        self.done = False
        self._limit = now + ACK_LIMIT
        self._soon()

    def tell(self, word: Offered | Conditioned | Draining) -> None:
        """Take note of what we can run now; the relay hears of it soon."""
        match word:
            case Offered(offers):
                self._offers = offers
            case Conditioned(condition):
                if bool(condition.unfit) is bool(self._condition.unfit):
                    self._condition = condition
                    return
                self._condition = condition
            case Draining():
                self._draining = True
        self._soon()

    def _soon(self) -> None:
        self.again_at = min(self.again_at, self._said_at + CHANGES_EVERY)

    def _registration(self) -> Register:
        own, node_id = self._own, self._identity.public_key.hex()
        return Register(
            node_id=node_id,
            public_key=node_id,
            display_name=well_formed(own.name)[:NAME_MAX],
            capabilities=self._capabilities(),
            signature=self._identity.sign(node_id.encode()).hex(),
            wg_public_key=self._identity.exchange_key.hex(),
        )

    def _capabilities(self) -> dict[str, Any]:
        own, offers = self._own, [*_for_all(self._offers)]
        contexts = [offer.context for offer in offers if offer.context]
        noise, proof = noise_fields(self._identity)
        introduction = Introduction(
            version=VERSION,
            features=[each.value for each in ABILITIES],
            name=well_formed(own.name)[:NAME_MAX],
            role=own.role.value,
            key=self._identity.public_key.hex(),
            noise=noise,
            noise_proof=proof,
        )
        # A coordinator is there for its workers also while it has nothing to offer.
        willing = own.role is Role.COORDINATOR or bool(offers)
        said = capabilities_of(
            own.hardware,
            model_names(offers),
            available=willing and not self._draining and not self._condition.unfit,
            slots=max((offer.slots for offer in offers), default=1),
            context=min(contexts, default=0),
            shoal=write(introduction),
        )
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(said))
        return plain


def model_names(offers: Iterable[Offer]) -> list[str]:
    """Return the models that others may ask for, each once."""
    names = {name for offer in offers for name in offer.models}
    return sorted(name for name in names if 0 < len(name) <= NAME_MAX)[:MODELS_MAX]


def _for_all(offers: Iterable[Offer]) -> Iterable[Offer]:
    """Return what peers that are not ours can use: chats, with whoever asks."""
    return (
        offer
        for offer in offers
        if Kind.CHAT in offer.kinds and offer.slots and not offer.only_for
    )
