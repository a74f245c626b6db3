"""MacFleet's original programs: one frame at a time, as recorded of version 2.2.

Written from the notes on the wire alone, without any of our own codecs, so that both
can be wrong only apart.
"""

import asyncio
import datetime
import hmac
import json
import os
import secrets
import ssl
import struct
import tempfile
import traceback
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.speed import scaled

HEAD = struct.Struct("!IHHIIII")
CONTROL, GRADIENT, TASK, RESULT = 1, 4, 8, 9
V2 = 8
PAYLOAD_MAX = 256 << 20
ARGS_MAX = 64 << 20
HARDWARE_MAX = 8192
HARDWARE = {
    "chip_name": "Apple Silicon",
    "data_port": 0,
    "gpu_cores": 8,
    "has_ane": True,
    "memory_bandwidth_gbps": 100.0,
    "mlx_available": False,
    "mps_available": False,
    "ram_gb": 8.0,
    "wire_version": 1,
}


class TaskNotRegisteredError(KeyError):
    """A worker's error for an unknown task."""

    def __str__(self) -> str:
        return str(self.args[0])


class RemoteTaskError(Exception):
    """What a dispatcher raises for a task that failed."""


@dataclass
class Frame:
    stream: int
    type: int
    flags: int
    sequence: int
    payload: bytes

    def packed(self) -> bytes:
        crc = zlib.crc32(self.payload)
        head = (self.stream, self.type, self.flags, len(self.payload))
        return HEAD.pack(*head, self.sequence, crc, 0) + self.payload


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    head = await reader.readexactly(HEAD.size)
    stream, type_, flags, size, sequence, crc, _ = HEAD.unpack(head)
    if size > PAYLOAD_MAX:
        raise ValueError(f"payload of {size} bytes")
    payload = await reader.readexactly(size)
    if zlib.crc32(payload) != crc:
        raise ValueError("CRC32 mismatch")
    if not 1 <= type_ <= 9:
        raise ValueError(f"{type_} is not a valid message type")
    return Frame(stream, type_, flags, sequence, payload)


def fleet_key(token: str, fleet: str = "") -> bytes:
    if len(token) < 8:
        raise ValueError("token is too short")
    message = f"macfleet-v2:{fleet or 'default'}".encode()
    return hmac.digest(token.encode(), message, "sha256")


def hardware_json(**fields: Any) -> bytes:
    return json.dumps(HARDWARE | fields, sort_keys=True).encode()


