"""Webhook deliveries of a complete coordinator, over real sockets."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from yarl import URL

from gateway.keys import request
from gateway.receiver import run_receiver, verify
from gateway.serving import Pool, eventually, serving
from harness.speed import PATIENCE
from shoal.domain.errors import StoreError
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Webhook
from shoal.domain.work import Chat
from shoal.gateway.context import JobsGateway
from shoal.gateway.jobs.endpoints import encode_job
from shoal.gateway.jobs.webhook_sender import (
    CONCURRENT_MAX,
    CONCURRENT_PER_LANE_MAX,
    WebhookSender,
)
from shoal.gateway.jobs.webhooks import ATTEMPTS_MAX, EgressPolicy
from shoal.store.port import StoredJob
from shoal.store.sql.webhooks import SqlWebhooks
from shoal.store.sqlite.database import SqliteStore
from shoal.store.webhooks import DeliveryState
from shoal.transports.clock import Clock, LoopClock, Timer

KEY = b"a key of the receiver's"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
FOREVER = 3600.0  # seconds
STUCK = 0.25  # seconds: the timeout of a silent receiver


class ImmediateClock:
    """A clock whose timers fire at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._skipped = 0.0

    def now(self) -> float:
        return self._loop.time() + self._skipped

    def wall(self) -> float:
        return time.time() + self._skipped

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        def ring() -> None:
            self._skipped += max(0.0, when - self.now())
            call()

        return self._loop.call_soon(ring)


@asynccontextmanager
async def sending(
    pool: Pool,
    reach: EgressPolicy = EgressPolicy.ANY,
    patience: float = 10.0,
    clock: Clock | None = None,
) -> AsyncIterator[WebhookSender]:
    """Send the webhooks of a pool within the block."""
    assert pool.gateway is not None
    its = WebhookSender(
        pool.hub,
        pool.gateway.store,
        clock or ImmediateClock(),
        partial(encode_job, pool.gateway.select(JobsGateway)),
        reach,
        lambda: 0.5,
        patience,
    )
    running = asyncio.create_task(its.run())
    try:
        yield its
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def complete_job(
    pool: Pool,
    url: str,
    name: str = "j",
    secret: str = SECRET,
    owner: str = "default",
) -> None:
    """Complete a job with a webhook."""
    work = Chat("m1", ({"role": "user", "content": "hi"},))
    terms = JobTerms(detached=True, webhook=Webhook(url, secret))
    async with (
        pool.node(name) as node,
        pool.hub.run_job(Job(JobId(name), work, owner=owner, terms=terms)) as its,
    ):
        await node.answer("Hello")
        await its.outcome()


async def wait_delivered(
    pool: Pool, name: str = "j", attempts: int = ATTEMPTS_MAX
) -> DeliveryState:
    """Wait until the delivery of a job has ended, or had so many attempts."""
    assert pool.gateway is not None
    calls = pool.gateway.store.webhooks
    async with asyncio.timeout(PATIENCE):
        while (  # noqa: ASYNC110  # nothing tells when it is
            tried := await calls.state_of(JobId(name))
        ) is None or (tried.due_at and tried.attempts < attempts):
            await asyncio.sleep(0.001)
    return tried


async def test_end_of_a_job_is_delivered(tmp_path: Path) -> None:
    async with run_receiver() as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    ((headers, body),) = receiver.requests
    (message,) = receiver.messages
    assert (tried.attempts, tried.error) == (1, None)
    assert verify(headers, body, KEY)
    assert headers["Content-Type"] == "application/json"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    assert message["id"] == headers["webhook-id"] == "msg_j"
    assert message["type"] == "job.completed"
    assert message["data"]["id"] == "j"
    assert message["data"]["status"] == "completed"
    assert message["data"]["result"] == {"model": "m1", "text": "Hello"}


