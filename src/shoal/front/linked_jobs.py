"""The jobs of a hub in another process.

A front keeps the text of each open stream.  When the hub dies, or another takes its
place, the stream is submitted to the next one with that text, and goes on.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from shoal import __version__
from shoal.coordinator.answer import (
    OTHER_ANSWER,
    Answer,
    ReaderTooSlow,
    UnusableOutput,
)
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.answer_assembly import (
    is_thought,
    pieces_after,
    pieces_from,
    replay,
    size_of,
)
from shoal.domain.credentials import Key
from shoal.domain.errors import Fenced, JobError, ShoalError, ShuttingDown, WorkerLost
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.vocabulary import TextSent
from shoal.domain.work import Work
from shoal.front import frames
from shoal.front.channel import Channel
from shoal.front.hub_links import is_streamed
from shoal.gateway.http.job_quotas import Pay
from shoal.gateway.metrics.requests import AnsweredRequest, ModelLabels, RequestMetrics
from shoal.transports.clock import Clock, Timer

RETRY_EVERY = 0.05  # seconds between attempts to reach the hub
# Seconds between questions to the hub, which show that it runs, and what was counted.
BEAT_EVERY = 1.0
SILENT_BEATS = 3  # without a frame, after which it counts as gone
LEAVE_EVERY = 0.1  # seconds between looks whether a front may leave
LEAVE_PATIENCE = 3.0  # seconds without a hub, until it leaves
SUBMIT_PATIENCE = 5.0  # seconds that new work waits for the hub
STREAM_PATIENCE = 30.0  # seconds that open streams do
# Of what waits for pieces before it; the hub has all of it.
EARLY_MAX, EARLY_MESSAGES = 1 << 20, 256  # characters
MISSING_PATIENCE = 1.0  # seconds that pieces may take longer than those after them
KEYS_MAX = 10_000  # keys that are known, each from one address
NO_HUB = (
    "the coordinator is restarting, and takes too long: try again shortly. No work is "
    "accepted meanwhile, because none would be recorded"
)
OTHER_TEXT = (
    "the worker reported another text than it had sent here: repeat the request"
)

Connect: TypeAlias = Callable[[Callable[[], Channel]], Awaitable[object]]
"""Opens a connection to the hub, with the protocol that the function makes.

Raises OSError.
"""

log = logging.getLogger("shoal.front")


class OnlyAtHub(Exception):
    """The request has to be answered where the hub is."""


class Elsewhere:
    """Stands for a part of the coordinator that is in the hub's process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise OnlyAtHub(name)


def unix_connection(path: Path) -> Connect:
    """Return what connects to the hub at a Unix socket."""

    async def connect(make: Callable[[], Channel]) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(make, str(path))

    return connect


class OtherVersion(Exception):
    """The hub speaks another version: this front has to be started again."""


