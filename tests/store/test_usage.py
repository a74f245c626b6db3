"""Usage by day, key, model and node."""

import asyncio
import sqlite3
from collections.abc import Collection
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from harness.databases import put_new_database
from shoal.domain.credentials import DAY
from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobLeased,
    JobStarted,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Webhook
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Call, Chat
from shoal.store.ledger import (
    MINUTES_KEPT,
    NO_ENTRIES,
    USAGE_DAYS,
    JobPlace,
    LedgerEntries,
    MinuteUsage,
    Refund,
    UsageField,
    UsagePage,
    UsageSum,
)
from shoal.store.sql.usage import UsageDays, _WantedSums
from shoal.store.sqlite.database import SqliteStore
from shoal.store.webhooks import WebhookDelivery
from store.query_plans import SUMS, recorded_statements

ONE = LeaseNumber(1)
EVERYTHING: tuple[UsageField, ...] = ("day", "key", "model", "node")


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    put_new_database(tmp_path / "shoal.db")
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    yield store
    await store.close()


def leased(name: str, owner: str = "al", model: str = "m") -> list[Fact]:
    chat = Chat(model, ({"role": "user", "content": "four"},))
    return [
        JobSubmitted(Job(JobId(name), chat, owner=owner)),
        JobLeased(JobId(name), WorkerId("w:n/m"), ONE, "free"),
        JobStarted(JobId(name), ONE),
    ]


def done(name: str, read: int = 10, written: int = 5) -> JobCompleted:
    return JobCompleted(JobId(name), ONE, Outcome("x", usage=Usage(read, written)))


async def complete(
    store: SqliteStore,
    name: str,
    at: float = 0.0,
    node: str = "w:n",
    cost: int = 0,
    **job: str,
) -> None:
    entries = LedgerEntries(places={JobId(name): JobPlace(node, cost)})
    await store.append([*leased(name, **job), done(name)], at, (), entries)


async def complete_call(
    store: SqliteStore, name: str, entries: LedgerEntries = NO_ENTRIES
) -> None:
    call = Call(f"f{name}", b"\x90", b"\x80")
    facts: list[Fact] = [
        JobSubmitted(Job(JobId(name), call, owner="al")),
        JobCompleted(JobId(name), ONE, Outcome("", value=b"\xc0")),
    ]
    await store.append(facts, 0.0, (), entries)


async def sums(
    store: SqliteStore, by: Collection[UsageField] = EVERYTHING, **more: Any
) -> list[UsageSum]:
    return (await store.usage.sums(0, 9999, by, 100, **more)).sums


async def test_usage_is_told_apart_by_all_four(store: SqliteStore) -> None:
    await complete(store, "a", cost=7)
    await complete(store, "b", cost=8)
    await complete(store, "c", node="w:o")
    await complete(store, "d", model="n")
    await complete(store, "e", owner="bo")
    await complete(store, "f", at=DAY)

    assert await sums(store) == [
        UsageSum(0, "al", "m", "w:n", 2, 20, 10, 15),
        UsageSum(0, "al", "m", "w:o", 1, 10, 5, 0),
        UsageSum(0, "al", "n", "w:n", 1, 10, 5, 0),
        UsageSum(0, "bo", "m", "w:n", 1, 10, 5, 0),
        UsageSum(1, "al", "m", "w:n", 1, 10, 5, 0),
    ]
    assert await sums(store, ["key"]) == [
        UsageSum(None, "al", None, None, 5, 50, 25, 15),
        UsageSum(None, "bo", None, None, 1, 10, 5, 0),
    ]
    assert await sums(store, ["model"], owner="bo") == [
        UsageSum(None, None, "m", None, 1, 10, 5, 0)
    ]
    assert await sums(store, []) == [UsageSum(None, None, None, None, 6, 60, 30, 15)]
    assert (await store.usage.sums(1, 1, ["day"], 100)).sums == [
        UsageSum(1, None, None, None, 1, 10, 5, 0)
    ]
    assert len((await store.usage.sums(0, 1, EVERYTHING, 3)).sums) == 3
    assert (await store.usage.sums(5, 9, [], 100)).sums == []
    assert (await store.keys.usage_of("al", 0)).requests == 5


@pytest.mark.parametrize("examined_max", [1, 3, 1000])
async def test_pages_together_have_each_sum_once(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, examined_max: int
) -> None:
    monkeypatch.setattr("shoal.store.sql.usage.EXAMINED_MAX", examined_max)
    for number in range(12):
        owner, model = ("al", "bo")[number % 2], ("m", "n", "o")[number % 3]
        at, node = (number % 5) * DAY, f"w:{number // 2 % 3}"
        await complete(store, f"{number}", at, node, owner=owner, model=model)
        await store.prune(0.0)  # some days are added up

    lists: list[Collection[UsageField]] = [EVERYTHING, ["day"], ["day", "model"]]
    lists += [["key", "model"], ["key"], [], ["node"], ["key", "node"]]
    lists += [["model", "node"], ["key", "model", "node"]]
    for by in lists:
        for only in (None, "al", "nobody"):
            whole = await store.usage.sums(1, 9999, by, 100, only)
            while whole.next is not None:
                rest = await store.usage.sums(1, 9999, by, 100, only, whole.next)
                whole = UsagePage(whole.sums + rest.sums, rest.next)
            for limit in (1, 2, 5):
                found: list[UsageSum] = []
                place = None
                while True:
                    page = await store.usage.sums(1, 9999, by, limit, only, place)
                    assert len(page.sums) <= limit
                    found += page.sums
                    if (place := page.next) is None:
                        break
                assert found == whole.sums
    (total,) = (await store.usage.sums(1, 9999, [], 1)).sums
    assert total.requests == 9


