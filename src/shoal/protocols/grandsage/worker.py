"""The node's session with a server, and its tasks across connections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from urllib.parse import quote, urlencode

from shoal.domain import vocabulary as words
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import Fault, plain_texts
from shoal.protocols.grandsage import admission, codec
from shoal.protocols.seam.context import WorkerProfile, unenforceable
from shoal.protocols.seam.json_text import well_formed
from shoal.protocols.seam.peer_addresses import split_url
from shoal.protocols.seam.session import Batch, Close, Data, Notice, Output, Send

KEEPALIVE_INTERVAL = 10.0  # seconds
TASK_MAX = 64 << 20  # bytes of a task
TASKS_MAX = 4096  # concurrent tasks accepted from a server
ENDED_MAX = 1024  # recent ends that are remembered
NO_TOKEN = "-"  # servers require the parameter even if they ignore it
REASON_MAX = 1000  # characters of a reason that are logged
REPEAT_WITHIN = 60.0  # seconds in which a broken connection is noticed

FAILURES = {
    Fault.WORKER: "\n[The node failed to answer.]",
    Fault.REQUEST: "\n[The node cannot process this request.]",
    Fault.CONTEXT: "\n[The conversation is too long for this model.]",
}
"""The last text of a failed task: the wire has no message for errors.

The details are for the operator: they may name what runs on this machine.
"""

BROKEN = "\n[The connection of the node broke: text may be missing.]"
"""The last text of a task of which a connection may have lost text.

