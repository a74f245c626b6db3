"""What every store keeps of calls of webhooks."""

import pytest

from shoal.domain.errors import StoreError
from shoal.domain.facts import Fact, JobFailed, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Webhook
from shoal.domain.work import Chat
from shoal.store.ledger import LedgerEntries
from shoal.store.port import Store
from shoal.store.webhooks import DeliveryState, WebhookDelivery


def call(name: str = "j", host: str = "one.example") -> WebhookDelivery:
    return WebhookDelivery(
        JobId(name), Webhook(f"https://{host}/hook?x=1", "shh-shh-shh-shh")
    )


async def end(store: Store, each: WebhookDelivery, at: float) -> None:
    """Have a job end that has a webhook."""
    work = Chat("m", ({"role": "user", "content": "hi"},))
    job = Job(each.job_id, work, terms=JobTerms(webhook=each.webhook))
    facts: list[Fact] = [JobSubmitted(job), JobFailed(each.job_id, "no")]
    await store.append(facts, at, entries=LedgerEntries(deliveries=(each,)))


async def test_call_is_due_when_its_job_has_ended(store: Store) -> None:
    assert await store.webhooks.next_due() is None

    await end(store, call(), 10.0)

    assert await store.webhooks.next_due() == 10.0
    assert await store.webhooks.due(9.9, 5) == []
    assert await store.webhooks.due(10.0, 5) == [DeliveryState(call(), 0, 10.0, None)]


async def test_call_is_written_with_its_facts_or_not_at_all(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.append(
            [JobFailed(JobId("j"), "there is no such job")],
            1.0,
            entries=LedgerEntries(deliveries=(call(),)),
        )

    assert await store.webhooks.state_of(JobId("j")) is None


async def test_those_who_waited_longest_come_first(store: Store) -> None:
    for at, name in [(3.0, "c"), (1.0, "a"), (2.0, "b")]:
        await end(store, call(name), at)

    due = await store.webhooks.due(5.0, 2)

    assert [each.delivery.job_id for each in due] == ["a", "b"]


async def test_jobs_and_hosts_can_be_left_out(store: Store) -> None:
    await end(store, call("a", "one.example"), 1.0)
    await end(store, call("b", "two.example"), 2.0)
    await end(store, call("c", "two.example"), 3.0)
    without, hosts = {JobId("b")}, ["one.example"]

    due = await store.webhooks.due(9.0, 9, without=without, hosts_without=hosts)
    next_due = await store.webhooks.next_due(without=without, hosts_without=hosts)

    assert [each.delivery.job_id for each in due] == ["c"]
    assert next_due == 3.0


async def test_attempts_are_counted_with_what_came_of_them(store: Store) -> None:
    await end(store, call(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), "HTTP 500", 6.0)

    assert await store.webhooks.state_of(JobId("j")) == DeliveryState(
        call(), 1, 6.0, "HTTP 500"
    )
    assert await store.webhooks.due(5.0, 9) == []


@pytest.mark.parametrize("error", [None, "HTTP 410"])
async def test_secret_of_a_call_that_is_over_is_forgotten(
    store: Store, error: str | None
) -> None:
    await end(store, call(), 1.0)

    await store.webhooks.record_attempt(JobId("j"), error, None)

    told = await store.webhooks.state_of(JobId("j"))
    assert told == DeliveryState(
        WebhookDelivery(JobId("j"), Webhook(call().webhook.url, "")), 1, None, error
    )
    assert await store.webhooks.next_due() is None


async def test_call_is_pruned_with_its_job(store: Store) -> None:
    await end(store, call("old"), 1.0)
    await end(store, call("new"), 20.0)

    await store.prune(10.0)
    await store.webhooks.record_attempt(
        JobId("old"), "HTTP 500", 30.0
    )  # it was under way

    assert await store.webhooks.state_of(JobId("old")) is None
    assert await store.webhooks.state_of(JobId("new")) is not None


async def test_url_that_cannot_be_read_has_no_host(store: Store) -> None:
    odd = WebhookDelivery(JobId("j"), Webhook("http://[::1/", "shh-shh-shh-shh"))

    await end(store, odd, 1.0)

    assert [each.delivery.host for each in await store.webhooks.due(1.0, 1)] == [""]
