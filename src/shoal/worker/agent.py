"""Offers one model to one coordinator, for as long as both want."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from shoal.domain.errors import (
    ClientError,
    ContextExceeded,
    JobError,
    Unavailable,
)
from shoal.domain.ids import JobId
from shoal.domain.outcome import Fault
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Draining,
    Event,
    Failed,
    Progress,
    Rejected,
    Reported,
    RunJob,
)
from shoal.domain.worker import Health
from shoal.engines.port import Finished, Runner
from shoal.protocols.session import Dialer
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.driver import Driver, End
from shoal.runtime.link import Link, LinkClosed
from shoal.worker.slots import Slots

RETRY_FIRST = 0.5  # seconds before dialling again
RETRY_MAX = 30.0
STEADY_AFTER = 10.0  # seconds of connection after which retries begin anew
WELCOME_AFTER = 0.5  # seconds without a refusal: some wires have no other welcome
REPORT_EVERY = 10.0  # seconds between words on how the machine is doing
WRONG_CERTIFICATE = 1015  # close code that stands for it (RFC 6455, section 7.4.1)
STOPPED = "stopped here"
LEAVING = "the worker is leaving"
BACKLOG_MAX = 256  # jobs that may wait for a slot; a coordinator has no use for more

log = logging.getLogger("shoal.worker")

Dial: TypeAlias = Callable[
    [str, Mapping[str, str], int],
    AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]],
]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something a person who watches a worker wants to know."""

    event: str  # joined, lost, waiting (it was not reached at all), left; of an engine
    # that it is unavailable, and that it is available again
    reason: str = ""


