"""The node's session with a server: Shoal's coordinator or an original server."""

from collections.abc import Mapping, Sequence
from itertools import chain
from urllib.parse import quote, urlencode, urlsplit

from shoal.domain.errors import ConfigError, PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallMessage,
    CancelJob,
    Command,
    Completed,
    Draining,
    Event,
    Failed,
    HealthReported,
    Joined,
    LoadChanged,
    OffersChanged,
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.protocols.grandsage.admission import (
    CLOSE_BYE,
    CLOSE_INVALID_TOKEN,
    CLOSE_MISSING_PARAMETER,
    read_query,
)
from shoal.protocols.grandsage.codec import (
    FRAME_MAX,
    REASON_MAX,
    TextMessage,
    encode_delta,
    encode_end,
    encode_ending,
    encode_text,
    encode_text_message,
    well_formed,
)
from shoal.protocols.grandsage.extension import (
    HEADER,
    read_extensions,
    write_extensions,
)
from shoal.protocols.grandsage.tasks import decode_text, decode_work
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.session import (
    Batch,
    Close,
    CloseCode,
    Data,
    Notice,
    Output,
    Send,
    protocol_error,
)

KEEPALIVE_INTERVAL = 10.0  # seconds
TASK_MAX = 64 << 20  # bytes of a task, which may have its messages twice
TASKS_MAX = 4096  # concurrent tasks accepted from a server
UTF8_CHARACTER_MAX = 4  # bytes of a character in UTF-8
NO_TOKEN = "-"  # servers require the parameter even if they ignore it

SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class GrandSageNodeDialer:
    """Connects and reconnects to one coordinator; keeps the running tasks meanwhile.

    The constructor raises ConfigError if the URL is invalid.
    """

    message_max = TASK_MAX

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        self.url = _address(url, profile)
        self.headers: Mapping[str, str] = {
            HEADER: write_extensions(profile.model, profile.only_for)
        }
        self._model = profile.model.name
        self._running: dict[JobId, int] = {}
        self._extended = False

    def start_session(self, headers: Mapping[str, str]) -> "GrandSageServerSession":
        announced = {name.lower(): value for name, value in headers.items()}
        self._extended = read_extensions(announced.get(HEADER.lower(), "")).known
        return GrandSageServerSession(self._model, self._running, self._extended)

    def final_reason(self, code: int, text: str) -> str | None:
        quoted = ascii(text[:123])[1:-1]
        if code == CLOSE_INVALID_TOKEN:
            return f"the coordinator does not know this token ({quoted}): check --token"
        if code == CLOSE_MISSING_PARAMETER:
            return f"the coordinator does not take these parameters: {quoted}"
        if code == CLOSE_BYE and self._extended:
            return "another worker joined under the same name: choose another --name"
        return None  # an original server also sends 4000 on errors


