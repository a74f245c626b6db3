"""A relay of bench/slowlink.py that delays: DELAY, then HOST PORT HOST PORT for each.

It listens at the first address, and connects to the second.  Each byte arrives DELAY
seconds after it came, in each direction; its first line says that it listens.
"""

import json
import socket
import sys
import threading
import time
from queue import Queue

PIECE_SIZE = 16 << 10  # bytes: 3 ms at 50 Mbit/s
PIECES_MAX = 256  # of a direction on the way; a sender then waits


def main() -> None:
    delay, *addresses = sys.argv[1:]
    for at in range(0, len(addresses), 4):
        host, port, to_host, to_port = addresses[at : at + 4]
        listener = socket.create_server((host, int(port)))
        target = (to_host, int(to_port))
        threading.Thread(
            target=accept_all, args=(listener, target, float(delay))
        ).start()
    print(json.dumps({}), flush=True)


def accept_all(listener: socket.socket, target: tuple[str, int], delay: float) -> None:
    while True:
        accepted, _ = listener.accept()
        connected = socket.create_connection(target)
        for source, to in ((accepted, connected), (connected, accepted)):
            to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            pieces: Queue[tuple[float, bytes]] = Queue(PIECES_MAX)
            threading.Thread(target=read, args=(source, pieces, delay)).start()
            threading.Thread(target=write, args=(pieces, to)).start()


def read(
    source: socket.socket, pieces: Queue[tuple[float, bytes]], delay: float
) -> None:
    """Queue what comes, with the time at which it is due; nothing: the end."""
    data = b"begun"
    while data:
        try:
            data = source.recv(PIECE_SIZE)
        except OSError:
            data = b""
        pieces.put((time.monotonic() + delay, data))


def write(pieces: Queue[tuple[float, bytes]], to: socket.socket) -> None:
    while True:
        due, data = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not data:
                to.shutdown(socket.SHUT_WR)
                return
            to.sendall(data)
        except OSError:
            return  # its reader sees the end as well


if __name__ == "__main__":
    main()
