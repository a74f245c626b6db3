import contextlib
import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.recordings import CASES, Case, case_of, recorded
from shoal.domain.errors import PeerError
from shoal.protocols.seam.framing import LengthPrefixed
from shoal.protocols.seam.session import Batch, Close, Output, Send
from shoal.protocols.tealenet.codec.chats import read_chat
from shoal.protocols.tealenet.codec.chunks import ChunkReader
from shoal.protocols.tealenet.codec.envelope import (
    VALUES_MAX,
    BadMessage,
    decode,
    encode,
)
from shoal.protocols.tealenet.codec.messages import (
    ChatCompletionChunk,
    ChunkChoice,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloAck,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    Message,
    ModelLoaded,
    ModelLoadError,
    ModelQueryRequest,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferRequest,
    SentMessage,
)

ID = "550e8400-e29b-41d4-a716-446655440000"
FRAME_MAX = 4 << 20  # bytes

Framed: TypeAlias = LengthPrefixed[Output, str]

hello = decode(case_of("cluster_swift_emits/hello_full")["json_text"])
assert isinstance(hello, Hello)
DEVICE = hello.device_info

SAMPLES: list[SentMessage] = [
    hello,
    HelloAck(DEVICE, 1, ("m",)),
    Heartbeat(ID, 1.5, "fair", 95, ("m",), True, 2, "org", ID, 18.25),
    HeartbeatAck(ID, 1.5, "nominal", 100),
    InferenceRequest(ID, {"messages": [], "top_k": 5}, True),
    InferenceComplete(ID, 5, 7),
    InferenceError(ID, "queue full", "queue_full"),
    LoadModel("lm-1", "m"),
    ModelLoaded("lm-1", "m", 17500),
    ModelLoadError("lm-1", "m", "not_swappable"),
    ModelQueryRequest("m"),
    ModelQueryResponse("m", True, 4831838208),
    ModelTransferRequest(ID, "m"),
    ModelTransferChunk(ID, "model.safetensors", 1048576, bytes(range(256)), True),
    ModelTransferComplete(ID, "m"),
]

UNSUPPORTED_PREFIXES = ("agentMessage", "usdcTransfer", "group", "ptnJoin")
"""Prefixes of the kinds of messages that Shoal does not support."""


def test_samples_cover_every_kind() -> None:
    assert {type(message) for message in SAMPLES} == set(get_args(SentMessage))
    assert set(get_args(Message)) - set(get_args(SentMessage)) == {InferenceChunk}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("message", SAMPLES, ids=lambda each: type(each).__name__)
def test_messages_round_trip_in_both_forms(message: SentMessage, flat: bool) -> None:
    data = encode(message, flat)

    assert (b'"_0"' in data) is not flat
    assert decode(data) == message
    assert decode(data.decode()) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda each: type(each).__name__)
def test_flat_messages_have_nulls_where_the_document_has_them(
    message: SentMessage,
) -> None:
    or_null = {
        Hello: {"clusterPasscodeHash", "ownerUserID"},
        HelloAck: {"clusterPasscodeHash", "ownerUserID"},
        Heartbeat: {"organizationID", "ownerUserID"},
        HeartbeatAck: {"organizationID", "ownerUserID"},
    }
    (flat,) = json.loads(encode(message, True)).values()
    (wrapped,) = json.loads(encode(message)).values()

    expected = or_null.get(type(message), set())
    assert flat.keys() == wrapped["_0"].keys() | expected
    assert {key: flat[key] for key in wrapped["_0"]} == wrapped["_0"]


@recorded("cluster_decode")
def test_recorded_messages_are_accepted_as_suggested(case: Case) -> None:
    """All as the recordings suggest, without exceptions."""
    try:
        verdict = "ignore" if decode(case["json_text"]) is None else "accept"
    except BadMessage:
        verdict = "reject"

    assert verdict == case["suggested"]


