"""Lanes at a peer: slots in which it calls one function of ours again and again.

One of ours gives a lane a stream of its own, with many calls to a frame.  To others
each call is a task like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CallsReturned,
    CancelJob,
    Completed,
    Event,
    LaneCall,
    LaneReturn,
    PushCalls,
    RecallCalls,
    Rejected,
    RunJob,
)
from shoal.domain.work import Lane
from shoal.protocols.macfleet.asking import failure, refusal
from shoal.protocols.macfleet.blobs import names_blob
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.probing import is_unknown
from shoal.protocols.macfleet.tickets import Tickets
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire import control
from shoal.protocols.macfleet.wire.frames import Frame, FrameType
from shoal.protocols.macfleet.wire.lanes import CALLS_MAX, read_returns, write_calls
from shoal.protocols.macfleet.wire.tasks import Answered, write_task
from shoal.protocols.session import Bulk, Output


@dataclass(slots=True)
class _Lane:
    """A lane that the peer has; ``in_turn`` is as with tasks.

    ``task_id`` is what its end is told by, and ``calls`` are the ids of those tasks
    that are calls in it, by their numbers; of those that were ``recalled``, nothing is
    said.  One that is ``closing`` is over with the last of them.
    """

    job_id: JobId
    lease: LeaseNumber
    work: Lane
    task_id: str = ""
    stream: int = 0
    in_turn: bool = False
    calls: dict[int, str] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)
    closing: bool = False


class OurLanes:
    """Lanes at one of ours."""

    def __init__(self, peer: Peer, tickets: Tickets, voice: Voice) -> None:
        self._peer = peer
        self._tickets = tickets
        self._voice = voice
        self._lanes: dict[tuple[JobId, LeaseNumber], _Lane] = {}
        self._streams: dict[int, _Lane] = {}
        self._ids: dict[str, _Lane] = {}

    def open(self, job: RunJob, work: Lane) -> Output | Rejected:
        """Return how the peer is asked for a lane, or why it is not."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        task_id, stream = self._tickets.next(), self._voice.new_stream()
        lane = _Lane(job.job_id, job.lease, work, task_id, stream)
        self._lanes[lane.job_id, lane.lease] = lane
        self._streams[stream] = self._ids[task_id] = lane
        needs = frozenset(each.value for each in work.needs)
        opening = control.OpenLane(task_id, stream, work.name, work.timeout, needs)
        return self._voice.say(FrameType.CONTROL, control.write_word(opening))

    def push(self, word: PushCalls) -> Iterator[Output | Event]:
        """Return how calls go to the peer."""
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is None:
            return
        for at in range(0, len(word.calls), CALLS_MAX):
            payload = write_calls(word.calls[at : at + CALLS_MAX])
            said = self._voice.say(
                FrameType.TASK, payload, lane.stream, in_turn=names_blob(payload)
            )
            lane.in_turn = lane.in_turn or isinstance(said, Bulk)
            yield said

    def recall(self, word: RecallCalls) -> Sequence[Output]:
        """Return how the peer is told not to make calls."""
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is None:
            return ()
        numbers, most = word.numbers, control.RECALLED_MAX
        return [
            self._about(lane, control.RecallCalls(lane.stream, numbers[at : at + most]))
            for at in range(0, len(numbers), most)
        ]

    def close(self, word: CancelJob) -> Sequence[Output]:
        """Forget a lane; return how the peer is told."""
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is None:
            return ()
        self._forget(lane)
        return (self._about(lane, control.CloseLane(lane.stream)),)

    def returned(self, frame: Frame) -> CallsReturned | None:
        """Return what came of calls, if it is about a lane that is still there.

        Raises PeerError if it cannot be read.
        """
        lane = self._streams.get(frame.stream)
        if lane is None:
            return None
        return CallsReturned(lane.job_id, lane.lease, read_returns(frame.payload))

    def ended(self, answered: Answered) -> Sequence[Event]:
        """Return how a lane ended that the peer does not have any more.

        Raises PeerError if it cannot be read.
        """
        lane = self._ids.get(answered.task_id)
        if lane is None:
            return ()
        self._forget(lane)
        return (failure(lane.job_id, lane.lease, self._peer, answered),)

    def _about(self, lane: _Lane, word: control.Word) -> Output:
        payload = control.write_word(word)
        return self._voice.say(FrameType.CONTROL, payload, in_turn=lane.in_turn)

    def _forget(self, lane: _Lane) -> None:
        del self._lanes[lane.job_id, lane.lease]
        del self._streams[lane.stream]
        del self._ids[lane.task_id]


