"""Messages of a WebSocket that a thread reads, from servers of all kinds."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import pytest

from shoal.transports.blocking.bulk_socket import HEAD_MAX, BulkSocket
from shoal.transports.link import LinkClosed

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
MESSAGES = [b"", b"x" * 125, b"y" * 126, b"z" * 65535, b"w" * 65536]


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Answer one request with these bytes, and close the connection; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connected, _ = listener.accept()
            with connected, suppress(OSError):  # it may have read enough
                request = b""
                while not request.endswith(b"\r\n\r\n"):
                    request += connected.recv(4096)
                connected.sendall(answer)
                connected.shutdown(socket.SHUT_WR)
                connected.recv(1)

        serving = Thread(target=serve)
        serving.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}/shoal/bulk?name"
        finally:
            serving.join()


@contextmanager
def connected(answer: bytes) -> Iterator[tuple[BulkSocket, Callable[[], bytes]]]:
    """Yield a client, and what receives a message."""
    buffer = memoryview(bytearray(1 << 17))
    with server(answer) as url:
        client = BulkSocket(url)
        try:
            yield client, lambda: bytes(buffer[: client.receive_into(buffer)])
        finally:
            client.end()


def frame(data: bytes) -> bytes:
    """Return a message of a server (RFC 6455, section 5.2)."""
    if len(data) < 126:
        return b"\x82" + bytes([len(data)]) + data
    if len(data) < 1 << 16:
        return b"\x82\x7e" + len(data).to_bytes(2) + data
    return b"\x82\x7f" + len(data).to_bytes(8) + data


def test_messages_of_all_sizes_arrive() -> None:
    answer = SWITCHED + b"".join(map(frame, MESSAGES))
    with connected(answer) as (client, receive):
        assert client.connect()
        assert [receive() for _ in MESSAGES] == MESSAGES
        with pytest.raises(LinkClosed, match="has ended"):
            receive()


def test_what_is_no_whole_binary_message_ends_the_connection() -> None:
    cut = frame(b"data")[:-1]
    text, part = b"\x81\x01a", b"\x02\x01a"
    large = b"\x82\x7f" + (1 << 17 | 1).to_bytes(8)
    for data in (b"\x88\x00", text, part, large, b"\x82", b"\x82\x7f", cut):
        with connected(SWITCHED + data) as (client, receive):
            assert client.connect()
            with pytest.raises(LinkClosed, match="has ended"):
                receive()


def test_a_server_may_refuse() -> None:
    for status in (b"404 Not Found", b"503 Service Unavailable"):
        with connected(b"HTTP/1.1 " + status + b"\r\n\r\n") as (client, _):
            assert not client.connect()


def test_where_nothing_answers_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    for url in (f"ws://127.0.0.1:{port}/", f"wss-any://127.0.0.1:{port}/"):
        client = BulkSocket(url)
        assert not client.connect()
        client.end()


def test_an_answer_without_an_end_may_have_been_one() -> None:
    for answer in (b"", SWITCHED[:-1], b"HTTP/1.1 101 " + b"x" * HEAD_MAX):
        with connected(answer) as (client, _), pytest.raises(LinkClosed):
            client.connect()


def test_closing_ends_what_another_thread_waits_for() -> None:
    with connected(SWITCHED) as (client, receive):
        assert client.connect()
        client.close()
        with pytest.raises(LinkClosed):
            receive()
