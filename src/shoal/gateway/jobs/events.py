"""The events of a job, as a resumable stream of server-sent events.

Source: HTML, "Server-sent events".  An event's id is its index in the job's history, so
a client that reconnects continues where it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from shoal.domain import facts
from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, QueueFull
from shoal.domain.ids import JobId
from shoal.gateway.context import JobsGateway
from shoal.gateway.http import responses
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import job_id_in
from shoal.gateway.http.errors import PLAIN_ERRORS, write_events
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.jobs.endpoints import owned_summary
from shoal.gateway.jobs.job_view import error_code
from shoal.ledger.canonical import to_time
from shoal.store.port import RecordedFact

api = Operations(PLAIN_ERRORS)

SUBSCRIBERS_MAX = 1000  # clients at a time, each with a connection
ID_DIGITS_MAX = 15  # of an event's id
LOOK_AGAIN = 0.5  # seconds for a signalled fact to be in the store
LAST_ID = "Last-Event-ID"


class JobEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of an event; ``error`` is for programs, ``detail`` for people."""

    job_id: JobId
    at: str  # ISO 8601, in UTC
    attempt: int = 0
    worker: str = ""
    error: str = ""
    detail: str = ""
    verdict: str = ""  # on the worker's receipt


@dataclass(slots=True)
class EventSubscriptions:
    """Signals clients about facts of the jobs that they follow."""

    _signals: dict[JobId, set[asyncio.Event]] = field(default_factory=dict)
    _count: int = 0

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Wake the subscribers of the facts' jobs."""
        for fact in batch if self._signals else ():
            job_id = getattr(fact, "job_id", None)  # not every fact is about a job
            for signal in self._signals.get(job_id, ()) if job_id else ():
                signal.set()

    @contextmanager
    def subscribe(self, job_id: JobId) -> Iterator[asyncio.Event]:
        """Return an event that is set when a job has new facts.  Raises QueueFull."""
        if self._count >= SUBSCRIBERS_MAX:
            raise QueueFull(
                f"{SUBSCRIBERS_MAX} clients are listening already: use ?wait= instead"
            )
        signal = asyncio.Event()
        self._signals.setdefault(job_id, set()).add(signal)
        self._count += 1
        try:
            yield signal
        finally:
            self._count -= 1
            self._signals[job_id].remove(signal)
            if not self._signals[job_id]:
                del self._signals[job_id]


SUBSCRIPTIONS = web.AppKey("subscriptions", EventSubscriptions)


@api.get(
    "/v1/jobs/{id}/events",
    "Stream a job's events",
    Scope.READ,
    by_calls=True,
    media=responses.SSE_TYPE,
)
async def stream_events(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    job_id = job_id_in(request)
    await owned_summary(gateway.store, job_id, caller)
    record_of(request).job_id = job_id
    seen = _last_seen(request)
    with request.app[SUBSCRIPTIONS].subscribe(job_id) as signal:
        history = await gateway.store.history_since(job_id, 0)
        ended = _has_ended(history)
        if ended and seen >= len(history):
            # A browser stops reconnecting at this status.
            return web.Response(status=204)
        seen = min(seen, len(history))
        events = _new_events(gateway, caller, job_id, signal, seen, ended=ended)
        return await write_events(request, events, api.errors)


async def _new_events(
    gateway: JobsGateway,
    caller: ApiCaller,
    job_id: JobId,
    signal: asyncio.Event,
    seen: int,
    *,
    ended: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a job after the first ``seen`` facts, until it has ended."""
    woken = False
    while True:
        signal.clear()
        # The key may have ended meanwhile.
        gateway.access.ensure_active(caller)
        new = await gateway.store.history_since(job_id, seen)
        encoded = [
            _encode_event(job_id, seen + n, each) for n, each in enumerate(new, start=1)
        ]
        if text := b"".join(encoded):
            yield text
        if ended or _has_ended(new):
            return
        seen += len(new)
        # Some facts are signalled shortly before they are stored.
        pause = LOOK_AGAIN if woken and not new else responses.KEEPALIVE_EVERY
        woken = await _wait_for_signal(signal, pause)
        if not woken and pause is responses.KEEPALIVE_EVERY:
            yield responses.SSE_KEEPALIVE


async def _wait_for_signal(signal: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return False
    return True


def _last_seen(request: web.Request) -> int:
    """Return the id of the last event that the client has received, or 0."""
    given = request.headers.get(LAST_ID, "")
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= ID_DIGITS_MAX):
        raise InvalidRequest(
            f"{LAST_ID}: expected the id of an event, got {given[:40]!r}", LAST_ID
        )
    return int(given)


def _has_ended(history: Sequence[RecordedFact]) -> bool:
    return any(isinstance(each.fact, facts.JOB_ENDS) for each in history)


def _encode_event(job_id: JobId, number: int, recorded: RecordedFact) -> bytes:
    """Encode an event; empty for facts that do not concern the job's owner."""
    at = to_time(recorded.at)
    match recorded.fact:
        case facts.JobSubmitted():
            name, event = "queued", JobEvent(job_id, at)
        case facts.JobLeased(_, worker, lease) | facts.JobHedged(_, worker, lease):
            name, event = "assigned", JobEvent(job_id, at, lease, worker)
        case facts.JobStarted(_, lease):
            name, event = "running", JobEvent(job_id, at, lease)
        case facts.JobRequeued(_, lease, reason):
            name, event = "requeued", JobEvent(job_id, at, lease, detail=reason)
        case facts.JobUnhedged(_, lease, reason):
            name, event = "unassigned", JobEvent(job_id, at, lease, detail=reason)
        case facts.JobCompleted(_, lease, _, verdict):
            event = JobEvent(job_id, at, lease, verdict=verdict.name.lower())
            name = "completed"
        case facts.JobFailed(error=error) | facts.JobExpired(error=error) as end:
            code = error_code(end)
            name, event = "failed", JobEvent(job_id, at, error=code, detail=error)
        case facts.JobCancelled(reason=reason) as end:
            code = error_code(end)
            name, event = "cancelled", JobEvent(job_id, at, error=code, detail=reason)
        case facts.ReceiptPresented(verdict=verdict):
            event = JobEvent(job_id, at, verdict=verdict.name.lower())
            name = "receipt"
        case (
            facts.LateResult()  # changes nothing
            | facts.WorkerJoined()
            | facts.WorkerLoadChanged()
            | facts.MachineCalled()
            | facts.WorkerDraining()
            | facts.WorkerLeft()
            | facts.WorkerSuspended()
            | facts.WorkerResumed()
            | facts.WorkerApproved()
            | facts.WorkerDisapproved()
            | facts.WorkerDismissed()
            | facts.WorkerMarked()
            | facts.WorkerTrusted()
            | facts.WorkerDistrusted()
            | facts.AccountCredited()
            | facts.AccountLimited()
            | facts.AliasSet()
            | facts.AliasRemoved()
            | facts.DeploymentSet()
            | facts.DeploymentRemoved()
        ):
            return b""
    return b"id: %d\n" % number + responses.encode_event(name, event)
