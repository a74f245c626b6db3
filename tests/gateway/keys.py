"""Creation of keys and tokens over HTTP, and requests with them."""

from typing import Any

from gateway.serving import KEY, Pool
from harness.plain_http import NO_CERTIFICATES
from harness.slow_imports import openai

CHAT: dict[str, Any] = {
    "model": "m1",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 50,
}


async def make_key(pool: Pool, name: str = "alice", **wanted: Any) -> str:
    """Create a key; return it."""
    status, shown = await request(pool, "POST", "/admin/keys", {"name": name, **wanted})
    assert status == 200, shown
    return str(shown["key"])


async def request(
    pool: Pool, method: str, path: str, body: Any = None, key: str = KEY
) -> tuple[int, Any]:
    """Send a request; return the status and the JSON of the answer."""
    async with pool.session.request(
        method, pool.url + path, json=body, headers=pool.headers(key)
    ) as response:
        return response.status, await response.json()


def client(pool: Pool, key: str = KEY) -> "openai.AsyncOpenAI":
    """The official client, without retries."""
    http = openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES)
    return openai.AsyncOpenAI(
        base_url=f"{pool.url}/v1", api_key=key, max_retries=0, http_client=http
    )
