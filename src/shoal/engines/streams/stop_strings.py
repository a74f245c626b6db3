"""Ends an answer at stop strings that its server did not get."""

from collections.abc import Sequence

from shoal.domain.outcome import STOP_REASON, AnswerPiece, Delta


class StopStrings:
    """Looks for ``stops`` in the text of an answer; ``found`` is the one that ended it.

    Text that may be the beginning of one is held back.  One may begin in the
    ``beginning`` of the answer, which was passed on before.
    """

    def __init__(self, stops: Sequence[str], beginning: str = "") -> None:
        self.found = ""
        self._stops = stops
        self._held = beginning[self._beginning_of_stop(beginning) :]
        self._passed_on = len(self._held)  # characters of what is held

    def passed(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        """Return what of these pieces, and of what was held back, is in the answer."""
        passed: list[AnswerPiece] = []
        for piece in pieces:
            if self.found:
                break
            if isinstance(piece, str):
                passed += self._passed_text(self._held + piece)
            else:
                passed += [*self.rest(), piece]
        return passed

    def rest(self) -> list[AnswerPiece]:
        """Return what was held back, and is not a stop string."""
        held, self._held = self._held[self._passed_on :], ""
        self._passed_on = 0
        return [held] if held else []

    def _passed_text(self, text: str) -> list[AnswerPiece]:
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops]
        at, _, self.found = min(
            (each for each in found if each[0] >= 0), default=(len(text), 0, "")
        )
        if not self.found:
            at = self._beginning_of_stop(text)
        self._held = "" if self.found else text[at:]
        new = text[self._passed_on : at]
        self._passed_on = max(self._passed_on - at, 0)
        passed: list[AnswerPiece] = [new] if new else []
        return [*passed, Delta(0, {STOP_REASON: self.found})] if self.found else passed

    def _beginning_of_stop(self, text: str) -> int:
        """Return where a stop string may begin at the end of a text; else its end."""
        longest = max(map(len, self._stops), default=0)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
