"""Workers of the own wire whose messages are of the right form, with odd values."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from attacks.siege import TOKEN
from fuzz.mutations import ODD
from gateway.serving import Pool
from gateway.shoal_worker import EVERYTHING, shoal_worker
from shoal.domain.errors import PeerError
from shoal.domain.outcome import Delta, Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallProgress,
    CallResult,
    CallsReturned,
    Completed,
    Event,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.worker import MachineHealth, ThermalLevel, WorkerLoad
from shoal.protocols.shoal.codec import EVENT_DECODER, encode

EACH = 12  # odd messages while a worker is connected
PAGES_EVERY = 10  # connections
PAGES = (
    *("/v1/models", "/v1/jobs", "/v1/receipts", "/admin/status", "/admin/nodes"),
    *("/admin/jobs", "/admin/events", "/admin/models", "/admin/usage", "/metrics"),
    *("/readyz", "/ollama/api/tags", "/ollama/api/ps"),
)


def events_of(job: RunJob) -> Sequence[Event]:
    """Return what a worker may say while it has a job."""
    about = job.job_id, job.lease
    load = WorkerLoad("", 1, 0.5, 2, True, 1, ThermalLevel.FAIR, 50)
    return (
        OffersChanged((EVERYTHING, replace(EVERYTHING, models=frozenset({"m2"})))),
        LoadChanged(load),
        HealthReported(MachineHealth(10.0, 20.0, 1, 40.0)),
        AnswerChunk(*about, ["a", Delta(0, {"content": "b"}, None, "stop")]),
        CallProgress(*about, 0.5, "half"),
        CallsReturned(*about, [CallResult(1, b"\1")]),
        Rejected(*about, "no"),
        Failed(*about, "broken", Fault.ENGINE),
        Completed(*about, "stop", Usage(1, 2, 1, 1), ("rest",), "{}"),
    )


def odd_events(job: RunJob) -> Iterator[Event]:
    """Yield each event with each of its values in turn replaced by each odd one."""
    for event in events_of(job):
        for tree in variants(msgspec.msgpack.decode(encode(event))):
            with suppress(PeerError, OverflowError, UnicodeEncodeError):
                yield EVENT_DECODER.decode(msgspec.msgpack.encode(tree))  # type: ignore[misc]


def variants(tree: Any) -> Iterator[Any]:
    yield from ODD
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from (tree | {key: each} for each in variants(value))
    if isinstance(tree, list):
        for place, value in enumerate(tree):
            for each in variants(value):
                yield [*tree[:place], each, *tree[place + 1 :]]


async def check_pages(pool: Pool) -> None:
    for path in PAGES:
        async with pool.session.get(pool.url + path, headers=pool.headers()) as got:
            text = await got.text()
            assert got.status == 200, (path, text)
            if path != "/metrics":
                json.loads(text, parse_constant=pytest.fail)


async def chat(pool: Pool) -> None:
    """Ask for the model, and take whatever comes."""
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions",
        headers=pool.headers(),
        json={"model": "m1", "messages": [{"role": "user", "content": "?"}]},
    ) as response:
        await response.read()


@pytest.mark.long
async def test_odd_values_of_a_worker_harm_nobody(pool: Pool) -> None:
    said = 0
    for number in count():
        async with shoal_worker(pool, name="odd", token=TOKEN) as worker:
            asking = asyncio.create_task(chat(pool))
            events: list[Event] = []
            try:
                job = await worker.job()
                events = [*islice(odd_events(job), said, said + EACH)]
                for event in events:
                    worker.send(event)
                if number % PAGES_EVERY == 0:
                    await check_pages(pool)
            except BaseException as error:
                error.add_note(f"after {said} events: {events}")
                raise
            finally:
                asking.cancel()
                await asyncio.wait([asking])
        await pool.wait_joined(0)
        said += len(events)
        if len(events) < EACH:
            break
    assert said > 1000
    async with shoal_worker(pool, name="sound", token=TOKEN) as worker:
        asking = asyncio.create_task(chat(pool))
        await worker.answer("fine")
        await asking
