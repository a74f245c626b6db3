"""Requests that are too long for some workers, and what refusals teach."""

import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pool.builders import assign, handle, job, joined, pool_after
from shoal.domain.errors import ContextExceeded
from shoal.domain.facts import (
    JobFailed,
    JobHedged,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.outcome import ENGINE_FAULTS, Fault
from shoal.domain.server_refusals import stated_context
from shoal.domain.vocabulary import Failed
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.pool.context_limits import (
    LEARNED_MIN,
    LENGTHS_MAX,
    UNKNOWN_LENGTH,
    KnownContexts,
    RequestLength,
    least_known,
    length_of,
)
from shoal.pool.eligibility import ineligibility
from shoal.pool.explanation import explain_fact
from shoal.pool.inputs import LeaseResult
from shoal.pool.job_admission import permanent_rejection
from shoal.pool.open_job import OpenJob
from shoal.pool.plan import plan
from shoal.pool.react import LENGTH_REFUSALS_MAX
from shoal.pool.state import PoolState

J = JobId("j")
KEY = "m", JobKind.CHAT
TOO_LONG = "the input length exceeds the context length"
PROMPT = "word " * 1000
LENGTHS = st.builds(RequestLength, st.integers(0, 9000), st.integers(0, 900))


def long_job(
    name: str = "j",
    prompt: str = PROMPT,
    max_tokens: int | None = None,
    **options: JSON,
) -> Job:
    made = job(name, prompt=prompt)
    assert isinstance(made.work, Chat)
    work = replace(made.work, max_tokens=max_tokens, options=options)
    return replace(made, work=work)


def submitted(pool: PoolState, each: Job) -> None:
    pool.apply(JobSubmitted(each), 0.0)


def refuse(
    pool: PoolState,
    error: str = TOO_LONG,
    name: str = "j",
    fault: Fault = Fault.CONTEXT,
) -> list[object]:
    """Let the worker of a job refuse it; return the facts."""
    held = pool.jobs[JobId(name)]
    assert held.worker_id is not None
    event = Failed(JobId(name), held.lease, error, fault)
    return [*handle(pool, LeaseResult(held.worker_id, event))]


def tried(pool: PoolState, error: str = TOO_LONG, name: str = "j") -> list[str]:
    """Let each worker that gets a job refuse it; return their names in order."""
    workers = []
    while JobId(name) in pool.jobs:
        ((_, worker),) = assign(pool)
        workers.append(worker)
        refuse(pool, error, name)
    return workers


# Lengths.


@pytest.mark.parametrize(
    ("work", "length"),
    [
        (Chat("m", ({"role": "user", "content": "abcd"},)), (19, 0)),
        (Chat("m", ({"role": "user", "content": "äöü"},), 9), (21, 9)),
        (Chat("m", (), None, None, {"stop": ["a", 1, None]}), (7, 0)),
        (Completion("m", "abc", 5, None, {"suffix": "d"}), (3, 5)),
        (Completion("m", "\u20ac"), (3, 0)),
        (Completion("m", [1, 2, 3]), UNKNOWN_LENGTH),
        (Embedding("m", ("a", "longer", "b")), (6, 0)),
        (Rerank("m", "why", ("a", "long")), (8, 0)),
        (Transcription("m", "AAAA", "wav"), UNKNOWN_LENGTH),
        (Task("t", {"input": "abc"}), UNKNOWN_LENGTH),
        (
            Chat("m", ({"role": "user", "content": [{"type": "image_url"}]},)),
            UNKNOWN_LENGTH,
        ),
        (
            Chat("m", ({"role": "user", "content": [{"type": "input_audio"}]},)),
            UNKNOWN_LENGTH,
        ),
        (Chat("m", ({"role": "user", "content": [{"type": "text"}]},)), (23, 0)),
        (Chat("m", ({"role": "user", "content": "\ud800"},)), (18, 0)),
    ],
)
def test_length_counts_what_a_model_reads_and_may_write(
    work: Work, length: tuple[int, int]
) -> None:
    assert length_of(work) == length


@pytest.mark.parametrize(
    ("length", "other", "reaches"),
    [
        ((100, 0), (100, 0), True),
        ((99, 0), (100, 0), False),
        ((100, 5), (100, 0), True),  # more to write
        ((99, 5000), (100, 0), False),  # which no text makes up for
        ((100, 0), (100, 1), False),
        ((107, 0), (100, 1), False),
        ((108, 0), (100, 1), True),  # text makes up for less to write
        ((108, 4), (100, 5), True),
        ((0, 0), (100, 0), False),  # an unknown length is no longer than any
    ],
)
def test_length_reaches_those_that_take_no_more(
    length: tuple[int, int], other: tuple[int, int], reaches: bool
) -> None:
    assert RequestLength(*length).reaches(RequestLength(*other)) is reaches


@given(LENGTHS, LENGTHS, LENGTHS)
def test_reaching_is_a_partial_order(
    one: RequestLength, two: RequestLength, three: RequestLength
) -> None:
    assert one.reaches(one)
    assert one.reaches(UNKNOWN_LENGTH)
    if one.reaches(two) and two.reaches(three):
        assert one.reaches(three)


def test_a_refusal_of_a_short_request_is_forgotten() -> None:
    known = KnownContexts()

    known.learn(KEY, RequestLength(LEARNED_MIN - 1, 0), TOO_LONG)
    assert not known.exclude(KEY, RequestLength(10**6, 0))

    known.learn(KEY, RequestLength(1, LEARNED_MIN - 1), TOO_LONG)
    assert known.exclude(KEY, RequestLength(10**6, 0))


@given(st.lists(LENGTHS, max_size=LENGTHS_MAX))
def test_refused_lengths_are_remembered(shorter: list[RequestLength]) -> None:
    known = KnownContexts()
    lengths = [each._replace(size=each.size + LEARNED_MIN) for each in shorter]

    for length in lengths:
        known.learn(KEY, length, TOO_LONG)

    assert all(known.exclude(KEY, each) for each in lengths)
    kept = known.refused[KEY] if lengths else []
    assert not any(one.reaches(two) for one in kept for two in kept if one is not two)
    assert not known.exclude(("other", JobKind.CHAT), RequestLength(10**6, 0))
    assert not known.exclude(("m", JobKind.EMBEDDING), RequestLength(10**6, 0))


def test_refused_lengths_are_few() -> None:
    known = KnownContexts()
    lengths = [RequestLength(9000 - 10 * n, n * n * n) for n in range(20)]

    for length in lengths:
        known.learn(KEY, length, TOO_LONG)

    assert known.refused[KEY] == lengths[-LENGTHS_MAX:]


@pytest.mark.parametrize(
    ("contexts", "least"),
    [((), 0), ((0, 0), 0), ((0, 5), 5), ((7, 5), 5), ((5, 0), 5)],
)
def test_unknown_contexts_are_not_the_least(
    contexts: tuple[int, ...], least: int
) -> None:
    assert least_known(*contexts) == least


@pytest.mark.parametrize(
    ("message", "context"),
    [
        # llama-server
        ("request (5000 tokens) exceeds the available context size (4096 tokens), try "
         "increasing it", 4096),
        # vLLM, three versions
        ("This model's maximum context length is 4096 tokens. However, you requested "
         "5000 tokens (1000 in the messages, 4000 in the completion).", 4096),
        ("The decoder prompt (length 5000) is longer than the maximum model length of "
         "4096. Make sure that …", 4096),
        ("'max_tokens' is too large: 5000. This model's maximum context length is 4096 "
         "tokens and your request has 1000 input tokens", 4096),
        # SGLang
        ("The input (5000 tokens) is longer than the model's context length "
         "(4096 tokens).", 4096),
        # LM Studio
        ("Trying to keep the first 5000 tokens when context the overflows. However, "
         "the model is loaded with context length of only 4096 tokens", 4096),
        ("Context Window: 8192", 8192),
        (TOO_LONG, None),  # Ollama
        ("the request exceeds the available context size. try increasing it", None),
        ("input is too large to process (current batch size: 512)", None),
        ("context length is 0", None),
        ("context length is 12345678901", None),
        (f"{TOO_LONG} (the longest context here: 8192 tokens)", None),
    ],
)  # fmt: skip
def test_stated_context_is_read(message: str, context: int | None) -> None:
    assert stated_context(message) == context


# Refusals.


def test_job_that_is_too_long_goes_on_to_a_worker_that_says_no_context() -> None:
    pool = pool_after(joined("a"), joined("b"))
    submitted(pool, long_job())
    assign(pool)

    facts = refuse(pool)

    assert facts == [
        JobRequeued(J, LeaseNumber(1), TOO_LONG, WorkerId("a"), too_long=True)
    ]
    assert assign(pool) == [("j", "b")]


def test_refusal_is_explained() -> None:
    fact = JobRequeued(J, LeaseNumber(1), TOO_LONG, WorkerId("a"), too_long=True)

    assert explain_fact(fact) == (
        f"refused by a for its length, back in the queue: {TOO_LONG}"
    )


def test_job_goes_to_known_contexts_that_are_larger() -> None:
    contexts = {"a": 2000, "b": 2000, "c": 1000, "d": 4000}
    pool = pool_after(*(joined(name, context=n) for name, n in contexts.items()))
    submitted(pool, long_job())
    assert [name for _, name in assign(pool)] == ["a"]

    refuse(pool)

    assert {
        name: ineligibility(pool.jobs[J], worker)
        for name, worker in pool.workers.items()
    } == {
        "a": f"refused it for its length: {TOO_LONG}",
        "b": "reads 2000 tokens, fewer than the request has",
        "c": "reads 1000 tokens, fewer than the request has",
        "d": None,
    }
    assert assign(pool) == [("j", "d")]


def test_stated_context_counts_as_an_offered_one() -> None:
    pool = pool_after(joined("a"), joined("b", context=4096), joined("c", context=8192))
    submitted(pool, long_job())
    assert assign(pool) == [("j", "b")]  # has room for it, as far as is known

    refuse(pool, "the context size (2048 tokens) is exceeded")
    assert pool.jobs[J].tokens_min == 2049
    assert pool.workers[WorkerId("b")].context_of(KEY) == 2048
    assert assign(pool) == [("j", "c")]

    refuse(pool, "the context size (9000 tokens) is exceeded")
    assert pool.workers[WorkerId("c")].context_of(KEY) == 8192
    assert pool.jobs[J].tokens_min == 8193
    assert assign(pool) == [("j", "a")]


@pytest.mark.parametrize(("context", "goes_on"), [(2048, False), (2049, True)])
def test_job_goes_on_only_to_contexts_above_a_stated_one(
    context: int, goes_on: bool
) -> None:
    pool = pool_after(joined("a"))
    submitted(pool, long_job())
    assign(pool)
    pool.apply(joined("b", context=context), 0.0)

    (fact,) = refuse(pool, "the context size (2048 tokens) is exceeded")

    assert isinstance(fact, JobRequeued if goes_on else JobFailed)


def test_job_fails_when_no_worker_is_left() -> None:
    pool = pool_after(joined("a"), joined("b", context=3000), joined("c"))
    submitted(pool, long_job())

    while assign(pool):
        facts = refuse(pool)

    error = f"{TOO_LONG} (the longest context here: 3000 tokens)"
    assert facts == [JobFailed(J, error, fault=Fault.CONTEXT)]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("context size (4096 tokens)", "context size (4096 tokens)"),
        ("context size (512)", "context size (512) (the longest context here: 4096 "
         "tokens)"),
        ("14096 tokens", "14096 tokens (the longest context here: 4096 tokens)"),
    ],
)  # fmt: skip
def test_error_names_the_longest_context_once(error: str, shown: str) -> None:
    pool = pool_after(joined("a", context=4096), joined("b"))
    submitted(pool, long_job())
    assign(pool)
    refuse(pool, "too long")
    assign(pool)

    assert refuse(pool, error) == [JobFailed(J, shown, fault=Fault.CONTEXT)]


