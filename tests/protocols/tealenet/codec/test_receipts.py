"""What a worker signs is what its coordinator put together."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    CHAT,
    OFFER,
    RUN,
    PeerPair,
    coordinator_side,
    worker_side,
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


@given(
    pieces=pieces_of_answers,
    continues=texts,
    reason=st.sampled_from(["stop", "length"]),
)
def test_what_a_worker_signs_is_what_the_coordinator_put_together(
    pieces: list[AnswerPiece], continues: str, reason: str
) -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    given = replace(RUN, continues=continues)
    two.acceptor.take(two.acceptor.conversation.send(given, 1.0))
    two.settle()
    (run,) = two.dialler.of(RunJob)

    for word in (
        AnswerChunk(run.job_id, run.lease, pieces),
        Completed(run.job_id, run.lease, reason, Usage(1, 2)),
    ):
        two.dialler.take(two.dialler.conversation.send(word, 2.0))
    two.settle()

    (done,) = two.acceptor.of(Completed)
    heard = [piece for each in two.acceptor.of(AnswerChunk) for piece in each.pieces]
    begun: list[AnswerPiece] = [continues] if continues else []
    outcome = assemble([*begun, *heard], done.finish_reason, done.usage)
    assert done.receipt is not None
    key = worker_side("w").identity
    assert key is not None
    verdict = verify(
        done.receipt,
        job_id=RUN.job_id,
        public_key=key.public_key,
        output_json=output_of(CHAT, replace(outcome, output=done.output)),
    )
    assert verdict is Verdict.VALID


def test_half_characters_are_signed_as_they_arrive() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    two.acceptor.take(two.acceptor.conversation.send(RUN, 1.0))
    two.settle()
    (run,) = two.dialler.of(RunJob)

    halves: list[AnswerPiece] = ["\ud83d", "\ude00", Delta(0, {"content": "\ud83d"})]
    words: list[Event] = [AnswerChunk(run.job_id, run.lease, [half]) for half in halves]
    for word in [*words, Completed(run.job_id, run.lease)]:
        two.dialler.take(two.dialler.conversation.send(word, 2.0))
    two.settle()

    (done,) = two.acceptor.of(Completed)
    heard = [piece for each in two.acceptor.of(AnswerChunk) for piece in each.pieces]
    key = worker_side("w").identity
    assert key is not None
    assert (
        verify(
            done.receipt,
            job_id=RUN.job_id,
            public_key=key.public_key,
            output_json=output_of(CHAT, assemble(heard)),
        )
        is Verdict.VALID
    )


def test_only_a_worker_signs() -> None:
    two = PeerPair(
        coordinator_side("a"), coordinator_side("b", offers=(OFFER,))
    ).settle()
    two.dialler.take(two.dialler.conversation.send(RUN, 1.0))
    two.settle()
    (run,) = two.acceptor.of(RunJob)

    done = Completed(run.job_id, run.lease)
    two.acceptor.take(two.acceptor.conversation.send(done, 2.0))
    two.settle()

    assert two.dialler.of(Completed) == [Completed(RUN.job_id, RUN.lease)]
