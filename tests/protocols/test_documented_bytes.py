"""The bytes that the pages of the protocols show: each codec reads them."""

from collections.abc import Callable, Mapping

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.documented_bytes import examples
from shoal.domain.work import Chat
from shoal.protocols.dispatch import messages as dispatch
from shoal.protocols.dispatch.ecmascript_json import canonical
from shoal.protocols.dispatch.receipts import read_submitted
from shoal.protocols.grandsage import codec as grandsage
from shoal.protocols.grandsage.codec import decode_text, decode_work
from shoal.protocols.macfleet.codec.frames import Frame, FrameReader, FrameType
from shoal.protocols.macfleet.codec.heartbeat_lines import decode_ping, decode_pong
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.codec.tasks import decode_result, decode_task
from shoal.protocols.tealenet.codec.envelope import decode
from shoal.protocols.tealenet.codec.messages import (
    Hello,
    InferenceComplete,
    InferenceRequest,
)
from shoal.protocols.tealenet.codec.relay_messages import decode_envelope

EXAMPLES = [*examples()]
SIGNER = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
KEY = fleet_key("vector-token-0001")


def grandsage_task(data: bytes) -> None:
    head, _ = decode_text(data)
    assert (head.id, head.stops) == (7, False)
    work = decode_work(data.decode(), "m1")
    assert isinstance(work, Chat)
    assert [*work.messages] == [
        {"role": "system", "content": "You are a helpful assistant name Buddy."},
        {"role": "user", "content": "hi"},
    ]


def grandsage_stop(data: bytes) -> None:
    assert decode_text(data)[0].stops
    assert data.decode() == grandsage.encode_stop(7)


def grandsage_output(data: bytes) -> None:
    text = data[grandsage.TASK_ID.size :].decode()
    assert grandsage.encode_text(7, text) == [data]
    assert text in ("Hello", " world")


def grandsage_end(data: bytes) -> None:
    assert data == grandsage.encode_end(7)


def dispatch_message(data: bytes) -> None:
    message = dispatch.decode(data)
    if isinstance(message, dispatch.ReceiptSubmit):
        _, receipt = read_submitted(message)
        SIGNER.public_key().verify(receipt.signature, receipt.body)


def dispatch_receipt(data: bytes) -> None:
    assert canonical(data) == data


def tealenet_message(data: bytes) -> None:
    assert isinstance(decode(data), Hello | InferenceRequest)


def tealenet_frame(data: bytes) -> None:
    assert int.from_bytes(data[:4]) == len(data) - 4
    assert isinstance(decode(data[4:]), InferenceComplete)


def tealenet_relay(data: bytes) -> None:
    assert decode_envelope(data)[0] == "registerAck"


def macfleet_ping(data: bytes) -> None:
    assert decode_ping(KEY, data).node_id == "node-b"


def macfleet_pong(data: bytes) -> None:
    assert decode_pong(KEY, data).node_id == "node-a"


def macfleet_task(data: bytes) -> None:
    frame = frame_of(data)
    task = decode_task(frame.payload)
    assert (frame.type, frame.stream) == (FrameType.TASK, 1)
    assert (task.name, bytes(task.args)) == ("demo.add", b"\x92\x14\x16")


def macfleet_result(data: bytes) -> None:
    frame = frame_of(data)
    assert frame.type is FrameType.RESULT
    assert bytes(decode_result(frame.payload).value) == b"\x2a"


def frame_of(data: bytes) -> Frame:
    (message,) = FrameReader().split(data)
    return FrameReader.read(message)


READERS: Mapping[tuple[str, str], Callable[[bytes], None]] = {
    ("grandsage", "task"): grandsage_task,
    ("grandsage", "output"): grandsage_output,
    ("grandsage", "end"): grandsage_end,
    ("grandsage", "stop"): grandsage_stop,
    ("dispatch", "message"): dispatch_message,
    ("dispatch", "receipt"): dispatch_receipt,
    ("tealenet", "cluster message"): tealenet_message,
    ("tealenet", "cluster frame"): tealenet_frame,
    ("tealenet", "relay message"): tealenet_relay,
    ("macfleet", "ping"): macfleet_ping,
    ("macfleet", "pong"): macfleet_pong,
    ("macfleet", "task frame"): macfleet_task,
    ("macfleet", "result frame"): macfleet_result,
}


def test_each_documented_example_is_read(subtests: pytest.Subtests) -> None:
    for example in EXAMPLES:
        with subtests.test(f"{example.wire}: {example.name}"):
            READERS[example.wire, example.name](example.data)


def test_each_page_has_examples() -> None:
    assert {(each.wire, each.name) for each in EXAMPLES} == READERS.keys()