async def test_url_is_called_as_it_was_given(tmp_path: Path) -> None:
    """Its owner may have signed it."""
    path = "/a%2Fb%28c%29/~x?sig=%7Eab%2b%2f==&t=a+b"
    async with run_receiver() as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, f"{URL(receiver.url).origin()}{path}")
        await wait_delivered(pool)

    assert receiver.paths == [path]


async def test_message_matches_the_fetched_job(tmp_path: Path) -> None:
    async with run_receiver() as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, receiver.url)
        await wait_delivered(pool)
        fetched = await pool.session.get(
            f"{pool.url}/v1/jobs/j", headers=pool.headers()
        )

        assert await fetched.json() == receiver.messages[0]["data"]


async def test_cancellation_is_delivered(tmp_path: Path) -> None:
    async with run_receiver() as receiver, serving(tmp_path) as pool, sending(pool):
        work = Chat("m1", ({"role": "user", "content": "hi"},))
        terms = JobTerms(detached=True, webhook=Webhook(receiver.url, SECRET))
        async with pool.node() as node:
            async with pool.hub.run_job(Job(JobId("j"), work, terms=terms)):
                await node.task()
            pool.hub.cancel(JobId("j"), "not wanted any more")
            await wait_delivered(pool)

    (message,) = receiver.messages
    assert message["type"] == "job.cancelled"
    assert message["data"]["result"] == {"error": "cancelled"}


async def test_failed_delivery_is_retried_under_the_same_id(
    tmp_path: Path,
) -> None:
    async with (
        run_receiver(500, 503, 204) as receiver,
        serving(tmp_path) as pool,
        sending(pool),
    ):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (tried.attempts, tried.error) == (3, None)
    assert {headers["webhook-id"] for headers, _ in receiver.requests} == {"msg_j"}
    assert all(verify(headers, body, KEY) for headers, body in receiver.requests)


async def test_delivery_fails_after_eight_attempts(tmp_path: Path) -> None:
    async with run_receiver(500) as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert len(receiver.requests) == tried.attempts == ATTEMPTS_MAX
    assert tried.error == "HTTP 500"
    assert tried.delivery.webhook.secret == ""


async def test_gone_receiver_is_not_retried(tmp_path: Path) -> None:
    async with run_receiver(410) as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (len(receiver.requests), tried.error) == (1, "HTTP 410")


async def test_redirects_are_not_followed(tmp_path: Path) -> None:
    async with (
        run_receiver(307, 410) as receiver,
        serving(tmp_path) as pool,
        sending(pool),
    ):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (len(receiver.requests), tried.attempts) == (2, 2)


async def test_silent_receiver_times_out(tmp_path: Path) -> None:
    async with (
        run_receiver(None) as receiver,
        serving(tmp_path) as pool,
        sending(pool, patience=STUCK),
    ):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (len(receiver.requests), tried.attempts) == (ATTEMPTS_MAX, ATTEMPTS_MAX)
    assert tried.error == f"no answer within {STUCK} s"


async def test_silent_receiver_does_not_block_others(tmp_path: Path) -> None:
    stuck_jobs = [f"stuck{number}" for number in range(CONCURRENT_MAX)]
    async with (
        run_receiver(None) as stuck,
        run_receiver() as other,  # at the same host
        serving(tmp_path) as pool,
        sending(pool, patience=FOREVER),
    ):
        for name in stuck_jobs:
            await complete_job(pool, stuck.url, name)
        await complete_job(pool, other.url)
        tried = await wait_delivered(pool)

    assert tried.error is None
    assert len(other.requests) == 1
    assert stuck.open_most == CONCURRENT_PER_LANE_MAX


async def test_silent_receivers_of_one_key_do_not_block_those_of_others(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(run_receiver(None)) for _ in range(4)]
        other = await stack.enter_async_context(run_receiver())
        pool = await stack.enter_async_context(serving(tmp_path))
        await stack.enter_async_context(sending(pool, patience=FOREVER))
        for number in range(2 * CONCURRENT_MAX):
            url = silent[number % len(silent)].url
            await complete_job(pool, url, f"stuck{number}", owner="alice")
        await complete_job(pool, other.url, owner="bob")
        tried = await wait_delivered(pool)

    assert tried.error is None


