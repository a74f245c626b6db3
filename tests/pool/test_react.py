"""The facts that follow from inputs."""

from functools import partial

import pytest
from msgspec.structs import replace

from pool.builders import NOTHING, assign, handle, job, joined, leased, pool_after
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    LateResult,
    ReceiptPresented,
    WorkerDistrusted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Privacy, TimeLimit, TimeLimits
from shoal.domain.outcome import Fault, Outcome, Usage
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Draining,
    Failed,
    Rejected,
)
from shoal.domain.work import CALL_QUEUE, Call, Feature, JobKind
from shoal.domain.worker import HANDED_OVER, WorkerLoad
from shoal.pool.eligibility import ineligibility, waits_for_another
from shoal.pool.inputs import (
    AnswerDisputed,
    AnswerRejected,
    Cancellation,
    DrainAnnounced,
    FirstOutput,
    HubInput,
    LeaseResult,
    LimitReached,
    LoadReported,
    ReceiptVerified,
    Submission,
    WorkerConnected,
    WorkerDisconnected,
    WorkerPaired,
    WorkerUnpaired,
)
from shoal.pool.open_job import OpenJob
from shoal.pool.react import (
    INVALID_RECEIPT_POINTS,
    WORKERS_LOST_MAX,
    WRONG_ANSWER_POINTS,
    WRONG_COUNT_POINTS,
    next_limit,
    react,
    revocations,
)
from shoal.pool.state import REFUSAL_PAUSE, PoolState
from shoal.pool.worker import REST_MIN

J, W = JobId("j"), WorkerId("w")
ONE, TWO = LeaseNumber(1), LeaseNumber(2)
WHOLE = Outcome("text", "length", Usage(3, 4))
LIMITS = TimeLimits(queue=10.0, first_output=20.0, silence=5.0, total=100.0)


def running() -> PoolState:
    return pool_after(joined(), JobSubmitted(job(limits=LIMITS)), leased())


@pytest.mark.parametrize(
    ("input_", "facts"),
    [
        (Submission(job("k")), [JobSubmitted(job("k"))]),
        (Cancellation(J, "left"), [JobCancelled(J, "left")]),
        (FirstOutput(J, ONE), [JobStarted(J, ONE)]),
        (
            AnswerRejected(J, "too much", lost=False),
            [JobFailed(J, "too much", cut=True)],
        ),
        (
            AnswerRejected(J, "diverged", lost=True),
            [JobFailed(J, "diverged", lost=True, cut=True)],
        ),
        (DrainAnnounced(W, Draining("bye")), [WorkerDraining(W, "bye")]),
        (
            LeaseResult(W, Completed(J, ONE, "length", WHOLE.usage), WHOLE),
            [JobCompleted(J, ONE, WHOLE)],
        ),
        (LeaseResult(W, Rejected(J, ONE, "no")), [JobRequeued(J, ONE, "no", W)]),
        (LeaseResult(W, Failed(J, ONE, "boom")), [JobFailed(J, "boom")]),
        (
            WorkerDisconnected(W, "reset"),
            [JobRequeued(J, ONE, "worker lost: reset"), WorkerLeft(W, "reset")],
        ),
    ],
)
def test_events_of_a_running_job_become_facts(
    input_: HubInput, facts: list[Fact]
) -> None:
    assert react(running(), input_) == facts


@pytest.mark.parametrize(
    "input_",
    [
        Cancellation(JobId("none"), ""),
        FirstOutput(JobId("none"), ONE),
        FirstOutput(J, TWO),
        FirstOutput(J, LeaseNumber(0)),
        AnswerRejected(JobId("none"), "", lost=False),
        LimitReached(JobId("none"), TimeLimit.TOTAL),
        WorkerDisconnected(WorkerId("none"), ""),
        DrainAnnounced(WorkerId("none"), Draining("")),
        LoadReported(WorkerId("none"), WorkerLoad("hot")),
    ],
)
def test_events_of_ended_leases_are_ignored(input_: HubInput) -> None:
    assert react(running(), input_) == []


