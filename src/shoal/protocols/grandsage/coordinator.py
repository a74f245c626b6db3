"""The coordinator's session with one node."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from shoal.domain import vocabulary as words
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, Fault
from shoal.protocols.grandsage import codec
from shoal.protocols.grandsage.admission import BYE, CLOSE_BYE, CLOSE_SILENT, Config
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.session import (
    Batch,
    Close,
    Data,
    Notice,
    Output,
    Send,
    protocol_error,
)

STOP_INTERVAL = 1.0  # least seconds between stops of the same task
STOPPED_MAX = 1024  # stopped tasks remembered per node
OVERTAKEN_MAX = 64  # characters of later answers, while a task has no output
DROPPED = "dropped without an answer: it may exceed the node's context"
TASK_ID_COUNT = 0x70000000  # as in the original: positive, signed or unsigned


class TaskIds:
    """Issues the task ids of all connections, and timestamps.

    ``epoch`` is as in ``ProtocolContext``.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._next_id: int | None = None

    def next_id(self, used: Container[int], now: float) -> int:
        """Return the next task id that is not among ``used``.

        Ids increase across connections and, because they start at the clock, across
        restarts.  So frames of an old task, which a node sends after it reconnects,
        do not match a new task.
        """
        task_id = self._next_id
        if task_id is None:
            task_id = int((self._epoch + now) * 1000) % TASK_ID_COUNT
        while task_id in used:
            task_id = (task_id + 1) % TASK_ID_COUNT
        self._next_id = (task_id + 1) % TASK_ID_COUNT
        return task_id

    def created_at(self, now: float) -> int:
        """Return whole seconds since the epoch at ``now``."""
        return int(self._epoch + now)


@dataclass(slots=True)
class _SentTask:
    """A running job."""

    job_id: JobId
    lease: LeaseNumber
    serial: int  # tasks in the order in which they were issued
    incomplete: bytes = b""  # incomplete character, at most three bytes
    characters: int = 0  # of its text, as far as they were counted
    overtaken: int = 0  # characters of answered tasks that were issued later


