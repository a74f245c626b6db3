"""Join tokens over HTTP: creation, use, revocation and invalid requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, WSServerHandshakeError

from gateway.keys import CHAT, request
from gateway.serving import KEY, Pool, eventually
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.coordinator.auth_throttle import BLOCK_AFTER

pytestmark = pytest.mark.shared_pool


async def make(pool: Pool, name: str = "lab", **wanted: Any) -> dict[str, Any]:
    status, shown = await request(
        pool, "POST", "/admin/tokens", {"name": name, **wanted}
    )
    assert status == 200, shown
    made: dict[str, Any] = shown
    return made


STRONG = "f85c0bfd0c9658e7b1baab8e5fe289e4"


def path(token: str, name: str = "n1", model: str = "m1") -> str:
    return f"/ws?name={name}&model={model}&token={token}&max_concurrency=1"


async def close_of_join(pool: Pool, path_: str) -> tuple[int, str]:
    """Join; return the close code and reason."""
    async with pool.node(path=path_) as node:
        await eventually(lambda: node.closed is not None)
    assert node.closed is not None
    return node.closed


@pytest.mark.own_pool
async def test_token_is_returned_once_with_its_command(pool: Pool) -> None:
    shown = await make(pool, uses=3, expires_in=60, models=["m*", "tiny"])

    token, join = shown.pop("token"), shown.pop("join")
    assert token.startswith("jt-")
    assert f"--token {token}" in join
    assert shown["expires_at"] == shown["created_at"] + 60
    assert shown == shown | {
        "name": "lab",
        "revoked_at": None,
        "uses": 3,
        "models": ["m*", "tiny"],
        "workers": [],
        "present": 0,
    }
    assert (await request(pool, "GET", "/admin/tokens"))[1] == {
        "data": [shown],
        "next": None,
    }


@pytest.mark.own_pool
async def test_worker_is_bound_to_its_token(pool: Pool) -> None:
    shown = await make(pool, uses=1)
    assert shown["join"].endswith(f"--token {shown['token']} --name lab")

    async with pool.node(path=path(shown["token"])):
        await pool.wait_joined()
        _, listed = await request(pool, "GET", "/admin/tokens")
        (token,) = listed["data"]
        assert (token["workers"], token["present"]) == (["grandsage:n1"], 1)

        closed = await close_of_join(pool, path(shown["token"], "n2"))
        assert closed == (4002, "The token has been used by other workers")
    await pool.wait_joined(0)
    async with pool.node(path=path(shown["token"])):
        await pool.wait_joined()


@pytest.mark.own_pool
async def test_token_use_is_stored_before_the_worker_joins(
    pool: Pool,
) -> None:
    shown = await make(pool, uses=1)

    async with pool.node(path=path(shown["token"])):
        await pool.wait_joined()

        assert pool.gateway is not None
        (token,) = await pool.gateway.store.keys.tokens.all()
        assert token.workers == {"grandsage:n1"}


async def test_token_for_other_models_is_rejected(pool: Pool) -> None:
    shown = await make(pool, models=["qwen*"])

    closed = await close_of_join(pool, path(shown["token"], model="llama"))

    assert closed == (4002, "The token is not for this model")


async def test_expired_token_is_rejected(pool: Pool) -> None:
    shown = await make(pool, expires_in=1e-6)

    closed = await close_of_join(pool, path(shown["token"]))

    assert closed == (4002, "The token has expired")


async def test_revoked_token_closes_its_connections(pool: Pool) -> None:
    one, other = await make(pool, "one"), await make(pool, "other")
    async with (
        pool.node("a", path=path(one["token"], "a")) as gone,
        pool.node("b", path=path(other["token"], "b")) as stays,
        pool.node("c") as first,
    ):
        await pool.wait_joined(3)

        status, shown = await request(pool, "DELETE", "/admin/tokens/one")

        assert (status, shown["present"]) == (200, 0)
        await pool.wait_joined(2)
        assert gone.closed == (1008, "the join token was revoked")
        assert (stays.closed, first.closed) == (None, None)
    closed = await close_of_join(pool, path(one["token"], "a"))
    assert closed == (4002, "The token was revoked")


async def test_jobs_of_a_revoked_worker_are_requeued(
    pool: Pool,
) -> None:
    shown = await make(pool)
    async with pool.node(path=path(shown["token"], "a")) as gone:
        await pool.wait_joined()
        async with pool.node("b") as heir:
            asking = asyncio.create_task(
                request(pool, "POST", "/v1/chat/completions", CHAT)
            )
            await eventually(lambda: bool(gone.tasks or heir.tasks))

            await request(pool, "DELETE", "/admin/tokens/lab")
            await heir.answer("text")

            assert (await asking)[0] == 200


async def test_guessing_is_banned_but_valid_tokens_are_accepted(tmp_path: Path) -> None:
    config = ServeConfig(port=0, data_dir=tmp_path, api_key=KEY, join_token=STRONG)
    async with run_coordinator(config) as running, ClientSession() as session:
        pool = Pool(running.url, running.hub, session)
        for number in range(BLOCK_AFTER):
            closed = await close_of_join(pool, path(f"guess{number}"))
            assert closed == (4002, "Invalid token")

        with pytest.raises(WSServerHandshakeError) as caught:
            await session.ws_connect(pool.url + path("again"))

        assert caught.value.status == 429
        assert caught.value.headers is not None
        assert int(caught.value.headers["Retry-After"]) > 0
        async with pool.node(path=path(STRONG)):
            await pool.wait_joined()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a", "uses": 0}, "uses"),
        ({"name": "a", "uses": -1}, "uses"),
        ({"name": "a", "uses": 10**9}, "uses"),
        ({"name": "a", "uses": "1"}, "uses"),
        ({"name": "a", "expires_in": 0}, "expires_in"),
        ({"name": "a", "models": "a*"}, "models"),
        ({"name": "a", "models": [""]}, "models[0]"),
        ({"name": "a", "models": ["x" * 257]}, "models[0]"),
        ({"name": "a", "models": ["x"] * 101}, "models"),
        ({"name": "a", "scope": "use"}, None),
    ],
    ids=str,
)
async def test_invalid_token_is_rejected_by_field(
    pool: Pool, body: Any, param: str | None
) -> None:
    status, answer = await request(pool, "POST", "/admin/tokens", body)

    assert status == 400, answer
    assert answer["error"]["param"] == param


async def test_unknown_token_is_not_found(pool: Pool) -> None:
    status, answer = await request(pool, "DELETE", "/admin/tokens/none")

    assert status == 404
    assert answer["error"]["message"] == "there is no join token none"
