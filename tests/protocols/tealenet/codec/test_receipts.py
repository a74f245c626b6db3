"""A worker signs the answer that its coordinator assembles."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.peers import (
    CHAT,
    OFFER,
    RUN,
    PeerPair,
    local_coordinator,
    local_worker,
)
from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import AnswerChunk, Completed, Event, RunJob
from shoal.ledger.outputs import output_of
from shoal.ledger.worker_receipts import verify

texts = st.text(max_size=8)
pieces_of_answers: st.SearchStrategy[list[AnswerPiece]] = st.lists(
    texts.filter(bool)
    | st.builds(
        Delta,
        st.integers(0, 2),
        st.dictionaries(
            st.sampled_from(["content", "reasoning_content"]), texts, max_size=2
        ),
    ),
    max_size=6,
)


@settings(max_examples=examples(0.4))
@given(
    pieces=pieces_of_answers,
    continues=texts,
    reason=st.sampled_from(["stop", "length"]),
)
def test_a_receipt_matches_the_assembled_answer(
    pieces: list[AnswerPiece], continues: str, reason: str
) -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).settle()
    job = replace(RUN, continues=continues)
    pair.acceptor.send(job, 1.0)
    pair.settle()
    (run,) = pair.dialler.messages(RunJob)

    for event in (
        AnswerChunk(run.job_id, run.lease, pieces),
        Completed(run.job_id, run.lease, reason, Usage(1, 2)),
    ):
        pair.dialler.send(event, 2.0)
    pair.settle()

    (done,) = pair.acceptor.messages(Completed)
    received = [
        piece for each in pair.acceptor.messages(AnswerChunk) for piece in each.pieces
    ]
    beginning: list[AnswerPiece] = [continues] if continues else []
    outcome = assemble([*beginning, *received], done.finish_reason, done.usage)
    assert done.receipt is not None
    key = local_worker("w").identity
    assert key is not None
    verdict = verify(
        done.receipt,
        job_id=RUN.job_id,
        public_key=key.public_key,
        output_json=output_of(CHAT, replace(outcome, output=done.output)),
    )
    assert verdict is Verdict.VALID


def test_lone_surrogates_are_signed_as_received() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).settle()
    pair.acceptor.send(RUN, 1.0)
    pair.settle()
    (run,) = pair.dialler.messages(RunJob)

    halves: list[AnswerPiece] = ["\ud83d", "\ude00", Delta(0, {"content": "\ud83d"})]
    events: list[Event] = [
        AnswerChunk(run.job_id, run.lease, [half]) for half in halves
    ]
    for event in [*events, Completed(run.job_id, run.lease)]:
        pair.dialler.send(event, 2.0)
    pair.settle()

    (done,) = pair.acceptor.messages(Completed)
    received = [
        piece for each in pair.acceptor.messages(AnswerChunk) for piece in each.pieces
    ]
    key = local_worker("w").identity
    assert key is not None
    assert (
        verify(
            done.receipt,
            job_id=RUN.job_id,
            public_key=key.public_key,
            output_json=output_of(CHAT, assemble(received)),
        )
        is Verdict.VALID
    )


def test_only_workers_sign_receipts() -> None:
    pair = PeerPair(
        local_coordinator("a"), local_coordinator("b", offers=(OFFER,))
    ).settle()
    pair.dialler.send(RUN, 1.0)
    pair.settle()
    (run,) = pair.acceptor.messages(RunJob)

    done = Completed(run.job_id, run.lease)
    pair.acceptor.send(done, 2.0)
    pair.settle()

    assert pair.dialler.messages(Completed) == [Completed(RUN.job_id, RUN.lease)]
