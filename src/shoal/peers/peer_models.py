"""The models of one peer, each of which is a worker of the pool.

A peer that does not say which of its models share slots shares them between all.  A job
that runs on one model therefore counts as load of the others, as do jobs of other
coordinators: a busy peer gets a second job only if no other worker is free, and then
queues or rejects it.

Each model that is added or removed is a stored fact, and a peer may have hundreds of
models and change them at any rate.  A burst of changes applies at once; later changes
are delayed, and the latest offers replace earlier ones.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from shoal.coordinator.connections import PeerRoute, WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.coordinator.worker_events import WorkerPort
from shoal.domain import vocabulary as words
from shoal.domain.credentials import may_offer
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.work import ANY_MODEL, MODEL_QUEUE, JobKind, NamedWork
from shoal.domain.worker import Offer, WorkerLoad
from shoal.peers.model_libraries import usable_library
from shoal.transports.clock import Clock, Timer

MODELS_MAX = 256  # models per peer; further ones are ignored
NAME_MAX = 256  # characters of the name of a peer or a model
ENDED_MAX = 256  # recently ended jobs per peer, for receipts that arrive later

LIBRARY = MODEL_QUEUE  # ends the name of the worker that loads a machine's models

UNLOADED = "no longer loaded"

CHANGES_AT_ONCE = 512  # models added or removed in one burst
CHANGES_EVERY = 1 / 32  # seconds per change in the long run
PEERS_FIRST = 64  # peers at which states that no longer limit are first evicted

log = logging.getLogger("shoal.peers")

ApplyOffers: TypeAlias = Callable[[tuple[Offer, ...]], int]
"""Applies offers; returns the number of models that changed."""


class PeerModel:
    """One model of a peer; for the hub, it is a worker's connection."""

    def __init__(self, name: str, models: "PeerModels", offer: Offer) -> None:
        self.accepts = models.peer.accepts
        self.id = WorkerId(f"{models.wire}:{name}")
        self.wanted_offer: Offer | None = offer  # None: it leaves
        self.load = WorkerLoad()  # as last reported to the pool
        self._name = name
        self._models = models
        self.offer = offer  # the offer that it joined with
        self._retired = False
        self.port: WorkerPort = models.hub.connect(self, models.wire, models.via)

    def send(self, message: words.Command) -> bool:
        return self._models.send(self, message)

    def disconnect(self, reason: str, code: int, text: str) -> None:
        self._models.peer.disconnect(reason, code, text)

    def with_model_name(self, job: words.RunJob) -> words.RunJob:
        """Name this model in a job for any model: the peer may have others."""
        if self._models.via is None:  # a single worker
            return job
        work, models = job.work, self.offer.models
        if isinstance(work, NamedWork) or work.model != ANY_MODEL or len(models) != 1:
            return job
        (name,) = models
        return replace(job, work=replace(work, model=name))

    @property
    def is_current(self) -> bool:
        """Whether the pool has the latest offer of this model."""
        return self.offer == self.wanted_offer and not self._retired

    def join(self, offer: Offer) -> None:
        """Join the pool, or rejoin it with another offer."""
        self.offer = self.wanted_offer = offer
        self._retired = False
        self.load = WorkerLoad()
        self.port.on_event(words.Joined(self._name, offer, self._models.running))

    def update_load(self, load: WorkerLoad) -> None:
        """Report the load to the pool, if it changed."""
        if load is not self.load and load != self.load:
            self.load = load
            self.port.on_event(words.LoadChanged(load))

    def drain(self) -> None:
        """Refuse new jobs, and leave when the running ones end."""
        self.wanted_offer = None
        if not self._retired:
            self._retired = True
            self.port.on_event(words.Draining(UNLOADED))


