"""Calls the webhooks of jobs that have ended, until each knows or is given up."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    InvalidURL,
    TCPConnector,
)

import shoal
from shoal.domain.errors import InvalidRequest, StoreError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobSubmitted,
)
from shoal.domain.ids import JobId
from shoal.gateway.reach import SOCKETS, Reach
from shoal.gateway.webhooks import headers_of, message, pause_after
from shoal.runtime.clock import Clock
from shoal.runtime.hub import Hub
from shoal.store.calls import Call, Tried
from shoal.store.port import Store, StoredJob

ANSWER_WITHIN = 10.0  # seconds, with the look-up of the name and all
AT_ONCE = 8  # calls; each holds a job's result, 16 MiB at most
AT_ONCE_PER_HOST = 2  # so that one that does not answer leaves room for others
ERROR_MAX = 300  # characters of an error that are kept

ACCEPTED = range(200, 300)
GONE = 410  # Standard Webhooks: this receiver wants no more
REDIRECTS = range(300, 400)

Render: TypeAlias = Callable[[StoredJob], Awaitable[bytes]]
"""Writes a job as ``GET /v1/jobs/{id}`` shows it."""

log = logging.getLogger("shoal.webhooks")


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    final: bool = False  # whether trying again would be no use


class Calling:
    """Tells webhooks of the end of their jobs, at least once each.

    What is to be told stands in the store, so that it is told after a restart as well;
    ``hub`` says when there is more.  ``chance`` draws numbers from 0 to 1, and
    ``patience`` is how many seconds a receiver has for its answer.
    """

    def __init__(
        self,
        hub: Hub,
        store: Store,
        clock: Clock,
        render: Render,
        reach: Reach,
        chance: Callable[[], float],
        patience: float = ANSWER_WITHIN,
    ) -> None:
        self._store = store
        self._clock = clock
        self._render = render
        self._reach = reach
        self._chance = chance
        self._patience = patience
        self._wake = asyncio.Event()
        self._busy: dict[JobId, str] = {}  # jobs whose calls are under way, by host
        self._promised = {
            job_id
            for job_id, opened in hub.pool.jobs.items()
            if opened.job.terms.webhook is not None
        }
        hub.watch(self._saw)

    async def run(self) -> None:
        """Call until cancelled, or until the store fails."""
        try:
            async with self._session() as session, asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    await self._begin(session, tasks)
                    await self._rest()
        except* StoreError as errors:
            log.error(
                "the store failed, webhooks wait for a restart: %s",
                errors.exceptions[0],
            )

    def _saw(self, fact: Fact) -> None:
        match fact:
            case JobSubmitted(job) if job.terms.webhook is not None:
                self._promised.add(job.id)
            case JobCompleted() | JobFailed() | JobCancelled() | JobExpired():
                if fact.job_id in self._promised:
                    self._promised.remove(fact.job_id)
                    self._wake.set()
            case _:
                pass  # of no interest to anybody outside

    def _session(self) -> ClientSession:
        connector = TCPConnector(
            limit=AT_ONCE,
            # Names are looked up for each call: receivers move, and seconds matter not.
            use_dns_cache=False,
            force_close=True,
            socket_factory=SOCKETS[self._reach],
        )
        return ClientSession(
            connector=connector,
            timeout=ClientTimeout(total=None),  # each call has a scope of its own
            headers={"User-Agent": f"Shoal/{shoal.__version__}"},
        )

    async def _begin(self, session: ClientSession, tasks: asyncio.TaskGroup) -> None:
        """Begin what is due, as far as there is room for it."""
        while free := AT_ONCE - len(self._busy):
            due = await self._store.calls.due(
                self._clock.wall(),
                free,
                without=self._busy,
                hosts_without=self._full_hosts(),
            )
            if not due:
                return
            for tried in due:
                if tried.call.host not in self._full_hosts():
                    self._busy[tried.call.job_id] = tried.call.host
                    tasks.create_task(self._call(session, tried))

    async def _rest(self) -> None:
        """Wait until there may be something to begin."""
        timer = None
        if len(self._busy) < AT_ONCE:
            first = await self._store.calls.next_due(
                without=self._busy, hosts_without=self._full_hosts()
            )
            if first is not None:
                seconds = max(0.0, first - self._clock.wall())
                timer = self._clock.call_at(self._clock.now() + seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _full_hosts(self) -> list[str]:
        calls = Counter(self._busy.values())
        return [host for host, count in calls.items() if count >= AT_ONCE_PER_HOST]

    async def _call(self, session: ClientSession, tried: Tried) -> None:
        try:
            failure = await self._told(session, tried.call)
            await self._note(tried, failure)
        finally:
            del self._busy[tried.call.job_id]
            self._wake.set()

    async def _told(self, session: ClientSession, call: Call) -> _Failure | None:
        """Tell a receiver; say what was in the way."""
        stored = await self._store.job(call.job_id)
        if stored is None:
            return _Failure("the job was pruned", final=True)
        body = message(stored, await self._render(stored))
        at = int(self._clock.wall())
        try:
            headers = headers_of(call.job_id, body, call.webhook.secret, at)
            async with (
                asyncio.timeout(self._patience),
                session.post(
                    call.webhook.url, data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                return _judged(response.status)
        except InvalidRequest as error:
            return _Failure(str(error), final=True)
        except TimeoutError:
            return _Failure(f"no answer within {self._patience:g} s")
        except (ClientError, OSError, ValueError) as error:
            return _Failure(_reason(error), final=isinstance(error, InvalidURL))

    async def _note(self, tried: Tried, failure: _Failure | None) -> None:
        """Write down how a call went, and when to try again."""
        job_id, host, attempts = tried.call.job_id, tried.call.host, tried.attempts + 1
        if failure is None:
            await self._store.calls.tried(job_id, None, None)
            log.info("told job=%s host=%s attempts=%d", job_id, host, attempts)
            return
        pause = None if failure.final else pause_after(attempts, self._chance())
        due_at = None if pause is None else self._clock.wall() + pause
        await self._store.calls.tried(job_id, failure.why, due_at)
        log.warning(
            "%s job=%s host=%s attempts=%d error=%r",
            "gave up" if pause is None else f"not told, again in {pause:.0f} s",
            job_id,
            host,
            attempts,
            failure.why,
        )


def _judged(status: int) -> _Failure | None:
    if status in ACCEPTED:
        return None
    if status in REDIRECTS:
        return _Failure(f"HTTP {status}: redirects are not followed")
    return _Failure(f"HTTP {status}", final=status == GONE)


def _reason(error: Exception) -> str:
    """Say what went wrong without the URL, for there may be secrets in it."""
    match error:
        case InvalidURL():
            reason = "the address is no good"
        case ClientConnectorCertificateError():
            reason = f"the certificate is no good: {error.certificate_error}"
        case ClientConnectorError(os_error=ConnectionRefusedError()):
            reason = "connection refused"
        case ClientConnectorError():
            reason = str(error.os_error.strerror or error.os_error)
        case _:
            reason = f"{type(error).__name__}: {error}"
    return reason[:ERROR_MAX]