@recorded("cluster_swift_emits", "cluster_rust_emits")
def test_messages_of_real_peers_round_trip(case: Case) -> None:
    message = decode(case["json_text"])

    ((kind, _),) = case["value"].items()
    if message is None:
        assert kind.startswith(UNSUPPORTED_PREFIXES)
    elif not isinstance(message, InferenceChunk):  # see test_chunks
        assert json.loads(encode(message)) == case["value"]
        assert decode(encode(message)) == message


@recorded("lan_frame")
def test_the_frame_length_counts_bytes(case: Case) -> None:
    message = decode(case["payload_utf8"])
    assert message is not None
    assert not isinstance(message, InferenceChunk)
    framed: Framed = LengthPrefixed(Reader(), FRAME_MAX)

    (send,) = framed.send(case["payload_utf8"], 0.0)

    assert send == Send(bytes.fromhex(case["frame_hex"]))
    assert json.loads(encode(message)) == json.loads(case["payload_utf8"])


@recorded("lan_stream")
def test_frames_are_split_and_invalid_messages_skipped(case: Case) -> None:
    reader = Reader()
    framed: Framed = LengthPrefixed(reader, FRAME_MAX)
    closed = case.get("eof", False)  # the transport detects it

    for read in case["reads_hex"]:
        try:
            outputs = framed.receive([bytes.fromhex(read)], 0.0)
        except PeerError:
            closed = True
        else:
            closed = closed or any(isinstance(each, Close) for each in outputs)

    assert reader.messages == [decode(text) for text in case["messages"]]
    assert closed is (case["after"] == "closed")


def test_fields_that_macs_require_are_written_at_their_defaults() -> None:
    beat = json.loads(encode(Heartbeat(ID, 1.0, "nominal", 100)))["heartbeat"]["_0"]
    request = json.loads(encode(InferenceRequest(ID, {}), True))["inferenceRequest"]

    assert beat["loadedModels"] == []
    assert beat["isGenerating"] is False
    assert beat["queueDepth"] == 0
    assert request["streaming"] is False


@pytest.mark.parametrize("message", SAMPLES, ids=lambda each: type(each).__name__)
def test_absent_fields_are_not_written_as_null(message: SentMessage) -> None:
    optional = OPTIONAL & set(message.__struct_fields__)
    without_optional = msgspec.structs.replace(message, **dict.fromkeys(optional))

    assert b"null" not in encode(without_optional)


OPTIONAL = {
    *("cluster_passcode_hash", "owner_user_id", "organization_id"),
    *("ewma_tokens_per_second", "tokens_in", "tokens_out", "code", "total_size_bytes"),
}


def test_the_layer_takes_precedence_over_flat_fields() -> None:
    message = decode('{"modelQuery":{"modelID":"flat","_0":{"modelID":"layer"}}}')

    assert message == ModelQueryRequest("layer")


def test_the_last_of_duplicate_keys_counts() -> None:
    assert decode('{"modelQuery":{"modelID":"a","modelID":"b"}}') == ModelQueryRequest(
        "b"
    )
    duplicate = (
        '{"modelQuery":{"_0":{"modelID":"a"}},"modelQuery":{"_0":{"modelID":"b"}}}'
    )
    assert decode(duplicate) == ModelQueryRequest("b")


@pytest.mark.parametrize("number", ["100.0", "1e2", "100"])
def test_integers_may_be_written_as_floats(number: str) -> None:
    text = encode(Heartbeat(ID, 1.0, "fair", 77)).decode()

    message = decode(text.replace("77", number))

    assert message == Heartbeat(ID, 1.0, "fair", 100)


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\uDE00\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\ud83d\ud83d\ude00\\\"", '\ufffd\U0001f600\\"'),
    ],
)
@pytest.mark.parametrize("form", ["%s", '{"_0":%s}'])
def test_halves_of_characters_are_replaced(escaped: str, read: str, form: str) -> None:
    text = '{"modelQuery":' + form % ('{"modelID":"' + escaped + '"}') + "}"

    assert decode(text) == ModelQueryRequest(read)