class GrandSageServerSession:
    """Receives tasks from a server and sends text.

    ``running`` outlives the connection.  After a reconnect, an original server
    continues a task under its id.  Shoal's coordinator has requeued it, so the session
    first cancels the tasks that still run.
    """

    def __init__(self, model: str, running: dict[JobId, int], extended: bool) -> None:
        # The URL stands for Joined.  A plain server has no message for Rejected; the
        # session handles the other events that it has no message for.
        self.accepts: frozenset[type] = frozenset(
            {
                AnswerChunk,
                Completed,
                Failed,
                Draining,
                *((Rejected,) if extended else ()),
            }
        )
        self._model = model
        self._running = running
        self._extended = extended
        self._due: float | None = None
        self._closed = False

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._due

    def tick(self, now: float) -> Sequence[Command | Output]:
        if self._closed or (self._due is not None and now < self._due):
            return ()
        first = self._due is None
        self._due = now + KEEPALIVE_INTERVAL
        outputs: list[Command | Output] = [Send("")]
        if first and self._extended:
            outputs += [
                _cancel(job_id, task_id) for job_id, task_id in self._running.items()
            ]
            self._running.clear()
        return outputs

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Output]:
        outputs: list[Command | Output] = []
        for data in batch:
            if self._closed:
                break
            try:
                outputs += self._receive_message(data) if data else ()
            except PeerError as error:
                if not outputs:
                    raise
                self._closed = True
                outputs.append(protocol_error(error))
        return tuple(outputs)

    def _receive_message(self, data: Data) -> Sequence[Command | Output]:
        try:
            head, text = decode_text(data)
        except PeerError as error:
            # As the document says: "it will log a warning and not process the task".
            return (Notice(str(error)),)
        job_id = JobId(str(head.id))
        if head.stops:
            task_id = self._running.pop(job_id, None)
            return () if task_id is None else (_cancel(job_id, task_id),)
        if not head.pending:
            return self._refuse(head.id, "it is not in a pending state")
        if job_id in self._running:
            return (
                Notice(f"task {head.id} was assigned twice: the second is ignored"),
            )
        if len(self._running) >= TASKS_MAX:
            raise PeerError(f"more than {TASKS_MAX} tasks at a time")
        try:
            work, continues = decode_work(text, self._model, extended=self._extended)
        except PeerError as error:
            return self._refuse(head.id, str(error))
        self._running[job_id] = head.id
        return (RunJob(job_id, LeaseNumber(head.id), work, continues),)

    def send(self, message: Event, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case Joined():
                raise Unsupported("a node joins by its URL")
            case OffersChanged() | HealthReported() | LoadChanged() | ReceiptSent():
                raise Unsupported("this wire has no such message")
            case CallMessage() | ModelMessage():
                raise Unsupported("this wire has no such message")
            case Draining(reason):
                # A plain server notices the disconnect.
                return self._send_text_message(TextMessage(draining=_short(reason)))
            case AnswerChunk(job_id, _, pieces):
                sent = [self._send(job_id, piece) for piece in pieces]
                return tuple(chain.from_iterable(sent))
            case Completed() | Rejected() | Failed():
                task_id = self._running.pop(message.job_id, None)
                return () if task_id is None else self._end_task(task_id, message)

    def _send(self, job_id: JobId, piece: AnswerPiece) -> Sequence[Output]:
        task_id = self._running.get(job_id)
        if task_id is None:
            return ()  # stopped in the meantime
        if isinstance(piece, str):
            return [Send(frame) for frame in encode_text(task_id, piece)]
        return self._send_delta(job_id, task_id, piece)

    def _send_delta(
        self, job_id: JobId, task_id: int, delta: Delta
    ) -> Sequence[Output]:
        if not self._extended:
            text = delta.fields.get("content")
            if delta.choice or not isinstance(text, str):
                return ()  # a plain server never requests more than text
            return [Send(frame) for frame in encode_text(task_id, text)]
        try:
            text = encode_delta(task_id, delta)
        except RecursionError:
            return self._fail_task(job_id, task_id, "is nested too deeply")
        if len(text) * UTF8_CHARACTER_MAX < FRAME_MAX or len(text.encode()) < FRAME_MAX:
            return (Send(text),)
        limit = f"exceeds the limit of {FRAME_MAX} bytes"
        return self._fail_task(job_id, task_id, limit)

    def _fail_task(self, job_id: JobId, task_id: int, reason: str) -> Sequence[Output]:
        """Fail a task whose answer cannot be sent; ignore the rest of the answer."""
        del self._running[job_id]
        return self._send_text_message(
            TextMessage(id=task_id, failed=f"a piece of the answer {reason}")
        )

    def _end_task(
        self, task_id: int, event: Completed | Rejected | Failed
    ) -> Sequence[Output]:
        match event:
            case Completed(_, _, finish_reason, usage):
                end = Send(encode_end(task_id))
                if not self._extended or (usage is None and finish_reason == "stop"):
                    return (end,)
                return (Send(encode_ending(task_id, finish_reason, usage)), end)
            case Rejected(_, _, reason):
                if self._extended:
                    return self._send_text_message(
                        TextMessage(id=task_id, rejected=_short(reason))
                    )
                return self._abort_task(task_id, f"was not started: {reason}")
            case Failed(_, _, error, fault):
                if self._extended:
                    return self._send_text_message(
                        TextMessage(id=task_id, failed=_short(error), fault=fault)
                    )
                return self._abort_task(task_id, f"failed: {error}")

    def _send_text_message(self, message: TextMessage) -> Sequence[Output]:
        return (Send(encode_text_message(message)),) if self._extended else ()

    def _abort_task(self, task_id: int, reason: str) -> Sequence[Output]:
        """Disconnect, because a plain server has no message for an error.

        As the document says: "it will disconnect the WebSocket connection and log the
        error".
        """
        self._closed = True
        quoted = f"task {task_id} {_short(reason)}"
        return (
            Notice(quoted),
            Close(quoted, CloseCode.INTERNAL_ERROR, f"task {task_id} failed"),
        )

    def _refuse(self, task_id: int, reason: str) -> Sequence[Output]:
        notice = Notice(f"task {task_id} is not processed: {reason}")
        return (
            notice,
            *self._send_text_message(TextMessage(id=task_id, rejected=_short(reason))),
        )


def _cancel(job_id: JobId, task_id: int) -> CancelJob:
    return CancelJob(job_id, LeaseNumber(task_id))


def _short(text: str) -> str:
    return well_formed(text[:REASON_MAX])


def _address(url: str, profile: WorkerProfile) -> str:
    """Return the URL to dial; ``profile`` takes precedence over the URL's query."""
    expected = "expected ws://HOST:PORT or http://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # raises if the port is invalid
    except ValueError as error:
        raise ConfigError(f"coordinator URL: {error}; {expected}") from error
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        raise ConfigError(
            f"coordinator URL: unknown scheme {parts.scheme!r}; {expected}"
        )
    if not host:
        raise ConfigError(f"coordinator URL: no host; {expected}")
    parameters = read_query(parts.query)
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
    return f"{scheme}://{parts.netloc}{path}?{query}"
