"""The tasks that a peer asks us for, and what it is told of them.

Whatever cannot be done is answered, as far as it can be read which task it was: real
workers leave such tasks without an answer, and some then read no more.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    Advanced,
    CallsReturned,
    CancelJob,
    Completed,
    Failed,
    PushCalls,
    RecallCalls,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, Feature, Lane
from shoal.protocols.macfleet.blobs import names_blob
from shoal.protocols.macfleet.extension import (
    Ending,
    features_of,
    read_wanting,
    write_ending,
)
from shoal.protocols.macfleet.ourselves import Role
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.plain import NIL, is_plain
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire import control
from shoal.protocols.macfleet.wire.frames import Frame, FrameType, Payload
from shoal.protocols.macfleet.wire.lanes import read_calls, write_returns
from shoal.protocols.macfleet.wire.tasks import (
    ID_MAX,
    Asked,
    read_task,
    result_parts,
    write_result,
)
from shoal.protocols.session import Bulk, Notice, Output, Send

OPEN_MAX = 4096  # tasks and lanes of one peer that are open at a time
LEASE = LeaseNumber(1)  # a peer's task is given to us once

NO_ASKING = (
    "who joined by a token of its own is here to work: to ask, present the token of "
    "the fleet"
)
NO_CODE = (
    "code that is sent along is only called for peers that have the fleet's token, and "
    "this fleet has none: give it one with --macfleet-token"
)
NO_LANES = "a coordinator gives no lanes: its own workers do"
NOT_PLAIN = (
    "the task returned an array, or another value that only Shoal's own programs can "
    "read: have it return what MessagePack has, such as lists and bytes"
)

Word: TypeAlias = RunJob | CancelJob | PushCalls | RecallCalls | Output
Ended: TypeAlias = Completed | Rejected | Failed


class Answering:
    """Our side as the one who is asked."""

    def __init__(self, peer: Peer, voice: Voice, role: Role) -> None:
        self._peer = peer
        self._voice = voice
        self._works = role is Role.WORKER
        self._open: set[str] = set()  # ids of tasks, and of lanes
        self._lanes: dict[int, str] = {}  # the ids of lanes, by stream
        self._streams: dict[str, int] = {}  # and the other way round

    def take(self, frame: Frame) -> Word:
        """Return the job that a task is, or how it is answered at once."""
        payload = frame.payload
        try:
            asked = read_task(payload, strict=not self._peer.ours)
        except PeerError as error:
            return self._cannot_read(payload, error)
        if asked.task_id in self._open:
            # An answer would end the first.
            return Notice(f"task {asked.task_id!a} came twice: one is ignored")
        try:
            work = _work_of(asked, self._peer)
        except PeerError as error:
            return self._refuse(asked.task_id, str(error))
        if reason := self._why_not(work.needs):
            return self._refuse(asked.task_id, reason)
        self._open.add(asked.task_id)
        return RunJob(JobId(asked.task_id), LEASE, work)

    def calls(self, frame: Frame) -> Word | None:
        """Return calls in a lane; None if it is not there any more.

        Raises PeerError if they cannot be read.
        """
        task_id = self._lanes.get(frame.stream)
        if task_id is None:
            return None
        return PushCalls(JobId(task_id), LEASE, read_calls(frame.payload))

    def open_lane(self, word: control.OpenLane) -> Word:
        """Return the job that a lane is, or why there cannot be one.

        Raises PeerError if there is one by that name already.
        """
        task_id, stream = word.task_id, word.stream
        if task_id in self._open or stream in self._lanes:
            raise PeerError(f"lane {task_id!a} on stream {stream} is open already")
        if not self._works:
            return self._refuse(task_id, NO_LANES)
        try:
            needs = features_of(word.features)
        except PeerError as error:
            return self._refuse(task_id, str(error))
        if reason := self._why_not(needs):
            return self._refuse(task_id, reason)
        self._open.add(task_id)
        self._lanes[stream], self._streams[task_id] = task_id, stream
        return RunJob(JobId(task_id), LEASE, Lane(word.name, word.timeout, needs))

    def recall(self, word: control.RecallCalls) -> Sequence[Word]:
        """Return calls that the peer does not want any more."""
        task_id = self._lanes.get(word.stream)
        if task_id is None:
            return ()
        return (RecallCalls(JobId(task_id), LEASE, word.numbers),)

    def cancel(self, word: control.Cancel | control.CloseLane) -> Sequence[Word]:
        """Return what the peer does not want any more, if that is not over."""
        if isinstance(word, control.CloseLane):
            task_id = self._lanes.get(word.stream)
        else:
            task_id = word.task_id
        if task_id is None or task_id not in self._open:
            return ()
        self._forget(task_id)
        return (CancelJob(JobId(task_id), LEASE),)

    def end(self, event: Ended) -> Iterator[Output]:
        """Return how the peer is told of its task; nothing, if it has cancelled it."""
        task_id = str(event.job_id)
        if task_id not in self._open or event.lease != LEASE:
            return
        self._forget(task_id)
        match event:
            case Completed():
                yield self._value(event)
            case Rejected(_, _, reason):
                yield self._refuse(task_id, reason)
            case Failed(_, _, error, fault):
                yield self._fail(task_id, error, Ending(fault=fault.value))

    def advance(self, event: Advanced) -> Iterator[Output]:
        """Return how the peer is told how far its task has come, if it wants that."""
        task_id = str(event.job_id)
        if self._peer.ours and task_id in self._open:
            remark = event.remark[: control.TEXT_MAX]
            share = None if event.share is None else min(max(event.share, 0.0), 1.0)
            payload = control.write_word(control.Progress(task_id, share, remark))
            yield self._voice.say(FrameType.CONTROL, payload)

    def returned(self, event: CallsReturned) -> Iterator[Output]:
        """Return how the peer is told what came of calls in a lane."""
        stream = self._streams.get(str(event.job_id))
        if stream is not None:
            payload = write_returns(event.returns)
            yield self._voice.say(
                FrameType.RESULT, payload, stream, in_turn=names_blob(payload)
            )

    # Private parts, in the order in which they are called.

    def _cannot_read(self, payload: Payload, error: PeerError) -> Output:
        task_id = id_in(payload)
        if task_id is None or task_id in self._open:
            return Notice(f"a task is ignored: {error}")
        return self._fail(task_id, str(error), Ending(fault=Fault.REQUEST.value))

    def _why_not(self, needs: frozenset[Feature]) -> str:
        if not self._peer.asks:
            return NO_ASKING
        if Feature.CODE in needs and not self._peer.trusted:
            return NO_CODE
        if len(self._open) >= OPEN_MAX:
            return f"{OPEN_MAX} tasks of this peer are open here already"
        return ""

    def _value(self, done: Completed) -> Send | Bulk:
        task_id, ours = str(done.job_id), self._peer.ours
        value = done.value or NIL
        if not ours and not is_plain(value):
            return self._fail(task_id, NOT_PLAIN, Ending())
        more = write_ending(Ending(blobs=done.blobs)) if ours else None
        try:
            parts = result_parts(task_id, value, None, more, strict=not ours)
        except (InvalidRequest, TooLarge) as error:
            return self._fail(task_id, str(error), Ending())
        in_turn = ours and names_blob(*parts)
        return self._voice.say_parts(FrameType.RESULT, *parts, in_turn=in_turn)

    def _refuse(self, task_id: str, reason: str) -> Send | Bulk:
        return self._fail(task_id, reason, Ending(rejected=True))

    def _fail(self, task_id: str, error: str, ending: Ending) -> Send | Bulk:
        more = write_ending(ending) if self._peer.ours else None
        text = error.encode(errors="replace").decode()  # a name of a file may be in it
        payload = write_result(task_id, None, text, more)
        return self._voice.say(FrameType.RESULT, payload)

    def _forget(self, task_id: str) -> None:
        self._open.discard(task_id)
        if (stream := self._streams.pop(task_id, None)) is not None:
            del self._lanes[stream]


def _work_of(asked: Asked, peer: Peer) -> Call:
    """Return what a task asks for.  Raises PeerError if we do not know what it needs.

    What only our own peers can say does not count in others' tasks.
    """
    needs, blobs = read_wanting(asked.more) if peer.ours else (frozenset(), ())
    args, kwargs = bytes(asked.args), bytes(asked.kwargs)
    return Call(asked.name, args, kwargs, asked.timeout, needs, blobs)


def id_in(payload: Payload) -> str | None:
    """Return the id of a task that cannot be read otherwise, if it has one."""
    try:
        told = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
        task_id = msgspec.msgpack.decode(told["task_id"], type=str)
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError):
        return None
    return task_id if len(task_id) <= ID_MAX else None
