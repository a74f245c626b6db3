"""The coordinator's session with one worker."""

from collections.abc import Sequence

from msgspec import UNSET, Raw

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import ModelMessage
from shoal.domain.vocabulary import (
    CallMessage,
    CancelJob,
    Command,
    Dismiss,
    Draining,
    Event,
    HealthReported,
    Joined,
    RunJob,
)
from shoal.domain.work import JobKind
from shoal.domain.worker import MachineHealth
from shoal.protocols.dispatch.admission import (
    CAPABILITIES,
    ProviderConnection,
    RegisteredProvider,
    register_provider,
)
from shoal.protocols.dispatch.codec.ecmascript_json import to_json, well_formed
from shoal.protocols.dispatch.codec.jobs import encode_job
from shoal.protocols.dispatch.codec.messages import (
    DISMISSED,
    REASON_MAX,
    REPLACED_TEXT,
    DispatchErrorCode,
    Drain,
    ErrorMessage,
    InvalidMessage,
    JobCancel,
    JobComplete,
    JobReject,
    ProviderHeartbeat,
    ProviderHeartbeatAck,
    ReceiptSubmit,
    RegisterProvider,
    RegisterProviderAck,
    decode,
    read_metrics,
    unknown_type,
)
from shoal.protocols.dispatch.config import Config
from shoal.protocols.dispatch.outstanding_jobs import (
    OutstandingJobs,
    Report,
    completed,
    rejected,
    submitted,
)
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.session import (
    Batch,
    Close,
    CloseCode,
    Data,
    Notice,
    Output,
    Send,
)

CLOSE_REFUSED = 4003  # Shoal's close codes; the original closes without one
CLOSE_SILENT = 4008

INVALID_IN_A_ROW_MAX = 100  # consecutive invalid messages before disconnecting
UNREGISTERED_MESSAGE_MAX = 64 << 10  # characters or bytes before registration
REPORT_INTERVAL = 1.0  # least seconds between health reports that are passed on
NULL = Raw(b"null")
PLAIN_KINDS = frozenset({JobKind.CHAT, JobKind.TASK})