def server_context() -> ssl.SSLContext:
    """Return TLS with a new self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "macfleet-node")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=24))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "both.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(file)
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass
class PeerConnection:
    """A connection after the handshake: both ends may send anything."""

    peer_id: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    hardware: dict[str, Any] | None = None

    async def send(self, payload: bytes, type_: int) -> None:
        self.writer.write(Frame(1, type_, 0, 0, payload).packed())
        await self.writer.drain()

    async def recv(self) -> Frame:
        async with asyncio.timeout(scaled(120)):
            return await read_frame(self.reader)


@dataclass
class PeerTransport:
    """The library's transport: connections by the id of who is at the other end."""

    node_id: str
    token: str = ""
    fleet: str = ""
    open_tls: bool = False  # ``--tls`` in an open fleet
    v1: bool = False  # whether it knows no newer handshake
    local: str = ""  # the address that it dials from; empty: any
    port: int = 0
    refused: list[str] = field(default_factory=list)
    connections: dict[str, PeerConnection] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> bytes | None:
        return fleet_key(self.token, self.fleet) if self.token else None

    @asynccontextmanager
    async def listening(
        self, host: str = "127.0.0.1", port: int = 0
    ) -> AsyncIterator[int]:
        """Accept peers within the block; yield the data port."""
        context = server_context() if self.token or self.open_tls else None
        server = await asyncio.start_server(
            self._accepted, host, port, ssl=context, backlog=100
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self.port
        finally:
            server.close()
            await self.disconnect()

    async def connect(
        self, peer_id: str, port: int, host: str = "127.0.0.1"
    ) -> PeerConnection:
        """Dial a peer whose id must be known, except in an open fleet."""
        context = client_context() if self.token or self.open_tls else None
        local = (self.local, 0) if self.local else None
        async with asyncio.timeout(scaled(10)):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, local_addr=local
            )
        try:
            found, hardware = await self._introduce(peer_id, reader, writer)
        except BaseException:
            await hang_up(writer)
            raise
        connection = PeerConnection(found, reader, writer, hardware)
        self.connections[peer_id] = connection
        return connection

    async def connection_to(self, peer_id: str) -> PeerConnection:
        """Wait until a peer has dialled."""
        async with asyncio.timeout(scaled(30)):
            while peer_id not in self.connections:
                self.arrived.clear()
                await self.arrived.wait()
        return self.connections[peer_id]

    async def disconnect(self) -> None:
        for connection in self.connections.values():
            await hang_up(connection.writer)
        self.connections.clear()

    # The client's side of the handshake.

    async def _introduce(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, dict[str, Any] | None]:
        own = self.node_id.encode()
        key = self.key
        async with asyncio.timeout(scaled(10)):
            if key is None:
                writer.write(Frame(0, CONTROL, 0, 0, own).packed())
                await read_frame(reader)
                return peer_id, None
            challenge = secrets.token_bytes(32)
            flags = 0 if self.v1 else V2
            writer.write(Frame(0, CONTROL, flags, 0, own + challenge).packed())
            frame = await read_frame(reader)
            base, hardware = frame.payload, None
            wrong = ConnectionError(f"{peer_id} does not have the correct token")
            if frame.flags & V2:
                peeled = peel(key, challenge, peer_id, frame.payload)
                if peeled is None:
                    raise wrong
                base, hardware = peeled
            if len(base) < 65:
                raise ConnectionError("the answer is too short")
            response, their_nonce = base[-64:-32], base[-32:]
            if not hmac.compare_digest(response, answer(key, challenge)):
                raise wrong
            reply = answer(key, their_nonce)
            if frame.flags & V2:
                reply += suffix(key, their_nonce, self.node_id, hardware_json())
            flags = frame.flags & V2
            writer.write(Frame(0, CONTROL, flags, 0, reply).packed())
            await writer.drain()
        return peer_id, hardware

    # The server's side.

    async def _accepted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(scaled(10)):
                peer_id, hardware = await self._welcome(reader, writer)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self.refused.append(f"{type(error).__name__}: {error}")
            await hang_up(writer)
            return
        self.connections[peer_id] = PeerConnection(peer_id, reader, writer, hardware)
        self.arrived.set()

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, dict[str, Any] | None]:
        frame = await read_frame(reader)
        if frame.type != CONTROL:
            raise ValueError("the first frame is not CONTROL")
        own, key = self.node_id.encode(), self.key
        if key is None:
            if len(frame.payload) > 256:
                raise ValueError("the id is too long")
            peer_id = frame.payload.decode()
            writer.write(Frame(0, CONTROL, 0, 0, own).packed())
            await writer.drain()
            return peer_id, None
        if len(frame.payload) < 33:
            raise ValueError("the first frame is too short")
        challenge = frame.payload[-32:]
        peer_id = frame.payload[:-32].decode()
        newer = frame.flags & V2 and not self.v1
        our_nonce = secrets.token_bytes(32)
        reply = own + answer(key, challenge) + our_nonce
        if newer:
            reply += suffix(key, challenge, self.node_id, hardware_json())
        writer.write(Frame(0, CONTROL, V2 if newer else 0, 0, reply).packed())
        await writer.drain()
        base, hardware = (await read_frame(reader)).payload, None
        if newer:
            peeled = peel(key, our_nonce, peer_id, base)
            if peeled is None:
                raise ValueError("the third frame has no sound suffix")
            base, hardware = peeled
        if len(base) != 32 or not hmac.compare_digest(base, answer(key, our_nonce)):
            raise ValueError("the third frame has a wrong response")
        return peer_id, hardware


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def answer(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, "sha256")


def suffix(key: bytes, challenge: bytes, node_id: str, hardware: bytes) -> bytes:
    signed = b"\x01" + challenge + node_id.encode() + b":" + hardware
    mac = hmac.digest(key, signed, "sha256")
    block = b"\x01" + struct.pack("!H", len(hardware)) + hardware + mac
    return block + struct.pack("!H", len(block))


def peel(
    key: bytes, challenge: bytes, node_id: str, payload: bytes
) -> tuple[bytes, dict[str, Any]] | None:
    """Split a payload into its content and the hardware in its suffix."""
    if len(payload) < 2:
        return None
    (size,) = struct.unpack("!H", payload[-2:])
    if not 35 <= size <= 35 + HARDWARE_MAX or size + 2 > len(payload):
        return None
    block = payload[-2 - size : -2]
    (length,) = struct.unpack("!H", block[1:3])
    if 35 + length != size:
        return None
    hardware, mac = block[3 : 3 + length], block[3 + length :]
    signed = block[:1] + challenge + node_id.encode() + b":" + hardware
    if not hmac.compare_digest(mac, hmac.digest(key, signed, "sha256")):
        return None
    try:
        read = json.loads(hardware.decode())
    except ValueError:
        return None
    return (payload[: -2 - size], read) if isinstance(read, dict) else None