@pytest.mark.parametrize("fault", sorted({*Fault} - {Fault.ENGINE}, key=str))
def test_failure_has_the_fault_that_the_worker_reports(fault: Fault) -> None:
    answered = LeaseResult(W, Failed(J, ONE, "boom", fault))

    assert react(running(), answered) == [JobFailed(J, "boom", fault=fault)]


@pytest.mark.parametrize(
    ("fact", "stopped"),
    [
        (JobCancelled(J, "left"), True),
        (JobExpired(J, TimeLimit.TOTAL, ""), True),
        (JobFailed(J, "spoilt", cut=True), True),
        (JobFailed(J, "boom"), False),
        (JobCompleted(J, ONE, WHOLE), False),
        (JobRequeued(J, ONE, "worker lost"), False),
        (JobStarted(J, ONE), False),
        (WorkerLeft(W, ""), False),
    ],
)
def test_worker_of_an_ended_job_is_stopped(fact: Fact, stopped: bool) -> None:
    recalled = [(W, CancelJob(J, ONE))] if stopped else []

    assert revocations(running(), fact) == recalled


def test_queued_job_is_cancelled_without_a_stop() -> None:
    pool = pool_after(JobSubmitted(job()))

    assert revocations(pool, JobCancelled(J, "left")) == []


def test_first_output_of_a_requeued_job_is_ignored() -> None:
    pool = running()
    pool.apply(JobRequeued(J, ONE, "worker lost"), 0.0)

    assert react(pool, FirstOutput(J, ONE)) == []


@pytest.mark.parametrize(
    ("worker", "event", "what"),
    [
        (WorkerId("other"), Completed(J, ONE), "completed"),
        (W, Completed(J, TWO), "completed"),
        (W, Rejected(JobId("none"), ONE, ""), "rejected"),
        (W, Failed(J, LeaseNumber(0), ""), "failed"),
    ],
)
def test_result_of_an_earlier_lease_is_recorded_only(
    worker: WorkerId, event: Completed | Rejected | Failed, what: str
) -> None:
    facts = react(running(), LeaseResult(worker, event, WHOLE))

    assert facts == [LateResult(event.job_id, event.lease, worker, what)]


def test_first_worker_cannot_complete_after_a_takeover() -> None:
    pool = running()
    handle(pool, WorkerDisconnected(W, "reset"))
    pool.apply(joined("second"), 0.0)
    assert assign(pool) == [("j", "second")]
    pool.apply(joined(), 0.0)

    late = handle(pool, LeaseResult(W, Completed(J, ONE), Outcome("first")))
    second = Outcome("second")
    good = handle(pool, LeaseResult(WorkerId("second"), Completed(J, TWO), second))

    assert late == [LateResult(J, ONE, W, "completed")]
    assert good == [JobCompleted(J, TWO, second)]


def test_newer_connection_replaces_the_older() -> None:
    pool = running()
    offer = joined("w", "n", slots=3).offer

    facts = handle(pool, WorkerConnected(W, offer, cancels=False))

    reason = "replaced by a newer connection"
    assert facts == [
        JobRequeued(J, ONE, f"worker lost: {reason}"),
        WorkerLeft(W, reason),
        WorkerJoined(W, offer, cancels=False),
    ]
    assert pool.workers[W].free_slots == 3
    assert pool.roster.models == {"n"}


def test_job_that_outlives_three_workers_is_given_up() -> None:
    pool = pool_after(JobSubmitted(job()))
    ends: list[list[Fact]] = []

    for number in range(WORKERS_LOST_MAX):
        pool.apply(joined(f"w{number}"), 0.0)
        assert len(assign(pool)) == 1
        ends.append(handle(pool, WorkerDisconnected(WorkerId(f"w{number}"), "killed")))

    assert all(isinstance(facts[0], JobRequeued) for facts in ends[:-1])
    assert ends[-1][0] == JobFailed(
        J, "lost 3 workers, the last one: killed", lost=True
    )
    assert pool.jobs == {}


