"""Where the rest of an answer meets its beginning, which another worker wrote."""

from collections.abc import Sequence

from shoal.engines.engine import Item


class Joint:
    """Passes the rest on, but for what belongs to the beginning.

    White space that was ``trimmed`` off the beginning, which the client has, is not
    repeated.  A stop string that began before the cut ends the answer: an engine looks
    for them in what it writes itself.  Text that may be a part of either is held back.
    """

    def __init__(self, beginning: str, trimmed: str, stops: Sequence[str]) -> None:
        longest = max(map(len, stops), default=1)
        self.stopped = False
        self._tail = beginning[max(len(beginning) - longest + 1, 0) :]
        self._trimmed = trimmed
        self._stops = stops
        self._held = ""
        self._passed = not (self._tail or trimmed)

    def passed(self, item: Item) -> list[Item]:
        """Return what of ``item``, and of what was held back, belongs to the rest.

        Nothing follows once ``stopped``.
        """
        if self._passed:
            return [] if self.stopped else [item]
        if not isinstance(item, str):
            held, self._held = self._held, ""
            self._passed = True
            return [held, item] if held else [item]
        self._held += item
        if self._trimmed:
            if self._trimmed.startswith(self._held) and self._held != self._trimmed:
                return []
            self._held = self._held.removeprefix(self._trimmed)
            self._trimmed = ""
        if self._find_stop():
            return []
        held, self._held = self._held, ""
        self._passed = True
        return [held] if held else []

    def _find_stop(self) -> bool:
        """Return whether a stop string lies across the cut, or may do."""
        for begin in range(len(self._tail)):
            text = self._tail[begin:] + self._held
            if any(
                text.startswith(stop)
                for stop in self._stops
                if len(stop) > len(self._tail) - begin
            ):
                self.stopped = self._passed = True
                return True
        texts = [self._tail[begin:] + self._held for begin in range(len(self._tail))]
        return any(stop.startswith(text) for text in texts for stop in self._stops)
