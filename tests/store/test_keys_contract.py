"""The contract of stores for keys, join tokens and usage."""

from dataclasses import replace

import pytest
from msgspec import structs

from shoal.domain.credentials import (
    DAY,
    JoinToken,
    Key,
    KeyUsage,
    Quota,
    Scope,
    digest_of,
)
from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority, TimeLimit
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Chat, Completion, Embedding, Work
from shoal.store.port import Store

ONE = LeaseNumber(1)
CHAT = Chat("m", ({"role": "user", "content": "12 bytes, or"},))

ALICE = Key(
    "key_1",
    "alice",
    digest_of("sk-1"),
    "sk-",
    Scope.USE,
    10.0,
    99.5,
    None,
    Quota(1, 2, 3, 2**53 - 1),
    Priority.LOW,
)
BOB = Key("key_2", "bob", digest_of("sk-2"), "", Scope.ADMIN, 11.0)
LAB = JoinToken(
    "token_1", "lab", digest_of("jt-1"), 10.0, 20.0, None, 2, ("a*", 'odd "m"')
)
OPEN = JoinToken("token_2", "open", digest_of("jt-2"), 11.0)


def done(
    name: str, owner: str = "alice", work: Work = CHAT, outcome: Outcome | None = None
) -> list[Fact]:
    job_id = JobId(name)
    outcome = outcome or Outcome("text", usage=Usage(3, 4))
    return [
        JobSubmitted(Job(job_id, work, owner=owner)),
        JobLeased(job_id, WorkerId("w"), ONE, ""),
        JobCompleted(job_id, ONE, outcome),
    ]


async def test_new_store_is_empty(store: Store) -> None:
    assert await store.keys.keys.all() == []
    assert await store.keys.tokens.all() == []
    assert await store.keys.usage_of("alice", 0) == KeyUsage()
    assert await store.keys.usage_by_owner(0, ["al"]) == {}


async def test_keys_survive_storage(store: Store) -> None:
    for key in (ALICE, BOB):
        await store.keys.keys.add(key)

    assert await store.keys.keys.all() == [ALICE, BOB]


async def test_key_is_revoked_once(store: Store) -> None:
    await store.keys.keys.add(ALICE)

    await store.keys.keys.revoke(ALICE.id, 50.0)
    await store.keys.keys.revoke(ALICE.id, 60.0)
    await store.keys.keys.revoke("key_none", 60.0)

    assert await store.keys.keys.all() == [replace(ALICE, revoked_at=50.0)]


@pytest.mark.parametrize(
    "second",
    [
        replace(BOB, name="alice"),
        replace(BOB, id=ALICE.id),
        replace(BOB, digest=ALICE.digest),
    ],
    ids=["name", "id", "digest"],
)
async def test_valid_keys_are_unique(store: Store, second: Key) -> None:
    await store.keys.keys.add(ALICE)

    with pytest.raises(StoreError):
        await store.keys.keys.add(second)

    assert await store.keys.keys.all() == [ALICE]


async def test_name_of_a_revoked_key_can_be_reused(
    store: Store,
) -> None:
    await store.keys.keys.add(ALICE)
    await store.keys.keys.revoke(ALICE.id, 50.0)

    await store.keys.keys.add(replace(BOB, name="alice"))

    assert [key.name for key in await store.keys.keys.all()] == ["alice", "alice"]


async def test_tokens_are_stored_with_their_uses(
    store: Store,
) -> None:
    for token in (LAB, OPEN):
        await store.keys.tokens.add(token)

    await store.keys.bind_worker(LAB.id, "wire:one")
    await store.keys.bind_worker(LAB.id, "wire:two 'é'")
    await store.keys.bind_worker(LAB.id, "wire:one")

    bound = replace(LAB, workers=frozenset({"wire:one", "wire:two 'é'"}))
    assert await store.keys.tokens.all() == [bound, OPEN]


async def test_token_is_revoked_once(store: Store) -> None:
    await store.keys.tokens.add(OPEN)

    await store.keys.tokens.revoke(OPEN.id, 50.0)
    await store.keys.tokens.revoke(OPEN.id, 60.0)

    assert await store.keys.tokens.all() == [replace(OPEN, revoked_at=50.0)]


