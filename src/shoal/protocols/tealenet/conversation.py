"""One peer, and all that is said with it: the same on a local network and on a relay.

Both ends are alike.  A message is the bytes of one JSON text; how messages are framed,
and who else can read them, is not known here.
"""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    CallWord,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Failed,
    Joined,
    Offered,
    Presented,
    Progress,
    Rejected,
    Reported,
    RunJob,
)
from shoal.protocols.crowd import Met
from shoal.protocols.session import Close, Data, Notice, Output, Send
from shoal.protocols.tealenet.answering import Answering, Said
from shoal.protocols.tealenet.asking import Asking
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.health import Life
from shoal.protocols.tealenet.heart import Heart
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.meeting import Meeting
from shoal.protocols.tealenet.ourselves import Ourselves
from shoal.protocols.tealenet.peer import Caller, Described, Peer
from shoal.protocols.tealenet.standing import Standing
from shoal.protocols.tealenet.wire.extension import Ability
from shoal.protocols.tealenet.wire.messages import (
    BadMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloAck,
    InferenceCancel,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    Message,
    ModelLoaded,
    ModelLoadError,
    decode,
)
from shoal.protocols.tealenet.wire.scalars import ErrorCode
from shoal.protocols.tealenet.wire.sharing import (
    WORDS,
    RawPieces,
    Shared,
    word_of,
    written,
)

Word: TypeAlias = Met | Event | Command

INVALID_MAX = 100  # messages in a row that are no good, until we hang up

SPOKEN: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss),
        *(Offered, Conditioned, Draining, Reported),
        *(Progress, Completed, Rejected, Failed),
    }
)


