"""The hub's end of the links to fronts: runs the jobs that they submit."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal import __version__
from shoal.coordinator.answer import Answer, ReaderTooSlow, UnusableOutput
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.hub import Hub
from shoal.domain.answer_assembly import pieces_after, size_of
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
from shoal.gateway.metrics.requests import AnsweredRequest
from shoal.protocols.shoal.text import route_name, text_ticket
from shoal.transports.clock import Clock


class FrontLinks:
    """Serves fronts for one hub.  ``on_answered`` counts what they have answered.

    ``text_secret`` makes the names and the tickets of text routes; empty: workers send
    all text here.
    """

    def __init__(
        self,
        hub: Hub,
        access: Access,
        clock: Clock,
        on_answered: Callable[[AnsweredRequest], None],
        text_secret: bytes = b"",
    ) -> None:
        self.hub = hub
        self.access = access
        self.clock = clock
        self.on_answered = on_answered
        self.text_secret = text_secret
        self._links: dict[Channel, _Link] = {}
        self._models: tuple[str, ...] = ()
        self._handed_over: list[_Link] = []
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
            self._cut()
            for link in self._handed_over:
                link.end()

    def channel(self) -> Channel:
        """Return this end of a new link."""
        return Channel(frames.OF_FRONTS, self._on_open, self._on_frame, self._on_lost)

    def hand_over(self) -> None:
        """Cut all links, and let no client leave: all go on at the next hub."""
        self._handed_over += self._links.values()
        links, self._links = self._links, {}
        for channel in links:
            channel.close()
        self.is_handed_over = True

    def _cut(self) -> None:
        for channel in [*self._links]:
            channel.close()
            self._on_lost(channel)

    def _on_open(self, channel: Channel) -> None:
        if self.is_handed_over:
            channel.close()
            return
        self._links[channel] = _Link(self, channel)

    def _on_lost(self, channel: Channel) -> None:
        if (link := self._links.pop(channel, None)) is not None:
            link.end()

    def _on_frame(self, channel: Channel, frame: frames.FrontFrame) -> None:
        if (link := self._links.get(channel)) is not None:
            link.receive(frame)

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


LOOK_EVERY = 0.25  # seconds between looks at the pool's models


class _Link:
    """The link of one front."""

    def __init__(self, links: FrontLinks, channel: Channel) -> None:
        self._links = links
        self._hub = links.hub
        self._access = links.access
        self.channel = channel
        self._opening = frames.LinkOpening(frames.VERSION, "")  # of the front
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._readers: dict[int, _StreamReader] = {}  # of those that come in pieces

    def end(self) -> None:
        """Let the clients of all its streams leave."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cancel()

    def receive(self, frame: frames.FrontFrame) -> None:
        """Do what a frame asks for."""
        channel = self.channel
        match frame:
            case frames.LinkOpening(version=version):
                self._opening = frame
                channel.send(
                    frames.LinkOpening(
                        *(frames.VERSION, __version__, self._hub.epoch),
                        self._links.models,
                        text_secret=self._links.text_secret,
                    )
                )
                if version != frames.VERSION:
                    channel.close()  # it reads why in the version
            case frames.KeyQuery():
                channel.send(self._found(frame))
            case frames.Submit():
                self._begin(frame)
            case frames.Leave(stream=number):
                if (stream := self._streams.pop(number, None)) is not None:
                    stream.cancel()
            case frames.Settled(stream=number, pieces=pieces):
                if (reading := self._readers.get(number)) is not None:
                    reading.on_settled(pieces)
            case frames.Cancel(job_id=job_id, reason=reason):
                self._access.jobs.cancel(job_id, reason)
            case frames.WaitQuery(number=number, job_id=job_id):
                channel.send(frames.Waits(number, self._hub.waits_for(job_id) or ""))
            case AnsweredRequest():
                self._links.on_answered(frame)

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
        number = submitted.stream
        if number in self._streams:
            return
        running = asyncio.get_running_loop().create_task(self._run(submitted))
        self._streams[number] = running
        running.add_done_callback(lambda _: self._drop(number, running))

    def _drop(self, number: int, running: asyncio.Task[None]) -> None:
        if (reading := self._readers.pop(number, None)) is not None:
            reading.abandon()
        if self._streams.get(number) is running:
            del self._streams[number]

    async def _run(self, submitted: frames.Submit) -> None:
        """Run a job, and send its answer until it ends or its client leaves."""
        number, channel = submitted.stream, self.channel
        reader: AnswerCursor | None = None
        try:
            job = self._fitting(submitted.job)
            headers: dict[str, str] = {}
            if job.terms.left_out:
                headers[LEFT_OUT] = left_out_header(job.terms.left_out)
            async with self._access.jobs.run(
                job,
                self._key_of(submitted),
                headers,
                early=True,  # the lease may come with the acceptance
                seen=submitted.seen if submitted.again else None,
            ) as reader:
                accepted = frames.Accepted(number, reader.job_id, headers)
                stream = _StreamReader(accepted, self, reader, submitted.seen)
                if is_streamed(job):
                    self._readers[number] = reader.remote = stream
                await self._access.jobs.wait_accepted(reader.job_id)
                stream.accept()
                if is_streamed(job):
                    await stream.forward()
                outcome = await reader.outcome()
        except ShoalError as error:
            failure = frames.Failure.of(error)
            ended = frames.Ended(number, None, failure, refused=reader is None)
            release_frames(error)
        else:
            ended = frames.Ended(number, outcome)
        if reader is not None:
            answer = reader.answer
            ended = replace(
                ended,
                refused=answer.refused,
                worker_id=answer.worker_id,
                lease=answer.lease,
                size=answer.size,
            )
        channel.send(ended)

    def text_route(self, job_id: JobId, lease: LeaseNumber) -> TextRoute | None:
        """Return how a worker reaches the front with an answer, if it can."""
        secret, opening = self._links.text_secret, self._opening
        if not (secret and opening.text_name):
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


