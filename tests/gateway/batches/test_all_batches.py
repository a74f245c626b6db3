"""Batches over HTTP: all keys' for operators, page by page."""

from gateway.batches.uploads import create, ended
from gateway.keys import client, make_key, request
from gateway.serving import Pool


async def test_batches_of_all_keys_are_listed_newest_first(pool: Pool) -> None:
    alice = await make_key(pool)
    created = []
    for key in (alice, await make_key(pool, "bob"), alice):
        async with client(pool, key) as each:
            batch = await create(each, ["no request"])
            await ended(each, batch.id)
            created.append(batch.id)
    newest = created[::-1]

    _, first = await request(pool, "GET", "/admin/batches?limit=2")
    _, second = await request(
        pool, "GET", f"/admin/batches?limit=2&before={first['next']}"
    )
    _, own = await request(pool, "GET", "/admin/batches", key=alice)

    pages = first["data"] + second["data"]
    assert [(each["id"], each["owner"]) for each in pages] == [
        (newest[0], "alice"),
        (newest[1], "bob"),
        (newest[2], "alice"),
    ]
    assert second["next"] is None
    assert pages[0]["status"] == "failed"
    assert [each["id"] for each in own["data"]] == [newest[0], newest[2]]
    status, _ = await request(
        pool, "GET", f"/admin/batches?before={newest[1]}", key=alice
    )
    assert status == 404
