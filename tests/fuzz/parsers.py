"""The decoders of messages from peers, each as a function of bytes.

A function accepts the data, or raises PeerError.  ``SEPARATOR`` separates the messages
of one input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

from zeroconf import ServiceInfo

from engines.gguf_headers import gguf
from fuzz import corpus, engine_answers, fleet_sessions, handshakes, sessions
from fuzz.fleets import FLEETS
from fuzz.mutations import SEPARATOR
from fuzz.own_wire import OWN_WIRE
from models.manifests import manifest_of
from protocols.contexts import protocol_context
from shoal.domain.errors import PeerError
from shoal.domain.model_messages import ModelChunk, ModelDone
from shoal.engines.gguf_header import InvalidGguf, parse_header
from shoal.models.manifest import CHUNK
from shoal.models.manifest import decode as decode_manifest
from shoal.models.staging import IncomingModel
from shoal.protocols.seam.endpoints import ServiceBrowser
from shoal.protocols.tealenet import Config, endpoints
from shoal.protocols.tealenet.codec.chats import (
    read_chat,
    wants_usage,
)
from shoal.protocols.tealenet.codec.chunks import ChunkReader
from shoal.protocols.tealenet.codec.envelope import decode, encode
from shoal.protocols.tealenet.codec.messages import (
    Hello,
    HelloAck,
    InferenceChunk,
    InferenceRequest,
    ModelTransferChunk,
    ModelTransferComplete,
    read_model_message,
)
from shoal.protocols.tealenet.codec.relay_messages import DiscoverResponse
from shoal.protocols.tealenet.codec.relay_messages import decode as decode_relayed
from shoal.protocols.tealenet.codec.relay_messages import encode as encode_relayed
from shoal.protocols.tealenet.handshake import read_greeting
from shoal.protocols.tealenet.relay_client.registration import NodeDirectory
from shoal.transports.mdns import service_of

TRANSFER = "550E8400-E29B-41D4-A716-446655440000"
KIND = "_teale._tcp.local."


@dataclass(frozen=True, slots=True)
class Parser:
    """A function that is tried, and good input for it."""

    parse: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


def messages(data: bytes) -> None:
    """A message between peers; a decoded one can be encoded."""
    message = decode(data)
    if message is not None and not isinstance(message, InferenceChunk):
        copy = decode(encode(message))
        assert type(copy) is type(message)


def requests(data: bytes) -> None:
    """A request of a peer."""
    message = decode(data)
    if isinstance(message, InferenceRequest):
        wants_usage(message)
        read_chat(message.request)


def chunks(data: bytes) -> None:
    """The chunks of one answer, for each kind of reader."""
    readers = [ChunkReader(several=several) for several in (False, True)]
    for line in data.split(SEPARATOR):
        message = decode(line)
        if isinstance(message, InferenceChunk):
            for reader in readers:
                assert "" not in reader.read(message.chunk)


def introduction(data: bytes) -> None:
    """A hello or a helloAck."""
    message = decode(data)
    if isinstance(message, Hello | HelloAck):
        assert read_greeting(message).label


def models(data: bytes) -> None:
    """The messages that copy a model, during a transfer."""
    incoming = IncomingModel(TRANSFER, "m", 1 << 30)
    for line in data.split(SEPARATOR):
        message = decode(line)
        if isinstance(message, ModelTransferChunk | ModelTransferComplete):
            match read_model_message(message):
                case ModelChunk() as received if incoming.belongs(received):
                    incoming.add_chunk(received)
                case ModelDone() as received if incoming.belongs(received):
                    incoming.complete(received)
                case _:
                    pass


def manifests(data: bytes) -> None:
    """A manifest that is accepted is in its only form, and has all its chunks."""
    manifest = decode_manifest(data)
    assert manifest.encoded == data
    assert manifest.place(max(manifest.chunks - 1, 0)).file < len(manifest.files)


def _manifests() -> list[bytes]:
    contents = {"config.json": b"{}", "weights.gguf": bytes(CHUNK + 1), "empty": b""}
    return [manifest_of(contents).encoded, manifest_of({"a": b""}).encoded]


def relayed(data: bytes) -> None:
    """A message of a relay; a decoded one can be encoded."""
    message = decode_relayed(data)
    if message is not None:
        assert type(decode_relayed(encode_relayed(message))) is type(message)


def directory(data: bytes) -> None:
    """A relay's list of nodes."""
    message = decode_relayed(data)
    if isinstance(message, DiscoverResponse):
        known = NodeDirectory("0" * 64)
        known.update(message.peers, 0.0)
        assert all(known.get(node.id) == node for node in known.all())


