"""GrandSage's small messages: frames of text, and stops.

Source: the WebSocket protocol document between API server and node, and exchanges
recorded with real servers and nodes; ``docs/protocols/grandsage.md`` has the details.
All functions are pure; tasks are in ``tasks.py``.
"""

import struct
from codecs import utf_8_decode

from shoal.protocols.seam.json_text import well_formed

TASK_ID = struct.Struct(">I")  # the document says Int32BE; real peers decode unsigned
FRAME_MAX = 1 << 20  # bytes; every binary frame is smaller


# Binary frames, node to server.


def encode_text(task_id: int, text: str) -> list[bytes]:
    """Encode generated text as frames smaller than ``FRAME_MAX`` bytes.

    Empty text yields no frame: an id alone means that the task is finished.
    """
    head = TASK_ID.pack(task_id)
    data = well_formed(text).encode()
    if len(head) + len(data) < FRAME_MAX:
        return [head + data] if data else []
    step = FRAME_MAX // 4 - len(head)  # a character takes four bytes at most
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return [head + well_formed(piece).encode() for piece in pieces]


def encode_end(task_id: int) -> bytes:
    """Encode the end of a task: its id alone."""
    return TASK_ID.pack(task_id)


def decode_frame(data: bytes) -> tuple[str, bytes]:
    """Decode the next bytes of a task; return the text and an incomplete character.

    Invalid bytes become U+FFFD; a byte order mark is kept.  The caller prepends the
    returned bytes, at most three, to the next piece.
    """
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]


# Text frames, server to node.


def encode_stop(task_id: int) -> str:
    """Encode a stop of a task; the document omits this message."""
    return f'{{"id":{task_id},"stop":true}}'
