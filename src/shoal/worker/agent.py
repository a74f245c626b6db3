"""The agent: keeps a worker connected to one coordinator."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain import model_messages as models
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId
from shoal.domain.worker import HANDED_OVER, MachineHealth, Offer, WorkerLoad
from shoal.protocols.seam.context import Dialer, KeepsCalls
from shoal.protocols.seam.session import Admitted, CloseCode
from shoal.transports.clock import Clock, Timer
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import WRONG_CERTIFICATE, LinkClosed, OpenLink
from shoal.worker.calls import FunctionBackend, RunningCalls
from shoal.worker.jobs import AWAY, EngineSlots, FindModel, RunningJobs
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.text_links import TextLinks
from shoal.worker.traces import JobTracer

OnModelMessage: TypeAlias = Callable[
    [models.ModelMessage, models.SendModelMessage, models.WaitUntilWritable], None
]
"""Receives a message about a model to copy, with how to answer it; does not wait."""


def decline_sharing(
    message: models.ModelMessage,
    send: models.SendModelMessage,
    wait_writable: models.WaitUntilWritable,
) -> None:
    """Answer that no model is shared here."""
    if (refused := models.refusal(message)) is not None:
        send(refused)


@dataclass(frozen=True, slots=True)
class MachineProbe:
    """Measurements of this machine."""

    measure: Callable[[], MachineHealth]
    load: Callable[[], WorkerLoad] = WorkerLoad


RETRY_FIRST = 0.5  # seconds before dialling again
RETRY_MAX = 30.0
RETRY_WITH_JOBS = 1.0  # the longest delay while jobs wait, for a while
AWAY_MAX = 60.0  # seconds without a connection until jobs are given up
STABLE_AFTER = 10.0  # seconds of connection after which the retry delay is reset
ADMISSION_DELAY = 0.5  # seconds; some wires admit a worker by not disconnecting it
ADMISSION_TIMEOUT = 10.0  # seconds without an admission until that is reported
REPORT_INTERVAL = 10.0  # seconds between health reports
STOPPED = "stopped here"
LEAVING = "the worker is leaving"
GIVEN_UP = "it was given up while the coordinator was away"

log = logging.getLogger("shoal.worker")


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event in the life of a worker, reported to its operator."""

    kind: str  # joined, lost, leaving (draining), left; before it joined: waiting (for
    # the coordinator), refused (for good); of an engine: unavailable, available; of
    # pairing: paired, unpaired; of the throttle: paused, throttled, resumed; of a model
    # that is loaded on order: loading, failed
    reason: str = ""


