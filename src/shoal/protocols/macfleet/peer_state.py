"""What two Shoal nodes tell each other about themselves: offers, load, draining.

Each node sends it when it changes, to every peer that may submit jobs: a worker sends
it to its peers and receives none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from shoal.domain.job import PRIVACY_CLASSES
from shoal.domain.vocabulary import (
    Draining,
    Event,
    HealthReported,
    LoadChanged,
    OffersChanged,
)
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import (
    DeviceKind,
    MachineHealth,
    Offer,
    ThermalLevel,
    WorkerLoad,
)
from shoal.protocols.macfleet.codec import control
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import FrameType
from shoal.protocols.macfleet.local_node import FleetPeer, FleetRole
from shoal.protocols.seam.session import Output

CARRIED_KINDS = frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM})
"""The kinds of jobs that this wire supports."""

SLOTS_MAX = 4096  # slots of a peer that are used
QUEUED_MAX = 1_000_000

_KNOWN_FEATURES = frozenset({Feature.VALUES, Feature.CODE})
_KINDS = {each.value: each for each in CARRIED_KINDS}
_FEATURES = {each.value: each for each in _KNOWN_FEATURES}
_THERMAL_LEVELS = {each.value: each for each in ThermalLevel}
_DEVICES = {each.value: each for each in DeviceKind}

NO_OFFER = control.OfferMessage(slots=0)


def encode_offer(
    offers: Sequence[Offer],
    load: WorkerLoad,
    peer: FleetPeer,
    *,
    from_coordinator: bool,
) -> control.OfferMessage:
    """Encode the first of several offers that this wire supports.

    Coordinators do not offer call streams to each other (``from_coordinator``): they
    would occupy slots that other jobs wait for.
    """
    kinds = CARRIED_KINDS - {JobKind.CALL_STREAM} if from_coordinator else CARRIED_KINDS
    offer = next((each for each in offers if each.kinds & kinds), None)
    if offer is None:
        return NO_OFFER
    return control.OfferMessage(
        kinds=frozenset(each.value for each in offer.kinds & kinds),
        tasks=frozenset(sorted(offer.tasks)[: control.NAMES_MAX]),
        slots=offer.slots,
        features=frozenset(
            each.value for each in _allowed_features(offer.features, peer)
        ),
        device="" if offer.device is None else offer.device.value,
        only_for=frozenset(sorted(offer.only_for)[: control.NAMES_MAX]),
        privacy="" if offer.privacy is None else offer.privacy.value,
        price=offer.price,
        queued=load.queued,
        unfit=load.unfit[: control.TEXT_MAX],
        speed=load.speed,
        pythons=offer.pythons,
        lent=load.lent,
        thermal=load.thermal.value,
        throttle=load.throttle,
    )


def decode_offer(message: control.OfferMessage, peer: FleetPeer) -> tuple[Offer, ...]:
    """Return a peer's offer, limited to what it may claim."""
    kinds = frozenset(_KINDS[each] for each in message.kinds if each in _KINDS)
    if not kinds or not message.slots:
        return ()
    features = frozenset(
        _FEATURES[each] for each in message.features if each in _FEATURES
    )
    offer = Offer(
        kinds=kinds,
        slots=min(message.slots, SLOTS_MAX),
        features=_allowed_features(features, peer),
        only_for=message.only_for,
        privacy=PRIVACY_CLASSES.get(message.privacy),
        price=message.price,
        tasks=message.tasks,
        streams=False,
        device=_DEVICES.get(message.device),
        public_key=peer.public_key.hex(),
        proven=bool(peer.public_key),
        neighbour=not peer.is_worker,
        receipts=False,
        pythons=message.pythons,
    )
    return (
        offer
        if peer.is_worker
        else replace(offer, kinds=kinds - {JobKind.CALL_STREAM}),
    )


def decode_load(message: control.OfferMessage) -> WorkerLoad:
    """Return a peer's load."""
    return WorkerLoad(
        message.unfit,
        min(message.queued, QUEUED_MAX),
        message.speed,
        lent=min(message.lent, SLOTS_MAX),
        thermal=_THERMAL_LEVELS.get(message.thermal, ThermalLevel.FAIR),
        throttle=message.throttle,
    )


def upstream_offer(tasks: frozenset[str] | None, slots: int) -> tuple[Offer, ...]:
    """Return the offer of an upstream worker.

    ``tasks`` are the names of its functions; None: unknown, so it may have any.
    """
    if tasks is not None and not tasks:
        return ()
    names = tasks or frozenset()
    offer = Offer(
        kinds=CARRIED_KINDS, slots=slots, tasks=names, streams=False, receipts=False
    )
    return (offer,)


def _allowed_features(
    features: frozenset[Feature], peer: FleetPeer
) -> frozenset[Feature]:
    """Return the features that count: code only if the peer is trusted."""
    return features & (
        _KNOWN_FEATURES if peer.trusted else _KNOWN_FEATURES - {Feature.CODE}
    )


LocalState: TypeAlias = OffersChanged | LoadChanged | Draining | HealthReported


class FleetPeerState:
    """The offer and load sent to a peer, and those received from it."""

    def __init__(self, peer: FleetPeer, role: FleetRole) -> None:
        self._peer = peer
        self._is_coordinator = role is FleetRole.COORDINATOR
        self._offers: Sequence[Offer] | None = None  # None: not known yet
        self._load = WorkerLoad()
        self._sent_offer: control.OfferMessage | None = None
        self._received_offers: tuple[Offer, ...] | None = None
        self._received_load = WorkerLoad()
        self._draining = False

    def send(self, state: LocalState, writer: FrameWriter) -> Sequence[Output]:
        """Return the messages for a change; nothing if the peer submits no jobs."""
        if not self._peer.is_shoal or self._peer.is_worker:
            return ()
        message: control.ControlMessage
        match state:
            case OffersChanged(offers):
                self._offers = offers
                return self._send_offer(writer)
            case LoadChanged(load):
                self._load = load
                return self._send_offer(writer)
            case Draining(reason):
                message = control.DrainingMessage(reason[: control.TEXT_MAX])
            case HealthReported(health):
                message = control.LoadReportMessage(
                    health.cpu, health.memory, health.jobs
                )
        return (writer.write(FrameType.CONTROL, control.encode_control(message)),)

    def receive(
        self,
        message: control.OfferMessage
        | control.DrainingMessage
        | control.LoadReportMessage,
    ) -> Sequence[Event]:
        """Return the events of a peer's message; nothing if it repeats the last."""
        match message:
            case control.OfferMessage():
                return self._receive_offer(message)
            case control.DrainingMessage(reason=reason):
                if self._draining:  # draining is final
                    return ()
                self._draining = True
                return (Draining(reason),)
            case control.LoadReportMessage(cpu=cpu, memory=memory, jobs=jobs):
                return (HealthReported(MachineHealth(cpu, memory, jobs)),)

    def _send_offer(self, writer: FrameWriter) -> Sequence[Output]:
        if self._offers is None:
            return ()
        message = encode_offer(
            self._offers,
            self._load,
            self._peer,
            from_coordinator=self._is_coordinator,
        )
        if message == self._sent_offer:
            return ()
        self._sent_offer = message
        return (writer.write(FrameType.CONTROL, control.encode_control(message)),)

    def _receive_offer(self, message: control.OfferMessage) -> Sequence[Event]:
        events: list[Event] = []
        offers, load = decode_offer(message, self._peer), decode_load(message)
        if offers != self._received_offers:
            self._received_offers = offers
            events.append(OffersChanged(offers))
        if load != self._received_load:
            self._received_load = load
            events.append(LoadChanged(load))
        return events