def capabilities(data: bytes) -> None:
    """The capabilities of a node."""
    directory(
        b'{"discoverResponse":{"peers":[{"nodeID":"%b","publicKey":"","displayName":'
        b'"","lastSeen":0,"capabilities":%b}]}}' % (b"1" * 64, data)
    )


def txt(data: bytes) -> None:
    """The TXT record of a discovered service."""
    info = ServiceInfo(KIND, f"x.{KIND}", 80, properties=data, addresses=[bytes(4)])
    (browser,) = (
        each
        for each in endpoints(Config(browse=True), protocol_context())
        if isinstance(each, ServiceBrowser)
    )
    browser.on_found(service_of(info, KIND), 0.0)


def gguf_header(data: bytes) -> None:
    """The metadata of a file of a model."""
    try:
        header = parse_header(BytesIO(data))
    except InvalidGguf as error:
        raise PeerError(str(error)) from error
    assert header.cache >= 0
    assert header.context >= 0
    assert isinstance(header.quantization, str)


def _cluster() -> list[bytes]:
    unique = {each for some in corpus.lan_exchange() for each in some}
    groups = ("cluster_decode", "cluster_swift_emits", "cluster_rust_emits")
    return corpus.recorded(*groups) + sorted(unique)


def _of_kinds(*kinds: bytes) -> list[bytes]:
    return [each for each in _cluster() if any(kind in each[:30] for kind in kinds)]


def _relayed() -> list[bytes]:
    groups = ("relay_swift_emits", "relay_decode", "relay_server", "relay_server_crash")
    unique = {each for some in corpus.relay_exchange() for each in some}
    return corpus.recorded(*groups) + sorted(unique)


def _records() -> list[bytes]:
    texts = (b"deviceID=" + TRANSFER.encode(), b"ram=16", b"version=1", b"chip", b"=x")
    record = b"".join(bytes([len(each)]) + each for each in texts)
    return [record, b"", b"\0", record[:-1], b"\xff" + record]


PARSERS: Mapping[str, Parser] = {
    "messages": Parser(messages, _cluster),
    "requests": Parser(requests, lambda: _of_kinds(b"inferenceRequest")),
    "chunks": Parser(chunks, lambda: _of_kinds(b"inferenceChunk")),
    "introduction": Parser(introduction, lambda: _of_kinds(b"hello")),
    "models": Parser(models, lambda: _of_kinds(b"model")),
    "manifests": Parser(manifests, _manifests),
    "relayed": Parser(relayed, _relayed),
    "directory": Parser(
        directory, lambda: [each for each in _relayed() if b'"peers"' in each]
    ),
    "capabilities": Parser(capabilities, lambda: corpus.recorded("node_capabilities")),
    "txt": Parser(txt, _records),
    "handshakes": Parser(handshakes.handshakes, handshakes.seeds),
    "engine_answers": Parser(engine_answers.answers, engine_answers.seeds),
    "engine_inputs": Parser(engine_answers.inputs, engine_answers.input_seeds),
    "gguf": Parser(gguf_header, lambda: [gguf(), gguf({"a": (1, 2), "b": -0.5})]),
    **{name: Parser(*each) for name, each in sessions.SESSIONS.items()},
    **{name: Parser(*each) for name, each in FLEETS.items()},
    **{name: Parser(*each) for name, each in fleet_sessions.SESSIONS.items()},
    **{name: Parser(*each) for name, each in OWN_WIRE.items()},
}