A frame has no number, and a server acknowledges none.
"""

SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


@dataclass(slots=True)
class NodeTasks:
    """The tasks of one server, across connections.

    ``ended`` has when each recent task ended, oldest first, and ``begun`` the running
    and recent tasks that have sent text on this connection.
    """

    running: dict[JobId, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def record_end(self, task_id: int, now: float) -> None:
        """Record an end frame, which a broken connection may have lost."""
        self.ended.pop(task_id, None)
        self.ended[task_id] = now
        while len(self.ended) > ENDED_MAX:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.begun.discard(oldest)

    def drain_recent_ends(self, now: float) -> list[int]:
        """Return and forget the tasks that ended within ``REPEAT_WITHIN``."""
        since = now - REPEAT_WITHIN
        recent = [task_id for task_id, at in self.ended.items() if at >= since]
        self.ended.clear()
        return recent

    def drain_begun(self) -> set[int]:
        """Return and forget the tasks that have sent text."""
        begun, self.begun = self.begun, set()
        return begun


class GrandSageNodeDialer:
    """Connects and reconnects to one coordinator; keeps the running tasks meanwhile.

    The constructor raises ConfigError if the URL is invalid.
    """

    message_max = TASK_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        self.url = _address(url, profile)
        self._model = profile.model.name
        self._tasks = NodeTasks()
        restriction = profile.restriction
        self._declined = unenforceable(restriction) if restriction else ""

    def start_session(self, headers: Mapping[str, str]) -> "GrandSageServerSession":
        return GrandSageServerSession(self._model, self._tasks, self._declined)

    def final_reason(self, code: int, text: str) -> str | None:
        if self._declined:
            return self._declined
        quoted = ascii(text[:123])[1:-1]
        if code == admission.CLOSE_INVALID_TOKEN:
            return f"the coordinator does not know this token ({quoted}): check --token"
        if code == admission.CLOSE_MISSING_PARAMETER:
            return f"the coordinator does not take these parameters: {quoted}"
        return None  # a server also closes with 4000 on errors


class GrandSageServerSession:
    """Receives tasks from a server and sends text.

    ``tasks`` outlives the connection.  After a reconnect, a server continues a task
    under its id, and keeps it until its end frame.  So the session ends every task,
    also those that fail, and first repeats the latest end frames: frames written to a
    broken connection are lost, and the end of an unknown task is ignored.  For the same
    reason a task that has sent text ends there, with ``BROKEN``; another goes on.  If
    it is ``declined``, the session disconnects with that reason.
    """

    # The URL stands for Joined, and a server notices by the disconnect that a node
    # leaves.
    accepts: frozenset[type] = frozenset(
        {words.AnswerChunk, words.Completed, words.Failed}
    )

    def __init__(self, model: str, tasks: NodeTasks, declined: str = "") -> None:
        self._model = model
        self._tasks = tasks
        self._running = tasks.running
        self._declined = declined
        self.deadline: float | None = None

    def tick(self, now: float) -> Sequence[words.Command | Output]:
        if self.deadline is not None and now < self.deadline:
            return ()
        if self._declined:
            return (Close(self._declined),)
        first = self.deadline is None
        self.deadline = now + KEEPALIVE_INTERVAL
        return (Send(""), *(self._end_broken_tasks(now) if first else ()))

    def _end_broken_tasks(self, now: float) -> Sequence[words.Command | Output]:
        """End what the last connection may not have ended.

        A server that has ended a task answers the text with a stop, and ignores it.
        """
        begun = self._tasks.drain_begun()
        outputs: list[words.Command | Output] = []
        for task_id in self._tasks.drain_recent_ends(now):
            outputs += self._text(task_id, BROKEN) if task_id in begun else ()
            outputs.append(Send(codec.encode_end(task_id)))
        for job_id, task_id in list(self._running.items()):
            if task_id in begun:
                del self._running[job_id]
                reason = "ends: the connection broke after it had sent text"
                outputs += (
                    _cancel(job_id, task_id),
                    *self._end_task_with(task_id, reason, BROKEN, now),
                )
        return outputs

    def receive(self, batch: Batch, now: float) -> Sequence[words.Command | Output]:
        if self._declined:
            return ()
        received = [self._receive_message(data, now) for data in batch if data]
        return tuple(chain.from_iterable(received))

    def _receive_message(
        self, data: Data, now: float
    ) -> Sequence[words.Command | Output]:
        try:
            head, text = codec.decode_text(data)
        except PeerError as error:
            # As the document says: "it will log a warning and not process the task".
            return (Notice(str(error)),)
        job_id = JobId(str(head.id))
        if head.stops:
            task_id = self._running.pop(job_id, None)
            self._tasks.begun.discard(head.id)
            return () if task_id is None else (_cancel(job_id, task_id),)
        if not head.pending:
            return self._refuse(head.id, "it is not in a pending state", now)
        if job_id in self._running:
            return (
                Notice(f"task {head.id} was assigned twice: the second is ignored"),
            )
        if len(self._running) >= TASKS_MAX:
            reason = f"{TASKS_MAX} tasks are running already"
            return self._refuse(head.id, reason, now)
        try:
            work = codec.decode_work(text, self._model)
        except PeerError as error:
            return self._refuse(head.id, str(error), now)
        self._running[job_id] = head.id
        self._tasks.ended.pop(head.id, None)
        self._tasks.begun.discard(head.id)
        lease = LeaseNumber(head.id)
        # As real nodes do: a server cannot learn that the prompt is too long.
        return (words.RunJob(job_id, lease, work, trim=True),)

    def send(self, message: words.Event, now: float) -> Sequence[Output]:
        match message:
            case (
                words.Joined()
                | words.OffersChanged()
                | words.HealthReported()
                | words.LoadChanged()
                | words.Draining()
                | words.Rejected()
                | words.ReceiptSent()
                | words.CallMessage()
                | ModelMessage()
            ):
                raise Unsupported("this protocol has no such message")
            case words.AnswerChunk(job_id, _, pieces):
                task_id = self._running.get(job_id)
                if task_id is None:
                    return ()  # stopped in the meantime
                texts = plain_texts(pieces)
                return tuple(
                    chain.from_iterable(self._text(task_id, text) for text in texts)
                )
            case words.Completed(job_id):
                task_id = self._running.pop(job_id, None)
                return () if task_id is None else (self._end(task_id, now),)
            case words.Failed(job_id, _, error, fault):
                task_id = self._running.pop(job_id, None)
                if task_id is None:
                    return ()
                return self._end_failed_task(task_id, f"failed: {error}", fault, now)

    def _refuse(self, task_id: int, reason: str, now: float) -> Sequence[Output]:
        logged = f"is not processed: {reason}"
        return self._end_failed_task(task_id, logged, Fault.REQUEST, now)

    def _end_failed_task(
        self, task_id: int, reason: str, fault: Fault, now: float
    ) -> Sequence[Output]:
        """End a task, for which the wire has no message for an error.

        The document says that a node disconnects then.  But the original keeps the
        task: without an end frame its client waits 600 s, and so long its slot is
        taken.
        """
        last_text = FAILURES.get(fault, FAILURES[Fault.WORKER])
        return self._end_task_with(task_id, reason, last_text, now)

    def _end_task_with(
        self, task_id: int, reason: str, last_text: str, now: float
    ) -> Sequence[Output]:
        return (
            Notice(f"task {task_id} {well_formed(reason[:REASON_MAX])}"),
            *self._text(task_id, last_text),
            self._end(task_id, now),
        )

    def _text(self, task_id: int, text: str) -> Sequence[Output]:
        if text:
            self._tasks.begun.add(task_id)
        return [Send(frame) for frame in codec.encode_text(task_id, text)]

    def _end(self, task_id: int, now: float) -> Send:
        self._tasks.record_end(task_id, now)
        return Send(codec.encode_end(task_id))


def _cancel(job_id: JobId, task_id: int) -> words.CancelJob:
    return words.CancelJob(job_id, LeaseNumber(task_id))


def _address(url: str, profile: WorkerProfile) -> str:
    """Return the URL to dial; ``profile`` takes precedence over the URL's query."""
    parts = split_url(url, SCHEMES, "expected ws://HOST:PORT or http://HOST:PORT")
    parameters = admission.read_query(parts.query)
    required = {
        "token": profile.token or parameters.get("token") or NO_TOKEN,
        "model": profile.model.name,
        "max_concurrency": str(profile.slots),
        "name": profile.name,
    }
    query = urlencode(
        required
        | {name: value for name, value in parameters.items() if name not in required},
        quote_via=quote,
        safe="",
        errors="replace",
    )
    path = parts.path if parts.path not in ("", "/") else "/ws"
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{path}?{query}"
