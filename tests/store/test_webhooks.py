"""The contract of stores for webhook deliveries."""

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


async def end_job(store: Store, each: WebhookDelivery, at: float) -> None:
    """End a job with a webhook."""
    work = Chat("m", ({"role": "user", "content": "hi"},))
    job = Job(each.job_id, work, terms=JobTerms(webhook=each.webhook))
    facts: list[Fact] = [JobSubmitted(job), JobFailed(each.job_id, "no")]
    await store.append(facts, at, entries=LedgerEntries(deliveries=(each,)))


async def test_delivery_is_due_when_its_job_has_ended(store: Store) -> None:
    assert await store.webhooks.next_due() is None

    await end_job(store, delivery(), 10.0)

    assert await store.webhooks.next_due() == 10.0
    assert await store.webhooks.due(9.9, 5) == []
    assert await store.webhooks.due(10.0, 5) == [
        DeliveryState(delivery(), 0, 10.0, None)
    ]


async def test_delivery_is_stored_with_its_facts_or_not_at_all(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.append(
            [JobFailed(JobId("j"), "there is no such job")],
            1.0,
            entries=LedgerEntries(deliveries=(delivery(),)),
        )

    assert await store.webhooks.state_of(JobId("j")) is None


async def test_oldest_deliveries_come_first(store: Store) -> None:
    for at, name in [(3.0, "c"), (1.0, "a"), (2.0, "b")]:
        await end_job(store, delivery(name), at)

    due = await store.webhooks.due(5.0, 2)

    assert [each.delivery.job_id for each in due] == ["a", "b"]


async def test_jobs_and_hosts_can_be_excluded(store: Store) -> None:
    await end_job(store, delivery("a", "one.example"), 1.0)
    await end_job(store, delivery("b", "two.example"), 2.0)
    await end_job(store, delivery("c", "two.example"), 3.0)
    without, hosts = {JobId("b")}, ["one.example"]

    due = await store.webhooks.due(9.0, 9, without=without, hosts_without=hosts)
    next_due = await store.webhooks.next_due(without=without, hosts_without=hosts)

    assert [each.delivery.job_id for each in due] == ["c"]
    assert next_due == 3.0


async def test_attempts_are_counted_with_their_results(store: Store) -> None:
    await end_job(store, delivery(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), "HTTP 500", 6.0)

    assert await store.webhooks.state_of(JobId("j")) == DeliveryState(
        delivery(), 1, 6.0, "HTTP 500"
    )
    assert await store.webhooks.due(5.0, 9) == []


@pytest.mark.parametrize("error", [None, "HTTP 410"])
async def test_secret_of_an_ended_delivery_is_deleted(
    store: Store, error: str | None
) -> None:
    await end_job(store, delivery(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), error, None)

    told = await store.webhooks.state_of(JobId("j"))
    assert told == DeliveryState(
        WebhookDelivery(JobId("j"), Webhook(delivery().webhook.url, "")), 1, None, error
    )
    assert await store.webhooks.next_due() is None


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

    assert [each.delivery.host for each in await store.webhooks.due(1.0, 1)] == [""]
