"""The coordinator's end of a connection to one worker."""

from collections.abc import Sequence

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    CallWord,
    CancelJob,
    Command,
    Dismiss,
    Draining,
    Event,
    Joined,
    Reported,
    RunJob,
)
from shoal.domain.work import Kind
from shoal.domain.worker import Health
from shoal.protocols.dispatch.held import Held
from shoal.protocols.dispatch.javascript import well_formed, written
from shoal.protocols.dispatch.jobs import encode_job
from shoal.protocols.dispatch.joining import Config, Provider, Visitor, enrol
from shoal.protocols.dispatch.messages import (
    REASON_MAX,
    REPLACED,
    Code,
    Complaint,
    Drain,
    Error,
    Heartbeat,
    HeartbeatAck,
    JobCancel,
    JobComplete,
    JobReject,
    ReceiptSubmit,
    Register,
    RegisterAck,
    decode,
    unknown,
)
from shoal.protocols.dispatch.reports import Said, completed, rejected, submitted
from shoal.protocols.session import (
    Batch,
    Close,
    Data,
    Notice,
    Output,
    Send,
    Setting,
)

REFUSED = 4003  # close codes of ours; the original closes without one
SILENT = 4008
POLICY = 1008  # RFC 6455, section 7.4.1

INVALID_MAX = 100  # messages in a row that are no good, until we hang up
FIRST_MAX = 1 << 20  # characters or bytes of a message before a worker has registered
REPORT_EVERY = 1.0  # seconds between words about a machine that are passed on
PLAIN_KINDS = frozenset({Kind.CHAT, Kind.TASK})


