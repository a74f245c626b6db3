"""A node's registration with a relay: what it contains and when to renew it.

Source: what real nodes do: every four minutes, and after each change.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Draining, LoadChanged, OffersChanged
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, WorkerLoad
from shoal.protocols.seam.session import Identity
from shoal.protocols.tealenet.codec.extension import (
    VERSION,
    IntroductionExtension,
    ShoalFeature,
    write_extension,
)
from shoal.protocols.tealenet.codec.hardware import node_capabilities
from shoal.protocols.tealenet.codec.relay_messages import (
    RegistrationProof,
    RelayRegister,
    RelayRegisterAck,
    RelayRegisterChallenge,
    challenge_text,
)
from shoal.protocols.tealenet.codec.scalars import MODELS_MAX, NAME_MAX, well_formed
from shoal.protocols.tealenet.codec.signatures import noise_fields
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole

REFRESH_INTERVAL = 240.0  # seconds from one registration to the next
CHANGE_INTERVAL = 2.0  # seconds at least from one registration to the next, on changes
TTL_FRACTION = 0.8  # of the time for which the relay knows us, after which we register
ACK_TIMEOUT = 10.0  # seconds for the relay to acknowledge the first one
NODE_FEATURES = tuple(ShoalFeature)


class NodeRegistration:
    """What a relay is told of us, and when.

    ``is_acknowledged`` says whether it has acknowledged that, and ``due_at`` when it is
    due to be told again.
    """

    def __init__(self, own: TealeLocalNode, identity: Identity, now: float) -> None:
        self._own, self._identity = own, identity
        self._offers = own.offers
        self._condition = WorkerLoad()
        self._draining = False
        self._last: RelayRegister | None = None
        self._last_at = now
        self._timeout_at = now + ACK_TIMEOUT
        self.is_acknowledged = False
        self.due_at = now

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        return (
            self.due_at if self.is_acknowledged else min(self.due_at, self._timeout_at)
        )

    def tick(self, now: float) -> RelayRegister | None:
        """Return what to say, if it is time to; PeerError if the relay says nothing."""
        if not self.is_acknowledged and now >= self._timeout_at:
            raise PeerError(
                "the relay did not acknowledge our registration within "
                f"{ACK_TIMEOUT:g} s"
            )
        if now < self.due_at:
            return None
        self._last, self._last_at = self._registration(), now
        self.due_at = now + REFRESH_INTERVAL
        return self._last

    def prove(self, challenge: RelayRegisterChallenge) -> RelayRegister:
        """Return the registration with what proves that we have the key now."""
        said = self._last or self._registration()
        text = challenge_text(challenge.challenge, said.node_id)
        proof = RegistrationProof(challenge.challenge, self._identity.sign(text).hex())
        return msgspec.structs.replace(said, shoal=proof)

    def on_ack(self, ack: RelayRegisterAck, now: float) -> None:
        """Take note that the relay knows us, and for how long."""
        self.is_acknowledged = True
        lifetime = min(
            ack.ttl_seconds, REFRESH_INTERVAL / TTL_FRACTION
        )  # it may be any number
        again = max(CHANGE_INTERVAL, TTL_FRACTION * lifetime)
        self.due_at = min(self.due_at, now + again)

    def on_expired(self, now: float) -> None:
        """Register again: the relay does not know us any more."""
        self.is_acknowledged = False
        self._timeout_at = now + ACK_TIMEOUT
        self._schedule_change()

    def update(self, word: OffersChanged | LoadChanged | Draining) -> None:
        """Take note of what we can run now; the relay hears of it soon."""
        match word:
            case OffersChanged(offers):
                self._offers = offers
            case LoadChanged(condition):
                if bool(condition.unfit) is bool(self._condition.unfit):
                    self._condition = condition
                    return
                self._condition = condition
            case Draining():
                self._draining = True
        self._schedule_change()

    def _schedule_change(self) -> None:
        self.due_at = min(self.due_at, self._last_at + CHANGE_INTERVAL)

    def _registration(self) -> RelayRegister:
        own, node_id = self._own, self._identity.public_key.hex()
        return RelayRegister(
            node_id=node_id,
            public_key=node_id,
            display_name=well_formed(own.name)[:NAME_MAX],
            capabilities=self._capabilities(),
            signature=self._identity.sign(node_id.encode()).hex(),
            wg_public_key=self._identity.exchange_key.hex(),
        )

    def _capabilities(self) -> dict[str, Any]:
        own, offers = self._own, [*_public_offers(self._offers)]
        contexts = [offer.context for offer in offers if offer.context]
        noise, proof = noise_fields(self._identity)
        introduction = IntroductionExtension(
            version=VERSION,
            features=[each.value for each in NODE_FEATURES],
            name=well_formed(own.name)[:NAME_MAX],
            role=own.role.value,
            key=self._identity.public_key.hex(),
            noise=noise,
            noise_proof=proof,
        )
        # A coordinator is there for its workers also while it has nothing to offer.
        willing = own.role is TealeRole.COORDINATOR or bool(offers)
        said = node_capabilities(
            own.hardware,
            public_model_names(offers),
            available=willing and not self._draining and not self._condition.unfit,
            slots=max((offer.slots for offer in offers), default=1),
            context=min(contexts, default=0),
            shoal=write_extension(introduction),
        )
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(said))
        return plain


def public_model_names(offers: Iterable[Offer]) -> list[str]:
    """Return the models that others may ask for, each once."""
    names = {name for offer in offers for name in offer.models}
    return sorted(name for name in names if 0 < len(name) <= NAME_MAX)[:MODELS_MAX]


def _public_offers(offers: Iterable[Offer]) -> Iterable[Offer]:
    """Return what peers that are not ours can use: chats, with whoever asks."""
    return (
        offer
        for offer in offers
        if JobKind.CHAT in offer.kinds and offer.slots and not offer.only_for
    )