class GrandSageNodeSession:
    """Assigns tasks to a node and decodes its frames.

    Tasks belong to the connection.  After a reconnect the session stops the old ones:
    frames written to a broken socket are lost silently, so a resumed text could have
    a gap.
    """

    accepts: frozenset[type] = frozenset({words.RunJob, words.CancelJob, words.Dismiss})

    def __init__(
        self,
        joined: words.Joined,
        grant: AdmissionGrant,
        config: Config,
        task_ids: TaskIds,
        now: float,
    ) -> None:
        self.grant = grant
        self._offer = joined.offer
        self._joining: words.Joined | None = joined  # until the connection is open
        self._config = config
        self._task_ids = task_ids
        self._last_received = now
        # Real nodes send keepalives, of which the document says nothing.  Of a node
        # without, only the pongs show that it is alive.
        self._sends_keepalives = False
        self._closed = False
        self._tasks: dict[int, _SentTask] = {}
        self._ids: dict[tuple[JobId, LeaseNumber], int] = {}
        self._issued = 0
        # Without output, in the order of issue.
        self._silent: dict[int, _SentTask] = {}
        self._stopped: dict[int, float] = {}  # when each was last stopped

    @property
    def deadline(self) -> float | None:
        if self._joining is None and not self._sends_keepalives:
            return None
        return None if self._closed else self._last_received + self._config.silence

    def tick(self, now: float) -> Sequence[words.Event | Output]:
        if self._closed:
            return ()
        if (joined := self._joining) is not None:
            self._joining = None
            self._last_received = now
            remark = self._offer.remark
            return (joined, Notice(remark)) if remark else (joined,)
        if self.deadline is None or now < self.deadline:
            return ()
        self._closed = True
        reason = f"silent for {self._config.silence:g} s"
        return (Close(reason, CLOSE_SILENT, "Silent"),)

    def send(self, message: words.Command, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case words.RunJob():
                return (Send(self._start_task(message, now)),)
            case words.CancelJob(job_id, lease):
                task_id = self._ids.get((job_id, lease))
                if task_id is None:
                    return ()
                self._remove_task(task_id)
                self._record_stop(task_id, now)
                return (Send(codec.encode_stop(task_id)),)
            case words.Dismiss(reason, replaced):
                self._closed = True
                return (Close(reason, CLOSE_BYE, BYE if replaced else reason),)
            case words.CallMessage() | words.WakeMachine() | ModelMessage():
                raise Unsupported("this protocol carries neither calls nor models")

    def receive(self, batch: Batch, now: float) -> Sequence[words.Event | Output]:
        if self._closed:
            return ()
        self._last_received = now
        outputs: list[words.Event | Output] = []
        # Pieces of each task in this batch, by the encoded task id.  Nearly every
        # frame is one more piece for one of them.
        extendable: dict[Data, list[AnswerPiece]] = {}
        for data in batch:
            pieces = extendable.get(data[:4]) if extendable else None
            if pieces is not None and len(data) > 4 and isinstance(data, bytes):
                try:
                    pieces.append(data[4:].decode())
                    continue
                except UnicodeDecodeError:
                    pass
            try:
                self._receive_frame(data, now, extendable, outputs)
            except PeerError as error:
                if not outputs:
                    raise
                self._closed = True
                outputs.append(protocol_error(error))
                break
        self._count_text(extendable)
        return tuple(outputs)

    def _receive_frame(
        self,
        data: Data,
        now: float,
        extendable: dict[Data, list[AnswerPiece]],
        outputs: list[words.Event | Output],
    ) -> None:
        """Process a message other than one more piece of text.

        ``extendable`` has a task while its last output is text that can be extended.
        """
        if isinstance(data, str):
            self._sends_keepalives |= not data
            if data:
                text = f"text from node ignored: {ascii(data[:60])[:80]}"
                outputs.append(Notice(text))
            return
        if len(data) < 4:
            raise PeerError(f"frame of {len(data)} bytes, expected a task id of 4")
        pieces = extendable.pop(data[:4], [])
        (task_id,) = codec.TASK_ID.unpack_from(data)
        task = self._tasks.get(task_id)
        if task is not None and self._silent:
            task.characters += _characters(pieces)
        if task is None:
            outputs += self._on_stray(task_id, bool(data[4:]), now)
        elif len(data) == 4:
            outputs += self._end_task(task_id, task)
            outputs += self._fail_dropped(task, now) if self._silent else ()
        else:
            if task.incomplete:
                text, task.incomplete = codec.decode_frame(task.incomplete + data[4:])
            else:
                text, task.incomplete = _begin_text(data[4:])
            if text:
                self._silent.pop(task_id, None)
                pieces = [text]
                outputs.append(words.AnswerChunk(task.job_id, task.lease, pieces))
                if not task.incomplete:
                    extendable[data[:4]] = pieces
                elif self._silent:
                    task.characters += len(text)

    def _start_task(self, job: words.RunJob, now: float) -> str:
        task_id = self._task_ids.next_id(self._tasks, now)
        text = codec.encode_task(
            task_id,
            job,
            created_at=self._task_ids.created_at(now - job.waited),
            max_new_tokens=self._config.max_new_tokens,
            context=self._offer.context,
        )
        self._issued += 1
        task = _SentTask(job.job_id, job.lease, self._issued)
        self._tasks[task_id] = self._silent[task_id] = task
        self._ids[job.job_id, job.lease] = task_id
        return text

    def _count_text(self, pieces_by_id: Mapping[Data, list[AnswerPiece]]) -> None:
        """Count the text of tasks while others have none; pieces are by encoded id."""
        if not self._silent:
            return
        for encoded_id, pieces in pieces_by_id.items():
            assert isinstance(encoded_id, bytes)
            (task_id,) = codec.TASK_ID.unpack(encoded_id)
            self._tasks[task_id].characters += _characters(pieces)

    def _fail_dropped(
        self, answered: _SentTask, now: float
    ) -> Sequence[words.Event | Output]:
        """Fail the tasks that the node must have dropped: it answered later ones.

        Real nodes drop a task that exceeds their context, without a message, and would
        do so again; a node with a larger context may answer it.  They compute a step of
        all tasks at a time, so a task that they run has output before a later one has
        much.  One of them holds back up to 15 characters, and more within a word, so
        the later answers must be longer.
        """
        outputs: list[words.Event | Output] = []
        for task_id, task in list(self._silent.items()):
            if task.serial > answered.serial:
                break
            task.overtaken += answered.characters
            if task.overtaken < OVERTAKEN_MAX:
                continue
            self._remove_task(task_id)
            self._record_stop(task_id, now)
            outputs += (
                Send(codec.encode_stop(task_id)),
                words.Failed(task.job_id, task.lease, DROPPED, Fault.CONTEXT),
            )
        return outputs

    def _on_stray(self, task_id: int, text: bool, now: float) -> Sequence[Output]:
        """Process text, or the end, of a task that does not run on this connection."""
        stopped_at = self._stopped.get(task_id)
        if not text:
            # The end of a stopped task was sent before the node received the stop.
            unknown = Notice(f"end of task {task_id}, which is not running: ignored")
            return (unknown,) if stopped_at is None else ()
        if stopped_at is not None and now < stopped_at + STOP_INTERVAL:
            return ()  # sent before the node received the stop
        self._record_stop(task_id, now)
        return (
            Send(codec.encode_stop(task_id)),
            Notice(f"text for task {task_id}, which is not running: stopped"),
        )

    def _end_task(self, task_id: int, task: _SentTask) -> Sequence[words.Event]:
        self._remove_task(task_id)
        completed = words.Completed(task.job_id, task.lease)
        if task.incomplete:
            return (words.AnswerChunk(task.job_id, task.lease, ["\ufffd"]), completed)
        return (completed,)

    def _remove_task(self, task_id: int) -> None:
        task = self._tasks.pop(task_id)
        self._silent.pop(task_id, None)
        del self._ids[task.job_id, task.lease]

    def _record_stop(self, task_id: int, now: float) -> None:
        self._stopped[task_id] = now
        if len(self._stopped) > STOPPED_MAX:
            del self._stopped[next(iter(self._stopped))]


def _characters(pieces: Sequence[AnswerPiece]) -> int:
    return sum(map(len, cast(Sequence[str], pieces)))  # this wire has only texts


def _begin_text(data: bytes) -> tuple[str, bytes]:
    """Decode text without a preceding tail; fast path: whole characters."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return codec.decode_frame(data)
