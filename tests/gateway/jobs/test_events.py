"""The event stream of a job, live and resumed from any event."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import ClientResponse

from gateway.keys import make_key, request
from gateway.providers import COMMIT, call, committed, provider, shown, to_json
from gateway.serving import Pool, eventually
from shoal.domain.errors import QueueFull
from shoal.domain.facts import JobStarted
from shoal.domain.ids import JobId, LeaseNumber
from shoal.gateway.http import responses
from shoal.gateway.jobs.events import SUBSCRIBERS_MAX, EventSubscriptions
from shoal.protocols.dispatch import Config

pytestmark = pytest.mark.shared_pool

JOB = JobId("j")


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"wires": {"dispatch": Config(open=True)}}


@dataclass(slots=True)
class EventStreamClient:
    """A client of the event stream, with the received ids, names and data."""

    response: ClientResponse
    text: str = ""
    heard: list[tuple[int, str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.heard]

    async def read(self) -> None:
        async for data in self.response.content.iter_any():
            self.text += data.decode()
            *whole, _ = self.text.split("\n\n")
            self.heard = [_event(each) for each in whole if each.startswith("id: ")]
        self.ended = True

    async def expect(self, *names: str) -> None:
        """Wait until exactly these events have arrived."""
        await eventually(lambda: self.names == list(names))


def _event(text: str) -> tuple[int, str, Any]:
    fields = dict(line.split(": ", 1) for line in text.split("\n"))
    return int(fields["id"]), fields["event"], json.loads(fields["data"])


@asynccontextmanager
async def listen(
    pool: Pool, job_id: str, after: int | None = None, key: str = ""
) -> AsyncIterator[EventStreamClient]:
    """Listen to a job within the block."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    if key:
        headers |= pool.headers(key)
    async with pool.session.get(
        f"{pool.url}/v1/jobs/{job_id}/events", headers=headers
    ) as response:
        listener = EventStreamClient(response)
        reading = asyncio.create_task(listener.read())
        try:
            yield listener
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def test_events_of_a_job_are_streamed(pool: Pool) -> None:
    job_id = await committed(pool)
    async with listen(pool, job_id) as listener:
        await listener.expect("queued")
        async with provider(pool) as worker:
            job = await worker.job()
            await listener.expect("queued", "assigned")
            await worker.complete(job["job_id"], {"ok": 1})
            await listener.expect("queued", "assigned", "completed")
            await eventually(lambda: listener.ended)

    assert listener.response.status == 200
    assert listener.response.content_type == "text/event-stream"
    assert [number for number, _, _ in listener.heard] == [1, 2, 3]
    queued, assigned, completed = (told for _, _, told in listener.heard)
    assert queued.keys() == {"job_id", "at"}
    assert (assigned["attempt"], assigned["job_id"]) == (1, job_id)
    assert assigned["worker"].startswith("dispatch:")
    assert completed["verdict"] == "valid"


async def test_requeues_are_streamed(pool: Pool) -> None:
    job_id = await committed(pool)
    async with listen(pool, job_id) as listener:
        async with provider(pool) as worker:
            await worker.job()
        await listener.expect("queued", "assigned", "requeued")
        async with provider(pool) as worker:
            job = await worker.job()
            reject = {"type": "job_reject", "job_id": job["job_id"], "reason": "busy"}
            await worker.send(to_json(reject))
            await eventually(lambda: len(listener.heard) == 5)
        await call(pool, "DELETE", f"/v1/jobs/{job_id}")
        await eventually(lambda: listener.ended)

    assert listener.names[-3:] == ["assigned", "requeued", "cancelled"]
    details = [told.get("detail") for _, _, told in listener.heard]
    assert "worker lost" in details[2]
    assert details[4] == "busy"
    assert listener.heard[-1][2]["error"] == "cancelled"


