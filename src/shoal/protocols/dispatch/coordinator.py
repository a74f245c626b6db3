"""The coordinator's session with one worker, and the jobs assigned to it."""

import re
from collections.abc import Mapping, Sequence

from msgspec import UNSET, Raw

from shoal.domain import vocabulary as words
from shoal.domain.errors import NotAdmitted, PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.receipts import SignedReceipt
from shoal.domain.worker import MachineHealth
from shoal.protocols.dispatch.admission import (
    CAPABILITIES,
    Config,
    admit,
    new_worker_id,
    offer_of,
)
from shoal.protocols.dispatch.ecmascript_json import to_json, well_formed
from shoal.protocols.dispatch.jobs import encode_job, read_answer
from shoal.protocols.dispatch.messages import (
    DISMISSED,
    REASON_MAX,
    REPLACED_TEXT,
    DispatchErrorCode,
    ErrorMessage,
    InvalidMessage,
    JobComplete,
    JobReject,
    ProviderHeartbeat,
    ProviderHeartbeatAck,
    ReceiptSubmit,
    RegisterProvider,
    RegisterProviderAck,
    decode,
    read_metrics,
)
from shoal.protocols.dispatch.receipts import UNREADABLE, read_submitted
from shoal.protocols.seam import session
from shoal.protocols.seam.admission import NO_JOIN_TOKEN
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import UpgradeRequest

CLOSE_REFUSED = 4003  # Shoal's close codes; the original closes without one
CLOSE_SILENT = 4008

INVALID_IN_A_ROW_MAX = 100  # consecutive invalid messages before disconnecting
UNREGISTERED_MESSAGE_MAX = 64 << 10  # characters or bytes before registration
REPORT_INTERVAL = 1.0  # least seconds between health reports that are passed on
NULL = Raw(b"null")
REGISTER = "register"

_SUBPROTOCOL = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


_ISSUED_ID = re.compile(r"[!-~]+")  # recorded ids are logged as well

NO_REASON = "no reason given"
NO_LEASE = LeaseNumber(0)  # no job has it, so the result counts as late

STRAYS_MAX = 64  # reports on other jobs that are passed on: each is stored
UNSIGNED_MAX = 256  # ended jobs whose receipt may still arrive separately


class OutstandingJobs:
    """The jobs assigned on one connection.

    Of reports on other jobs a limited number is passed on, with an id that Shoal can
    issue; each job that ends allows one more.  The methods raise InvalidMessage.
    """

    def __init__(self) -> None:
        self._assigned: dict[str, words.RunJob] = {}
        self._early: dict[str, SignedReceipt] = {}  # that came before their answers
        self._unsigned: dict[JobId, None] = {}  # ended without a receipt, oldest first
        self._stray_reports_left = STRAYS_MAX

    def add(self, job: words.RunJob) -> None:
        """Record that a job is assigned to the worker."""
        self._assigned[job.job_id] = job

    def completed(self, message: JobComplete) -> Sequence[words.Event | session.Send]:
        """Process an answer; if it is invalid, another worker gets the job.

        An answer with a wrong hash is still an answer.
        """
        job = self._assigned.get(message.job_id)
        if job is None:
            late = words.Completed(JobId(message.job_id), NO_LEASE)
            stray = self._may_report_stray(message.job_id)
            raise _unknown_job(message.job_id, late if stray else None)
        early = self._early.get(message.job_id)
        try:
            event, warning = read_answer(job, message, early)
        except PeerError as error:
            self._end(job)
            return (_rejected(job, str(error)), _error_message(str(error)))
        receipt = event.receipt if isinstance(event, words.Completed) else None
        self._end(job, signed=receipt is not None)
        report: list[words.Event | session.Send] = [event]
        if receipt is UNREADABLE:
            text = "job_complete: receipt: it or its signature cannot be read"
            report.append(_error_message(text))
        if warning:
            report.append(_error_message(warning))
        return report

    def rejected(self, message: JobReject) -> Sequence[words.Event]:
        """Process the rejection of a job."""
        job = self._assigned.get(message.job_id)
        if job is None:
            raise _unknown_job(message.job_id)
        self._end(job)
        given = message.reason
        reason = given[:REASON_MAX] if isinstance(given, str) else NO_REASON
        return (_rejected(job, well_formed(reason)),)

    def submitted(self, message: ReceiptSubmit) -> Sequence[words.Event]:
        """Process a receipt that arrives separately, before or after its answer."""
        try:
            job_id, receipt = read_submitted(message)
        except PeerError as error:
            text = f"receipt_submit: {error}"
            raise InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, text) from error
        if job_id in self._assigned:
            self._early[job_id] = receipt  # passed on with the answer
            return ()
        if job_id in self._unsigned:
            del self._unsigned[job_id]
        elif not self._may_report_stray(job_id):
            raise _unknown_job(job_id)
        return (words.ReceiptSent(job_id, receipt),)

    def _end(self, job: words.RunJob, *, signed: bool = True) -> None:
        """Record the end of a job; unless it is ``signed``, a receipt may follow."""
        del self._assigned[job.job_id]
        self._early.pop(job.job_id, None)
        self._stray_reports_left = min(self._stray_reports_left + 1, STRAYS_MAX)
        if not signed:
            self._unsigned[job.job_id] = None
            if len(self._unsigned) > UNSIGNED_MAX:
                del self._unsigned[next(iter(self._unsigned))]

    def _may_report_stray(self, job_id: str) -> bool:
        if not self._stray_reports_left or not _ISSUED_ID.fullmatch(job_id):
            return False
        self._stray_reports_left -= 1
        return True


