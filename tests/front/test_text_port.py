"""Workers that send text to fronts, over real WebSockets and the fronts' sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from gateway.serving import eventually
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import THOUGHTS, Delta
from shoal.domain.worker import ServedModel
from shoal.front.linked_jobs import LinkedJobs
from shoal.front.text_port import TextPort
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.shoal import ShoalDialer
from shoal.protocols.shoal.text import TEXT_PATH, text_ticket
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import dial
from shoal.transports.strangers import Strangers
from shoal.worker.text_links import COPIED_EVERY, TextLinks
from transports.manual_clock import ManualClock

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="fronts need Unix sockets"
)

SECRET = b"of the pool"
JOB, LEASE = JobId("j"), LeaseNumber(2)


class Front(LinkedJobs):
    """A front whose streams are not looked at."""

    def __init__(self, name: bytes, secret: bytes) -> None:
        async def nowhere(make: object) -> None:
            raise OSError

        super().__init__(nowhere, LoopClock(), lambda: JobId(""))
        self.name = name
        self.text_secret = secret
        self.texts: list[words.TextSent] = []

    def receive_text(self, sent: words.TextSent) -> None:
        self.texts.append(sent)

    def route(self, ticket_of: bytes = SECRET) -> words.TextRoute:
        name = self.name + b"0123456789abcdef"
        return words.TextRoute("", name, text_ticket(ticket_of, name))


class Fronts:
    """Two fronts of one machine; workers reach the ``first``."""

    def __init__(self, first: Front, second: Front, url: str) -> None:
        self.first = first
        self.second = second
        self.url = url


@asynccontextmanager
async def two_fronts(folder: Path, secret: bytes = SECRET) -> AsyncIterator[Fronts]:
    first, second = Front(b"front  1", secret), Front(b"front  2", secret)
    async with AsyncExitStack() as opened:
        ports = [
            TextPort(each.name, folder, each, LoopClock(), Strangers())
            for each in (first, second)
        ]
        for port in ports:
            await opened.enter_async_context(port.opened())
        app = web.Application()
        app.router.add_get(TEXT_PATH, ports[0].handle)
        runner = web.AppRunner(app)
        await runner.setup()
        opened.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Fronts(first, second, f"http://127.0.0.1:{runner.addresses[0][1]}")


class Worker:
    """A worker's text links; ``told`` is what its coordinator gets."""

    def __init__(self, url: str, tasks: asyncio.TaskGroup, *, plain: bool) -> None:
        profile = WorkerProfile("w", ServedModel("m"), 1, plain=plain)
        self.clock = ManualClock()
        self.told: list[words.Event] = []
        self.online = True
        self.links = TextLinks(
            *(ShoalDialer(url, profile), dial, self.clock, tasks, self._send)
        )

    def write(self, *pieces: str) -> bool:
        """Write pieces; return whether they go past the coordinator."""
        chunk = words.AnswerChunk(JOB, LEASE, [*pieces])
        return self.links.send(chunk) is not None

    async def open(self, route: words.TextRoute) -> None:
        """Begin an answer, and wait until the link is open."""
        self.links.begin(JOB, LEASE, route)
        await eventually(lambda: self.is_open)

    @property
    def is_open(self) -> bool:
        return any(each.driver for each in self.links._links.values())

    def _send(self, event: words.Event) -> bool:
        if self.online:
            self.told.append(event)
        return self.online


@asynccontextmanager
async def worker_of(url: str, *, plain: bool = False) -> AsyncIterator[Worker]:
    async with asyncio.TaskGroup() as tasks:
        worker = Worker(url, tasks, plain=plain)
        yield worker
        worker.links.close()


def copied(*pieces: str) -> words.AnswerChunk:
    return words.AnswerChunk(JOB, LEASE, [*pieces], copied=True)


async def test_pieces_go_to_the_front_at_once_and_to_the_hub_later(
    tmp_path: Path,
) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        route = fronts.first.route()
        await worker.open(route)

        assert worker.write("a", "b")
        assert worker.write("c")
        await eventually(lambda: bool(fronts.first.texts))
        assert fronts.first.texts == [words.TextSent(route.name, 0, ["a", "b", "c"])]
        assert worker.told == [copied("a", "b", "c")]  # the first ones at once
        assert worker.write("d")
        await eventually(lambda: len(fronts.first.texts) == 2)
        assert worker.write("e")
        await eventually(lambda: len(fronts.first.texts) == 3)
        assert len(worker.told) == 1
        await worker.clock.advance(COPIED_EVERY)
        assert worker.told[1:] == [copied("d", "e")]
        assert fronts.first.texts[2] == words.TextSent(route.name, 4, ["e"])

        assert worker.write("f")
        end = worker.links.send_copies_before(words.Completed(JOB, LEASE))
        assert end == words.Completed(JOB, LEASE, rest=("f",), copied=True)
        worker.links.on_sent(end)
        assert not worker.links.answers


