"""Function calls over the WebSocket, by a scripted client."""

import gc
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientWebSocketResponse, WSMsgType

from calls.function_workers import RECORD, FunctionWorker, pack, unpack
from gateway.keys import make_key
from gateway.serving import KEY, WAIT_MAX, Pool, eventually, serving
from shoal.calls.messages import CallRequest
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.vocabulary import CancelCalls, CancelJob
from shoal.domain.work import Feature
from shoal.store.port import StoredJob
from shoal.store.sqlite.database import SqliteStore

pytestmark = pytest.mark.shared_pool

FUNCTIONS: dict[str, Callable[..., object]] = {
    "add": lambda a, b: a + b,
    "div": lambda a, b: a // b,
    "big": lambda size: b"x" * size,
}


class CallClient:
    """A scripted client's connection."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket = socket
        self.items: list[list[Any]] = []
        self.messages = 0
        self._ends: dict[int, list[Any]] = {}

    async def ask(self, *asks: list[object]) -> None:
        await self.socket.send_bytes(pack(list(asks)))

    async def call(
        self, number: int, name: str, *args: object, **options: object
    ) -> None:
        await self.ask(item(number, name, *args, **options))

    async def read(self) -> None:
        """Receive one message."""
        message = await self.socket.receive(timeout=WAIT_MAX)
        assert message.type is WSMsgType.BINARY, message
        self.messages += 1
        items = unpack(message.data)
        self.items += items
        self._ends.update((each[1], each) for each in items if each[0] in (2, 3))

    def forget(self) -> None:
        """Forget what was received, so that numbers of calls serve again."""
        self.items.clear()
        self._ends.clear()

    async def end(self, number: int) -> list[Any]:
        """Wait for the end of a call."""
        while number not in self._ends:
            await self.read()
        return self._ends[number]

    async def value(self, number: int) -> Any:
        kind, _, value, *_ = await self.end(number)
        assert kind == 2, value
        return unpack(value)


def item(number: int, name: str, *args: object, **options: object) -> list[object]:
    return [1, number, name, pack(args), pack({}), options]


@asynccontextmanager
async def caller(pool: Pool, key: str = KEY) -> AsyncIterator[CallClient]:
    url = f"{pool.url}/v1/calls"
    async with pool.session.ws_connect(
        url, headers=pool.headers(key), max_msg_size=0
    ) as socket:
        yield CallClient(socket)


@pytest_asyncio.fixture(loop_scope="module")
async def worker(pool: Pool) -> AsyncIterator[FunctionWorker]:
    worker = FunctionWorker(pool.hub, FUNCTIONS)
    await pool.wait_joined()
    yield worker
    worker.drop()


@pytest.mark.parametrize("kept", [True, False])
async def test_function_is_called(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    async with caller(pool) as client:
        await client.call(7, "add", 2, 3, kept=kept)

        assert await client.value(7) == 5


@pytest.mark.parametrize("kept", [True, False])
async def test_a_rejected_call_is_freed_at_once(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    # Otherwise a flood keeps its arguments until the garbage collector runs.
    def held() -> int:
        return sum(type(each) in (CallRequest, Job) for each in gc.get_objects())

    async with caller(pool) as client:
        gc.collect()
        before = held()
        gc.disable()
        try:
            for number in range(3):
                await client.call(number, "nope", 2, 3, kept=kept)
                assert (await client.end(number))[0] == 3

            assert held() <= before + 1  # the last one, which a loop's variable has
        finally:
            gc.enable()


@pytest.mark.own_pool
async def test_coordinator_that_stops_says_that_a_call_has_not_begun(
    pool: Pool, worker: FunctionWorker
) -> None:
    assert pool.gateway is not None
    pool.gateway.calls.stop()
    async with caller(pool) as client:
        await client.call(1, "add", 2, 3)
        kind, _, code, text, meta = await client.end(1)

    assert (kind, code, meta) == (3, "unavailable", {"stopping": True})
    assert "is stopping" in text


@pytest.mark.own_pool
async def test_call_with_progress_reports_its_job(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as client:
        await client.call(1, "add", 2, 3, progress=True)
        end = await client.end(1)

    assert client.items[0] == [1, 1, "job1"]
    assert client.items[1] == [5, 1, 1]
    assert client.items[2] == [4, 1, 0.5, "half"]
    assert end[3] == {"job": "job1", "worker": "wire:w", "attempts": 1}


@pytest.mark.own_pool
async def test_call_in_memory_is_not_stored(pool: Pool, worker: FunctionWorker) -> None:
    async with caller(pool) as client:
        await client.call(1, "add", 2, 3, kept=False)
        assert await client.end(1) == [2, 1, pack(5), {}]

    response = await pool.session.get(f"{pool.url}/v1/jobs", headers=pool.headers())
    assert (await response.json())["jobs"] == []


@pytest.mark.parametrize("options", [{}, {"kept": False}, {"progress": True}])
async def test_exception_is_returned(
    pool: Pool, worker: FunctionWorker, options: dict[str, bool]
) -> None:
    async with caller(pool) as client:
        await client.call(1, "div", 1, 0, **options)
        kind, _, what, text, meta = await client.end(1)

    assert (kind, what) == (3, "raised")
    assert "ZeroDivisionError" in text
    assert meta["exception"] == RECORD


@pytest.mark.parametrize("options", [{}, {"kept": False}, {"progress": True}])
async def test_code_is_for_workers_with_its_version_of_python(
    pool: Pool, options: dict[str, bool]
) -> None:
    features, pythons = frozenset({Feature.CODE}), frozenset({"3.12"})
    FunctionWorker(pool.hub, {"<lambda>": abs}, features=features, pythons=pythons)
    await pool.wait_joined()
    code = options | {"needs": ["code"]}

    async with caller(pool) as client:
        await client.call(1, "<lambda>", -1, **code, python="3.12")
        await client.call(2, "<lambda>", -1, **code, python="3.11")
        assert await client.value(1) == 1
        assert (await client.end(2))[2:4] == [
            "code",
            "code of Python 3.11; the workers have 3.12: start one with the same "
            "version, or give the function a name with @shoal.task where a worker "
            "finds it",
        ]


@pytest.mark.own_pool
async def test_member_of_a_gang_is_stored_with_its_place(
    pool: Pool, worker: FunctionWorker
) -> None:
    gang = {"id": "0a" * 16, "rank": 0, "size": 1, "least": 1}

    async with caller(pool) as client:
        await client.call(1, "add", 2, 3, gang=gang)
        assert await client.value(1) == 5

    for path in ("/v1/jobs/job1", "/admin/jobs/job1"):
        response = await pool.session.get(pool.url + path, headers=pool.headers())
        assert (await response.json())["gang"] == gang | {"slots": 0}


async def explanation(pool: Pool, job_id: str) -> list[str]:
    """Return the explanation of a job without what has a time."""
    path = f"{pool.url}/admin/jobs/{job_id}/explain"
    response = await pool.session.get(path, headers=pool.headers())
    lines: list[str] = (await response.json())["lines"]
    return [line for line in lines if not line[:4].isdigit()]


@pytest.mark.own_pool
async def test_members_of_a_gang_begin_when_there_are_machines_for_all(
    pool: Pool, worker: FunctionWorker
) -> None:
    gang = {"id": "0a" * 16, "size": 2, "least": 2, "slots": 1}

    async with caller(pool) as client:
        await client.ask(
            *(item(n, "add", n, 1, gang=gang | {"rank": n}) for n in range(2))
        )
        while len(client.items) < 2:
            await client.read()
        assert await explanation(pool, "job1") == [
            "rank 0 of 2 (this job): waits",
            "rank 1 of 2: waits",
            "the group needs 2 machines with 1 free slot each, 1 of 1 suitable ones is "
            "free",
            "  wire:w: free",
        ]
        limits = pool.hub.pool.jobs[JobId("job1")].job.limits
        assert limits.first_output == limits.total == 30 * 86_400.0
        second = FunctionWorker(pool.hub, FUNCTIONS, "v")

        assert [await client.value(n) for n in range(2)] == [1, 2]
        assert len(second.runs) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2}, "gang: rank: expected 0 to 1, got 2"),
        ({"rank": "one"}, "Expected `int`, got `str` - at `$[5].gang.rank`"),
        ({"ranks": 2}, "contains unknown field `ranks` - at `$[5].gang`"),
    ],
)
async def test_invalid_gang_is_rejected_with_its_error(
    pool: Pool, worker: FunctionWorker, wrong: dict[str, object], message: str
) -> None:
    gang = {"id": "0a" * 16, "rank": 0, "size": 2, "least": 1} | wrong

    async with caller(pool) as client:
        await client.call(1, "add", 2, 3, gang=gang)
        _, _, kind, text, _ = await client.end(1)

        assert (kind, message in text) == ("invalid", True), text
        await client.call(2, "add", 2, 3)
        assert await client.value(2) == 5


async def test_gang_requires_durable_calls(pool: Pool, worker: FunctionWorker) -> None:
    gang = {"id": "0a" * 16, "rank": 0, "size": 1, "least": 1}

    async with caller(pool) as client:
        await client.call(1, "add", 2, 3, gang=gang, kept=False)

        assert (await client.end(1))[2:4] == [
            "invalid",
            "gang: requires a durable call",
        ]


@pytest.mark.parametrize("kept", [True, False])
async def test_unknown_function_is_rejected_with_a_suggestion(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    async with caller(pool) as client:
        await client.call(1, "ad", 1, kept=kept)

        assert (await client.end(1))[2:4] == [
            "unknown",
            "no worker has the function 'ad': did you mean add?",
        ]


@pytest.mark.parametrize("carried", ["stored", "kept", "progress"])
async def test_call_waits_for_a_function_that_no_worker_has(
    pool: Pool, worker: FunctionWorker, carried: str
) -> None:
    name = f"later {carried}"
    options = {"stored": {}, "kept": {"kept": False}, "progress": {"progress": True}}
    async with caller(pool) as client:
        await client.call(1, name, 1, wait=True, **options[carried])
        await client.call(2, name, 1, **options[carried])
        refused = await client.end(2)
        later = FunctionWorker(pool.hub, {name: lambda x: -x}, "later")

        assert await client.value(1) == -1
        later.drop()
    assert refused[2] == "unknown"


@pytest.mark.parametrize("kept", [True, False])
async def test_code_is_for_workers_that_trust_it(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    async with caller(pool) as client:
        await client.call(1, "lambda", 1, kept=kept, needs=["code"])
        _, _, kind, text, _ = await client.end(1)

    assert kind == "code"
    assert "--trust-code" in text


@pytest.mark.parametrize("kept", [True, False])
async def test_rich_values_need_a_shoal_worker(pool: Pool, kept: bool) -> None:
    FunctionWorker(pool.hub, FUNCTIONS, features=frozenset())
    await pool.wait_joined()

    async with caller(pool) as client:
        await client.call(1, "add", 1, kept=kept, needs=["values"])

        assert (await client.end(1))[2] == "values"


@pytest.mark.parametrize("kept", [True, False])
async def test_many_calls_of_one_message_all_return(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    async with caller(pool) as client:
        await client.ask(*(item(n, "add", n, 1, kept=kept) for n in range(3000)))

        assert [await client.value(n) for n in range(3000)] == [*range(1, 3001)]


async def test_simultaneous_results_are_one_message(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as client:
        await client.ask(*(item(n, "add", n, 1, kept=False) for n in range(2000)))
        for n in range(2000):
            await client.value(n)

    assert client.messages < 200


@pytest.mark.parametrize("kept", [True, False])
async def test_a_call_is_cancelled(pool: Pool, kept: bool) -> None:
    worker = FunctionWorker(pool.hub, FUNCTIONS, holds=True)
    await pool.wait_joined()

    async with caller(pool) as client:
        await client.call(1, "add", 1, 1, kept=kept)
        await eventually(lambda: bool(worker.runs or worker.calls))
        await client.ask([2, 1])

        assert (await client.end(1))[2] == "cancelled"
        await eventually(
            lambda: isinstance(worker.commands[-1], CancelJob | CancelCalls)
        )


async def test_disconnect_cancels_calls(pool: Pool) -> None:
    worker = FunctionWorker(pool.hub, FUNCTIONS, slots=2, holds=True)
    await pool.wait_joined()
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1)
        await client.call(2, "add", 1, 1, kept=False)
        await eventually(lambda: len(worker.calls) == 2)

    await eventually(lambda: not pool.hub.pool.jobs)


@pytest.mark.own_pool
@pytest.mark.parametrize("fresh", [True, False])
async def test_keyed_call_survives_its_client_and_runs_once(
    pool: Pool, fresh: bool
) -> None:
    worker = FunctionWorker(pool.hub, FUNCTIONS, holds=True)
    await pool.wait_joined()
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1, key="k", fresh=fresh)
        await eventually(lambda: len(worker.calls) == 1)
    worker.return_all("it")
    worker.holds = False

    async with caller(pool) as client:
        await client.call(5, "add", 1, 1, key="k")

        assert await client.value(5) == "it"
    assert worker.calls == []


async def test_used_key_is_not_fresh(pool: Pool) -> None:
    FunctionWorker(pool.hub, FUNCTIONS, holds=True)
    await pool.wait_joined()
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1, key="k", fresh=True)
        await client.call(2, "add", 1, 1, key="k", fresh=True)

        assert (await client.end(2))[2:4] == [
            "invalid",
            "the idempotency key was marked as fresh, but is in use",
        ]


@pytest.mark.parametrize("fresh", [True, False])
async def test_keyed_calls_wait_for_room(
    pool: Pool, worker: FunctionWorker, fresh: bool
) -> None:
    async with caller(pool) as client:
        calls = (item(n, "add", n, 1, key=f"k{n}", fresh=fresh) for n in range(1500))
        await client.ask(*calls)

        assert [await client.value(n) for n in range(1500)] == [*range(1, 1501)]


class CountingStore(SqliteStore):
    """Counts how often jobs are looked up by their idempotency keys."""

    lookups = 0

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> StoredJob | None:
        self.lookups += 1
        return await super().by_idempotency_key(owner, idempotency_key)


async def test_lookups_of_keyed_calls_are_linear(
    tmp_path: Path,
) -> None:
    # A call in a call stream needs no room in the queue.  Each of the others is
    # looked up before it waits, and at its turn.
    for count, progress in product((8, 64, 512), (False, True)):
        folder = tmp_path / f"{count}-{progress}"
        async with serving(folder, queue_max=4, open_store=CountingStore) as pool:
            FunctionWorker(pool.hub, FUNCTIONS)
            await pool.wait_joined()
            assert pool.gateway is not None
            store = pool.gateway.store
            assert isinstance(store, CountingStore)

            async with caller(pool) as client:
                await client.ask(
                    *(
                        item(n, "add", n, 1, key=f"k{n}", progress=progress)
                        for n in range(count)
                    )
                )
                for n in range(count):
                    await client.end(n)

            assert store.lookups == (1 + progress) * count


async def test_completed_keyed_call_returns_despite_a_full_queue(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, queue_max=1) as pool, caller(pool) as client:
        worker = FunctionWorker(pool.hub, FUNCTIONS)
        await pool.wait_joined()
        await client.call(1, "add", 1, 1, key="made")
        await client.end(1)
        worker.holds = True
        await client.ask(
            *(item(n, "add", n, 1, key=f"k{n}", progress=True) for n in range(2, 6))
        )
        await eventually(lambda: pool.hub.queue_room("default") <= 0)

        await client.call(6, "add", 1, 1, key="made")

        assert await client.value(6) == 2


async def test_waiting_keyed_call_can_be_cancelled(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, queue_max=1) as pool, caller(pool) as client:
        worker = FunctionWorker(pool.hub, FUNCTIONS, holds=True)
        await pool.wait_joined()
        await client.ask(
            *(item(n, "add", n, 1, key=f"k{n}", progress=True) for n in range(4))
        )
        await eventually(
            lambda: bool(worker.runs) and pool.hub.queue_room("default") <= 0
        )

        await client.ask([2, 2])
        assert (await client.end(2))[2] == "cancelled"

        worker.holds = False
        worker.finish(value="first")
        assert await client.value(3) == 4
        assert len(worker.runs) == 3


async def test_large_value_is_fetched_separately(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as client:
        for number, kept in enumerate((True, False)):
            await client.call(number, "big", 2 << 20, kept=kept)
            _, _, value, meta = await client.end(number)
            assert value == b""
            url = f"{pool.url}/v1/blobs/{meta['value']}"
            response = await pool.session.get(url, headers=pool.headers())
            assert unpack(await response.read()) == b"x" * (2 << 20)


async def test_referenced_value_is_stored_and_sent_once(
    pool: Pool, worker: FunctionWorker
) -> None:
    data = pack("large")
    digest = hashlib.sha256(data).digest()
    url = f"{pool.url}/v1/blobs/{digest.hex()}"

    async with caller(pool) as client:
        await client.call(1, "add", 1, 1, blobs=[digest])
        assert (await client.end(1))[2:4] == ["lacks", digest.hex()]
        client.forget()
        response = await pool.session.head(url, headers=pool.headers())
        assert response.status == 404
        response = await pool.session.put(url, data=data, headers=pool.headers())
        assert response.status == 204
        for number, kept in ((1, True), (2, False), (3, True)):  # the first, again
            await client.call(number, "add", 1, 1, blobs=[digest], kept=kept)
            assert await client.value(number) == 2

    kinds = [type(each).__name__ for each in worker.commands]
    assert kinds.count("SendBlob") == 1
    assert kinds.index("SendBlob") < kinds.index("PushCalls")


async def test_blob_with_a_wrong_digest_is_rejected(pool: Pool) -> None:
    url = f"{pool.url}/v1/blobs/{'0' * 64}"

    response = await pool.session.put(url, data=b"x", headers=pool.headers())

    assert response.status == 400
    assert "expected 0000" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("kept", [True, False])
async def test_call_beyond_the_priority_of_its_key_is_refused(
    pool: Pool, worker: FunctionWorker, kept: bool
) -> None:
    limited = await make_key(pool, priority_max="low")
    async with caller(pool, limited) as client:
        await client.call(1, "add", 2, 3, kept=kept, priority="high")
        end = await client.end(1)
        await client.call(2, "add", 2, 3, kept=kept)

        assert "may give its jobs the priority low at most" in end[3]
        assert await client.value(2) == 5


async def test_invalid_item_does_not_affect_others(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as client:
        await client.ask(
            [1, 1, "add", pack((1, 1)), pack({}), {"timeout": "soon"}],
            item(2, "add", 1, 1, needs=["wings"]),
            item(3, "add", 1, 1, priority="urgent"),
            item(4, "add", 1, 1),
        )

        assert await client.value(4) == 2
        ends = [await client.end(number) for number in (1, 2, 3)]
    assert {each[2] for each in ends} == {"invalid"}
    assert "timeout" in ends[0][3]
    assert "wings" in ends[1][3]


@pytest.mark.parametrize("data", [b"\xc1", b"\x93\x01", pack(["x"]), pack(7)])
async def test_malformed_message_ends_the_connection_with_a_reason(
    pool: Pool, data: bytes
) -> None:
    async with caller(pool) as client:
        await client.socket.send_bytes(data)
        message = await client.socket.receive(timeout=WAIT_MAX)

    assert message.type is WSMsgType.CLOSE
    assert message.data == 1007
    assert message.extra


async def test_path_requires_a_key_and_a_websocket(pool: Pool) -> None:
    response = await pool.session.get(f"{pool.url}/v1/calls")
    assert response.status == 401
    response = await pool.session.get(f"{pool.url}/v1/calls", headers=pool.headers())
    assert response.status == 400


async def test_functions_are_listed_with_their_workers(
    pool: Pool, worker: FunctionWorker
) -> None:
    FunctionWorker(
        pool.hub, {"add": max}, "v", 3, frozenset({Feature.VALUES, Feature.CODE})
    )
    await pool.wait_joined(2)

    response = await pool.session.get(f"{pool.url}/v1/tasks", headers=pool.headers())

    listed = await response.json()
    assert listed["tasks"][0] == {"name": "add", "workers": 2, "slots": 4}
    assert [each["name"] for each in listed["tasks"]] == ["add", "big", "div"]
    assert (listed["workers"], listed["slots"], listed["code"]) == (2, 4, 1)


@pytest.mark.own_pool
async def test_call_is_listed_as_a_job_with_its_value(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1)
        await client.call(2, "big", 100)
        await client.end(1)
        await client.end(2)

    url = f"{pool.url}/v1/jobs"
    response = await pool.session.get(url, headers=pool.headers())
    big, add = (await response.json())["jobs"]
    assert (add["job_type"], add["name"], big["name"]) == ("CALL", "add", "big")
    response = await pool.session.get(f"{url}/job1", headers=pool.headers())
    assert (await response.json())["result"] == 2


@pytest.mark.own_pool
async def test_history_of_a_call_names_workers_and_requeues(
    pool: Pool,
) -> None:
    first = FunctionWorker(pool.hub, FUNCTIONS, "first", holds=True)
    await pool.wait_joined()
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1)
        await eventually(lambda: len(first.calls) == 1)
        FunctionWorker(pool.hub, FUNCTIONS, "second")
        await pool.wait_joined(2)
        first.drop()
        assert await client.value(1) == 2

    url = f"{pool.url}/admin/jobs/job1/explain"
    response = await pool.session.get(url, headers=pool.headers())
    story = str(await response.json())
    for word in ("wire:first", "worker lost: connection lost", "wire:second"):
        assert word in story
    url = f"{pool.url}/v1/jobs/job1"
    response = await pool.session.get(url, headers=pool.headers())
    shown = await response.json()
    assert (shown["job_type"], shown["status"], shown["attempts"]) == (
        "CALL",
        "completed",
        2,
    )


async def test_end_of_a_connection_is_logged(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.gateway")

    async with caller(pool):
        pass
    await eventually(lambda: bool(caplog.messages))

    (line,) = caplog.messages
    assert "status=101" in line


async def test_operators_see_owner_and_size_of_calls(
    pool: Pool, worker: FunctionWorker
) -> None:
    async with caller(pool) as made:
        await made.call(1, "add", 2, 3)
        meta = (await made.end(1))[3]
    url = f"{pool.url}/admin/jobs/{meta['job']}"

    async with pool.session.get(url, headers=pool.headers()) as response:
        shown = await response.json()

    assert (shown["model"], shown["worker"]) == ("add", meta["worker"])
    assert shown["outcome"]["value"] == 5
