"""Laws of every worker protocol on which models work; those of others are apart.

Those of ``own_wire`` say that nothing is lost, which other systems' documents have no
words for; what these carry is tried in the folders of their wires.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.profiles import examples
from protocols.pairs import CHAT, MEMBER, RUN, SIGNER, ChatPair, connect, other_profile
from protocols.session_pair import In, Out, Pair, ReceivedMessage, sent
from shoal.domain.answer_assembly import CHOICES_MAX
from shoal.domain.errors import ConfigError, PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece, Delta, Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    Draining,
    Failed,
    HealthReported,
    Joined,
    Rejected,
    RunJob,
)
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    InputWork,
    JobKind,
    Rerank,
    Transcription,
    Work,
)
from shoal.domain.worker import MachineHealth
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.protocols.seam.session import Close, Data, Send

every_protocol = pytest.mark.parametrize(
    "protocol",
    [each for each in discover().values() if JobKind.CHAT in each.kinds],
    ids=lambda p: p.name,
)
own_wire = pytest.mark.parametrize(
    "protocol",
    [each for each in discover().values() if each.preferred],
    ids=lambda p: p.name,
)
all_protocols = pytest.mark.parametrize(
    "protocol", discover().values(), ids=lambda p: p.name
)

texts = st.text(max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(
    allow_nan=False, allow_infinity=False
)
values: st.SearchStrategy[JSON] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts})
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": texts | st.lists(parts, max_size=3) | st.none(),
    },
    optional={"name": texts, "tool_calls": values},
)
chats = st.builds(
    Chat,
    st.just(MEMBER.model.name),
    st.lists(messages, max_size=5).map(tuple),
    st.none() | st.integers(1, 2**31 - 1),
    st.none() | st.floats(0, 2),
    st.dictionaries(texts, values, max_size=3),
)
completions = st.builds(
    Completion,
    st.just(MEMBER.model.name),
    texts | st.lists(texts, max_size=3) | st.lists(st.integers(0, 2**31), max_size=3),
    st.none() | st.integers(1, 2**31 - 1),
    st.none() | st.floats(0, 2),
    st.dictionaries(texts, values, max_size=3),
)
embeddings = st.builds(
    Embedding,
    st.just(MEMBER.model.name),
    st.lists(texts, max_size=3).map(tuple),
    st.dictionaries(texts, values, max_size=3),
)
rerankings = st.builds(
    Rerank,
    st.just(MEMBER.model.name),
    texts,
    st.lists(texts, max_size=3).map(tuple),
    st.dictionaries(texts, values, max_size=3),
)
transcriptions = st.builds(
    Transcription,
    st.just(MEMBER.model.name),
    texts,
    texts,
    st.dictionaries(texts, values, max_size=3),
)
deltas = st.builds(
    Delta,
    st.integers(0, CHOICES_MAX - 1),
    st.dictionaries(texts, values, max_size=3),
    st.none() | st.dictionaries(texts, values, max_size=3),
    st.sampled_from([None, "stop", "tool_calls"]),
)
numbers_of_tokens = st.integers(0, 2**40)
usages = st.builds(
    Usage,
    *(numbers_of_tokens, numbers_of_tokens),
    *(st.none() | numbers_of_tokens, st.none() | numbers_of_tokens),
)
# Each example connects two ends.
FEWER = settings(max_examples=examples(0.4))


@own_wire
def test_a_worker_joins_with_the_offer_it_states(protocol: AnyWireProtocol) -> None:
    model = MEMBER.model
    _, heard = connect(protocol)

    (joined,) = heard
    assert isinstance(joined, Joined)
    assert MEMBER.name in joined.name or SIGNER.public_key.hex() in joined.name
    assert joined.offer.models == {model.name}
    assert joined.offer.slots == MEMBER.slots
    assert joined.offer.features <= model.features
    assert JobKind.CHAT in joined.offer.kinds
    assert joined.offer.kinds <= model.kinds
    assert joined.offer.context in (model.context, 0)
    assert joined.offer.only_for == MEMBER.only_for
    assert joined.offer.privacy is MEMBER.privacy
    assert joined.offer.price == MEMBER.price
    assert joined.offer.remark == ""


@every_protocol
def test_workers_of_different_names_or_models_are_different(
    protocol: AnyWireProtocol,
) -> None:
    names = {
        heard[0].name
        for name, has in [("b-c", "a"), ("c", "a-b"), ("a/b", "c"), ("a", "b/c")]
        for _, heard in [connect(protocol, other_profile(name, has))]
        if isinstance(heard[0], Joined)
    }

    assert len(names) == 4


@all_protocols
def test_an_address_that_cannot_be_dialled_is_refused(
    protocol: AnyWireProtocol,
) -> None:
    for url in ("", "nonsense", "gopher://host", "ws://", "ws://host:port", "ws://[::"):
        with pytest.raises(ConfigError, match="expected"):
            protocol.dial(url, MEMBER)


@own_wire
@FEWER
@given(
    work=chats | completions | embeddings | rerankings | transcriptions,
    continues=texts,
    thoughts=texts,
)
def test_a_job_arrives_unchanged(
    protocol: AnyWireProtocol, work: Work, continues: str, thoughts: str
) -> None:
    pair, (joined,) = connect(protocol)
    assert isinstance(joined, Joined)
    if work.kind not in joined.offer.kinds:
        return  # it is never given one
    if isinstance(work, InputWork):
        continues = thoughts = ""
    if not isinstance(work, Chat):
        thoughts = ""

    heard = pair.command(
        RunJob(JobId("job"), LeaseNumber(2), work, continues, thoughts)
    )

    (run,) = heard
    assert isinstance(run, RunJob)
    assert run.work == work
    assert run.continues == continues
    assert run.thoughts == thoughts


@own_wire
@FEWER
@given(
    pieces=st.lists(st.text(min_size=1) | deltas, max_size=5),
    reason=st.sampled_from(["stop", "length"]),
    usage=st.none() | usages,
)
def test_an_answer_arrives_unchanged(
    protocol: AnyWireProtocol,
    pieces: list[AnswerPiece],
    reason: str,
    usage: Usage | None,
) -> None:
    pair, _ = connect(protocol)
    run = given_job(pair)

    heard: list[ReceivedMessage] = []
    for piece in pieces:
        heard += pair.event(AnswerChunk(run.job_id, run.lease, [piece]))
    heard += pair.event(Completed(run.job_id, run.lease, reason, usage))

    *progress, end = heard
    assert isinstance(end, Completed)
    said = [x for p in progress if isinstance(p, AnswerChunk) for x in p.pieces]
    assert said == pieces
    assert len(progress) == len(pieces)
    assert not end.rest
    assert (end.job_id, end.lease) == (RUN.job_id, RUN.lease)
    assert end.finish_reason == reason
    assert end.usage == usage


@own_wire
@FEWER
@given(text=texts, fault=st.sampled_from(Fault))
def test_failures_arrive_unchanged(
    protocol: AnyWireProtocol, text: str, fault: Fault
) -> None:
    pair, _ = connect(protocol)
    run = given_job(pair)
    heard = pair.event(Rejected(run.job_id, run.lease, text))
    assert heard == [Rejected(RUN.job_id, RUN.lease, text)]
    run = given_job(pair)
    heard = pair.event(Failed(run.job_id, run.lease, text, fault))
    assert heard == [Failed(RUN.job_id, RUN.lease, text, fault)]
    assert pair.event(Draining(text)) == [Draining(text)]


@own_wire
def test_a_cancelled_job_ends_at_both_ends(protocol: AnyWireProtocol) -> None:
    pair, _ = connect(protocol)
    run = given_job(pair)

    heard = pair.command(CancelJob(RUN.job_id, RUN.lease))

    assert heard == [CancelJob(run.job_id, run.lease)]
    assert pair.event(AnswerChunk(run.job_id, run.lease, ["late"])) == []
    assert pair.event(Completed(run.job_id, run.lease)) == []
    assert pair.command(CancelJob(RUN.job_id, RUN.lease)) == []


@own_wire
def test_two_leases_of_one_job_are_distinct(protocol: AnyWireProtocol) -> None:
    pair, _ = connect(protocol)
    first = given_job(pair)
    (second,) = pair.command(replace(RUN, lease=LeaseNumber(3)))

    assert isinstance(second, RunJob)
    heard = pair.event(AnswerChunk(second.job_id, second.lease, ["new"]))
    heard += pair.event(Completed(first.job_id, first.lease))
    heard += pair.event(Completed(second.job_id, second.lease))

    said = [
        (each.lease, each.pieces if isinstance(each, AnswerChunk) else [*each.rest])
        for each in heard
        if isinstance(each, AnswerChunk | Completed) and each.job_id == RUN.job_id
    ]
    new: tuple[LeaseNumber, list[AnswerPiece]] = (LeaseNumber(3), ["new"])
    assert said == [new, (RUN.lease, []), (LeaseNumber(3), [])]


@every_protocol
@FEWER
@given(data=st.data())
def test_any_message_is_accepted_or_refused_by_either_end(
    protocol: AnyWireProtocol, data: st.DataObject
) -> None:
    pair, _ = connect(protocol)
    run = given_job(pair)
    for event in (
        AnswerChunk(run.job_id, run.lease, ["text"]),
        AnswerChunk(run.job_id, run.lease, [Delta(1, {"content": "more than text"})]),
        Completed(run.job_id, run.lease, "length", Usage(1, 2)),
        Draining("why"),
        HealthReported(MachineHealth(12.5, 50.0, 1)),
    ):
        if type(event) in pair.worker.accepts:
            pair.event(event)
    given_job(pair, "another")

    # PeerError is how a session refuses a message; anything else is a bug.
    with contextlib.suppress(PeerError):
        for message in data.draw(st.lists(garbage(pair.worker_sent), max_size=4)):
            pair.coordinator.receive([message], 1.0)
    with contextlib.suppress(PeerError):
        for message in data.draw(st.lists(garbage(pair.coordinator_sent), max_size=4)):
            pair.worker.receive([message], 1.0)


@every_protocol
def test_nothing_follows_a_close(protocol: AnyWireProtocol) -> None:
    pair, _ = connect(protocol)
    given_job(pair)

    outputs = pair.coordinator.send(Dismiss("not needed"), 1.0)

    *_, close = outputs  # some wires have words of farewell
    assert isinstance(close, Close)
    assert len(close.text.encode()) <= 123  # RFC 6455, section 5.5
    assert pair.coordinator.deadline is None
    assert list(pair.coordinator.tick(1e6)) == []
    assert list(pair.coordinator.send(RUN, 2.0)) == []
    for message in pair.worker_sent:
        assert list(pair.coordinator.receive([message], 2.0)) == []


@own_wire
def test_a_dismissed_worker_does_not_reconnect_and_reports_the_reason(
    protocol: AnyWireProtocol,
) -> None:
    pair, _ = connect(protocol)
    outputs = pair.coordinator.send(Dismiss("removed by an operator: `why`"), 1.0)

    for each in outputs:
        if isinstance(each, Send):
            pair.worker.receive([each.data], 1.0)

    close = outputs[-1]
    assert isinstance(close, Close)
    final = pair.dialer.final_reason(close.code, close.text)
    assert final is not None
    assert final.endswith("removed by an operator: `why`")


@every_protocol
def test_after_a_tick_the_deadline_lies_ahead(protocol: AnyWireProtocol) -> None:
    pair, _ = connect(protocol)

    for session in (pair.coordinator, pair.worker):
        now = 0.0
        for _ in range(20):
            if session.deadline is None:
                break
            assert session.deadline > now
            now = session.deadline
            session.tick(now)


@every_protocol
def test_an_active_worker_stays_connected_and_a_silent_one_does_not(
    protocol: AnyWireProtocol,
) -> None:
    pair, _ = connect(protocol)

    now = 0.0
    while now < 600:
        assert pair.worker.deadline is not None
        now = pair.worker.deadline
        pair.deliver((), pair.worker.tick(now), now)
        assert not closing(pair.coordinator.tick(now))

    assert closing(pair.coordinator.tick(now + 600))


@every_protocol
def test_memory_does_not_grow_with_the_messages(protocol: AnyWireProtocol) -> None:
    pair, _ = connect(protocol)
    turns = count()

    def run_jobs() -> None:
        for turn in islice(turns, 100):
            run = given_job(pair, f"job {turn}")
            pair.event(AnswerChunk(run.job_id, run.lease, ["text"]))
            pair.event(AnswerChunk(run.job_id, run.lease, [Delta(1, {"content": "a"})]))
            late = AnswerChunk(run.job_id, run.lease, ["late"])
            messages = sent(pair.worker.send(late, 0.0))
            pair.event(Completed(run.job_id, run.lease))
            for message in messages:
                with contextlib.suppress(PeerError):
                    pair.coordinator.receive([message], 0.0)

    assert stops_growing(run_jobs, pair)


def given_job(pair: ChatPair, name: str = "job") -> RunJob:
    """Give the worker a job; return it as the worker has it."""
    (run,) = pair.command(RunJob(JobId(name), RUN.lease, CHAT))
    assert isinstance(run, RunJob)
    return run


def garbage(seen: list[Data]) -> st.SearchStrategy[Data]:
    """Anything at all, or something once sent, damaged."""
    anything = st.text() | st.binary()
    return anything | st.tuples(
        st.sampled_from(seen), st.integers(0, 300), st.integers(0, 3), anything
    ).map(lambda choice: damaged(*choice))


def damaged(data: Data, at: int, cut: int, more: Data) -> Data:
    if isinstance(data, str):
        return data[:at] + (more if isinstance(more, str) else "") + data[at + cut :]
    return data[:at] + (more if isinstance(more, bytes) else b"") + data[at + cut :]


def closing(outputs: object) -> bool:
    assert isinstance(outputs, list | tuple)
    return any(isinstance(output, Close) for output in outputs)


def stops_growing(act: Callable[[], None], pair: Pair[In, Out]) -> bool:
    """Say whether what both ends hold stays the same after a while.

    Some wires remember the last thousand tasks or so.
    """
    held = [0, 0]
    for _ in range(15):
        before = held
        act()
        held = [footprint(end) for end in (pair.coordinator, pair.worker)]
        if all(now <= then + 10 for now, then in zip(held, before, strict=True)):
            return True
    return False


def footprint(value: object) -> int:
    """Count what the containers within ``value`` hold."""
    return sum(1 for _ in reachable(value, set()))


def reachable(value: object, seen: set[int]) -> Iterator[object]:
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    match value:
        case dict():
            inner = [*value.keys(), *value.values()]
        case list() | tuple() | set() | frozenset():
            inner = list(value)
        case str() | bytes() | int() | float() | type() | None:
            inner = []
        case _:
            inner = list(getattr(value, "__dict__", {}).values())
            slots = getattr(type(value), "__slots__", ())
            inner += [getattr(value, name, None) for name in slots]
    for item in inner:
        yield from reachable(item, seen)