def test_the_error_for_an_invalid_request_has_its_id() -> None:
    with pytest.raises(BadMessage, match=r"request.*messages") as refused:
        decode(f'{{"inferenceRequest":{{"_0":{{"requestID":"{ID}","request":{{}}}}}}}}')

    assert refused.value.kind == "inferenceRequest"
    assert refused.value.request_id == ID


def test_the_error_for_an_invalid_transfer_has_its_id() -> None:
    with pytest.raises(BadMessage, match="offset") as refused:
        decode(
            f'{{"modelTransferChunk":{{"transferID":"{ID}","fileName":"a",'
            '"offset":-1,"data":"","isLastChunk":true}}'
        )

    assert refused.value.kind == "modelTransferChunk"
    assert refused.value.request_id == ID


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [], "max_tokens": 1.5}, "max_tokens"),
        ({"messages": [], "seed": "x"}, "seed"),
        ({"messages": [], "seed": 10**400}, "seed"),
        ({"messages": [], "n": 129}, "n"),
        ({"messages": [], "top_k": 10**400}, "top_k"),
        ({"messages": [], "stop": [1]}, "stop"),
        ({"messages": [], "tools": "x"}, "tools"),
        ({"messages": [], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"messages": [], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [], "temperature": "hot"}, "temperature"),
    ],
)
def test_the_error_for_an_invalid_request_names_the_field(
    request_: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadMessage, match=field):
        decode(encode(InferenceRequest(ID, request_, True)))


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/passwd", "a/../b", "a//b", "", ".", "a\\b", "a\x00b", "a/"],
)
def test_a_file_name_outside_the_folder_is_refused(name: str) -> None:
    with pytest.raises(BadMessage, match="fileName"):
        decode(encode(ModelTransferChunk(ID, name, 0, b"", False)))


def test_a_transfer_id_that_is_no_uuid_is_refused() -> None:
    with pytest.raises(BadMessage, match="transferID"):
        decode(encode(ModelTransferRequest("../up", "m")))


DEEP = b"[" * 150 + b"]" * 150
BOMB = b"[" * 100_000 + b"]" * 100_000
CHUNK = b'{"inferenceChunk":{"_0":{"requestID":"a","chunk":{"choices":[%b]}}}}'
REQUEST = b'{"inferenceRequest":{"_0":{"requestID":"a","request":{"messages":[]%b}}}}'


@pytest.mark.parametrize(
    "data",
    [
        *(BOMB, b'{"hello":' + BOMB + b"}"),
        *(REQUEST % (b',"a":' + DEEP), REQUEST % (b',"a":' + BOMB)),
        REQUEST % (b',"a":[' + b"[]," * VALUES_MAX + b"1]"),
        CHUNK % (b'{"delta":{"a":' + DEEP + b"}}"),
        CHUNK % (b'{"logprobs":' + BOMB + b"}"),
        CHUNK % b'{"index":2048}',
        CHUNK % b'{"index":-1}',
        CHUNK % b'{"delta":{"content":5}}',
        CHUNK % b'{"delta":{"tool_calls":[{"index":99999}]}}',
        CHUNK % b'{"delta":{"content":"\xff"}}',
        CHUNK % b'{"index":1e400}',
        CHUNK % (b'{"index":' + b"9" * 5000 + b"}"),
        *(b"", b" ", b"{", b"null", b"NaN", b'""', b"\xff", b"\xef\xbb\xbf"),
        b'{"heartbeat":null}',
        b'{"heartbeat":{"_0":null}}',
        b'{"heartbeat":{"_0":{"deviceID":"","timestamp":1,"thermalLevel":"fair",'
        b'"throttleLevel":1}}}',
        b'{"heartbeat":{"_0":{"deviceID":"a","timestamp":NaN,"thermalLevel":"fair",'
        b'"throttleLevel":1}}}',
        b'{"loadModel":{"requestID":"' + b"x" * 200 + b'","modelID":"m"}}',
    ],
    ids=lambda data: ascii(data[:40]),
)
def test_harmful_messages_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage) as refused:
        decode(data)

    assert len(str(refused.value)) <= 500
    assert len(refused.value.request_id) <= 128