async def test_page_reads_no_more_rows_for_the_keys_after_it(
    store: SqliteStore, tmp_path: Path
) -> None:
    """Of a thousand keys on twelve days, in a list that adds the days up."""
    for day in range(13):
        refunds = [
            Refund(f"o{key:03}", "m", "w:n", -1)
            for key in range(1000 if day < 12 else 5)
        ]
        await store.append([], day * DAY, (), LedgerEntries(refunds=refunds))
    await store.prune(0.0)
    lists: list[Collection[UsageField]] = [["key"], ["key", "model"]]
    lists += [["key", "node"], ["key", "model", "node"]]

    with closing(sqlite3.connect(tmp_path / "shoal.db")) as sql:
        steps = count()
        sql.set_progress_handler(lambda: next(steps) < 0, 100)
        for by in lists:
            began = next(steps)
            page = _WantedSums(0, 12, by, 10, None).page(sql, None)
            assert [each.cost for each in page.sums] == [13] * 5 + [12] * 5
            assert page.next is not None
            few, began = next(steps) - began, next(steps)
            whole = _WantedSums(0, 12, by, 1000, None).page(sql, None)
            assert len(whole.sums) == 1000
            assert few < (next(steps) - began) / 20, by


def count_rows(path: Path) -> list[tuple[int, int]]:
    """Return the days that are added up, and the rows of all their sums."""
    query = "SELECT day, count(*) FROM usage_sums GROUP BY day"
    with closing(sqlite3.connect(path)) as sql:
        return sql.execute(query).fetchall()


async def test_days_that_are_over_are_added_up_once(
    store: SqliteStore, tmp_path: Path
) -> None:
    for number in range(12):
        await complete(store, f"{number}", model=f"m{number}", node=f"w:{number % 2}")
    await complete(store, "next", at=2 * DAY)
    await complete(store, "later", at=5 * DAY)
    assert count_rows(tmp_path / "shoal.db") == []
    for _ in range(2):
        await store.prune(0.0)

    # None, key, model, node, and pairs of these.
    assert count_rows(tmp_path / "shoal.db") == [
        (0, 1 + 1 + 12 + 2 + 12 + 2 + 12),
        (2, 7),
    ]
    assert [each.requests for each in await sums(store, ["node"])] == [6, 6, 2]


async def test_usage_of_a_day_that_was_over_is_counted(store: SqliteStore) -> None:
    """The coordinator's clock was set back."""
    for number, day in enumerate((3, 5, 3, 4, 5, 3, 9)):
        await complete(store, f"{number}", at=day * DAY)
        await store.prune(0.0)

        assert [each.requests for each in await sums(store, [])] == [number + 1]
    found = await sums(store, ["day"])
    assert [(each.day, each.requests) for each in found] == [
        (3, 3),
        (4, 1),
        (5, 2),
        (9, 1),
    ]


async def test_job_that_was_given_up_counts_where_it_was(store: SqliteStore) -> None:
    entries = LedgerEntries(places={JobId("a"): JobPlace("w:n", 0)})
    end = JobCancelled(JobId("a"), "enough", written=40)

    await store.append([*leased("a"), end], 0.0, (), entries)
    await store.append([*leased("b"), JobFailed(JobId("b"), "broken")], 0.0)

    assert await sums(store) == [UsageSum(0, "al", "m", "w:n", 1, 1, 10, 0)]


async def test_calls_of_functions_name_no_model(store: SqliteStore) -> None:
    await complete_call(store, "a")
    await complete_call(store, "b")

    assert await sums(store) == [UsageSum(0, "al", "", "", 2, 0, 0, 0)]


async def test_cost_of_calls_is_counted(store: SqliteStore) -> None:
    for name, cost in (("a", 7), ("b", 8)):
        places = {JobId(name): JobPlace("", cost)}
        await complete_call(store, name, LedgerEntries(places=places))
    await complete_call(store, "free")

    assert await sums(store) == [UsageSum(0, "al", "", "", 3, 0, 0, 15)]
    assert (await store.keys.usage_of("al", 0)).requests == 3


async def test_refund_takes_back_the_cost_alone(store: SqliteStore) -> None:
    await complete(store, "a", cost=7)

    await store.append(
        [], 1.0, (), LedgerEntries(refunds=[Refund("al", "m", "w:n", 7)])
    )

    assert await sums(store) == [UsageSum(0, "al", "m", "w:n", 1, 10, 5, 0)]
    assert (await store.keys.usage_of("al", 0)).requests == 1


