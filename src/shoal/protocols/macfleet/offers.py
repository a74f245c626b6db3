"""What peers of ours tell each other that they do, and how much they can take."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.work import Feature, Kind
from shoal.domain.worker import Condition, Device, Offer
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.wire import control

CARRIED = frozenset({Kind.TASK, Kind.CALL, Kind.LANE})
"""The kinds of jobs that this wire has words for."""

SLOTS_MAX = 4096  # tasks at a time that we believe a peer to take
QUEUED_MAX = 1_000_000

_TOLD = frozenset({Feature.VALUES, Feature.CODE})
_KINDS = {each.value: each for each in CARRIED}
_FEATURES = {each.value: each for each in _TOLD}
_DEVICES = {each.value: each for each in Device}

NOTHING = control.Offer(slots=0)


def told(
    offers: Sequence[Offer], condition: Condition, peer: Peer, *, from_pool: bool
) -> control.Offer:
    """Return what a peer is told that we do.

    Of several offers that is the first for which this wire has words.  Lanes are not
    for other pools, which ``from_pool`` says: they would hold what others wait for.
    """
    carried = CARRIED - {Kind.LANE} if from_pool else CARRIED
    offer = next((each for each in offers if each.kinds & carried), None)
    if offer is None:
        return NOTHING
    return control.Offer(
        kinds=frozenset(each.value for each in offer.kinds & carried),
        tasks=frozenset(sorted(offer.tasks)[: control.NAMES_MAX]),
        slots=offer.slots,
        features=frozenset(each.value for each in _allowed(offer.features, peer)),
        device="" if offer.device is None else offer.device.value,
        only_for=frozenset(sorted(offer.only_for)[: control.NAMES_MAX]),
        queued=condition.queued,
        unfit=condition.unfit[: control.TEXT_MAX],
        speed=condition.speed,
    )


def heard(word: control.Offer, peer: Peer) -> tuple[Offer, ...]:
    """Return what a peer does, as it says."""
    kinds = frozenset(_KINDS[each] for each in word.kinds if each in _KINDS)
    if not kinds or not word.slots:
        return ()
    named = frozenset(_FEATURES[each] for each in word.features if each in _FEATURES)
    offer = Offer(
        kinds=kinds,
        slots=min(word.slots, SLOTS_MAX),
        features=_allowed(named, peer),
        only_for=word.only_for,
        tasks=word.tasks,
        streams=False,
        device=_DEVICES.get(word.device),
        public_key=peer.public_key.hex(),
        proven=bool(peer.public_key),
        neighbour=not peer.works,
        receipts=False,
    )
    return (offer if peer.works else replace(offer, kinds=kinds - {Kind.LANE}),)


def condition_of(word: control.Offer) -> Condition:
    """Return how much a peer can take, as it says."""
    return Condition(word.unfit, min(word.queued, QUEUED_MAX), word.speed)


def plain_offer(tasks: frozenset[str] | None, slots: int) -> tuple[Offer, ...]:
    """Return what a worker does that is not one of ours.

    ``tasks`` are the functions that it has; None: nobody knows, and so any.
    """
    if tasks is not None and not tasks:
        return ()
    names = tasks or frozenset()
    offer = Offer(
        kinds=CARRIED, slots=slots, tasks=names, streams=False, receipts=False
    )
    return (offer,)


def _allowed(features: frozenset[Feature], peer: Peer) -> frozenset[Feature]:
    """Return what counts: code does not, where no token says who sends it."""
    return features & (_TOLD if peer.trusted else _TOLD - {Feature.CODE})