@dataclass
class TaskWorker:
    """Runs registered functions for one peer; stops at the first malformed frame."""

    connection: PeerConnection
    functions: dict[str, Callable[..., Any]]
    dead: str = ""
    names: list[str] = field(default_factory=list)  # of the tasks that came

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run within the block."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def run(self) -> None:
        jobs: set[asyncio.Task[None]] = set()
        try:
            while True:
                frame = await self.connection.recv()
                if frame.type != TASK:
                    continue
                spec = unpacked(frame.payload)
                job = asyncio.create_task(self._do(spec))
                jobs.add(job)
                job.add_done_callback(jobs.discard)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self.dead = f"{type(error).__name__}: {error}"
        finally:
            for job in jobs:
                job.cancel()

    async def _do(self, spec: dict[str, Any]) -> None:
        name, limit = spec["name"], spec.get("timeout", 300.0)
        self.names.append(name)
        outcome: dict[str, Any] = {"task_id": spec["task_id"]}
        try:
            if name not in self.functions:
                names = sorted(self.functions)
                raise TaskNotRegisteredError(
                    f"Task {name!r} not registered on this worker. Known tasks: {names}"
                )
            args, kwargs = spec.get("args") or [], spec.get("kwargs") or {}
            call = asyncio.to_thread(self.functions[name], *args, **kwargs)
            value = await asyncio.wait_for(call, limit)
            outcome |= {"ok": True, "value": value, "error": None}
        except TimeoutError:
            error = f"Task timed out after {limit}s"
            outcome |= {"ok": False, "value": None, "error": error}
        except Exception:
            error = traceback.format_exc()
            outcome |= {"ok": False, "value": None, "error": error}
        # What cannot be packed gets no answer at all.
        with suppress(TypeError, ValueError, OverflowError):
            await self.connection.send(packed(outcome), RESULT)


