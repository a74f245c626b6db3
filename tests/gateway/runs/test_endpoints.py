"""Training runs over HTTP: their two WebSockets, and what operators see of them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from gateway.keys import make_key, request
from gateway.serving import WAIT_MAX, Pool, eventually, serving
from shoal.domain.facts import Fact, JobCancelled, JobFailed, JobLeased, JobSubmitted
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.job import Gang, Job, JobTerms
from shoal.domain.work import Call
from shoal.gateway.runs import hosted_runs
from shoal.gateway.runs.hosted_runs import new_entries
from shoal.training.generations.messages import RankState
from shoal.training.run_events import MESSAGE_MAX, Message, member_key, run_id_of
from shoal.training.run_link import (
    CONNECTED,
    EVENTS,
    RunLink,
    RunOver,
    store_piece,
)
from shoal.transports.relayed_sockets import REPLACED

pytestmark = pytest.mark.shared_pool

TOKEN = "7" * 64
RUN = run_id_of(TOKEN)
R = TypeVar("R")


def member(pool: Pool, node: int, size: int = 2, owner: str = "default") -> Job:
    gang = Gang(RUN, node, size, 1)
    return Job(
        pool.hub.new_id(),
        Call("run_member", b"\x90", b"\x80"),
        owner=owner,
        idempotency_key=member_key(RUN, node),
        terms=JobTerms(gang=gang),
    )


@asynccontextmanager
async def open_run(
    pool: Pool, size: int = 2, owner: str = "default"
) -> AsyncIterator[None]:
    """Keep the members of a run open, and cancel them at the end."""
    facts: list[Fact] = []
    pool.hub.subscribe(facts.extend)  # after the runs have
    async with AsyncExitStack() as stack:
        members = [member(pool, node, size, owner) for node in range(size)]
        for each in members:
            await stack.enter_async_context(pool.hub.run_job(each))
        yield
        for each in members:
            pool.hub.cancel(each.id, "enough")
        await eventually(
            lambda: sum(isinstance(each, JobCancelled) for each in facts) == size
        )


@asynccontextmanager
async def link(pool: Pool, urls: str = "", **options: Any) -> AsyncIterator[RunLink]:
    opened = RunLink(urls or pool.url, TOKEN, **options)
    try:
        yield opened
    finally:
        await beside(opened.close)


async def beside(function: Callable[..., R], *args: object) -> R:
    """Call what blocks, while the coordinator goes on."""
    return await asyncio.to_thread(function, *args)


async def next_of(link: RunLink, key: str) -> Message:
    """Wait for a message with a key."""
    while True:
        message = await beside(link.receive, WAIT_MAX)
        assert message is not None, f"no {key}"
        if key in message:
            return message


@asynccontextmanager
async def socket(
    pool: Pool, path: str = "events", token: str = TOKEN
) -> AsyncIterator[ClientWebSocketResponse]:
    async with pool.session.ws_connect(
        f"{pool.url}/v1/runs/{RUN}/{path}", headers=pool.headers(token), max_msg_size=0
    ) as opened:
        yield opened


async def next_event(socket: ClientWebSocketResponse) -> Any:
    """Wait for an event, after the present notes."""
    while "event" not in (message := await socket.receive_json(timeout=WAIT_MAX)):
        pass
    return message


def ended_lines(*lines: str) -> dict[str, Any]:
    return {"event": "output", "rank": 1, "lines": [*lines]}


async def test_a_link_finds_the_address_that_answers(pool: Pool) -> None:
    urls = f"http://127.0.0.1:1,{pool.url}"
    async with open_run(pool), link(pool, urls, purpose=EVENTS) as opened:
        assert await next_of(opened, CONNECTED) == {CONNECTED: 1}
        digest = await beside(store_piece, urls, TOKEN, None, b"a piece")
    assert digest == hashlib.sha256(b"a piece").hexdigest()


async def test_reports_of_a_member_reach_those_who_watch(pool: Pool) -> None:
    async with (
        open_run(pool),
        link(pool, purpose=EVENTS) as reporter,
        link(pool, purpose=EVENTS, greeting=lambda: [{"watch": 0}]) as watcher,
    ):
        reporter.send(ended_lines("before", "and after"))
        seen = await next_of(watcher, "event")
        reporter.send({"note": "master", "value": "29500 127.0.0.1"})
        note = await next_of(watcher, "note")

    assert (seen["event"], seen["rank"], seen["lines"]) == (
        *("output", 1),
        ["before", "and after"],
    )
    assert note == {"note": "master", "value": "29500 127.0.0.1"}


@pytest.mark.parametrize("purpose", ["ranks", "events"])
async def test_only_the_token_of_an_open_run_is_admitted(
    pool: Pool, purpose: str
) -> None:
    async def refused(token: str) -> int:
        with pytest.raises(WSServerHandshakeError) as error:
            async with socket(pool, f"{purpose}?member=m", token):
                pass
        return error.value.status

    before = await refused(TOKEN)
    async with open_run(pool):
        during = [await refused("8" * 64), await refused(RUN)]
        async with socket(pool, f"{purpose}?member=m"):
            pass
    after = await refused(TOKEN)

    assert (before, during, after) == (404, [404, 404], 404)


async def test_links_end_with_the_run(pool: Pool) -> None:
    async with (
        open_run(pool),
        link(pool, purpose=EVENTS) as watcher,
        link(pool) as rank,
    ):
        for each in (watcher, rank):
            await next_of(each, CONNECTED)
        for job_id in [*pool.hub.pool.jobs]:
            pool.hub.cancel(job_id, "enough")

        for each in (watcher, rank):
            with pytest.raises(RunOver, match="ended"):
                await next_of(each, "nothing")
            assert each.send({"note": "late", "value": ""}) is False


async def test_ranks_form_their_first_generation(pool: Pool) -> None:
    async with open_run(pool), link(pool) as first, link(pool) as second:
        for rank, each in enumerate((first, second)):
            state = RankState(rank, "127.0.0.1", 5000 + rank, f"port{rank}")
            each.send({"announce": -1, **state.message()})
        formed = [await next_of(each, "formation") for each in (first, second)]

    assert [each["formation"] for each in formed] == [0, 0]
    assert [each["rank"] for each in formed] == [0, 1]
    assert formed[0]["secret"] == formed[1]["secret"]


async def test_run_with_several_ranks_on_each_machine_waits_for_all(
    pool: Pool,
) -> None:
    async with open_run(pool), AsyncExitStack() as stack:
        links = [await stack.enter_async_context(link(pool, size=4)) for _ in range(4)]
        for rank, each in enumerate(links):
            state = RankState(rank, "127.0.0.1", 5000 + rank, f"port{rank}")
            each.send({"announce": -1, **state.message()})
        formed = [await next_of(each, "formation") for each in links]

    assert {len(each["ranks"]) for each in formed} == {4}  # type: ignore[arg-type]  # a list


@pytest.mark.parametrize("size", ["3", "0", "x", "70000", "-2"])
async def test_number_of_ranks_fits_the_machines(pool: Pool, size: str) -> None:
    async with open_run(pool):
        with pytest.raises(WSServerHandshakeError) as refused:
            async with socket(pool, f"ranks?member=m&size={size}"):
                pass

    assert refused.value.status == 400


async def test_newer_connection_of_a_member_replaces_the_older(pool: Pool) -> None:
    path = "ranks?member=m"
    async with open_run(pool), socket(pool, path) as older, socket(pool, path):
        closed = await older.receive(WAIT_MAX)

    assert closed.type is WSMsgType.CLOSE
    assert closed.data == REPLACED


@pytest.mark.parametrize(
    ("path", "message", "code"),
    [
        ("events", "{", 1007),
        ("events", "[" * 5000, 1007),
        ("events", '{"event": "sabotage"}', 1007),
        ("events", f'"{"x" * MESSAGE_MAX}"', 1009),
        ("ranks?member=m", "[]", 1007),
        ("ranks?member=m", '{"announce": "x"}', 1007),
    ],
)
async def test_invalid_message_ends_its_connection_only(
    pool: Pool, path: str, message: str, code: int
) -> None:
    async with open_run(pool), socket(pool) as other, socket(pool, path) as wrong:
        await wrong.send_str(message)
        while (closed := await wrong.receive(WAIT_MAX)).type is WSMsgType.TEXT:
            pass
        await other.send_json({"watch": 0})
        await other.send_json(ended_lines("fine"))
        fine = await next_event(other)

    assert (closed.type, closed.data) == (WSMsgType.CLOSE, code)
    assert fine["lines"] == ["fine"]


async def test_connection_that_does_not_read_is_closed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_runs, "UNREAD_MAX", 2)
    async with open_run(pool), socket(pool) as slow:
        for number in range(20):
            await slow.send_json({"event": "remark", "rank": 0, "text": str(number)})
        await slow.send_json({"watch": 0})  # all at once
        while (message := await slow.receive(WAIT_MAX)).type is WSMsgType.TEXT:
            pass

    assert (message.type, message.data) == (WSMsgType.CLOSE, 1008)


async def test_a_run_has_so_many_connections(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_runs, "CONNECTIONS_MAX", 1)
    async with open_run(pool), socket(pool):
        with pytest.raises(WSServerHandshakeError) as refused:
            async with socket(pool):
                pass

    assert refused.value.status == 413


async def test_member_that_failed_before_a_restart_is_not_done(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        jobs = [member(pool, node, 3) for node in range(3)]
        facts: list[Fact] = [JobSubmitted(each) for each in jobs]
        for each in jobs:
            facts.append(JobLeased(each.id, WorkerId(each.id), LeaseNumber(1), ""))
        facts.append(JobFailed(jobs[1].id, "exploded"))
        assert pool.gateway is not None
        await pool.gateway.store.append(facts, pool.gateway.clock.wall())
    async with serving(tmp_path, restarted=True) as pool, AsyncExitStack() as stack:
        members = [await stack.enter_async_context(socket(pool)) for _ in range(2)]
        await members[0].send_json({"member": 0, "round": 1, "nodes": [0, 2]})
        await members[1].send_json({"member": 2, "round": -1, "nodes": []})
        while "round" not in (
            answer := await members[1].receive_json(timeout=WAIT_MAX)
        ):
            pass

    assert (answer["round"], answer["nodes"]) == (1, [0, 2])


async def test_course_of_a_run_is_explained(pool: Pool) -> None:
    async with open_run(pool), socket(pool) as events:
        text = "train.py on beagle"
        await events.send_json({"event": "started", "rank": 0, "text": text})
        await events.send_json({"watch": 0})
        await next_event(events)
        _, during = await request(pool, "GET", f"/admin/jobs/{RUN}/explain")
    _, after = await request(pool, "GET", f"/admin/jobs/{RUN}/explain")

    texts = [line.partition("  ")[2] for line in during["lines"]]
    assert "machine 0: submitted by default for the function 'run_member'" in texts[0]
    assert "rank 0 started: train.py on beagle" in texts
    assert during["lines"][-3:] == [
        "machine 0 of 2: waits",
        "machine 1 of 2: waits",
        "the group needs 2 machines without other jobs, and none that is connected is "
        "suitable",
    ]
    assert any(each.endswith("cancelled: enough") for each in after["lines"])
    assert any(each.endswith("on beagle") for each in after["lines"])


async def test_run_is_its_owners(pool: Pool) -> None:
    ada, bob = [await make_key(pool, name) for name in ("ada", "bob")]
    path = f"{pool.url}/admin/jobs/{RUN}"
    async with open_run(pool, owner="ada"):
        statuses = []
        for method, way, key in (
            ("GET", "/explain", ada),
            ("GET", "/explain", bob),
            ("DELETE", "", bob),
            ("DELETE", "", ada),
            ("DELETE", "", ada),
        ):
            async with pool.session.request(
                method, path + way, headers=pool.headers(key)
            ) as response:
                statuses.append(response.status)
        await eventually(lambda: not pool.hub.pool.jobs)

    assert statuses == [200, 403, 403, 200, 400]


@pytest.mark.parametrize(
    ("sent", "history", "new"),
    [
        ([], [], []),
        ([], ["a"], ["a"]),
        (["a"], ["a"], []),
        (["a"], ["a", "b"], ["b"]),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a", "b"], ["c"], ["c"]),
        (["a", "a"], ["a", "a", "a"], ["a"]),
    ],
)
def test_new_entries_of_a_history(
    sent: list[str], history: list[str], new: list[str]
) -> None:
    assert new_entries(sent, history) == new
