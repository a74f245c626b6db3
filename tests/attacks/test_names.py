"""Names that would be interpreted where they are displayed."""

import asyncio
import json
from urllib.parse import quote

import pytest
from yarl import URL

from attacks.siege import OLD_CHAT, ask, join
from gateway.serving import Pool

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = {
    "a line of the log": "x\n2026-01-01 00:00:00 ERROR shoal pool is on fire",
    "carriage return": "x\rfact=WorkerLost",
    "escape": "\x1b[2J\x1b]0;title\x07",
    "C1 control": "\x9b2J\x85",
    "right to left": "\u202egnp.exe",
    "line separator": "a\u2028b\u2029c",
    "NUL": "a\0b",
    "emoji": "🐟🏴‍☠️" * 20,
    "combining": "e" + "\u0301" * 200,
    "noncharacter": "\uffff\ufdd0",
    "prototype": "__proto__",
    "constructor": "constructor",
    "path": "../../../etc/passwd",
    "absolute path": "/etc/passwd",
    "quotes": "'\"`\\'; DROP TABLE jobs; --",
    "markup": "<script>alert(1)</script>",
    "format": "%s%s%n{0}{name}${jndi:ldap://x}",
    "escapes": "%00%2e%2e%2f%",
    "query": "?a=b&c=d#e",
    "key and value": "a' reason='fine",
    "only a space": " ",
    "256 characters": "n" * 256,
    "256 wide characters": "宽" * 256,
}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def test_names_are_not_interpreted(pool: Pool) -> None:
    for name, odd in NAMES.items():
        try:
            await check_name(pool, odd)
        except BaseException as error:
            error.add_note(name)
            raise
        await pool.wait_joined(0)


async def check_name(pool: Pool, odd: str) -> None:
    """Check that a node and a model of that name work and are displayed verbatim."""
    async with join(pool, odd, odd) as node, join(pool, "plain", "plain") as other:
        await pool.wait_joined(2)
        for number, path in enumerate(("/v1/chat/completions", OLD_CHAT)):
            pending = asyncio.create_task(ask(pool, path, model=odd))
            await node.answer("mine", number=number)
            assert "mine" in await pending
        assert other.tasks == []

        status = json.loads(await _get(pool, "/admin/status"))
        assert odd in status["models"]
        assert [odd] in [worker["models"] for worker in status["workers"]]
        models = json.loads(await _get(pool, "/v1/models"))["data"]
        assert {model["id"] for model in models} == {odd, "plain"}
        unknown = json.loads(await ask(pool, model=odd[1:] + "!"))
        assert odd in unknown["error"]["message"]
        if "\n" not in odd:
            shown = await _get(pool, f"/v1/models/{quote(odd, safe='')}")
            assert json.loads(shown)["id"] == odd


async def test_invalid_unicode_becomes_replacement_characters(pool: Pool) -> None:
    target = "/ws?name=%ff%ed%a0%80&model=%ff&max_concurrency=1&token="
    token = "join-token-that-no-log-may-hold"
    async with pool.node(path=target + token) as node:
        await pool.wait_joined()
        pending = asyncio.create_task(ask(pool, model="\ufffd"))
        await node.answer("mine")

        assert "mine" in await pending


async def test_similar_names_are_different_workers(pool: Pool) -> None:
    pairs = [("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c"), ("a%252Fb", "c"), ("A/b", "c")]
    async with (
        join(pool, *pairs[0]),
        join(pool, *pairs[1]),
        join(pool, *pairs[2]),
        join(pool, *pairs[3]),
        join(pool, *pairs[4]),
    ):
        await pool.wait_joined(len(pairs))


async def _get(pool: Pool, path: str) -> str:
    async with pool.session.get(
        URL(pool.url + path, encoded=True), headers=pool.headers()
    ) as response:
        assert response.status == 200, await response.text()
        return await response.text()