def test_call_that_ended_two_connections_is_not_given_to_a_third() -> None:
    call = Job(J, Call("f", b"\x90", b"\x80"))
    pool = pool_after(JobSubmitted(call))
    why = "protocol error: frame 0 on stream 1 fails its CRC32"

    for name in ("w1", "w2"):
        pool.apply(joined(name, CALL_QUEUE, kinds=frozenset({JobKind.CALL})), 0.0)
        assert len(assign(pool)) == 1
        first, *_ = handle(pool, WorkerDisconnected(WorkerId(name), why))

    assert first == JobFailed(J, f"lost 2 workers, the last one: {why}", lost=True)


def test_refusals_are_no_losses() -> None:
    pool = pool_after(JobSubmitted(job()))

    for number in range(WORKERS_LOST_MAX + 2):
        pool.apply(joined(f"w{number}"), 0.0)
        ((_, worker),) = assign(pool)
        lease = pool.jobs[J].lease
        handle(pool, LeaseResult(WorkerId(worker), Rejected(J, lease, "loading")))

    assert pool.jobs[J].lost == 0
    assert assign(pool) == []


def test_refusal_without_output_is_no_third_loss() -> None:
    pool = pool_after(JobSubmitted(job()))
    for name in ("w1", "w2"):
        pool.apply(joined(name), 0.0)
        assign(pool)
        handle(pool, WorkerDisconnected(WorkerId(name), "killed"))
    pool.apply(joined(), 0.0)
    assign(pool)
    third = pool.jobs[J].lease

    facts = react(pool, LeaseResult(W, Rejected(J, third, "loading")))

    assert facts == [JobRequeued(J, third, "loading", refused_by=W)]


def test_refusal_in_mid_answer_counts_like_a_lost_worker() -> None:
    pool = pool_after(JobSubmitted(job()))
    ends: list[list[Fact]] = []

    for number in range(WORKERS_LOST_MAX):
        pool.apply(joined(f"w{number}"), 0.0)
        ((_, worker),) = assign(pool)
        lease = pool.jobs[J].lease
        handle(pool, FirstOutput(J, lease))
        refused = LeaseResult(WorkerId(worker), Rejected(J, lease, "the server died"))
        ends.append(handle(pool, refused))

    assert ends[:-1] == [
        [JobRequeued(J, LeaseNumber(n), "the server died", WorkerId(f"w{n - 1}"))]
        for n in range(1, WORKERS_LOST_MAX)
    ]
    assert ends[-1] == [
        JobFailed(J, "lost 3 workers, the last one: the server died", lost=True)
    ]


def test_answer_that_is_handed_over_for_an_owner_is_nobodys_loss() -> None:
    pool = pool_after(JobSubmitted(job()))
    reason = f"{HANDED_OVER}its user is active"

    for number in range(WORKERS_LOST_MAX + 1):
        pool.apply(joined(f"w{number}"), 0.0)
        ((_, worker),) = assign(pool)
        lease = pool.jobs[J].lease
        handle(pool, FirstOutput(J, lease))
        given_back = LeaseResult(WorkerId(worker), Rejected(J, lease, reason))
        facts = handle(pool, given_back)

        assert facts == [
            JobRequeued(J, lease, reason, WorkerId(worker), handed_over=True)
        ]

    assert pool.jobs[J].lost == 0
    assert assign(pool) == [], "those who have no time for it are not asked at once"


def test_jobs_of_a_lost_worker_are_requeued() -> None:
    pool = pool_after(joined(slots=3), joined("v"), *map(JobSubmitted, map(job, "abc")))
    for name, worker in (("a", "w"), ("b", "v"), ("c", "w")):
        pool.apply(leased(name, worker), 0.0)

    facts = handle(pool, WorkerDisconnected(W, "reset"))

    back = [fact.job_id for fact in facts if isinstance(fact, JobRequeued)]
    assert back == ["a", "c"]