async def test_receiver_that_timed_out_gets_one_slot(tmp_path: Path) -> None:
    async with (
        run_receiver(None) as silent,
        run_receiver() as other,
        serving(tmp_path) as pool,
        sending(pool, patience=0.01) as sender,
    ):
        await complete_job(pool, silent.url)
        await wait_delivered(pool)
        sender._answer_timeout = FOREVER
        # Requests that timed out may still arrive: these have another path.
        url = silent.url.replace("/hook", "/slow")
        for name in ("a", "b", "c"):
            await complete_job(pool, url, name)
        await eventually(lambda: any("/slow" in path for path in silent.paths))
        await complete_job(pool, other.url, "other")
        await wait_delivered(pool, "other")

        assert len([path for path in silent.paths if "/slow" in path]) == 1


async def test_retry_does_not_wait_for_a_clock_that_jumped_back(
    tmp_path: Path,
) -> None:
    jumped = 0.0
    clock = LoopClock(lambda: time.time() - jumped)
    async with (
        run_receiver(500, 200) as receiver,
        serving(tmp_path) as pool,
        sending(pool, clock=clock),
    ):
        await complete_job(pool, receiver.url)
        await wait_delivered(pool, attempts=1)
        jumped = 3600.0
        # What wakes the sender finds the retry due.
        await complete_job(pool, receiver.url, "k")
        tried = await wait_delivered(pool)

    assert tried.attempts == 2


async def test_retry_does_not_wait_for_a_clock_that_was_set_back_before_the_start(
    tmp_path: Path,
) -> None:
    async with run_receiver(500, 200) as receiver, serving(tmp_path) as pool:
        async with sending(pool, clock=LoopClock(lambda: time.time() + 3600)):
            await complete_job(pool, receiver.url)
            await wait_delivered(pool, attempts=1)
        async with sending(pool, clock=LoopClock()):
            tried = await wait_delivered(pool)

    assert tried.attempts == 2


async def test_pending_delivery_continues_after_a_restart(
    tmp_path: Path,
) -> None:
    async with run_receiver(None, 200) as receiver:
        async with serving(tmp_path) as pool, sending(pool):
            await complete_job(pool, receiver.url)
            await eventually(lambda: receiver.open == 1)
        async with serving(tmp_path) as pool, sending(pool):
            tried = await wait_delivered(pool)

    assert (tried.attempts, tried.error) == (1, None)
    first, second = receiver.messages
    assert first == second


async def test_end_after_a_restart_is_delivered(tmp_path: Path) -> None:
    work = Chat("m1", ({"role": "user", "content": "hi"},))
    async with run_receiver() as receiver:
        async with serving(tmp_path) as pool, pool.node() as node:
            terms = JobTerms(detached=True, webhook=Webhook(receiver.url, SECRET))
            async with pool.hub.run_job(Job(JobId("j"), work, terms=terms)):
                await node.task()
        async with serving(tmp_path) as pool:
            await pool.hub.restore()
            async with sending(pool), pool.node() as node:
                await node.answer("Hello")
                await wait_delivered(pool)

    assert [each["type"] for each in receiver.messages] == ["job.completed"]


INSIDE = {
    "an address": "127.0.0.1",
    "a name": "localhost",
    "another way to write it": "0x7f.0.0.1",
    "this machine": "0.0.0.0",
    "IPv4 in IPv6": "[::ffff:127.0.0.1]",
    "IPv6": "[::1]",
}


@pytest.mark.parametrize("host", INSIDE.values(), ids=INSIDE)
async def test_private_addresses_are_not_called(tmp_path: Path, host: str) -> None:
    async with (
        run_receiver() as receiver,
        serving(tmp_path) as pool,
        sending(pool, EgressPolicy.PUBLIC),
    ):
        await complete_job(pool, receiver.url.replace("127.0.0.1", host))
        tried = await wait_delivered(pool)

    assert receiver.requests == []
    assert tried.attempts == ATTEMPTS_MAX
    assert "is not a public address (--webhooks public)" in (tried.error or "")


