"""A front puts an answer together whose pieces come from its hub and past it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from front.test_silent_hub import KEY, Hub, cancelled, linked
from shoal.domain.answer_assembly import pieces_from, size_of
from shoal.domain.errors import JobError, WorkerLost
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Delta, Outcome
from shoal.domain.vocabulary import TextSent
from shoal.domain.work import Chat
from shoal.front import frames
from shoal.front.channel import Channel
from shoal.front.linked_jobs import EARLY_MESSAGES, MISSING_PATIENCE, LinkedJobs
from simulation import virtual

ROUTE = b"r" * 24
WORKER = WorkerId("shoal:one")
CALL = Delta(0, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]})


class ScriptedHub(Hub):
    """A hub whose frames a test sends itself; ``heard`` are those of the front."""

    def __init__(self) -> None:
        super().__init__()
        self.link: Channel | None = None
        self.heard: list[Any] = []

    def _on_frame(self, channel: Channel, frame: Any) -> None:
        self.link = channel
        self.heard.append(frame)
        super()._on_frame(channel, frame)

    async def say(self, frame: object) -> None:
        assert self.link is not None
        self.link.send(frame)
        await asyncio.sleep(0.01)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.heard if type(each) is kind]


Script = Callable[[ScriptedHub, LinkedJobs, Callable[[], str]], Awaitable[None]]


def play(script: Script) -> str:
    """Run a chat whose first lease has a route; return its text, or raise its error."""

    async def run() -> str:
        hub, read = ScriptedHub(), list[AnswerPiece]()
        jobs, linking = await linked(hub)

        async def client() -> str:
            chat = Chat("m", ({"role": "user", "content": "x"},))
            async with jobs.run(Job(JobId("j"), chat, owner="one"), KEY, {}) as reader:
                while pieces := await reader.read():
                    read.extend(pieces)
                await reader.outcome()
            return _text(read)

        running = asyncio.create_task(client())
        await asyncio.sleep(0.01)
        await hub.say(leased(1, 0, ROUTE))
        await script(hub, jobs, lambda: _text(read))
        text = await running
        await cancelled(linking)
        return text

    return virtual.run(run())


def leased(
    lease: int, size: int, route: bytes = b"", *, resumes: bool = False, stream: int = 1
) -> frames.Leased:
    return frames.Leased(stream, WORKER, LeaseNumber(lease), size, resumes, route)


def ended(text: str, stream: int = 1) -> frames.Ended:
    return frames.Ended(stream, Outcome(text, "stop"), size=len(text))


def _text(pieces: list[AnswerPiece]) -> str:
    return "".join(str(each) for each in pieces)


def test_pieces_come_past_the_hub() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["a", "b"]))
        jobs.receive_text(TextSent(ROUTE, 2, ["c"]))
        await asyncio.sleep(0.01)
        assert text() == "abc"
        await hub.say(ended("abc"))

    assert play(script) == "abc"


def test_those_along_another_route_are_dropped() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(b"s" * 24, 0, ["x"]))
        await hub.say(ended("a"))

    assert play(script) == "a"


def test_pieces_are_put_in_order_and_counted_once() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 4, ["ef"]))
        await hub.say(frames.Pieces(1, 0, ("ab",)))
        assert text() == "ab"
        await hub.say(frames.Pieces(1, 1, ("bc", "d")))
        assert text() == "abcdef"
        await hub.say(ended("abcdef"))

    assert play(script) == "abcdef"


def test_the_end_waits_for_what_is_on_its_way() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        await hub.say(ended("abc"))
        assert text() == ""
        jobs.receive_text(TextSent(ROUTE, 0, ["abc"]))

    assert play(script) == "abc"


def test_an_end_whose_pieces_are_lost_has_them_itself() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["a"]))
        await hub.say(ended("abc"))
        await asyncio.sleep(2 * MISSING_PATIENCE)

    assert play(script) == "abc"


def test_what_stays_missing_is_asked_for() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["ab"]))
        await hub.say(frames.Pieces(1, 3, ("d",)))
        await asyncio.sleep(2 * MISSING_PATIENCE)
        again = hub.of(frames.Submit)[-1]
        assert (again.again, again.seen) == (True, ("ab",))
        await asyncio.sleep(0.01)
        assert [each.stream for each in hub.of(frames.Leave)] == [1]
        jobs.receive_text(TextSent(ROUTE, 2, ["x"]))  # from before, and too late
        await hub.say(frames.Pieces(again.stream, 2, ("cd",)))
        await hub.say(ended("abcd", again.stream))

    assert play(script) == "abcd"


def test_a_hub_whose_worker_is_lost_gets_what_the_client_has() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["ab"]))
        await hub.say(frames.Settle(1))
        await asyncio.sleep(0.01)
        assert hub.of(frames.Settled) == [frames.Settled(1, ("ab",))]
        jobs.receive_text(TextSent(ROUTE, 2, ["x"]))  # too late
        await hub.say(leased(2, 2))
        await hub.say(frames.Pieces(1, 2, ("c",)))
        await hub.say(ended("abc"))

    assert play(script) == "abc"


def test_a_successor_that_begins_before_what_was_read_ends_the_stream() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["ab"]))
        await hub.say(leased(2, 1))

    with pytest.raises(WorkerLost):
        play(script)


def test_the_same_worker_may_go_on_before_what_was_read() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["ab"]))
        await hub.say(leased(2, 1, resumes=True))
        await hub.say(frames.Pieces(1, 1, ("bcd",)))
        await hub.say(ended("abcd"))

    assert play(script) == "abcd"


def test_a_worker_that_reports_another_text_is_an_error() -> None:
    """The receipt is of what it reported."""

    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["abc"]))
        await hub.say(ended("abd"))

    with pytest.raises(JobError, match="another text"):
        play(script)


def test_a_question_about_a_stream_that_has_ended_is_answered() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        await hub.say(frames.Settle(7))
        await asyncio.sleep(0.01)
        assert hub.of(frames.Settled) == [frames.Settled(7, ())]
        await hub.say(ended("a"))

    play(script)


def test_pieces_that_come_after_the_lease_has_ended_are_dropped() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        jobs.receive_text(TextSent(ROUTE, 0, ["a"]))
        await hub.say(frames.Requeued(1))
        jobs.receive_text(TextSent(ROUTE, 1, ["x"]))
        await hub.say(leased(2, 1))
        await hub.say(frames.Pieces(1, 1, ("b",)))
        await hub.say(ended("ab"))

    assert play(script) == "ab"


def test_what_waits_for_pieces_before_it_is_bounded() -> None:
    async def script(
        hub: ScriptedHub, jobs: LinkedJobs, text: Callable[[], str]
    ) -> None:
        stream = jobs._streams[1]
        for at in range(1, 2 * EARLY_MESSAGES):
            jobs.receive_text(TextSent(ROUTE, at, ["x"]))
        assert len(stream.early) == EARLY_MESSAGES
        await hub.say(ended("ab"))
        await asyncio.sleep(2 * MISSING_PATIENCE)

    assert play(script) == "ab"


def thought(text: str) -> Delta:
    return Delta(0, {THOUGHTS: text})


@given(
    st.lists(
        st.one_of(st.text(min_size=1), st.text(min_size=1).map(thought), st.just(CALL))
    ),
    st.data(),
)
def test_pieces_from_a_place_are_what_follows_it(
    pieces: list[AnswerPiece], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pieces)))
    place = size_of(pieces[:cut])

    assert pieces_from(pieces, place) == pieces[cut:]
    assert pieces_from(pieces, size_of(pieces) + 1) is None
    if cut < len(pieces) and isinstance(piece := pieces[cut], str) and len(piece) > 1:
        assert pieces_from(pieces, place + 1) == [piece[1:], *pieces[cut + 1 :]]
