"""Works too large for the row of their job: they are split into parts.

An update of a row rewrites all of it, and a job is updated several times.  So a row
holds a head instead of a large work: a byte that names the format, and JSON.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shoal.domain.credentials import tokens_to_read
from shoal.domain.errors import StoreError
from shoal.domain.job import DEFAULT_TERMS, Job, JobTerms
from shoal.domain.json_limits import characters_in
from shoal.domain.work import JsonWork, values_of
from shoal.store.codec import LARGE_FROM, encode_work
from shoal.store.packing import pack, unpack

HEAD = b"\x02"
PART_SIZE = 256 << 10  # bytes of a part, before it is compressed


class WorkHead(msgspec.Struct, frozen=True):
    """What a row says of a large work; ``tokens`` is ``tokens_to_read`` of it."""

    parts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SplitWork:
    """What goes to the row of a job, and the parts that do not, in order."""

    row: bytes | None
    parts: Sequence[bytes] = ()


def is_large(job: Job) -> bool:
    """Say whether a job has so much text that its work may have to be split.

    Takes microseconds.  Arguments of calls have a store of their own.
    """
    values = [job.terms.form, job.terms.api_fields, *values_of(job.work)]
    return characters_in(values, LARGE_FROM) >= LARGE_FROM


def split_work(work: JsonWork | None, terms: JobTerms = DEFAULT_TERMS) -> SplitWork:
    """Encode and compress work that is no call, and the long texts of its terms.

    Takes tens of milliseconds for the largest.
    """
    text = encode_work(work, terms)
    if text is None:
        return SplitWork(None)
    if len(text) <= PART_SIZE:
        packed = pack(text)
        if len(packed) < LARGE_FROM:
            return SplitWork(packed)
    starts = range(0, len(text), PART_SIZE)
    parts = [pack(text[start : start + PART_SIZE]) for start in starts]
    head = WorkHead(len(parts), 0 if work is None else tokens_to_read(work))
    return SplitWork(HEAD + msgspec.json.encode(head), parts)


def head_of(stored: bytes | str | None) -> WorkHead | None:
    """Return the head in a row; None if the row has the work itself, or none."""
    if not isinstance(stored, bytes) or not stored.startswith(HEAD):
        return None
    return msgspec.json.decode(memoryview(stored)[1:], type=WorkHead)


def join_parts(head: WorkHead, parts: Iterable[bytes]) -> bytes:
    """Return the text of all parts.  Raises StoreError if some are missing."""
    texts = [unpack(part) for part in parts]
    if len(texts) != head.parts:
        raise StoreError(
            f"a work in the database has {len(texts)} of its {head.parts} parts"
        )
    return b"".join(texts)
