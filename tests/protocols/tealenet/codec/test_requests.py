from typing import Any

import pytest

from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    ANY_MODEL,
    Chat,
    Completion,
    Embedding,
    Task,
    Work,
)
from shoal.protocols.tealenet.codec.chats import (
    read_chat,
    wants_usage,
    write_request,
)
from shoal.protocols.tealenet.codec.envelope import decode, encode
from shoal.protocols.tealenet.codec.messages import InferenceRequest

ID = "550E8400-E29B-41D4-A716-446655440000"
CHAT = Chat("m", ({"role": "user", "content": "hi"},))


def received(message: InferenceRequest) -> InferenceRequest:
    """Return a request as the peer decodes it."""
    read = decode(encode(message))
    assert isinstance(read, InferenceRequest)
    return read


def test_any_model_is_requested_without_a_name() -> None:
    job = RunJob(JobId("job"), LeaseNumber(1), Chat(ANY_MODEL, CHAT.messages))

    message = received(write_request(job, ID))

    assert "model" not in message.request
    assert read_chat(message.request) == job.work


def test_a_request_has_nothing_but_the_chat() -> None:
    job = RunJob(JobId("a secret name"), LeaseNumber(7), CHAT)

    message = write_request(job, ID)

    assert b"secret" not in encode(message)
    assert message.streaming
    assert read_chat(received(message).request) == CHAT


@pytest.mark.parametrize(
    "work", [Completion("m", "a"), Embedding("m", ("a",)), Task("t")]
)
def test_only_chats_are_supported(work: Work) -> None:
    with pytest.raises(Unsupported, match=work.kind.value):
        write_request(RunJob(JobId("job"), LeaseNumber(1), work), ID)


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