@pytest.mark.parametrize("host", ["127.1", "2130706433"])
async def test_unusual_forms_of_private_addresses_are_rejected(
    tmp_path: Path, host: str
) -> None:
    async with (
        run_receiver() as receiver,
        serving(tmp_path) as pool,
        sending(pool, EgressPolicy.PUBLIC),
    ):
        await complete_job(pool, receiver.url.replace("127.0.0.1", host))
        tried = await wait_delivered(pool)

    assert (receiver.requests, tried.attempts) == ([], 1)
    assert tried.error == "invalid address"


async def test_secret_and_url_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    odd = "http://127.0.0.1:1/hook?token=t0p"
    async with (
        run_receiver(500, 200) as receiver,
        serving(tmp_path) as pool,
        sending(pool),
    ):
        await complete_job(pool, receiver.url, "a")
        await complete_job(pool, odd, "b")
        await wait_delivered(pool, "a")
        tried = await wait_delivered(pool, "b")

    assert tried.error == "connection refused"
    lines = [
        each.getMessage() for each in caplog.records if each.name == "shoal.gateway"
    ]
    assert any("delivered webhook job=a" in line for line in lines)
    assert any("gave up webhook job=b" in line for line in lines)
    assert not any("t0p" in line or SECRET in line for line in lines)


ODD_ANSWERS = {
    "no HTTP": (b"220 mail\r\n", "the server there does not speak HTTP"),
    "a wrong header": (b"HTTP/1.1 200 OK\r\n\0\r\n\r\n", "does not speak HTTP"),
    "nothing": (b"", "it closed the connection without an answer"),
}


@pytest.mark.parametrize(("answer", "reason"), ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_url_stays_secret_when_no_http_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: bytes, reason: str
) -> None:
    async def respond(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    caplog.set_level(logging.DEBUG)
    async with (
        await asyncio.start_server(respond, "127.0.0.1", 0) as server,
        serving(tmp_path) as pool,
        sending(pool),
    ):
        port = server.sockets[0].getsockname()[1]
        await complete_job(pool, f"http://127.0.0.1:{port}/h00k?token=t0p")
        tried = await wait_delivered(pool)
        _, explained = await request(pool, "GET", "/admin/jobs/j/explain")

    assert reason in (tried.error or "")
    shown = f"{tried.error} {explained} {caplog.text}"
    assert "h00k" not in shown
    assert "t0p" not in shown


async def test_deliveries_outlast_a_failure_of_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(SqliteStore):
        failures = 3

        async def job(self, job_id: JobId) -> StoredJob | None:
            if self.failures:
                self.failures -= 1
                raise StoreError("disk I/O error", temporary=True)
            return await super().job(job_id)

    async with (
        run_receiver() as receiver,
        serving(tmp_path, open_store=Failing) as pool,
        sending(pool),
    ):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (tried.attempts, tried.error) == (1, None)
    assert len(receiver.requests) == 1
    assert caplog.text.count("webhooks wait for the store: disk I/O error") == 3


async def test_deliveries_wait_while_the_store_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.coordinator.store_health.RETRY_MIN", 0.01)
    recording = SqlWebhooks.record_attempt
    failures = iter([StoreError("disk is full", temporary=True)] * 3)

    async def record(
        webhooks: SqlWebhooks, job_id: JobId, error: str | None, due: float | None
    ) -> None:
        for failure in failures:
            raise failure
        await recording(webhooks, job_id, error, due)

    monkeypatch.setattr(SqlWebhooks, "record_attempt", record)
    async with run_receiver() as receiver, serving(tmp_path) as pool, sending(pool):
        await complete_job(pool, receiver.url)
        tried = await wait_delivered(pool)

    assert (tried.attempts, tried.error) == (1, None)
    assert len(receiver.requests) == 1  # delivered once, and recorded in the end
