"""The lines of a batch's input file: found by their number, and validated."""

import asyncio
from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from hashlib import blake2b
from typing import BinaryIO

from shoal.batches.line_jobs import LineJobs
from shoal.domain.errors import InvalidRequest
from shoal.store.batches import BatchError, StoredBatch
from shoal.store.contents import ContentStore
from shoal.transports.loop_share import LoopShare

LINES_MAX = 50_000  # requests of one batch, as with OpenAI
LINE_MAX = 17 << 20  # bytes: the longest body, and what is around it
PIECE = 1 << 20  # bytes that are read at a time
SLICE = 256 << 10  # bytes of lines that are checked in one turn
DIGEST_SIZE = 16  # bytes that are kept of an id, which has up to 2 KiB
ERRORS_MAX = 100  # of a batch that are kept


class InputLines:
    """The lines of a file: 20 bytes for each.  All methods block.

    Lines are numbered from 1.  Empty ones do not count; ``numbers`` has the numbers of
    the others in the file, as an editor shows them.
    """

    def __init__(self, contents: ContentStore, file_id: str) -> None:
        """Find the lines.

        Raises InvalidRequest if there are none, too many, or too long ones; StoreError.
        """
        self.numbers = array("I")
        self._contents = contents
        self._file_id = file_id
        self._begins = array("Q")
        self._ends = array("Q")
        number = 1  # of the line that is being read
        empty = True  # that line, so far
        with contents.read(file_id) as file:
            begin = position = _skip_mark(file)  # of the line; the bytes read
            while piece := file.read(PIECE):
                start = 0
                while (end := piece.find(b"\n", start)) >= 0:
                    if not empty or piece[start:end].strip():
                        self._append(number, begin, position + end + 1)
                    start, empty, number = end + 1, True, number + 1
                    begin = position + start
                    if number > 2 * LINES_MAX:
                        raise _too_many()
                empty = empty and not piece[start:].strip()
                position += len(piece)
        if not empty:
            self._append(number, begin, position)
        if not self.numbers:
            raise InvalidRequest("the file has no lines")

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, line: int) -> bytes:
        """Return a line.  Raises StoreError."""
        (data,) = self._read(line, line)
        return data

    def read_from(self, line: int, size: int) -> list[bytes]:
        """Return lines from one on, of about ``size`` bytes.  Raises StoreError."""
        last = line
        while last < len(self) and self._ends[last] - self._begins[line - 1] < size:
            last += 1
        return self._read(line, last)

    def _read(self, first: int, last: int) -> list[bytes]:
        begin = self._begins[first - 1]
        with self._contents.read(self._file_id) as file:
            file.seek(begin)
            data = file.read(self._ends[last - 1] - begin)
        return [
            data[self._begins[each] - begin : self._ends[each] - begin]
            for each in range(first - 1, last)
        ]

    def _append(self, number: int, begin: int, end: int) -> None:
        """Add the line from one offset to before another."""
        if end - begin > LINE_MAX:
            raise InvalidRequest(f"line {number} has more than {LINE_MAX} bytes")
        if len(self) == LINES_MAX:
            raise _too_many()
        self.numbers.append(number)
        self._begins.append(begin)
        self._ends.append(end)


def _skip_mark(file: BinaryIO) -> int:
    """Skip the mark with which Windows begins files; return its length in bytes.

    Raises InvalidRequest if the mark says that the file is not UTF-8.
    """
    head = file.read(len(BOM_UTF8))
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InvalidRequest("the file is in UTF-16: save it in UTF-8")
    mark = len(BOM_UTF8) if head == BOM_UTF8 else 0
    file.seek(mark)
    return mark


def _too_many() -> InvalidRequest:
    return InvalidRequest(f"the file has more than {LINES_MAX} lines")


async def validate(
    batch: StoredBatch, lines: InputLines, jobs: LineJobs, share: LoopShare
) -> str | tuple[BatchError, ...]:
    """Return the model of a batch, or what is wrong with its lines.

    All lines are for one model, and each has an id of its own.  Raises StoreError.
    """
    check = _LineCheck(batch, jobs)
    line = 1
    while line <= len(lines) and len(check.errors) < ERRORS_MAX:
        async with share.turn(batch.owner):
            data = await asyncio.to_thread(lines.read_from, line, SLICE)
            numbers = lines.numbers[line - 1 : line - 1 + len(data)]
            await asyncio.to_thread(check.check, numbers, data)
        line += len(data)
    if not check.errors:
        rejection = jobs.rejection(batch, check.model)
        if rejection is not None:
            number = lines.numbers[0]
            check.errors.append(
                BatchError("model_not_found", rejection, number, "model")
            )
    return tuple(check.errors[:ERRORS_MAX]) or check.model


class _LineCheck:
    """What is known of the lines so far."""

    def __init__(self, batch: StoredBatch, jobs: LineJobs) -> None:
        self.model = ""
        self.errors: list[BatchError] = []
        self._batch = batch
        self._jobs = jobs
        self._ids: dict[bytes, int] = {}  # lines, by the digests of their ids

    def check(self, numbers: Sequence[int], lines: list[bytes]) -> None:
        """Check lines, which have these ``numbers`` in the file."""
        for number, data in zip(numbers, lines, strict=True):
            try:
                found = self._jobs.check(self._batch.endpoint, data)
            except InvalidRequest as error:
                self._add("invalid_line", str(error), number, error.field)
                continue
            digest = blake2b(found.custom_id.encode(), digest_size=DIGEST_SIZE)
            earlier = self._ids.setdefault(digest.digest(), number)
            if earlier != number:
                text = f"custom_id: line {earlier} already has it"
                self._add("duplicate_custom_id", text, number, "custom_id")
            self.model = self.model or found.model
            if found.model != self.model:
                text = f"body.model: expected {self.model}, as in the lines before"
                self._add("mismatched_model", text, number, "body.model")

    def _add(self, code: str, message: str, line: int, field: str | None) -> None:
        self.errors.append(BatchError(code, message, line, field))