def test_ended_job_of_a_lost_worker_is_not_requeued() -> None:
    pool = pool_after(joined(cancels=False), JobSubmitted(job()), leased())
    handle(pool, Cancellation(J, "left"))

    assert handle(pool, WorkerDisconnected(W, "reset")) == [WorkerLeft(W, "reset")]


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        (
            TimeLimit.FIRST_OUTPUT,
            "waiting for the first output: over the limit of 20 s",
        ),
        (TimeLimit.SILENCE, "waiting for more output: over the limit of 5 s"),
        (TimeLimit.TOTAL, "running in all: over the limit of 100 s"),
        (
            TimeLimit.QUEUE,
            "no worker for m: 1 worker has it but is full "
            "(waiting in the queue: over the limit of 10 s)",
        ),
    ],
)
def test_overdue_job_expires_with_its_limit(limit: TimeLimit, error: str) -> None:
    seconds = 5 if limit is TimeLimit.QUEUE else 0

    assert react(running(), LimitReached(J, limit)) == [
        JobExpired(J, limit, error, retry_after=seconds)
    ]


def test_overdue_call_expires_with_words_about_a_call() -> None:
    call = Job(J, Call("f", b"\x90", b"\x80"), LIMITS)
    worker = joined("w", CALL_QUEUE, kinds=frozenset({JobKind.CALL}))
    pool = pool_after(worker, JobSubmitted(call), leased())

    (expired,) = react(pool, LimitReached(J, TimeLimit.FIRST_OUTPUT))
    (in_all,) = react(pool, LimitReached(J, TimeLimit.TOTAL))

    assert isinstance(expired, JobExpired)
    assert expired.error == "the worker returned no result of the call within 20 s"
    assert isinstance(in_all, JobExpired)
    assert in_all.error == "running in all: over the limit of 100 s"


def waiting(since: float = 0.0) -> OpenJob:
    return OpenJob(job(limits=LIMITS), submitted_at=0.0, since=since, queued_at=since)


def held(since: float = 0.0) -> OpenJob:
    return OpenJob(job(limits=LIMITS), 0.0, since=since, queued_at=0.0, worker_id=W)


@pytest.mark.parametrize(
    ("open_job", "now", "last_output", "due"),
    [
        (waiting(), 0.0, None, 10.0),
        (waiting(), 9.99, None, 10.0),
        (waiting(), 10.0, None, TimeLimit.QUEUE),
        (waiting(since=95.0), 96.0, None, 100.0),
        (waiting(since=95.0), 100.0, None, TimeLimit.TOTAL),
        (held(since=3.0), 3.0, None, 23.0),
        (held(since=3.0), 23.0, None, TimeLimit.FIRST_OUTPUT),
        (held(since=85.0), 86.0, None, 100.0),
        (held(), 50.0, 48.0, 53.0),
        (held(), 53.0, 48.0, TimeLimit.SILENCE),
        (held(), 99.0, 98.0, 100.0),
        (held(since=80.0), 100.0, None, TimeLimit.TOTAL),  # both at once
        (held(), 100.0, 98.0, TimeLimit.TOTAL),
        # Text of an earlier lease does not count while the job is queued.
        (waiting(since=48.0), 50.0, 48.0, 58.0),
    ],
)
def test_nearest_limit_applies(
    open_job: OpenJob, now: float, last_output: float | None, due: TimeLimit | float
) -> None:
    assert next_limit(PoolState(), open_job, now, last_output) == due


def test_queued_job_waits_for_a_busy_worker_but_not_for_one_that_never_was() -> None:
    limits = TimeLimits(queue=600.0, without_worker=30.0)
    queued = OpenJob(job(limits=limits), submitted_at=0.0, since=0.0, queued_at=0.0)
    nobody, busy = PoolState(), pool_after(joined("w"))

    assert next_limit(nobody, queued, 0.0, None) == 30.0
    assert next_limit(nobody, queued, 30.0, None) is TimeLimit.QUEUE
    assert next_limit(busy, queued, 30.0, None) == 60.0
    assert next_limit(busy, queued, 590.0, None) == 600.0
    assert next_limit(busy, queued, 600.0, None) is TimeLimit.QUEUE
    # Its workers have left meanwhile.
    assert next_limit(nobody, queued, 60.0, None) is TimeLimit.QUEUE
    (expired,) = react(
        pool_after(JobSubmitted(queued.job)), LimitReached(J, TimeLimit.QUEUE)
    )
    assert isinstance(expired, JobExpired)
    assert "over the limit of 30 s" in expired.error


KEY = "aa" * 32


