"""What a front says to its hub each second, and when the hub says nothing."""

import asyncio
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest

from shoal.domain.credentials import Key, Scope
from shoal.domain.errors import ShuttingDown
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Embedding
from shoal.front import frames
from shoal.front.channel import Channel
from shoal.front.linked_jobs import (
    BEAT_EVERY,
    NO_HUB,
    SILENT_BEATS,
    STREAM_PATIENCE,
    SUBMIT_PATIENCE,
    LinkedJobs,
)
from shoal.gateway.metrics.requests import AnsweredRequest, CountedRequests
from shoal.transports.clock import LoopClock
from simulation import virtual
from simulation.front_link import connect

KEY = Key("", "one", b"digest", "", Scope.USE, 0.0, None)


class Hub:
    """Answers what fronts ask, unless it is stopped; then that waits."""

    def __init__(self) -> None:
        self.stopped = False
        self.jobs = 0
        self.counted: list[CountedRequests] = []
        self._waiting: list[tuple[Channel, Any]] = []

    def channel(self) -> Channel:
        return Channel(
            frames.OF_FRONTS,
            lambda channel: partial(self._on_frame, channel),
            lambda channel: None,
        )

    def go_on(self) -> None:
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        for channel, frame in waiting:
            self._on_frame(channel, frame)

    def _on_frame(self, channel: Channel, frame: Any) -> None:
        if self.stopped:
            self._waiting.append((channel, frame))
            return
        match frame:
            case frames.LinkOpening(version=version):
                channel.send(frames.LinkOpening(version, "a release", 1))
            case frames.KeyQuery(number=number):
                channel.send(frames.KeyFound(number, "one"))
            case frames.WaitQuery(number=number):
                channel.send(frames.Waits(number, ""))
            case frames.Submit(stream=stream, job=job):
                self.jobs += 1
                channel.send(frames.Accepted(stream, job.id, {}))
            case CountedRequests():
                self.counted.append(frame)
            case _:
                pass


async def linked(hub: Hub) -> tuple[LinkedJobs, asyncio.Task[None]]:
    """Return a front's jobs, and the task of its link."""

    async def to_hub(make: Any) -> None:
        connect(make(), hub.channel, copy_context(), copy_context())

    jobs = LinkedJobs(to_hub, LoopClock(), lambda: JobId("j"))
    linking = asyncio.create_task(jobs.run_link())
    await jobs.wait_up()
    return jobs, linking


async def run_job(jobs: LinkedJobs, stop: asyncio.Event) -> None:
    job = Job(JobId("j"), Embedding("m", ("text",)), owner="one")
    async with jobs.run(job, KEY, {}):
        await stop.wait()


def test_new_work_is_refused_while_the_hub_says_nothing() -> None:
    async def script() -> None:
        hub, stop = Hub(), asyncio.Event()
        jobs, linking = await linked(hub)
        open_before = asyncio.create_task(run_job(jobs, stop))
        await asyncio.sleep(10 * BEAT_EVERY)  # silence needs no work

        hub.stopped = True
        began = asyncio.get_running_loop().time()
        with pytest.raises(ShuttingDown, match=NO_HUB):
            await run_job(jobs, stop)
        with pytest.raises(ShuttingDown, match=NO_HUB):
            await jobs.key(b"other", "127.0.0.1", guessable=False)
        waited = asyncio.get_running_loop().time() - began
        assert waited <= 2 * SUBMIT_PATIENCE + BEAT_EVERY
        hub.go_on()
        await asyncio.sleep(BEAT_EVERY)

        assert await jobs.key(b"other", "127.0.0.1", guessable=False) is not None
        assert not open_before.done()
        stop.set()
        await open_before
        await run_job(jobs, stop)
        await cancelled(linking)

    virtual.run(script())


def test_the_hub_is_told_each_second_what_was_counted() -> None:
    async def script() -> None:
        hub = Hub()
        jobs, linking = await linked(hub)
        answered = AnsweredRequest("GET", "/healthz", 200, 0.5)

        await asyncio.sleep(2 * BEAT_EVERY)
        assert not hub.counted
        jobs.add(answered)
        jobs.add(answered)
        await asyncio.sleep(2 * BEAT_EVERY)
        jobs.add(answered)
        await asyncio.sleep(2 * BEAT_EVERY)

        totals = [sum(each.total for each in one.values) for one in hub.counted]
        assert totals == [1.0, 0.5]
        await cancelled(linking)

    virtual.run(script())


def test_what_is_asked_of_a_hub_that_falls_silent_ends() -> None:
    async def script() -> None:
        hub = Hub()
        jobs, linking = await linked(hub)

        hub.stopped = True
        assert await jobs.key(b"other", "127.0.0.1", guessable=False) is None

        await cancelled(linking)

    virtual.run(script())


def test_streams_of_a_hub_that_stays_silent_are_given_up() -> None:
    async def script() -> None:
        hub, stop = Hub(), asyncio.Event()
        jobs, linking = await linked(hub)
        running = asyncio.create_task(first_text(jobs))
        await asyncio.sleep(BEAT_EVERY)

        hub.stopped = True
        await asyncio.sleep((SILENT_BEATS - 1) * BEAT_EVERY + STREAM_PATIENCE)
        assert not running.done()
        await asyncio.sleep(3 * BEAT_EVERY)
        with pytest.raises(ShuttingDown, match=NO_HUB):
            await running

        stop.set()
        await cancelled(linking)

    virtual.run(script())


async def first_text(jobs: LinkedJobs) -> None:
    job = Job(JobId("j"), Embedding("m", ("text",)), owner="one")
    async with jobs.run(job, KEY, {}) as reader:
        await reader.outcome()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