def test_error_is_the_workers_own_where_no_context_is_known() -> None:
    pool = pool_after(joined("a"))
    submitted(pool, long_job())
    assign(pool)

    assert refuse(pool) == [JobFailed(J, TOO_LONG, fault=Fault.CONTEXT)]


def test_job_is_not_tried_on_workers_that_could_not_take_it() -> None:
    pool = pool_after(
        joined("a"),
        joined("others", only_for=frozenset({"bo"}), context=9999),
        joined("embeds", kinds=frozenset({JobKind.EMBEDDING}), context=9999),
    )
    submitted(pool, long_job())
    assign(pool)

    assert refuse(pool) == [JobFailed(J, TOO_LONG, fault=Fault.CONTEXT)]


def test_busy_worker_is_waited_for() -> None:
    pool = pool_after(joined("a"), joined("b"))
    submitted(pool, job("first"))
    submitted(pool, long_job())
    assert assign(pool) == [("first", "a"), ("j", "b")]

    (fact,) = refuse(pool)

    assert isinstance(fact, JobRequeued)
    assert assign(pool) == []


@pytest.mark.parametrize("crowd", [LENGTH_REFUSALS_MAX + 4, 300])
def test_job_is_tried_on_some_workers_of_many(crowd: int) -> None:
    pool = pool_after(*(joined(f"w{number}") for number in range(crowd)))
    submitted(pool, long_job())

    workers = tried(pool)

    assert len(workers) == len(set(workers)) == LENGTH_REFUSALS_MAX