def packed(value: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def unpacked(payload: bytes) -> dict[str, Any]:
    if len(payload) > ARGS_MAX:
        raise ValueError("the task is too large")
    spec = msgpack.unpackb(payload, raw=False)
    if not isinstance(spec, dict) or not {"task_id", "name"} <= spec.keys():
        raise ValueError("no task")
    return spec


class TaskDispatcher:
    """Assigns tasks to peers in turn, without retries."""

    def __init__(self, connections: Sequence[PeerConnection]) -> None:
        self._connections = connections
        self._turn = 0
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._readers: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator["TaskDispatcher"]:
        self._readers = [asyncio.create_task(self._read(c)) for c in self._connections]
        try:
            yield self
        finally:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def submit(self, name: str, *args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.pop("timeout_", 300.0)
        task_id = uuid.uuid4().hex
        spec: dict[str, Any] = {"task_id": task_id, "name": name, "args": list(args)}
        spec |= {"kwargs": kwargs, "timeout": timeout}
        future = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = future
        connection = self._connections[self._turn % len(self._connections)]
        self._turn += 1
        await connection.send(packed(spec), TASK)
        async with asyncio.timeout(scaled(60)):
            return await future

    async def map(self, name: str, items: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*(self.submit(name, each) for each in items)))

    async def _read(self, connection: PeerConnection) -> None:
        while True:
            frame = await connection.recv()
            if frame.type != RESULT:
                continue
            result = msgpack.unpackb(frame.payload, raw=False)
            future = self._waiting.pop(result["task_id"], None)
            if future is None or future.done():
                continue
            if result["ok"]:
                future.set_result(result.get("value"))
            else:
                error = RemoteTaskError(result["task_id"], result.get("error"))
                future.set_exception(error)


@dataclass
class PoolAgent:
    """``macfleet join``: it pings and answers pings, without a data port."""

    node_id: str
    token: str = ""
    fleet: str = ""
    open_tls: bool = False
    v1: bool = False  # whether it is of version 2.1: four fields, and no others
    data_port: int = 0
    hardware: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    pings: list[str] = field(default_factory=list)

    @property
    def key(self) -> bytes | None:
        return fleet_key(self.token, self.fleet) if self.token else None

    @asynccontextmanager
    async def listening(
        self, host: str = "127.0.0.1", port: int = 0
    ) -> AsyncIterator[int]:
        context = server_context() if self.token or self.open_tls else None
        server = await asyncio.start_server(self._answer, host, port, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self.port

    def line(self, verb: str) -> bytes:
        if self.key is None:
            return f"{verb} {self.node_id}\n".encode()
        nonce = os.urandom(16)
        if self.v1:
            mac = hmac.digest(self.key, self.node_id.encode() + b":" + nonce, "sha256")
            return f"A{verb} {self.node_id} {nonce.hex()} {mac.hex()}\n".encode()
        hardware = hardware_json(data_port=self.data_port, **self.hardware)
        signed = self.node_id.encode() + b":" + nonce + b":" + hardware
        mac = hmac.digest(self.key, signed, "sha256")
        fields = [self.node_id, nonce.hex(), mac.hex(), hardware.hex()]
        return f"A{verb} {' '.join(fields)}\n".encode()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(scaled(1)):
                line = await reader.readline()
            if self._is_sound(line, "PING"):
                self.pings.append(line.decode().split()[1])
                writer.write(self.line("PONG"))
                await writer.drain()
        await hang_up(writer)

    async def ping(self, port: int, host: str = "127.0.0.1") -> dict[str, Any] | None:
        """Ping a peer; return its id and hardware, or None if it is not believed.

        ``--peer`` does this once: the pinged node learns nothing of this one.
        """
        context = client_context() if self.token or self.open_tls else None
        async with asyncio.timeout(scaled(10)):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(self.line("PING"))
                line = await reader.readline()
            finally:
                await hang_up(writer)
        if not self._is_sound(line, "PONG"):
            return None
        fields = line.decode().strip().split(" ")
        found: dict[str, Any] = {"id": fields[1]}
        if len(fields) == 5:
            found |= json.loads(bytes.fromhex(fields[4]))
        return found

    def _is_sound(self, line: bytes, verb: str) -> bool:
        if self.key is None:
            return line.startswith(verb.encode())
        if not line.startswith(b"A" + verb.encode()):
            return False
        fields = line.decode().strip().split(" ")
        if len(fields) not in ((4,) if self.v1 else (4, 5)):
            return False
        try:
            nonce, mac, *more = [bytes.fromhex(each) for each in fields[2:]]
        except ValueError:
            return False
        signed = b":".join([fields[1].encode(), nonce, *more])
        return hmac.compare_digest(mac, hmac.digest(self.key, signed, "sha256"))


ARRAY = struct.Struct("!HH")


def packed_array(array: Any) -> bytes:
    """An array as gradients carry it: sizes, shape, dtype, numbers."""
    name = str(array.dtype).encode()
    shape = struct.pack(f"!{array.ndim}I", *array.shape)
    data: bytes = array.tobytes()
    return ARRAY.pack(len(name), array.ndim) + shape + name + data


def unpacked_array(payload: bytes) -> Any:
    import numpy as np

    name_size, dimensions = ARRAY.unpack_from(payload)
    at = ARRAY.size + 4 * dimensions
    shape = struct.unpack_from(f"!{dimensions}I", payload, ARRAY.size)
    dtype = payload[at : at + name_size].decode()
    return np.frombuffer(payload[at + name_size :], dtype).reshape(shape)


@dataclass
class CollectiveGroup:
    """The library's collectives: each rank is a peer id, each array one frame."""

    rank: int
    peers: Sequence[str]
    transport: PeerTransport

    async def allreduce(self, array: Any, op: str = "mean") -> Any:
        import numpy as np

        size = len(self.peers)
        if size == 2:
            other = 1 - self.rank
            await self._send(other, array)
            total = array + await self._recv(other)
            return total / 2.0 if op == "mean" else total
        flat = array.reshape(-1)
        pad = -flat.size % size
        chunks = np.split(np.concatenate([flat, np.zeros(pad, flat.dtype)]), size)
        left, right = (self.rank - 1) % size, (self.rank + 1) % size
        for step in range(size - 1):
            await self._send(right, chunks[(self.rank - step) % size])
            at = (self.rank - step - 1) % size
            chunks[at] = chunks[at] + await self._recv(left)
        if op == "mean":
            chunks = [chunk / size for chunk in chunks]
        for step in range(size - 1):
            await self._send(right, chunks[(self.rank - step + 1) % size])
            chunks[(self.rank - step) % size] = await self._recv(left)
        whole = np.concatenate(chunks)[: flat.size]
        return whole.reshape(array.shape).astype(array.dtype)

    async def broadcast(self, array: Any, root: int = 0) -> Any:
        if self.rank != root:
            return await self._recv(root)
        for rank in range(len(self.peers)):
            if rank != root:
                await self._send(rank, array)
        return array

    async def gather(self, array: Any, root: int = 0) -> Any:
        import numpy as np

        if self.rank != root:
            await self._send(root, array)
            return None
        parts = [
            array if rank == root else await self._recv(rank)
            for rank in range(len(self.peers))
        ]
        return np.stack(parts)

    async def _send(self, rank: int, array: Any) -> None:
        connection = await self.transport.connection_to(self.peers[rank])
        await connection.send(packed_array(array), GRADIENT)

    async def _recv(self, rank: int) -> Any:
        connection = await self.transport.connection_to(self.peers[rank])
        return unpacked_array((await connection.recv()).payload)