class _StreamReader:
    """Sends what comes of one answer, once a turn of the loop.

    ``seen``: the client has that already.  ``accepted`` says that the job is accepted.
    """

    def __init__(
        self,
        accepted: frames.Accepted,
        link: _Link,
        reader: AnswerCursor,
        seen: Sequence[AnswerPiece],
    ) -> None:
        self._number = accepted.stream
        self._accepted: frames.Accepted | None = accepted  # until it is sent
        self._link = link
        self._channel = link.channel
        self._reader = reader
        self._answer: Answer = reader.answer
        self._unsent: list[AnswerPiece] = []
        self._place = size_of(seen)  # characters of the answer before what comes next
        self._behind = False
        self._routed = False  # whether the worker sends pieces to the front itself
        self._on_settled: Callable[[], None] | None = None

    def accept(self, leased: frames.Leased | None = None) -> None:
        """Report that the job is accepted, once."""
        accepted, self._accepted = self._accepted, None
        if accepted is not None:
            self._channel.send(replace(accepted, leased=leased))

    async def forward(self) -> None:
        """Send the pieces until the answer ends."""
        reader, channel = self._reader, self._channel
        requeued = partial(self._then, frames.Requeued(self._number))
        reader.on_requeue(requeued)
        reader.on_pieces(self._push)
        while pieces := await reader.read():
            if channel.is_congested:
                self._behind = True  # what comes meanwhile waits to be read
                await channel.writable()
                self._behind = False
            self._add(pieces)
        self._flush()

    # For the answer.

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
        if self._accepted is None:
            self._then(leased)
        else:
            self.accept(leased)
        return route

    def on_copied(self, pieces: Sequence[AnswerPiece]) -> bool:
        if not self._routed or self._behind:
            return self._push(pieces)
        self._flush()
        self._place += size_of(pieces)
        return True

    def settle(self, then: Callable[[], None]) -> None:
        if not self._channel.open:
            then()
            return
        self._on_settled = then
        self._then(frames.Settle(self._number))

    def on_settled(self, pieces: Sequence[AnswerPiece]) -> None:
        """Add what the client has beyond the answer, or send what it lacks."""
        settled, self._on_settled = self._on_settled, None
        answer, had = self._answer, self._answer.pieces
        if answer.end is not None or settled is None:
            pass
        elif beyond := pieces_after(pieces, had):
            with suppress(ReaderTooSlow, UnusableOutput):  # it goes no further
                answer.append(beyond, self._link.now(), copied=True)
        elif lacking := pieces_after(had, pieces):
            at = size_of(pieces)
            self._then(frames.Pieces(self._number, at, (*lacking,)))
        if settled is not None:
            settled()

    def abandon(self) -> None:
        """Let nothing wait for the client, which has left."""
        settled, self._on_settled = self._on_settled, None
        if settled is not None:
            settled()

    def _then(self, frame: object) -> None:
        self._flush()
        self._channel.send(frame)

    def _push(self, pieces: Sequence[AnswerPiece]) -> bool:
        if self._behind or self._channel.is_congested:
            return False
        self._add(pieces)
        return True

    def _add(self, pieces: Sequence[AnswerPiece]) -> None:
        if not self._unsent:
            self._channel.before_flush(self._flush)
        self._unsent += pieces

    def _flush(self) -> None:
        if self._unsent:
            sent, self._unsent = tuple(self._unsent), []
            self._channel.send(frames.Pieces(self._number, self._place, sent))
            self._place += size_of(sent)
