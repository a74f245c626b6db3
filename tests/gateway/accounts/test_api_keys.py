"""API keys over HTTP: creation, listing, revocation and invalid requests."""

from typing import Any

import pytest

from gateway.keys import make_key, request
from gateway.serving import KEY, Pool

pytestmark = pytest.mark.shared_pool

LIMITS = {
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "tokens_per_day": 100_000,
    "budget": 1_000_000,
    "priority_max": "normal",
}
USAGE = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "tokens_today": 0}


@pytest.mark.own_pool
async def test_key_is_returned_once_and_its_digest_stored(pool: Pool) -> None:
    status, shown = await request(
        pool, "POST", "/admin/keys", {"name": "alice", "expires_in": 3600} | LIMITS
    )

    assert status == 200
    key = shown.pop("key")
    assert key.startswith("sk-shoal-")
    assert key.startswith(shown["start"])
    assert len(shown["start"]) < 16
    assert shown["expires_at"] == shown["created_at"] + 3600
    assert shown == shown | LIMITS | USAGE | {
        "name": "alice",
        "scope": "use",
        "revoked_at": None,
    }
    _, listed = await request(pool, "GET", "/admin/keys")
    first, *others = listed["data"]
    assert (first["id"], first["name"], first["scope"]) == (
        "default",
        "default",
        "admin",
    )
    assert first["start"] == ""  # an operator chose it
    assert (others, listed["next"]) == ([shown], None)
    assert (await request(pool, "GET", "/admin/keys/alice")) == (200, shown)
    assert (await request(pool, "GET", f"/admin/keys/{shown['id']}")) == (200, shown)
    assert pool.gateway is not None
    (kept,) = await pool.gateway.store.keys.keys.all()
    assert key not in repr(kept)


async def test_response_with_a_key_is_not_cached(pool: Pool) -> None:
    async with pool.session.post(
        f"{pool.url}/admin/keys", json={"name": "a"}, headers=pool.headers()
    ) as response:
        assert response.headers["Cache-Control"] == "no-store"


async def test_created_admin_key_can_create_keys(pool: Pool) -> None:
    admin = await make_key(pool, "root", scope="admin")

    status, shown = await request(pool, "POST", "/admin/keys", {"name": "b"}, key=admin)

    assert status == 200
    assert (await request(pool, "GET", "/v1/models", key=shown["key"]))[0] == 200


@pytest.mark.parametrize("by", ["name", "id"])
async def test_revoked_key_is_rejected(pool: Pool, by: str) -> None:
    _, shown = await request(pool, "POST", "/admin/keys", {"name": "alice"})

    status, revoked = await request(pool, "DELETE", f"/admin/keys/{shown[by]}")

    assert status == 200
    assert revoked["revoked_at"] >= shown["created_at"]
    status, answer = await request(pool, "GET", "/v1/models", key=shown["key"])
    assert (status, answer["error"]["code"]) == (401, "revoked_api_key")
    assert "ask the operator" in answer["error"]["message"]
    assert (await request(pool, "DELETE", f"/admin/keys/{shown['id']}"))[1] == revoked
    assert (await request(pool, "DELETE", "/admin/keys/alice"))[0] == 404
    # The name is free again.
    assert (await request(pool, "POST", "/admin/keys", {"name": "alice"}))[0] == 200


async def test_key_can_revoke_itself(pool: Pool) -> None:
    admin = await make_key(pool, "root", scope="admin")

    assert (await request(pool, "DELETE", "/admin/keys/root", key=admin))[0] == 200

    assert (await request(pool, "GET", "/admin/keys", key=admin))[0] == 401
    assert (await request(pool, "GET", "/admin/keys", key=KEY))[0] == 200


async def test_expired_key_is_rejected_as_expired(pool: Pool) -> None:
    key = await make_key(pool, expires_in=1e-6)

    status, answer = await request(pool, "GET", "/v1/models", key=key)

    assert (status, answer["error"]["code"]) == (401, "expired_api_key")


@pytest.mark.parametrize("name", ["default", "loopback"])
async def test_static_key_is_not_managed_here(pool: Pool, name: str) -> None:
    status, answer = await request(pool, "POST", "/admin/keys", {"name": name})
    assert (status, answer["error"]["param"]) == (400, "name")

    status, answer = await request(pool, "DELETE", f"/admin/keys/{name}")
    assert status == 400
    assert "--api-key" in answer["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_unknown_key_is_not_found(pool: Pool, method: str) -> None:
    status, answer = await request(pool, method, "/admin/keys/nobody")

    assert status == 404
    assert answer["error"]["message"] == "there is no key nobody"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": None}, "name"),
        ({"name": 5}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a/../b"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "\u0000"}, "name"),
        ({"name": "a", "scope": "root"}, "scope"),
        ({"name": "a", "scope": ["use"]}, "scope"),
        ({"name": "a", "expires_in": 0}, "expires_in"),
        ({"name": "a", "expires_in": -1}, "expires_in"),
        ({"name": "a", "expires_in": 1e300}, "expires_in"),
        ({"name": "a", "expires_in": "30d"}, "expires_in"),
        ({"name": "a", "requests_per_minute": 0}, "requests_per_minute"),
        ({"name": "a", "requests_per_minute": 1.5}, "requests_per_minute"),
        ({"name": "a", "tokens_per_minute": -5}, "tokens_per_minute"),
        ({"name": "a", "tokens_per_day": True}, "tokens_per_day"),
        ({"name": "a", "priority_max": "urgent"}, "priority_max"),
        ({"name": "a", "budget": 2**63}, "budget"),
        ({"name": "a", "budget": 10**40}, "budget"),
        ({"name": "a", "budgets": 5}, None),
        ([], None),
        ("a", None),
    ],
    ids=str,
)
async def test_invalid_key_is_rejected_by_field(
    pool: Pool, body: Any, param: str | None
) -> None:
    before = await names(pool)

    status, answer = await request(pool, "POST", "/admin/keys", body)

    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert len(answer["error"]["message"]) < 200
    assert await names(pool) == before


async def names(pool: Pool) -> list[str]:
    """Return the names of all keys."""
    _, listed = await request(pool, "GET", "/admin/keys")
    return [each["name"] for each in listed["data"]]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
async def test_non_json_body_is_rejected(pool: Pool, body: bytes) -> None:
    async with pool.session.post(
        f"{pool.url}/admin/keys", data=body, headers=pool.headers()
    ) as response:
        assert response.status == 400


async def test_name_is_unique(pool: Pool) -> None:
    await make_key(pool)

    status, answer = await request(pool, "POST", "/admin/keys", {"name": "alice"})

    assert status == 400
    assert "revoke it first" in answer["error"]["message"]
