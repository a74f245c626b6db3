"""What a machine lends to models of others, and when it has its memory back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal.domain.errors import JobError, Unavailable
from shoal.domain.work import ModelAction, ModelOrder, Shard
from shoal.domain.worker import MemoryLoan
from shoal.worker import lending
from shoal.worker.lending import FAILURES_MAX, CopyLayers, Lender, OnCopied
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.shard_links import ShardLinks
from worker.fake_shards import GROUP, PROTOCOL, RUNNER, EchoShard

KEY = RUNNER.public_key.hex()
TERMS = MemoryLoan(PROTOCOL, "own key", 10_000_000_000)
PART = Shard("me", 10, 6_000_000_000)
ORDER = ModelOrder(
    ModelAction.LEND,
    "big",
    "me",
    group=GROUP,
    shards=(PART, Shard("runner", 5, 1)),
    runner=KEY,
)


class Owner:
    """A lender, and what its owner sees of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.throttle = OwnerThrottle()
        self.started: list[EchoShard] = []
        self.caches: list[tuple[Path, Path | None]] = []  # of each, with its folder
        self.reports: list[str] = []
        self.changes = 0
        self.broken = False
        self.on_start: Callable[[], object] = lambda: None
        self.lender = self.with_terms(TERMS)

    def with_terms(self, terms: MemoryLoan, copy: CopyLayers | None = None) -> Lender:
        self.lender = Lender(
            *(terms, self.start, self.folder, "127.0.0.1", self.throttle),
            lambda model, what: self.reports.append(f"{model}: {what}"),
            copy=copy,
        )
        self.lender.on_change = self.on_change
        return self.lender

    async def start(self, folder: Path, cache: Path | None, memory: int) -> EchoShard:
        if self.broken:
            raise Unavailable("no such program")
        assert folder.parent.parent == self.folder
        assert memory == PART.memory
        self.caches.append((folder, cache))
        self.started.append(EchoShard())
        self.on_start()
        return self.started[-1]

    def on_change(self) -> None:
        self.changes += 1


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    found = Owner(tmp_path)
    yield found
    await found.lender.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.001)


async def test_part_is_lent_until_it_is_freed(owner: Owner) -> None:
    lender = owner.lender

    await lender.lend(ORDER)
    await lender.lend(ORDER)  # ordered again, by a coordinator that came back

    (shard,) = lender.loan.shards
    assert shard.order == ORDER
    assert shard.hosts == ("127.0.0.1",)
    assert lender.loan.free == 4_000_000_000
    assert owner.changes == 1
    assert owner.reports == ["big: lends 6.0 GB to the machine that runs it"]

    await lender.free(replace(ORDER, action=ModelAction.UNLOAD))

    assert lender.loan == TERMS
    assert owner.started[0].exited.done()
    assert owner.reports[-1] == "big: lends no more memory to it: freed on order"


async def test_order_that_is_cancelled_leaves_no_process(owner: Owner) -> None:
    """As when the coordinator restarts, at any moment of a start or an end."""
    for turns in range(40):
        lending = asyncio.create_task(owner.lender.lend(ORDER))
        for _ in range(turns):
            await asyncio.sleep(0)
        lending.cancel()
        await asyncio.wait([lending])
        freeing = asyncio.create_task(owner.lender.free(ORDER))
        await asyncio.sleep(0)
        freeing.cancel()
        await asyncio.wait([freeing])
        await until(lambda: owner.lender.loan == TERMS)
        assert all(each.exited.done() for each in owner.started)

    await owner.lender.lend(ORDER)
    assert owner.lender.loan.shards


async def test_two_orders_at_a_time_get_no_more_than_is_lent(owner: Owner) -> None:
    other = replace(ORDER, group="big-2")

    ended = await asyncio.gather(
        owner.lender.lend(ORDER), owner.lender.lend(other), return_exceptions=True
    )

    assert [type(each) for each in ended] == [type(None), JobError]
    assert len(owner.lender.loan.shards) == 1


async def test_offer_says_whether_the_runner_is_connected(owner: Owner) -> None:
    await owner.lender.lend(ORDER)
    (lent,) = owner.lender.loan.shards
    where = replace(
        PART, hosts=lent.hosts, port=lent.port, fingerprint=lent.fingerprint
    )

    links = await ShardLinks.open(GROUP, RUNNER, PROTOCOL, [where])
    await until(lambda: owner.lender.loan.shards[0].used)
    assert owner.changes >= 2

    await links.close()
    await until(lambda: not owner.lender.loan.shards[0].used)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (
            replace(TERMS, memory=0),
            "this machine lends no memory: its owner has to say --lend-memory",
        ),
        (
            replace(TERMS, runners=("ab" * 32,)),
            f"this machine lends no memory to the key '{KEY}': its owner named others "
            "with --lend-for",
        ),
        (
            replace(TERMS, memory=5_000_000_000),
            "a part of 6.0 GB does not fit into the 5.0 GB that this machine still "
            "lends",
        ),
    ],
    ids=["not at all", "not to it", "too little"],
)
async def test_only_what_the_owner_said_is_lent(
    owner: Owner, terms: MemoryLoan, why: str
) -> None:
    with pytest.raises(JobError) as refused:
        await owner.with_terms(terms).lend(ORDER)

    assert str(refused.value) == why
    assert not owner.started


