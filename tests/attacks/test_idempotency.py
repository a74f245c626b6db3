"""Thousands of idempotency keys, of several owners, at both APIs."""

import asyncio

import pytest

from attacks.siege import ANSWER, CHAT, OLD_CHAT, body, join
from gateway.keys import make_key
from gateway.serving import KEY, Node, Pool, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 60


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def ask(pool: Pool, name: str, key: str = KEY, path: str = CHAT) -> str:
    headers = pool.headers(key) | {"Idempotency-Key": name}
    async with pool.session.post(
        pool.url + path, json=body(), headers=headers
    ) as response:
        return await response.text()


async def answer_all(node: Node) -> None:
    number = 0
    while True:
        await node.answer(ANSWER, number=number)
        number += 1


async def test_many_keys_leave_nothing_in_memory(pool: Pool) -> None:
    async with join(pool, slots="64") as node:
        await pool.wait_joined()
        answering = asyncio.create_task(answer_all(node))
        for _ in range(2):
            answers = await asyncio.gather(
                *(ask(pool, f"key {number}") for number in range(MANY))
            )
            assert all(ANSWER in answer for answer in answers)
        answering.cancel()

        assert len(node.tasks) == MANY
    opened = pool.hub._answers
    await eventually(lambda: not (opened._jobs_by_key or opened._keys or opened))


@pytest.mark.parametrize("path", [CHAT, OLD_CHAT])
async def test_idempotency_key_belongs_to_its_owner(pool: Pool, path: str) -> None:
    place = "old" if path == OLD_CHAT else "new"
    alice, bob = [await make_key(pool, f"{place}-{name}") for name in ("al", "bo")]
    async with join(pool) as node:
        await pool.wait_joined()
        pending = [
            asyncio.create_task(ask(pool, "k", key, path))
            for key in (alice, bob, alice, bob)
        ]
        await node.task(1)
        await asyncio.gather(*(node.answer(f"{n}", number=n) for n in range(2)))
        answers = [await each for each in pending]

        assert len(node.tasks) == 2
        assert _text(answers[0]) == _text(answers[2]) != _text(answers[1])
        assert _text(answers[1]) == _text(answers[3])


def _text(answer: str) -> str:
    """Return the single number of an answer, at either API."""
    (text,) = {
        n for n in "01" if f'"content":"{n}"' in answer or f'"o":"{n}"' in answer
    }
    return text
