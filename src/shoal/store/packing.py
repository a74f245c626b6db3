"""Compresses the texts of rows: JSON of some hundred bytes, up to a megabyte.

A compressed text is a byte that names the format, and raw DEFLATE (RFC 1951) with a
preset dictionary.  Other texts stay as they are: no JSON begins with that byte.
"""

import zlib

from shoal.domain.errors import StoreBroken

try:
    from isal.isal_zlib import compressobj as compressobj  # a third of the time
except ImportError:  # not available for this processor
    from zlib import compressobj as compressobj  # type: ignore[assignment]  # called in the same way

PACKED = b"\x01"
PACKED_FROM = 200  # bytes; of shorter texts, too little would be saved
PACKED_MAX = 1 << 20  # bytes; of larger ones, the writer's thread would be held up

LEVEL = 1
WINDOW = -15  # 32 KiB, and no header

# Common substrings of the texts, the most frequent ones at the end.  The
# dictionary is part of the format: another one needs another byte before the text.
DICTIONARY = (
    b'"tools":[{"type":"function","function":{"name":"","description":"","parameters":'
    b'{"type":"object","properties":{"required":["tool_calls":[{"id":"call_","image_url'
    b'"{"type":"text","text":"response_format":{"type":"json_schema","stop":["seed":'
    b'"top_p":"temperature":0.7,"max_tokens":{"job_id":"","worker_id":"","reason":"'
    b'"passed_over":[{"reason":"all slots busy","count":1,"workers":["does not have it'
    b'"worker lost: "refused_by":null,"handed_over":false,"JobRequeued","CameLate",'
    b'"JobFailed",{"error":"","lost":false,"cut":false,"fault":"worker","exception":""}'
    b'"JobCancelled",{"reason":"","written":0}]\n"JobSubmitted",{}]\n'
    b'"JobLeased",{"worker_id":"","lease":1,'
    b'"reason":"least busy","passed_over":[]}]\n"JobStarted",{"lease":1}]\n'
    b'"JobCompleted",{"lease":1,"verdict":"UNSIGNED"}]\n'
    b'{"at":"2026-","checkpoint":{"root":"","size":},"completion_tokens":,"fee":0,'
    b'"job_id":"","output_hash":"sha256:","payment_ref":null,"price":0,'
    b'"prompt_tokens":,"type":"shoal-receipt","verdict":"unsigned","version":1,'
    b'"worker":"","worker_key":null,"worker_receipt":null}'
    b" the and that with for this from which are not have you is of to in "
    b'{"work":{"model":"","messages":[{"role":"system","content":"You are a helpful '
    b'assistant."},{"role":"assistant","content":"{"role":"user","content":"'
    b'"}],"max_tokens":null,"temperature":null,"options":{}}}'
    b'{"text":"","finish_reason":"stop","usage":{"prompt_tokens":1,"completion_tokens":'
    b'1},"choices":[],"output":"","value":"","blobs":[]}'
)


def pack(text: bytes) -> bytes:
    """Compress a JSON text if that makes it smaller."""
    if not PACKED_FROM <= len(text) <= PACKED_MAX:
        return text
    packer = compressobj(LEVEL, zlib.DEFLATED, WINDOW, zdict=DICTIONARY)
    packed = b"".join((PACKED, packer.compress(text), packer.flush()))
    return packed if len(packed) < len(text) else text


def unpack(data: bytes) -> bytes:
    """Return the text of ``pack``.  Raises StoreBroken if it is damaged."""
    if not data.startswith(PACKED):
        return data
    unpacker = zlib.decompressobj(WINDOW, zdict=DICTIONARY)
    try:
        text = unpacker.decompress(memoryview(data)[1:])
    except zlib.error as error:
        raise StoreBroken(f"a compressed text in the database: {error}") from error
    if not unpacker.eof:
        raise StoreBroken("a compressed text in the database is cut off")
    return text
