"""The models of one peer, each of which is a worker of the pool.

A peer has as many slots as its offers say, for all of its models together, but no wire
says so.  Hence what runs under one model counts as load of the others, as the jobs do
that others have there: a second job goes to a busy peer only where nobody else is free,
and then waits at the peer, or is refused.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.vocabulary import (
    Advanced,
    CallsReturned,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Draining,
    Event,
    Failed,
    Joined,
    Presented,
    Progress,
    Rejected,
    RunJob,
)
from shoal.domain.work import ANY_MODEL, Named
from shoal.domain.worker import Condition, Offer
from shoal.runtime.hearing import Port
from shoal.runtime.hub import Hub
from shoal.runtime.peers import Peer, Via

MODELS_MAX = 256  # models of one peer; more are left out
NAME_MAX = 256  # characters of a peer's name, and of a model's
ENDED_MAX = 256  # jobs of a peer that ended last, for receipts that come after them

UNLOADED = "not loaded any more"

log = logging.getLogger("shoal.crowd")


class ModelPeer:
    """One model of a peer, as the hub sees a worker's connection."""

    def __init__(self, name: str, models: "ModelPeers", offer: Offer) -> None:
        self.accepts = models.peer.accepts
        self.id = WorkerId(f"{models.wire}:{name}")
        self.wanted: Offer | None = offer  # None: it is to leave
        self.condition = Condition()  # as the pool was told
        self._name = name
        self._models = models
        self._offer = offer  # that it has joined with
        self._retired = False
        self.port: Port = models.hub.connect(self, models.wire, models.via)

    def issue(self, message: Command) -> bool:
        return self._models.issue(self, message)

    def hang_up(self, reason: str, code: int, text: str) -> None:
        self._models.peer.hang_up(reason, code, text)

    def named(self, job: RunJob) -> RunJob:
        """Return a job for any model as one for this: the peer may have others."""
        work, models = job.work, self._offer.models
        if isinstance(work, Named) or work.model != ANY_MODEL or len(models) != 1:
            return job
        (name,) = models
        return replace(job, work=replace(work, model=name))

    @property
    def settled(self) -> bool:
        """Whether the pool knows it as it wants to be known."""
        return self._offer == self.wanted and not self._retired

    def join(self, offer: Offer) -> None:
        """Come into the pool, or come in anew."""
        self._offer = self.wanted = offer
        self._retired = False
        self.condition = Condition()
        self.port.heard(Joined(self._name, offer))

    def heed(self, condition: Condition) -> None:
        """Tell the pool how much it can take, if that has changed."""
        if condition is not self.condition and condition != self.condition:
            self.condition = condition
            self.port.heard(Conditioned(condition))

    def retire(self) -> None:
        """Take nothing new, and leave when there is nothing left to do."""
        self.wanted = None
        if not self._retired:
            self._retired = True
            self.port.heard(Draining(UNLOADED))


