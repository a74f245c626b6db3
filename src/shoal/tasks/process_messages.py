"""The messages between a worker and its task processes.

A message is its size, its head's size, the head in MessagePack, and a tail of raw
bytes, which avoids copies of large values.  Both ends are of one version.
"""

import struct
from enum import IntFlag
from typing import Any, Final

import msgspec

SIZES: Final = struct.Struct("!IH")  # of what follows both, and of the head
MESSAGE_MAX = 512 << 20  # bytes: what a call returns, or its arguments, and some

# To the process.  The head is an array that begins with one of these.
PREPARE = 0  # modules, whether to trust code: the first
# number, name, mode, size of args, whether timed, grant; the tail: args, kwargs
CALL = 1
OPEN_STREAM = 2  # name, mode, whether to send each return at once, grant
PUSH = 3  # the tail: an array of calls, each a number, args and kwargs
BLOB = 4  # digest, path; an empty path: there is none
# From the process.
# how many calls at a time, remarks about tasks; the tail: their names and timeouts
READY = 5
IMPORT_FAILED = 6  # why the modules cannot be imported
DONE = 7  # number; the tail: the value
# number, why, size of the traceback; the tail: the traceback, the exception's record
RAISED = 8
RETURNS = 9  # the tail: an array of returns, each as in ``CallResult``
PROGRESS = 10  # number, share, remark
BLOB_NEEDED = 11  # digest
WAITING = 16  # whether the running call waits for calls of its own

# Messages to a process with all slots, such as one for a cluster, begin with the slot;
# its own messages carry the slot after OF_SLOT.
STOP = 12  # the running call of the slot
OF_SLOT = 13  # slot, and a message
LOST = 14  # why the slot's process ended
STARTED = 15  # number of a timed call that begins now; none: the first of a stream


class Mode(IntFlag):
    """How a call is made."""

    CODE = 1  # the function is the first argument
    EXACT = 2  # as in ``Call``


_encode = msgspec.msgpack.Encoder().encode
decode_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]]).decode
"""Returns the calls in the tail of PUSH."""


def encode_head(head: tuple[Any, ...], tail_size: int = 0) -> bytes:
    """Return the sizes and the head of a message; its tail follows."""
    data = _encode(head)
    return SIZES.pack(len(data) + tail_size, len(data)) + data
