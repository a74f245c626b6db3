"""Writes the results of a batch to its output file and its error file."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.store import batches
from shoal.store.file_folder import ContentWriter, FileFolder


@dataclass(slots=True)
class ResultFiles:
    """The two files of a batch; each is created with its first line."""

    folder: FileFolder
    batch: batches.StoredBatch
    new_id: Callable[[], str]
    at: float
    _writers: dict[bool, ContentWriter] = field(default_factory=dict)
    _files: dict[bool, batches.StoredFile] = field(default_factory=dict)

    @property
    def output(self) -> batches.StoredFile | None:
        """The file of the lines that succeeded, once all is written."""
        return self._files.get(False)

    @property
    def error(self) -> batches.StoredFile | None:
        """The file of the lines that failed, once all is written."""
        return self._files.get(True)

    async def write_recorded(self, store: batches.BatchStore) -> None:
        """Write the results that are in the store, in the order of their lines.

        Raises StoreError.
        """
        after = 0
        while page := await store.results(
            self.batch.id, after, batches.RESULTS_AT_ONCE
        ):
            await asyncio.to_thread(self.write, page)
            after = page[-1].line

    def write(self, results: Sequence[batches.LineResult]) -> None:
        """Write results.  Blocks.  Raises StoreError."""
        for failed in (False, True):
            lines = [each.body + b"\n" for each in results if each.failed is failed]
            if lines:
                if failed not in self._writers:
                    self._writers[failed] = self.folder.begin(self.new_id())
                self._writers[failed].write(b"".join(lines))

    def finish(self) -> None:
        """Wait until all is on the disk.  Blocks.  Raises StoreError."""
        for failed, writer in self._writers.items():
            writer.finish()
            self._files[failed] = batches.StoredFile(
                writer.id,
                self.batch.owner,
                f"{self.batch.id}_{'error' if failed else 'output'}.jsonl",
                batches.FilePurpose.BATCH_OUTPUT,
                writer.size,
                self.at,
            )

    def discard(self) -> None:
        """Delete the files.  Blocks."""
        for writer in self._writers.values():
            writer.discard()
