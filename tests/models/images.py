"""Images of one colour, which the tiny model with a projector can name."""

import struct
import zlib

SIDE = 20  # pixels


def png_of(colour: str) -> bytes:
    """Return a PNG that is all red (``r``), green (``g``) or blue (``b``)."""
    pixel = bytes(255 if each == colour else 0 for each in "rgb")
    rows = (b"\0" + pixel * SIDE) * SIDE
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        png += struct.pack(">I", len(data)) + kind + data + checksum
    return png