class ProviderSession:
    """Gives jobs to a worker and hears what became of them.

    Jobs belong to the connection: when it ends they go to others, and what is said of
    them later, on another connection, is recorded and no more.
    """

    def __init__(self, visitor: Visitor, config: Config, setting: Setting) -> None:
        self.accepts: frozenset[type] = frozenset({RunJob, Dismiss})
        self._visitor = visitor
        self._config = config
        self._setting = setting
        self._heard: float | None = None
        self._closed = False
        self._registered: Register | None = None
        self._provider: Provider | None = None
        self._held = Held()
        self._draining = False
        self._reported: float | None = None
        self._invalid = 0  # messages in a row

    @property
    def deadline(self) -> float | None:
        if self._closed or self._heard is None:
            return None
        return self._heard + self._config.silence

    def tick(self, now: float) -> Sequence[Event | Output]:
        if self._closed:
            return ()
        if self._heard is None:
            self._heard = now
        if now < self._heard + self._config.silence:
            return ()
        limit = f"{self._config.silence:g} s"
        if self._provider is None:
            return (self._close(f"not registered within {limit}", SILENT),)
        return (self._close(f"silent for {limit}", SILENT),)

    def issue(self, message: Command, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case RunJob():
                return (self._begin(message),)
            case CancelJob(job_id, lease):
                if CancelJob not in self.accepts:
                    raise Unsupported("a worker without the extension cannot be told")
                if not self._held.take_back(job_id, lease):
                    return ()
                return (_send(JobCancel(job_id, lease)),)
            case Dismiss(reason):
                farewell = _send(Error(Code.REPLACED, well_formed(reason)))
                return (farewell, self._close(reason, REPLACED, "Replaced"))
            case CallWord() | ModelWord():
                raise Unsupported("this wire carries neither calls nor models")

    def receive(self, batch: Batch, now: float) -> Sequence[Event | Output]:
        outputs: list[Event | Output] = []
        for data in batch:
            if self._closed:
                break
            invalid = self._invalid
            outputs += self._take(data, now)
            if self._invalid == invalid:
                self._invalid = 0
            elif self._invalid >= INVALID_MAX:
                reason = f"{INVALID_MAX} invalid messages in a row"
                outputs.append(self._close(reason, POLICY, reason))
        return outputs

    def _begin(self, job: RunJob) -> Send:
        assert self._provider is not None, "jobs are for workers that have joined"
        extended = self._provider.extended
        if not extended and (job.continues or job.work.kind not in PLAIN_KINDS):
            raise Unsupported("a worker without the extension begins its own texts")
        self._held.give(job)
        return Send(encode_job(job, extended=extended))

    def _take(self, data: Data, now: float) -> Sequence[Event | Output]:
        provider = self._provider
        if provider is None and len(data) > FIRST_MAX:
            # Nobody is known yet for whom so much would be read.
            text = f"register first: until then a message has {FIRST_MAX} bytes at most"
            return (self._complain(Complaint(Code.NOT_REGISTERED, text)),)
        message = decode(data)
        if provider is not None:
            self._heard = now
        if isinstance(message, Complaint):
            if message.about == "register":
                return self._decline(message.text)
            return (self._complain(message),)
        if isinstance(message, Register):
            return self._register(message, now)
        if provider is None:
            text = "register first: nothing else is heard before"
            return (self._complain(Complaint(Code.NOT_REGISTERED, text)),)
        match message:
            case Heartbeat():
                return self._beat(message, provider, now)
            case JobComplete():
                extended = provider.extended
                return self._said(completed(self._held, message, extended=extended))
            case JobReject():
                extended = provider.extended
                return self._said(rejected(self._held, message, extended=extended))
            case ReceiptSubmit():
                return self._said(submitted(self._held, message))
            case Drain(reason):
                if not provider.extended:
                    return (self._complain(unknown("drain")),)
                return self._drain(reason)

    def _register(self, message: Register, now: float) -> Sequence[Event | Output]:
        visitor = self._visitor
        accepted = _send(RegisterAck("ok", visitor.worker_id))
        if self._registered is not None:
            if message == self._registered:
                return (accepted,)
            return self._decline("this connection has registered, as something else")
        if visitor.refusal:
            declined = self._decline(visitor.refusal)
            return (*declined, self._close(f"refused: {visitor.refusal}", REFUSED))
        try:
            provider = enrol(message, visitor, self._config, self._setting)
        except PeerError as error:
            return self._decline(str(error))
        self._registered, self._provider, self._heard = message, provider, now
        if provider.extended:
            self.accepts |= {CancelJob}
        joined = Joined(provider.identity, provider.offer)
        remark = provider.offer.remark
        return (accepted, joined, *((Notice(remark),) if remark else ()))

    def _beat(
        self, message: Heartbeat, provider: Provider, now: float
    ) -> Sequence[Event | Output]:
        if message.provider_pubkey.lower() != provider.offer.public_key:
            text = "heartbeat: provider_pubkey: this connection registered another"
            return (self._complain(Complaint(Code.INVALID_MESSAGE, text)),)
        acknowledged = _send(HeartbeatAck())
        metrics = message.metrics
        if metrics is None or (
            self._reported is not None and now < self._reported + REPORT_EVERY
        ):
            return (acknowledged,)
        self._reported = now
        jobs = None if metrics.active_jobs is None else int(metrics.active_jobs)
        return (acknowledged, Reported(Health(metrics.cpu_pct, metrics.mem_pct, jobs)))

    def _drain(self, reason: str) -> Sequence[Event | Output]:
        if self._draining:
            return ()  # each one is stored: a flood would fill disks
        self._draining = True
        return (Draining(well_formed(reason[:REASON_MAX])),)

    def _said(self, said: Said) -> Sequence[Event | Output]:
        """Turn complaints into messages, which are counted."""
        return [
            self._complain(each) if isinstance(each, Complaint) else each
            for each in said
        ]

    def _decline(self, why: str) -> Sequence[Output]:
        self._invalid += 1
        return (_send(RegisterAck("error", error=why)),)

    def _complain(self, complaint: Complaint) -> Send:
        self._invalid += 1
        return _error(complaint.code, complaint.text)

    def _close(self, reason: str, code: int, text: str = "") -> Close:
        self._closed = True
        return Close(reason, code, text or reason[:100])


def _error(code: Code, text: str) -> Send:
    return _send(Error(code, text))


def _send(message: object) -> Send:
    return Send(written(message))