class _Stream:
    """The answer to one job, as far as it has come.

    Pieces come from the hub, or from the worker itself along a route, and each says
    what came before it; those that come too early wait in ``early``.
    """

    def __init__(self, number: int, job: Job, key: Key) -> None:
        self.number = number
        self.former: int | None = None  # its number until it was submitted again
        self.route = b""  # the name of the worker's way to it
        self.base = 0  # characters before what the present lease writes
        self.routed = False  # whether anything came past the hub
        self.ended: frames.Ended | None = None  # before all of it has come
        self.early: list[tuple[int, Sequence[AnswerPiece]]] = []
        self.early_size = 0  # characters
        self.missing: Timer | None = None  # while pieces are
        self.job = job
        self.digest = key.digest
        self.submitted = False  # to any hub
        self.accepted: asyncio.Future[frames.Accepted] = (
            asyncio.get_running_loop().create_future()
        )
        self.answer: Answer | None = None
        self.reader: AnswerCursor | None = None

    def submission(self) -> frames.Submit:
        """Return what submits the job, for the first time or to the next hub."""
        seen: tuple[AnswerPiece, ...] = ()
        if self.answer is not None and is_streamed(self.job):
            seen = tuple(self.answer.pieces)
        again, self.submitted = self.submitted, True
        return frames.Submit(self.number, self.digest, self.job, again, seen)

    def accept(self, accepted: frames.Accepted) -> None:
        if self.answer is None and not self.accepted.done():
            self.answer = Answer(accepted.job_id)
            self.reader = self.answer.open_reader()
            self.accepted.set_result(accepted)

    def add(self, at: int, pieces: Sequence[AnswerPiece], now: float) -> bool:
        """Add pieces that follow ``at`` characters; return whether nothing is missing.

        What is here already is left out.
        """
        assert self.answer is not None, "pieces come after it is accepted"
        if at > self.answer.size and (
            self.early_size >= EARLY_MAX or len(self.early) >= EARLY_MESSAGES
        ):
            return False
        self.early.append((at, pieces))
        self.early.sort(key=itemgetter(0))
        self.early_size += size_of(pieces)
        while self.early and self.early[0][0] <= self.answer.size:
            at, pieces = self.early.pop(0)
            self.early_size -= size_of(pieces)
            if rest := pieces_from(pieces, self.answer.size - at):
                with suppress(ReaderTooSlow, UnusableOutput):  # its reader has the end
                    self.answer.append(rest, now)
        return not self.early

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come, and its end."""
        ended, answer = self.ended, self.answer
        return ended is not None and answer is not None and answer.size >= ended.size

    def fail(self, error: ShoalError) -> None:
        """End with an error."""
        if self.answer is not None:
            self.answer.finish(error)
        elif not self.accepted.done():
            self.accepted.set_exception(error)


class LinkedJobs:
    """The jobs and keys of the hub, as ``JobService`` and for ``FrontAccess``."""

    def __init__(
        self,
        connect: Connect,
        clock: Clock,
        new_id: Callable[[], JobId],
        text_name: bytes = b"",
        address: str = "",
    ) -> None:
        self.new_id = new_id
        self.text_secret = b""  # see ``LinkOpening``
        self.models: Collection[str] = ()
        self.aliases: Collection[str] = ()  # the hub answers requests for them
        self.active = 0  # requests, see ``RequestCounter``
        self.upgraded = 0  # of these, relayed connections without an end
        self.epoch = 0
        self._connect = connect
        self._clock = clock
        self._text_name = text_name
        self._address = address
        self._channel: Channel | None = None  # None: there is no hub
        self._giving_up: Timer | None = None
        self._refusal: OtherVersion | None = None
        self._stopping = False
        self._silent_beats = 0
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._routes: dict[bytes, _Stream] = {}  # by their names
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._keys: OrderedDict[tuple[bytes, str], Key] = OrderedDict()
        self._keys_version = 0
        labels = ModelLabels()
        self._counted = RequestMetrics(lambda model: labels.label(model, self.models))

    async def run_link(self) -> None:
        """Keep a link to the hub, after ``stop`` till it ends.  Raises OtherVersion."""
        self._await_hub()
        while True:
            self._lost.clear()
            try:
                await self._connect(self._make_channel)
                while not await self._is_lost():
                    self._beat()
            except OSError:
                pass
            if self._refusal is not None:
                raise self._refusal
            if self._stopping:
                return
            await asyncio.sleep(RETRY_EVERY)

    def stop(self) -> None:
        """Expect the end of the hub, which lets open streams end before."""
        self._stopping = True

    async def leave(self) -> None:
        """Leave once all requests have ended, or when there is no hub any more.

        Until then, another node may have it.
        """
        looks = 0  # in a row without a hub
        while self.active > self.upgraded and looks * LEAVE_EVERY < LEAVE_PATIENCE:
            await asyncio.sleep(LEAVE_EVERY)
            looks = 0 if self._up.is_set() else looks + 1
        self._stopping = True
        self._close()

    def close(self, error: ShoalError) -> None:
        """End all open streams with an error."""
        for stream in [*self._streams.values()]:
            stream.fail(error)
        self._close()

    def _close(self) -> None:
        if self._channel is not None:
            self._report()
            self._channel.close()

    def _report(self) -> None:
        """Send the hub what was counted."""
        if self._channel is not None and (counted := self._counted.take()).values:
            self._channel.send(counted)

    async def wait_up(self) -> None:
        """Wait until there is a hub.  Raises ShuttingDown if that takes too long."""
        if self._up.is_set():
            return
        try:
            async with asyncio.timeout(SUBMIT_PATIENCE):
                await self._up.wait()
        except TimeoutError:
            raise ShuttingDown(NO_HUB) from None

    # As ``RequestCounter``.

    def add(self, answered: AnsweredRequest) -> None:
        """Count a request that this front has answered; the hub hears of it later."""
        self._counted.add(answered)

    # Keys.

    def known_key(self, digest: bytes, address: str) -> Key | None:
        """Return a valid key that the client at an address has used before."""
        if (key := self._keys.get((digest, address))) is None:
            return None
        if key.expires_at is not None and self._clock.wall() >= key.expires_at:
            return None
        return key

    async def key(self, digest: bytes, address: str, *, guessable: bool) -> Key | None:
        """Return the valid key whose secret the client at an address has sent.

        None: the hub has to refuse it, and counts it as a guess.

        Raises ShuttingDown if there is no hub.
        """
        if (known := self.known_key(digest, address)) is not None:
            return known
        await self.wait_up()  # a request that is relayed would end with its hub
        version = self._keys_version
        found = await self._ask(
            lambda number: frames.KeyQuery(number, digest, address, guessable)
        )
        if found is None or not found.name:
            return None
        key = Key(
            *("", found.name, digest, "", found.scope, 0.0, found.expires_at),
            priority_max=found.priority_max,
            hosted_after=found.hosted_after,
        )
        if version == self._keys_version:
            self._keys[digest, address] = key
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)
        return key

    def _forget_keys(self) -> None:
        self._keys_version += 1
        self._keys.clear()

    # As ``JobService``.

    def with_real_model(self, work: Work, owner: str, *, hosted: bool = False) -> Work:
        """Return the work as it is: the hub refuses an alias, and gets the request."""
        return work

    def without_tools(self, work: Work, owner: str) -> Work:
        """Return the work as it is: the hub leaves its tools out."""
        return work

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        key: Key,
        headers: dict[str, str],
        pay: Pay | None = None,
        *,
        early: bool = False,
        seen: Sequence[AnswerPiece] | None = None,
    ) -> AsyncIterator[AnswerCursor]:
        """Run ``job`` for the length of the block, which begins when it is accepted."""
        assert pay is None, "payments are collected where the hub is"
        assert seen is None, "clients come back to hubs, not to fronts"
        await self.wait_up()
        stream = _Stream(next(self._numbers), job, key)
        self._streams[stream.number] = stream
        try:
            self._submit(stream)
            headers.update((await stream.accepted).headers)
            assert stream.reader is not None, "it is accepted"
            yield stream.reader
        finally:
            self._leave(stream)

    async def wait_accepted(self, job_id: JobId) -> None:
        """Return: a block of ``run`` begins only then."""

    async def waits_for(self, job_id: JobId) -> str | None:
        waits = await self._ask(lambda number: frames.WaitQuery(number, job_id))
        return None if waits is None else waits.what or None

    def cancel(self, job_id: JobId, reason: str) -> bool:
        if self._channel is not None:
            self._channel.send(frames.Cancel(job_id, reason))
        return True

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerCursor | None]:
        raise OnlyAtHub

    def is_open(self, job_id: JobId) -> bool:
        raise OnlyAtHub

    async def cancel_now(self, job_id: JobId, reason: str) -> None:
        raise OnlyAtHub

    # The link.

    def _make_channel(self) -> Channel:
        return Channel(frames.OF_HUBS, self._on_open, self._on_lost)

    def _on_open(self, channel: Channel) -> Callable[[frames.HubFrame], None]:
        channel.send(
            frames.LinkOpening(
                *(frames.VERSION, __version__, self.epoch),
                text_name=self._text_name,
                address=self._address,
            )
        )
        return partial(self._on_frame, channel)

    def _on_lost(self, channel: Channel) -> None:
        self._lost.set()
        if channel is not self._channel:
            return
        self._channel = None
        self._up.clear()
        self._forget_keys()
        self._end_queries()
        for stream in [*self._streams.values()]:
            if stream.ended is not None:
                self._end(stream, stream.ended)
        self._await_hub()
        # A stop ends the hub, too, and is known here a moment later, perhaps.
        self._clock.call_at(self._clock.now() + RETRY_EVERY, self._log_loss)

    async def _is_lost(self) -> bool:
        """Wait a while; return whether the link is lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_EVERY):
                await self._lost.wait()
        return self._lost.is_set()

    def _beat(self) -> None:
        """Ask the hub something, and refuse new work while it does not answer.

        The link stays: a hub that was stopped goes on with what it has.
        """
        if self._channel is None:
            return
        self._silent_beats += 1
        if self._silent_beats == SILENT_BEATS:
            log.warning("the hub is silent streams=%d", len(self._streams))
            self._up.clear()
            self._end_queries()
            self._await_hub()
        if self._silent_beats * BEAT_EVERY >= SUBMIT_PATIENCE:
            for stream in [*self._streams.values()]:
                if stream.answer is None:
                    stream.fail(ShuttingDown(NO_HUB))
        self._channel.send(frames.WaitQuery(next(self._numbers), JobId("")))
        self._report()

    def _on_heard(self) -> None:
        """Note that the hub runs."""
        if self._silent_beats >= SILENT_BEATS:
            self._stay()
            self._up.set()
        self._silent_beats = 0

    def _stay(self) -> None:
        """Give no streams up."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _log_loss(self) -> None:
        if not self._stopping:
            log.warning("lost the hub streams=%d", len(self._streams))

    def _await_hub(self) -> None:
        """Give open streams up unless a hub is there in time."""
        if self._giving_up is None:
            soonest = self._clock.now() + STREAM_PATIENCE
            self._giving_up = self._clock.call_at(soonest, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        for stream in [*self._streams.values()]:
            stream.fail(ShuttingDown(NO_HUB))

    def _submit(self, stream: _Stream) -> None:
        if self._channel is not None:
            self._close_route(stream)  # the hub goes on after what is here now
            self._channel.send(stream.submission())

    def _submit_again(self, stream: _Stream) -> None:
        """Submit a stream of which pieces were lost on their way."""
        stream.missing = None
        if stream.ended is not None:
            self._end(stream, stream.ended)
            return
        if self._channel is None:
            return  # it is submitted to the next hub
        log.info("pieces of an answer are missing job=%s", stream.job.id)
        stream.former, stream.number = stream.number, next(self._numbers)
        del self._streams[stream.former]
        self._streams[stream.number] = stream
        self._submit(stream)

    def _close_route(self, stream: _Stream) -> None:
        """Take no more of what a worker sends past the hub."""
        self._routes.pop(stream.route, None)
        stream.route = b""
        stream.early.clear()
        stream.early_size = 0
        if stream.missing is not None:
            stream.missing.cancel()
            stream.missing = None

    def _leave(self, stream: _Stream) -> None:
        self._close_route(stream)
        if stream.answer is not None and stream.reader is not None:
            stream.answer.remove_reader(stream.reader)
        if self._streams.pop(stream.number, None) is not None and self._channel:
            for number in filter(None, (stream.number, stream.former)):
                self._channel.send(frames.Leave(number))

    async def _ask(self, query: Callable[[int], object]) -> Any:
        """Return the answer to a query; None: there is no hub."""
        if self._channel is None:
            return None
        number = next(self._numbers)
        answered = asyncio.get_running_loop().create_future()
        self._queries[number] = answered
        try:
            self._channel.send(query(number))
            return await answered
        finally:
            self._queries.pop(number, None)

    def _end_queries(self) -> None:
        """Leave queries without an answer."""
        queries, self._queries = self._queries, {}
        for waiting in queries.values():
            if not waiting.done():
                waiting.set_result(None)

    def _on_frame(self, channel: Channel, frame: frames.HubFrame) -> None:
        if self._silent_beats:
            self._on_heard()
        match frame:
            case frames.LinkOpening():
                self._welcome(channel, frame)
            case frames.Models(models=models):
                self.models = models
            case frames.KeysChanged():
                self._forget_keys()
            case frames.KeyFound(number=number) | frames.Waits(number=number):
                waiting = self._queries.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            case (
                frames.Accepted()
                | frames.Leased()
                | frames.Pieces()
                | frames.Settle()
                | frames.Requeued()
                | frames.Ended()
            ):
                if (stream := self._streams.get(frame.stream)) is not None:
                    self._receive(stream, frame)
                elif isinstance(frame, frames.Settle):
                    channel.send(frames.Settled(frame.stream, ()))

    def _welcome(self, channel: Channel, opening: frames.LinkOpening) -> None:
        if opening.version != frames.VERSION:
            self._refusal = OtherVersion(
                f"the coordinator is of release {opening.release}, and this front of "
                f"{__version__}"
            )
            channel.close()
            return
        self._channel = channel
        self._silent_beats = 0
        self._stay()
        self.epoch, self.models = opening.epoch, opening.models
        self.text_secret = opening.text_secret
        for stream in self._streams.values():
            self._submit(stream)
        self._up.set()

    def _receive(
        self,
        stream: _Stream,
        frame: frames.Accepted
        | frames.Leased
        | frames.Pieces
        | frames.Settle
        | frames.Requeued
        | frames.Ended,
    ) -> None:
        answer = stream.answer
        match frame:
            case frames.Accepted():
                stream.accept(frame)
                if (former := stream.former) is not None and self._channel is not None:
                    stream.former = None
                    self._channel.send(frames.Leave(former))
                if frame.leased is not None and stream.answer is not None:
                    self._on_lease(stream, stream.answer, frame.leased)
            case frames.Leased() if answer is not None:
                self._on_lease(stream, answer, frame)
            case frames.Pieces(at=at, pieces=pieces) if answer is not None:
                self._receive_pieces(stream, at, pieces)
            case frames.Settle() if answer is not None:
                self._close_route(stream)
                if self._channel is not None:
                    had = tuple(answer.pieces)
                    self._channel.send(frames.Settled(stream.number, had))
            case frames.Requeued() if answer is not None:
                self._close_route(stream)
                answer.requeue()
            case frames.Ended(failure=failure):
                if failure is not None and failure.kind == Fenced.__name__:
                    return  # another hub has taken over, and the stream goes on there
                stream.ended = frame
                self._end_if_whole(stream)
            case _:
                pass  # not before it is accepted

    def _on_lease(self, stream: _Stream, answer: Answer, leased: frames.Leased) -> None:
        self._close_route(stream)
        answer.worker_id, answer.lease = leased.worker_id, leased.lease
        stream.base = leased.size
        if answer.size > leased.size and not leased.resumes:
            # Of what the lost worker sent past the hub, which it could not ask for.
            stream.fail(WorkerLost(OTHER_ANSWER))
        elif leased.route:
            stream.route = leased.route
            self._routes[leased.route] = stream

    def receive_text(self, sent: TextSent) -> None:
        """Take pieces that a worker sent past the hub."""
        if (stream := self._routes.get(sent.name)) is not None:
            stream.routed = True
            self._receive_pieces(stream, stream.base + sent.at, sent.pieces)

    def _receive_pieces(
        self, stream: _Stream, at: int, pieces: Sequence[AnswerPiece]
    ) -> None:
        now = self._clock.now()
        if not stream.add(at, pieces, now) and stream.missing is None:
            self._expect_missing(stream)
        elif stream.missing is not None and not stream.early and stream.ended is None:
            stream.missing.cancel()
            stream.missing = None
        if stream.ended is not None:
            self._end_if_whole(stream)

    def _expect_missing(self, stream: _Stream) -> None:
        """Get what is missing from the hub, unless it comes soon."""
        latest = self._clock.now() + MISSING_PATIENCE
        again = partial(self._submit_again, stream)
        stream.missing = self._clock.call_at(latest, again)

    def _end_if_whole(self, stream: _Stream) -> None:
        """End a stream, once all of it has come that belongs to its outcome."""
        ended = stream.ended
        assert ended is not None, "it has ended"
        is_outcome = ended.failure is None and is_streamed(stream.job)
        if is_outcome and stream.answer is not None and not stream.is_whole:
            if stream.missing is None:
                self._expect_missing(stream)
            return
        self._end(stream, ended)

    def _end(self, stream: _Stream, ended: frames.Ended) -> None:
        """End a stream, with what its outcome has beyond the pieces that came."""
        self._close_route(stream)
        self._streams.pop(stream.number, None)
        failure = ended.failure
        end = ended.outcome if failure is None else failure.error()
        assert end is not None, "a stream ends with either"
        answer = stream.answer
        if answer is None:
            assert isinstance(end, ShoalError), "it was not accepted"
            stream.fail(end)
            return
        if ended.worker_id is not None:
            answer.worker_id, answer.lease = ended.worker_id, ended.lease
        answer.refused = ended.refused
        if isinstance(end, Outcome) and is_streamed(stream.job) and not stream.is_whole:
            rest = pieces_after(replay(end), answer.pieces)
            if rest is None:
                end = WorkerLost(OTHER_ANSWER)
            else:
                stream.add(answer.size, rest, self._clock.now())
        if isinstance(end, Outcome) and stream.routed and not _is_of(end, answer):
            end = JobError(OTHER_TEXT)
        answer.finish(end)


def _is_of(outcome: Outcome, answer: Answer) -> bool:
    """Return whether an outcome has the text that came, as far as that is all text."""
    pieces = answer.pieces
    if not all(isinstance(each, str) or is_thought(each) for each in pieces):
        return True
    return answer.text == outcome.text