def test_private_job_without_a_trusted_worker_fails_at_once() -> None:
    private = replace(job(), terms=JobTerms(privacy=Privacy.PRIVATE, user="ada"))

    submitted, failed = react(pool_after(joined()), Submission(private))

    assert submitted == JobSubmitted(private)
    assert isinstance(failed, JobFailed)
    assert failed.error.startswith("no_trusted_worker: ")


def test_only_a_change_of_the_load_is_a_fact() -> None:
    pool = pool_after(joined())

    hot = handle(pool, LoadReported(W, WorkerLoad("hot")))
    again = handle(pool, LoadReported(W, WorkerLoad("hot")))
    busier = handle(pool, LoadReported(W, WorkerLoad("hot", queued=1)))

    assert hot == [WorkerLoadChanged(W, WorkerLoad("hot"), fitness_changed=True)]
    assert again == []
    assert busier == [WorkerLoadChanged(W, WorkerLoad("hot", 1), fitness_changed=False)]


def test_pairing_and_its_end_are_facts_once() -> None:
    pool = PoolState()
    pairing, end = WorkerPaired("al", "ada", KEY), WorkerUnpaired("al", "ada", KEY)

    assert handle(pool, end) == []
    assert handle(pool, pairing) == [WorkerTrusted("al", "ada", KEY)]
    assert handle(pool, pairing) == []
    assert handle(pool, WorkerUnpaired("al", "bo", KEY)) == []
    assert handle(pool, end) == [WorkerDistrusted("al", "ada", KEY)]
    assert handle(pool, end) == []


@pytest.mark.parametrize("verdict", Verdict)
def test_only_an_invalid_receipt_marks_its_worker(verdict: Verdict) -> None:
    harmless = verdict in (Verdict.VALID, Verdict.UNSIGNED, Verdict.MISSING)
    reason = f"an invalid receipt: {verdict.value}"
    marked = [WorkerMarked(W, INVALID_RECEIPT_POINTS, reason, J)]

    receipt = SignedReceipt(b"{}", b"s" * 64)

    late = react(running(), ReceiptVerified(W, J, verdict, receipt))
    answered = react(running(), LeaseResult(W, Completed(J, ONE), WHOLE, verdict))

    presented = ReceiptPresented(J, W, verdict, receipt)
    assert late == [presented, *([] if harmless else marked)]
    assert answered == [
        JobCompleted(J, ONE, WHOLE, verdict),
        *([] if harmless else marked),
    ]


def test_count_that_cannot_be_is_left_out_and_marks_its_worker() -> None:
    said = Outcome("text", usage=Usage(3, 2**31 - 1))

    facts = react(running(), LeaseResult(W, Completed(J, ONE), said))

    reason = f"{2**31 - 1} tokens written, more than the answer can hold"
    assert facts == [
        JobCompleted(J, ONE, Outcome("text")),
        WorkerMarked(W, WRONG_COUNT_POINTS, reason, J),
    ]


@pytest.mark.parametrize(("workers", "key"), [([True], KEY), ([False], ""), ([], "")])
def test_mark_follows_a_key_that_the_worker_proved(
    workers: list[bool], key: str
) -> None:
    pool = PoolState()
    for proven in workers:
        offer = replace(joined().offer, public_key=KEY, proven=proven)
        handle(pool, WorkerConnected(W, offer, cancels=True))

    facts = react(pool, AnswerDisputed(W, "differs", J))

    assert facts == [WorkerMarked(W, WRONG_ANSWER_POINTS, "differs", J, key)]


CONTINUES = frozenset({Feature.CONTINUE})


