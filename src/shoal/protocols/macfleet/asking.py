"""The tasks that a peer has from us, and what it says of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, Feature, Task
from shoal.protocols.macfleet.blobs import names_blob
from shoal.protocols.macfleet.extension import (
    fault_of,
    read_ending,
    write_wanting,
)
from shoal.protocols.macfleet.peer import Peer
from shoal.protocols.macfleet.plain import NotPlain, arguments, json_text
from shoal.protocols.macfleet.probing import is_unknown
from shoal.protocols.macfleet.tickets import Tickets
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire.control import Cancel, write_word
from shoal.protocols.macfleet.wire.frames import FrameType
from shoal.protocols.macfleet.wire.tasks import Answered, Parts, task_parts
from shoal.protocols.session import Bulk, Output

REASON_MAX = 1000  # characters of why a worker would not do a task

PLAIN_ONLY = (
    "the worker is no Shoal worker: it takes what MessagePack has and no arrays, "
    "large values or code"
)
NO_CODE = (
    "code is only sent to workers that were let in by a token, and no token is needed "
    "here: give the fleet one with --macfleet-token"
)


@dataclass(slots=True)
class _Asked:
    """A task that the peer has.

    ``as_json``: its value is wanted as JSON text.  ``in_turn``: it was large, so that
    what is said about it may come before it.
    """

    job_id: JobId
    lease: LeaseNumber
    as_json: bool
    in_turn: bool


class Asking:
    """Our side as the one who asks.

    What is said of tasks that are over, or that were cancelled, is not heard.
    """

    def __init__(self, peer: Peer, tickets: Tickets, voice: Voice) -> None:
        self._peer = peer
        self._tickets = tickets
        self._voice = voice
        self._asked: dict[str, _Asked] = {}  # by the task's id
        self._ids: dict[tuple[JobId, LeaseNumber], str] = {}

    def run(self, job: RunJob, work: Call | Task) -> Output | Rejected | Failed:
        """Return how the peer is asked for a job, or why it is not."""
        number = (job.job_id, job.lease)
        if reason := refusal(self._peer, needs_of(work)):
            return Rejected(*number, reason)
        task_id = self._tickets.next()
        try:
            parts = self._written(task_id, work)
        except (NotPlain, TooLarge) as error:
            return Failed(*number, str(error), Fault.REQUEST)
        except InvalidRequest as error:
            if not self._peer.ours:  # one of ours may be able to read it
                return Rejected(*number, f"the worker is no Shoal worker: {error}")
            return Failed(*number, str(error), Fault.REQUEST)
        in_turn = names_blob(*parts)
        said = self._voice.say_parts(FrameType.TASK, *parts, in_turn=in_turn)
        as_json = isinstance(work, Task)
        self._asked[task_id] = _Asked(*number, as_json, isinstance(said, Bulk))
        self._ids[number] = task_id
        return said

    def cancel(self, word: CancelJob) -> Sequence[Output]:
        """Forget a job; return how the peer is told, if it can be."""
        task_id = self._ids.get((word.job_id, word.lease))
        if task_id is None:
            return ()
        asked = self._forget(task_id)
        if not self._peer.ours:
            return ()
        payload = write_word(Cancel(task_id))
        said = self._voice.say(FrameType.CONTROL, payload, in_turn=asked.in_turn)
        return (said,)

    def job_of(self, task_id: str) -> tuple[JobId, LeaseNumber] | None:
        """Return which job of ours a task is; None: none, or no more."""
        asked = self._asked.get(task_id)
        return None if asked is None else (asked.job_id, asked.lease)

    def hear(self, answered: Answered) -> Sequence[Event]:
        """Return what came of a job.

        Raises PeerError if one of ours says what it cannot mean.
        """
        if answered.task_id not in self._asked:
            return ()
        ending = read_ending(answered.more) if self._peer.ours else None
        asked = self._forget(answered.task_id)
        number = (asked.job_id, asked.lease)
        if answered.error is not None:
            return (failure(*number, self._peer, answered),)
        if not asked.as_json:
            blobs = () if ending is None else ending.blobs
            return (Completed(*number, value=bytes(answered.value), blobs=blobs),)
        try:
            return (Completed(*number, rest=(json_text(answered.value),)),)
        except NotPlain as error:
            return (Failed(*number, str(error)),)

    def _written(self, task_id: str, work: Call | Task) -> Parts:
        strict = not self._peer.ours
        if isinstance(work, Task):
            args, kwargs = arguments(work)
            return task_parts(task_id, work.name, args, kwargs, None, strict=strict)
        more = write_wanting(work.needs, work.blobs) if self._peer.ours else None
        return task_parts(
            task_id,
            work.name,
            work.args,
            work.kwargs,
            work.timeout,
            more,
            strict=strict,
        )

    def _forget(self, task_id: str) -> _Asked:
        asked = self._asked.pop(task_id)
        del self._ids[asked.job_id, asked.lease]
        return asked


def needs_of(work: Call | Task) -> frozenset[Feature]:
    """Return what a worker must be able to do, for which this wire has a word."""
    return work.needs if isinstance(work, Call) else frozenset()


def refusal(peer: Peer, needs: frozenset[Feature]) -> str:
    """Say why a peer cannot be asked for what needs this; empty: it can."""
    if needs and not peer.ours:
        return PLAIN_ONLY
    if Feature.CODE in needs and not peer.trusted:
        return NO_CODE
    return ""


def failure(
    job_id: JobId, lease: LeaseNumber, peer: Peer, answered: Answered
) -> Rejected | Failed:
    """Return that a task was not done: whether another worker may do it, ours say.

    Of others only those say so that do not have the function.
    """
    error = answered.error or ""
    if peer.ours:
        ending = read_ending(answered.more)
        if ending.rejected:
            return Rejected(job_id, lease, error[:REASON_MAX])
        return Failed(job_id, lease, error, fault_of(ending))
    if is_unknown(error):
        last = error.rstrip().rpartition("\n")[2]
        return Rejected(job_id, lease, last[:REASON_MAX])
    return Failed(job_id, lease, error)
