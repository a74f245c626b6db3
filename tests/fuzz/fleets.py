"""Everything that reads what MacFleet's peers write, and good input for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from fuzz.mutations import SEPARATOR
from protocols.macfleet.recorded import CASES
from protocols.macfleet.wire.test_control import WORDS
from shoal.domain.errors import ConfigError, PeerError
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.protocols.crowd import Sighting
from shoal.protocols.macfleet.pairing import read_pairing_url
from shoal.protocols.macfleet.scores import Candidate, by_rank, coordinator, portions
from shoal.protocols.macfleet.wire.announcing import read_text
from shoal.protocols.macfleet.wire.arrays import pack_array, unpack_array
from shoal.protocols.macfleet.wire.beyond import (
    Barrier,
    Beat,
    read_barrier,
    read_beat,
    read_blob,
    read_tensor,
    write_barrier,
    write_beat,
)
from shoal.protocols.macfleet.wire.chunks import Joiner, split
from shoal.protocols.macfleet.wire.control import read_word, write_word
from shoal.protocols.macfleet.wire.frames import (
    Flag,
    Frame,
    FrameReader,
    FrameType,
    encode,
)
from shoal.protocols.macfleet.wire.hardware import read_profile, write_profile
from shoal.protocols.macfleet.wire.keys import fleet_key
from shoal.protocols.macfleet.wire.lanes import (
    read_calls,
    read_returns,
    write_calls,
    write_returns,
)
from shoal.protocols.macfleet.wire.lines import (
    Heard,
    read_ping,
    read_pong,
    write_ping,
    write_pong,
)
from shoal.protocols.macfleet.wire.suffix import peel, suffix
from shoal.protocols.macfleet.wire.tasks import (
    read_result,
    read_task,
    write_result,
    write_task,
)

KEY = fleet_key("vector-token-0001")
HELD_MAX = 1 << 20  # bytes of payload that a stream may make us hold
CHALLENGE = bytes(range(32))


def lines(data: bytes) -> None:
    """A line of a heartbeat, of a fleet with a token or an open one."""
    for key in (KEY, None):
        for read in (read_ping, read_pong):
            with suppress(PeerError):
                assert isinstance(read(key, data), Heard)


def frames(data: bytes) -> None:
    """A stream of frames, some of them pieces; it may be cut anywhere."""
    reader, joiner = FrameReader(HELD_MAX), Joiner(HELD_MAX, held_max=HELD_MAX)
    for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
        for whole in reader.cut(piece):
            frame = reader.read(whole)
            assert encode(frame)[:20] == whole.head[:20]
            if frame.flags & Flag.CHUNKED:
                joiner.take(frame)


def fleet_tasks(data: bytes) -> None:
    """A task; what real peers are to read can be written again."""
    asked = read_task(data)
    again = write_task(asked.task_id, asked.name, asked.args, asked.kwargs, 1.0)
    assert read_task(again).name == asked.name
    msgspec.msgpack.decode(asked.args)


def fleet_results(data: bytes) -> None:
    """What came of a task."""
    answered = read_result(data)
    again = write_result(answered.task_id, answered.value, answered.error)
    assert read_result(again).error == answered.error


def arrays(data: bytes) -> None:
    """An array; it can be written again, and copied."""
    array = unpack_array(data)
    assert array.nbytes <= len(data)
    head, numbers = pack_array(array.copy())
    again = unpack_array(head + numbers)
    assert (again.shape, again.tobytes()) == (array.shape, array.tobytes())


def fleet_hardware(data: bytes) -> None:
    """What a node says that it is made of; elections bear it."""
    profile = read_profile(data)
    assert read_profile(write_profile(profile)) == profile
    nodes = [Candidate("a", profile), Candidate("b")]
    assert coordinator(nodes) in ("a", "b")
    assert sum(each.samples for each in portions(by_rank(nodes), 100)) == 100


def suffixes(data: bytes) -> None:
    """A message of the handshake with hardware at its end, rightly signed or not."""
    signed = suffix(KEY, CHALLENGE, "node", data[:8192])
    for node_id, payload in (("node-a", data), ("node", data + signed)):
        with suppress(PeerError):
            assert data.startswith(peel(KEY, CHALLENGE, node_id, payload).base)


def words(data: bytes) -> None:
    """What our own peers say beside tasks."""
    word = read_word(data)
    assert word is None or read_word(write_word(word)) == word


def lanes(data: bytes) -> None:
    """Calls in a lane, or what came of them."""
    with suppress(PeerError):
        assert read_calls(write_calls(calls := read_calls(data))) == calls
    with suppress(PeerError):
        assert read_returns(write_returns(said := read_returns(data))) == said


def beyond(data: bytes) -> None:
    """Payloads of other types of frames."""
    for read in (read_beat, read_barrier, read_tensor, read_blob):
        with suppress(PeerError):
            read(data)


def announced(data: bytes) -> None:
    """What a node's TXT record says."""
    fields = (line.partition(b"=") for line in data.split(SEPARATOR))
    text = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, _, value in fields
    }
    read_text(Sighting("node-a", ("192.0.2.1",), 50051, text))


def pairing(data: bytes) -> None:
    """A URL that somebody scanned."""
    with suppress(ConfigError):
        read_pairing_url(data.decode(errors="surrogateescape"))


def _recorded(kind: str, place: str, field: str) -> list[bytes]:
    """Return bytes that cases of a kind have in a field."""
    said = (case[place].get(field) for case in CASES if case["kind"] == kind)
    return [bytes.fromhex(each) for each in said if each is not None]


def _frames() -> list[bytes]:
    pieces = b"".join(map(encode, split(FrameType.STATE, 7, bytes(32), bytes(300_000))))
    written = _recorded("frame", "expect", "wire_hex")
    taken = _recorded("frame_decode", "input", "wire_hex")
    few = encode(Frame(FrameType.TASK, 7, 2, 0, b"a")) + encode(
        Frame(FrameType.TASK, 7, 6, 1, b"b")
    )
    return [*written, *taken, b"".join(written), few, pieces[: 60 << 10]]


def _lines() -> list[bytes]:
    said = Heard("node", bytes(16), b'{"ram_gb": 8.0}')
    return [
        *_recorded("heartbeat_server", "input", "request_hex"),
        *_recorded("heartbeat_client", "input", "peer_reply_hex"),
        *(
            write(key, said)
            for key in (KEY, None)
            for write in (write_ping, write_pong)
        ),
    ]


def _beyond() -> list[bytes]:
    return [
        write_beat(Beat(7, 6)),
        write_barrier(Barrier("epoch", 3, 1)),
        b"\0\x04\x92\xa1x\x05" + _recorded("array", "expect", "packed_hex")[0],
        bytes(40),
    ]


def _lanes() -> list[bytes]:
    return [
        write_calls([LaneCall(n, b"\x91\x01", b"\x80") for n in range(3)]),
        write_returns([LaneReturn(1, b"\x2a"), LaneReturn(2, b"", "boom")]),
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
    "words": (words, lambda: [write_word(word) for word in WORDS]),
    "lanes": (lanes, _lanes),
    "beyond": (beyond, _beyond),
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
