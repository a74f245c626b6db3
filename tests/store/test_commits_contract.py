"""The contract of numbered commits: each counts once, and only in its epoch."""

import pytest

from shoal.domain.errors import Fenced, StoreBroken, StoreError, WentBack
from shoal.domain.facts import Fact, JobCancelled, JobFailed, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Task
from shoal.ledger import accounts
from shoal.store.ledger import LedgerEntries
from shoal.store.port import CommitId, Epoch, Store, commit_ids

J = JobId("j")
STORY: list[Fact] = [JobSubmitted(Job(J, Task("hi"))), JobCancelled(J, "left", 7)]
CREDIT = LedgerEntries(accounts.credit("user:al", 7))


async def state_of(store: Store) -> object:
    """Return what a commit of ``STORY`` with ``CREDIT`` changes."""
    opening = await store.ledger.load()
    return (
        await store.history(J),
        await store.open_jobs(),
        opening.accounts,
        await store.keys.usage_by_owner(0, ["default"]),
    )


async def test_a_repeated_commit_counts_once(store: Store) -> None:
    commit = CommitId(await store.take_over(), "hub", 1)
    await store.append(STORY, 1.0, (), CREDIT, commit)
    before = await state_of(store)

    await store.append(STORY, 1.0, (), CREDIT, commit)

    assert await state_of(store) == before
    assert (await store.ledger.load()).accounts["user:al"].balance == 7


async def test_a_commit_whose_copy_comes_late_counts_once(store: Store) -> None:
    epoch = await store.take_over()
    first = CommitId(epoch, "hub", 1)
    await store.append(STORY, 1.0, (), CREDIT, first)
    await store.append([], 2.0, (), CREDIT, CommitId(epoch, "hub", 2))
    before = await state_of(store)

    await store.append(STORY, 1.0, (), CREDIT, first)

    assert await state_of(store) == before


async def test_a_commit_of_an_earlier_epoch_is_fenced(store: Store) -> None:
    earlier = commit_ids(await store.take_over(), "hub")
    await store.append([], 1.0, commit=next(earlier))
    before = await state_of(store)

    later = await store.take_over()

    with pytest.raises(Fenced, match="another coordinator has taken over") as raised:
        await store.append(STORY, 2.0, (), CREDIT, next(earlier))
    assert not raised.value.temporary
    assert not isinstance(raised.value, StoreBroken)
    assert await state_of(store) == before
    await store.append(STORY, 2.0, (), CREDIT, CommitId(later, "hub", 1))
    assert await state_of(store) != before


async def test_a_takeover_fences_all_writers(store: Store) -> None:
    earlier = await store.take_over()
    later = await store.take_over()

    assert later > earlier
    for writer in ("hub", "calls"):
        with pytest.raises(Fenced):
            await store.append([], 1.0, commit=CommitId(earlier, writer, 1))


async def test_a_database_without_the_commit_before_went_back(store: Store) -> None:
    epoch = await store.take_over()
    await store.append([], 1.0, commit=CommitId(epoch, "hub", 1))
    before = await state_of(store)

    with pytest.raises(WentBack, match="commit 1 of the hub, before commit 3"):
        await store.append(STORY, 2.0, (), CREDIT, CommitId(epoch, "hub", 3))

    assert await state_of(store) == before


async def test_a_database_of_an_earlier_epoch_went_back(store: Store) -> None:
    """Its coordinator was not taken over from: it is newer than the copy."""
    epoch = Epoch(await store.take_over() + 1)

    with pytest.raises(WentBack, match=f"to epoch {epoch - 1}, before epoch {epoch}"):
        await store.append([], 1.0, commit=CommitId(epoch, "hub", 1))


async def test_writers_number_their_commits_apart(store: Store) -> None:
    epoch = await store.take_over()
    hub, calls = commit_ids(epoch, "hub"), commit_ids(epoch, "calls")

    await store.append(STORY[:1], 1.0, commit=next(hub))
    await store.append([], 2.0, commit=next(hub))
    await store.append(STORY[1:], 3.0, commit=next(calls))

    assert len(await store.history(J)) == 2


async def test_a_commit_that_failed_is_not_counted(store: Store) -> None:
    commit = CommitId(await store.take_over(), "hub", 1)

    with pytest.raises(StoreError, match="no job"):
        await store.append([JobFailed(JobId("unknown"), "no")], 1.0, commit=commit)
    await store.append(STORY, 2.0, commit=commit)

    assert len(await store.history(J)) == 2


async def test_nobody_has_taken_a_new_database_over(store: Store) -> None:
    await store.append(STORY, 1.0, commit=CommitId(Epoch(0), "hub", 1))

    assert len(await store.history(J)) == 2