@dataclass(slots=True, eq=False)
class PeerModels:
    """All models of one peer; ``name`` is the peer's name within worker names.

    ``via`` is None for a peer that is a single worker: it has one offer, and all its
    messages are about that, even if another connection got the job.  Commands of the
    hub to any model go to ``peer``.  ``running`` is as in ``Joined``, of all models.
    ``permitted`` are the patterns of the models that the peer may offer; empty: any.
    """

    hub: Hub
    wire: str
    _name: str
    via: PeerRoute | None
    peer: WorkerConnection
    _changed: Callable[[], None]
    running: words.RunningJobNames | None = None
    permitted: tuple[str, ...] = ()
    _models: dict[str, PeerModel] = field(default_factory=dict)
    _running: dict[tuple[JobId, LeaseNumber], PeerModel] = field(default_factory=dict)
    _ended: dict[JobId, PeerModel] = field(default_factory=dict)  # oldest first
    _load: WorkerLoad = field(default_factory=WorkerLoad)
    _draining: words.Draining | None = None
    _warned: bool = False
    _add_load: bool = False  # whether a job of a model is load for the others

    @property
    def is_sole_worker(self) -> bool:
        """Whether the peer is a single worker, and not one worker per model."""
        return self.via is None

    # From the peer.

    def on_offers(self, offers: tuple[Offer, ...]) -> int:
        """Replace the peer's offers; return the number of models that changed.

        A busy model finishes its jobs before it leaves or rejoins.
        """
        wanted = self._usable(offers)
        changes = 0
        for name, model in self._models.items():
            if name not in wanted:
                changes += model.wanted_offer is not None
                model.drain()
        for name, offer in wanted.items():
            known = self._models.get(name)
            changes += known is None or known.wanted_offer != offer
            if known is not None:
                known.wanted_offer = offer
            else:
                new = self._models[name] = PeerModel(name, self, offer)
                self._join(new, offer)
        if not self.rejoin():
            self._changed()
        return changes

    def on_chunk(self, event: words.AnswerChunk) -> None:
        """Route a piece of an answer: the hot path, once per token."""
        model = self._running.get((event.job_id, event.lease))
        if model is not None:
            model.port.on_chunk(event)

    def on_call_message(self, event: words.CallsReturned | words.CallProgress) -> None:
        """Route an event about function calls: the hot path of a call stream."""
        model = self._running.get((event.job_id, event.lease))
        if model is not None:
            model.port.on_event(event)

    def on_result(self, event: words.Completed | words.Rejected | words.Failed) -> None:
        """Route the end of a job, which may have been cancelled."""
        number = (event.job_id, event.lease)
        model = self._end(*number) or self._recent(event.job_id)
        if model is not None:
            model.port.on_event(event)

    def on_receipt(self, event: words.ReceiptSent) -> None:
        """Route a receipt that is separate from its answer."""
        job_id = event.job_id
        running = (model for (job, _), model in self._running.items() if job == job_id)
        model = next(running, None) or self._recent(job_id)
        if model is not None:
            model.port.on_event(event)

    def on_load(self, load: WorkerLoad) -> None:
        """Update the load of the peer."""
        self._load = load
        self._update_loads()

    def on_draining(self, event: words.Draining) -> None:
        """Let all models refuse new jobs, including models that join later."""
        self._draining = event
        self.broadcast(event)

    def broadcast(self, event: words.Event) -> None:
        """Pass an event to all models."""
        for model in self._models.values():
            model.port.on_event(event)

    def close(self, reason: str) -> None:
        """Disconnect all models: the peer has left."""
        for model in self._models.values():
            model.port.on_disconnect(reason)
        self._models.clear()
        self._running.clear()
        self._ended.clear()

    # From the hub.

    def send(self, model: PeerModel, message: words.Command) -> bool:
        """Send the peer a command for one of its models."""
        if isinstance(message, words.RunJob):
            message = model.with_model_name(message)
        if not self.peer.send(message):
            return False
        if isinstance(message, words.RunJob):
            self._running[message.job_id, message.lease] = model
            if self._add_load:
                self._update_loads()
        elif (
            isinstance(message, words.CancelJob)
            and words.CancelJob in self.peer.accepts
        ):
            # Otherwise the peer cannot cancel, and reports the end of the job.
            self._end(message.job_id, message.lease)
        return True

    def rejoin(self) -> bool:
        """Let idle models leave or rejoin; return whether all are up to date."""
        for name, model in list(self._models.items()):
            worker = self.hub.pool.workers.get(model.id)
            if model.is_current or (worker is not None and worker.leases):
                continue
            if model.wanted_offer is None:
                del self._models[name]
                model.port.on_disconnect(UNLOADED)
                self._update_loads()
            else:
                self._join(model, model.wanted_offer)
        return all(model.is_current for model in self._models.values())

    # Internals.

    def _usable(self, offers: tuple[Offer, ...]) -> dict[str, Offer]:
        """Return the valid offers by worker name, without the wire's prefix."""
        if self.is_sole_worker:
            (offer,) = offers
            return {self._name: offer}
        usable: dict[str, Offer] = {}
        for offer in filter(None, map(self._permitted, offers)):
            model = LIBRARY if offer.library else _model_label(offer.models)
            if len(model) <= NAME_MAX and len(usable) < MODELS_MAX:
                name = f"{self._name}/{model}" if model else self._name
                usable.setdefault(name, offer)
        left_out = len(offers) - len(usable)
        if left_out and not self._warned:
            self._warned = True  # offers may repeat with every heartbeat
            log.warning(
                "ignored peer=%r offers=%d: too many, duplicate, too long, or not "
                "permitted by its token",
                f"{self.wire}:{self._name}",
                left_out,
            )
        return usable

    def _permitted(self, offer: Offer) -> Offer | None:
        """Return what counts of an offer, and its join token permits; None: nothing.

        The models of its first message were checked when it joined; these may be
        others.
        """
        if not may_offer(self.permitted, offer.models):
            return None
        if offer.library is None:
            return offer
        if offer.neighbour or offer.slots < 1:
            return None  # only a pool's own machines get orders
        library = usable_library(offer.library, self.permitted, offer.proven_key)
        return replace(offer, library=library)

    def _join(self, model: PeerModel, offer: Offer) -> None:
        model.join(offer)
        if self._draining is not None:
            model.port.on_event(self._draining)
        self._update_loads()

    def _update_loads(self) -> None:
        """Report changed loads of models to the pool."""
        # The pool itself counts the jobs at an engine that the peer names.
        alone = [
            each.offer.engine or each.offer.library for each in self._models.values()
        ]
        self._add_load = len(alone) > 1 and not all(alone)
        if len(alone) == 1:  # no other model adds load
            for model in self._models.values():
                model.update_load(self._load)
            return
        jobs = Counter(model.id for model in self._running.values())
        for model in self._models.values():
            is_alone = model.offer.engine or model.offer.library
            other_jobs = 0 if is_alone else len(self._running) - jobs[model.id]
            queued = self._load.queued + other_jobs
            calls = JobKind.CALL in model.offer.kinds
            lent = self._load.lent if calls else 0  # slots of functions
            model.update_load(replace(self._load, queued=queued, lent=lent))

    def _recent(self, job_id: JobId) -> PeerModel | None:
        """Return the model of a job that ended recently."""
        if self.is_sole_worker:
            return self._models.get(self._name)
        return self._ended.get(job_id)

    def _end(self, job_id: JobId, lease: LeaseNumber) -> PeerModel | None:
        """Record that a job ended at the peer; return its model."""
        model = self._running.pop((job_id, lease), None)
        if model is None:
            return None
        self._ended[job_id] = model
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        if self._add_load:
            self._update_loads()
        return model


