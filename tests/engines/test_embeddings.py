"""Embeddings in servers' formats."""

import json

import pytest

from shoal.domain.errors import InvalidRequest, JobError, ShoalError
from shoal.domain.outcome import Delta
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
        (answer([1.0, None]), JobError, "not all are finite numbers"),
        (answer([[1.0], [2.0]]), JobError, "not all are finite numbers"),
        (answer([float("nan")]), JobError, "not all are finite numbers"),
        (answer(None), JobError, "no embeddings"),
        (answer({"a": 1}), JobError, "no embeddings"),
        (b'{"data": null}', JobError, "no embeddings"),
        (b'{"data":[null]}', JobError, "no embeddings"),
        (b'{"data":[{"embedding":[1.0],"index":7}]}', JobError, "1 embeddings for 1"),
        (b"<html>", JobError, "no embeddings"),
        (b'{"detail": "no such model"}', JobError, "no such model"),
        (b'{"error": {"message": "too hot", "code": 400}}', InvalidRequest, "too hot"),
    ],
)
def test_malformed_embeddings_are_an_error(
    body: bytes, error: type[ShoalError], message: str
) -> None:
    with pytest.raises(error, match=message):
        decode_input_answer(Embedding("m", ("a",)), body)


@pytest.mark.parametrize(
    "body",
    [
        {"data": [{"embedding": [1.0, -2]}]},
        {"data": [{"embedding": [1, -2], "index": None}], "usage": None},
        {"data": [{"embedding": [1, -2], "index": "0"}], "usage": {}},
        {"data": [{"embedding": [[1, -2]], "index": 0.0}]},
        {"data": [{"embedding": "AACAPwAAAMA=\n"}]},
        {"embeddings": [[1.0, -2.0]]},  # Ollama's
        {"embedding": [1.0, -2.0]},  # its older
        [[1.0, -2.0]],  # text-embeddings-inference's
        [{"index": 0, "embedding": [[1.0, -2.0]]}],  # llama-server's own
    ],
    ids=str,
)
def test_embeddings_are_read_in_other_forms(body: object) -> None:
    pieces, _ = decode_input_answer(Embedding("m", ("a",)), json.dumps(body).encode())

    assert pieces == [Delta(0, {"embedding": "AACAPwAAAMA="})]


@pytest.mark.parametrize("index", ["", '"index": 0, ', '"index": null, '])
def test_embeddings_without_an_index_are_in_their_order(index: str) -> None:
    vectors = f'{{{index}"embedding": [1.0]}}, {{{index}"embedding": [-2.0]}}'
    body = f'{{"data": [{vectors}]}}'.encode()

    pieces, _ = decode_input_answer(Embedding("m", ("a", "b")), body)

    assert pieces == [
        Delta(0, {"embedding": "AACAPw=="}),
        Delta(1, {"embedding": "AAAAwA=="}),
    ]


@pytest.mark.parametrize("vector", [[1.0, -2.0], "AACAPwAAAMA="])
def test_vectors_of_another_size_than_requested_are_an_error(vector: object) -> None:
    body = answer(vector)

    pieces, _ = decode_input_answer(Embedding("m", ("a",), {"dimensions": 2}), body)
    assert len(pieces) == 1
    with pytest.raises(InvalidRequest, match=r"have 2 numbers, not 1") as refusal:
        decode_input_answer(Embedding("m", ("a",), {"dimensions": 1}), body)
    assert refusal.value.field == "dimensions"


@pytest.mark.parametrize("usage", ["null", '{"prompt_tokens": -1}', "{}"])
def test_implausible_counts_do_not_fail_embeddings(usage: str) -> None:
    body = b'{"data":[{"embedding":[1.0],"index":0}],"usage":%b}' % usage.encode()

    pieces, _ = decode_input_answer(Embedding("m", ("a",)), body)

    assert len(pieces) == 1