@pytest.mark.parametrize("fault", [Fault.WORKER, Fault.ENGINE])
@pytest.mark.parametrize(
    ("workers", "begun", "said", "tries"),
    [
        # The second engine that says the same ends the job, with its words.
        (
            "abcd",
            False,
            ["status 500: no room (id 1)", "status 500: no room (id 2)"],
            2,
        ),
        # Engines that say different things are not of one kind; three are enough.
        ("abcd", False, ["no room", "a bug", "broken"], 3),
        # An answer goes on only where it can be continued.
        ("aB", True, ["no room", "no room"], 2),
    ],
)
def test_an_engine_that_fails_is_followed_by_one_of_another_kind(
    workers: str, begun: bool, said: list[str], tries: int, fault: Fault
) -> None:
    pool = pool_after(JobSubmitted(job()))
    for name in workers:
        features = CONTINUES if name.isupper() else NOTHING
        pool.apply(joined(name.lower(), features=features), 0.0)
    facts: list[Fact] = []

    for words in said:
        ((_, worker),) = assign(pool)
        lease = pool.jobs[J].lease
        if begun:
            handle(pool, FirstOutput(J, lease))
        failed = Failed(J, lease, words, fault)
        facts += handle(pool, LeaseResult(WorkerId(worker), failed))

    assert [type(each) for each in facts] == [JobRequeued] * (tries - 1) + [JobFailed]
    assert facts[-1] == JobFailed(J, said[-1], fault=fault)


def test_a_job_waits_for_a_busy_worker_rather_than_for_one_that_failed_at_it() -> None:
    pool = pool_after(JobSubmitted(job("other")), joined("busy"))
    assert assign(pool) == [("other", "busy")]
    pool.apply(joined("broken"), 0.0)
    pool.apply(JobSubmitted(job()), 0.0)
    assert assign(pool) == [(J, "broken")]
    renews = partial(waits_for_another, pool)

    failed = Failed(J, pool.jobs[J].lease, "no room", Fault.ENGINE)
    handle(pool, LeaseResult(WorkerId("broken"), failed), 0.0)
    for now in (REFUSAL_PAUSE, 2 * REFUSAL_PAUSE):
        pool.expire_penalties(now, renews)
        assert assign(pool, now) == []

    # Nobody else is left, and its engine may have recovered: one refuses the job.
    pool.apply(joined("refuses"), now)
    assert assign(pool, now) == [(J, "refuses")]
    refusal = Rejected(J, pool.jobs[J].lease, "no")
    handle(pool, LeaseResult(WorkerId("refuses"), refusal), now)
    pool.apply(WorkerLeft(WorkerId("busy"), "gone"), now)
    pool.expire_penalties(3 * REFUSAL_PAUSE, renews)
    assert (J, "broken") in assign(pool, 3 * REFUSAL_PAUSE)


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_may_recover_is_tried_again_and_others_are_not(
    begun: bool,
) -> None:
    for fault, again in ((Fault.ENGINE, True), (Fault.WORKER, False)):
        pool = running()
        if begun:
            pool.apply(joined("cannot continue"), 0.0)
            handle(pool, FirstOutput(J, ONE))
        (fact,) = react(pool, LeaseResult(W, Failed(J, ONE, "no room", fault)))
        assert isinstance(fact, JobRequeued) == again


def test_a_worker_whose_engine_keeps_failing_rests_until_a_trial_succeeds() -> None:
    pool, now = pool_after(joined(slots=4)), 0.0
    worker = pool.workers[W]

    def given(*names: str) -> list[str]:
        for name in names:
            pool.apply(JobSubmitted(job(name)), now)
        return [name for name, _ in assign(pool, now)]

    def fail(*names: str) -> None:
        for name in map(JobId, names):
            failed = Failed(name, pool.jobs[name].lease, "no room")
            handle(pool, LeaseResult(W, failed), now)

    fail(*given("a", "b", "c", "d"))
    assert worker.unfit == "", "it is the only one, and says what is wrong"
    pool.apply(joined("other", only_for=frozenset({"al"})), now)
    fail(*given("e", "f"))
    waiting = OpenJob(job(), now, now, now)
    assert ineligibility(waiting, worker) == "its engine keeps failing: no room"
    assert given("g", "h", "i") == []
    for pause, trial in ((REST_MIN, "g"), (2 * REST_MIN, "h")):
        now += pause
        assert pool.expire_penalties(now - 0.1) == now
        pool.expire_penalties(now)
        assert given() == [trial]
        fail(trial)

    now = worker.rests_until
    pool.expire_penalties(now)
    assert given("j") == ["i"]
    handle(pool, FirstOutput(JobId("i"), ONE), now)
    assert given("k") == ["j", "k"]
