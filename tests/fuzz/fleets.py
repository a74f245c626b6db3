"""Every decoder of MacFleet's bytes, and valid input for each."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from fuzz.mutations import SEPARATOR
from protocols.macfleet.recorded import CASES
from shoal.domain.errors import ConfigError, PeerError
from shoal.protocols.macfleet.addresses import parse_pairing_url
from shoal.protocols.macfleet.codec.chunks import ChunkJoiner
from shoal.protocols.macfleet.codec.frames import (
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.codec.hardware import decode_profile, encode_profile
from shoal.protocols.macfleet.codec.heartbeat_lines import (
    HeartbeatLine,
    decode_ping,
    decode_pong,
    encode_ping,
    encode_pong,
)
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.codec.tasks import (
    decode_result,
    decode_task,
    encode_result,
    encode_task,
)
from shoal.protocols.macfleet.discovery import decode_txt
from shoal.protocols.macfleet.election import (
    ElectionCandidate,
    elect_coordinator,
    rank_nodes,
    work_weights,
)
from shoal.protocols.macfleet.handshake_messages import decode_suffix, encode_suffix
from shoal.protocols.macfleet.ranks import decode_array, encode_array
from shoal.protocols.seam.endpoints import DiscoveredService

KEY = fleet_key("vector-token-0001")
LIMIT = 1 << 20  # bytes of a payload
CHALLENGE = bytes(range(32))


def lines(data: bytes) -> None:
    """A heartbeat line, of a fleet with a token or an open one."""
    for key in (KEY, None):
        for read in (decode_ping, decode_pong):
            with suppress(PeerError):
                assert isinstance(read(key, data), HeartbeatLine)


def frames(data: bytes) -> None:
    """A stream of frames, some of them chunks, cut anywhere."""
    reader, joiner = FrameReader(LIMIT), ChunkJoiner()
    for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
        for whole in reader.split(piece):
            frame = reader.read(whole)
            assert encode_frame(frame)[:20] == whole.head[:20]
            joiner.join(frame, 0.0)


def fleet_tasks(data: bytes) -> None:
    """A task; one that upstream can decode can be encoded again."""
    asked = decode_task(data)
    again = encode_task(asked.task_id, asked.name, asked.args, asked.kwargs, 1.0)
    assert decode_task(b"".join(again)).name == asked.name
    msgspec.msgpack.decode(asked.args)


def fleet_results(data: bytes) -> None:
    """A task's result."""
    answered = decode_result(data)
    again = encode_result(answered.task_id, answered.value, answered.error)
    assert decode_result(b"".join(again)).error == answered.error


def arrays(data: bytes) -> None:
    """An array; it can be encoded again, and copied."""
    array = decode_array(data)
    assert array.nbytes <= len(data)
    head, numbers = encode_array(array.copy())
    again = decode_array(head + numbers)
    assert (again.shape, again.tobytes()) == (array.shape, array.tobytes())


def fleet_hardware(data: bytes) -> None:
    """A hardware profile; elections accept it."""
    profile = decode_profile(data)
    assert decode_profile(encode_profile(profile)) == profile
    nodes = [ElectionCandidate("a", profile), ElectionCandidate("b")]
    assert elect_coordinator(nodes) in ("a", "b")
    assert math.isclose(sum(work_weights(rank_nodes(nodes))), 1)


def suffixes(data: bytes) -> None:
    """A handshake message with a hardware suffix, validly signed or not."""
    signed = encode_suffix(KEY, CHALLENGE, "node", data[:8192])
    for node_id, payload in (("node-a", data), ("node", data + signed)):
        with suppress(PeerError):
            assert data.startswith(
                decode_suffix(KEY, CHALLENGE, node_id, payload).message
            )


def announced(data: bytes) -> None:
    """A TXT record."""
    fields = (line.partition(b"=") for line in data.split(SEPARATOR))
    text = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, _, value in fields
    }
    decode_txt(DiscoveredService("node-a", ("192.0.2.1",), 50051, text))


def pairing(data: bytes) -> None:
    """A pairing URL."""
    with suppress(ConfigError):
        parse_pairing_url(data.decode(errors="surrogateescape"))


def _recorded(kind: str, place: str, field: str) -> list[bytes]:
    """Return a field of the recorded cases of a kind as bytes."""
    said = (case[place].get(field) for case in CASES if case["kind"] == kind)
    return [bytes.fromhex(each) for each in said if each is not None]


def _frames() -> list[bytes]:
    written = _recorded("frame", "expect", "wire_hex")
    taken = _recorded("frame_decode", "input", "wire_hex")
    few = encode_frame(Frame(FrameType.TASK, 7, 2, 0, b"a")) + encode_frame(
        Frame(FrameType.TASK, 7, 6, 1, b"b")
    )
    return [*written, *taken, b"".join(written), few]


def _lines() -> list[bytes]:
    said = HeartbeatLine("node", bytes(16), b'{"ram_gb": 8.0}')
    return [
        *_recorded("heartbeat_server", "input", "request_hex"),
        *_recorded("heartbeat_client", "input", "peer_reply_hex"),
        *(
            write(key, said)
            for key in (KEY, None)
            for write in (encode_ping, encode_pong)
        ),
    ]


def _announced() -> list[bytes]:
    records = (case["expect"]["txt"] for case in CASES if case["kind"] == "mdns")
    return [
        SEPARATOR.join(f"{key}={value}".encode() for key, value in record)
        for record in records
    ]


FLEETS: Mapping[str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]] = {
    "lines": (lines, _lines),
    "frames": (frames, _frames),
    "fleet_tasks": (
        fleet_tasks,
        lambda: [
            *_recorded("task_spec", "expect", "payload_hex"),
            *_recorded("TaskSpec_decode", "input", "payload_hex"),
        ],
    ),
    "fleet_results": (
        fleet_results,
        lambda: [
            *_recorded("task_result", "expect", "payload_hex"),
            *_recorded("TaskResult_decode", "input", "payload_hex"),
        ],
    ),
    "arrays": (
        arrays,
        lambda: [
            *_recorded("array", "expect", "packed_hex"),
            *_recorded("array_decode", "input", "packed_hex"),
        ],
    ),
    "fleet_hardware": (
        fleet_hardware,
        lambda: [
            *_recorded("hw_json", "expect", "json_hex"),
            *_recorded("hw_json_parse", "input", "json_hex"),
        ],
    ),
    "suffixes": (suffixes, lambda: _recorded("hw_suffix_peel", "input", "payload_hex")),
    "announced": (announced, _announced),
    "pairing": (
        pairing,
        lambda: [
            case["input"]["url"].encode()
            for case in CASES
            if case["kind"] == "pairing_parse"
        ],
    ),
}
