"""Pieces of an answer in order, many small ones at little cost."""

from collections.abc import Sequence

from shoal.domain.outcome import Delta, Piece

JOIN_AT = 1024  # pieces whose texts are joined: a list slot costs more than a character
DELTA_COST = 128  # characters that a piece counts for which is more than text


def cost_of(piece: Piece) -> int:
    """Return how many characters a piece counts for where the memory is limited."""
    return piece.size + DELTA_COST if isinstance(piece, Delta) else len(piece)


class Pieces:
    """Pieces as they came, but for texts that follow each other and were joined."""

    def __init__(self) -> None:
        self._old: list[Piece] = []
        self._new: list[Piece] = []

    def __bool__(self) -> bool:
        return bool(self._new or self._old)

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Add pieces at the end."""
        self._new.extend(pieces)
        if len(self._new) >= JOIN_AT:
            self._old += _joined(self._new)
            self._new = []

    def all(self) -> list[Piece]:
        """Return them, in a list of the caller's own."""
        return [*self._old, *self._new]

    def take(self) -> list[Piece]:
        """Return them, and keep none."""
        if not self._old:
            taken, self._new = self._new, []
            return taken
        taken = self.all()
        self.replace([])
        return taken

    def replace(self, pieces: list[Piece]) -> None:
        """Keep ``pieces`` instead."""
        self._old = pieces
        self._new = []


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join texts that follow each other."""
    joined: list[Piece] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            joined.append("".join(texts))
            texts = []
        joined.append(piece)
    return [*joined, "".join(texts)] if texts else joined
