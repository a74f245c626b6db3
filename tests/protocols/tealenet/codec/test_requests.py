from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from harness.profiles import examples
from protocols.test_conformance import chats, completions, embeddings, texts, values
from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    ANY_MODEL,
    Chat,
    Completion,
    Embedding,
    JobKind,
    Task,
    Work,
)
from shoal.protocols.tealenet.codec.envelope import BadMessage, decode, encode
from shoal.protocols.tealenet.codec.messages import InferenceRequest
from shoal.protocols.tealenet.codec.requests import (
    read_request,
    wants_usage,
    write_request,
)

ID = "550E8400-E29B-41D4-A716-446655440000"
CHAT = Chat("m", ({"role": "user", "content": "hi"},))

tasks = st.builds(Task, texts, values)
leases = st.integers(1, 2**40).map(LeaseNumber)


def received(message: InferenceRequest) -> InferenceRequest:
    """Return a request as the peer decodes it."""
    read = decode(encode(message))
    assert isinstance(read, InferenceRequest)
    return read


@settings(max_examples=examples(0.4))
@given(work=chats | completions | embeddings | tasks, lease=leases, continues=texts)
def test_a_job_round_trips_between_shoal_peers(
    work: Work, lease: LeaseNumber, continues: str
) -> None:
    if work.kind in (JobKind.EMBEDDING, JobKind.TASK):
        continues = ""
    job = RunJob(JobId("job"), lease, work, continues)

    message = received(write_request(job, ID, extended=True))

    assert read_request(message, extended=True) == RunJob(
        JobId(ID), lease, work, continues
    )
    assert message.streaming
    assert message.request["stream"] is True


@pytest.mark.parametrize("extended", [False, True])
def test_any_model_is_requested_without_a_name(extended: bool) -> None:
    job = RunJob(JobId("job"), LeaseNumber(1), Chat(ANY_MODEL, CHAT.messages))

    message = received(write_request(job, ID, extended=extended))

    assert "model" not in message.request
    assert read_request(message, extended=extended).work == job.work


@pytest.mark.parametrize(
    "work", [Completion("m", "a"), Embedding("m", ("a",)), Task("t")]
)
def test_plain_peers_support_only_chats(work: Work) -> None:
    with pytest.raises(Unsupported, match=work.kind.value):
        write_request(RunJob(JobId("job"), LeaseNumber(1), work), ID)


def test_a_request_to_a_plain_peer_has_no_extension() -> None:
    job = RunJob(JobId("a secret name"), LeaseNumber(7), CHAT)

    message = write_request(job, ID)

    assert message.shoal is UNSET
    assert b"secret" not in encode(message)
    assert read_request(received(message)) == RunJob(JobId(ID), LeaseNumber(1), CHAT)


def test_the_extension_of_a_plain_peer_is_ignored() -> None:
    job = RunJob(JobId("job"), LeaseNumber(7), CHAT, "a beginning")

    read = read_request(received(write_request(job, ID, extended=True)))

    assert (read.lease, read.continues) == (1, "")


@pytest.mark.parametrize(
    ("shoal", "field"),
    [
        ({}, "lease"),
        ({"lease": -1}, "lease"),
        ({"lease": 1, "kind": "dance"}, "kind"),
        ({"lease": 1, "options": []}, "options"),
        ({"lease": 1, "max_tokens": "many"}, "max_tokens"),
        ({"lease": 1, "kind": "embedding", "inputs": [1]}, "inputs"),
    ],
)
def test_the_error_for_an_invalid_job_names_the_field(
    shoal: dict[str, Any], field: str
) -> None:
    message = InferenceRequest(ID, {"messages": []}, True, shoal_of(shoal))

    with pytest.raises(BadMessage, match=field) as refused:
        read_request(received(message), extended=True)

    assert refused.value.request_id == ID


def test_a_deeply_nested_job_is_refused() -> None:
    nested = b"[" * 150 + b"]" * 150
    raw = Raw(b'{"lease":1,"kind":"task","payload":%b}' % nested)
    message = received(InferenceRequest(ID, {"messages": []}, True, raw))

    with pytest.raises(BadMessage, match="nested too deeply"):
        read_request(message, extended=True)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": None}, False),
    ],
)
def test_usage_is_sent_if_requested(request_: dict[str, Any], wanted: bool) -> None:
    message = InferenceRequest(ID, {"messages": [], **request_}, True)

    assert wants_usage(received(message)) is wanted


def shoal_of(field: dict[str, Any]) -> Raw:
    return Raw(msgspec.json.encode(field))