class Agent:
    """One model's membership of one coordinator.

    When a connection is lost, running jobs pause until the next one, and then go on
    under their old ids; the coordinator may have given them to others by then and
    cancels them.

    Args:
        slots: those of the engine, which other models may use too.
        trouble: told when the engine did not take a job.
        measure: how the machine is doing; None: nothing is said of it.
    """

    def __init__(
        self,
        dialer: Dialer,
        dial: Dial,
        engine: Runner,
        clock: Clock,
        random: Random,
        slots: Slots,
        report: Callable[[Happening], None],
        trouble: Callable[[], None] = lambda: None,
        measure: Callable[[], Health] | None = None,
    ) -> None:
        self._dialer = dialer
        self._dial = dial
        self._engine = engine
        self._clock = clock
        self._random = random
        self._report = report
        self._trouble = trouble
        self._measure = measure
        self._slots = slots
        self._jobs: dict[JobId, asyncio.Task[None]] = {}
        self._driver: Driver[Command, Event] | None = None
        self._online = asyncio.Event()
        self._was_there = False
        self._waiting = False  # which is reported once, not for each try
        self._leaving = asyncio.Event()
        self._why_left = STOPPED
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> str:
        """Serve until told to leave or while there is a point; return why it ended."""
        async with self._tasks:
            reason = await self._stay()
            for job in self._jobs.values():
                job.cancel()
        self._report(Happening("left", reason))
        return reason

    @property
    def idle(self) -> bool:
        """Whether it has no job."""
        return not self._jobs

    def leave(self, reason: str = STOPPED) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._why_left = reason
        if self._driver is not None and Draining in self._driver.accepts:
            self._driver.issue(Draining(LEAVING if reason == STOPPED else reason))
        self._hang_up_if_done()

    async def _stay(self) -> str:
        delay = RETRY_FIRST
        while not self._leaving.is_set():
            began = self._clock.now()
            end = await self._connect()
            if self._leaving.is_set():
                # If it was cut off, what it still ran is given to others.
                break
            if end.code == WRONG_CERTIFICATE:
                return end.reason
            if (final := self._dialer.final(end.code, end.text)) is not None:
                return final
            if self._clock.now() - began > STEADY_AFTER:
                delay = RETRY_FIRST
            # Spread out, for a coordinator that restarts sees all its workers at once.
            pause = delay * self._random.uniform(0.5, 1.0)
            log.info("disconnected reason=%r retry_s=%.1f", end.reason, pause)
            if not self._waiting:
                self._waiting = True
                event = "lost" if self._was_there else "waiting"
                self._report(Happening(event, f"{end.reason}; trying again"))
            delay = min(delay * 2, RETRY_MAX)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._leaving.wait()
        return self._why_left

    async def _connect(self) -> End:
        """Open a connection and serve it; return why it ended or did not come about."""
        dialer = self._dialer
        try:
            async with self._dial(dialer.url, dialer.headers, dialer.message_max) as (
                link,
                headers,
            ):
                if self._leaving.is_set():
                    return End(self._why_left)
                session = dialer.connected(headers)
                driver = Driver(session, link, self._clock, self._told)
                self._driver = driver
                self._call_after(WELCOME_AFTER, self._joined)
                self._online.set()
                try:
                    return await driver.run()
                finally:
                    self._timer.cancel()
                    self._driver = None
                    self._online.clear()
        except LinkClosed as closed:
            return End(str(closed), closed.code, closed.text, by_peer=True)

    def _joined(self) -> None:
        self._waiting = False
        self._was_there = True
        self._report(Happening("joined"))
        self._tell_health()

    def _tell_health(self) -> None:
        driver = self._driver
        if self._measure is None or driver is None or Reported not in driver.accepts:
            return
        driver.issue(Reported(replace(self._measure(), jobs=len(self._jobs))))
        self._call_after(REPORT_EVERY, self._tell_health)

    def _call_after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call for as long as there is this connection; nothing else is called then."""
        self._timer: Timer = self._clock.call_at(self._clock.now() + seconds, call)

    def _told(self, command: Command) -> None:
        match command:
            case RunJob(job_id=job_id):
                if (reason := self._why_not()) is not None:
                    self._issue(Rejected(job_id, command.lease, reason))
                    return
                task = self._tasks.create_task(self._run(command))
                self._jobs[job_id] = task
                self._slots.jobs += 1
                task.add_done_callback(lambda task: self._ended(job_id, task))
            case CancelJob(job_id=job_id):
                if job_id in self._jobs:
                    self._jobs[job_id].cancel()
            case Dismiss(reason):
                log.info("dismissed reason=%r", reason)
            case ModelWord():
                pass

    def _why_not(self) -> str | None:
        """Say why a job cannot be taken, or None if it can.

        Where the wire cannot say so, jobs wait for other models' jobs.
        """
        if len(self._jobs) >= self._slots.size + BACKLOG_MAX:
            return f"{BACKLOG_MAX} jobs are waiting already"
        assert self._driver is not None, "commands come through a driver"
        if Rejected in self._driver.accepts and self._slots.kept_busy(len(self._jobs)):
            return f"all {self._slots.size} slots of the engine are busy"
        return None

    def _issue(self, event: Event) -> bool:
        """Say ``event`` in the words of the wire; return whether it was there."""
        driver = self._driver
        if driver is None:
            return False
        if isinstance(event, Rejected) and Rejected not in driver.accepts:
            event = Failed(event.job_id, event.lease, f"not started: {event.reason}")
        return driver.issue(event)

    def _ended(self, job_id: JobId, task: asyncio.Task[None]) -> None:
        self._slots.jobs -= 1
        if self._jobs.get(job_id) is task:  # else: cancelled, and already given anew
            del self._jobs[job_id]
        self._hang_up_if_done()

    def _hang_up_if_done(self) -> None:
        if self._leaving.is_set() and not self._jobs and self._driver is not None:
            self._driver.hang_up("leaving", 1000, "leaving")

    async def _run(self, command: RunJob) -> None:
        async with self._slots.running:
            await self._say(await self._answer(command))

    async def _answer(self, command: RunJob) -> Event:
        """Say the answer as it comes; return how it ended."""
        job_id, lease = command.job_id, command.lease
        answer = self._engine.run(command.work, command.continues)
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Finished):
                        return Completed(
                            job_id, lease, piece.finish_reason, piece.usage
                        )
                    await self._say(Progress(job_id, lease, [piece]))
            return Failed(job_id, lease, "the engine stopped without a word")
        except Unavailable as error:
            self._trouble()
            return Rejected(job_id, lease, str(error))
        except ContextExceeded as error:
            return Failed(job_id, lease, str(error), Fault.CONTEXT)
        except ClientError as error:
            return Failed(job_id, lease, str(error), Fault.REQUEST)
        except JobError as error:
            return Failed(job_id, lease, str(error))
        except Exception as error:
            # An engine is somebody else's program: its bug fails the job it was
            # working on, and no other.
            log.exception("engine failed job=%s", job_id)
            return Failed(job_id, lease, f"the engine failed: {type(error).__name__}")

    async def _say(self, event: Event) -> None:
        """Say ``event`` as soon as there is a connection with room for it."""
        while True:
            await self._online.wait()
            driver = self._driver
            if driver is not None and self._issue(event):
                await driver.room()
                return
            self._online.clear()  # it has ended and is being taken down