class Conversation:
    """What is said with one peer.

    Words about what we asked it for are events, and what it asks us for are commands;
    Met comes first.  What it returns besides is for whoever carries its messages: after
    a Close it says and hears nothing more.  Nothing here waits, so that any number of
    jobs go on at a time in either direction.

    Args:
        desk: what tells of other connections to the same device; None where the carrier
            sees to that.
    """

    def __init__(
        self,
        own: Ourselves,
        caller: Caller,
        manners: Manners,
        desk: Desk | None = None,
    ) -> None:
        self.accepts = SPOKEN | (WORDS if manners.shares else frozenset())
        self._own = own
        self._caller = caller
        self._manners = manners
        self._heart = Heart(own, manners, leads=caller.dialled)
        self._meeting = Meeting(own, caller, manners, desk, self._heart)
        self._asking = Asking(own, manners)
        self._answering = Answering(own)
        self._raw = RawPieces()
        self._standing: Standing | None = None  # from the time at which it is met
        self._owed: list[Word] = []  # to be heard, and came of what was said
        self._owed_since = 0.0
        self._invalid = 0  # messages in a row
        self._begun = False
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None before it was called, and after the end."""
        if self._closed or not self._begun:
            return None
        if self._owed:
            return self._owed_since
        # Asked for after each token, and so in plain steps.
        standing, due = self._standing, self._heart.due
        limit = self._meeting.deadline if standing is None else standing.deadline
        if limit is None or due is None:
            return due if limit is None else limit
        return due if due < limit else limit

    @property
    def lets_in(self) -> bool:
        """Whether the peer has said who it is, and is let in."""
        return self._meeting.lets_in

    def tick(self, now: float) -> Sequence[Word | Output]:
        """Begin, when it is called for the first time; then act on time passing."""
        if self._closed:
            return ()
        outputs: list[Word | Output] = [*self._owed]
        self._owed.clear()
        if not self._begun:
            self._begun = True
            outputs += self._begin(now)
        elif self._standing is not None:
            outputs += self._look_after(self._standing, now)
        else:
            outputs += self._ended_by(self._meeting.tick(now))
        due = self._heart.due
        if due is not None and now >= due and not self._closed:
            outputs += self._beat(now)
        return outputs

    def receive(self, batch: Sequence[Data], now: float) -> Sequence[Word | Output]:
        """Take the messages that arrived together.

        One that is no good is answered, if it can be, and the others count.
        """
        outputs: list[Word | Output] = []
        asking = self._asking
        asking.read_on()
        for data in batch:
            if self._closed:
                break
            if self._raw.due:
                outputs += self._hear_raw(data)
                continue
            # Nearly every message is one more piece of a text.
            more = asking.more(data)
            if more is not None:
                self._invalid = 0
                outputs += more
                continue
            try:
                message = decode(data)
            except BadMessage as error:
                outputs += self._complain(error)
                continue
            self._invalid = 0
            if isinstance(message, InferenceChunk):
                outputs += asking.chunk(message, data)
            elif message is not None:
                outputs += self._hear(message, now)
        return outputs

    def issue(self, word: Event | Command, now: float) -> Sequence[Output]:
        """Say something to the peer.

        Raises Unsupported for what the wire has no words for.
        """
        if self._closed:
            return ()
        match word:
            case Progress() | Completed() | Rejected() | Failed():
                return self._answer(word, now)
            case RunJob():
                return self._ask(word, now)
            case CancelJob():
                return self._cancel(word)
            case Dismiss(reason):
                return self._part(reason, now)
            case Offered(offers):
                self._heart.offers = offers
                return self._changed(now)
            case Conditioned(condition):
                self._heart.condition = condition
                return self._changed(now)
            case Draining(reason):
                self._heart.draining = reason
                return self._beat(now)
            case Reported(health):
                self._heart.machine = health
                return self._beat(now)
            case ModelWord():
                return self._share(word)
            case Joined() | Presented():
                raise Unsupported("a peer is told what there is, and no more")
            case CallWord():
                raise Unsupported("this wire calls no functions")

    def describe(self, described: Described, now: float) -> Sequence[Word | Output]:
        """Take what the carrier tells of a peer that does not say it itself."""
        standing = self._standing
        if self._closed or standing is None or standing.peer.ours:
            return ()
        if standing.peer.refusal:
            return ()
        events = standing.describe(described)
        return [*events, *standing.conditioned()]

    # The beginning.

    def _begin(self, now: float) -> Sequence[Word | Output]:
        begun = self._meeting.begin(now)
        if not isinstance(begun, Standing):
            return self._ended_by(begun)
        self._standing = begun
        peer = begun.peer
        if peer.refusal:
            return (Notice(f"{peer.name!a} is not let in: {peer.refusal}"),)
        described = begun.describe(self._caller.described)
        return [self._met(peer), *described, *begun.conditioned()]

    def _ended_by(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """Take note if one of the outputs ends the conversation."""
        self._closed = any(isinstance(each, Close) for each in outputs)
        return outputs

    def _met(self, peer: Peer) -> Met:
        return Met(
            peer.name,
            cancels=Ability.CANCEL in peer.features,
            asks=peer.asks,
            admitted=peer.admitted,
            protection=self._caller.protection,
        )

    # What the peer says.

    def _hear(self, message: Message, now: float) -> Sequence[Word | Output]:
        """Take a message: before the peer is met only what makes it known."""
        if isinstance(message, Hello | HelloAck):
            # One that comes again later is ignored, as real peers do.
            late = self._standing is not None and self._manners.greets
            return () if late else self._ended_by(self._meeting.greet(message, now))
        if isinstance(message, Heartbeat | HeartbeatAck):
            return self._hear_beat(message, now)
        if self._standing is None:
            return ()
        peer = self._standing.peer
        match message:
            case InferenceRequest():
                return self._hear_request(message, peer, now)
            case InferenceComplete():
                return self._asking.complete(message, peer)
            case InferenceError():
                return self._asking.fail(message, peer)
            case InferenceCancel():
                cancelled = self._answering.cancel(message)
                self._heart.occupy(self._answering.open, now)
                return () if cancelled is None else (cancelled,)
            case LoadModel():
                return (Send(self._answering.load(message, peer, self._heart.models)),)
            case InferenceChunk() | ModelLoaded() | ModelLoadError():
                return ()
            case _:
                return self._hear_shared(message, peer)

    def _hear_beat(
        self, beat: Heartbeat | HeartbeatAck, now: float
    ) -> Sequence[Word | Output]:
        outputs: list[Word | Output] = []
        if self._standing is None:
            try:
                met = self._meeting.meet(beat, now)
            except PeerError as error:
                return (self._close(str(error)),)
            if met is None:
                return ()
            self._standing, said = met
            outputs += [self._met(self._standing.peer), *said]
        standing = self._standing
        if standing.peer.refusal:
            return ()
        outputs += standing.hear(beat, self._asking.running, now)
        self._meeting.heard(now)
        if standing.farewell is not None:
            self._own.turned_away(standing.farewell)
            outputs.append(self._close(standing.farewell))
        elif isinstance(beat, Heartbeat):
            outputs.append(Send(self._heart.answer(standing.peer, now)))
        return outputs

    def _hear_request(
        self, message: InferenceRequest, peer: Peer, now: float
    ) -> Sequence[Word | Output]:
        taken = self._answering.take(message, peer, now)
        self._heart.occupy(self._answering.open, now)
        return (Send(taken) if isinstance(taken, bytes) else taken,)

    def _hear_shared(self, message: Shared, peer: Peer) -> Sequence[Word | Output]:
        if self._raw.announced(message, peer):
            return ()
        return (word_of(message),) if self._shares_with(peer) else ()

    def _hear_raw(self, data: Data) -> Sequence[Word | Output]:
        try:
            piece = self._raw.take(data)
        except PeerError as error:
            return (self._close(str(error)),)
        standing = self._standing
        known = standing is not None and self._shares_with(standing.peer)
        return (piece,) if known else ()

    def _shares_with(self, peer: Peer) -> bool:
        return self._manners.shares and not peer.refusal

    def _complain(self, error: BadMessage) -> Sequence[Word | Output]:
        """Answer a message that is no good; who sends nothing else is hung up on."""
        self._invalid += 1
        if self._invalid >= INVALID_MAX:
            return (self._close(f"{INVALID_MAX} invalid messages in a row"),)
        notice = Notice(f"message ignored: {error}")
        asked = error.kind == "inferenceRequest" and error.request_id
        if not asked or self._standing is None:
            return (notice, *self._asking.spoil(error))
        code = ErrorCode.INTERNAL_ERROR
        refusal = self._answering.refusal(error.request_id, str(error), code)
        return (notice, Send(refusal))

    # What we say.

    def _look_after(self, standing: Standing, now: float) -> Sequence[Word | Output]:
        """Act on the peer's silence."""
        life = standing.life(now)
        if life is Life.DISCONNECTED:
            if not self._manners.greets and self._answering.open:
                # It may only want to hear: gateways on a relay say nothing meanwhile.
                standing.alive(now)
                return ()
            return (self._close(f"silent for {self._manners.gone_after:g} s"),)
        return standing.conditioned()

    def _beat(self, now: float) -> Sequence[Output]:
        """Say how we are, if the peer is one to be told."""
        peer = self._meeting.peer
        if peer is None or peer.refusal:
            return ()
        return (Send(self._heart.beat(peer, now)),)

    def _changed(self, now: float) -> Sequence[Output]:
        """Tell what has changed, to whom it matters."""
        peer = self._meeting.peer
        if peer is None or not peer.asks:
            return ()
        self._heart.change(now)
        due = self._heart.due
        return self._beat(now) if due is not None and due <= now else ()

    def _ask(self, job: RunJob, now: float) -> Sequence[Output]:
        assert self._standing is not None, "jobs are for peers that were met"
        try:
            return (Send(self._asking.run(job, self._standing.peer)),)
        except PeerError as error:
            self._owe(Rejected(job.job_id, job.lease, str(error)), now)
            return ()

    def _cancel(self, job: CancelJob) -> Sequence[Output]:
        assert self._standing is not None, "jobs are for peers that were met"
        message = self._asking.cancel(job, self._standing.peer)
        return () if message is None else (Send(message),)

    def _answer(self, event: Said, now: float) -> Sequence[Output]:
        assert self._standing is not None, "only who was met has asked"
        peer = self._standing.peer
        try:
            said = self._answering.say(event, peer, self._heart.offers, now)
        except PeerError as error:
            message, cancel = self._answering.drop(event, str(error), peer)
            self._owe(cancel, now)
            said = (message,)
        if not isinstance(event, Progress):
            self._heart.occupy(self._answering.open, now)
        return [Send(message) for message in said]

    def _share(self, word: ModelWord) -> Sequence[Output]:
        if self._standing is None:
            return ()
        if not self._manners.shares:
            raise Unsupported("models are shared on local networks only")
        said = written(word, self._standing.peer, self._own.flat)
        return [Send(message) for message in said]

    def _part(self, reason: str, now: float) -> Sequence[Output]:
        """Hang up; a peer of ours is told why."""
        peer = self._meeting.peer
        if peer is None or not peer.ours:
            return (self._close(reason),)
        return (Send(self._heart.beat(peer, now, reason)), self._close(reason))

    def _owe(self, word: Word, now: float) -> None:
        """Have something heard at the next tick, which is due at once."""
        self._owed.append(word)
        self._owed_since = now

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._meeting.end()
        return Close(reason)