def _model_label(models: frozenset[str]) -> str:
    """Return the part of a worker's name that lists its models, or counts the rest."""
    names = sorted(models)
    label = ",".join(names)
    while len(label) > NAME_MAX and len(names) > 1:
        names.pop()
        label = f"{','.join(names)},+{len(models) - len(names)}"
    return label


@dataclass(slots=True)
class _OfferState:
    """The rate limit of one peer, and the offers that wait for it.

    ``spent_until`` is when all changes so far would be done at the long-term rate.
    """

    spent_until: float = 0.0
    offers: tuple[Offer, ...] = ()
    timer: Timer | None = None


class OfferRateLimiter:
    """The limits of all peers, by name: reconnecting does not reset a limit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[str, _OfferState] = {}
        self._clear_at = PEERS_FIRST

    def submit(self, peer: str, offers: tuple[Offer, ...], apply: ApplyOffers) -> None:
        """Apply a peer's offers now, or as soon as its limit permits."""
        self._clear()
        state = self._states.setdefault(peer, _OfferState())
        state.offers = offers
        due = state.spent_until - CHANGES_AT_ONCE * CHANGES_EVERY
        if self._clock.now() >= due:
            self._pass_on(state, apply)
        elif state.timer is None:
            state.timer = self._clock.call_at(due, lambda: self._pass_on(state, apply))

    def on_peer_left(self, peer: str) -> None:
        """Drop the pending offers of a peer that left."""
        state = self._states.get(peer)
        if state is not None and state.timer is not None:
            state.timer.cancel()
            state.timer = None
            state.offers = ()

    def _pass_on(self, state: _OfferState, apply: ApplyOffers) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        offers, state.offers = state.offers, ()
        begin = max(self._clock.now(), state.spent_until)
        state.spent_until = begin + max(1, apply(offers)) * CHANGES_EVERY

    def _clear(self) -> None:
        # Rarely, because it iterates over all peers.
        if len(self._states) < self._clear_at:
            return
        now = self._clock.now()
        for peer, state in [*self._states.items()]:
            if now >= state.spent_until and state.timer is None:
                del self._states[peer]
        self._clear_at = 2 * max(len(self._states), PEERS_FIRST // 2)