def test_answer_that_has_begun_is_not_moved() -> None:
    pool = pool_after(joined("a"), joined("b"))
    submitted(pool, long_job())
    assign(pool)
    pool.apply(JobStarted(J, LeaseNumber(1)), 0.0)

    assert refuse(pool) == [JobFailed(J, TOO_LONG, fault=Fault.CONTEXT)]
    assert pool.workers[WorkerId("a")].contexts is None


@pytest.mark.parametrize(
    "fault", sorted({*Fault} - ENGINE_FAULTS - {Fault.CONTEXT}, key=str)
)
def test_other_failures_are_final_and_teach_nothing(fault: Fault) -> None:
    pool = pool_after(joined("a"), joined("b"))
    submitted(pool, long_job())
    assign(pool)

    assert refuse(pool, fault=fault) == [JobFailed(J, TOO_LONG, fault=fault)]
    assert pool.workers[WorkerId("a")].contexts is None


def test_continuation_of_an_answer_teaches_only_what_is_stated() -> None:
    pool = pool_after(joined("a"), joined("b"), joined("c"))
    submitted(pool, long_job())
    assign(pool)
    pool.apply(JobStarted(J, LeaseNumber(1)), 0.0)
    pool.apply(JobRequeued(J, LeaseNumber(1), "worker lost"), 0.0)
    ((_, name),) = assign(pool)

    refuse(pool, "context size (700 tokens)")

    worker = pool.workers[WorkerId(name)]
    assert worker.context_of(KEY) == 700
    assert worker.contexts is not None
    assert not worker.contexts.exclude(KEY, length_of(long_job().work))
    ((_, other),) = assign(pool)
    assert other != name