async def test_start_of_a_streaming_worker_is_an_event(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        job_id = await committed(pool, job_type="LLM_INFER", payload={"prompt": "hi"})
        async with listen(pool, job_id) as listener:
            task = await node.task()
            await node.write(task["id"], "once")
            await listener.expect("queued", "assigned", "running")
            await node.end(task["id"])
            await listener.expect("queued", "assigned", "running", "completed")


async def test_failure_has_a_code_and_a_message(pool: Pool) -> None:
    path = "/v1/jobs/commit/fast"
    _, answer = await call(pool, "POST", path, COMMIT | {"privacy_class": "PRIVATE"})

    async with listen(pool, answer["job_id"]) as listener:
        await eventually(lambda: listener.ended)

    assert listener.names == ["queued", "failed"]
    told = listener.heard[-1][2]
    assert told["error"] == "no_trusted_worker"
    assert "no worker is paired" in told["detail"]


async def test_reconnected_listener_gets_the_rest(pool: Pool) -> None:
    job_id = await committed(pool)
    async with provider(pool) as worker:
        job = await worker.job()
        async with listen(pool, job_id, after=1) as listener:
            await listener.expect("assigned")
            await worker.complete(job["job_id"], {"ok": 1})
            await eventually(lambda: listener.ended)
    assert [number for number, _, _ in listener.heard] == [2, 3]

    async with listen(pool, job_id, after=2) as listener:
        await eventually(lambda: listener.ended)
    assert listener.names == ["completed"]


async def test_complete_listener_is_told_to_stop(pool: Pool) -> None:
    job_id = await committed(pool)
    await call(pool, "DELETE", f"/v1/jobs/{job_id}")

    for seen in (2, 3, 10**14):
        async with listen(pool, job_id, after=seen) as listener:
            assert listener.response.status == 204


async def test_id_beyond_the_last_event_is_the_end(pool: Pool) -> None:
    job_id = await committed(pool)
    async with listen(pool, job_id, after=99) as listener:
        await call(pool, "DELETE", f"/v1/jobs/{job_id}")
        await eventually(lambda: listener.ended)

    assert listener.names == ["cancelled"]


@pytest.mark.parametrize("seen", ["x", "-1", "1.5", "9" * 16, "²"])
async def test_invalid_event_id_is_rejected(pool: Pool, seen: str) -> None:
    job_id = await committed(pool)

    status, answer = await call(
        pool, "GET", f"/v1/jobs/{job_id}/events", **{"Last-Event-ID": seen}
    )

    assert status == 400
    assert answer["error"].startswith("Last-Event-ID: expected the id of an event")


async def test_disconnected_listener_does_not_cancel_the_job(pool: Pool) -> None:
    job_id = await committed(pool)
    async with listen(pool, job_id) as listener:
        await listener.expect("queued")

    assert (await shown(pool, job_id))["status"] == "pending"


async def test_keepalive_comments_are_sent(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEPALIVE_EVERY", 0.01)
    job_id = await committed(pool)
    async with listen(pool, job_id) as listener:
        await eventually(lambda: listener.text.count(": keep-alive\n\n") > 1)

    assert listener.names == ["queued"]


async def test_revoked_key_ends_the_event_stream(pool: Pool) -> None:
    key = await make_key(pool)
    _, answer = await request(pool, "POST", "/v1/jobs/commit/fast", COMMIT, key=key)
    async with listen(pool, answer["job_id"], key=key) as listener:
        await listener.expect("queued")
        assert (await request(pool, "DELETE", "/admin/keys/alice"))[0] == 200
        await eventually(lambda: listener.ended)

    assert "event: error" in listener.text
    assert "the key was revoked" in listener.text


async def test_no_state_is_held_without_listeners() -> None:
    listeners = EventSubscriptions()
    with listeners.subscribe(JOB) as one, listeners.subscribe(JOB) as other:
        listeners.on_facts([JobStarted(JobId("another"), LeaseNumber(1))])
        assert not one.is_set()
        listeners.on_facts([JobStarted(JOB, LeaseNumber(1))])
        assert one.is_set()
        assert other.is_set()

    assert listeners == EventSubscriptions()


async def test_number_of_listeners_is_limited() -> None:
    listeners = EventSubscriptions()
    with listeners.subscribe(JOB):
        listeners._count = SUBSCRIBERS_MAX
        with pytest.raises(QueueFull), listeners.subscribe(JOB):
            pass
