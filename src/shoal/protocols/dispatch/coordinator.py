"""The coordinator's session with one worker."""

import re
from collections.abc import Mapping, Sequence

from msgspec import UNSET, Raw

from shoal.domain import vocabulary as words
from shoal.domain.errors import NotAdmitted, PeerError, Unsupported
from shoal.domain.model_messages import ModelMessage
from shoal.domain.worker import MachineHealth
from shoal.protocols.dispatch.admission import (
    CAPABILITIES,
    Config,
    admit,
    new_worker_id,
    offer_of,
)
from shoal.protocols.dispatch.ecmascript_json import to_json, well_formed
from shoal.protocols.dispatch.jobs import encode_job
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
from shoal.protocols.dispatch.outstanding_jobs import OutstandingJobs
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
                raise Unsupported("this wire cancels no jobs")
            case words.Dismiss(reason, replaced):
                code, text = DispatchErrorCode.DISMISSED, reason
                if replaced:
                    code, text = DispatchErrorCode.REPLACED, REPLACED_TEXT
                error = _send(ErrorMessage(code, well_formed(reason)))
                return (error, self._close(reason, DISMISSED, text))
            case words.CallMessage() | ModelMessage():
                raise Unsupported("this wire carries neither calls nor models")

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
            raise _invalid_register("this connection has registered, as something else")
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
