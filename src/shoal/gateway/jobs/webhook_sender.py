"""Delivers webhooks of ended jobs, with retries.

Keys take turns, and slow receivers share a slot.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import aiohttp

import shoal
from shoal.coordinator.hub import Hub
from shoal.coordinator.store_health import RETRY_MAX
from shoal.domain.errors import InvalidRequest, StoreError
from shoal.domain.facts import JOB_ENDS, Fact, JobSubmitted
from shoal.domain.ids import JobId
from shoal.gateway.jobs import webhooks
from shoal.store.port import Store, StoredJob
from shoal.store.webhooks import DeliveryState, WebhookDelivery
from shoal.transports.clock import Clock
from shoal.transports.http_client import as_given

ANSWER_TIMEOUT = 10.0  # seconds, including name resolution
JUMP_MIN = 1.0  # seconds by which a clock jumps rather than drifts
ERROR_MAX = 300  # characters of an error that are kept

ACCEPTED = range(200, 300)
GONE = 410  # Standard Webhooks: the receiver has unsubscribed
REDIRECTS = range(300, 400)

Render: TypeAlias = Callable[[StoredJob], Awaitable[bytes]]
"""Encodes a job as ``GET /v1/jobs/{id}`` shows it."""

log = logging.getLogger("shoal.gateway")


CONCURRENT_MAX = 8  # deliveries; each holds a job's result of at most 16 MiB
CONCURRENT_PER_KEY_MAX = 4  # a key whose receivers do not answer leaves room for others
CONCURRENT_PER_LANE_MAX = 2  # of one key, to one host and port
REMEMBERED_MAX = 1000  # keys that had a turn, and slow lanes; the oldest are forgotten


class WebhookTurns:
    """The deliveries in progress, and which keys and lanes wait for others.

    A lane whose last attempt timed out is slow: all slow lanes share one slot.
    """

    def __init__(self) -> None:
        self._in_flight: dict[JobId, DeliveryState] = {}
        self._served: dict[str, None] = {}  # keys, the last one to have its turn last
        self._slow: dict[str, None] = {}  # lanes, the oldest first

    @property
    def has_room(self) -> bool:
        """Whether another delivery may begin."""
        return len(self._in_flight) < CONCURRENT_MAX

    @property
    def jobs(self) -> Collection[JobId]:
        """The jobs of the deliveries in progress."""
        return self._in_flight.keys()

    @property
    def full_keys(self) -> set[str]:
        """The keys that wait for deliveries of their own."""
        counts = Counter(each.owner for each in self._in_flight.values())
        return {key for key, count in counts.items() if count >= CONCURRENT_PER_KEY_MAX}

    @property
    def full_lanes(self) -> set[str]:
        """The lanes that wait for deliveries in progress."""
        counts = Counter(each.lane for each in self._in_flight.values())
        full = {
            lane for lane, count in counts.items() if count >= CONCURRENT_PER_LANE_MAX
        }
        return full if self._slow.keys().isdisjoint(counts) else full | set(self._slow)

    def choose(
        self, first: Iterable[DeliveryState], now: float
    ) -> DeliveryState | None:
        """Return which of the first deliveries of lanes is next; it may be due later.

        Of those due, it is of the key whose last turn was longest ago.  Returns None if
        all wait for deliveries in progress.
        """
        full_keys, full_lanes = self.full_keys, self.full_lanes
        turns = {key: turn for turn, key in enumerate(self._served)}

        def order(each: DeliveryState) -> tuple[float, int, float]:
            due_at = each.due_at or 0.0
            return max(due_at, now), turns.get(each.owner, -1), due_at

        able = (
            each
            for each in first
            if each.owner not in full_keys and each.lane not in full_lanes
        )
        return min(able, key=order, default=None)

    def begin(self, tried: DeliveryState) -> None:
        """Note the beginning of an attempt."""
        self._in_flight[tried.delivery.job_id] = tried
        _put_last(self._served, tried.owner)

    def end(self, tried: DeliveryState, *, timed_out: bool) -> None:
        """Note the end of an attempt."""
        del self._in_flight[tried.delivery.job_id]
        if timed_out:
            _put_last(self._slow, tried.lane)
        else:
            self._slow.pop(tried.lane, None)


def _put_last(remembered: dict[str, None], name: str) -> None:
    remembered.pop(name, None)
    remembered[name] = None
    if len(remembered) > REMEMBERED_MAX:
        del remembered[next(iter(remembered))]


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    final: bool = False  # whether a retry is useless
    timed_out: bool = False


class WebhookSender:
    """Delivers the webhook of each ended job, at least once.

    Deliveries are in the store, and so survive a restart; facts of ``hub`` announce new
    ones.  ``chance`` draws numbers from 0 to 1, and ``answer_timeout`` is the number of
    seconds in which a receiver must answer.  ``results`` counts the attempts.
    """

    def __init__(
        self,
        hub: Hub,
        store: Store,
        clock: Clock,
        render: Render,
        egress_policy: webhooks.EgressPolicy,
        chance: Callable[[], float],
        answer_timeout: float = ANSWER_TIMEOUT,
        results: webhooks.WebhookResults | None = None,
    ) -> None:
        self._results = webhooks.WebhookResults() if results is None else results
        self._store = store
        self._health = hub.store_health
        self._clock = clock
        self._render = render
        self._egress_policy = egress_policy
        self._chance = chance
        self._answer_timeout = answer_timeout
        self._wake = asyncio.Event()
        self._turns = WebhookTurns()
        self._clock_offset: float | None = None  # from monotonic to Unix time
        self._expected = {
            job_id
            for job_id, opened in hub.pool.jobs.items()
            if opened.job.terms.webhook is not None
        }
        hub.subscribe(self._on_facts)

    async def run(self) -> None:
        """Deliver until cancelled, or until the store is broken.

        While the store fails, deliveries are neither recorded nor begun.
        """
        while not self._health.is_broken:
            self._turns = WebhookTurns()
            try:
                async with self._session() as session, asyncio.TaskGroup() as tasks:
                    while True:
                        self._wake.clear()
                        await self._health.wait_writable()
                        await self._limit_delays()
                        await self._wait_until(await self._start_due(session, tasks))
            except* StoreError as errors:
                log.error("webhooks wait for the store: %s", errors.exceptions[0])
            await self._pause()

    async def _pause(self) -> None:
        """Pause: what failed may have been a read."""
        over = asyncio.Event()
        self._clock.call_at(self._clock.now() + RETRY_MAX, over.set)
        await over.wait()

    def _on_facts(self, batch: Sequence[Fact]) -> None:
        for fact in batch:
            if isinstance(fact, JobSubmitted):
                if fact.job.terms.webhook is not None:
                    self._expected.add(fact.job.id)
            elif isinstance(fact, JOB_ENDS) and fact.job_id in self._expected:
                self._expected.remove(fact.job_id)
                self._wake.set()

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=CONCURRENT_MAX,
            # Resolve the name for each delivery: receivers move.
            use_dns_cache=False,
            force_close=True,
            socket_factory=webhooks.SOCKET_FACTORIES[self._egress_policy],
        )
        return aiohttp.ClientSession(
            connector=connector,
            # Each delivery has its own timeout.
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": f"Shoal/{shoal.__version__}"},
        )

    async def _limit_delays(self) -> None:
        """Make retries due that would wait because the clock has jumped back.

        It may have done so before the start, too.
        """
        offset, last = self._clock.wall() - self._clock.now(), self._clock_offset
        if last is None or offset < last - JUMP_MIN:
            at = self._clock.wall()
            await self._store.webhooks.limit_delays(at, webhooks.DELAYS_MAX)
        if last is None or abs(offset - last) > JUMP_MIN:
            self._clock_offset = offset

    async def _start_due(
        self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> float | None:
        """Start due deliveries, within the limits.

        Returns when the next one is due that need not wait for another; None if there
        is none.
        """
        while self._turns.has_room:
            first = await self._store.webhooks.first_of_lanes(self._turns.jobs)
            now = self._clock.wall()
            tried = self._turns.choose(first, now)
            if tried is None:
                return None
            if tried.due_at is not None and tried.due_at > now:
                return tried.due_at
            self._turns.begin(tried)
            tasks.create_task(self._deliver(session, tried))
        return None

    async def _wait_until(self, due_at: float | None) -> None:
        """Wait until a delivery may be due."""
        timer = None
        if due_at is not None:
            seconds = max(0.0, due_at - self._clock.wall())
            timer = self._clock.call_at(self._clock.now() + seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _deliver(
        self, session: aiohttp.ClientSession, tried: DeliveryState
    ) -> None:
        failure = None
        try:
            failure = await self._attempt(session, tried.delivery)
            await self._record_attempt(tried, failure)
        finally:
            timed_out = failure is not None and failure.timed_out
            self._turns.end(tried, timed_out=timed_out)
            self._wake.set()

    async def _attempt(
        self, session: aiohttp.ClientSession, call: WebhookDelivery
    ) -> _Failure | None:
        """Send a message once; return the failure, if any."""
        stored = await self._store.job(call.job_id)
        if stored is None:
            return _Failure("the job was pruned", final=True)
        body = webhooks.encode_message(stored, await self._render(stored))
        at = int(self._clock.wall())
        try:
            headers = webhooks.signed_headers(
                call.job_id, body, call.webhook.secret, at
            )
            async with (
                asyncio.timeout(self._answer_timeout),
                session.post(
                    as_given(call.webhook.url),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                return _failure_of(response.status)
        except InvalidRequest as error:
            return _Failure(str(error), final=True)
        except TimeoutError:
            reason = f"no answer within {self._answer_timeout:g} s"
            return _Failure(reason, timed_out=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _Failure(_reason(error), final=isinstance(error, aiohttp.InvalidURL))

    async def _record_attempt(
        self, tried: DeliveryState, failure: _Failure | None
    ) -> None:
        """Store and log the result of an attempt, and schedule the next."""
        job_id, host, attempts = (
            tried.delivery.job_id,
            tried.delivery.host,
            tried.attempts + 1,
        )
        if failure is None:
            self._results.delivered += 1
            await self._record(job_id, None, None)
            log.info(
                "delivered webhook job=%s host=%s attempts=%d", job_id, host, attempts
            )
            return
        pause = (
            None if failure.final else webhooks.retry_delay(attempts, self._chance())
        )
        if pause is None:
            self._results.given_up += 1
        else:
            self._results.failed += 1
        due_at = None if pause is None else self._clock.wall() + pause
        await self._record(job_id, failure.reason, due_at)
        log.warning(
            "%s job=%s host=%s attempts=%d error=%r",
            "gave up webhook"
            if pause is None
            else f"webhook failed, next attempt in {pause:.0f} s",
            job_id,
            host,
            attempts,
            failure.reason,
        )

    async def _record(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        """Store the result of an attempt, as soon as the store can be written."""
        await self._health.write(
            partial(self._store.webhooks.record_attempt, job_id, error, due_at)
        )


def _failure_of(status: int) -> _Failure | None:
    if status in ACCEPTED:
        return None
    if status in REDIRECTS:
        return _Failure(f"HTTP {status}: redirects are not followed")
    return _Failure(f"HTTP {status}", final=status == GONE)


def _reason(error: Exception) -> str:
    """Describe an error without the URL, which may contain secrets.

    Neither aiohttp's own text is shown, which may have it, nor the server's answer.
    """
    match error:
        case aiohttp.InvalidURL():
            reason = "invalid address"
        case aiohttp.ClientResponseError():  # raised only if the answer is not HTTP
            reason = "the server there does not speak HTTP"
        case aiohttp.ClientConnectorCertificateError():
            reason = f"invalid certificate: {error.certificate_error}"
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            reason = "connection refused"
        case aiohttp.ClientConnectorError():
            reason = str(error.os_error.strerror or error.os_error)
        case aiohttp.ServerDisconnectedError():
            reason = "it closed the connection without an answer"
        case OSError():
            reason = error.strerror or type(error).__name__
        case _:
            reason = type(error).__name__
    return reason[:ERROR_MAX]
