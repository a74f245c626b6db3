"""Lists over HTTP: pages, and what one key may read."""

import asyncio
from typing import Any

import pytest

from gateway.keys import make_key, request
from gateway.serving import Pool
from shoal.domain.facts import Fact, JobCancelled, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.http.list_limits import LISTS_WAITING_MAX
from shoal.store.port import JobFilter, StoredJobPage

IN_MEMORY = {
    *("/v1/models", "/v1/tasks", "/v1/trust/list"),
    *("/admin/models", "/admin/nodes", "/admin/runs", "/admin/aliases"),
    "/admin/deployments",
    *("/ollama/api/tags", "/ollama/api/ps"),
}
"""Lists of what is connected or bounded, a user's workers, and the latest runs."""


async def pages(pool: Pool, path: str, cursor: str) -> list[Any]:
    """Read all pages of a list, two entries each; return the entries."""
    found: list[Any] = []
    query = "limit=2"
    while True:
        status, page = await request(pool, "GET", f"{path}?{query}")
        assert status == 200, page
        (entries,) = (
            page[name] for name in ("data", "transfers", "jobs") if name in page
        )
        assert len(entries) <= 2
        found += entries
        if page["next"] is None:
            return found
        query = f"limit=2&{cursor}={page['next']}"


async def store_jobs(pool: Pool, number: int, owner: str = "default") -> list[str]:
    assert pool.gateway is not None
    names = [f"{owner}{each}" for each in range(number)]
    for name in names:
        job = Job(JobId(name), Chat("m", ()), owner=owner)
        facts: list[Fact] = [JobSubmitted(job), JobCancelled(job.id, "enough")]
        await pool.gateway.store.append(facts, 1.0)
    return names


def test_every_list_is_limited() -> None:
    listing = [each for each in OPERATIONS if each.summary.startswith("List ")]

    assert len(listing) > len(IN_MEMORY)
    for each in listing:
        if each.path in IN_MEMORY:
            continue
        assert each.lists, each.path
        assert each.query is not None, each.path
        fields = each.query.__struct_fields__
        assert "limit" in fields, each.path
        assert {"before", "after"} & {*fields}, each.path


async def test_pages_of_jobs_are_complete(pool: Pool) -> None:
    names = await store_jobs(pool, 5)

    for path in ("/admin/jobs", "/v1/jobs"):
        listed = await pages(pool, path, "before")
        assert [each["id"] for each in listed] == names[::-1]


async def test_pages_of_jobs_go_on_where_one_was_deleted(pool: Pool) -> None:
    names = await store_jobs(pool, 4)
    assert pool.gateway is not None
    for path, field in (("/admin/jobs", "data"), ("/v1/jobs", "jobs")):
        _, first = await request(pool, "GET", f"{path}?limit=1")
        assert await pool.gateway.store.delete_job(JobId(names.pop()))

        _, second = await request(pool, "GET", f"{path}?before={first['next']}")

        assert [each["id"] for each in second[field]] == names[::-1]


async def test_page_before_another_keys_job_is_rejected(pool: Pool) -> None:
    await store_jobs(pool, 2)
    reader = await make_key(pool, "al", scope="read")

    for path in ("/admin/jobs", "/v1/jobs"):
        for before in ("default0", "none"):
            url = f"{path}?before={before}"
            status, told = await request(pool, "GET", url, key=reader)
            assert status == 400
            assert "never existed" in str(told)


async def test_pages_of_accounts_and_transfers_are_complete(pool: Pool) -> None:
    for name in ("al", "bo", "cy", "di", "al", "al"):
        credit = {"amount": 7}
        await request(pool, "POST", f"/admin/accounts/{name}/credit", credit)

    names = [each["name"] for each in await pages(pool, "/admin/accounts", "after")]
    moved = await pages(pool, "/admin/accounts/al", "before")

    assert names == ["user:al", "user:bo", "user:cy", "user:di", "world"]
    assert [each["number"] for each in moved] == [6, 5, 1]


@pytest.mark.parametrize("kind", ["keys", "tokens"])
async def test_pages_of_credentials_are_complete(pool: Pool, kind: str) -> None:
    before = await pages(pool, f"/admin/{kind}", "after")
    for name in ("al", "bo", "cy"):
        await request(pool, "POST", f"/admin/{kind}", {"name": name})

    found = await pages(pool, f"/admin/{kind}", "after")
    status, _ = await request(pool, "GET", f"/admin/{kind}?after=none")

    assert [each["name"] for each in found[len(before) :]] == ["al", "bo", "cy"]
    assert status == 400


@pytest.mark.parametrize("kind", ["keys", "tokens"])
async def test_pages_of_credentials_go_on_where_one_was_deleted(
    pool: Pool, kind: str
) -> None:
    gateway = pool.gateway
    assert gateway is not None
    book = gateway.access.keyring.cache if kind == "keys" else gateway.admission.tokens
    before = len(await pages(pool, f"/admin/{kind}", "after"))
    for name in ("al", "bo", "cy"):
        await request(pool, "POST", f"/admin/{kind}", {"name": name})
    path = f"/admin/{kind}?limit={before + 2}"
    _, first = await request(pool, "GET", path)
    await request(pool, "DELETE", f"/admin/{kind}/bo")
    book.drop_ended(gateway.clock.wall() + 1.0)

    _, second = await request(pool, "GET", f"{path}&after={first['next']}")
    _, third = await request(
        pool, "GET", f"/admin/{kind}?after={first['data'][-2]['id']}"
    )

    assert first["data"][-1]["name"] == "bo"
    for page in (second, third):
        assert [each["name"] for each in page["data"]] == ["cy"]


async def test_key_with_many_lists_at_once_delays_only_itself(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.gateway is not None
    await store_jobs(pool, 1, "al")
    keys = {name: await make_key(pool, name, scope="read") for name in ("al", "bo")}
    go_on = asyncio.Event()
    reading: list[str | None] = []
    recent = pool.gateway.store.recent

    async def slow(wanted: JobFilter, *limits: int) -> StoredJobPage:
        reading.append(wanted.owner)
        if wanted.owner == "al":
            await go_on.wait()
        return await recent(wanted, *limits)

    monkeypatch.setattr(pool.gateway.store, "recent", slow)
    flood = [
        asyncio.create_task(request(pool, "GET", "/v1/jobs", key=keys["al"]))
        for _ in range(LISTS_WAITING_MAX + 10)
    ]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)

    status, page = await request(pool, "GET", "/v1/jobs", key=keys["bo"])

    assert (status, page["jobs"]) == (200, [])
    assert reading == ["al", "bo"]
    go_on.set()
    statuses = [(await each)[0] for each in flood]
    assert statuses.count(200) == 1 + LISTS_WAITING_MAX
    assert statuses.count(429) == 9
