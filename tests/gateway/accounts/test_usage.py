"""Usage over HTTP: as JSON and as a table, one's own and everybody's."""

import asyncio
import csv
import io
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.serving import EPOCH, KEY, Pool, serving
from shoal.domain.credentials import DAY
from shoal.store.ledger import LedgerEntries, Refund
from shoal.transports.clock import LoopClock

NODE = "grandsage:n1"


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """A pool whose day does not end during a test."""
    async with serving(tmp_path, clock=LoopClock(lambda: EPOCH)) as pool:
        yield pool


async def chat(
    pool: Pool, node_name: str = "n1", model: str = "m1", **sent: Any
) -> None:
    """Have a node answer a chat."""
    async with pool.node(node_name, model) as node:
        await pool.wait_joined()
        body = CHAT | {"model": model}
        asking = request(pool, "POST", "/v1/chat/completions", body, **sent)
        task = asyncio.create_task(asking)
        await node.answer("some text")
        assert (await task)[0] == 200
    await pool.wait_joined(0)


async def usage(pool: Pool, query: str = "", key: str = KEY) -> list[dict[str, Any]]:
    status, shown = await request(pool, "GET", f"/admin/usage{query}", key=key)
    assert status == 200, shown
    rows: list[dict[str, Any]] = shown["data"]
    return rows


async def table(pool: Pool, query: str) -> list[list[str]]:
    async with pool.session.get(
        f"{pool.url}/admin/usage?format=csv{query}", headers=pool.headers()
    ) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
        named = response.headers["Content-Disposition"]
        assert named.startswith('attachment; filename="shoal-usage-2')
        return [*csv.reader(io.StringIO(await response.text()))]


async def test_chat_is_counted_at_its_node(pool: Pool) -> None:
    await chat(pool)
    await chat(pool)
    await chat(pool, "n2", "m2")

    shown = await usage(pool)

    assert [(each["key"], each["model"], each["node"]) for each in shown] == [
        ("default", "m1", NODE),
        ("default", "m2", "grandsage:n2"),
    ]
    first = shown[0]
    assert (first["requests"], first["cost"]) == (2, 20_000)  # of PRICES
    assert first["prompt_tokens"] > 0
    assert first["completion_tokens"] > 0
    async with pool.session.get(
        f"{pool.url}/admin/jobs?search=m1&limit=1", headers=pool.headers()
    ) as response:
        ((listed,), _) = (await response.json()).values()
    assert listed["worker"] == f"{NODE}/m1"
    (total,) = await usage(pool, "?by=")
    assert total | {"requests": 3} == total
    assert [total[each] for each in ("day", "key", "model", "node")] == [None] * 4
    (of_day,) = await usage(pool, f"?by=day&since={first['day']}&until={first['day']}")
    assert of_day["day"] == first["day"]
    assert await usage(pool, "?since=2001-01-01&until=2001-12-31") == []


async def test_minutes_have_the_jobs_and_tokens_of_all_keys(pool: Pool) -> None:
    await chat(pool)
    await chat(pool)
    (sum_,) = await usage(pool, "?by=")

    async with pool.session.get(
        f"{pool.url}/admin/usage/minutes", headers=pool.headers()
    ) as response:
        (minutes,) = (await response.json()).values()

    # Two, if one began between the jobs.
    assert all(each["at"] % 60 == 0 for each in minutes)
    assert sum(each["jobs"] for each in minutes) == 2
    written = sum(each["tokens"] for each in minutes)
    assert written == sum_["completion_tokens"]


async def test_key_sees_its_own_usage_without_keys_of_machines(pool: Pool) -> None:
    alice = await make_key(pool)
    machine = "ab" * 32
    await chat(pool, machine, key=alice)
    await chat(pool)

    (own,) = await usage(pool, key=alice)

    assert (own["key"], own["node"]) == ("alice", "grandsage:abababab…")
    watcher = await make_key(pool, "watcher", scope="monitor")
    everyones = await usage(pool, key=watcher)
    assert [each["node"] for each in everyones] == [f"grandsage:{machine}", NODE]


COUNTS = ("requests", "prompt_tokens", "completion_tokens", "cost")


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@sum", "\t=1", "\r=1"])
async def test_table_has_no_formulas(pool: Pool, name: str) -> None:
    assert pool.gateway is not None
    store, at = pool.gateway.store, pool.gateway.clock.wall()
    written = LedgerEntries(refunds=[Refund("default", name, name, -7)])
    await store.append([], at, (), written)

    rows = await table(pool, "&by=model,node,key")

    assert rows == [
        ["day", "key", "model", "node", *COUNTS],
        ["", "default", f"'{name}", f"'{name}", "0", "0", "0", "7"],
    ]


async def test_pages_and_the_table_have_all_rows(pool: Pool) -> None:
    assert pool.gateway is not None
    store, at = pool.gateway.store, pool.gateway.clock.wall()
    for day in range(3):
        for model in "abc":
            refund = Refund("default", model, NODE, -1)
            written = LedgerEntries(refunds=[refund])
            await store.append([], at - day * DAY, (), written)

    for by in ("day,model", "model", "key,model,node"):
        whole, found = await usage(pool, f"?by={by}"), list[Any]()
        after: str | None = ""
        while after is not None:
            query = f"by={by}&limit=2&after={after}"
            status, page = await request(pool, "GET", f"/admin/usage?{query}")
            assert status == 200, page
            assert len(page["data"]) <= 2
            found += page["data"]
            after = page["next"]
            # A key may not see the names of machines as they are stored.
            assert NODE.encode() not in urlsafe_b64decode(f"{after or ''}==")
        assert found == whole
        _, *rows = await table(pool, f"&by={by}&limit=2")
        assert len(rows) == len(whole) in (3, 9)


async def test_default_is_the_last_thirty_days(tmp_path: Path) -> None:
    at = EPOCH
    async with serving(tmp_path, clock=LoopClock(lambda: at)) as pool:
        await chat(pool)

        for days, found in ((29, 1), (30, 0)):
            at = EPOCH + days * DAY
            assert len(await usage(pool)) == found


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?since=yesterday", "since"),
        ("?since=20261123", "since"),
        ("?until=2026-13-01", "until"),
        ("?until=0001-01-01&format=csv", "until"),
        ("?since=1969-12-31", "since"),
        ("?by=owner", "by"),
        ("?format=xml", "format"),
        ("?days=3", None),
        ("?after=x", "after"),
        ("?after=WzEsIlx1ZDgwMCIsIiIsMF0", "after"),  # half of a surrogate pair
        ("?after=WzEwMDAwMDAwMDAsIiIsIiIsMF0", "after"),  # the day 1000000000
        ("?limit=0", "limit"),
    ],
)
async def test_invalid_query_is_refused(
    pool: Pool, query: str, param: str | None
) -> None:
    status, answer = await request(pool, "GET", f"/admin/usage{query}")

    assert (status, answer["error"]["param"]) == (400, param)


async def test_first_day_of_all_is_a_day(tmp_path: Path) -> None:
    """The day with the number 0, as any other."""
    async with serving(tmp_path, clock=LoopClock(lambda: 0.0)) as pool:
        await chat(pool)

        for query in ("?since=1970-01-01", "?until=1970-01-01", "?until=1970-01-29"):
            assert [each["day"] for each in await usage(pool, query)] == ["1970-01-01"]
        assert await usage(pool, "?until=1970-01-31") == []
    async with serving(tmp_path, clock=LoopClock(lambda: EPOCH)) as pool:
        assert await usage(pool, "?until=1970-01-01") != []
        assert len(await usage(pool, "?since=1970-01-01")) == 1