def test_a_lone_surrogate_in_a_text_frame_is_refused() -> None:
    with pytest.raises(BadMessage):
        decode('{"modelQuery":{"_0":{"modelID":"\ud800"}}}')


pieces = st.one_of(
    st.sampled_from([encode(message) for message in SAMPLES]),
    st.sampled_from(
        [case["json_text"].encode() for case in CASES if "json_text" in case]
    ),
)


@given(data=pieces, at=st.integers(0, 400), cut=st.integers(0, 4), more=st.binary())
def test_damaged_messages_raise_only_bad_message(
    data: bytes, at: int, cut: int, more: bytes
) -> None:
    with contextlib.suppress(BadMessage):
        decode(data[:at] + more + data[at + cut :])


odd = st.sampled_from([10**400, -(10**30), 2**64, 1e308, -0.0, 2.5, "", "\ud800"])
values = st.recursive(
    st.none() | st.booleans() | odd | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=examples(0.4))
@given(data=pieces, value=values, choose=st.data())
def test_replaced_values_raise_only_bad_message(
    data: bytes, value: object, choose: st.DataObject
) -> None:
    try:
        tree = json.loads(data)
    except ValueError:
        return  # a recorded invalid message
    node = tree
    while isinstance(node, dict) and node:
        name = choose.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[name], dict) or choose.draw(st.booleans()):
            node[name] = value
            break
        node = node[name]

    with contextlib.suppress(BadMessage):
        message = decode(json.dumps(tree))
        if isinstance(message, InferenceRequest):
            read_chat(message.request)
        if isinstance(message, InferenceChunk):
            ChunkReader().read(message.chunk)


@given(st.binary() | st.text())
def test_arbitrary_data_raises_only_bad_message(data: bytes | str) -> None:
    with contextlib.suppress(BadMessage):
        decode(data)


@given(
    data=pieces, at=st.integers(0, 400), more=st.sampled_from([b"1", b'"', b",", b""])
)
def test_the_fast_and_the_slow_path_agree(data: bytes, at: int, more: bytes) -> None:
    damaged = data[:at] + more + data[at:]
    assume(not damaged.startswith(BOM_UTF8))  # a BOM is one only at the beginning

    # A message with a leading blank takes the slow path.
    assert result(damaged) == result(b" " + damaged)


def test_chunks_without_unused_fields_are_read() -> None:
    message = decode(CHUNK % b'{"delta":{"content":"hi"}},{"delta":null,"index":1}')

    choices = [ChunkChoice(0, {"content": "hi"}), ChunkChoice(1, None)]
    assert message == InferenceChunk("a", ChatCompletionChunk(choices))


def result(data: bytes) -> object:
    """Return the decoded message, or the kind and the id of the error."""
    try:
        return decode(data)
    except BadMessage as bad:
        return bad.kind, bad.request_id


@dataclass
class Reader:
    """A session that records the valid messages, and sends texts unchanged."""

    messages: list[Message | None] = field(default_factory=list)
    accepts: frozenset[type] = frozenset({str})

    @property
    def deadline(self) -> float | None:
        return None

    def receive(self, batch: Batch, now: float) -> Sequence[Output]:
        for data in batch:
            with contextlib.suppress(BadMessage):
                if (message := decode(data)) is not None:
                    self.messages.append(message)
        return ()

    def send(self, message: str, now: float) -> Sequence[Output]:
        return [Send(message.encode())]

    def tick(self, now: float) -> Sequence[Output]:
        return ()
