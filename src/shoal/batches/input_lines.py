"""The lines of a batch's input file, found by their number."""

from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from typing import BinaryIO

from shoal.domain.errors import InvalidRequest
from shoal.store.file_folder import FileFolder

LINES_MAX = 50_000  # requests of one batch, as with OpenAI
LINE_MAX = 17 << 20  # bytes: the longest body, and what is around it
PIECE = 1 << 20  # bytes that are read at a time


class InputLines:
    """The lines of a file: 20 bytes for each.  All methods block.

    Lines are numbered from 1.  Empty ones do not count; ``numbers`` has the numbers of
    the others in the file, as an editor shows them.
    """

    def __init__(self, folder: FileFolder, file_id: str) -> None:
        """Find the lines.

        Raises InvalidRequest if there are none, too many, or too long ones; StoreError.
        """
        self.numbers = array("I")
        self._folder = folder
        self._file_id = file_id
        self._begins = array("Q")
        self._ends = array("Q")
        number = 1  # of the line that is being read
        empty = True  # that line, so far
        with folder.read(file_id) as file:
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
        with self._folder.read(self._file_id) as file:
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
