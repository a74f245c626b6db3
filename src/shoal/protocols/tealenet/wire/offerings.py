"""Offers in our field: a peer of ours says more of its models than their names."""

from collections.abc import Iterable

import msgspec

from shoal.domain.work import Feature, Kind
from shoal.domain.worker import CHATS, Device, Offer
from shoal.protocols.tealenet.wire.scalars import (
    MODELS_MAX,
    NAME_MAX,
    Count,
    Name,
    well_formed,
)

SLOTS_MAX = 1024  # jobs at a time that we believe a peer to run
NAMES_MAX = 256  # tasks or keys that an offer may name
CONTEXT_MAX = 2**31 - 1  # tokens


class Offering(msgspec.Struct, frozen=True, omit_defaults=True):
    """An offer on the wire; without ``kinds`` it is for chats."""

    models: list[str] = []
    kinds: list[str] = []
    features: list[str] = []
    slots: Count = 1
    context: Count = 0
    only_for: list[str] = []
    tasks: list[str] = []
    device: Name = ""
    price: Name = ""
    streams: bool = True


def offerings_of(offers: Iterable[Offer]) -> list[Offering]:
    """Return offers as they are written."""
    return [
        Offering(
            models=sorted(offer.models),
            kinds=[] if offer.kinds == CHATS else _values(offer.kinds),
            features=_values(offer.features),
            slots=offer.slots,
            context=offer.context,
            only_for=sorted(offer.only_for)[:NAMES_MAX],
            tasks=sorted(offer.tasks)[:NAMES_MAX],
            device=offer.device.value if offer.device is not None else "",
            price=offer.price[:NAME_MAX],
            streams=offer.streams,
        )
        for offer in offers
    ]


def offers_of(
    offerings: Iterable[Offering],
    *,
    neighbour: bool = False,
    public_key: bytes = b"",
    proven: bool = False,
) -> tuple[Offer, ...]:
    """Return offers as they were read, those of more than ``MODELS_MAX`` left out.

    So are those that offer no kind of work that we know, or a name that is too long.
    """
    offers = []
    models = 0
    for given in offerings:
        kinds = frozenset(kind for kind in Kind if kind.value in given.kinds)
        names = frozenset(well_formed(name) for name in given.models)
        models += max(1, len(names))
        if models > MODELS_MAX:
            break
        if (given.kinds and not kinds) or any(len(each) > NAME_MAX for each in names):
            continue
        offers.append(
            Offer(
                kinds=kinds or CHATS,
                models=names,
                slots=min(given.slots, SLOTS_MAX),
                features=frozenset(f for f in Feature if f.value in given.features),
                context=min(given.context, CONTEXT_MAX),
                only_for=_some(given.only_for),
                tasks=_some(given.tasks),
                streams=given.streams,
                device=next((d for d in Device if d.value == given.device), None),
                public_key=public_key.hex(),
                proven=proven,
                price=given.price,
                neighbour=neighbour,
            )
        )
    return tuple(offers)


def _values(words: Iterable[Kind | Feature]) -> list[str]:
    return sorted(word.value for word in words)


def _some(names: list[str]) -> frozenset[str]:
    return frozenset(well_formed(name) for name in names[:NAMES_MAX] if name)
