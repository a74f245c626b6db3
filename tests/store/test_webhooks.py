"""The contract of stores for webhook deliveries."""

import math
from collections.abc import Collection

import pytest

from shoal.domain.errors import StoreError
from shoal.domain.facts import Fact, JobFailed, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Webhook
from shoal.domain.work import Chat
from shoal.store.ledger import LedgerEntries
from shoal.store.port import Store
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


async def test_delivery_is_due_when_its_job_has_ended(store: Store) -> None:
    assert await store.webhooks.next(math.inf) is None

    await end_job(store, delivery(), 10.0)

    assert await store.webhooks.next(9.9) is None
    assert await store.webhooks.next(10.0) == DeliveryState(
        delivery(), "alice", "alice one.example:443", 0, 10.0, None
    )


async def test_delivery_is_stored_with_its_facts_or_not_at_all(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.append(
            [JobFailed(JobId("j"), "there is no such job")],
            1.0,
            entries=LedgerEntries(deliveries=(delivery(),)),
        )

    assert await store.webhooks.state_of(JobId("j")) is None


async def test_oldest_delivery_comes_first(store: Store) -> None:
    for at, name in [(3.0, "c"), (1.0, "a"), (2.0, "b")]:
        await end_job(store, delivery(name), at)

    due = await store.webhooks.next(5.0)

    assert due is not None
    assert due.delivery.job_id == "a"


async def test_jobs_keys_and_lanes_can_be_excluded(store: Store) -> None:
    await end_job(store, delivery("a"), 1.0)
    await end_job(store, delivery("b"), 2.0)
    await end_job(store, delivery("c"), 3.0, "bob")
    await end_job(store, delivery("d", "one.example:8443"), 4.0)
    lanes = ["bob one.example:443", "alice one.example:443"]

    async def next_without(**excluded: Collection[str]) -> str:
        due = await store.webhooks.next(9.0, **excluded)  # type: ignore[arg-type]
        return "" if due is None else due.delivery.job_id

    assert await next_without(without=["a"]) == "b"
    assert await next_without(owners_without=["alice"]) == "c"
    assert await next_without(lanes_without=lanes) == "d"
    assert await next_without(lanes_without=lanes, without={"d"}) == ""


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
    assert await store.webhooks.next(5.0) is None


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
    assert await store.webhooks.next(math.inf) is None


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

    due = await store.webhooks.next(1.0)
    assert due is not None
    assert (due.delivery.host, due.lane) == ("", "alice ")
