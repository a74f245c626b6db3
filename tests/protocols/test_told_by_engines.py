"""What engines tell beside an answer's text reaches the coordinator on every wire."""

import pytest

from protocols.pairs import RUN, connect
from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import STOP_REASON, AnswerPiece, Delta, Outcome, Usage
from shoal.domain.vocabulary import AnswerChunk, Completed, RunJob
from shoal.domain.work import JobKind
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol

every_protocol = pytest.mark.parametrize(
    "protocol",
    [each for each in discover().values() if JobKind.CHAT in each.kinds],
    ids=lambda p: p.name,
)

PIECES: list[AnswerPiece] = ["Hello", Delta(0, {STOP_REASON: "END"})]


def answered(protocol: AnyWireProtocol, usage: Usage | None) -> Outcome:
    """Return an answer with ``PIECES`` as the coordinator assembles it."""
    pair, _ = connect(protocol)
    (run,) = pair.command(RUN)
    assert isinstance(run, RunJob)
    heard = [
        *pair.event(AnswerChunk(run.job_id, run.lease, PIECES)),
        *pair.event(Completed(run.job_id, run.lease, "stop", usage)),
    ]
    pieces: list[AnswerPiece] = []
    for message in heard:
        if isinstance(message, AnswerChunk):
            pieces += message.pieces
    completed = heard[-1]
    assert isinstance(completed, Completed)
    return assemble(
        [*pieces, *completed.rest], completed.finish_reason, completed.usage
    )


@every_protocol
@pytest.mark.parametrize(
    "usage",
    [Usage(10, 5), Usage(10, 5, cached_tokens=0), Usage(10, 5, 8, 3)],
    ids=["counts", "nothing cached", "details"],
)
def test_known_details_of_the_usage_arrive(
    protocol: AnyWireProtocol, usage: Usage
) -> None:
    assert answered(protocol, usage).usage == usage


@every_protocol
def test_the_stop_string_that_ended_the_text_arrives(
    protocol: AnyWireProtocol,
) -> None:
    (choice,) = answered(protocol, None).choices

    assert choice.fields == {"content": "Hello", STOP_REASON: "END"}