def test_hedged_job_goes_on_at_the_other_worker() -> None:
    pool = pool_after(joined("a"), joined("b"))
    submitted(pool, long_job())
    assign(pool)
    pool.apply(JobHedged(J, WorkerId("b"), LeaseNumber(2), "silent"), 0.0)
    event = Failed(J, LeaseNumber(2), TOO_LONG, Fault.CONTEXT)

    facts = handle(pool, LeaseResult(WorkerId("b"), event))

    said = f"failed: {TOO_LONG}"
    assert facts == [JobUnhedged(J, LeaseNumber(2), said, too_long=True)]
    assert pool.jobs[J].too_long_for == {"b": said}
    assert pool.roster.refused_lengths == {"m": 1}


# What the pool has learned.


def taught(error: str = TOO_LONG) -> PoolState:
    """Return a pool whose worker has refused a long job at one of its two models."""
    pool = pool_after(joined("a", "m", "x"))
    submitted(pool, long_job())
    assign(pool)
    refuse(pool, error)
    return pool


def of_model(model: str, each: Job) -> Job:
    assert isinstance(each.work, Chat)
    return replace(each, work=replace(each.work, model=model))


@pytest.mark.parametrize(
    ("each", "is_refused"),
    [
        (long_job("k"), True),
        (long_job("k", PROMPT * 2), True),
        (long_job("k", max_tokens=10), True),
        (long_job("k", top_p=0.5), True),
        (long_job("k", PROMPT[:-1]), False),
        (long_job("k", PROMPT[:-1], max_tokens=5000), False),
        (of_model("x", long_job("k")), False),
    ],
)
def test_worker_gets_no_job_as_long_as_one_that_it_refused(
    each: Job, is_refused: bool
) -> None:
    pool = taught()
    rejected = permanent_rejection(pool, each, 0.0)
    submitted(pool, each)

    assert assign(pool) == ([] if is_refused else [("k", "a")])
    reason = ineligibility(pool.jobs[JobId("k")], pool.workers[WorkerId("a")])
    if is_refused:
        assert reason == "refused a request no longer than this one for its length"
        assert isinstance(rejected, ContextExceeded)
    else:
        assert rejected is None