class ProviderSession:
    """Assigns jobs to a worker and receives their results.

    Jobs belong to the connection.  When it ends, they are requeued; results that the
    worker reports later on another connection are only recorded.
    """

    def __init__(
        self, connection: ProviderConnection, config: Config, context: ProtocolContext
    ) -> None:
        self.accepts: frozenset[type] = frozenset({RunJob, Dismiss})
        self._connection = connection
        self._config = config
        self._context = context
        self._last_received: float | None = None
        self._closed = False
        self._registered: RegisterProvider | None = None
        self._provider: RegisteredProvider | None = None
        self._jobs = OutstandingJobs()
        self._draining = False
        self._reported: float | None = None
        self._has_noted_metrics = False
        self._invalid = 0  # consecutive invalid messages

    @property
    def deadline(self) -> float | None:
        if self._closed or self._last_received is None:
            return None
        return self._last_received + self._config.silence

    def tick(self, now: float) -> Sequence[Event | Output]:
        if self._closed:
            return ()
        if self._last_received is None:
            self._last_received = now
        if now < self._last_received + self._config.silence:
            return ()
        limit = f"{self._config.silence:g} s"
        if self._provider is None:
            return (self._close(f"not registered within {limit}", CLOSE_SILENT),)
        return (self._close(f"silent for {limit}", CLOSE_SILENT),)

    def send(self, message: Command, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case RunJob():
                return (self._start_job(message),)
            case CancelJob(job_id, lease):
                if CancelJob not in self.accepts:
                    raise Unsupported(
                        "a worker without the extension cannot cancel jobs"
                    )
                if not self._jobs.remove(job_id, lease):
                    return ()
                return (_send(JobCancel(job_id, lease)),)
            case Dismiss(reason, replaced):
                code, text = DispatchErrorCode.DISMISSED, reason
                if replaced:
                    code, text = DispatchErrorCode.REPLACED, REPLACED_TEXT
                error = _send(ErrorMessage(code, well_formed(reason)))
                return (error, self._close(reason, DISMISSED, text))
            case CallMessage() | ModelMessage():
                raise Unsupported("this wire carries neither calls nor models")

    def receive(self, batch: Batch, now: float) -> Sequence[Event | Output]:
        outputs: list[Event | Output] = []
        for data in batch:
            if self._closed:
                break
            invalid = self._invalid
            outputs += self._receive_message(data, now)
            if self._invalid == invalid:
                self._invalid = 0
            elif self._invalid >= INVALID_IN_A_ROW_MAX:
                reason = f"{INVALID_IN_A_ROW_MAX} invalid messages in a row"
                outputs.append(self._close(reason, CloseCode.POLICY_VIOLATION, reason))
        return outputs

    def _start_job(self, job: RunJob) -> Send:
        assert self._provider is not None, "jobs are for workers that have joined"
        extended = self._provider.extended
        if not extended and (job.continues or job.work.kind not in PLAIN_KINDS):
            raise Unsupported(
                "a worker without the extension runs only new chats and tasks"
            )
        self._jobs.add(job)
        return Send(encode_job(job, extended=extended))

    def _receive_message(self, data: Data, now: float) -> Sequence[Event | Output]:
        provider = self._provider
        if provider is None and len(data) > UNREGISTERED_MESSAGE_MAX:
            # Do not parse large messages of an unregistered peer.
            limit = UNREGISTERED_MESSAGE_MAX
            text = f"register first: until then a message has {limit} bytes at most"
            return (
                self._reply_invalid(
                    InvalidMessage(DispatchErrorCode.NOT_REGISTERED, text)
                ),
            )
        message = decode(data)
        if provider is not None:
            self._last_received = now
        if isinstance(message, InvalidMessage):
            if message.about == "register":
                return self._decline(message.text)
            return (self._reply_invalid(message),)
        if isinstance(message, RegisterProvider):
            return self._on_register(message, now)
        if provider is None:
            text = "register first: other messages are invalid until then"
            return (
                self._reply_invalid(
                    InvalidMessage(DispatchErrorCode.NOT_REGISTERED, text)
                ),
            )
        match message:
            case ProviderHeartbeat():
                return self._on_heartbeat(message, provider, now)
            case JobComplete():
                extended = provider.extended
                return self._report(completed(self._jobs, message, extended=extended))
            case JobReject():
                extended = provider.extended
                return self._report(rejected(self._jobs, message, extended=extended))
            case ReceiptSubmit():
                return self._report(submitted(self._jobs, message))
            case Drain(reason):
                if not provider.extended:
                    return (self._reply_invalid(unknown_type("drain")),)
                return self._on_drain(reason)

    def _on_register(
        self, message: RegisterProvider, now: float
    ) -> Sequence[Event | Output]:
        connection = self._connection
        accepted = _send(RegisterProviderAck("ok", connection.worker_id))
        if self._registered is not None:
            if message == self._registered:
                return (accepted,)
            return self._decline("this connection has registered, as something else")
        if connection.refusal:
            declined = self._decline(connection.refusal)
            return (
                *declined,
                self._close(f"refused: {connection.refusal}", CLOSE_REFUSED),
            )
        try:
            provider = register_provider(
                message, connection, self._config, self._context
            )
        except PeerError as error:
            return self._decline(str(error))
        self._registered, self._provider, self._last_received = message, provider, now
        if provider.extended:
            self.accepts |= {CancelJob}
        joined = Joined(provider.identity, provider.offer)
        remark = provider.offer.remark
        remarks = [remark, _unknown_capabilities(message)]
        return (accepted, joined, *(Notice(each) for each in remarks if each))

    def _on_heartbeat(
        self, message: ProviderHeartbeat, provider: RegisteredProvider, now: float
    ) -> Sequence[Event | Output]:
        if message.provider_pubkey.lower() != provider.offer.public_key:
            text = "heartbeat: provider_pubkey: this connection registered another"
            return (
                self._reply_invalid(
                    InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, text)
                ),
            )
        ack = _send(ProviderHeartbeatAck())
        if message.metrics in (UNSET, NULL) or (
            self._reported is not None and now < self._reported + REPORT_INTERVAL
        ):
            return (ack,)
        self._reported = now
        metrics, unusable = read_metrics(message)
        jobs = None if metrics.active_jobs is None else int(metrics.active_jobs)
        report = HealthReported(MachineHealth(metrics.cpu_pct, metrics.mem_pct, jobs))
        return (ack, report, *self._note_unusable(unusable))

    def _note_unusable(self, metrics: Sequence[str]) -> Sequence[Notice]:
        """Return a notice for metrics that are unusable, once per connection."""
        if not metrics or self._has_noted_metrics:
            return ()
        self._has_noted_metrics = True
        return (Notice(f"heartbeat: ignored {', '.join(metrics)}: out of range"),)

    def _on_drain(self, reason: str) -> Sequence[Event | Output]:
        if self._draining:
            return ()  # each one is stored: a flood would fill the disk
        self._draining = True
        return (Draining(well_formed(reason[:REASON_MAX])),)

    def _report(self, report: Report) -> Sequence[Event | Output]:
        """Turn invalid messages into error replies, and count them."""
        return [
            self._reply_invalid(each) if isinstance(each, InvalidMessage) else each
            for each in report
        ]

    def _decline(self, reason: str) -> Sequence[Output]:
        self._invalid += 1
        return (_send(RegisterProviderAck("error", error=reason)),)

    def _reply_invalid(self, invalid: InvalidMessage) -> Send:
        self._invalid += 1
        return _error_message(invalid.code, invalid.text)

    def _close(self, reason: str, code: int, text: str = "") -> Close:
        self._closed = True
        return Close(reason, code, text or reason[:100])


def _unknown_capabilities(message: RegisterProvider) -> str:
    """Return a remark on capabilities that are ignored; empty if there are none."""
    names = [name for name in message.capabilities if name not in CAPABILITIES]
    return f"ignored unknown capabilities: {ascii(names)[:REASON_MAX]}" if names else ""


def _error_message(code: DispatchErrorCode, text: str) -> Send:
    return _send(ErrorMessage(code, text))


def _send(message: object) -> Send:
    return Send(to_json(message))
