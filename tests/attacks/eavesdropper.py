"""Somebody between a coordinator and its workers, who records and changes bytes."""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

Change: TypeAlias = Callable[[bytes], bytes]

READ_SIZE = 1 << 16


def unchanged(data: bytes) -> bytes:
    """Return the bytes as they are."""
    return data


class Tap:
    """A port that forwards its connections to another port of this machine.

    ``to_server`` and ``to_client`` change what passes, and may be set at any time.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._streams: list[bytearray] = []  # each direction of each connection
        self.to_server: Change = unchanged
        self.to_client: Change = unchanged
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def seen(self) -> bytes:
        """All that passed, before a change, and what frames of WebSockets carry."""
        streams = [bytes(each) for each in self._streams]
        return b"".join((*streams, *map(unmasked, streams)))

    def close(self) -> None:
        """Close the port and all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += (client, server)
                for source, target, change in (
                    (client, server, lambda data: self.to_server(data)),
                    (server, client, lambda data: self.to_client(data)),
                ):
                    copying = (source, target, change)
                    threading.Thread(
                        target=self._copy, args=copying, daemon=True
                    ).start()

    def _copy(
        self, source: socket.socket, target: socket.socket, change: Change
    ) -> None:
        seen = bytearray()
        self._streams.append(seen)
        with suppress(OSError):
            while data := source.recv(READ_SIZE):
                seen += data
                target.sendall(change(data))
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def unmasked(stream: bytes) -> bytes:
    """Return what the frames of a WebSocket's client carry (RFC 6455, section 5.2)."""
    head, _, frames = stream.partition(b"\r\n\r\n")
    carried, at = bytearray(), 0
    while b"upgrade: websocket" in head.lower() and at + 2 <= len(frames):
        size, at = frames[at + 1] & 0x7F, at + 2
        if wide := {126: 2, 127: 8}.get(size, 0):
            size, at = int.from_bytes(frames[at : at + wide]), at + wide
        mask, payload = frames[at : at + 4], frames[at + 4 : at + 4 + size]
        carried += bytes(each ^ mask[n % 4] for n, each in enumerate(payload))
        at += 4 + size
    return bytes(carried)


class Eavesdropper:
    """Taps on all ports of a coordinator.

    The coordinator names its other ports on the HTTP port, without encryption: there
    the eavesdropper names its own instead.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        others = {name: port for name, port in ports.items() if name != "http"}
        self.taps = {name: Tap(port) for name, port in ports.items()}
        self._ports = {
            b"%d" % port: b"%d" % self.taps[name].port for name, port in others.items()
        }
        assert all(len(one) == len(other) for one, other in self._ports.items())
        self.taps["http"].to_client = self._rename_ports

    @property
    def url(self) -> str:
        """The URL of the HTTP port."""
        return f"http://127.0.0.1:{self.taps['http'].port}"

    @property
    def seen(self) -> bytes:
        """Everything that passed."""
        return b"".join(tap.seen for tap in self.taps.values())

    def close(self) -> None:
        """Close all ports."""
        for tap in self.taps.values():
            tap.close()

    def _rename_ports(self, data: bytes) -> bytes:
        if b'"direct"' in data:
            for one, other in self._ports.items():
                data = data.replace(one, other)
        return data