def test_shorter_job_is_not_held_up_by_a_longer_one() -> None:
    pool = taught()
    pool.apply(joined("busy", slots=0), 0.0)
    for name, prompt in (("k1", PROMPT * 2), ("k2", PROMPT), ("k3", "hi")):
        submitted(pool, long_job(name, prompt, max_tokens=5))

    assert assign(pool) == [("k3", "a")]


def test_job_without_a_token_limit_is_not_held_up_by_one_with() -> None:
    pool = pool_after(joined("a"))
    submitted(pool, long_job(prompt="hi", max_tokens=9000))
    assign(pool)
    refuse(pool)
    pool.apply(joined("busy", slots=0), 0.0)
    submitted(pool, long_job("k1", "hi", max_tokens=9000))
    submitted(pool, long_job("k2", "hi, you"))

    assert assign(pool) == [("k2", "a")]


def test_free_workers_are_examined_once_for_all_jobs_that_are_too_long() -> None:
    names = [f"w{number}" for number in range(LENGTH_REFUSALS_MAX)]
    pool = pool_after(*(joined(name) for name in names))
    submitted(pool, long_job())
    assert sorted(tried(pool)) == sorted(names)
    pool.apply(joined("busy", slots=0), 0.0)
    for number in range(50):
        submitted(pool, long_job(f"k{number}", PROMPT + "more" * number))
    examined: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            examined[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        assert plan(pool) == []
    finally:
        sys.setprofile(before)

    # Twice, because a long job prefers workers that are known to have room for it.
    assert examined["exclude"] <= 2 * len(names)


def test_rejection_says_that_no_worker_reads_so_much() -> None:
    pool = taught()

    error = permanent_rejection(pool, long_job("k"), 0.0)

    assert isinstance(error, ContextExceeded)
    assert (error.field, str(error)) == (
        "messages",
        "the request is too long: all workers with m refused one that is no longer",
    )


def test_rejection_names_the_longest_context() -> None:
    pool = taught("context size (700 tokens)")
    pool.apply(joined("b", context=650), 0.0)

    error = permanent_rejection(pool, long_job("k"), 0.0)
    certain = permanent_rejection(pool, long_job("k", PROMPT * 2), 0.0)

    assert error is None  # b may read it, as far as is known
    assert str(certain) == "the request has more than 1250 tokens, m reads 700 here"
    pool.apply(WorkerLeft(WorkerId("b"), ""), 0.0)
    assert str(permanent_rejection(pool, long_job("k"), 0.0)) == (
        "the request is too long: all workers with m refused one that is no longer; "
        "the longest context here: 700 tokens"
    )


@pytest.mark.parametrize(
    "other",
    [
        joined("b"),
        joined("b", context=9000),
        joined("b", slots=0),
    ],
)
def test_job_may_wait_for_a_worker_that_may_read_it(other: object) -> None:
    pool = taught()
    pool.apply(other, 0.0)  # type: ignore[arg-type]  # a fact

    assert permanent_rejection(pool, long_job("k"), 0.0) is None


@pytest.mark.parametrize(
    "other",
    [
        joined("b", only_for=frozenset({"bo"})),
        joined("b", kinds=frozenset({JobKind.EMBEDDING})),
        joined("b", context=10),
    ],
)
def test_job_does_not_wait_for_workers_that_cannot_take_it(other: object) -> None:
    pool = taught()
    pool.apply(other, 0.0)  # type: ignore[arg-type]  # a fact

    error = permanent_rejection(pool, long_job("k"), 0.0)

    assert isinstance(error, ContextExceeded)


def test_job_does_not_wait_for_workers_without_a_feature() -> None:
    pool = pool_after(joined("a", features=frozenset({Feature.STOP})), joined("b"))
    submitted(pool, long_job(stop=["."]))
    assign(pool)
    assert refuse(pool) == [JobFailed(J, TOO_LONG, fault=Fault.CONTEXT)]

    error = permanent_rejection(pool, long_job("k", stop=["."]), 0.0)

    assert isinstance(error, ContextExceeded)
    assert permanent_rejection(pool, long_job("k"), 0.0) is None


def test_worker_that_reconnects_is_asked_again() -> None:
    pool = taught()
    assert pool.roster.refused_lengths == {"m": 1}

    pool.apply(WorkerLeft(WorkerId("a"), ""), 0.0)
    assert not pool.roster.refused_lengths
    pool.apply(joined("a"), 0.0)
    submitted(pool, long_job("k"))

    assert assign(pool) == [("k", "a")]


def test_pictures_teach_nothing_of_texts() -> None:
    picture: Mapping[str, JSON] = {"type": "image_url", "image_url": {"url": "data:"}}
    message: Mapping[str, JSON] = {"role": "user", "content": [picture]}
    sees = frozenset({Feature.IMAGES})
    pool = pool_after(joined("a", features=sees), joined("b", features=sees))
    shown = replace(long_job(), work=Chat("m", (message,)))
    submitted(pool, shown)

    assert tried(pool) == ["a", "b"]

    submitted(pool, replace(shown, id=JobId("k")))
    assert assign(pool) == [("k", "a")]


def test_kinds_of_work_have_contexts_of_their_own() -> None:
    both = frozenset({JobKind.CHAT, JobKind.EMBEDDING})
    pool = pool_after(joined("a", kinds=both))
    submitted(pool, replace(long_job(), work=Embedding("m", (PROMPT,))))
    assign(pool)
    refuse(pool, "context size (512 tokens)")

    submitted(pool, long_job("k"))
    assert assign(pool) == [("k", "a")]
    again = replace(long_job("e"), work=Embedding("m", ("hi", PROMPT)))
    assert isinstance(permanent_rejection(pool, again, 0.0), ContextExceeded)
    short = replace(long_job("e"), work=Embedding("m", tuple(["hi"] * 5000)))
    assert permanent_rejection(pool, short, 0.0) is None


def test_length_is_measured_once() -> None:
    opened = OpenJob(long_job(), 0.0, 0.0, 0.0)
    assert opened.known_length is None

    assert opened.length is opened.length
    assert opened.length == length_of(opened.job.work)
