"""What happens to a job, as it happens: server-sent events that can be resumed.

Source: HTML, "Server-sent events".  An event's id is its place in the job's story, so
that whoever comes back says how far they had come.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, QueueFull, ShoalError
from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    ReceiptPresented,
)
from shoal.domain.ids import JobId
from shoal.gateway import problems
from shoal.gateway.access import Caller
from shoal.gateway.job_shown import error_word
from shoal.gateway.jobs import BASE, Enter, owned
from shoal.gateway.parts import Gateway
from shoal.gateway.query import job_in
from shoal.gateway.record import record_of
from shoal.gateway.stream import KEEPALIVE, ClientGone, write
from shoal.gateway.streaming import SSE
from shoal.gateway.text import encode_json, well_formed
from shoal.ledger.canonical import to_time
from shoal.store.port import Recorded

PATH = f"{BASE}/{{id}}/events"
LISTENERS_MAX = 1000  # clients that hear of jobs at a time, each on a connection
LOOK_AGAIN = 0.5  # seconds until what was told of is in the store, though it may wait
LAST_ID = "Last-Event-ID"
COMMENT = b": keep-alive\n\n"

ENDS = (JobCompleted, JobFailed, JobCancelled, JobExpired)


class JobEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an event tells; ``error`` is for programs, ``detail`` for people."""

    job_id: JobId
    at: str  # ISO 8601, in UTC
    attempt: int = 0
    worker: str = ""
    error: str = ""
    detail: str = ""
    verdict: str = ""  # on the worker's receipt


@dataclass(slots=True)
class Listeners:
    """Who waits for news of which jobs; nothing is kept of jobs nobody listens to."""

    _signals: dict[JobId, set[asyncio.Event]] = field(default_factory=dict)
    _count: int = 0

    def saw(self, fact: Fact) -> None:
        """Wake who listens to the job that a fact is about."""
        if not self._signals:
            return
        submitted = isinstance(fact, JobSubmitted)
        job_id = fact.job.id if submitted else getattr(fact, "job_id", None)
        for signal in self._signals.get(job_id, ()):
            signal.set()

    @contextmanager
    def listening(self, job_id: JobId) -> Iterator[asyncio.Event]:
        """Return what is set when there is news of a job.  Raises QueueFull."""
        if self._count >= LISTENERS_MAX:
            raise QueueFull(f"{LISTENERS_MAX} clients listen already: ask with ?wait=")
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


def routes(gateway: Gateway, enter: Enter) -> list[web.RouteDef]:
    """Return the path of the events."""
    listeners = Listeners()
    gateway.hub.watch(listeners.saw)
    return [web.get(PATH, partial(_events, gateway, listeners, enter))]


async def _events(
    gateway: Gateway, listeners: Listeners, enter: Enter, request: web.Request
) -> web.StreamResponse:
    caller = await enter(request, Scope.READ)
    job_id = record_of(request).job_id = job_in(request)
    await owned(gateway, job_id, caller)
    seen = _last_seen(request)
    with listeners.listening(job_id) as signal:
        story = await gateway.store.story(job_id)
        if _ended(story) and seen >= len(story):
            # By this a browser knows that there is no point in coming back.
            return web.Response(status=204)
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        try:
            last = await _tell(gateway, caller, job_id, seen, signal, request, response)
            await write(request, response, last, last=True)
        except ClientGone:
            record_of(request).error = "client_gone"
    return response


async def _tell(
    gateway: Gateway,
    caller: Caller,
    job_id: JobId,
    seen: int,
    signal: asyncio.Event,
    request: web.Request,
    response: web.StreamResponse,
) -> bytes:
    """Write the job's story from ``seen`` on as it comes; return the last of it."""
    while True:
        signal.clear()
        try:
            gateway.access.check(caller)
            story = await gateway.store.story(job_id)
        except ShoalError as error:
            record_of(request).error = problems.problem(error).code
            return b"event: error\ndata: %b\n\n" % problems.body(
                error, problems.as_plain
            )
        told = b"".join(
            _written(job_id, number, each)
            for number, each in enumerate(story[seen:], start=seen + 1)
        )
        if _ended(story):
            return told
        if told:
            await write(request, response, told)
        # Some facts are told of a little before they are stored.
        fresh = len(story) > seen
        seen = max(seen, len(story))
        if not await _signalled(signal, KEEPALIVE if fresh else LOOK_AGAIN):
            await write(request, response, COMMENT)
