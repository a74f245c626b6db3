"""The contract of stores."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness.profiles import examples
from shoal.domain.credentials import DAY
from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    AccountCredited,
    AccountFact,
    AccountLimited,
    AliasRemoved,
    AliasSet,
    DeploymentRemoved,
    DeploymentSet,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFact,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
    MachineCalled,
    ModelFact,
    PassedOver,
    ReceiptPresented,
    WorkerApproved,
    WorkerDisapproved,
    WorkerDismissed,
    WorkerDistrusted,
    WorkerDraining,
    WorkerFact,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
    WorkerMarked,
    WorkerResumed,
    WorkerSuspended,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import (
    Gang,
    Job,
    JobTerms,
    Policy,
    Priority,
    TimeLimit,
    TimeLimits,
)
from shoal.domain.outcome import AnswerSpan, Choice, Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import (
    Call,
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    Task,
    Work,
)
from shoal.domain.worker import (
    DeviceKind,
    LoadableModel,
    ModelLibrary,
    Offer,
    Suspension,
    WorkerLoad,
)
from shoal.pool.lifecycle import JobState
from shoal.store.port import (
    OMITTED_WORK,
    JobFilter,
    RecordedFact,
    Store,
    StoredJob,
    summarize,
)

W = WorkerId("wire:w/m")
ONE = LeaseNumber(1)
LATE = LeaseNumber(7)

PROMPTS = {
    "plain": "What is the capital of Peru?",
    "empty": "",
    "NUL": "before\0after",
    "emoji": "👩\u200d🚀 👍🏽 \U0001f9a6",
    "quotes": "'; DROP TABLE jobs; -- \" \\ \n\r\t\x7f",
    "right to left": "\u202eevil\u202c",
    "beyond": "\ufffe\uffff\U0010ffff",
    "a megabyte": "0123456789abcdef" * 65_536,
}


def job(name: str = "j", prompt: str = "hi", owner: str = "default") -> Job:
    chat = Chat(
        "family/model:7b",
        (
            {"role": "system", "content": [{"type": "text", "text": prompt}]},
            {"role": "user", "content": prompt},
        ),
        max_tokens=100,
        temperature=0.5,
        options={"stop": [prompt, "b"], "seed": 2**63 - 1, "top_p": 0.25, "x": None},
    )
    return Job(JobId(name), chat, TimeLimits(1.5, 2.5, 3.5, 4.5), owner)


def leased(name: str = "j", lease: int = 1) -> JobLeased:
    groups = (PassedOver("all slots busy", 9, (W, WorkerId("x"))),)
    return JobLeased(JobId(name), W, LeaseNumber(lease), "least busy", groups)


def end_of(kind: type[Fact], name: str = "j", text: str = "done") -> Fact:
    job_id = JobId(name)
    ends: dict[type[Fact], Fact] = {
        JobCompleted: JobCompleted(job_id, ONE, Outcome(text, "length", Usage(3, 4))),
        JobFailed: JobFailed(job_id, text, lost=True),
        JobCancelled: JobCancelled(job_id, text),
        JobExpired: JobExpired(job_id, TimeLimit.FIRST_OUTPUT, text),
    }
    return ends[kind]


STATES = {
    JobCompleted: JobState.DONE,
    JobFailed: JobState.FAILED,
    JobCancelled: JobState.CANCELLED,
    JobExpired: JobState.EXPIRED,
}

WHOLE_STORY: list[Fact] = [
    JobSubmitted(job()),
    leased(),
    JobStarted(JobId("j"), ONE),
    JobRequeued(JobId("j"), ONE, "worker lost: reset"),
    leased(lease=2),
    JobHedged(JobId("j"), WorkerId("x"), LeaseNumber(3), "silent for 9 s"),
    JobUnhedged(JobId("j"), LeaseNumber(3), "the other one was faster", cut=True),
    JobRequeued(JobId("j"), LeaseNumber(2), "loading", refused_by=W),
    leased(lease=5),
    JobRequeued(JobId("j"), LeaseNumber(5), "removed", handed_over=True),
    leased(lease=4),
    LateResult(JobId("j"), ONE, W, "completed"),
    end_of(JobCompleted),
    ReceiptPresented(JobId("j"), W, Verdict.VALID),
]

OF_WORKERS: list[Fact] = [
    WorkerJoined(
        W,
        Offer(
            frozenset(JobKind),
            frozenset({"m", "n"}),
            3,
            frozenset(Feature),
            4096,
            frozenset({"al", "bo"}),
            "odd",
            frozenset({"classify"}),
            streams=False,
            device=DeviceKind.PHONE,
            public_key="8a" * 32,
            proven=True,
            price="$0.010",
        ),
        cancels=True,
    ),
    MachineCalled(W, ("02:00:00:00:00:01",), (WorkerId("wire:v"),)),
    WorkerDraining(W, "bye"),
    WorkerSuspended("wire:w", Suspension.DRAINING, "al", 60.0),
    WorkerResumed("wire:w", "al"),
    WorkerApproved("wire:w", "al", "8a" * 32),
    WorkerDisapproved("wire:w", "al"),
    WorkerDismissed(W, "drained by an operator"),
    WorkerLoadChanged(W, WorkerLoad("is too hot", 3, 0.5), fitness_changed=True),
    WorkerLeft(W, "reset"),
    WorkerMarked(W, 3, "another answer than others", JobId("j")),
    WorkerTrusted("al", "u1", "8a" * 32),
    WorkerDistrusted("al", "u2", "8a" * 32),
]

OF_ACCOUNTS: list[Fact] = [
    AccountCredited("user:al", 5_000_000, "default"),
    AccountLimited("user:al", 0, "default"),
    AccountLimited("user:al", None, "default"),
]

OF_ALIASES: list[Fact] = [
    AliasSet("gpt-*", ("m", "n"), "al"),
    AliasRemoved("gpt-*", "al"),
    DeploymentSet("m", 1, "al", 3, ("anna",), True, None, 8192, 2),
    DeploymentRemoved("m", "al"),
]


async def test_new_store_is_empty(store: Store) -> None:
    assert await store.open_jobs() == []
    assert await store.job(JobId("j")) is None
    assert await store.history(JobId("j")) == []
    assert await store.prune(1e12) == 0


def test_every_fact_is_tested() -> None:
    tried = {
        type(fact) for fact in [*WHOLE_STORY, *OF_WORKERS, *OF_ACCOUNTS, *OF_ALIASES]
    }

    assert tried | set(STATES) == {
        *get_args(JobFact),
        *get_args(WorkerFact),
        *get_args(AccountFact),
        *get_args(ModelFact),
        LateResult,
        ReceiptPresented,
    }


async def test_history_is_returned_as_recorded(store: Store) -> None:
    for number, fact in enumerate(WHOLE_STORY):
        await store.append([fact], 100.0 + number)

    assert await store.history(JobId("j")) == [
        RecordedFact(100.0 + number, fact) for number, fact in enumerate(WHOLE_STORY)
    ]


async def test_long_history_is_complete_and_in_order(store: Store) -> None:
    job_id = JobId("j")
    story: list[Fact] = [JobSubmitted(job())]
    for number in range(1, 60):
        lease = LeaseNumber(number)
        story += [leased(lease=number), JobRequeued(job_id, lease, "x" * number)]
        if number % 7 == 0:
            story.append(LateResult(job_id, lease, W, "completed"))
    story += [leased(lease=60), end_of(JobCompleted)]
    story += [ReceiptPresented(job_id, W, Verdict.VALID)] * 40

    for fact in story:
        await store.append([fact], 5.0)

    assert [each.fact for each in await store.history(job_id)] == story
    for seen in (1, 20, 100):
        since = [each.fact for each in await store.history_since(job_id, seen)]
        assert len(since) == len(story) - seen
        assert since[-1] == story[-1]


async def test_history_omits_hashes_that_the_receipts_have(store: Store) -> None:
    end = JobCompleted(JobId("j"), ONE, Outcome("text"), output_hash="ab" * 32)

    await store.append([JobSubmitted(job()), leased(), end], 1.0)

    told = await store.history(JobId("j"))
    assert told[-1].fact == structs.replace(end, output_hash="")


async def test_history_of_one_batch_is_the_same(store: Store) -> None:
    await store.append(WHOLE_STORY, 100.0)

    told = [each.fact for each in await store.history(JobId("j"))]
    assert told == WHOLE_STORY
    stored = await store.job(JobId("j"))
    assert stored is not None
    assert (stored.state, stored.lease) == (JobState.DONE, 4)


@pytest.mark.parametrize(
    "fact",
    [*OF_WORKERS, *OF_ACCOUNTS, *OF_ALIASES],
    ids=lambda fact: type(fact).__name__,
)
async def test_facts_of_workers_are_in_no_history(store: Store, fact: Fact) -> None:
    await store.append([fact], 1.0)

    assert await store.open_jobs() == []


async def test_suspensions_hold_until_a_resume(store: Store) -> None:
    machine = WorkerSuspended("wire:w", Suspension.PAUSED, "al")
    worker = WorkerSuspended("wire:w/m", Suspension.DRAINING, "al", 60.0)
    other = WorkerSuspended("wire:w2/m", Suspension.REMOVED, "bo")
    await store.append([machine, worker], 1.0)
    await store.append([other], 2.0)
    await store.prune(1e12)

    assert await store.suspensions() == [
        (machine, 1.0),
        (structs.replace(worker, within=None), 1.0),
        (other, 2.0),
    ]

    await store.append([structs.replace(other, how=Suspension.PAUSED)], 3.0)
    await store.append([WorkerResumed("wire:w", "al")], 4.0)

    assert await store.suspensions() == [
        (structs.replace(other, how=Suspension.PAUSED), 3.0)
    ]


async def test_resumed_worker_is_no_machine_of_others(store: Store) -> None:
    # A model's name may begin with another one's, and a slash.
    other = WorkerSuspended("wire:w/org/m", Suspension.REMOVED, "al")
    await store.append([WorkerSuspended("wire:w/org", Suspension.PAUSED, "al")], 1.0)
    await store.append([other], 2.0)

    await store.append([WorkerResumed("wire:w/org", "al")], 3.0)

    assert await store.suspensions() == [(other, 2.0)]


async def test_aliases_hold_until_they_are_removed(store: Store) -> None:
    gpt, claude = AliasSet("gpt", ("m",), "al"), AliasSet("claude-*", ("m", "n"), "al")
    await store.append([gpt, claude], 1.0)
    await store.prune(1e12)
    assert await store.aliases() == [claude, gpt]

    changed = AliasSet("gpt", ("n", "m, with a comma"), "bo")
    await store.append([changed, AliasRemoved("claude-*", "bo")], 2.0)

    assert await store.aliases() == [changed]
    await store.append([AliasRemoved("gpt", "bo")], 3.0)
    assert await store.aliases() == []


async def test_deployments_hold_until_they_are_removed(store: Store) -> None:
    qwen = DeploymentSet("qwen3", 1, "al", 4, ("anna", "ben"), idle=60.0)
    llama = DeploymentSet("llama", 2, "al", pinned=True)
    await store.append([qwen, llama], 1.0)
    await store.prune(1e12)
    assert await store.deployments() == [llama, qwen]

    changed = DeploymentSet("qwen3", 0, "bo")
    await store.append([changed, DeploymentRemoved("llama", "bo")], 2.0)

    assert await store.deployments() == [changed]


async def test_approvals_hold_until_they_are_withdrawn(store: Store) -> None:
    waiting = WorkerApproved("wire:w", "al")
    keyless = WorkerApproved("wire:w", "al", "")
    keyed = [WorkerApproved(name, "bo", "8a" * 32) for name in ("wire:w", "wire:x")]
    await store.append([waiting, keyed[1]], 1.0)
    await store.prune(1e12)
    assert await store.approvals() == [waiting, keyed[1]]

    await store.append([keyless], 2.0)
    await store.append([keyed[0], structs.replace(keyed[0], by="cy")], 3.0)
    await store.append([WorkerDisapproved("wire:x", "al", "8a" * 32)], 4.0)
    await store.append([WorkerDisapproved("wire:w", "al")], 5.0)

    assert await store.approvals() == [keyless, structs.replace(keyed[0], by="cy")]
    await store.append([WorkerDisapproved("wire:w", "al", "")], 6.0)
    assert await store.approvals() == [structs.replace(keyed[0], by="cy")]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
async def test_unusual_texts_survive_storage(store: Store, prompt: str) -> None:
    given_in = job("odd", prompt, owner=prompt[:100])
    end = JobCompleted(given_in.id, ONE, Outcome(prompt, "stop", None))

    await store.append([JobSubmitted(given_in), leased("odd"), end], 1.0)

    stored = await store.job(given_in.id)
    assert stored == StoredJob(
        given_in, JobState.DONE, ONE, 1.0, 1.0, Outcome(prompt, "stop", None)
    )
    assert (await store.history(given_in.id))[-1].fact == end


CHOICES = (
    Choice({"content": None, "tool_calls": [{"id": "c", "n": [1.5]}]}, "tool_calls"),
    Choice({"content": "é"}, "length", {"content": [{"token": "é", "logprob": -0.5}]}),
)


@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (Completion("m", "go on", 5, 0.5, {"echo": True}), Outcome("text")),
        (Completion("m", ["a", [1, 2]]), Outcome("", choices=CHOICES)),
        (Embedding("m", ("a", "é"), {"dimensions": 8}),
         Outcome("", usage=Usage(3, 0),
                 choices=(Choice({"content": None, "embedding": "AACAPw=="}),))),
        (Chat("m", ()), Outcome("", "tool_calls", Usage(1, 2), CHOICES)),
    ],
)  # fmt: skip
async def test_work_and_outcomes_of_every_kind_survive_storage(
    store: Store, work: Work, outcome: Outcome
) -> None:
    given_in = Job(JobId("j"), work, priority=Priority.HIGH)
    end = JobCompleted(given_in.id, ONE, outcome)

    await store.append([JobSubmitted(given_in), leased(), end], 1.0)

    stored = await store.job(given_in.id)
    assert stored is not None
    assert (stored.job, stored.outcome) == (given_in, outcome)
    assert [each.fact for each in await store.history(given_in.id)][::2] == [
        JobSubmitted(given_in),
        end,
    ]


async def test_order_of_an_answer_is_stored(store: Store) -> None:
    order = (AnswerSpan("content", 0, 1), AnswerSpan("tool_calls", 0, 2))
    choices = (Choice({"content": "a"}, order=order), Choice({"content": "b"}))
    end = JobCompleted(JobId("j"), ONE, Outcome("a", choices=choices))
    await store.append([JobSubmitted(job()), leased(), end], 1.0)

    stored = await store.job(JobId("j"))

    assert stored is not None
    assert stored.outcome is not None
    assert [choice.order for choice in stored.outcome.choices] == [order, ()]


async def test_outlines_and_recent_facts_omit_large_fields(
    store: Store,
) -> None:
    form = '{"prompt":"hi"}'
    gang = Gang("0a" * 16, rank=1, size=3, least=2)
    terms = JobTerms(
        Policy.CHEAP,
        user="ada",
        price=5,
        form=form,
        api_fields='{"metadata":{}}',
        near=True,
        gang=gang,
    )
    given_in = structs.replace(job("j"), terms=terms, priority=Priority.HIGH)
    end = JobCompleted(given_in.id, ONE, Outcome("text"))
    await store.append([JobSubmitted(given_in), leased(), end], 1.0)

    stored = await store.job(given_in.id)
    told = await store.summary(given_in.id)

    assert stored is not None
    assert stored.job.terms == terms
    assert told == summarize(stored)
    assert told is not None
    assert told.terms == structs.replace(terms, form="", api_fields="")
    assert (await store.recent(JobFilter(), 1)).jobs == [told]
    assert await store.summary(JobId("none")) is None
    assert await store.history_since(given_in.id, 0) == [
        RecordedFact(1.0, JobSubmitted(Job(given_in.id, OMITTED_WORK))),
        RecordedFact(1.0, leased()),
        RecordedFact(1.0, structs.replace(end, outcome=Outcome(""))),
    ]
    assert len(await store.history_since(given_in.id, 2)) == 1
    assert await store.history_since(given_in.id, 3) == []
    assert await store.history_since(JobId("none"), 0) == []


def keyed_job(name: str, owner: str = "al", key: str = "k") -> Job:
    return structs.replace(job(name, owner=owner), idempotency_key=key)


async def test_job_is_found_by_its_owners_idempotency_key(store: Store) -> None:
    await store.append([JobSubmitted(keyed_job("a")), JobSubmitted(job("plain"))], 1.0)
    await store.append([JobSubmitted(keyed_job("b", owner="bo"))], 2.0)
    await store.append([JobSubmitted(keyed_job("c", key="other"))], 3.0)

    for owner, key, name in (("al", "k", "a"), ("bo", "k", "b"), ("al", "other", "c")):
        stored = await store.by_idempotency_key(owner, key)
        assert stored is not None
        assert stored.job == keyed_job(name, owner, key)
    assert await store.by_idempotency_key("cy", "k") is None
    assert await store.by_idempotency_key("al", "none") is None


async def test_key_of_an_unsuccessful_job_is_free(
    store: Store,
) -> None:
    await store.append([JobSubmitted(keyed_job("old"))], 1.0)
    await store.append([leased("old"), end_of(JobFailed, "old")], 2.0)

    await store.append([JobSubmitted(keyed_job("new"))], 3.0)

    stored = await store.by_idempotency_key("al", "k")
    assert stored is not None
    assert stored.job.id == "new"
    assert await store.job(JobId("old")) is not None
    assert await store.prune(100.0) == 1
    assert await store.by_idempotency_key("al", "k") is not None


async def test_key_is_deleted_with_its_job(store: Store) -> None:
    done: list[Fact] = [JobSubmitted(keyed_job("old")), leased("old")]
    done.append(end_of(JobCompleted, "old"))
    await store.append(done, 1.0)

    await store.prune(100.0)

    assert await store.by_idempotency_key("al", "k") is None


async def test_hedged_job_is_open_under_the_newer_lease(
    store: Store,
) -> None:
    await store.append([JobSubmitted(job()), leased()], 1.0)
    await store.append([JobHedged(JobId("j"), W, LeaseNumber(2), "silent")], 2.0)
    await store.append([JobUnhedged(JobId("j"), ONE, "reset", lost=True)], 3.0)

    (stored,) = await store.open_jobs()

    assert (stored.state, stored.lease) == (JobState.LEASED, 2)


@settings(
    max_examples=examples(0.2),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(max_size=50), number=st.integers())
async def test_any_error_survives_storage(store: Store, text: str, number: int) -> None:
    name = f"job {number} {text}"
    if await store.job(JobId(name)) is not None:
        return

    await store.append([JobSubmitted(job(name)), end_of(JobFailed, name, text)], 1.0)

    stored = await store.job(JobId(name))
    assert stored is not None
    assert (stored.job.id, stored.error) == (name, text)


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
async def test_ended_job_is_stored_with_its_end(store: Store, kind: type[Fact]) -> None:
    await store.append([JobSubmitted(job()), leased()], 10.0)
    await store.append([end_of(kind)], 20.0)

    stored = await store.job(JobId("j"))
    assert stored is not None
    assert (stored.state, stored.submitted_at, stored.ended_at) == (
        STATES[kind],
        10.0,
        20.0,
    )
    completed = kind is JobCompleted
    assert stored.error == (None if completed else "done")
    assert (stored.outcome is not None) == completed
    assert await store.open_jobs() == []


async def test_open_jobs_are_listed_oldest_first(
    store: Store,
) -> None:
    for name in ("c", "a", "b", "d"):
        await store.append([JobSubmitted(job(name))], 5.0)
    await store.append([leased("c"), JobStarted(JobId("c"), ONE)], 6.0)
    await store.append([leased("b"), end_of(JobCancelled, "b")], 6.0)

    opened = await store.open_jobs()

    assert [(each.job.id, each.state) for each in opened] == [
        ("c", JobState.STREAMING),
        ("a", JobState.QUEUED),
        ("d", JobState.QUEUED),
    ]
    assert opened[0].job == job("c")


@pytest.mark.parametrize(
    "impossible",
    [JobSubmitted(job("old")), leased("none"), end_of(JobFailed, "none")],
    ids=["submitted twice", "leased but unknown", "ended but unknown"],
)
async def test_invalid_batch_stores_nothing(store: Store, impossible: Fact) -> None:
    await store.append([JobSubmitted(job("old"))], 1.0)
    before = await store.open_jobs()

    with pytest.raises(StoreError):
        await store.append(
            [JobSubmitted(job("new")), leased("old"), impossible, leased("new")], 2.0
        )

    assert await store.open_jobs() == before
    assert await store.job(JobId("new")) is None
    assert await store.history(JobId("new")) == []
    assert len(await store.history(JobId("old"))) == 1
    await store.append([JobSubmitted(job("new"))], 3.0)


async def test_prune_deletes_old_ended_jobs_only(
    store: Store,
) -> None:
    for name in ("old", "new", "open"):
        await store.append([JobSubmitted(job(name)), leased(name)], 1.0)
    await store.append([end_of(JobFailed, "old")], 10.0)
    await store.append([end_of(JobFailed, "new")], 20.0)
    await store.append(OF_WORKERS, 5.0)

    assert await store.prune(20.0) == 1

    assert await store.job(JobId("old")) is None
    assert await store.history(JobId("old")) == []
    assert len(await store.history(JobId("new"))) == 3
    assert [each.job.id for each in await store.open_jobs()] == ["open"]
    assert await store.prune(20.0) == 0


async def test_ended_job_is_deleted_and_an_open_one_stays(store: Store) -> None:
    for name in ("gone", "kept", "open"):
        await store.append([JobSubmitted(job(name)), leased(name)], 1.0)
    await store.append([end_of(JobFailed, "gone"), end_of(JobFailed, "kept")], 2.0)

    deleted = [await store.delete_job(JobId(name)) for name in ("gone", "open", "no")]

    assert deleted == [True, False, False]
    assert await store.job(JobId("gone")) is None
    assert await store.history(JobId("gone")) == []
    assert len(await store.history(JobId("kept"))) == 3
    assert [each.job.id for each in await store.open_jobs()] == ["open"]
    await store.append([JobSubmitted(job("gone"))], 3.0)


async def test_late_fact_of_a_pruned_job_has_no_history(store: Store) -> None:
    await store.append([LateResult(JobId("gone"), LATE, W, "completed")], 1.0)

    assert await store.history(JobId("gone")) == []
    assert await store.job(JobId("gone")) is None


async def test_recent_models_of_workers_are_known(
    store: Store,
) -> None:
    def joined(name: str, *models: str) -> WorkerJoined:
        offer = Offer(frozenset({JobKind.CHAT}), frozenset(models))
        return WorkerJoined(WorkerId(name), offer, cancels=True)

    await store.append([joined("a", "old")], 1.0)
    await store.append([joined("b", "new", 'odd "name"'), joined("c", "new")], 2.0)

    assert await store.models_since(since=2.0) == {"new", 'odd "name"'}
    assert await store.models_since(since=0.0) == {"old", "new", 'odd "name"'}
    assert await store.models_since(since=3.0) == set()


async def test_of_a_library_only_the_names_are_stored(store: Store) -> None:
    models = (LoadableModel("cold", 10**9, digest="sha256:", cache=7),)
    library = ModelLibrary(models, 10**10, 50.0)
    offer = Offer(frozenset({JobKind.MODEL}), library=library)
    await store.append([WorkerJoined(W, offer, cancels=True)], 1.0)

    (joined,) = await store.worker_facts(9)

    assert isinstance(joined.fact, WorkerJoined)
    assert joined.fact.offer.library == ModelLibrary((LoadableModel("cold"),))
    assert await store.models_since(since=0.0) == {"cold"}


async def test_recent_functions_of_workers_are_known(store: Store) -> None:
    def joined(name: str, *tasks: str) -> WorkerJoined:
        offer = Offer(frozenset({JobKind.TASK}), tasks=frozenset(tasks))
        return WorkerJoined(WorkerId(name), offer, cancels=True)

    await store.append([joined("a", "old"), joined("any")], 1.0)
    await store.append([joined("b", "new", "demo.échó")], 2.0)

    assert await store.functions_since(since=2.0) == {"new", "demo.échó"}
    assert await store.functions_since(since=0.0) == {"old", "new", "demo.échó"}


async def test_jobs_are_filtered(store: Store) -> None:
    wanted = [
        job("a"),
        structs.replace(job("b"), terms=JobTerms(user="ada")),
        structs.replace(job("c"), work=Task("classify", {"input": "x"})),
        job("d", owner="other"),
    ]
    for number, each in enumerate(wanted):
        await store.append([JobSubmitted(each)], float(number))
    await store.append([leased("a")], 9.0)
    await store.append([end_of(JobCancelled, "c")], 9.0)

    async def found(limit: int = 10, **what: Any) -> list[str]:
        page = await store.recent(JobFilter(**what), limit)
        return [each.id for each in page.jobs]

    assert await found() == ["d", "c", "b", "a"]
    assert await found(limit=1) == ["d"]
    assert await found(owner="default") == ["c", "b", "a"]
    assert await found(user="ada") == ["b"]
    assert await found(user="") == ["d", "c", "a"]
    assert await found(kind=JobKind.TASK) == ["c"]
    assert await found(states=frozenset({JobState.LEASED})) == ["a"]
    assert await found(
        states=frozenset({JobState.CANCELLED, JobState.LEASED}), owner="default"
    ) == ["c", "a"]
    assert await found(before=JobId("c")) == ["b", "a"]
    assert await found(before=JobId("c"), limit=1) == ["b"]
    assert await found(before=JobId("none")) == []
    assert await found(text="AUL") == ["c", "b", "a"]
    assert await found(text="OTHE") == ["d"]
    assert await found(text="othe", owner="default") == []
    assert await found(text="a") == ["a"]  # the id, though others contain it
    assert await found(text="aul", limit=1) == ["c"]
    assert await found(text="none") == []


async def test_jobs_have_their_workers_and_tokens(store: Store) -> None:
    await store.append([JobSubmitted(job("a")), leased("a")], 1.0)
    await store.append([JobSubmitted(job("b"))], 2.0)

    ran, waits, unknown = await store.runs([JobId("a"), JobId("b"), JobId("c")])

    assert [type(each.fact) for each in ran.facts] == [JobSubmitted, JobLeased]
    assert [type(each.fact) for each in waits.facts] == [JobSubmitted]
    assert (ran.usage, waits.usage, unknown.usage) == (None, None, None)
    assert unknown.facts == []


async def test_pages_together_list_each_job_once(store: Store) -> None:
    for number in range(30):
        name = f"j{number}"
        owner, user = ("al", "bo")[number % 2], ("", "u", "v")[number % 3]
        each = structs.replace(job(name, owner=owner), terms=JobTerms(user=user))
        await store.append([JobSubmitted(each)], float(number))
        if number % 5:
            await store.append([end_of(JobFailed, name)], float(number))

    async def pages(wanted: JobFilter, examined_max: int = 100) -> list[list[JobId]]:
        found = []
        while True:
            page = await store.recent(wanted, 4, examined_max)
            found.append([each.id for each in page.jobs])
            if page.before is None:
                return found
            wanted = replace(wanted, before=page.before)

    queued = frozenset({JobState.QUEUED})
    for wanted, matches in (
        (JobFilter(), range(30)),
        (JobFilter("al"), range(0, 30, 2)),
        (JobFilter(user="u"), range(1, 30, 3)),
        (JobFilter(states=queued), range(0, 30, 5)),
    ):
        listed = await pages(wanted)
        assert [name for page in listed for name in page] == [
            f"j{number}" for number in reversed(matches)
        ]
        assert [len(page) for page in listed[:-1]] == [4] * (len(listed) - 1)
    # Few of the tested jobs match: pages are short, and there are more of them.
    rare = JobFilter("al", queued, "u")
    assert await pages(rare) == [["j10"]]
    assert await pages(rare, 4) == [["j10"], []]


async def test_page_after_a_pruned_job_is_empty(store: Store) -> None:
    await store.append([JobSubmitted(job("a")), JobSubmitted(job("b"))], 1.0)

    page = await store.recent(JobFilter(before=JobId("gone")), 10)

    assert (page.jobs, page.before) == ([], None)


async def test_pages_go_on_where_a_job_was_deleted(store: Store) -> None:
    for name in "abcd":
        await store.append([JobSubmitted(job(name)), end_of(JobFailed, name)], 1.0)
    first = await store.recent(JobFilter(), 2)
    assert [each.id for each in first.jobs] == ["d", "c"]
    assert await store.delete_job(JobId("c"))

    second = await store.recent(JobFilter(before=first.before), 2)

    assert [each.id for each in second.jobs] == ["b", "a"]


async def test_what_a_start_reads_is_in_order(store: Store) -> None:
    call = Call("f", b"\x90", b"\x80")
    facts: list[Fact] = [
        JobSubmitted(Job(JobId("c"), call, owner="al")),
        JobCompleted(JobId("c"), ONE, Outcome("", value=b"\xc0")),
    ]
    marks = [WorkerMarked(W, points, "odd", JobId("c")) for points in (1, 2, 3)]
    trusted = WorkerTrusted("al", "ada", "8a" * 32)

    await store.append(facts, DAY)
    for number, mark in enumerate([marks[2], marks[0], marks[1]]):
        await store.append([mark], 20.0 - number)
    await store.append([trusted], 1.0)

    assert (await store.keys.usage_of("al", 1)).requests == 1
    assert await store.penalties_since(19.0) == [
        RecordedFact(19.0, marks[0]),
        RecordedFact(20.0, marks[2]),
    ]
    assert await store.trusted_workers() == [trusted]
    await store.append([WorkerDistrusted("al", "ada", "8a" * 32)], 2.0)
    assert await store.trusted_workers() == []


async def test_facts_about_workers_are_listed_newest_first(store: Store) -> None:
    joined, left = (
        WorkerJoined(W, Offer(frozenset({JobKind.CHAT})), cancels=True),
        WorkerLeft(W, "gone"),
    )
    await store.append([joined, JobSubmitted(job("a")), left], 1.0)
    await store.append([AccountCredited("user:al", 5, "op"), joined], 2.0)

    newest = await store.worker_facts(3)

    assert [(each.at, type(each.fact)) for each in newest] == [
        (2.0, WorkerJoined),
        (2.0, AccountCredited),
        (1.0, WorkerLeft),
    ]
    assert newest[0].fact == joined
    (first,) = await store.worker_facts(3, newest[-1].number)
    assert (first.at, first.fact) == (1.0, joined)
    assert await store.worker_facts(9, skip=3) == [first]
