"""Every request leaves one log line, whatever becomes of it."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from gateway.keys import CHAT
from gateway.serving import KEY, TOKEN, Pool, eventually
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.calls import CALLS_PATH
from shoal.gateway.operators import status
from shoal.gateway.runs.endpoints import RUNS_PATH

PAGE = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
WORKER = f"/ws?name=n1&model=m1&token={TOKEN}&max_concurrency=8"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of requests, those of monitors included."""
    caplog.set_level(logging.DEBUG, "shoal.gateway")
    return caplog


async def line_of(log: pytest.LogCaptureFixture, request_id: str) -> Mapping[str, Any]:
    """Return the fields of the only line about a request."""

    def found() -> list[logging.LogRecord]:
        named = f"request='{request_id}'"
        return [each for each in log.records if each.getMessage().startswith(named)]

    await eventually(lambda: bool(found()))
    (record,) = found()
    fields: Mapping[str, Any] = record.__dict__["fields"]
    return fields


@pytest.mark.parametrize("key", [KEY, ""], ids=["key", "no key"])
async def test_every_operation_leaves_one_line(
    pool: Pool, lines: pytest.LogCaptureFixture, key: str
) -> None:
    # Each fails soon: its body is empty, or what it names does not exist.
    for number, operation in enumerate(OPERATIONS):
        if operation.status == 101:
            continue
        request_id = f"request-{number}"
        headers = {"x-request-id": request_id}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        path = re.sub("{[^}]*}", "nothing", operation.path)

        async with pool.session.request(
            operation.method, pool.url + path, headers=headers, allow_redirects=False
        ) as got:
            status = got.status

        fields = await line_of(lines, request_id)
        assert (fields["method"], fields["path"]) == (operation.method, path)
        # The client leaves a stream, which may have ended by then.
        streams = got.content_type == "text/event-stream"
        assert fields["status"] in ((status, 499) if streams else (status,)), path


async def test_web_sockets_leave_one_line(
    pool: Pool, lines: pytest.LogCaptureFixture
) -> None:
    page = {"Origin": "https://page.example"}
    for number, (path, more, expected) in enumerate(
        [
            (WORKER, {}, 101),
            (WORKER.replace(TOKEN, "wrong"), {}, 101),  # the close frame says why
            (WORKER, page, 403),
            (CALLS_PATH, page, 403),
            (CALLS_PATH, {}, 101),
            (f"{RUNS_PATH}/nothing/ranks", {}, 404),
        ]
    ):
        request_id = f"socket-{number}"
        headers = pool.headers() | {"x-request-id": request_id} | more
        status = 101
        try:
            async with pool.session.ws_connect(pool.url + path, headers=headers):
                pass
        except aiohttp.WSServerHandshakeError as error:
            status = error.status

        fields = await line_of(lines, request_id)
        assert fields["status"] == status == expected, path


async def test_answers_and_what_is_left_unread_leave_one_line(
    pool: Pool, lines: pytest.LogCaptureFixture
) -> None:
    url = f"{pool.url}/v1/chat/completions"
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        for number, stream in enumerate((False, True)):
            request_id = f"chat-{number}"
            headers = pool.headers() | {"x-request-id": request_id}
            tasks.create_task(node.answer("a", number=number))
            body = CHAT | {"stream": stream}
            async with pool.session.post(url, json=body, headers=headers) as got:
                await got.read()

            assert (await line_of(lines, request_id))["status"] == 200

        async def begin() -> int:
            task = await node.task(2)
            await node.write(task["id"], "a")
            task_id: int = task["id"]
            return task_id

        beginning = tasks.create_task(begin())
        headers = pool.headers() | {"x-request-id": "left"}
        async with pool.session.post(
            url, json=CHAT | {"stream": True}, headers=headers
        ):
            pass
        await node.wait_stopped(await beginning)

    assert (await line_of(lines, "left"))["status"] == 499


async def test_bug_is_logged_as_one(
    pool: Pool, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(status, "job_counts", fail)
    headers = pool.headers() | {"x-request-id": "bug"}

    answer = await pool.session.get(f"{pool.url}/admin/status", headers=headers)

    assert answer.status == 500
    assert (await line_of(lines, "bug"))["status"] == 500


async def test_preflights_leave_one_line(
    pool: Pool, lines: pytest.LogCaptureFixture
) -> None:
    headers = PAGE | {"x-request-id": "preflight"}

    await pool.session.options(f"{pool.url}/v1/models", headers=headers)

    assert (await line_of(lines, "preflight"))["method"] == "OPTIONS"