async def test_a_front_passes_on_what_is_for_another(tmp_path: Path) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        route = fronts.second.route()
        await worker.open(route)

        for piece in "abc":  # of which some come while the fronts connect
            worker.write(piece)
            await asyncio.sleep(0)
        await eventually(lambda: len(fronts.second.texts) == 3)
        worker.write("d")
        await eventually(lambda: len(fronts.second.texts) == 4)

        texts = [each.pieces for each in fronts.second.texts]
        assert texts == [["a"], ["b"], ["c"], ["d"]]
        assert not fronts.first.texts


async def test_what_is_for_a_front_that_has_ended_is_dropped(tmp_path: Path) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        gone = Front(b"front  3", SECRET)
        await worker.open(gone.route())

        worker.write("a")
        worker.links.begin(JOB, LEASE, fronts.first.route())
        await asyncio.sleep(0)
        worker.write("b")

        await eventually(lambda: bool(fronts.first.texts))


async def test_without_a_link_all_goes_to_the_coordinator(tmp_path: Path) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        worker.links.begin(JOB, LEASE, fronts.first.route(b"another"))

        await eventually(lambda: not worker.links._links or not _dialling(worker))

        assert not worker.write("a")
        chunk = words.AnswerChunk(JOB, LEASE, ["a"])
        assert worker.links.send_copies_before(chunk) is chunk
        assert not worker.told


def _dialling(worker: Worker) -> bool:
    return any(each.task for each in worker.links._links.values())


async def test_fronts_that_have_gone_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.text_links.LINKS_MAX", 1)
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        here = fronts.first.route()
        gone = words.TextRoute("http://127.0.0.1:1", here.name, here.ticket)
        worker.links.begin(JOB, LEASE, gone)
        await eventually(lambda: not _dialling(worker))

        await worker.open(here)

        assert worker.write("a")


async def test_only_text_and_thoughts_go_past_the_coordinator(tmp_path: Path) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        await worker.open(fronts.first.route())
        thought = Delta(0, {THOUGHTS: "hm"})
        tool_call = Delta(0, {"tool_calls": [2**70]})
        call = words.AnswerChunk(JOB, LEASE, [tool_call])

        assert worker.links.send(words.AnswerChunk(JOB, LEASE, [thought])) is not None
        assert worker.links.send(call) is None
        assert worker.links.send_copies_before(call) is call
        assert worker.write("a")

        await eventually(lambda: len(fronts.first.texts) == 2)
        assert [each.at for each in fronts.first.texts] == [0, 2 + tool_call.size]


async def test_what_cannot_be_written_is_left_to_the_coordinator(
    tmp_path: Path,
) -> None:
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        await worker.open(fronts.first.route())
        odd = words.AnswerChunk(JOB, LEASE, [Delta(0, {THOUGHTS: 2**70})])

        worker.links.send(odd)
        worker.write("a")
        await asyncio.sleep(0)
        worker.write("b")

        await eventually(lambda: bool(fronts.first.texts))
        assert worker.is_open


async def test_an_unencrypted_worker_opens_none(tmp_path: Path) -> None:
    async with (
        two_fronts(tmp_path) as fronts,
        worker_of(fronts.url, plain=True) as worker,
    ):
        worker.links.begin(JOB, LEASE, fronts.first.route())

        assert not worker.links.answers


async def test_the_rest_is_told_after_what_was_sent_past(tmp_path: Path) -> None:
    """As when the link is lost, or the connection to the coordinator was."""
    async with two_fronts(tmp_path) as fronts, worker_of(fronts.url) as worker:
        await worker.open(fronts.first.route())
        worker.write("a")
        await eventually(lambda: bool(worker.told))

        worker.online = False
        worker.write("b")
        await eventually(lambda: len(fronts.first.texts) == 2)
        failed = words.Failed(JOB, LEASE, "no more")
        assert worker.links.send_copies_before(failed) is None
        worker.online = True
        worker.links.end_all()

        assert worker.told == [copied("a"), copied("b")]
        assert not worker.write("c")


async def test_a_front_that_has_not_reached_the_hub_serves_none(
    tmp_path: Path,
) -> None:
    async with (
        two_fronts(tmp_path, b"") as fronts,
        ClientSession() as session,
        session.get(fronts.url + TEXT_PATH) as refused,
    ):
        assert refused.status == 503
