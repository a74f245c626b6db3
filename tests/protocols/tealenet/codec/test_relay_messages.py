import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.relay_harness import cases
from shoal.ledger.keys import Signer, verify
from shoal.protocols.tealenet.codec.relay_messages import (
    KINDS,
    RAW_AT,
    VALUES_MAX,
    BadRelayMessage,
    DiscoverResponse,
    RelayData,
    RelayError,
    RelayRegisterAck,
    check_data,
    decode,
    decode_data,
    decode_envelope,
    encode,
    encode_envelope,
)

ENDS = {"fromNodeID": "a", "toNodeID": "b", "sessionID": "s"}

# Messages that Swift refuses and Shoal accepts, and why.
ACCEPTED_BY_SHOAL = {
    "relay_decode/relayData_wrapped_0": "Shoal accepts the wrapped form, too",
    "relay_decode/relayData_byte_array": "as Rust does",
    "relay_decode/discoverResponse_one_bad_peer": "as Rust does: others may be valid",
}


@pytest.mark.parametrize(
    "case", cases("relay_swift_emits"), ids=lambda case: case["id"]
)
def test_swift_messages_round_trip(case: dict[str, Any]) -> None:
    message = decode(case["json_text"])

    assert message is not None
    assert json.loads(encode(message)) == case["value"]


@pytest.mark.parametrize("case", cases("relay_decode"), ids=lambda case: case["id"])
def test_messages_that_swift_accepts_are_read(case: dict[str, Any]) -> None:
    accepted = case["swift"]["accepts"] or case["id"] in ACCEPTED_BY_SHOAL

    try:
        message = decode(case["json_text"])
    except BadRelayMessage:
        message = None

    assert (message is not None) == accepted


@pytest.mark.parametrize(
    "case", cases("relay_data_field_rust"), ids=lambda case: case["id"]
)
def test_data_is_decoded_as_by_rust(case: dict[str, Any]) -> None:
    data = json.loads(case["data_json"])

    if case["accepts"]:
        assert decode_data(data).hex() == case["rust_bytes_hex"]
        message = decode(json.dumps({"relayData": ENDS | {"data": data}}))
        assert isinstance(message, RelayData)
        assert message.data.hex() == case["rust_bytes_hex"]
    else:
        with pytest.raises(BadRelayMessage, match="expected base64 text"):
            decode_data(data)


@pytest.mark.parametrize(
    "case",
    [each for each in cases("identity") if "nodeID" in each],
    ids=lambda case: case["id"],
)
def test_ids_and_signatures_match_real_nodes(case: dict[str, Any]) -> None:
    signer = Signer.from_seed(bytes.fromhex(case["private_key_file_hex"]))
    text = case["signed_bytes_utf8"].encode()

    assert signer.public_key.hex() == case["nodeID"] == case["publicKey"]
    assert signer.exchange_key.hex() == case["wgPublicKey"]
    assert signer.sign(text).hex() == case["register_signature"]
    assert verify(signer.public_key, bytes.fromhex(case["register_signature"]), text)


def test_offer_signatures_match_real_nodes() -> None:
    (case,) = [each for each in cases("identity") if "nodeID" not in each]
    signer = Signer.from_seed(bytes.fromhex(case["private_key_file_hex"]))

    assert signer.sign(case["signed_bytes_utf8"].encode()).hex() == case["signature"]


def test_integers_are_written_without_a_fraction() -> None:
    # Otherwise Rust nodes refuse the whole message.
    assert '"ttlSeconds":300}' in encode(RelayRegisterAck("n", 1.5, 300))


def test_absent_fields_are_omitted() -> None:
    assert encode(RelayError("c", "m")) == '{"error":{"code":"c","message":"m"}}'


def test_invalid_node_entries_are_skipped() -> None:
    good = {
        "nodeID": "n",
        "publicKey": "n",
        "displayName": "d",
        "capabilities": {},
        "lastSeen": 1,
    }
    peers = [{"nodeID": "n"}, good, 5, None]

    message = decode(json.dumps({"discoverResponse": {"peers": peers}}))

    assert isinstance(message, DiscoverResponse)
    assert [each.node_id for each in message.peers] == ["n"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("not json", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        ('"\\ud800"', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("{} {}", "invalid_json"),
        ("null", "invalid_message"),
        ("{}", "invalid_message"),
        ("[]", "invalid_message"),
        ('{"relayData":null}', "invalid_message"),
        ('{"relayData":{},"register":{}}', "invalid_message"),
        ('{"relayOpen":{"x":' + "[" * 200 + "]" * 200 + "}}", "invalid_message"),
        ('{"x":[' + "0," * VALUES_MAX * 2 + "0]}", "invalid_message"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_invalid_message_has_an_error_code(text: str | bytes, code: str) -> None:
    with pytest.raises(BadRelayMessage) as raised:
        decode_envelope(text)

    assert raised.value.code == code


def test_a_long_text_counts_as_one_value() -> None:
    data = "[{,," * 1_000_000

    _, payload = decode_envelope(json.dumps({"relayData": ENDS | {"data": data}}))

    assert decode_data(payload["data"]) == data.encode()


def test_duplicate_keys_are_reduced_to_the_last() -> None:
    text = '{"relayOpen":{"sessionID":"a","sessionID":"b"}}'

    kind, payload = decode_envelope(text)

    assert encode_envelope(kind, payload) == '{"relayOpen":{"sessionID":"b"}}'


@pytest.mark.parametrize("size", [10, RAW_AT, 10 * RAW_AT])
@pytest.mark.parametrize("wrapped", [False, True])
def test_texts_of_any_length_round_trip(size: int, wrapped: bool) -> None:
    content = 'e\\"\né' * size
    payload = ENDS | {"data": content, "more": [1, {"x": None}]}
    text = json.dumps({"relayData": {"_0": payload} if wrapped else payload})

    kind, found = decode_envelope(text)

    assert json.loads(encode_envelope(kind, found)) == {"relayData": payload}
    message = decode(text)
    assert isinstance(message, RelayData)
    assert message.data == content.encode()


@pytest.mark.parametrize("size", [1, 32, 79])
def test_a_short_handshake_is_refused(size: int) -> None:
    data = RelayData("a", "b", "s", b"\x01" + bytes(size))
    written = json.loads(encode(data))["relayData"]["data"]

    with pytest.raises(BadRelayMessage, match="expected at least 81"):
        check_data(written)


@pytest.mark.parametrize(
    "data", [b"", b"\x01" + bytes(80), b"\x01" + bytes(108), b"{}"]
)
def test_other_data_is_accepted(data: bytes) -> None:
    check_data(json.loads(encode(RelayData("a", "b", "s", data)))["relayData"]["data"])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["_0", *ENDS, "data", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(0.4))
@given(kind=st.sampled_from([*KINDS, "other"]), payload=ANYTHING)
def test_any_json_is_decoded_or_refused(kind: str, payload: object) -> None:
    try:
        message = decode(msgspec.json.encode({kind: payload}))
    except BadRelayMessage:
        return

    if message is not None:
        assert decode(encode(message)) == message


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_bytes_are_decoded_or_refused(data: bytes | str) -> None:
    with suppress(BadRelayMessage):
        decode(data)


def test_recorded_relay_messages_have_known_kinds() -> None:
    texts = [each["value"] for each in cases("relay_swift_emits")]

    assert {next(iter(each)) for each in texts} <= KINDS.keys()