class ModelPeers:
    """All models of one peer; ``name`` is the peer's, as it stands in workers' names.

    ``peer`` is who is told what the hub has to say to any of them.
    """

    def __init__(
        self,
        hub: Hub,
        wire: str,
        name: str,
        via: Via,
        peer: Peer,
        changed: Callable[[], None],
    ) -> None:
        self.hub = hub
        self.wire = wire
        self.via = via
        self.peer = peer
        self._name = name
        self._changed = changed
        self._models: dict[str, ModelPeer] = {}
        self._running: dict[tuple[JobId, LeaseNumber], ModelPeer] = {}
        self._ended: dict[JobId, ModelPeer] = {}  # the oldest first
        self._condition = Condition()
        self._draining: Draining | None = None
        self._warned = False

    # From the peer.

    def offered(self, offers: tuple[Offer, ...]) -> int:
        """Take what the peer can run from now on; return how many models changed.

        A model that is busy goes on with what it has before it leaves, or joins anew.
        """
        wanted = self._sound(offers)
        changes = 0
        for name, model in self._models.items():
            if name not in wanted:
                changes += model.wanted is not None
                model.retire()
        for name, offer in wanted.items():
            known = self._models.get(name)
            changes += known is None or known.wanted != offer
            if known is not None:
                known.wanted = offer
            else:
                new = self._models[name] = ModelPeer(name, self, offer)
                self._join(new, offer)
        if not self.renew():
            self._changed()
        return changes

    def progress(self, word: Progress) -> None:
        """Take a piece of an answer: the path of every token."""
        model = self._running.get((word.job_id, word.lease))
        if model is not None:
            model.port.heard(word)

    def called(self, word: CallsReturned | Advanced) -> None:
        """Take what is said of calls: the path of every call in a lane."""
        model = self._running.get((word.job_id, word.lease))
        if model is not None:
            model.port.heard(word)

    def ended(self, word: Completed | Rejected | Failed) -> None:
        """Take the end of a job, or what is said of one that was cancelled."""
        number = (word.job_id, word.lease)
        model = self._end(*number) or self._ended.get(word.job_id)
        if model is not None:
            model.port.heard(word)

    def presented(self, word: Presented) -> None:
        """Take a receipt that comes apart from its answer."""
        job_id = word.job_id
        running = (m for (job, _), m in self._running.items() if job == job_id)
        model = next(running, None) or self._ended.get(job_id)
        if model is not None:
            model.port.heard(word)

    def conditioned(self, condition: Condition) -> None:
        """Take how much the peer can take."""
        self._condition = condition
        self._tell_conditions()

    def draining(self, word: Draining) -> None:
        """Let all models take nothing new, also those that join later."""
        self._draining = word
        self.tell_all(word)

    def tell_all(self, event: Event) -> None:
        """Take something that holds for all models."""
        for model in self._models.values():
            model.port.heard(event)

    def leave(self, reason: str) -> None:
        """Let all models go with their peer."""
        for model in self._models.values():
            model.port.gone(reason)
        self._models.clear()
        self._running.clear()
        self._ended.clear()

    # From the hub.

    def issue(self, model: ModelPeer, message: Command) -> bool:
        """Tell the peer something that is meant for one of its models."""
        if isinstance(message, RunJob):
            message = model.named(message)
        if not self.peer.issue(message):
            return False
        if isinstance(message, RunJob):
            self._running[message.job_id, message.lease] = model
            self._tell_conditions()
        elif isinstance(message, CancelJob) and CancelJob in self.peer.accepts:
            # Of others it is still to be heard that they are done.
            self._end(message.job_id, message.lease)
        return True

    def renew(self) -> bool:
        """Let models leave or join anew that can by now; say whether all have."""
        for name, model in list(self._models.items()):
            worker = self.hub.pool.workers.get(model.id)
            if model.settled or (worker is not None and worker.leases):
                continue
            if model.wanted is None:
                del self._models[name]
                model.port.gone(UNLOADED)
            else:
                self._join(model, model.wanted)
        return all(model.settled for model in self._models.values())

    # How it is done.

    def _sound(self, offers: tuple[Offer, ...]) -> dict[str, Offer]:
        """Return what can be used of some offers, by the name within the wire."""
        sound: dict[str, Offer] = {}
        for offer in offers:
            model = ",".join(sorted(offer.models))
            if len(model) <= NAME_MAX and len(sound) < MODELS_MAX:
                name = f"{self._name}/{model}" if model else self._name
                sound.setdefault(name, offer)
        left_out = len(offers) - len(sound)
        if left_out and not self._warned:
            self._warned = True  # it may say so with every heartbeat
            log.warning(
                "left out peer=%r offers=%d: too many, twice, or names too long",
                f"{self.wire}:{self._name}",
                left_out,
            )
        return sound

    def _join(self, model: ModelPeer, offer: Offer) -> None:
        model.join(offer)
        if self._draining is not None:
            model.port.heard(self._draining)
        self._tell_conditions()

    def _tell_conditions(self) -> None:
        """Tell the pool what has changed of how much each model can take."""
        if len(self._models) == 1:  # there is nothing beside
            for model in self._models.values():
                model.heed(self._condition)
            return
        jobs = Counter(model.id for model in self._running.values())
        for model in self._models.values():
            beside = len(self._running) - jobs[model.id]
            queued = self._condition.queued + beside
            model.heed(replace(self._condition, queued=queued))

    def _end(self, job_id: JobId, lease: LeaseNumber) -> ModelPeer | None:
        """Note that a job is over at the peer; return the model that it was for."""
        model = self._running.pop((job_id, lease), None)
        if model is None:
            return None
        self._ended[job_id] = model
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._tell_conditions()
        return model