async def test_paused_owner_has_the_memory_back(owner: Owner) -> None:
    await owner.lender.lend(ORDER)

    owner.throttle.set(0)
    await until(lambda: not owner.lender.loan.shards)

    assert owner.lender.loan.memory == 0
    with pytest.raises(JobError, match="lends nothing now: paused by its owner"):
        await owner.lender.lend(ORDER)
    owner.throttle.set(100)
    assert owner.lender.loan == TERMS


async def test_owner_may_pause_while_a_part_starts(owner: Owner) -> None:
    owner.on_start = lambda: owner.throttle.set(0)

    with pytest.raises(JobError, match="lends nothing now: paused by its owner"):
        await owner.lender.lend(ORDER)

    assert owner.lender.loan.shards == ()
    assert owner.started[0].fault() == "closed"


async def test_part_that_nobody_uses_is_freed(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "UNUSED_MAX", 0.01)

    await owner.lender.lend(ORDER)
    await until(lambda: not owner.lender.loan.shards)

    assert owner.reports[-1].startswith("big: lends no more memory to it: unused for")


async def test_machine_that_lost_several_parts_lends_no_more_for_a_while(
    owner: Owner,
) -> None:
    for _ in range(FAILURES_MAX):
        assert owner.lender.loan.memory == TERMS.memory
        await owner.lender.lend(ORDER)
        owner.started[-1].exit("was ended by SIGKILL")
        await until(lambda: not owner.lender.loan.shards)
        assert owner.reports[-1].endswith("was ended by SIGKILL")

    assert owner.lender.loan.memory == 0
    assert owner.changes > 0
    with pytest.raises(JobError, match="3 parts were lost here, so it rests"):
        await owner.lender.lend(ORDER)


async def test_program_that_does_not_start_is_named(owner: Owner) -> None:
    owner.broken = True

    with pytest.raises(JobError) as failed:
        await owner.lender.lend(ORDER)

    assert str(failed.value) == "no part of big can be held: no such program"
    assert not owner.lender.loan.shards


COPIED = replace(ORDER, has_copies=True)


async def copied(order: ModelOrder, folder: Path, on_copied: OnCopied) -> Path:
    on_copied(1, 2)
    await asyncio.to_thread(folder.mkdir, parents=True)
    return folder


async def test_layers_that_others_have_are_copied_before_the_start(
    owner: Owner,
) -> None:
    lender, arrived = owner.with_terms(TERMS, copied), list[tuple[int, int | None]]()
    await lender.lend(ORDER)
    (own, none) = owner.caches.pop()
    assert none is None
    await asyncio.to_thread(own.mkdir, parents=True)  # with what the runner has sent
    await lender.free(ORDER)

    await lender.lend(COPIED, lambda *progress: arrived.append(progress))

    (own, cache) = owner.caches.pop()
    assert cache is not None
    assert cache.parent == own.parent
    assert not own.exists()
    assert arrived == [(1, 2)]


async def test_layers_that_cannot_be_copied_are_sent_by_the_runner(
    owner: Owner,
) -> None:
    async def fail(order: ModelOrder, folder: Path, on_copied: OnCopied) -> Path:
        raise Unavailable("no source is left")

    await owner.with_terms(TERMS, fail).lend(COPIED)

    assert owner.caches[0][1] is None
    assert (
        "big: the machine that runs it sends its layers, since no source is left"
        in owner.reports
    )


async def test_paused_owner_has_no_traffic_of_a_copy(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.lending.FAILURES_MAX", 1)  # a pause is none
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(order: ModelOrder, folder: Path, on_copied: OnCopied) -> Path:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return folder

    lender = owner.with_terms(TERMS, wait)
    lending = asyncio.create_task(lender.lend(COPIED))
    await begun.wait()
    owner.throttle.set(0)
    await ended.wait()
    with pytest.raises(JobError, match="lends nothing now: paused by its owner"):
        await lending

    owner.throttle.set(100)
    begun.clear()
    ended.clear()
    cancelled = asyncio.create_task(lender.lend(COPIED))
    await begun.wait()
    cancelled.cancel()
    await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert lender.loan == TERMS
    assert not owner.started
