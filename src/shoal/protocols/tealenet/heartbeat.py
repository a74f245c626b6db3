"""The heartbeats that Shoal sends: their contents, and when the next one is due.

Source: TealeNet's "Cluster Messages", "heartbeat", and what real peers do: they send a
heartbeat every few seconds, and immediately after a change; see
``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence

from shoal.domain.worker import SPEED_BY_THERMAL_LEVEL, Offer, WorkerLoad
from shoal.protocols.tealenet.codec import scalars
from shoal.protocols.tealenet.codec.envelope import PayloadForm
from shoal.protocols.tealenet.codec.messages import Heartbeat, HeartbeatAck
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import LinkProfile, TealePeer

REPEAT_DELAY = 2.0  # seconds before the first heartbeat is repeated, as for hello
CHANGE_INTERVAL = 1.0  # seconds between heartbeats that announce changes


class HeartbeatSender:
    """Writes the heartbeats to one peer; the next one is ``due``."""

    def __init__(
        self, local: TealeLocalNode, profile: LinkProfile, form: PayloadForm
    ) -> None:
        self._local = local
        self._form = form
        self._profile = profile
        self.set_offers(local.offers)
        self.set_load(WorkerLoad())
        self.draining = False
        self._busy = False
        self._cached_names: tuple[tuple[Offer, ...], tuple[str, ...]] = ((), ())
        self._sent_at = 0.0
        self.sent = 0  # heartbeats
        self._unanswered = 0  # sent before the peer had shown its form
        self.due: float | None = None

    def set_offers(self, offers: tuple[Offer, ...]) -> None:
        """Set the offers of this end, with their models and slots."""
        self.offers = offers
        # No properties, because they are read for each token.
        self.slots = sum(offer.slots for offer in offers)
        self.models = frozenset[str]().union(*(offer.models for offer in offers))

    def set_load(self, load: WorkerLoad) -> None:
        """Set the load of this end, as it is written in each heartbeat."""
        self._load = load
        self._thermal_level = load.thermal.value
        self._throttle_level = _throttle_level(load)

    def schedule_change(self, now: float) -> None:
        """Make a heartbeat due, at most one each ``CHANGE_INTERVAL``."""
        if self.due is not None:
            self.due = min(self.due, max(now, self._sent_at + CHANGE_INTERVAL))

    def set_open_jobs(self, jobs: int, now: float) -> None:
        """Set how many jobs the peer has here: it may occupy all slots."""
        busy = jobs > 0 and jobs >= self.slots
        if busy is not self._busy:
            self._busy = busy
            self.schedule_change(now)

    def heartbeat(self, peer: TealePeer, now: float) -> Sequence[bytes]:
        """Return a heartbeat; the next one is due after the link's interval.

        A peer that has shown no form yet gets it in both forms, from the second one on.
        """
        self._sent_at = now
        interval = self._profile.heartbeat_interval
        first = not self.sent and not self._form.known
        self.due = now + (REPEAT_DELAY if first else interval)
        message = self._message(Heartbeat, peer, now)
        encoded = (
            self._form.encode_again(message)
            if self.sent
            else (self._form.encode(message),)
        )
        self.sent += len(encoded)
        self._unanswered += not self._form.known
        return encoded

    @property
    def unread(self) -> int:
        """How many were sent in a form that a silent peer could not read.

        It answered the repeated one, in the other form.
        """
        return self._unanswered if self._unanswered > 1 else 0

    def heartbeat_ack(self, peer: TealePeer, now: float) -> bytes:
        """Return the answer to a heartbeat, with the state of this end."""
        return self._form.encode(self._message(HeartbeatAck, peer, now))

    # Private parts, in the order in which they are called.

    def _model_names(self, shown: tuple[Offer, ...]) -> tuple[str, ...]:
        if shown is not self._cached_names[0]:
            self._cached_names = (shown, model_names(shown))
        return self._cached_names[1]

    def _message(
        self, kind: type[Heartbeat] | type[HeartbeatAck], peer: TealePeer, now: float
    ) -> Heartbeat | HeartbeatAck:
        load = self._load
        # Peers learn from an empty list that this end accepts no new jobs.
        shown = peer.submits_jobs and not self.draining
        models = self._model_names(self.offers) if shown else ()
        return kind(
            device_id=self._local.device_id,
            timestamp=scalars.to_date(now + self._local.epoch),
            thermal_level=self._thermal_level,
            throttle_level=self._throttle_level,
            loaded_models=models,
            # No slot is free.  Macs give no job to a peer that is generating, whatever
            # its slots, so that one running job does not count.
            is_generating=self._busy or load.full,
            queue_depth=load.waiting,
            organization_id=self._local.passcode if peer.knows_passcode else None,
            owner_user_id=self._local.owner,
        )


def model_names(offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return the names of the offered models."""
    offered = [name for offer in offers for name in sorted(offer.models)]
    names = dict.fromkeys(
        scalars.well_formed(name) for name in offered if len(name) <= scalars.NAME_MAX
    )
    return tuple(names)[: scalars.MODELS_MAX]


def _throttle_level(load: WorkerLoad) -> int:
    """Return the throttle; 0 if there is a reason to get no jobs but heat."""
    is_hot = load.thermal not in SPEED_BY_THERMAL_LEVEL
    return load.throttle if is_hot or not load.unfit else 0