async def test_day_with_too_many_rows_names_only_keys(store: SqliteStore) -> None:
    store._usage_days = UsageDays(rows_max=2)

    for number in range(5):
        await complete(store, f"j{number}", model=f"m{number}")
    await complete(store, "again", model="m0")

    assert await sums(store) == [
        UsageSum(0, "al", "", "", 3, 30, 15, 0),
        UsageSum(0, "al", "m0", "w:n", 2, 20, 10, 0),
        UsageSum(0, "al", "m1", "w:n", 1, 10, 5, 0),
    ]
    await complete(store, "next", at=DAY, model="m9")
    assert (await sums(store))[-1] == UsageSum(1, "al", "m9", "w:n", 1, 10, 5, 0)


async def test_batches_that_were_rolled_back_take_no_rows(store: SqliteStore) -> None:
    store._usage_days = UsageDays(rows_max=2)
    webhook = WebhookDelivery(JobId("a"), Webhook("http://receiver/", "secret"))
    twice = LedgerEntries(deliveries=[webhook, webhook])
    await complete(store, "old")
    day = USAGE_DAYS + 1

    for _ in range(3):
        with pytest.raises(StoreError):
            await store.append([*leased("a"), done("a")], day * DAY, (), twice)
    assert [each.day for each in await sums(store)] == [0]
    for number in range(2):
        await complete(store, f"j{number}", at=day * DAY, model=f"m{number}")

    assert await sums(store) == [
        UsageSum(day, "al", "m0", "w:n", 1, 10, 5, 0),
        UsageSum(day, "al", "m1", "w:n", 1, 10, 5, 0),
    ]


async def test_batch_behind_one_that_is_rolled_back_has_its_rows(
    store: SqliteStore,
) -> None:
    store._usage_days = UsageDays(rows_max=1)
    webhook = WebhookDelivery(JobId("a"), Webhook("http://receiver/", "secret"))
    twice = LedgerEntries(deliveries=[webhook, webhook])

    failed, stored = await asyncio.gather(
        store.append([*leased("a"), done("a")], 1.0, (), twice),
        complete(store, "b"),
        return_exceptions=True,
    )

    assert isinstance(failed, StoreError)
    assert stored is None
    assert await sums(store) == [UsageSum(0, "al", "m", "w:n", 1, 10, 5, 0)]


async def test_usage_is_kept_for_some_days(store: SqliteStore) -> None:
    for number, day in enumerate((0, 1, USAGE_DAYS + 1)):
        await complete(store, f"j{number}", at=day * DAY)

    assert [each.day for each in await sums(store, ["day"])] == [1, USAGE_DAYS + 1]
    assert [each.requests for each in await sums(store, [])] == [2]


async def test_usage_of_one_key_does_not_read_that_of_all(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    with recorded_statements() as statements:
        store = SqliteStore(path)
        await store.open()
        await sums(store, ["model"], owner="al")
        await store.close()

    (query,) = (each for each in statements if SUMS in each and "OFFSET" in each)
    with closing(sqlite3.connect(path)) as sql:
        plan = sql.execute(f"EXPLAIN QUERY PLAN {query}", statements[query]).fetchall()
    steps = "".join(step for *_, step in plan)
    assert "usage_by_model USING PRIMARY KEY (day=? AND owner=? AND model>?)" in steps
    assert "PRIMARY KEY (fields=? AND day=? AND owner=? AND model>?)" in steps


async def test_minutes_are_added_up_and_kept_for_a_day(store: SqliteStore) -> None:
    await complete(store, "a", at=59.0)
    await complete(store, "b", at=60.0)
    await store.append(leased("c"), 119.0)
    cut = JobCancelled(JobId("c"), "left", written=8)
    await store.append([cut, *leased("d"), done("d")], 119.0)

    first, second = await store.usage.minutes(0)
    assert first == MinuteUsage(0, 1, 5)
    assert second.jobs == 2
    assert second.tokens > 10  # with those of the job that was cancelled
    assert await store.usage.minutes(1) == [second]

    await complete(store, "e", at=60.0 * MINUTES_KEPT)

    assert [each.minute for each in await store.usage.minutes(0)] == [1, MINUTES_KEPT]


async def test_minutes_have_the_most_jobs_that_were_open(store: SqliteStore) -> None:
    await complete(store, "a", at=60.0)
    for running, queued in ((2, 7), (3, 5)):
        await store.usage.record_open_jobs(1, running, queued)
    await complete(store, "b", at=61.0)
    await store.usage.record_open_jobs(2, 1, 0)

    first, second = await store.usage.minutes(0)
    assert first == MinuteUsage(1, 2, 10, running=3, queued=7)
    assert second == MinuteUsage(2, 0, 0, running=1, queued=0)

    await store.usage.record_open_jobs(1 + MINUTES_KEPT, 1, 0)

    assert [each.minute for each in await store.usage.minutes(0)] == [
        2,
        1 + MINUTES_KEPT,
    ]
