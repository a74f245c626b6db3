"""One peer of a node, which may be in several sessions with us at a time.

Of them one is its *main* one: what we ask goes there, and what the peer is and offers
counts as it is said there.  When that ends, the peer is gone.  Who only comes to ask,
as gateways do with a session for each request, has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Draining,
    Event,
    Failed,
    Offered,
    Progress,
    Rejected,
    Reported,
    RunJob,
)
from shoal.protocols.crowd import From, Gone, Met
from shoal.protocols.tealenet.conversation import Word
from shoal.protocols.tealenet.node.talk import Talk

Job: TypeAlias = tuple[JobId, LeaseNumber]

TWICE = "a job of this number is at work, from another session"


@dataclass(slots=True, eq=False)
class Guest:
    """A peer.

    ``voice`` is the session that speaks for it: ``main``, or the one by which it was
    met.  ``asked`` says by which session each of its jobs came.  It is called on from
    ``call_at``, after so many ``failures``, and forgotten at
    ``leave_at``, if it has no session by then.
    """

    id: str
    talks: set[Talk] = field(default_factory=set)
    main: Talk | None = None
    voice: Talk | None = None
    met: bool = False
    asked: dict[Job, Talk] = field(default_factory=dict)
    failures: int = 0
    call_at: float = 0.0
    leave_at: float = 0.0

    @property
    def called(self) -> bool:
        """Whether we have called on it, or have no need to."""
        return self.main is not None or any(talk.begins for talk in self.talks)

    def meet(self, talk: Talk, met: Met, *, main: bool) -> Sequence[From]:
        """Let a session speak for the peer, if it is the main one or none does."""
        if main:
            self.main = self.voice = talk
            self.failures = 0
        elif self.voice is None:
            self.voice = talk
        if self.met:
            return ()
        self.met = True
        return (From(self.id, met),)

    def hear(self, talk: Talk, word: Word) -> Sequence[From] | Rejected:
        """Take what was said in a session; or say why a job is not done."""
        match word:
            case RunJob(job_id, lease):
                if (job_id, lease) in self.asked:
                    return Rejected(job_id, lease, TWICE)
                self.asked[job_id, lease] = talk
            case CancelJob(job_id, lease):
                self.asked.pop((job_id, lease), None)
            case Offered() | Conditioned() | Draining() | Reported():
                if talk is not self.voice:
                    return ()
            case _:
                pass  # about what we asked for
        return (From(self.id, word),)

    def talk_for(self, word: Event | Command) -> Talk | None:
        """Return the session in which to say something; None: it does not matter."""
        match word:
            case Progress(job_id, lease):
                return self.asked.get((job_id, lease))
            case Completed() | Rejected() | Failed():
                return self.asked.pop((word.job_id, word.lease), None)
            case _:
                return self.main

    def part(self, talk: Talk, reason: str) -> Sequence[From]:
        """Draw the consequences of a session's end.

        Jobs that came by it are done for nobody; with its main one the peer is gone.
        """
        self.talks.discard(talk)
        heard = []
        for job, by in [*self.asked.items()]:
            if by is talk:
                del self.asked[job]
                heard.append(From(self.id, CancelJob(*job)))
        if talk is self.main:
            return [*heard, *self.go(reason)]
        if talk is self.voice:
            self.voice = next((each for each in self.talks if each.met), None)
        return heard

    def go(self, reason: str) -> Sequence[From]:
        """Take note that the peer is gone."""
        self.main = self.voice = None
        if not self.met:
            return ()
        self.met = False
        self.asked.clear()
        return (From(self.id, Gone(reason)),)
