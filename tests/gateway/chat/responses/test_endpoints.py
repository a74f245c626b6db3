"""The Responses API through OpenAI's client."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import client, make_key, request
from gateway.serving import Pool, eventually, serving
from gateway.shoal_worker import shoal_worker
from harness.slow_imports import openai as sdk
from shoal.domain.errors import StoreError
from shoal.domain.moderation import Moderation
from shoal.gateway.chat.responses import endpoints, stored_responses
from shoal.gateway.chat.responses.stored_responses import find_response
from shoal.gateway.http.access import ANONYMOUS_KEY, LOOPBACK_KEY, ApiCaller

pytestmark = pytest.mark.shared_pool


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


def text_of(events: Sequence[Any]) -> str:
    return "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )


@pytest.mark.own_pool
async def test_response_is_returned(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))

        answer = await openai.responses.create(
            model="m1",
            input="hi",
            instructions="Be brief.",
            max_output_tokens=7,
            temperature=0.5,
            metadata={"run": "1"},
        )

    assert answer.output_text == "Hello"
    assert answer.status == "completed"
    assert answer.id == "resp_job1"
    assert answer.instructions == "Be brief."
    assert answer.metadata == {"run": "1"}
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2
    (task,) = node.tasks
    assert task["system"] == "Be brief."
    assert task["messages"] == [{"role": "user", "content": "hi"}]
    assert task["max_new_tokens"] == 7
    assert (await openai.responses.retrieve(answer.id)).to_dict() == answer.to_dict()


async def test_response_is_streamed(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))

        async with openai.responses.stream(model="m1", input="hi") as stream:
            events = await collect(stream)
            final = await stream.get_final_response()

    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert text_of(events) == final.output_text == "Hello"
    assert [event.sequence_number for event in events][-1] == 12


async def test_previous_response_is_continued(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Paris."))
        first = await openai.responses.create(
            model="m1", input="Capital of France?", instructions="Be brief."
        )
        tasks.create_task(node.answer("Seine.", number=1))

        second = await openai.responses.create(
            model="m1",
            input="Its river?",
            instructions="Be polite.",
            previous_response_id=first.id,
        )

    assert second.previous_response_id == first.id
    assert node.tasks[1]["system"] == "Be polite."
    assert node.tasks[1]["messages"] == [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Its river?"},
    ]
    items = await openai.responses.input_items.list(second.id, order="asc")
    assert [item.to_dict()["content"] for item in items.data] == [
        [{"type": "input_text", "text": "Capital of France?"}],
        [
            {
                "type": "output_text",
                "text": "Paris.",
                "annotations": [],
                "logprobs": [],
            }
        ],
        [{"type": "input_text", "text": "Its river?"}],
    ]
    newest = await openai.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == items.data[-1].id
    assert newest.has_more
    rest = await openai.responses.input_items.list(second.id, after=newest.data[0].id)
    assert [item.id for item in rest.data] == [item.id for item in items.data[1::-1]]


@pytest.mark.own_pool
async def test_item_is_referred_to_by_its_id(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Paris."))
        first = await openai.responses.create(model="m1", input="Capital of France?")
        item = str(first.output[0].id)
        tasks.create_task(node.answer("Seine.", number=1))

        await openai.responses.create(
            model="m1",
            input=[
                {"type": "item_reference", "id": item},
                {"role": "user", "content": "Its river?"},
            ],
        )
        for unknown in ("msg_job1_1", "msg_job9_0", "msg", item[:-2], f"{item}_0"):
            with pytest.raises(sdk.BadRequestError, match="there is no item"):
                await openai.responses.create(
                    model="m1", input=[{"type": "item_reference", "id": unknown}]
                )

    assert node.tasks[1]["messages"] == [
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Its river?"},
    ]


async def test_background_response_is_polled(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()

        queued = await openai.responses.create(model="m1", input="hi", background=True)
        task = await node.task()
        running = await openai.responses.retrieve(queued.id)
        await node.write(task["id"], "Hello")
        await node.end(task["id"])
        await eventually(lambda: not pool.hub.pool.jobs)
        ended = await openai.responses.retrieve(queued.id)

    assert (queued.status, running.status, ended.status) == (
        "queued",
        "in_progress",
        "completed",
    )
    assert ended.output_text == "Hello"
    assert ended.background


async def test_background_response_outlives_its_stream(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        stream = await openai.responses.create(
            model="m1", input="hi", background=True, stream=True
        )
        task = await node.task()
        await node.write(task["id"], "Hel", "lo")
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if text_of(seen) == "Hello":
                break
        await stream.close()

        id_, last = seen[0].response.id, seen[-1].sequence_number
        resumed = await openai.responses.retrieve(
            id_, stream=True, starting_after=last - 1
        )
        await node.write(task["id"], ", world")
        await node.end(task["id"])
        running = await collect(resumed)
        ended = await collect(
            await openai.responses.retrieve(id_, stream=True, starting_after=last - 1)
        )
        whole = await collect(await openai.responses.retrieve(id_, stream=True))
        after_all = await collect(
            await openai.responses.retrieve(
                id_, stream=True, starting_after=whole[-1].sequence_number
            )
        )

    types = [event.type for event in seen[:3]]
    assert types == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert text_of(running) == text_of(ended) == "o, world"
    assert text_of(whole) == "Hello, world"
    assert running[-1].response.output_text == "Hello, world"
    assert running[-1].sequence_number == whole[-1].sequence_number
    assert running[-1].to_dict() == ended[-1].to_dict()
    assert after_all == []


async def test_client_that_leaves_frees_its_worker(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        stream = asyncio.create_task(
            openai.responses.create(model="m1", input="hi", stream=True)
        )
        task = await node.task()
        await node.write(task["id"], "Hel")
        created: Any = await anext(aiter(await stream))
        await (await stream).close()

        await node.wait_stopped(task["id"])
        left = await openai.responses.retrieve(created.response.id)

    assert left.status == "cancelled"


async def test_revoked_key_ends_its_background_stream(pool: Pool) -> None:
    owner = client(pool, await make_key(pool, "owner"))
    async with pool.node() as node, owner, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        stream = await owner.responses.create(
            model="m1", input="hi", background=True, stream=True
        )
        reading = tasks.create_task(collect(stream))
        task = await node.task()
        status, _ = await request(pool, "DELETE", "/admin/keys/owner")
        await node.wait_stopped(task["id"])

    assert status == 200
    assert reading.result()[-1].type == "response.failed"
    assert reading.result()[-1].response.status == "cancelled"


async def test_running_response_is_cancelled(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        queued = await openai.responses.create(model="m1", input="hi", background=True)
        task = await node.task()

        cancelled = await openai.responses.cancel(queued.id)
        await node.wait_stopped(task["id"])
        again = await openai.responses.cancel(queued.id)
        with pytest.raises(sdk.BadRequestError, match="has no answer"):
            await openai.responses.create(
                model="m1", input="more", previous_response_id=queued.id
            )
        streamed = await collect(
            await openai.responses.retrieve(queued.id, stream=True, starting_after=9)
        )

    assert cancelled.status == again.status == "cancelled"
    assert [(each.type, each.sequence_number) for each in streamed] == [
        ("response.failed", 10)
    ]
    assert streamed[0].response.status == "cancelled"


async def test_deleted_response_is_gone(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        queued = await openai.responses.create(model="m1", input="hi", background=True)
        task = await node.task()

        await openai.responses.delete(queued.id)
        await node.wait_stopped(task["id"])

        for ask in (
            openai.responses.retrieve(queued.id),
            openai.responses.delete(queued.id),
            openai.responses.cancel(queued.id),
            openai.responses.create(
                model="m1", input="hi", previous_response_id=queued.id
            ),
        ):
            with pytest.raises(sdk.NotFoundError, match="there is no response"):
                await ask


async def test_response_that_is_not_stored_is_not_found(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hello"))

        answer = await openai.responses.create(model="m1", input="hi", store=False)

        with pytest.raises(sdk.NotFoundError, match="was not stored"):
            await openai.responses.retrieve(answer.id)
        with pytest.raises(sdk.NotFoundError):
            await openai.responses.retrieve("resp_unknown")
        with pytest.raises(sdk.NotFoundError):
            await openai.responses.retrieve("job1")
    assert answer.to_dict()["store"] is False


async def test_request_refers_to_a_limited_number_of_responses(
    pool: Pool, openai: "sdk.AsyncOpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "REFERRED_MAX", 1)
    async with pool.node() as node:
        await pool.wait_joined()
        made = []
        for number in range(2):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello", number=number))
                made.append(await openai.responses.create(model="m1", input="hi"))
        items: Any = [
            {"type": "item_reference", "id": answer.output[0].id} for answer in made
        ]

        with pytest.raises(sdk.BadRequestError, match="more than 1 responses"):
            await openai.responses.create(model="m1", input=items)


async def test_what_a_request_takes_from_responses_is_limited(
    pool: Pool, openai: "sdk.AsyncOpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "TAKEN_MAX", 12)
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hello"))
        first = await openai.responses.create(model="m1", input="hi")
        item: Any = {"type": "item_reference", "id": first.output[0].id}

        with pytest.raises(sdk.BadRequestError, match="more than 12 ch") as references:
            await openai.responses.create(model="m1", input=[item] * 3)
        tasks.create_task(node.answer("Bye", number=1))
        await openai.responses.create(model="m1", input=[item] * 2)
        monkeypatch.setattr(stored_responses, "TAKEN_MAX", 6)
        with pytest.raises(sdk.BadRequestError, match="more than 6 char") as previous:
            await openai.responses.create(
                model="m1", input="more", previous_response_id=first.id
            )

    assert references.value.param == "input[2]"
    assert previous.value.param == "previous_response_id"


async def test_responses_of_clients_without_a_key_are_not_stored(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, open_loopback=True) as pool,
        pool.node() as node,
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        url = f"{pool.url}/v1/responses"
        body = {"model": "m1", "input": "hi"}
        tasks.create_task(node.answer("Hello"))
        async with pool.session.post(url, json=body) as response:
            answer = await response.json()
        async with pool.session.get(f"{url}/{answer['id']}") as response:
            status = response.status
        item = {"type": "item_reference", "id": answer["output"][0]["id"]}
        refused = []
        for more in (
            {"previous_response_id": answer["id"]},
            {"input": [item]},
            {"background": True},
        ):
            async with pool.session.post(url, json=body | more) as response:
                refused.append((await response.json())["error"])

    assert (answer["status"], answer["store"], status) == ("completed", False, 404)
    assert [error["param"] for error in refused] == [
        *("previous_response_id", "input[0]", "background")
    ]
    assert all("Authorization: Bearer KEY" in error["message"] for error in refused)


def test_anonymous_clients_have_no_key() -> None:
    assert ApiCaller(ANONYMOUS_KEY).is_keyless
    assert ApiCaller(LOOPBACK_KEY).is_keyless


async def test_response_belongs_to_its_key(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    other = client(pool, await make_key(pool, "other"))
    async with pool.node() as node, other, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hello"))
        owner = client(pool, await make_key(pool, "owner"))
        async with owner:
            answer = await owner.responses.create(model="m1", input="hi")

        for ask in (
            other.responses.retrieve(answer.id),
            other.responses.delete(answer.id),
            other.responses.cancel(answer.id),
            other.responses.input_items.list(answer.id),
            other.responses.create(
                model="m1", input="more", previous_response_id=answer.id
            ),
            # Not even an operator continues a conversation of another key.
            openai.responses.create(
                model="m1", input="more", previous_response_id=answer.id
            ),
        ):
            with pytest.raises(sdk.NotFoundError):
                await ask
        assert (await openai.responses.retrieve(answer.id)).output_text == "Hello"


@pytest.mark.own_pool
async def test_tools_and_reasoning_are_items(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object"},
        "strict": False,
    }
    called = {"name": "weather", "arguments": '{"city":"Lima"}'}
    async with shoal_worker(pool) as made, asyncio.TaskGroup() as tasks:

        async def call() -> None:
            job = await made.job()
            call = {"index": 0, "id": "call_7", "type": "function", "function": called}
            thought = {"reasoning_content": "Lima, then."}
            made.delta(job, fields=thought)
            made.delta(job, fields={"tool_calls": [call]})
            made.end(job, "tool_calls")

        tasks.create_task(call())
        stream = await openai.responses.create(
            model="m1", input="Weather?", tools=[tool], stream=True
        )
        events = await collect(stream)
        first = events[-1].response
        result: Any = {
            "type": "function_call_output",
            "call_id": "call_7",
            "output": "Fog",
        }
        tasks.create_task(made.answer("Foggy.", number=1))
        second = await openai.responses.create(
            model="m1", input=[result], tools=[tool], previous_response_id=first.id
        )

    reasoning, function_call = first.output
    assert [part.text for part in reasoning.content] == ["Lima, then."]
    assert function_call.to_dict() == called | {
        "id": "fc_job1_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_7",
    }
    deltas = [event for event in events if "arguments.delta" in event.type]
    assert "".join(event.delta for event in deltas) == '{"city":"Lima"}'
    assert first.tools[0].to_dict() == tool
    assert [*made.work(1).messages] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_7", "type": "function", "function": called}],
            "reasoning_content": "Lima, then.",
        },
        {"role": "tool", "content": "Fog", "tool_call_id": "call_7"},
    ]
    assert second.output_text == "Foggy."


async def test_job_that_fails_is_a_failed_response(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        headers = {"x-shoal-first-output-seconds": "0.01"}
        with pytest.raises(sdk.APIStatusError, match="over the limit"):
            await openai.responses.create(model="m1", input="hi", extra_headers=headers)
        queued = await openai.responses.create(
            model="m1", input="hi", background=True, extra_headers=headers
        )
        streamed = await collect(
            await openai.responses.retrieve(queued.id, stream=True)
        )
        failed = await openai.responses.retrieve(queued.id)
        await node.task()

    assert [event.type for event in streamed] == [
        "response.created",
        "response.queued",
        "response.failed",
    ]
    assert failed.status == "failed"
    assert failed.error is not None
    assert streamed[-1].response.error.message == failed.error.message


async def test_stream_ends_with_an_event_if_the_store_fails(
    pool: Pool, openai: "sdk.AsyncOpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = [find_response]  # how often the store works

    async def fail(*given: Any) -> Any:
        if not reads:
            raise StoreError("disk I/O error")
        return await reads.pop()(*given)

    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hello"))
        answer = await openai.responses.create(model="m1", input="hi")
    monkeypatch.setattr(endpoints, "find_response", fail)

    url = f"{pool.url}/v1/responses/{answer.id}?stream=true"
    async with pool.session.get(url, headers=pool.headers()) as response:
        text = await response.text()

    assert "HTTP/1.1" not in text
    events = re.findall("^event: (.*)$", text, re.MULTILINE)
    assert events == ["response.created", "response.in_progress", "error"]
    assert "disk I/O error" in text


async def test_same_request_of_one_key_is_one_response(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    asked: Any = {
        "model": "m1",
        "input": "hi",
        "background": True,
        "extra_headers": {"Idempotency-Key": "k"},
    }
    async with pool.node() as node:
        await pool.wait_joined()
        first = await openai.responses.create(**asked)
        await node.answer("Hello")
        await eventually(lambda: not pool.hub.pool.jobs)

        again = await openai.responses.create(**asked)

    assert (first.status, again.status) == ("queued", "completed")
    assert again.to_dict() == (await openai.responses.retrieve(first.id)).to_dict()


@pytest.mark.own_pool
@pytest.mark.parametrize("stored", [True, False])
async def test_key_of_another_storage_is_refused(
    pool: Pool, openai: "sdk.AsyncOpenAI", stored: bool
) -> None:
    asked: Any = {
        "model": "m1",
        "input": "hi",
        "extra_headers": {"Idempotency-Key": "k"},
    }
    async with pool.node() as node:
        await pool.wait_joined()
        first = asyncio.create_task(openai.responses.create(**asked, store=stored))
        await node.answer("Hello")
        await first

        with pytest.raises(sdk.UnprocessableEntityError, match="a different request"):
            await openai.responses.create(**asked, store=not stored)


async def test_stream_continues_when_another_worker_takes_over(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        stream = await openai.responses.create(
            model="m1", input="hi", temperature=0, background=True, stream=True
        )
        await eventually(lambda: bool(one.tasks or two.tasks))
        lost, heir = (one, two) if one.tasks else (two, one)
        await lost.write(lost.tasks[0]["id"], "He", "l")
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if text_of(seen) == "Hel":
                break
        await stream.close()
        lost.abort()
        await heir.answer("H", "ello")
        rest = await collect(
            await openai.responses.retrieve(
                seen[0].response.id,
                stream=True,
                starting_after=seen[-1].sequence_number,
            )
        )

    assert text_of(rest) == "lo"
    assert rest[-1].response.output_text == "Hello"


async def test_moderated_answer_is_withheld(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, moderation=Moderation("badword")) as pool,
        client(pool) as openai,
        pool.node() as node,
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        with pytest.raises(sdk.BadRequestError, match="input match"):
            await openai.responses.create(model="m1", input="a badword")
        queued = await openai.responses.create(model="m1", input="hi", background=True)
        await node.answer("It is badword.")
        await eventually(lambda: not pool.hub.pool.jobs)
        ended = await openai.responses.retrieve(queued.id)
        replayed = await collect(
            await openai.responses.retrieve(queued.id, stream=True)
        )
        stream = await openai.responses.create(
            model="m1", input="hi", background=True, stream=True
        )
        tasks.create_task(node.answer("badword " * 20, number=1))
        streamed = await collect(stream)
        await eventually(lambda: not pool.hub.pool.jobs)
        cut = await openai.responses.retrieve(streamed[0].response.id)

    shown: list[Any] = [ended, replayed[-1].response, streamed[-1].response, cut]
    for response in shown:
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "content_filter"
        assert "badword" not in response.output_text
    assert text_of(replayed) == ""
