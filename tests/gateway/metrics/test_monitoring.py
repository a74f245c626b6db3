"""Metrics have few labels, whatever clients send."""

import asyncio
import re

import pytest

from gateway.keys import CHAT
from gateway.serving import Pool

PATH = "/v1/chat/completions"


async def scrape(pool: Pool) -> str:
    async with pool.session.get(pool.url + "/metrics", headers=pool.headers()) as got:
        return await got.text()


def labels(text: str, name: str) -> set[str]:
    return set(re.findall(rf'[{{,]{name}="([^"]*)"', text))


async def test_client_texts_are_not_labels(pool: Pool) -> None:
    for number in range(20):
        for method, path in (
            ("GET", f"/nothing/{number}"),
            ("GET", f"/v1/models/model-{number}"),
            ("GET", f"/admin/jobs/job-{number}"),
            ("PURGE", "/v1/models"),
            ("TRACE", f"/{number}"),
        ):
            await pool.session.request(method, pool.url + path, headers=pool.headers())
        body = CHAT | {"model": f"model-{number}"}
        await pool.session.post(pool.url + PATH, json=body, headers=pool.headers())

    text = await scrape(pool)

    assert labels(text, "http_request_method") == {"GET", "POST", "_OTHER"}
    assert labels(text, "gen_ai_request_model") == {"other"}
    assert labels(text, "http_route") == {
        *("other", "/v1/models/{model}", "/admin/jobs/{id}", PATH)
    }


async def test_models_beyond_the_limit_share_a_label(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.metrics.requests.MODELS_MAX", 2)
    for number in range(4):
        model = f"model-{number}"
        async with pool.node(model=model) as node, asyncio.TaskGroup() as tasks:
            await pool.wait_joined()
            tasks.create_task(node.answer("a"))
            body = CHAT | {"model": model}
            await pool.session.post(pool.url + PATH, json=body, headers=pool.headers())
        await pool.wait_joined(0)

    models = labels(await scrape(pool), "gen_ai_request_model")

    assert models == {"model-0", "model-1", "other"}
