"""Whom a client names as its user: those of one key take turns."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from gateway.keys import CHAT
from gateway.serving import Pool
from shoal.domain.facts import Fact, JobSubmitted

pytestmark = pytest.mark.shared_pool

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
CHATS = "/v1/chat/completions"
OF_ALICE: Mapping[str, Mapping[str, Any]] = {
    CHATS: {**CHAT, "user": "alice"},
    "/v1/responses": {"model": "m1", "input": "hi", "user": "alice"},
    "/v1/messages": {"model": "m1", **HI, "metadata": {"user_id": "alice"}},
}


async def end_users_of(
    pool: Pool, requests: Iterable[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """Return the users of the jobs that requests become."""
    submitted: list[Fact] = []
    pool.hub.subscribe(submitted.extend)
    async with pool.node() as node:
        await pool.wait_joined()
        for number, (path, body) in enumerate(requests):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello", number=number))
                async with pool.session.post(
                    pool.url + path, json=body, headers=pool.headers()
                ) as response:
                    assert response.status == 200, await response.text()
    jobs = [each.job for each in submitted if isinstance(each, JobSubmitted)]
    return [job.terms.end_user for job in jobs]


async def test_user_is_the_same_in_all_dialects(pool: Pool) -> None:
    users = await end_users_of(pool, OF_ALICE.items())

    assert len(users) == len(OF_ALICE)
    assert len({*users}) == 1
    assert not {"", "alice"} & {*users}


async def test_users_are_told_apart(pool: Pool) -> None:
    given: list[Any] = ["alice", "bob", {"id": "1"}, {"id": "2"}, None]

    users = await end_users_of(pool, [(CHATS, {**CHAT, "user": u}) for u in given])

    assert len({*users}) == len(given)
    assert users[-1] == ""
    assert await end_users_of(pool, [(CHATS, CHAT)]) == [""]
