"""Jobs that are rejected at submission, and the errors."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from pool.builders import CHAT_ONLY, assign, chat, job, joined, pool_after
from shoal.domain.errors import (
    CannotDo,
    ContextExceeded,
    Forbidden,
    QueueFull,
    ShoalError,
    UnknownModel,
)
from shoal.domain.facts import (
    JobCancelled,
    JobCompleted,
    JobSubmitted,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job, JobTerms, Priority, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    Task,
    Transcription,
    Work,
)
from shoal.pool.job_admission import (
    RETRY_MAX,
    WORKERS_EXAMINED_MAX,
    permanent_rejection,
    queue_rejection,
    without_tools,
)
from shoal.pool.open_job import size_of
from shoal.pool.roster import MODEL_MEMORY
from shoal.pool.state import PoolState

J = JobId("new")
TOOLS = frozenset({Feature.TOOLS})
SCHEMA = frozenset({Feature.SCHEMA})
HI = ({"role": "user", "content": "hi"},)
LONG = ({"role": "user", "content": "x" * 8001},)
ORDERS = (
    {"role": "system", "content": "be kind"},
    {"role": "developer", "content": "and brief"},
)
SEEN: JSON = [{"type": "image_url"}]
PICTURE = ({"role": "user", "content": SEEN},)


def chat_job(model: str = "m", **options: JSON) -> Job:
    return Job(J, Chat(model, HI, options=options))


def message_of(error: ShoalError | None) -> tuple[type[ShoalError], str] | None:
    return None if error is None else (type(error), str(error))


@pytest.mark.parametrize(
    ("workers", "asked", "said"),
    [
        ([], "m", "no worker has the model m: the pool has no model yet"),
        (["llama-3"], "lama-3", "did you mean llama-3?"),
        (["llama-3", "llama-4"], "llama-5", "did you mean llama-4 or llama-3?"),
        (["x"], "m", "no worker has the model m: the pool has x"),
    ],
)
def test_unknown_model_is_rejected_with_similar_names(
    workers: list[str], asked: str, said: str
) -> None:
    pool = pool_after(*(joined(model, model) for model in workers))

    error = permanent_rejection(pool, chat_job(asked), 0.0)

    assert isinstance(error, UnknownModel)
    assert said in str(error)


def test_model_of_a_worker_that_just_left_is_awaited() -> None:
    pool = pool_after(joined(), WorkerLeft(WorkerId("w"), ""))

    assert permanent_rejection(pool, chat_job(), MODEL_MEMORY - 1.0) is None
    error = permanent_rejection(pool, chat_job(), MODEL_MEMORY)
    assert isinstance(error, UnknownModel)


def test_job_of_a_peer_pool_is_rejected_without_a_local_worker() -> None:
    near = replace(chat_job(), terms=JobTerms(near=True))
    far = pool_after(joined("far", neighbour=True))
    both = pool_after(joined("far", neighbour=True), joined("own"))

    error = permanent_rejection(far, near, 0.0)

    assert isinstance(error, UnknownModel)
    assert str(error) == "only other pools have m, and the job came from one"
    assert permanent_rejection(both, near, 0.0) is None
    assert permanent_rejection(far, chat_job(), 0.0) is None


def test_job_of_a_peer_is_refused_where_only_that_peer_has_the_model() -> None:
    theirs = replace(chat_job(), terms=JobTerms(near=True, peer="wire:mac"))
    alone = pool_after(joined("wire:mac/m"))
    both = pool_after(joined("wire:mac/m"), joined("wire:mac2/m"))

    error = permanent_rejection(alone, theirs, 0.0)

    assert isinstance(error, UnknownModel)
    assert str(error) == "only the peer that requests m has it"
    assert permanent_rejection(both, theirs, 0.0) is None
    assert permanent_rejection(alone, chat_job(), 0.0) is None


TOOL_LIST: JSON = [{"type": "function", "function": {"name": "f"}}]
JSON_OBJECT: JSON = {"type": "json_object"}
EMBEDS = frozenset({JobKind.EMBEDDING})
BOTH = [joined("a", features=TOOLS), joined("b", features=SCHEMA)]


@pytest.mark.parametrize(
    ("workers", "work", "error", "field", "said"),
    [
        ([joined()], Embedding("m", ("a",)), CannotDo, "model",
         "m supports chat here, but not embedding; "
         "no worker has a model that does"),
        ([joined(), joined("e", "vectors", kinds=EMBEDS)],
         Embedding("m", ("a",)), CannotDo, "model",
         "m supports chat here, but not embedding; a model that does: vectors"),
        ([joined(), joined("e", "vectors", kinds=EMBEDS,
                           only_for=frozenset({"bo"}))],
         Embedding("m", ("a",)), CannotDo, "model",
         "m supports chat here, but not embedding; "
         "no worker has a model that does"),
        ([joined(kinds=frozenset({JobKind.CHAT, JobKind.EMBEDDING}))],
         Completion("m", "a"),
         CannotDo, "model",
         "m supports chat and embedding here, but not completion; "
         "no worker has a model that does"),
        ([joined()], Chat("m", HI, options={"tools": TOOL_LIST}), CannotDo, "tools",
         "tools: none of the workers with m can do this (tools); "
         "no worker has a model that does"),
        ([joined()], Chat("m", HI, options={"response_format": JSON_OBJECT}), CannotDo,
         "response_format",
         "response_format: none of the workers with m can do this (schema); "
         "no worker has a model that does"),
        ([joined()], Chat("m", HI, options={"n": 2, "logprobs": True}), CannotDo, "n",
         "n: none of the workers with m can do this (choices); "
         "no worker has a model that does"),
        ([joined()], Chat("m", HI, options={"stop": "."}), CannotDo, "stop",
         "stop: none of the workers with m can do this (stop); "
         "no worker has a model that does"),
        ([joined()], Chat("m", HI, options={"logit_bias": {"1": 1}}), CannotDo,
         "logit_bias",
         "logit_bias: none of the workers with m can do this (options); "
         "no worker has a model that does"),
        ([joined()], Chat("m", PICTURE), CannotDo, "messages",
         "messages: none of the workers with m can do this (images); "
         "no worker has a model that does"),
        ([joined(), joined("v", "sees", features=frozenset({Feature.IMAGES}))],
         Chat("m", PICTURE), CannotDo, "messages",
         "messages: none of the workers with m can do this (images); "
         "a model that does: sees"),
        (BOTH,
         Chat("m", HI, options={"tools": TOOL_LIST, "response_format": JSON_OBJECT}),
         CannotDo,
         "response_format",
         "no worker with m can do all of response_format, tools together; "
         "no worker has a model that does"),
        ([joined(needs_question=True)], Chat("m", ORDERS), CannotDo, "messages",
         "messages: m needs a message other than the system's here"),
        ([joined(context=999), joined("v", context=500)], Chat("m", LONG),
         ContextExceeded, "messages",
         "the request has more than 1000 tokens, m reads 999 here"),
    ],
)  # fmt: skip
def test_unsupported_field_is_rejected_by_name(
    workers: list[WorkerJoined],
    work: Work,
    error: type[CannotDo | ContextExceeded],
    field: str,
    said: str,
) -> None:
    refused = permanent_rejection(pool_after(*workers), Job(J, work), 0.0)

    assert isinstance(refused, error)
    assert (refused.field, str(refused)) == (field, said)


OFFERED: dict[str, JSON] = {"tools": TOOL_LIST, "parallel_tool_calls": True}


@pytest.mark.parametrize(
    ("workers", "messages", "options", "left"),
    [
        ([joined()], HI, {**OFFERED, "top_p": 0.5}, {"top_p": 0.5}),
        ([joined()], HI, {**OFFERED, "tool_choice": "auto"}, {}),
        ([joined(features=TOOLS, only_for=frozenset({"bo"}))], HI, OFFERED, {}),
        ([joined(features=TOOLS), joined("v")], HI, OFFERED, OFFERED),
        ([], HI, OFFERED, OFFERED),
        *(
            ([joined()], HI, {**OFFERED, "tool_choice": choice},
             {**OFFERED, "tool_choice": choice})
            for choice in ("required", {"type": "function"})
        ),
    ],
)  # fmt: skip
def test_tools_are_left_out_if_no_worker_calls_them(
    workers: list[WorkerJoined],
    messages: tuple[Mapping[str, JSON], ...],
    options: dict[str, JSON],
    left: dict[str, JSON],
) -> None:
    work = Chat("m", messages, options=options)

    fitting = without_tools(pool_after(*workers), work, "al")

    assert fitting == replace(work, options=left)
    assert (fitting is work) == (left == options)


def test_calls_of_a_history_are_text_for_a_model_without_tools() -> None:
    call: JSON = {"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}
    text = "Let me see."
    said: Mapping[str, JSON] = {
        "role": "assistant",
        "content": text,
        "tool_calls": [call],
    }
    result: Mapping[str, JSON] = {"role": "tool", "tool_call_id": "c", "content": "1"}
    pool = pool_after(joined())
    for options in (OFFERED, {}):
        work = Chat("m", (*HI, said, result), options=options)

        fitting = without_tools(pool, work, "al")

        assert fitting == Chat(
            "m",
            (
                *HI,
                {"role": "assistant", "content": 'Let me see.\nf({"a":1})'},
                {"role": "user", "content": "1"},
            ),
        )
    must = Chat(
        "m", (*HI, said, result), options={**OFFERED, "tool_choice": "required"}
    )
    assert without_tools(pool, must, "al") is must


@pytest.mark.parametrize(
    ("workers", "work"),
    [
        ([joined()], Chat("m", HI, options={"top_p": 0.5})),
        ([joined(features=TOOLS)], Chat("m", HI, options={"tools": TOOL_LIST})),
        (
            [joined(), joined("v", features=TOOLS)],
            Chat("m", HI, options={"tools": TOOL_LIST}),
        ),
        ([joined(slots=0)], Chat("m", HI)),
        ([joined(context=0)], Chat("m", LONG)),
        ([joined(needs_question=True), joined("v")], Chat("m", ORDERS)),
        ([joined(needs_question=True)], Chat("m", ORDERS + HI)),
        ([joined(context=10), joined("v", context=1000)], Chat("m", LONG)),
        ([joined(context=10), joined("v")], Chat("m", LONG)),
    ],
)
def test_possibly_supported_field_is_queued(
    workers: list[WorkerJoined], work: Work
) -> None:
    assert permanent_rejection(pool_after(*workers), Job(J, work), 0.0) is None


def test_worker_for_other_keys_does_not_count() -> None:
    mine, free = frozenset({"al"}), frozenset[str]()
    pool = pool_after(joined("a", only_for=mine), joined("b", only_for=mine))

    assert permanent_rejection(pool, job(owner="al"), 0.0) is None
    assert message_of(permanent_rejection(pool, job(owner="bo"), 0.0)) == (
        Forbidden,
        "the workers with m work for other keys only",
    )
    pool.apply(joined("c", only_for=free), 0.0)
    assert permanent_rejection(pool, job(owner="bo"), 0.0) is None


def test_large_pool_rejects_nothing_as_unsupported() -> None:
    crowd = [joined(f"w{number}") for number in range(WORKERS_EXAMINED_MAX + 1)]
    tools = chat_job(tools=TOOL_LIST)

    assert permanent_rejection(pool_after(*crowd), tools, 0.0) is None
    assert permanent_rejection(pool_after(*crowd[1:]), tools, 0.0) is not None


# Queues.


def measured(pool: PoolState, seconds: float) -> PoolState:
    """Complete a job that took ``seconds``."""
    pool.apply(JobSubmitted(job("first")), 0.0)
    assert assign(pool) != []
    end = JobCompleted(JobId("first"), pool.jobs[JobId("first")].lease, Outcome(""))
    pool.apply(end, seconds)
    return pool


def full(pool: PoolState, waiting: int, owner: str = "al") -> PoolState:
    """Fill all slots, and queue ``waiting`` jobs."""
    slots = sum(worker.offer.slots for worker in pool.workers.values())
    for number in range(slots + waiting):
        pool.apply(JobSubmitted(job(f"j{number}", owner=owner)), 0.0)
        if number < slots:
            assign(pool)
    assert pool.queued == waiting
    return pool


def job_of(owner: str, priority: Priority = Priority.NORMAL) -> Job:
    return job("new", limits=TimeLimits(queue=10.0), owner=owner, priority=priority)


def test_full_queue_rejects() -> None:
    pool = full(pool_after(joined()), waiting=3)

    assert queue_rejection(pool, job_of("bo"), queue_max=4) is None
    assert message_of(queue_rejection(pool, job_of("bo"), queue_max=3)) == (
        QueueFull,
        "3 jobs are waiting already",
    )


def test_last_eighth_of_the_queue_is_for_owners_with_few_jobs() -> None:
    pool = full(pool_after(joined()), waiting=14, owner="al")

    assert queue_rejection(pool, job_of("bo"), queue_max=16) is None
    assert message_of(queue_rejection(pool, job_of("al"), queue_max=16)) == (
        QueueFull,
        "14 jobs of this key are waiting already; the rest of the queue is kept for "
        "other keys",
    )


def test_job_with_a_too_long_estimated_wait_is_rejected() -> None:
    pool = full(measured(pool_after(joined(slots=2)), 4.0), waiting=6)

    refused = queue_rejection(pool, job_of("al"), queue_max=1000)

    assert message_of(refused) == (
        QueueFull,
        "no worker for m: 1 worker has it but is full; 6 jobs are to be done first, "
        "which takes about 12 s: more than the 10 s that this job may wait",
    )
    assert isinstance(refused, QueueFull)
    assert refused.retry_after == 2


@pytest.mark.parametrize(
    "asked", [job_of("bo"), job_of("al", Priority.HIGH)], ids=["other", "higher"]
)
def test_priority_shortens_the_estimated_wait(asked: Job) -> None:
    pool = full(measured(pool_after(joined(slots=2)), 4.0), waiting=6)

    assert queue_rejection(pool, asked, queue_max=1000) is None


def test_jobs_beyond_the_memory_limit_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.pool.job_admission.SIZE_MAX", 101)
    # A message has 7 characters beside its text.
    first = job("first", owner="al", prompt="x" * 40)
    form = Job(JobId("form"), chat(), owner="al", terms=JobTerms(form="x" * 28))
    pool = pool_after(JobSubmitted(first), JobSubmitted(form))

    assert (
        queue_rejection(pool, job("other", owner="bo", prompt="x" * 10), 1000) is None
    )
    assert message_of(queue_rejection(pool, job("more", owner="al"), 1000)) == (
        QueueFull,
        "the open jobs of this key have 84 characters, and this one 9 more; the rest "
        "of the space is kept for other keys",
    )
    assert message_of(
        queue_rejection(pool, job("all", owner="bo", prompt="x" * 11), 1000)
    ) == (
        QueueFull,
        "the open jobs have 84 characters, and this one 18 more",
    )

    pool.apply(JobCancelled(form.id, ""), 1.0)
    assert queue_rejection(pool, job("more", owner="al"), 1000) is None


@pytest.mark.parametrize(
    "work",
    [
        Chat("m", ({"role": "user", "content": [{"image_url": {"url": "x" * 900}}]},)),
        Chat("m", HI, options={"tools": [{"function": {"description": "x" * 900}}]}),
        Completion("m", ["x" * 450, "x" * 450]),
        Embedding("m", ("x" * 450, "x" * 450)),
        Transcription("m", "x" * 900, "wav"),
        Task("t", {"input": ["x" * 900]}),
    ],
    ids=lambda work: work.kind.value,
)
def test_all_that_a_job_holds_counts(work: Work) -> None:
    assert 900 <= size_of(Job(JobId("j"), work)) < 1000


def test_wait_without_workers_is_unknown() -> None:
    pool = measured(pool_after(joined()), 4.0)
    (worker,) = pool.workers
    pool.apply(WorkerLeft(worker, "gone"), 0.0)
    for number in range(6):
        pool.apply(JobSubmitted(job(f"j{number}", owner="al")), 0.0)

    assert queue_rejection(pool, job_of("al"), queue_max=1000) is None


def test_wait_without_measurements_is_unknown() -> None:
    pool = full(pool_after(joined()), waiting=500)

    assert queue_rejection(pool, job_of("al"), queue_max=1000) is None


def test_empty_queue_accepts_despite_long_jobs() -> None:
    pool = full(measured(pool_after(joined()), 1000.0), waiting=0)

    assert queue_rejection(pool, job_of("al"), queue_max=1000) is None


@pytest.mark.parametrize(
    ("slots", "seconds", "retry_after"),
    [(1, 3.2, 7), (4, 3.2, 2), (1, 1000.0, RETRY_MAX), (1, 0.001, 1)],
)
def test_retry_after_estimates_the_wait_behind_the_jobs_ahead(
    slots: int, seconds: float, retry_after: int
) -> None:
    pool = full(measured(pool_after(joined(slots=slots)), seconds), waiting=1)

    refused = queue_rejection(pool, job_of("al"), queue_max=1)

    assert isinstance(refused, QueueFull)
    assert refused.retry_after == retry_after


def test_retry_after_has_a_default_without_measurements() -> None:
    pool = full(pool_after(joined()), waiting=1)

    refused = queue_rejection(pool, job_of("al"), queue_max=1)

    assert isinstance(refused, QueueFull)
    assert refused.retry_after == 10


def test_slots_of_draining_workers_do_not_shorten_the_wait() -> None:
    pool = pool_after(joined(slots=1), joined("none", slots=0, kinds=CHAT_ONLY))
    full(measured(pool, 4.0), waiting=3)

    assert queue_rejection(pool, job_of("al"), queue_max=1000) is not None
