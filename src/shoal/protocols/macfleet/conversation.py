"""What is said on a connection once both ends know each other.

To real peers only tasks are said, and of them only tasks and results are heard.  With
our own there are also words, heartbeats, blobs, and lanes on streams of their own.
"""

from collections.abc import Iterable, Sequence

from shoal.domain.errors import Unsupported
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    Advanced,
    BlobLacked,
    CallsReturned,
    CallWord,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Failed,
    GiveBlob,
    Joined,
    Offered,
    Presented,
    Progress,
    PushCalls,
    RecallCalls,
    Rejected,
    Reported,
    RunJob,
)
from shoal.domain.work import Call, Lane, Task
from shoal.protocols.macfleet import blobs
from shoal.protocols.macfleet.answering import Answering
from shoal.protocols.macfleet.asking import Asking
from shoal.protocols.macfleet.hearing import (
    OurHearing,
    RealHearing,
    Said,
    Talk,
    Word,
)
from shoal.protocols.macfleet.lanes import OurLanes, PlainLanes
from shoal.protocols.macfleet.life import Beating, Watched
from shoal.protocols.macfleet.ourselves import Ourselves, Role
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.probing import Probe
from shoal.protocols.macfleet.standing import Standing
from shoal.protocols.macfleet.tickets import Tickets
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire import control
from shoal.protocols.macfleet.wire.chunks import Take
from shoal.protocols.macfleet.wire.frames import Frame, FrameType
from shoal.protocols.session import Bulk, Close, Notice, Output, Send

SPOKEN: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, PushCalls, RecallCalls, GiveBlob),
        *(Offered, Conditioned, Draining, Reported),
        *(Progress, Completed, Rejected, Failed),
        *(Advanced, CallsReturned, BlobLacked),
    }
)


class Conversation:
    """What is said with one peer.

    Words about what we asked it for are events, and what it asks us for are commands.
    After a Close it says and hears nothing more.
    """

    def __init__(self, own: Ourselves, peer: Peer, now: float) -> None:
        self._peer = peer
        self._voice = voice = Voice(ours=peer.ours)
        tickets = Tickets(own.node.draw)
        ours = peer.ours
        self._talk = Talk(
            voice,
            Asking(peer, tickets, voice),
            (OurLanes if ours else PlainLanes)(peer, tickets, voice),
            Answering(peer, voice, own.role),
            Standing(peer, own.role),
            Beating(now) if ours else Watched(own.fleet, peer.name, now),
        )
        self._probe = Probe(tickets.next(), own.slots)
        self._asks_what = own.role is Role.COORDINATOR and not ours
        self._hearing = (
            OurHearing(self._talk, own.turned_away)
            if ours
            else RealHearing(self._talk, self._probe)
        )
        self._owed: list[Word] = []  # to be heard, and came of what was said
        self._owed_since = 0.0
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None: never."""
        if self._closed:
            return None
        return self._owed_since if self._owed else self._talk.life.deadline

    def begin(self) -> Sequence[Said]:
        """Return what is said and heard to begin with."""
        if not self._asks_what:
            return ()
        return (self._voice.say(FrameType.TASK, self._probe.question()),)

    def tick(self, now: float) -> Sequence[Said]:
        """Act on time passing."""
        if self._closed:
            return ()
        outputs: list[Said] = [*self._owed]
        self._owed.clear()
        if reason := self._talk.life.lost(now):
            return [*outputs, self._close(reason)]
        if (beat := self._talk.life.beat(now)) is not None:
            outputs.append(self._voice.say(FrameType.HEARTBEAT, beat))
        return outputs

    def place(self, head: bytes, take: Take) -> memoryview | None:
        """Return where a frame is to be read to, as ``Framed.place`` does."""
        return self._hearing.place(head, take)

    def hear(self, frame: Frame, now: float) -> Sequence[Said]:
        """Take a frame.

        Raises PeerError if it is no good, and nothing is to be said about it.
        """
        self._talk.life.alive(now)
        said = self._hearing.hear(frame)
        self._closed = any(isinstance(each, Close) for each in said)
        return said

    def issue(self, word: Event | Command, now: float) -> Sequence[Output]:
        """Say something to the peer.

        Raises Unsupported for what the wire has no words for.
        """
        said: list[Output] = []
        for each in () if self._closed else self._issued(word):
            if isinstance(each, Send | Bulk | Close | Notice):
                said.append(each)
            else:
                self._owed.append(each)
                self._owed_since = now
        return said

    # What we say.

    def _issued(self, word: Event | Command) -> Iterable[Said]:
        """Return how something is said, and what comes of it at once."""
        match word:
            case RunJob():
                return self._run(word)
            case PushCalls():
                return self._talk.lanes.push(word)
            case CallsReturned():
                return self._talk.answering.returned(word)
            case RecallCalls():
                return self._talk.lanes.recall(word)
            case CancelJob():
                return [*self._talk.asking.cancel(word), *self._talk.lanes.close(word)]
            case Completed() | Rejected() | Failed():
                return self._talk.answering.end(word)
            case Advanced():
                return self._talk.answering.advance(word)
            case GiveBlob():
                return (blobs.give(word, self._voice),) if self._peer.ours else ()
            case BlobLacked(digest):
                return self._tell(control.BlobLacked(digest))
            case Offered() | Conditioned() | Draining() | Reported():
                return self._talk.standing.say(word, self._voice)
            case Dismiss(reason):
                words = self._tell(control.Dismissed(reason[: control.TEXT_MAX]))
                return [*words, self._close(reason)]
            case Progress():
                return ()  # what is called returns all at once
            case Joined() | Presented() | ModelWord() | CallWord():
                raise Unsupported("this wire has no words for that")

    def _run(self, job: RunJob) -> Iterable[Said]:
        match job.work:
            case Call() | Task():
                return (self._talk.asking.run(job, job.work),)
            case Lane():
                opened = self._talk.lanes.open(job, job.work)
                return () if opened is None else (opened,)
            case _:
                raise Unsupported("this wire asks no models")

    def _tell(self, word: control.Word) -> Sequence[Output]:
        """Return how a word goes out, if the peer is one that knows words."""
        if not self._peer.ours:
            return ()
        return (self._voice.say(FrameType.CONTROL, control.write_word(word)),)

    def _close(self, reason: str) -> Close:
        self._closed = True
        return Close(reason)
