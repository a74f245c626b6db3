"""The contract of stores for webhook deliveries."""

import itertools
import sqlite3
from collections.abc import Collection
from contextlib import closing

import pytest

from shoal.domain.errors import StoreError
from shoal.domain.facts import Fact, JobFailed, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Webhook
from shoal.domain.work import Chat
from shoal.store.ledger import LedgerEntries
from shoal.store.port import Store
from shoal.store.sql.webhooks import FIRST_OF_LANES
from shoal.store.sqlite.database import migrate
from shoal.store.webhooks import DeliveryState, WebhookDelivery


def delivery(name: str = "j", host: str = "one.example") -> WebhookDelivery:
    return WebhookDelivery(
        JobId(name), Webhook(f"https://{host}/hook?x=1", "shh-shh-shh-shh")
    )


async def end_job(
    store: Store, each: WebhookDelivery, at: float, owner: str = "alice"
) -> None:
    """End a job with a webhook."""
    work = Chat("m", ({"role": "user", "content": "hi"},))
    job = Job(each.job_id, work, owner=owner, terms=JobTerms(webhook=each.webhook))
    facts: list[Fact] = [JobSubmitted(job), JobFailed(each.job_id, "no")]
    await store.append(facts, at, entries=LedgerEntries(deliveries=(each,)))


async def first(store: Store, without: Collection[JobId] = ()) -> set[str]:
    """Return the job of the first delivery of each lane."""
    lanes = await store.webhooks.first_of_lanes(without)
    return {each.delivery.job_id for each in lanes}


async def test_delivery_is_due_when_its_job_has_ended(store: Store) -> None:
    assert await store.webhooks.first_of_lanes() == []

    await end_job(store, delivery(), 10.0)

    assert await store.webhooks.first_of_lanes() == [
        DeliveryState(delivery(), "alice", "alice one.example:443", 0, 10.0, None)
    ]


async def test_delivery_is_stored_with_its_facts_or_not_at_all(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.append(
            [JobFailed(JobId("j"), "there is no such job")],
            1.0,
            entries=LedgerEntries(deliveries=(delivery(),)),
        )

    assert await store.webhooks.state_of(JobId("j")) is None


async def test_oldest_delivery_of_a_lane_comes_first(store: Store) -> None:
    for at, name in [(3.0, "c"), (1.0, "a"), (2.0, "b")]:
        await end_job(store, delivery(name), at)

    assert await first(store) == {"a"}
    assert await first(store, without={JobId("a")}) == {"b"}


async def test_each_key_has_a_lane_for_each_host_and_port(store: Store) -> None:
    await end_job(store, delivery("a"), 1.0)
    await end_job(store, delivery("b"), 2.0)
    await end_job(store, delivery("c"), 3.0, "bob")
    await end_job(store, delivery("d", "one.example:8443"), 4.0)
    await end_job(store, delivery("e", "another.example"), 5.0, "carol")

    assert await first(store) == {"a", "c", "d", "e"}
    assert await first(store, without={JobId("a"), JobId("c")}) == {"b", "d", "e"}


def test_a_backlog_makes_the_choice_no_slower() -> None:
    def steps(backlog: int) -> int:
        """Count the steps of SQLite's virtual machine."""
        count = itertools.count()
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as sql:
            migrate(sql)
            sql.executemany(
                "INSERT INTO webhook_deliveries"
                " (job_id, url, secret, owner, host, due_at)"
                " VALUES (?, '', '', ?, ?, ?)",
                [
                    (f"{owner}{host}{number}", owner, host, number)
                    for owner in ("alice", "bob")
                    for host in ("one:443", "two:443")
                    for number in range(backlog)
                ],
            )
            sql.set_progress_handler(lambda: next(count) < 0, 1)
            rows = sql.execute(FIRST_OF_LANES, ('["aliceone:4430"]',)).fetchall()
        assert len(rows) == 4
        return next(count)

    assert steps(2000) == steps(20)


async def test_no_delivery_waits_longer_than_its_delay(store: Store) -> None:
    """As when the clock has jumped back."""
    for name in ["new", "late", "early"]:
        await end_job(store, delivery(name), 1000.0)
    await store.webhooks.record_attempt(JobId("late"), "HTTP 500", 1005.0)
    await store.webhooks.record_attempt(JobId("early"), "HTTP 500", 502.0)

    await store.webhooks.limit_delays(500.0, [0.0, 6.0])

    states = [await store.webhooks.state_of(JobId(n)) for n in ["new", "late", "early"]]
    assert [state and state.due_at for state in states] == [500.0, 500.0, 502.0]


async def test_attempts_are_counted_with_their_results(store: Store) -> None:
    await end_job(store, delivery(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), "HTTP 500", 6.0)

    assert await store.webhooks.state_of(JobId("j")) == DeliveryState(
        delivery(), "alice", "alice one.example:443", 1, 6.0, "HTTP 500"
    )


@pytest.mark.parametrize("error", [None, "HTTP 410"])
async def test_secret_of_an_ended_delivery_is_deleted(
    store: Store, error: str | None
) -> None:
    await end_job(store, delivery(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), error, None)

    ended = await store.webhooks.state_of(JobId("j"))
    assert ended is not None
    assert (ended.delivery.webhook.secret, ended.due_at, ended.error) == (
        "",
        None,
        error,
    )
    assert await first(store) == set()


async def test_delivery_is_pruned_with_its_job(store: Store) -> None:
    await end_job(store, delivery("old"), 1.0)
    await end_job(store, delivery("new"), 20.0)

    await store.prune(10.0)
    await store.webhooks.record_attempt(
        JobId("old"), "HTTP 500", 30.0
    )  # it was in progress

    assert await store.webhooks.state_of(JobId("old")) is None
    assert await store.webhooks.state_of(JobId("new")) is not None


async def test_invalid_url_has_no_host(store: Store) -> None:
    odd = WebhookDelivery(JobId("j"), Webhook("http://[::1/", "shh-shh-shh-shh"))

    await end_job(store, odd, 1.0)

    (due,) = await store.webhooks.first_of_lanes()
    assert (due.delivery.host, due.lane) == ("", "alice ")
