"""How the tensors of a state are cut into pieces: who writes which numbers where."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

PIECE_MAX = 256 << 20  # bytes of a file: that of a frame, so that one can be sent
HEADER_MAX = 1 << 20  # bytes of them for names and shapes
PARTS_MAX = 4096  # of one piece, so that the header fits


class SizedTensor(NamedTuple):
    """A tensor of ``length`` numbers of ``unit`` bytes each."""

    section: str
    name: str
    length: int
    unit: int


class TensorPart(NamedTuple):
    """Numbers ``begin`` to ``end`` of a tensor, in C order."""

    section: str
    name: str
    begin: int
    end: int


class Piece(NamedTuple):
    """A file and what it holds; all parts are of one section."""

    file: str
    parts: Sequence[TensorPart]


def plan_pieces(
    tensors: Iterable[SizedTensor], piece_max: int = PIECE_MAX
) -> list[Piece]:
    """Return the pieces of a state, each of at most ``piece_max`` bytes as a file.

    A tensor is cut only if it is larger than a piece.  The same tensors make the same
    pieces, so that ranks need not agree on more.
    """
    room = piece_max - min(HEADER_MAX, piece_max // 2)
    pieces: list[Piece] = []
    parts: list[TensorPart] = []
    numbers: dict[str, int] = {}
    free = 0

    def close() -> None:
        if parts:
            section = parts[0].section
            numbers[section] = number = numbers.get(section, 0) + 1
            pieces.append(Piece(f"{section}-{number:05}.safetensors", tuple(parts)))
            parts.clear()

    for section, name, length, unit in tensors:
        most = room // unit
        for begin in range(0, max(length, 1), most):
            end = min(length, begin + most)
            size = (end - begin) * unit
            other = bool(parts) and parts[0].section != section
            if other or size > free or len(parts) == PARTS_MAX:
                close()
                free = room
            parts.append(TensorPart(section, name, begin, end))
            free -= size
    close()
    return pieces
