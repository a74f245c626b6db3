"""Checks the lines of a batch before any of them runs."""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from shoal.batches.input_lines import InputLines
from shoal.batches.line_jobs import LineJobs
from shoal.domain.errors import InvalidRequest
from shoal.store.batches import BatchError, StoredBatch
from shoal.transports.loop_share import LoopShare

SLICE = 256 << 10  # bytes of lines that are checked in one turn
DIGEST_SIZE = 16  # bytes that are kept of an id, which has up to 2 KiB
ERRORS_MAX = 100  # of a batch that are kept


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
                text = f"custom_id: line {earlier} has the same"
                self._add("duplicate_custom_id", text, number, "custom_id")
            self.model = self.model or found.model
            if found.model != self.model:
                text = f"body.model: expected {self.model}, as in the lines before"
                self._add("mismatched_model", text, number, "body.model")

    def _add(self, code: str, message: str, line: int, field: str | None) -> None:
        self.errors.append(BatchError(code, message, line, field))
