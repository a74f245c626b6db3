"""What a peer says on a connection: frames, by their type, and what they mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Advanced, BlobLacked, Command, Event
from shoal.protocols.crowd import Met
from shoal.protocols.macfleet import blobs
from shoal.protocols.macfleet.answering import Answering, id_in
from shoal.protocols.macfleet.asking import Asking
from shoal.protocols.macfleet.lanes import OurLanes, PlainLanes
from shoal.protocols.macfleet.life import Beating, Watched
from shoal.protocols.macfleet.probing import Probe
from shoal.protocols.macfleet.standing import Standing
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire import beyond, control
from shoal.protocols.macfleet.wire.chunks import HELD_MAX, Joiner, Take
from shoal.protocols.macfleet.wire.frames import (
    PAYLOAD_MAX,
    Flag,
    Frame,
    FrameType,
    Payload,
)
from shoal.protocols.macfleet.wire.tasks import NIL, Answered, read_result
from shoal.protocols.session import Close, Notice, Output

Word: TypeAlias = Met | Event | Command
Said: TypeAlias = Word | Output
Hears: TypeAlias = Mapping[FrameType, Callable[[Frame], Sequence[Said]]]

ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))  # how one begins in MessagePack
BLOB_MAX = PAYLOAD_MAX + beyond.DIGEST_SIZE  # bytes, with the digest


_CHUNKED = int(Flag.CHUNKED)  # flags themselves take a microsecond for each frame


@dataclass(frozen=True, slots=True)
class Talk:
    """What is going on with a peer."""

    voice: Voice
    asking: Asking
    lanes: OurLanes | PlainLanes
    answering: Answering
    standing: Standing
    life: Beating | Watched


class RealHearing:
    """Hears a real peer, which says tasks and results and ignores all else, as we do.

    ``probe`` is what it was asked.
    """

    def __init__(self, talk: Talk, probe: Probe) -> None:
        self._talk = talk
        self._probe = probe
        self._hears: Hears = {
            FrameType.TASK: self._hear_task,
            FrameType.RESULT: self._hear_result,
        }

    def place(self, head: bytes, take: Take) -> memoryview | None:
        """Return nothing: there are no pieces."""
        return None

    def hear(self, frame: Frame) -> Sequence[Said]:
        """Return what a frame means, and what to answer."""
        return _heard(self._hears, frame)

    def _hear_task(self, frame: Frame) -> Sequence[Said]:
        return (self._talk.answering.take(frame),)

    def _hear_result(self, frame: Frame) -> Sequence[Said]:
        """Take a result of a real worker; one that cannot be read is a failure."""
        try:
            answered = read_result(frame.payload)
        except PeerError as error:
            task_id = id_in(frame.payload)
            if task_id is None:
                return (Notice(f"a result is ignored: {error}"),)
            answered = Answered(task_id, NIL, f"what came of it is no good: {error}")
        offered = self._probe.answered(answered)
        return _ended(self._talk, answered) if offered is None else (offered,)


class OurHearing:
    """Hears one of ours; ``turned_away`` takes why it does not want us any more."""

    def __init__(self, talk: Talk, turned_away: Callable[[str], None]) -> None:
        self._talk = talk
        self._turned_away = turned_away
        self._joiner = Joiner(BLOB_MAX, held_max=HELD_MAX + beyond.DIGEST_SIZE)
        self._coming = blobs.Coming()
        self.place = self._joiner.place
        self._hears: Hears = {
            FrameType.TASK: self._hear_task,
            FrameType.RESULT: self._hear_result,
            FrameType.CONTROL: self._hear_word,
            FrameType.HEARTBEAT: self._hear_beat,
            FrameType.STATE: self._hear_blob,
            FrameType.BARRIER: self._hear_barrier,
        }

    def hear(self, frame: Frame) -> Sequence[Said]:
        """Return what a frame means, and what to answer; a piece means nothing yet.

        Raises PeerError if it is no good.
        """
        if not frame.flags & _CHUNKED:
            return _heard(self._hears, frame)
        whole = self._joiner.take(frame)
        if frame.type is FrameType.STATE:
            self._coming.piece(frame)
        return () if whole is None else _heard(self._hears, whole)

    def _hear_task(self, frame: Frame) -> Sequence[Said]:
        """Take a task of one of ours, or calls in a lane: a map, or an array."""
        if not _is_array(frame.payload):
            return (self._talk.answering.take(frame),)
        calls = self._talk.answering.calls(frame)
        return () if calls is None else (calls,)

    def _hear_result(self, frame: Frame) -> Sequence[Said]:
        """Take a result of one of ours, or what calls in a lane returned."""
        if not _is_array(frame.payload):
            return _ended(self._talk, read_result(frame.payload, strict=False))
        returned = self._talk.lanes.returned(frame)
        return () if returned is None else (returned,)

    def _hear_word(self, frame: Frame) -> Sequence[Said]:
        word = control.read_word(frame.payload)
        match word:
            case None:
                return ()  # newer peers add words freely
            case control.Cancel() | control.CloseLane():
                return self._talk.answering.cancel(word)
            case control.OpenLane():
                return (self._talk.answering.open_lane(word),)
            case control.RecallCalls():
                return self._talk.answering.recall(word)
            case control.Progress(task_id, share, remark):
                job = self._talk.asking.job_of(task_id)
                return () if job is None else (Advanced(*job, share, remark),)
            case control.BlobLacked(digest):
                return (BlobLacked(digest),)
            case control.Dismissed(reason):
                self._turned_away(reason)
                return (Close(reason),)
            case control.Offer() | control.Draining() | control.Reported():
                return self._talk.standing.hear(word)

    def _hear_beat(self, frame: Frame) -> Sequence[Said]:
        self._talk.life.hear(frame.payload)
        return ()

    def _hear_blob(self, frame: Frame) -> Sequence[Said]:
        return (self._coming.whole(frame),)

    def _hear_barrier(self, frame: Frame) -> Sequence[Said]:
        """Let a peer pass that waits for us: nothing goes on here that others join."""
        barrier = beyond.read_barrier(frame.payload)
        if barrier.passed:
            return ()
        passed = beyond.write_barrier(replace(barrier, passed=True))
        return (self._talk.voice.say(FrameType.BARRIER, passed, frame.stream),)


def _heard(hears: Hears, frame: Frame) -> Sequence[Said]:
    heard = hears.get(frame.type)
    if heard is None:
        return (Notice(f"a frame is ignored: {frame.type.name}"),)
    return heard(frame)


def _ended(talk: Talk, answered: Answered) -> Sequence[Said]:
    """Return what came of a task, which is a job of ours, or in a lane."""
    return [*talk.asking.hear(answered), *talk.lanes.ended(answered)]


def _is_array(payload: Payload) -> bool:
    """Say whether a payload in MessagePack begins as an array does."""
    return len(payload) > 0 and payload[0] in ARRAYS
