"""Embeddings in servers' formats."""

import json

import pytest

from shoal.domain.errors import InvalidRequest, JobError, ShoalError
from shoal.domain.work import Embedding
from shoal.engines.input_answers import decode_input_answer


def answer(*vectors: object) -> bytes:
    data = [{"index": n, "embedding": each} for n, each in enumerate(vectors)]
    return json.dumps({"data": data}).encode()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (answer(), JobError, "0 embeddings for 1"),
        (answer([1.0], [1.0]), JobError, "2 embeddings for 1"),
        (answer([]), JobError, "without numbers"),
        (answer(""), JobError, "of 0 bytes"),
        (answer("AAAA"), JobError, "of 3 bytes"),
        (answer("AA=A"), JobError, "sent an embedding"),
        (answer("!!!!"), JobError, "sent an embedding"),
        (answer([1.0, None]), JobError, "no embeddings"),
        (answer([[1.0], [2.0]]), JobError, "no embeddings"),
        (b'{"data":[{"embedding":[1.0]}]}', JobError, "no embeddings"),
        (b'{"data":[{"embedding":[1.0],"index":7}]}', JobError, "1 embeddings for 1"),
        (b"<html>", JobError, "no embeddings"),
        (b'{"error": {"message": "too hot", "code": 400}}', InvalidRequest, "too hot"),
    ],
)
def test_malformed_embeddings_are_an_error(
    body: bytes, error: type[ShoalError], message: str
) -> None:
    with pytest.raises(error, match=message):
        decode_input_answer(Embedding("m", ("a",)), body)


@pytest.mark.parametrize("usage", ["null", '{"prompt_tokens": -1}', "{}"])
def test_implausible_counts_do_not_fail_embeddings(usage: str) -> None:
    body = b'{"data":[{"embedding":[1.0],"index":0}],"usage":%b}' % usage.encode()

    pieces, _ = decode_input_answer(Embedding("m", ("a",)), body)

    assert len(pieces) == 1