def _rejected(job: words.RunJob, reason: str) -> words.Rejected:
    return words.Rejected(job.job_id, job.lease, reason)


def _unknown_job(job_id: str, event: words.Event | None = None) -> InvalidMessage:
    text = f"{ascii(job_id)[1:-1]} is not a job that this connection has"
    return InvalidMessage(DispatchErrorCode.NOT_YOUR_JOB, text, event=event)


def _error_message(text: str) -> session.Send:
    return session.Send(to_json(ErrorMessage(DispatchErrorCode.INVALID_MESSAGE, text)))


def answer_headers(request: UpgradeRequest) -> Mapping[str, str]:
    """Return the headers of the upgrade response: the first subprotocol offered."""
    offered = request.headers.get("sec-websocket-protocol", "").partition(",")[0]
    if not _SUBPROTOCOL.fullmatch(offered.strip()):
        return {}
    return {"Sec-WebSocket-Protocol": offered.strip()}  # as the original does


class ProviderSession:
    """Assigns jobs to a worker and receives their results.

    Jobs belong to the connection.  When it ends, they are requeued; results that the
    worker reports later on another connection are only recorded.
    """

    accepts: frozenset[type] = frozenset({words.RunJob, words.Dismiss})

    def __init__(
        self, request: UpgradeRequest, config: Config, context: ProtocolContext
    ) -> None:
        self.grant = NO_JOIN_TOKEN
        self._request = request
        self._worker_id = new_worker_id(context)
        self._config = config
        self._context = context
        self._last_received: float | None = None
        self._closed = False
        self._registered: RegisterProvider | None = None
        self._jobs = OutstandingJobs()
        self._reported: float | None = None
        self._has_noted_metrics = False
        self._invalid = 0  # consecutive invalid messages

    @property
    def deadline(self) -> float | None:
        if self._closed or self._last_received is None:
            return None
        return self._last_received + self._config.silence

    def tick(self, now: float) -> Sequence[words.Event | session.Output]:
        if self._closed:
            return ()
        if self._last_received is None:
            self._last_received = now
        if now < self._last_received + self._config.silence:
            return ()
        limit = f"{self._config.silence:g} s"
        if self._registered is None:
            return (self._close(f"not registered within {limit}", CLOSE_SILENT),)
        return (self._close(f"silent for {limit}", CLOSE_SILENT),)

    def send(self, message: words.Command, now: float) -> Sequence[session.Output]:
        if self._closed:
            return ()
        match message:
            case words.RunJob():
                text = encode_job(message)
                self._jobs.add(message)
                return (session.Send(text),)
            case words.CancelJob():
                raise Unsupported("this protocol cannot cancel jobs")
            case words.Dismiss(reason, replaced):
                code, text = DispatchErrorCode.DISMISSED, reason
                if replaced:
                    code, text = DispatchErrorCode.REPLACED, REPLACED_TEXT
                error = _send(ErrorMessage(code, well_formed(reason)))
                return (error, self._close(reason, DISMISSED, text))
            case words.CallMessage() | words.WakeMachine() | ModelMessage():
                raise Unsupported("this protocol carries neither calls nor models")

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[words.Event | session.Output]:
        outputs: list[words.Event | session.Output] = []
        for data in batch:
            if self._closed:
                break
            try:
                outputs += self._receive_message(data, now)
                self._invalid = 0
            except InvalidMessage as invalid:
                if invalid.event is not None:
                    outputs.append(invalid.event)
                outputs += self._refuse(invalid)
        return outputs

    def _receive_message(
        self, data: session.Data, now: float
    ) -> Sequence[words.Event | session.Output]:
        registered = self._registered
        if registered is None and len(data) > UNREGISTERED_MESSAGE_MAX:
            # Do not parse large messages of an unregistered peer.
            limit = UNREGISTERED_MESSAGE_MAX
            raise _unregistered(f"until then a message has {limit} bytes at most")
        if registered is not None:
            self._last_received = now
        message = decode(data)
        if isinstance(message, RegisterProvider):
            return self._on_register(message, now)
        if registered is None:
            raise _unregistered("other messages are invalid until then")
        match message:
            case ProviderHeartbeat():
                return self._on_heartbeat(message, registered, now)
            case JobComplete():
                return self._jobs.completed(message)
            case JobReject():
                return self._jobs.rejected(message)
            case ReceiptSubmit():
                return self._jobs.submitted(message)

    def _on_register(
        self, message: RegisterProvider, now: float
    ) -> Sequence[words.Event | session.Output]:
        accepted = _send(RegisterProviderAck("ok", self._worker_id))
        if self._registered is not None:
            if message == self._registered:
                return (accepted,)
            raise _invalid_register("this connection is registered as something else")
        key = message.provider_pubkey.lower()
        try:
            self.grant = admit(key, self._request, self._config, self._context)
            offer = offer_of(message, self._config)
        except NotAdmitted as error:
            refused = _send(RegisterProviderAck("error", error=str(error)))
            return (refused, self._close(f"refused: {error}", CLOSE_REFUSED))
        except PeerError as error:
            raise _invalid_register(str(error)) from error
        self._registered, self._last_received = message, now
        remarks = [offer.remark, _unknown_capabilities(message)]
        notices = [session.Notice(each) for each in remarks if each]
        # Anyone can name a key: such a worker replaces none that has proved it.
        return (accepted, words.Joined(f"{key}/unproven", offer), *notices)

    def _on_heartbeat(
        self, message: ProviderHeartbeat, registered: RegisterProvider, now: float
    ) -> Sequence[words.Event | session.Output]:
        if message.provider_pubkey.lower() != registered.provider_pubkey.lower():
            text = "heartbeat: provider_pubkey: this connection registered another"
            raise InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, text)
        ack = _send(ProviderHeartbeatAck())
        if message.metrics in (UNSET, NULL) or (
            self._reported is not None and now < self._reported + REPORT_INTERVAL
        ):
            return (ack,)
        self._reported = now
        metrics, unusable = read_metrics(message)
        jobs = None if metrics.active_jobs is None else int(metrics.active_jobs)
        report = words.HealthReported(
            MachineHealth(metrics.cpu_pct, metrics.mem_pct, jobs)
        )
        return (ack, report, *self._note_unusable(unusable))

    def _note_unusable(self, metrics: Sequence[str]) -> Sequence[session.Notice]:
        """Return a notice for metrics that are unusable, once per connection."""
        if not metrics or self._has_noted_metrics:
            return ()
        self._has_noted_metrics = True
        return (
            session.Notice(f"heartbeat: ignored {', '.join(metrics)}: out of range"),
        )

    def _refuse(self, invalid: InvalidMessage) -> Sequence[session.Output]:
        """Answer an invalid message; disconnect after many in a row."""
        self._invalid += 1
        text = str(invalid)
        answer: object = ErrorMessage(invalid.code, text)
        if invalid.about == REGISTER:
            answer = RegisterProviderAck("error", error=text)
        if self._invalid < INVALID_IN_A_ROW_MAX:
            return (_send(answer),)
        reason = f"{INVALID_IN_A_ROW_MAX} invalid messages in a row"
        return (
            _send(answer),
            self._close(reason, session.CloseCode.POLICY_VIOLATION, reason),
        )

    def _close(self, reason: str, code: int, text: str = "") -> session.Close:
        self._closed = True
        return session.Close(reason, code, text or reason[:100])


def _unregistered(rule: str) -> InvalidMessage:
    text = f"register first: {rule}"
    return InvalidMessage(DispatchErrorCode.NOT_REGISTERED, text)


def _invalid_register(reason: str) -> InvalidMessage:
    return InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, reason, REGISTER)


def _unknown_capabilities(message: RegisterProvider) -> str:
    """Return a remark on capabilities that are ignored; empty if there are none."""
    names = [name for name in message.capabilities if name not in CAPABILITIES]
    return f"ignored unknown capabilities: {ascii(names)[:REASON_MAX]}" if names else ""


def _send(message: object) -> session.Send:
    return session.Send(to_json(message))