class Agent:
    """Keeps a connection to one coordinator, and runs its jobs.

    When the connection is lost, running jobs pause and continue under their ids on the
    next one, if that comes within a minute.  The coordinator cancels those that it has
    meanwhile given to others.

    Args:
        find: finds the model for a job.
        machine: measurements to report; None: no reports.
        share: answers messages about models to copy.
        offers: all offers, on wires with one connection for all models, which confirm
            admission; None on other wires.
        functions: runs function calls; None: they are rejected.
        slots: the slots of all engines, on wires that report whether they are taken.
        throttle: the owner's, which limits the offers and pauses the worker; None:
            full speed.
        on_admitted: called on each admission, on wires that confirm it: before the
            event, since the coordinator may still refuse.
        redials: False: ``run`` ends with the first connection, and returns why that
            ended.
        call_machine: wakes another machine on this network, by its addresses.
        traces: as in ``RunningJobs``.
    """

    def __init__(
        self,
        dialer: Dialer,
        dial: OpenLink,
        find: FindModel,
        clock: Clock,
        random: Random,
        report: Callable[[WorkerEvent], None],
        *,
        machine: MachineProbe | None = None,
        share: OnModelMessage = decline_sharing,
        offers: tuple[Offer, ...] | None = None,
        functions: FunctionBackend | None = None,
        slots: Sequence[EngineSlots] = (),
        throttle: OwnerThrottle | None = None,
        on_admitted: Callable[[], None] = lambda: None,
        redials: bool = True,
        call_machine: Callable[[Sequence[str]], None] = lambda addresses: None,
        traces: JobTracer | None = None,
    ) -> None:
        self._dialer = dialer
        self._dial = dial
        self._clock = clock
        self._random = random
        self._report = report
        self._machine = machine
        self._share = share
        self._offers = offers
        self._throttle = throttle or OwnerThrottle()
        self._on_admitted = on_admitted
        self._redials = redials
        self._call_machine = call_machine
        self._away: Timer | None = None  # while there is no connection
        self._ended_at = -math.inf  # when the last job did
        self._load = WorkerLoad()  # as reported last
        self._slots = slots
        self._lent = 0  # slots of tasks that wait for calls of their own
        self._driver: Driver[words.Command | Admitted, words.Event] | None = None
        self._online = asyncio.Event()
        self._joined_before = False
        self._admitted = False  # whether the coordinator has confirmed admission
        self._waiting = False  # reported once, not for each attempt
        self._leaving = asyncio.Event()
        self._leave_reason = STOPPED
        self._tasks = asyncio.TaskGroup()
        self._jobs = RunningJobs(
            find, self._send, self._on_job_ended, self._tasks, traces
        )
        self._texts = TextLinks(dialer, dial, clock, self._tasks, self._try_send)
        self._calls: RunningCalls | None = None
        if functions is not None:
            self._calls = RunningCalls(
                functions,
                self._try_send,
                self._send,
                self._disconnect_if_done,
                self._tasks,
                clock,
            )

    async def run(self) -> str:
        """Serve until ``leave`` or a final refusal; return the reason."""
        async with self._tasks:
            with self._throttle.observed(self._on_throttle):
                reason = await self._stay_connected()
            self._stop_timing()
            self._jobs.cancel_all()
            self._texts.close()
            if self._calls is not None:
                self._calls.cancel_all()
        if self._joined_before:
            self._report(WorkerEvent("left", reason))
        elif not self._leaving.is_set():
            self._report(WorkerEvent("refused", reason))
        return reason

    @property
    def idle(self) -> bool:
        """Whether no job is running."""
        return not self._running

    @property
    def _running(self) -> int:
        return len(self._jobs) + (0 if self._calls is None else len(self._calls))

    def leave(self, reason: str = STOPPED) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._leave_reason = reason
        if self._driver is not None and words.Draining in self._driver.accepts:
            self._driver.send(words.Draining(LEAVING if reason == STOPPED else reason))
        if self._running:
            jobs = "1 job" if self._running == 1 else f"{self._running} jobs"
            self._report(WorkerEvent("leaving", f"{jobs} to finish first"))
        self._disconnect_if_done()

    def update_offers(self, offers: tuple[Offer, ...]) -> None:
        """Replace the offers at the coordinator."""
        self._offers = offers
        self._send_offers()

    def update_lent_slots(self, lent: int) -> None:
        """Report how many slots are lent beyond those of the offers."""
        self._lent = lent
        if self._calls is not None:
            self._calls.update_lent_slots(lent)
        if not self._waiting:
            self._send_load(self._load)

    def _on_throttle(self) -> None:
        """Report what the owner lends now; hand jobs over if their rules say so."""
        self._send_offers()
        if self._machine is not None and not self._waiting and self._joined_before:
            self._send_load(self._machine.load())
        if self._throttle.pause_reason:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the running jobs back to a coordinator that gives them to others.

        Without a connection it has done so already.
        """
        handed_over = self._jobs.hand_over()
        if self._calls is not None:
            handed_over += self._calls.hand_over()
        reason = f"{HANDED_OVER}{self._throttle.pause_reason}"
        for job_id, lease in handed_over:
            self._try_send(words.Rejected(job_id, lease, reason))

    def _longest_pause(self, lost_at: float) -> float:
        """Return the longest delay: a short one while answers are missed.

        ``lost_at``: when a connection that was stable was lost.  One that always ends
        soon must not be dialled so often for ever.
        """
        now = self._clock.now()
        missed = self._running or now - self._ended_at < AWAY_MAX
        return RETRY_WITH_JOBS if missed and now - lost_at < AWAY_MAX else RETRY_MAX

    def _give_up(self) -> None:
        """Stop the jobs whose coordinator has been away for long."""
        self._jobs.hand_over(AWAY)

    def _stop_timing(self) -> None:
        if self._away is not None:
            self._away.cancel()
            self._away = None

    async def _stay_connected(self) -> str:
        delay, lost_at = RETRY_FIRST, self._clock.now()
        reported = ""  # why a worker that was connected is still not
        while not self._leaving.is_set():
            began = self._clock.now()
            end = await self._connect()
            if self._leaving.is_set():
                # After an abrupt end, the coordinator requeues the open jobs.
                break
            if not self._redials:
                return end.reason
            url = self._dialer.url
            if (final := self._dialer.final_reason(end.code, end.text)) is not None:
                return final
            if end.code == WRONG_CERTIFICATE and self._dialer.url == url:
                return end.reason
            if end.code == CloseCode.MOVED and not end.by_peer:
                continue
            # The query may hold a token; all that is dialled so is encrypted.
            next_url = self._dialer.url.partition("?")[0].removeprefix("noise+")
            next_ = "again" if self._dialer.url == url else next_url
            if self._clock.now() - began > STABLE_AFTER:
                delay, lost_at, reported = RETRY_FIRST, self._clock.now(), ""
            # Jitter: after a restart, a coordinator's workers all reconnect.
            pause = min(delay, self._longest_pause(lost_at)) * self._random.uniform(
                0.5, 1.0
            )
            log.info("disconnected reason=%r retry_s=%.1f", end.reason, pause)
            if not self._waiting:
                self._waiting = True
                kind = "lost" if self._joined_before else "waiting"
                self._report(WorkerEvent(kind, f"{end.reason}; trying {next_}"))
            elif self._joined_before and delay == RETRY_MAX and end.reason != reported:
                # Such as a coordinator that came back with a certificate.
                reported = end.reason
                self._report(WorkerEvent("waiting", reported))
            delay = min(delay * 2, RETRY_MAX)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._leaving.wait()
        return self._leave_reason

    async def _connect(self) -> ConnectionEnd:
        """Open a connection and serve it; return why it ended or failed."""
        dialer = self._dialer
        try:
            async with self._dial(dialer.url, dialer.headers, dialer.message_max) as (
                link,
                headers,
            ):
                if self._leaving.is_set():
                    return ConnectionEnd(self._leave_reason)
                session = dialer.start_session(headers)
                driver = Driver(session, link, self._clock, self._receive)
                self._driver = driver
                self._load = WorkerLoad()
                self._admitted = False
                if self._offers is None:
                    self._call_after(ADMISSION_DELAY, self._on_joined)
                else:
                    self._call_after(ADMISSION_TIMEOUT, self._report_not_admitted)
                # The offers may have changed since the last connection, and the
                # coordinator needs the text sent past it before it resumes the jobs.
                begun = self._clock.call_at(self._clock.now(), self._on_connected)
                self._online.set()
                self._stop_timing()
                try:
                    return await driver.run()
                finally:
                    begun.cancel()
                    self._timer.cancel()
                    self._driver = None
                    self._online.clear()
                    self._away = self._clock.call_at(
                        self._clock.now() + AWAY_MAX, self._give_up
                    )
                    if (
                        self._calls is not None
                        and words.CallsReturned in driver.accepts
                    ):
                        # On wires without calls, tasks continue as jobs do.
                        keeps = isinstance(dialer, KeepsCalls)
                        if keeps and (self._calls or self._calls.was_used):
                            self._ended_at = self._clock.now()  # results are missed
                        self._calls.on_disconnected(keeps=keeps)
        except LinkClosed as error:
            return ConnectionEnd(str(error), error.code, error.text, by_peer=True)

    def _report_not_admitted(self) -> None:
        if not self._waiting:
            self._waiting = True
            reason = "connected, but not admitted yet"
            self._report(WorkerEvent("waiting", reason))

    def _on_joined(self) -> None:
        self._waiting = False
        self._joined_before = True
        if self._calls is not None:
            self._calls.on_connected()
        self._report(WorkerEvent("joined"))
        self._send_health()

    def _on_connected(self) -> None:
        self._texts.end_all()
        self._send_offers()

    def _send_offers(self) -> None:
        driver, offers = self._driver, self._offers
        if (
            driver is not None
            and offers is not None
            and words.OffersChanged in driver.accepts
        ):
            driver.send(words.OffersChanged(self._throttle.limit(offers)))

    def _send_health(self) -> None:
        driver, machine = self._driver, self._machine
        if machine is None or driver is None:
            return
        if words.HealthReported in driver.accepts:
            driver.send(
                words.HealthReported(replace(machine.measure(), jobs=self._running))
            )
        self._send_load(machine.load())
        self._call_after(REPORT_INTERVAL, self._send_health)

    def _send_load(self, load: WorkerLoad) -> None:
        """Report a load of the machine and that of the slots, if it changed."""
        lent, waiting, full = self._occupancy()
        load = replace(load, lent=lent, waiting=waiting, full=full)
        driver = self._driver
        if (
            driver is not None
            and words.LoadChanged in driver.accepts
            and load != self._load
        ):
            self._load = load
            driver.send(words.LoadChanged(load))

    def _occupancy(self) -> tuple[int, int, bool]:
        """Return the lent slots, the jobs that wait for one, and if none is free."""
        waiting, full = 0, bool(self._slots)
        for each in self._slots:
            free = each.size - each.jobs
            waiting += max(0, -free)
            full = full and free <= 0
        return self._lent, waiting, full

    def _send_occupancy(self) -> None:
        load = self._load
        if self._occupancy() != (load.lent, load.waiting, load.full):
            self._send_load(load)

    def _call_after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule the connection's only timer."""
        self._timer: Timer = self._clock.call_at(self._clock.now() + seconds, call)

    def _receive(self, command: words.Command | Admitted) -> None:
        driver = self._driver
        assert driver is not None, "commands come through a driver"
        match command:
            case Admitted(profile):
                if profile is not None:
                    hardware = profile.hardware
                    chip = "" if hardware is None else hardware.chip
                    log.info("admitted by=%r chip=%r", profile.name, chip)
                if not self._admitted:
                    self._admitted = True
                    driver.admit()
                    self._timer.cancel()
                    # The coordinator may still refuse, after storing the admission.
                    self._call_after(ADMISSION_DELAY, self._on_joined)
                    self._on_admitted()
            case words.RunJob(job_id, lease, resumes=resumes) if resumes:
                if not (job_id in self._jobs or self._has_call(job_id)):
                    self._try_send(words.Rejected(job_id, lease, GIVEN_UP))
            case words.RunJob(job_id, lease) if (
                self._throttle.why_paused and words.Rejected in driver.accepts
            ):
                self._try_send(words.Rejected(job_id, lease, self._throttle.why_paused))
            case words.RunJob() if self._calls is not None and self._calls.accepts(
                command.work
            ):
                can_refuse = words.Rejected in driver.accepts
                refusal = self._calls.start(command, can_refuse=can_refuse)
                if refusal is not None:
                    self._try_send(refusal)
            case words.RunJob(job_id, lease):
                can_refuse = words.Rejected in driver.accepts
                reason = self._jobs.start(command, can_refuse=can_refuse)
                if reason is not None:
                    self._try_send(words.Rejected(job_id, lease, reason))
                    return
                if command.text is not None:
                    self._texts.begin(job_id, lease, command.text)
                self._send_occupancy()
            case words.CancelJob(job_id):
                self._jobs.cancel(job_id)
                self._texts.forget(job_id)
                if self._calls is not None:
                    self._calls.cancel(job_id)
            case words.Dismiss(reason):
                log.info("dismissed reason=%r", reason)
            case words.WakeMachine(addresses):
                self._call_machine(addresses)
            case words.CallMessage():
                if self._calls is not None:
                    self._calls.receive(command)
            case models.ModelMessage():
                self._share(command, driver.send, driver.wait_for_bulk_room)

    def _has_call(self, job_id: JobId) -> bool:
        return self._calls is not None and job_id in self._calls

    def _try_send(self, event: words.Event) -> bool:
        """Send an event; return False without a connection."""
        driver = self._driver
        if driver is None:
            return False
        if self._texts.answers:
            with_copies = self._texts.send_copies_before(event)
            if with_copies is None:
                return False
            event = with_copies
        if isinstance(event, words.Rejected) and words.Rejected not in driver.accepts:
            event = words.Failed(
                event.job_id, event.lease, f"not started: {event.reason}"
            )
        if isinstance(event, words.CallMessage) and type(event) not in driver.accepts:
            return False
        sent = driver.send(event)
        if sent and self._texts.answers:
            self._texts.on_sent(event)
        return sent

    def _on_job_ended(self) -> None:
        self._ended_at = self._clock.now()
        self._send_occupancy()
        self._disconnect_if_done()

    def _disconnect_if_done(self) -> None:
        if self._leaving.is_set() and self.idle and self._driver is not None:
            self._driver.disconnect("leaving", CloseCode.NORMAL, "leaving")

    async def _send(self, event: words.Event) -> None:
        """Send an event as soon as a connection has room for it; progress at once."""
        if isinstance(event, words.CallProgress):
            self._try_send(event)  # later, it says nothing
            return
        if self._texts.answers and isinstance(event, words.AnswerChunk):
            link = self._texts.send(event)
            if link is not None:
                await link.wait_for_room()
                return
        while (driver := self._driver) is None or not self._try_send(event):
            self._online.clear()  # there is no connection, or it is ending
            await self._online.wait()
        if isinstance(event, words.Completed) and event.value:  # it may be large
            await driver.wait_for_bulk_room()
        else:
            await driver.wait_for_room()
