"""The hub's end of the links to fronts: runs the jobs that they submit."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal import __version__
from shoal.coordinator.answer import Answer, ReaderTooSlow, UnusableOutput
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.hub import Hub, JobBlock
from shoal.domain.answer_assembly import pieces_after, pieces_from, size_of
from shoal.domain.credentials import Key
from shoal.domain.errors import ShoalError, Unauthorized, UnknownModel, release_frames
from shoal.domain.facts import Fact
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job
from shoal.domain.outcome import AnswerPiece
from shoal.domain.vocabulary import TextRoute
from shoal.domain.work import Chat, Completion
from shoal.front import frames
from shoal.front.channel import Channel
from shoal.gateway.http.access import KEYLESS, Access
from shoal.gateway.http.request_record import LEFT_OUT, left_out_header
from shoal.gateway.jobs.job_options import fitting_work
from shoal.gateway.metrics.requests import CountedRequests
from shoal.protocols.shoal.text import route_name, text_ticket
from shoal.transports.clock import Clock

LOOK_EVERY = 0.25  # seconds between looks at the pool's models
BACK_WITHIN = 10.0  # seconds in which a front comes back after its link was lost


class FrontLinks:
    """Serves fronts for one hub.  ``on_counted`` adds what they have counted.

    ``text_secret`` makes the names and the tickets of text routes; empty: workers send
    all text here.
    """

    def __init__(
        self,
        hub: Hub,
        access: Access,
        clock: Clock,
        on_counted: Callable[[CountedRequests], None],
        text_secret: bytes = b"",
    ) -> None:
        self.hub = hub
        self.access = access
        self.clock = clock
        self.on_counted = on_counted
        self.text_secret = text_secret
        self._links: dict[Channel, _Link] = {}
        self._models: tuple[str, ...] = ()
        self._lost: list[_Link] = []  # with clients that may come back
        self.is_handed_over = False  # then it refuses new links
        hub.subscribe(self._on_facts)
        access.keyring.cache.on_change(self._on_keys)

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the pool."""
        return tuple(sorted(self.access.jobs.models))

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept links at a Unix socket for the length of the block."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self.channel, path)
        watching = loop.create_task(self._watch_models())
        try:
            yield
        finally:
            watching.cancel()
            server.close()
            for channel in [*self._links]:
                channel.close()
                self._on_lost(channel)
            for link in self._lost:
                link.end()

    def channel(self) -> Channel:
        """Return this end of a new link."""
        return Channel(frames.OF_FRONTS, self._on_open, self._on_lost)

    def hand_over(self) -> None:
        """Cut all links, and let no client leave: all go on at the next hub."""
        self._lost += self._links.values()
        links, self._links = self._links, {}
        for channel in links:
            channel.close()
        self.is_handed_over = True

    def _on_open(self, channel: Channel) -> Callable[[frames.FrontFrame], None]:
        link = _Link(self, channel)
        if self.is_handed_over:
            channel.close()
        else:
            self._links[channel] = link
        return link.receive

    def _on_lost(self, channel: Channel) -> None:
        """Give the clients of a link time to come back over another.

        What breaks between two nodes breaks no stream: the front may still be there.
        """
        link = self._links.pop(channel, None)
        if link is not None and link.streams:
            self._lost.append(link)
            self.clock.call_at(
                self.clock.now() + BACK_WITHIN, partial(self._give_up, link)
            )

    def _give_up(self, link: "_Link") -> None:
        self._lost.remove(link)
        link.end()

    def _on_keys(self) -> None:
        for channel in self._links:
            channel.send(frames.KeysChanged())

    def _on_facts(self, facts: Sequence[Fact]) -> None:
        self._show_models()

    def _show_models(self) -> None:
        if self._links and (models := self.models) != self._models:
            self._models = models
            for channel in self._links:
                channel.send(frames.Models(models))

    async def _watch_models(self) -> None:
        """Look for models that came without a fact: offers are none."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self._show_models()


class _Link:
    """The link of one front."""

    def __init__(self, links: FrontLinks, channel: Channel) -> None:
        self.hub = links.hub
        self.channel = channel
        self.streams: dict[int, _SentAnswer] = {}  # that have not ended
        self._links = links
        self._access = links.access
        self._opening = frames.LinkOpening(frames.VERSION, "")  # of the front

    def end(self) -> None:
        """Let the clients of all its streams leave."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.leave()

    def receive(self, frame: frames.FrontFrame) -> None:
        """Do what a frame asks for."""
        channel = self.channel
        match frame:
            case frames.Submit():
                self._begin(frame)
            case CountedRequests():
                self._links.on_counted(frame)
            case frames.LinkOpening(version=version):
                self._opening = frame
                channel.send(
                    frames.LinkOpening(
                        *(frames.VERSION, __version__, self.hub.epoch),
                        self._links.models,
                        text_secret=self._links.text_secret,
                    )
                )
                if version != frames.VERSION:
                    channel.close()  # it reads why in the version
            case frames.KeyQuery():
                channel.send(self._found(frame))
            case frames.Leave(stream=number):
                if (leaving := self.streams.pop(number, None)) is not None:
                    leaving.leave()
            case frames.Settled(stream=number, pieces=pieces):
                if (stream := self.streams.get(number)) is not None:
                    stream.on_settled(pieces)
            case frames.Cancel(job_id=job_id, reason=reason):
                self._access.jobs.cancel(job_id, reason)
            case frames.WaitQuery(number=number, job_id=job_id):
                channel.send(frames.Waits(number, self.hub.waits_for(job_id) or ""))

    def _found(self, query: frames.KeyQuery) -> frames.KeyFound:
        try:
            key = self._access.key_of(
                query.digest, query.address, guessable=query.guessable
            )
        except ShoalError:  # the hub refuses it where it is presented
            return frames.KeyFound(query.number)
        return frames.KeyFound(
            *(query.number, key.name, key.scope, key.priority_max, key.expires_at),
            key.hosted_after,
        )

    def _begin(self, submitted: frames.Submit) -> None:
        if submitted.stream not in self.streams:
            stream = self.streams[submitted.stream] = _SentAnswer(self, submitted)
            stream.begin(submitted)

    def run(
        self, submitted: frames.Submit, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[AnswerCursor]:
        """Return what runs a job for the length of a block, see ``JobService``."""
        job = self._fitting(submitted.job)
        if job.terms.left_out:
            headers[LEFT_OUT] = left_out_header(job.terms.left_out)
        return self._access.jobs.run(
            job,
            self._key_of(submitted),
            headers,
            early=True,  # the lease may come with the acceptance
            seen=submitted.seen if submitted.again else None,
        )

    def text_route(self, job_id: JobId, lease: LeaseNumber) -> TextRoute | None:
        """Return how a worker reaches the front with an answer, if it can."""
        secret, opening = self._links.text_secret, self._opening
        if not (secret and opening.text_name and self.channel.open):
            return None
        name = route_name(secret, opening.text_name, job_id, lease)
        return TextRoute(opening.address, name, text_ticket(secret, name))

    def now(self) -> float:
        """Return the time of the hub."""
        return self._links.clock.now()

    def _fitting(self, job: Job) -> Job:
        """Return a job without the tools that no worker calls.

        Raises UnknownModel for an alias: the front, which writes the name of the model
        into the answer, then relays the request.
        """
        if self._access.jobs.with_real_model(job.work, job.owner) is not job.work:
            raise UnknownModel(f"{job.model} is an alias")
        work, left_out = fitting_work(self._access.jobs, job.work, job.owner)
        if not left_out:
            return job
        terms = replace(job.terms, left_out=(*job.terms.left_out, *left_out))
        return replace(job, work=work, terms=terms)

    def _key_of(self, submitted: frames.Submit) -> Key:
        """Return the key of a job.  Raises Unauthorized if it has ended."""
        if submitted.digest:
            access, at = self._access, self._links.clock.wall()
            return access.keyring.by_digest(submitted.digest, at)
        if (key := KEYLESS.get(submitted.job.owner)) is None:
            raise Unauthorized("the job has no key")
        return key


def is_streamed(job: Job) -> bool:
    """Say whether a front gets the answer to a job in pieces, or whole."""
    return isinstance(job.work, Chat | Completion) and not job.terms.whole


class _SentAnswer:
    """Runs one job, and sends what comes of its answer, once a turn of the loop.

    It has a task only if something is awaited before the job is submitted.
    """

    _reader: AnswerCursor  # once the job is submitted
    _answer: Answer

    def __init__(self, link: _Link, submitted: frames.Submit) -> None:
        self._number = submitted.stream
        self._link = link
        self._channel = link.channel
        self._headers: dict[str, str] = {}  # of the response
        self._is_streamed = is_streamed(submitted.job)
        self._block: JobBlock | None = None  # that this ends itself
        self._task: asyncio.Task[None] | None = None  # that ends it, else
        self._ended: asyncio.Future[None] | None = None  # for the task
        self._accepting = False  # whether it is accepted, and that is not sent yet
        self._unsent: list[AnswerPiece] = []
        # Characters of the answer before what comes next.
        self._place = size_of(submitted.seen)
        self._behind = False  # whether what came is still to be sent
        self._routed = False  # whether the worker sends pieces to the front itself
        self._on_settled: Callable[[], None] | None = None

    def begin(self, submitted: frames.Submit) -> None:
        """Run the job."""
        try:
            block = self._link.run(submitted, self._headers)
            if isinstance(block, JobBlock) and (reader := block.begin()) is not None:
                self._block = block
                self._follow(reader)
            else:
                running = self._attend(block)
                self._task = asyncio.get_running_loop().create_task(running)
        except ShoalError as error:
            self._refuse(error)

    async def _attend(self, block: AbstractAsyncContextManager[AnswerCursor]) -> None:
        ended = self._ended = asyncio.get_running_loop().create_future()
        try:
            async with block as reader:
                self._follow(reader)
                await ended
        except ShoalError as error:
            self._refuse(error)

    def _refuse(self, error: ShoalError) -> None:
        """Report that the job was not even submitted."""
        failure = frames.Failure.of(error)
        release_frames(error)
        self._channel.send(frames.Ended(self._number, None, failure, refused=True))
        self._link.streams.pop(self._number, None)

    def _follow(self, reader: AnswerCursor) -> None:
        self._reader, self._answer = reader, reader.answer
        unread = reader.follow(self.on_end, self if self._is_streamed else None)
        self._link.hub.when_accepted(reader.job_id, self._on_accepted)
        if unread:
            self.on_pieces(unread)
        if reader.is_over:
            self.on_end()

    def leave(self) -> None:
        """Let the client leave."""
        if self._task is not None:
            self._task.cancel()
        elif self._block is not None:
            self._block.end()
        self._behind = False
        self._abandon()

    def _abandon(self) -> None:
        """Let nothing wait for the client, which has left, or has all."""
        settled, self._on_settled = self._on_settled, None
        if settled is not None:
            settled()

    def on_settled(self, pieces: Sequence[AnswerPiece]) -> None:
        """Add what the client has beyond the answer, or send what it lacks."""
        if self._on_settled is None:
            return
        answer = self._answer
        if answer.end is not None:
            pass  # both have all
        elif beyond := pieces_after(pieces, answer.pieces):
            with suppress(ReaderTooSlow, UnusableOutput):  # it goes no further
                answer.append(beyond, self._link.now(), copied=True)
        elif lacking := pieces_after(answer.pieces, pieces):
            at = size_of(pieces)
            self._then(frames.Pieces(self._number, at, (*lacking,)))
        self._abandon()

    # For the hub.

    def _on_accepted(self, error: ShoalError | None) -> None:
        if error is None:
            self._accepting = True
            self._channel.before_flush(self._accept)  # with a lease, if it has one then

    def on_end(self) -> None:
        """Send the end, after all that came."""
        outcome, failure = None, None
        try:
            outcome = self._reader.result()
        except ShoalError as error:
            failure = frames.Failure.of(error)
            release_frames(error)
        if self._accepting:
            self._accept()
        if self._behind:
            self._catch_up()
        if self._unsent:
            self._flush()
        answer = self._answer
        self._channel.send(
            frames.Ended(
                *(self._number, outcome, failure, answer.refused),
                *(answer.worker_id, answer.lease, answer.size),
            )
        )
        self._link.streams.pop(self._number, None)
        if self._block is not None:
            self._block.end()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        if self._on_settled is not None:
            self._abandon()

    # As ``RemoteReader``.

    def on_pieces(self, pieces: Sequence[AnswerPiece], *, copied: bool = False) -> bool:
        if self._behind or not self._channel.open:
            return False
        if copied and self._routed:
            if self._unsent:
                self._flush()
            self._place += size_of(pieces)
        elif self._channel.is_congested:
            self._behind = True
            self._flush()
            self._channel.when_writable(self._catch_up)
            return False
        else:
            if not self._unsent:
                self._channel.before_flush(self._flush)
            self._unsent += pieces
        return True

    def on_requeue(self) -> None:
        self._then(frames.Requeued(self._number))

    def on_lease(self, *, routable: bool, resumes: bool) -> TextRoute | None:
        answer, link = self._answer, self._link
        self._on_settled = None  # from now on, what comes is another worker's
        route = link.text_route(answer.job_id, answer.lease) if routable else None
        self._routed = route is not None
        self._place = min(self._place, answer.size)  # it may begin anew
        leased = frames.Leased(
            *(self._number, answer.worker_id, answer.lease, answer.size),
            resumes=resumes,
            route=b"" if route is None else route.name,
        )
        if self._accepting:
            self._accept(leased)
        else:
            self._then(leased)
        return route

    def settle(self, then: Callable[[], None]) -> None:
        if not self._channel.open:
            then()
            return
        self._on_settled = then
        self._then(frames.Settle(self._number))

    def _accept(self, leased: frames.Leased | None = None) -> None:
        """Report that the job is accepted, once."""
        if self._accepting:
            self._accepting = False
            self._channel.send(
                frames.Accepted(
                    self._number, self._answer.job_id, self._headers, leased
                )
            )

    def _then(self, frame: object) -> None:
        self._flush()
        self._channel.send(frame)

    def _catch_up(self) -> None:
        """Send what came while the other end read too slowly."""
        if not self._behind:
            return  # it has ended, or its client has left
        self._behind, answer = False, self._answer
        if rest := pieces_from(answer.pieces, self._place):
            self._unsent += rest
            self._flush()
            answer.was_read = True

    def _flush(self) -> None:
        if self._unsent:
            sent, self._unsent = tuple(self._unsent), []
            self._channel.send(frames.Pieces(self._number, self._place, sent))
            self._place += size_of(sent)
