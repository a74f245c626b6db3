"""Which worker has read the beginning of a chat, and when that decides."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.steps import calls
from pool.builders import assign, job, joined, leased, load_changed, pool_after
from shoal.domain.facts import JobCompleted, JobSubmitted, WorkerJoined, WorkerLeft
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Policy
from shoal.domain.outcome import Outcome
from shoal.domain.work import JSON, Chat
from shoal.pool import beginnings
from shoal.pool.beginnings import KnownBeginnings, beginnings_of
from shoal.pool.free_workers import READERS_EXAMINED_MAX
from shoal.pool.open_job import OpenJob
from shoal.pool.plan import plan
from shoal.pool.state import PoolState
from shoal.pool.worker import CostLevel

LONG = "word " * 1000  # about 1,250 tokens
OTHER = "tale " * 1000
RULES = "rule " * 20  # 25 tokens: less than counts
SIZE = 10_000


def said(role: str, content: JSON) -> Mapping[str, JSON]:
    return {"role": role, "content": content}


def talk(
    name: str, *texts: JSON, owner: str = "", model: str = "m", **options: JSON
) -> Job:
    """Return the job of a chat whose user and assistant take turns."""
    messages = tuple(
        said("assistant" if number % 2 else "user", text)
        for number, text in enumerate(texts)
    )
    work = Chat(model, messages, options=options)
    return replace(job(name, owner=owner), work=work, model=model)


def pool_with_reader(*others: WorkerJoined, first: Job | None = None) -> PoolState:
    """Return a pool whose worker "had" has answered the first turn of a chat."""
    pool = pool_after(joined("had", slots=4), *others)
    pool.apply(JobSubmitted(first or talk("before", LONG)), 0.0)
    pool.apply(leased("before", "had"), 0.0)
    pool.apply(JobCompleted(JobId("before"), LeaseNumber(1), Outcome("")), 0.0)
    return pool


def worker_of(pool: PoolState, next_job: Job) -> str:
    pool.apply(JobSubmitted(next_job), 0.0)
    ((_, worker),) = assign(pool)
    return worker


IDLE = joined("idle", slots=4)


def test_conversation_stays_at_the_worker_that_has_read_it() -> None:
    pool = pool_with_reader(IDLE)
    pool.apply(JobSubmitted(talk("next", LONG, "yes", "and?")), 0.0)

    (lease,) = plan(pool)

    assert lease.worker_id == "had"
    assert lease.reason == (
        "has the beginning of the conversation (about 1,250 tokens) in its cache: 0% "
        "of its slots in use"
    )


def test_worker_is_left_that_is_busier_than_reading_costs() -> None:
    pool = pool_with_reader(IDLE)
    pool.apply(load_changed("had", queued=3), 0.0)

    assert worker_of(pool, talk("next", LONG, "yes", "and?")) == "idle"


def test_slower_worker_is_preferred_if_reading_takes_longer() -> None:
    # It reads ten thousand tokens in the time of 625, and writes 128.
    pool = pool_with_reader(IDLE, first=talk("before", LONG * 8))
    pool.apply(load_changed("had", queued=3), 0.0)

    assert worker_of(pool, talk("next", LONG * 8, "yes", "and?")) == "had"


def test_long_answer_matters_more_than_a_short_prompt() -> None:
    pool = pool_with_reader(IDLE)
    pool.speeds.answer_tokens = 4000.0
    pool.apply(load_changed("had", queued=1), 0.0)
    again = talk("next", LONG, "yes", "and?")

    assert worker_of(pool, again) == "idle"

    pool = pool_with_reader(IDLE)
    pool.speeds.answer_tokens = 4000.0
    pool.apply(load_changed("had", speed=0.9), 0.0)
    brief = replace(again.work, max_tokens=16)

    assert worker_of(pool, replace(again, work=brief)) == "had"


@pytest.mark.parametrize(
    "another",
    [
        talk("next", LONG, "yes", "and?", owner="someone else"),
        talk("next", OTHER, "yes", "and?"),
        talk("next", "first", LONG, "and?"),
    ],
    ids=["owner", "text", "order"],
)
def test_other_conversations_count_for_nothing(another: Job) -> None:
    pool = pool_with_reader(IDLE)

    assert worker_of(pool, another) == "idle"


def test_short_beginning_counts_for_nothing() -> None:
    pool = pool_with_reader(IDLE, first=talk("before", RULES, LONG))

    assert worker_of(pool, talk("next", RULES, OTHER)) == "idle"


def test_longest_beginning_decides() -> None:
    other = talk("other", LONG, OTHER)
    pool = pool_with_reader(IDLE)
    pool.apply(JobSubmitted(other), 0.0)
    pool.apply(leased("other", "idle"), 0.0)
    pool.apply(JobCompleted(JobId("other"), LeaseNumber(1), Outcome("")), 0.0)

    assert worker_of(pool, talk("next", LONG, OTHER, "and?")) == "idle"


def test_busy_worker_with_the_longest_leaves_it_to_the_next_longest() -> None:
    pool = pool_with_reader(joined("full"), joined("idle", slots=4))
    pool.apply(JobSubmitted(talk("other", LONG, OTHER)), 0.0)
    pool.apply(leased("other", "full"), 0.0)

    assert worker_of(pool, talk("next", LONG, OTHER, "and?")) == "had"


def test_worker_that_joins_again_has_nothing_in_its_cache() -> None:
    pool = pool_with_reader(IDLE)
    pool.apply(WorkerLeft(WorkerId("had"), ""), 0.0)
    pool.apply(joined("had", slots=4), 0.0)

    assert not pool.beginnings
    assert worker_of(pool, talk("next", LONG, "yes", "and?")) == "idle"


def test_cheap_job_goes_by_price() -> None:
    pool = pool_with_reader(joined("idle", slots=4, price="$0.001"))
    cheap = replace(
        talk("next", LONG, "yes", "and?"), terms=JobTerms(policy=Policy.CHEAP)
    )
    pool.apply(JobSubmitted(cheap), 0.0)

    (lease,) = plan(pool)

    assert "beginning" not in lease.reason


def test_named_session_wins() -> None:
    pool = pool_with_reader(IDLE)
    pool.apply(JobSubmitted(job("before", session="s")), 0.0)
    pool.apply(leased("before", "idle"), 0.0)
    pool.apply(JobCompleted(JobId("before"), LeaseNumber(1), Outcome("")), 0.0)

    named = replace(talk("next", LONG, "yes", "and?"), session="s")

    assert worker_of(pool, named) == "idle"


def test_worker_not_chosen_is_free_for_the_next_job() -> None:
    pool = pool_with_reader(IDLE)
    pool.apply(JobSubmitted(talk("next", LONG, "yes", "and?")), 0.0)
    pool.apply(JobSubmitted(talk("short", "hi")), 0.0)

    assert dict(assign(pool)) == {"next": "had", "short": "idle"}


def test_with_one_worker_nothing_is_computed() -> None:
    pool = pool_with_reader()
    pool.apply(JobSubmitted(talk("next", LONG, "yes", "and?")), 0.0)
    assign(pool)

    assert pool.jobs[JobId("next")].known_beginnings is None
    assert not pool.beginnings


def test_no_more_readers_than_a_few_are_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"w{number}" for number in range(40)]
    pool = pool_after(*(joined(name, slots=4) for name in names))
    (prompt, *_) = beginnings_of(talk("any", LONG), SIZE)
    for name in names:
        pool.beginnings.record(WorkerId(name), [prompt])
    costs = 0
    cost = pool.cost

    def counted(self: PoolState, level: CostLevel) -> float:
        nonlocal costs
        costs += 1
        return cost(level)

    monkeypatch.setattr(PoolState, "cost", counted)
    pool.apply(JobSubmitted(talk("next", LONG, "yes", "and?")), 0.0)
    plan(pool)

    assert costs <= READERS_EXAMINED_MAX + 8


# Beginnings of a chat.


def keys_of(work: Job) -> list[int]:
    return [key for key, _ in beginnings_of(work, SIZE)]


def test_each_message_ends_a_beginning() -> None:
    short = beginnings_of(talk("a", LONG), SIZE)
    longer = beginnings_of(talk("b", LONG, "yes", OTHER), SIZE)

    assert [characters for _, characters in longer] == [5000, 5003, 10_003]
    assert [*short] == longer[:1]


def test_parts_and_calls_are_part_of_a_beginning() -> None:
    def asked(url: str) -> Job:
        image: JSON = {"type": "image_url", "image_url": {"url": url}}
        return talk("a", [{"type": "text", "text": LONG}, image], "a cat", "sure?")

    first, second = asked("data:image/png;base64,AA"), asked("data:image/png;base64,AB")

    assert len({*keys_of(first), *keys_of(second)}) == 6
    assert keys_of(first) == keys_of(asked("data:image/png;base64,AA"))


def test_chats_with_other_tools_or_users_have_no_beginning_in_common() -> None:
    tools = talk("a", LONG, tools=[{"type": "function"}])
    user = replace(talk("a", LONG), terms=JobTerms(user="u"))

    assert len({*keys_of(talk("a", LONG)), *keys_of(tools), *keys_of(user)}) == 3


def test_few_beginnings_of_a_long_chat_are_compared() -> None:
    kept = beginnings_of(talk("a", *([LONG] * 1000)), SIZE)

    assert len(kept) == beginnings.FIRST_KEPT + beginnings.LAST_KEPT
    assert [characters // 5000 for _, characters in kept] == [1, 2, *range(987, 1001)]


def test_long_chat_takes_no_more_calls_than_a_short_one() -> None:
    short, long = talk("a", *[LONG] * 2), talk("b", *[LONG] * 200)

    assert calls(lambda: beginnings_of(long, SIZE)) == calls(
        lambda: beginnings_of(short, SIZE)
    )


def test_chat_of_many_megabytes_is_not_read() -> None:
    opened = OpenJob(talk("a", "x" * (beginnings.READ_MAX + 1)), 0.0, 0.0, 0.0)

    assert opened.beginnings == ()


# What is remembered.

WORKERS = st.sampled_from([WorkerId(name) for name in "abc"])
CHATS = st.lists(st.integers(0, 40), max_size=6, unique=True)


@given(
    st.lists(st.tuples(WORKERS, CHATS) | WORKERS, max_size=40),
    st.integers(6, 12),
    st.integers(6, 30),
)
def test_memory_is_bounded_and_keeps_the_latest(
    events: list[tuple[WorkerId, list[int]] | WorkerId], each_max: int, all_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "OF_WORKER_MAX", each_max)
        patch.setattr(beginnings, "MAX", all_max)
        known = KnownBeginnings()
        for event in events:
            if isinstance(event, str):
                known.forget(event)
                assert not known.of_worker(event)
                continue
            worker_id, keys = event
            known.record(worker_id, [(key, 1000) for key in keys])
            assert all(worker_id in known.readers[key] for key in keys)
            assert len(known.of_worker(worker_id)) <= each_max
            assert len(known) <= all_max
            pairs = {(w, k) for w in map(WorkerId, "abc") for k in known.of_worker(w)}
            assert pairs == {
                (w, k) for k in range(41) for w in known.readers.get(k, ())
            }
            assert len(pairs) == len(known)
