"""The lines of a batch's input file, found by their number."""

from array import array

from shoal.domain.errors import InvalidRequest
from shoal.store.file_folder import FileFolder

LINES_MAX = 50_000  # requests of one batch, as with OpenAI
LINE_MAX = 17 << 20  # bytes: the longest body, and what is around it
PIECE = 1 << 20  # bytes that are read at a time


class InputLines:
    """The offsets of the lines of a file: 8 bytes a line.  All methods block.

    Lines are numbered from 1.  Empty lines at the end do not count.
    """

    def __init__(self, folder: FileFolder, file_id: str) -> None:
        """Find the lines.

        Raises InvalidRequest if there are none, too many, or too long ones; StoreError.
        """
        self._folder = folder
        self._file_id = file_id
        self._offsets = array("Q", [0])
        last = position = 0  # the last line that is not empty; the bytes read
        empty = True  # the line that is being read, so far
        with folder.read(file_id) as file:
            while piece := file.read(PIECE):
                begin = 0
                while (end := piece.find(b"\n", begin)) >= 0:
                    empty = empty and not piece[begin:end].strip()
                    self._append(position + end + 1)
                    if not empty:
                        last = len(self._offsets) - 1
                    begin, empty = end + 1, True
                empty = empty and not piece[begin:].strip()
                position += len(piece)
        if not empty:
            self._append(position)
            last = len(self._offsets) - 1
        del self._offsets[last + 1 :]
        if not last:
            raise InvalidRequest("the file has no lines")
        if last > LINES_MAX:
            raise _too_many()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, line: int) -> bytes:
        """Return a line.  Raises StoreError."""
        begin, end = self._offsets[line - 1], self._offsets[line]
        with self._folder.read(self._file_id) as file:
            file.seek(begin)
            return file.read(end - begin)

    def read_from(self, line: int, size: int) -> list[bytes]:
        """Return lines from one on, of about ``size`` bytes.  Raises StoreError."""
        end = line
        while end < len(self) and self._offsets[end] - self._offsets[line - 1] < size:
            end += 1
        with self._folder.read(self._file_id) as file:
            file.seek(self._offsets[line - 1])
            return [
                file.read(self._offsets[each] - self._offsets[each - 1])
                for each in range(line, end + 1)
            ]

    def _append(self, end: int) -> None:
        """Add the line that ends before this offset."""
        number = len(self._offsets)
        if end - self._offsets[-1] > LINE_MAX:
            raise InvalidRequest(f"line {number} has more than {LINE_MAX} bytes")
        if number > 2 * LINES_MAX:  # empty lines at the end may follow
            raise _too_many()
        self._offsets.append(end)


def _too_many() -> InvalidRequest:
    return InvalidRequest(f"the file has more than {LINES_MAX} lines")
