"""Shoal's own wire, fed by peers: its messages, sessions at either end, and ranks."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fuzz.mutations import SEPARATOR
from protocols.calling import MEMBER, REQUEST, counted_bytes, fleet_context
from protocols.shoal import test_recorded as recorded
from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import AnswerChunk, Completed, Event, RunJob
from shoal.protocols.seam.endpoints import WebSocketRoute
from shoal.protocols.seam.peer_session import ALL_PEERS, ToPeer
from shoal.protocols.seam.ranks import RankIdentity, RankRefused
from shoal.protocols.seam.session import Bulk, Close
from shoal.protocols.shoal import POOL_PATH, PROTOCOL, Config
from shoal.protocols.shoal.codec import (
    COMMAND_DECODER,
    EVENT_DECODER,
    POOL_DECODER,
    MessageDecoder,
    encode,
)
from shoal.protocols.shoal.ranks import ShoalRanks
from shoal.protocols.shoal.streams import (
    CREDIT,
    HEAD,
    NUMBER,
    SMALL_MAX,
    STREAM_LAST,
    STREAM_MORE,
    WHOLE,
    IncomingStreams,
    OutgoingStreams,
)

BINDING = b"the only channel"
PASSCODE = "three hundred herrings"


def messages(data: bytes) -> None:
    """A message; a decoded one can be encoded."""
    for decoder in (COMMAND_DECODER, EVENT_DECODER, POOL_DECODER):
        with suppress(PeerError):
            _decode(decoder, data)


def coordinator(data: bytes) -> None:
    """What a worker says to its coordinator, once it is admitted and before."""
    for hello in (True, False):
        route, *_ = PROTOCOL.endpoints(PROTOCOL.config(), fleet_context())
        assert isinstance(route, WebSocketRoute)
        end: Any = route.accept(REQUEST, 0.0).session
        end.bind(BINDING)
        if hello:
            worker: Any = PROTOCOL.dial("http://127.0.0.1:4010", MEMBER)
            worker = worker.start_session({})
            worker.bind(BINDING)
            _hear(end, recorded._bytes(worker.tick(0.0)))
            for command in recorded.COMMANDS:
                end.send(ToPeer(ALL_PEERS, command), 0.0)
        _hear(end, _messages(data))


def worker(data: bytes) -> None:
    """What a coordinator says to its worker."""
    dialer = PROTOCOL.dial("http://127.0.0.1:4010", replace(MEMBER, token=""))
    end: Any = dialer.start_session({})
    end.bind(BINDING)
    end.tick(0.0)
    heard = [*recorded.recorded()["coordinator's hello"], *_messages(data)]
    _hear(end, heard, lambda event: event)
    end.tick(100.0)


def pool(data: bytes) -> None:
    """What one pool says to another."""
    routes = PROTOCOL.endpoints(Config(passcode=PASSCODE), fleet_context())
    request = replace(REQUEST, path=POOL_PATH)
    route = next(
        each
        for each in routes
        if isinstance(each, WebSocketRoute) and each.claims(request)
    )
    end: Any = route.accept(request, 0.0).session
    end.bind(BINDING)
    _hear(end, _messages(data))


def streams(data: bytes) -> None:
    """Pieces of streams, and credit for those that this end sends."""
    outgoing = OutgoingStreams()
    outgoing.window = SMALL_MAX
    sent = outgoing.write((bytes(2 * SMALL_MAX),), "key")
    assert isinstance(sent, Bulk)
    assert sent.is_ready is not None
    incoming = IncomingStreams(SMALL_MAX, outgoing.on_credit)
    incoming.window = incoming.held_max = len(data)
    with suppress(PeerError):
        for pieces in data.split(SEPARATOR):
            if sent.is_ready():
                next(iter(sent.parts), None)
            incoming.receive(pieces)
            incoming.acknowledge()


def ranks(data: bytes) -> None:
    """The handshake of two ranks, and the heads of their segments."""
    wire = ShoalRanks()
    with suppress(PeerError):
        if len(data) >= wire.head_size:
            wire.decode_segment(data[: wire.head_size])
    identity = RankIdentity("a", "secret", counted_bytes("rank"))
    for end in (
        wire.client(identity, "b", "127.0.0.1"),
        wire.server(identity, "127.0.0.1", lambda name: "secret"),
    ):
        end.on_open(b"a certificate")
        end.start(0.0)
        rest = data
        with suppress(RankRefused):
            while len(rest) >= end.head_size:
                head, rest = rest[: end.head_size], rest[end.head_size :]
                size = end.body_size(head)
                if len(rest) < size:
                    break
                end.receive(head, rest[:size], 0.0)
                rest = rest[size:]


def _decode(decoder: MessageDecoder, data: bytes) -> None:
    message = decoder.decode(data)
    assert type(decoder.decode(encode(message))) is type(message)


def _to_coordinator(event: Event) -> ToPeer:
    return ToPeer(ALL_PEERS, event)


def _hear(
    end: Any, pieces: Sequence[bytes], sent: Callable[[Event], Any] = _to_coordinator
) -> None:
    """Receive, and answer each job; ``sent`` is what the end sends for an event."""
    for number, each in enumerate(pieces):
        for output in [*end.receive([each], float(number)), *end.tick(float(number))]:
            heard = getattr(output, "message", output)
            if isinstance(heard, Close):
                return
            if isinstance(heard, RunJob):
                job = (heard.job_id, heard.lease)
                for event in (AnswerChunk(*job, ["x"]), Completed(*job)):
                    if type(event) in end.accepts:
                        end.send(sent(event), float(number))


def _messages(data: bytes) -> list[bytes]:
    """Return messages as they come, and what is not one as raw pieces."""
    parts = data.split(SEPARATOR)
    return [HEAD.pack(WHOLE, len(each)) + each for each in parts[:-1]] + [parts[-1]]


def _corpus() -> list[bytes]:
    steps = recorded.recorded().values()
    pieces = [*itertools.chain.from_iterable(steps)]
    bodies = [each[HEAD.size :] for each in pieces]
    return [*bodies, *pieces, SEPARATOR.join([*bodies, b""])]


def _pieces() -> list[bytes]:
    """Return pieces of streams that take turns, and credit."""
    parts = [(1, b"first of one"), (2, b"first of two"), (1, b"last"), (2, b"last")]
    pieces = [
        HEAD.pack(STREAM_LAST if part == b"last" else STREAM_MORE, 4 + len(part))
        + NUMBER.pack(number)
        + part
        for number, part in parts
    ]
    credit = HEAD.pack(CREDIT, 12) + b"".join(map(NUMBER.pack, (1, 100, 100)))
    return [*pieces, credit, SEPARATOR.join([*pieces, credit])]


OWN_WIRE: Mapping[
    str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]
] = {
    "shoal_messages": (messages, _corpus),
    "shoal_coordinator": (coordinator, _corpus),
    "shoal_worker": (worker, _corpus),
    "shoal_pool": (pool, _corpus),
    "shoal_streams": (streams, _pieces),
    "shoal_ranks": (
        ranks,
        lambda: [b"\1\0\x22" + bytes(34), b"\1\0\x22" + bytes(34) + b"\2\0\x20", b"\3"],
    ),
}