class PlainLanes:
    """Lanes at a worker that knows of none."""

    def __init__(self, peer: Peer, tickets: Tickets, voice: Voice) -> None:
        self._peer = peer
        self._tickets = tickets
        self._voice = voice
        self._lanes: dict[tuple[JobId, LeaseNumber], _Lane] = {}
        self._calls: dict[str, tuple[_Lane, int]] = {}  # by the task's id

    def open(self, job: RunJob, work: Lane) -> Rejected | None:
        """Take note of a lane; return why it cannot be one."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        self._lanes[job.job_id, job.lease] = _Lane(job.job_id, job.lease, work)
        return None

    def push(self, word: PushCalls) -> Iterator[Output | Event]:
        """Return a task for each call; and what came of those that cannot be one."""
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is None or lane.closing:
            return
        unsaid: list[LaneReturn] = []
        for call in word.calls:
            task_id = self._tickets.next()
            try:
                payload = self._written(task_id, lane, call)
            except (InvalidRequest, TooLarge) as error:
                unsaid.append(LaneReturn(call.number, b"", str(error)))
                continue
            lane.calls[call.number] = task_id
            self._calls[task_id] = (lane, call.number)
            yield self._voice.say(FrameType.TASK, payload)
        if unsaid:
            yield CallsReturned(lane.job_id, lane.lease, unsaid)

    def recall(self, word: RecallCalls) -> Sequence[Output]:
        """Take note that calls are unwanted; the peer makes them all the same."""
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is not None:
            lane.recalled.update(lane.calls.keys() & set(word.numbers))
        return ()

    def close(self, word: CancelJob) -> Sequence[Completed]:
        """Have no more calls made in a lane; return its end, if none is made now.

        What the peer was asked for it does, and so long its slot is taken.
        """
        lane = self._lanes.get((word.job_id, word.lease))
        if lane is None:
            return ()
        lane.closing = True
        return self._over(lane)

    def ended(self, answered: Answered) -> Sequence[Event]:
        """Return what came of a call.

        If there is no such function, that is the end of the lane.
        """
        found = self._calls.pop(answered.task_id, None)
        if found is None:
            return ()
        lane, number = found
        del lane.calls[number]
        error = answered.error
        if error is not None and is_unknown(error) and not lane.closing:
            self._forget(lane)
            return (failure(lane.job_id, lane.lease, self._peer, answered),)
        if lane.closing:
            return self._over(lane)
        if number in lane.recalled:
            lane.recalled.remove(number)
            return ()
        value = b"" if error is not None else bytes(answered.value)
        returned = LaneReturn(number, value, error or "")
        return (CallsReturned(lane.job_id, lane.lease, [returned]),)

    def returned(self, frame: Frame) -> CallsReturned | None:
        """Return nothing: there are no streams of lanes."""
        return None

    def _written(self, task_id: str, lane: _Lane, call: LaneCall) -> bytes:
        name, timeout = lane.work.name, lane.work.timeout
        return write_task(task_id, name, call.args, call.kwargs, timeout)

    def _over(self, lane: _Lane) -> Sequence[Completed]:
        """Return the end of a lane that is closing, once nothing is left of it."""
        if lane.calls:
            return ()
        self._forget(lane)
        return (Completed(lane.job_id, lane.lease),)

    def _forget(self, lane: _Lane) -> None:
        for task_id in lane.calls.values():
            del self._calls[task_id]
        del self._lanes[lane.job_id, lane.lease]