async def test_prune_deletes_expired_keys_and_tokens(
    store: Store,
) -> None:
    expired = replace(OPEN, id="token_3", name="c", digest=b"3", expires_at=20.0)
    for token in (LAB, OPEN, expired):
        await store.keys.tokens.add(token)
    await store.keys.bind_worker(LAB.id, "wire:one")
    await store.keys.tokens.revoke(OPEN.id, 50.0)
    for key in (ALICE, BOB):
        await store.keys.keys.add(key)

    await store.prune(50.0)
    # Workers that used a token of limited uses may rejoin after it has expired.
    assert {token.name for token in await store.keys.tokens.all()} == {"lab", "open"}
    assert {key.name for key in await store.keys.keys.all()} == {"alice", "bob"}

    await store.prune(100.0)
    assert {token.name for token in await store.keys.tokens.all()} == {"lab"}
    assert {key.name for key in await store.keys.keys.all()} == {"bob"}

    await store.keys.tokens.revoke(LAB.id, 101.0)
    await store.prune(102.0)
    assert await store.keys.tokens.all() == []


async def test_usage_is_counted_by_owner_and_day(
    store: Store,
) -> None:
    await store.append(done("a"), 5 * DAY + 1.0)
    await store.append([*done("b"), *done("c", "bob")], 5 * DAY + 2.0)
    await store.append(done("d"), 6 * DAY)

    assert await store.keys.usage_of("alice", 5) == KeyUsage(3, 9, 12, 14)
    assert await store.keys.usage_of("alice", 6) == KeyUsage(3, 9, 12, 7)
    assert await store.keys.usage_of("alice", 7) == KeyUsage(3, 9, 12, 0)
    assert await store.keys.usage_by_owner(6, ["alice", "bob", "eve"]) == {
        "alice": KeyUsage(3, 9, 12, 7),
        "bob": KeyUsage(1, 3, 4, 0),
    }


async def test_usage_outlives_the_jobs(store: Store) -> None:
    await store.append(done("a"), 1.0)

    assert await store.prune(2.0) == 1

    assert (await store.keys.usage_of("alice", 0)).tokens == 7


@pytest.mark.parametrize("written", [0, 401])
@pytest.mark.parametrize(
    "end",
    [JobCancelled(JobId("a"), "left"), JobExpired(JobId("a"), TimeLimit.TOTAL, "over")],
    ids=["cancelled", "expired"],
)
async def test_cancelled_job_counts_its_output(
    store: Store, end: JobCancelled | JobExpired, written: int
) -> None:
    await store.append([JobSubmitted(Job(end.job_id, CHAT, owner="alice"))], 1.0)

    await store.append([structs.replace(end, written=written)], 2.0)

    so_far = KeyUsage(1, 3, 101, 104) if written else KeyUsage()
    assert await store.keys.usage_of("alice", 0) == so_far


async def test_failed_job_is_not_counted(store: Store) -> None:
    job_id = JobId("a")
    await store.append([JobSubmitted(Job(job_id, CHAT, owner="alice"))], 1.0)

    await store.append([JobFailed(job_id, "out of memory")], 2.0)

    assert await store.keys.usage_of("alice", 0) == KeyUsage()


async def test_failed_batch_counts_nothing(
    store: Store,
) -> None:
    with pytest.raises(StoreError):
        await store.append([*done("a"), JobCancelled(JobId("none"), "")], 1.0)

    assert await store.keys.usage_of("alice", 0) == KeyUsage()


@pytest.mark.parametrize(
    ("work", "outcome", "used"),
    [
        (CHAT, Outcome("12345"), KeyUsage(1, 3, 2)),
        (CHAT, Outcome(""), KeyUsage(1, 3, 0)),
        (Completion("m", "日本"), Outcome("日"), KeyUsage(1, 2, 1)),
        (Embedding("m", ("1234", "12345")), Outcome(""), KeyUsage(1, 3, 0)),
        # Workers report usage, and may report anything.
        (CHAT, Outcome("", usage=Usage(-5, 10**30)), KeyUsage(1, 0, 1 << 32)),
    ],
    ids=["text", "nothing", "other scripts", "vectors", "lies"],
)
async def test_missing_usage_is_estimated(
    store: Store, work: Work, outcome: Outcome, used: KeyUsage
) -> None:
    await store.append(done("a", work=work, outcome=outcome), DAY)

    assert await store.keys.usage_of("alice", 0) == used
